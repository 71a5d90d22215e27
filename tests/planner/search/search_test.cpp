#include "planner/search/search.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/parallel/engine_layouts.h"
#include "planner/parallel/techniques.h"
#include "planner/schedule/schedules.h"
#include "planner/search/candidates.h"
#include "planner/search/node_group_arrangements.h"
#include "planner/search/simulate_spec.h"
#include "planner/search/space.h"
#include "planner/search/stage_recompute.h"
#include "planner/suggest.h"
#include "tests/planner/search/random_settings.h"

namespace parplan {

using testing::all_cuts;
using testing::cluster_of;
using testing::describe;
using testing::eight_cores;
using testing::graph_of;
using testing::source;
using testing::training_of;

struct Tried {
  ParallelSpec spec;
  StepResult result;
};

// Simulates a layout, and the same with one more buffer for arriving activations where that is
// faster.
void try_layout(const OpGraph& graph, NetworkCache& networks, const TrainingSpec& training, ParallelSpec spec,
                KnownBlocks& blocks, std::vector<Tried>& all) {
  const Placements placements = place(graph, spec);
  const auto simulated = [&] {
    return simulate_spec(graph, networks, training, spec, placements, schedule_of(spec, training), nullptr, &blocks);
  };
  const StepResult without = simulated();
  all.push_back({spec, without});
  if (spec.pp() == 1 || spec.schedule == ScheduleKind::gpipe) return;
  spec.input_slots = InputSlots::one_more;
  const StepResult with = simulated();
  CHECK(with.time.total() <= without.time.total() * (1 + 1e-12));
  if (with.time.total() < without.time.total() * (1 - 1e-9)) all.push_back({spec, with});
}

// Every spec on so many devices with every cut and every choice of stages that recompute, where
// that is searched.
void try_every_layout(const OpGraph& graph, NetworkCache& networks, const TrainingSpec& training, int devices,
                      const LayoutRequest& request, KnownBlocks& blocks, std::vector<Tried>& all) {
  for (const ParallelSpec& spec : enumerate_specs(graph, training, devices, request))
    for (const std::vector<int>& cut : all_cuts(static_cast<int>(graph.blocks.size()), spec.stages())) {
      ParallelSpec one = spec;
      one.stage_blocks = cut;
      try_layout(graph, networks, training, one, blocks, all);
      if (spec.recompute != Recompute::none || request[Choice::recompute] || !training.engine.has_recompute_per_stage)
        continue;
      one.recompute = Recompute::per_stage;
      for (const std::vector<StageRecompute>& choices : recompute_choices(spec, training.engine)) {
        one.stage_recompute = choices;
        try_layout(graph, networks, training, one, blocks, all);
      }
    }
}

// The best score is among the plans, and the first of them is no worse but for a tie.
template <class ScoreOf>
void check_best(const SearchResult& found, const Score& best, const ScoreOf& score_of) {
  Score least = score_of(found.plans.front().spec, found.plans.front().result);
  CHECK(least.first <= best.first * (1.0 + tied_plans));
  for (const RankedPlan& plan : found.plans) least = std::min(least, score_of(plan.spec, plan.result));
  CHECK(least == best);
}

// The plans are the best of their degrees, which are the best degrees. Returns how many layouts
// that were left out beat the worst of the plans.
template <class ScoreOf>
std::int64_t check_best_of_each_degrees(const SearchResult& found, int top, const std::vector<Tried>& all, Bytes limit,
                                        const ScoreOf& score_of) {
  std::map<Degrees, Score> best;
  for (const auto& [spec, result] : all)
    if (result.memory.peak() <= limit) {
      const auto [of, inserted] = best.try_emplace(spec.mesh.degree, score_of(spec, result));
      if (!inserted) of->second = std::min(of->second, score_of(spec, result));
    }
  std::vector<Score> ranked;
  for (const auto& [degrees, score] : best) ranked.push_back(score);
  std::ranges::sort(ranked);
  ranked.resize(std::min<std::size_t>(ranked.size(), static_cast<std::size_t>(top)));
  REQUIRE(found.plans.size() == ranked.size());
  std::set<Degrees> seen;
  Score worst{};
  for (const RankedPlan& plan : found.plans) {
    CHECK(seen.insert(plan.spec.mesh.degree).second);
    const Score own = score_of(plan.spec, plan.result);
    worst = std::max(worst, own);
    // A plainer one may stand for that which is as good but for a tie, and behind the best plan
    // one that is a little slower (most_variants_behind).
    const double apart = &plan == &found.plans.front() ? tied_plans : 0.05;
    CHECK(own.first <= best.at(plan.spec.mesh.degree).first * (1.0 + apart));
    CHECK(own.first <= ranked.back().first * (1.0 + apart));
  }
  std::int64_t beating = 0;
  for (const auto& [spec, result] : all) beating += result.memory.peak() <= limit && score_of(spec, result) < worst;
  return beating - static_cast<std::int64_t>(found.plans.size()) + 1;
}

TEST_CASE("the search finds what simulating every candidate with every cut finds") {
  const OpGraph plain = graph_of("tiny-gpt2", 16);
  // One that lacks much, and writes attention's scores.
  const Engine poor{.name = "poor",
                    .fused_attention = false,
                    .has_gpipe = false,
                    .has_zero_bubble = false,
                    .has_sequence_parallel = false,
                    .has_other_orders = false,
                    .has_norms_recompute = false,
                    .has_activation_recompute = false,
                    .has_mlp_recompute = false,
                    .has_recompute_per_stage = false,
                    .most_zero_in_pipelines = 1};
  Engine mixing = poor;
  mixing.has_recompute_per_stage = true;
  int interleaved = 0, cores = 0;
  struct Setting {
    bool gpu, tight, pipeline;
    Engine engine = {};
    Offload offload = Offload{};
  };
  for (const Setting& setting :
       {Setting{false, false, false}, Setting{false, true, false}, Setting{true, false, false},
        Setting{true, true, false}, Setting{true, false, true}, Setting{true, true, true},
        Setting{true, true, false, poor}, Setting{true, true, true, poor}, Setting{true, true, false, mixing},
        Setting{true, true, true, mixing}, Setting{false, true, false, {}, Offload{.activations = Home::host}},
        Setting{true, true, true, {}, Offload{.activations = Home::host}}}) {
    const bool gpu = setting.gpu, tight = setting.tight, pipeline = setting.pipeline;
    const Engine& engine = setting.engine;
    const Offload& offload = setting.offload;
    TrainingSpec training = training_of(8, gpu ? DataType::bf16 : DataType::fp32);
    training.engine = engine;
    const OpGraph graph = as_run_by(engine, plain);
    // Four stages may recompute in 256 ways.
    const int devices = gpu && tight && !pipeline ? 4 : 2;
    Cluster cluster =
        gpu ? cluster_of("dgx-a100", devices) : cluster_of(source + "/tests/data/clusters/cpu-8.yaml", devices);
    LayoutRequest request;
    if (offload != Offload{}) request[Choice::offload] = offload;
    // A pipeline whose time is that of its products.
    if (pipeline) {
      request[Choice::pp] = std::int64_t{2};
      cluster.groups.front().device.measured.reset();
      for (DeviceRates& rates : cluster.groups.front().device.rates)
        rates.matrix_half = rates.matrix_fp32 = FlopsPerSecond(1e9);
    }
    SearchOptions options;
    options.fewer_devices = false;
    options.most_simulated = 1 << 20;
    options.top = 3;

    // Brute force: every spec, every cut, every choice of stages that recompute; those that fit
    // are simulated.
    NetworkCache networks(cluster);
    KnownBlocks blocks;
    std::vector<Tried> all;
    try_every_layout(graph, networks, training, devices, request, blocks, all);
    // Tight: the largest memory for which no plan fits without recompute, and less than a tenth
    // of all plans fit.
    std::ranges::sort(all, {}, [](const Tried& one) { return one.result.memory.peak(); });
    const Bytes limit =
        tight ? all[all.size() / 10].result.memory.peak() : cluster.groups.front().device.memory_capacity;
    cluster.groups.front().device.memory_capacity = limit;

    for (const Objective objective : {Objective::time, Objective::cost, Objective::memory}) {
      const auto score_of = [&](const ParallelSpec& spec, const StepResult& result) {
        return score(objective, cluster, spec, result.time.total(), result.memory);
      };
      Score best{std::numeric_limits<double>::infinity(), 0.0};
      for (const auto& [spec, result] : all)
        if (result.memory.peak() <= limit) best = std::min(best, score_of(spec, result));
      options.objective = objective;
      const SearchResult found = search(graph, cluster, training, request, options);
      INFO(name(objective) << " on " << (gpu ? "gpu" : "cpu") << (tight ? ", tight" : "") << ": "
                           << found.counts.simulated << " of " << found.counts.candidates << " simulated, "
                           << all.size() << " by brute force");
      REQUIRE(!found.plans.empty());
      CHECK(found.counts.certified);
      CHECK(!found.counts.gap);
      check_best(found, best, score_of);
      for (const RankedPlan& plan : found.plans) CHECK(plan.result.memory.peak() <= limit);
      interleaved += found.plans.front().spec.virtual_stages > 1;
      for (const RankedPlan& plan : found.plans) {
        CHECK(!lacked_by_engine(engine, plan.spec));
        cores += plan.spec.recompute == Recompute::core_attn ||
                 std::ranges::count(plan.spec.stage_recompute, Recompute::core_attn) > 0;
      }
    }
  }
  CHECK(interleaved > 0);
  CHECK(cores > 0);
}

TEST_CASE("on any number of devices the search finds what simulating every layout on every smaller number finds") {
  std::mt19937 random = testing::random_from(17);
  const auto pick = [&](std::initializer_list<int> from) { return from.begin()[random() % from.size()]; };
  std::int64_t simulated = 0;
  int odd = 0, with_input_slot = 0;
  std::int64_t variants = 0;
  for (int setting = 0; setting < 8; ++setting) {
    const bool gpu = setting % 4 != 3;
    ModelSpec model = load_model(source + "/tests/data/models/tiny-gpt2.yaml", "").spec;
    model.layers = pick({1, 2});
    model.hidden = pick({32, 512, 512});
    model.feature = 4 * model.hidden;
    model.vocabulary = pick({61, 5000});
    const OpGraph graph = build_graph(model, 16);
    TrainingSpec training = training_of(pick({9, 10, 15, 21}), gpu ? DataType::bf16 : DataType::fp32);
    training.clip_norm = setting % 2;
    Cluster cluster = testing::random_cluster(random, gpu, false);
    // Every second time computation decides, and as many devices as possible pay.
    if (setting % 2 == 0) {
      cluster.groups.front().device.measured.reset();
      for (DeviceRates& rates : cluster.groups.front().device.rates)
        rates.matrix_half = rates.matrix_fp32 = FlopsPerSecond(1e9);
    }
    const int devices = pick({17, 18, 20, 21, 23});
    NodeGroup& nodes = cluster.groups.front();
    if (gpu) nodes.nodes = static_cast<int>(ceil_div(devices, nodes.devices_per_node()));
    LayoutRequest request;
    request[Choice::zero_stage] = std::int64_t{pick({0, 1, 2, 3})};
    if (setting % 3 == 0) request[Choice::schedule] = ScheduleKind::gpipe;
    if (setting % 3 == 1)
      request[Choice::schedule] = setting % 2 == 0 ? ScheduleKind::zero_bubble_h1 : ScheduleKind::zero_bubble_v;
    if (setting % 4 < 2) request[Choice::tp] = std::int64_t{1};
    SearchOptions options;
    options.top = pick({1, 3});
    options.most_simulated = 1 << 20;

    NetworkCache networks(cluster);
    KnownBlocks blocks;
    std::vector<Tried> all;
    for (int n = 1; n <= cluster.devices(); ++n) try_every_layout(graph, networks, training, n, request, blocks, all);
    REQUIRE(!all.empty());
    simulated += static_cast<std::int64_t>(all.size());
    std::ranges::sort(all, {}, [](const Tried& one) { return one.result.memory.peak(); });
    // A limit that leaves out most layouts, and one that leaves out all.
    const Bytes least = all.front().result.memory.peak();
    for (const Bytes limit : {cluster.groups.front().device.memory_capacity, all[all.size() / 8].result.memory.peak(),
                              least, least - Bytes(1)}) {
      cluster.groups.front().device.memory_capacity = limit;
      for (const Objective objective : {Objective::time, Objective::cost, Objective::memory}) {
        const auto score_of = [&](const ParallelSpec& spec, const StepResult& result) {
          return score(objective, cluster, spec, result.time.total(), result.memory);
        };
        std::vector<Score> scores;
        for (const auto& [spec, result] : all)
          if (result.memory.peak() <= limit) scores.push_back(score_of(spec, result));
        std::ranges::sort(scores);
        options.objective = objective;
        const SearchResult found = search(graph, cluster, training, request, options);
        INFO("setting " << setting << " by " << std::string(name(objective)) << " on " << cluster.devices()
                        << " devices, batch " << training.global_batch << ", " << limit.count
                        << " bytes: " << found.counts.simulated << " of " << found.counts.candidates
                        << " simulated, " << all.size() << " by brute force");
        REQUIRE(found.plans.empty() == scores.empty());
        CHECK(found.counts.candidates ==
              found.counts.infeasible_memory + found.counts.pruned_by_bound + found.counts.simulated);
        REQUIRE(found.smallest);
        if (scores.empty()) CHECK(found.smallest->result.memory.peak() == least);
        if (scores.empty()) continue;
        CHECK(found.counts.certified);
        const RankedPlan& winner = found.plans.front();
        check_best(found, scores.front(), score_of);
        CHECK(winner.result.memory.peak() <= limit);
        with_input_slot += winner.spec.input_slots == InputSlots::one_more;
        odd += winner.spec.mesh.size() != cluster.devices() && winner.spec.mesh.size() > 16;
        SearchOptions of_each = options;
        of_each.top = 4;
        of_each.top_each = 1;
        variants += check_best_of_each_degrees(search(graph, cluster, training, request, of_each), of_each.top, all,
                                               limit, score_of);
      }
    }
  }
  MESSAGE(simulated << " layouts simulated; " << odd << " winners leave out devices of more than 16, "
                    << with_input_slot << " have one more buffer for arriving activations; " << variants
                    << " variants of ranked plans beat the worst of their ranking");
  CHECK(variants > 0);
  CHECK(odd > 0);
  CHECK(with_input_slot > 0);
}

TEST_CASE("of unlike nodes the search finds what simulating every layout of every arrangement finds") {
  std::mt19937 random = testing::random_from(23);
  const auto pick = [&](std::initializer_list<int> from) { return from.begin()[random() % from.size()]; };
  int rearranged = 0, three = 0, elsewhere = 0;
  for (int setting = 0; setting < 10; ++setting) {
    ModelSpec model = load_model(source + "/tests/data/models/tiny-gpt2.yaml", "").spec;
    model.layers = pick({1, 2});
    model.hidden = pick({32, 512});
    model.feature = 4 * model.hidden;
    const OpGraph graph = build_graph(model, 16);
    TrainingSpec training = training_of(pick({4, 6}), DataType::bf16);
    training.clip_norm = setting % 2;
    Cluster cluster = testing::random_cluster(random, true, false);
    std::erase_if(cluster.network.levels, [](const FabricLevel& level) { return level.nodes.has_value(); });
    const NodeGroup any = cluster.groups.front();
    cluster.groups.assign(setting % 3 == 2 ? 3 : 2, any);
    for (std::size_t g = 0; g < cluster.groups.size(); ++g) {
      NodeGroup& group = cluster.groups[g];
      group.nodes = 1;
      group.node = first_devices(any.node, std::min(any.devices_per_node(), pick({1, 2})));
      group.device.name = fmt::format("kind {}", g);
      group.device.measured.reset();
      // Computation decides, and kinds differ by up to four times.
      for (DeviceRates& rates : group.device.rates)
        rates.matrix_half = rates.matrix_fp32 = FlopsPerSecond(1e9 * pick({1, 2, 4}));
      group.price = Price{.per_device_hour = static_cast<double>(pick({1, 2, 3})), .currency = "USD"};
    }
    LayoutRequest request;
    request[Choice::zero_stage] = std::int64_t{pick({0, 1, 2, 3})};
    if (cluster.groups.size() == 3) request[Choice::recompute] = Recompute::none;
    SearchOptions options;
    options.top = 3;
    options.most_simulated = 1 << 20;

    struct OnArrangement {
      Cluster cluster;
      std::vector<Tried> all;
    };
    KnownBlocks blocks;
    std::vector<OnArrangement> tried;
    for (const Cluster& one : arrangements(cluster)) {
      OnArrangement& on = tried.emplace_back(OnArrangement{.cluster = one, .all = {}});
      NetworkCache networks(on.cluster);
      for (int n = 1; n <= one.devices(); ++n) try_every_layout(graph, networks, training, n, request, blocks, on.all);
    }
    std::vector<Bytes> peaks;
    for (const OnArrangement& on : tried)
      for (const Tried& one : on.all) peaks.push_back(one.result.memory.peak());
    std::ranges::sort(peaks);
    // Without a limit, with one that leaves out most layouts, and with one that leaves out all.
    for (const Bytes limit : {peaks.back(), peaks[peaks.size() / 8], peaks.front() - Bytes(1)}) {
      Cluster limited = cluster;
      for (NodeGroup& group : limited.groups) group.device.memory_capacity = limit;
      for (const Objective objective : {Objective::time, Objective::cost, Objective::memory}) {
        // One more input slot is not made room for by recompute.
        const bool is_tight = limit < peaks.back();
        if (is_tight) request[Choice::input_slots] = InputSlots::in_flight;
        std::optional<Score> best;
        for (const OnArrangement& on : tried)
          for (const auto& [spec, result] : on.all) {
            if (result.memory.peak() > limit || (is_tight && spec.input_slots != InputSlots::in_flight)) continue;
            const Score own = score(objective, on.cluster, spec, result.time.total(), result.memory);
            best = best ? std::min(*best, own) : own;
          }
        options.objective = objective;
        const ArrangedResult arranged = search_arrangements(graph, limited, training, request, options);
        INFO("setting " << setting << " by " << std::string(name(objective)) << ", " << limited.groups.size()
                        << " groups, " << limit.count << " bytes, " << peaks.size() << " by brute force");
        REQUIRE(arranged.found.plans.empty() == !best);
        if (!best) continue;
        CHECK(arranged.found.counts.certified);
        const auto score_of = [&](const RankedPlan& plan) {
          return score(objective, plan.on ? plan.on->cluster : arranged.cluster, plan.spec, plan.result.time.total(),
                       plan.result.memory);
        };
        Score least = score_of(arranged.found.plans.front());
        for (const RankedPlan& plan : arranged.found.plans) {
          CHECK(plan.result.memory.peak() <= limit);
          least = std::min(least, score_of(plan));
        }
        // Searches of several arrangements end within rounding of the best.
        CHECK(least.first <= best->first * (1.0 + arranged.found.counts.cut_gap.value_or(0.0)) * (1 + 1e-8));
        CHECK(least.first >= best->first * (1 - 1e-8));
        rearranged += arranged.cluster != limited;
        three += limited.groups.size() == 3;
        if (objective == Objective::memory || is_tight) continue;
        // Behind it, the best of each set of degrees, on whichever nodes that is.
        std::map<Degrees, double> of_degrees;
        for (const OnArrangement& on : tried)
          for (const auto& [spec, result] : on.all) {
            const double own = score(objective, on.cluster, spec, result.time.total(), result.memory).first;
            const auto [entry, is_new] = of_degrees.try_emplace(spec.mesh.degree, own);
            entry->second = std::min(entry->second, own);
          }
        std::vector<double> ranked;
        for (const auto& [degrees, own] : of_degrees) ranked.push_back(own);
        std::ranges::sort(ranked);
        SearchOptions each = options;
        each.top_each = 1;
        const ArrangedResult list = search_arrangements(graph, limited, training, request, each);
        REQUIRE(list.found.plans.size() == std::min<std::size_t>(ranked.size(), static_cast<std::size_t>(each.top)));
        for (std::size_t i = 0; i < list.found.plans.size(); ++i) {
          // Plans that are as good but for a tie may come first, and go without another buffer.
          CHECK(score_of(list.found.plans[i]).first == doctest::Approx(ranked[i]).epsilon(2 * tied_plans));
          elsewhere += list.found.plans[i].on.has_value();
        }
      }
    }
  }
  MESSAGE(rearranged << " winners leave groups out or have them in another order");
  CHECK(rearranged > 5);
  CHECK(three > 5);
  CHECK(elsewhere > 5);
}

TEST_CASE("plans on fewer devices are looked into where more do not pay: whole nodes, and what given degrees allow") {
  const OpGraph graph = build_graph(load_model(source + "/models/gpt2.yaml", "").spec, 1024);
  TrainingSpec training = training_of(16, DataType::fp16);
  training.sequence_length = 1024;
  SearchOptions options;
  options.top = 1;
  // Slow NICs: one of four nodes is faster than all.
  const SearchResult found = search(graph, cluster_of("azure-ndv2", 32), training, {}, options);
  REQUIRE(found.counts.certified);
  const SearchResult alone = search(graph, cluster_of("azure-ndv2", 8), training, {}, options);
  CHECK(found.plans.front().result.time.total() <= alone.plans.front().result.time.total());
  CHECK(found.plans.front().spec.mesh.size() == 8);
  // Three nodes with 8 ranks each.
  LayoutRequest three;
  three[Choice::dp] = 3;
  three[Choice::tp] = 4;
  training.global_batch = 24;
  const SearchResult given = search(graph, cluster_of("dgx-a100", 64), training, three, options);
  REQUIRE(!given.plans.empty());
  CHECK(given.plans.front().spec.mesh.size() % 12 == 0);
}

TEST_CASE("numbers of devices are left out only where their floor says that none of their plans is better") {
  const OpGraph graph = graph_of("tiny-llama", 16);
  for (const Objective objective : {Objective::time, Objective::cost, Objective::memory})
    for (const std::int64_t batch : {8, 48, 4096}) {
      INFO(name(objective) << ", batch " << batch);
      const TrainingSpec training = training_of(batch, DataType::bf16);
      const Cluster cluster = cluster_of("dgx-a100", 24);
      SearchOptions options;
      options.objective = objective;
      options.most_simulated = 1 << 20;
      const SearchResult found = search(graph, cluster, training, {}, options);
      REQUIRE(found.counts.certified);
      CHECK(found.counts.candidates >=
            found.counts.infeasible_memory + found.counts.pruned_by_bound + found.counts.simulated);
      options.fewer_devices = false;
      const auto score_of = [&](const RankedPlan& plan) {
        return score(objective, cluster, plan.spec, plan.result.time.total(), plan.result.memory);
      };
      for (const int devices : {24, 16, 8, 6, 4, 3, 2, 1}) {
        const SearchResult one = search(graph, cluster_of("dgx-a100", devices), training, {}, options);
        for (std::size_t i = 0; i < one.plans.size(); ++i)
          if (found.plans.size() == static_cast<std::size_t>(options.top))
            CHECK(score_of(found.plans[i]) <= score_of(one.plans[i]));
      }
    }
}

TEST_CASE("a search goes on beyond its usual number of simulations while that is little work") {
  const OpGraph graph = build_graph(load_model(source + "/models/gpt2.yaml", "").spec, 1024);
  TrainingSpec training = training_of(16, DataType::fp16);
  training.sequence_length = 1024;
  SearchOptions options;
  const SearchResult usual = search(graph, cluster_of("azure-ndv2", 32), training, {}, options);
  options.most_simulated = 64;
  const SearchResult limited = search(graph, cluster_of("azure-ndv2", 32), training, {}, options);
  CHECK(usual.counts.certified);
  CHECK(usual.counts.simulated > limited.counts.simulated);
  CHECK(!limited.counts.certified);
}

TEST_CASE("where some cut fits, a layout is a candidate with one that does") {
  ModelSpec model = load_model(source + "/tests/data/models/tiny-gpt2.yaml", "").spec;
  model.layers = 10;
  model.vocabulary = 5000;  // the head's logits are large beside a layer
  const OpGraph graph = build_graph(model, 32);
  for (const int stages : {4, 6})
    for (const int zero : {0, 2})
      for (const Recompute recompute : {Recompute::none, Recompute::full}) {
        ParallelSpec spec;
        spec.mesh.degree = {.pp = stages, .dp = 2};
        spec.zero_stage = zero;
        spec.recompute = recompute;
        spec.micro_batch = 2;
        TrainingSpec training = training_of(64, DataType::bf16);
        training.sequence_length = 32;
        Cluster cluster = cluster_of("dgx-a100", 16);
        cluster.groups.front().device.memory_overhead = Bytes(0);
        CandidateMaker maker(graph, cluster, training);
        const ScheduleRow& row = row_of(spec.schedule);
        Bytes least(std::numeric_limits<std::int64_t>::max());
        for (const std::vector<int>& cut : all_cuts(static_cast<int>(graph.blocks.size()), stages)) {
          ParallelSpec one = spec;
          one.stage_blocks = cut;
          least =
              std::min(least, maker.estimator().estimate(one, maker.placements_of(one), forms_of(row)).memory.peak());
        }
        for (const double room : {1.0, 1.01, 1.05, 1.2}) {
          cluster.groups.front().device.memory_capacity =
              Bytes(static_cast<std::int64_t>(static_cast<double>(least.count) * room));
          std::vector<Candidate> candidates;
          CandidateMaker(graph, cluster, training).add(spec, false, candidates);
          INFO(describe(spec) << ", " << room);
          CHECK(std::ranges::any_of(candidates,
                                    [](const Candidate& candidate) { return candidate.bound.spare.count >= 0; }));
        }
        cluster.groups.front().device.memory_capacity = least - Bytes(1);
        std::vector<Candidate> candidates;
        CandidateMaker(graph, cluster, training).add(spec, false, candidates);
        CHECK(std::ranges::none_of(candidates,
                                   [](const Candidate& candidate) { return candidate.bound.spare.count >= 0; }));
      }
}

TEST_CASE("plans that differ only in the order of axes with equal links are ranked once") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  const TrainingSpec training = training_of(8, DataType::bf16);
  const Cluster cluster = cluster_of("dgx-a100", 8);  // around one switch every order is the same
  SearchOptions options;
  options.top = 40;
  options.most_simulated = 1 << 20;
  const SearchResult found = search(graph, cluster, training, {}, options);
  REQUIRE(found.plans.size() == 40);
  CHECK(found.counts.certified);
  for (std::size_t i = 0; i < found.plans.size(); ++i) {
    if (i > 0) CHECK(found.plans[i - 1].result.time.total() <= found.plans[i].result.time.total() * (1 + 1e-9));
    for (std::size_t j = 0; j < i; ++j) {
      ParallelSpec same_order = found.plans[j].spec;
      same_order.mesh.order = found.plans[i].spec.mesh.order;
      CHECK(!(same_order == found.plans[i].spec));
    }
  }
  CHECK(found.counts.candidates ==
        found.counts.infeasible_memory + found.counts.pruned_by_bound + found.counts.simulated);
}

