#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "planner/base/units.h"
#include "planner/graph/op_graph.h"

namespace parplan {

// Blocks per stage, none empty, such that the slowest stage is as fast as possible, and among those
// cuts the one with the least sum of squares (so that slack is spread; ties go to shorter early
// stages). `1 <= stages <= blocks.size()`.
std::vector<int> cut_stages(std::span<const Seconds> blocks, int stages);

// One way in which a stage can hold blocks, as prefix sums over the model's blocks (one more than
// blocks): the time of a micro-batch, the bytes of state, and those saved for each micro-batch in
// flight. Without `state`, everything fits.
struct StageOption {
  std::span<const Seconds> seconds;
  std::span<const std::int64_t> state;
  std::span<const std::int64_t> saved;
  std::int64_t in_flight = 0;
  // Any blocks fit with at most `surely_fits` bytes of these and do not fit with more than
  // `may_fit`; in between `fits` decides. If it accepts some blocks, it must accept fewer of them,
  // too.
  std::int64_t surely_fits = 0;
  std::int64_t may_fit = 0;
  std::function<bool(std::size_t begin, std::size_t end)> fits = nullptr;
};
struct StageCut {
  std::vector<int> blocks;   // of each stage, at least one
  std::vector<int> options;  // the option of each stage
  bool operator==(const StageCut&) const = default;
};
// The cut whose slowest stage is the fastest, and among those the one with the least sum of
// squares, for stages that each choose between options (heterogeneous devices, more or less
// recompute). Nothing where no cut fits.
std::optional<StageCut> cut_stages(std::span<const std::vector<StageOption>> stages);

// The default cut without a cost model: blocks weighted by the multiply-adds of their matrix
// products (an embedding look-up has none, the head has its vocabulary).
std::vector<int> even_stages(const OpGraph& graph, int stages);

}  // namespace parplan
