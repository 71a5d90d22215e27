#include "planner/search/restrictions.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "planner/cluster/routes.h"
#include "planner/parallel/context.h"
#include "planner/parallel/engine_layouts.h"
#include "planner/parallel/recompute.h"
#include "planner/parallel/techniques.h"
#include "planner/parallel/tensor.h"
#include "planner/plan/recompute.h"
#include "planner/search/best_first.h"
#include "planner/search/space_rows.h"
#include "planner/search/tried_with_best.h"

namespace parplan {
namespace {

// Parts that are looked into for one restriction; more where it may be lifted, and of context
// parallelism where that is searched.
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

// Whether a degree may be above 1 beside those that are given.
bool may_have(const SearchedSpace& space, Choice degree) {
  if (const auto value = given<std::int64_t>(space.request, degree)) return *value > 1;
  return space.cluster.devices() / product_of_degrees(space.request) > 1;
}

// Whether more ranks than one may share out a sequence unless the space leaves that out.
bool may_share_context(const SearchedSpace& space) {
  return space.training.engine.has_context && !gives_every_degree(space.request) && may_have(space, Choice::cp);
}

// Ranks with the same parameters.
bool may_have_replicas(const SearchedSpace& space) {
  return may_have(space, Choice::dp) ||
         (space.training.engine.has_context && given<std::int64_t>(space.request, Choice::cp).value_or(1) > 1) ||
         (may_share_context(space) && space.width.most_context_ranks > 1);
}

// Restrictions, each where it applies -------------------------------------------------------------

bool may_have_schedules(const SearchedSpace& space) {
  return space.training.engine.has_pipeline && !space.request[Choice::schedule] && may_have(space, Choice::pp);
}

std::optional<Restriction> other_interleaved(const SearchedSpace& space) {
  if (!may_have_schedules(space) || !space.training.engine.has_interleaved || space.request[Choice::stage_blocks])
    return std::nullopt;
  const SpaceContext narrow{space.graph, space.training, space.cluster.devices(), true, space.width};
  const auto is_beyond = [narrow](const ParallelSpec& spec) {
    if (spec.schedule != ScheduleKind::interleaved) return false;
    std::vector<ChoiceValue> usual;
    space_row_of(Choice::virtual_stages).values(narrow, spec, usual);
    return spec.zero_stage > 1 ||
           std::ranges::find(usual, ChoiceValue(std::int64_t{spec.virtual_stages})) == usual.end();
  };
  SpaceWidth wider = space.width;
  wider.interleaves_freely = true;
  const Engine& engine = space.training.engine;
  const bool shards = std::min(engine.most_zero, engine.most_zero_in_pipelines) > 1;
  const char* const with_shards = shards ? " or with ZeRO-2 and 3" : "";
  return Restriction{.what = fmt::format("interleaved pipelines in other numbers of stages{}", with_shards),
                     .options = {"--schedule interleaved"},
                     .wider = {{.request = with(space.request, Choice::schedule, ScheduleKind::interleaved),
                                .width = wider,
                                .beyond = {.of_degrees = has_stages, .layout = is_beyond},
                                .has_same_floors = true}}};
}

// A given cut is taken for one stage on each rank.
std::optional<Restriction> interleaved_in_given_stages(const SearchedSpace& space) {
  const auto cut = given<std::vector<int>>(space.request, Choice::stage_blocks);
  if (!cut || space.request[Choice::schedule] || space.request[Choice::virtual_stages] ||
      !space.training.engine.has_interleaved)
    return std::nullopt;
  const int stages = static_cast<int>(cut->size());
  LayoutRequest request = with(space.request, Choice::schedule, ScheduleKind::interleaved);
  // The cut says how many ranks there are, where it has one stage on each.
  request[Choice::stage_blocks].reset();
  request[Choice::pp].reset();
  SpaceWidth wider = space.width;
  wider.interleaves_freely = wider.groups_freely = true;
  const auto goes_around = [stages](const ParallelSpec& degrees) {
    return degrees.pp() > 1 && degrees.pp() < stages && stages % degrees.pp() == 0;
  };
  return Restriction{.what = "interleaved pipelines of these stages",
                     .options = {"--schedule interleaved", "--virtual-stages", "--micro-batch-group"},
                     .wider = {{.request = std::move(request),
                                .width = wider,
                                .beyond = {.of_degrees = goes_around, .layout = {}, .until = Beyond::Until::samples}}}};
}

// Floors by samples hold for groups of any number of micro-batches.
std::optional<Restriction> larger_groups(const SearchedSpace& space) {
  const Engine& engine = space.training.engine;
  const auto schedule = given<ScheduleKind>(space.request, Choice::schedule).value_or(ScheduleKind::interleaved);
  if (!engine.has_pipeline || !engine.has_interleaved || !engine.has_other_groups ||
      schedule != ScheduleKind::interleaved || space.request[Choice::micro_batch_group] || !may_have(space, Choice::pp))
    return std::nullopt;
  // What is left out then is interleaved_in_given_stages.
  if (space.request[Choice::stage_blocks] && !space.request[Choice::virtual_stages]) return std::nullopt;
  SpaceWidth wider = space.width;
  wider.groups_freely = true;
  return Restriction{.what = space.objective == Objective::memory
                                 ? "interleaved pipelines in other groups of micro-batches"
                                 : "interleaved pipelines in other groups of micro-batches, of other layouts",
                     .options = {"--micro-batch-group"},
                     .wider = {{.request = with(space.request, Choice::schedule, ScheduleKind::interleaved),
                                .width = wider,
                                .beyond = {.of_degrees = has_stages, .layout = {}, .until = Beyond::Until::samples}}}};
}

std::optional<Restriction> zero_bubble(const SearchedSpace& space) {
  const bool may_be_whole = given<std::int64_t>(space.request, Choice::zero_stage).value_or(0) <= 1;
  if (!may_have_schedules(space) || !space.training.engine.has_zero_bubble || !may_be_whole) return std::nullopt;
  SpaceWidth wider = space.width;
  wider.interleaves_freely = true;
  // What bounds zero_bubble_v bounds dualpipe_v, which has the same stages and degrees, and needs
  // more micro-batches.
  Restriction restriction{
      .what = "zero_bubble_h1, zero_bubble_v and dualpipe_v",
      .options = {"--schedule zero_bubble_h1", "--schedule zero_bubble_v", "--schedule dualpipe_v"},
      .wider = {}};
  for (const ScheduleKind kind : {ScheduleKind::zero_bubble_h1, ScheduleKind::zero_bubble_v})
    restriction.wider.push_back({.request = with(space.request, Choice::schedule, kind),
                                 .width = wider,
                                 .beyond = {.of_degrees = has_stages, .layout = {}, .until = Beyond::Until::samples}});
  return restriction;
}

std::optional<Restriction> other_shard_groups(const SearchedSpace& space) {
  const bool may_shard = space.training.engine.most_zero > 0 &&
                         given<std::int64_t>(space.request, Choice::zero_stage).value_or(1) > 0;
  // Six ranks have groups of two and of three.
  constexpr int fewest = 6;
  if (!space.training.engine.has_hybrid_sharding || space.width.shards_freely || space.request[Choice::dp_shard] ||
      !may_shard || space.cluster.devices() < fewest || !may_have_replicas(space))
    return std::nullopt;
  SpaceWidth wider = space.width;
  wider.shards_freely = true;
  const auto has_others = [](const ParallelSpec& degrees) {
    return degrees.replicas() >= fewest && !std::has_single_bit(static_cast<unsigned>(degrees.replicas()));
  };
  const SpaceContext narrow{space.graph, space.training, space.cluster.devices(), true, space.width};
  const auto is_other = [narrow](const ParallelSpec& spec) {
    std::vector<ChoiceValue> usual;
    space_row_of(Choice::dp_shard).values(narrow, spec, usual);
    return std::ranges::find(usual, ChoiceValue(std::int64_t{spec.mesh.dp_shard})) == usual.end();
  };
  return Restriction{.what = "hybrid sharding in groups of other sizes",
                     .options = {"--dp-shard"},
                     .wider = {{.request = space.request,
                                .width = wider,
                                .beyond = {.of_degrees = has_others, .layout = is_other},
                                .has_same_floors = true}}};
}

// Floors of time hold however far ahead parameters are gathered or brought from the host, and in
// however many collectives. The layouts are those that fit where that is not ahead at all, since
// each block ahead takes a buffer, and block by block, since parameters one by one are padded more.
std::optional<Restriction> other_gathers(const SearchedSpace& space) {
  const Engine& engine = space.training.engine;
  const bool may_gather = given<std::int64_t>(space.request, Choice::zero_stage).value_or(3) == 3 &&
                          engine.most_zero >= 3 && space.training.optimizer != Optimizer::muon &&
                          may_have_replicas(space);
  const bool brings = given<Offload>(space.request, Choice::offload).value_or(Offload{}).parameters != Home::device;
  const bool may_differ =
      (may_gather || brings) && engine.has_other_prefetch && !space.request[Choice::prefetch_depth];
  const bool may_gather_one_by_one = may_gather && engine.has_parameter_gathers && !space.request[Choice::gather_unit];
  if (!may_differ && !may_gather_one_by_one) return std::nullopt;
  std::vector<std::string> options;
  if (may_differ) options.emplace_back("--prefetch-depth");
  if (may_gather_one_by_one) options.emplace_back("--gather-unit parameter");
  const auto may_fetch = [brings](const ParallelSpec& degrees) { return brings || degrees.replicas() > 1; };
  const auto fetches = [brings](const ParallelSpec& spec) { return brings || spec.zero_stage == 3; };
  return Restriction{
      .what = !may_differ              ? "gathers of parameters one by one"
              : !may_gather_one_by_one ? "gathers of parameters other than one block ahead"
                                       : "gathers of parameters one by one, or other than one block ahead",
      .options = std::move(options),
      .wider = {{.request = may_differ ? with(space.request, Choice::prefetch_depth, std::int64_t{0}) : space.request,
                 .width = space.width,
                 .beyond = {.of_degrees = may_fetch, .layout = fetches},
                 .has_same_floors = space.objective != Objective::memory}}};
}

std::optional<Restriction> data_parallel(const SearchedSpace& space) {
  if (!space.training.engine.has_master || space.request[Choice::dp_method] || !may_have(space, Choice::dp))
    return std::nullopt;
  const auto has_replicas_alone = [](const ParallelSpec& degrees) {
    return degrees.dp() > 1 && degrees.dp() == degrees.mesh.size();
  };
  const auto has_master = [](const ParallelSpec& spec) { return spec.dp_method == DataMethod::master; };
  return Restriction{.what = "DataParallel",
                     .options = {"--dp-method master"},
                     .wider = {{.request = with(space.request, Choice::dp_method, DataMethod::master),
                                .width = space.width,
                                .beyond = {.of_degrees = has_replicas_alone, .layout = has_master},
                                .has_same_floors = true}}};
}

// Devices of one kind are as fast as one another: replicas are then best alike but for a remainder,
// which a number of them or a size of micro-batch may leave. Unlike ones may be any number, whether
// or not it divides the batch.
std::optional<Restriction> unlike_replicas_of_layouts(const SearchedSpace& space) {
  if (!is_own(space.training.engine) || space.request[Choice::replica_micro_batches] || !may_have(space, Choice::dp))
    return std::nullopt;
  const bool are_alike = space.cluster.groups.size() == 1;
  if (!are_alike && !space.width.balances_replicas)
    return Restriction{.what = "replicas with unlike numbers of micro-batches",
                       .options = {"--balance-replicas"},
                       .wider = {},
                       .bound = Restriction::Bound::devices};
  if (are_alike)
    return Restriction{.what = "replicas with a micro-batch more than others",
                       .options = {"--replica-micro-batches"},
                       .wider = {},
                       .bound = Restriction::Bound::remainder};
  if (space.request[Choice::dp]) return std::nullopt;
  return Restriction{.what = "numbers of replicas that do not divide the batch",
                     .options = {"--replica-micro-batches"},
                     .wider = {},
                     .bound = Restriction::Bound::devices};
}

// Slices of a product take no less than the whole.
std::optional<Restriction> sliced_products(const SearchedSpace& space) {
  const Engine& engine = space.training.engine;
  const bool may_cut_tokens =
      engine.has_sequence_parallel && given<bool>(space.request, Choice::sequence_parallel).value_or(true);
  if (!engine.has_tensor || !engine.has_tensor_overlap || space.request[Choice::tp_overlap] || !may_cut_tokens ||
      !may_have(space, Choice::tp))
    return std::nullopt;
  // The search tries it with the layouts of its best plans.
  return Restriction{
      .what = space.objective == Objective::memory ? "tensor parallelism overlapped by slices"
                                                   : "tensor parallelism overlapped by slices of other layouts",
      .options = {"--tp-overlap ring"},
      .wider = {{.request = with(space.request, Choice::sequence_parallel, true),
                 .width = space.width,
                 .beyond = {.of_degrees = has_tensor_ranks, .layout = {}, .until = Beyond::Until::samples},
                 .samples = SampleFloors::without_tensor_communication}}};
}

// Whether keys and values of other ranks may come to a rank: kernels that write all scores know no
// chunks of sequences.
bool brings_keys(const Engine& engine) {
  return engine.has_context_by_keys && engine.fused_attention;
}

// By more than so many ranks, in any way, or by up to `most`.
Restriction context_by_samples(const SearchedSpace& space, std::string what, std::vector<std::string> options,
                               int ranks, int most = any_context_ranks) {
  SpaceWidth wider = space.width;
  wider.most_context_ranks = most;
  wider.most_ring_ranks = wider.most_exchange_ranks = most;
  return {
      .what = std::move(what),
      .options = std::move(options),
      .wider = {
          {.request = space.request,
           .width = wider,
           .beyond = {.of_degrees = has_more_context_ranks_than(ranks), .layout = {}, .until = Beyond::Until::samples},
           .samples = SampleFloors::shared_over_context}}};
}

std::optional<Restriction> more_context(const SearchedSpace& space) {
  const int most = space.width.most_context_ranks;
  if (!may_share_context(space) || most >= space.cluster.devices()) return std::nullopt;
  const std::string what =
      most == 1 ? "context parallelism" : fmt::format("context parallelism over more than {} ranks", most);
  return context_by_samples(space, what, {"--cp"}, most);
}

std::optional<Restriction> context_rings(const SearchedSpace& space) {
  const int most = space.width.most_ring_ranks;
  if (!may_share_context(space) || std::min(space.width.most_context_ranks, space.cluster.devices()) <= most ||
      space.request[Choice::cp] || space.request[Choice::cp_method])
    return std::nullopt;
  const bool exchanges = space.width.most_exchange_ranks > 1, has_rings = brings_keys(space.training.engine);
  if (exchanges && !has_rings) return std::nullopt;
  std::vector<std::string> options;
  if (has_rings) options.emplace_back("--cp-method ring");
  if (!exchanges) options.emplace_back("--cp-method ulysses");
  // Groups of heads are tried with any method.
  const auto heads = std::ranges::find(tried_rows(), Choice::cp_ulysses, &TriedRow::choice);
  const std::string what = !has_rings   ? "context parallelism in exchange for heads"
                           : !exchanges ? "context parallelism around a ring or in exchange for heads"
                           : most == 1  ? "context parallelism around a ring"
                                        : fmt::format("context parallelism around rings of more than {} ranks", most);
  return context_by_samples(space, what + (is_tried(*heads, space) ? ", of other layouts" : ""), std::move(options),
                            most, space.width.most_context_ranks);
}

// Where sequences are shared out, a group of two is the least, and two groups. Their kernels do the
// work of other methods.
std::optional<Restriction> hierarchical_context(const SearchedSpace& space) {
  constexpr int fewest = 4;
  const Engine& engine = space.training.engine;
  const ContextMethod method =
      given<ContextMethod>(space.request, Choice::cp_method).value_or(ContextMethod::ring);
  const bool may_group = given<std::int64_t>(space.request, Choice::cp).value_or(fewest) >= fewest &&
                         method != ContextMethod::ulysses &&
                         (method != ContextMethod::all_gather || engine.has_hierarchical_gather);
  if (!may_share_context(space) || space.width.most_context_ranks < fewest || !engine.has_hierarchical_context ||
      !brings_keys(engine) || space.request[Choice::cp_ulysses] || !may_group || space.cluster.devices() < fewest)
    return std::nullopt;
  // The search tries it with the layouts of its best plans.
  Restriction restriction =
      context_by_samples(space,
                         space.objective == Objective::memory ? "hierarchical context parallelism"
                                                              : "hierarchical context parallelism of other layouts",
                         {"--cp-ulysses"}, fewest - 1, space.width.most_context_ranks);
  restriction.wider.front().beyond.of_degrees = [heads = key_value_groups(space.graph)](const ParallelSpec& degrees) {
    const std::int64_t own = heads % degrees.tp() == 0 ? heads / degrees.tp() : 1;
    for (std::int64_t ranks = 2; ranks < degrees.cp() && ranks <= own; ++ranks)
      if (degrees.cp() % ranks == 0 && own % ranks == 0) return true;
    return false;
  };
  return restriction;
}

// Another engine's plans have no other offload, and this one without a pipeline and without
// recompute alone.
std::optional<Restriction> offload_of_some_layers(const SearchedSpace& space) {
  const bool may_be_plain =
      given<std::int64_t>(space.request, Choice::pp).value_or(1) == 1 &&
      given<Recompute>(space.request, Choice::recompute).value_or(Recompute::none) == Recompute::none;
  constexpr Offload of_activations{.activations = Home::host};
  const int layers = most_layers_of_a_stage(space.graph, ParallelSpec{});
  if (!space.training.engine.has_offload_of_some_layers || !may_be_plain || layers < 2 ||
      lacks_homes(space.cluster, of_activations))
    return std::nullopt;
  Restriction::Wider wider{.request = space.request,
                           .width = space.width,
                           .beyond = {.of_degrees = [](const ParallelSpec& degrees) { return degrees.pp() == 1; },
                                      .layout = {},
                                      .room = Beyond::Room::any},
                           .has_same_floors = true};
  if (space.objective == Objective::memory) {
    // The more layers, the less stays.
    LayoutRequest request = with(space.request, Choice::offload, of_activations);
    request[Choice::offload_layers] = std::int64_t{layers - 1};
    request[Choice::recompute] = Recompute::none;
    wider = {.request = request, .width = space.width, .beyond = {.of_degrees = wider.beyond.of_degrees, .layout = {}}};
  }
  return Restriction{.what = "offload of the activations of some layers",
                     .options = {"--offload-layers"},
                     .wider = {wider},
                     .fits_other_cuts = space.objective != Objective::memory};
}

// What layouts take at least that copy fewer activations than the space does, whatever they
// recompute.
Restriction::Wider without_copies_of_activations(const SearchedSpace& space) {
  Offload others = std::get<Offload>(*space.request[Choice::offload]);
  others.activations = Home::device;
  return {.request = with(space.request, Choice::offload, others),
          .width = space.width,
          .beyond = {.of_degrees = has_anything, .layout = {}, .room = Beyond::Room::any, .also_what_fits = true}};
}

// All layers of the space have theirs where `--offload` says.
std::optional<Restriction> offload_of_fewer_layers(const SearchedSpace& space) {
  const int layers = most_layers_of_a_stage(space.graph, ParallelSpec{});
  if (!is_own(space.training.engine) || !offloads_activations(space.request) ||
      space.request[Choice::offload_layers] || layers < 2)
    return std::nullopt;
  // The more layers, the less memory.
  Restriction::Wider wider = without_copies_of_activations(space);
  if (space.objective == Objective::memory) wider.request = space.request;
  return Restriction{.what = "offload of the activations of only some layers",
                     .options = {"--offload-layers"},
                     .wider = {std::move(wider)}};
}

// What recomputes has less to copy: no stage is known to be faster without.
std::optional<Restriction> unlike_stages_with_offload(const SearchedSpace& space) {
  if (!space.training.engine.has_recompute_per_stage || !offloads_activations(space.request) ||
      space.request[Choice::recompute] || space.request[Choice::recompute_layers] || !may_have(space, Choice::pp))
    return std::nullopt;
  Restriction::Wider wider = without_copies_of_activations(space);
  wider.beyond.of_degrees = has_stages;
  if (space.objective == Objective::memory) wider.request = space.request;
  return Restriction{
      .what = "stages that recompute differently", .options = {}, .wider = {std::move(wider)}};
}

std::optional<Restriction> host_offload(const SearchedSpace& space) {
  const bool may_offload = std::ranges::any_of(all_offloads(), [&](const Offload& offload) {
    return offload != Offload{} && !lacks_homes(space.cluster, offload);
  });
  if (!may_offload || space.request[Choice::offload]) return std::nullopt;
  if (!is_own(space.training.engine)) return offload_of_some_layers(space);
  Restriction offload{.what = "offload",
                      .options = {"--offload"},
                      .wider = {},
                      .fits_other_cuts = space.objective != Objective::memory};
  if (space.objective == Objective::memory) {
    // What is in a file leaves as much of the device as what is on the host.
    for (const Offload& other : all_offloads())
      if (other != Offload{} && !uses(other, Home::nvme) && !lacks_homes(space.cluster, other))
        offload.wider.push_back({.request = with(space.request, Choice::offload, other),
                                 .width = space.width,
                                 .beyond = {.of_degrees = has_anything, .layout = {}}});
  } else {
    offload.wider.push_back({.request = space.request,
                             .width = space.width,
                             .beyond = {.of_degrees = has_anything,
                                        .layout = {},
                                        .room = Beyond::Room::any,
                                        .also_what_fits = !devices_update_sooner(space.cluster)},
                             .has_same_floors = true});
  }
  return offload;
}

std::optional<Restriction> other_recompute(const SearchedSpace& space) {
  const Engine& engine = space.training.engine;
  const std::span<const Recompute> searched = searched_recomputes(engine);
  if (space.request[Choice::recompute] || searched.size() == 1) return std::nullopt;
  const auto is_other = [&](const RecomputeRow& row) {
    ParallelSpec spec;
    spec.recompute = row.kind;
    return std::ranges::find(searched, row.kind) == searched.end() && !lacked_by_engine(engine, spec);
  };
  const bool of_modules = std::ranges::any_of(recompute_rows(), is_other);
  const bool of_layers = !space.width.recomputes_fewest_layers &&
                         (engine.has_recompute_of_some_layers || engine.has_modules_of_some_layers);
  if (!of_modules && !of_layers) return std::nullopt;
  std::vector<std::string> options;
  // --recompute-fewest-layers chooses what is recomputed: the two exclude each other.
  if (of_modules && !space.width.recomputes_fewest_layers) options.emplace_back("--recompute");
  if (of_layers)
    options.emplace_back(engine.has_recompute_per_stage ? "--recompute-fewest-layers" : "--recompute-layers");
  Restriction recompute{.what = !of_layers    ? "other modules to recompute"
                                : !of_modules ? "only some layers to recompute"
                                              : "other modules or only some layers to recompute",
                        .options = std::move(options),
                        .wider = {},
                        .fits_other_cuts = space.objective != Objective::memory};
  if (space.objective != Objective::memory && offloads_activations(space.request))
    recompute.wider.push_back(without_copies_of_activations(space));
  else if (space.objective != Objective::memory)
    recompute.wider.push_back(
        {.request = space.request,
         .width = space.width,
         .beyond = {.of_degrees = has_anything, .layout = {}, .room = Beyond::Room::with_other_recompute},
         .has_same_floors = true});
  else
    for (const RecomputeRow& row : recompute_rows())
      if (is_other(row))
        recompute.wider.push_back({.request = with(space.request, Choice::recompute, row.kind),
                                   .width = space.width,
                                   .beyond = {.of_degrees = has_anything, .layout = {}}});
  return recompute;
}

// All layers of the space recompute what `--recompute` gives.
std::optional<Restriction> some_layers_to_recompute(const SearchedSpace& space) {
  const Engine& engine = space.training.engine;
  const auto all = given<Recompute>(space.request, Choice::recompute);
  if (!all || *all == Recompute::none || *all == Recompute::per_stage || space.request[Choice::recompute_layers])
    return std::nullopt;
  if (*all == Recompute::full ? !engine.has_recompute_of_some_layers : !engine.has_modules_of_some_layers)
    return std::nullopt;
  const int layers = most_layers_of_a_stage(space.graph, ParallelSpec{});
  if (layers < 2) return std::nullopt;
  // The fewer layers, the less time; the more, the less memory.
  LayoutRequest request = space.request;
  if (space.objective != Objective::memory) request[Choice::recompute] = Recompute::none;
  return Restriction{.what = "recompute of only some layers",
                     .options = {"--recompute-layers"},
                     .wider = {{.request = std::move(request),
                                .width = space.width,
                                .beyond = {.of_degrees = has_anything,
                                           .layout = {},
                                           .room = Beyond::Room::any,
                                           .also_what_fits = true}}}};
}

// Switches and shared memory join all devices of a node alike.
bool joins_all_alike(const NodeKind& node) {
  const auto& between = routes_of(node)->between;
  for (std::size_t a = 0; a < between.size(); ++a)
    for (std::size_t b = 0; b < between.size(); ++b)
      if (a != b && (between[a][b].distance != between[0][1].distance ||
                     between[a][b].bandwidth != between[0][1].bandwidth))
        return false;
  return true;
}

// Ranks are on the first devices of each node, in their order.
std::optional<Restriction> other_devices_of_nodes(const SearchedSpace& space) {
  const auto joins = [](const NodeGroup& group) { return joins_all_alike(group.node); };
  if (space.objective == Objective::memory || std::ranges::all_of(space.cluster.groups, joins)) return std::nullopt;
  const bool has_option = space.cluster.nodes() == 1;
  return Restriction{.what = has_option ? "other devices of the node, or in another order, as --device-ids gives"
                                        : "other devices of nodes, or in another order",
                     .options = {},
                     .wider = {},
                     .bound = Restriction::Bound::devices};
}

constexpr std::array restriction_rows = {
    other_interleaved,    larger_groups,
    interleaved_in_given_stages, zero_bubble,
    other_shard_groups,   other_gathers,
    data_parallel,        unlike_replicas_of_layouts,
    sliced_products,      more_context,
    context_rings,        hierarchical_context,
    host_offload,         offload_of_fewer_layers,
    other_recompute,      some_layers_to_recompute,
    unlike_stages_with_offload, other_devices_of_nodes};

}  // namespace

std::vector<Restriction> restrictions(const SearchedSpace& space) {
  std::vector<Restriction> all;
  for (const auto& row : restriction_rows)
    if (std::optional<Restriction> one = row(space)) all.push_back(*std::move(one));
  return all;
}

namespace {

// `than`: see OpenParts::open_beyond.
std::optional<double> least_of(const Restriction::Wider& wider, int most_parts, const SearchedSpace& space,
                               const Score& best, const OpenParts* than, LayoutFloors& floors, CandidateMaker& maker) {
  std::optional<LayoutFloors> own;
  const bool needs_no_times =
      space.objective == Objective::memory && wider.samples != SampleFloors::shared_by_unlike_replicas;
  if (!wider.has_same_floors)
    own.emplace(space.graph, space.cluster, space.training, wider.request, wider.width, maker,
                needs_no_times ? SampleFloors::none : wider.samples);
  OpenParts parts(space.graph, space.cluster, space.training, wider.request, wider.width, space.objective,
                  space.least_devices, own ? *own : floors);
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

std::optional<double> below(double least, const Score& best) {
  return least < best.first ? std::optional(least) : std::nullopt;
}

double score_of(const SearchedSpace& space, const Floor& floor, int devices, int replicas) {
  ParallelSpec spec;
  spec.mesh.degree.dp = replicas;
  spec.mesh.degree.tp = devices / replicas;
  MemoryUse memory;
  memory.parameters = floor.memory;
  return score(space.objective, space.cluster, spec, floor.time, memory).first;
}

// On two devices or more.
std::optional<double> least_of_devices(const SearchedSpace& space, const Score& best, const LayoutFloors& floors) {
  double least = std::numeric_limits<double>::infinity();
  for (int devices = std::max(space.least_devices, 2); devices <= space.cluster.devices(); ++devices)
    least = std::min(least, score_of(space, floors.of_devices(devices), devices, devices));
  return below(least, best);
}

// The least time of all devices together for the batch, with any tensor and context parallelism.
Seconds device_seconds_of_batch(const SearchedSpace& space, LayoutFloors& floors) {
  Seconds least(std::numeric_limits<double>::infinity());
  const int devices = space.cluster.devices();
  for (const int tp : legal_tensor_degrees(space.graph, space.training, {}, devices))
    for (const std::int64_t cp : divisors(space.graph.sequence)) {
      ParallelSpec spec;
      spec.mesh.degree.tp = tp;
      spec.mesh.degree.cp = static_cast<int>(cp);
      if (cp > space.width.most_context_ranks || spec.mesh.size() > devices) break;
      least = std::min(least, spec.mesh.size() * floors.of_degrees(spec).time);
    }
  return least;
}

// The fewest samples of the fullest of so many replicas where they cannot have as many
// micro-batches each; nothing where all sizes of micro-batch share the batch out evenly.
std::optional<std::int64_t> fewest_with_remainder(const SearchedSpace& space, int replicas) {
  const auto size = given<std::int64_t>(space.request, Choice::micro_batch);
  std::optional<std::int64_t> fewest;
  for (const std::int64_t micro_batch : divisors(space.training.global_batch)) {
    const std::int64_t count = space.training.global_batch / micro_batch;
    if (count < replicas) break;
    if (count % replicas == 0 || micro_batch != size.value_or(micro_batch)) continue;
    const std::int64_t own = ceil_div(count, replicas) * micro_batch;
    fewest = std::min(fewest.value_or(own), own);
  }
  return fewest;
}

// One of the replicas on equal devices has a micro-batch more than its share.
std::optional<double> least_with_remainder(const SearchedSpace& space, const Score& best, LayoutFloors& floors) {
  const std::int64_t batch = space.training.global_batch;
  const Seconds of_batch = device_seconds_of_batch(space, floors);
  const std::int64_t asked = given<std::int64_t>(space.request, Choice::dp).value_or(0);
  const std::int64_t of_each = product_of_degrees(space.request) / std::max<std::int64_t>(asked, 1);
  double least = std::numeric_limits<double>::infinity();
  // Each on as many devices as it can have, which no objective dislikes.
  for (int replicas = 2; replicas <= std::min(space.cluster.devices() / of_each, batch); ++replicas) {
    const int devices = space.cluster.devices() / replicas * replicas;
    if ((asked > 0 && replicas != asked) || devices < space.least_devices) continue;
    const std::optional<std::int64_t> samples = fewest_with_remainder(space, replicas);
    if (!samples) continue;
    Floor floor = floors.of_devices(devices);
    const double more = static_cast<double>(*samples * replicas) / static_cast<double>(batch);
    floor.time = std::max(floor.time, of_batch / devices) * more * (1 - 1e-9);
    least = std::min(least, score_of(space, floor, devices, replicas));
  }
  return below(least, best);
}

}  // namespace

std::optional<double> least_beyond(const Restriction& restriction, const SearchedSpace& space, const Score& best,
                                   const OpenParts& than, LayoutFloors& floors, CandidateMaker& maker) {
  if (restriction.bound == Restriction::Bound::devices) return least_of_devices(space, best, floors);
  if (restriction.bound == Restriction::Bound::remainder) return least_with_remainder(space, best, floors);
  std::optional<double> least;
  for (const Restriction::Wider& wider : restriction.wider) {
    // On unlike nodes, parts are looked into once more, for the orders of the axes.
    const int beyond = most_parts_beyond * (space.cluster.groups.size() > 1 ? 2 : 1);
    const int most = wider.samples == SampleFloors::shared_over_context ? most_parts_where_lifted : beyond;
    if (const std::optional<double> one = least_of(wider, most, space, best, &than, floors, maker))
      least = std::min(least.value_or(*one), *one);
  }
  return least;
}

bool is_worth_context(const SearchedSpace& space, LayoutFloors& floors, CandidateMaker& maker) {
  const int most = space.width.most_context_ranks;
  if (most == any_context_ranks || !may_share_context(space)) return false;
  const auto least = [&](const Restriction::Wider& wider) {
    constexpr Score any{std::numeric_limits<double>::infinity(), 0.0};
    return least_of(wider, most_parts_where_lifted, space, any, nullptr, floors, maker);
  };
  const std::optional<double> without =
      least({.request = space.request,
             .width = space.width,
             .beyond = {.of_degrees = has_anything, .layout = {}, .until = Beyond::Until::samples},
             .has_same_floors = true});
  const std::optional<double> with = least(context_by_samples(space, "", {}, most).wider.front());
  return without && with && *without > (1.0 + worth_context) * *with;
}

}  // namespace parplan
