#pragma once

#include <algorithm>

#include "planner/cost/cost_model.h"

namespace parplan {

// What a collective takes from the kernels of its device for as long as it is in flight, as shares
// of all that there is.
struct Contention {
  // A channel is a block of threads that holds a multiprocessor: 544 threads of 96 registers
  // (NVIDIA/nccl at 5067397c, src/enqueue.cc:2108, makefiles/common.mk:103) are 80 % of its 65,536,
  // so that no block of a product runs beside it.
  double multiprocessors = 0.0;
  // Each byte is read where it is sent and written where it arrives.
  double memory = 0.0;
  bool operator==(const Contention&) const = default;
  bool takes_any() const { return multiprocessors > 0.0 || memory > 0.0; }
};
inline Contention operator+(Contention a, Contention b) {
  return {.multiprocessors = a.multiprocessors + b.multiprocessors, .memory = a.memory + b.memory};
}

// What a collective of `duration` on an accelerator takes. Kernels take nothing, nor do transfers
// between two ranks, whose few channels are left out, and what is in line with kernels anyway.
Contention contention(const Instruction& instruction, Seconds duration, const CostModel& model);
// The same of a collective over `bytes`, as long as it does not wait in line with kernels.
Contention contention(InstructionKind kind, Bytes bytes, Seconds duration, const GroupNetwork& network,
                      const DeviceKind& device, const DeviceRates& rates);

// Which share a kernel is slowed by: products and attention are bound by multiprocessors, all
// others by memory, which fewer multiprocessors saturate as well.
bool needs_multiprocessors(const Instruction& instruction);

// Seconds of kernels by what bounds them.
struct BoundTimes {
  Seconds multiprocessors;
  Seconds memory;
};
inline BoundTimes operator+(const BoundTimes& a, const BoundTimes& b) {
  return {.multiprocessors = a.multiprocessors + b.multiprocessors, .memory = a.memory + b.memory};
}
// How much longer kernels take beside such collectives than alone: 0 where nothing is taken. At
// least a quarter of everything is left to them.
inline constexpr double most_taken = 0.75;
inline Seconds slowed_by(const BoundTimes& times, Contention beside) {
  const auto longer = [](double share) { return 1.0 / (1.0 - std::min(share, most_taken)) - 1.0; };
  return times.multiprocessors * longer(beside.multiprocessors) + times.memory * longer(beside.memory);
}

}  // namespace parplan
