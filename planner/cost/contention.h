#pragma once

#include <algorithm>

#include "planner/cost/cost_model.h"

namespace parplan {

// What a collective takes from other work of its device for as long as it is in flight, as shares
// of all that there is: from kernels the first two, from other communication the others.
struct Contention {
  // A channel is a block of threads that holds a multiprocessor: 544 threads of 96 registers
  // (NVIDIA/nccl at 5067397c, src/enqueue.cc:2108, makefiles/common.mk:103) are 80 % of its 65,536,
  // so that no block of a product runs beside it.
  double multiprocessors = 0.0;
  // Each byte is read where it is sent and written where it arrives.
  double memory = 0.0;
  double nics = 0.0;        // of the node, as far as they carry what the group's ranks send
  double host_links = 0.0;  // ways from devices to the host, of groups in a node without direct links
  bool operator==(const Contention&) const = default;
  bool takes_any() const { return multiprocessors > 0.0 || memory > 0.0 || nics > 0.0 || host_links > 0.0; }
};
inline Contention operator+(Contention a, Contention b) {
  return {.multiprocessors = a.multiprocessors + b.multiprocessors,
          .memory = a.memory + b.memory,
          .nics = a.nics + b.nics,
          .host_links = a.host_links + b.host_links};
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

// Seconds of work by what bounds it: of kernels the first two, of communication the others, for
// which the links carry what it moves. What else a communication takes is latency.
struct BoundTimes {
  Seconds multiprocessors = {};
  Seconds memory = {};
  Seconds nics = {};
  Seconds host_links = {};
  bool is_communication() const { return nics > Seconds(0.0) || host_links > Seconds(0.0); }
};
inline BoundTimes operator+(const BoundTimes& a, const BoundTimes& b) {
  return {.multiprocessors = a.multiprocessors + b.multiprocessors,
          .memory = a.memory + b.memory,
          .nics = a.nics + b.nics,
          .host_links = a.host_links + b.host_links};
}
// How much longer work takes beside such collectives than alone: 0 where nothing is taken. At least
// a quarter of everything is left to kernels, and half of a link to what shares it.
inline constexpr double most_taken = 0.75, most_taken_of_links = 0.5;
inline Seconds slowed_by(const BoundTimes& times, Contention beside) {
  const auto longer = [](double share, double most) { return 1.0 / (1.0 - std::min(share, most)) - 1.0; };
  return times.multiprocessors * longer(beside.multiprocessors, most_taken) +
         times.memory * longer(beside.memory, most_taken) + times.nics * longer(beside.nics, most_taken_of_links) +
         times.host_links * longer(beside.host_links, most_taken_of_links);
}

// The links that a communication, or a copy to or from the host, of `duration` is on, and for how
// long. Those of NVLink and of CPUs are left out.
BoundTimes time_on_links(const Instruction& instruction, Seconds duration, const CostModel& model);
// The same of a communication of `bytes` between GPUs.
BoundTimes time_on_links(InstructionKind kind, Bytes bytes, Seconds duration, const GroupNetwork& network);

}  // namespace parplan
