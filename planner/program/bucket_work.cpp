#include "planner/program/bucket_work.h"

#include "planner/base/error.h"

namespace parplan {
namespace {

OpKind kind_of_update(Optimizer optimizer) {
  switch (optimizer) {
    case Optimizer::adamw:
    case Optimizer::adam:
    case Optimizer::muon:  // of what is no matrix
      return OpKind::adamw;
    case Optimizer::adamw_8bit:
      return OpKind::adamw_8bit;
    case Optimizer::sgd:
      return OpKind::sgd;
  }
  PARPLAN_ASSERT(false, "an optimizer has a kernel");
  return {};
}

}  // namespace

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

UpdateCopies update_copies(std::int64_t elements, const TrainingSpec& training) {
  if (!training.engine.copies_to_update || !is_half(gradient_type(training))) return {};
  const auto kernel = [&](OpKind op, DataType type) {
    Instruction one = flat_kernel(op, elements, Stream::compute, Label::optimizer, type);
    if (op == OpKind::widen) one.shape.columns = 1;
    return one;
  };
  const DataType half = training.precision;
  // A kernel that scales reads and writes as much as a copy, and a reading of 4 bytes is as much as
  // a copy in half precision.
  return {.before = {kernel(OpKind::copy, half), kernel(OpKind::widen, half), kernel(OpKind::copy, DataType::fp32)},
          .behind = {kernel(OpKind::copy, half)}};
}

std::vector<Instruction> norm_copies(std::int64_t elements, const TrainingSpec& training) {
  const UpdateCopies copies = update_copies(elements, training);
  if (copies.before.empty()) return {};
  // 2 bytes read, 8 written and 8 read, instead of 4 read: 6 and 8 more.
  return {copies.before[1], copies.before[2]};
}

Instruction clear_gradients(std::int64_t elements, Label label, DataType type) {
  return flat_kernel(OpKind::fill_zero, elements, Stream::compute, label, type);
}

std::vector<Instruction> flatten_gradients(std::int64_t elements, const TrainingSpec& training) {
  Instruction widen = flat_kernel(OpKind::widen, elements, Stream::compute, Label::compute, training.precision);
  widen.shape.columns = 1;
  if (training.engine.widens_gradients) return {widen};
  return {flat_kernel(OpKind::copy, elements, Stream::compute, Label::compute, training.precision), widen};
}

Instruction fill_gathered(std::int64_t elements, const TrainingSpec& training) {
  return flat_kernel(OpKind::fill_zero, elements, Stream::dp, Label::dp, in_memory(training.precision));
}

Instruction copy_shards(std::int64_t elements, DataType type, Seconds host) {
  Instruction copy = flat_kernel(OpKind::copy, elements, Stream::dp, Label::dp, type);
  copy.submission = host;
  return copy;
}

std::vector<Instruction> sharded_copies(std::int64_t elements, const TrainingSpec& training) {
  constexpr int kernels = 3;  // a copy, a division, a copy
  return std::vector(kernels, flat_kernel(OpKind::copy, elements, Stream::compute, Label::compute, training.precision));
}

bool clears_sharded(const TrainingSpec& training) {
  return !training.engine.copies_sharded || !leaves_half_gradients(training);
}

bool leaves_half_gradients(const TrainingSpec& training) {
  const Engine& engine = training.engine;
  return is_half(training.precision) && (engine.half_gradients || !engine.fused_accumulation ||
                                         engine.flattens_gradients || engine.widens_gradients);
}

DataType left_type(const TrainingSpec& training) {
  return leaves_half_gradients(training) ? training.precision : gradient_type(training);
}

std::vector<Instruction> add_half_gradients(std::int64_t elements, const TrainingSpec& training) {
  const DataType sums = gradient_type(training);
  std::vector<Instruction> kernels{flat_kernel(OpKind::accumulate, elements, Stream::compute, Label::compute, sums)};
  kernels.front().shape.in_half = !training.engine.half_gradients;
  if (training.engine.half_gradients && sums != training.precision) {
    Instruction widen = flat_kernel(OpKind::widen, elements, Stream::compute, Label::compute, training.precision);
    widen.shape.columns = 1;
    kernels.insert(kernels.begin(), widen);
  }
  return kernels;
}

DataType gradient_type(const TrainingSpec& training) {
  const Engine& engine = training.engine;
  const bool in_half = is_half(training.precision) &&
                       (engine.sums_half || (engine.half_gradients && training.precision == DataType::fp16));
  return in_half ? training.precision : DataType::fp32;
}

Instruction accumulate_gradients(std::int64_t elements, Stream stream, Label label) {
  return flat_kernel(OpKind::accumulate, elements, stream, label);
}

Instruction sum_of_squares(std::int64_t elements) {
  return flat_kernel(OpKind::sum_squares, elements, Stream::compute, Label::optimizer);
}

Instruction sum_of_squares_on_host(std::int64_t elements) {
  Instruction instruction = sum_of_squares(elements);
  instruction.stream = Stream::host;
  instruction.home = Home::host;
  return instruction;
}

Instruction update_parameters(std::int64_t elements, bool decays, const TrainingSpec& training) {
  const OpKind kind = kind_of_update(training.optimizer);
  const bool sgd = kind == OpKind::sgd;
  Instruction instruction =
      flat_kernel(kind, elements, Stream::compute, Label::optimizer, in_memory(training.precision));
  instruction.shape.weight_decay = decays;
  instruction.shape.second = sgd && optimizer_state(training).first_moment;
  instruction.shape.norm = computes_norm(training);
  instruction.shape.master = optimizer_state(training).master;
  instruction.shape.scaled = scales_loss(training);
  instruction.shape.stepwise = kind == OpKind::adamw && !training.engine.fused_update;
  return instruction;
}

Instruction update_on_host(std::int64_t elements, bool decays, const TrainingSpec& training) {
  Instruction instruction = update_parameters(elements, decays, training);
  instruction.stream = Stream::host;
  instruction.home = Home::host;
  return instruction;
}

Instruction copy_on(Stream stream, DataType type) {
  Instruction instruction;
  instruction.kind = InstructionKind::copy;
  instruction.stream = stream;
  instruction.label = Label::offload;
  instruction.type = type;
  instruction.name = stream == Stream::to_host     ? "to host"
                     : stream == Stream::from_host ? "from host"
                     : stream == Stream::to_nvme   ? "to NVMe"
                                                   : "from NVMe";
  return instruction;
}

Instruction copy_to(Home home, DataType type) {
  return copy_on(home == Home::host ? Stream::to_host : Stream::from_host, type);
}

DataType reduced_type(const TrainingSpec& training) {
  return training.engine.reduces_half && is_half(training.precision) ? training.precision : gradient_type(training);
}

InstructionKind gradient_reduction(const DataShards& shards, const TrainingSpec& training) {
  const Engine& engine = training.engine;
  const bool scatters = shards.parameters || (shards.gradients ? engine.scatters_sharded : engine.scatters_gradients);
  return shards.optimizer && scatters ? InstructionKind::reduce_scatter : InstructionKind::all_reduce_sum;
}

std::vector<Instruction> BucketReduction::copies() const {
  std::vector<Instruction> all = before;
  all.insert(all.end(), after.begin(), after.end());
  return all;
}

BucketReduction accumulated_reduction(std::int64_t elements, const DataShards& shards, const TrainingSpec& training) {
  BucketReduction reduction{.kind = gradient_reduction(shards, training), .before = {}, .after = {}};
  if (training.engine.copies_to_buckets && !shards.optimizer) {
    const Instruction copy = flat_kernel(OpKind::copy, elements, Stream::dp, Label::dp, left_type(training));
    reduction.before = {copy};
    reduction.after = {copy};
  }
  if (!training.engine.copies_reduced || reduction.kind != InstructionKind::all_reduce_sum) return reduction;
  const Instruction copy = flat_kernel(OpKind::copy, elements, Stream::dp, Label::dp, reduced_type(training));
  reduction.before = {copy, copy};  // a division reads and writes as much
  reduction.after = {copy};
  return reduction;
}

}  // namespace parplan
