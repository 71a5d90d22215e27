#include "planner/simulator/play_calls.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <span>
#include <vector>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/simulator/deadlock.h"

namespace parplan {
namespace {

void note_crossing(const Simulation& simulation, PlayedRank& rank, int piece, int other, std::optional<int> cause) {
  if (simulation.notes_crossings) rank.crossings.push_back({.piece = piece, .rank = other, .cause = cause});
}

// A piece that waits for partners, if any, and for its stream.
struct Candidate {
  const CostedInstruction& instruction;
  int call = 0;
  int piece = 0;
  Moment ready;
};

void settle(PlayedRank& rank, const Candidate& candidate, Seconds start, Seconds duration) {
  rank.pieces[candidate.piece] = {.start = start,
                                  .end = start + duration,
                                  .cause = candidate.ready.piece,
                                  .work = candidate.instruction.work,
                                  .progress = Progress::done};
  rank.free[candidate.instruction.stream] = {.time = start + duration, .piece = candidate.piece};
}

// What slows a call that starts then on a stream: collectives of calls that were launched before
// it, however far ranks have been played.
std::span<const InFlight> in_flight_beside(PlayedRank& rank, std::size_t stream, int call, Seconds start) {
  std::vector<InFlight>& in_flight = rank.in_flight[stream];
  if (in_flight.empty()) return {};
  std::erase_if(in_flight, [&](const InFlight& one) { return one.end <= start; });
  const auto later =
      std::stable_partition(in_flight.begin(), in_flight.end(), [&](const InFlight& one) { return one.call < call; });
  return {in_flight.begin(), later};
}

// The duration of work that starts then, beside what earlier calls left in flight on its rank.
Seconds beside_earlier_calls(PlayedRank& rank, std::size_t stream, int call, Seconds start, Seconds duration,
                             const BoundTimes& bound) {
  const std::span<const InFlight> beside = in_flight_beside(rank, stream, call, start);
  if (beside.empty() || duration <= Seconds(0.0)) return duration;
  return end_beside(beside, start, duration, bound) - start;
}

// `stream`: of the collective. Work other than kernels is slowed by those of the data axis.
void put_in_flight(PlayedRank& rank, std::size_t stream, const InFlight& one) {
  for (const std::size_t s : rank.streams)
    if (rank.slowed >> s & 1u && (s == index_of(Stream::compute) || stream == index_of(Stream::dp)))
      rank.in_flight[s].push_back(one);
}

// Posts a send: it ends when the receiver has taken it.
void post(PlayedRank& rank, Meeting& channel, const Candidate& candidate) {
  const Moment at = candidate.ready;
  channel.posted.push_back({.ready = at.time, .duration = candidate.instruction.duration, .piece = candidate.piece});
  rank.pieces[candidate.piece] = {
      .start = at.time, .cause = at.piece, .work = candidate.instruction.work, .progress = Progress::posted};
  Moment& free = rank.free[candidate.instruction.stream];
  free = later(free, at);
}

// Takes what was posted, if anything was.
bool take(const Simulation& simulation, PlayedRank& rank, PlayedRank& sender, Meeting& channel,
          const Candidate& candidate) {
  if (channel.taken == channel.posted.size()) return false;
  const Meeting::Posted& posted = channel.posted[channel.taken++];
  const Moment at = candidate.ready;
  const Seconds start = std::max(at.time, posted.ready);
  settle(rank, candidate, start,
         beside_earlier_calls(rank, candidate.instruction.stream, candidate.call, start, posted.duration,
                              candidate.instruction.bound));
  const Played& received = rank.pieces[candidate.piece];
  Played& sent = sender.pieces[posted.piece];
  if (posted.ready > at.time) note_crossing(simulation, rank, candidate.piece, channel.seats[0].rank, sent.cause);
  if (at.time > posted.ready) note_crossing(simulation, sender, posted.piece, channel.seats[1].rank, received.cause);
  sent.start = received.start;
  sent.end = received.end;
  sent.progress = Progress::done;
  return true;
}

// A transfer is as slow as at the end where collectives leave it less.
void slow_transfer(Simulation& simulation, Meeting& meeting) {
  const Seconds alone = meeting.duration;
  for (const Seat& seat : meeting.seats)
    meeting.duration = std::max(meeting.duration, beside_earlier_calls(simulation.ranks[seat.rank], seat.stream,
                                                                       seat.call, meeting.start, alone,
                                                                       meeting.seats.front().bound));
}

// True once the instruction is done or posted, so that its stream may continue.
bool meet(Simulation& simulation, PlayedRank& rank, SeatAt where, const Candidate& candidate) {
  Meeting& meeting = simulation.meetings[where.meeting];
  if (meeting.is_channel && rank.execution.posts_sends()) {
    PlayedRank& partner = simulation.ranks[meeting.seats[1 - where.seat].rank];
    if (where.seat == 0)
      post(rank, meeting, candidate);
    else if (!take(simulation, rank, partner, meeting, candidate))
      return false;
    partner.runnable = true;
    return true;
  }
  Seat& seat = meeting.seats[where.seat];
  if (seat.arrival == Arrival::absent) {
    seat.call = candidate.call;
    seat.stream = candidate.instruction.stream;
    seat.bound = candidate.instruction.bound;
    if (arrive(meeting, where.seat, candidate.ready, candidate.instruction.duration)) {
      if (meeting.is_channel) slow_transfer(simulation, meeting);
      for (const Seat& other : meeting.seats) simulation.ranks[other.rank].runnable = true;
    }
  }
  if (seat.arrival != Arrival::served) return false;
  seat.arrival = Arrival::absent;
  settle(rank, candidate, meeting.start, meeting.duration);
  if (meeting.start > candidate.ready.time)
    note_crossing(simulation, rank, candidate.piece, meeting.last.rank, meeting.last.ready.piece);
  return true;
}

// Whether all that a call submitted has ended by now.
bool is_complete(PlayedRank& rank, int number) {
  PlayedCall& call = rank.calls[number];
  if (call.complete) return true;
  // Left open by a call with posted sends: complete once all of them are taken.
  const Playable& playable = rank.segment_of(number);
  if (!playable.posts || number >= rank.head[0]) return false;
  Moment last;
  for (int i = call.first; i < call.first + static_cast<int>(playable.costed.instructions.size()); ++i) {
    const Played& one = rank.pieces[i];
    if (!one.done()) return false;
    if (!last.piece || one.end > last.time) last = {.time = one.end, .piece = i};
  }
  call.end = last;
  call.complete = true;
  return true;
}

// Whether all collectives of earlier calls that may slow this one have been played: of any stream
// where it computes, of the data axis where it shares links. The latter wait for work of earlier
// calls alone. Those of other axes may be behind a receive, whose sender waits for this call.
bool knows_in_flight(const PlayedRank& rank, int number, bool computes) {
  constexpr unsigned of_data = 1u << index_of(Stream::dp);
  for (unsigned left = computes ? rank.contends : rank.contends & of_data; left != 0; left &= left - 1)
    if (rank.head[static_cast<std::size_t>(std::countr_zero(left))] < number) return false;
  return true;
}

// When what the call waits for is complete, not before `from`.
std::optional<Moment> ready(PlayedRank& rank, const PlayList::Call& call, Moment from) {
  for (const int wait : rank.list.waits_of(call)) {
    if (!is_complete(rank, wait)) return std::nullopt;
    from = later(from, rank.calls[wait].end);
  }
  return from;
}

bool idle(const PlayedRank& rank, unsigned streams, Seconds time) {
  for (const std::size_t s : rank.streams)
    if (streams >> s & 1u && rank.free[s].time > time) return false;
  return true;
}

void finish_call(PlayedRank& rank, int number, const Playable& playable, Moment end) {
  Moment& free = rank.free[playable.costed.stream];
  free = later(free, end);
  for (const std::size_t s : rank.streams)
    if (playable.queues >> s & 1u) rank.head[s] = rank.list.next_on(s, number + 1);
  if (playable.posts) return;
  // The whole piece, where a side stream of it is all that the call waited for.
  if (end.piece) end.time = rank.pieces[*end.piece].end;
  rank.calls[number].end = end;
  rank.calls[number].complete = true;
}

void play_whole(PlayedRank& rank, int number, const Playable& playable, Moment start) {
  const int piece = static_cast<int>(rank.pieces.size());
  const bool is_slowed = playable.costed.stream == index_of(Stream::compute);
  const std::span<const InFlight> beside =
      is_slowed ? in_flight_beside(rank, index_of(Stream::compute), number, start.time) : std::span<const InFlight>();
  Seconds end = start.time, alone = start.time;
  for (std::size_t i = 0; i < playable.splits.size(); ++i) {
    const Seconds duration = playable.splits[i].duration;
    alone += duration;
    end = beside.empty() ? end + duration : end_beside(beside, end, duration, playable.bound[i]);
  }
  if (!is_slowed && rank.contends != 0)
    for (std::size_t i = 0; i < playable.costed.alone.size(); ++i)
      if (const CostedInstruction& one = playable.costed.instructions[i]; one.takes.takes_any())
        put_in_flight(rank, playable.costed.stream,
                      {.start = start.time + playable.costed.alone[i].end - one.duration,
                       .end = start.time + playable.costed.alone[i].end,
                       .takes = one.takes,
                       .call = number});
  rank.pieces.push_back({.start = start.time,
                         .end = end,
                         .cause = start.piece,
                         .work = playable.work,
                         .progress = Progress::done,
                         .slowed = end > alone});
  const double longer = end > alone ? (end - start.time) / (alone - start.time) : 1.0;
  for (std::size_t i = 0; i < playable.costed.alone.size() && playable.shared != 0; ++i)
    if (const std::size_t side = playable.costed.instructions[i].stream; playable.shared >> side & 1u)
      rank.free[side] = {.time = start.time + longer * playable.costed.alone[i].end, .piece = piece};
  finish_call(rank, number, playable, {.time = end, .piece = piece});
}

// The duration of an instruction that meets nobody. Collectives of calls of their own slow later
// calls; what slows kernels within a call is known beforehand (cost_segment).
Seconds beside_others(PlayedRank& rank, int call, const Playable& playable, const CostedInstruction& instruction,
                      Seconds start) {
  const std::size_t stream = playable.costed.stream;
  if (stream == index_of(Stream::compute) || playable.shares_links)
    return instruction.stream != stream ? instruction.duration
                                        : beside_earlier_calls(rank, stream, call, start, instruction.duration,
                                                               instruction.bound);
  if (instruction.takes.takes_any())
    put_in_flight(rank, stream,
                  {.start = start, .end = start + instruction.duration, .takes = instruction.takes, .call = call});
  return instruction.duration;
}

// True once the call is over.
bool play_instructions(Simulation& simulation, PlayedRank& rank, int call, const Playable& playable, Running& running) {
  const int first = rank.calls[call].first;
  const std::vector<CostedInstruction>& instructions = playable.costed.instructions;
  Played* const pieces = rank.pieces.data() + first;
  unsigned blocked = 0;
  bool all = true;
  for (std::size_t i = running.first_open; i < instructions.size(); ++i) {
    if (pieces[i].progress != Progress::waiting) continue;
    const CostedInstruction& instruction = instructions[i];
    if (!(blocked >> instruction.stream & 1u)) {
      Moment at = later(running.fork, rank.free[instruction.stream]);
      bool met = true;
      for (const int wait : instruction.waits) {
        const Played& awaited = pieces[wait];
        met &= awaited.done();
        if (met) at = later(at, {.time = awaited.end, .piece = first + wait});
      }
      const Candidate candidate{
          .instruction = instruction, .call = call, .piece = first + static_cast<int>(i), .ready = at};
      if (met && !playable.seats[i]) {
        const Seconds submitted = running.fork.time + instruction.submitted;
        const Seconds held = std::max(submitted - at.time, Seconds(0.0));
        Seconds duration = instruction.duration;
        if (rank.contends != 0) duration = beside_others(rank, call, playable, instruction, at.time + held);
        settle(rank, candidate, at.time, held + duration);
        continue;
      }
      if (met && meet(simulation, rank, *playable.seats[i], candidate)) continue;
      blocked |= 1u << instruction.stream;
    }
    if (all) running.first_open = i;
    all = false;
  }
  if (!all) return false;
  // The streams join, and with them posted sends on side streams.
  Moment end = later(running.fork, rank.free[playable.costed.stream]);
  for (std::size_t i = 0; i < instructions.size(); ++i) {
    if (pieces[i].done())
      end = later(end, {.time = pieces[i].end, .piece = first + static_cast<int>(i)});
    else if (!playable.posts)
      return false;
  }
  running.active = false;
  finish_call(rank, call, playable, end);
  return true;
}

// Advances the call at the head of a stream, if this is the call's own stream; true once the call
// is over.
bool advance_stream(Simulation& simulation, PlayedRank& rank, std::size_t stream) {
  const int number = rank.head[stream];
  const PlayList::Call& call = rank.list.calls[number];
  const Playable& playable = rank.segment_of(number);
  if (playable.costed.stream != stream) return false;
  Running& running = rank.running[stream];
  if (!running.active) {
    for (const std::size_t other : rank.streams)
      if (playable.queues >> other & 1u && rank.head[other] != number) return false;
    const bool computes = stream == index_of(Stream::compute);
    if (rank.contends != 0 && (computes || playable.shares_links) && !simulation.starts_regardless &&
        !knows_in_flight(rank, number, computes))
      return false;
    const std::optional<Moment> start = ready(rank, call, rank.free[stream]);
    if (!start) return false;
    const bool whole = playable.alone && idle(rank, playable.shared, start->time);
    rank.calls[number].first = static_cast<int>(rank.pieces.size());
    rank.calls[number].whole = whole;
    if (whole) {
      play_whole(rank, number, playable, *start);
      return true;
    }
    rank.pieces.resize(rank.pieces.size() + playable.costed.instructions.size());
    running = {.active = true, .fork = *start, .first_open = 0};
  }
  return play_instructions(simulation, rank, number, playable, running);
}

// Plays as far as possible without other ranks.
bool advance_rank(Simulation& simulation, PlayedRank& rank) {
  const int end = rank.calls_to_play.value_or(static_cast<int>(rank.list.calls.size()));
  bool any = false;
  for (bool progress = true; progress; any |= progress) {
    progress = false;
    // Where collectives slow kernels, they come first: what is in flight must be known.
    for (std::size_t i = 0; i < rank.streams.size(); ++i) {
      const std::size_t s = rank.contends != 0 ? rank.streams[rank.streams.size() - 1 - i] : rank.streams[i];
      while (rank.head[s] < end && advance_stream(simulation, rank, s)) {
        progress = true;
        if (rank.contends != 0 && s == index_of(Stream::compute)) break;
      }
    }
  }
  return any;
}

}  // namespace

namespace {

// Plays until no rank gets any further.
void advance_all(Simulation& simulation) {
  for (PlayedRank& rank : simulation.ranks) rank.runnable = true;
  for (bool progress = true; progress;) {
    progress = false;
    for (PlayedRank& rank : simulation.ranks) {
      if (!rank.runnable) continue;
      rank.runnable = false;
      progress |= advance_rank(simulation, rank);
    }
    for (const PlayedRank& rank : simulation.ranks) progress |= rank.runnable;
  }
}

bool all_is_played(const Simulation& simulation) {
  return std::ranges::all_of(simulation.ranks, [](const PlayedRank& rank) {
    const int calls = static_cast<int>(rank.list.calls.size());
    return std::ranges::all_of(rank.streams, [&](std::size_t s) { return rank.head[s] == calls; });
  });
}

}  // namespace

void play_on(Simulation& simulation) {
  for (PlayedRank& rank : simulation.ranks) {
    rank.calls.resize(rank.list.calls.size());
    rank.pieces.reserve(rank.list.calls.size());
    for (const std::size_t s : rank.streams) rank.head[s] = rank.list.next_on(s, rank.head[s]);
  }
  advance_all(simulation);
}

void play_calls(Simulation& simulation) {
  play_on(simulation);
  if (!all_is_played(simulation)) {
    simulation.starts_regardless = true;
    advance_all(simulation);
  }
  if (!all_is_played(simulation)) report_deadlock(simulation);
  for (const Meeting& meeting : simulation.meetings)
    PARPLAN_ASSERT(meeting.taken == meeting.posted.size(),
                   fmt::format("rank {}: {} sends, {} receives", meeting.name, meeting.posted.size(), meeting.taken));
}

}  // namespace parplan
