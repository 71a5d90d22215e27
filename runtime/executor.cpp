#include "runtime/executor.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <map>
#include <new>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

// More operands than the row of any op has.
constexpr std::size_t most_operands = 12;

constexpr int streams = static_cast<int>(stream_count);

int position_in(const std::vector<int>& ranks, int rank) {
  return static_cast<int>(std::ranges::find(ranks, rank) - ranks.begin());
}

// The events of the Program come first, then those of a Segment.
int event_after_segments(const Program& program) {
  int most = 0;
  for (const Segment& segment : program.segments) most = std::max(most, segment.events);
  return program.events + most;
}

}  // namespace

Executor::Executor(const Program& program, const GroupTable& groups, Backend& backend, Communicator& communicator,
                   const Arena& arena, SampleRange samples)
    : program_(program),
      backend_(backend),
      communicator_(communicator),
      arena_(arena),
      samples_(samples),
      first_segment_event_(program.events),
      fork_event_(event_after_segments(program)),
      tokens_(program, backend),
      profile_(program, backend, fork_event_ + 1 + streams) {
  for (const Group& group : program.groups) {
    Link& link = links_.emplace_back();
    if (group.ranks.size() > 1) link.group = groups.id_of(group.ranks);
    if (!is_neighbour(group.key)) continue;
    link.sends = groups.channel_to(group.key);
    link.receives = groups.channel_to(seen_from(group.key));
  }
  sent_before_.resize(static_cast<std::size_t>(fork_event_ + 1 + streams));

  for (const Segment& segment : program.segments) {
    Submission submission{.side_streams = {}, .repeats = segment.instructions.size() > 1};
    for (const Instruction& instruction : segment.instructions) {
      if (instruction.stream != segment.stream &&
          std::ranges::find(submission.side_streams, instruction.stream) == submission.side_streams.end())
        submission.side_streams.push_back(instruction.stream);
      // The host's work is handed over anew each time.
      const bool is_recorded = instruction.kind == InstructionKind::kernel && instruction.home == Home::device;
      if (!is_recorded || is_load(instruction)) submission.repeats = false;
    }
    submission.repeats &= submission.side_streams.empty();
    submissions_.push_back(std::move(submission));
  }

  std::map<std::pair<int, BufferIds>, std::int64_t> known;
  for (const Call& call : program.calls)
    keys_.push_back(
        known.try_emplace({call.segment, call.buffers}, static_cast<std::int64_t>(known.size())).first->second);
  if (program.loss_buffer || program.norm_buffer)
    results_ = new (backend.allocate_host(Bytes(sizeof(Results)))) Results;
}

Executor::~Executor() {
  if (results_ == nullptr) return;
  backend_.attach_thread();
  backend_.release_host(results_);
}

std::optional<double> Executor::gradient_norm() const {
  if (!program_.norm_buffer) return std::nullopt;
  const double scale = program_.loss_scale_buffer ? static_cast<double>(results_->scale.scale) : 1.0;
  return std::sqrt(static_cast<double>(results_->sum_of_squares)) / scale;
}

std::byte* Executor::address(const Operand& operand, const Call& call) const {
  return arena_.at(call.buffers[operand.binding]) + operand.offset;
}

