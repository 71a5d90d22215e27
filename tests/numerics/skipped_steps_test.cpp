// Steps whose gradients are not finite, under every kind of layout.
#include <doctest/doctest.h>

#include <bit>
#include <limits>
#include <map>
#include <random>

#include "runtime/run.h"
#include "tests/numerics/plan_runs.h"

namespace parplan {
namespace {

constexpr std::int32_t poisoned = 7;  // the token whose row of the embedding is not a number

// The input's embedding is a parameter of its own in this model, so that a batch without the token
// is finite.
const OpGraph& graph() {
  static const OpGraph made = testing::graph_of("tiny-llama");
  return made;
}

InitialValues initial_values() {
  return [standard = initializer(7)](const Tensor& tensor) -> std::function<float(std::int64_t)> {
    if (tensor.name != "embedding.weight") return standard(tensor);
    const std::int64_t width = element_count(tensor) / graph().vocabulary;
    return [values = standard(tensor), width](std::int64_t index) {
      return index / width == poisoned ? std::numeric_limits<float>::quiet_NaN() : values(index);
    };
  };
}

// A batch of tokens other than the poisoned one; with `bad`, its last sequence holds that once.
void fill_batch(Batch& batch, std::uint32_t number, bool bad) {
  std::mt19937 random(number);
  batch.ids.resize(static_cast<std::size_t>(testing::global_batch * (testing::sequence + 1)));
  for (std::int32_t& id : batch.ids) {
    id = static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(graph().vocabulary));
    if (id == poisoned) ++id;
  }
  if (bad) batch.ids[batch.ids.size() - 3] = poisoned;
}

// A step's batch.
struct Given {
  std::uint32_t number = 0;
  bool bad = false;
};

struct Trained {
  std::vector<bool> skipped;
  std::map<std::string, std::vector<std::uint32_t>> bits;  // of the parameters
};

Trained train(const TrainingSpec& training, const ParallelSpec& spec, const std::vector<Given>& batches) {
  const std::unique_ptr<Rendezvous> rendezvous = alone();
  LocalJob job(testing::job_of(graph(), training, spec), initial_values(), cpu_threads(), *rendezvous);
  Trained trained;
  job.run({.first = 0,
           .count = static_cast<std::int64_t>(batches.size()),
           .batch_of = [&](std::int64_t step, Batch& batch) {
             const Given& given = batches[static_cast<std::size_t>(step)];
             fill_batch(batch, given.number, given.bad);
           },
           .timing_of = {},
           .on_step = [&](std::int64_t, const JobStep& step) { trained.skipped.push_back(step.skipped); },
           .skips_not_finite = true});
  for (const auto& [name, values] : job.collect(ParameterContent::values))
    for (const float value : values) trained.bits[name].push_back(std::bit_cast<std::uint32_t>(value));
  return trained;
}

}  // namespace

TEST_CASE("a run that skips what is not finite ends with the bits of one that never saw it, under every layout") {
  std::mt19937 random(5);
  for (int trial = 0; trial < 24; ++trial) {
    TrainingSpec training = testing::training_of();
    training.clip_norm = trial % 3 == 0 ? 1.0 : 0.0;
    training.optimizer = trial % 4 == 3 ? Optimizer::sgd : Optimizer::adamw;
    training.momentum = 0.9;
    training = with_gradient_norm(training);
    const ParallelSpec spec = testing::random_spec(graph(), training, 1 << trial % 4, {}, random);
    INFO(testing::describe(spec));
    const Trained with = train(training, spec, {{1, false}, {2, true}, {3, false}, {4, true}, {5, true}, {6, false}});
    const Trained without = train(training, spec, {{1, false}, {3, false}, {6, false}});
    CHECK(with.skipped == std::vector<bool>{false, true, false, true, true, false});
    CHECK(without.skipped == std::vector<bool>(3, false));
    CHECK(with.bits == without.bits);
    CHECK(with.bits != train(training, spec, {{1, false}, {3, false}}).bits);
  }
}

TEST_CASE("a norm that is computed without being clipped by changes no bit") {
  std::mt19937 random(6);
  for (int trial = 0; trial < 8; ++trial) {
    const TrainingSpec training = testing::training_of();
    const ParallelSpec spec = testing::random_spec(graph(), training, 1 << trial % 4, {}, random);
    INFO(testing::describe(spec));
    CHECK(train(training, spec, {{1, false}, {2, false}}).bits ==
          train(with_gradient_norm(training), spec, {{1, false}, {2, false}}).bits);
  }
}

}  // namespace parplan
