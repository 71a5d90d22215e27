#pragma once

#include <cstdint>
#include <vector>

#include "planner/graph/op.h"
#include "planner/graph/op_graph.h"

namespace parplan {

// One dim of a tensor, as a rank holds it.
struct LocalDim {
  std::int64_t size = 1;     // elements that this rank holds
  std::int64_t begin = 0;    // the first of them in the whole dim
  std::int64_t whole = 1;    // elements on all ranks together
  std::int64_t granule = 1;  // TensorDim::granule
};

struct LocalParameter {
  LocalDim rows;
  LocalDim columns;  // 1 for a vector
};

// A forward op as one rank computes it for one micro-batch: all that the rows of ops know about
// placements.
struct LocalOp {
  const Op& op;
  LocalDim sequence;
  std::int64_t batch = 1;
  LocalDim input;   // last dim of the first input
  LocalDim output;  // last dim of the first output
  std::vector<LocalParameter> parameters;
  double loss_weight = 1.0;  // of a token: 1 / tokens of the global batch
};

// The op's attributes with the sizes of this rank, by its row.
OpShape shape_of(const LocalOp& local);

// The op on one rank that holds everything, for one sample.
LocalOp whole(const OpGraph& graph, const Op& op);

}  // namespace parplan
