#include "planner/explain/sensitivity.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/base/parallel_for.h"
#include "planner/cluster/host_share.h"
#include "planner/cluster/price_and_power.h"
#include "planner/cluster/routes.h"
#include "planner/parallel/techniques.h"

namespace parplan {
namespace {

struct ChangedBatch {
  std::int64_t global_batch = 0;
  std::int64_t micro_batch = 0;
  std::vector<int> replica_micro_batches = {};  // where replicas have unlike numbers
};

ParallelSpec with_batch(ParallelSpec spec, const ChangedBatch& batch) {
  spec.micro_batch = batch.micro_batch;
  spec.replica_micro_batches = batch.replica_micro_batches;
  return spec;
}

bool is_legal(const ExplainedPlan& explained, const ChangedBatch& batch) {
  TrainingSpec training = explained.plan.training;
  training.global_batch = batch.global_batch;
  return !illegal(explained.graph, training, with_batch(explained.plan.spec, batch));
}

// About `factor` times the batch, but never the same batch: in whole micro-batches of the plan, the
// nearest number that is legal (groups of micro-batches in an interleaved pipeline) and close
// enough; else in sequences of a data-parallel rank, with the micro-batch size closest to the
// plan's that divides them. Replicas with unlike numbers of micro-batches have each about `factor`
// times as many. Nothing where a rank has one sequence and is to have fewer, or where that is not
// legal.
std::optional<ChangedBatch> changed_batch(const ExplainedPlan& explained, double factor) {
  const Plan& plan = explained.plan;
  if (!plan.spec.replica_micro_batches.empty()) {
    ChangedBatch batch{.global_batch = 0,
                       .micro_batch = plan.spec.micro_batch,
                       .replica_micro_batches = plan.spec.replica_micro_batches};
    for (int& count : batch.replica_micro_batches) {
      count = static_cast<int>(std::max(std::lround(count * factor), 1L));
      batch.global_batch += count * batch.micro_batch;
    }
    return batch.global_batch != plan.training.global_batch && is_legal(explained, batch) ? std::optional(batch)
                                                                                          : std::nullopt;
  }
  const std::int64_t ranks = plan.spec.mesh.batch_ranks();
  const auto scaled = [&](std::int64_t count) {
    const std::int64_t then = std::llround(static_cast<double>(count) * factor);
    return then != count ? then : count + (factor > 1.0 ? 1 : -1);
  };
  const std::int64_t now = micro_batches(plan.spec, plan.training);
  const std::int64_t wanted = scaled(now);
  const auto is_close = [&](std::int64_t count) {
    const double off = std::abs(static_cast<double>(count) / static_cast<double>(now) - factor);
    return count > 0 && count != now && off <= 0.5 * std::abs(factor - 1.0);
  };
  const int nearer = static_cast<double>(now) * factor > static_cast<double>(wanted) ? 1 : -1;
  for (std::int64_t apart = 0; is_close(wanted - apart) || is_close(wanted + apart); ++apart)
    for (const std::int64_t count : {wanted + nearer * apart, wanted - nearer * apart}) {
      const ChangedBatch batch{.global_batch = count * ranks * plan.spec.micro_batch,
                               .micro_batch = plan.spec.micro_batch};
      if (is_close(count) && is_legal(explained, batch)) return batch;
    }
  const std::int64_t each = scaled(plan.training.global_batch / ranks);
  if (each < 1) return std::nullopt;
  const auto apart = [&](std::int64_t micro) {
    return std::abs(std::log(static_cast<double>(micro) / static_cast<double>(plan.spec.micro_batch)));
  };
  std::int64_t nearest = 1;
  for (const std::int64_t micro : divisors(each))
    if (apart(micro) <= apart(nearest)) nearest = micro;
  const ChangedBatch batch{.global_batch = each * ranks, .micro_batch = nearest};
  return is_legal(explained, batch) ? std::optional(batch) : std::nullopt;
}

// The plan as it stands under changed circumstances.
struct Circumstances {
  TrainingSpec training;
  Variation variation;
};
std::optional<Circumstances> changed(const ExplainedPlan& explained, Resource resource, double factor) {
  const Plan& plan = explained.plan;
  explained.say(fmt::format("{} x {:.2g}", name(resource), factor));
  Circumstances then{.training = plan.training, .variation = {}};
  then.variation.resource = resource;
  then.variation.cluster = varied(plan.cluster, resource, factor, plan.spec.mesh.size());
  ParallelSpec spec = plan.spec;
  if (resource == Resource::global_batch) {
    const std::optional<ChangedBatch> batch = changed_batch(explained, factor);
    if (!batch) return std::nullopt;
    then.training.global_batch = batch->global_batch;
    spec = with_batch(std::move(spec), *batch);
    factor = static_cast<double>(batch->global_batch) / static_cast<double>(plan.training.global_batch);
  }
  NetworkCache networks(then.variation.cluster, then.training.engine);
  then.variation.factor = factor;
  then.variation.global_batch = then.training.global_batch;
  then.variation.plan = rival(then.variation.cluster, explained.simulated(networks, then.training, spec));
  return then;
}

// Takes the best of what was found, or the plan where that is as good.
void choose(const ExplainedPlan& explained, const SearchResult& found, Variation& variation) {
  const RankedPlan& own = variation.plan.plan;
  const bool fits = variation.plan.fits();
  if (!found.plans.empty()) {
    const RankedPlan& best = found.plans.front();
    variation.changes =
        best.spec != own.spec && (!fits || better(explained.score_of(best), explained.score_of(own), tied_plans));
    if (variation.changes) variation.best = best;
  }
  if (!variation.changes && fits) variation.best = own;
  // A search that finds no fitting plan needs no simulation to be certain.
  variation.certified = (found.plans.empty() && !fits) || found.counts.certified;
}

// The best of the whole space, where that is better than the plan.
SearchResult found_better(const ExplainedPlan& explained, const Circumstances& then) {
  return explained.searched(then.variation.cluster, then.training, 1, to_beat(explained, then.variation.plan));
}

std::optional<Variation> vary(const ExplainedPlan& explained, Resource resource, double factor) {
  std::optional<Circumstances> then = changed(explained, resource, factor);
  if (!then) return std::nullopt;
  choose(explained, found_better(explained, *then), then->variation);
  return std::move(then->variation);
}

// The same for a plan that is the best of the whole space: what fits in less memory also fitted
// before.
std::optional<Variation> vary_best_of_all(const ExplainedPlan& explained, Resource resource, double factor) {
  if (resource != Resource::memory || factor > 1.0) return vary(explained, resource, factor);
  std::optional<Circumstances> then = changed(explained, resource, factor);
  const bool fits = then->variation.plan.fits();
  choose(explained, fits ? SearchResult{} : found_better(explained, *then), then->variation);
  if (fits) then->variation.certified = true;
  return std::move(then->variation);
}

// On so many nodes; a search may use others than the plan.
bool has(const Plan& plan, Resource resource, int nodes) {
  const bool has_files = uses(plan.spec.offload, Home::nvme);
  if (resource == Resource::nvme) return has_files;
  if (resource == Resource::host) return has_files || uses(plan.spec.offload, Home::host);
  return (resource != Resource::network && resource != Resource::links) || nodes > 1;
}

}  // namespace

std::optional<Score> to_beat(const ExplainedPlan& explained, const Rival& plan) {
  if (!plan.fits()) return std::nullopt;
  Score score = explained.score_of(plan.plan);
  if (explained.objective() != Objective::memory) score.first *= 1.0 - tied_plans;
  return score;
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

Cluster varied(Cluster cluster, Resource resource, double factor, std::optional<int> devices) {
  const bool varies_links =
      resource == Resource::node_links || resource == Resource::network || resource == Resource::links;
  for (NodeGroup& group : cluster.groups) {
    DeviceKind& device = group.device;
    // A way to the host that the file leaves to the node's links is stated before they change.
    if (group.host && !group.host->link && (varies_links || resource == Resource::host))
      if (const std::optional<HostShare> share =
              host_share(group, std::min(devices.value_or(cluster.devices()), group.devices_per_node())))
        group.host->link = share->link;
    if (resource == Resource::host && group.host) {
      group.host->memory_bandwidth *= factor;
      if (group.host->link) *group.host->link *= factor;
    }
    if (resource == Resource::nvme && group.nvme) {
      group.nvme->read *= factor;
      group.nvme->write *= factor;
    }
    if (resource == Resource::memory)
      device.memory_capacity = Bytes(std::llround(static_cast<double>(device.memory_capacity.count) * factor));
    if (resource == Resource::compute) {
      for (FlopsPerSecond* rate : {&device.peak_fp32, &device.peak_half, &device.peak_tf32, &device.peak_fp8})
        *rate *= factor;
      device.kernel_launch *= 1.0 / factor;
      for (DeviceRates& rates : device.rates) {
        for (FlopsPerSecond* rate :
             {&rates.matrix_fp32, &rates.matrix_half, &rates.matrix_tf32, &rates.matrix_fp8, &rates.vector})
          *rate *= factor;
        for (const OptionalRate& one : optional_rates()) rates.*one.member *= factor;
        rates.memory *= factor;
        rates.sustained_memory *= factor;
      }
      if (device.measured)
        for (KernelFit& fit : device.measured->fits) {
          fit.floor *= 1.0 / factor;
          fit.rate *= factor;
          fit.memory *= factor;
        }
    }
    if (!varies_links) continue;
    const std::vector<bool> of_network = network_links(group.node);
    for (std::size_t link = 0; link < of_network.size(); ++link)
      if (resource == Resource::links || (resource == Resource::network) == of_network[link])
        group.node.links[link].bandwidth *= factor;
  }
  return cluster;
}

std::vector<Variation> double_without_searches(const ExplainedPlan& explained) {
  const Plan& plan = explained.plan;
  const int nodes = first_nodes(plan.cluster, plan.spec.mesh.size()).nodes();
  std::vector<Variation> twice;
  for (const Resource resource :
       {Resource::compute, Resource::node_links, Resource::network, Resource::links, Resource::host, Resource::nvme,
        Resource::global_batch})
    if (has(plan, resource, nodes))
      if (std::optional<Circumstances> then = changed(explained, resource, 2.0))
        twice.push_back(std::move(then->variation));
  return twice;
}

Variation as_things_are(const ExplainedPlan& explained, const SearchResult& found) {
  const Plan& plan = explained.plan;
  Variation now{.resource = Resource::compute,
                .factor = 1.0,
                .global_batch = plan.training.global_batch,
                .cluster = plan.cluster,
                .plan = rival(plan.cluster, {.spec = plan.spec, .result = plan.prediction}),
                .best = {}};
  choose(explained, found, now);
  return now;
}

Variations vary_resources(const ExplainedPlan& explained, bool is_best_of_all) {
  constexpr double twice = 2.0;
  std::vector<std::pair<Resource, double>> changes;
  for (int i = 0; i < static_cast<int>(Resource::count_); ++i) {
    const Resource resource = static_cast<Resource>(i);
    if (!has(explained.plan, resource, explained.plan.cluster.nodes())) continue;
    changes.emplace_back(resource, twice);
    if (resource == Resource::links) continue;  // A fifth more of each kind of link says as much.
    for (const double factor : {0.8, 1.2}) changes.emplace_back(resource, factor);
  }
  std::vector<std::optional<Variation>> changed(changes.size());
  parallel_for(explained.threads(), changes.size(), [&](int /*thread*/, std::size_t i) {
    const auto [resource, factor] = changes[i];
    changed[i] = (is_best_of_all ? vary_best_of_all : vary)(explained, resource, factor);
  });
  Variations variations;
  for (std::size_t i = 0; i < changes.size(); ++i)
    if (changed[i])
      (changes[i].second == twice ? variations.twice : variations.sensitivity).push_back(std::move(*changed[i]));
  return variations;
}

}  // namespace parplan
