// Frozen parameters and adapters: every plan against the one-rank reference; the reference against
// training all parameters and against merged weights, which know nothing of either.
#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "planner/graph/trained_file.h"
#include "tests/numerics/op_graphs.h"
#include "tests/numerics/plan_runs.h"

namespace parplan {

using namespace testing;

namespace {

Trainable only(std::vector<std::string> patterns) {
  return {.all = false, .patterns = std::move(patterns)};
}

TrainingSpec training_with(Trainable trainable, std::optional<Lora> lora = {}) {
  TrainingSpec training = training_of();
  training.trainable = std::move(trainable);
  training.lora = std::move(lora);
  return training;
}

// What of a decoder may be trained: adapters everywhere and somewhere; parts in every place of the
// model, so that the backward ends in each; kinds of parameters that share a kernel with others.
std::vector<TrainingSpec> choices(const std::string& model) {
  const std::string layer = model == "tiny-mlp" ? "down" : "attention.output";
  const bool has_biases = model != "tiny-llama" && model != "tiny-t5";
  std::vector<TrainingSpec> all{
      training_with(only({}), Lora{.r = 3, .alpha = 6.0, .target_modules = {}}),
      training_with(only({}), Lora{.r = 8, .alpha = 8.0, .target_modules = {layer}}),
      training_with(only({"head"}), Lora{.r = 2, .alpha = 1.0, .target_modules = {"up"}}),
      training_with({}, Lora{.r = 4, .alpha = 2.0, .target_modules = {}}),
      training_with(only({"head*"})),
      training_with(only({model == "tiny-t5" ? "decoder.1" : "layers.1"})),
      training_with(only({"embedding"})),
      training_with(only({layer})),
  };
  if (has_biases) all.push_back(training_with(only({"bias"})));
  if (model == "tiny-t5") all.push_back(training_with(only({"encoder.position"})));
  if (model != "tiny-mlp") all.push_back(training_with(only({"*norm.weight"})));
  return all;
}

double norm_of(const std::vector<float>& values) {
  double sum = 0.0;
  for (const float v : values) sum += static_cast<double>(v) * v;
  return std::sqrt(sum);
}

}  // namespace

TEST_CASE("whatever is frozen, the gradients of the rest are those of training everything") {
  for (const std::string& model : models)
    for (const TrainingSpec& training : choices(model)) {
      INFO(model << " trained: " << describe_trained(training));
      TrainingSpec everything = training;
      everything.trainable = {};
      const OpGraph graph = as_trained(training, graph_of(model)), whole = as_trained(everything, graph_of(model));
      const Outcome some = run_reference(graph, training, 2, 1), all = run_reference(whole, everything, 2, 1);
      CHECK(some.losses == all.losses);
      std::size_t frozen = 0;
      for (const TensorId id : parameters(graph)) {
        const Tensor& tensor = graph.tensors[id];
        INFO(tensor.name);
        CHECK(some.first_gradients.contains(tensor.name) == !tensor.frozen);
        if (tensor.frozen)
          ++frozen;
        else
          CHECK(some.first_gradients.at(tensor.name) == all.first_gradients.at(tensor.name));
      }
      CHECK((frozen > 0) == !training.trainable.all);
    }
}

// Every op, with any of its parameters frozen.
TEST_CASE("any subset of the parameters of any op trains on any plan, with the gradients of training everything") {
  std::mt19937 random(20261126);
  std::vector<OpGraph> graphs = op_graphs(sequence);
  graphs.push_back(normed_sums(sequence));
  graphs.push_back(two_sequences(sequence));
  for (const OpGraph& plain : graphs)
    for (int trial = 0; trial < 6; ++trial) {
      std::vector<std::string> names;
      for (const TensorId id : parameters(plain))
        if (random() % 3 == 0) names.push_back(plain.tensors[id].name);
      if (names.empty()) continue;
      const TrainingSpec training = training_with(only(names));
      const OpGraph graph = as_trained(training, plain);
      const ParallelSpec spec = random_spec(graph, training, 1 << trial % 3, {}, random);
      INFO(plain.name << " trained: " << describe_trained(training) << ": " << describe(spec));
      const Outcome reference = run_reference(graph, training, spec.micro_batch, 2);
      const Outcome all = run_reference(plain, training_of(), spec.micro_batch, 1);
      for (const auto& [name, values] : reference.first_gradients) {
        INFO(name);
        CHECK(values == all.first_gradients.at(name));
      }
      check_close(run_plan(graph, training, spec, 2), reference);
    }
}

// With W' = W + f B A, f = alpha / r, and G the gradient of W' in the model without adapters:
// dB = f G A^T and dA = f B^T G.
TEST_CASE("adapters compute what merged weights do, and their gradients follow from those of the merged weights") {
  constexpr double alpha = 6.0;
  constexpr std::int64_t r = 3;
  for (const std::string& model : models) {
    INFO(model);
    const TrainingSpec training = training_with(only({}), Lora{.r = r, .alpha = alpha, .target_modules = {}});
    const OpGraph plain = graph_of(model), graph = as_trained(training, plain);
    const Outcome adapted = run_reference(graph, training, 2, 1);
    // The values before the first step: those of a run of none.
    const LogicalTensors values = run_reference(graph, training, 2, 0).parameters;
    LogicalTensors merged = values;
    const double factor = alpha / r;
    int adapters = 0;
    for (const TensorId id : parameters(plain)) {
      const Tensor& weight = plain.tensors[id];
      const std::optional<AdapterNames> names = adapter_of(weight.name);
      if (!names || !values.contains(names->in)) continue;
      ++adapters;
      const std::int64_t rows = weight.dims[0].size, columns = weight.dims[1].size;
      const std::vector<float>&a = values.at(names->in), &b = values.at(names->out);
      for (std::int64_t i = 0; i < rows; ++i)
        for (std::int64_t j = 0; j < columns; ++j) {
          double sum = 0.0;
          for (std::int64_t k = 0; k < r; ++k) sum += static_cast<double>(b[i * r + k]) * a[k * columns + j];
          merged.at(weight.name)[i * columns + j] += static_cast<float>(factor * sum);
        }
    }
    REQUIRE(adapters > 0);
    const Outcome whole = run_reference(plain, training_of(), 2, 1, &merged);
    CHECK(adapted.losses[0] == doctest::Approx(whole.losses[0]).epsilon(1e-6));
    for (const TensorId id : parameters(plain)) {
      const Tensor& weight = plain.tensors[id];
      const std::optional<AdapterNames> names = adapter_of(weight.name);
      if (!names || !values.contains(names->in)) continue;
      INFO(weight.name);
      const std::int64_t rows = weight.dims[0].size, columns = weight.dims[1].size;
      const std::vector<float>& g = whole.first_gradients.at(weight.name);
      const std::vector<float>&a = values.at(names->in), &b = values.at(names->out);
      std::vector<float> da(a.size()), db(b.size());
      for (std::int64_t k = 0; k < r; ++k) {
        for (std::int64_t j = 0; j < columns; ++j) {
          double sum = 0.0;
          for (std::int64_t i = 0; i < rows; ++i) sum += static_cast<double>(b[i * r + k]) * g[i * columns + j];
          da[k * columns + j] = static_cast<float>(factor * sum);
        }
        for (std::int64_t i = 0; i < rows; ++i) {
          double sum = 0.0;
          for (std::int64_t j = 0; j < columns; ++j)
            sum += static_cast<double>(g[i * columns + j]) * a[k * columns + j];
          db[i * r + k] = static_cast<float>(factor * sum);
        }
      }
      for (const auto& [name, wanted] : {std::pair(names->in, da), std::pair(names->out, db)}) {
        std::vector<float> difference = adapted.first_gradients.at(name);
        for (std::size_t i = 0; i < difference.size(); ++i) difference[i] -= wanted[i];
        CHECK(norm_of(difference) <= 1e-4 * norm_of(wanted));
      }
    }
  }
}

TEST_CASE("frozen parameters keep their initial values to the bit") {
  std::mt19937 random(3);
  const TrainingSpec training = training_with(only({"layers.1"}), Lora{.r = 2, .alpha = 4.0, .target_modules = {"up"}});
  const OpGraph graph = as_trained(training, graph_of("tiny-llama"));
  const LogicalTensors before = run_reference(graph, training, 1, 0).parameters;
  for (int trial = 0; trial < 6; ++trial) {
    LayoutRequest request;
    request[Choice::zero_stage] = trial % 4;
    const ParallelSpec spec = random_spec(graph, training, 4, request, random);
    INFO(describe(spec));
    const Outcome outcome = run_plan(graph, training, spec, 3);
    for (const TensorId id : parameters(graph)) {
      const Tensor& tensor = graph.tensors[id];
      INFO(tensor.name);
      CHECK((outcome.parameters.at(tensor.name) == before.at(tensor.name)) == tensor.frozen);
    }
  }
}

}  // namespace parplan
