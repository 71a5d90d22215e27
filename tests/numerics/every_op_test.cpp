// Plans of graphs made of every op that the tiny models lack, compared with the one-rank reference;
// and the reference's gradients compared with differences of its own loss.
#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <vector>

#include "tests/numerics/op_graphs.h"
#include "tests/numerics/plan_runs.h"
#include "tests/numerics/reference.h"

namespace parplan {

using namespace testing;

namespace {

std::vector<OpGraph> all_graphs(std::int64_t of_sequence) {
  std::vector<OpGraph> graphs = op_graphs(of_sequence);
  graphs.push_back(two_sequences(of_sequence));
  return graphs;
}

}  // namespace

TEST_CASE("random legal plans of graphs with every op train as the one-rank reference does") {
  std::mt19937 random(20261121);
  for (const OpGraph& graph : all_graphs(sequence)) {
    References references(graph);
    for (int trial = 0; trial < 24; ++trial) {
      const TrainingSpec training = training_of();
      LayoutRequest request;
      if (trial % 2 == 1) request[Choice::tp] = 1 << (1 + trial / 2 % 2);  // half of them split heads
      if (trial % 2 == 1 && graph.name == "parallel-branches") request[Choice::tp] = 2;
      const ParallelSpec spec = random_spec(graph, training, 4 << trial % 2, request, random);
      INFO(graph.name << ": " << describe(spec));
      check_close(run_plan(graph, training, spec), references.of(training, spec.micro_batch));
    }
  }
}

TEST_CASE("graphs with every op: a pipeline equals accumulation on one rank to the bit") {
  std::mt19937 random(7);
  for (const OpGraph& graph : all_graphs(sequence))
    for (const int ranks : {1, 2}) {
      LayoutRequest request;
      request[Choice::dp] = request[Choice::tp] = 1;
      request[Choice::tied_gradients] = TiedGradients::apart;
      const TrainingSpec training = training_of();
      const ParallelSpec spec = random_spec(graph, training, ranks, request, random);
      INFO(graph.name << ": " << describe(spec));
      check_equal(run_plan(graph, training, spec, 2), run_reference(graph, training, spec.micro_batch, 2));
    }
}

TEST_CASE("graphs with every op: a zero-bubble pipeline equals 1F1B to the bit, with every axis and recompute") {
  std::mt19937 random(20261127);
  std::vector<OpGraph> graphs = op_graphs(sequence);
  graphs.push_back(normed_sums(sequence));
  for (const OpGraph& graph : graphs)
    for (int trial = 0; trial < 12; ++trial) {
      TrainingSpec training = training_of();
      if (trial % 4 == 3) training.clip_norm = 0.5;
      LayoutRequest request;
      request[Choice::pp] = 2;
      request[Choice::schedule] = ScheduleKind::zero_bubble_h1;
      if (trial % 3 != 0) request[Choice::micro_batch] = 1;
      ParallelSpec spec = random_spec(graph, training, 4, request, random);
      spec.recompute = recompute_rows()[static_cast<std::size_t>(trial) % recompute_rows().size()].kind;
      if (trial % 3 == 2) spec.input_slots = InputSlots::one_more;
      INFO(graph.name << ": " << describe(spec));
      const Outcome outcome = run_plan(graph, training, spec, 3);
      spec.schedule = ScheduleKind::one_f_one_b;
      check_equal(outcome, run_plan(graph, training, spec, 3));
    }
}

TEST_CASE("the reference's gradients of graphs with every op are the slopes of its loss along random directions") {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const OpGraph& graph : all_graphs(8)) {
    INFO(graph.name);
    // A loss in double precision would allow smaller steps; in fp32 its rounding, 1e-7, over a step
    // of 1e-2 leaves four digits.
    TrainingSpec training;
    training.global_batch = 4;
    training.sequence_length = 8;
    training.learning_rate = 0.0;
    training.weight_decay = 0.0;
    Reference reference(graph, training);
    for (const TensorId id : parameters(graph)) {
      const Tensor& tensor = graph.tensors[id];
      const float base = tensor.initializer == Initializer::ones ? 1.0f : 0.0f;
      for (float& value : reference.parameter(tensor.name)) value = base + 0.3f * normal(random);
    }
    std::vector<std::int32_t> tokens, targets;
    for (int i = 0; i < 32; ++i) {
      tokens.push_back(static_cast<std::int32_t>(random() % 61));
      targets.push_back(static_cast<std::int32_t>(random() % 61));
    }
    const ReferenceStep at = reference.step(tokens, targets, 2);
    for (const TensorId id : parameters(graph)) {
      const std::string& name = graph.tensors[id].name;
      INFO(name);
      const std::vector<float>& gradient = at.gradients.at(name);
      double length = 0.0;
      for (const float g : gradient) length += static_cast<double>(g) * g;
      length = std::sqrt(length);
      if (length < 1e-4)
        continue;  // below what rounding leaves of a difference (the bias of keys: softmax does not see it)
      // Along the gradient itself the slope is its length; an error in any part of it shows.
      const std::vector<float> kept = reference.parameter(name);
      const auto loss_at = [&](double step) {
        std::vector<float>& values = reference.parameter(name);
        for (std::size_t i = 0; i < kept.size(); ++i)
          values[i] = kept[i] + static_cast<float>(step * gradient[i] / length);
        const double loss = reference.step(tokens, targets, 2).loss;
        values = kept;
        return loss;
      };
      const double step = 4e-3;
      // Richardson: the cubic term cancels.
      const double near = (loss_at(step) - loss_at(-step)) / (2 * step),
                   far = (loss_at(2 * step) - loss_at(-2 * step)) / (4 * step);
      CHECK(std::abs((4 * near - far) / 3 - length) <= 1e-2 * length + 1e-4);
    }
  }
}

}  // namespace parplan
