#pragma once

#include <cstdint>
#include <span>

#include "planner/graph/op.h"

namespace parplan {

// What a kernel of the optimizer needs beside its operands; it changes from step to step.
struct StepScalars {
  std::int64_t step = 1;  // counts from 1 (bias correction)
  double learning_rate = 0.0;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.0;  // applied where shape.weight_decay says so
  bool decoupled_decay = true;  // adamw; false: adam and sgd, the decay is added to the gradient
  double momentum = 0.0;      // sgd where shape.second says that the momentum operand is present
  double clip_norm = 0.0;     // gradients are scaled by min(1, clip_norm / (norm + 1e-6)), as PyTorch's clip_grad_norm_
  bool has_norm = false;      // the norm operand is present: one fp32 number, the global sum of squares
};

// One kernel and what it works on. Operands stand in the order of the op's row (planner/graph/op.cpp); optional
// operands that are absent are left out (shape.bias and shape.second tell). Sizes: `shape`.
struct KernelCall {
  OpKind kind{};
  OpShape shape;
  std::span<void* const> operands;
  const StepScalars* scalars = nullptr;  // sgd, adamw
};

}  // namespace parplan
