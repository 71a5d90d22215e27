#include "planner/search/restrictions.h"

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "planner/parallel/engine_layouts.h"
#include "planner/plan/recompute.h"
#include "planner/search/best_first.h"
#include "planner/search/space_rows.h"

namespace parplan {
namespace {

// Parts that are looked into for one restriction; more where it may be lifted.
constexpr int most_parts_beyond = 1024, most_parts_where_lifted = 8192;

bool has_stages(const ParallelSpec& degrees) {
  return degrees.pp() > 1;
}

bool has_tensor_ranks(const ParallelSpec& degrees) {
  return degrees.tp() > 1;
}

// More than so many ranks that share out a sequence.
auto has_more_context_ranks_than(int ranks) {
  return [ranks](const ParallelSpec& degrees) { return degrees.cp() > ranks; };
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

bool may_have(const LayoutRequest& request, Choice degree) {
  return given<std::int64_t>(request, degree).value_or(2) > 1;
}

// Whether more ranks than one may share out a sequence unless the space leaves that out.
bool may_share_context(const Cluster& cluster, const Engine& engine, const LayoutRequest& request) {
  return cluster.devices() > 1 && engine.has_context && !gives_every_degree(request) && may_have(request, Choice::cp);
}

// All context parallelism by more than so many ranks.
Restriction::Wider by_samples(const Cluster& cluster, const LayoutRequest& request, SpaceWidth width, int ranks) {
  width.shares_context = true;
  width.most_ring_ranks = cluster.devices();
  return {.request = request,
          .width = width,
          .beyond = {.of_degrees = has_more_context_ranks_than(ranks),
                     .layout = {},
                     .until = Beyond::Until::samples},
          .samples = SampleFloors::shared_over_context};
}

}  // namespace

std::vector<Restriction> restrictions(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                                      Objective objective, const LayoutRequest& request, const SpaceWidth& width) {
  const Engine& engine = training.engine;
  std::vector<Restriction> all;
  const std::int64_t zero_stage = given<std::int64_t>(request, Choice::zero_stage).value_or(0);
  if (cluster.devices() > 1 && !request[Choice::schedule] && may_have(request, Choice::pp) && engine.has_pipeline) {
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
                     .wider = {{.request = with(request, Choice::schedule, ScheduleKind::interleaved),
                                .width = wider,
                                .beyond = {.of_degrees = has_stages, .layout = is_beyond},
                                .has_same_floors = true}}});
    if (engine.has_zero_bubble && zero_stage <= 1)
      all.push_back({.what = "zero_bubble_h1",
                     .wider = {{.request = with(request, Choice::schedule, ScheduleKind::zero_bubble_h1),
                                .width = wider,
                                .beyond = {.of_degrees = has_stages, .layout = {}}}}});
  }
  if (cluster.devices() > 1 && engine.has_master && !request[Choice::dp_method] && may_have(request, Choice::dp))
    all.push_back(
        {.what = "DataParallel",
         .wider = {
             {.request = with(request, Choice::dp_method, DataMethod::master),
              .width = width,
              .beyond = {.of_degrees = [](const ParallelSpec& degrees) { return degrees.dp() > 1 &&
                                                                                degrees.dp() == degrees.mesh.size(); },
                         .layout = [](const ParallelSpec& spec) { return spec.dp_method == DataMethod::master; }},
              .has_same_floors = true}}});
  // Slices of a product take no less than the whole.
  const bool may_cut_tokens = given<bool>(request, Choice::sequence_parallel).value_or(true);
  if (cluster.devices() > 1 && engine.has_tensor && engine.has_sequence_parallel && engine.has_tensor_overlap &&
      !request[Choice::tp_overlap] && may_have(request, Choice::tp) && may_cut_tokens)
    all.push_back({.what = "tensor parallelism overlapped by slices",
                   .wider = {{.request = with(request, Choice::sequence_parallel, true),
                              .width = width,
                              .beyond = {.of_degrees = has_tensor_ranks,
                                         .layout = {},
                                         .until = Beyond::Until::samples},
                              .samples = SampleFloors::without_tensor_communication}}});
  if (may_share_context(cluster, engine, request)) {
    const auto more_ranks_than = [&](std::string what, int ranks) {
      return Restriction{.what = std::move(what), .wider = {by_samples(cluster, request, width, ranks)}};
    };
    if (!width.shares_context) {
      Restriction any = more_ranks_than("context parallelism", 1);
      any.is_context = graph.sequence >= shortest_shared_sequence;
      if (any.is_context)
        any.closer = {{.what = "context parallelism by gathered keys and values or exchange for heads",
                       .wider = {{.request = request,
                                  .width = with_context(width),
                                  .beyond = {.of_degrees = has_more_context_ranks_than(1), .layout = {}}}},
                       .is_context = true},
                      more_ranks_than("context parallelism around a ring", 1)};
      all.push_back(std::move(any));
    } else if (!request[Choice::cp] && !request[Choice::cp_method]) {
      all.push_back(width.most_ring_ranks == 1
                        ? more_ranks_than("context parallelism around a ring", 1)
                        : more_ranks_than(fmt::format("context parallelism around rings of more than {} ranks",
                                                      width.most_ring_ranks),
                                          width.most_ring_ranks));
    }
  }
  const bool has_host =
      std::ranges::any_of(cluster.groups, [](const NodeGroup& group) { return group.host.has_value(); });
  if (has_host && !request[Choice::offload]) {
    Restriction offload{.what = "offload of the optimizer's state", .wider = {}};
    if (objective == Objective::memory)
      offload.wider.push_back({.request = with(request, Choice::offload, Offload::optimizer),
                               .width = width,
                               .beyond = {.of_degrees = has_anything, .layout = {}}});
    else
      offload.wider.push_back({.request = request,
                               .width = width,
                               .beyond = {.of_degrees = has_anything,
                                          .layout = {},
                                          .room = Beyond::Room::any,
                                          .also_what_fits = !devices_update_sooner(cluster)},
                               .has_same_floors = true});
    all.push_back(std::move(offload));
  }
  const std::span<const Recompute> searched = searched_recomputes(engine);
  if (!request[Choice::recompute] && searched.size() > 1) {
    Restriction recompute{.what = "other modules to recompute", .wider = {}};
    if (objective != Objective::memory)
      recompute.wider.push_back(
          {.request = request,
           .width = width,
           .beyond = {.of_degrees = has_anything, .layout = {}, .room = Beyond::Room::with_other_recompute},
           .has_same_floors = true});
    else
      for (const RecomputeRow& row : recompute_rows())
        if (std::ranges::find(searched, row.kind) == searched.end())
          recompute.wider.push_back({.request = with(request, Choice::recompute, row.kind),
                                     .width = width,
                                     .beyond = {.of_degrees = has_anything, .layout = {}}});
    all.push_back(std::move(recompute));
  }
  return all;
}

