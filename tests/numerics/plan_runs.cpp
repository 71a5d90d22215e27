#include "tests/numerics/plan_runs.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/parallel/techniques.h"
#include "planner/plan/parallel_spec_text.h"
#include "planner/program/verify.h"
#include "planner/schedule/schedules.h"
#include "tests/numerics/reference.h"

namespace parplan::testing {

OpGraph graph_of(const std::string& model) {
  const ModelSpec spec = load_model(fmt::format("{}/tests/data/models/{}.yaml", PARPLAN_SOURCE_DIR, model), "").spec;
  return build_graph(spec, reads_images(spec) ? tokens_of_image(spec) : sequence);
}

TrainingSpec training_of() {
  TrainingSpec training;
  training.global_batch = global_batch;
  training.sequence_length = sequence;
  training.learning_rate = 1e-3;
  return training;
}

namespace {

// Weights large enough that gradients are far from rounding error.
InitialValues initial_values() {
  return [standard = initializer(7)](const Tensor& tensor) -> std::function<float(std::int64_t)> {
    if (tensor.initializer == Initializer::normal)
      return [values = standard(tensor)](std::int64_t index) { return 3.0f * values(index); };
    Tensor noise = tensor;
    noise.initializer = Initializer::normal;
    noise.standard_deviation = 0.1;
    return [values = standard(noise), base = tensor.initializer == Initializer::ones ? 1.0f : 0.0f](
               std::int64_t index) { return base + values(index); };
  };
}

TokenData data_of(const OpGraph& graph) {
  if (graph.images) return TokenData::load_images({}, *graph.images, graph.vocabulary);  // noise
  std::mt19937 random(11);
  std::vector<std::int32_t> tokens(1000);
  for (std::int32_t& token : tokens)
    token = static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(graph.vocabulary));
  return TokenData(std::move(tokens));
}

void fill_batch(Batch& batch, const OpGraph& graph, const TokenData& data, std::int64_t step,
                const TrainingSpec& training) {
  if (graph.images)
    return fill_images(batch, data, *graph.images, graph.vocabulary, step * training.global_batch,
                       training.global_batch, training.seed);
  fill(batch, data, step, training.global_batch);
  if (graph.masked) mask(batch, *graph.masked, graph.vocabulary, step * training.global_batch, training.seed);
  if (graph.corrupted) corrupt(batch, *graph.corrupted, graph.vocabulary, step * training.global_batch, training.seed);
}

}  // namespace

Job job_of(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec, BackendKind backend) {
  return {.graph = &graph, .training = training, .layout = lay_out(spec, place(graph, spec)),
          .schedule = schedule_of(spec, training),
          .backend = backend, .overhead = {}};
}

std::string describe(const ParallelSpec& spec) {
  return fmt::format(
      "dp {} tp {} pp {} order {} sp {} overlap {} zero {} in groups of {} mb {} {} recompute {} stages [{}]",
      spec.dp(), spec.tp(), spec.pp(), write_order(spec.mesh.order), spec.sequence_parallel, name(spec.tp_overlap),
      spec.zero_stage, spec.mesh.dp_shard, spec.micro_batch, name(spec.schedule),
      write_stage_recompute({spec.recompute, spec.recompute_layers}), fmt::join(spec.stage_blocks, ", "));
}

Outcome run_plan(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec, std::int64_t count) {
  return run_plan(job_of(graph, training, spec), cpu_threads(), count);
}

