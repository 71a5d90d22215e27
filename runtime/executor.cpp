#include "runtime/executor.h"

#include <algorithm>
#include <array>
#include <chrono>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// More operands than any op's row has.
constexpr std::size_t most_operands = 12;

}  // namespace

GroupTable::GroupTable(const std::vector<Program>& programs) {
  std::vector<std::vector<int>> known;
  for (const Program& program : programs)
    for (const std::vector<int>& ranks : program.groups)
      if (ranks.size() > 1) known.push_back(ranks);
  std::sort(known.begin(), known.end());
  known.erase(std::unique(known.begin(), known.end()), known.end());
  for (std::size_t i = 0; i < known.size(); ++i) groups_.push_back({.id = static_cast<int>(i), .ranks = known[i]});
}

int GroupTable::id_of(const std::vector<int>& ranks) const {
  const auto found = std::ranges::find(groups_, ranks, &CommunicationGroup::ranks);
  PARPLAN_ASSERT(found != groups_.end(), fmt::format("no group of {} ranks", ranks.size()));
  return found->id;
}

Executor::Executor(const Program& program, const GroupTable& groups, Backend& backend, Communicator& communicator,
                   const Arena& arena, int data_rank, int data_ranks)
    : program_(program), backend_(backend), communicator_(communicator), arena_(arena), data_rank_(data_rank), data_ranks_(data_ranks) {
  for (const std::vector<int>& ranks : program.groups) group_ids_.push_back(ranks.size() > 1 ? groups.id_of(ranks) : -1);
  tickets_.resize(static_cast<std::size_t>(program.events));
  awaited_.assign(static_cast<std::size_t>(program.events), false);
  for (const Segment& segment : program.segments) measurements_.emplace_back(segment.instructions.size());
  unrecorded_.reserve(program.calls.size());
}

std::byte* Executor::address(const Operand& operand, const Call& call) const {
  return arena_.at(call.buffers[static_cast<std::size_t>(operand.binding)]) + operand.offset;
}

void Executor::account(Label label, double busy, double waited) {
  step_.time.part(label) += Seconds(busy);
  step_.time.bubble += Seconds(waited);
}

StepMeasurement Executor::run_step(const Batch& batch, const StepScalars& scalars) {
  batch_ = &batch;
  scalars_ = scalars;
  scalars_.has_norm = program_.norm_buffer >= 0;
  step_ = {};
  clock_ = now();
  for (const Call& call : program_.calls) run_call(call);
  for (std::size_t event = 0; event < awaited_.size(); ++event)
    if (awaited_[event]) wait_for(static_cast<int>(event));
  for (const SendTicket& ticket : unrecorded_) communicator_.wait_sent(ticket);
  unrecorded_.clear();
  const double end = now();
  step_.time.bubble += Seconds(end - clock_);
  return step_;
}

void Executor::wait_for(int event) {
  const std::size_t at = static_cast<std::size_t>(event);
  if (!awaited_[at]) return;
  communicator_.wait_sent(tickets_[at]);
  awaited_[at] = false;
}

void Executor::run_call(const Call& call) {
  for (const int event : call.waits) {
    if (!awaited_[static_cast<std::size_t>(event)]) continue;
    wait_for(event);
    const double end = now();
    account(Label::pipeline, 0.0, end - clock_);
    clock_ = end;
  }
  const Segment& segment = program_.segments[static_cast<std::size_t>(call.segment)];
  std::vector<InstructionMeasurement>& measured = measurements_[static_cast<std::size_t>(call.segment)];
  posted_ = false;
  for (std::size_t i = 0; i < segment.instructions.size(); ++i) {
    const Instruction& instruction = segment.instructions[i];
    double waited = 0.0;
    if (instruction.kind == InstructionKind::kernel) {
      run_kernel(instruction, call);
    } else {
      const Transfer transfer = communicate(instruction, call);
      waited = transfer.waited.value;
      CommunicationVolume& volume = step_.communication;
      (instruction.label == Label::tensor ? volume.tensor : instruction.label == Label::data ? volume.data : volume.pipeline) += transfer.sent;
    }
    const double end = now();
    waited = std::min(waited, end - clock_);
    const double busy = end - clock_ - waited;
    clock_ = end;
    account(instruction.label, busy, waited);
    measured[i].runs += 1;
    measured[i].busy_s += busy;
    measured[i].waited_s += waited;
  }
  if (!posted_) return;
  if (call.records) {
    tickets_[static_cast<std::size_t>(*call.records)] = last_ticket_;
    awaited_[static_cast<std::size_t>(*call.records)] = true;
  } else {
    unrecorded_.push_back(last_ticket_);
  }
}

