#include "planner/simulator/simulate.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "planner/base/enum.h"
#include "planner/base/error.h"
#include "planner/base/text.h"
#include "planner/simulator/segment_cost.h"

namespace parplan {
namespace {

// An instant, and the piece of work that determined it.
struct Moment {
  double time = 0.0;
  int piece = -1;
};
Moment later(Moment a, Moment b) { return b.time > a.time ? b : a; }

enum class Arrival { absent, arrived, served };

// One stage's side of a meeting.
struct Seat {
  int stage = 0;
  Arrival arrival = Arrival::absent;
  double ready = 0.0;
  double seconds = 0.0;
  int cause = -1;      // the piece that made it ready
  double start = 0.0;  // once served
  // The stage that arrived last, once served.
  int last_stage = 0;
  int last_cause = -1;
};

// Where ranks of the pipeline meet: a channel from one rank to another (seat 0 sends, seat 1
// receives), or a collective's group along the pipeline. A rank has at most one instruction in a
// meeting at a time, except that posted sends queue up.
struct Meeting {
  std::string name;
  GroupKey group;  // for a channel: the group in which its source sends
  bool is_channel = false;
  std::vector<Seat> seats;
  int arrived = 0;
  struct Posted {
    double ready = 0.0;
    double seconds = 0.0;
    int piece = -1;  // of the sender
  };
  std::vector<Posted> posted;
  std::size_t taken = 0;
};

struct SeatAt {
  int meeting = -1;  // -1: the instruction concerns this stage only
  int seat = -1;
};

// A segment of one stage, and how it is simulated.
struct Playable {
  CostedSegment costed;
  std::vector<SeatAt> seats;  // per instruction
  // Computes without meeting anyone: simulated as one piece where its side streams are idle.
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

struct Stage {
  const Program* program = nullptr;
  Execution execution{};
  Bytes capacity;                   // of the stage's devices
  std::vector<Playable> segments;
  std::vector<Played> pieces;  // in the order in which calls began
  struct Place {
    int first = 0;                  // piece
    bool whole = false;             // one piece for all instructions
  };
  std::vector<Place> places;        // per call
  std::vector<int> event_recorder;  // call
  std::vector<int> event_piece;     // the piece whose end completed the event
  // Calls in launch order, for each stream that they use.
  std::array<std::vector<int>, stream_count> queue;
  std::array<std::size_t, stream_count> head{};
  std::array<Moment, stream_count> free;
  std::array<Running, stream_count> running;
  std::vector<std::size_t> streams;  // with calls
  // A piece that started when a partner was ready, later than this stage.
  struct Crossing {
    int piece = 0;
    int stage = 0;   // of the partner
    int cause = -1;  // the partner's piece that made it ready
  };
  std::vector<Crossing> crossings;  // where they are requested

  const Playable& segment_of(int call) const {
    return segments[program->calls[call].segment];
  }
};

constexpr int unknown = -2;  // an event that is not complete yet

class Simulation {
 public:
  Simulation(std::span<const Program> programs, std::span<const CostModel> models, bool notes_crossings);
  void play();
  StepResult result() const;
  StepDetails details() const;
  void write(Timeline& timeline) const;
  std::vector<CallEnds> ends() const;

 private:
  int place_of(int rank) const;
  void make_meetings();
  void prepare(Stage& stage, int number, const CostModel& model);
  SeatAt seat_of(const Stage& stage, int number, const Instruction& instruction) const;
  bool advance(Stage& stage);
  bool step(Stage& stage, std::size_t stream);
  std::optional<Moment> ready(Stage& stage, const Call& call, Moment from);
  bool complete(Stage& stage, int event);
  bool play_instructions(Stage& stage, int call, const Playable& playable, Running& running);
  // True once the instruction is done or posted, so that its stream may continue.
  bool meet(Stage& stage, const Playable& playable, std::size_t instruction, int piece, Moment at);
  void finish_call(Stage& stage, int call, const Playable& playable, Moment end);
  Moment last_of(const Stage& stage) const;
  void note_crossing(Stage& stage, int piece, int other, int cause);
  std::vector<CriticalWork> critical_path() const;
  [[noreturn]] void report_deadlock() const;

