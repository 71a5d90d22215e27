#pragma once

#include "planner/plan/plan.h"

namespace parplan::testing {

// Whole numbers throughout: 4 devices of 1000 bytes and 100 FLOP/s, a step of 10 s, 640 bytes of
// memory.
inline Plan small_plan() {
  Plan plan;
  plan.model = {.name = "small", .parameters = 50, .flops_per_sample = Flops(500.0)};
  plan.cluster.name = "four";
  plan.cluster.groups.front().device.name = "box";
  plan.cluster.groups.front().device.backend = BackendKind::cpu;
  plan.cluster.groups.front().device.memory_capacity = Bytes(1000);
  plan.cluster.groups.front().device.peak_fp32 = FlopsPerSecond(100.0);
  for (int i = 0; i < 4; ++i) {
    plan.cluster.groups.front().node.vertices.push_back({.name = "box", .kind = VertexKind::device});
    plan.cluster.groups.front().node.devices.push_back(i);
  }
  plan.training.global_batch = 4;
  plan.training.sequence_length = 5;
  plan.spec.mesh.degree = {.pp = 2, .dp = 2};  // pp, dp, tp
  plan.spec.zero_stage = 1;
  plan.spec.stage_blocks = {3, 2};
  plan.prediction.time = {.compute = Seconds(6.0),
                          .recompute = Seconds(0.0),
                          .exposed = {.pp = Seconds(0.5), .dp = Seconds(1.0), .tp = Seconds(0.0)},
                          .bubble = Seconds(2.0),
                          .optimizer = Seconds(0.5),
                          .offload = Seconds(0.0)};
  plan.prediction.memory = {.parameters = Bytes(200),
                            .gradients = Bytes(200),
                            .optimizer = Bytes(100),
                            .activations = Bytes(80),
                            .buffers = Bytes(40),
                            .overhead = Bytes(20)};
  plan.prediction.communication = {.pp = Bytes(60), .dp = Bytes(300), .tp = Bytes(0)};
  RankedPlan second{.spec = plan.spec, .result = plan.prediction};
  second.spec.micro_batch = 2;
  second.result.time.bubble = Seconds(4.0);
  second.result.time.exposed.dp = Seconds(0.5);
  second.result.memory.activations = Bytes(160);
  plan.alternatives.push_back(second);
  plan.search = {.candidates = 12,
                 .infeasible_memory = 3,
                 .pruned_by_bound = 5,
                 .simulated = 4,
                 .seconds = 0.25,
                 .certified = true,
                 .gap = {}};
  return plan;
}

}  // namespace parplan::testing
