#include "planner/explain/rules_of_thumb.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "planner/cluster/mesh.h"
#include "planner/explain/best_among.h"
#include "planner/explain/layout_families.h"
#include "planner/parallel/techniques.h"
#include "planner/program/bucket_layout.h"
#include "planner/program/job.h"
#include "planner/program/memory.h"

namespace parplan {
namespace {

std::optional<Guide::LargestBlock> block_beyond_a_device(const ExplainedPlan& explained) {
  const OpGraph& graph = explained.graph;
  const Plan& plan = explained.plan;
  ParallelSpec alone;
  alone.stage_blocks = {static_cast<int>(graph.blocks.size())};
  const Job job = job_of(graph, plan.cluster, plan.training, alone, place(graph, alone), {});
  const BlockContext context = block_context(job, 0, Coordinates{});
  Guide::LargestBlock largest;
  for (const Block& block : graph.blocks) {
    const BlockParameters parameters = block_parameters(graph, block);
    const BucketLayout own = bucket_layout(graph, block, parameters.own, context);
    std::vector<BucketSizes> buckets{{.elements = own.elements, .without_second = own.matrix_elements}};
    buckets.push_back({.elements = bucket_layout(graph, block, parameters.frozen, context).elements, .frozen = true});
    if (parameters.tied)
      buckets.push_back({.elements = bucket_layout(graph, block, {*parameters.tied}, context).elements,
                         .tied = true,
                         .frozen = graph.tensors[*parameters.tied].frozen});
    const MemoryUse use = rank_memory({.buckets = buckets, .saved = {}}, plan.training);
    const Bytes state = use.parameters + use.gradients + use.optimizer;
    if (state > largest.state) largest = {.block = block.name, .state = state, .capacity = {}};
  }
  for (const NodeGroup& group : groups_in_use(plan.cluster, plan.spec.mesh.size())) {
    if (largest.state + group.device.memory_overhead <= group.device.memory_capacity) return std::nullopt;
    largest.capacity = std::max(largest.capacity, group.device.memory_capacity);
  }
  return largest;
}

int fewest_per_node(std::span<const NodeGroup> groups) {
  int fewest = groups.front().devices_per_node();
  for (const NodeGroup& group : groups) fewest = std::min(fewest, group.devices_per_node());
  return fewest;
}

std::optional<Guide::BeyondNode> tensor_beyond_a_node(const ExplainedPlan& explained, CandidateMaker& maker,
                                                      const std::optional<BestAmong>& across_nodes) {
  NetworkCache& networks = maker.estimator().networks();
  const int devices = explained.plan.spec.mesh.size();
  const std::span<const NodeGroup> groups = groups_in_use(explained.plan.cluster, devices);
  const int inside = fewest_per_node(groups);
  if (inside < 2) return std::nullopt;
  const auto ring = [&](int tp) {
    return networks.group(adjacent_tensor_groups(devices, tp), Axis::tp).ring_bandwidth;
  };
  const auto is_beyond = [&](int tp) {
    return tp > inside && devices % tp == 0 && !tensor_inside_nodes(adjacent_tensor_groups(devices, tp), networks);
  };
  BestAmong found_best;
  // On devices that are alike, what is beyond a node is across nodes in every order of the axes.
  if (across_nodes && across_nodes->rival && across_nodes->certified && groups.size() == 1 &&
      is_beyond(across_nodes->rival->plan.spec.tp())) {
    found_best = *across_nodes;
  } else {
    explained.say("tensor parallelism beyond a node");
    LayoutFloors floors = floors_of(explained, maker);
    found_best = best_among(explained, maker, floors,
                            {.devices = devices,
                             .request = explained.request(),
                             .of_degrees = [&](const ParallelSpec& spec) { return is_beyond(spec.tp()); },
                             .layout = {},
                             .in_order = {}});
  }
  if (!found_best.rival) return std::nullopt;
  const Rival& best = *found_best.rival;
  const int across = best.plan.spec.tp();
  const Guide::BeyondNode found{.inside_ranks = inside,
                                .inside = ring(inside),
                                .across_ranks = across,
                                .across = ring(across),
                                .best = best,
                                .certified = found_best.certified};
  const bool slower = !best.fits() || best.plan.result.time.total() > explained.plan.prediction.time.total();
  return found.across < found.inside && slower ? std::optional(found) : std::nullopt;
}

// The best plan on one device of any kind: each kind is searched by itself. Where the model fits on
// none, the kind that lacks the smallest part of its memory.
std::optional<Guide::OneDevice> on_one_device(const ExplainedPlan& explained) {
  explained.say("one device");
  const Among alone_on_it{.devices = 1,
                          .request = explained.request(),
                          .of_degrees = [](const ParallelSpec&) { return true; },
                          .layout = {},
                          .in_order = {}};
  const auto rank = [&](const Guide::OneDevice& one) {
    const RankedPlan& plan = one.least.plan;
    if (one.least.fits())
      return std::pair(
          false, score(explained.objective(), one.cluster, plan.spec, plan.result.time.total(), plan.result.memory));
    return std::pair(true, Score{static_cast<double>(plan.result.memory.peak().count) /
                                     static_cast<double>(one.least.capacity.count),
                                 0.0});
  };
  std::optional<Guide::OneDevice> best;
  const std::vector<NodeGroup>& groups = explained.plan.cluster.groups;
  for (auto group = groups.begin(); group != groups.end(); ++group) {
    if (std::any_of(groups.begin(), group, [&](const NodeGroup& before) { return before.device == group->device; }))
      continue;
    Cluster alone = explained.plan.cluster;
    alone.groups = {*group};
    alone.groups.front().nodes = 1;
    CandidateMaker maker(explained.graph, alone, explained.plan.training, Objective::time, explained.shapes);
    LayoutFloors floors = floors_of(explained, maker);
    BestAmong least = best_among(explained, maker, floors, alone_on_it);
    if (!least.rival) continue;
    Guide::OneDevice one{.cluster = std::move(alone), .least = *std::move(least.rival)};
    if (!best || rank(one) < rank(*best)) best = std::move(one);
  }
  return best;
}

}  // namespace

Guide find_guide(const ExplainedPlan& explained, CandidateMaker& maker, std::span<const Neighbour> neighbours,
                 const std::optional<BestAmong>& across_nodes) {
  const Plan& plan = explained.plan;
  const StepResult& own = plan.prediction;
  const std::int64_t count = micro_batches(plan.spec, plan.training);
  Guide guide;
  guide.largest_block = block_beyond_a_device(explained);
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
    guide.bubble = {.stages = plan.spec.pp(),
                    .micro_batches = count,
                    .closed_form = closed_form_bubble(plan),
                    .simulated = own.time.bubble / own.time.total(),
                    .enough = 4 * plan.spec.pp(),
                    .closed_form_then = static_cast<double>(plan.spec.pp() - 1) /
                                        static_cast<double>((4 * bubble_divisor(plan.spec) + 1) * plan.spec.pp() - 1)};
  if (!explained.options.searches) return guide;
  guide.one_device = on_one_device(explained);
  guide.beyond_node = tensor_beyond_a_node(explained, maker, across_nodes);
  return guide;
}

}  // namespace parplan
