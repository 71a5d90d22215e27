#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "planner/plan/plan.h"
#include "planner/program/program.h"
#include "runtime/share_results.h"

// The one step that stands for a run, from the steps that were measured.
namespace parplan {

// The time of one instruction of one Segment, summed over a step (mean over the profiled steps,
// without the first). In the order of the rank's Program: Segments, then their instructions.
struct InstructionComparison {
  std::string segment;
  std::string instruction;
  std::int64_t runs_per_step = 0;
  Seconds measured;
};

// The median of the steps that nothing disturbed, and the rank whose forward and backward computed
// longest in it (where it was not profiled: in the last step).
struct TypicalStep {
  std::size_t step = 0;
  int rank = 0;
};
TypicalStep typical_step(std::span<const JobStep> steps, BackendKind backend);

// The time of the typical step on that rank, which after its own work waits for the others. Where
// the step was not profiled, the parts are those of the last step, scaled.
StepTime measured_time(std::span<const JobStep> steps, const TypicalStep& typical);

// Whether ranks that share a GPU share the memory of libraries, too; then no rank's prediction
// covers the whole.
enum class DeviceSharing { own_device, shared_device };

// The parts of the worst rank as planned: every rank touched its arena to the promised byte
// (check_promises). The overhead, on GPUs, is that of the fullest device, whose memory in use is
// `device_used`.
MemoryUse measured_memory(std::span<const Program> programs, BackendKind backend, Bytes device_used,
                          DeviceSharing sharing);

// What the predicted rank that sent most has sent in a step (predicted_ranks).
CommunicationVolume measured_communication(const Plan& plan, const JobStep& step);

// `measured`: by instruction, Segment by Segment, over `steps` profiled steps.
std::vector<InstructionComparison> compare_instructions(const Program& program,
                                                        std::span<const InstructionMeasurement> measured,
                                                        std::int64_t steps);

}  // namespace parplan
