#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/plan/placement.h"
#include "planner/program/block_context.h"
#include "planner/program/program.h"

namespace parplan {

// How many shards a layout cuts a dim into, and which of them is this rank's.
int shards_of(Dim dim, const TensorLayout& layout, const BlockContext& context);
int shard_at(Dim dim, const TensorLayout& layout, const BlockContext& context);
// The axes from the one that cuts a dim first, into the largest parts, to the one that cuts inside
// the parts of all others. Groups of heads are cut by weights first, then by an axis that exchanges
// tokens for them.
std::span<const Axis> cutting_order(Dim dim);
// Which positions the rows have, where the context axis shares out chunks; of a layout with whole
// sequences: none.
ContextChunks chunks_of(std::int64_t sequence, const TensorLayout& layout, const BlockContext& context);
// Local size of one dim. The vocabulary is padded to a multiple of the shards, each of its
// `multiple`; every other dim splits evenly in whole granules, or in shares of granules
// (planner/parallel rejects all else before).
std::int64_t local_size(const TensorDim& dim, const TensorLayout& layout, const BlockContext& context);
// The first element that this rank holds; the copied end of a granule comes behind its share.
std::int64_t local_begin(const TensorDim& dim, const TensorLayout& layout, const BlockContext& context);
std::int64_t local_elements(const Tensor& tensor, const TensorLayout& layout, const BlockContext& context);
// Whether each step of the softmax that makes these probabilities is a kernel (SoftmaxKernel), but
// for floors (BlockContext::scratch_apart): so no sample takes less in a smaller micro-batch.
bool softmax_is_apart(const Tensor& probabilities, const TensorLayout& layout, const BlockContext& context);
// Bytes of an activation, statistic, tokens or loss tensor (its own type).
std::int64_t local_bytes(const Tensor& tensor, const TensorLayout& layout, const BlockContext& context);
DataType type_of(const Tensor& tensor, DataType precision);

// The part of a parameter that this rank holds; the caller fills in the bucket fields. Where ranks
// share out a granule of its rows, these are not side by side in the whole parameter:
// local_rectangles.
ParameterPart local_part(const OpGraph& graph, TensorId parameter, const BlockContext& context);
// The same as rectangles of the whole parameter, in the order of memory: this rank's own rows, then
// those of which other ranks hold copies.
std::vector<ParameterPart> local_rectangles(const OpGraph& graph, TensorId parameter, const BlockContext& context);
TensorLayout layout_of_parameter(const OpGraph& graph, TensorId parameter, const Placements& placements);

// The op's local size for the layout `input` of its first input (which `propagate` found that the
// op needs).
OpShape local_shape(const OpGraph& graph, const Op& op, const TensorLayout& input, const BlockContext& context);

}  // namespace parplan
