#include "planner/simulator/repeating_step.h"

#include <algorithm>
#include <utility>

namespace parplan {
namespace {

PlayList list_of(const RepeatingStep& step, std::size_t rank, int times) {
  const PlayedRank& own = step.shortest.ranks[rank];
  return extended(own.list, step.middle[rank], times, sent_by_segment(own));
}

}  // namespace

std::optional<RepeatingStep> repeating_step(Simulation shortest, int micro_batches, int period) {
  constexpr int most = 4;
  for (int times = 1; times <= most; ++times) {
    std::vector<Repeat> middle;
    for (const PlayedRank& rank : shortest.ranks) {
      const std::optional<Repeat> repeat = find_repeat(rank.list, times * period);
      if (!repeat) break;
      middle.push_back(*repeat);
    }
    if (middle.size() == shortest.ranks.size())
      return RepeatingStep{.shortest = std::move(shortest),
                           .micro_batches = micro_batches,
                           .period = times * period,
                           .middle = std::move(middle)};
  }
  return std::nullopt;
}

Simulation longer(const RepeatingStep& step, int times) {
  Simulation more{.ranks = {}, .meetings = step.shortest.meetings, .notes_crossings = step.shortest.notes_crossings};
  for (std::size_t r = 0; r < step.shortest.ranks.size(); ++r) {
    const PlayedRank& rank = step.shortest.ranks[r];
    PlayedRank& longer = more.ranks.emplace_back();
    longer.program = rank.program;
    longer.execution = rank.execution;
    longer.capacity = rank.capacity;
    longer.segments = rank.segments;
    longer.streams = rank.streams;
    longer.contends = rank.contends;
    longer.slowed = rank.slowed;
    longer.list = list_of(step, r, times);
  }
  return more;
}

void set_length(Simulation& playing, const RepeatingStep& step, int times) {
  for (std::size_t r = 0; r < playing.ranks.size(); ++r) {
    PlayedRank& rank = playing.ranks[r];
    rank.list = list_of(step, r, times);
    // The calls behind what has been played are others now.
    for (int& head : rank.head) head = std::min(head, rank.calls_to_play.value_or(head));
  }
}

}  // namespace parplan
