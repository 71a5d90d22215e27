#pragma once

#include <optional>
#include <vector>

#include "planner/graph/op_graph.h"

namespace parplan {

// One operand of a training op, resolved: a forward tensor, the gradient of one, workspace or the
// loss scale.
struct TrainingOperand {
  OperandSource source{};
  // The forward tensor meant (its value, or its gradient); workspace and loss scale have none.
  std::optional<TensorId> tensor = {};
  Access access{};
  // Which of the contributions of one op to the tensor a contribution is; below 0 where nobody
  // needs it.
  int part = 0;
  bool operator==(const TrainingOperand&) const = default;
};

// Besides the ops of the table's rows, there are two more where a tensor is used several times: a
// `copy` of an output's gradient to an input's, where the two cannot share storage, and an
// `accumulate` of an output's gradient, or of a contribution, onto an input's.
struct TrainingOp {
  OpKind kind{};
  // Index into OpGraph::ops; for an op that adds or copies, the op whose input's gradient it
  // handles.
  int forward_op = 0;
  // Without inputs and parameters that the op lacks; lowering leaves out more.
  std::vector<TrainingOperand> operands;
  bool accumulate = false;  // the (first) input gradient is added to, not written
  bool operator==(const TrainingOp&) const = default;
};

// The forward and the derived backward of one block. Gradients of tensors are named by the tensor;
// `alias[t]` is the tensor whose gradient storage t's gradient shares (residual adds pass their
// gradient on), and t itself otherwise.
struct TrainingBlock {
  std::vector<TrainingOp> forward;
  std::vector<TrainingOp> backward;
  std::vector<TensorId> saved;  // forward tensors that the backward reads; the block's input comes first if it is read
  std::vector<TensorId> alias;  // indexed by TensorId (whole graph)
  bool passes_gradient_on = false;  // to the block before: the input's is computed
};

// Derives the backward of block `block` from the op rows. An input that several ops use gets its
// gradient from the last use first; later contributions accumulate in place: the kernel itself adds
// where its row says that it can, otherwise an `accumulate` follows it. The gradient that `add`
// passes on shares its output's storage unless one user adds to it while another still needs the
// old value; then it is a copy. Gradients of frozen parameters and those that only lead to such are
// not computed; where a kernel cannot leave one out, it is a contribution that nobody adds.
TrainingBlock training_block(const OpGraph& graph, int block);

}  // namespace parplan
