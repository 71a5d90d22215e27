// Every plan against the one-rank reference, which shares kernels with it but no lowering; and what a Program promises
// (bytes of memory and of communication) against what its execution did.
#include <doctest/doctest.h>

#include <cmath>
#include <numeric>
#include <random>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/parallel/techniques.h"
#include "planner/program/verify.h"
#include "planner/schedule/schedules.h"
#include "planner/search/space.h"
#include "runtime/local_job.h"
#include "tests/numerics/reference.h"

namespace parplan {
namespace {

constexpr std::int64_t sequence = 16;
constexpr std::int64_t global_batch = 8;
constexpr std::int64_t steps = 5;

OpGraph graph_of(const std::string& model) {
  return build_graph(load_model(fmt::format("{}/tests/data/models/{}.yaml", PARPLAN_SOURCE_DIR, model), "").spec, sequence);
}

TrainingSpec training_of() {
  TrainingSpec training;
  training.global_batch = global_batch;
  training.sequence_length = sequence;
  training.learning_rate = 1e-3;
  return training;
}

// Weights of a size at which gradients are far from rounding error.
InitialValues initial_values() {
  return [standard = initializer(7)](const Tensor& tensor) -> std::function<float(std::int64_t)> {
    if (tensor.initializer == Initializer::normal)
      return [values = standard(tensor)](std::int64_t index) { return 3.0f * values(index); };
    Tensor noise = tensor;
    noise.initializer = Initializer::normal;
    noise.standard_deviation = 0.1;
    return [values = standard(noise), base = tensor.initializer == Initializer::ones ? 1.0f : 0.0f](std::int64_t index) {
      return base + values(index);
    };
  };
}

TokenData data_of(const OpGraph& graph) {
  std::mt19937 random(11);
  std::vector<std::int32_t> tokens(1000);
  for (std::int32_t& token : tokens) token = static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(graph.vocabulary));
  return TokenData(std::move(tokens));
}

struct Outcome {
  std::vector<double> losses;
  LogicalTensors first_gradients;
  LogicalTensors parameters;  // after the last step
};

Job job_of(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec) {
  return {.graph = &graph, .training = training, .spec = spec, .placements = place(graph, spec),
          .schedule = row_of(spec.schedule).actions(spec.pp(), static_cast<int>(micro_batches(spec, training))),
          .backend = BackendKind::cpu, .overhead = {}};
}

std::string describe(const ParallelSpec& spec) {
  return fmt::format("dp {} tp {} pp {} order {} sp {} zero {} mb {} {} recompute {} stages [{}]", spec.dp(), spec.tp(), spec.pp(),
                     write_order(spec.mesh.order), spec.sequence_parallel, spec.zero_stage, spec.micro_batch,
                     name(spec.schedule), name(spec.recompute), fmt::join(spec.stage_blocks, ", "));
}

Outcome run_plan(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec, std::int64_t count = steps) {
  LocalJob job(job_of(graph, training, spec), initial_values());
  CHECK_NOTHROW(verify(job.programs()));
  const TokenData data = data_of(graph);
  Outcome outcome;
  job.run(0, count, [&](std::int64_t step, Batch& batch) { fill(batch, data, step, training.global_batch); },
          [&](std::int64_t step, const JobStep& result) {
            outcome.losses.push_back(result.loss);
            if (step == 0) outcome.first_gradients = job.collect(ParameterContent::gradients);
            for (std::size_t r = 0; r < result.ranks.size(); ++r)
              CHECK(result.ranks[r].communication == job.programs()[r].communication);
          });
  outcome.parameters = job.collect(ParameterContent::values);
  for (const Program& program : job.programs()) {
    CHECK(job.arena(program.rank).highest_touched() == program.arena_bytes);
    CHECK(program.memory.arena().count == program.arena_bytes);
    for (std::size_t b = 0; b < program.buffers.size(); ++b) {
      const Buffer& buffer = program.buffers[b];
      INFO(buffer.name);
      // Saved tensors end in alignment, scratch may end in a workspace that the kernel does not fill, and one of the two
      // buffers that blocks take turns on may never meet the largest bucket.
      if (buffer.name == "scratch" || buffer.name.starts_with("saved") || buffer.name.starts_with("gathered") ||
          buffer.name.starts_with("unreduced"))
        continue;
      CHECK(job.arena(program.rank).highest_touched(static_cast<int>(b)) == buffer.bytes);
    }
  }
  return outcome;
}

Outcome run_reference(const OpGraph& graph, const TrainingSpec& training, std::int64_t micro_batch, std::int64_t count = steps) {
  Reference reference(graph, training);
  const InitialValues initial = initial_values();
  for (const TensorId id : parameters(graph)) {
    const Tensor& tensor = graph.tensors[static_cast<std::size_t>(id)];
    std::vector<float>& values = reference.parameter(tensor.name);
    const std::function<float(std::int64_t)> value = initial(tensor);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = value(static_cast<std::int64_t>(i));
  }
  const TokenData data = data_of(graph);
  Outcome outcome;
  Batch batch{.sequence = sequence, .ids = {}};
  for (std::int64_t step = 0; step < count; ++step) {
    fill(batch, data, step, training.global_batch);
    std::vector<std::int32_t> tokens, targets;
    for (std::int64_t i = 0; i < training.global_batch; ++i)
      for (std::int64_t s = 0; s < sequence; ++s) {
        tokens.push_back(batch.ids[static_cast<std::size_t>(i * (sequence + 1) + s)]);
        targets.push_back(batch.ids[static_cast<std::size_t>(i * (sequence + 1) + s + 1)]);
      }
    ReferenceStep result = reference.step(tokens, targets, micro_batch);
    outcome.losses.push_back(result.loss);
    if (step == 0) outcome.first_gradients = std::move(result.gradients);
  }
  outcome.parameters = reference.parameters();
  return outcome;
}

double norm(const std::vector<float>& values) {
  double sum = 0.0;
  for (const float v : values) sum += static_cast<double>(v) * v;
  return std::sqrt(sum);
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
  return std::sqrt(sum);
}

void check_close(const Outcome& plan, const Outcome& reference) {
  REQUIRE(plan.losses.size() == reference.losses.size());
  for (std::size_t i = 0; i < plan.losses.size(); ++i) CHECK(std::abs(plan.losses[i] - reference.losses[i]) <= 1e-5);
  double global = 0.0;
  for (const auto& [tensor, values] : reference.first_gradients) global += norm(values) * norm(values);
  REQUIRE(plan.first_gradients.size() == reference.first_gradients.size());
  for (const auto& [tensor, values] : reference.first_gradients) {
    INFO(tensor);
    REQUIRE(plan.first_gradients.at(tensor).size() == values.size());
    CHECK(distance(plan.first_gradients.at(tensor), values) <= 1e-5 * norm(values) + 1e-7 * std::sqrt(global));
  }
}

void check_equal(const Outcome& a, const Outcome& b) {
  for (const auto& [tensor, values] : b.first_gradients) {
    INFO(tensor);
    CHECK(a.first_gradients.at(tensor) == values);
  }
  for (const auto& [tensor, values] : b.parameters) {
    INFO(tensor);
    CHECK(a.parameters.at(tensor) == values);
  }
  CHECK(a.losses.size() == b.losses.size());
}

std::vector<int> random_cut(int blocks, int stages, std::mt19937& random) {
  std::vector<int> cut(static_cast<std::size_t>(stages), 1);
  for (int left = blocks - stages; left > 0; --left) ++cut[random() % cut.size()];
  return cut;
}

ParallelSpec random_spec(const OpGraph& graph, const TrainingSpec& training, int ranks, const LayoutRequest& request, std::mt19937& random) {
  const std::vector<ParallelSpec> specs = enumerate_specs(graph, training, ranks, request);
  REQUIRE(!specs.empty());
  ParallelSpec spec = specs[random() % specs.size()];
  spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), spec.pp(), random);
  return spec;
}

