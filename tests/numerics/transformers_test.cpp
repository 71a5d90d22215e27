// The reference on graphs of imported configs against transformers;
// tests/golden/make_golden_families.py made the golden values.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "models/families.h"
#include "models/huggingface.h"
#include "planner/base/file.h"
#include "tests/numerics/golden.h"
#include "tests/numerics/plan_runs.h"
#include "tests/numerics/reference.h"

using namespace parplan;

namespace {

constexpr std::int64_t batch = 2;
constexpr std::int64_t sequence = 16;

// Both sides compute in fp32 (2^-24 = 6e-8 per rounding) and sum in different orders. Observed: up
// to 4e-7 for logits, up to 1.5e-6 for the worst gradient.
constexpr double tolerance = 1e-5;

// ||a - b|| / ||b||
double relative_error(std::span<const float> a, std::span<const float> b) {
  REQUIRE(a.size() == b.size());
  double difference = 0.0, size = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    size += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(difference / size);
}

std::vector<std::filesystem::path> tiny_configs() {
  std::vector<std::filesystem::path> configs;
  for (const auto& file :
       std::filesystem::directory_iterator(std::filesystem::path(PARPLAN_SOURCE_DIR) / "tests/data/golden/families")) {
    if (file.path().extension() == ".json") configs.push_back(file.path());
  }
  std::ranges::sort(configs);
  return configs;
}

OpGraph graph_of(const std::filesystem::path& config) {
  const ModelSpec spec = read_huggingface(read_file(config), config.string()).spec;
  return build_graph(spec, reads_images(spec) ? tokens_of_image(spec) : sequence);
}

// Colours of each sample, patch by patch, and behind them the classes, as make_golden_families.py
// does.
void take_images(const OpGraph& graph, std::vector<std::int32_t>& colours, std::vector<std::int32_t>& targets) {
  const std::int64_t count = batch * graph.images->patches() * graph.images->colours();
  colours = golden_text(count + batch, 256);
  targets.assign(static_cast<std::size_t>(batch * graph.sequence), -1);
  for (std::int64_t sample = 0; sample < batch; ++sample)
    targets[static_cast<std::size_t>(sample * graph.sequence)] =
        colours[static_cast<std::size_t>(count + sample)] % static_cast<std::int32_t>(graph.vocabulary);
  colours.resize(static_cast<std::size_t>(count));
}

// Two of the 16 positions of a sample, as make_golden_families.py does.
void mask_some(const MaskedTokens& masked, std::vector<std::int32_t>& tokens, std::vector<std::int32_t>& targets) {
  constexpr std::int64_t positions[] = {3, 11};
  CHECK(masked.count == std::ssize(positions));
  std::ranges::fill(targets, -1);
  for (std::int64_t sample = 0; sample < batch; ++sample)
    for (const std::int64_t position : positions)
      targets[sample * sequence + position] =
          std::exchange(tokens[sample * sequence + position], static_cast<std::int32_t>(masked.token));
}

}  // namespace

TEST_CASE("logits, loss and gradients of every imported family equal those of transformers") {
  const std::vector<std::filesystem::path> configs = tiny_configs();
  CHECK(configs.size() == 39);
  for (const std::filesystem::path& config : configs) {
    CAPTURE(config.stem().string());
    const OpGraph graph = graph_of(config);
    std::filesystem::path golden_file = config;
    const std::map<std::string, GoldenTensor> golden = read_golden(golden_file.replace_extension(".golden").string());
    Reference reference(graph, {.global_batch = batch, .sequence_length = graph.sequence});
    for (const TensorId id : parameters(graph)) {
      const Tensor& tensor = graph.tensors[id];
      reference.parameter(tensor.name) = golden_parameter(tensor);
    }
    const std::vector<std::int32_t> text = golden_text(batch * (sequence + 1), graph.vocabulary);
    std::vector<std::int32_t> tokens, targets;
    for (std::int64_t sample = 0; sample < batch; ++sample) {
      const auto first = text.begin() + sample * (sequence + 1);
      tokens.insert(tokens.end(), first, first + sequence);
      targets.insert(targets.end(), first + 1, first + 1 + sequence);
    }
    if (graph.images) take_images(graph, tokens, targets);
    if (graph.masked) mask_some(*graph.masked, tokens, targets);
    if (graph.corrupted)  // the decoder reads the first half, and the encoder the second
      CHECK(graph.corrupted->decoder == sequence / 2);

    const double logits_error = relative_error(reference.logits(tokens), golden.at("logits").values);
    CHECK(logits_error < tolerance);
    const ReferenceStep step = reference.step(tokens, targets, 1);
    const double loss = static_cast<double>(golden.at("loss").values.at(0));
    CHECK(std::abs(step.loss - loss) < tolerance * loss);
    std::set<std::string> compared;
    double worst = 0.0;
    for (const auto& [name, gradient] : step.gradients) {
      CAPTURE(name);
      REQUIRE(golden.contains("gradient/" + name));
      const double error = relative_error(gradient, golden.at("gradient/" + name).values);
      CHECK(error < tolerance);
      worst = std::max(worst, error);
      compared.insert("gradient/" + name);
    }
    MESSAGE(fmt::format("{}: relative error {:.1e} of logits, {:.1e} of the worst gradient", config.stem().string(),
                        logits_error, worst));
    for (const auto& [name, tensor] : golden) CHECK(name.starts_with("gradient/") == compared.contains(name));
  }
}

TEST_CASE("random legal plans of every imported family train as the one-rank reference does") {
  std::mt19937 random(20261121);
  for (const std::filesystem::path& config : tiny_configs()) {
    const OpGraph graph = graph_of(config);
    const TrainingSpec training = testing::training_of();
    std::map<std::int64_t, testing::Outcome> references;
    for (int trial = 0; trial < 8; ++trial) {
      const ParallelSpec spec = testing::random_spec(graph, training, 1 << trial % 4, {}, random);
      INFO(config.stem().string() << ": " << testing::describe(spec));
      auto reference = references.find(spec.micro_batch);
      if (reference == references.end())
        reference =
            references.emplace(spec.micro_batch, testing::run_reference(graph, training, spec.micro_batch, 3)).first;
      testing::check_close(testing::run_plan(graph, training, spec, 3), reference->second);
    }
  }
}
