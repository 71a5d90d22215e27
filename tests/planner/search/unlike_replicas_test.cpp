// Replicas with unlike numbers of micro-batches on unlike devices: their bound, their simulation,
// and the numbers that suit the devices.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "planner/cluster/node_layout.h"
#include "planner/parallel/techniques.h"
#include "planner/plan/parallel_spec_text.h"
#include "planner/plan/unlike_replicas.h"
#include "planner/program/job.h"
#include "planner/program/lower.h"
#include "planner/schedule/schedules.h"
#include "planner/search/candidates.h"
#include "planner/search/made_candidates.h"
#include "planner/search/layout_floors.h"
#include "planner/search/replica_shares.h"
#include "planner/search/search.h"
#include "planner/search/simulate_spec.h"
#include "planner/search/space.h"
#include "planner/simulator/simulate.h"
#include "tests/planner/search/random_settings.h"

namespace parplan {

using testing::describe;
using testing::graph_of;
using testing::random_cluster;
using testing::random_cut;
using testing::random_graph;
using testing::source;
using testing::training_of;

namespace {

// Every way to share out so many micro-batches, at least one to each replica.
void each_share(int replicas, int micro_batches, const std::function<void(const std::vector<int>&)>& visit,
                std::vector<int> before = {}) {
  if (static_cast<int>(before.size()) + 1 == replicas) {
    before.push_back(micro_batches);
    return visit(before);
  }
  const int behind = replicas - static_cast<int>(before.size()) - 1;
  for (int share = 1; share + behind <= micro_batches; ++share) {
    std::vector<int> with = before;
    with.push_back(share);
    each_share(replicas, micro_batches - share, visit, with);
  }
}

// A node of so many cores and one of cores that take `slower` times as long in everything, over
// links of this bandwidth.
Cluster two_kinds(int devices, double slower, double bandwidth) {
  Cluster cluster = testing::cluster_of(source + "/tests/data/clusters/cpu-two-kinds.yaml");
  DeviceKind& slow = cluster.groups.back().device;
  const DeviceKind& fast = cluster.groups.front().device;
  slow.rates = fast.rates;
  slow.kernel_launch = fast.kernel_launch * slower;
  for (DeviceRates& rates : slow.rates) {
    for (FlopsPerSecond* rate : {&rates.matrix_fp32, &rates.matrix_half, &rates.vector}) *rate *= 1.0 / slower;
    rates.memory *= 1.0 / slower;
  }
  for (NodeGroup& group : cluster.groups) {
    group.node = first_devices(group.node, devices);
    for (Link& link : group.node.links) link.bandwidth = BytesPerSecond(bandwidth);
  }
  return cluster;
}

}  // namespace

TEST_CASE("shares are as fast as the best of all") {
  std::mt19937 random = testing::random_from(20261127);
  for (int trial = 0; trial < 300; ++trial) {
    const int replicas = 1 + static_cast<int>(random() % 4), micro_batches = replicas + static_cast<int>(random() % 7);
    std::vector<int> kinds;
    for (int replica = 0; replica < replicas; ++replica) kinds.push_back(static_cast<int>(random() % (replica + 1)));
    for (int& kind : kinds) kind = kinds[static_cast<std::size_t>(kind)];
    std::vector<std::vector<Seconds>> times(kinds.size());  // that do not fall, and may stand still
    for (std::vector<Seconds>& of_kind : times) {
      of_kind.emplace_back(static_cast<double>(random() % 3));
      while (static_cast<int>(of_kind.size()) < micro_batches + 2)
        of_kind.push_back(of_kind.back() + Seconds(static_cast<double>(random() % 4)));
    }
    const auto time = [&](int kind, int count) {
      return times[static_cast<std::size_t>(kind)][static_cast<std::size_t>(count)];
    };
    const auto slowest = [&](const std::vector<int>& shares) {
      Seconds most;
      for (std::size_t replica = 0; replica < shares.size(); ++replica)
        most = std::max(most, time(kinds[replica], shares[replica]));
      return most;
    };
    const std::vector<int> shares = balanced_shares(kinds, micro_batches, time);
    CHECK(std::accumulate(shares.begin(), shares.end(), 0) == micro_batches);
    CHECK(std::ranges::min(shares) >= 1);
    Seconds best(std::numeric_limits<double>::infinity());
    each_share(replicas, micro_batches, [&](const std::vector<int>& one) { best = std::min(best, slowest(one)); });
    CHECK(slowest(shares) == best);
  }
}

// One after another to the replica that then takes least, ties to the first.
std::vector<int> one_by_one(const std::vector<int>& kinds, int micro_batches,
                            const std::function<Seconds(int, int)>& time) {
  std::vector<int> shares(kinds.size(), 1);
  for (int left = micro_batches - static_cast<int>(kinds.size()); left > 0; --left) {
    std::size_t next = 0;
    for (std::size_t replica = 1; replica < shares.size(); ++replica)
      if (time(kinds[replica], shares[replica] + 1) < time(kinds[next], shares[next] + 1)) next = replica;
    ++shares[next];
  }
  return shares;
}

TEST_CASE("shares are those that are given out one after another, and few times are asked for") {
  std::mt19937 random = testing::random_from(20261130);
  const double never = std::numeric_limits<double>::infinity();
  int standing = 0, limited = 0, none = 0;
  for (int trial = 0; trial < 400; ++trial) {
    const int replicas = 1 + static_cast<int>(random() % 12);
    const int micro_batches = replicas + static_cast<int>(random() % 400);
    std::vector<int> kinds;
    for (int replica = 0; replica < replicas; ++replica) kinds.push_back(static_cast<int>(random() % (replica + 1)));
    for (int& kind : kinds) kind = std::min(kinds[static_cast<std::size_t>(kind)], 2);
    // Times that do not fall: along a line but for a first part and steps, some without end.
    struct Kind {
      double begin, slope;
      int step, most;
    };
    std::vector<Kind> of;
    for (int kind = 0; kind < 3; ++kind)
      of.push_back({.begin = static_cast<double>(random() % 50),
                    .slope = static_cast<double>(random() % 5),
                    .step = 1 + static_cast<int>(random() % 4),
                    .most = random() % 4 == 0 ? static_cast<int>(random() % 30) : micro_batches + 1});
    const auto time = [&](int kind, int count) {
      const Kind& one = of[static_cast<std::size_t>(kind)];
      if (count > one.most) return Seconds(never);
      return Seconds(one.begin + std::max(0.0, one.slope * (count / one.step * one.step - 3)));
    };
    CAPTURE(trial);
    CHECK(balanced_shares(kinds, micro_batches, time) == one_by_one(kinds, micro_batches, time));
    for (const int kind : kinds) {
      standing += of[static_cast<std::size_t>(kind)].slope == 0.0;
      limited += of[static_cast<std::size_t>(kind)].most <= micro_batches;
      none += of[static_cast<std::size_t>(kind)].most == 0;
    }
  }
  CHECK(standing > 50);
  CHECK(limited > 50);
  CHECK(none > 5);

  // A pipeline fills first, of three kinds: a dozen times of each are asked for, not hundreds.
  int asked = 0;
  const std::vector<int> kinds{0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8};
  const auto time = [&](int kind, int count) {
    ++asked;
    return Seconds((1.0 + 0.37 * kind) * (count + 7));
  };
  const std::vector<int> shares = balanced_shares(kinds, 6000, time);
  CHECK(asked <= 36);
  CHECK(shares == one_by_one(kinds, 6000, time));
}

TEST_CASE("an estimate of unlike replicas has the memory that lowering plans and bounds below the simulated step") {
  std::mt19937 random = testing::random_from(20261128);
  int several_kinds = 0, pipelines = 0, sharded = 0, hybrid = 0, dealt = 0;
  double gaps = 0.0;
  int count = 0;
  for (int setting = 0; setting < 60; ++setting) {
    OpGraph graph = random_graph(random, 16);
    Cluster cluster = random_cluster(random, true, true);
    for (NodeGroup& group : cluster.groups) group.device.overlaps_communication = setting % 4 != 0;
    TrainingSpec training = training_of(16, DataType::bf16);
    testing::train_random_parts(static_cast<unsigned>(setting), training, graph);
    training.clip_norm = setting % 2;
    // Each replica has matrices of its own. Where communication does not overlap, replicas wait for
    // those of one another, which the first of a kind does not tell of the others.
    if (setting % 5 == 2 && setting % 4 != 0) training.optimizer = Optimizer::muon;
    Estimator estimator(graph, cluster, training);
    std::vector<ParallelSpec> specs = enumerate_specs(graph, training, cluster.devices(), {{Choice::dp_shard, 0}});
    std::erase_if(specs, [](const ParallelSpec& spec) { return spec.dp() == 1; });
    if (specs.empty()) continue;
    for (int trial = 0; trial < 12; ++trial) {
      ParallelSpec spec = specs[random() % specs.size()];
      spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), spec.stages(), random);
      const int unit = spec.schedule == ScheduleKind::interleaved ? shape_of(spec, training).group : 1;
      const int units = spec.dp() * static_cast<int>(micro_batches(spec, training)) / unit;
      spec.replica_micro_batches.assign(static_cast<std::size_t>(spec.dp()), unit);
      for (int left = units - spec.dp(); left > 0; --left)
        spec.replica_micro_batches[random() % spec.replica_micro_batches.size()] += unit;
      if (trial % 3 == 1 && spec.pp() > 1 && spec.virtual_stages == 1) spec.schedule = ScheduleKind::zero_bubble_h1;
      if (trial % 2 == 0) spec.input_slots = InputSlots::one_more;
      if (spec.zero_stage > 0 && spec.dp() % 2 == 0 && spec.dp() > 2 && spec.cp() == 1 && trial % 4 == 0) {
        spec.mesh.dp_shard = 2;
        for (std::size_t i = 0; i + 1 < spec.replica_micro_batches.size(); i += 2) {
          const int both = spec.replica_micro_batches[i] + spec.replica_micro_batches[i + 1];
          if (both % (2 * unit) == 0) spec.replica_micro_batches[i] = spec.replica_micro_batches[i + 1] = both / 2;
        }
      }
      if (illegal(graph, training, spec)) continue;
      INFO("setting " << setting << " on " << cluster.name << ": " << describe(spec) << ", " << layout_text(spec));
      const Placements placements = place(graph, spec);
      const ScheduleForms forms = forms_of(row_of(spec.schedule));
      const Estimate estimate = estimator.estimate(spec, placements, forms);
      const Schedule schedule = schedule_of(spec, training);
      const StepResult simulated =
          simulate_spec(graph, estimator.networks(), training, spec, placements, schedule, nullptr);
      CHECK(estimate.memory == simulated.memory);
      CHECK(estimate.memory_stage == simulated.memory_stage);
      CHECK(estimate.memory_replica == simulated.memory_replica);
      CHECK(estimate.lower_bound <= simulated.time.total() * (1 + 1e-12));
      CHECK(estimate.time.total().value == doctest::Approx(estimate.lower_bound.value).epsilon(1e-9));
      // The step in full of every replica, where the first of each kind stands for the others:
      // ZeRO's shards begin and end in other parameters on each, and so have another piece or two.
      std::vector<int> all(static_cast<std::size_t>(spec.dp()));
      std::iota(all.begin(), all.end(), 0);
      std::vector<CostModel> models;
      for (const int replica : all)
        for (int rank = 0; rank < spec.pp(); ++rank)
          models.push_back(cost_model(estimator.networks(), spec, rank, replica));
      const Job job = job_of(graph, cluster, training, spec, placements, schedule);
      const double apart = spec.zero_stage == 0 ? 1e-9 : 2e-3;
      const StepResult in_full = simulate(lower_replicas(job, all), models);
      CHECK(in_full.time.total().value == doctest::Approx(simulated.time.total().value).epsilon(apart));
      CHECK(in_full.memory.peak() == simulated.memory.peak());
      several_kinds += unlike_replicas(cluster, spec).size() > 2;
      pipelines += spec.pp() > 1;
      sharded += spec.zero_stage > 0;
      hybrid += spec.mesh.dp_shard > 0;
      dealt += training.optimizer == Optimizer::muon && spec.zero_stage == 1;
      gaps += simulated.time.total() / estimate.lower_bound - 1.0;
      ++count;
    }
  }
  MESSAGE(count << " simulated over bound: " << 100.0 * gaps / count << "% above on average");
  CHECK(count > 100);
  CHECK(several_kinds > 30);
  CHECK(pipelines > 30);
  CHECK(sharded > 30);
  CHECK(hybrid > 5);
  CHECK(dealt > 5);
}

