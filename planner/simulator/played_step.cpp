#include "planner/simulator/played_step.h"

#include <algorithm>
#include <optional>

namespace parplan {
namespace {

// The pieces of one rank, with those that were played whole split into their instructions.
std::vector<Played> taken_apart(const PlayedRank& rank) {
  constexpr int within = -2;  // a cause inside the same whole: within - part
  std::vector<Played> apart;
  std::vector<int> first_part(rank.pieces.size());
  std::vector<const CostedSegment*> whole(rank.pieces.size(), nullptr);
  for (std::size_t c = 0; c < rank.calls.size(); ++c) {
    const CostedSegment& costed = rank.segment_of(c).costed;
    const CallPieces call = rank.calls[c];
    const auto piece = static_cast<std::size_t>(call.first);
    const int first = static_cast<int>(apart.size());
    if (call.whole) {
      whole[piece] = &costed;
      first_part[piece] = first;
    }
    for (std::size_t i = 0; i < costed.instructions.size(); ++i) {
      if (!call.whole) {
        first_part[piece + i] = static_cast<int>(apart.size());
        apart.push_back(rank.pieces[piece + i]);
        continue;
      }
      Played part = costed.alone[i];
      part.start += rank.pieces[piece].start;
      part.end += rank.pieces[piece].start;
      part.cause = part.cause >= 0 ? within - (first + part.cause) : rank.pieces[piece].cause;
      apart.push_back(part);
    }
  }
  for (Played& part : apart) {
    if (part.cause <= within) {
      part.cause = within - part.cause;
    } else if (part.cause >= 0) {
      const auto cause = static_cast<std::size_t>(part.cause);
      part.cause = first_part[cause];
      if (whole[cause] == nullptr) continue;
      // The part that ended last; for a whole that goes on during this piece, the last part that
      // had ended.
      const Played* begin = &apart[first_part[cause]];
      int best = whole[cause]->last;
      if (begin[best].end > part.start)
        for (int i = best = 0; i < static_cast<int>(whole[cause]->alone.size()); ++i)
          if (begin[i].end <= part.start && (begin[best].end > part.start || begin[i].end > begin[best].end)) best = i;
      part.cause += best;
    }
  }
  return apart;
}

// Whether something else computed during a piece that was played whole, so that its inner gaps may
// have been used.
bool overlaps(const std::vector<Played>& pieces) {
  Seconds covered;
  for (const Played& piece : pieces) {
    if (!piece.work.computes) continue;
    if (piece.start < covered) return true;
    covered = piece.end;
  }
  return false;
}

// The filled share of a rank's device at its peak.
double filled_share(const PlayedRank& rank) {
  return static_cast<double>(rank.program->memory.peak().count) /
         static_cast<double>(std::max<std::int64_t>(rank.capacity.count, 1));
}

// By call: the stage of the task that it belongs to; nothing outside actions.
std::vector<std::optional<int>> stages_of_calls(const Program& program) {
  std::vector<std::optional<int>> stages(program.calls.size());
  for (const Task& task : program.tasks)
    if (task.action)
      std::fill(stages.begin() + task.first_call, stages.begin() + task.last_call, task.action->stage);
  return stages;
}

}  // namespace

StepTime time_of(const PlayedRank& rank) {
  const Moment end = last_of(rank);
  if (end.piece < 0) return {};
  if (!overlaps(rank.pieces)) return sum(attribute(rank.pieces, end.piece));
  const std::vector<Played> apart = taken_apart(rank);
  int last = 0;
  for (int i = 0; i < static_cast<int>(apart.size()); ++i)
    if (apart[i].end > apart[last].end) last = i;
  return sum(attribute(apart, last));
}

StepResult result_of(const Simulation& simulation) {
  StepResult result;
  const PlayedRank* slowest = nullptr;
  std::int64_t most_sent = -1;
  double fullest = -1.0;
  for (const PlayedRank& rank : simulation.ranks) {
    if (slowest == nullptr || last_of(rank).time > last_of(*slowest).time) slowest = &rank;
    const CommunicationVolume& volume = rank.program->communication;
    const std::int64_t sent = sum(volume).count;
    if (sent > most_sent) {
      most_sent = sent;
      result.communication = volume;
    }
    if (const double filled = filled_share(rank); filled > fullest) {
      fullest = filled;
      result.memory = rank.program->memory;
      result.memory_stage = rank.program->pipeline_rank;
    }
  }
  result.time = time_of(*slowest);
  return result;
}

std::vector<RankResult> rank_results(const Simulation& simulation) {
  std::vector<RankResult> results;
  for (const PlayedRank& rank : simulation.ranks)
    results.push_back({.time = time_of(rank),
                       .memory = rank.program->memory,
                       .communication = rank.program->communication});
  return results;
}

std::vector<CallEnds> call_ends(const Simulation& simulation) {
  std::vector<CallEnds> all;
  for (const PlayedRank& rank : simulation.ranks) {
    CallEnds& ends = all.emplace_back();
    for (std::size_t c = 0; c < rank.calls.size(); ++c) {
      ends.first.push_back(ends.times.size());
      const auto first = static_cast<std::size_t>(rank.calls[c].first);
      for (std::size_t i = 0; i < rank.pieces_of(c); ++i) ends.times.push_back(rank.pieces[first + i].end);
    }
    ends.first.push_back(ends.times.size());
  }
  return all;
}

void write(const Simulation& simulation, Timeline& timeline) {
  for (const PlayedRank& rank : simulation.ranks) {
    const std::vector<std::optional<int>> stages = stages_of_calls(*rank.program);
    for (std::size_t c = 0; c < rank.program->calls.size(); ++c) {
      const Call& call = rank.program->calls[c];
      const Segment& segment = rank.program->segments[call.segment];
      const Playable& playable = rank.segment_of(c);
      const CallPieces pieces = rank.calls[c];
      for (std::size_t i = 0; i < segment.instructions.size(); ++i) {
        const Played& own = rank.pieces[static_cast<std::size_t>(pieces.first) + (pieces.whole ? 0 : i)];
        const Played& part = playable.costed.alone[i];
        const Instruction& instruction = segment.instructions[i];
        timeline.events.push_back({.rank = rank.program->pipeline_rank,
                                   .stage = stages[c],
                                   .stream = instruction.stream,
                                   .name = instruction_title(segment, instruction),
                                   .label = instruction.label,
                                   .micro_batch = call.micro_batch.value_or(-1),
                                   .start = pieces.whole ? own.start + part.start : own.start,
                                   .end = pieces.whole ? own.start + part.end : own.end});
      }
    }
  }
}

}  // namespace parplan
