#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/parallel/techniques.h"
#include "planner/schedule/schedules.h"
#include "planner/search/candidates.h"
#include "planner/search/search.h"
#include "planner/search/simulate_spec.h"
#include "planner/search/space.h"
#include "planner/search/stage_recompute.h"
#include "planner/suggest.h"
#include "tests/planner/search/random_settings.h"

namespace parplan {
namespace {

using testing::cluster_of;
using testing::describe;
using testing::random_cluster;
using testing::source;
using testing::training_of;

// Calls `visit(cut)` for every cut of `blocks` into `stages` runs.
void for_each_cut(int blocks, int stages, const std::function<void(const std::vector<int>&)>& visit) {
  std::vector<int> cut;
  const auto extend = [&](auto&& self, int left) -> void {
    const int behind = stages - static_cast<int>(cut.size()) - 1;
    for (int size = behind == 0 ? left : 1; size <= left - behind; ++size) {
      cut.push_back(size);
      if (behind == 0)
        visit(cut);
      else
        self(self, left - size);
      cut.pop_back();
    }
  };
  extend(extend, blocks);
}

// The specs with this cut and with everything that its stages may recompute.
std::vector<ParallelSpec> with_every_mix(ParallelSpec spec, const Engine& engine, bool mixes) {
  std::vector<ParallelSpec> all{spec};
  if (!mixes || spec.recompute != Recompute::none) return all;
  spec.recompute = Recompute::per_stage;
  for (std::vector<StageRecompute>& choices : recompute_choices(spec, engine)) {
    spec.stage_recompute = std::move(choices);
    all.push_back(spec);
  }
  return all;
}

// A model with so many layers that it has more cuts than are all candidates.
// `slides`: every other layer sees half of the sequence.
OpGraph deep_graph(std::mt19937& random, std::int64_t sequence, bool slides = false) {
  const auto pick = [&](std::initializer_list<int> from) { return from.begin()[random() % from.size()]; };
  ModelSpec spec =
      load_model(source + "/tests/data/models/" + (random() % 2 ? "tiny-gpt2" : "tiny-llama") + ".yaml", "").spec;
  spec.layers = pick({8, 9, 11, 13});
  spec.kv_heads = spec.kv_heads == spec.heads ? 4 : 2;
  spec.heads = 4;
  spec.head_dim = pick({8, 64});
  spec.hidden = pick({32, 512, 2048});
  spec.feature = spec.hidden * pick({1, 4});
  spec.vocabulary = pick({61, 5000, 50257});
  spec.tied_embeddings = random() % 2;
  if (slides) {
    spec.sliding_window = sequence / 2;
    spec.attention_pattern = {LayerSpan::sliding, LayerSpan::full};
  }
  return build_graph(spec, sequence);
}

// An engine that writes attention's scores and recomputes attention's core or whole layers: alike
// on all stages or not.
Engine writing_scores(bool mixes) {
  return {.name = "writes scores",
          .fused_attention = false,
          .has_norms_recompute = false,
          .has_activation_recompute = false,
          .has_mlp_recompute = false,
          .has_recompute_per_stage = mixes};
}

struct Setting {
  OpGraph graph;
  Cluster cluster;
  TrainingSpec training;
  LayoutRequest request;
  int devices = 0;
};

Setting random_setting(std::mt19937& random, bool heterogeneous) {
  const auto upto = [&](int most) { return static_cast<int>(random() % static_cast<unsigned>(most)); };
  Setting setting;
  const bool gpu = upto(4) != 0 || heterogeneous;
  const std::int64_t sequence = 16 << upto(2);
  setting.graph = deep_graph(random, sequence);
  const std::int64_t pp = 3 + upto(2), dp = 1 + upto(2);
  do setting.cluster = random_cluster(random, gpu, heterogeneous);
  while (setting.cluster.devices() < dp * pp);
  for (NodeGroup& group : setting.cluster.groups) group.device.memory_overhead = Bytes(upto(2) * 1'000'000);
  const std::int64_t micro = 1 << upto(4), size = 1 + upto(2);
  setting.training = training_of(dp * micro * size, gpu ? DataType::bf16 : DataType::fp32);
  setting.training.sequence_length = sequence;
  setting.training.clip_norm = upto(2);
  setting.devices = static_cast<int>(dp * pp);
  setting.request[Choice::dp] = dp;
  setting.request[Choice::tp] = std::int64_t{1};
  setting.request[Choice::pp] = pp;
  setting.request[Choice::micro_batch] = size;
  setting.request[Choice::schedule] = upto(3) ? ScheduleKind::one_f_one_b : ScheduleKind::gpipe;
  setting.request[Choice::zero_stage] = std::int64_t{dp > 1 ? upto(4) : 0};
  setting.request[Choice::mesh_order] = AxisOrder{};
  // Four stages may recompute in 256 ways: few settings try all of them with every cut.
  if (upto(3) == 0 || (pp == 4 && upto(8) != 0)) {
    const std::span<const Recompute> recomputes = searched_recomputes(setting.training.engine);
    setting.request[Choice::recompute] = recomputes[random() % recomputes.size()];
  }
  return setting;
}

// What is given to recompute becomes what the engine has.
void run_by(const Engine& engine, Setting& setting) {
  setting.training.engine = engine;
  setting.graph = as_run_by(engine, std::move(setting.graph));
  if (setting.request[Choice::recompute]) setting.request[Choice::recompute] = Recompute::core_attn;
}

}  // namespace

TEST_CASE("beyond 32 cuts a plan is found wherever one fits, and none is better than the plan by more than its gap") {
  std::mt19937 random = testing::random_from(20261122);
  int infeasible = 0, exact = 0, open = 0, stated = 0;
  double widest = 0.0;
  for (int trial = 0; trial < 32; ++trial) {
    Setting setting = random_setting(random, trial % 5 == 4);
    if (trial % 4 == 3) run_by(writing_scores(trial % 8 == 3), setting);
    testing::train_random_parts(static_cast<unsigned>(trial), setting.training, setting.graph);
    if (trial % 3 == 1) setting.request[Choice::input_slots] = InputSlots::one_more;
    const OpGraph& graph = setting.graph;
    const Cluster& cluster = setting.cluster;
    const TrainingSpec& training = setting.training;
    const LayoutRequest& request = setting.request;
    const bool mixes = !request[Choice::recompute] && training.engine.has_recompute_per_stage;

    // Everything there is; memory is that of the simulation, to the byte.
    struct Tried {
      ParallelSpec spec;
      Bound bound;
      std::optional<StepResult> result = {};
      std::optional<StepResult> with_input_slot = {};  // with one more buffer for arriving activations
    };
    std::vector<Tried> all;
    CandidateMaker maker(graph, cluster, training);
    const std::vector<ParallelSpec> specs = enumerate_specs(graph, training, setting.devices, request);
    for (const ParallelSpec& spec : specs)
      for_each_cut(static_cast<int>(graph.blocks.size()), spec.stages(), [&](const std::vector<int>& cut) {
        ParallelSpec one = spec;
        one.stage_blocks = cut;
        for (ParallelSpec& mixed : with_every_mix(one, training.engine, mixes)) {
          const ScheduleForms schedule = forms_of(row_of(mixed.schedule));
          const Bound bound = maker.estimator().bound(mixed, maker.placements_of(mixed), schedule);
          all.push_back({std::move(mixed), bound});
        }
      });
    REQUIRE(all.size() > static_cast<std::size_t>(most_cuts));
    // Memory that all, some, few or none of them need.
    std::vector<Bytes> peaks;
    for (const Tried& one : all) peaks.push_back(one.bound.memory.peak());
    std::ranges::sort(peaks);
    const std::array limits = {peaks.back(), peaks[peaks.size() / 4], peaks[peaks.size() / 20], peaks.front(),
                               peaks.front() - Bytes(1)};
    Cluster limited = cluster;
    for (NodeGroup& group : limited.groups) group.device.memory_capacity = limits[random() % limits.size()];
    if (limited.groups.size() > 1) limited.groups.back().device.memory_capacity = limits[random() % 4];
    NetworkCache networks(limited);
    CandidateMaker in_limit(graph, limited, training);

    for (const Objective objective : {Objective::time, Objective::cost, Objective::memory}) {
      INFO("trial " << trial << ", " << name(objective) << ", " << describe(specs.front()) << ", "
                    << graph.blocks.size() << " blocks, batch " << training.global_batch);
      const auto score_of = [&](const ParallelSpec& spec, const StepResult& result) {
        return score(objective, limited, spec, result.time.total(), result.memory);
      };
      Score best{std::numeric_limits<double>::infinity(), 0.0};
      Bytes least(std::numeric_limits<std::int64_t>::max());
      for (Tried& one : all) {
        const ScheduleForms schedule = forms_of(row_of(one.spec.schedule));
        const Bound bound = in_limit.estimator().bound(one.spec, in_limit.placements_of(one.spec), schedule);
        least = std::min(least, bound.memory.peak());
        if (bound.spare.count < 0) continue;
        if (!one.result)
          one.result = simulate_spec(graph, networks, training, one.spec, in_limit.placements_of(one.spec),
                                     schedule_of(one.spec, training), nullptr);
        if (!one.with_input_slot && one.spec.pp() > 1 && one.spec.schedule == ScheduleKind::one_f_one_b) {
          ParallelSpec with = one.spec;
          with.input_slots = InputSlots::one_more;
          if (in_limit.estimator().bound(with, in_limit.placements_of(with), schedule).spare.count >= 0)
            one.with_input_slot = simulate_spec(graph, networks, training, with, in_limit.placements_of(with),
                                                schedule_of(with, training), nullptr);
        }
        best = std::min(best, score_of(one.spec, *one.result));
        if (one.with_input_slot) best = std::min(best, score_of(one.spec, *one.with_input_slot));
      }
      SearchOptions options;
      options.top = 1;
      options.objective = objective;
      options.fewer_devices = false;
      options.threads = 1;
      const SearchResult found = search(graph, limited, training, request, options);
      const bool fits = best.first < std::numeric_limits<double>::infinity();
      REQUIRE(found.plans.empty() == !fits);
      if (limited.groups.size() == 1 && (!fits || objective == Objective::memory)) {
        REQUIRE(found.smallest);
        CHECK(found.smallest->result.memory.peak() == least);
      }
      if (!fits) {
        ++infeasible;
        continue;
      }
      const RankedPlan& plan = found.plans.front();
      const Score own = score_of(plan.spec, plan.result);
      CHECK(own.first >= best.first * (1 - 1e-12));
      // A plainer one may stand for that which is as good but for a tie.
      CHECK(own.first <= best.first * (1.0 + found.counts.cut_gap.value_or(0.0)) * (1 + tied_plans));
      if (!found.counts.certified) CHECK(found.counts.gap);
      // The fullest of devices of unequal memory has a bound only.
      const bool is_searched = limited.groups.size() == 1 || objective != Objective::memory;
      (found.counts.cut_gap ? open : exact) += is_searched;
      for (const std::int64_t most : {1, 3}) {
        options.most_simulated = most;
        const SearchResult limited_search = search(graph, limited, training, request, options);
        REQUIRE(!limited_search.plans.empty());
        const SearchCounts& counts = limited_search.counts;
        const RankedPlan& first = limited_search.plans.front();
        const double gap = std::max(counts.gap.value_or(0.0), counts.cut_gap.value_or(0.0));
        CHECK(score_of(first.spec, first.result).first <= best.first * (1.0 + gap) * (1 + 1e-12));
        stated += counts.cut_gap.has_value();
      }
      widest = std::max(widest, found.counts.cut_gap.value_or(0.0));
    }
  }
  MESSAGE(exact << " exact, " << open << " with a gap of up to " << 100.0 * widest << " %, " << infeasible
                << " infeasible, " << stated << " with a gap where few were simulated");
  CHECK(exact > 60);
  CHECK(open == 0);  // so few cuts are searched to the end
  CHECK(infeasible > 0);
  CHECK(stated > 0);
}

TEST_CASE("an interleaved pipeline that is asked for has one cut, and no other is better by more than its gap") {
  std::mt19937 random = testing::random_from(20261123);
  int mixed = 0, fitted = 0;
  double widest = 0.0;
  for (int trial = 0; trial < 24; ++trial) {
    Setting setting = random_setting(random, false);
    if (trial % 3 == 0) setting.graph = deep_graph(random, setting.training.sequence_length, true);
    setting.request[Choice::schedule] = ScheduleKind::interleaved;
    setting.request[Choice::pp] = std::int64_t{2};
    setting.request[Choice::virtual_stages] = std::int64_t{2};
    setting.devices = static_cast<int>(2 * std::get<std::int64_t>(*setting.request[Choice::dp]));
    const OpGraph& graph = setting.graph;
    const TrainingSpec& training = setting.training;
    const bool mixes = !setting.request[Choice::recompute] && training.engine.has_recompute_per_stage;
    const std::vector<ParallelSpec> specs = enumerate_specs(graph, training, setting.devices, setting.request);
    if (specs.empty()) continue;
    struct Tried {
      ParallelSpec spec;
      StepResult result;
    };
    std::vector<Tried> all;
    NetworkCache networks(setting.cluster);
    for (const ParallelSpec& spec : specs)
      for_each_cut(static_cast<int>(graph.blocks.size()), spec.stages(), [&](const std::vector<int>& cut) {
        ParallelSpec one = spec;
        one.stage_blocks = cut;
        for (ParallelSpec& with_mix : with_every_mix(one, training.engine, mixes)) {
          if (random() % 4 != 0) continue;
          StepResult result = simulate_spec(graph, networks, training, with_mix, place(graph, with_mix),
                                            schedule_of(with_mix, training), nullptr);
          all.push_back({std::move(with_mix), std::move(result)});
        }
      });
    std::ranges::sort(all, {}, [](const Tried& one) { return one.result.memory.peak(); });
    for (const std::size_t share : {1, 2, 5}) {
      Cluster limited = setting.cluster;
      const Bytes limit = all[(all.size() - 1) / share].result.memory.peak();
      for (NodeGroup& group : limited.groups) group.device.memory_capacity = limit;
      const auto score_of = [&](const ParallelSpec& spec, const StepResult& result) {
        return score(Objective::time, limited, spec, result.time.total(), result.memory);
      };
      double best = std::numeric_limits<double>::infinity();
      for (const Tried& one : all)
        if (one.result.memory.peak() <= limit) best = std::min(best, score_of(one.spec, one.result).first);
      SearchOptions options;
      options.top = 1;
      options.fewer_devices = false;
      const SearchResult found = search(graph, limited, training, setting.request, options);
      INFO("trial " << trial << ", " << describe(specs.front()) << ", " << graph.blocks.size() << " blocks, 1 in "
                    << share << " fit");
      REQUIRE(!found.plans.empty());
      ++fitted;
      const RankedPlan& plan = found.plans.front();
      CHECK(plan.result.memory.peak() <= limit);
      CHECK(score_of(plan.spec, plan.result).first <= best * (1.0 + found.counts.cut_gap.value_or(0.0)) * (1 + 1e-12));
      widest = std::max(widest, found.counts.cut_gap.value_or(0.0));
      if (plan.spec.recompute != Recompute::per_stage) continue;
      ++mixed;
      CHECK(plan.spec.stage_recompute[0] == plan.spec.stage_recompute[2]);
      CHECK(plan.spec.stage_recompute[1] == plan.spec.stage_recompute[3]);
    }
  }
  MESSAGE(fitted << " found, " << mixed << " with ranks that recompute differently, gaps up to " << 100.0 * widest
                 << " %");
  CHECK(fitted > 20);
  CHECK(mixed > 0);
}

// Whatever is the least memory that any cut needs with any recompute of its ranks.
TEST_CASE("a pipeline that has few cuts is found wherever any of its cuts fits") {
  std::mt19937 random = testing::random_from(20261124);
  int beyond_few = 0, beyond_fastest = 0;
  for (int trial = 0; trial < 24; ++trial) {
    Setting setting = random_setting(random, false);
    const bool interleaves = trial % 3 != 0;
    const std::int64_t pp = interleaves ? 2 + trial % 2 : 4, chunks = interleaves ? 2 : 1;
    setting.request[Choice::schedule] = !interleaves     ? ScheduleKind::zero_bubble_h1
                                        : trial % 3 == 2 ? ScheduleKind::zero_bubble_v
                                                         : ScheduleKind::interleaved;
    setting.request[Choice::pp] = pp;
    if (interleaves) setting.request[Choice::virtual_stages] = chunks;
    if (pp * chunks > 4) setting.request[Choice::recompute] = searched_recomputes(setting.training.engine)[trial % 3];
    const std::int64_t dp = std::get<std::int64_t>(*setting.request[Choice::dp]);
    setting.devices = static_cast<int>(pp * dp);
    setting.request[Choice::zero_stage] = std::int64_t{dp > 1 && trial % 2};
    setting.training.global_batch = 12 * dp;
    if (setting.cluster.devices() < setting.devices) continue;
    const OpGraph& graph = setting.graph;
    const TrainingSpec& training = setting.training;
    const bool mixes = !setting.request[Choice::recompute] && training.engine.has_recompute_per_stage;
    CandidateMaker maker(graph, setting.cluster, training);
    const auto peak = [&](const ParallelSpec& spec) {
      return maker.estimator().bound(spec, maker.placements_of(spec), forms_of(row_of(spec.schedule))).memory.peak();
    };
    std::optional<Bytes> least, of_fastest;
    int cuts = 0;
    for (const ParallelSpec& spec : enumerate_specs(graph, training, setting.devices, setting.request)) {
      const int blocks = static_cast<int>(graph.blocks.size());
      std::vector<int> fastest = maker.cut_of(spec);
      cuts = 0;
      for_each_cut(blocks, spec.stages(), [&](const std::vector<int>& cut) {
        ++cuts;
        ParallelSpec one = spec;
        one.stage_blocks = cut;
        for (const ParallelSpec& with_mix : with_every_mix(one, training.engine, mixes)) {
          const Bytes takes = peak(with_mix);
          least = std::min(least.value_or(takes), takes);
          if (cut == fastest) of_fastest = std::min(of_fastest.value_or(takes), takes);
        }
      });
    }
    if (!least) continue;
    INFO("trial " << trial << ", " << graph.blocks.size() << " blocks, pp " << pp << ", " << cuts << " cuts");
    SearchOptions options;
    options.top = 1;
    options.fewer_devices = false;
    for (const Bytes limit : {*least, *least - Bytes(1)}) {
      Cluster limited = setting.cluster;
      for (NodeGroup& group : limited.groups) group.device.memory_capacity = limit;
      const SearchResult found = search(graph, limited, training, setting.request, options);
      CHECK(found.plans.empty() == (limit < *least));
      // With another buffer for arriving activations it may take less still.
      for (const RankedPlan& plan : found.plans) CHECK(plan.result.memory.peak() <= *least);
    }
    beyond_few += cuts > most_cuts;
    beyond_fastest += cuts > most_cuts && *least < *of_fastest;
  }
  MESSAGE(beyond_few << " with more cuts than are all candidates; in " << beyond_fastest
                     << " the fastest takes more than another");
  CHECK(beyond_few > 10);
  CHECK(beyond_fastest > 3);
}

TEST_CASE("no cut of a layout is below the bounds of its cuts") {
  std::mt19937 random = testing::random_from(7);
  for (int trial = 0; trial < 40; ++trial) {
    Setting setting = random_setting(random, trial % 3 == 2);
    if (trial % 4 == 3) run_by(writing_scores(trial % 8 == 3), setting);
    testing::train_random_parts(static_cast<unsigned>(trial), setting.training, setting.graph);
    const OpGraph& graph = setting.graph;
    const Cluster& cluster = setting.cluster;
    const TrainingSpec& training = setting.training;
    const LayoutRequest& request = setting.request;
    const bool mixes = !request[Choice::recompute] && training.engine.has_recompute_per_stage;
    CandidateMaker maker(graph, cluster, training);
    for (const ParallelSpec& spec : enumerate_specs(graph, training, setting.devices, request)) {
      if (mixes && spec.recompute != Recompute::none) continue;
      INFO("trial " << trial << ", " << describe(spec) << ", " << graph.blocks.size() << " blocks");
      std::vector<Candidate> candidates;
      const std::optional<OfAnyCut> open = maker.add(spec, mixes, candidates);
      REQUIRE(open);
      const ScheduleForms schedule = forms_of(row_of(spec.schedule));
      std::vector<Seconds> times;
      for_each_cut(static_cast<int>(graph.blocks.size()), spec.stages(), [&](const std::vector<int>& cut) {
        ParallelSpec one = spec;
        one.stage_blocks = cut;
        for (const ParallelSpec& mixed : with_every_mix(one, training.engine, mixes)) {
          const Bound bound = maker.estimator().bound(mixed, maker.placements_of(mixed), schedule);
          CHECK(bound.memory.peak() >= maker.least_memory(spec, open->room_in_all));
          CHECK((bound.room_in_all.count >= 0 || bound.spare.count < 0));
          if (bound.spare.count < 0) continue;
          CHECK(bound.lower_bound >= open->time);
          times.push_back(bound.lower_bound);
        }
      });
      if (times.empty()) continue;
      std::ranges::sort(times);
      // All below a limit where they are few, and a bound of all where they are many.
      const Seconds limit = times[times.size() / 10] * (1 + 1e-9);
      const CutsBelow few = maker.cuts_below(spec, mixes, limit, 100'000);
      CHECK(few.rest.value == std::numeric_limits<double>::infinity());
      REQUIRE(!few.candidates.empty());
      CHECK(few.candidates.front().bound.lower_bound <= times.front() * (1 + 1e-12));
      const CutsBelow none = maker.cuts_below(spec, mixes, limit, 0);
      CHECK(none.rest <= times.front());
    }
  }
}

TEST_CASE("cuts whose stages recompute differently are tried where the fastest cut that fits recomputes everywhere") {
  ModelSpec model = load_model(source + "/tests/data/models/tiny-gpt2.yaml", "").spec;
  model.layers = 12;
  const OpGraph graph = build_graph(model, 32);
  Cluster cluster = cluster_of("dgx-a100", 3);
  cluster.groups.front().device.memory_overhead = Bytes(0);
  const TrainingSpec training = training_of(16, DataType::bf16);
  LayoutRequest request = {{Choice::dp, std::int64_t{1}},
                           {Choice::tp, std::int64_t{1}},
                           {Choice::pp, std::int64_t{3}},
                           {Choice::micro_batch, std::int64_t{16}},
                           {Choice::schedule, ScheduleKind::gpipe}};
  ParallelSpec spec;
  spec.mesh.degree = {.pp = 3};
  spec.micro_batch = 16;
  spec.schedule = ScheduleKind::gpipe;
  CandidateMaker maker(graph, cluster, training);
  NetworkCache networks(cluster);
  struct Tried {
    ParallelSpec spec;
    Bytes peak;
    Seconds time;
  };
  std::vector<Tried> all;
  for_each_cut(static_cast<int>(graph.blocks.size()), 3, [&](const std::vector<int>& cut) {
    spec.stage_blocks = cut;
    for (const Recompute recompute : searched_recomputes(training.engine)) {
      ParallelSpec one = spec;
      one.recompute = recompute;
      for (ParallelSpec& mixed : with_every_mix(one, training.engine, recompute == Recompute::none)) {
        const Placements& placements = maker.placements_of(mixed);
        const StepResult result =
            simulate_spec(graph, networks, training, mixed, placements, schedule_of(mixed, training), nullptr);
        all.push_back({std::move(mixed), result.memory.peak(), result.time.total()});
      }
    }
  });
  const auto best_within = [&](Bytes memory, const std::vector<int>& cut) {
    Seconds best(std::numeric_limits<double>::infinity());
    for (const Tried& one : all)
      if (one.peak <= memory && (cut.empty() || one.spec.stage_blocks == cut)) best = std::min(best, one.time);
    return best;
  };
  std::vector<Bytes> peaks;
  for (const Tried& one : all) peaks.push_back(one.peak);
  std::ranges::sort(peaks);
  SearchOptions options;
  options.top = 1;
  options.fewer_devices = false;
  int mixed = 0;
  for (std::size_t part = 1; part <= 24; ++part) {
    const Bytes memory = peaks[peaks.size() * part / 32];
    cluster.groups.front().device.memory_capacity = memory;
    INFO(memory.count << " B");
    request[Choice::stage_blocks].reset();
    const SearchResult found = search(graph, cluster, training, request, options);
    REQUIRE(!found.plans.empty());
    CHECK_FALSE(found.counts.cut_gap);
    const RankedPlan& plan = found.plans.front();
    CHECK(plan.result.time.total() <= best_within(memory, {}) * (1 + 1e-9));
    mixed += plan.spec.recompute == Recompute::per_stage;
    // With a given cut, too.
    request[Choice::stage_blocks] = std::vector<int>{5, 4, 5};
    const SearchResult given = search(graph, cluster, training, request, options);
    const Seconds best = best_within(memory, {5, 4, 5});
    REQUIRE(given.plans.empty() == (best.value == std::numeric_limits<double>::infinity()));
    if (!given.plans.empty()) CHECK(given.plans.front().result.time.total() <= best * (1 + 1e-9));
  }
  CHECK(mixed > 5);
}

TEST_CASE("a cut that fits is found where the fastest needs more memory than all stages together have") {
  ModelSpec model = load_model(source + "/tests/data/models/tiny-gpt2.yaml", "").spec;
  model.layers = 13;
  int beyond = 0;
  for (const int vocabulary : {61, 600, 5000})
    for (const std::int64_t size : {8, 16})
      for (const Recompute recompute : {Recompute::none, Recompute::full}) {
        const ScheduleKind schedule = ScheduleKind::one_f_one_b;
        model.vocabulary = vocabulary;
        const OpGraph graph = build_graph(model, 32);
        SuggestRequest request;
        request.graph = &graph;
        request.model_name = "tiny-gpt2";
        request.cluster = cluster_of("dgx-a100", 3);
        request.cluster.groups.front().device.memory_overhead = Bytes(0);
        request.training = training_of(4 * size, DataType::bf16);
        request.training.sequence_length = 32;
        request.layout = {{Choice::dp, 1},
                          {Choice::tp, 1},
                          {Choice::pp, 3},
                          {Choice::micro_batch, size},
                          {Choice::schedule, schedule},
                          {Choice::recompute, recompute}};
        ParallelSpec spec;
        spec.mesh.degree = {.pp = 3};
        spec.micro_batch = size;
        spec.schedule = schedule;
        spec.recompute = recompute;
        CandidateMaker maker(graph, request.cluster, request.training);
        const ScheduleForms forms = forms_of(row_of(schedule));
        const auto sum_and_peak = [&](const std::vector<int>& cut) {
          Bytes sum, peak;
          int first = 0;
          for (int s = 0; s < 3; ++s) {
            const Bytes of_stage = maker.estimator().peak(spec, maker.placements_of(spec), forms, s,
                                                          {first, first + cut[s]}, recompute);
            first += cut[s];
            sum += of_stage;
            peak = std::max(peak, of_stage);
          }
          return std::pair(sum, peak);
        };
        Bytes least(std::numeric_limits<std::int64_t>::max());
        for_each_cut(static_cast<int>(graph.blocks.size()), 3,
                     [&](const std::vector<int>& cut) { least = std::min(least, sum_and_peak(cut).second); });
        const std::vector<int> fastest = maker.cut_of(spec);
        beyond += sum_and_peak(fastest).first > 3 * least;
        INFO(vocabulary << " words, micro-batches of " << size << ", recompute " << name(recompute));
        request.cluster.groups.front().device.memory_capacity = least;
        const SuggestResult found = suggest(request);
        REQUIRE(found.plan);
        CHECK(found.plan->prediction.memory.peak() == least);
        // With a byte less nothing fits, and that byte is asked for.
        request.cluster.groups.front().device.memory_capacity = least - Bytes(1);
        const SuggestResult none = suggest(request);
        CHECK(!none.plan);
        REQUIRE(!none.remedies.empty());
        CHECK(none.remedies.front().of == "memory");
        CHECK(none.remedies.front().value == RemedyValue(least.count));
      }
  CHECK(beyond > 0);
}

}  // namespace parplan