TEST_CASE("a given cut is taken for as many stages as it has alone, and a given schedule where there is a pipeline") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  const TrainingSpec training = training_of(8, DataType::bf16);
  LayoutRequest request;
  request[Choice::stage_blocks] = std::vector{1, static_cast<int>(graph.blocks.size()) - 1};
  for (const ParallelSpec& spec : enumerate_specs(graph, training, 8, request)) CHECK(spec.pp() == 2);
  CHECK(!enumerate_specs(graph, training, 8, request).empty());
  request[Choice::stage_blocks] = std::vector{1, static_cast<int>(graph.blocks.size())};
  CHECK(enumerate_specs(graph, training, 8, request).empty());

  LayoutRequest gpipe;
  gpipe[Choice::schedule] = ScheduleKind::gpipe;
  for (const ParallelSpec& spec : enumerate_specs(graph, training, 8, gpipe))
    CHECK(spec.schedule == (spec.pp() > 1 ? ScheduleKind::gpipe : ScheduleKind::one_f_one_b));
}

TEST_CASE("the best plan by memory has the least memory that any candidate needs, by cost the least cost") {
  const OpGraph graph = graph_of("tiny-llama", 16);
  const TrainingSpec training = training_of(8, DataType::bf16);
  Cluster cluster = cluster_of("dgx-a100", 8);
  SearchOptions options;
  options.objective = Objective::memory;
  const SearchResult by_memory = search(graph, cluster, training, {}, options);
  REQUIRE(by_memory.counts.certified);
  options.objective = Objective::cost;
  const SearchResult by_cost = search(graph, cluster, training, {}, options);
  REQUIRE(by_cost.counts.certified);
  options.objective = Objective::time;
  options.top = 1000;
  options.most_simulated = 1000;
  const SearchResult by_time = search(graph, cluster, training, {}, options);
  for (const RankedPlan& plan : by_time.plans) {
    CHECK(by_memory.plans.front().result.memory.peak() <= plan.result.memory.peak());
    const auto device_seconds = [](const RankedPlan& one) {
      return one.result.time.total() * static_cast<double>(one.spec.mesh.size());
    };
    CHECK(device_seconds(by_cost.plans.front()) <= device_seconds(plan));
  }
  // Such a small model wastes most of eight GPUs: the cheapest step takes fewer.
  CHECK(by_cost.plans.front().spec.mesh.size() < by_time.plans.front().spec.mesh.size());
}

