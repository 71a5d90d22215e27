#include "runtime/warm_up.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "runtime/staged_tokens.h"

namespace parplan {
namespace {

// Determines which kernel runs: that of a matrix product also depends on the alignment of its
// operands, up to 256 bytes.
struct Launch {
  OpKind op{};
  DataType type{};
  OpShape shape;
  std::vector<int> alignments;
  bool operator==(const Launch&) const = default;
};
constexpr int most_alignment = 8;

}  // namespace

void warm_up(const Program& program, Backend& backend, const Arena& arena) {
  if (backend.works_at_once()) return;
  constexpr std::int64_t word = 4;
  constexpr StreamId compute = static_cast<StreamId>(Stream::compute);
  backend.attach_thread();
  for (StreamId stream = 0; stream < static_cast<StreamId>(stream_count); ++stream)
    backend.fill(stream, arena.begin(Home::device), 0, 1);
  backend.synchronize();
  backend.set_scalars({});
  std::vector<Launch> launched;
  for (const Call& call : program.calls)
    for (const Instruction& instruction : program.segments[call.segment].instructions) {
      if (instruction.kind != InstructionKind::kernel || instruction.home == Home::host || is_load(instruction))
        continue;
      Launch launch{.op = instruction.op, .type = instruction.type, .shape = instruction.shape, .alignments = {}};
      std::vector<void*> operands;
      for (const Operand& operand : instruction.operands) {
        operands.push_back(arena.at(call.buffers[operand.binding]) + operand.offset);
        launch.alignments.push_back(
            std::min(std::countr_zero(reinterpret_cast<std::uintptr_t>(operands.back())), most_alignment));
      }
      if (std::ranges::find(launched, launch) != launched.end()) continue;
      launched.push_back(std::move(launch));
      for (std::size_t i = 0; i < operands.size(); ++i)
        backend.fill(compute, operands[i], 0, ceil_div(instruction.operands[i].bytes, word));
      backend.run(compute,
                  {.kind = instruction.op, .shape = instruction.shape, .type = instruction.type, .operands = operands});
    }
  backend.synchronize();
  arena.refill_memory();
}

}  // namespace parplan
