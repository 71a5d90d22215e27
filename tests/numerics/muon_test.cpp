// Plans whose optimizer orthogonalizes the momentum of matrices, against the reference and one
// another, and their promises of memory.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "planner/parallel/techniques.h"
#include "planner/program/orthogonalize.h"
#include "planner/program/verify.h"
#include "tests/numerics/plan_runs.h"
#include "tests/numerics/trainer.h"
#include "tests/temporary_folder.h"

namespace parplan {

using namespace testing;

namespace {

TrainingSpec muon_training() {
  TrainingSpec training = testing::training_of();
  training.optimizer = Optimizer::muon;
  training.momentum = default_muon_momentum;
  return training;
}

ParallelSpec alone(const OpGraph& graph) {
  ParallelSpec spec;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  return spec;
}

// A step leaves directions in the place of gradients, or parts of them.
Outcome without_gradients(Outcome outcome) {
  outcome.first_gradients.clear();
  return outcome;
}
Outcome run_muon(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec) {
  return without_gradients(run_plan(graph, training, spec, 3));
}
Outcome run_one_rank(const OpGraph& graph, const TrainingSpec& training, std::int64_t micro_batch) {
  return without_gradients(run_reference(graph, training, micro_batch, 3));
}
// Losses, and each matrix: three steps change its elements by 6e-4 in root mean square.
void check_near(const OpGraph& graph, const Outcome& plan, const Outcome& reference) {
  check_close(plan, reference);
  for (const auto& [name, values] : reference.parameters) {
    const auto tensor = std::ranges::find(graph.tensors, name, &Tensor::name);
    REQUIRE(tensor != graph.tensors.end());
    if (!tensor->of_layer_product) continue;
    CAPTURE(name);
    double squares = 0.0;
    for (std::size_t i = 0; i < values.size(); ++i)
      squares += std::pow(static_cast<double>(plan.parameters.at(name)[i]) - static_cast<double>(values[i]), 2);
    CHECK(std::sqrt(squares / static_cast<double>(values.size())) < 1e-5);
  }
}

std::vector<Program> programs_of(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec) {
  return lower_all(testing::job_of(graph, training, spec));
}

}  // namespace

TEST_CASE("Muon's steps are the same to the bit in stages and in shards") {
  std::mt19937 random(3);
  for (const std::string& model : models) {
    const OpGraph graph = testing::graph_of(model);
    const TrainingSpec training = muon_training();
    LayoutRequest request;
    request[Choice::dp] = request[Choice::tp] = 1;
    request[Choice::tied_gradients] = TiedGradients::apart;
    const ParallelSpec spec = random_spec(graph, training, 2, request, random);
    INFO(model << ": " << describe(spec));
    check_equal(run_muon(graph, training, spec), run_one_rank(graph, training, spec.micro_batch));
    ParallelSpec data = alone(graph);
    data.mesh.degree.dp = 4;
    data.micro_batch = 2;
    const Outcome plain = run_muon(graph, training, data);
    data.zero_stage = 1;
    check_equal(run_muon(graph, training, data), plain);
    data.mesh.dp_shard = 2;
    check_near(graph, run_muon(graph, training, data), plain);  // gradients add up in another order
  }
}

TEST_CASE("matrices of layers have a momentum alone, and all else two moments") {
  const OpGraph graph = testing::graph_of("tiny-llama");
  const std::int64_t matrices = orthogonalized_elements(graph, muon_training());
  std::int64_t expected = 0;  // products of layers, by the sizes of the model's file
  for (const Tensor& tensor : graph.tensors)
    if (tensor.name.starts_with("layers.") && tensor.dims.size() == 2 && tensor.role == TensorRole::parameter)
      expected += element_count(tensor);
  CHECK(matrices == expected);
  for (const int ranks : {1, 2, 4}) {
    ParallelSpec spec = alone(graph);
    spec.mesh.degree.dp = ranks;
    spec.zero_stage = ranks > 1 ? 1 : 0;
    for (const DataType precision : {DataType::fp32, DataType::bf16}) {
      TrainingSpec training = muon_training();
      training.precision = precision;
      for (const Program& program : programs_of(graph, training, spec)) {
        std::int64_t without = 0;
        for (const Bucket& bucket : program.buckets) {
          without += bucket.without_second;
          CHECK(program.buffers[*bucket.first_moment].bytes == 4 * bucket.shard_elements);
          CHECK(program.buffers[*bucket.second_moment].bytes ==
                4 * std::min(bucket.shard_elements, bucket.elements - bucket.without_second));
          CHECK(bucket.master.has_value() == is_half(precision));
        }
        CHECK(without == matrices);  // sizes of tiny-llama are multiples of the alignment
      }
    }
  }
}

TEST_CASE("Muon orthogonalizes whole matrices that are there, without copies, on the device") {
  const OpGraph graph = testing::graph_of("tiny-llama");
  const TrainingSpec training = muon_training();
  ParallelSpec spec = alone(graph);
  spec.mesh.degree.dp = 2;
  spec.zero_stage = 2;
  CHECK(illegal(graph, training, spec) ==
        "optimizer muon orthogonalizes whole matrices, of whose gradients ZeRO stage 2 leaves a rank a shard; legal "
        "stages: 0, 1, or another optimizer");
  spec.zero_stage = 1;
  CHECK(!illegal(graph, training, spec));
  spec.offload = {.optimizer = Home::host};
  CHECK(illegal(graph, training, spec) ==
        "offload optimizer has the host update parameters, and optimizer muon multiplies matrices to do so; legal: "
        "offload none, activations or activations:nvme, or another optimizer");
  spec.offload = {.activations = Home::host};
  CHECK(!illegal(graph, training, spec));
}

TEST_CASE("ranks that share out the optimizer's state take turns with blocks, the first no fewer than others") {
  const OpGraph graph = testing::graph_of("tiny-llama");  // four layers, each with five matrices
  const auto normalized = [&](int ranks, int zero_stage) {
    ParallelSpec spec = alone(graph);
    spec.mesh.degree.dp = ranks;
    spec.zero_stage = zero_stage;
    std::vector<int> counts;
    for (const Program& program : programs_of(graph, muon_training(), spec)) {
      counts.push_back(0);
      for (const Call& call : program.calls)
        for (const Instruction& instruction : program.segments[call.segment].instructions)
          counts.back() += instruction.kind == InstructionKind::kernel && instruction.op == OpKind::normalize_matrix;
    }
    return counts;
  };
  CHECK(normalized(2, 0) == std::vector{20, 20});
  CHECK(normalized(2, 1) == std::vector{10, 10});
  CHECK(normalized(8, 1) == std::vector{5, 5, 5, 5, 0, 0, 0, 0});
}

TEST_CASE("a momentum that is dropped, made twice, or not gathered is found") {
  const OpGraph graph = testing::graph_of("tiny-llama");
  ParallelSpec spec = alone(graph);
  spec.mesh.degree.dp = 2;
  spec.zero_stage = 1;
  const std::vector<Program> programs = programs_of(graph, muon_training(), spec);
  CHECK(find_faults(programs).empty());
  const auto planted = [&](const std::string& name, bool twice) {
    std::vector<Program> broken = programs;
    for (Program& program : broken)
      for (std::size_t c = 0; c < program.calls.size(); ++c) {
        if (program.segments[program.calls[c].segment].name != name) continue;
        Segment changed = program.segments[program.calls[c].segment];
        if (twice)
          changed.instructions.push_back(changed.instructions.back());
        else
          changed.instructions.clear();
        program.segments.push_back(changed);
        program.calls[c].segment = static_cast<int>(program.segments.size()) - 1;
        break;
      }
    return find_faults(broken);
  };
  const auto says = [](const std::vector<Fault>& faults, const std::string& words) {
    return std::ranges::any_of(faults, [&](const Fault& fault) { return fault.what.starts_with(words); });
  };
  CHECK(says(planted("momentum", false), "dropped momentum"));
  CHECK(says(planted("momentum", true), "momentum twice"));
  CHECK(says(planted("data.all_gather.momentum", false), "dropped momentum"));
  CHECK(says(planted("data.reduce_scatter.directions", false), "dropped reduction"));
}

TEST_CASE("a checkpoint of Muon's momenta and moments loses no bit, whoever holds them") {
  std::mt19937 random(5);
  const OpGraph graph = testing::graph_of("tiny-llama");
  const TrainingSpec training = muon_training();
  for (int trial = 0; trial < 3; ++trial) {
    const ParallelSpec from = random_spec(graph, training, 1 << trial % 3, {}, random),
                       to = random_spec(graph, training, 1 << (trial + 1) % 4, {}, random);
    INFO("from " << describe(from) << "\nto " << describe(to));
    const TemporaryFolder folder;
    const std::string first = folder.path("first"), second = folder.path("second");
    make_folder(first);
    make_folder(second);
    Trainer writer(graph, testing::job_of(graph, training, from));
    writer.train(0, 2);
    writer.save(first, 2);
    TrainingSpec other = training;
    other.seed += 1;
    Trainer reader(graph, testing::job_of(graph, other, to));
    reader.load(first);
    reader.save(second, 2);
    CHECK(content_of(first) == content_of(second));
  }
  ParallelSpec spec = alone(graph);
  spec.mesh.degree.dp = 2;
  spec.zero_stage = 1;
  const TemporaryFolder folder;
  Trainer whole(graph, testing::job_of(graph, training, spec)), before(graph, testing::job_of(graph, training, spec)),
      after(graph, testing::job_of(graph, training, spec));
  whole.train(0, 4);
  before.train(0, 2);
  before.save(folder.root().string(), 2);
  after.load(folder.root().string());
  after.train(2, 2);
  CHECK(after.losses == std::vector<double>{whole.losses[2], whole.losses[3]});
  CHECK(after.job.collect(ParameterContent::values) == whole.job.collect(ParameterContent::values));
}

}  // namespace parplan