const std::vector<std::string> models{"tiny-gpt2", "tiny-llama", "tiny-mlp"};

}  // namespace

TEST_CASE("random legal plans train as the one-rank reference does") {
  std::mt19937 random(20261121);
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    std::map<std::pair<std::int64_t, bool>, Outcome> references;
    for (int trial = 0; trial < 40; ++trial) {
      TrainingSpec training = training_of();
      const bool clips = trial % 4 == 3;
      if (clips) training.clip_norm = 0.5;
      const ParallelSpec spec = random_spec(graph, training, 1 << trial % 4, {}, random);
      INFO(model << ": " << describe(spec) << (clips ? ", clipped" : ""));
      auto reference = references.find({spec.micro_batch, clips});
      if (reference == references.end())
        reference = references.emplace(std::pair{spec.micro_batch, clips}, run_reference(graph, training, spec.micro_batch)).first;
      check_close(run_plan(graph, training, spec), reference->second);
    }
  }
}

TEST_CASE("a pipeline equals accumulation on one rank to the bit") {
  std::mt19937 random(5);
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    const TrainingSpec training = training_of();
    for (const int ranks : {1, 2, 4})
      for (int trial = 0; trial < 3; ++trial) {
        LayoutRequest request;
        request.dp = request.tp = 1;
        const ParallelSpec spec = random_spec(graph, training, ranks, request, random);
        INFO(model << ": " << describe(spec));
        const Outcome plan = run_plan(graph, training, spec, 3);
        const Outcome reference = run_reference(graph, training, spec.micro_batch, 3);
        check_equal(plan, reference);
      }
  }
}

TEST_CASE("a pipeline of data-parallel ranks equals data parallelism to the bit") {
  std::mt19937 random(6);
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    const TrainingSpec training = training_of();
    for (int trial = 0; trial < 3; ++trial) {
      LayoutRequest request;
      request.dp = 2;
      request.tp = 1;
      request.pp = 2;
      request.zero_stage = 0;
      const ParallelSpec spec = random_spec(graph, training, 4, request, random);
      INFO(model << ": " << describe(spec));
      ParallelSpec flat = spec;
      flat.mesh.degree = {1, 2, 1};
      flat.stage_blocks = {static_cast<int>(graph.blocks.size())};
      check_equal(run_plan(graph, training, spec, 3), run_plan(graph, training, flat, 3));
    }
  }
}

TEST_CASE("ZeRO equals data parallelism to the bit: stage 1 always, 2 and 3 without accumulation") {
  std::mt19937 random(9);
  for (const std::string& model : models) {
    const OpGraph graph = graph_of(model);
    const TrainingSpec training = training_of();
    for (int zero = 1; zero <= 3; ++zero)
      for (int trial = 0; trial < 4; ++trial) {
        LayoutRequest request;
        request.dp = trial % 2 ? 4 : 2;
        request.zero_stage = zero;
        if (zero > 1) request.micro_batch = global_batch / *request.dp;
        ParallelSpec spec = random_spec(graph, training, trial < 2 ? 4 : 8, request, random);
        INFO(model << ": " << describe(spec));
        const Outcome sharded = run_plan(graph, training, spec, 3);
        spec.zero_stage = 0;
        check_equal(sharded, run_plan(graph, training, spec, 3));
      }
  }
}

}  // namespace parplan
