#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "planner/base/units.h"
#include "planner/parallel/cut_stages.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/pipeline_time.h"
#include "planner/plan/placement.h"
#include "planner/simulator/estimate.h"

namespace parplan {

// Whether of a layout's many cuts only the fastest is a candidate, and stages recompute where that
// does not fit: what a stage saves on its devices then does not grow with its blocks by one size of
// slots, or not by as much with each.
inline bool takes_fastest_cut_alone(const ParallelSpec& spec) {
  return spec.virtual_stages > 1 || runs_backward_in_parts(spec.schedule) || spec.recompute_layers > 0 ||
         spec.offload_layers > 0;
}

// The cuts of one layout by the memory of its stages, to the byte. The memory of a stage depends on
// its own blocks and recompute alone, so that each stage chooses for itself.
class LayoutCuts {
 public:
  // `recomputes`: what each stage may choose from. All arguments must outlive it.
  LayoutCuts(Estimator& estimator, const ParallelSpec& spec, const Placements& placements, const PipelineShape& shape,
             std::span<const Recompute> recomputes);

  // What the stages can hold within the memory of their devices with the first `choices` of what
  // they may recompute; 0 stands for all.
  std::vector<std::vector<StageOption>> options(std::size_t choices = 0) const;
  // Where true, no cut fits; takes no look at cuts.
  bool surely_none(std::size_t choices = 0) const;
  // The cut whose slowest stage is the fastest, among those that fit.
  std::optional<StageCut> fastest(std::size_t choices = 0) const;
  // The same with this memory for each stage, whatever its devices have. Where these have unequal
  // memory, the bytes are those of the stage that has least; others have the same share of theirs.
  std::optional<StageCut> fastest_within(Bytes room) const;
  // The least memory of the fullest stage over all cuts, whether it fits its devices or not, in
  // such bytes, rounded up; nothing where that is more than `most`.
  std::optional<Bytes> least_peak(Bytes most) const;

 private:
  // Bytes that do not grow with blocks, by Estimator::kinds_in: equal on every stage, and found
  // when asked for.
  using Fixed = std::vector<std::pair<std::uint64_t, std::int64_t>>;

  const BlockTable& table(int stage, std::size_t choice) const;
  std::int64_t growing(int stage, std::size_t choice, int begin, int end) const;
  std::int64_t peak(int stage, std::size_t choice, int begin, int end) const;
  std::int64_t least_peak_of(int stage, int begin, int end) const;
  std::vector<std::vector<StageOption>> options_within(std::span<const std::int64_t> room, std::size_t choices) const;
  // What each stage has where the one with the least memory has so much.
  std::vector<std::int64_t> rooms(std::int64_t of_least) const;
  double times_least(int stage) const { return static_cast<double>(capacities_[stage]) / static_cast<double>(least_); }

  Estimator& estimator_;
  const ParallelSpec& spec_;
  const Placements& placements_;
  std::span<const Recompute> recomputes_;
  ScheduleForms schedule_;
  std::vector<BlockTable> tables_;  // by pace, then choice
  bool alike_ = true;               // a single pace
  std::vector<int> in_flight_;      // by stage
  std::vector<std::int64_t> capacities_;
  std::int64_t least_ = 1;  // of them
  mutable std::vector<Fixed> fixed_;  // by choice
};

// The spec with this cut, where each stage recomputes what it chose.
ParallelSpec with_cut(const ParallelSpec& spec, const StageCut& cut, std::span<const Recompute> recomputes);

}  // namespace parplan
