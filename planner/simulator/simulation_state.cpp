#include "planner/simulator/simulation_state.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

// Whether work of other calls is slowed beside a call of this Segment.
bool slows_others(const CostedSegment& segment) {
  return segment.stream != index_of(Stream::compute) &&
         std::ranges::any_of(segment.instructions, [](const CostedInstruction& one) { return one.takes.takes_any(); });
}

// Costs the rank's Segments, and seats those of their instructions that meet others.
std::vector<Playable> playables(const Simulation& simulation, std::span<const Program> programs, int number,
                                const CostModel& model) {
  const std::vector<Segment>& segments = programs[number].segments;
  const Execution execution = simulation.ranks[number].execution;
  // Instructions that meet in one place come from one stream; otherwise their order would depend on
  // timing.
  std::vector<std::optional<Stream>> meeting_stream(simulation.meetings.size());
  std::array<unsigned, stream_count> users{};  // streams whose segments use this stream
  std::vector<char> meets(segments.size(), false);
  std::vector<Playable> all(segments.size());
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    Playable& playable = all[i];
    playable.costed = cost_segment(segment, model);
    playable.splits = {playable.costed.split};
    playable.bound = {playable.costed.bound};
    if (simulation.notes_crossings)
      for (const Instruction& instruction : segment.instructions) {
        playable.by_origin += kernel_time_by_origin(instruction, model);
        playable.collectives += communication_time_by_origin(instruction, model);
      }
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
      playable.posts |=
          execution.posts_sends() && instruction.kind == InstructionKind::send && instruction.stream == segment.stream;
    }
    for (std::size_t s = 0; s < stream_count; ++s)
      if (playable.costed.streams >> s & 1u) users[s] |= 1u << playable.costed.stream;
  }
  for (std::size_t i = 0; i < segments.size(); ++i) {
    Playable& playable = all[i];
    const unsigned own = 1u << playable.costed.stream;
    playable.alone = !meets[i] && playable.costed.computes;
    for (std::size_t s = 0; s < stream_count; ++s)
      if (playable.costed.streams >> s & 1u && s != playable.costed.stream && users[s] != own)
        playable.shared |= 1u << s;
    playable.queues = playable.alone ? own | playable.shared : playable.costed.streams;
  }
  return all;
}

Playable joined(const std::vector<Playable>& segments, const std::vector<int>& in_a_row) {
  Playable all{.costed = {},
               .in_a_row = in_a_row,
               .splits = {},
               .bound = {},
               .by_origin = {},
               .collectives = {},
               .seats = {},
               .alone = true,
               .queues = segments[in_a_row.front()].queues,
               .work = {}};
  all.costed.stream = segments[in_a_row.front()].costed.stream;
  for (const int segment : in_a_row) {
    const Playable& one = segments[segment];
    all.costed.streams |= one.costed.streams;
    all.splits.push_back(one.costed.split);
    all.bound.push_back(one.costed.bound);
  }
  return all;
}

// Joins computations in a row on one stream into one call, where only the first waits and others
// wait for the last alone; not across tasks.
void join_calls(PlayList& list, std::vector<Playable>& segments) {
  const int calls = static_cast<int>(list.calls.size());
  std::vector<char> is_awaited(list.calls.size(), false), starts_task(list.calls.size() + 1, false);
  for (const int wait : list.waits) is_awaited[wait] = true;
  for (const Task& task : list.tasks) starts_task[task.first_call] = starts_task[task.last_call] = true;
  const auto continues = [&](int c) {  // the call before it
    const Playable &one = segments[list.calls[c - 1].segment], &next = segments[list.calls[c].segment];
    if (slows_others(one.costed) || slows_others(next.costed)) return false;
    return one.alone && next.alone && one.shared == 0 && next.shared == 0 && one.costed.stream == next.costed.stream &&
           !starts_task[c] && !is_awaited[c - 1] && list.waits_of(list.calls[c]).empty();
  };
  std::map<std::vector<int>, int> known;
  PlayList shorter{.calls = {}, .waits = {}, .tasks = list.tasks, .sent = list.sent};
  std::vector<int> number(list.calls.size() + 1);  // in `shorter`
  std::vector<int> in_a_row;
  for (int first = 0, end = 0; first < calls; first = end) {
    in_a_row.clear();
    constexpr int longest = std::numeric_limits<decltype(Work::in_a_row)>::max();
    for (end = first; end == first || (end < calls && end - first < longest && continues(end)); ++end)
      in_a_row.push_back(list.calls[end].segment);
    int segment = in_a_row.front();
    if (in_a_row.size() > 1) {
      const auto [join, is_new] = known.try_emplace(in_a_row, static_cast<int>(segments.size()));
      if (is_new) segments.push_back(joined(segments, in_a_row));
      segment = join->second;
    }
    std::fill(number.begin() + first, number.begin() + end, static_cast<int>(shorter.calls.size()));
    const int first_wait = static_cast<int>(shorter.waits.size());
    for (const int wait : list.waits_of(list.calls[first])) shorter.waits.push_back(number[wait]);
    shorter.calls.push_back(
        {.segment = segment, .first_wait = first_wait, .end_wait = static_cast<int>(shorter.waits.size())});
  }
  number.back() = static_cast<int>(shorter.calls.size());
  for (Task& task : shorter.tasks) {
    task.first_call = number[task.first_call];
    task.last_call = number[task.last_call];
  }
  list = std::move(shorter);
}

}  // namespace