TEST_CASE("slow devices get fewer layers, and each stage is held against its own devices' memory") {
  const OpGraph graph = build_graph(load_model(source + "/models/gpt2-xl.yaml", "").spec, 1024);
  TrainingSpec training = training_of(64, DataType::bf16);
  training.sequence_length = 1024;
  Cluster cluster = cluster_of("dgx-a100", 16);
  cluster.groups.push_back(cluster.groups.front());
  for (NodeGroup& group : cluster.groups) group.nodes = 1;
  DeviceKind& slow = cluster.groups[1].device;
  slow.name = "half";
  for (DeviceRates& rates : slow.rates) {
    rates.matrix_half *= 0.5;
    rates.vector *= 0.5;
    rates.memory *= 0.5;
  }
  slow.peak_half *= 0.5;
  slow.memory_capacity = Bytes(slow.memory_capacity.count / 2);
  const LayoutRequest two{{Choice::dp, 8},
                          {Choice::tp, 1},
                          {Choice::pp, 2},
                          {Choice::zero_stage, 1},
                          {Choice::micro_batch, 1},
                          {Choice::schedule, ScheduleKind::one_f_one_b},
                          {Choice::sequence_parallel, false},
                          {Choice::recompute, Recompute::full},
                          {Choice::mesh_order, AxisOrder{Axis::pp, Axis::dp, Axis::tp}}};
  const SearchResult found = search(graph, cluster, training, two, {});
  REQUIRE(!found.plans.empty());
  const std::vector<int>& blocks = found.plans.front().spec.stage_blocks;
  // Twice as fast devices get about twice as many of the 48 layers; the head counts for the second
  // stage.
  CHECK(blocks[0] >= 31);
  CHECK(blocks[0] <= 36);
  // The other way round, the slow ones first.
  std::swap(cluster.groups[0], cluster.groups[1]);
  const std::vector<int> other = search(graph, cluster, training, two, {}).plans.front().spec.stage_blocks;
  CHECK(other[0] >= 15);
  CHECK(other[0] <= 20);
}

