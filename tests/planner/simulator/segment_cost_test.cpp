#include "planner/simulator/segment_cost.h"

#include <doctest/doctest.h>

#include <algorithm>

#include "planner/base/error.h"
#include "tests/planner/simulator/hand_built.h"

namespace parplan {
namespace {

Segment layer() {
  HandBuilt built;
  built.segment(
      "layer", Stream::compute,
      {after(kernel(3), {}, 0), after(all_reduce(4, all_along(Axis::tp), Stream::tp, Label::tp), {0}, 1),
       kernel(3), after(kernel(2, Label::recompute), {1})});
  return built.program.segments[0];
}

TEST_CASE("a segment is costed once, with its time and parts when nothing else runs") {
  const CostedSegment costed = cost_segment(layer(), concurrent());
  CHECK(costed.duration == Seconds(9));  // 3, then 4 beside 3, then 2
  CHECK(costed.split.parts.compute == Seconds(6));
  CHECK(costed.parts.exposed.tp == Seconds(1));
  CHECK(costed.split.parts.recompute == Seconds(2));
  CHECK(costed.split.computed == Seconds(9));
  CHECK(costed.split.tail == StepTime{});
  CHECK(costed.parts.total() == Seconds(9));
  CHECK(costed.computes);
  CHECK(costed.streams == (1u << index_of(Stream::compute) | 1u << index_of(Stream::tp)));
}

TEST_CASE("on a device that communicates itself a segment takes the sum of its instructions") {
  const CostedSegment costed = cost_segment(layer(), sequential());
  CHECK(costed.duration == Seconds(12));
  CHECK(costed.parts.exposed.tp == Seconds(4));
}

TEST_CASE("what an engine does not overlap takes its turn among the kernels") {
  CostModel model = concurrent();
  model.execution = execution_of(*model.device, {.name = "other", .overlaps_tensor = false});
  const CostedSegment costed = cost_segment(layer(), model);
  CHECK(costed.duration == Seconds(12));
  CHECK(costed.parts.exposed.tp == Seconds(4));
  Instruction hop;
  hop.kind = InstructionKind::send;
  hop.stream = Stream::ring_send;
  CHECK(!model.execution.is_posted(hop));
  CHECK(model.execution.stream_of(Stream::ring_receive) == index_of(Stream::ring_receive));
  CHECK(model.execution.stream_of(Stream::cp) == index_of(Stream::compute));
  // Other axes do as before.
  model.execution = execution_of(*model.device, {.name = "other", .overlaps_data = false, .overlaps_pipeline = false});
  CHECK(cost_segment(layer(), model).duration == Seconds(9));
  CHECK(model.execution.posts_sends());
  CHECK(execution_of(*model.device, {.overlaps_tensor = false, .overlaps_data = false, .overlaps_pipeline = false}) ==
        sequential_execution);
  CHECK(execution_of(*sequential().device, {}) == sequential_execution);
}

TEST_CASE("nothing runs before the host has submitted it") {
  CostModel model = concurrent();
  model.host_per_op = Seconds(1);
  // The host is ahead but for the first kernel.
  CHECK(cost_segment(layer(), model).duration == Seconds(10));
  model.host_per_op = Seconds(5);
  // Four ops are submitted at 5, 10, 15 and 20; the last takes 2.
  const CostedSegment slow = cost_segment(layer(), model);
  CHECK(slow.duration == Seconds(22));
  CHECK(slow.parts.total() == slow.duration);
}

TEST_CASE("what the host takes to submit one op delays it and those behind it, and pieces of a kernel run meanwhile") {
  CostModel model = concurrent();
  Segment segment = layer();
  const Seconds plain = cost_segment(segment, model).duration;
  const auto collective = std::ranges::find_if(
      segment.instructions, [](const Instruction& one) { return one.kind != InstructionKind::kernel; });
  REQUIRE(collective != segment.instructions.end());
  collective->submission = Seconds(100);
  const CostedSegment listed = cost_segment(segment, model);
  const auto at = static_cast<std::size_t>(collective - segment.instructions.begin());
  CHECK(listed.alone[at].end == Seconds(100) + listed.instructions[at].duration);
  for (std::size_t i = 0; i < segment.instructions.size(); ++i)
    CHECK(listed.instructions[i].submitted == Seconds(i < at ? 0 : 100));
  CHECK(listed.duration >= Seconds(100));
  // A kernel in pieces ends with the host where the device is faster, and else takes its own time.
  segment = layer();
  segment.instructions.front().submission = Seconds(100);
  CHECK(cost_segment(segment, model).alone.front().end == Seconds(100));
  const Seconds own = cost_segment(layer(), model).instructions.front().duration;
  segment.instructions.front().submission = 0.5 * own;
  CHECK(cost_segment(segment, model).alone.front().end == own);
  segment.instructions.front().submission = {};
  CHECK(cost_segment(segment, model).duration == plain);
}

TEST_CASE("an op of several kernels is submitted kernel by kernel") {
  Segment segment = layer();
  Instruction& first = segment.instructions.front();
  REQUIRE(first.kind == InstructionKind::kernel);
  first.op = OpKind::attention_softmax;
  first.shape.apart = first.shape.in_half = true;
  REQUIRE(launches(first) == 5);
  CostModel model = concurrent();
  // 3 s in 5 kernels of 0.6 each, submitted from 0.1 on: then 4 beside 3, then 2.
  const auto took = [&](double host) {
    model.host_per_op = Seconds(host);
    return cost_segment(segment, model.execution, model.host_per_op, [&](const Instruction& instruction) {
             return &instruction == &first ? Seconds(3) : duration(instruction, model);
           })
        .duration.value;
  };
  const double rest = took(0.0) - 3.0;
  CHECK(took(0.1) == doctest::Approx(0.1 + 3.0 + rest));
  // The fifth at 5 s, and 0.6 s more; or all four before the fifth faster than the host.
  model.host_per_op = Seconds(1);
  const CostedSegment slow = cost_segment(segment, model.execution, model.host_per_op,
                                          [&](const Instruction& one) { return Seconds(&one == &first ? 3 : 0); });
  CHECK(slow.alone.front().end.value == doctest::Approx(5.0 + 3.0 / 5));
  // The other three ops come behind all five.
  CHECK(slow.instructions.back().submitted.value == doctest::Approx(8.0));
  // Where launches block, the host's time is that of all.
  const Seconds plain = duration(first, model);
  model.blocks_launches = true;
  CHECK(duration(first, model).value == doctest::Approx(plain.value + 5.0));
}

TEST_CASE("an optimizer that takes tensors in lists is submitted by its share of a launch") {
  Segment segment = layer();
  Instruction& update = segment.instructions.front();
  update.op = OpKind::adamw;
  update.label = Label::optimizer;
  update.shape.rows = 320 * 65536 / 4;
  CHECK(submissions(update, false) == 1.0);
  CHECK(submissions(update, true) == 0.25);
  CostModel model = concurrent();
  model.host_per_op = Seconds(8);
  CHECK(cost_segment(segment, model).instructions[1].submitted == Seconds(16));
  model.lists_updates = true;
  const CostedSegment listed = cost_segment(segment, model);
  CHECK(listed.instructions[0].submitted == Seconds(2));
  CHECK(listed.instructions[1].submitted == Seconds(10));
  // Several launches, of which the first lets the device begin.
  update.shape.rows = 3 * 320 * 65536;
  CHECK(submissions(update, true) == 3.0);
  CHECK(cost_segment(segment, model).instructions[0].submitted == model.host_per_op);
  // Nothing else is listed: other kernels, an update of several kernels, what the host updates.
  Instruction other = update;
  other.op = OpKind::sum_squares;
  CHECK(submissions(other, true) == 3.0);
  other.label = Label::compute;
  CHECK(submissions(other, true) == 1.0);
  other = update;
  other.shape.stepwise = true;
  CHECK(submissions(other, true) == launches(other));
  other = update;
  other.home = Home::host;
  CHECK(submissions(other, true) == 1.0);
  // Where launches block, the host's time is that of the share.
  update.shape.rows = 320 * 65536 / 4;
  const Seconds plain = duration(update, model);
  model.blocks_launches = true;
  CHECK(duration(update, model).value == doctest::Approx(plain.value + 2.0));
}

TEST_CASE("where launches block, the host's time adds to each op") {
  Instruction kernel = layer().instructions.front();
  REQUIRE(kernel.kind == InstructionKind::kernel);
  CostModel model = concurrent();
  model.host_per_op = Seconds(5);
  const Seconds plain = duration(kernel, model);
  model.blocks_launches = true;
  CHECK(duration(kernel, model) == plain + Seconds(5));
}

TEST_CASE("communication after the last kernel stands apart, since what follows decides whether it was awaited") {
  Segment segment = layer();
  segment.instructions.resize(2);
  const CostedSegment costed = cost_segment(segment, concurrent());
  CHECK(costed.split.computed == Seconds(3));
  CHECK(costed.split.parts.compute == Seconds(3));
  CHECK(costed.split.parts.total() == Seconds(3));
  CHECK(costed.split.tail.exposed.tp == Seconds(4));
  CHECK(costed.duration == Seconds(7));
}

TEST_CASE("a copy of a costed segment stands on its own") {
  CostedSegment copy;
  {
    const CostedSegment costed = cost_segment(layer(), concurrent());
    copy = costed;
  }
  CHECK(sum(attribute(copy.alone, copy.last)) == copy.parts);
}

TEST_CASE("an instruction that waits for an event of the future is an error of ours") {
  Segment segment = layer();
  segment.instructions[0].waits = {1};
  CHECK_THROWS_WITH_AS(cost_segment(segment, concurrent()),
                       doctest::Contains("segment 'layer': instruction 0 waits for event 1, recorded by 1"),
                       InternalError);
}

}  // namespace
}  // namespace parplan