Simulation prepare(std::span<const Program> programs, std::span<const CostModel> models, CallsInARow in_a_row,
                   bool notes_crossings) {
  std::vector<PlayList> lists;
  for (const Program& program : programs) lists.push_back(play_list(program));
  return prepare(programs, std::move(lists), models, in_a_row, notes_crossings);
}

Simulation prepare(std::span<const Program> programs, std::vector<PlayList> lists, std::span<const CostModel> models,
                   CallsInARow in_a_row, bool notes_crossings) {
  PARPLAN_ASSERT(!programs.empty() && programs.size() == lists.size() && programs.size() == models.size(),
                 fmt::format("{} programs, {} lists, {} cost models", programs.size(), lists.size(), models.size()));
  const auto pipeline = std::ranges::max(programs, {}, &Program::pipeline_rank).pipeline_rank + 1;
  Simulation simulation{.ranks = std::vector<PlayedRank>(programs.size()),
                        .meetings = make_meetings(programs),
                        .notes_crossings = notes_crossings};
  for (int r = 0; r < static_cast<int>(programs.size()); ++r) {
    PARPLAN_ASSERT(programs[r].pipeline_rank == r % pipeline,
                   fmt::format("program {} is of rank {} of the pipeline", r, programs[r].pipeline_rank));
    PARPLAN_ASSERT(models[r].execution == models[0].execution, fmt::format("rank {} runs unlike rank 0", r));
    PlayedRank& rank = simulation.ranks[r];
    rank.program = &programs[r];
    rank.execution = models[r].execution;
    rank.capacity = models[r].device->memory_capacity;
    rank.list = std::move(lists[r]);
    std::vector<Playable> segments = playables(simulation, programs, r, models[r]);
    for (const Playable& playable : segments)
      if (slows_others(playable.costed)) rank.contends |= 1u << playable.costed.stream;
    for (Playable& playable : segments) {
      const std::size_t stream = playable.costed.stream;
      if (rank.contends == 0 || slows_others(playable.costed)) continue;
      playable.shares_links = stream != index_of(Stream::compute) && playable.costed.bound.is_communication();
      if (playable.shares_links || stream == index_of(Stream::compute)) rank.slowed |= 1u << stream;
    }
    if (in_a_row == CallsInARow::joined) join_calls(rank.list, segments);
    unsigned used = 0;
    for (PlayList::Call& call : rank.list.calls) used |= call.queues = segments[call.segment].queues;
    for (std::size_t s = 0; s < stream_count; ++s)
      if (used >> s & 1u) rank.streams.push_back(s);
    for (Playable& playable : segments)
      playable.work = {.split = playable.splits.data(),
                       .in_a_row = static_cast<std::uint16_t>(playable.splits.size()),
                       .computes = true,
                       .label = Label::compute};
    rank.segments = std::make_shared<const std::vector<Playable>>(std::move(segments));
  }
  return simulation;
}

std::vector<CommunicationVolume> sent_by_segment(const PlayedRank& rank) {
  std::vector<CommunicationVolume> sent = sent_by_segment(*rank.program);
  for (std::size_t g = sent.size(); g < rank.segments->size(); ++g) {
    CommunicationVolume in_a_row;
    for (const int segment : (*rank.segments)[g].in_a_row) in_a_row += sent[segment];
    sent.push_back(in_a_row);
  }
  return sent;
}

Moment last_of(const PlayedRank& rank) {
  Moment last;
  for (const Moment& free : rank.free)
    if (!last.piece || free.time > last.time) last = free;
  return last;
}

}  // namespace parplan
