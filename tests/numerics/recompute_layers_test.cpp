// Plans in which some layers of a stage recompute, against the same without recompute.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "planner/parallel/recompute.h"
#include "planner/parallel/techniques.h"
#include "tests/numerics/plan_runs.h"

namespace parplan {

using namespace testing;

namespace {

struct Case {
  std::string name;
  Degrees degree;
  ScheduleKind schedule = ScheduleKind::one_f_one_b;
  int virtual_stages = 1;
  int zero_stage = 0;
  bool sequence_parallel = false;
  InputSlots input_slots = InputSlots::in_flight;
};

const std::vector<Case> cases = {
    {.name = "one rank", .degree = {}},
    {.name = "ZeRO-3", .degree = {.dp = 2}, .zero_stage = 3},
    {.name = "tensor and sequence parallelism",
     .degree = {.dp = 2, .tp = 2},
     .zero_stage = 2,
     .sequence_parallel = true},
    {.name = "1F1B", .degree = {.pp = 2}, .input_slots = InputSlots::one_more},
    {.name = "interleaved", .degree = {.pp = 2}, .schedule = ScheduleKind::interleaved, .virtual_stages = 2},
    {.name = "ZB-H1", .degree = {.pp = 2}, .schedule = ScheduleKind::zero_bubble_h1},
    {.name = "ZB-V", .degree = {.pp = 2}, .schedule = ScheduleKind::zero_bubble_v, .virtual_stages = 2},
    {.name = "DualPipeV", .degree = {.pp = 2}, .schedule = ScheduleKind::dualpipe_v, .virtual_stages = 2},
};

}  // namespace

TEST_CASE("whatever number of a stage's layers recompute, a plan trains to the bits of none") {
  for (const std::string model : {"tiny-gpt2", "tiny-t5"}) {
    const OpGraph graph = graph_of(model);
    const TrainingSpec training = training_of();
    for (const Case& one : cases) {
      ParallelSpec spec;
      spec.mesh.degree = one.degree;
      spec.schedule = one.schedule;
      spec.virtual_stages = one.virtual_stages;
      spec.zero_stage = one.zero_stage;
      spec.sequence_parallel = one.sequence_parallel;
      spec.input_slots = one.input_slots;
      spec.micro_batch = 2;
      // Most layers are on the second stage.
      const int stages = spec.stages(), blocks = static_cast<int>(graph.blocks.size());
      spec.stage_blocks.assign(static_cast<std::size_t>(stages), 1);
      spec.stage_blocks[static_cast<std::size_t>(std::min(1, stages - 1))] += blocks - stages;
      if (illegal(graph, training, spec)) continue;
      const Outcome none = run_plan(graph, training, spec, 2);
      for (const Offload offload : {Offload{}, Offload{.activations = Home::host}}) {
        spec.offload = offload;
        for (const Recompute rule : {Recompute::norms | Recompute::mlp, Recompute::full})
          for (int layers = 1; layers < most_layers_of_a_stage(graph, spec); layers += offload == Offload{} ? 1 : 2) {
            INFO(model << ", " << one.name << ": " << layers << " layers, offload " << name(offload));
            ParallelSpec some = spec;
            some.recompute = rule;
            some.recompute_layers = layers;
            // Fewer than recompute, or more.
            if (offload != Offload{}) some.offload_layers = most_layers_of_a_stage(graph, spec) - layers;
            REQUIRE(illegal(graph, training, some).value_or("legal") == "legal");
            check_equal(run_plan(graph, training, some, 2), none);
          }
      }
    }
  }
}

}  // namespace parplan
