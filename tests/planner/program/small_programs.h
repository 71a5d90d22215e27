#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "planner/base/enum_index.h"
#include "planner/program/program.h"

// Programs small enough to check by hand: 4 tokens (16 B) look up a table of 4 rows of 4 fp32
// numbers (64 B), the resulting 64 B are their own gradient, and AdamW updates the table.
namespace parplan {

struct Piece {
  int buffer = -1;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
  Access access{};
};
inline Piece reads(int buffer, std::int64_t offset, std::int64_t bytes) {
  return {buffer, offset, bytes, Access::read};
}
inline Piece writes(int buffer, std::int64_t offset, std::int64_t bytes) {
  return {buffer, offset, bytes, Access::write};
}
inline Piece updates(int buffer, std::int64_t offset, std::int64_t bytes) {
  return {buffer, offset, bytes, Access::update};
}

// Builds a Program call by call; every call has its own segment, and every buffer follows the one
// before.
struct SmallProgram {
  Program program;

  explicit SmallProgram(int rank, int stage = 0) {
    program.rank = rank;
    program.pipeline_rank = stage;
    for (GroupKey kind : {all_along(Axis::tp), all_along(Axis::dp), all_along(Axis::pp)}) group(kind, {rank});
  }
  SmallProgram& group(GroupKey kind, std::vector<int> ranks) {
    program.set_group(kind, std::move(ranks));
    return *this;
  }
  int buffer(std::string name, MemoryCategory category, std::int64_t bytes, bool persistent = false) {
    program.buffers.push_back({std::move(name), category, bytes, program.arena_bytes.device, persistent});
    program.arena_bytes.device += bytes;
    return static_cast<int>(program.buffers.size()) - 1;
  }

  Call& call(std::string name, Stream stream) {
    Segment segment;
    segment.name = std::move(name);
    segment.stream = stream;
    Call made;
    made.segment = static_cast<int>(program.segments.size());
    program.segments.push_back(std::move(segment));
    program.calls.push_back(std::move(made));
    return program.calls.back();
  }
  // Adds to the last call.
  Instruction& instruction(InstructionKind kind, Stream stream, std::string name, const std::vector<Piece>& pieces) {
    Segment& segment = program.segments.back();
    Instruction made;
    made.kind = kind;
    made.stream = stream;
    made.name = std::move(name);
    for (const Piece& piece : pieces)
      made.operands.push_back({bind(piece.buffer), piece.offset, piece.bytes, piece.access});
    segment.instructions.push_back(std::move(made));
    return segment.instructions.back();
  }
  Instruction& kernel(OpKind op, std::string name, const std::vector<Piece>& pieces, Stream stream = Stream::compute) {
    Instruction& made = instruction(InstructionKind::kernel, stream, std::move(name), pieces);
    made.op = op;
    return made;
  }
  // A call of one instruction.
  Call& communicate(InstructionKind kind, GroupKey group, Stream stream, std::string name,
                    const std::vector<Piece>& pieces) {
    call(name, stream);
    Instruction& made = instruction(kind, stream, std::move(name), pieces);
    made.group = group;
    made.label = group == all_along(Axis::dp) ? Label::dp : group == all_along(Axis::tp) ? Label::tp : Label::pp;
    return program.calls.back();
  }
  Call& compute(OpKind op, std::string name, const std::vector<Piece>& pieces) {
    Call& made = call(name, Stream::compute);
    kernel(op, std::move(name), pieces);
    return made;
  }

  void task(std::optional<Action> action) {
    const int first = program.tasks.empty() ? 0 : program.tasks.back().last_call;
    program.tasks.push_back({action, first, static_cast<int>(program.calls.size())});
  }
  static void wait(Call& from, int event, Call& to) {
    from.records = event;
    to.waits.push_back(event);
  }

