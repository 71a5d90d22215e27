#pragma once

#include <cstdint>
#include <span>

#include "planner/graph/op_kind.h"

namespace parplan {

// What a kernel of the optimizer needs besides its operands; it changes from step to step.
struct StepScalars {
  std::int64_t step = 1;  // counts from 1 (bias correction)
  double learning_rate = 0.0;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.0;  // applied where shape.weight_decay says so
  bool decoupled_decay = true;  // adamw; false: adam and sgd, the decay is added to the gradient
  double momentum = 0.0;      // sgd where shape.second says that the momentum operand is present
  // Where shape.norm is set, gradients are scaled by min(1, clip_norm / (norm + 1e-6)), as in
  // PyTorch's clip_grad_norm_; 0: they are not.
  double clip_norm = 0.0;
  // Where shape.norm is set and the norm is not finite, nothing changes. (With shape.scaled that
  // always holds: the loss scale was too large.)
  bool skips_not_finite = false;
};

// One kernel and its operands, in the order of the op's row (planner/graph/ops/); absent optional
// operands are left out (shape.bias, second, norm, master and scaled tell which). `shape` has the
// sizes.
struct KernelCall {
  OpKind kind{};
  OpShape shape;
  // Type of parameters and activations; statistics, gradients of parameters and state are fp32.
  DataType type = DataType::fp32;
  std::span<void* const> operands;
};

}  // namespace parplan
