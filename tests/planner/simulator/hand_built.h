#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "planner/base/enum_index.h"
#include "planner/cost/cost_model.h"
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
  model.execution = execution_of(device, {});
  const GroupNetwork two = unit_network(2);
  for (const GroupKey group : {all_along(Axis::tp), all_along(Axis::pp), tied_stages, next_stage, previous_stage,
                               next_stage_on_return, previous_stage_on_return})
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

inline Instruction after(Instruction instruction, EventIds waits, std::optional<int> records = std::nullopt) {
  instruction.waits = std::move(waits);
  instruction.records = records;
  return instruction;
}

struct HandBuilt {
  Program program;

  explicit HandBuilt(int rank = 0) {
    program.pipeline_rank = program.rank = rank;
    program.set_group(next_stage, {rank + 1});
    if (rank > 0) program.set_group(previous_stage, {rank - 1});
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
  int call(int segment, EventIds waits = {}) {
    Call call;
    call.segment = segment;
    call.waits = std::move(waits);
    call.records = program.events++;
    program.calls.push_back(std::move(call));
    return *program.calls.back().records;
  }
};

}  // namespace parplan
