#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "planner/cost/cost_model.h"
#include "planner/program/program.h"
#include "planner/simulator/play_list.h"
#include "planner/simulator/rank_synchronization.h"
#include "planner/simulator/segment_cost.h"

namespace parplan {

// The state of a step while it is played, and what is known of it afterwards.

// A Segment of one rank, or several that compute in a row, and how it is played.
struct Playable {
  CostedSegment costed;                      // of several: only its streams
  std::vector<int> in_a_row;                 // several: the Segments
  std::vector<SplitTime> splits;             // of the one, or of each in the row
  std::vector<BoundTimes> bound;             // the same
  TimeByOrigin by_origin;                    // of its kernels alone, where details are wanted
  TimeByCommunicationOrigin collectives;     // likewise of its communication
  std::vector<std::optional<SeatAt>> seats;  // per instruction
  // Computes without meeting anyone: played as one piece where its side streams are idle.
  bool alone = false;
  unsigned shared = 0;  // the side streams that it shares with segments of other streams
  unsigned queues = 0;  // its own stream, and the side streams whose order it must keep
  bool posts = false;   // posts sends on its own stream: the call does not wait for them to be taken
  bool shares_links = false;  // with collectives that earlier calls left in flight on other streams
  Work work;            // of the one piece
};

// The call at the head of a stream, while it waits for partners.
struct Running {
  bool active = false;
  Moment fork;
  std::size_t first_open = 0;
};

// How a call was played.
struct PlayedCall {
  int first = 0;          // of its pieces
  bool whole = false;     // one piece for all instructions
  bool complete = false;  // with all that it submitted
  Moment end = {};        // of a complete one
};

// A piece that started when a partner was ready, later than its own rank.
struct Crossing {
  int piece = 0;
  int rank = 0;              // of the partner
  std::optional<int> cause;  // the partner's piece that made it ready
};

struct PlayedRank {
  const Program* program = nullptr;
  Execution execution{};
  Bytes capacity;  // of the rank's device
  // Those of the Program, then those of several in a row; shared by steps of several lengths.
  std::shared_ptr<const std::vector<Playable>> segments;
  PlayList list;
  std::vector<Played> pieces;  // in the order in which calls began
  std::vector<PlayedCall> calls;
  // The first call on each stream that is not over; the number of calls, where all are.
  std::array<int, stream_count> head{};
  std::array<Moment, stream_count> free;
  std::array<Running, stream_count> running;
  std::vector<std::size_t> streams;  // with calls
  // Side streams, as bits, whose collectives slow later calls, and streams with calls that are
  // slowed; by the latter: what was in flight when work started last, or has begun since.
  unsigned contends = 0, slowed = 0;
  std::array<std::vector<InFlight>, stream_count> in_flight;
  std::vector<Crossing> crossings;   // where they are requested
  bool runnable = true;              // a partner may have let it go on
  std::optional<int> calls_to_play;  // those before this one; all, where nothing is said

  const Playable& segment_of(std::size_t call) const { return (*segments)[list.calls[call].segment]; }
  // The Segment of a call, or the first in the row.
  const Segment& program_segment_of(std::size_t call) const {
    const std::vector<int>& in_a_row = segment_of(call).in_a_row;
    return program->segments[in_a_row.empty() ? list.calls[call].segment : in_a_row.front()];
  }
  // Whether a call has been played, but for posted sends that nobody has taken yet.
  bool is_over(std::size_t call) const {
    return head[segment_of(call).costed.stream] > static_cast<int>(call);
  }
  std::size_t pieces_of(std::size_t call) const {
    return calls[call].whole ? 1 : segment_of(call).costed.instructions.size();
  }
};

struct Simulation {
  std::vector<PlayedRank> ranks;  // of the pipeline, of one unlike replica after the other
  std::vector<Meeting> meetings;
  bool notes_crossings = false;
  // Nobody gets further while kernels wait to know what is in flight beside them: they start
  // without.
  bool starts_regardless = false;
};

// Whether computations in a row become one call. Times are the same, and the step is played faster,
// but who computed is known by task only.
enum class CallsInARow { apart, joined };

// A step ready to be played: costs the Segments and seats their instructions. programs[r] is that
// of rank r of the pipeline, and lists[r] what it plays: by itself, its calls. Where replicas do
// unlike work, those of the next replica follow.
Simulation prepare(std::span<const Program> programs, std::vector<PlayList> lists, std::span<const CostModel> models,
                   CallsInARow in_a_row, bool notes_crossings);
Simulation prepare(std::span<const Program> programs, std::span<const CostModel> models, CallsInARow in_a_row,
                   bool notes_crossings);
// What a rank sends in a call of each of its Segments, and of those in a row.
std::vector<CommunicationVolume> sent_by_segment(const PlayedRank& rank);

// The last work of a rank; without a piece where it has none.
Moment last_of(const PlayedRank& rank);

}  // namespace parplan