TEST_CASE("replicas with micro-batches in proportion to their devices compute equally long") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  TrainingSpec training = training_of(16, DataType::fp32);
  const Cluster cluster = two_kinds(2, 3.0, 1e30);
  NetworkCache networks(cluster);
  ParallelSpec spec;
  spec.mesh.degree = {.dp = 4};
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  const auto step_of = [&](const ParallelSpec& of, StepDetails* details) {
    return simulate_spec(graph, cluster, training, of, place(graph, of), schedule_of(of, training),
                         cost_models(networks, of), nullptr, details)
        .time.total();
  };
  const Seconds alike = step_of(spec, nullptr);
  spec.replica_micro_batches = {6, 6, 2, 2};
  StepDetails details;
  const Seconds unlike = step_of(spec, &details);
  REQUIRE(details.ranks.size() == 2);
  CHECK(details.ranks[0].replica == 0);
  CHECK(details.ranks[1].replica == 2);
  CHECK(details.ranks[0].time.compute.value == doctest::Approx(details.ranks[1].time.compute.value));
  // Four micro-batches on devices that take three times as long, or two; the update, once a step,
  // takes them three times as long in both.
  CHECK(alike / unlike > 1.3);
  CHECK(alike / unlike < 2.0);
}

TEST_CASE("the numbers that a layout is given have the least bound of all") {
  const OpGraph graph = graph_of("tiny-gpt2", 16);
  std::mt19937 random = testing::random_from(20261129);
  int unlike = 0;
  for (int setting = 0; setting < 12; ++setting) {
    const Cluster cluster =
        two_kinds(2, 1.0 + static_cast<double>(random() % 50) / 10.0, setting % 2 == 0 ? 1e30 : 1e8);
    const TrainingSpec training = training_of(12, DataType::fp32);
    CandidateMaker maker(graph, cluster, training);
    for (const int pp : {1, 2}) {
      ParallelSpec spec;
      spec.mesh.degree = {.pp = pp, .dp = 4 / pp};
      spec.mesh.order = {Axis::dp, Axis::pp, Axis::tp};
      spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), pp, random);
      spec.zero_stage = setting % 3 == 0;
      const Placements placements = place(graph, spec);
      const ScheduleForms forms = forms_of(row_of(spec.schedule));
      Seconds best = maker.estimator().bound(spec, placements, forms).lower_bound;
      each_share(spec.dp(), 12, [&](const std::vector<int>& shares) {
        ParallelSpec one = spec;
        one.replica_micro_batches = shares;
        if (!illegal(graph, training, one))
          best = std::min(best, maker.estimator().bound(one, placements, forms).lower_bound);
      });
      const ParallelSpec found = maker.balanced(spec).value_or(spec);
      INFO(layout_text(found));
      CHECK(maker.estimator().bound(found, placements, forms).lower_bound == best);
      unlike += !found.replica_micro_batches.empty();
    }
  }
  CHECK(unlike > 12);
}