  std::vector<Stage> stages_;
  std::vector<Meeting> meetings_;
  std::vector<char> runnable_;
  bool notes_crossings_ = false;
};

// The position of a rank's Program; -1 where it has none here.
int Simulation::place_of(int rank) const {
  for (std::size_t s = 0; s < stages_.size(); ++s)
    if (stages_[s].program->rank == rank) return static_cast<int>(s);
  return -1;
}

// Meetings in this order: forward and backward of each pair of neighbours, tied, pipeline. The
// Programs' own groups determine who meets.
void Simulation::make_meetings() {
  for (const Stage& stage : stages_)
    for (const int next : stage.program->group(next_stage)) {
      const int one = place_of(stage.program->rank), other = place_of(next);
      if (other < 0) continue;
      const auto add = [&](int source, int destination, GroupKey group) {
        meetings_.push_back({.name = fmt::format("{} to {}", source, destination),
                             .group = group,
                             .is_channel = true,
                             .seats = {{.stage = source}, {.stage = destination}},
                             .posted = {}});
      };
      add(one, other, next_stage);
      add(other, one, previous_stage);
    }
  for (const GroupKey key : {tied_stages, all_along(Axis::pp)})
    for (const Stage& stage : stages_) {
      const std::vector<int>& ranks = stage.program->group(key);
      if (ranks.size() < 2 || ranks.front() != stage.program->rank) continue;
      Meeting meeting{.name = name(key), .group = key, .seats = {}, .posted = {}};
      for (const int rank : ranks) {
        const int place = place_of(rank);
        PARPLAN_ASSERT(place >= 0, fmt::format("rank {} of group {} has no Program", rank, name(key)));
        meeting.seats.push_back({.stage = place});
      }
      meetings_.push_back(std::move(meeting));
    }
}

SeatAt Simulation::seat_of(const Stage& stage, int number, const Instruction& instruction) const {
  if (instruction.kind == InstructionKind::kernel || instruction.group.axis != Axis::pp) return {};
  const bool sends = instruction.kind == InstructionKind::send;
  const bool receives = instruction.kind == InstructionKind::receive;
  const std::vector<int>& ranks = stage.program->group(instruction.group);
  if (!sends && !receives && ranks.size() < 2) return {};
  // What comes from the next rank was sent to that rank's previous one.
  GroupKey group = instruction.group;
  if (receives) group.members = group.members == Members::next ? Members::previous : Members::next;
  const int peer = (sends || receives) && !ranks.empty() ? place_of(ranks.front()) : -1;
  for (std::size_t m = 0; m < meetings_.size(); ++m) {
    const Meeting& meeting = meetings_[m];
    if (meeting.group != group || meeting.is_channel != (sends || receives)) continue;
    for (std::size_t seat = 0; seat < meeting.seats.size(); ++seat) {
      if (meeting.seats[seat].stage != number) continue;
      if (meeting.is_channel && (seat != (sends ? 0 : 1) || meeting.seats[1 - seat].stage != peer)) continue;
      return {.meeting = static_cast<int>(m), .seat = static_cast<int>(seat)};
    }
  }
  PARPLAN_ASSERT(false, fmt::format("rank {} of the pipeline has nobody to meet for {} with group {}", number,
                                    name(instruction.kind), name(instruction.group)));
  return {};
}

void Simulation::prepare(Stage& stage, int number, const CostModel& model) {
  const Program& program = *stage.program;
  stage.execution = execution_of(model);
  stage.capacity = model.device->memory_capacity;

  // Instructions that meet in one place come from one stream; otherwise their order would depend on
  // timing.
  std::vector<int> meeting_stream(meetings_.size(), -1);
  std::array<unsigned, stream_count> users{};  // streams whose segments use this stream
  std::vector<char> meets(program.segments.size(), false);
  stage.segments.resize(program.segments.size());
  for (std::size_t i = 0; i < program.segments.size(); ++i) {
    const Segment& segment = program.segments[i];
    Playable& playable = stage.segments[i];
    playable.costed = cost_segment(segment, model);
    for (const Instruction& instruction : segment.instructions) {
      const SeatAt seat = seat_of(stage, number, instruction);
      playable.seats.push_back(seat);
      if (seat.meeting < 0) continue;
      meets[i] = true;
      int& stream = meeting_stream[seat.meeting];
      PARPLAN_ASSERT(stream < 0 || stream == static_cast<int>(instruction.stream),
                     fmt::format("stage {} meets at '{}' on two streams", number, meetings_[seat.meeting].name));
      stream = static_cast<int>(instruction.stream);
      playable.posts |= stage.execution == Execution::sequential && instruction.kind == InstructionKind::send &&
                        instruction.stream == segment.stream;
    }
    for (std::size_t s = 0; s < stream_count; ++s)
      if (playable.costed.streams >> s & 1u) users[s] |= 1u << playable.costed.stream;
  }
  for (std::size_t i = 0; i < stage.segments.size(); ++i) {
    Playable& playable = stage.segments[i];
    const unsigned own = 1u << playable.costed.stream;
    playable.alone = !meets[i] && playable.costed.computes;
    for (std::size_t s = 0; s < stream_count; ++s)
      if (playable.costed.streams >> s & 1u && s != playable.costed.stream && users[s] != own)
        playable.shared |= 1u << s;
    playable.queues = playable.alone ? own | playable.shared : playable.costed.streams;
    playable.work = {.computes = true, .label = Label::compute, .split = &playable.costed.split};
  }

  std::array<std::size_t, stream_count> calls_on{};
  std::vector<std::size_t> posts_at(meetings_.size(), 0);
  stage.places.resize(program.calls.size());
  stage.event_recorder.assign(static_cast<std::size_t>(program.events), -1);
  stage.event_piece.assign(static_cast<std::size_t>(program.events), unknown);
  std::size_t pieces = 0;
  for (std::size_t c = 0; c < program.calls.size(); ++c) {
    const Call& call = program.calls[c];
    const Playable& playable = stage.segment_of(static_cast<int>(c));
    pieces += playable.alone ? 1 : playable.costed.instructions.size();
    for (std::size_t s = 0; s < stream_count; ++s)
      if (playable.queues >> s & 1u) ++calls_on[s];
    for (const int event : call.waits)
      PARPLAN_ASSERT(
          stage.event_recorder[event] >= 0,
          fmt::format("stage {}: call {} waits for event {}, which no earlier call records", number, c, event));
    if (call.records) stage.event_recorder[*call.records] = static_cast<int>(c);
    if (stage.execution == Execution::sequential)
      for (std::size_t i = 0; i < playable.seats.size(); ++i)
        if (playable.seats[i].meeting >= 0 && playable.seats[i].seat == 0)
          ++posts_at[playable.seats[i].meeting];
  }
  stage.pieces.reserve(pieces);
  for (std::size_t s = 0; s < stream_count; ++s) {
    stage.queue[s].reserve(calls_on[s]);
    if (calls_on[s] > 0) stage.streams.push_back(s);
  }
  for (std::size_t c = 0; c < program.calls.size(); ++c) {
    const Playable& playable = stage.segment_of(static_cast<int>(c));
    for (const std::size_t s : stage.streams)
      if (playable.queues >> s & 1u) stage.queue[s].push_back(static_cast<int>(c));
  }
  for (std::size_t m = 0; m < meetings_.size(); ++m)
    if (posts_at[m] > 0) meetings_[m].posted.reserve(std::max(meetings_[m].posted.capacity(), posts_at[m]));
}

Simulation::Simulation(std::span<const Program> programs, std::span<const CostModel> models, bool notes_crossings)
    : notes_crossings_(notes_crossings) {
  PARPLAN_ASSERT(!programs.empty() && programs.size() == models.size(),
                 fmt::format("{} programs, {} cost models", programs.size(), models.size()));
  stages_.resize(programs.size());
  runnable_.assign(programs.size(), true);
  for (std::size_t s = 0; s < programs.size(); ++s) stages_[s].program = &programs[s];
  make_meetings();
  for (std::size_t s = 0; s < programs.size(); ++s) {
    PARPLAN_ASSERT(programs[s].stage == static_cast<int>(s),
                   fmt::format("program {} is of stage {}", s, programs[s].stage));
    PARPLAN_ASSERT(execution_of(models[s]) == execution_of(models[0]), fmt::format("stage {} runs unlike stage 0", s));
    prepare(stages_[s], static_cast<int>(s), models[s]);
  }
}

void Simulation::play() {
  for (bool progress = true; progress;) {
    progress = false;
    for (std::size_t s = 0; s < stages_.size(); ++s) {
      if (!runnable_[s]) continue;
      runnable_[s] = false;
      progress |= advance(stages_[s]);
    }
    for (const char runnable : runnable_) progress |= runnable != 0;
  }
  for (const Stage& stage : stages_)
    for (const std::size_t s : stage.streams)
      if (stage.head[s] < stage.queue[s].size()) report_deadlock();
  for (const Meeting& meeting : meetings_)
    PARPLAN_ASSERT(meeting.taken == meeting.posted.size(),
                   fmt::format("stage {}: {} sends, {} receives", meeting.name, meeting.posted.size(), meeting.taken));
}

// Simulates as far as possible without other stages.
bool Simulation::advance(Stage& stage) {
  bool any = false;
  for (bool progress = true; progress; any |= progress) {
    progress = false;
    for (const std::size_t s : stage.streams)
      while (stage.head[s] < stage.queue[s].size() && step(stage, s)) progress = true;
  }
  return any;
}

bool Simulation::complete(Stage& stage, int event) {
  int& piece = stage.event_piece[event];
  if (piece != unknown) return true;
  // Left open by a call with posted sends: complete once all of them are taken.
  const int call = stage.event_recorder[event];
  const Playable& playable = stage.segment_of(call);
  if (!playable.posts || stage.head[0] >= stage.queue[0].size() || call >= stage.queue[0][stage.head[0]]) return false;
  int last = -1;
  const int first = stage.places[call].first;
  for (int i = first; i < first + static_cast<int>(playable.costed.instructions.size()); ++i) {
    const Played& one = stage.pieces[i];
    if (!one.done()) return false;
    if (last < 0 || one.end > stage.pieces[last].end) last = i;
  }
  piece = last;
  return true;
}

std::optional<Moment> Simulation::ready(Stage& stage, const Call& call, Moment from) {
  for (const int event : call.waits) {
    if (!complete(stage, event)) return std::nullopt;
    const int piece = stage.event_piece[event];
    if (piece >= 0) from = later(from, {.time = stage.pieces[piece].end, .piece = piece});
  }
  return from;
}

bool idle(const Stage& stage, unsigned streams, double time) {
  for (const std::size_t s : stage.streams)
    if (streams >> s & 1u && stage.free[s].time > time) return false;
  return true;
}

// Advances the call at the head of a stream, if this is the call's own stream; true once the call
// is over.
bool Simulation::step(Stage& stage, std::size_t stream) {
  const int number = stage.queue[stream][stage.head[stream]];
  const Call& call = stage.program->calls[number];
  const Playable& playable = stage.segments[call.segment];
  if (playable.costed.stream != stream) return false;
  Running& running = stage.running[stream];
  if (!running.active) {
    for (const std::size_t other : stage.streams)
      if (playable.queues >> other & 1u && stage.queue[other][stage.head[other]] != number) return false;
    const std::optional<Moment> start = ready(stage, call, stage.free[stream]);
    if (!start) return false;
    const int piece = static_cast<int>(stage.pieces.size());
    stage.places[number] = {.first = piece, .whole = playable.alone && idle(stage, playable.shared, start->time)};
    if (stage.places[number].whole) {
      const double end = start->time + playable.costed.seconds;
      stage.pieces.push_back(
          {.start = start->time, .end = end, .cause = start->piece, .begun = true, .work = playable.work});
      for (std::size_t i = 0; i < playable.costed.alone.size() && playable.shared != 0; ++i)
        if (const std::size_t side = playable.costed.instructions[i].stream; playable.shared >> side & 1u)
          stage.free[side] = {.time = start->time + playable.costed.alone[i].end, .piece = piece};
      finish_call(stage, number, playable, {.time = end, .piece = piece});
      return true;
    }
    stage.pieces.resize(stage.pieces.size() + playable.costed.instructions.size());
    running = {.active = true, .fork = *start, .first_open = 0};
  }
  return play_instructions(stage, number, playable, running);
}

bool Simulation::play_instructions(Stage& stage, int call, const Playable& playable, Running& running) {
  const int first = stage.places[call].first;
  const std::vector<CostedInstruction>& instructions = playable.costed.instructions;
  const auto piece_of = [&](std::size_t i) -> Played& { return stage.pieces[static_cast<std::size_t>(first) + i]; };
  unsigned blocked = 0;
  bool all = true;
  for (std::size_t i = running.first_open; i < instructions.size(); ++i) {
    if (piece_of(i).begun) continue;
    const CostedInstruction& instruction = instructions[i];
    if (!(blocked >> instruction.stream & 1u)) {
      Moment at = later(running.fork, stage.free[instruction.stream]);
      bool met = true;
      for (const int wait : instruction.waits) {
        const Played& awaited = piece_of(static_cast<std::size_t>(wait));
        met &= awaited.done();
        if (met) at = later(at, {.time = awaited.end, .piece = first + wait});
      }
      const int piece = first + static_cast<int>(i);
      if (met && playable.seats[i].meeting < 0) {
        piece_of(i) = {.start = at.time,
                       .end = at.time + instruction.seconds,
                       .cause = at.piece,
                       .begun = true,
                       .work = instruction.work};
        stage.free[instruction.stream] = {.time = piece_of(i).end, .piece = piece};
        continue;
      }
      if (met && meet(stage, playable, i, piece, at)) continue;
      blocked |= 1u << instruction.stream;
    }
    if (all) running.first_open = i;
    all = false;
  }
  if (!all) return false;
  // The streams join, and with them posted sends on side streams.
  Moment end = later(running.fork, stage.free[playable.costed.stream]);
  for (std::size_t i = 0; i < instructions.size(); ++i) {
    if (piece_of(i).done())
      end = later(end, {.time = piece_of(i).end, .piece = first + static_cast<int>(i)});
    else if (!playable.posts)
      return false;
  }
  running.active = false;
  finish_call(stage, call, playable, end);
  return true;
}

void Simulation::note_crossing(Stage& stage, int piece, int other, int cause) {
  if (notes_crossings_) stage.crossings.push_back({.piece = piece, .stage = other, .cause = cause});
}

bool Simulation::meet(Stage& stage, const Playable& playable, std::size_t index, int piece, Moment at) {
  const CostedInstruction& instruction = playable.costed.instructions[index];
  const SeatAt where = playable.seats[index];
  Meeting& meeting = meetings_[where.meeting];
  Seat& seat = meeting.seats[where.seat];
  Played& played = stage.pieces[piece];
  const auto settle = [&](double start, double seconds) {
    played = {.start = start, .end = start + seconds, .cause = at.piece, .begun = true, .work = instruction.work};
    stage.free[instruction.stream] = {.time = played.end, .piece = piece};
  };

  if (meeting.is_channel && stage.execution == Execution::sequential) {
    const int partner = meeting.seats[1 - where.seat].stage;
    if (where.seat == 0) {
      meeting.posted.push_back({.ready = at.time, .seconds = instruction.seconds, .piece = piece});
      played = {.start = at.time, .end = Played::unset, .cause = at.piece, .begun = true, .work = instruction.work};
      stage.free[instruction.stream] = later(stage.free[instruction.stream], at);
      runnable_[partner] = true;
      return true;
    }
    if (meeting.taken == meeting.posted.size()) return false;
    const Meeting::Posted& posted = meeting.posted[meeting.taken++];
    settle(std::max(at.time, posted.ready), posted.seconds);
    Stage& sender = stages_[partner];
    Played& sent = sender.pieces[posted.piece];
    if (posted.ready > at.time) note_crossing(stage, piece, partner, sent.cause);
    if (at.time > posted.ready) note_crossing(sender, posted.piece, stage.program->stage, at.piece);
    sent.start = played.start;
    sent.end = played.end;
    runnable_[partner] = true;
    return true;
  }

  if (seat.arrival == Arrival::absent) {
    seat.arrival = Arrival::arrived;
    seat.ready = at.time;
    seat.seconds = instruction.seconds;
    seat.cause = at.piece;
    if (++meeting.arrived == static_cast<int>(meeting.seats.size())) {
      // A transfer takes the time of the sender's links; a collective takes the time of its slowest
      // member.
      double start = 0.0;
      double seconds = meeting.seats[0].seconds;
      const Seat* last = &meeting.seats[0];
      for (const Seat& other : meeting.seats) {
        start = std::max(start, other.ready);
        if (other.ready > last->ready) last = &other;
        if (!meeting.is_channel) seconds = std::max(seconds, other.seconds);
      }
      const int last_stage = last->stage;
      const int last_cause = last->cause;
      for (Seat& other : meeting.seats) {
        other.arrival = Arrival::served;
        other.start = start;
        other.seconds = seconds;
        other.last_stage = last_stage;
        other.last_cause = last_cause;
        runnable_[other.stage] = true;
      }
      meeting.arrived = 0;
    }
  }
  if (seat.arrival != Arrival::served) return false;
  seat.arrival = Arrival::absent;
  settle(seat.start, seat.seconds);
  if (seat.start > at.time) note_crossing(stage, piece, seat.last_stage, seat.last_cause);
  return true;
}

void Simulation::finish_call(Stage& stage, int number, const Playable& playable, Moment end) {
  const Call& call = stage.program->calls[number];
  stage.free[playable.costed.stream] = later(stage.free[playable.costed.stream], end);
  for (const std::size_t s : stage.streams)
    if (playable.queues >> s & 1u) ++stage.head[s];
  if (call.records && !playable.posts) stage.event_piece[*call.records] = end.piece;
}

Moment Simulation::last_of(const Stage& stage) const {
  Moment last;
  for (const Moment& free : stage.free)
    if (last.piece < 0 || free.time > last.time) last = free;
  return last;
}

// The pieces of one stage, with those that were simulated whole split into their instructions.
std::vector<Played> taken_apart(const Stage& stage) {
  constexpr int within = -2;  // a cause inside the same whole: within - part
  std::vector<Played> apart;
  std::vector<int> first_part(stage.pieces.size());
  std::vector<const CostedSegment*> whole(stage.pieces.size(), nullptr);
  for (std::size_t c = 0; c < stage.places.size(); ++c) {
    const CostedSegment& costed = stage.segment_of(static_cast<int>(c)).costed;
    const Stage::Place place = stage.places[c];
    const auto piece = static_cast<std::size_t>(place.first);
    const int first = static_cast<int>(apart.size());
    if (place.whole) {
      whole[piece] = &costed;
      first_part[piece] = first;
    }
    for (std::size_t i = 0; i < costed.instructions.size(); ++i) {
      if (!place.whole) {
        first_part[piece + i] = static_cast<int>(apart.size());
        apart.push_back(stage.pieces[piece + i]);
        continue;
      }
      Played part = costed.alone[i];
      part.start += stage.pieces[piece].start;
      part.end += stage.pieces[piece].start;
      part.cause = part.cause >= 0 ? within - (first + part.cause) : stage.pieces[piece].cause;
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

// Whether something else computed during a piece that was simulated whole, so that its inner gaps
// may have been used.
bool overlaps(const std::vector<Played>& pieces) {
  double covered = 0.0;
  for (const Played& piece : pieces) {
    if (!piece.work.computes) continue;
    if (piece.start < covered) return true;
    covered = piece.end;
  }
  return false;
}

// The filled share of a stage's devices at its peak.
double filled_share(const Stage& stage) {
  return static_cast<double>(stage.program->memory.peak().count) /
         static_cast<double>(std::max<std::int64_t>(stage.capacity.count, 1));
}

// The parts of the stage's time until `last_piece`, where its work ends.
StepTime time_of(const Stage& stage, int last_piece) {
  if (!overlaps(stage.pieces)) return sum(attribute(stage.pieces, last_piece));
  const std::vector<Played> apart = taken_apart(stage);
  int last = 0;
  for (int i = 0; i < static_cast<int>(apart.size()); ++i)
    if (apart[i].end > apart[last].end) last = i;
  return sum(attribute(apart, last));
}

StepResult Simulation::result() const {
  StepResult result;
  const Stage* slowest = nullptr;
  Moment finish;
  std::int64_t most_sent = -1;
  double fullest = -1.0;
  for (const Stage& stage : stages_) {
    const Moment last = last_of(stage);
    if (slowest == nullptr || last.time > finish.time) {
      slowest = &stage;
      finish = last;
    }
    const CommunicationVolume& volume = stage.program->communication;
    const std::int64_t sent = sum(volume).count;
    if (sent > most_sent) {
      most_sent = sent;
      result.communication = volume;
    }
    if (const double filled = filled_share(stage); filled > fullest) {
      fullest = filled;
      result.memory = stage.program->memory;
      result.memory_stage = stage.program->stage;
    }
  }
  if (finish.piece >= 0) result.time = time_of(*slowest, finish.piece);
  return result;
}

// Seconds of each label on the critical path from `offset` in a segment that was simulated whole
// back to its start.
using LabelSeconds = std::array<double, static_cast<std::size_t>(Label::count_)>;
LabelSeconds way_through(const CostedSegment& costed, double offset) {
  LabelSeconds seconds{};
  // The piece that had ended last by then.
  int piece = -1;
  for (int i = 0; i < static_cast<int>(costed.alone.size()); ++i)
    if (const double end = costed.alone[i].end;
        end <= offset * (1.0 + 1e-9) && (piece < 0 || end > costed.alone[piece].end))
      piece = i;
  for (double t = offset; piece >= 0; piece = costed.alone[piece].cause) {
    const Played& part = costed.alone[piece];
    seconds[index_of(part.work.label)] += t - part.start;
    t = part.start;
  }
  return seconds;
}

std::vector<CriticalWork> Simulation::critical_path() const {
  struct Share {
    std::int64_t runs = 0;
    int last_call = -1;
    double seconds = 0.0;
  };
  using Shares = std::array<Share, static_cast<std::size_t>(Label::count_)>;
  std::vector<std::vector<Shares>> shares;  // by stage and segment
  std::vector<std::vector<int>> calls;      // by stage and piece
  std::vector<std::vector<int>> crossing;   // by stage and piece: index into crossings, or -1
  // By stage and segment: the path through all of it.
  std::vector<std::vector<std::optional<LabelSeconds>>> wholes;
  int stage_number = -1;
  Moment at;
  for (const Stage& stage : stages_) {
    shares.emplace_back(stage.segments.size());
    wholes.emplace_back(stage.segments.size());
    std::vector<int>& call_of = calls.emplace_back(stage.pieces.size(), -1);
    for (std::size_t c = 0; c < stage.places.size(); ++c) {
      const std::size_t count =
          stage.places[c].whole ? 1 : stage.segment_of(static_cast<int>(c)).costed.instructions.size();
      std::fill_n(call_of.begin() + stage.places[c].first, count, static_cast<int>(c));
    }
    std::vector<int>& crosses = crossing.emplace_back(stage.pieces.size(), -1);
    for (std::size_t i = 0; i < stage.crossings.size(); ++i) crosses[stage.crossings[i].piece] = static_cast<int>(i);
    if (const Moment last = last_of(stage); stage_number < 0 || last.time > at.time) {
      at = last;
      stage_number = stage.program->stage;
    }
  }
  while (at.piece >= 0) {
    const auto s = static_cast<std::size_t>(stage_number);
    const Stage& stage = stages_[s];
    const auto piece = static_cast<std::size_t>(at.piece);
    const Played& played = stage.pieces[piece];
    const int call = calls[s][piece];
    const auto segment = static_cast<std::size_t>(stage.program->calls[call].segment);
    const auto add = [&](std::size_t label, double seconds) {
      if (seconds <= 0.0) return;
      Share& share = shares[s][segment][label];
      share.runs += share.last_call != call;
      share.last_call = call;
      share.seconds += seconds;
    };
    if (stage.places[call].whole) {
      const CostedSegment& costed = stage.segments[segment].costed;
      std::optional<LabelSeconds>& whole = wholes[s][segment];
      if (!whole) whole = way_through(costed, costed.seconds);
      const LabelSeconds way = at.time >= played.end ? *whole : way_through(costed, at.time - played.start);
      for (std::size_t label = 0; label < way.size(); ++label) add(label, way[label]);
    } else {
      add(static_cast<std::size_t>(played.work.label), at.time - played.start);
    }
    at = {.time = played.start, .piece = played.cause};
    if (crossing[s][piece] >= 0) {
      const Stage::Crossing& cross = stage.crossings[crossing[s][piece]];
      stage_number = cross.stage;
      at.piece = cross.cause;
    }
  }
  std::vector<CriticalWork> path;
  for (std::size_t s = 0; s < stages_.size(); ++s)
    for (std::size_t g = 0; g < shares[s].size(); ++g)
      for (std::size_t label = 0; label < shares[s][g].size(); ++label) {
        const Share& share = shares[s][g][label];
        if (share.runs == 0) continue;
        const std::string& name = stages_[s].program->segments[g].name;
        const auto same = [&](const CriticalWork& work) {
          return work.stage == static_cast<int>(s) && work.segment == name && work.label == static_cast<Label>(label);
        };
        auto found = std::find_if(path.begin(), path.end(), same);
        if (found == path.end())
          found = path.insert(path.end(), {.stage = static_cast<int>(s),
                                           .segment = name,
                                           .label = static_cast<Label>(label),
                                           .runs = 0,
                                           .time = {}});
        found->runs += share.runs;
        found->time += Seconds(share.seconds);
      }
  return path;
}

StepDetails Simulation::details() const {
  StepDetails details;
  for (const Stage& stage : stages_) {
    const Moment last = last_of(stage);
    details.stages.push_back({.time = last.piece < 0 ? StepTime{} : time_of(stage, last.piece),
                              .memory = stage.program->memory,
                              .communication = stage.program->communication});
  }
  details.critical_path = critical_path();
  return details;
}

std::vector<CallEnds> Simulation::ends() const {
  std::vector<CallEnds> all;
  for (const Stage& stage : stages_) {
    CallEnds& ends = all.emplace_back();
    for (std::size_t c = 0; c < stage.places.size(); ++c) {
      ends.first.push_back(ends.seconds.size());
      const Stage::Place place = stage.places[c];
      const std::size_t pieces = place.whole ? 1 : stage.segment_of(static_cast<int>(c)).costed.instructions.size();
      for (std::size_t i = 0; i < pieces; ++i)
        ends.seconds.push_back(stage.pieces[static_cast<std::size_t>(place.first) + i].end);
    }
    ends.first.push_back(ends.seconds.size());
  }
  return all;
}

void Simulation::write(Timeline& timeline) const {
  for (const Stage& stage : stages_) {
    for (std::size_t c = 0; c < stage.program->calls.size(); ++c) {
      const Call& call = stage.program->calls[c];
      const Segment& segment = stage.program->segments[call.segment];
      const Playable& playable = stage.segment_of(static_cast<int>(c));
      for (std::size_t i = 0; i < segment.instructions.size(); ++i) {
        const auto first = static_cast<std::size_t>(stage.places[c].first);
        const bool whole = stage.places[c].whole;
        const Played& own = stage.pieces[whole ? first : first + i];
        const Played& part = playable.costed.alone[i];
        const Instruction& instruction = segment.instructions[i];
        timeline.events.push_back({.stage = stage.program->stage,
                                   .stream = instruction.stream,
                                   .name = instruction_title(segment, instruction),
                                   .label = instruction.label,
                                   .micro_batch = call.micro_batch,
                                   .start = Seconds(whole ? own.start + part.start : own.start),
                                   .end = Seconds(whole ? own.start + part.end : own.end)});
      }
    }
  }
}

void Simulation::report_deadlock() const {
  std::vector<std::string> waits;
  for (const Stage& stage : stages_) {
    for (const std::size_t s : stage.streams) {
      if (stage.head[s] >= stage.queue[s].size()) continue;
      const int number = stage.queue[s][stage.head[s]];
      const Playable& playable = stage.segment_of(number);
      if (playable.costed.stream != s) continue;
      const Call& call = stage.program->calls[number];
      const Segment& segment = stage.program->segments[call.segment];
      std::string reason;
      if (!stage.running[s].active) {
        for (const int event : call.waits)
          if (stage.event_piece[event] == unknown) {
            const int recorder = stage.event_recorder[event];
            reason = fmt::format("waits for call {} '{}'", recorder,
                                 stage.program->segments[stage.program->calls[recorder].segment].name);
            break;
          }
        if (reason.empty()) reason = "waits for a side stream";
      } else {
        std::size_t open = 0;
        while (
            stage.pieces[static_cast<std::size_t>(stage.places[static_cast<std::size_t>(number)].first) + open].done())
          ++open;
        const Instruction& instruction = segment.instructions[open];
        const SeatAt where = playable.seats[open];
        reason = where.meeting < 0 ? fmt::format("waits for events of instruction {}", open)
                                   : fmt::format("waits in '{}' for {}", meetings_[where.meeting].name,
                                                 instruction.kind == InstructionKind::send      ? "a receive"
                                                 : instruction.kind == InstructionKind::receive ? "a send"
                                                                                                : "the others");
      }
      waits.push_back(fmt::format("stage {} call {} '{}' {}", stage.program->stage, number, segment.name, reason));
    }
  }
  throw InternalError("the programs block one another: " + join(waits, "; "));
}

}  // namespace

StepResult simulate(std::span<const Program> programs, std::span<const CostModel> models, Timeline* timeline,
                    StepDetails* details, std::vector<CallEnds>* ends) {
  Simulation simulation(programs, models, details != nullptr);
  simulation.play();
  if (timeline != nullptr) simulation.write(*timeline);
  if (details != nullptr) *details = simulation.details();
  if (ends != nullptr) *ends = simulation.ends();
  return simulation.result();
}

}  // namespace parplan
