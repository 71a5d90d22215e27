// Kernels and communication beside collectives (planner/cost/contention.h).
#include <algorithm>

#include <doctest/doctest.h>

#include "planner/program/bucket_work.h"
#include "planner/simulator/segment_cost.h"
#include "planner/simulator/simulate.h"
#include "tests/planner/simulator/hand_built.h"

namespace parplan {
namespace {

using doctest::Approx;

// Two GPUs with links of 1 B/s and memory of 4 B/s: a gather of S bytes takes S / 2 seconds, and
// half of the memory.
CostModel two_gpus() {
  DeviceKind device = unit_device(BackendKind::cuda);
  device.rates.front().memory = BytesPerSecond(4.0);
  CostModel model;
  model.rates = device.rates.front();
  model.device = std::make_shared<const DeviceKind>(device);
  for (const Axis axis : {Axis::dp, Axis::tp}) model.networks[all_along(axis)] = unit_network(2);
  return model;
}
Instruction gather(std::int64_t seconds, Axis axis) {
  return communication(InstructionKind::all_gather, 2 * seconds, all_along(axis), streams_of(axis).collectives,
                       label_of(axis));
}
// Writes 4 bytes an element.
Instruction clear(std::int64_t seconds) {
  return flat_kernel(OpKind::fill_zero, seconds, Stream::compute, Label::compute, DataType::fp32);
}

Seconds end_of(const HandBuilt& built, const CostModel& model, Timeline* timeline = nullptr) {
  return simulate({&built.program, 1}, {&model, 1}, timeline).time.total();
}

TEST_CASE("work ends later by what is taken while collectives are in flight") {
  const BoundTimes kernels{.multiprocessors = Seconds(4.0), .memory = {}};
  const std::vector<InFlight> one{{.start = Seconds(2.0), .end = Seconds(5.0), .takes = {.multiprocessors = 0.5}}};
  const auto end = [&](double start) { return end_beside(one, Seconds(start), Seconds(4.0), kernels).value; };
  CHECK(end(0.0) == Approx(5.5));   // 2 alone, 1.5 in 3, 0.5 alone
  CHECK(end(2.0) == Approx(7.5));
  CHECK(end(-3.0) == Approx(1.0));  // before it
  CHECK(end(-1.0) == Approx(4.0));  // 3 alone, 1 in 2
  CHECK(end(5.0) == 9.0);
  // Where memory bounds a half of it.
  const BoundTimes mixed{.multiprocessors = Seconds(2.0), .memory = Seconds(2.0)};
  CHECK(end_beside(one, Seconds(0.0), Seconds(4.0), mixed).value == Approx(5.0));  // 2 alone, 2 in 3
  // Two at once take what both take.
  std::vector<InFlight> two = one;
  two.push_back({.start = Seconds(2.0), .end = Seconds(100.0), .takes = {.multiprocessors = 0.25}});
  CHECK(end_beside(two, Seconds(2.0), Seconds(1.0), {.multiprocessors = Seconds(1.0), .memory = {}}).value ==
        Approx(2.0 + 3.0 + 0.25 / 0.75));
}

TEST_CASE("a kernel beside a collective of its Segment is slowed, one before it is not") {
  HandBuilt built;
  built.segment("layer", Stream::compute,
                {after(clear(10), {}, 0), after(gather(100, Axis::tp), {0}, 1), clear(20), after(clear(3), {1})});
  const CostModel model = two_gpus();
  const CostedSegment costed = cost_segment(built.program.segments[0], model);
  CHECK(costed.instructions[0].duration == Seconds(10.0));
  CHECK(costed.instructions[2].duration.value == Approx(40.0));
  CHECK(costed.instructions[3].duration == Seconds(3.0));
  CHECK(costed.parts.total() == costed.duration);
  // What is not the model's is not slowed: bounds have the least of everything.
  const auto alone = [&](const Instruction& instruction) { return duration(instruction, model); };
  CHECK(cost_segment(built.program.segments[0], model.execution, Seconds(0.0), alone).instructions[2].duration ==
        Seconds(20.0));
}

TEST_CASE("collectives slow the kernels of calls that were launched later") {
  HandBuilt built;
  const int transfer = built.segment("gather", Stream::dp, {gather(100, Axis::dp)});
  const int work = built.segment("work", Stream::compute, {clear(20), clear(10)});
  built.call(transfer);
  built.call(work);
  const CostModel model = two_gpus();
  Timeline timeline;
  simulate({&built.program, 1}, {&model, 1}, &timeline);
  REQUIRE(timeline.events.size() == 3);
  CHECK(timeline.events[1].end.value == Approx(40.0));
  CHECK(timeline.events[2].end.value == Approx(60.0));
  // The gather ends while the fourth call computes: 100 seconds do the work of 50.
  for (int more = 0; more < 3; ++more) built.call(work);
  CHECK(end_of(built, model).value == Approx(100.0 + 120.0 - 50.0));
  StepDetails details;
  const StepResult result = simulate({&built.program, 1}, {&model, 1}, nullptr, &details);
  CHECK(result.time.compute.value == Approx(170.0));
  Seconds on_path;
  for (const CriticalWork& one : details.critical_path) on_path += one.time;
  CHECK(on_path.value == Approx(170.0));
}

TEST_CASE("a kernel that was launched before a collective is not slowed by it") {
  HandBuilt built;
  const int transfer = built.segment("gather", Stream::dp, {gather(100, Axis::dp)});
  const int work = built.segment("work", Stream::compute, {clear(20)});
  built.call(work);
  built.call(transfer);
  CHECK(end_of(built, two_gpus()).value == Approx(100.0));
  CHECK(simulate({&built.program, 1}, std::vector{two_gpus()}).time.compute.value == Approx(20.0));
}

TEST_CASE("collectives slow kernels whose calls compute on their stream as well, alone and in a row") {
  HandBuilt built;
  Instruction add = clear(5);
  add.stream = Stream::dp;
  const int reduce = built.segment("reduce", Stream::dp, {gather(100, Axis::dp), add});
  const int work = built.segment("work", Stream::compute, {clear(20)});
  built.call(reduce);
  built.call(work);
  CHECK(end_of(built, two_gpus()).value == Approx(105.0));
  // 40 of work, and 5 after the gather.
  CHECK(simulate({&built.program, 1}, std::vector{two_gpus()}).time.compute.value == Approx(45.0));
  HandBuilt twice;
  CHECK(twice.segment("reduce", Stream::dp, {gather(100, Axis::dp), add}) == reduce);
  CHECK(twice.segment("work", Stream::compute, {clear(20)}) == work);
  for (int time = 0; time < 2; ++time) twice.call(reduce);
  for (int time = 0; time < 5; ++time) twice.call(work);
  // In 100 seconds 50 of work, 5 alone, then 45.
  Timeline timeline;
  CHECK(end_of(twice, two_gpus(), &timeline).value == Approx(210.0));
  Seconds computed;
  for (const TimelineEvent& event : timeline.events)
    if (event.stream == Stream::compute) computed = std::max(computed, event.end);
  CHECK(computed.value == Approx(195.0));
  CHECK(simulate({&twice.program, 1}, std::vector{two_gpus()}).time.compute.value == Approx(200.0));
}

TEST_CASE("what is awaited behind slowed kernels counts as it does behind others") {
  HandBuilt built;
  const int transfer = built.segment("gather", Stream::dp, {gather(100, Axis::dp)});
  const int work = built.segment("work", Stream::compute, {clear(20)});
  const int arrived = built.call(transfer);
  built.call(work);
  built.call(work, {arrived});
  const StepTime time = simulate({&built.program, 1}, std::vector{two_gpus()}).time;
  CHECK(time.compute.value == Approx(60.0));     // 40 beside the gather, then 20
  CHECK(time.exposed.dp.value == Approx(60.0));
  CHECK(time.total().value == Approx(120.0));
}

// The same two GPUs on two nodes, whose NICs carry 1 B/s each way: a gather takes all of them for
// as long as it takes, as does a transfer.
CostModel two_nodes(double nics = 1.0) {
  CostModel model = two_gpus();
  GroupNetwork network = unit_network(2, 2);
  for (const GroupKey group : {next_stage, previous_stage}) model.networks[group] = network;
  network.uplink_bandwidth = BytesPerSecond(nics);
  for (const Axis axis : {Axis::dp, Axis::tp}) model.networks[all_along(axis)] = network;
  return model;
}

// A transfer from one stage to the next, beside gathers of 100 seconds.
struct Transfer {
  HandBuilt from{0}, to{1};
  int gather_from = 0, gather_to = 0, send = 0, receive = 0;

