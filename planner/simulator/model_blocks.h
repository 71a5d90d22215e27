#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/plan/layout.h"

namespace parplan {

// What estimates ask of a model's blocks again and again.
class ModelBlocks {
 public:
  explicit ModelBlocks(const OpGraph& graph);

  int count() const { return static_cast<int>(kinds_.size()); }
  std::size_t kinds() const { return of_kind_.size(); }
  std::size_t kind_of(int block) const { return kinds_[static_cast<std::size_t>(block)]; }
  bool is_layer_kind(std::size_t kind) const { return is_layer_kind_[kind] != 0; }
  int of_kind(std::size_t kind, BlockRange range) const {
    return of_kind_[kind][static_cast<std::size_t>(range.last)] - of_kind_[kind][static_cast<std::size_t>(range.first)];
  }
  // The end of the run of equal blocks that contains it.
  int run_end(int block) const { return run_ends_[static_cast<std::size_t>(block)]; }
  bool are_alike(BlockRange range) const { return run_end(range.first) >= range.last; }
  // A number that encodes whether the range has no, one or several blocks of each kind. The part of
  // a stage's memory that does not grow with blocks depends on nothing else about them, unless the
  // stage's input lies apart.
  std::uint64_t kinds_in(BlockRange range) const;

  bool uses_tied(int block) const { return uses_tied_[static_cast<std::size_t>(block)] != 0; }
  // How many blocks of the range use the tied parameter; and from the first of them to the last,
  // empty where none does.
  int tied_uses(BlockRange range) const;
  BlockRange tied_in(BlockRange range) const;
  // Whether the stages of any cut hold equal state together: the blocks that tie a parameter are
  // never on one stage.
  bool has_fixed_state() const { return has_fixed_state_; }

 private:
  std::vector<std::size_t> kinds_;  // by block
  std::vector<char> uses_tied_;     // likewise
  std::vector<int> run_ends_;       // likewise
  std::vector<int> tied_blocks_;
  bool has_fixed_state_ = true;
  std::vector<char> is_layer_kind_;
  std::vector<std::vector<int>> of_kind_;  // [kind][block]: blocks of the kind before it
};

}  // namespace parplan
