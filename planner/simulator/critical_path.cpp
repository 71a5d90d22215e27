#include "planner/simulator/critical_path.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "planner/base/enum_index.h"

namespace parplan {
namespace {

using LabelTimes = std::array<Seconds, count_of<Label>>;

// The time of each label on the critical path from `offset` in a segment that was played whole back
// to its start.
LabelTimes way_through(const CostedSegment& costed, Seconds offset) {
  LabelTimes times;
  // The piece that had ended last by then.
  std::optional<int> piece;
  for (int i = 0; i < static_cast<int>(costed.alone.size()); ++i)
    if (const Seconds end = costed.alone[i].end;
        end <= offset * (1.0 + 1e-9) && (!piece || end > costed.alone[*piece].end))
      piece = i;
  for (Seconds t = offset; piece; piece = costed.alone[*piece].cause) {
    const Played& part = costed.alone[*piece];
    times[index_of(part.work.label)] += t - part.start;
    t = part.start;
  }
  return times;
}

// What a Segment has on the path under one label.
struct Share {
  std::int64_t runs = 0;
  std::optional<int> last_call;
  Seconds time;
};
using Shares = std::array<Share, count_of<Label>>;

// A rank while the path is followed.
struct Traced {
  const PlayedRank* rank = nullptr;
  std::vector<int> call_of;                // by piece
  std::vector<const Crossing*> crossing;   // by piece; null where it started when its own rank was ready
  std::vector<Shares> shares;              // by Segment
  // By Segment: the path through all of it.
  std::vector<std::optional<LabelTimes>> wholes;
};

Traced trace_of(const PlayedRank& rank) {
  Traced traced{.rank = &rank,
                .call_of = std::vector<int>(rank.pieces.size()),
                .crossing = std::vector<const Crossing*>(rank.pieces.size(), nullptr),
                .shares = std::vector<Shares>(rank.program->segments.size()),
                .wholes = std::vector<std::optional<LabelTimes>>(rank.program->segments.size())};
  for (std::size_t c = 0; c < rank.calls.size(); ++c)
    std::fill_n(traced.call_of.begin() + rank.calls[c].first, rank.pieces_of(c), static_cast<int>(c));
  for (const Crossing& crossing : rank.crossings) traced.crossing[crossing.piece] = &crossing;
  return traced;
}

// Adds the path within a piece, from `until` back to its start.
void add_piece(Traced& traced, int piece, Seconds until) {
  const PlayedRank& rank = *traced.rank;
  const Played& played = rank.pieces[piece];
  const int call = traced.call_of[piece];
  const int segment = rank.list.calls[call].segment;
  const auto add = [&](std::size_t label, Seconds time) {
    if (time <= Seconds()) return;
    Share& share = traced.shares[segment][label];
    share.runs += share.last_call != call;
    share.last_call = call;
    share.time += time;
  };
  if (!rank.calls[call].whole) {
    add(index_of(played.work.label), until - played.start);
    return;
  }
  const CostedSegment& costed = (*rank.segments)[segment].costed;
  std::optional<LabelTimes>& whole = traced.wholes[segment];
  if (!whole) whole = way_through(costed, costed.duration);
  const double longer = times_as_long(played);
  const LabelTimes way = until >= played.end ? *whole : way_through(costed, (until - played.start) / longer);
  for (std::size_t label = 0; label < way.size(); ++label) add(label, longer * way[label]);
}

// Adds a rank's shares to the path; Segments of the same name are one row.
void add_rows(std::vector<CriticalWork>& path, const Traced& traced, int rank) {
  const Program& program = *traced.rank->program;
  for (std::size_t g = 0; g < traced.shares.size(); ++g)
    for (std::size_t label = 0; label < count_of<Label>; ++label) {
      const Share& share = traced.shares[g][label];
      if (share.runs == 0) continue;
      const std::string& name = program.segments[g].name;
      const auto same = [&](const CriticalWork& work) {
        return work.rank == rank && work.segment == name && work.label == static_cast<Label>(label);
      };
      auto found = std::ranges::find_if(path, same);
      if (found == path.end())
        found = path.insert(path.end(),
                            {.rank = rank, .segment = name, .label = static_cast<Label>(label), .runs = 0, .time = {}});
      found->runs += share.runs;
      found->time += share.time;
    }
}

}  // namespace

std::vector<CriticalWork> critical_path(const Simulation& simulation) {
  std::vector<Traced> ranks;
  for (const PlayedRank& rank : simulation.ranks) ranks.push_back(trace_of(rank));
  const auto end_of = [](const Traced& traced) { return last_of(*traced.rank).time; };
  Traced* traced = &*std::ranges::max_element(ranks, {}, end_of);  // the first of those that end together
  for (Moment at = last_of(*traced->rank); at.piece;) {
    add_piece(*traced, *at.piece, at.time);
    const Played& played = traced->rank->pieces[*at.piece];
    const Crossing* crossing = traced->crossing[*at.piece];
    at = {.time = played.start, .piece = crossing == nullptr ? played.cause : crossing->cause};
    if (crossing != nullptr) traced = &ranks[crossing->rank];
  }
  std::vector<CriticalWork> path;
  for (std::size_t r = 0; r < ranks.size(); ++r) add_rows(path, ranks[r], static_cast<int>(r));
  return path;
}

}  // namespace parplan
