#include "planner/search/space_rows.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <numeric>
#include <set>

#include "planner/parallel/cut_stages.h"
#include "planner/parallel/pipeline.h"
#include "planner/parallel/recompute.h"
#include "planner/parallel/techniques.h"
#include "planner/parallel/tensor.h"
#include "planner/schedule/schedules.h"

namespace parplan {
namespace {

using Values = std::vector<ChoiceValue>;

// ---- values ----

void tensor_degrees(const SpaceContext& context, const ParallelSpec& /*spec*/, Values& values) {
  if (context.uses_all)
    for (const std::int64_t degree : divisors(context.devices)) values.emplace_back(degree);
  else
    for (const int degree : legal_tensor_degrees(context.graph, context.training, {}, context.devices))
      values.emplace_back(degree);
}

void pipeline_degrees(const SpaceContext& context, const ParallelSpec& spec, Values& values) {
  const int left = context.devices / spec.tp();
  if (context.uses_all)
    for (const std::int64_t degree : divisors(left)) values.emplace_back(degree);
  else
    for (const int degree : legal_pipeline_degrees(context.graph, context.training, spec, left))
      values.emplace_back(degree);
}

// Those that divide the sequence; `illegal` looks at its parts.
void context_degrees(const SpaceContext& context, const ParallelSpec& spec, Values& values) {
  const int left = context.devices / spec.tp() / spec.pp();
  for (const std::int64_t degree : divisors(context.graph.sequence)) {
    if (degree > std::min(left, context.width.most_context_ranks)) break;
    if (!context.uses_all || left % degree == 0) values.emplace_back(degree);
  }
}

void methods_of_context(const SpaceContext& context, const ParallelSpec& spec, Values& values) {
  for (const ContextMethod method : context_methods)
    if (is_searched(method, spec.cp(), context.width)) values.emplace_back(method);
}

// What groups gain follows from the links: only for those who ask (restrictions.h).
void no_groups_of_heads(const SpaceContext& /*context*/, const ParallelSpec& /*spec*/, Values& values) {
  values.emplace_back(std::int64_t{1});
}

// The degree that the other axes leave, or all that they leave room for.
void data_degrees(const SpaceContext& context, const ParallelSpec& spec, Values& values) {
  const int left = context.devices / spec.tp() / spec.pp() / spec.cp();
  if (const int asked = context.width.unlike_replicas; asked > 0) {
    if (context.uses_all ? asked == left : asked <= left) values.emplace_back(std::int64_t{asked});
    return;
  }
  if (context.uses_all && context.training.global_batch % left == 0) values.emplace_back(left);
  if (!context.uses_all)
    for (const std::int64_t degree : divisors(context.training.global_batch))
      if (degree <= left) values.emplace_back(degree);
}

// A free cut is found once the rest of the layout is chosen (CandidateMaker).
void free_cut(const SpaceContext& /*context*/, const ParallelSpec& /*spec*/, Values& values) {
  values.emplace_back(std::vector<int>{});
}

void with_and_without_sequence_parallel(const SpaceContext& /*context*/, const ParallelSpec& spec, Values& values) {
  values.emplace_back(false);
  if (spec.tp() > 1) values.emplace_back(true);
}

void zero_stages(const SpaceContext& /*context*/, const ParallelSpec& spec, Values& values) {
  for (int stage = 0; stage <= (spec.replicas() > 1 ? 3 : 0); ++stage) values.emplace_back(stage);
}

// 0 stands for all.
void ranks_that_shard(const SpaceContext& context, const ParallelSpec& spec, Values& values) {
  values.emplace_back(std::int64_t{0});
  if (!context.training.engine.has_hybrid_sharding || spec.zero_stage == 0) return;
  std::int64_t before = 1;
  for (const std::int64_t ranks : divisors(spec.replicas())) {
    if (ranks == spec.replicas()) break;
    if (ranks == 1 || (!context.width.shards_freely && ranks < 2 * before)) continue;
    values.emplace_back(ranks);
    before = ranks;
  }
}

void micro_batch_sizes(const SpaceContext& context, const ParallelSpec& spec, Values& values) {
  ParallelSpec with_size = spec;
  if (!spec.replica_micro_batches.empty()) {
    const std::int64_t batch = context.training.global_batch;
    const std::int64_t all =
        std::accumulate(spec.replica_micro_batches.begin(), spec.replica_micro_batches.end(), std::int64_t{0});
    if (all > 0 && batch % all == 0) values.emplace_back(batch / all);
    return;
  }
  for (const std::int64_t size : divisors(context.training.global_batch / spec.mesh.batch_ranks())) {
    with_size.micro_batch = size;
    if (!has_too_many_calls(context.training, with_size)) values.emplace_back(size);
  }
}

// What replicas sustain follows from the rest of the layout: only for those who ask.
void alike_replicas(const SpaceContext& /*context*/, const ParallelSpec& /*spec*/, Values& values) {
  values.emplace_back(std::vector<int>{});
}

// Interleaved stages are small: ZeRO-2 and 3, which reduce or gather what a stage holds for every
// micro-batch, are not for them unless asked for. A given cut has one stage on each rank, unless
// their number is given, too. Zero-bubble pipelines are only for those who ask for them.
void schedules(const SpaceContext& context, const ParallelSpec& spec, Values& values) {
  if (spec.pp() == 1) {
    values.emplace_back(ParallelSpec{}.schedule);
    return;
  }
  const Engine& engine = context.training.engine;
  const bool may_interleave = engine.has_interleaved &&
                              ((spec.zero_stage <= 1 && spec.stage_blocks.empty()) || context.width.interleaves_freely);
  // The first of equal plans is ranked: the plain one.
  values.emplace_back(ScheduleKind::one_f_one_b);
  if (engine.has_gpipe) values.emplace_back(ScheduleKind::gpipe);
  if (may_interleave) values.emplace_back(ScheduleKind::interleaved);
}

bool accepts_schedule(const SpaceContext& /*context*/, const ParallelSpec& spec, const ChoiceValue& given) {
  const auto kind = std::get<ScheduleKind>(given);
  if (is_v_shaped(kind) && !spec.replica_micro_batches.empty()) return false;
  return !runs_backward_in_parts(kind) || spec.zero_stage <= 1;
}

bool interleaves(const ParallelSpec& spec) {
  return spec.pp() > 1 && spec.schedule == ScheduleKind::interleaved;
}

// 0 stands for as many micro-batches as ranks.
bool accepts_group(const SpaceContext& context, const ParallelSpec& spec, const ChoiceValue& given) {
  if (spec.schedule == ScheduleKind::dualpipe_v && micro_batches(spec, context.training) < 2 * spec.pp()) return false;
  const std::int64_t group = std::get<std::int64_t>(given);
  if (!interleaves(spec)) return group == 0;
  if (group != 0 && group != spec.pp() && !context.training.engine.has_other_groups) return false;
  const std::int64_t size = group == 0 ? spec.pp() : group;
  // Replicas with unlike numbers have whole groups.
  if (!spec.replica_micro_batches.empty())
    return size >= spec.pp() &&
           std::ranges::all_of(spec.replica_micro_batches, [&](int replica) { return replica % size == 0; });
  return allows_group(micro_batches(spec, context.training), spec.pp(), size);
}

// As many micro-batches as ranks. Larger groups keep more activations: for those who ask, and with
// the layouts of the best plans (restrictions.h).
void allowed_group(const SpaceContext& context, const ParallelSpec& spec, Values& values) {
  if (accepts_group(context, spec, 0)) {
    values.emplace_back(0);
  } else if ((context.width.takes_larger_groups || context.width.groups_freely) && interleaves(spec) &&
             spec.replica_micro_batches.empty()) {
    if (const auto group = smallest_group(micro_batches(spec, context.training), spec.pp()))
      values.emplace_back(*group);
  }
}

bool accepts_virtual_stages(const SpaceContext& context, const ParallelSpec& spec, const ChoiceValue& given) {
  const std::int64_t number = std::get<std::int64_t>(given);
  const bool goes_back = spec.pp() > 1 && is_v_shaped(spec.schedule);
  const auto stages = static_cast<std::int64_t>(spec.stage_blocks.size());
  if (stages > 0 && number * spec.pp() != stages) return false;
  if (!interleaves(spec) && !goes_back) return number == 1;
  return (goes_back ? number == 2 : number >= 2) &&
         number * spec.pp() <= static_cast<std::int64_t>(context.graph.blocks.size());
}

void numbers_of_virtual_stages(const SpaceContext& context, const ParallelSpec& spec, Values& values) {
  if (!interleaves(spec)) {
    for (const std::int64_t number : {1, 2})
      if (accepts_virtual_stages(context, spec, number)) values.emplace_back(number);
    return;
  }
  // As Megatron-LM demands: layers, with or without the embedding and the head counted as one each.
  const std::int64_t blocks = static_cast<std::int64_t>(context.graph.blocks.size());
  std::vector<std::int64_t> numbers;
  if (context.width.interleaves_freely)
    for (std::int64_t number = 2; number * spec.pp() <= blocks; ++number) numbers.push_back(number);
  else
    for (std::int64_t counted = blocks - context.width.blocks_beside_layers; counted <= blocks; ++counted)
      if (counted % spec.pp() == 0) std::ranges::copy(divisors(counted / spec.pp()), std::back_inserter(numbers));
  std::ranges::sort(numbers);
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  for (const std::int64_t number : numbers)
    if (accepts_virtual_stages(context, spec, number)) values.emplace_back(number);
}

void recomputes(const SpaceContext& context, const ParallelSpec& /*spec*/, Values& values) {
  for (const Recompute recompute : searched_recomputes(context.training.engine)) values.emplace_back(recompute);
}

// All layers, unless asked for.
void every_layer(const SpaceContext& /*context*/, const ParallelSpec& /*spec*/, Values& values) {
  values.emplace_back(0);
}

bool accepts_layers(const SpaceContext& context, const ParallelSpec& spec, const ChoiceValue& given) {
  return std::get<std::int64_t>(given) <= most_layers_of_a_stage(context.graph, spec);
}

// One accumulator takes less memory and less time; two are for who asks for their bits.
void one_accumulator(const SpaceContext& /*context*/, const ParallelSpec& /*spec*/, Values& values) {
  values.emplace_back(TiedGradients::together);
}

// Each candidate stands for both, which have one lower bound (SpaceSearch).
void as_many_as_in_flight(const SpaceContext& /*context*/, const ParallelSpec& /*spec*/, Values& values) {
  values.emplace_back(InputSlots::in_flight);
}

// What the host updates is slower on every cluster, and what is copied there is no faster: only for
// those who ask for it, or need it.
void nothing_on_host(const SpaceContext& /*context*/, const ParallelSpec& /*spec*/, Values& values) {
  values.emplace_back(Offload{});
}

// All ranks reducing gradients is never slower: only for those who ask.
void no_master(const SpaceContext& /*context*/, const ParallelSpec& /*spec*/, Values& values) {
  values.emplace_back(DataMethod::all_reduce);
}

// What slices cost and hide follows from the links: for those who ask, and with the layouts of the
// best plans (restrictions.h).
void no_overlap(const SpaceContext& /*context*/, const ParallelSpec& /*spec*/, Values& values) {
  values.emplace_back(TensorOverlap::none);
}

// What a deeper prefetch hides follows from the links, and a block more of memory is what it takes:
// only for those who ask (restrictions.h).
void one_block_ahead(const SpaceContext& /*context*/, const ParallelSpec& /*spec*/, Values& values) {
  values.emplace_back(std::int64_t{ParallelSpec{}.prefetch_depth});
}

// One collective takes no longer than several of the same bytes: only for those who ask.
void blocks_together(const SpaceContext& /*context*/, const ParallelSpec& /*spec*/, Values& values) {
  values.emplace_back(GatherUnit::block);
}

// The orders that differ on axes of more than one rank; each stands for all orders that differ from
// it only elsewhere.
std::vector<AxisOrder> distinct_orders(const PerAxis<bool>& has_several) {
  AxisOrder order;
  std::vector<AxisOrder> orders;
  std::set<std::vector<Axis>> seen;
  do {
    std::vector<Axis> matters;
    for (const Axis axis : order)
      if (has_several[axis]) matters.push_back(axis);
    if (seen.insert(matters).second) orders.push_back(order);
  } while (std::next_permutation(order.begin(), order.end()));
  return orders;
}

// Every set of axes with several ranks, listed once, since a space is counted for many numbers of
// devices.
using OrdersOfSets = std::array<std::vector<AxisOrder>, std::size_t{1} << count_of<Axis>>;
OrdersOfSets all_distinct_orders() {
  OrdersOfSets orders;
  for (std::size_t set = 0; set < orders.size(); ++set) {
    PerAxis<bool> has_several;
    for (const Axis axis : all_axes) has_several[axis] = (set >> index_of(axis) & 1u) != 0;
    orders[set] = distinct_orders(has_several);
  }
  return orders;
}

void mesh_orders(const SpaceContext& context, const ParallelSpec& spec, Values& values) {
  if (!context.training.engine.has_other_orders) {
    values.emplace_back(AxisOrder());
    return;
  }
  static const OrdersOfSets orders = all_distinct_orders();
  std::size_t set = 0;
  for (const Axis axis : all_axes)
    if (group_size(spec.mesh, axis) > 1) set |= std::size_t{1} << index_of(axis);
  values.insert(values.end(), orders[set].begin(), orders[set].end());
}

// ---- frugalest values ----

template <auto value>
std::optional<ChoiceValue> always(const Cluster& /*cluster*/, const LayoutRequest& /*given*/) {
  return value;
}

// ---- neighbours ----

// None where there is nothing to choose.
Values every_value(const SpaceRow& row, const SpaceContext& context, const ParallelSpec& own) {
  Values values;
  row.values(context, own, values);
  if (values.size() == 1) values.clear();
  return values;
}

// ZeRO over groups has these: over all ranks, and over the next smaller and larger groups.
Values other_shard_groups(const SpaceRow& /*row*/, const SpaceContext& /*context*/, const ParallelSpec& own) {
  Values values;
  const std::int64_t ranks = own.mesh.dp_shard;
  if (ranks == 0) return values;
  values.emplace_back(std::int64_t{0});
  const std::vector<std::int64_t>& groups = divisors(own.replicas());
  const auto now = std::ranges::find(groups, ranks);
  if (const std::int64_t smaller = *std::prev(now); smaller > 1) values.emplace_back(smaller);
  if (const std::int64_t larger = *std::next(now); larger < own.replicas()) values.emplace_back(larger);
  return values;
}

Values other_overlap(const SpaceRow& /*row*/, const SpaceContext& context, const ParallelSpec& own) {
  if (own.tp() == 1 || !own.sequence_parallel || !context.training.engine.has_tensor_overlap) return {};
  return {own.tp_overlap == TensorOverlap::none ? TensorOverlap::ring : TensorOverlap::none};
}

// No groups, and the next smaller and larger ones.
Values other_head_groups(const SpaceRow& /*row*/, const SpaceContext& /*context*/, const ParallelSpec& own) {
  Values values;
  if (own.cp() == 1 || own.cp_method == ContextMethod::ulysses) return values;
  const std::int64_t ranks = own.mesh.cp_ulysses;
  const std::vector<std::int64_t>& groups = divisors(own.cp());
  const auto now = std::ranges::find(groups, ranks);
  if (ranks > 1) values.emplace_back(std::int64_t{1});
  if (ranks > 1 && *std::prev(now) > 1) values.emplace_back(*std::prev(now));
  if (const std::int64_t larger = *std::next(now); larger < own.cp()) values.emplace_back(larger);
  return values;
}

// Equally many micro-batches, where replicas have unlike numbers.
Values alike_instead(const SpaceRow& /*row*/, const SpaceContext& /*context*/, const ParallelSpec& own) {
  if (own.replica_micro_batches.empty()) return {};
  return {std::vector<int>{}};
}

// One block less ahead, and one more.
Values next_depths(const SpaceRow& /*row*/, const SpaceContext& context, const ParallelSpec& own) {
  Values depths;
  if (!brings_parameters(own) || !context.training.engine.has_other_prefetch) return depths;
  if (own.prefetch_depth > 0) depths.emplace_back(std::int64_t{own.prefetch_depth} - 1);
  depths.emplace_back(std::int64_t{own.prefetch_depth} + 1);
  return depths;
}

Values other_unit(const SpaceRow& /*row*/, const SpaceContext& context, const ParallelSpec& own) {
  if (!gathers_parameters(own) || !context.training.engine.has_parameter_gathers) return {};
  return {own.gather_unit == GatherUnit::block ? GatherUnit::parameter : GatherUnit::block};
}

// One part a step closer to the device: on the host instead of in a file, or not there.
Values less_on_host(const SpaceRow& /*row*/, const SpaceContext& /*context*/, const ParallelSpec& own) {
  Values less;
  for (const OffloadPart& part : offload_parts()) {
    const Home home = own.offload.*part.home;
    if (home == Home::device) continue;
    Offload closer = own.offload;
    closer.*part.home = all_homes[index_of(home) - 1];
    if (!wrong_with(closer)) less.emplace_back(closer);
  }
  return less;
}

// The next smaller and the next larger number.
Values next_values(const SpaceRow& row, const SpaceContext& context, const ParallelSpec& own) {
  Values values, next;
  row.values(context, own, values);
  const ChoiceValue now = row_of(row.choice).get(own);
  const auto smaller = std::ranges::lower_bound(values, now);
  if (smaller != values.begin()) next.push_back(*std::prev(smaller));
  const auto larger = std::ranges::upper_bound(values, now);
  if (larger != values.end()) next.push_back(*larger);
  return next;
}

// One layer less, and one more, up to all of a stage's, where activations leave the device.
Values next_numbers_of_layers(const SpaceRow& /*row*/, const SpaceContext& context, const ParallelSpec& own) {
  if (own.offload.activations == Home::device) return {};
  const int most = most_layers_of_a_stage(context.graph, own);
  const int now = own.offload_layers == 0 ? most : own.offload_layers;
  Values numbers;
  if (now > 1) numbers.emplace_back(std::int64_t{now - 1});
  if (now < most) numbers.emplace_back(std::int64_t{now + 1 < most ? now + 1 : 0});
  return numbers;
}

Values even_cut(const SpaceRow& /*row*/, const SpaceContext& context, const ParallelSpec& own) {
  if (own.pp() == 1) return {};
  return {even_stages(context.graph, own.stages())};
}

// ---- memory ----

Values higher_stages(const TrainingSpec& /*training*/, const ChoiceValue& given) {
  Values stages;
  for (std::int64_t stage = std::get<std::int64_t>(given) + 1; stage <= 3; ++stage) stages.emplace_back(stage);
  return stages;
}

// Twice as many, and so on, up to the largest group that anyone has; `illegal` tells which divide.
Values larger_shard_groups(const TrainingSpec& training, const ChoiceValue& given) {
  Values sizes;
  for (std::int64_t size = 2 * std::get<std::int64_t>(given); size > 0 && size <= training.global_batch; size *= 2)
    sizes.emplace_back(size);
  return sizes;
}

Values smaller_sizes(const TrainingSpec& training, const ChoiceValue& given) {
  Values sizes;
  for (const std::int64_t size : divisors(training.global_batch))
    if (size < std::get<std::int64_t>(given)) sizes.emplace_back(size);
  std::ranges::reverse(sizes);
  return sizes;
}

Values every_layer_instead(const TrainingSpec& /*training*/, const ChoiceValue& given) {
  if (std::get<std::int64_t>(given) == 0) return {};
  return {std::int64_t{0}};
}

Values fewer_accumulators(const TrainingSpec& /*training*/, const ChoiceValue& given) {
  if (std::get<TiedGradients>(given) == TiedGradients::together) return {};
  return {TiedGradients::together};
}

Values fewer_in_flight(const TrainingSpec& /*training*/, const ChoiceValue& given) {
  if (std::get<ScheduleKind>(given) == ScheduleKind::one_f_one_b) return {};
  return {ScheduleKind::one_f_one_b};
}

Values more_on_host(const TrainingSpec& /*training*/, const ChoiceValue& given) {
  Values more;
  for (const Offload& other : all_offloads())
    if (other != std::get<Offload>(given) && includes(other, std::get<Offload>(given))) more.emplace_back(other);
  return more;
}

// A master holds what every rank does, and the logits of all, but no buckets.
Values without_master(const TrainingSpec& training, const ChoiceValue& given) {
  if (std::get<DataMethod>(given) == DataMethod::all_reduce || training.engine.copies_to_buckets) return {};
  return {DataMethod::all_reduce};
}

Values fewer_blocks_ahead(const TrainingSpec& /*training*/, const ChoiceValue& given) {
  Values fewer;
  for (std::int64_t depth = std::get<std::int64_t>(given); depth > 0;) fewer.emplace_back(depth /= 2);
  return fewer;
}

// A parameter alone is padded alone.
Values larger_units(const TrainingSpec& /*training*/, const ChoiceValue& given) {
  if (std::get<GatherUnit>(given) == GatherUnit::block) return {};
  return {GatherUnit::block};
}

Values fewer_input_slots(const TrainingSpec& /*training*/, const ChoiceValue& given) {
  if (std::get<InputSlots>(given) == InputSlots::in_flight) return {};
  return {InputSlots::in_flight};
}

constexpr std::array rows = {
    SpaceRow{.choice = Choice::tp, .decides_legality = true, .values = tensor_degrees},
    SpaceRow{.choice = Choice::pp, .follows_from = {Choice::tp}, .decides_legality = true, .values = pipeline_degrees},
    SpaceRow{.choice = Choice::cp,
             .follows_from = {Choice::tp, Choice::pp},
             .decides_legality = true,
             .values = context_degrees},
    SpaceRow{.choice = Choice::dp,
             .follows_from = {Choice::tp, Choice::pp, Choice::cp},
             .decides_legality = true,
             .values = data_degrees},
    SpaceRow{.choice = Choice::stage_blocks,
             .decides_legality = true,
             .has_one_value = true,
             .values = free_cut,
             .neighbours = even_cut,
             .neighbour = "blocks cut evenly over the stages"},
    SpaceRow{.choice = Choice::sequence_parallel,
             .follows_from = {Choice::tp},
             .decides_legality = true,
             .values = with_and_without_sequence_parallel,
             .neighbours = every_value},
    SpaceRow{.choice = Choice::tp_overlap,
             .follows_from = {Choice::sequence_parallel},
             .decides_legality = true,
             .has_one_value = true,
             .values = no_overlap,
             .neighbours = other_overlap},
    SpaceRow{.choice = Choice::cp_method,
             .follows_from = {Choice::cp},
             .decides_legality = true,
             .values = methods_of_context,
             .neighbours = every_value},
    SpaceRow{.choice = Choice::cp_ulysses,
             .follows_from = {Choice::cp, Choice::cp_method},
             .decides_legality = true,
             .has_one_value = true,
             .values = no_groups_of_heads,
             .neighbours = other_head_groups},
    SpaceRow{.choice = Choice::zero_stage,
             .follows_from = {Choice::dp, Choice::cp},
             .decides_legality = true,
             .values = zero_stages,
             .neighbours = every_value,
             .frugaler = higher_stages},
    SpaceRow{.choice = Choice::dp_method,
             .follows_from = {Choice::dp},
             .decides_legality = true,
             .has_one_value = true,
             .values = no_master,
             .frugaler = without_master},
    SpaceRow{.choice = Choice::replica_micro_batches,
             .follows_from = {Choice::dp},
             .decides_legality = true,
             .has_one_value = true,
             .values = alike_replicas,
             .neighbours = alike_instead},
    SpaceRow{.choice = Choice::dp_shard,
             .follows_from = {Choice::dp, Choice::cp, Choice::zero_stage},
             .values = ranks_that_shard,
             .neighbours = other_shard_groups,
             .frugaler = larger_shard_groups},
    SpaceRow{.choice = Choice::micro_batch,
             .follows_from = {Choice::dp, Choice::pp, Choice::replica_micro_batches},
             .values = micro_batch_sizes,
             .neighbours = next_values,
             .frugaler = smaller_sizes,
             .frugalest =
                 [](const Cluster&, const LayoutRequest& given) {
                   // Replicas with numbers of their own have micro-batches of one size.
                   return given[Choice::replica_micro_batches] ? std::nullopt
                                                               : std::optional<ChoiceValue>(std::int64_t{1});
                 }},
    // 1F1B has the fewest micro-batches in flight.
    SpaceRow{.choice = Choice::schedule,
             .follows_from = {Choice::pp, Choice::stage_blocks, Choice::zero_stage, Choice::replica_micro_batches},
             .values = schedules,
             .accepts = accepts_schedule,
             .neighbours = every_value,
             .frugaler = fewer_in_flight,
             .frugalest = always<ScheduleKind::one_f_one_b>},
    SpaceRow{
        .choice = Choice::micro_batch_group,
        .follows_from = {Choice::dp, Choice::pp, Choice::replica_micro_batches, Choice::micro_batch, Choice::schedule},
        .values = allowed_group,
        .accepts = accepts_group},
    SpaceRow{.choice = Choice::virtual_stages,
             .follows_from = {Choice::pp, Choice::stage_blocks, Choice::schedule},
             .values = numbers_of_virtual_stages,
             .accepts = accepts_virtual_stages,
             .neighbours = next_values},
    SpaceRow{.choice = Choice::recompute, .values = recomputes, .neighbours = every_value},
    SpaceRow{.choice = Choice::recompute_layers,
             .follows_from = {Choice::pp, Choice::stage_blocks, Choice::schedule, Choice::virtual_stages},
             .has_one_value = true,
             .values = every_layer,
             .accepts = accepts_layers,
             .frugaler = every_layer_instead},
    SpaceRow{.choice = Choice::tied_gradients,
             .has_one_value = true,
             .values = one_accumulator,
             .frugaler = fewer_accumulators,
             .frugalest = always<TiedGradients::together>},
    SpaceRow{.choice = Choice::input_slots,
             .follows_from = {Choice::pp, Choice::schedule},
             .has_one_value = true,
             .values = as_many_as_in_flight,
             .frugaler = fewer_input_slots,
             .frugalest = always<InputSlots::in_flight>},
    SpaceRow{
        .choice = Choice::offload,
        .has_one_value = true,
        .values = nothing_on_host,
        .neighbours = less_on_host,
        .frugaler = more_on_host},
    SpaceRow{
        .choice = Choice::offload_layers,
        .follows_from = {Choice::pp, Choice::stage_blocks, Choice::schedule, Choice::virtual_stages, Choice::offload},
        .has_one_value = true,
        .values = every_layer,
        .accepts = accepts_layers,
        .neighbours = next_numbers_of_layers,
        .frugaler = every_layer_instead},
    SpaceRow{.choice = Choice::prefetch_depth,
             .follows_from = {Choice::dp, Choice::cp, Choice::zero_stage, Choice::offload},
             .has_one_value = true,
             .values = one_block_ahead,
             .neighbours = next_depths,
             .frugaler = fewer_blocks_ahead},
    SpaceRow{.choice = Choice::gather_unit,
             .follows_from = {Choice::dp, Choice::cp, Choice::zero_stage},
             .has_one_value = true,
             .values = blocks_together,
             .neighbours = other_unit,
             .frugaler = larger_units,
             .frugalest = always<GatherUnit::block>},
    // The order of equal devices needs no memory; heterogeneous devices may differ in memory.
    SpaceRow{.choice = Choice::mesh_order,
             .follows_from = {Choice::tp, Choice::pp, Choice::cp, Choice::dp},
             .values = mesh_orders,
             .frugalest =
                 [](const Cluster& cluster, const LayoutRequest&) {
                   return cluster.groups.size() == 1 ? std::optional<ChoiceValue>(AxisOrder{}) : std::nullopt;
                 },
             .takes_memory = false},
};

constexpr bool every_choice_once() {
  std::array<bool, count_of<Choice>> has{};
  bool decided = false;
  for (const SpaceRow& row : rows) {
    if (has[index_of(row.choice)] || (row.decides_legality && decided)) return false;
    // Values follow from the choices before them.
    for (std::size_t choice = 0; choice < has.size(); ++choice)
      if (row.follows_from.contains(static_cast<Choice>(choice)) && !has[choice]) return false;
    has[index_of(row.choice)] = true;
    decided = !row.decides_legality;
  }
  // The walk over the space counts orders without visiting them.
  return rows.size() == count_of<Choice> && rows.back().choice == Choice::mesh_order;
}
static_assert(every_choice_once(),
              "every choice has a row; those that decide legality come first, the order of axes comes last");

}  // namespace

std::span<const SpaceRow> space_rows() {
  return rows;
}

const SpaceRow& space_row_of(Choice choice) {
  return *std::ranges::find(rows, choice, &SpaceRow::choice);
}

}  // namespace parplan