void Executor::run_kernel(const Instruction& instruction, const Call& call) {
  if (instruction.op == OpKind::load_tokens) return load(instruction, call, 0);
  if (instruction.op == OpKind::load_targets) return load(instruction, call, 1);
  std::array<void*, most_operands> operands{};
  PARPLAN_ASSERT(instruction.operands.size() <= most_operands, fmt::format("{} operands", instruction.operands.size()));
  for (std::size_t i = 0; i < instruction.operands.size(); ++i) operands[i] = address(instruction.operands[i], call);
  backend_.run(static_cast<int>(instruction.stream), {.kind = instruction.op,
                                                      .shape = instruction.shape,
                                                      .operands = {operands.data(), instruction.operands.size()},
                                                      .scalars = &scalars_});
}

// Token ids of the micro-batch in memory order [sequence, batch]; targets are the ids one position further.
void Executor::load(const Instruction& instruction, const Call& call, int shift) {
  std::int32_t* to = reinterpret_cast<std::int32_t*>(address(instruction.operands[0], call));
  const std::int64_t sequence = instruction.shape.sequence;
  const std::int64_t samples = instruction.shape.batch;
  const std::int64_t stride = batch_->sequence + 1;
  const std::int64_t global_batch = static_cast<std::int64_t>(batch_->ids.size()) / stride;
  const std::int64_t first = data_rank_ * (global_batch / data_ranks_) + call.micro_batch * samples;
  for (std::int64_t s = 0; s < sequence; ++s)
    for (std::int64_t b = 0; b < samples; ++b)
      to[s * samples + b] = batch_->ids[static_cast<std::size_t>((first + b) * stride + s + shift)];
}

Transfer Executor::communicate(const Instruction& instruction, const Call& call) {
  const std::vector<int>& ranks = program_.group(instruction.group);
  const int group = group_ids_[static_cast<std::size_t>(instruction.group)];
  const Operand& last = instruction.operands.back();
  float* data = reinterpret_cast<float*>(address(last, call));
  const std::int64_t count = last.bytes / 4;
  const int channel = instruction.group == GroupKind::next ? 0 : 1;
  switch (instruction.kind) {
    case InstructionKind::all_reduce_sum: return communicator_.all_reduce(group, Reduction::sum, data, count);
    case InstructionKind::all_reduce_max: return communicator_.all_reduce(group, Reduction::max, data, count);
    case InstructionKind::reduce_scatter: return communicator_.reduce_scatter(group, data, count);
    case InstructionKind::all_gather: {
      const int members = static_cast<int>(ranks.size());
      const int member = static_cast<int>(std::ranges::find(ranks, program_.rank) - ranks.begin());
      float* own = data + chunk_begin(count, members, member);
      const std::byte* shard = address(instruction.operands[0], call);
      if (reinterpret_cast<std::byte*>(own) != shard)
        backend_.copy(static_cast<int>(instruction.stream), own, shard, Bytes(instruction.operands[0].bytes));
      return communicator_.all_gather(group, data, count);
    }
    case InstructionKind::send:
      last_ticket_ = communicator_.send(ranks.front(), channel, data, count);
      posted_ = true;
      return {.sent = Bytes(last.bytes), .waited = {}, .moving = {}};
    case InstructionKind::receive:
      return communicator_.receive(ranks.front(), 1 - channel, data, count);
    case InstructionKind::kernel: break;
  }
  PARPLAN_ASSERT(false, name(instruction.kind));
  return {};
}

double Executor::loss() const {
  return program_.loss_buffer < 0 ? 0.0 : static_cast<double>(*reinterpret_cast<const float*>(arena_.at(program_.loss_buffer)));
}

}  // namespace parplan
