#pragma once

#include <cstdint>
#include <vector>

#include "planner/graph/dynamic_quantization.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/placement.h"
#include "planner/program/program.h"

namespace parplan {

// The kernels and collectives around a bucket of parameters, without operands: lowering binds them
// to buffers, the estimate prices them. `elements`: of the bucket, or of the part of it that a rank
// works on.

Instruction flat_kernel(OpKind op, std::int64_t elements, Stream stream, Label label,
                        DataType type = DataType::fp32);

// `type`: gradient_type
Instruction clear_gradients(std::int64_t elements, Label label, DataType type = DataType::fp32);
Instruction accumulate_gradients(std::int64_t elements, Stream stream, Label label);
Instruction sum_of_squares(std::int64_t elements);
Instruction sum_of_squares_on_host(std::int64_t elements);  // by its processor
// AdamW, Adam or SGD on parameters that all decay, or that do not; with Muon, AdamW on those that
// are no matrices of layers (orthogonalize.h has the others).
Instruction update_parameters(std::int64_t elements, bool decays, const TrainingSpec& training);
// The same by the host's processor; in fp32 it updates the master copy, the only one there.
Instruction update_on_host(std::int64_t elements, bool decays, const TrainingSpec& training);
// A copy of `type`, without operands, on its stream.
Instruction copy_on(Stream stream, DataType type);
// Between the device and the host, on the stream to the home.
Instruction copy_to(Home home, DataType type);

// Engines with copies_to_update, where gradients are summed in half precision: kernels around an
// update of so many elements by the device, which copy, widen and scale the gradients before it,
// and read the master once more behind it for the parameters that it writes.
struct UpdateCopies {
  std::vector<Instruction> before, behind;
};
UpdateCopies update_copies(std::int64_t elements, const TrainingSpec& training);
// The same before their norm: what a copy in fp64 and its reading move beyond one reading in fp32.
std::vector<Instruction> norm_copies(std::int64_t elements, const TrainingSpec& training);

// Copies what one micro-batch's backward left in half precision into one tensor, and widens it
// (Engine::flattens_gradients, widens_gradients).
std::vector<Instruction> flatten_gradients(std::int64_t elements, const TrainingSpec& training);

// Engines with lists_shards: what is filled before a gather of so many elements, on the stream of
// the data axis.
Instruction fill_gathered(std::int64_t elements, const TrainingSpec& training);
// A copy around a gather or before a reduction (lists_shards, copies_coalesced), on that stream.
// `host`: to submit the copies of all ranks' shards.
Instruction copy_shards(std::int64_t elements, DataType type, Seconds host);
// What moves sharded gradients before they are reduced (copies_sharded): a division reads and
// writes as much as a copy.
std::vector<Instruction> sharded_copies(std::int64_t elements, const TrainingSpec& training);
// Whether what a backward adds sharded gradients to is cleared before; not where these come in
// tensors of their own (copies_sharded), in half precision.
bool clears_sharded(const TrainingSpec& training);

// Whether products leave the gradients of weights in half precision, for other kernels to sum. So
// they do under engines that copy sharded ones.
bool leaves_half_gradients(const TrainingSpec& training);
// The type in which a backward leaves them.
DataType left_type(const TrainingSpec& training);
// Adds what one micro-batch's backward left so.
std::vector<Instruction> add_half_gradients(std::int64_t elements, const TrainingSpec& training);

// The type in which gradients are summed over micro-batches and data-parallel ranks: fp32, but that
// of the training under engines with sums_half, and fp16 under those with half_gradients.
DataType gradient_type(const TrainingSpec& training);
// The type in which they go over the data axis.
DataType reduced_type(const TrainingSpec& training);
// What sums the gradients of all data-parallel ranks: a reduce-scatter where each rank updates its
// shard, else an all-reduce (Engine::scatters_gradients, scatters_sharded).
InstructionKind gradient_reduction(const DataShards& shards, const TrainingSpec& training);
// The same of gradients that are whole on every rank, with the kernels around it
// (Engine::copies_reduced, copies_to_buckets), on the stream of the data axis.
struct BucketReduction {
  InstructionKind kind{};
  std::vector<Instruction> before, after;
  std::vector<Instruction> copies() const;  // both
};
BucketReduction accumulated_reduction(std::int64_t elements, const DataShards& shards, const TrainingSpec& training);

// Bytes of an element of a bucket in each of its roles.
inline std::int64_t gradient_bytes(const TrainingSpec& training) {
  return size_of(gradient_type(training));
}
inline std::int64_t reduced_bytes(const TrainingSpec& training) {
  return size_of(reduced_type(training));
}
inline constexpr std::int64_t state_bytes = 4;  // master copies, moments that are not quantized

// The copies of the optimizer's state that a rank keeps for each of its parameters.
struct OptimizerState {
  bool first_moment = false;
  bool second_moment = false;  // but of matrices that are orthogonalized (BucketSizes::without_second)
  bool master = false;  // the parameters in fp32, next to half precision
  bool quantized = false;  // moments in 8 bits, with a scale for each block

  std::int64_t moment_bytes(std::int64_t elements) const { return elements * (quantized ? 1 : state_bytes); }
  // The scales of one moment.
  std::int64_t scale_bytes(std::int64_t elements) const {
    return quantized ? quantization_blocks(elements) * state_bytes : 0;
  }
};
inline OptimizerState optimizer_state(const TrainingSpec& training) {
  const bool adaptive = training.optimizer != Optimizer::sgd;
  return {.first_moment = adaptive || training.momentum != 0.0,
          .second_moment = adaptive,
          .master = is_half(training.precision),
          .quantized = training.optimizer == Optimizer::adamw_8bit};
}

// Each parameter of a bucket, and each rank's shard of it, begins at a multiple of so many
// elements: 64 bytes in fp32, or whole blocks of quantized state, so that which numbers share a
// scale does not depend on who holds them.
inline std::int64_t bucket_alignment(const TrainingSpec& training) {
  return optimizer_state(training).quantized ? quantization_block : 16;
}

// Whether the host's processor updates the parameters: where their state is in its memory, or in a
// file that it reads and writes.
inline bool updates_on_host(const StateHomes& homes) {
  return homes.optimizer != Home::device;
}
// Then the state has a master copy in fp32, too, unless the parameters are such a copy themselves.
inline OptimizerState optimizer_state(const TrainingSpec& training, const StateHomes& homes) {
  OptimizerState state = optimizer_state(training);
  state.master |= updates_on_host(homes) && homes.parameters == Home::device;
  return state;
}
inline std::int64_t bytes_of_state(const TrainingSpec& training, const StateHomes& homes) {
  const OptimizerState state = optimizer_state(training, homes);
  return state_bytes * (int{state.first_moment} + int{state.second_moment} + int{state.master});
}

// Bytes of each parameter that are on NVMe and that an update by the host reads and writes.
inline std::int64_t bytes_on_nvme(const TrainingSpec& training, const StateHomes& homes) {
  return (homes.optimizer == Home::nvme ? bytes_of_state(training, homes) : 0) +
         (homes.parameters == Home::nvme ? size_of(in_memory(training.precision)) : 0);
}

}  // namespace parplan