TEST_CASE("what was not simulated is counted, and the gap says how far it could be") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  const TrainingSpec training = training_of(8, DataType::fp32);
  SearchOptions options;
  options.top = 1;
  const SearchResult best = search(graph, eight_cores(), training, {}, options);
  REQUIRE(best.counts.certified);
  REQUIRE(best.counts.simulated > 1);
  options.most_simulated = 1;
  const SearchResult found = search(graph, eight_cores(), training, {}, options);
  REQUIRE(found.plans.size() == 1);
  REQUIRE(!found.counts.certified);
  CHECK(found.counts.simulated == 1);
  CHECK(found.counts.candidates >
        found.counts.infeasible_memory + found.counts.pruned_by_bound + found.counts.simulated);
  // The gap covers what is really left.
  REQUIRE(found.counts.gap);
  CHECK(*found.counts.gap > 0.0);
  CHECK(best.plans.front().result.time.total() * (1 + *found.counts.gap) >= found.plans.front().result.time.total());
}

TEST_CASE("a search gives the same plans every time") {
  const OpGraph graph = graph_of("tiny-llama", 16);
  const TrainingSpec training = training_of(8, DataType::fp32);
  const SearchResult first = search(graph, eight_cores(), training, {}, {});
  const SearchResult second = search(graph, eight_cores(), training, {}, {});
  CHECK(first.plans == second.plans);
  for (const int threads : {1, 2, 3, 8}) {
    SearchOptions options;
    options.threads = threads;
    const SearchResult other = search(graph, eight_cores(), training, {}, options);
    CHECK(other.plans == first.plans);
    CHECK(other.counts.candidates == first.counts.candidates);
    CHECK(other.counts.infeasible_memory == first.counts.infeasible_memory);
    CHECK(other.counts.pruned_by_bound == first.counts.pruned_by_bound);
    CHECK(other.counts.simulated == first.counts.simulated);
    CHECK(other.counts.certified == first.counts.certified);
  }
}

