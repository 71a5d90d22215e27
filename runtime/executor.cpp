#include "runtime/executor.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstdint>
#include <map>

#include <fmt/format.h>

#include "planner/base/enum.h"
#include "planner/base/error.h"

namespace parplan {
namespace {

// More operands than the row of any op has.
constexpr std::size_t most_operands = 12;

constexpr int streams = static_cast<int>(stream_count);

bool is_load(const Instruction& instruction) {
  return instruction.kind == InstructionKind::kernel &&
         (instruction.op == OpKind::load_tokens || instruction.op == OpKind::load_targets);
}

int position_in(const std::vector<int>& ranks, int rank) {
  return static_cast<int>(std::ranges::find(ranks, rank) - ranks.begin());
}

}  // namespace

GroupTable::GroupTable(const std::vector<Program>& programs) {
  std::vector<std::vector<int>> known;
  for (const Program& program : programs) {
    for (const Group& group : program.groups)
      if (group.ranks.size() > 1) known.push_back(group.ranks);
    for (const int next : program.group(next_stage)) {
      routes_.push_back({.source = program.rank, .destination = next, .channel = to_next});
      routes_.push_back({.source = next, .destination = program.rank, .channel = to_previous});
    }
  }
  std::sort(known.begin(), known.end());
  known.erase(std::unique(known.begin(), known.end()), known.end());
  for (std::size_t i = 0; i < known.size(); ++i) groups_.push_back({.id = static_cast<int>(i), .ranks = known[i]});
  std::sort(routes_.begin(), routes_.end());
}

int GroupTable::id_of(const std::vector<int>& ranks) const {
  const auto found = std::ranges::find(groups_, ranks, &CommunicationGroup::ranks);
  PARPLAN_ASSERT(found != groups_.end(), fmt::format("no group of {} ranks", ranks.size()));
  return found->id;
}

void warm_up(const Program& program, Backend& backend, const Arena& arena) {
  if (backend.works_at_once()) return;
  // Determines which kernel runs: that of a matrix product also depends on the alignment of its
  // operands, up to 256 bytes.
  struct Launch {
    OpKind op{};
    DataType type{};
    OpShape shape;
    std::vector<int> alignments;
    bool operator==(const Launch&) const = default;
  };
  constexpr int most_alignment = 8;
  constexpr std::int64_t word = 4;
  constexpr StreamId compute = static_cast<StreamId>(Stream::compute);
  backend.attach_thread();
  for (StreamId stream = 0; stream < streams; ++stream) backend.fill(stream, arena.begin(), 0, 1);
  backend.synchronize();
  backend.set_scalars({});
  std::vector<Launch> launched;
  for (const Call& call : program.calls)
    for (const Instruction& instruction : program.segments[call.segment].instructions) {
      if (instruction.kind != InstructionKind::kernel || is_load(instruction)) continue;
      Launch launch{.op = instruction.op, .type = instruction.type, .shape = instruction.shape, .alignments = {}};
      std::vector<void*> operands;
      for (const Operand& operand : instruction.operands) {
        operands.push_back(arena.at(call.buffers[operand.binding]) + operand.offset);
        launch.alignments.push_back(
            std::min(std::countr_zero(reinterpret_cast<std::uintptr_t>(operands.back())), most_alignment));
      }
      if (std::ranges::find(launched, launch) != launched.end()) continue;
      launched.push_back(std::move(launch));
      for (std::size_t i = 0; i < operands.size(); ++i)
        backend.fill(compute, operands[i], 0, ceil_div(instruction.operands[i].bytes, word));
      backend.run(compute,
                  {.kind = instruction.op, .shape = instruction.shape, .type = instruction.type, .operands = operands});
    }
  backend.synchronize();
  arena.refill();
}

Executor::Executor(const Program& program, const GroupTable& groups, Backend& backend, Communicator& communicator,
                   const Arena& arena, int data_rank, int data_ranks)
    : program_(program),
      backend_(backend),
      communicator_(communicator),
      arena_(arena),
      data_rank_(data_rank),
      data_ranks_(data_ranks) {
  for (const Group& group : program.groups)
    group_ids_.push_back(group.ranks.size() > 1 ? groups.id_of(group.ranks) : -1);
  tickets_.resize(static_cast<std::size_t>(program.events));
  unrecorded_.reserve(program.calls.size());

  int segment_events = 0;
  for (const Segment& segment : program.segments) {
    Submission submission{.side_streams = {}, .repeats = segment.instructions.size() > 1};
    for (const Instruction& instruction : segment.instructions) {
      if (instruction.stream != segment.stream &&
          std::ranges::find(submission.side_streams, instruction.stream) == submission.side_streams.end())
        submission.side_streams.push_back(instruction.stream);
      if (instruction.kind != InstructionKind::kernel || is_load(instruction)) submission.repeats = false;
    }
    submission.repeats &= submission.side_streams.empty();
    submissions_.push_back(std::move(submission));
    segment_events = std::max(segment_events, segment.events);
    measurements_.emplace_back(segment.instructions.size());
  }
  first_segment_event_ = program.events;
  fork_event_ = first_segment_event_ + segment_events;

  std::map<std::pair<int, std::vector<int>>, std::int64_t> known;
  std::int64_t tokens = 0;
  std::size_t pieces = 0;
  for (const Call& call : program.calls) {
    keys_.push_back(
        known.try_emplace({call.segment, call.buffers}, static_cast<std::int64_t>(known.size())).first->second);
    const Segment& segment = program.segments[call.segment];
    pieces += segment.instructions.size();
    staged_at_.push_back(std::ranges::any_of(segment.instructions, is_load) ? tokens : -1);
    for (const Instruction& instruction : segment.instructions)
      if (is_load(instruction)) tokens += instruction.shape.rows;
  }
  pieces_.reserve(pieces);
  piece_of_.reserve(pieces);
  dependencies_.resize(pieces);
  backend.prepare_marks(2 * static_cast<int>(pieces) + 1);
  stream_heads_.resize(stream_count);
  event_heads_.resize(static_cast<std::size_t>(fork_event_ + 1 + streams));
  if (tokens > 0) tokens_ = static_cast<std::int32_t*>(backend.allocate_host(Bytes(4 * tokens)));
  if (program.loss_buffer) {
    loss_ = static_cast<float*>(backend.allocate_host(Bytes(4)));
    *loss_ = 0.0f;
  }
}

Executor::~Executor() {
  backend_.attach_thread();
  if (tokens_ != nullptr) backend_.release_host(tokens_);
  if (loss_ != nullptr) backend_.release_host(loss_);
}

std::byte* Executor::address(const Operand& operand, const Call& call) const {
  return arena_.at(call.buffers[operand.binding]) + operand.offset;
}

StepMeasurement Executor::run_step(const Batch& batch, const StepScalars& scalars, StepTiming timing) {
  timing_ = backend_.works_at_once() || timing == StepTiming::each_instruction;
  backend_.attach_thread();  // between steps the thread may have used other ranks' arenas
  sent_ = {};
  pieces_.clear();
  piece_of_.clear();
  for (Heads& heads : stream_heads_) heads.clear();
  for (Heads& heads : event_heads_) heads.clear();
  stage_tokens(batch);
  backend_.set_scalars(scalars);
  backend_.synchronize();

  const auto begin = std::chrono::steady_clock::now();
  const int compute = static_cast<int>(Stream::compute);
  if (timing_) backend_.mark(compute, 0);
  for (std::size_t call = 0; call < program_.calls.size(); ++call) run_call(call);
  for (std::size_t event = 0; event < tickets_.size(); ++event) wait_sent(Stream::compute, static_cast<int>(event));
  for (const auto& [stream, ticket] : unrecorded_) communicator_.wait_sent(static_cast<int>(stream), ticket);
  unrecorded_.clear();
  backend_.synchronize();
  communicator_.check();

  StepMeasurement step;
  step.total = Seconds(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  if (loss_ != nullptr) {  // the loss is reduced on a stream of its own: only now is it complete
    backend_.copy(compute, loss_, arena_.at(*program_.loss_buffer), Bytes(4));
    backend_.synchronize();
  }
  step.communication = sent_;
  if (timing_) take_apart(step);
  return step;
}

// Token ids of the micro-batches in memory order [sequence, batch]; targets are the ids one
// position later.
void Executor::stage_tokens(const Batch& batch) {
  const std::int64_t stride = batch.sequence + 1;
  const std::int64_t global_batch = static_cast<std::int64_t>(batch.ids.size()) / stride;
  for (std::size_t c = 0; c < program_.calls.size(); ++c) {
    if (staged_at_[c] < 0) continue;
    const Call& call = program_.calls[c];
    std::int32_t* to = tokens_ + staged_at_[c];
    for (const Instruction& instruction : program_.segments[call.segment].instructions) {
      if (!is_load(instruction)) continue;
      const std::int64_t samples = instruction.shape.batch;
      const std::int64_t first = data_rank_ * (global_batch / data_ranks_) + call.micro_batch * samples;
      const std::int64_t shift = instruction.op == OpKind::load_targets ? 1 : 0;
      for (std::int64_t s = 0; s < instruction.shape.sequence; ++s)
        for (std::int64_t b = 0; b < samples; ++b) *to++ = batch.ids[(first + b) * stride + s + shift];
    }
  }
}

void Executor::wait(Stream stream, int event) {
  backend_.wait(static_cast<int>(stream), event);
  if (!timing_) return;
  const Heads& from = event_heads_[event];
  Heads& heads = stream_heads_[index_of(stream)];
  heads.insert(heads.end(), from.begin(), from.end());
}

void Executor::record(Stream stream, int event) {
  backend_.record(static_cast<int>(stream), event);
  if (timing_) event_heads_[event] = stream_heads_[index_of(stream)];
}

void Executor::wait_sent(Stream stream, int event) {
  std::optional<SendTicket>& ticket = tickets_[event];
  if (!ticket) return;
  communicator_.wait_sent(static_cast<int>(stream), *ticket);
  ticket.reset();
}

void Executor::run_call(std::size_t index) {
  const Call& call = program_.calls[index];
  const Segment& segment = program_.segments[call.segment];
  const Submission& submission = submissions_[call.segment];
  for (const int event : call.waits) {
    wait_sent(segment.stream, event);
    wait(segment.stream, event);
  }
  if (!submission.side_streams.empty()) {
    record(segment.stream, fork_event_);
    for (const Stream side : submission.side_streams) wait(side, fork_event_);
  }
  posted_.reset();
  if (submission.repeats && !timing_) {
    backend_.repeat(static_cast<int>(segment.stream), keys_[index], [&] { submit(segment, call, index); });
  } else {
    submit(segment, call, index);
  }
  for (const Stream side : submission.side_streams) {
    const int join = fork_event_ + 1 + static_cast<int>(side);
    record(side, join);
    wait(segment.stream, join);
  }
  if (call.records) record(segment.stream, *call.records);
  if (!posted_) return;
  if (call.records) {
    tickets_[*call.records] = posted_;
  } else {
    unrecorded_.emplace_back(segment.stream, *posted_);
  }
}

void Executor::submit(const Segment& segment, const Call& call, std::size_t index) {
  for (std::size_t i = 0; i < segment.instructions.size(); ++i) {
    const Instruction& instruction = segment.instructions[i];
    for (const int event : instruction.waits) wait(instruction.stream, first_segment_event_ + event);
    if (timing_) begin_piece(segment, i);
    Seconds waited;
    if (instruction.kind == InstructionKind::kernel) {
      submit(instruction, call, index);
    } else {
      const Transfer transfer = communicate(instruction, call);
      waited = transfer.waited;
      sent_[instruction.group.axis] += transfer.sent;
    }
    if (timing_) end_piece(waited);
    if (instruction.records) record(instruction.stream, first_segment_event_ + *instruction.records);
  }
}

void Executor::submit(const Instruction& instruction, const Call& call, std::size_t call_index) {
  const int stream = static_cast<int>(instruction.stream);
  if (is_load(instruction)) {
    std::int64_t at = staged_at_[call_index];
    for (const Instruction& earlier : program_.segments[call.segment].instructions) {
      if (&earlier == &instruction) break;
      if (is_load(earlier)) at += earlier.shape.rows;
    }
    backend_.copy(stream, address(instruction.operands[0], call), tokens_ + at, Bytes(4 * instruction.shape.rows));
    return;
  }
  std::array<void*, most_operands> operands{};
  PARPLAN_ASSERT(instruction.operands.size() <= most_operands, fmt::format("{} operands", instruction.operands.size()));
  for (std::size_t i = 0; i < instruction.operands.size(); ++i) operands[i] = address(instruction.operands[i], call);
  backend_.run(stream, {.kind = instruction.op,
                        .shape = instruction.shape,
                        .type = instruction.type,
                        .operands = {operands.data(), instruction.operands.size()}});
}

Transfer Executor::communicate(const Instruction& instruction, const Call& call) {
  const auto found = std::ranges::find(program_.groups, instruction.group, &Group::key);
  PARPLAN_ASSERT(found != program_.groups.end(), name(instruction.group));
  const std::vector<int>& ranks = found->ranks;
  const int group = group_ids_[found - program_.groups.begin()];
  const int stream = static_cast<int>(instruction.stream);
  const Operand& last = instruction.operands.back();
  const std::int64_t element = size_of(instruction.type);
  const Elements data{.data = address(last, call), .count = last.bytes / element, .type = instruction.type};
  const bool towards_next = instruction.group == next_stage;
  switch (instruction.kind) {
    case InstructionKind::all_reduce_sum: return communicator_.all_reduce(stream, group, Reduction::sum, data);
    case InstructionKind::all_reduce_max: return communicator_.all_reduce(stream, group, Reduction::max, data);
    case InstructionKind::reduce_scatter: return communicator_.reduce_scatter(stream, group, data);
    case InstructionKind::all_gather: {
      const int members = static_cast<int>(ranks.size());
      std::byte* own =
          address(last, call) + chunk_begin(data.count, members, position_in(ranks, program_.rank)) * element;
      const std::byte* shard = address(instruction.operands[0], call);
      if (own != shard) backend_.copy(stream, own, shard, Bytes(instruction.operands[0].bytes));
      return communicator_.all_gather(stream, group, data);
    }
    case InstructionKind::send:
      posted_ =
          communicator_.send(stream, ranks.front(), towards_next ? GroupTable::to_next : GroupTable::to_previous, data);
      return {.sent = Bytes(last.bytes), .waited = {}, .moving = {}};
    case InstructionKind::receive:  // what comes from the next stage was sent to the previous one
      return communicator_.receive(stream, ranks.front(), towards_next ? GroupTable::to_previous : GroupTable::to_next,
                                   data);
    case InstructionKind::kernel: break;
  }
  PARPLAN_ASSERT(false, name(instruction.kind));
  return {};
}

// Profiled steps ----------------------------------------------------------------------------------

// Concurrent work has one order, the launch order: each piece waits for the one before. Otherwise a
// piece waits for the piece that its stream came from.
void Executor::begin_piece(const Segment& segment, std::size_t instruction) {
  const Instruction& what = segment.instructions[instruction];
  const int piece = static_cast<int>(pieces_.size());
  pieces_.push_back({.work = {.computes = what.kind == InstructionKind::kernel, .label = what.label}});
  piece_of_.push_back(
      {.segment = static_cast<int>(&segment - program_.segments.data()), .instruction = static_cast<int>(instruction)});
  Heads& dependencies = dependencies_[piece];
  Heads& heads = stream_heads_[index_of(what.stream)];
  if (backend_.works_at_once()) {
    dependencies.clear();
    if (piece > 0) dependencies.push_back(piece - 1);
  } else {
    dependencies = heads;
  }
  heads.assign(1, piece);
  backend_.mark(static_cast<int>(what.stream), 2 * piece + 1);
}

void Executor::end_piece(Seconds waited) {
  const int piece = static_cast<int>(pieces_.size()) - 1;
  const PieceOf& of = piece_of_.back();
  piece_of_.back().waited_s = waited.value;
  const Instruction& what = program_.segments[of.segment].instructions[of.instruction];
  backend_.mark(static_cast<int>(what.stream), 2 * piece + 2);
}

void Executor::take_apart(StepMeasurement& step) {
  int last = -1;
  double end = 0.0;
  for (std::size_t p = 0; p < pieces_.size(); ++p) {
    Played& piece = pieces_[p];
    const PieceOf& of = piece_of_[p];
    piece.end = backend_.seconds_at(2 * static_cast<int>(p) + 2);
    piece.start = std::min(backend_.seconds_at(2 * static_cast<int>(p) + 1) + of.waited_s, piece.end);
    piece.cause = -1;
    for (const int before : dependencies_[p])
      if (piece.cause < 0 || pieces_[before].end > pieces_[piece.cause].end)
        piece.cause = before;
    if (last < 0 || piece.end >= end) {
      last = static_cast<int>(p);
      end = piece.end;
    }
    InstructionMeasurement& measurement = measurements_[of.segment][of.instruction];
    measurement.runs += 1;
    measurement.busy_s += piece.end - piece.start;
    measurement.waited_s += of.waited_s;
  }
  step.taken_apart = true;
  step.time = sum(attribute(pieces_, last, computing_));
  // The rest of the step belongs to no instruction: the last sends, the copy of the loss, the
  // return to the caller.
  step.time.bubble += std::max(step.total - step.time.total(), Seconds(0.0));
}

}  // namespace parplan