  explicit Transfer(std::int64_t seconds) {
    gather_from = from.segment("gather", Stream::dp, {gather(100, Axis::dp)});
    gather_to = to.segment("gather", Stream::dp, {gather(100, Axis::dp)});
    send = from.segment(
        "send", Stream::send_next,
        {communication(InstructionKind::send, seconds, next_stage, Stream::send_next, Label::pp)});
    receive = to.segment("receive", Stream::receive_previous,
                         {communication(InstructionKind::receive, seconds, previous_stage,
                                        Stream::receive_previous, Label::pp)});
  }
  Seconds end(const CostModel& model) {
    Timeline timeline;
    const std::vector<Program> programs{from.program, to.program};
    simulate(programs, std::vector{model, model}, &timeline);
    Seconds arrived;
    for (const TimelineEvent& event : timeline.events)
      if (event.stream == Stream::receive_previous) arrived = std::max(arrived, event.end);
    return arrived;
  }
};

TEST_CASE("a transfer shares the NICs with collectives that were launched before it, at either end") {
  for (const bool at_source : {false, true})
    for (const bool at_destination : {false, true}) {
      Transfer transfer(20);
      if (at_source) transfer.from.call(transfer.gather_from);
      if (at_destination) transfer.to.call(transfer.gather_to);
      transfer.from.call(transfer.send);
      transfer.to.call(transfer.receive);
      CAPTURE(at_source);
      CAPTURE(at_destination);
      CHECK(transfer.end(two_nodes()).value == Approx(at_source || at_destination ? 40.0 : 20.0));
      // NICs of four times the rate are taken for a quarter.
      CHECK(transfer.end(two_nodes(4.0)).value == Approx(at_source || at_destination ? 20.0 / 0.75 : 20.0));
    }
}

TEST_CASE("a transfer shares the NICs where its stream carries collectives, too") {
  Transfer transfer(20);
  // As the gradients of a tied parameter are summed over the pipeline.
  Instruction sum = gather(5, Axis::tp);
  sum.stream = Stream::send_next;
  const int sums = transfer.from.segment("sum", Stream::send_next, {sum});
  transfer.from.call(transfer.gather_from);
  transfer.from.call(transfer.send);
  transfer.from.call(sums);
  transfer.to.call(transfer.receive);
  CHECK(transfer.end(two_nodes()).value == Approx(40.0));
}

TEST_CASE("a transfer that was launched before a collective, or beside one within a node, is not slowed") {
  Transfer transfer(20);
  transfer.from.call(transfer.send);
  transfer.to.call(transfer.receive);
  transfer.from.call(transfer.gather_from);
  transfer.to.call(transfer.gather_to);
  CHECK(transfer.end(two_nodes()).value == Approx(20.0));
  Transfer within(20);
  within.from.call(within.gather_from);
  within.to.call(within.gather_to);
  within.from.call(within.send);
  within.to.call(within.receive);
  CostModel model = two_nodes();
  model.networks[all_along(Axis::dp)] = unit_network(2);
  CHECK(within.end(model).value == Approx(20.0));
}

TEST_CASE("a transfer that outlasts a collective has the NICs to itself from then on") {
  Transfer transfer(80);
  transfer.from.call(transfer.gather_from);
  transfer.from.call(transfer.send);
  transfer.to.call(transfer.receive);
  CHECK(transfer.end(two_nodes()).value == Approx(130.0));  // 50 in 100, then 30
}

TEST_CASE("collectives in line with kernels share the NICs, too") {
  CostModel model = two_nodes();
  model.execution.in_line |= 1u << index_of(streams_of(Axis::tp).collectives);
  for (const bool beside : {false, true}) {
    HandBuilt built;
    const int collect = built.segment("gather", Stream::dp, {gather(100, Axis::dp)});
    const int work = built.segment("work", Stream::compute, {gather(20, Axis::tp), clear(10)});
    if (beside) built.call(collect);
    built.call(work);
    Timeline timeline;
    simulate({&built.program, 1}, {&model, 1}, &timeline);
    Seconds end;
    for (const TimelineEvent& event : timeline.events)
      if (event.stream == Stream::compute) end = std::max(end, event.end);
    CHECK(end.value == Approx(beside ? 40.0 + 20.0 : 30.0));
  }
}

}  // namespace
}  // namespace parplan
