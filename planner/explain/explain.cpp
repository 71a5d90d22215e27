#include "planner/explain/explain.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <iterator>

#include <fmt/format.h>

#include "planner/cluster/routes.h"
#include "planner/parallel/pipeline.h"
#include "planner/parallel/techniques.h"
#include "planner/program/lower.h"
#include "planner/program/memory.h"
#include "planner/schedule/schedules.h"
#include "planner/search/simulate_spec.h"
#include "planner/search/candidates.h"
#include "planner/search/search.h"
#include "planner/simulator/simulate.h"

namespace parplan {
namespace {

// Better by a smaller part is a tie: sums of the same parts in another order differ by as much.
constexpr double noise = 1e-9;
// Better by a smaller part is not worth another layout.
constexpr double worth = 5e-4;

constexpr std::array family_table = {
    LayoutFamily{"data parallel, nothing sharded (ZeRO-0)", Degree::several, Degree::one, Degree::one, 0},
    LayoutFamily{"data parallel, ZeRO-1", Degree::several, Degree::one, Degree::one, 1},
    LayoutFamily{"data parallel, ZeRO-2", Degree::several, Degree::one, Degree::one, 2},
    LayoutFamily{"data parallel, ZeRO-3", Degree::several, Degree::one, Degree::one, 3},
    LayoutFamily{"pipeline alone", Degree::one, Degree::one, Degree::several, {}},
    LayoutFamily{"tensor parallel inside a node alone", Degree::one, Degree::inside_node, Degree::one, {}},
    LayoutFamily{"tensor parallel inside nodes x data parallel", Degree::several, Degree::inside_node, Degree::one, {}},
    LayoutFamily{"pipeline x data parallel", Degree::several, Degree::one, Degree::several, {}},
    LayoutFamily{"tensor parallel inside nodes x pipeline", Degree::one, Degree::inside_node, Degree::several, {}},
    LayoutFamily{"tensor parallel inside nodes x pipeline x data parallel",
                 Degree::several,
                 Degree::inside_node,
                 Degree::several,
                 {}},
    LayoutFamily{"tensor parallel across nodes", Degree::any, Degree::across_nodes, Degree::any, {}},
};

bool matches(Degree wanted, int degree, bool is_inside) {
  switch (wanted) {
    case Degree::one: return degree == 1;
    case Degree::several: return degree > 1;
    case Degree::inside_node: return degree > 1 && is_inside;
    case Degree::across_nodes: return degree > 1 && !is_inside;
    case Degree::any: return true;
  }
  return false;
}

// Groups of `tp` neighbours on all of so many devices that they divide.
DeviceMesh neighbours_mesh(int devices, int tp) {
  return {.degree = {.dp = devices / tp, .tp = tp}, .order = {Axis::pp, Axis::dp, Axis::tp}};
}

bool tensor_inside_nodes(const DeviceMesh& mesh, NetworkCache& networks) {
  return networks.group(mesh, Axis::tp).nodes == 1;
}

// Whether so many devices can be spread so at all, whatever the model says. Neighbours are the
// likeliest to lie inside nodes; all devices as one group lie across nodes where any do.
bool is_possible(const LayoutFamily& family, int devices, NetworkCache& networks) {
  for (int tp = 1; tp <= devices; ++tp) {
    if (devices % tp != 0 || !matches(family.tp, tp, tensor_inside_nodes(neighbours_mesh(devices, tp), networks)))
      continue;
    for (int pp = 1; pp <= devices / tp; ++pp)
      if (devices / tp % pp == 0 && matches(family.pp, pp, false) && matches(family.dp, devices / tp / pp, false))
        return true;
  }
  return false;
}

int fewest_per_node(const Cluster& cluster) {
  int fewest = cluster.groups.front().devices_per_node();
  for (const NodeGroup& group : cluster.groups) fewest = std::min(fewest, group.devices_per_node());
  return fewest;
}

StepDetails details_of(const OpGraph& graph, NetworkCache& networks, const Plan& plan) {
  const Job job{.graph = &graph,
                .training = plan.training,
                .spec = plan.spec,
                .placements = plan.placements,
                .schedule = plan.schedule,
                .backend = plan.cluster.backend(),
                .overhead = memory_overhead(plan.cluster)};
  StepDetails details;
  simulate(lower_representatives(job), cost_models(networks, plan.spec.mesh), nullptr, &details);
  return details;
}

// All that a reason is found from.
struct Inquiry {
  const OpGraph& graph;
  const Plan& plan;
  const ReasonsOptions& options;

