#pragma once

#include <vector>

#include "planner/graph/op_graph.h"

namespace parplan {

// One operand of a training op, resolved: a forward tensor, the gradient of one, workspace or the
// loss scale.
struct TrainingOperand {
  OperandSource source{};
  TensorId tensor = -1;     // the forward tensor meant (its value, or its gradient); -1 for workspace and loss scale
  Access access{};
  int part = 0;             // of a contribution: which of those that one op makes to the tensor
  bool operator==(const TrainingOperand&) const = default;
};

// Besides the ops of the table's rows there stand between them, where a tensor is used several
// times: `copy` of an output's gradient to an input's, where the two cannot share storage, and
// `accumulate` of an output's gradient, or of a contribution, to an input's.
struct TrainingOp {
  OpKind kind{};
  int forward_op = -1;  // index into OpGraph::ops; of what adds or copies: the op whose input's gradient it is
  std::vector<TrainingOperand> operands;  // without inputs and parameters that the op lacks; lowering leaves out more
  bool accumulate = false;  // the (first) input gradient is added to, not written
  bool operator==(const TrainingOp&) const = default;
};

// Forward and derived backward of one block. Gradients of tensors are named by the tensor;
// `alias[t]` is the tensor whose gradient storage t's gradient shares (residual adds pass their
// gradient through), t itself otherwise.
struct TrainingBlock {
  std::vector<TrainingOp> forward;
  std::vector<TrainingOp> backward;
  std::vector<TensorId> saved;  // forward tensors that the backward reads, the block's input first if it does
  std::vector<TensorId> alias;  // indexed by TensorId (whole graph)
};

// Derives the backward of block `block` from the op rows. An input that several ops use gets its
// gradient from the last use first, later contributions accumulate in place: by the kernel itself
// where its row says that it can, else by an `accumulate` behind it. What `add` passes on shares
// its output's storage unless somebody adds to it while another still needs it as it was; then it
// is a copy.
TrainingBlock training_block(const OpGraph& graph, int block);

}  // namespace parplan