StepMeasurement Executor::run_step(const Batch& batch, const StepScalars& scalars, StepTiming timing) {
  timing_ = backend_.works_at_once() || timing == StepTiming::each_instruction;
  backend_.attach_thread();  // between steps the thread may have used other ranks' arenas
  sent_ = {};
  copied_ = {};
  profile_.clear();
  tokens_.stage(batch, samples_);
  backend_.set_scalars(scalars);
  constexpr int compute = static_cast<int>(Stream::compute);
  if (program_.loss_scale_buffer)
    backend_.copy(compute, &results_->scale, arena_.at(*program_.loss_scale_buffer), Bytes(sizeof(LossScale)));
  backend_.synchronize();

  const auto begin = std::chrono::steady_clock::now();
  if (timing_) profile_.begin();
  for (std::size_t call = 0; call < program_.calls.size(); ++call) run_call(call);
  for (std::vector<SendTicket>& tickets : sent_by_) {
    wait_sent(Stream::compute, tickets);
    tickets.clear();
  }
  backend_.synchronize();
  communicator_.check();

  StepMeasurement step;
  step.total = Seconds(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  // The loss is reduced on a stream of its own: only now is it complete.
  if (program_.loss_buffer) backend_.copy(compute, &results_->loss, arena_.at(*program_.loss_buffer), Bytes(4));
  if (program_.norm_buffer)
    backend_.copy(compute, &results_->sum_of_squares, arena_.at(*program_.norm_buffer), Bytes(4));
  if (results_ != nullptr) backend_.synchronize();
  step.communication = sent_;
  step.copied = copied_;
  step.is_profiled = timing_;
  if (timing_) step.time = profile_.attribute(step.total);
  return step;
}

void Executor::wait(Stream stream, int event) {
  wait_sent(stream, sent_before_[event]);
  backend_.wait(static_cast<int>(stream), event);
  if (timing_) profile_.wait(stream, event);
}

void Executor::record(Stream stream, int event) {
  sent_before_[event] = sent_by_[index_of(stream)];
  backend_.record(static_cast<int>(stream), event);
  if (timing_) profile_.record(stream, event);
}

void Executor::wait_sent(Stream stream, const std::vector<SendTicket>& tickets) {
  if (tickets.empty()) return;
  const WaitingForRanks waiting(flight_);
  for (const SendTicket& ticket : tickets) communicator_.wait_sent(static_cast<int>(stream), ticket);
}

void Executor::run_call(std::size_t index) {
  const Call& call = program_.calls[index];
  const Segment& segment = program_.segments[call.segment];
  const Submission& submission = submissions_[call.segment];
  for (const int event : call.waits) wait(segment.stream, event);
  if (!submission.side_streams.empty()) {
    record(segment.stream, fork_event_);
    for (const Stream side : submission.side_streams) wait(side, fork_event_);
  }
  if (submission.repeats && !timing_) {
    flight_.begin(index, 0);
    backend_.repeat(static_cast<int>(segment.stream), keys_[index], [&] { submit(segment, call, index); });
  } else {
    submit(segment, call, index);
  }
  for (const Stream side : submission.side_streams) {
    const int join = join_event(side);
    record(side, join);
    wait(segment.stream, join);
  }
  if (call.records) record(segment.stream, *call.records);
}

void Executor::submit(const Segment& segment, const Call& call, std::size_t index) {
  for (std::size_t i = 0; i < segment.instructions.size(); ++i) {
    const Instruction& instruction = segment.instructions[i];
    for (const int event : instruction.waits) wait(instruction.stream, first_segment_event_ + event);
    if (timing_) profile_.begin_piece(segment, i);
    flight_.begin(index, i);
    Seconds waited;
    if (instruction.kind == InstructionKind::kernel) {
      submit(instruction, call, index);
    } else if (instruction.kind == InstructionKind::copy) {
      copy(instruction, call);
    } else {
      const WaitingForRanks waiting(flight_);
      const Transfer transfer = communicate(instruction, call);
      waited = transfer.waited;
      sent_[instruction.group.axis] += transfer.sent;
    }
    if (timing_) profile_.end_piece(waited);
    if (instruction.records) record(instruction.stream, first_segment_event_ + *instruction.records);
  }
}

void Executor::submit(const Instruction& instruction, const Call& call, std::size_t call_index) {
  const int stream = static_cast<int>(instruction.stream);
  if (is_load(instruction)) {
    backend_.copy(stream, address(instruction.operands[0], call), tokens_.ids_of(instruction, call_index),
                  Bytes(4 * instruction.shape.rows));
    return;
  }
  std::array<void*, most_operands> operands{};
  PARPLAN_ASSERT(instruction.operands.size() <= most_operands, fmt::format("{} operands", instruction.operands.size()));
  for (std::size_t i = 0; i < instruction.operands.size(); ++i) operands[i] = address(instruction.operands[i], call);
  const KernelCall kernel{.kind = instruction.op,
                          .shape = instruction.shape,
                          .type = instruction.type,
                          .operands = {operands.data(), instruction.operands.size()}};
  if (instruction.home == Home::host)
    backend_.run_on_host(stream, kernel);
  else
    backend_.run(stream, kernel);
}

void Executor::copy(const Instruction& instruction, const Call& call) {
  const Operand &from = instruction.operands.front(), &to = instruction.operands.back();
  const int stream = static_cast<int>(instruction.stream);
  const auto in_file = [&](const Operand& operand) {
    return arena_.in_file(call.buffers[operand.binding]) + operand.offset;
  };
  if (instruction.stream == Stream::from_nvme)
    backend_.transfer_file(stream, arena_.file().reading(in_file(from), address(to, call), to.bytes));
  else if (instruction.stream == Stream::to_nvme)
    backend_.transfer_file(stream, arena_.file().writing(in_file(to), address(from, call), to.bytes));
  else
    backend_.copy(stream, address(to, call), address(from, call), Bytes(to.bytes));
  copied_on(copied_, instruction.stream) += Bytes(to.bytes);
}

Transfer Executor::communicate(const Instruction& instruction, const Call& call) {
  const auto found = std::ranges::find(program_.groups, instruction.group, &Group::key);
  PARPLAN_ASSERT(found != program_.groups.end(), name(instruction.group));
  const std::vector<int>& ranks = found->ranks;
  const Link& link = links_[found - program_.groups.begin()];
  const int stream = static_cast<int>(instruction.stream);
  const Operand& last = instruction.operands.back();
  const std::int64_t element = size_of(instruction.type);
  const Elements data{.data = address(last, call), .count = last.bytes / element, .type = instruction.type};
  switch (instruction.kind) {
    case InstructionKind::all_reduce_sum:
      return communicator_.all_reduce(stream, link.group.value(), Reduction::sum, data);
    case InstructionKind::all_reduce_max:
      return communicator_.all_reduce(stream, link.group.value(), Reduction::max, data);
    case InstructionKind::reduce_scatter: return communicator_.reduce_scatter(stream, link.group.value(), data);
    case InstructionKind::all_gather: {
      const int members = static_cast<int>(ranks.size());
      std::byte* own =
          address(last, call) + chunk_begin(data.count, members, position_in(ranks, program_.rank)) * element;
      const std::byte* shard = address(instruction.operands[0], call);
      if (own != shard) backend_.copy(stream, own, shard, Bytes(instruction.operands[0].bytes));
      return communicator_.all_gather(stream, link.group.value(), data);
    }
    case InstructionKind::all_to_all: {
      const Elements from{
          .data = address(instruction.operands[0], call), .count = data.count, .type = instruction.type};
      return communicator_.all_to_all(stream, link.group.value(), from, data);
    }
    case InstructionKind::send: {
      const SendTicket ticket = communicator_.send(stream, ranks.front(), link.sends.value(), data);
      std::vector<SendTicket>& sent = sent_by_[index_of(instruction.stream)];
      const auto before = std::ranges::find_if(sent, [&](const SendTicket& earlier) {
        return earlier.destination == ticket.destination && earlier.channel == ticket.channel;
      });
      if (before != sent.end())
        *before = ticket;
      else
        sent.push_back(ticket);
      return {.sent = Bytes(last.bytes), .waited = {}, .moving = {}};
    }
    case InstructionKind::receive:
      return communicator_.receive(stream, ranks.front(), link.receives.value(), data);
    case InstructionKind::broadcast: return communicator_.broadcast(stream, link.group.value(), data);
    case InstructionKind::reduce_sum: return communicator_.reduce(stream, link.group.value(), data);
    case InstructionKind::gather:
    case InstructionKind::scatter: {
      // The whole is on the first rank alone.
      const Operand& first = instruction.operands.front();
      const Elements own{.data = address(first, call), .count = first.bytes / element, .type = instruction.type};
      const Elements whole = instruction.operands.size() > 1
                                 ? data
                                 : Elements{.data = nullptr, .count = 0, .type = instruction.type};
      return instruction.kind == InstructionKind::gather
                 ? communicator_.gather(stream, link.group.value(), own, whole)
                 : communicator_.scatter(stream, link.group.value(), whole, own);
    }
    case InstructionKind::kernel:
    case InstructionKind::copy:
      break;
  }
  PARPLAN_ASSERT(false, name(instruction.kind));
  return {};
}

}  // namespace parplan
