#include "planner/plan/attribution.h"

#include <algorithm>
#include <span>

namespace parplan {
namespace {

// Attributes the time from `from` to `until`, when nothing computed and a piece that `cause` had
// made ready started.
void attribute_gap(std::span<const Played> pieces, std::optional<int> cause, Seconds from, Seconds until,
                   StepTime& time) {
  Seconds t = until;
  while (cause && t > from) {
    const Played& piece = pieces[*cause];
    if (piece.end < t) {  // ready, but partners were not
      const Seconds ready = std::max(piece.end, from);
      time.bubble += t - ready;
      t = ready;
      if (t <= from) return;
    }
    if (piece.work.split != nullptr) {  // `from` is where it computed last
      time += piece.work.split[piece.work.in_a_row - 1].tail;
      return;
    }
    const Seconds start = std::max(piece.start, from);
    time.part(piece.work.label) += t - start;
    t = start;
    cause = piece.cause;
  }
  if (t > from) time.bubble += t - from;
}

Seconds alone(const Work& work) {
  Seconds all;
  for (const SplitTime& split : std::span(work.split, work.in_a_row)) all += split.duration;
  return all;
}

// The pieces by their starts, those of equal ones in their order. Few streams compute at once, so
// that most pieces are in their places, or close to them.
void sort_by_start(std::span<const Played> pieces, std::vector<int>& indices) {
  const auto earlier = [&](int a, int b) {
    return pieces[a].start < pieces[b].start;
  };
  std::size_t moves_left = 8 * indices.size();
  for (std::size_t i = 1; i < indices.size(); ++i) {
    const int own = indices[i];
    std::size_t place = i;
    for (; place > 0 && moves_left > 0 && earlier(own, indices[place - 1]); --place, --moves_left)
      indices[place] = indices[place - 1];
    indices[place] = own;
    if (moves_left == 0) {
      std::ranges::stable_sort(indices, earlier);
      return;
    }
  }
}

}  // namespace

double times_as_long(const Played& piece) {
  return piece.slowed ? (piece.end - piece.start) / alone(piece.work) : 1.0;
}

StepTime sum(const SplitTime& split) {
  StepTime time = split.parts;
  time += split.tail;
  return time;
}

SplitTime attribute(std::span<const Played> pieces, std::optional<int> last) {
  std::vector<int> computing;
  computing.reserve(pieces.size());
  return attribute(pieces, last, computing);
}

SplitTime attribute(std::span<const Played> pieces, std::optional<int> last, std::vector<int>& computing) {
  SplitTime split;
  computing.clear();
  if (!last) return split;
  StepTime& time = split.parts;
  for (int i = 0; i < static_cast<int>(pieces.size()); ++i)
    if (pieces[i].work.computes) computing.push_back(i);
  sort_by_start(pieces, computing);

  Seconds covered;
  for (const int i : computing) {
    const Played& piece = pieces[i];
    if (piece.start > covered) {
      attribute_gap(pieces, piece.cause, covered, piece.start, time);
      covered = piece.start;
    }
    if (piece.end <= covered) continue;
    if (piece.work.split != nullptr) {
      Seconds start = piece.start;
      for (const SplitTime& before : std::span(piece.work.split, piece.work.in_a_row - 1)) {
        time += before.parts;
        time += before.tail;
        start += before.duration;
      }
      const SplitTime& end_of_row = piece.work.split[piece.work.in_a_row - 1];
      time += end_of_row.parts;
      covered = start + end_of_row.computed;
      if (piece.slowed) {
        const Seconds longer = piece.end - piece.start - alone(piece.work);
        time.compute += longer;
        covered += longer;
      }
    } else {
      time.part(piece.work.label) += piece.end - covered;
      covered = piece.end;
    }
  }
  split.computed = covered;
  const Seconds end = pieces[*last].end;
  if (end > covered) attribute_gap(pieces, last, covered, end, split.tail);
  split.duration = end;
  return split;
}

}  // namespace parplan
