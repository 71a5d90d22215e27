#include "planner/simulator/deadlock.h"

#include <string>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/base/text.h"

namespace parplan {
namespace {

const std::string& segment_name(const PlayedRank& rank, int call) { return rank.program_segment_of(call).name; }

// Why a call has not begun.
std::string wait_before(const PlayedRank& rank, int call) {
  for (const int wait : rank.list.waits_of(rank.list.calls[call]))
    if (!rank.calls[wait].complete) return fmt::format("waits for call {} '{}'", wait, segment_name(rank, wait));
  return "waits for a side stream";
}

// Why a call that has begun does not go on.
std::string wait_within(const Simulation& simulation, const PlayedRank& rank, int call) {
  std::size_t open = 0;
  while (rank.pieces[rank.calls[call].first + open].done()) ++open;
  const std::optional<SeatAt> where = rank.segment_of(call).seats[open];
  if (!where) return fmt::format("waits for events of instruction {}", open);
  const InstructionKind kind = rank.program_segment_of(call).instructions[open].kind;
  return fmt::format("waits in '{}' for {}", simulation.meetings[where->meeting].name,
                     kind == InstructionKind::send      ? "a receive"
                     : kind == InstructionKind::receive ? "a send"
                                                        : "the others");
}

}  // namespace

void report_deadlock(const Simulation& simulation) {
  std::vector<std::string> waits;
  for (const PlayedRank& rank : simulation.ranks)
    for (const std::size_t s : rank.streams) {
      const int call = rank.head[s];
      if (call == static_cast<int>(rank.list.calls.size())) continue;
      if (rank.segment_of(call).costed.stream != s) continue;
      const std::string reason =
          rank.running[s].active ? wait_within(simulation, rank, call) : wait_before(rank, call);
      waits.push_back(
          fmt::format("rank {} call {} '{}' {}", rank.program->pipeline_rank, call, segment_name(rank, call), reason));
    }
  throw InternalError("the programs block one another: " + join(waits, "; "));
}

}  // namespace parplan
