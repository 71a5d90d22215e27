#include "planner/search/restrictions.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <fmt/format.h>

#include "planner/parallel/engine_layouts.h"
#include "planner/search/best_first.h"
#include "planner/search/space_rows.h"

namespace parplan {
namespace {

// Parts that are looked into for one restriction; fewer with context parallelism, of which each has
// kernels of its own, and more where it may be lifted.
constexpr int most_parts_beyond = 1024, most_parts_with_context = 256, most_parts_where_lifted = 8192;

bool has_stages(const ParallelSpec& degrees) {
  return degrees.pp() > 1;
}

bool has_several_replicas(const ParallelSpec& degrees) {
  return degrees.replicas() > 2;
}

bool has_tensor_ranks(const ParallelSpec& degrees) {
  return degrees.tp() > 1;
}

bool has_context_ranks(const ParallelSpec& degrees) {
  return degrees.cp() > 1;
}

bool has_anything(const ParallelSpec& /*degrees*/) {
  return true;
}

// Whether every device updates its own state sooner than its host could: both move the same bytes
// through their memory.
bool devices_update_sooner(const Cluster& cluster) {
  return std::ranges::all_of(cluster.groups, [](const NodeGroup& group) {
    if (!group.host) return true;
    const double of_host = group.host->memory_bandwidth.value / group.devices_per_machine();
    return std::ranges::all_of(group.device.rates,
                               [&](const DeviceRates& rates) { return rates.memory.value >= of_host; });
  });
}

LayoutRequest with(LayoutRequest request, Choice choice, const ChoiceValue& value) {
  request[choice] = value;
  return request;
}

}  // namespace

std::vector<Restriction> restrictions(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                                      const LayoutRequest& request, const SpaceWidth& width) {
  const Engine& engine = training.engine;
  std::vector<Restriction> all;
  const std::int64_t zero_stage = given<std::int64_t>(request, Choice::zero_stage).value_or(0);
  const auto may_have = [&](Choice degree) { return given<std::int64_t>(request, degree).value_or(2) > 1; };
  if (cluster.devices() > 1 && !request[Choice::schedule] && may_have(Choice::pp) && engine.has_pipeline) {
    SpaceWidth wider = width;
    wider.interleaves_freely = true;
    const SpaceContext narrow{graph, training, cluster.devices(), true, width};
    const auto is_beyond = [narrow](const ParallelSpec& spec) {
      if (spec.schedule != ScheduleKind::interleaved) return false;
      std::vector<ChoiceValue> usual;
      space_row_of(Choice::virtual_stages).values(narrow, spec, usual);
      return spec.zero_stage > 1 ||
             std::ranges::find(usual, ChoiceValue(std::int64_t{spec.virtual_stages})) == usual.end();
    };
    if (engine.has_interleaved && !request[Choice::stage_blocks])
      all.push_back({.what = "interleaved pipelines in other numbers of stages or with ZeRO-2 and 3",
                     .wider = {{with(request, Choice::schedule, ScheduleKind::interleaved),
                                wider,
                                {.of_degrees = has_stages, .layout = is_beyond}}}});
    if (engine.has_zero_bubble && zero_stage <= 1)
      all.push_back({.what = "zero_bubble_h1",
                     .wider = {{with(request, Choice::schedule, ScheduleKind::zero_bubble_h1),
                                wider,
                                {.of_degrees = has_stages, .layout = {}}}}});
  }
  if (cluster.devices() > 2 && !request[Choice::dp_shard] && (zero_stage > 0 || !request[Choice::zero_stage]) &&
      may_have(Choice::dp)) {
    SpaceWidth wider = width;
    wider.shards_freely = true;
    all.push_back(
        {.what = "hybrid sharding",
         .wider = {{request, wider, {.of_degrees = has_several_replicas, .layout = [](const ParallelSpec& spec) {
                                       return spec.mesh.dp_shard > 0;
                                     }}}}});
  }
  if (cluster.devices() > 1 && engine.has_master && !request[Choice::dp_method] && may_have(Choice::dp))
    all.push_back(
        {.what = "DataParallel",
         .wider = {
             {with(request, Choice::dp_method, DataMethod::master),
              width,
              {.of_degrees =
                   [](const ParallelSpec& degrees) { return degrees.dp() > 1 && degrees.dp() == degrees.mesh.size(); },
               .layout = [](const ParallelSpec& spec) { return spec.dp_method == DataMethod::master; }}}}});
  const bool may_cut_tokens = given<bool>(request, Choice::sequence_parallel).value_or(true);
  if (cluster.devices() > 1 && engine.has_tensor && engine.has_sequence_parallel && engine.has_tensor_overlap &&
      !request[Choice::tp_overlap] && may_have(Choice::tp) && may_cut_tokens)
    all.push_back(
        {.what = "tensor parallelism overlapped by slices",
         .wider = {{with(with(request, Choice::sequence_parallel, true), Choice::tp_overlap, TensorOverlap::ring),
                    width,
                    {.of_degrees = has_tensor_ranks, .layout = {}}}}});
  if (cluster.devices() > 1 && engine.has_context && !gives_every_degree(request) && may_have(Choice::cp)) {
    if (!width.shares_context) {
      all.push_back({.what = "context parallelism by gathered keys and values or exchange for heads",
                     .is_context = true,
                     .wider = {{request, with_context(width), {.of_degrees = has_context_ranks, .layout = {}}}}});
      all.push_back({.what = "context parallelism around a ring", .wider = {}});
    } else if (!request[Choice::cp] && !request[Choice::cp_method]) {
      all.push_back(
          {.what = width.most_ring_ranks == 1
                       ? "context parallelism around a ring"
                       : fmt::format("context parallelism around rings of more than {} ranks", width.most_ring_ranks),
           .wider = {}});
    }
  }
  const bool has_host =
      std::ranges::any_of(cluster.groups, [](const NodeGroup& group) { return group.host.has_value(); });
  if (has_host && !request[Choice::offload])
    all.push_back({.what = "offload of the optimizer's state",
                   .wider = {{request,
                              width,
                              {.of_degrees = has_anything,
                               .layout = {},
                               .room = Beyond::Room::any,
                               .also_what_fits = !devices_update_sooner(cluster)}}}});
  if (!request[Choice::recompute] && searched_recomputes(engine).size() > 1)
    all.push_back(
        {.what = "other modules to recompute",
         .wider = {{request,
                    width,
                    {.of_degrees = has_anything, .layout = {}, .room = Beyond::Room::with_other_recompute}}}});
  return all;
}

LeastBeyond least_beyond(const Restriction& restriction, const OpGraph& graph, const Cluster& cluster,
                         const TrainingSpec& training, Objective objective, bool fewer_devices, const Score& best,
                         const OpenParts& than, LayoutFloors& floors, CandidateMaker& maker) {
  // What restrictions leave out may need less memory, of which floors do not tell.
  if (!restriction.wider || objective == Objective::memory) return {};
  const auto& [request, width, beyond] = *restriction.wider;
  // Floors follow from the schedules, the context methods and the overlap that the space may have.
  std::unique_ptr<LayoutFloors> own;
  if (given<ScheduleKind>(request, Choice::schedule) == ScheduleKind::zero_bubble_h1 ||
      given<TensorOverlap>(request, Choice::tp_overlap) == TensorOverlap::ring ||
      width.most_ring_ranks != SpaceWidth{}.most_ring_ranks)
    own = std::make_unique<LayoutFloors>(graph, cluster, training, request, width, maker);
  OpenParts parts(graph, cluster, training, request, width, objective, fewer_devices, own ? *own : floors);
  std::vector<Open> open = parts.open_beyond(beyond, own ? nullptr : &than);
  const int most = !restriction.is_context                      ? most_parts_beyond
                   : graph.sequence >= shortest_shared_sequence ? most_parts_where_lifted
                                                                : most_parts_with_context;
  const auto is_later = [](const Open& a, const Open& b) {
    return std::pair(a.bound, a.place) > std::pair(b.bound, b.place);
  };
  std::ranges::make_heap(open, is_later);
  for (int looked_into = 0; !open.empty() && open.front().bound < best; ++looked_into) {
    if (looked_into == most) return {.is_bounded = true, .score = open.front().bound.first};
    std::ranges::pop_heap(open, is_later);
    const Open least = open.back();
    open.pop_back();
    const std::optional<std::vector<Open>> opened = parts.look_into(least.part);
    if (!opened) return {.is_bounded = true, .score = least.bound.first};
    for (const Open& one : *opened) {
      open.push_back(one);
      std::ranges::push_heap(open, is_later);
    }
  }
  return {.is_bounded = true, .score = {}};
}

}  // namespace parplan
