#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "planner/program/local_size.h"
#include "planner/program/program.h"
#include "planner/program/propagate_placements.h"

namespace parplan {

// Elements [begin, end) of a bucket.
struct BucketRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool operator==(const BucketRange&) const = default;
};

// The flat bucket of a set of parameters. Each starts at a multiple of bucket_alignment. Matrices
// that an optimizer takes apart come first. Parameters that every rank of an axis holds whole come
// last, and within each part those with weight decay first.
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

// The parts of `within` whose run holds, as long as possible each; what is behind the last run is
// padding, which is neither decaying nor replicated nor partial, and has no copies.
template <class Holds>
std::vector<BucketRange> ranges_where(const BucketLayout& layout, BucketRange within, Holds holds) {
  std::vector<BucketRange> ranges;
  const auto take = [&](const BucketLayout::Run& run) {
    const BucketRange common{std::max(run.range.begin, within.begin), std::min(run.range.end, within.end)};
    if (common.begin >= common.end || !holds(run)) return;
    if (!ranges.empty() && ranges.back().end == common.begin) ranges.back().end = common.end;
    else ranges.push_back(common);
  };
  for (const BucketLayout::Run& run : layout.runs) take(run);
  BucketLayout::Run padding;
  padding.range = {layout.elements, std::max(layout.elements, within.end)};
  take(padding);
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
