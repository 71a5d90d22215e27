#pragma once

#include <cstdint>

#include "planner/base/units.h"

namespace parplan {

// What an instruction's time counts as.
enum class Label { compute, recompute, tensor, data, pipeline, optimizer, count_ };
const char* name(Label label);

// Where a step's time goes on the rank that finishes last: disjoint parts that sum to the step.
// Each instant belongs to the running compute, else to the communication that the next compute
// awaits, else to the bubble. The same type at three fidelities: estimated, simulated, measured.
struct StepTime {
  Seconds compute;
  Seconds recompute;
  Seconds tensor_exposed;
  Seconds data_exposed;
  Seconds pipeline_exposed;
  Seconds bubble;
  Seconds optimizer;

  Seconds total() const {
    return compute + recompute + tensor_exposed + data_exposed + pipeline_exposed + bubble + optimizer;
  }
  Seconds& part(Label label);
  StepTime& operator+=(const StepTime& other);   // part by part
  StepTime& operator*=(double times);
  bool operator==(const StepTime&) const = default;
};

enum class MemoryCategory { parameters, gradients, optimizer, activations, buffers, count_ };
const char* name(MemoryCategory category);

// Memory of one rank: disjoint parts that sum to the peak. `overhead` is what libraries take
// outside the arena.
struct MemoryUse {
  Bytes parameters;
  Bytes gradients;
  Bytes optimizer;
  Bytes activations;
  Bytes buffers;
  Bytes overhead;

  Bytes arena() const { return parameters + gradients + optimizer + activations + buffers; }
  Bytes peak() const { return arena() + overhead; }
  Bytes& part(MemoryCategory category);
  bool operator==(const MemoryUse&) const = default;
};

// Logical bytes that one rank sends in a step, by axis.
struct CommunicationVolume {
  Bytes tensor;
  Bytes data;
  Bytes pipeline;
  bool operator==(const CommunicationVolume&) const = default;
};

// One result at any fidelity.
struct StepResult {
  StepTime time;               // of the rank that finishes last (ties: lowest)
  MemoryUse memory;            // of the worst rank
  int memory_stage = 0;        // that it is on
  // Of the stage that sends most, its rank at data and tensor coordinate 0: where a buffer does not
  // divide evenly, its neighbours send a few bytes more or less.
  CommunicationVolume communication;
  bool operator==(const StepResult&) const = default;
};

}  // namespace parplan
