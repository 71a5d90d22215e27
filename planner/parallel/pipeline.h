#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"

namespace parplan {

// Pipeline parallelism: the graph's blocks in runs, one run a stage. It splits time, not tensors,
// so it sets no placement.
std::vector<int> legal_pipeline_degrees(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec,
                                        int most);
std::optional<std::string> illegal_pipeline(const OpGraph& graph, const TrainingSpec& training,
                                            const ParallelSpec& spec);
void place_pipeline(const OpGraph& graph, const ParallelSpec& spec, Placements& placements);

// Blocks per stage, none empty, such that the costliest stage is as cheap as can be, and among
// those cuts the sum of squares least (so that slack is spread; ties go to shorter early stages).
// `1 <= stages <= block_cost.size()`.
std::vector<int> cut_stages(std::span<const double> block_cost, int stages);

// One way in which a stage can hold blocks, as prefix sums over the model's blocks (one more than
// blocks): the time of a micro-batch, bytes of state, and of what is saved for each micro-batch in
// flight. No `state`: everything fits.
struct StageOption {
  std::span<const double> seconds;
  std::span<const std::int64_t> state;
  std::span<const std::int64_t> saved;
  std::int64_t in_flight = 0;
  // Whatever the blocks, with no more than `surely_fits` bytes of these they fit, with more than
  // `may_fit` they do not; in between `fits` is asked, which what fits with more blocks has to say
  // of fewer, too.
  std::int64_t surely_fits = 0;
  std::int64_t may_fit = 0;
  std::function<bool(std::size_t begin, std::size_t end)> fits = nullptr;
};
struct StageCut {
  std::vector<int> blocks;   // of each stage, at least one
  std::vector<int> options;  // which each stage takes
  bool operator==(const StageCut&) const = default;
};
// The cut whose slowest stage is least slow, and of those the one of the least sum of squares, for
// stages that each choose between options: unlike devices, more or less recomputed. Nothing where
// no cut fits.
std::optional<StageCut> cut_stages(std::span<const std::vector<StageOption>> stages);

// The default cut, where no cost model is at hand: blocks weighted by the multiply-adds of their
// matrix products (an embedding look-up has none, the head has its vocabulary).
std::vector<int> even_stages(const OpGraph& graph, int stages);

}  // namespace parplan
