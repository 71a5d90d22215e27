#include "runtime/step_profile.h"

#include <algorithm>

#include "planner/base/enum_index.h"

namespace parplan {

StepProfile::StepProfile(const Program& program, Backend& backend, int events) : program_(program), backend_(backend) {
  for (const Segment& segment : program.segments) measurements_.emplace_back(segment.instructions.size());
  std::size_t pieces = 0;
  for (const Call& call : program.calls) pieces += program.segments[call.segment].instructions.size();
  pieces_.reserve(pieces);
  piece_of_.reserve(pieces);
  dependencies_.resize(pieces);
  backend.prepare_marks(2 * static_cast<int>(pieces) + 1);
  stream_heads_.resize(stream_count);
  event_heads_.resize(static_cast<std::size_t>(events));
}

void StepProfile::clear() {
  pieces_.clear();
  piece_of_.clear();
  last_in_turn_ = -1;
  for (Heads& heads : stream_heads_) heads.clear();
  for (Heads& heads : event_heads_) heads.clear();
}

void StepProfile::begin() { backend_.mark(static_cast<int>(Stream::compute), 0); }

void StepProfile::wait(Stream stream, int event) {
  const Heads& from = event_heads_[event];
  Heads& heads = stream_heads_[index_of(stream)];
  heads.insert(heads.end(), from.begin(), from.end());
}

void StepProfile::record(Stream stream, int event) { event_heads_[event] = stream_heads_[index_of(stream)]; }

// Work that takes turns has one order, the launch order: each piece waits for the one before.
// Others wait for the piece that their stream came from, and so does each for file transfers, which
// go on beside it.
void StepProfile::begin_piece(const Segment& segment, std::size_t instruction) {
  const Instruction& what = segment.instructions[instruction];
  const int piece = static_cast<int>(pieces_.size());
  pieces_.push_back({.work = {.computes = what.kind == InstructionKind::kernel, .label = what.label}});
  piece_of_.push_back(
      {.segment = static_cast<int>(&segment - program_.segments.data()), .instruction = static_cast<int>(instruction)});
  Heads& dependencies = dependencies_[piece];
  Heads& heads = stream_heads_[index_of(what.stream)];
  dependencies = heads;
  if (backend_.works_at_once()) {
    if (last_in_turn_ >= 0) dependencies.push_back(last_in_turn_);
    if (!is_of_file(what.stream)) last_in_turn_ = piece;
  }
  heads.assign(1, piece);
  backend_.mark(static_cast<int>(what.stream), 2 * piece + 1);
}

void StepProfile::end_piece(Seconds waited) {
  const int piece = static_cast<int>(pieces_.size()) - 1;
  const PieceOf& of = piece_of_.back();
  piece_of_.back().waited = waited;
  const Instruction& what = program_.segments[of.segment].instructions[of.instruction];
  backend_.mark(static_cast<int>(what.stream), 2 * piece + 2);
}

StepTime StepProfile::attribute(Seconds total) {
  std::optional<int> last;
  for (std::size_t p = 0; p < pieces_.size(); ++p) {
    Played& piece = pieces_[p];
    const PieceOf& of = piece_of_[p];
    piece.end = backend_.time_at(2 * static_cast<int>(p) + 2);
    piece.start = std::min(backend_.time_at(2 * static_cast<int>(p) + 1) + of.waited, piece.end);
    piece.cause.reset();
    for (const int before : dependencies_[p])
      if (!piece.cause || pieces_[before].end > pieces_[*piece.cause].end) piece.cause = before;
    if (!last || piece.end >= pieces_[*last].end) last = static_cast<int>(p);
    InstructionMeasurement& measurement = measurements_[of.segment][of.instruction];
    measurement.runs += 1;
    measurement.busy += piece.end - piece.start;
    measurement.waited += of.waited;
  }
  StepTime time = sum(parplan::attribute(pieces_, last, computing_));
  // The rest of the step belongs to no instruction: the last sends, the copy of the loss, the
  // return to the caller.
  time.bubble += std::max(total - time.total(), Seconds(0.0));
  return time;
}

}  // namespace parplan
