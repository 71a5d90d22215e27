#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "planner/plan/parallel_spec.h"
#include "planner/program/local_size.h"
#include "planner/program/program.h"
#include "planner/program/propagate_placements.h"

namespace parplan {

// The flat bucket of a set of parameters. Each starts at a multiple of the context's alignment.
// Matrices that an optimizer takes apart come first. Parameters that every rank of an axis holds
// whole come last, and within each part those with weight decay first.
struct BucketLayout {
  std::vector<ParameterPart> parts;  // the rectangles of a parameter side by side
  std::int64_t elements = 0;  // without the padding to the data-parallel degree

  // A run of parameters, with the padding behind each, that are alike in this:
  struct Run {
    BucketRange range;
    bool decays = false;       // has weight decay
    bool is_matrix = false;    // the optimizer orthogonalizes its momentum
    PerAxis<bool> replicated;  // equal on every rank of the axis: counted once in a global norm
    PerAxis<bool> partial;     // the gradients are still to be summed over the axis
    int copies = 1;            // equal on so many consecutive ranks of the tensor axis, which sum the gradients
  };
  std::vector<Run> runs;  // side by side, from 0 to `elements`
  std::int64_t matrix_elements = 0;  // of the runs `is_matrix`, from 0 on
};
// `parameters` are read by ops of `block`, whose tensors lie as `placed` says; without it they are
// propagated.
BucketLayout bucket_layout(const OpGraph& graph, const Block& block, const std::vector<TensorId>& parameters,
                           const BlockPlacements& placed, const BlockContext& context);
BucketLayout bucket_layout(const OpGraph& graph, const Block& block, const std::vector<TensorId>& parameters,
                           const BlockContext& context);

// The units of a bucket of `elements`, which ranks share out, this one in the place `place` of so
// many: one, or one for each parameter. One of fewer elements than `least` goes with that before
// it, or with the next where it is the first.
std::vector<BucketUnit> bucket_units(const BucketLayout& layout, std::int64_t elements, GatherUnit unit, int ranks,
                                     int place, std::int64_t least);
std::int64_t parameters_of(const BucketLayout& layout);
// The parameters of fewer elements than `least`: how many they are, the elements of all of them,
// and how many shards of them `ranks` ranks hold, each of whom has the same share of a parameter
// until none of it is left.
struct SmallParameters {
  std::int64_t count = 0, elements = 0, shards = 0;
};
SmallParameters small_parameters(const BucketLayout& layout, std::int64_t least, std::int64_t ranks);

// The parts of a rank's shard whose run holds, as long as possible each, in elements from the start
// of the shard. What is behind the last run is padding, which is neither decaying nor replicated
// nor partial, and has no copies.
template <class Holds>
std::vector<BucketRange> ranges_where(const BucketLayout& layout, std::span<const BucketUnit> units, Holds holds) {
  std::vector<BucketRange> ranges;
  const auto take = [&](const BucketLayout::Run& run, const HeldRange& own) {
    const BucketRange common{std::max(run.range.begin, own.range.begin), std::min(run.range.end, own.range.end)};
    if (common.begin >= common.end || !holds(run)) return;
    const std::int64_t begin = own.at + common.begin - own.range.begin, end = begin + common.size();
    if (!ranges.empty() && ranges.back().end == begin)
      ranges.back().end = end;
    else
      ranges.push_back({begin, end});
  };
  BucketLayout::Run padding;
  padding.range = {layout.elements, std::max(layout.elements, units.empty() ? 0 : units.back().range.end)};
  for (const BucketUnit& unit : units) {
    const auto first = std::ranges::upper_bound(layout.runs, unit.own.range.begin, {},
                                                [](const BucketLayout::Run& run) { return run.range.end; });
    for (auto run = first; run != layout.runs.end() && run->range.begin < unit.own.range.end; ++run)
      take(*run, unit.own);
    take(padding, unit.own);
  }
  return ranges;
}

// The block's own parameters, those that are trained and those that are frozen, and the tied one
// that it uses, if any.
struct BlockParameters {
  std::vector<TensorId> own;
  std::vector<TensorId> frozen;
  std::optional<TensorId> tied;
};
BlockParameters block_parameters(const OpGraph& graph, const Block& block);

}  // namespace parplan
