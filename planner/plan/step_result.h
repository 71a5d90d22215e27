#pragma once

#include <cstdint>
#include <optional>

#include "planner/base/units.h"
#include "planner/cluster/axis.h"
#include "planner/plan/memory_home.h"

namespace parplan {

// What an instruction's time counts as: communication by the axis that it is over.
enum class Label : std::uint8_t { compute, recompute, tp, ep, cp, dp, pp, optimizer, offload, count_ };
const char* name(Label label);
constexpr Label label_of(Axis axis) {
  constexpr PerAxis<Label> labels{
      .pp = Label::pp, .dp = Label::dp, .cp = Label::cp, .ep = Label::ep, .tp = Label::tp};
  return labels[axis];
}
// The axis of a label of communication; nothing for the others.
constexpr std::optional<Axis> axis_of(Label label) {
  for (const Axis axis : all_axes)
    if (label_of(axis) == label) return axis;
  return std::nullopt;
}

// Where a step's time goes on one rank: disjoint parts that sum to the step.
// Each instant belongs to the running compute, else to the communication that the next compute
// awaits, else to the bubble. The same type serves three fidelities: estimated, simulated,
// measured.
struct StepTime {
  Seconds compute;
  Seconds recompute;
  PerAxis<Seconds> exposed;  // communication over an axis that computation waits for
  Seconds bubble;
  Seconds optimizer;
  Seconds offload;  // copies between homes that computation waits for

  Seconds exposed_in_all() const { return exposed.tp + exposed.ep + exposed.cp + exposed.dp + exposed.pp; }
  Seconds total() const {
    return compute + recompute + exposed.tp + exposed.ep + exposed.cp + exposed.dp + exposed.pp + bubble + optimizer +
           offload;
  }
  Seconds& part(Label label);
  StepTime& operator+=(const StepTime& other);  // part by part
  StepTime& operator*=(double times);
  bool operator==(const StepTime&) const = default;
};

enum class MemoryCategory { parameters, gradients, optimizer, activations, buffers, count_ };
const char* name(MemoryCategory category);

// Memory of one rank. Disjoint parts on its device sum to the peak there, which alone decides
// whether a plan fits; `reserve` is what an engine's allocator holds beyond tensors in use, and
// `overhead` the memory of the context, of NCCL and of other libraries. PyTorch calls the arena
// allocated, and the arena with the reserve reserved.
struct MemoryUse {
  Bytes parameters;
  Bytes gradients;
  Bytes optimizer;
  Bytes activations;
  Bytes buffers;
  Bytes overhead;
  Bytes reserve = {};
  Bytes host = {};  // the arena in the host's memory, of all categories
  Bytes nvme = {};  // likewise of the file on its NVMe drives

  Bytes arena() const { return parameters + gradients + optimizer + activations + buffers; }
  Bytes arena(Home home) const { return home == Home::device ? arena() : home == Home::host ? host : nvme; }
  Bytes peak() const { return arena() + reserve + overhead; }
  // What a buffer counts as: its category on the device, else its home.
  Bytes& part(MemoryCategory category, Home home = Home::device);
  bool operator==(const MemoryUse&) const = default;
};

// Logical bytes that one rank sends in a step, by axis.
using CommunicationVolume = PerAxis<Bytes>;
Bytes sum(const CommunicationVolume& volume);
CommunicationVolume& operator+=(CommunicationVolume& volume, const CommunicationVolume& other);

// One result at any fidelity.
struct StepResult {
  // On the bottleneck: the rank whose forward and backward compute longest (ties: the one that
  // finishes last, then the lowest). After its own work it waits for the others: bubble.
  StepTime time;
  MemoryUse memory;      // of the worst rank
  int memory_stage = 0;  // that rank's place in the pipeline
  int memory_replica = 0;  // and on the data axis, where replicas do unlike work
  // For the rank of the pipeline that sends most, at data and tensor coordinate 0: where a buffer
  // does not divide evenly, its neighbours send a few bytes more or less.
  CommunicationVolume communication;
  bool operator==(const StepResult&) const = default;
};

}  // namespace parplan
