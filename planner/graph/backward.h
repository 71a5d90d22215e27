#pragma once

#include <vector>

#include "planner/graph/op_graph.h"

namespace parplan {

// One operand of a training op, resolved: a forward tensor, the gradient of one, workspace or the loss scale.
struct TrainingOperand {
  OperandSource source{};
  TensorId tensor = -1;     // the forward tensor meant (its value, or its gradient); -1 for workspace and loss scale
  Access access{};
  bool operator==(const TrainingOperand&) const = default;
};

struct TrainingOp {
  OpKind kind{};
  int forward_op = -1;  // index into OpGraph::ops
  std::vector<TrainingOperand> operands;  // without inputs and parameters that the op lacks; lowering leaves out more
  bool accumulate = false;  // the input gradient is added to, not written
  bool operator==(const TrainingOp&) const = default;
};

// Forward and derived backward of one block. Gradients of tensors are named by the tensor; `alias[t]` is the tensor
// whose gradient storage t's gradient shares (residual adds pass their gradient through), t itself otherwise.
struct TrainingBlock {
  std::vector<TrainingOp> forward;
  std::vector<TrainingOp> backward;
  std::vector<TensorId> saved;  // forward tensors that the backward reads, the block's input first if it does
  std::vector<TensorId> alias;  // indexed by TensorId (whole graph)
};

// Derives the backward of block `block` from the op rows. An input that several ops use gets its gradient from
// the last use first, later contributions accumulate in place.
TrainingBlock training_block(const OpGraph& graph, int block);

}  // namespace parplan
