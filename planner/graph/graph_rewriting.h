#pragma once

#include <map>
#include <utility>
#include <vector>

#include "planner/graph/op_graph.h"

namespace parplan {

// A graph that is written anew, op by op, beside the one that it is made of. Who derives from it
// says what is written in the place of each op.
class GraphRewriting {
 protected:
  explicit GraphRewriting(OpGraph graph) : from_(std::move(graph)) {
    to_.name = from_.name;
    to_.sequence = from_.sequence;
    to_.vocabulary = from_.vocabulary;
    to_.masked = from_.masked;
    to_.corrupted = from_.corrupted;
    to_.images = from_.images;
  }

  // The blocks, whose ops `write(block, op)` writes; still without what finish() fills in.
  template <class Write>
  OpGraph rewritten(const Write& write) {
    for (const Block& block : from_.blocks) {
      Block& written = to_.blocks.emplace_back(Block{.name = block.name, .first_op = op_count()});
      if (block.input) written.input = mapped(*block.input);
      for (int i = block.first_op; i < block.last_op; ++i) write(block, from_.ops[static_cast<std::size_t>(i)]);
      if (block.output) written.output = mapped(*block.output);
      written.last_op = op_count();
    }
    return std::move(to_);
  }

  // What is written: tensors as they were and others, and ops as they were.
  TensorId add(Tensor tensor) {
    to_.tensors.push_back(std::move(tensor));
    return static_cast<TensorId>(to_.tensors.size()) - 1;
  }
  TensorId mapped(TensorId id) {
    const auto known = number_.find(id);
    if (known != number_.end()) return known->second;
    return number_[id] = add(from_.tensors[static_cast<std::size_t>(id)]);
  }
  std::vector<TensorId> mapped(const std::vector<TensorId>& ids) {
    std::vector<TensorId> result;
    for (const TensorId id : ids) result.push_back(mapped(id));
    return result;
  }
  void copy(const Op& op) {
    Op written = op;
    written.inputs = mapped(op.inputs);
    written.parameters = mapped(op.parameters);
    written.outputs = mapped(op.outputs);
    to_.ops.push_back(std::move(written));
  }
  Tensor& tensor(TensorId id) { return to_.tensors[static_cast<std::size_t>(id)]; }

  OpGraph from_, to_;

 private:
  int op_count() const { return static_cast<int>(to_.ops.size()); }

  std::map<TensorId, TensorId> number_;  // of tensors of `from_` in `to_`
};

}  // namespace parplan
