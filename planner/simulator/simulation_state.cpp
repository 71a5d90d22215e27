#include "planner/simulator/simulation_state.h"

#include <algorithm>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

// Costs the rank's Segments, and seats those of their instructions that meet others.
void prepare_segments(Simulation& simulation, std::span<const Program> programs, int number, const CostModel& model) {
  PlayedRank& rank = simulation.ranks[number];
  const std::vector<Segment>& segments = programs[number].segments;
  // Instructions that meet in one place come from one stream; otherwise their order would depend on
  // timing.
  std::vector<std::optional<Stream>> meeting_stream(simulation.meetings.size());
  std::array<unsigned, stream_count> users{};  // streams whose segments use this stream
  std::vector<char> meets(segments.size(), false);
  rank.segments.resize(segments.size());
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    Playable& playable = rank.segments[i];
    playable.costed = cost_segment(segment, model);
    for (const Instruction& instruction : segment.instructions) {
      const std::optional<SeatAt> seat = seat_of(simulation.meetings, programs, number, instruction);
      playable.seats.push_back(seat);
      if (!seat) continue;
      meets[i] = true;
      std::optional<Stream>& stream = meeting_stream[seat->meeting];
      PARPLAN_ASSERT(
          !stream || stream == instruction.stream,
          fmt::format("rank {} meets at '{}' on two streams", number, simulation.meetings[seat->meeting].name));
      stream = instruction.stream;
      playable.posts |= rank.execution == Execution::sequential && instruction.kind == InstructionKind::send &&
                        instruction.stream == segment.stream;
    }
    for (std::size_t s = 0; s < stream_count; ++s)
      if (playable.costed.streams >> s & 1u) users[s] |= 1u << playable.costed.stream;
  }
  for (std::size_t i = 0; i < segments.size(); ++i) {
    Playable& playable = rank.segments[i];
    const unsigned own = 1u << playable.costed.stream;
    playable.alone = !meets[i] && playable.costed.computes;
    for (std::size_t s = 0; s < stream_count; ++s)
      if (playable.costed.streams >> s & 1u && s != playable.costed.stream && users[s] != own)
        playable.shared |= 1u << s;
    playable.queues = playable.alone ? own | playable.shared : playable.costed.streams;
    playable.work = {.split = &playable.costed.split, .computes = true, .label = Label::compute};
  }
}

// Queues the rank's calls on the streams that they use.
void queue_calls(Simulation& simulation, int number) {
  PlayedRank& rank = simulation.ranks[number];
  const Program& program = *rank.program;
  std::array<std::size_t, stream_count> calls_on{};
  std::vector<std::size_t> posts_at(simulation.meetings.size(), 0);
  rank.calls.resize(program.calls.size());
  rank.event_recorder.resize(static_cast<std::size_t>(program.events));
  rank.event_complete.resize(static_cast<std::size_t>(program.events));
  rank.event_end.resize(static_cast<std::size_t>(program.events));
  std::size_t pieces = 0;
  for (std::size_t c = 0; c < program.calls.size(); ++c) {
    const Call& call = program.calls[c];
    const Playable& playable = rank.segment_of(c);
    pieces += playable.alone ? 1 : playable.costed.instructions.size();
    for (std::size_t s = 0; s < stream_count; ++s)
      if (playable.queues >> s & 1u) ++calls_on[s];
    for (const int event : call.waits)
      PARPLAN_ASSERT(
          rank.event_recorder[event].has_value(),
          fmt::format("rank {}: call {} waits for event {}, which no earlier call records", number, c, event));
    if (call.records) rank.event_recorder[*call.records] = static_cast<int>(c);
    if (rank.execution == Execution::sequential)
      for (const std::optional<SeatAt>& seat : playable.seats)
        if (seat && seat->seat == 0) ++posts_at[seat->meeting];
  }
  rank.pieces.reserve(pieces);
  for (std::size_t s = 0; s < stream_count; ++s) {
    rank.queue[s].reserve(calls_on[s]);
    if (calls_on[s] > 0) rank.streams.push_back(s);
  }
  for (std::size_t c = 0; c < program.calls.size(); ++c) {
    const Playable& playable = rank.segment_of(c);
    for (const std::size_t s : rank.streams)
      if (playable.queues >> s & 1u) rank.queue[s].push_back(static_cast<int>(c));
  }
  for (std::size_t m = 0; m < simulation.meetings.size(); ++m) {
    std::vector<Meeting::Posted>& posted = simulation.meetings[m].posted;
    if (posts_at[m] > 0) posted.reserve(std::max(posted.capacity(), posts_at[m]));
  }
}

}  // namespace

Simulation prepare(std::span<const Program> programs, std::span<const CostModel> models, bool notes_crossings) {
  PARPLAN_ASSERT(!programs.empty() && programs.size() == models.size(),
                 fmt::format("{} programs, {} cost models", programs.size(), models.size()));
  Simulation simulation{.ranks = std::vector<PlayedRank>(programs.size()),
                        .meetings = make_meetings(programs),
                        .notes_crossings = notes_crossings};
  for (int r = 0; r < static_cast<int>(programs.size()); ++r) {
    PARPLAN_ASSERT(programs[r].pipeline_rank == r,
                   fmt::format("program {} is of rank {} of the pipeline", r, programs[r].pipeline_rank));
    PARPLAN_ASSERT(execution_of(models[r]) == execution_of(models[0]), fmt::format("rank {} runs unlike rank 0", r));
    PlayedRank& rank = simulation.ranks[r];
    rank.program = &programs[r];
    rank.execution = execution_of(models[r]);
    rank.capacity = models[r].device->memory_capacity;
    prepare_segments(simulation, programs, r, models[r]);
    queue_calls(simulation, r);
  }
  return simulation;
}

Moment last_of(const PlayedRank& rank) {
  Moment last;
  for (const Moment& free : rank.free)
    if (!last.piece || free.time > last.time) last = free;
  return last;
}

}  // namespace parplan
