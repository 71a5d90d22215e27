#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "planner/base/enum.h"
#include "planner/cost/cost_model.h"
#include "planner/plan/schedule.h"
#include "tests/planner/cost/unit_model.h"

namespace parplan {

// Costs in whole seconds: hops cost nothing and links carry 1 B/s. Both kinds use the CPU's
// algorithms, which have no base latency; they differ in whether streams run concurrently.
inline CostModel unit_model(bool overlaps_communication, int data_ranks = 2) {
  CostModel model;
  DeviceKind device = unit_device(BackendKind::cpu);
  device.overlaps_communication = overlaps_communication;
  device.rates[0].matrix_fp32 = FlopsPerSecond(2.0);
  model.rates = device.rates[0];
  model.device = std::make_shared<const DeviceKind>(device);
  const GroupNetwork two = unit_network(2);
  for (const GroupKey group : {all_along(Axis::tp), all_along(Axis::pp), tied_stages, next_stage, previous_stage})
    model.networks[group] = two;
  model.networks[all_along(Axis::dp)] = unit_network(data_ranks);
  return model;
}
inline CostModel concurrent() { return unit_model(true); }
inline CostModel sequential() { return unit_model(false); }

// A product of `seconds` x 1 x 1: two FLOP each, at 2 FLOP/s.
inline Instruction kernel(std::int64_t seconds, Label label = Label::compute) {
  Instruction instruction;
  instruction.kind = InstructionKind::kernel;
  instruction.op = OpKind::linear;
  instruction.shape = {.rows = seconds, .columns = 1, .inner = 1};
  instruction.label = label;
  instruction.name = "work";
  return instruction;
}

// Two ranks exchange half of the bytes twice: as many seconds as bytes. The same holds for a
// transfer.
inline Instruction communication(InstructionKind kind, std::int64_t seconds, GroupKey group, Stream stream,
                                 Label label) {
  Instruction instruction;
  instruction.kind = kind;
  instruction.group = group;
  instruction.stream = stream;
  instruction.label = label;
  instruction.operands = {{.bytes = seconds, .access = Access::update}};
  return instruction;
}
inline Instruction all_reduce(std::int64_t seconds, GroupKey group, Stream stream, Label label) {
  return communication(InstructionKind::all_reduce_sum, seconds, group, stream, label);
}

inline Instruction after(Instruction instruction, std::vector<int> waits, std::optional<int> records = std::nullopt) {
  instruction.waits = std::move(waits);
  instruction.records = records;
  return instruction;
}

struct HandBuilt {
  Program program;

  explicit HandBuilt(int stage = 0) {
    program.stage = program.rank = stage;
    program.set_group(next_stage, {stage + 1});
    if (stage > 0) program.set_group(previous_stage, {stage - 1});
  }

  int segment(std::string name, Stream stream, std::vector<Instruction> instructions) {
    Segment segment;
    segment.name = std::move(name);
    segment.stream = stream;
    for (const Instruction& instruction : instructions)
      if (instruction.records) segment.events = std::max(segment.events, *instruction.records + 1);
    segment.instructions = std::move(instructions);
    program.segments.push_back(std::move(segment));
    return static_cast<int>(program.segments.size()) - 1;
  }

  // Returns the event at the end of the call.
  int call(int segment, std::vector<int> waits = {}) {
    Call call;
    call.segment = segment;
    call.waits = std::move(waits);
    call.records = program.events++;
    program.calls.push_back(std::move(call));
    return *program.calls.back().records;
  }
};

// A stage of a pipeline: every forward and backward is received, computed and sent on. `forward`,
// `backward` and `transfer` are in seconds.
inline Program pipeline_stage(int stage, int stages, const std::vector<Action>& actions, std::int64_t forward,
                              std::int64_t backward, std::int64_t transfer) {
  HandBuilt built(stage);
  const auto move = [&](const char* name, InstructionKind kind, GroupKey group, Stream stream) {
    if (group == next_stage ? stage + 1 == stages : stage == 0) return -1;
    return built.segment(name, stream, {communication(kind, transfer, group, stream, Label::pp)});
  };
  const int receive_forward =
      move("receive forward", InstructionKind::receive, previous_stage, Stream::receive_previous);
  const int send_forward = move("send forward", InstructionKind::send, next_stage, Stream::send_next);
  const int receive_backward =
      move("receive backward", InstructionKind::receive, next_stage, Stream::receive_next);
  const int send_backward = move("send backward", InstructionKind::send, previous_stage, Stream::send_previous);
  const int run_forward = built.segment("forward", Stream::compute, {kernel(forward)});
  const int run_backward = built.segment("backward", Stream::compute, {kernel(backward)});
  for (const Action& action : actions) {
    const bool up = action.phase == Phase::forward;
    std::vector<int> waits;
    if (up ? stage > 0 : stage + 1 < stages) waits.push_back(built.call(up ? receive_forward : receive_backward));
    const int done = built.call(up ? run_forward : run_backward, waits);
    if (up ? stage + 1 < stages : stage > 0) built.call(up ? send_forward : send_backward, {done});
  }
  return built.program;
}

}  // namespace parplan