 private:
  int bind(int buffer) {
    BufferIds& bound = program.calls.back().buffers;
    for (std::size_t i = 0; i < bound.size(); ++i)
      if (bound[i] == buffer) return static_cast<int>(i);
    bound.push_back(buffer);
    program.segments.back().bindings.push_back("buffer " + std::to_string(bound.size() - 1));
    return static_cast<int>(bound.size()) - 1;
  }
};

// Calls of a data-parallel rank, with all gradients on every rank (ZeRO-0).
namespace data_parallel {
enum Calls { zero, forward, backward, reduce, optimizer };
enum Buffers { table, gradients, first_moment, second_moment, saved };
}  // namespace data_parallel

inline Program data_parallel_program(int rank) {
  using namespace data_parallel;
  SmallProgram p(rank);
  p.group(all_along(Axis::dp), {0, 1});
  p.buffer("table", MemoryCategory::parameters, 64, true);
  p.buffer("gradients", MemoryCategory::gradients, 64, true);
  p.buffer("first moment", MemoryCategory::optimizer, 64, true);
  p.buffer("second moment", MemoryCategory::optimizer, 64, true);
  p.buffer("saved", MemoryCategory::activations, 80);
  p.program.buckets.push_back({.name = "embedding",
                               .elements = 16,
                               .units = {{.range = {0, 16}, .own = {{0, 16}, 0}}},
                               .shard_elements = 16,
                               .parameters = table,
                               .gradients = gradients,
                               .first_moment = first_moment,
                               .second_moment = second_moment});

  p.compute(OpKind::fill_zero, "fill_zero", {writes(gradients, 0, 64)});
  p.task(std::nullopt);
  p.call("forward", Stream::compute).micro_batch = 0;
  p.kernel(OpKind::load_tokens, "tokens", {writes(saved, 0, 16)}).type = DataType::int32;
  OpShape& shape =
      p.kernel(OpKind::embedding, "embedding", {reads(saved, 0, 16), reads(table, 0, 64), writes(saved, 16, 64)}).shape;
  shape.rows = 4;
  shape.columns = 4;
  p.task(Action{0, Phase::forward, 0});
  p.compute(OpKind::embedding_gradient, "embedding",
            {reads(saved, 16, 64), reads(saved, 0, 16), updates(gradients, 0, 64)});
  p.program.calls[backward].frees = {saved};
  p.communicate(InstructionKind::all_reduce_sum, all_along(Axis::dp), Stream::dp, "reduce",
                {updates(gradients, 0, 64)});
  p.task(Action{0, Phase::backward, 0});
  p.compute(
      OpKind::adamw, "optimizer",
      {reads(gradients, 0, 64), updates(table, 0, 64), updates(first_moment, 0, 64), updates(second_moment, 0, 64)});
  p.task(std::nullopt);
  p.program.events = 2;
  SmallProgram::wait(p.program.calls[backward], 0, p.program.calls[reduce]);
  SmallProgram::wait(p.program.calls[reduce], 1, p.program.calls[optimizer]);
  return p.program;
}
inline std::vector<Program> data_parallel_job() { return {data_parallel_program(0), data_parallel_program(1)}; }

// The same with ZeRO-1: rank r updates elements [8r, 8r + 8) of the table.
namespace zero {
enum Calls { zero, forward, backward, reduce, optimizer, gather };
}
inline Program zero_program(int rank) {
  using namespace data_parallel;
  Program program = data_parallel_program(rank);
  program.buckets[0].units[0].own.range = {8 * rank, 8 * rank + 8};
  program.buckets[0].shard_elements = 8;
  program.segments[zero::reduce].instructions[0].kind = InstructionKind::reduce_scatter;
  Operands& operands = program.segments[zero::optimizer].instructions[0].operands;
  for (Operand& operand : operands) operand = {operand.binding, 32 * rank, 32, operand.access};
  SmallProgram p(rank);
  p.program = std::move(program);
  p.communicate(InstructionKind::all_gather, all_along(Axis::dp), Stream::dp, "gather",
                {reads(table, 32 * rank, 32), writes(table, 0, 64)});
  p.task(std::nullopt);
  p.program.events = 3;
  SmallProgram::wait(p.program.calls[zero::optimizer], 2, p.program.calls[zero::gather]);
  return p.program;
}
inline std::vector<Program> zero_job() { return {zero_program(0), zero_program(1)}; }

// Two stages and one micro-batch: the first looks the table up, the second applies an activation.
namespace first_stage {
enum Calls { zero, forward, send, receive, backward, optimizer };
enum Buffers { table, gradients, first_moment, second_moment, tokens, output, gradient };
}  // namespace first_stage
namespace second_stage {
enum Calls { receive, forward, backward, send };
enum Buffers { input, result, gradient };
}  // namespace second_stage

inline Program first_stage_program() {
  using namespace first_stage;
  SmallProgram p(0, 0);
  p.group(all_along(Axis::pp), {0, 1}).group(next_stage, {1});
  p.buffer("table", MemoryCategory::parameters, 64, true);
  p.buffer("gradients", MemoryCategory::gradients, 64, true);
  p.buffer("first moment", MemoryCategory::optimizer, 64, true);
  p.buffer("second moment", MemoryCategory::optimizer, 64, true);
  p.buffer("tokens", MemoryCategory::activations, 16);
  p.buffer("output", MemoryCategory::buffers, 64);
  p.buffer("gradient", MemoryCategory::activations, 64);

  p.compute(OpKind::fill_zero, "fill_zero", {writes(gradients, 0, 64)});
  p.task(std::nullopt);
  p.call("forward", Stream::compute).micro_batch = 0;
  p.kernel(OpKind::load_tokens, "tokens", {writes(tokens, 0, 16)});
  p.kernel(OpKind::embedding, "embedding", {reads(tokens, 0, 16), reads(table, 0, 64), writes(output, 0, 64)});
  p.communicate(InstructionKind::send, next_stage, Stream::send_next, "send", {reads(output, 0, 64)}).frees = {
      output};
  p.task(Action{0, Phase::forward, 0});
  p.communicate(InstructionKind::receive, next_stage, Stream::receive_next, "receive", {writes(gradient, 0, 64)});
  p.compute(OpKind::embedding_gradient, "embedding",
            {reads(gradient, 0, 64), reads(tokens, 0, 16), updates(gradients, 0, 64)})
      .frees = {tokens, gradient};
  p.task(Action{0, Phase::backward, 0});
  p.compute(
      OpKind::adamw, "optimizer",
      {reads(gradients, 0, 64), updates(table, 0, 64), updates(first_moment, 0, 64), updates(second_moment, 0, 64)});
  p.task(std::nullopt);
  p.program.events = 2;
  SmallProgram::wait(p.program.calls[forward], 0, p.program.calls[send]);
  SmallProgram::wait(p.program.calls[receive], 1, p.program.calls[backward]);
  return p.program;
}

inline Program second_stage_program() {
  using namespace second_stage;
  SmallProgram p(1, 1);
  p.group(all_along(Axis::pp), {0, 1}).group(previous_stage, {0});
  p.buffer("input", MemoryCategory::activations, 64);
  p.buffer("result", MemoryCategory::activations, 64);
  p.buffer("gradient", MemoryCategory::activations, 64);
  p.communicate(InstructionKind::receive, previous_stage, Stream::receive_previous, "receive",
                {writes(input, 0, 64)});
  p.compute(OpKind::activation, "activation", {reads(input, 0, 64), writes(result, 0, 64)});
  p.task(Action{1, Phase::forward, 0});
  p.compute(OpKind::activation_gradient, "activation",
            {reads(result, 0, 64), reads(input, 0, 64), writes(gradient, 0, 64)}).frees = {input, result};
  p.communicate(InstructionKind::send, previous_stage, Stream::send_previous, "send", {reads(gradient, 0, 64)})
      .frees = {gradient};
  p.task(Action{1, Phase::backward, 0});
  p.program.events = 2;
  SmallProgram::wait(p.program.calls[receive], 0, p.program.calls[forward]);
  SmallProgram::wait(p.program.calls[backward], 1, p.program.calls[send]);
  return p.program;
}
inline std::vector<Program> pipeline_job() { return {first_stage_program(), second_stage_program()}; }

// Removes a call, its events and the waits for them.
inline void drop_call(Program& program, int call) {
  const std::optional<int> event = program.calls[call].records;
  program.calls.erase(program.calls.begin() + call);
  for (Call& other : program.calls)
    if (event) other.waits.erase(std::ranges::remove(other.waits, *event).begin(), other.waits.end());
  for (Task& task : program.tasks) {
    if (task.first_call > call) --task.first_call;
    if (task.last_call > call) --task.last_call;
  }
}

}  // namespace parplan
