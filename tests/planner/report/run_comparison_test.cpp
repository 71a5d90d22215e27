#include "planner/report/run_comparison.h"

#include <doctest/doctest.h>

#include "tests/planner/report/small_plan.h"

namespace parplan {
namespace {

using testing::small_plan;

TEST_CASE("predicted stands beside measured") {
  const Plan plan = small_plan();
  RunComparison comparison{.measured = plan.prediction,
                           .loss = {2.5},
                           .step_times = {Seconds(11.0)},
                           .promised = {.device = {Bytes(620), Bytes(600)}},
                           .touched = {.device = {Bytes(620), Bytes(600)}},
                           .process_growth = Bytes(1830),
                           .hosted = {0, 1},
                           .instructions = {}};
  comparison.measured.time.compute = Seconds(7.0);
  CHECK(write_comparison(plan, comparison) ==
        "                                 predicted  measured  difference\n"
        "step time                           10.0 s    11.0 s     +10.0 %\n"
        "  compute                           6.00 s    7.00 s     +16.7 %\n"
        "  data-parallel communication       1.00 s    1.00 s       equal\n"
        "  transfers between stages          500 ms    500 ms       equal\n"
        "  bubble                            2.00 s    2.00 s       equal\n"
        "  optimizer                         500 ms    500 ms       equal\n"
        "sent a step, tensor parallelism        0 B       0 B       equal\n"
        "sent a step, data parallelism        300 B     300 B       equal\n"
        "sent a step, between stages           60 B      60 B       equal\n"
        "peak of rank 0                       620 B     620 B       equal\n"
        "peak of rank 1                       600 B     600 B       equal\n"
        "process memory growth             1.19 KiB  1.79 KiB     +50.0 %\n");
  // Arenas on the host have rows of their own where a rank has one, and the process holds them too.
  comparison.promised.host = comparison.touched.host = {Bytes(0), Bytes(610)};
  const std::string text = write_comparison(plan, comparison);
  CHECK(text.substr(text.find("peak of rank 1")) ==
        "peak of rank 1                       600 B     600 B       equal\n"
        "peak of rank 0 on the host             0 B       0 B       equal\n"
        "peak of rank 1 on the host           610 B     610 B       equal\n"
        "process memory growth             1.79 KiB  1.79 KiB       equal\n");
}

TEST_CASE("instructions are shown longest first, the rest in the sum") {
  RunComparison comparison;
  comparison.instructions = {
      {.segment = "a", .instruction = "add", .runs_per_step = 2, .predicted = Seconds(1.0), .measured = Seconds(2.0)},
      {.segment = "b",
       .instruction = "linear",
       .runs_per_step = 1,
       .predicted = Seconds(4.0),
       .measured = Seconds(3.0)},
      {.segment = "b", .instruction = "copy", .runs_per_step = 1, .predicted = {}, .measured = Seconds(1.0)}};
  CHECK(write_instructions(comparison, 2) ==
        "segment  instruction     runs a step  predicted  measured  difference\n"
        "b        linear                    1     4.00 s    3.00 s     -25.0 %\n"
        "a        add                       2     1.00 s    2.00 s    +100.0 %\n"
        "all      3 instructions            4     5.00 s    6.00 s     +20.0 %\n");
}

}  // namespace
}  // namespace parplan
