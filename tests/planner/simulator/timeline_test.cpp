#include "planner/simulator/timeline.h"

#include <doctest/doctest.h>

#include "planner/simulator/simulate.h"
#include "tests/planner/simulator/hand_built.h"

namespace parplan {
namespace {

TEST_CASE("a timeline holds every instruction at its time") {
  HandBuilt built;
  const int layer = built.segment("layer", Stream::compute,
                                  {after(kernel(3), {}, 0),
                                   after(all_reduce(4, all_along(Axis::tp), Stream::tp, Label::tp), {0}, 1)});
  built.call(layer);
  built.call(layer);
  built.program.calls[1].micro_batch = 5;
  const CostModel model = concurrent();
  Timeline timeline;
  simulate({&built.program, 1}, {&model, 1}, &timeline);
  REQUIRE(timeline.events.size() == 4);
  CHECK(timeline.events[0] == TimelineEvent{.rank = 0,
                                            .stage = std::nullopt,
                                            .stream = Stream::compute,
                                            .name = "layer: work linear",
                                            .label = Label::compute,
                                            .micro_batch = std::nullopt,
                                            .start = Seconds(0),
                                            .end = Seconds(3)});
  CHECK(timeline.events[3] == TimelineEvent{.rank = 0,
                                            .stage = std::nullopt,
                                            .stream = Stream::tp,
                                            .name = std::string("layer: ") + name(InstructionKind::all_reduce_sum),
                                            .label = Label::tp,
                                            .micro_batch = 5,
                                            .start = Seconds(10),
                                            .end = Seconds(14)});
}

TEST_CASE("a trace is Chrome trace JSON with a process a rank and a thread a stream") {
  Timeline timeline;
  timeline.events = {{.rank = 1,
                      .stage = 1,
                      .stream = Stream::tp,
                      .name = "layer: \"sum\"",
                      .label = Label::tp,
                      .micro_batch = 2,
                      .start = Seconds(1.5),
                      .end = Seconds(2.0)}};
  const std::string stream = name(Stream::tp);
  CHECK(
      write_trace(timeline) ==
      R"({"displayTimeUnit":"ms","traceEvents":[)"
      R"({"name":"process_name","ph":"M","pid":1,"tid":0,"args":{"name":"stage 1"}},)"
      R"({"name":"thread_name","ph":"M","pid":1,"tid":1,"args":{"name":")" +
          stream +
          R"("}},)"
          R"({"name":"layer: \"sum\"","cat":"tensor","ph":"X","pid":1,"tid":1,"ts":1500000.0,"dur":500000.0,"args":{"micro_batch":2}}]})");
}

}  // namespace
}  // namespace parplan
