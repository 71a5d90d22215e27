#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "planner/base/units.h"
#include "planner/cost/contention.h"
#include "planner/program/program.h"

namespace parplan {

// Where the simulated ranks of a pipeline wait for one another.

// An instant, and the piece of work that determined it.
struct Moment {
  Seconds time;
  std::optional<int> piece;
};
inline Moment later(Moment a, Moment b) { return b.time > a.time ? b : a; }

enum class Arrival { absent, arrived, served };

// One rank's side of a meeting.
struct Seat {
  int rank = 0;
  Arrival arrival = Arrival::absent;
  Moment ready = {};
  Seconds duration = {};  // of its own instruction
  // Of a transfer: the call that the instruction is in, its stream, and what slows it.
  int call = 0;
  std::size_t stream = 0;
  BoundTimes bound = {};
};

// A channel from one rank to another (seat 0 sends, seat 1 receives), or a collective's group along
// the pipeline. A rank has at most one instruction in a meeting at a time, except that posted sends
// queue up.
struct Meeting {
  std::string name;
  GroupKey group;  // of a channel: the group in which its source sends
  bool is_channel = false;
  std::vector<Seat> seats = {};
  int arrived = 0;
  // Once all have arrived:
  Seconds start = {};
  Seconds duration = {};
  Seat last = {};  // that was ready last
  struct Posted {
    Seconds ready;
    Seconds duration;
    int piece = 0;  // of the sender
  };
  std::vector<Posted> posted = {};
  std::size_t taken = 0;
};

// The meetings of these Programs, one Program for each rank of the pipeline, of one replica or of
// several that do unlike work, as their own groups determine them: channels first, then tied
// stages, then the whole pipeline; then between replicas the ranks that hold the same stages.
std::vector<Meeting> make_meetings(std::span<const Program> programs);

struct SeatAt {
  int meeting = 0;
  int seat = 0;
};
// The seat that programs[rank] takes for an instruction; nothing where that concerns this rank
// only.
std::optional<SeatAt> seat_of(std::span<const Meeting> meetings, std::span<const Program> programs, int rank,
                              const Instruction& instruction);

// Takes a seat at the moment when the instruction is ready. True where everyone has: then all seats
// are served, and `start`, `duration` and `last` are known.
bool arrive(Meeting& meeting, int seat, Moment ready, Seconds duration);

}  // namespace parplan