TEST_CASE("no floor of layouts whose replicas may be unlike is above one of them") {
  std::mt19937 random = testing::random_from(20261201);
  int unlike = 0, closer = 0, alike = 0, pipelines = 0;
  for (int setting = 0; setting < 60; ++setting) {
    const OpGraph graph = random_graph(random, 16);
    const double slower = 1.0 + static_cast<double>(random() % 50) / 10.0;
    const Cluster cluster =
        setting % 3 != 0 ? two_kinds(2 << (setting / 3 % 2), slower, 1e9) : random_cluster(random, true, true);
    const TrainingSpec training = training_of(48, setting % 3 != 0 ? DataType::fp32 : DataType::bf16);
    const LayoutRequest request;
    SpaceWidth width = usual_width(graph, training.engine, request);
    width.balances_replicas = true;
    Space space(graph, training, request, width);
    const std::vector<SpacePart> parts = space.parts(cluster.devices(), Devices::at_most);
    NetworkCache networks(cluster, training.engine);
    CandidateMaker maker(graph, cluster, training, Objective::time, nullptr, width);
    LayoutFloors floors(graph, cluster, training, request, width, maker);
    for (int trial = 0; trial < 20; ++trial) {
      const SpacePart& part = parts[random() % parts.size()];
      const std::vector<SpaceGroups> listed = space.groups(part);
      const SpaceGroups& groups = listed[random() % listed.size()];
      const SpaceGroups::Size& size = groups.sizes[random() % groups.sizes.size()];
      SpacePart group{.spec = groups.spec, .layouts = size.layouts};
      group.spec.micro_batch = size.micro_batch;
      const std::vector<PlacedSpec> specs = space.specs(group);
      if (specs.empty()) continue;  // too few micro-batches
      const std::vector<PlacedSpec> orders = space.orders(specs[random() % specs.size()]);
      const ParallelSpec layout = orders[random() % orders.size()].spec;
      ParallelSpec spec = layout;
      spec.stage_blocks = random_cut(static_cast<int>(graph.blocks.size()), spec.stages(), random);
      // The numbers with the least bound, or any.
      ParallelSpec other = maker.balanced(spec).value_or(spec);
      if (trial % 2 == 0 && spec.dp() > 1) {
        ParallelSpec any = spec;
        const int unit = spec.schedule == ScheduleKind::interleaved ? shape_of(spec, training).group : 1;
        any.replica_micro_batches.assign(static_cast<std::size_t>(spec.dp()), unit);
        const int units = spec.dp() * static_cast<int>(micro_batches(spec, training)) / unit;
        for (int left = units - spec.dp(); left > 0; --left)
          any.replica_micro_batches[random() % any.replica_micro_batches.size()] += unit;
        if (kinds_of_replicas(cluster, spec.mesh) != std::vector<int>(static_cast<std::size_t>(spec.dp()), 0) &&
            !illegal(graph, training, any))
          other = any;
      }
      const StepResult simulated =
          simulate_spec(graph, networks, training, other, place(graph, other), schedule_of(other, training), nullptr);
      INFO("setting " << setting << ": " << describe(other));
      const Seconds time = simulated.time.total() * (1 + 1e-12);
      for (const Floor& floor : {floors.of_degrees(part.spec), floors.of_micro_batch_at_peak(group.spec),
                                 floors.of_micro_batch(group.spec)}) {
        CHECK(floor.time <= time);
        CHECK(floor.memory <= simulated.memory.peak());
      }
      const Seconds of_layout = floors.time_of(layout, {&layout.recompute, 1});
      CHECK(of_layout <= time);
      const Bound bound = maker.estimator().bound(other, place(graph, other), forms_of(row_of(other.schedule)));
      if (bound.spare.count >= 0) {
        CHECK(floors.can_hold(layout, {&layout.recompute, 1}));
        CHECK(floors.time_within_memory(layout, {&layout.recompute, 1}) <= time);
      }
      if (other.replica_micro_batches.empty()) {
        ++alike;
        continue;
      }
      ++unlike;
      pipelines += spec.pp() > 1;
      closer += of_layout > 2.0 * floors.of_devices(spec.mesh.size()).time;
    }
  }
  MESSAGE(unlike << " with unlike replicas, of " << closer << " of which the floor is twice that of their devices");
  CHECK(unlike > 100);
  CHECK(alike > 100);
  CHECK(pipelines > 30);
  CHECK(3 * closer > unlike);
}

