// The time of rows that go around the ring of the tensor axis beside slices of products.
#include <algorithm>
#include <iterator>
#include <string>

#include <doctest/doctest.h>

#include "planner/simulator/segment_cost.h"
#include "tests/planner/program/random_plans.h"

using namespace parplan;

namespace {

// The Segment of a layer whose tokens four ranks share out.
Segment segment_of_slices(const std::string& name) {
  const OpGraph graph = graph_of("tiny-llama");
  TrainingSpec training;
  training.global_batch = 4;
  training.sequence_length = 16;
  ParallelSpec spec;
  spec.mesh.degree = {.tp = 4};
  spec.sequence_parallel = true;
  spec.tp_overlap = TensorOverlap::ring;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  const std::vector<Program> programs = lower_all(job_of(graph, training, spec));
  return *std::ranges::find(programs.front().segments, name, &Segment::name);
}

// Nothing takes time but the slices of one product and the hops of its rows, which are launched
// before the first slice, or of its sums, behind it.
double seconds_of(const Segment& segment, OpKind op, const std::string& product, Execution execution, double slice,
                  double hop) {
  const auto is_slice = [&](const Instruction& one) {
    return one.kind == InstructionKind::kernel && one.op == op && one.name == product;
  };
  const auto first = std::ranges::find_if(segment.instructions, is_slice);
  const auto last = std::ranges::find_if(segment.instructions.rbegin(), segment.instructions.rend(), is_slice).base();
  return cost_segment(segment, execution, Seconds(0.0),
                      [&](const Instruction& instruction) {
                        if (is_slice(instruction)) return Seconds(slice);
                        const auto at = segment.instructions.begin() + (&instruction - segment.instructions.data());
                        const bool is_hop = communicates(instruction.kind) && first - at <= 2 && at < last;
                        return Seconds(is_hop ? hop : 0.0);
                      })
      .duration.value;
}

}  // namespace

// Four slices, three hops. The first product needs no hop, and the last one, or the last sum, comes
// behind all: whichever takes longer, max(4 s, s + 3 h). In line, both.
TEST_CASE("hops around the ring of the tensor axis hide behind slices, or slices behind hops") {
  const Segment forward = segment_of_slices("layers.forward"), backward = segment_of_slices("layers.backward");
  struct Case {
    const Segment& segment;
    OpKind op;
    std::string product;
  };
  for (const Case& of : {Case{forward, OpKind::linear, "layers.0.attention.qkv"},
                         Case{forward, OpKind::linear, "layers.0.feed_forward.down"},
                         Case{backward, OpKind::linear_input_gradient, "layers.0.feed_forward.down"}}) {
    INFO(of.product);
    const auto seconds = [&](Execution execution, double slice, double hop) {
      return seconds_of(of.segment, of.op, of.product, execution, slice, hop);
    };
    CHECK(seconds({}, 3.0, 2.0) == 4 * 3.0);
    CHECK(seconds({}, 3.0, 5.0) == 3.0 + 3 * 5.0);
    CHECK(seconds(sequential_execution, 3.0, 2.0) == 4 * 3.0 + 3 * 2.0);
  }
}
