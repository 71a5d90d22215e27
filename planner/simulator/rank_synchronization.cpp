#include "planner/simulator/rank_synchronization.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

// The position of a rank's Program, if it has one here.
std::optional<int> place_of(std::span<const Program> programs, int rank) {
  const auto found = std::ranges::find(programs, rank, &Program::rank);
  if (found == programs.end()) return std::nullopt;
  return static_cast<int>(found - programs.begin());
}

// Nothing where only replicas of the rank's own kind meet it: they arrive when it does.
std::optional<SeatAt> seat_between_replicas(std::span<const Meeting> meetings, int rank, GroupKey group) {
  for (std::size_t m = 0; m < meetings.size(); ++m) {
    if (meetings[m].group != group || meetings[m].is_channel) continue;
    const auto seat = std::ranges::find(meetings[m].seats, rank, &Seat::rank);
    if (seat != meetings[m].seats.end())
      return SeatAt{.meeting = static_cast<int>(m), .seat = static_cast<int>(seat - meetings[m].seats.begin())};
  }
  return std::nullopt;
}

}  // namespace

std::vector<Meeting> make_meetings(std::span<const Program> programs) {
  std::vector<Meeting> meetings;
  for (int one = 0; one < static_cast<int>(programs.size()); ++one)
    for (const GroupKey direction : {next_stage, next_stage_on_return})
      for (const int next : programs[one].group(direction)) {
        const std::optional<int> other = place_of(programs, next);
        if (!other) continue;
        const auto add = [&](int source, int destination, GroupKey group) {
          meetings.push_back({.name = fmt::format("{} to {}", source, destination),
                              .group = group,
                              .is_channel = true,
                              .seats = {{.rank = source}, {.rank = destination}}});
        };
        add(one, *other, direction);
        add(*other, one, seen_from(direction));
      }
  for (const GroupKey key : {tied_stages, all_along(Axis::pp)})
    for (const Program& program : programs) {
      const std::vector<int>& ranks = program.group(key);
      if (ranks.size() < 2 || ranks.front() != program.rank) continue;
      Meeting meeting{.name = name(key), .group = key};
      for (const int rank : ranks) {
        const std::optional<int> place = place_of(programs, rank);
        PARPLAN_ASSERT(place, fmt::format("rank {} of group {} has no Program", rank, name(key)));
        meeting.seats.push_back({.rank = *place});
      }
      meetings.push_back(std::move(meeting));
    }
  const bool has_replicas =
      std::ranges::any_of(programs, [&](const Program& one) { return one.replica != programs.front().replica; });
  for (const GroupKey key : {all_along(Axis::dp), GroupKey{Axis::dp, Members::shard}, shard_replicas})
    for (int one = 0; one < static_cast<int>(programs.size()) && has_replicas; ++one) {
      Meeting meeting{.name = fmt::format("{} of stage {}", name(key), programs[one].pipeline_rank), .group = key};
      for (const int rank : programs[one].group(key))
        if (const std::optional<int> place = place_of(programs, rank)) meeting.seats.push_back({.rank = *place});
      if (meeting.seats.size() > 1 && meeting.seats.front().rank == one) meetings.push_back(std::move(meeting));
    }
  return meetings;
}

std::optional<SeatAt> seat_of(std::span<const Meeting> meetings, std::span<const Program> programs, int rank,
                              const Instruction& instruction) {
  if (!communicates(instruction.kind)) return std::nullopt;
  if (instruction.group.axis == Axis::dp) return seat_between_replicas(meetings, rank, instruction.group);
  if (instruction.group.axis != Axis::pp) return std::nullopt;
  const bool sends = instruction.kind == InstructionKind::send;
  const bool receives = instruction.kind == InstructionKind::receive;
  const std::vector<int>& ranks = programs[rank].group(instruction.group);
  if (!sends && !receives && ranks.size() < 2) return std::nullopt;
  const GroupKey group = receives ? seen_from(instruction.group) : instruction.group;
  const std::optional<int> peer =
      (sends || receives) && !ranks.empty() ? place_of(programs, ranks.front()) : std::nullopt;
  for (std::size_t m = 0; m < meetings.size(); ++m) {
    const Meeting& meeting = meetings[m];
    if (meeting.group != group || meeting.is_channel != (sends || receives)) continue;
    for (std::size_t seat = 0; seat < meeting.seats.size(); ++seat) {
      if (meeting.seats[seat].rank != rank) continue;
      if (meeting.is_channel && (seat != (sends ? 0 : 1) || meeting.seats[1 - seat].rank != peer)) continue;
      return SeatAt{.meeting = static_cast<int>(m), .seat = static_cast<int>(seat)};
    }
  }
  PARPLAN_ASSERT(false, fmt::format("rank {} of the pipeline has nobody to meet for {} with group {}", rank,
                                    name(instruction.kind), name(instruction.group)));
  return std::nullopt;
}

bool arrive(Meeting& meeting, int seat, Moment ready, Seconds duration) {
  Seat& own = meeting.seats[seat];
  own.arrival = Arrival::arrived;
  own.ready = ready;
  own.duration = duration;
  if (++meeting.arrived < static_cast<int>(meeting.seats.size())) return false;
  // A transfer takes the time of the sender's links; a collective takes the time of its slowest
  // member.
  meeting.arrived = 0;
  meeting.duration = meeting.seats[0].duration;
  meeting.last = meeting.seats[0];
  for (Seat& other : meeting.seats) {
    if (other.ready.time > meeting.last.ready.time) meeting.last = other;
    if (!meeting.is_channel) meeting.duration = std::max(meeting.duration, other.duration);
    other.arrival = Arrival::served;
  }
  meeting.start = meeting.last.ready.time;
  return true;
}

}  // namespace parplan
