#include "runtime/measured_step.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "runtime/check_promises.h"

namespace parplan {
namespace {

// The number of steps until recorded work is replayed and caches are warm: CUDA work runs directly,
// is recorded, is replayed.
std::size_t warm_up_steps(BackendKind backend) { return backend == BackendKind::cuda ? 3 : 1; }

// The numbers of the steps after the warm-up if there are any, else the number of the last step;
// without those that were profiled where profiling costs time.
std::vector<std::size_t> undisturbed(std::size_t steps, BackendKind backend) {
  const std::size_t first = std::min(warm_up_steps(backend), steps - 1);
  std::vector<std::size_t> numbers(steps - first);
  std::iota(numbers.begin(), numbers.end(), first);
  if (backend == BackendKind::cuda && numbers.size() > 1) numbers.pop_back();
  return numbers;
}

}  // namespace

TypicalStep typical_step(std::span<const JobStep> steps, BackendKind backend) {
  std::vector<std::size_t> counted = undisturbed(steps.size(), backend);
  const auto middle = counted.begin() + static_cast<std::ptrdiff_t>(counted.size() / 2);
  std::nth_element(counted.begin(), middle, counted.end(),
                   [&](std::size_t a, std::size_t b) { return steps[a].time < steps[b].time; });
  const std::vector<StepMeasurement>& ranks = steps[*middle].ranks;
  const std::vector<StepMeasurement>& profiled = ranks.front().is_profiled ? ranks : steps.back().ranks;
  const auto most = std::ranges::max_element(
      profiled, {}, [](const StepMeasurement& rank) { return rank.time.compute + rank.time.recompute; });
  return {.step = *middle, .rank = static_cast<int>(most - profiled.begin())};
}

StepTime measured_time(std::span<const JobStep> steps, const TypicalStep& typical) {
  const std::vector<StepMeasurement>& ranks = steps[typical.step].ranks;
  const StepMeasurement& own = ranks[typical.rank];
  StepTime time = own.time;
  if (!own.is_profiled) {
    time = steps.back().ranks[typical.rank].time;
    time *= own.total / time.total();
  }
  time.bubble += std::ranges::max(ranks, {}, &StepMeasurement::total).total - own.total;
  return time;
}

MemoryUse measured_memory(std::span<const Program> programs, BackendKind backend, Bytes device_used,
                          DeviceSharing sharing) {
  const auto worst =
      std::ranges::max_element(programs, {}, [](const Program& program) { return program.memory.peak(); });
  MemoryUse memory = worst->memory;
  if (backend != BackendKind::cuda) return memory;
  if (sharing == DeviceSharing::own_device) {
    memory.overhead = device_used - memory.arena();
    return memory;
  }
  Bytes arenas;
  for (const Program& program : programs) arenas += Bytes(program.arena_bytes.device);
  memory.overhead = Bytes((device_used - arenas).count / static_cast<std::int64_t>(programs.size()));
  return memory;
}

CommunicationVolume measured_communication(const Plan& plan, const JobStep& step) {
  CommunicationVolume most;
  for (const int rank : predicted_ranks(plan))
    if (const CommunicationVolume& sent = step.ranks[rank].communication; sum(sent) > sum(most)) most = sent;
  return most;
}

std::vector<InstructionComparison> compare_instructions(const Program& program,
                                                        std::span<const InstructionMeasurement> measured,
                                                        std::int64_t steps) {
  std::vector<InstructionComparison> comparisons;
  for (const Segment& segment : program.segments)
    for (const Instruction& instruction : segment.instructions) {
      const InstructionMeasurement& measurement = measured[comparisons.size()];
      const char* what = instruction.kind == InstructionKind::kernel ? name(instruction.op) : name(instruction.kind);
      comparisons.push_back(
          {.segment = segment.name,
           .instruction = instruction.name == what ? what : fmt::format("{} {}", instruction.name, what),
           .runs_per_step = measurement.runs / steps,
           .measured = measurement.busy / static_cast<double>(steps)});
    }
  return comparisons;
}

}  // namespace parplan
