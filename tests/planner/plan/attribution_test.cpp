#include "planner/plan/attribution.h"

#include <doctest/doctest.h>

#include <vector>

namespace parplan {
namespace {

Played compute(double start, double end, std::optional<int> cause = {}) {
  return {.start = Seconds(start), .end = Seconds(end), .cause = cause,
          .work = {.computes = true, .label = Label::compute}, .progress = Progress::done};
}
Played communication(Label label, double start, double end, std::optional<int> cause) {
  return {.start = Seconds(start), .end = Seconds(end), .cause = cause,
          .work = {.label = label}, .progress = Progress::done};
}

TEST_CASE("nothing played takes no time") {
  CHECK(sum(attribute({}, std::nullopt)) == StepTime{});
}

TEST_CASE("a communication counts as far as the next compute awaits it, the wait for partners as bubble") {
  // Computed 0-3 and 3-5; a reduction, ready at 3, starts with its partners at 4 and ends at 7; the
  // last compute awaits it from 7 to 9.
  const std::vector<Played> pieces{compute(0, 3), compute(3, 5, 0), communication(Label::tp, 4, 7, 0),
                                   compute(7, 9, 2)};
  StepTime expected;
  expected.compute = Seconds(7);
  expected.exposed.tp = Seconds(2);
  CHECK(sum(attribute(pieces, 3)) == expected);
  // Without the second compute the partners' delay from 3 to 4 shows.
  const std::vector<Played> alone{compute(0, 3), communication(Label::tp, 4, 7, 0), compute(7, 9, 1)};
  expected.compute = Seconds(5);
  expected.exposed.tp = Seconds(3);
  expected.bubble = Seconds(1);
  CHECK(sum(attribute(alone, 2)) == expected);
}

TEST_CASE("what follows the last compute is kept apart, since only later work decides whether it is awaited") {
  const std::vector<Played> pieces{compute(0, 3), communication(Label::dp, 3, 8, 0)};
  const SplitTime split = attribute(pieces, 1);
  CHECK(split.computed == Seconds(3));
  CHECK(split.parts.total() == Seconds(3));
  CHECK(split.tail.exposed.dp == Seconds(5));
  CHECK(split.tail.total() == Seconds(5));
}

TEST_CASE("a bubble is what no cause explains") {
  // The compute starts at 4, and nothing made it ready.
  StepTime expected;
  expected.compute = Seconds(2);
  expected.bubble = Seconds(4);
  CHECK(sum(attribute(std::vector{compute(4, 6)}, 0)) == expected);
}

}  // namespace
}  // namespace parplan
