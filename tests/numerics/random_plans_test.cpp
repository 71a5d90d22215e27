// All techniques together: random legal plans, so many that each pair of choices that is legal
// together is in one of them, against the one-rank reference, against themselves without what
// changes no bit, and against what was predicted of them.
#include <doctest/doctest.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <optional>
#include <queue>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/parallel/techniques.h"
#include "planner/plan/layout_choices.h"
#include "planner/plan/parallel_spec_text.h"
#include "planner/plan/plan.h"
#include "planner/program/lower.h"
#include "planner/schedule/schedules.h"
#include "planner/search/simulate_spec.h"
#include "planner/simulator/estimate.h"
#include "runtime/check_promises.h"
#include "tests/numerics/plan_runs.h"
#include "tests/numerics/random_plans.h"

namespace parplan {

using namespace testing;

namespace {

constexpr std::int64_t trained_steps = 3;
constexpr std::uint32_t seeds_of_pool = 8000;

// The plan that the file of a plan says, with what its simulation predicts.
Plan through_a_file(const RandomPlan& random) {
  Plan plan{.model_text = "name: " + random.graph.name + '\n',
            .model = {.name = random.graph.name,
                      .parameters = parameter_count(random.graph),
                      .flops_per_sample = model_flops_per_sample(random.graph)},
            .cluster = random.cluster,
            .training = random.training,
            .spec = random.spec,
            .placements = place(random.graph, random.spec),
            .schedule = random.schedule,
            .prediction = {},
            .alternatives = {},
            .search = {},
            .notes = {}};
  NetworkCache networks(plan.cluster, plan.training.engine);
  plan.prediction = simulate_soon(random.graph, networks, plan);
  Plan read = read_plan(write_plan(plan), "plan.yaml");
  CHECK(read.spec == plan.spec);
  CHECK(read.training == plan.training);
  CHECK(read.placements == plan.placements);
  CHECK(read.schedule == plan.schedule);
  CHECK(read.prediction.memory == plan.prediction.memory);
  CHECK(read.prediction.communication == plan.prediction.communication);
  return read;
}

// What a search knows of the plan without lowering it.
void check_estimate(const RandomPlan& random, const Plan& plan) {
  if (random.has_own_order) return;
  Estimator estimator(random.graph, plan.cluster, plan.training);
  const Estimate estimate = estimator.estimate(plan.spec, plan.placements, forms_of(row_of(plan.spec.schedule)));
  CHECK(estimate.memory == plan.prediction.memory);
  CHECK(estimate.memory_stage == plan.prediction.memory_stage);
  CHECK(estimate.lower_bound <= plan.prediction.time.total() * (1 + 1e-12));
  const Estimate played =
      estimator.estimate(plan.spec, plan.placements, as_played(forms_of(row_of(plan.spec.schedule))));
  CHECK(played.lower_bound <= plan.prediction.time.total() * (1 + 1e-12));
}

// Muon's steps leave directions in the place of gradients, or parts of them; but matrices say as
// much: three steps change their elements by 6e-4 in root mean square.
void check_trained_alike(const RandomPlan& random, Outcome plan, Outcome reference) {
  const bool has_gradients = random.training.optimizer != Optimizer::muon;
  if (!has_gradients) {
    plan.first_gradients.clear();
    reference.first_gradients.clear();
  }
  // Where the tensor axis cuts parameters, other numbers share a scale of 8-bit moments.
  const bool has_other_scales = random.training.optimizer == Optimizer::adamw_8bit && random.spec.tp() > 1;
  check_close(plan, reference, has_other_scales ? Closeness{.loss = 1e-3} : Closeness{});
  for (const Tensor& tensor : random.graph.tensors) {
    if (has_gradients || !tensor.of_layer_product || !reference.parameters.contains(tensor.name)) continue;
    INFO(tensor.name);
    const std::vector<float>&own = plan.parameters.at(tensor.name), &other = reference.parameters.at(tensor.name);
    double squares = 0.0;
    for (std::size_t i = 0; i < other.size(); ++i)
      squares += std::pow(static_cast<double>(own[i]) - static_cast<double>(other[i]), 2);
    CHECK(std::sqrt(squares / static_cast<double>(other.size())) < 1e-5);
  }
}

void check_same_bits(const RandomPlan& random, Outcome plan, Outcome plain) {
  if (random.training.optimizer == Optimizer::muon) {
    plan.first_gradients.clear();
    plain.first_gradients.clear();
  }
  check_equal(plan, plain);
}

void check_plan(std::uint32_t seed) {
  const RandomPlan random = random_plan(seed);
  const OpGraph& graph = random.graph;
  INFO("seed " << seed << ": " << describe(random));
  REQUIRE(illegal(graph, random.training, random.spec).value_or("legal") == "legal");
  const Plan plan = through_a_file(random);
  check_estimate(random, plan);
  const Job job = parplan::job_of(graph, plan.cluster, plan.training, plan.spec, plan.placements, plan.schedule);
  CHECK_NOTHROW(check_prediction(plan, lower_all(job)));
  const Outcome outcome = run_plan(job, cpu_threads(), trained_steps);
  const Outcome reference = run_reference(graph, plan.training, plan.spec.micro_batch, trained_steps);
  check_trained_alike(random, outcome, reference);
  const ParallelSpec plainest = plainest_of_same_bits(random);
  const bool has_apart = graph.tied.empty() || plainest.tied_gradients == TiedGradients::apart;
  if (plainest.mesh.size() == 1 && has_apart && !computes_norm(random.training)) {
    INFO("the reference, to the bit");
    check_same_bits(random, outcome, reference);
  } else if (plainest != plan.spec || random.has_own_order) {
    INFO("as plain as it has these bits: " << layout_text(plainest));
    REQUIRE(illegal(graph, random.training, plainest).value_or("legal") == "legal");
    Job plain = testing::job_of(graph, plan.training, plainest);
    // On a rank of several stages, one accumulator for two uses of a parameter adds them up in the
    // order of actions.
    if (plainest.virtual_stages > 1) plain.schedule = plan.schedule;
    check_same_bits(random, outcome, run_plan(plain, cpu_threads(), trained_steps));
  }
}

// What an environment variable says.
std::optional<std::uint32_t> number_in(const char* variable) {
  const char* const text = std::getenv(variable);
  if (text == nullptr) return std::nullopt;
  std::uint32_t number = 0;
  const std::string_view digits(text);
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  REQUIRE((error == std::errc() && end == digits.data() + digits.size()));
  return number;
}

// What no plan has together: traits, each with those that exclude it, in words.
struct Apart {
  const char* trait = nullptr;
  std::vector<const char*> from;
};
const std::vector<Apart> apart = {
    {"dp_method master", {"cp more", "cp_method ring", "cp_method ulysses", "cp_ulysses more", "dp plain",
     "dp_shard more", "gather_unit parameter", "input_slots in_flight+1", "mesh_order other",
     "micro_batch_group more", "offload of gradients NVMe", "offload of gradients host", "offload of optimizer NVMe",
     "offload of optimizer host", "offload of parameters NVMe", "offload of parameters host", "order of its own yes",
     "pp more", "prefetch_depth less", "prefetch_depth more", "replica_micro_batches unlike", "schedule dualpipe_v",
     "schedule gpipe", "schedule interleaved", "schedule zero_bubble_h1", "schedule zero_bubble_v",
     "sequence_parallel true", "stage_blocks unlike", "tp more", "tp_overlap ring", "virtual_stages more",
     "zero_stage 1", "zero_stage 2", "zero_stage 3"}},
    {"optimizer muon", {"gather_unit parameter", "momentum of sgd yes", "offload of gradients NVMe",
     "offload of gradients host", "offload of optimizer NVMe", "offload of optimizer host",
     "offload of parameters NVMe", "offload of parameters host", "prefetch_depth less", "prefetch_depth more",
     "zero_stage 2", "zero_stage 3"}},
    {"pp plain", {"input_slots in_flight+1", "micro_batch_group more", "order of its own yes", "schedule dualpipe_v",
     "schedule gpipe", "schedule interleaved", "schedule zero_bubble_h1", "schedule zero_bubble_v",
     "stage_blocks unlike", "virtual_stages more"}},
    {"zero_stage 2", {"gather_unit parameter", "offload of parameters NVMe", "offload of parameters host",
     "prefetch_depth less", "prefetch_depth more", "schedule dualpipe_v", "schedule zero_bubble_h1",
     "schedule zero_bubble_v"}},
    {"model tiny-vit", {"cp more", "cp_method ring", "cp_method ulysses", "cp_ulysses more",
     "sequence_parallel true", "tied yes", "tp_overlap ring"}},
    {"micro_batch_group more", {"accumulates no", "schedule 1f1b", "schedule dualpipe_v", "schedule gpipe",
     "schedule zero_bubble_h1", "schedule zero_bubble_v", "virtual_stages plain"}},
    {"model tiny-t5", {"cp more", "cp_method ring", "cp_method ulysses", "cp_ulysses more", "sequence_parallel true",
     "tp_overlap ring"}},
    {"zero_stage 1", {"gather_unit parameter", "offload of parameters NVMe", "offload of parameters host",
     "prefetch_depth less", "prefetch_depth more"}},
    {"schedule dualpipe_v", {"accumulates no", "gather_unit parameter", "replica_micro_batches unlike",
     "virtual_stages plain", "zero_stage 3"}},
    {"schedule zero_bubble_v", {"gather_unit parameter", "replica_micro_batches unlike", "virtual_stages plain",
     "zero_stage 3"}},
    {"offload of optimizer device", {"offload of gradients NVMe", "offload of gradients host",
     "offload of parameters NVMe", "offload of parameters host"}},
    {"virtual_stages more", {"schedule 1f1b", "schedule gpipe", "schedule zero_bubble_h1"}},
    {"momentum of sgd yes", {"optimizer adam", "optimizer adamw", "optimizer adamw_8bit"}},
    {"cp_ulysses more", {"cp plain", "cp_method ulysses", "model tiny-mlp"}},
    {"zero_stage 0", {"dp_shard more", "gather_unit parameter"}},
    {"tp_overlap ring", {"sequence_parallel false", "tp plain"}},
    {"schedule zero_bubble_h1", {"gather_unit parameter", "zero_stage 3"}},
    {"schedule interleaved", {"accumulates no", "virtual_stages plain"}},
    {"replica_micro_batches unlike", {"accumulates no", "dp plain"}},
    {"recompute_layers more", {"recompute none", "recompute per_stage"}},
    {"cp_method ulysses", {"cp plain", "model tiny-mlp"}},
    {"tp plain", {"sequence_parallel true"}},
    {"schedule gpipe", {"input_slots in_flight+1"}},
    {"optimizer adamw_8bit", {"offload of optimizer NVMe"}},
    {"offload_layers more", {"offload of activations device"}},
    {"cp_method ring", {"cp plain"}},
};

std::string words_of(const Trait& trait) { return trait.of + ' ' + trait.value; }

std::string words_of_pair(const std::string& a, const std::string& b) {
  return fmt::format("{} | {}", std::min(a, b), std::max(a, b));
}

std::set<std::string> pairs_apart() {
  std::set<std::string> pairs;
  for (const Apart& one : apart)
    for (const char* other : one.from) pairs.insert(words_of_pair(one.trait, other));
  return pairs;
}

// Pairs of traits that some plan has, and for each plan those that it has; traits by number.
struct Pool {
  std::map<Trait, int> numbers;
  std::vector<Trait> traits;
  std::vector<std::vector<int>> of_plans;  // by seed
  std::set<std::pair<int, int>> pairs;
};

Pool pool_of(std::uint32_t plans) {
  Pool pool;
  for (std::uint32_t seed = 0; seed < plans; ++seed) {
    std::vector<int>& own = pool.of_plans.emplace_back();
    for (const Trait& trait : traits_of(random_plan(seed))) {
      const auto [place, is_new] = pool.numbers.emplace(trait, static_cast<int>(pool.traits.size()));
      if (is_new) pool.traits.push_back(trait);
      own.push_back(place->second);
    }
    for (std::size_t i = 0; i < own.size(); ++i)
      for (std::size_t j = 0; j < i; ++j) pool.pairs.insert(std::minmax(own[i], own[j]));
  }
  return pool;
}

// Seeds whose plans together have all pairs: again and again the one with the most that are open.
std::vector<std::uint32_t> seeds_of_all_pairs(const Pool& pool) {
  const std::size_t count = pool.traits.size();
  std::vector<char> is_open(count * count, 0);
  for (const auto& [a, b] : pool.pairs) is_open[static_cast<std::size_t>(a) * count + static_cast<std::size_t>(b)] = 1;
  const auto visit_open = [&](std::uint32_t seed, const auto& visit) {
    const std::vector<int>& own = pool.of_plans[seed];
    for (std::size_t i = 0; i < own.size(); ++i)
      for (std::size_t j = 0; j < i; ++j) {
        const auto [a, b] = std::minmax(own[i], own[j]);
        char& open = is_open[static_cast<std::size_t>(a) * count + static_cast<std::size_t>(b)];
        if (open != 0) visit(open);
      }
  };
  const auto open_of = [&](std::uint32_t seed) {
    int open = 0;
    visit_open(seed, [&](char&) { ++open; });
    return open;
  };
  // A plan never has more open pairs than it had: the first whose number still holds is the best.
  using Entry = std::pair<int, std::uint32_t>;
  std::priority_queue<Entry> best;
  for (std::uint32_t seed = 0; seed < pool.of_plans.size(); ++seed) best.emplace(open_of(seed), seed);
  std::vector<std::uint32_t> seeds;
  for (std::size_t left = pool.pairs.size(); left > 0;) {
    const auto [known, seed] = best.top();
    best.pop();
    const int open = open_of(seed);
    if (open < known) {
      best.emplace(open, seed);
      continue;
    }
    visit_open(seed, [](char& pair) { pair = 0; });
    left -= static_cast<std::size_t>(open);
    seeds.push_back(seed);
  }
  return seeds;
}

}  // namespace

TEST_CASE("random legal plans over all techniques together train as the one-rank reference does, as was predicted") {
  // For developers (docs/contributing.md): these plans and no others.
  if (const std::optional<std::uint32_t> first = number_in("PARPLAN_RANDOM_SEED")) {
    for (std::uint32_t i = 0; i < number_in("PARPLAN_RANDOM_PLANS").value_or(1); ++i) check_plan(*first + i);
    return;
  }
  const Pool pool = pool_of(seeds_of_pool);
  // A row of choices that no plan varies, and a value that no plan has, have been forgotten.
  for (const ChoiceRow& row : choice_rows()) {
    if (row.choice == Choice::offload) continue;  // by its parts
    INFO(row.key);
    CHECK(std::ranges::count(pool.traits, row.key, &Trait::of) > 1);
  }
  for (const Trait& trait : named_traits()) {
    INFO(trait.of << ": " << trait.value);
    CHECK(pool.numbers.contains(trait));
  }
  const std::vector<std::uint32_t> seeds = seeds_of_all_pairs(pool);
  MESSAGE(pool.traits.size() << " traits, " << pool.pairs.size() << " pairs of them, in " << seeds.size() << " plans");
  // A pair of traits that no plan has is not legal, and in the table above, or has been missed.
  const std::set<std::string> known = pairs_apart();
  std::set<std::string> unseen;
  for (int a = 0; a < static_cast<int>(pool.traits.size()); ++a)
    for (int b = 0; b < a; ++b)
      if (pool.traits[a].of != pool.traits[b].of && !pool.pairs.contains(std::minmax(a, b)))
        unseen.insert(words_of_pair(words_of(pool.traits[a]), words_of(pool.traits[b])));
  for (const std::string& pair : unseen) {
    INFO("no plan has " << pair);
    CHECK(known.contains(pair));
  }
  for (const std::string& pair : known) {
    INFO("a plan has " << pair << ", or nothing does");
    CHECK(unseen.contains(pair));
  }
  for (const std::uint32_t seed : seeds) check_plan(seed);
  // And some of any seeds: three and more traits meet in them by chance.
  for (std::uint32_t seed = seeds_of_pool; seed < seeds_of_pool + 60; ++seed) check_plan(seed);
}

TEST_CASE("one group of all ranks is ZeRO without groups, and groups of the context axis are as good") {
  const OpGraph graph = graph_of("tiny-llama");
  const TrainingSpec training = training_of();
  ParallelSpec spec;
  spec.mesh.degree = {.dp = 4};
  spec.zero_stage = 3;
  row_of(Choice::dp_shard).set(spec, std::int64_t{4});
  CHECK(spec.mesh.dp_shard == 0);
  spec.mesh.degree = {.dp = 2, .cp = 2};
  spec.mesh.dp_shard = 2;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  check_close(run_plan(graph, training, spec), run_reference(graph, training, spec.micro_batch));
}

}  // namespace parplan
