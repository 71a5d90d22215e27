#include "planner/calibrate/training_log.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "planner/base/error.h"
#include "tests/planner/base/error_of.h"

namespace parplan {
namespace {

const LoggedJob job{.global_batch = 96, .sequence_length = 2048, .devices = 8};

LoggedSteps read(const std::string& text) {
  return read_training_log(text, "train.log", job);
}

std::string line_of(const std::string& milliseconds, const std::string& batch = "96") {
  return "[default7]: iteration       10/  500000 | consumed samples:          960 | elapsed time per iteration "
         "(ms): " +
         milliseconds + " | learning rate: 4.438E-07 | global batch size:    " + batch +
         " | lm loss: 1.010967E+01 | grad norm: 178.553 |\n";
}

}  // namespace

TEST_CASE("the first tenth of a log is warm-up, and the step is the median of the rest") {
  std::string text = "using world size: 8\n" + line_of("271607.0");
  for (const char* step : {"1900.5", "2000.0", "2100.0", "1950.0"}) text += line_of(step) + "validation loss 3.2\n";
  const LoggedSteps steps = read(text);
  CHECK(steps.written_by == "Megatron-LM");
  CHECK(steps.lines == 4);
  CHECK(steps.median.value == doctest::Approx(1.975));  // between 1.95 and 2.0
  CHECK(steps.low.value == doctest::Approx(1.9005));
  CHECK(steps.high.value == doctest::Approx(2.1));
  CHECK(read(line_of("1500")).median.value == doctest::Approx(1.5));  // one line is no warm-up
}

TEST_CASE("steps of another global batch, as while it grows, are left out") {
  const LoggedSteps steps =
      read(line_of("500.0", "16") + line_of("600.0", "32") + line_of("9000.0") + line_of("2000.0"));
  CHECK(steps.lines == 1);
  CHECK(steps.other_batches == 2);
  CHECK(steps.median.value == doctest::Approx(2.0));
  CHECK(error_of<ConfigError>([] { read(line_of("500.0", "16")); }) ==
        "train.log: error: all steps of this log have another global batch, such as 16, than the 96 of this layout; "
        "give it with --global-batch");
}

TEST_CASE("each program's lines are read, with colours, ranks and dates around them") {
  struct Line {
    std::string text;
    std::string written_by;
    double seconds;
  };
  const std::vector<Line> lines{
      {" iteration 12695/ 115311 | elapsed time per iteration (s): 105.22 | TFLOPs: 149.02 |", "Megatron-DeepSpeed",
       105.22},
      {"Epoch 0: : 1%| | 10/1000 [reduced_train_loss=9.0, train_step_timing in s=2.750]", "NeMo", 2.75},
      {"[INFO|DP=0|PP=0|TP=0]: iteration: 5 / 100 | elapsed_time_per_iteration_ms: 3.21K | tokens_per_sec: 20K",
       "nanotron", 3.21},
      {"steps: 200 loss: 5.5508 iter time (s): 0.936 samples/sec: 136.706", "DeepSpeed", 0.936},
      // 96 x 2048 tokens over 8 devices: 24576 each, at 6144 a second.
      {"[rank0]:\x1b[31mstep: 10  \x1b[32mloss:  7.4  \x1b[34mtps: 6,144  \x1b[36mtflops: 35.20  \x1b[35mmfu: "
       "11%\x1b[0m",
       "torchtitan", 4.0},
      {"step: 10 loss: 7.4 memory: 40GiB wps: 12,288 mfu: 22%", "torchtitan", 2.0},
      {"[INFO] [timer.py:260:stop] epoch=0/micro_step=2/global_step=2, RunningAvgSamplesPerSec=30.0, "
       "CurrSamplesPerSec=48.0, MemAllocated=1.87GB",
       "DeepSpeed", 2.0},
  };
  for (const Line& line : lines) {
    CAPTURE(line.text);
    const LoggedSteps steps = read("noise\r" + line.text);
    CHECK(steps.written_by == line.written_by);
    CHECK(steps.median.value == doctest::Approx(line.seconds));
  }
}

TEST_CASE("a log without steps is refused, whatever stands in it") {
  for (const char* text : {"", "\n\n", "elapsed time per iteration (ms): -5", "elapsed time per iteration (ms): fast",
                           "elapsed time per iteration (ms): 1.2.3", "elapsed time per iteration (ms): 0 |",
                           "elapsed time per iteration (ms):", "tps: 1e999", "\x1b[", "iteration 5"})
    CHECK(error_of<ConfigError>([&] { read(text); })
              .starts_with("train.log: error: this log has no step: no line has a "
                           "number behind one of 'elapsed time per iteration "
                           "(ms):', "));
}

}  // namespace parplan
