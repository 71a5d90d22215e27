#include "planner/program/memory.h"

#include <array>

#include "planner/base/enum.h"
#include "planner/graph/op.h"
#include "planner/program/lowering_state.h"

namespace parplan {

MemoryUse rank_memory(const RankSizes& sizes, const TrainingSpec& training) {
  std::array<Bytes, count_of<MemoryCategory>> bytes{};  // by category: searches call this most
  RankBuffer last;
  for_each_buffer(sizes, training, [&](const RankBuffer& buffer) {
    bytes[index_of(buffer.category)] +=
        align_up(Bytes(buffer.bytes), buffer_alignment) * (buffer.times * buffer.slots);
    last = buffer;
  });
  // The last buffer is not padded.
  bytes[index_of(last.category)] -= align_up(Bytes(last.bytes), buffer_alignment) - Bytes(last.bytes);
  MemoryUse use;
  for (std::size_t i = 0; i < bytes.size(); ++i) use.part(static_cast<MemoryCategory>(i)) = bytes[i];
  return use;
}

// Places buffers one after another, each aligned.
void plan_memory(Program& program, Bytes overhead) {
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < program.buffers.size(); ++i) {
    Buffer& buffer = program.buffers[i];
    buffer.offset = offset;
    program.arena_bytes = buffer.offset + buffer.bytes;
    const bool last = i + 1 == program.buffers.size();
    const std::int64_t end =
        last ? program.arena_bytes : align_up(Bytes(program.arena_bytes), buffer_alignment).count;
    program.memory.part(buffer.category) += Bytes(end - offset);
    offset = end;
  }
  program.memory.overhead = overhead;
}

}  // namespace parplan