TEST_CASE("a search that counts no layouts finds the same plans") {
  const OpGraph graph = graph_of("tiny-llama", 16);
  const TrainingSpec training = training_of(12, DataType::bf16);
  for (const int devices : {5, 8})
    for (const Objective objective : {Objective::time, Objective::cost, Objective::memory}) {
      SearchOptions options;
      options.objective = objective;
      const Cluster cluster = cluster_of("dgx-a100", devices);
      const SearchResult counted = search(graph, cluster, training, {}, options);
      options.counts_layouts = false;
      const SearchResult other = search(graph, cluster, training, {}, options);
      REQUIRE(!counted.plans.empty());
      CHECK(other.plans == counted.plans);
      CHECK(other.counts.certified == counted.counts.certified);
      CHECK(other.counts.simulated == counted.counts.simulated);
    }
}

TEST_CASE("the space holds every factorisation once, and only orders that differ") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  const TrainingSpec training = training_of(4, DataType::fp32);
  LayoutRequest request;
  request[Choice::zero_stage] = 0;
  request[Choice::micro_batch] = 1;
  request[Choice::recompute] = Recompute::none;
  request[Choice::schedule] = ScheduleKind::gpipe;
  request[Choice::sequence_parallel] = false;
  const std::vector<ParallelSpec> specs = enumerate_specs(graph, training, 4, request);
  // dp4; tp4; pp4; dp2tp2, dp2pp2, tp2pp2 in two orders each.
  CHECK(specs.size() == 3 + 3 * 2);
  for (const ParallelSpec& spec : specs) {
    CHECK(spec.mesh.size() == 4);
    CHECK(std::count(specs.begin(), specs.end(), spec) == 1);
  }
}

TEST_CASE("when nothing fits, what would fit is named and does") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  SuggestRequest request;
  request.graph = &graph;
  request.model_name = "tiny-gpt2";
  request.cluster = eight_cores();
  request.training = training_of(8, DataType::fp32);
  request.cluster.groups.front().device.memory_capacity = Bytes(100'000);
  const SuggestResult none = suggest(request);
  CHECK(!none.plan);
  REQUIRE(!none.remedies.empty());
  const SearchResult failed = search(graph, request.cluster, request.training, {}, request.options);
  REQUIRE(failed.smallest);
  CHECK(none.remedies.front().instead.starts_with(format_bytes_up(failed.smallest->result.memory.peak()) +
                                                  " of memory a device instead of"));
  request.cluster.groups.front().device.memory_capacity = failed.smallest->result.memory.peak();
  CHECK(suggest(request).plan);
}

}  // namespace parplan
