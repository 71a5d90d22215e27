#include "planner/program/bucket_work.h"

namespace parplan {

Instruction flat_kernel(OpKind op, std::int64_t elements, Stream stream, Label label, DataType type) {
  Instruction instruction;
  instruction.kind = InstructionKind::kernel;
  instruction.op = op;
  instruction.shape.rows = elements;
  instruction.stream = stream;
  instruction.label = label;
  instruction.type = type;
  instruction.name = name(op);
  return instruction;
}

Instruction clear_gradients(std::int64_t elements, Label label) {
  return flat_kernel(OpKind::fill_zero, elements, Stream::compute, label);
}

Instruction accumulate_gradients(std::int64_t elements, Stream stream, Label label) {
  return flat_kernel(OpKind::accumulate, elements, stream, label);
}

Instruction sum_of_squares(std::int64_t elements) {
  return flat_kernel(OpKind::sum_squares, elements, Stream::compute, Label::optimizer);
}

Instruction update_parameters(std::int64_t elements, bool decays, const TrainingSpec& training) {
  const bool sgd = training.optimizer == Optimizer::sgd;
  Instruction instruction = flat_kernel(sgd ? OpKind::sgd : OpKind::adamw, elements, Stream::compute,
                                        Label::optimizer, in_memory(training.precision));
  instruction.shape.weight_decay = decays;
  instruction.shape.second = sgd && optimizer_state(training).first_moment;
  instruction.shape.norm = computes_norm(training);
  instruction.shape.master = optimizer_state(training).master;
  instruction.shape.scaled = scales_loss(training);
  return instruction;
}

InstructionKind gradient_reduction(const DataShards& shards) {
  return shards.optimizer ? InstructionKind::reduce_scatter : InstructionKind::all_reduce_sum;
}

}  // namespace parplan
