#include "planner/report/plan_table.h"
#include "planner/report/table.h"

#include <doctest/doctest.h>

#include "tests/planner/report/small_plan.h"

namespace parplan {
namespace {

using testing::small_plan;

TEST_CASE("the table ranks the plan and its alternatives") {
  CHECK(write_table(small_plan()) ==
        "rank  layout                            devices    step  tokens/s     MFU  memory peak  of capacity  bubble  "
        "exposed comm\n"
        "1     dp2 tp1 pp2 zero1 mb1 1f1b pp>dp        4  10.0 s         2  50.0 %        640 B       64.0 %  20.0 %   "
        "     15.0 %\n"
        "2     dp2 tp1 pp2 zero1 mb2 1f1b pp>dp        4  11.5 s      1.74  43.5 %        720 B       72.0 %  34.8 %   "
        "      8.7 %\n"
        "memory peak counts 20 B a device for libraries; fragmentation is not modelled\n");
  Plan without = small_plan();
  without.prediction.memory.overhead = Bytes(0);
  CHECK(write_table(without).ends_with("counts nothing for libraries; fragmentation is not modelled\n"));
}

TEST_CASE("the table says on which nodes plans are where these are not the same for all") {
  Plan plan = small_plan();
  Cluster crates = plan.cluster;
  crates.groups.front().device.name = "crate";
  crates.groups.front().device.memory_capacity = Bytes(1440);
  crates.groups.front().device.peak_fp32 = FlopsPerSecond(200.0);
  plan.alternatives.front().on = OtherDevices{.cluster = crates, .training = plan.training};
  // 720 of 1440 bytes; half the share of twice the peak.
  CHECK(write_table(plan) ==
        "rank  layout                            devices    step  tokens/s     MFU  memory peak  of capacity  bubble  "
        "exposed comm                   on\n"
        "1     dp2 tp1 pp2 zero1 mb1 1f1b pp>dp        4  10.0 s         2  50.0 %        640 B       64.0 %  20.0 %   "
        "     15.0 %    1 node of 4 x box\n"
        "2     dp2 tp1 pp2 zero1 mb2 1f1b pp>dp        4  11.5 s      1.74  21.7 %        720 B       50.0 %  34.8 %   "
        "      8.7 %  1 node of 4 x crate\n"
        "memory peak counts 20 B a device for libraries; fragmentation is not modelled\n");
  plan.alternatives.front().on->training.precision = DataType::fp16;
  CHECK(describe_devices(plan, plan.alternatives.front()) == "1 node of 4 x crate, in fp16");
}

TEST_CASE("long lines go on in the next, between words") {
  CHECK(fold_lines("short\n", 10) == "short\n");
  CHECK(fold_lines("a list of words\n  - of several lines\n", 11) ==
        "a list of\n  words\n  - of\n    several\n    lines\n");
  CHECK(fold_lines("unbreakable-word and more\n", 10) == "unbreakable-word\n  and more\n");
  // No room beside the indentation.
  CHECK(fold_lines("      some words here\n", 4) == "      some\n        words\n        here\n");
}

}  // namespace
}  // namespace parplan
