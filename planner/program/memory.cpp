#include "planner/program/memory.h"

#include <array>
#include <cmath>

#include "planner/base/enum_index.h"
#include "planner/graph/op_kind.h"
#include "planner/program/lowering_state.h"

namespace parplan {
namespace {

// Where MemoryUse::part counts a buffer: the categories on the device, then the other homes.
constexpr std::size_t parts = count_of<MemoryCategory> + count_of<Home> - 1;
constexpr std::size_t part_of(MemoryCategory category, Home home) {
  return home == Home::device ? index_of(category) : count_of<MemoryCategory> + index_of(home) - 1;
}

}  // namespace

Bytes reserve_of(std::int64_t bytes, MemoryCategory category, const TrainingSpec& training) {
  const Engine& engine = training.engine;
  double share = 0.0;
  if (category == MemoryCategory::activations) share = engine.allocator_reserve;
  if (category == MemoryCategory::optimizer && (engine.copies_gradients || engine.sums_half) &&
      is_half(gradient_type(training))) {
    // Counted on the buffers of state, which together hold so many bytes of a block's elements.
    const OptimizerState state = optimizer_state(training);
    const std::int64_t moments = int{state.first_moment} + int{state.second_moment};
    const std::int64_t held =
        moments * (state.moment_bytes(quantization_block) + state.scale_bytes(quantization_block)) +
        (state.master ? quantization_block * state_bytes : 0);
    const std::int64_t flat = engine.copies_gradients ? size_of(gradient_type(training)) : 0;
    share = static_cast<double>((flat + size_of(DataType::fp32)) * quantization_block) / static_cast<double>(held);
  }
  // Sums in fp32 are copied whole to be reduced in half precision. Buffers of half_gradients count,
  // too.
  if (category == MemoryCategory::gradients && engine.copies_gradients && engine.reduces_half &&
      is_half(training.precision) && !is_half(gradient_type(training))) {
    const std::int64_t half = size_of(training.precision);
    const std::int64_t held = gradient_bytes(training) + (engine.half_gradients ? half : 0);
    share = static_cast<double>(half) / static_cast<double>(held);
  }
  if (share == 0.0) return {};
  return align_up(Bytes(static_cast<std::int64_t>(std::ceil(share * static_cast<double>(bytes)))), buffer_alignment);
}

MemoryUse rank_memory(const RankSizes& sizes, const TrainingSpec& training) {
  std::array<Bytes, parts> bytes{};  // searches call this most
  Bytes reserve;
  struct Last {
    std::size_t part = 0;
    Bytes bytes;
  };
  std::array<Last, count_of<Home>> last;  // by home
  for_each_buffer(sizes, training, [&](const RankBuffer& buffer) {
    const std::size_t part = part_of(buffer.category, buffer.home);
    const Bytes all = align_up(Bytes(buffer.bytes), buffer_alignment) * (buffer.times * buffer.slots);
    if (buffer.counted) bytes[part] += all;
    if (buffer.kept) reserve += all;
    if (buffer.home == Home::device)
      reserve += reserve_of(buffer.bytes, buffer.category, training) * (buffer.times * buffer.slots);
    // Behind scratch, which state alone lacks, state is padded.
    if (buffer.role == BufferRole::scratch || (buffer.bytes > 0 && buffer.times > 0))
      last[index_of(buffer.home)] = {.part = part, .bytes = Bytes(buffer.bytes)};
  });
  // The last buffer of an arena that has bytes is not padded.
  for (const Last& of_home : last)
    bytes[of_home.part] -= align_up(of_home.bytes, buffer_alignment) - of_home.bytes;
  const auto on_device = [&](MemoryCategory category) { return bytes[part_of(category, Home::device)]; };
  return {.parameters = on_device(MemoryCategory::parameters),
          .gradients = on_device(MemoryCategory::gradients),
          .optimizer = on_device(MemoryCategory::optimizer),
          .activations = on_device(MemoryCategory::activations),
          .buffers = on_device(MemoryCategory::buffers),
          .overhead = {},
          .reserve = reserve,
          .host = bytes[part_of({}, Home::host)],
          .nvme = bytes[part_of({}, Home::nvme)]};
}

// Places the buffers of each home one after another, each aligned; one without bytes begins
// with the arena and takes nothing.
void plan_memory(Program& program, const TrainingSpec& training, Bytes overhead) {
  PerHome<const Buffer*> last;
  for (Buffer& buffer : program.buffers) {
    std::int64_t& end = program.arena_bytes[buffer.home];
    if (buffer.bytes == 0) continue;
    buffer.offset = align_up(Bytes(end), buffer_alignment).count;
    if (const Buffer* before = last[buffer.home]; before != nullptr && before->counted)
      program.memory.part(before->category, before->home) += Bytes(buffer.offset - end);
    end = buffer.offset + buffer.bytes;
    if (buffer.counted) program.memory.part(buffer.category, buffer.home) += Bytes(buffer.bytes);
    last[buffer.home] = &buffer;
    if (buffer.kept) program.memory.reserve += align_up(Bytes(buffer.bytes), buffer_alignment);
    if (buffer.home == Home::device) program.memory.reserve += reserve_of(buffer.bytes, buffer.category, training);
  }
  program.memory.overhead = overhead;
}

}  // namespace parplan
