#include "planner/graph/ops/op_rows.h"

#include <algorithm>

#include "planner/graph/ops/row_parts.h"

namespace parplan {
namespace {

using enum OperandSource;
using enum Access;
using enum OperandContent;

// Operands ----------------------------------------------------------------------------------------

constexpr OperandSize two_per_row{[](const OpShape& s) { return 2 * s.rows; }, fp32};

constexpr OperandRow cross_entropy_max_operands[] = {{input, 0, read, matrix}, {output, 0, write, per_row}};
constexpr OperandRow cross_entropy_sums_operands[] = {{input, 0, read, matrix},
                                                      {input, 1, read, vocabulary_ids},
                                                      {input, 2, read, per_row},
                                                      {output, 0, write, two_per_row},
                                                      {workspace, 0, update, {}, if_second}};
constexpr OperandRow cross_entropy_loss_operands[] = {{input, 0, read, matrix},
                                                      {input, 1, read, vocabulary_ids},
                                                      {input, 2, read, per_row},
                                                      {input, 3, read, two_per_row},
                                                      {output, 0, update, one}};
constexpr OperandRow cross_entropy_gradient_operands[] = {{input, 0, read, matrix},
                                                          {input, 1, read, vocabulary_ids},
                                                          {input, 2, read, per_row},
                                                          {input, 3, read, two_per_row},
                                                          {input_gradient, 0, write, matrix},
                                                          {loss_scale, 0, read, scale_state, if_scaled},
                                                          {workspace, 0, update, {}, if_second}};

constexpr OpKind cross_entropy_loss_gradients[] = {OpKind::cross_entropy_gradient};

// Local shapes ------------------------------------------------------------------------------------

void localize_cross_entropy(const LocalOp& local, OpShape& shape) {
  shape.columns = local.input.size;
  shape.begin = local.input.begin;
  shape.valid = std::clamp<std::int64_t>(local.input.whole - local.input.begin, 0, local.input.size);
  shape.scale = local.loss_weight;
  shape.apart = local.input.size < local.input.whole;
}

// Work --------------------------------------------------------------------------------------------

OpWork cross_entropy_max_work(const OpShape& s, DataType type) {
  return {flops(s.rows * s.columns), Bytes(s.rows * s.columns * e(type) + 4 * s.rows)};
}
// The bytes of `kernels` that each read and write all logits.
Bytes rewritten(const OpShape& s, DataType type, int kernels) {
  return Bytes(s.stepwise ? std::int64_t{2} * kernels * s.rows * s.columns * e(type) : 0);
}
// Subtract, exp, add; target, maximum, two sums. Step by step, the first two are kernels in place.
OpWork cross_entropy_sums_work(const OpShape& s, DataType type) {
  return {flops(3 * s.rows * s.columns), Bytes(s.rows * s.columns * e(type) + 16 * s.rows) + rewritten(s, type, 2)};
}
// What metrics move: logits in half precision are widened by a kernel of its own, and another makes
// the log-softmax of them, both in fp32 (autocast; ATen's log_softmax widens fp16 alone in its
// kernel).
Bytes of_metrics(const OpShape& s, DataType type) {
  const std::int64_t fp32_bytes = size_of(DataType::fp32);
  const std::int64_t widened = e(type) < fp32_bytes ? e(type) + fp32_bytes : 0;
  return Bytes(s.metrics * s.rows * s.columns * (widened + 2 * fp32_bytes));
}
// The two sums of a token hold all that its loss needs; the other operands are for the gradient.
// Step by step, a kernel makes the probabilities that the gradient is made of.
OpWork cross_entropy_loss_work(const OpShape& s, DataType type) {
  return {flops(3 * s.rows + 3 * s.metrics * s.rows * s.columns),
          Bytes(8 * s.rows + 8) + rewritten(s, type, 1) + of_metrics(s, type)};
}
int cross_entropy_sums_launches(const OpShape& s) { return s.stepwise ? 1 + 2 : 1; }
int cross_entropy_loss_launches(const OpShape& s) {  // a metric widens, makes the log-softmax, picks targets
  return (s.stepwise ? 1 + 1 : 1) + 3 * s.metrics;
}
// Where the loss fills the gradient of its log-softmax, a kernel writes zeros, one puts a number of
// each token among them (PyTorch's nll_loss), and the gradient reads them, too.
OpWork cross_entropy_gradient_work(const OpShape& s, DataType type) {  // subtract, exp, divide, scale
  return {flops(4 * s.rows * s.columns),
          Bytes((s.second ? 4 : 2) * s.rows * s.columns * e(type) + (s.second ? 28 : 16) * s.rows)};
}
int cross_entropy_gradient_launches(const OpShape& s) { return s.second ? 1 + 2 : 1; }

Bytes copied_logits(const OpShape& s) { return Bytes(s.second ? s.rows * s.columns * size_of(DataType::fp32) : 0); }
// The gradient of the log-softmax, and that of the logits, which is not in its place; of a part of
// the vocabulary it is the product of a sum, which is one more (PyTorch,
// torch/distributed/tensor/parallel/loss.py, _nll_loss_and_log_softmax_backward).
Bytes filled_gradients(const OpShape& s) { return (s.apart ? 3 : 2) * copied_logits(s); }

// Rows --------------------------------------------------------------------------------------------

constexpr OpRow rows[] = {
    {.kind = OpKind::cross_entropy_max,
     .name = "cross_entropy_max",
     .sharding = ShardingRule::vocabulary_max,
     .localize = localize_cross_entropy,
     .operands = cross_entropy_max_operands,
     .work = cross_entropy_max_work,
     .measured_over = MeasuredOver::vocabulary},
    {.kind = OpKind::cross_entropy_sums,
     .name = "cross_entropy_sums",
     .sharding = ShardingRule::vocabulary_sum,
     .localize = localize_cross_entropy,
     .operands = cross_entropy_sums_operands,
     .work = cross_entropy_sums_work,
     .launches = cross_entropy_sums_launches,
     .measured_over = MeasuredOver::vocabulary,
     .cuda_workspace = copied_logits},
    {.kind = OpKind::cross_entropy_loss,
     .name = "cross_entropy_loss",
     .sharding = ShardingRule::vocabulary_loss,
     .localize = localize_cross_entropy,
     .operands = cross_entropy_loss_operands,
     .gradients = cross_entropy_loss_gradients,
     .work = cross_entropy_loss_work,
     .launches = cross_entropy_loss_launches},
    {.kind = OpKind::cross_entropy_gradient,
     .name = "cross_entropy_gradient",
     .operands = cross_entropy_gradient_operands,
     .in_place = InPlace{.read = 0, .write = 4},
     .work = cross_entropy_gradient_work,
     .launches = cross_entropy_gradient_launches,
     .measured_over = MeasuredOver::vocabulary,
     .cuda_workspace = filled_gradients},
};

}  // namespace

std::span<const OpRow> loss_rows() {
  return rows;
}

}  // namespace parplan
