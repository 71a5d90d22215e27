#include "planner/simulator/simulation_results.h"

#include <algorithm>
#include <optional>
#include <span>

namespace parplan {
namespace {

// The calls of one rank and their pieces, with Segments that were played in a row apart.
struct Apart {
  struct Call {
    const CostedSegment* costed = nullptr;
    int first = 0;  // of its pieces
    bool whole = false;
  };
  std::vector<Call> calls;
  std::vector<Played> pieces;
};
Apart rows_apart(const PlayedRank& rank) {
  std::vector<const Playable*> row(rank.pieces.size(), nullptr);  // by piece
  for (std::size_t c = 0; c < rank.calls.size(); ++c)
    if (const Playable& playable = rank.segment_of(c); !playable.in_a_row.empty()) row[rank.calls[c].first] = &playable;
  Apart apart;
  std::vector<int> first(rank.pieces.size()), last(rank.pieces.size());
  for (std::size_t p = 0, count = 0; p < row.size(); ++p) {
    first[p] = static_cast<int>(count);
    count += row[p] == nullptr ? 1 : row[p]->splits.size();
    last[p] = static_cast<int>(count) - 1;
  }
  for (std::size_t p = 0; p < row.size(); ++p) {
    Played piece = rank.pieces[p];
    // Others waited for the end of a row.
    if (piece.cause) piece.cause = last[*piece.cause];
    if (row[p] != nullptr) {
      piece.end = piece.start;
      piece.work.in_a_row = 1;
      const double longer = times_as_long(rank.pieces[p]);
      for (const SplitTime& split : std::span(row[p]->splits).first(row[p]->splits.size() - 1)) {
        piece.end += longer * split.duration;
        piece.work.split = &split;
        apart.pieces.push_back(piece);
        piece.start = piece.end;
        piece.cause = static_cast<int>(apart.pieces.size()) - 1;
      }
      piece.work.split = &row[p]->splits.back();
      piece.end = rank.pieces[p].end;
    }
    apart.pieces.push_back(piece);
  }
  for (std::size_t c = 0; c < rank.calls.size(); ++c) {
    const Playable& playable = rank.segment_of(c);
    Apart::Call call{.costed = &playable.costed, .first = first[rank.calls[c].first], .whole = rank.calls[c].whole};
    if (playable.in_a_row.empty()) apart.calls.push_back(call);
    for (const int segment : playable.in_a_row) {
      call.costed = &(*rank.segments)[segment].costed;
      apart.calls.push_back(call);
      ++call.first;
    }
  }
  return apart;
}

// The pieces of one rank, with those that were played whole split into their instructions.
std::vector<Played> pieces_in_detail(const PlayedRank& rank) {
  const Apart played = rows_apart(rank);
  // What becomes of a piece: its first part, and its Segment where it was played whole.
  struct Parts {
    int first = 0;
    const CostedSegment* whole = nullptr;
  };
  std::vector<Parts> parts(played.pieces.size());
  int count = 0;
  for (const Apart::Call& call : played.calls) {
    const int instructions = static_cast<int>(call.costed->instructions.size());
    for (int i = 0; i < (call.whole ? 1 : instructions); ++i)
      parts[call.first + i] = {.first = count + i, .whole = call.whole ? call.costed : nullptr};
    count += instructions;
  }
  // The part of a piece that ended last; where a whole goes on after `start`, the last part that
  // had ended by then.
  const auto part_before = [&](int piece, Seconds start) {
    const auto [first, whole] = parts[piece];
    if (whole == nullptr) return first;
    const double longer = times_as_long(played.pieces[piece]);
    const auto end_of = [&, costed = whole](int i) {
      return longer * costed->alone[i].end + played.pieces[piece].start;
    };
    int best = whole->last.value();
    if (end_of(best) > start)
      for (int i = best = 0; i < static_cast<int>(whole->alone.size()); ++i)
        if (end_of(i) <= start && (end_of(best) > start || end_of(i) > end_of(best))) best = i;
    return first + best;
  };
  std::vector<Played> in_detail;
  in_detail.reserve(static_cast<std::size_t>(count));
  for (const Apart::Call& call : played.calls) {
    const int first = static_cast<int>(in_detail.size());
    for (int i = 0; i < static_cast<int>(call.costed->instructions.size()); ++i) {
      const Played& piece = played.pieces[call.first + (call.whole ? 0 : i)];
      Played part = piece;
      std::optional<int> within;  // the cause inside the same whole
      if (call.whole) {
        const double longer = times_as_long(piece);
        part = call.costed->alone[i];
        part.start = longer * part.start + piece.start;
        part.end = longer * part.end + piece.start;
        within = part.cause;
      }
      if (within)
        part.cause = first + *within;
      else if (piece.cause)
        part.cause = part_before(*piece.cause, part.start);
      in_detail.push_back(part);
    }
  }
  return in_detail;
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

// The durations of a rank's forward and backward computation: in proportion to the micro-batches,
// so that a step's extension has the same order of ranks.
Seconds computing(const PlayedRank& rank) {
  std::vector<Seconds> of_segment;
  for (const Playable& segment : *rank.segments) {
    Seconds together;
    for (const CostedInstruction& instruction : segment.costed.instructions)
      if (instruction.work.label == Label::compute || instruction.work.label == Label::recompute)
        together += instruction.duration;
    for (const int one : segment.in_a_row) together += of_segment[one];
    of_segment.push_back(together);
  }
  Seconds sum;
  for (const PlayList::Call& call : rank.list.calls) sum += of_segment[call.segment];
  return sum;
}

// By call: the action of the task that it belongs to; nothing outside actions.
std::vector<std::optional<Action>> actions_of_calls(const Program& program) {
  std::vector<std::optional<Action>> actions(program.calls.size());
  for (const Task& task : program.tasks)
    if (task.action) std::fill(actions.begin() + task.first_call, actions.begin() + task.last_call, task.action);
  return actions;
}

}  // namespace

const PlayedRank& bottleneck_of(const Simulation& simulation) {
  std::vector<Seconds> each;
  for (const PlayedRank& rank : simulation.ranks) each.push_back(computing(rank));
  constexpr double rounding = 1e-9;
  const Seconds longest = std::ranges::max(each) * (1 - rounding);
  const PlayedRank* bottleneck = nullptr;
  for (std::size_t r = 0; r < each.size(); ++r) {
    const PlayedRank& rank = simulation.ranks[r];
    if (each[r] >= longest && (bottleneck == nullptr || last_of(rank).time > last_of(*bottleneck).time))
      bottleneck = &rank;
  }
  return *bottleneck;
}

StepTime time_of(const PlayedRank& rank) {
  const std::optional<int> last_piece = last_of(rank).piece;
  if (!last_piece) return {};
  if (!overlaps(rank.pieces)) return sum(attribute(rank.pieces, last_piece));
  const std::vector<Played> apart = pieces_in_detail(rank);
  int last = 0;
  for (int i = 0; i < static_cast<int>(apart.size()); ++i)
    if (apart[i].end > apart[last].end) last = i;
  return sum(attribute(apart, last));
}

std::optional<StepTime> time_until(const PlayedRank& rank, int call) {
  if (overlaps(rank.pieces)) return std::nullopt;
  const auto c = static_cast<std::size_t>(call);
  const std::size_t pieces = static_cast<std::size_t>(rank.calls[c].first) + rank.pieces_of(c);
  return sum(attribute(std::span(rank.pieces).first(pieces), static_cast<int>(pieces) - 1));
}

StepResult result_of(const Simulation& simulation) {
  const auto most = [&](auto projection) -> const PlayedRank& {
    return *std::ranges::max_element(simulation.ranks, {}, projection);  // ties: lowest
  };
  const Seconds end = last_of(most([](const PlayedRank& rank) { return last_of(rank).time; })).time;
  const PlayedRank& bottleneck = bottleneck_of(simulation);
  StepTime time = time_of(bottleneck);
  time.bubble += end - last_of(bottleneck).time;
  const PlayedRank& fullest = most(filled_share);
  const PlayedRank& busiest = most([](const PlayedRank& rank) { return sum(rank.list.sent).count; });
  return {.time = time,
          .memory = fullest.program->memory,
          .memory_stage = fullest.program->pipeline_rank,
          .memory_replica = fullest.program->replica,
          .communication = busiest.list.sent};
}

std::vector<RankResult> rank_results(const Simulation& simulation) {
  std::vector<RankResult> results;
  for (const PlayedRank& rank : simulation.ranks) {
    RankResult& result = results.emplace_back(RankResult{.pipeline_rank = rank.program->pipeline_rank,
                                                         .replica = rank.program->replica,
                                                         .time = time_of(rank),
                                                         .memory = rank.program->memory,
                                                         .communication = rank.list.sent,
                                                         .kernels = {},
                                                         .collectives = {}});
    for (std::size_t call = 0; call < rank.list.calls.size(); ++call) {
      result.kernels += rank.segment_of(call).by_origin;
      result.collectives += rank.segment_of(call).collectives;
    }
  }
  return results;
}

void write(const Simulation& simulation, Timeline& timeline) {
  const bool has_replicas = simulation.ranks.back().program->replica != simulation.ranks.front().program->replica;
  for (std::size_t r = 0; r < simulation.ranks.size(); ++r) {
    const PlayedRank& rank = simulation.ranks[r];
    const std::vector<std::optional<Action>> actions = actions_of_calls(*rank.program);
    for (std::size_t c = 0; c < rank.program->calls.size(); ++c) {
      const Call& call = rank.program->calls[c];
      const Segment& segment = rank.program->segments[call.segment];
      const Playable& playable = rank.segment_of(c);
      const PlayedCall& pieces = rank.calls[c];
      for (std::size_t i = 0; i < segment.instructions.size(); ++i) {
        const Played& own = rank.pieces[static_cast<std::size_t>(pieces.first) + (pieces.whole ? 0 : i)];
        const Played& part = playable.costed.alone[i];
        const Instruction& instruction = segment.instructions[i];
        const double longer = pieces.whole ? times_as_long(own) : 1.0;
        timeline.events.push_back({.rank = static_cast<int>(r),
                                   .stage = actions[c] ? std::optional(actions[c]->stage) : std::nullopt,
                                   .stream = instruction.stream,
                                   .name = instruction_title(segment, instruction),
                                   .label = instruction.label,
                                   .micro_batch = call.micro_batch,
                                   .start = pieces.whole ? own.start + longer * part.start : own.start,
                                   .end = pieces.whole ? own.start + longer * part.end : own.end,
                                   .phase = actions[c] ? std::optional(actions[c]->phase) : std::nullopt,
                                   .replica = has_replicas ? std::optional(rank.program->replica) : std::nullopt});
      }
    }
  }
}

}  // namespace parplan