Outcome run_plan(const Job& description, const MakeWorld& make_world, std::int64_t count) {
  const std::unique_ptr<Rendezvous> rendezvous = alone();
  LocalJob job(description, initial_values(), make_world, *rendezvous);
  CHECK_NOTHROW(verify(job.programs()));
  const TokenData data = data_of(*description.graph);
  Outcome outcome;
  job.run(
      {.first = 0,
       .count = count,
       .batch_of = [&](std::int64_t step,
                       Batch& batch) { fill_batch(batch, *description.graph, data, step, description.training); },
       .timing_of = [](std::int64_t step) { return step == 1 ? StepTiming::each_instruction : StepTiming::whole; },
       .on_step =
           [&](std::int64_t step, const JobStep& result) {
             outcome.losses.push_back(result.loss);
             if (step == 0) {
               outcome.first_gradients = job.collect(ParameterContent::gradients);
               if (description.training.precision == DataType::fp16)  // they are those of the loss times its scale
                 for (auto& [tensor, values] : outcome.first_gradients)
                   for (float& value : values) value /= LossScale{}.scale;
             }
             for (std::size_t r = 0; r < result.ranks.size(); ++r) {
               CHECK(result.ranks[r].communication == job.programs()[r].communication);
               CHECK(result.ranks[r].copied == job.programs()[r].copied);
             }
           }});
  outcome.parameters = job.collect(ParameterContent::values);
  for (const Program& program : job.programs()) {
    const PerHome<std::int64_t> touched_end = job.arena(program.rank).highest_touched();
    CHECK(touched_end.device == program.arena_bytes.device);
    CHECK(touched_end.host == end_of_use(program, Home::host));
    CHECK(touched_end.nvme == end_of_use(program, Home::nvme));
    for (const Home home : all_homes) CHECK(program.memory.arena(home).count == program.arena_bytes[home]);
    for (std::size_t b = 0; b < program.buffers.size(); ++b) {
      const Buffer& buffer = program.buffers[b];
      INFO(buffer.name);
      // Saved tensors end in alignment, scratch may end in a workspace that the kernel does not
      // fill, and one of the buffers that blocks use in turn may never hold the largest bucket, nor
      // one of the slots that several stages share the largest stage. A step of one micro-batch
      // fills this rank's shard alone of a whole bucket's sum on the host or in a file.
      const bool shares_slots = static_cast<int>(description.layout.stages.size()) > description.layout.mesh.degree.pp;
      if (buffer.name == "scratch" || (shares_slots && buffer.name.starts_with("left of")) ||
          buffer.name.starts_with("saved") || buffer.name.starts_with("gathered") ||
          buffer.name.starts_with("unreduced") || buffer.name.starts_with("gradients on their way") ||
          buffer.name.starts_with("what is updated on its way") || buffer.name.starts_with("parameters on their way") ||
          (buffer.name.starts_with("gradients of") && buffer.home != Home::device))
        continue;
      const std::int64_t touched = job.arena(program.rank).highest_touched(static_cast<int>(b));
      const bool ends_in_alignment = buffer.name.starts_with("left of");
      CHECK((ends_in_alignment ? align_up(Bytes(touched), 64).count : touched) == buffer.bytes);
    }
  }
  return outcome;
}

Outcome run_reference(const OpGraph& graph, const TrainingSpec& training, std::int64_t micro_batch, std::int64_t count,
                      const LogicalTensors* values) {
  Reference reference(graph, training);
  const InitialValues initial = initial_values();
  for (const TensorId id : parameters(graph)) {
    const Tensor& tensor = graph.tensors[id];
    std::vector<float>& parameter = reference.parameter(tensor.name);
    const std::function<float(std::int64_t)> value = initial(tensor);
    for (std::size_t i = 0; i < parameter.size(); ++i)
      parameter[i] = values != nullptr ? values->at(tensor.name)[i] : value(static_cast<std::int64_t>(i));
  }
  const TokenData data = data_of(graph);
  Outcome outcome;
  Batch batch{.sequence = graph.sequence, .ids = {}};
  for (std::int64_t step = 0; step < count; ++step) {
    fill_batch(batch, graph, data, step, training);
    std::vector<std::int32_t> tokens(batch.colours.begin(), batch.colours.end()), targets = batch.targets;
    for (std::int64_t i = 0; i < training.global_batch && !graph.images; ++i)
      for (std::int64_t s = 0; s < sequence; ++s) {
        tokens.push_back(batch.ids[i * (sequence + 1) + s]);
        if (batch.targets.empty()) targets.push_back(batch.ids[i * (sequence + 1) + s + 1]);
      }
    ReferenceStep result = reference.step(tokens, targets, micro_batch);
    outcome.losses.push_back(result.loss);
    if (step == 0) outcome.first_gradients = std::move(result.gradients);
  }
  outcome.parameters = reference.parameters();
  return outcome;
}

