#pragma once

#include <optional>
#include <span>
#include <vector>

#include "planner/plan/step_result.h"
#include "planner/program/program.h"

namespace parplan {

// What a rank plays in one step: the calls of its Program without their buffers, which have done
// their part once they have ordered the calls.
struct PlayList {
  struct Call {
    int segment = 0;
    int first_wait = 0, end_wait = 0;  // in `waits`
    unsigned queues = 0;               // the streams whose order it keeps, as bits
    bool operator==(const Call&) const = default;
  };
  std::vector<Call> calls;  // in launch order
  std::vector<int> waits;   // earlier calls
  std::vector<Task> tasks;  // spans of `calls`
  CommunicationVolume sent;
  bool operator==(const PlayList&) const = default;

  std::span<const int> waits_of(const Call& call) const {
    return std::span(waits).subspan(static_cast<std::size_t>(call.first_wait),
                                    static_cast<std::size_t>(call.end_wait - call.first_wait));
  }
  // The first call from this one on that keeps the stream's order; the number of calls, where none
  // does.
  int next_on(std::size_t stream, int call) const {
    const int end = static_cast<int>(calls.size());
    while (call < end && !(calls[call].queues >> stream & 1u)) ++call;
    return call;
  }
};

PlayList play_list(const Program& program);

// The middle of a list repeats itself: after `period` micro-batches, the same Segments wait for
// calls equally far back.
struct Repeat {
  int period = 0;
  int begin_task = 0;                // of the first repetition
  int first_task = 0, end_task = 0;  // of the last one
};
// The longest middle that repeats itself after `period` micro-batches: at least two repetitions,
// and four of short ones, and no wait of the last one, or of what follows, reaches back before the
// first. Nothing where there is none.
std::optional<Repeat> find_repeat(const PlayList& list, int period);
// The list of a step that repeats its middle `times` times more. A call of each Segment sends
// `sent_by_segment`.
PlayList extended(const PlayList& list, const Repeat& repeat, int times,
                  std::span<const CommunicationVolume> sent_by_segment);

}  // namespace parplan
