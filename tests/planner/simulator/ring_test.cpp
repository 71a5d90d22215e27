// The time of keys and values that go around a ring beside attention.
#include <algorithm>
#include <string>

#include <doctest/doctest.h>

#include "planner/simulator/segment_cost.h"
#include "tests/planner/program/random_plans.h"

using namespace parplan;

namespace {

// The Segment of a layer whose tokens four ranks share out.
Segment segment_of_ring(const std::string& name) {
  const OpGraph graph = graph_of("tiny-llama");
  TrainingSpec training;
  training.global_batch = 4;
  training.sequence_length = 16;
  ParallelSpec spec;
  spec.mesh.degree = {.cp = 4};
  spec.cp_method = ContextMethod::ring;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  const std::vector<Program> programs = lower_all(job_of(graph, training, spec));
  return *std::ranges::find(programs.front().segments, name, &Segment::name);
}

// Nothing takes time but a step of attention and a hop.
double seconds_of(const Segment& segment, Execution execution, double step, double hop) {
  return cost_segment(segment, execution, Seconds(0.0),
                      [&](const Instruction& instruction) {
                        if (communicates(instruction.kind)) return Seconds(hop);
                        return Seconds(instruction.shape.chunks.holder ? step : 0.0);
                      })
      .duration.value;
}

}  // namespace

TEST_CASE("hops around a ring hide behind attention, or attention behind hops") {
  const Segment forward = segment_of_ring("layers.forward"), backward = segment_of_ring("layers.backward");
  // Four steps; the keys of the next one arrive during each.
  CHECK(seconds_of(forward, {}, 3.0, 2.0) == 4 * 3.0);
  // Three hops, and the step with the last keys.
  CHECK(seconds_of(forward, {}, 3.0, 5.0) == 3 * 5.0 + 3.0);
  // The last gradients of keys have one hop home.
  CHECK(seconds_of(backward, {}, 3.0, 1.0) == 4 * 3.0 + 1.0);
  // Seven hops, three of keys and four of gradients: after the first hop of keys, and the second
  // step, each waits for the stream.
  CHECK(seconds_of(backward, {}, 0.0, 1.0) == 3 + 4);
  // In line, the receiver pays for all.
  CHECK(seconds_of(forward, sequential_execution, 3.0, 2.0) == 4 * 3.0 + 3 * 2.0);
  CHECK(seconds_of(backward, sequential_execution, 3.0, 2.0) == 4 * 3.0 + 7 * 2.0);
}

TEST_CASE("all ranks of a ring have steps that cost as much") {
  const OpGraph graph = graph_of("tiny-llama");
  TrainingSpec training;
  training.global_batch = 4;
  training.sequence_length = 16;
  ParallelSpec spec;
  spec.mesh.degree = {.cp = 4};
  spec.cp_method = ContextMethod::ring;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  const std::vector<Program> programs = lower_all(job_of(graph, training, spec));
  for (const Program& program : programs)
    for (std::size_t s = 0; s < program.segments.size(); ++s)
      for (std::size_t i = 0; i < program.segments[s].instructions.size(); ++i) {
        const Instruction &one = programs.front().segments[s].instructions[i],
                          &other = program.segments[s].instructions[i];
        REQUIRE(one.kind == other.kind);
        if (one.kind != InstructionKind::kernel) continue;
        const OpWork a = row_of(one.op).work(one.shape, one.type), b = row_of(other.op).work(other.shape, other.type);
        CHECK(a.flops == b.flops);
        CHECK(a.bytes == b.bytes);
        for (std::size_t o = 0; o < one.operands.size(); ++o) CHECK(one.operands[o].bytes == other.operands[o].bytes);
      }
}
