#pragma once

#include <cstdint>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/graph/op_kind.h"

namespace parplan {

// One dim of a tensor, as a rank holds it.
struct LocalDim {
  std::int64_t size = 1;     // elements that this rank holds
  std::int64_t begin = 0;    // the first of them in the whole dim
  std::int64_t whole = 1;    // elements on all ranks together
  std::int64_t granule = 1;  // TensorDim::granule
  // Of ranks that share out a granule: how many, and which of them this one is.
  std::int64_t sharers = 1;
  std::int64_t share = 0;
};

struct LocalParameter {
  LocalDim rows;
  LocalDim columns;  // 1 for a vector
};

// A forward op as one rank computes it for one micro-batch: all that the rows of ops know about
// placements.
struct LocalOp {
  const Op& op;
  std::int64_t rows = 1;  // tokens of the first operand: the product of its dims that count them
  LocalDim sequence;
  ContextChunks chunks = {};  // of the sequence
  std::int64_t batch = 1;
  LocalDim input;   // last dim of the first input
  LocalDim output;  // last dim of the first output
  std::vector<LocalParameter> parameters;
  double loss_weight = 1.0;  // of a token: 1 / tokens of the global batch that have a target
};

// The op's attributes with the sizes of this rank, by its row.
OpShape shape_of(const LocalOp& local);

// The tensor whose tokens are the rows of a forward op: its first input, or its output where it
// has no input.
const Tensor& first_operand(const OpGraph& graph, const Op& op);
// The positions of the sequence that they are of: all of a sample's, or those that an op took.
std::int64_t positions_of(const OpGraph& graph, const Op& op);
// The product of `size_of` each of the tensor's dims that count tokens.
template <class SizeOf>
std::int64_t tokens_of(const Tensor& tensor, const SizeOf& size_of) {
  std::int64_t tokens = 1;
  for (const TensorDim& dim : tensor.dims)
    if (counts_tokens(dim.dim)) tokens *= size_of(dim);
  return tokens;
}

// The op on one rank that holds everything, for one sample.
LocalOp whole(const OpGraph& graph, const Op& op);

}  // namespace parplan
