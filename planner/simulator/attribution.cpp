#include "planner/simulator/attribution.h"

#include <algorithm>

namespace parplan {
namespace {

void add(StepTime& to, const StepTime& parts) {
  to.compute += parts.compute;
  to.recompute += parts.recompute;
  to.tensor_exposed += parts.tensor_exposed;
  to.data_exposed += parts.data_exposed;
  to.pipeline_exposed += parts.pipeline_exposed;
  to.bubble += parts.bubble;
  to.optimizer += parts.optimizer;
}

// Nothing computed from `from` until `until`, when something started that piece `cause` had made ready.
void attribute_gap(std::span<const Played> pieces, int cause, double from, double until, StepTime& time) {
  double t = until;
  while (cause >= 0 && t > from) {
    const Played& piece = pieces[static_cast<std::size_t>(cause)];
    if (piece.end < t) {  // ready, but partners were not
      const double ready = std::max(piece.end, from);
      time.bubble += Seconds(t - ready);
      t = ready;
      if (t <= from) return;
    }
    const double start = std::max(piece.start, from);
    time.part(piece.work.label) += Seconds(t - start);
    t = start;
    cause = piece.cause;
  }
  if (t > from) time.bubble += Seconds(t - from);
}

}  // namespace

StepTime attribute(std::span<const Played> pieces, int last) {
  StepTime time;
  if (last < 0) return time;
  std::vector<int> computing;
  computing.reserve(pieces.size());
  for (int i = 0; i < static_cast<int>(pieces.size()); ++i)
    if (pieces[static_cast<std::size_t>(i)].work.computes) computing.push_back(i);
  const auto earlier = [&](int a, int b) {
    return pieces[static_cast<std::size_t>(a)].start < pieces[static_cast<std::size_t>(b)].start;
  };
  if (!std::is_sorted(computing.begin(), computing.end(), earlier))
    std::stable_sort(computing.begin(), computing.end(), earlier);

  double covered = 0.0;
  for (const int i : computing) {
    const Played& piece = pieces[static_cast<std::size_t>(i)];
    if (piece.start > covered) {
      attribute_gap(pieces, piece.cause, covered, piece.start, time);
      covered = piece.start;
    }
    if (piece.end <= covered) continue;
    if (piece.work.parts != nullptr)
      add(time, *piece.work.parts);
    else
      time.part(piece.work.label) += Seconds(piece.end - covered);
    covered = piece.end;
  }
  const double end = pieces[static_cast<std::size_t>(last)].end;
  if (end > covered) attribute_gap(pieces, last, covered, end, time);
  return time;
}

}  // namespace parplan
