#include "planner/program/bucket_layout.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "planner/base/error.h"

namespace parplan {
namespace {

// Whether each rank of the axis holds the whole parameter.
bool is_replicated(const OpGraph& graph, TensorId parameter, Axis axis, const BlockContext& context) {
  if (context.layout.degree[axis] == 1) return false;
  const Placement placement = layout_of_parameter(graph, parameter, context.layout.placements)[axis];
  return std::ranges::none_of(graph.tensors[parameter].dims,
                              [&](const TensorDim& dim) { return placement == shard(dim.dim); });
}

// Whether each rank of the axis knows only the gradient of its share of what a whole parameter is
// applied to: its tokens, or its heads.
bool is_partial_gradient(const OpGraph& graph, const Block& block, TensorId parameter, Axis axis,
                         const BlockPlacements& placed) {
  const auto has_own_tokens = [&](const TensorLayout& layout) { return cuts_tokens(layout[axis]); };
  for (int i = block.first_op; i < block.last_op; ++i) {
    const Op& op = graph.ops[i];
    if (std::ranges::find(op.parameters, parameter) == op.parameters.end()) continue;
    const std::vector<TensorLayout>& inputs = placed.inputs[i - block.first_op];
    const bool by_heads = row_of(op.kind).sharding == ShardingRule::heads &&
                          std::ranges::any_of(inputs, [&](const TensorLayout& input) {
                            return input[axis] == shard(Dim::kv_groups);
                          });
    if (by_heads || std::ranges::any_of(inputs, has_own_tokens) ||
        std::ranges::any_of(op.outputs, [&](TensorId id) { return has_own_tokens(placed.canonical[id]); }))
      return true;
  }
  return false;
}

// Calls visit(offset in the bucket, elements) for each parameter; its rectangles are side by side.
template <class Visit>
void for_each_parameter(const BucketLayout& layout, Visit visit) {
  for (std::size_t first = 0, last = 0; first < layout.parts.size(); first = last) {
    std::int64_t elements = 0;
    for (; last < layout.parts.size() && layout.parts[last].tensor == layout.parts[first].tensor; ++last)
      elements += layout.parts[last].rows * layout.parts[last].columns;
    visit(layout.parts[first].bucket_offset, elements);
  }
}

}  // namespace

std::int64_t parameters_of(const BucketLayout& layout) {
  std::int64_t count = 0;
  for_each_parameter(layout, [&](std::int64_t, std::int64_t) { ++count; });
  return count;
}

SmallParameters small_parameters(const BucketLayout& layout, std::int64_t least, std::int64_t ranks) {
  SmallParameters small;
  for_each_parameter(layout, [&](std::int64_t, std::int64_t elements) {
    if (elements >= least) return;
    ++small.count;
    small.elements += elements;
    small.shards += ceil_div(elements, ceil_div(elements, ranks));
  });
  return small;
}

std::vector<BucketUnit> bucket_units(const BucketLayout& layout, std::int64_t elements, GatherUnit unit, int ranks,
                                     int place, std::int64_t least) {
  std::vector<BucketUnit> units;
  if (unit == GatherUnit::parameter) {
    bool takes_next = false;  // since the unit so far is of small parameters alone
    for_each_parameter(layout, [&](std::int64_t offset, std::int64_t of) {
      const bool is_small = of < least;
      if (units.empty() || (!is_small && !takes_next)) {
        if (!units.empty()) units.back().range.end = offset;
        units.push_back({.range = {offset, elements}, .own = {}});
        takes_next = is_small;
      } else if (!is_small) {
        takes_next = false;
      }
    });
  }
  if (units.empty()) units.push_back({.range = {0, elements}, .own = {}});
  std::int64_t at = 0;
  for (BucketUnit& of : units) {
    const std::int64_t own = of.range.size() / ranks, begin = of.range.begin + own * place;
    PARPLAN_ASSERT(own * ranks == of.range.size(), "a unit is padded to a multiple of the ranks that share it out");
    of.own = {.range = {begin, begin + own}, .at = at};
    at += own;
  }
  return units;
}

BlockParameters block_parameters(const OpGraph& graph, const Block& block) {
  const std::vector<TensorId>& tied = graph.tied;
  BlockParameters result;
  for (int i = block.first_op; i < block.last_op; ++i)
    for (TensorId id : graph.ops[i].parameters) {
      if (std::find(tied.begin(), tied.end(), id) != tied.end()) {
        PARPLAN_ASSERT(!result.tied || result.tied == id, block.name);
        result.tied = id;
      } else {
        std::vector<TensorId>& own = graph.tensors[id].frozen ? result.frozen : result.own;
        if (std::find(own.begin(), own.end(), id) == own.end()) own.push_back(id);
      }
    }
  return result;
}

BucketLayout bucket_layout(const OpGraph& graph, const Block& block, const std::vector<TensorId>& parameters,
                           const BlockPlacements& placed, const BlockContext& context) {
  struct Part {
    std::vector<ParameterPart> rectangles;
    BucketLayout::Run run;
  };
  std::vector<Part> parts;
  for (const TensorId id : parameters) {
    Part part{.rectangles = local_rectangles(graph, id, context), .run = {}};
    part.run.decays = graph.tensors[id].decays;
    part.run.is_matrix = context.orthogonalizes && graph.tensors[id].of_layer_product;
    for (const Axis axis : parameter_axes) {
      part.run.replicated[axis] = is_replicated(graph, id, axis, context);
      part.run.partial[axis] = part.run.replicated[axis] && is_partial_gradient(graph, block, id, axis, placed);
    }
    parts.push_back(part);
  }
  std::ranges::stable_sort(parts, {}, [](const Part& part) {
    return std::tuple(!part.run.is_matrix, part.run.replicated, !part.run.decays);
  });

  BucketLayout layout;
  for (Part& part : parts) {
    for (ParameterPart& rectangle : part.rectangles) {
      rectangle.bucket_offset = layout.elements;
      part.run.range.begin = layout.elements;
      layout.elements += rectangle.rows * rectangle.columns;
      if (&rectangle == &part.rectangles.back())
        layout.elements = align_up(Bytes(layout.elements), context.bucket_alignment).count;
      part.run.range.end = layout.elements;
      part.run.copies = rectangle.copies;
      layout.parts.push_back(rectangle);
      layout.runs.push_back(part.run);
      if (part.run.is_matrix) layout.matrix_elements = layout.elements;
    }
  }
  return layout;
}

BucketLayout bucket_layout(const OpGraph& graph, const Block& block, const std::vector<TensorId>& parameters,
                           const BlockContext& context) {
  // Only parameters that several ranks hold ask where the block's tensors lie.
  const bool asks = std::ranges::any_of(parameter_axes, [&](Axis axis) { return context.layout.degree[axis] > 1; });
  return bucket_layout(graph, block, parameters, asks ? propagate(graph, block, context) : BlockPlacements{}, context);
}

}  // namespace parplan