  void say(const std::string& doing) const {
    if (options.progress) options.progress(doing);
  }
  // In the plan's own schedule, which may be of the user's making, where it is one for `spec`.
  RankedPlan simulated(NetworkCache& networks, const TrainingSpec& training, const ParallelSpec& spec) const {
    const Placements placements = place(graph, spec);
    const std::vector<CostModel> models = cost_models(networks, spec.mesh);
    const bool same_tasks = spec.pp() == plan.spec.pp() && spec.schedule == plan.spec.schedule &&
                            micro_batches(spec, training) == micro_batches(plan.spec, plan.training);
    if (same_tasks && plan.schedule != schedule_of(spec, training))
      return {.spec = spec,
              .result =
                  simulate_spec(graph, networks.cluster(), training, spec, placements, plan.schedule, models, nullptr)};
    return {.spec = spec,
            .result = simulate_soon(graph, networks.cluster(), training, spec, placements, models).result};
  }
  // The whole space, by the plan's objective.
  SearchResult searched(const Cluster& cluster, const TrainingSpec& training, int top) const {
    SearchOptions search_options;
    search_options.top = top;
    search_options.objective = objective();
    search_options.most_simulated = options.most_simulated;
    return search(graph, cluster, training, {}, search_options);
  }
  Objective objective() const { return plan.search.objective; }
  Score score_of(const RankedPlan& of) const {
    return score(objective(), plan.cluster, of.spec, of.result.time.total(), of.result.memory);
  }
};

// One choice made differently ---------------------------------------------------------------------

std::vector<std::pair<std::string, ParallelSpec>> specs_one_choice_away(const OpGraph& graph, const Plan& plan) {
  std::vector<std::pair<std::string, ParallelSpec>> specs;
  const ParallelSpec& own = plan.spec;
  const auto add = [&](std::string change, const auto& alter) {
    ParallelSpec spec = own;
    alter(spec);
    if (spec != own && !illegal(graph, plan.training, spec)) specs.emplace_back(std::move(change), std::move(spec));
  };
  const auto recompute = [&](const char* change, Recompute as) {
    add(change, [&](ParallelSpec& spec) {
      spec.recompute = as;
      spec.stage_recompute.clear();
    });
  };
  recompute("without recompute", Recompute::none);
  recompute("with full recompute", Recompute::full);
  if (own.dp() > 1)
    for (int zero = 0; zero <= 3; ++zero)
      add(fmt::format("ZeRO-{}", zero), [&](ParallelSpec& spec) { spec.zero_stage = zero; });
  if (own.tp() > 1)
    add(own.sequence_parallel ? "without sequence parallelism" : "with sequence parallelism",
        [&](ParallelSpec& spec) { spec.sequence_parallel = !own.sequence_parallel; });
  if (own.pp() > 1) {
    for (const ScheduleRow& row : schedule_rows())
      add(fmt::format("schedule {}", row.name), [&](ParallelSpec& spec) { spec.schedule = row.kind; });
    add("blocks cut evenly over the stages",
        [&](ParallelSpec& spec) { spec.stage_blocks = even_stages(graph, own.pp()); });
  }
  const std::int64_t each = plan.training.global_batch / own.dp();
  std::int64_t less = own.micro_batch - 1;
  while (less > 0 && each % less != 0) --less;
  std::int64_t more = own.micro_batch + 1;
  while (more <= each && each % more != 0) ++more;
  if (less > 0) add(fmt::format("micro-batch {}", less), [&](ParallelSpec& spec) { spec.micro_batch = less; });
  if (more <= each) add(fmt::format("micro-batch {}", more), [&](ParallelSpec& spec) { spec.micro_batch = more; });
  return specs;
}

std::vector<Neighbour> find_neighbours(const Inquiry& inquiry, NetworkCache& networks) {
  std::vector<Neighbour> neighbours;
  for (auto& [change, spec] : specs_one_choice_away(inquiry.graph, inquiry.plan)) {
    inquiry.say("one choice away: " + change);
    neighbours.push_back(
        {.change = change,
         .rival = rival(networks.cluster(), inquiry.simulated(networks, inquiry.plan.training, spec))});
  }
  return neighbours;
}

// The guide ---------------------------------------------------------------------------------------

std::optional<Guide::LargestBlock> block_beyond_a_device(const Inquiry& inquiry) {
  const OpGraph& graph = inquiry.graph;
  const Plan& plan = inquiry.plan;
  ParallelSpec alone;
  alone.stage_blocks = {static_cast<int>(graph.blocks.size())};
  const Placements placements = place(graph, alone);
  const Job job{.graph = &graph, .training = plan.training, .spec = alone, .placements = placements, .schedule = {},
                .backend = plan.cluster.backend(), .overhead = {}};
  const BlockChoice choice = block_choice(job, 0, 0);
  Guide::LargestBlock largest;
  for (const Block& block : graph.blocks) {
    const BlockParameters parameters = block_parameters(graph, block);
    std::vector<BucketSizes> buckets{{.elements = bucket_layout(graph, parameters.own, choice).elements}};
    if (parameters.tied >= 0)
      buckets.push_back({.elements = bucket_layout(graph, {parameters.tied}, choice).elements, .tied = true});
    const MemoryUse use = stage_memory({.buckets = buckets, .saved = {}}, alone, placements, plan.training);
    const Bytes state = use.parameters + use.gradients + use.optimizer;
    if (state > largest.state) largest = {.block = block.name, .state = state, .capacity = {}};
  }
  for (const NodeGroup& group : plan.cluster.groups) {
    if (largest.state + group.device.memory_overhead <= group.device.memory_capacity) return std::nullopt;
    largest.capacity = std::max(largest.capacity, group.device.memory_capacity);
  }
  return largest;
}

struct BestAmong {
  Rival rival;
  bool certified = true;  // false where `most_simulated` ended the search before the bounds did
};
// The best of these layouts that fits, by as many simulations as bounds leave open; where none
// fits, the one that needs least memory.
std::optional<BestAmong> best_among(const Inquiry& inquiry, CandidateMaker& maker,
                                    const std::vector<ParallelSpec>& specs) {
  std::vector<Candidate> fitting;
  std::optional<Candidate> smallest;
  std::vector<Candidate> made;
  for (const ParallelSpec& spec : specs) {
    made.clear();
    maker.add(spec, true, made);
    for (Candidate& candidate : made)
      if (candidate.estimate.spare.count >= 0)
        fitting.push_back(std::move(candidate));
      else if (!smallest || candidate.estimate.memory.peak() < smallest->estimate.memory.peak())
        smallest = std::move(candidate);
  }
  NetworkCache& networks = maker.estimator().networks();
  if (fitting.empty()) {
    if (!smallest) return std::nullopt;
    return BestAmong{.rival = rival(networks.cluster(), maker.with_times(*smallest))};
  }
  const auto counted = [&](const ParallelSpec& spec, Seconds time, const MemoryUse& memory) {
    return score(inquiry.objective(), networks.cluster(), spec, time, memory);
  };
  const auto bound = [&](const Candidate& candidate) {
    return counted(candidate.spec, candidate.estimate.lower_bound, candidate.estimate.memory);
  };
  const auto score_of = [&](const RankedPlan& plan) {
    return counted(plan.spec, plan.result.time.total(), plan.result.memory);
  };
  std::ranges::stable_sort(fitting, {}, bound);
  std::optional<RankedPlan> best;
  std::int64_t simulated = 0;
  bool certified = true;
  for (const Candidate& candidate : fitting) {
    if (best && bound(candidate) >= score_of(*best)) break;
    certified = simulated++ < inquiry.options.most_simulated;
    if (!certified) break;
    RankedPlan plan = inquiry.simulated(networks, inquiry.plan.training, candidate.spec);
    if (!best || score_of(plan) < score_of(*best)) best = std::move(plan);
  }
  return BestAmong{.rival = rival(networks.cluster(), std::move(*best)), .certified = certified};
}

std::optional<Guide::BeyondNode> tensor_beyond_a_node(const Inquiry& inquiry, CandidateMaker& maker) {
  const Cluster& cluster = inquiry.plan.cluster;
  NetworkCache& networks = maker.estimator().networks();
  const int inside = fewest_per_node(cluster);
  const int devices = inquiry.plan.spec.mesh.size();
  if (inside < 2) return std::nullopt;
  const auto ring = [&](int tp) { return networks.group(neighbours_mesh(devices, tp), Axis::tp).ring_bandwidth; };
  std::vector<ParallelSpec> specs;
  for (int tp = inside + 1; tp <= devices; ++tp) {
    if (devices % tp != 0 || tensor_inside_nodes(neighbours_mesh(devices, tp), networks)) continue;
    LayoutRequest layout;
    layout.tp = tp;
    std::ranges::move(enumerate_specs(inquiry.graph, inquiry.plan.training, devices, layout),
                      std::back_inserter(specs));
  }
  inquiry.say("tensor parallelism beyond a node");
  const std::optional<BestAmong> found_best = best_among(inquiry, maker, specs);
  if (!found_best) return std::nullopt;
  const Rival& best = found_best->rival;
  const int across = best.plan.spec.tp();
  const Guide::BeyondNode found{.inside_ranks = inside,
                                .inside = ring(inside),
                                .across_ranks = across,
                                .across = ring(across),
                                .best = best,
                                .certified = found_best->certified};
  const bool slower = !best.fits() || best.plan.result.time.total() > inquiry.plan.prediction.time.total();
  return found.across < found.inside && slower ? std::optional(found) : std::nullopt;
}

// The best on one device of any kind: each kind is asked by itself. Where none has room, the kind
// that lacks least of what it has.
std::optional<Guide::OneDevice> on_one_device(const Inquiry& inquiry) {
  inquiry.say("one device");
  const std::vector<ParallelSpec> specs = enumerate_specs(inquiry.graph, inquiry.plan.training, 1, {});
  const auto rank = [&](const Guide::OneDevice& one) {
    const RankedPlan& plan = one.least.plan;
    if (one.least.fits())
      return std::pair(
          false, score(inquiry.objective(), one.cluster, plan.spec, plan.result.time.total(), plan.result.memory));
    return std::pair(true, Score{static_cast<double>(plan.result.memory.peak().count) /
                                     static_cast<double>(one.least.capacity.count),
                                 0.0});
  };
  std::optional<Guide::OneDevice> best;
  const std::vector<NodeGroup>& groups = inquiry.plan.cluster.groups;
  for (auto group = groups.begin(); group != groups.end(); ++group) {
    if (std::any_of(groups.begin(), group, [&](const NodeGroup& before) { return before.device == group->device; }))
      continue;
    Cluster alone = inquiry.plan.cluster;
    alone.groups = {*group};
    alone.groups.front().nodes = 1;
    CandidateMaker maker(inquiry.graph, alone, inquiry.plan.training);
    std::optional<BestAmong> least = best_among(inquiry, maker, specs);
    if (!least) continue;
    Guide::OneDevice one{.cluster = std::move(alone), .least = std::move(least->rival)};
    if (!best || rank(one) < rank(*best)) best = std::move(one);
  }
  return best;
}

Guide find_guide(const Inquiry& inquiry, CandidateMaker& maker, const std::vector<Neighbour>& neighbours) {
  const Plan& plan = inquiry.plan;
  const StepResult& own = plan.prediction;
  const std::int64_t count = micro_batches(plan.spec, plan.training);
  Guide guide;
  guide.largest_block = block_beyond_a_device(inquiry);
  if (plan.spec.pp() > 1 && plan.spec.dp() > 1 && plan.spec.zero_stage < 2)
    for (const Neighbour& neighbour : neighbours) {
      const RankedPlan& other = neighbour.rival.plan;
      if (other.spec.zero_stage >= 2 && other.result.communication.dp > own.communication.dp)
        guide.sharded_pipeline.push_back(
            {.rival = neighbour.rival, .sent = own.communication.dp, .micro_batches = count});
    }
  if (plan.spec.zero_stage == 3 && plan.spec.dp() > 1 && count > 1)
    guide.gathered = {.micro_batches = count, .sent = own.communication.dp, .exposed = own.time.exposed.dp};
  if (plan.spec.pp() > 1)
    guide.bubble = {
        .stages = plan.spec.pp(),
        .micro_batches = count,
        .closed_form = closed_form_bubble(plan),
        .simulated = own.time.bubble / own.time.total(),
        .enough = 4 * plan.spec.pp(),
        .closed_form_then = static_cast<double>(plan.spec.pp() - 1) / static_cast<double>(5 * plan.spec.pp() - 1)};
  if (!inquiry.options.searches) return guide;
  guide.one_device = on_one_device(inquiry);
  guide.beyond_node = tensor_beyond_a_node(inquiry, maker);
  return guide;
}

// Families ----------------------------------------------------------------------------------------

std::vector<FamilyBest> find_families(const Inquiry& inquiry, CandidateMaker& maker) {
  const Plan& plan = inquiry.plan;
  NetworkCache& networks = maker.estimator().networks();
  // One device has no families: then those of all, which the plan leaves idle.
  const int devices = plan.spec.mesh.size() > 1 ? plan.spec.mesh.size() : plan.cluster.devices();
  const std::vector<ParallelSpec> specs = enumerate_specs(inquiry.graph, plan.training, devices, {});
  std::vector<FamilyBest> families;
  for (const LayoutFamily& family : layout_families()) {
    if (!is_possible(family, devices, networks)) continue;
    inquiry.say(fmt::format("best plan of: {}", family.name));
    std::vector<ParallelSpec> own;
    std::ranges::copy_if(specs, std::back_inserter(own),
                         [&](const ParallelSpec& spec) { return belongs(family, spec, networks); });
    FamilyBest best{.family = family.name, .best = {}, .of_the_plan = belongs(family, plan.spec, networks)};
    if (std::optional<BestAmong> found = best_among(inquiry, maker, own)) {
      best.best = std::move(found->rival);
      best.certified = found->certified;
    }
    // What the plan's own search found counts too, on however many devices: it looked longer.
    const auto offer = [&](const RankedPlan& one) {
      if (!belongs(family, one.spec, networks)) return;
      Rival known = rival(plan.cluster, one);
      if (known.fits() && (!best.best || !best.best->fits() ||
                           !better(inquiry.score_of(best.best->plan), inquiry.score_of(one), noise)))
        best.best = std::move(known);
    };
    for (const RankedPlan& alternative : plan.alternatives) offer(alternative);
    offer({.spec = plan.spec, .result = plan.prediction});  // last: it wins ties
    families.push_back(std::move(best));
  }
  return families;
}

// More and less of everything ---------------------------------------------------------------------

struct ChangedBatch {
  std::int64_t global_batch = 0;
  std::int64_t micro_batch = 0;
};

// About `factor` times the batch, more or less by something: in whole micro-batches of the plan,
// where that comes near enough, else in sequences of a data-parallel rank, in micro-batches as near
// to the plan's as divide them. Nothing where a rank has one sequence and is to have less.
std::optional<ChangedBatch> changed_batch(const Plan& plan, double factor) {
  const std::int64_t ranks = plan.spec.dp();
  const auto scaled = [&](std::int64_t count) {
    const std::int64_t then = std::llround(static_cast<double>(count) * factor);
    return then != count ? then : count + (factor > 1.0 ? 1 : -1);
  };
  const std::int64_t now = micro_batches(plan.spec, plan.training);
  const std::int64_t then = scaled(now);
  const double off = std::abs(static_cast<double>(then) / static_cast<double>(now) - factor);
  if (then > 0 && off <= 0.5 * std::abs(factor - 1.0))
    return ChangedBatch{.global_batch = then * ranks * plan.spec.micro_batch, .micro_batch = plan.spec.micro_batch};
  const std::int64_t each = scaled(plan.training.global_batch / ranks);
  if (each < 1) return std::nullopt;
  const auto apart = [&](std::int64_t micro) {
    return std::abs(std::log(static_cast<double>(micro) / static_cast<double>(plan.spec.micro_batch)));
  };
  std::int64_t nearest = 1;
  for (std::int64_t micro = 2; micro <= each; ++micro)
    if (each % micro == 0 && apart(micro) <= apart(nearest)) nearest = micro;
  return ChangedBatch{.global_batch = each * ranks, .micro_batch = nearest};
}

// The plan as it stands when things are otherwise.
struct Circumstances {
  TrainingSpec training;
  Variation variation;
};
std::optional<Circumstances> changed(const Inquiry& inquiry, Resource resource, double factor) {
  const Plan& plan = inquiry.plan;
  inquiry.say(fmt::format("{} x {:.2g}", name(resource), factor));
  Circumstances then{.training = plan.training, .variation = {}};
  then.variation.resource = resource;
  then.variation.cluster = varied(plan.cluster, resource, factor);
  ParallelSpec spec = plan.spec;
  if (resource == Resource::global_batch) {
    const std::optional<ChangedBatch> batch = changed_batch(plan, factor);
    if (!batch) return std::nullopt;
    then.training.global_batch = batch->global_batch;
    spec.micro_batch = batch->micro_batch;
    factor = static_cast<double>(batch->global_batch) / static_cast<double>(plan.training.global_batch);
  }
  NetworkCache networks(then.variation.cluster);
  then.variation.factor = factor;
  then.variation.global_batch = then.training.global_batch;
  then.variation.plan = rival(then.variation.cluster, inquiry.simulated(networks, then.training, spec));
  return then;
}

// Takes the best of what was found, or the plan where that is as good.
void choose(const Inquiry& inquiry, const SearchResult& found, Variation& variation) {
  const RankedPlan& own = variation.plan.plan;
  const bool fits = variation.plan.fits();
  if (!found.plans.empty()) {
    const RankedPlan& best = found.plans.front();
    variation.changes =
        best.spec != own.spec && (!fits || better(inquiry.score_of(best), inquiry.score_of(own), worth));
    if (variation.changes) variation.best = best;
  }
  if (!variation.changes && fits) variation.best = own;
  // That nothing fits needs no simulation.
  variation.certified = found.plans.empty() || found.counts.certified;
}

std::optional<Variation> vary(const Inquiry& inquiry, Resource resource, double factor) {
  std::optional<Circumstances> then = changed(inquiry, resource, factor);
  if (!then) return std::nullopt;
  choose(inquiry, inquiry.searched(then->variation.cluster, then->training, 1), then->variation);
  return std::move(then->variation);
}

// The same, of a plan than which nothing in the whole space is better as things are: what fits in
// less memory fitted before.
std::optional<Variation> vary_best_of_all(const Inquiry& inquiry, Resource resource, double factor) {
  if (resource != Resource::memory || factor > 1.0) return vary(inquiry, resource, factor);
  std::optional<Circumstances> then = changed(inquiry, resource, factor);
  choose(inquiry,
         then->variation.plan.fits() ? SearchResult{} : inquiry.searched(then->variation.cluster, then->training, 1),
         then->variation);
  return std::move(then->variation);
}

bool promised(const StepResult& promise, const StepResult& result) {
  const double apart = std::abs(promise.time.total() / result.time.total() - 1.0);
  return apart < 1e-6 && promise.memory == result.memory && promise.memory_stage == result.memory_stage;
}

// The best of what else was looked at and fits. Not the plan in another order of axes that comes to
// the same.
std::optional<RankedPlan> next_best(const Inquiry& inquiry, const std::vector<RankedPlan>& found,
                                    const Reasons& reasons) {
  const Plan& plan = inquiry.plan;
  const Score own = inquiry.score_of({.spec = plan.spec, .result = plan.prediction});
  std::optional<RankedPlan> best;
  const auto offer = [&](const RankedPlan& one) {
    ParallelSpec same_order = one.spec;
    same_order.mesh.order = plan.spec.mesh.order;
    const Score score = inquiry.score_of(one);
    if (same_order == plan.spec && !better(score, own, noise) && !better(own, score, noise)) return;
    if (!best || better(score, inquiry.score_of(*best), noise)) best = one;
  };
  for (const RankedPlan& one : found) offer(one);
  for (const FamilyBest& family : reasons.families)
    if (family.best && family.best->fits()) offer(family.best->plan);
  for (const Neighbour& neighbour : reasons.neighbours)
    if (neighbour.rival.fits()) offer(neighbour.rival.plan);
  return best;
}

// GPT-3 175B in 14 layouts, as tests/planner/explain/model_error_test.cpp simulates them.
constexpr ModelError published_error{
    .least = -0.236,
    .most = -0.157,
    .runs = 15,
    .source = "runs of GPT-3 175B in 14 layouts on 512 A100 80 GB, by vTrain, MICRO 2024"};
constexpr std::string_view published_device = "a100-sxm4-80gb";

}  // namespace

std::optional<ModelError> model_error(const Cluster& cluster) {
  const bool such =
      std::ranges::all_of(cluster.groups, [](const NodeGroup& group) { return group.device.name == published_device; });
  return such ? std::optional(published_error) : std::nullopt;
}

Plan simulated_anew(const OpGraph& graph, Plan plan) {
  NetworkCache networks(plan.cluster);
  const StepResult promise = plan.prediction;
  const auto in_full = [&] {
    return simulate_spec(graph, networks, plan.training, plan.spec, plan.placements, plan.schedule, nullptr);
  };
  const bool usual = plan.placements == place(graph, plan.spec);
  // A promise that is kept stands: it is exact, and a steady state is so but for rounding.
  if (promised(promise,
               usual ? Inquiry{graph, plan, {}}.simulated(networks, plan.training, plan.spec).result : in_full()))
    return plan;
  plan.prediction = in_full();
  plan.notes.push_back(
      fmt::format("the file promises a step of {} and {} of memory, and this plan takes {} and {}: it was edited, or "
                  "written by another version of parplan. "
                  "All here is simulated anew; what the file says of its search and of alternatives is left out",
                  format_duration(promise.time.total()), format_bytes(promise.memory.peak()),
                  format_duration(plan.prediction.time.total()), format_bytes(plan.prediction.memory.peak())));
  plan.alternatives.clear();
  const Objective objective = plan.search.objective;
  plan.search = {};
  plan.search.objective = objective;
  return plan;
}

std::span<const LayoutFamily> layout_families() { return family_table; }

bool belongs(const LayoutFamily& family, const ParallelSpec& spec, NetworkCache& networks) {
  return matches(family.dp, spec.dp(), false) && matches(family.pp, spec.pp(), false) &&
         (!family.zero_stage || spec.zero_stage == *family.zero_stage) &&
         matches(family.tp, spec.tp(), tensor_inside_nodes(spec.mesh, networks));
}

std::vector<bool> network_links(const NodeKind& node) {
  const std::shared_ptr<const NodeRoutes> routes = routes_of(node);
  std::vector<bool> of_network(node.links.size(), false);
  const auto mark = [&](const Path& path, bool as) {
    for (const Arc arc : path.arcs) of_network[link_of(arc)] = as;
  };
  for (const std::vector<Uplink>& uplinks : routes->uplinks)
    for (const Uplink& uplink : uplinks) mark(uplink.path, true);
  for (const std::vector<Path>& row : routes->between)
    for (const Path& path : row) mark(path, false);
  return of_network;
}

Cluster varied(Cluster cluster, Resource resource, double factor) {
  for (NodeGroup& group : cluster.groups) {
    DeviceKind& device = group.device;
    if (resource == Resource::memory)
      device.memory_capacity = Bytes(std::llround(static_cast<double>(device.memory_capacity.count) * factor));
    if (resource == Resource::compute) {
      for (FlopsPerSecond* rate : {&device.peak_fp32, &device.peak_half, &device.peak_tf32}) *rate *= factor;
      device.kernel_launch *= 1.0 / factor;
      for (DeviceRates& rates : device.rates) {
        for (FlopsPerSecond* rate : {&rates.matrix_fp32, &rates.matrix_half, &rates.matrix_tf32, &rates.vector})
          *rate *= factor;
        rates.memory *= factor;
      }
      if (device.measured)
        for (KernelFit& fit : device.measured->fits) {
          fit.floor *= 1.0 / factor;
          fit.rate *= factor;
          fit.memory *= factor;
        }
    }
    if (resource != Resource::node_links && resource != Resource::network && resource != Resource::links) continue;
    const std::vector<bool> of_network = network_links(group.node);
    for (std::size_t link = 0; link < of_network.size(); ++link)
      if (resource == Resource::links || (resource == Resource::network) == of_network[link])
        group.node.links[link].bandwidth *= factor;
  }
  return cluster;
}

Reasons find_reasons(const OpGraph& graph, const Plan& plan, const ReasonsOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  const Inquiry inquiry{graph, plan, options};
  NetworkCache networks(plan.cluster);
  Reasons reasons;
  inquiry.say("the plan, stage by stage");
  reasons.details = details_of(graph, networks, plan);
  for (int stage = 0; stage < plan.spec.pp(); ++stage)
    reasons.capacities.push_back(memory_capacity(plan.cluster, plan.spec.mesh, stage));
  reasons.error = model_error(plan.cluster);
  if (!reasons.error && is_accelerator(plan.cluster.backend())) reasons.elsewhere = published_error;
  reasons.neighbours = find_neighbours(inquiry, networks);
  CandidateMaker maker(graph, plan.cluster, plan.training, plan.search.objective);
  reasons.guide = find_guide(inquiry, maker, reasons.neighbours);
  const RankedPlan own{.spec = plan.spec, .result = plan.prediction};
  const auto has = [&](Resource resource) {
    return (resource != Resource::network && resource != Resource::links) || plan.cluster.nodes() > 1;
  };
  SearchResult now;
  if (!options.searches) {
    // What memory gains, only a search says.
    std::vector<Variation> twice;
    for (const Resource resource :
         {Resource::compute, Resource::node_links, Resource::network, Resource::links, Resource::global_batch})
      if (has(resource)) twice.push_back(std::move(changed(inquiry, resource, 2.0)->variation));
    reasons.binding = binding_constraint(plan, twice, own);
  } else {
    reasons.families = find_families(inquiry, maker);
    inquiry.say("the whole space");
    now = inquiry.searched(plan.cluster, plan.training, 2);
    Variation as_it_is{.resource = Resource::compute,
                       .factor = 1.0,
                       .global_batch = plan.training.global_batch,
                       .cluster = plan.cluster,
                       .plan = rival(plan.cluster, own),
                       .best = {}};
    choose(inquiry, now, as_it_is);
    const auto change = now.counts.certified && !as_it_is.changes ? vary_best_of_all : vary;
    for (int i = 0; i < static_cast<int>(Resource::count_); ++i) {
      const Resource resource = static_cast<Resource>(i);
      if (!has(resource)) continue;
      reasons.twice.push_back(*change(inquiry, resource, 2.0));
      if (resource == Resource::links) continue;  // a fifth of each kind says as much
      for (const double factor : {0.8, 1.2})
        if (std::optional<Variation> variation = change(inquiry, resource, factor))
          reasons.sensitivity.push_back(std::move(*variation));
    }
    // What is the best of all is the best of its family.
    if (now.counts.certified && !as_it_is.changes)
      for (FamilyBest& family : reasons.families)
        family.certified |= family.best && family.best->plan.spec == plan.spec;
    reasons.binding = binding_constraint(plan, reasons.twice, as_it_is.best ? *as_it_is.best : own);
    if (as_it_is.changes) reasons.unrestricted = std::move(as_it_is);
  }
  if (plan.alternatives.empty()) reasons.runner_up = next_best(inquiry, now.plans, reasons);
  reasons.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return reasons;
}

}  // namespace parplan
