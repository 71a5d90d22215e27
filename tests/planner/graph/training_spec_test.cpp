#include "planner/graph/training_spec.h"

#include <doctest/doctest.h>

using namespace parplan;

TEST_CASE("The learning rate warms up from the first step and then stays") {
  const TrainingSpec training = {.learning_rate = 8.0, .warmup_steps = 4};
  CHECK(learning_rate_at(training, 0) == 2.0);
  CHECK(learning_rate_at(training, 2) == 6.0);
  CHECK(learning_rate_at(training, 3) == 8.0);
  CHECK(learning_rate_at(training, 4) == 8.0);
  CHECK(learning_rate_at(training, 1000) == 8.0);
  CHECK(learning_rate_at({.learning_rate = 8.0}, 0) == 8.0);
}

TEST_CASE("A linear schedule falls evenly to its last learning rate and stays there") {
  const TrainingSpec training = {.learning_rate = 10.0,
                                 .schedule = LearningRateSchedule::linear,
                                 .warmup_steps = 2,
                                 .decay_steps = 6,
                                 .final_learning_rate = 2.0};
  CHECK(learning_rate_at(training, 1) == 10.0);
  CHECK(learning_rate_at(training, 2) == 10.0);
  CHECK(learning_rate_at(training, 3) == 8.0);  // 10 - 8 / 4
  CHECK(learning_rate_at(training, 5) == 4.0);
  CHECK(learning_rate_at(training, 6) == 2.0);
  CHECK(learning_rate_at(training, 99) == 2.0);
}

TEST_CASE("A cosine schedule is half way down in the middle") {
  const TrainingSpec training = {.learning_rate = 10.0,
                                 .schedule = LearningRateSchedule::cosine,
                                 .warmup_steps = 0,
                                 .decay_steps = 6,
                                 .final_learning_rate = 2.0};
  CHECK(learning_rate_at(training, 0) == 10.0);
  CHECK(learning_rate_at(training, 2) == doctest::Approx(8.0));  // 2 + 8 (1 + cos 60 deg) / 2
  CHECK(learning_rate_at(training, 3) == doctest::Approx(6.0));
  CHECK(learning_rate_at(training, 6) == 2.0);
}

TEST_CASE("Optimizers, schedules, dims and types have the names that files use") {
  CHECK(std::string(name(Optimizer::adamw)) == "adamw");
  CHECK(std::string(name(Optimizer::adamw_8bit)) == "adamw_8bit");
  CHECK(std::string(name(Optimizer::adam)) == "adam");
  CHECK(std::string(name(Optimizer::sgd)) == "sgd");
  CHECK(std::string(name(Optimizer::muon)) == "muon");
  CHECK(std::string(name(LearningRateSchedule::constant)) == "constant");
  CHECK(std::string(name(LearningRateSchedule::cosine)) == "cosine");
  CHECK(std::string(name(LearningRateSchedule::linear)) == "linear");
  CHECK(std::string(name(Dim::kv_groups)) == "kv_groups");
  CHECK(std::string(name(DataType::bf16)) == "bf16");
  CHECK(element_count({.name = "weight", .dims = {{Dim::hidden, 3, 1}, {Dim::feature, 5, 1}}}) == 15);
  CHECK(element_count({.name = "loss", .dims = {}}) == 1);
}
