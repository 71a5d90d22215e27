#include "planner/program/program.h"

#include <algorithm>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

// The byte counts of the bandwidth-optimal algorithms (Patarasuk and Yuan 2009; NVIDIA/nccl-tests
// doc/PERFORMANCE.md), for the chunks of Instruction's comment. A rank's own chunk goes to the n -
// 1 others in a gather, and all but its own chunk leaves it in a scatter or an all-to-all; an
// all-reduce scatters and then gathers.
std::int64_t sent_bytes(InstructionKind kind, std::int64_t bytes, std::int64_t element_size, int ranks, int index) {
  switch (kind) {
    case InstructionKind::kernel:
    case InstructionKind::copy:
    case InstructionKind::receive: return 0;
    // The first rank sends to every other one, or each of these sends to it. `bytes`: of the whole
    // on the first rank, of its own on the others.
    case InstructionKind::broadcast: return index == 0 ? (ranks - 1) * bytes : 0;
    case InstructionKind::reduce_sum:
    case InstructionKind::gather: return index == 0 ? 0 : bytes;
    case InstructionKind::scatter: return index == 0 ? bytes - bytes / ranks : 0;
    case InstructionKind::send: return bytes;
    case InstructionKind::all_reduce_sum:
    case InstructionKind::all_reduce_max:
    case InstructionKind::all_gather:
    case InstructionKind::reduce_scatter:
    case InstructionKind::all_to_all: break;
  }
  if (ranks <= 1) return 0;
  PARPLAN_ASSERT(
      index >= 0 && index < ranks && bytes % element_size == 0,
      fmt::format("{} of {} bytes, {} each, by member {} of {}", name(kind), bytes, element_size, index, ranks));
  const std::int64_t elements = bytes / element_size;
  const std::int64_t own =
      (chunk_begin(elements, ranks, index + 1) - chunk_begin(elements, ranks, index)) * element_size;
  const std::int64_t scattered = bytes - own;
  const std::int64_t gathered = (ranks - 1) * own;
  if (kind == InstructionKind::reduce_scatter || kind == InstructionKind::all_to_all) return scattered;
  if (kind == InstructionKind::all_gather) return gathered;
  return scattered + gathered;
}

std::vector<CommunicationVolume> sent_by_segment(const Program& program) {
  std::vector<CommunicationVolume> of_segment;
  for (const Segment& segment : program.segments) {
    CommunicationVolume volume;
    for (const Instruction& instruction : segment.instructions) {
      if (!communicates(instruction.kind)) continue;
      const std::vector<int>& group = program.group(instruction.group);
      const auto at = std::find(group.begin(), group.end(), program.rank) - group.begin();
      volume[instruction.group.axis] +=
          Bytes(sent_bytes(instruction.kind, instruction.operands.back().bytes, size_of(instruction.type),
                           static_cast<int>(group.size()), static_cast<int>(at)));
    }
    of_segment.push_back(volume);
  }
  return of_segment;
}

}  // namespace parplan