const Outcome& References::of(const TrainingSpec& training, std::int64_t micro_batch) {
  const std::pair key(micro_batch, training.clip_norm);
  auto known = known_.find(key);
  if (known == known_.end()) known = known_.emplace(key, run_reference(graph_, training, micro_batch, count_)).first;
  return known->second;
}

namespace {

double norm(const std::vector<float>& values) {
  double sum = 0.0;
  for (const float v : values) sum += static_cast<double>(v) * v;
  return std::sqrt(sum);
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i)
    sum += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
  return std::sqrt(sum);
}

}  // namespace

void check_close(const Outcome& plan, const Outcome& reference, const Closeness& closeness) {
  REQUIRE(plan.losses.size() == reference.losses.size());
  for (std::size_t i = 0; i < plan.losses.size(); ++i)
    CHECK(std::abs(plan.losses[i] - reference.losses[i]) <= closeness.loss);
  double global = 0.0;
  for (const auto& [tensor, values] : reference.first_gradients) global += norm(values) * norm(values);
  REQUIRE(plan.first_gradients.size() == reference.first_gradients.size());
  for (const auto& [tensor, values] : reference.first_gradients) {
    INFO(tensor);
    REQUIRE(plan.first_gradients.at(tensor).size() == values.size());
    CHECK(distance(plan.first_gradients.at(tensor), values) <=
          closeness.gradient * norm(values) + closeness.all_gradients * std::sqrt(global));
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
  REQUIRE(a.losses.size() == b.losses.size());
}

namespace {

std::vector<int> random_cut(int blocks, int stages, std::mt19937& random) {
  std::vector<int> cut(static_cast<std::size_t>(stages), 1);
  for (int left = blocks - stages; left > 0; --left) ++cut[random() % cut.size()];
  return cut;
}

}  // namespace

ParallelSpec random_spec(const OpGraph& graph, const TrainingSpec& training, int ranks, const LayoutRequest& request,
                         std::mt19937& random) {
  const std::vector<ParallelSpec> specs = enumerate_specs(graph, training, ranks, request);
  REQUIRE(!specs.empty());
  ParallelSpec spec = specs[random() % specs.size()];
  spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), spec.stages(), random);
  std::mt19937 apart = random;  // so that the draw changes no others
  if (spec.sequence_parallel && !request[Choice::tp_overlap] && apart() % 2 == 0) spec.tp_overlap = TensorOverlap::ring;
  if (brings_parameters(spec) && !request[Choice::prefetch_depth] && apart() % 2 == 0)
    spec.prefetch_depth = std::array{0, 2, 3}[apart() % 3];
  const std::vector<int> layers = layers_of_stages(spec);
  if (spec.recompute != Recompute::none && spec.recompute != Recompute::per_stage &&
      !request[Choice::recompute_layers] && std::ranges::max(layers) > 0 && apart() % 2 == 0)
    spec.recompute_layers = 1 + static_cast<int>(apart() % static_cast<unsigned>(std::ranges::max(layers)));
  // Half of the time, groups of two exchange tokens for heads where they can.
  if (spec.cp() > 2 && !request[Choice::cp_ulysses] && apart() % 2 == 0) {
    spec.mesh.cp_ulysses = 2;
    if (illegal(graph, training, spec)) spec.mesh.cp_ulysses = 1;
  }
  if (gathers_parameters(spec) && !request[Choice::gather_unit] && apart() % 2 == 0)
    spec.gather_unit = GatherUnit::parameter;
  return spec;
}

}  // namespace parplan::testing