TEST_CASE("a search for balanced replicas finds what making every layout finds") {
  const OpGraph graph = graph_of("tiny-llama", 64);
  int unlike = 0;
  for (const double slower : {2.0, 4.0})
    for (const int devices : {1, 2}) {
      const Cluster cluster = two_kinds(devices, slower, 1e9);
      TrainingSpec training = training_of(48, DataType::fp32);
      training.sequence_length = 64;
      LayoutRequest request{{Choice::recompute, Recompute::none},
                            {Choice::input_slots, InputSlots::in_flight},
                            {Choice::tp, std::int64_t{1}}};
      if (devices == 2) request[Choice::pp] = std::int64_t{1};
      SearchOptions options;
      options.top = 1;
      options.balances_replicas = true;
      options.most_simulated = 1 << 20;
      const SearchResult found = search(graph, cluster, training, request, options);
      REQUIRE(!found.plans.empty());
      SpaceWidth width = usual_width(graph, training.engine, request);
      width.balances_replicas = true;
      CandidateMaker maker(graph, cluster, training, Objective::time, nullptr, width);
      CandidateMaker* const makers[] = {&maker};
      std::optional<std::pair<Seconds, ParallelSpec>> best;
      for (int n = 1; n <= cluster.devices(); ++n)
        for (const Candidate& one :
             make_candidates(makers, enumerate_specs(graph, training, n, request), false).fitting) {
          const Seconds time = simulate_spec(graph, maker.estimator().networks(), training, one.spec,
                                             maker.placements_of(one.spec), schedule_of(one.spec, training), nullptr)
                                   .time.total();
          if (!best || time < best->first) best = {time, one.spec};
        }
      REQUIRE(best);
      INFO(layout_text(found.plans.front().spec) << " and " << layout_text(best->second));
      // The plainest of those that are as good but for a tie comes first.
      CHECK(found.plans.front().result.time.total() <= best->first * (1 + 2 * tied_plans));
      CHECK(found.plans.front().result.time.total() >= best->first * (1 - 1e-9));
      unlike += !best->second.replica_micro_batches.empty();
    }
  CHECK(unlike >= 2);
}

