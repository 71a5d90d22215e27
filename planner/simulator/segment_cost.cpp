#include "planner/simulator/segment_cost.h"

#include <algorithm>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

// By event: the instruction that records it.
std::vector<std::optional<int>> recorders(const Segment& segment) {
  std::vector<std::optional<int>> recorder(static_cast<std::size_t>(segment.events));
  for (std::size_t i = 0; i < segment.instructions.size(); ++i)
    if (const auto event = segment.instructions[i].records) recorder[*event] = static_cast<int>(i);
  return recorder;
}

}  // namespace

namespace {

// Seconds of one kernel.
BoundTimes bound_times(const Instruction& instruction, Seconds duration) {
  return needs_multiprocessors(instruction) ? BoundTimes{.multiprocessors = duration, .memory = {}}
                                            : BoundTimes{.multiprocessors = {}, .memory = duration};
}

CostedSegment cost(const Segment& segment, Execution execution, Seconds host_per_op, bool lists_updates,
                   const std::function<Seconds(const Instruction&)>& duration_of, const CostModel* contending) {
  const std::vector<std::optional<int>> recorder = recorders(segment);
  CostedSegment costed;
  costed.stream = execution.stream_of(segment.stream);
  costed.streams = 1u << costed.stream;

  std::array<Seconds, stream_count> free;
  std::array<std::optional<int>, stream_count> last_on;
  std::vector<InFlight> in_flight;
  costed.instructions.reserve(segment.instructions.size());
  double ops = 0.0;   // that the host has submitted
  Seconds submission;  // of them, beyond what each op takes
  for (std::size_t i = 0; i < segment.instructions.size(); ++i) {
    const Instruction& instruction = segment.instructions[i];
    const bool posted = execution.is_posted(instruction);
    // Ranks of the pipeline meet (rank_synchronization.h), and know what a posted send takes; those
    // of other axes do the same at the same time, and the receiver copies.
    const bool meets_nobody = instruction.group.axis != Axis::pp;
    const double own = submissions(instruction, lists_updates);
    ops += own;
    submission += instruction.submission;
    const Seconds duration = posted && meets_nobody ? Seconds() : duration_of(instruction);
    // The last of its kernels, which is taken for as long as each, runs behind the host.
    Seconds before_last = own > 1.0 ? std::min(duration, host_per_op * own) * ((own - 1.0) / own) : Seconds();
    // Likewise the pieces of a kernel, of which there are many.
    if (instruction.kind == InstructionKind::kernel)
      before_last += std::min(duration - before_last, instruction.submission);
    CostedInstruction one{
        .duration = duration,
        .submitted = host_per_op * ops + submission - before_last,
        .stream = execution.stream_of(instruction.stream),
        .waits = {},
        .work = {.computes = instruction.kind == InstructionKind::kernel, .label = instruction.label}};
    costed.streams |= 1u << one.stream;
    costed.computes |= one.work.computes;
    Played piece{.start = free[one.stream], .cause = last_on[one.stream], .work = one.work, .progress = Progress::done};
    for (const int event : instruction.waits) {
      const std::optional<int> wait = recorder[event];
      PARPLAN_ASSERT(wait && *wait < static_cast<int>(i),
                     fmt::format("segment '{}': instruction {} waits for event {}, recorded by {}", segment.name, i,
                                 event, wait ? fmt::format("{}", *wait) : "none"));
      one.waits.push_back(*wait);
      const Played& awaited = costed.alone[*wait];
      if (awaited.end > piece.start) {
        piece.start = awaited.end;
        piece.cause = wait;
      }
    }
    // A stream that waits for the host is as good as busy.
    const Seconds begin = std::max(piece.start, one.submitted);
    if (contending != nullptr) {
      one.takes = contention(instruction, one.duration, *contending);
      if (one.takes.takes_any())
        in_flight.push_back({.start = begin, .end = begin + one.duration, .takes = one.takes});
      if (one.work.computes && instruction.stream == segment.stream) {
        if (!in_flight.empty() && one.duration > Seconds(0.0)) {
          const BoundTimes alone = bound_times(instruction, one.duration);
          one.duration = end_beside(in_flight, begin, one.duration, alone) - begin;
        }
        one.bound = bound_times(instruction, one.duration);
      } else if (!one.work.computes && one.stream == costed.stream) {
        one.bound = time_on_links(instruction, one.duration, *contending);
      }
      costed.bound = costed.bound + one.bound;
    }
    piece.end = begin + (posted ? Seconds() : one.duration);
    free[one.stream] = piece.end;
    last_on[one.stream] = static_cast<int>(i);
    if (!costed.last || piece.end > costed.duration) {
      costed.last = static_cast<int>(i);
      costed.duration = piece.end;
    }
    costed.alone.push_back(piece);
    costed.instructions.push_back(std::move(one));
  }
  costed.split = attribute(costed.alone, costed.last);
  costed.parts = sum(costed.split);
  return costed;
}

}  // namespace

Seconds end_beside(std::span<const InFlight> in_flight, Seconds start, Seconds duration, const BoundTimes& bound) {
  if (duration <= Seconds(0.0)) return start;
  Seconds at = start, left = duration;  // left of it, as it would take alone
  while (true) {
    Contention taken;
    std::optional<Seconds> until;
    for (const InFlight& one : in_flight) {
      if (one.start <= at && one.end > at) taken = taken + one.takes;
      for (const Seconds change : {one.start, one.end})
        if (change > at && (!until || change < *until)) until = change;
    }
    if (!taken.takes_any() && (!until || at + left <= *until)) return at + left;
    const double longer = 1.0 + slowed_by(bound, taken) / duration;
    if (!until || at + left * longer <= *until) return at + left * longer;
    left -= (*until - at) / longer;
    at = *until;
  }
}

CostedSegment cost_segment(const Segment& segment, const CostModel& model) {
  const auto duration_of = [&](const Instruction& instruction) { return duration(instruction, model); };
  return cost(segment, model.execution, model.host_per_op, model.lists_updates, duration_of, &model);
}

CostedSegment cost_segment(const Segment& segment, Execution execution, Seconds host_per_op,
                           const std::function<Seconds(const Instruction&)>& duration_of) {
  return cost(segment, execution, host_per_op, false, duration_of, nullptr);
}

}  // namespace parplan
