#include "planner/base/enum_index.h"
#include "planner/simulator/simulate.h"

#include <doctest/doctest.h>

#include <random>

#include "planner/base/error.h"
#include "planner/cost/host_time.h"
#include "planner/plan/parallel_spec.h"
#include "planner/program/bucket_work.h"
#include "tests/planner/simulator/hand_built.h"
#include "tests/planner/simulator/pipelines.h"

namespace parplan {
namespace {

using doctest::Approx;

StepResult simulate_one(const HandBuilt& built, const CostModel& model) {
  return simulate({&built.program, 1}, {&model, 1});
}

StepTime parts(double compute, double tensor, double data, double pipeline, double bubble, double optimizer = 0.0) {
  StepTime time;
  time.compute = Seconds(compute);
  time.exposed.tp = Seconds(tensor);
  time.exposed.dp = Seconds(data);
  time.exposed.pp = Seconds(pipeline);
  time.bubble = Seconds(bubble);
  time.optimizer = Seconds(optimizer);
  return time;
}

StepTime simulate_stages(const std::vector<Program>& programs, const CostModel& model, Timeline* timeline = nullptr) {
  const std::vector<CostModel> models(programs.size(), model);
  return simulate(programs, models, timeline).time;
}

Schedule pipeline_schedule(int stages, int micro_batches, ScheduleKind kind) {
  std::vector<std::vector<Action>> ranks;
  for (int s = 0; s < stages; ++s)
    ranks.push_back(kind == ScheduleKind::gpipe ? gpipe(s, micro_batches) : one_f_one_b(s, stages, micro_batches));
  return one_stage_a_rank(std::move(ranks));
}

std::vector<Program> pipeline(int stages, int micro_batches, ScheduleKind kind, StageWork work,
                              std::int64_t transfer) {
  return pipeline_ranks(pipeline_schedule(stages, micro_batches, kind),
                        std::vector<StageWork>(static_cast<std::size_t>(stages), work), transfer);
}

TEST_CASE("kernels of one stream add up under their labels") {
  HandBuilt built;
  const int segment =
      built.segment("step", Stream::compute, {kernel(3), kernel(2, Label::recompute), kernel(1, Label::optimizer)});
  built.call(segment);
  built.call(segment);
  StepTime expected = parts(6, 0, 0, 0, 0, 2);
  expected.recompute = Seconds(4);
  for (const CostModel& model : {concurrent(), sequential()}) {
    CHECK(simulate_one(built, model).time == expected);
    CHECK(simulate_one(built, model).time.total() == Seconds(12));
  }
}

TEST_CASE("a tensor reduction that the next kernel awaits is exposed") {
  HandBuilt built;
  // 3, then 4 in transfer, then 2.
  built.call(built.segment("layer", Stream::compute,
                           {after(kernel(3), {}, 0),
                            after(all_reduce(4, all_along(Axis::tp), Stream::tp, Label::tp), {0}, 1),
                            after(kernel(2), {1})}));
  for (const CostModel& model : {concurrent(), sequential()})
    CHECK(simulate_one(built, model).time == parts(5, 4, 0, 0, 0));
}

TEST_CASE("a tensor reduction hides behind a kernel that does not await it") {
  HandBuilt built;
  built.call(built.segment("layer", Stream::compute,
                           {after(kernel(3), {}, 0),
                            after(all_reduce(4, all_along(Axis::tp), Stream::tp, Label::tp), {0}, 1),
                            kernel(3),               // 3 to 6, while the reduction goes on until 7
                            after(kernel(2), {1})}));
  CHECK(simulate_one(built, concurrent()).time == parts(8, 1, 0, 0, 0));
  CHECK(simulate_one(built, sequential()).time == parts(8, 4, 0, 0, 0));
}

TEST_CASE("a segment joins its side streams at its end, so what they do last is exposed") {
  HandBuilt built;
  const int layer = built.segment(
      "layer", Stream::compute,
      {after(kernel(3), {}, 0), after(all_reduce(4, all_along(Axis::tp), Stream::tp, Label::tp), {0})});
  built.call(layer);
  built.call(layer);
  CHECK(simulate_one(built, concurrent()).time == parts(6, 8, 0, 0, 0));
}

TEST_CASE("the data-parallel reduction overlaps the backward pass") {
  HandBuilt built;
  const int backward = built.segment("backward", Stream::compute, {kernel(3)});
  const int reduce = built.segment("reduce", Stream::dp, {all_reduce(4, all_along(Axis::dp), Stream::dp, Label::dp)});
  const int update = built.segment("update", Stream::compute, {kernel(1, Label::optimizer)});
  int reduced = -1;
  for (int layer = 0; layer < 3; ++layer) reduced = built.call(reduce, {built.call(backward)});
  built.call(update, {reduced});
  // Backward 0-3, 3-6, 6-9; reductions 3-7, 7-11, 11-15; update 15-16: 6 s of reductions are not
  // hidden.
  CHECK(simulate_one(built, concurrent()).time == parts(9, 0, 6, 0, 0, 1));
  // One core does both: 9 + 12 + 1.
  CHECK(simulate_one(built, sequential()).time == parts(9, 0, 12, 0, 0, 1));
}

TEST_CASE("communication at the end of the step is exposed though nothing computes after it") {
  HandBuilt built;
  const int compute = built.segment("compute", Stream::compute, {kernel(3)});
  const int gather = built.segment("gather", Stream::dp, {all_reduce(4, all_along(Axis::dp), Stream::dp, Label::dp)});
  built.call(gather, {built.call(compute)});
  CHECK(simulate_one(built, concurrent()).time == parts(3, 0, 4, 0, 0));
}

TEST_CASE("a kernel beside another segment's exposed communication counts as compute") {
  HandBuilt built;
  built.call(built.segment("layer", Stream::compute,
                           {after(kernel(3), {}, 0),
                            after(all_reduce(4, all_along(Axis::tp), Stream::tp, Label::tp), {0}, 1),
                            after(kernel(2), {1})}));
  built.call(built.segment("update", Stream::dp, {kernel(5, Label::optimizer)}));
  // compute 0-3, update goes on until 5, the reduction until 7, compute 7-9.
  built.program.segments[1].instructions[0].stream = Stream::dp;
  CHECK(simulate_one(built, concurrent()).time == parts(5, 2, 0, 0, 0, 2));
}

TEST_CASE("copies to the host overlap the backward, and the host's update is awaited by what follows") {
  HandBuilt built;
  const auto copy = [](std::int64_t seconds, Home to) {
    Instruction instruction = copy_to(to, DataType::fp32);
    instruction.operands = {{.bytes = seconds, .access = Access::read}, {.bytes = seconds, .access = Access::write}};
    return instruction;
  };
  const Instruction of_host = update_on_host(1, false, TrainingSpec{});
  const int backward = built.segment("backward", Stream::compute, {kernel(4)});
  const int out = built.segment("out", Stream::to_host, {copy(6, Home::host)});
  const int update = built.segment("update", Stream::host, {of_host});
  const int back = built.segment("back", Stream::from_host, {copy(2, Home::device)});
  int copied = -1;
  for (int layer = 0; layer < 2; ++layer) copied = built.call(out, {built.call(backward)});
  built.call(back, {built.call(update, {copied})});
  CostModel model = concurrent();
  DeviceKind device = *model.device;
  device.backend = BackendKind::cuda;
  model.device = std::make_shared<const DeviceKind>(device);
  // The update moves 28 bytes.
  model.host = HostShare{.link = BytesPerSecond(1.0),
                         .latency = Seconds(0.0),
                         .memory_bandwidth = BytesPerSecond(28.0 / host_update_share)};
  // Backward 0-4, 4-8; copies 4-10, 10-16; update 16-17; copy back 17-19.
  StepTime expected = parts(8, 0, 0, 0, 0, 1);
  expected.offload = Seconds(8 + 2);
  CHECK(simulate_one(built, model).time == expected);
}

TEST_CASE("state on NVMe is read and written beside updates, also where all else takes turns") {
  const auto built_with = [](CostModel model) {
    HandBuilt built;
    const auto of_file = [](std::int64_t seconds, Stream stream) {
      Instruction instruction = copy_on(stream, DataType::fp32);
      instruction.operands = {{.bytes = seconds, .access = Access::read}, {.bytes = seconds, .access = Access::write}};
      return instruction;
    };
    const int read = built.segment("read", Stream::from_nvme, {of_file(4, Stream::from_nvme)});
    const int forward = built.segment("forward", Stream::compute, {kernel(3)});
    const int update = built.segment("update", Stream::compute, {kernel(2, Label::optimizer)});
    const int write = built.segment("write", Stream::to_nvme, {of_file(4, Stream::to_nvme)});
    const int first = built.call(read), second = built.call(read);
    built.call(forward);
    const int updated = built.call(update, {first});
    const int written = built.call(write, {updated});
    built.call(write, {built.call(update, {second})});
    const int third = built.call(read, {written});
    built.call(write, {built.call(update, {third})});
    model.nvme = NvmeShare{.read = BytesPerSecond(1.0), .write = BytesPerSecond(2.0), .latency = Seconds(1.0)};
    return simulate_one(built, model).time;
  };
  // Reads take 4 + 1, writes 4 / 2 + 1. Reads 0-5, 5-10; forward 0-3; updates 5-7, 10-12; writes
  // 7-10, 12-15; the third read 10-15, its update 15-17 and its write 17-20.
  StepTime expected = parts(3, 0, 0, 0, 0, 6);
  expected.offload = Seconds(11);
  CHECK(built_with(concurrent()) == expected);
  CHECK(built_with(sequential()) == expected);
}

TEST_CASE("calls played in one piece give the same parts as their instructions one by one") {
  HandBuilt built;
  const int layer = built.segment("layer", Stream::compute,
                                  {after(kernel(3), {}, 0),
                                   after(all_reduce(4, all_along(Axis::tp), Stream::tp, Label::tp), {0}, 1),
                                   kernel(1, Label::recompute),
                                   after(kernel(2), {1}, 2),
                                   after(all_reduce(5, all_along(Axis::tp), Stream::tp, Label::tp), {2})});
  const int reduce =
      built.segment("reduce", Stream::dp, {all_reduce(20, all_along(Axis::dp), Stream::dp, Label::dp)});
  const int done = built.call(layer);  // kernels 0-3, 3-4, 7-9; reductions 3-7, 9-14
  built.call(layer);                   // kernels until 23, the last reduction until 28
  built.call(layer, {built.call(reduce, {done})});  // reduced 14-34; 34-48
  // A layer: 5 of compute, 1 of recompute, 3 + 5 of tensor; but from 23 on the third layer awaits
  // the reduction of data.
  StepTime expected = parts(15, 19, 11, 0, 0);
  expected.recompute = Seconds(3);
  CHECK(simulate_one(built, concurrent()).time == expected);
  // A kernel of zero duration on another stream, launched beside the first call, makes every call
  // be played instruction by instruction.
  built.call(built.segment("nothing", Stream::receive_next, {kernel(0)}));
  built.program.segments.back().instructions[0].stream = Stream::receive_next;
  CHECK(simulate_one(built, concurrent()).time == expected);
}

TEST_CASE("GPipe and 1F1B take (m + p - 1)(f + b), of which p - 1 are the bubble") {
  for (const ScheduleKind kind : {ScheduleKind::gpipe, ScheduleKind::one_f_one_b})
    for (const int p : {1, 2, 4})
      for (const int m : {1, 4, 9}) {
        CAPTURE(p);
        CAPTURE(m);
        for (const CostModel& model : {concurrent(), sequential()})
          // f = 1, b = 2, transfers cost nothing. Stage 0 finishes last: 3 m computing, 3 (p - 1)
          // idle.
          CHECK(simulate_stages(pipeline(p, m, kind, {1, 2}, 0), model) == parts(3.0 * m, 0, 0, 0, 3.0 * (p - 1)));
      }
}

TEST_CASE("a transfer counts as pipeline while it is awaited, the wait for the partner as bubble") {
  // Stage 0: forward 0-1, sent 1-6, then it waits. Stage 1: forward 6-7, backward 7-9, sent 9-14.
  // Stage 0: backward 14-16.
  const std::vector<Program> programs = pipeline(2, 1, ScheduleKind::gpipe, {1, 2}, 5);
  for (const CostModel& model : {concurrent(), sequential()})
    CHECK(simulate_stages(programs, model) == parts(3, 0, 0, 5, 8));
}

TEST_CASE("the parts of a step are those of the stage that computes longest, until the last one ends") {
  const Schedule schedule = pipeline_schedule(2, 3, ScheduleKind::gpipe);
  const std::vector<Program> programs = pipeline_ranks(schedule, {{1, 2}, {2, 3}}, 0);
  // Stage 1: idle 0-1, forwards 1-7, backwards 7-16. Stage 0: its last backward 16-18.
  for (const CostModel& model : {concurrent(), sequential()})
    CHECK(simulate_stages(programs, model) == parts(15, 0, 0, 0, 3));
}

TEST_CASE("transfers overlap compute on devices with streams, and cost the receiver on others") {
  // Two stages, three micro-batches forward only: f = 4, transfer 2.
  Schedule schedule = pipeline_schedule(2, 3, ScheduleKind::gpipe);
  for (std::vector<Action>& actions : schedule.ranks) actions.resize(3);
  const std::vector<Program> programs = pipeline_ranks(schedule, {{4, 0}, {4, 0}}, 2);
  // Stage 1: received 4-6, 8-10, 12-14; computed 6-10, 10-14, 14-18.
  // Before the first: 4 of bubble, 2 of transfer.
  CHECK(simulate_stages(programs, concurrent()) == parts(12, 0, 0, 2, 4));
  // Stage 0 posts at 4, 8, 12. Stage 1: copies 4-6, computes 6-10, copies 10-12, computes 12-16,
  // copies 16-18, computes 18-22.
  CHECK(simulate_stages(programs, sequential()) == parts(12, 0, 0, 6, 4));
}

TEST_CASE("a sender in its own thread goes on at once, and waits where it waits for the event") {
  HandBuilt first(0);
  const int work = first.segment("work", Stream::compute, {kernel(1)});
  const int send =
      first.segment("send", Stream::send_next,
                    {communication(InstructionKind::send, 5, next_stage, Stream::send_next, Label::pp)});
  const int sent = first.call(send, {first.call(work)});
  first.call(work);           // 1 to 2, while the send is outstanding
  const int again = first.segment("reuse", Stream::compute, {kernel(20)});
  first.call(again, {sent});  // taken at 3 + 5
  HandBuilt second(1);
  second.call(second.segment("work", Stream::compute, {kernel(3)}));
  second.call(second.segment(
      "receive", Stream::receive_previous,
      {communication(InstructionKind::receive, 5, previous_stage, Stream::receive_previous, Label::pp)}));
  // 0-2 compute, 2-3 bubble (the receiver computes), 3-8 the copy, 8-28 compute.
  CHECK(simulate_stages({first.program, second.program}, sequential()) == parts(22, 0, 0, 5, 1));
  // With streams the receive is ready at 0, the send at 1: 1-6, compute 1-2; then 4 s of transfer
  // are left.
  CHECK(simulate_stages({first.program, second.program}, concurrent()) == parts(22, 0, 0, 4, 0));
}

TEST_CASE("a posted send on a side stream is joined at its segment's end") {
  HandBuilt first(0);
  first.call(first.segment(
      "work", Stream::compute,
      {communication(InstructionKind::send, 5, next_stage, Stream::send_next, Label::pp), kernel(1)}));
  first.call(first.segment("more", Stream::compute, {kernel(20)}));
  HandBuilt second(1);
  second.call(second.segment(
      "receive", Stream::receive_previous,
      {communication(InstructionKind::receive, 5, previous_stage, Stream::receive_previous, Label::pp)}));
  // The copy 0-5 beside the kernel 0-1, then 20.
  for (const CostModel& model : {concurrent(), sequential()})
    CHECK(simulate_stages({first.program, second.program}, model) == parts(21, 0, 0, 4, 0));
}

TEST_CASE("tied gradients meet between the first and the last stage, norms between all") {
  std::vector<Program> programs;
  for (int s = 0; s < 3; ++s) {
    HandBuilt built(s);
    built.program.set_group(all_along(Axis::pp), {0, 1, 2});
    if (s != 1) built.program.set_group(tied_stages, {0, 2});
    int event = built.call(built.segment("work", Stream::compute, {kernel(1 + 2 * s)}));  // until 1, 3, 5
    if (s != 1)
      event = built.call(
          built.segment("tied", Stream::dp, {all_reduce(4, tied_stages, Stream::dp, Label::dp)}), {event});
    // The tied sum goes from 5 to 9; the norm from 9 to 11, with a kernel before it and one after
    // it.
    built.call(built.segment(
                   "norm", Stream::compute,
                   {kernel(0, Label::optimizer), all_reduce(2, all_along(Axis::pp), Stream::compute, Label::pp),
                    kernel(3 - s, Label::optimizer)}),
               {event});
    programs.push_back(built.program);
  }
  // Stage 2 computes longest, until 5; it reduces until 9 and 11, updates until 12, and waits for
  // stage 0, which updates until 14.
  for (const CostModel& model : {concurrent(), sequential()})
    CHECK(simulate_stages(programs, model) == parts(5, 0, 4, 2, 2, 1));
}

TEST_CASE("a stage without the tied parameter's group takes its own time only") {
  HandBuilt built;
  built.call(built.segment("tied", Stream::dp, {all_reduce(4, tied_stages, Stream::dp, Label::dp)}));
  CHECK(simulate_one(built, concurrent()).time.total() == Seconds(4));
}

TEST_CASE("of stages that finish together the lowest is reported") {
  HandBuilt first(0), second(1);
  first.call(first.segment("work", Stream::compute, {kernel(5)}));
  second.call(second.segment("work", Stream::compute, {kernel(5, Label::recompute)}));
  CHECK(simulate_stages({first.program, second.program}, concurrent()) == parts(5, 0, 0, 0, 0));
}

TEST_CASE("memory is of the stage with the highest peak, communication of the one that sends most") {
  HandBuilt first(0), second(1);
  first.program.memory.activations = Bytes(100);
  second.program.memory.parameters = Bytes(90);
  second.program.memory.overhead = Bytes(20);
  first.program.communication = {.pp = Bytes(0), .dp = Bytes(5), .tp = Bytes(7)};
  second.program.communication = {.pp = Bytes(9), .dp = Bytes(1), .tp = Bytes(1)};
  const std::vector<Program> programs = {first.program, second.program};
  const std::vector<CostModel> models(2, concurrent());
  const StepResult result = simulate(programs, models);
  CHECK(result.memory == second.program.memory);
  CHECK(result.communication == first.program.communication);
  CHECK(result.time == StepTime{});
}

TEST_CASE("calls whose segments share a side stream use it in launch order") {
  HandBuilt built;
  const int a = built.segment("a", Stream::compute, {all_reduce(4, all_along(Axis::tp), Stream::tp, Label::tp)});
  const int b = built.segment("b", Stream::dp, {all_reduce(3, all_along(Axis::tp), Stream::tp, Label::dp)});
  built.call(a);
  built.call(b);
  const std::vector<CostModel> models = {concurrent()};
  Timeline timeline;
  CHECK(simulate({&built.program, 1}, models, &timeline).time.total() == Seconds(7));
  REQUIRE(timeline.events.size() == 2);
  CHECK(timeline.events[1].start == Seconds(4));
}

TEST_CASE("a call that finds its side stream busy waits there, instruction by instruction") {
  HandBuilt built;
  const int layer = built.segment(
      "layer", Stream::compute,
      {after(kernel(3), {}, 0), after(all_reduce(4, all_along(Axis::tp), Stream::tp, Label::tp), {0}, 1),
       after(kernel(2), {1})});
  const int sum =
      built.segment("sum", Stream::tp, {all_reduce(10, all_along(Axis::tp), Stream::tp, Label::tp)});
  built.call(sum);    // 0-10
  built.call(layer);  // 0-3, 10-14, 14-16
  built.call(layer);  // 16-19, 19-23, 23-25: in one piece
  built.call(sum);    // 23-33, beside the last kernel
  Timeline timeline;
  CHECK(simulate_stages({built.program}, concurrent(), &timeline) == parts(10, 23, 0, 0, 0));  // 3-14, 19-23, 25-33
  std::vector<double> starts;
  for (const TimelineEvent& event : timeline.events) starts.push_back(event.start.value);
  CHECK(starts == std::vector<double>{0, 0, 10, 14, 16, 19, 23, 23});
  // With a kernel of zero duration in the way, the pieces are played separately: the last sum's
  // cause is the reduction before it.
  built.call(built.segment("nothing", Stream::dp, {kernel(0)}));
  built.program.segments.back().instructions[0].stream = Stream::dp;
  CHECK(simulate_stages({built.program}, concurrent()) == parts(10, 23, 0, 0, 0));
}

TEST_CASE("programs that block one another are named with what they wait for") {
  std::vector<Program> programs = pipeline(2, 1, ScheduleKind::gpipe, {1, 2}, 5);
  programs[1].calls.erase(programs[1].calls.begin(), programs[1].calls.begin() + 3);  // left: nothing of the forward
  programs[1].calls[0].waits.clear();
  const std::vector<CostModel> models(2, concurrent());
  CHECK_THROWS_WITH_AS(simulate(programs, models),
                       "the programs block one another: rank 0 call 1 'send forward' waits in '0 to 1' for a receive",
                       InternalError);
}

TEST_CASE("crossed receives are a deadlock on every kind of device") {
  // Both stages wait for the other first.
  std::vector<Program> programs;
  for (int s = 0; s < 2; ++s) {
    HandBuilt built(s);
    const GroupKey other = s == 0 ? next_stage : previous_stage;
    const Stream in = s == 0 ? Stream::receive_next : Stream::receive_previous;
    const Stream out = s == 0 ? Stream::send_next : Stream::send_previous;
    const int heard =
        built.call(built.segment("hear", in, {communication(InstructionKind::receive, 1, other, in, Label::pp)}));
    built.call(built.segment("tell", out, {communication(InstructionKind::send, 1, other, out, Label::pp)}),
               {heard});
    programs.push_back(built.program);
  }
  CHECK_THROWS_WITH_AS(simulate_stages(programs, sequential()),
                       "the programs block one another: rank 0 call 0 'hear' waits in '1 to 0' for a send; "
                       "rank 1 call 0 'hear' waits in '0 to 1' for a send",
                       InternalError);
  CHECK_THROWS_WITH_AS(simulate_stages(programs, concurrent()),
                       "the programs block one another: rank 0 call 1 'tell' waits for call 0 'hear'; "
                       "rank 0 call 0 'hear' waits in '1 to 0' for a send; "
                       "rank 1 call 0 'hear' waits in '0 to 1' for a send; "
                       "rank 1 call 1 'tell' waits for call 0 'hear'",
                       InternalError);
}

TEST_CASE("a posted send that nobody takes is an error") {
  HandBuilt first(0), second(1);
  first.call(
      first.segment("send", Stream::send_next,
                    {communication(InstructionKind::send, 5, next_stage, Stream::send_next, Label::pp)}));
  second.call(second.segment("work", Stream::compute, {kernel(1)}));
  CHECK_THROWS_WITH_AS(simulate_stages({first.program, second.program}, sequential()),
                       doctest::Contains("rank 0 to 1: 1 sends, 0 receives"), InternalError);
}

TEST_CASE(
    "random pipelines take what the recurrence of their schedule says, their parts sum to it, and a timeline changes "
    "nothing") {
  std::mt19937 random(7);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int round = 0; round < 200; ++round) {
    CAPTURE(round);
    const int stages = draw(1, 5);
    const int micro_batches = draw(1, 8);
    const int transfer = draw(0, 3);
    const bool fill_first = draw(0, 1) == 1;
    const Schedule schedule =
        pipeline_schedule(stages, micro_batches, fill_first ? ScheduleKind::gpipe : ScheduleKind::one_f_one_b);
    std::vector<StageWork> work;
    for (int s = 0; s < stages; ++s) {
      const int forward = draw(1, 9);
      work.push_back({forward, draw(1, 9)});
    }
    const std::vector<Program> programs = pipeline_ranks(schedule, work, transfer);
    Timeline timeline;
    const StepTime time = simulate_stages(programs, concurrent(), &timeline);
    CHECK(time.total() == Seconds(pipeline_recurrence(schedule, work, transfer)));
    CHECK(simulate_stages(programs, concurrent()) == time);
    double last = 0.0;
    for (const TimelineEvent& event : timeline.events) last = std::max(last, event.end.value);
    CHECK(time.total() == Seconds(last));

    Timeline in_order;
    const StepTime slower = simulate_stages(programs, sequential(), &in_order);
    last = 0.0;
    for (const TimelineEvent& event : in_order.events) last = std::max(last, event.end.value);
    CHECK(slower.total() == Seconds(last));
    CHECK(slower.total() >= time.total());
  }
}

TEST_CASE("fractional times sum to the end of the step up to rounding") {
  CostModel model = concurrent();
  model.rates.matrix_fp32 = FlopsPerSecond(2.0 / 0.1);  // a unit of work takes 0.1 s
  for (auto& [group, network] : model.networks) network = unit_network(2);
  Timeline timeline;
  const StepTime time = simulate_stages(pipeline(4, 50, ScheduleKind::one_f_one_b, {1, 2}, 1), model, &timeline);
  double last = 0.0;
  for (const TimelineEvent& event : timeline.events) last = std::max(last, event.end.value);
  CHECK(time.total().value == Approx(last).epsilon(1e-12));
}

}  // namespace
}  // namespace parplan
