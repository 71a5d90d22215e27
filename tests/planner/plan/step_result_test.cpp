#include "planner/plan/step_result.h"

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "planner/plan/parallel_spec.h"

using namespace parplan;

TEST_CASE("Every label has its name and its own part of the step, which sum to the total") {
  StepTime time;
  std::vector<std::string> names;
  double value = 1;
  for (int i = 0; i < static_cast<int>(Label::count_); ++i, value *= 2) {
    names.push_back(name(static_cast<Label>(i)));
    time.part(static_cast<Label>(i)) += Seconds(value);
  }
  CHECK(names == std::vector<std::string>{"compute", "recompute", "tensor", "expert", "context", "data", "pipeline",
                                         "optimizer", "offload"});
  CHECK(
      time ==
      StepTime{.compute = Seconds(1),
               .recompute = Seconds(2),
               .exposed = {.pp = Seconds(64), .dp = Seconds(32), .cp = Seconds(16), .ep = Seconds(8), .tp = Seconds(4)},
               .bubble = Seconds(0),
               .optimizer = Seconds(128),
               .offload = Seconds(256)});
  time.bubble = Seconds(512);
  CHECK(time.total() == Seconds(1023));
  CHECK(time.exposed_in_all() == Seconds(124));
}

TEST_CASE("Every axis has a label, and a label of an axis that axis") {
  for (const Axis axis : all_axes) CHECK(axis_of(label_of(axis)) == axis);
  for (const Label label : {Label::compute, Label::recompute, Label::optimizer, Label::offload})
    CHECK_FALSE(axis_of(label).has_value());
}

TEST_CASE("Every memory category has its name and its own part of the arena") {
  MemoryUse memory;
  memory.overhead = Bytes(1000);
  std::vector<std::string> names;
  for (int i = 0; i < static_cast<int>(MemoryCategory::count_); ++i) {
    names.push_back(name(static_cast<MemoryCategory>(i)));
    memory.part(static_cast<MemoryCategory>(i)) += Bytes(1 << i);
  }
  CHECK(names == std::vector<std::string>{"parameters", "gradients", "optimizer", "activations", "buffers"});
  CHECK(memory == MemoryUse{.parameters = Bytes(1),
                            .gradients = Bytes(2),
                            .optimizer = Bytes(4),
                            .activations = Bytes(8),
                            .buffers = Bytes(16),
                            .overhead = Bytes(1000)});
  CHECK(memory.arena() == Bytes(31));
  CHECK(memory.peak() == Bytes(1031));
}

TEST_CASE("Memory on the host is counted apart from the device's parts and peak") {
  MemoryUse memory;
  memory.part(MemoryCategory::parameters) += Bytes(3);
  memory.part(MemoryCategory::optimizer, Home::host) += Bytes(5);
  memory.part(MemoryCategory::gradients, Home::host) += Bytes(7);
  memory.part(MemoryCategory::optimizer, Home::nvme) += Bytes(11);
  CHECK(memory == MemoryUse{.parameters = Bytes(3),
                            .gradients = {},
                            .optimizer = {},
                            .activations = {},
                            .buffers = {},
                            .overhead = {},
                            .host = Bytes(12),
                            .nvme = Bytes(11)});
  CHECK(memory.arena(Home::device) == Bytes(3));
  CHECK(memory.arena(Home::host) == Bytes(12));
  CHECK(memory.arena(Home::nvme) == Bytes(11));
  CHECK(memory.peak() == Bytes(3));
}

TEST_CASE("A value of each home is found by name and by home") {
  PerHome<int> values{.device = 1, .host = 2, .nvme = 3};
  for (const Home home : all_homes) values[home] *= 10;
  CHECK(values == PerHome<int>{.device = 10, .host = 20, .nvme = 30});
  CHECK(name(Home::device) == std::string("device"));
  CHECK(name(Home::host) == std::string("host"));
}

TEST_CASE("Schedules and recompute have the names of the command line") {
  CHECK(std::string(name(ScheduleKind::gpipe)) == "gpipe");
  CHECK(std::string(name(ScheduleKind::one_f_one_b)) == "1f1b");
  CHECK(std::string(name(Recompute::none)) == "none");
  CHECK(std::string(name(Recompute::full)) == "full");
}

TEST_CASE("Micro-batches are the global batch over data-parallel ranks and micro-batch size") {
  ParallelSpec spec;
  spec.mesh.degree = {.pp = 4, .dp = 2, .tp = 8};  // pp, dp, tp
  spec.micro_batch = 3;
  TrainingSpec training;
  training.global_batch = 48;
  CHECK(micro_batches(spec, training) == 8);
}

TEST_CASE("times of steps add and scale part by part") {
  const StepTime once{.compute = Seconds(1),
                      .recompute = Seconds(2),
                      .exposed = {.pp = Seconds(5), .dp = Seconds(4), .tp = Seconds(3)},
                      .bubble = Seconds(6),
                      .optimizer = Seconds(7),
                      .offload = Seconds(8)};
  StepTime time = once;
  time += once;
  CHECK(time.total() == Seconds(72));
  time *= 0.5;
  CHECK(time == once);
}
