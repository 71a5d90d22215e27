// The step that stands for a run, from steps written by hand.
#include "runtime/measured_step.h"

#include <doctest/doctest.h>

#include <vector>

namespace parplan {
namespace {

// Two ranks, the second of which computes longer. A profiled one computes a quarter of its time.
JobStep step_of(double seconds, bool profiled) {
  JobStep step{.loss = 0.0, .time = Seconds(seconds), .ranks = {}};
  for (const double total : {seconds / 2, seconds}) {
    StepMeasurement rank;
    rank.total = Seconds(total);
    rank.is_profiled = profiled;
    if (profiled) {
      rank.time.compute = Seconds(total / 4);
      rank.time.bubble = Seconds(total * 3 / 4);
    }
    step.ranks.push_back(rank);
  }
  return step;
}

}  // namespace

TEST_CASE("the typical step is the median without the warm-up, and its rank computes longest") {
  const std::vector<JobStep> steps = {step_of(100, true), step_of(4, true), step_of(9, true), step_of(5, true)};
  const TypicalStep typical = typical_step(steps, BackendKind::cpu);
  CHECK(typical.step == 3);  // of 4, 5 and 9 seconds
  CHECK(typical.rank == 1);
  CHECK(measured_time(steps, typical) == steps[3].ranks[1].time);
  // Where the other rank computes longer, it waits for the one that takes longer in all.
  std::vector<JobStep> other = steps;
  StepTime longer;
  longer.compute = Seconds(2);
  longer.bubble = Seconds(0.5);
  other[3].ranks[0].time = longer;
  const TypicalStep first = typical_step(other, BackendKind::cpu);
  CHECK(first.rank == 0);
  longer.bubble = Seconds(3);
  CHECK(measured_time(other, first) == longer);
  // One step alone is the warm-up, and yet the only one.
  CHECK(typical_step(std::span(steps).first(1), BackendKind::cpu).step == 0);
}

TEST_CASE("on a GPU three steps warm up, and the profiled last one only gives the parts") {
  const std::vector<JobStep> steps = {step_of(90, false), step_of(80, false), step_of(70, false),
                                      step_of(4, false),  step_of(6, false),  step_of(8, false), step_of(16, true)};
  const TypicalStep typical = typical_step(steps, BackendKind::cuda);
  CHECK(typical.step == 4);  // of 4, 6 and 8 seconds
  // 16 s of which 4 s compute, scaled to 6 s.
  const StepTime time = measured_time(steps, typical);
  CHECK(time.compute.value == 1.5);
  CHECK(time.bubble.value == 4.5);
}

TEST_CASE("the overhead of a GPU is what is in use beyond the arenas, shared by the ranks on it") {
  std::vector<Program> programs(2);
  for (Program& program : programs) program.arena_bytes.device = 100;
  programs[0].memory.parameters = Bytes(100);
  programs[0].memory.overhead = Bytes(7);
  programs[1].memory.parameters = Bytes(60);
  programs[1].memory.buffers = Bytes(40);
  programs[1].memory.overhead = Bytes(3);
  const auto overhead = [&](BackendKind backend, DeviceSharing sharing) {
    const MemoryUse memory = measured_memory(programs, backend, Bytes(260), sharing);
    CHECK(memory.parameters == Bytes(100));  // of the worst rank
    return memory.overhead.count;
  };
  CHECK(overhead(BackendKind::cpu, DeviceSharing::own_device) == 7);  // as planned
  CHECK(overhead(BackendKind::cuda, DeviceSharing::own_device) == 160);
  CHECK(overhead(BackendKind::cuda, DeviceSharing::shared_device) == 30);  // (260 - 200) / 2
}

}  // namespace parplan