namespace {

// `than`: see OpenParts::open_beyond.
std::optional<double> least_of(const Restriction::Wider& wider, int most_parts, const OpGraph& graph,
                               const Cluster& cluster, const TrainingSpec& training, Objective objective,
                               bool fewer_devices, const Score& best, const OpenParts* than, LayoutFloors& floors,
                               CandidateMaker& maker) {
  std::optional<LayoutFloors> own;
  if (!wider.has_same_floors)
    own.emplace(graph, cluster, training, wider.request, wider.width, maker, wider.samples);
  OpenParts parts(graph, cluster, training, wider.request, wider.width, objective, fewer_devices,
                  own ? *own : floors);
  std::vector<Open> open = parts.open_beyond(wider.beyond, own ? nullptr : than);
  const auto is_later = [](const Open& a, const Open& b) {
    return std::pair(a.bound, a.place) > std::pair(b.bound, b.place);
  };
  std::ranges::make_heap(open, is_later);
  for (int looked_into = 0; !open.empty() && open.front().bound < best; ++looked_into) {
    if (looked_into == most_parts) return open.front().bound.first;
    std::ranges::pop_heap(open, is_later);
    const Open least = open.back();
    open.pop_back();
    const std::optional<std::vector<Open>> opened = parts.look_into(least.part);
    if (!opened) return least.bound.first;
    for (const Open& one : *opened) {
      open.push_back(one);
      std::ranges::push_heap(open, is_later);
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<double> least_beyond(const Restriction& restriction, const OpGraph& graph, const Cluster& cluster,
                                   const TrainingSpec& training, Objective objective, bool fewer_devices,
                                   const Score& best, const OpenParts& than, LayoutFloors& floors,
                                   CandidateMaker& maker) {
  const int most = restriction.is_context ? most_parts_where_lifted : most_parts_beyond;
  std::optional<double> least;
  for (const Restriction::Wider& wider : restriction.wider)
    if (const std::optional<double> one = least_of(wider, most, graph, cluster, training, objective, fewer_devices,
                                                   best, &than, floors, maker))
      least = std::min(least.value_or(*one), *one);
  return least;
}

bool is_surely_worth_context(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                             Objective objective, const LayoutRequest& request, const SpaceWidth& width,
                             bool fewer_devices, LayoutFloors& floors, CandidateMaker& maker) {
  if (width.shares_context || !may_share_context(cluster, training.engine, request)) return false;
  const auto least = [&](const Restriction::Wider& wider) {
    constexpr Score any{std::numeric_limits<double>::infinity(), 0.0};
    return least_of(wider, most_parts_where_lifted, graph, cluster, training, objective, fewer_devices, any, nullptr,
                    floors, maker);
  };
  const std::optional<double> without = least({.request = request,
                                               .width = width,
                                               .beyond = {.of_degrees = has_anything,
                                                          .layout = {},
                                                          .until = Beyond::Until::samples},
                                               .has_same_floors = true});
  const std::optional<double> with = least(by_samples(cluster, request, width, 1));
  return without && with && *without > (1.0 + worth_context) * *with;
}

}  // namespace parplan