TEST_CASE("a search for balanced replicas finds no slower plan, and the gap that was said holds for it") {
  const OpGraph graph = graph_of("tiny-llama", 64);
  int faster = 0, said = 0;
  const LayoutRequest replicas{{Choice::tp, std::int64_t{1}}, {Choice::pp, std::int64_t{1}}};
  for (const double slower : {2.0, 4.0})
    for (const LayoutRequest& request : {LayoutRequest(), replicas}) {
      const Cluster cluster = two_kinds(2, slower, 1e9);
      TrainingSpec training = training_of(48, DataType::fp32);
      training.sequence_length = 64;
      SearchOptions options;
      options.threads = 1;
      options.top = 1;
      options.bounds_left_out = options.tries_more_with_best = true;
      const SearchResult alike = search(graph, cluster, training, request, options);
      options.balances_replicas = true;
      const SearchResult balanced = search(graph, cluster, training, request, options);
      REQUIRE(!alike.plans.empty());
      REQUIRE(!balanced.plans.empty());
      CHECK(balanced.counts.certified);
      const double best = alike.plans.front().result.time.total().value,
                   with = balanced.plans.front().result.time.total().value;
      CAPTURE(layout_text(alike.plans.front().spec));
      CAPTURE(layout_text(balanced.plans.front().spec));
      CHECK(with <= best * (1 + 1e-3));
      faster += with < 0.95 * best;
      for (const LeftOut& one : alike.counts.left_out)
        if (one.what == "replicas with unlike numbers of micro-batches") {
          ++said;
          CHECK(with * (1 + 1e-9) >= best / (1.0 + one.gap.value_or(1e9)));
        }
      for (const LeftOut& one : balanced.counts.left_out)
        CHECK(one.what != "replicas with unlike numbers of micro-batches");
    }
  // Among whole replicas, the best of equal ones wait for the slow devices, or leave them out.
  CHECK(faster >= 2);
  CHECK(said == 4);
}

}  // namespace parplan
