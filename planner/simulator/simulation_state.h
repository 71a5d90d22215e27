#pragma once

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "planner/cost/cost_model.h"
#include "planner/program/program.h"
#include "planner/simulator/rank_synchronization.h"
#include "planner/simulator/segment_cost.h"

namespace parplan {

// The state of a step while it is played, and what is known of it afterwards.

// A Segment of one rank, and how it is played.
struct Playable {
  CostedSegment costed;
  std::vector<std::optional<SeatAt>> seats;  // per instruction
  // Computes without meeting anyone: played as one piece where its side streams are idle.
  bool alone = false;
  unsigned shared = 0;  // the side streams that it shares with segments of other streams
  unsigned queues = 0;  // its own stream, and the side streams whose order it must keep
  bool posts = false;   // posts sends on its own stream: the call does not wait for them to be taken
  Work work;            // of the one piece
};

// The call at the head of a stream, while it waits for partners.
struct Running {
  bool active = false;
  Moment fork;
  std::size_t first_open = 0;
};

// The pieces of a call.
struct CallPieces {
  int first = 0;
  bool whole = false;  // one piece for all instructions
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
  Bytes capacity;                   // of the rank's device
  std::vector<Playable> segments;
  std::vector<Played> pieces;       // in the order in which calls began
  std::vector<CallPieces> calls;
  std::vector<std::optional<int>> event_recorder;  // call
  std::vector<bool> event_complete;
  std::vector<Moment> event_end;  // of complete events
  // Calls in launch order, for each stream that they use.
  std::array<std::vector<int>, stream_count> queue;
  std::array<std::size_t, stream_count> head{};
  std::array<Moment, stream_count> free;
  std::array<Running, stream_count> running;
  std::vector<std::size_t> streams;  // with calls
  std::vector<Crossing> crossings;   // where they are requested
  bool runnable = true;              // a partner may have let it go on

  const Playable& segment_of(std::size_t call) const { return segments[program->calls[call].segment]; }
  std::size_t pieces_of(std::size_t call) const {
    return calls[call].whole ? 1 : segment_of(call).costed.instructions.size();
  }
};

struct Simulation {
  std::vector<PlayedRank> ranks;  // of the pipeline
  std::vector<Meeting> meetings;
  bool notes_crossings = false;
};

// Costs the Segments, seats their instructions and queues the calls. programs[r] is that of rank r
// of the pipeline.
Simulation prepare(std::span<const Program> programs, std::span<const CostModel> models, bool notes_crossings);

// The last work of a rank; without a piece where it has none.
Moment last_of(const PlayedRank& rank);

}  // namespace parplan
