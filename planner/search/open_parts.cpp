#include "planner/search/open_parts.h"

#include <algorithm>
#include <iterator>
#include <unordered_map>
#include <utility>

#include "planner/plan/spec_hash.h"
#include "planner/search/space_rows.h"
#include "planner/search/stage_recompute.h"

namespace parplan {
namespace {

constexpr int place_bits = 38;  // of a layout in its part, with its candidates
constexpr int candidate_bits = 14;

// The devices to consider: up to all of them, or exactly these.
std::pair<int, Devices> devices_of(const Cluster& cluster, const LayoutRequest& request, int least) {
  if (gives_every_degree(request)) return {static_cast<int>(product_of_degrees(request)), Devices::exactly};
  return {cluster.devices(), least < cluster.devices() ? Devices::at_most : Devices::exactly};
}

}  // namespace

OpenParts::OpenParts(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                     const LayoutRequest& request, const SpaceWidth& width, Objective objective, int least_devices,
                     LayoutFloors& floors)
    : cluster_(cluster),
      engine_(training.engine),
      request_(request),
      objective_(objective),
      least_devices_(least_devices),
      space_(graph, training, request, width),
      floors_(floors) {}

std::vector<Open> OpenParts::open_all() {
  const auto [devices, wanted] = devices_of(cluster_, request_, least_devices_);
  std::vector<SpacePart> parts = on_enough(space_.parts(devices, wanted));
  for (const SpacePart& one : parts) count_all_ += one.layouts;
  counts_ = true;
  return open_degrees(std::move(parts));
}

std::vector<Open> OpenParts::open_uncounted() {
  const auto [devices, wanted] = devices_of(cluster_, request_, least_devices_);
  return open_degrees(on_enough(space_.degrees(devices, wanted)));
}

std::vector<Open> OpenParts::open_only(std::vector<SpacePart> parts, const Beyond& those) {
  beyond_ = those;
  std::erase_if(parts, [&](const SpacePart& one) { return !those.of_degrees(one.spec); });
  return open_degrees(std::move(parts));
}

std::vector<Open> OpenParts::open_those(const Beyond& those, int devices) {
  return open_only(space_.degrees(devices, Devices::exactly), those);
}

std::vector<Open> OpenParts::open_beyond(const Beyond& beyond, const OpenParts* than) {
  if (than == nullptr) {
    const auto [devices, wanted] = devices_of(cluster_, request_, least_devices_);
    return open_only(on_enough(space_.degrees(devices, wanted)), beyond);
  }
  beyond_ = beyond;
  std::vector<Open> open;
  for (const std::size_t number : than->looked_into_) {
    Part part = than->parts_[number];
    const bool lacks_room = part.step == Step::micro_batch_at_peak;
    if (!beyond.of_degrees(part.space.spec) || (lacks_room && beyond.room != Beyond::Room::any)) continue;
    part.step = lacks_room ? Step::micro_batch : part.step;
    part.groups = nullptr;
    part.place = open.size() << place_bits;
    open.push_back(open_part(std::move(part)));
  }
  return open;
}

std::vector<SpacePart> OpenParts::on_enough(std::vector<SpacePart> parts) const {
  if (!gives_every_degree(request_))
    std::erase_if(parts, [&](const SpacePart& one) { return one.spec.mesh.size() < least_devices_; });
  return parts;
}

std::vector<Open> OpenParts::open_degrees(std::vector<SpacePart> parts) {
  std::vector<Open> open;
  for (SpacePart& one : parts) {
    Part part{.step = Step::devices, .space = std::move(one), .floor = {}, .place = open.size() << place_bits};
    part.floor = floors_.of_devices(part.space.spec.mesh.size());
    open.push_back(open_part(std::move(part)));
  }
  return open;
}

OpenParts::Layouts OpenParts::layouts(std::size_t number) const {
  const Part& part = parts_[number];
  return {.spec = part.space.spec, .count = part.space.layouts, .floor = part.floor, .place = part.place};
}

Open OpenParts::open_part(Part part) {
  parts_.push_back(std::move(part));
  return opened(parts_.size() - 1);
}

Open OpenParts::opened(std::size_t number) {
  const Part& part = parts_[number];
  MemoryUse least;
  least.parameters = part.floor.memory;
  return {.bound = score(objective_, cluster_, part.space.spec, part.floor.time, least),
          .place = part.place,
          .part = number,
          .mesh = &part.space.spec.mesh};
}

Seconds OpenParts::time_for(const ParallelSpec& spec, double score_of_it) const {
  return Seconds(score_of_it / score(objective_, cluster_, spec, Seconds(1.0), {}).first);
}

// The same part once more is known of it.
Open OpenParts::open_again(std::size_t number, Step step, const Floor& floor) {
  Part& part = parts_[number];
  part.step = step;
  part.floor.time = std::max(part.floor.time, floor.time);
  part.floor.memory = std::max(part.floor.memory, floor.memory);
  return opened(number);
}

std::optional<std::vector<Open>> OpenParts::look_into(std::size_t number, double enough) {
  switch (parts_[number].step) {
    case Step::devices:
      return std::vector{open_again(number, Step::degrees, floors_.of_degrees(parts_[number].space.spec))};
    case Step::degrees:
      return look_into_degrees(number);
    case Step::micro_batch_at_peak:
      if (beyond_ && beyond_->until == Beyond::Until::samples) return std::nullopt;
      return look_into_groups(number);
    case Step::micro_batch:
      return std::vector{open_on_links(number)};
    case Step::micro_batch_on_links:
      return look_into_micro_batch(number);
    case Step::any_shards:
      return look_into_shards(number);
    case Step::unlike_orders:
      return look_into_unlike_orders(number);
    case Step::alike_orders:
      return look_into_alike_orders(number);
    case Step::unlike_shards:
      return look_into_unlike_shards(number);
    case Step::any_recompute:
      return look_for_room(number);
    case Step::any_that_fits:
      return look_into_recomputing(number);
    case Step::any_order:
      return open_orders(number);
    case Step::layout:
      return refine(number, enough);
    case Step::refined_layout:
      break;
  }
  return std::nullopt;
}

// The part holds nothing that fits.
std::vector<Open> OpenParts::leave_out(std::size_t number) {
  count_left_out_ += parts_[number].space.layouts;
  left_out_.push_back(number);
  return {};
}

std::vector<Open> OpenParts::look_into_degrees(std::size_t number) {
  std::vector<Open> opened;
  for (SpaceGroups& listed : space_.groups(parts_[number].space, counts_)) {
    Groups& groups = groups_.emplace_back(Groups{.spec = std::move(listed.spec), .sizes = {}});
    ParallelSpec one = groups.spec;
    for (const SpaceGroups::Size& size : listed.sizes) {
      one.micro_batch = size.micro_batch;
      groups.sizes.push_back({size, floors_.of_micro_batch_at_peak(one).time});
    }
    if (smallest_takes_least())
      for (std::size_t i = groups.sizes.size(); i-- > 1;)
        groups.sizes[i - 1].floor = std::min(groups.sizes[i - 1].floor, groups.sizes[i].floor);
    else
      std::ranges::stable_sort(groups.sizes, {}, &Groups::Size::floor);
    opened.push_back(open_groups(number, groups, 0));
  }
  return opened;
}

// The groups from this size on. `number`: the part that they are in.
Open OpenParts::open_groups(std::size_t number, const Groups& groups, std::size_t size) {
  Part part{.step = Step::micro_batch_at_peak,
            .space = {.spec = groups.spec, .layouts = 0},
            .floor = parts_[number].floor,
            .place = parts_[number].place,
            .groups = &groups,
            .size = size};
  part.space.spec.micro_batch = groups.sizes[size].micro_batch;
  part.floor.time = std::max(part.floor.time, groups.sizes[size].floor);
  for (std::size_t i = size; i < groups.sizes.size(); ++i) part.space.layouts += groups.sizes[i].layouts;
  return open_part(std::move(part));
}

std::vector<Open> OpenParts::look_into_groups(std::size_t number) {
  std::vector<Open> opened;
  const Groups& groups = *parts_[number].groups;
  const std::size_t size = parts_[number].size;
  Part& part = parts_[number];
  if (size + 1 < groups.sizes.size()) opened.push_back(open_groups(number, groups, size + 1));
  part.space.layouts = groups.sizes[size].layouts;
  if (!has_room(Beyond::Room::any) && floors_.lacks_room(part.space.spec)) {
    leave_out(number);
    looked_into_.push_back(number);
    return opened;
  }
  const Floor floor = objective_ == Objective::memory ? floors_.memory_of_micro_batch(part.space.spec)
                                                      : floors_.of_micro_batch(part.space.spec);
  if (!opened.empty() && smallest_takes_least()) {
    const std::size_t larger = opened.front().part;
    opened.front() = open_again(larger, parts_[larger].step, {.time = {}, .memory = floor.memory});
  }
  opened.push_back(open_again(number, Step::micro_batch, floor));
  return opened;
}

// What the stages of a layout may choose from.
std::span<const Recompute> OpenParts::choices_of(const ParallelSpec& spec) const {
  return recomputes_of(spec, engine_, may_mix(request_, engine_));
}

// What the stages of layouts that differ in their recompute may choose from.
std::vector<Recompute> OpenParts::choices_of(const Recomputing& group) const {
  const std::span<const Recompute> of_first = choices_of(group.front().spec);
  std::vector<Recompute> choices(of_first.begin(), of_first.end());
  for (const PlacedSpec& placed : group)
    if (std::ranges::find(choices, placed.spec.recompute) == choices.end()) choices.push_back(placed.spec.recompute);
  return choices;
}

std::uint64_t OpenParts::place_of(std::size_t part, const PlacedSpec& placed) const {
  return parts_[part].place + (static_cast<std::uint64_t>(placed.place) << candidate_bits);
}

// Layouts of this part. Equal devices hold the same in every order of the axes.
std::vector<PlacedSpec> OpenParts::list_layouts(std::size_t number, bool each_order) const {
  std::vector<PlacedSpec> placed = space_.specs(parts_[number].space);
  if (!each_order) return placed;
  std::vector<PlacedSpec> all;
  for (const PlacedSpec& one : placed) std::ranges::move(space_.orders(one), std::back_inserter(all));
  return all;
}

Open OpenParts::open_on_links(std::size_t number) {
  Floor floor = parts_[number].floor;
  if (objective_ != Objective::memory) floor.time = floors_.time_on_links(parts_[number].space.spec);
  return open_again(number, Step::micro_batch_on_links, floor);
}

namespace {

// Layouts in groups that differ in nothing but their recompute, and with `in_any_shards` in ZeRO's
// groups; each group and its layouts in the order of their places.
std::vector<std::vector<PlacedSpec>> grouped(std::vector<PlacedSpec> layouts, bool in_any_shards) {
  std::vector<std::vector<PlacedSpec>> groups;
  std::unordered_map<ParallelSpec, std::size_t, SpecHash> numbers;
  for (PlacedSpec& placed : layouts) {
    ParallelSpec key = placed.spec;
    key.recompute = Recompute::none;
    key.recompute_layers = 0;
    if (in_any_shards) key.mesh.dp_shard = 0;
    const auto [number, is_new] = numbers.try_emplace(std::move(key), groups.size());
    if (is_new) groups.emplace_back();
    groups[number->second].push_back(std::move(placed));
  }
  return groups;
}

}  // namespace

std::vector<Open> OpenParts::look_into_micro_batch(std::size_t number) {
  looked_into_.push_back(number);
  const bool by_time = objective_ != Objective::memory;
  std::vector<PlacedSpec> layouts = list_layouts(number, !are_equal() && !by_time);
  std::erase_if(layouts, [this](const PlacedSpec& placed) { return !is_open(placed.spec); });
  const bool in_any_shards = by_time && (are_equal() || !floors_.balances_replicas());
  std::vector<Open> opened;
  for (Recomputing& group : grouped(std::move(layouts), in_any_shards)) {
    Part part = parts_[number];
    part.place = place_of(number, group.front());
    const ParallelSpec& spec = group.front().spec;
    if (by_time)
      part.floor.time = std::max(part.floor.time, are_equal() ? floors_.time_of_any_shards(spec)
                                                              : floors_.time_of_any_order(spec));
    else if (are_equal())
      part.floor.memory = std::max(part.floor.memory, floors_.memory_by_share(spec, choices_of(group)));
    part.step = !by_time ? Step::any_recompute : are_equal() ? Step::any_shards : Step::unlike_orders;
    opened.push_back(open_recomputing(std::move(part), std::move(group)));
  }
  return opened;
}

// The devices are not alike, and the objective is not memory. Layouts that differ in what they
// recompute, or in ZeRO's groups, have the same orders.
std::vector<Open> OpenParts::look_into_unlike_orders(std::size_t number) {
  const Recomputing& all = *parts_[number].recomputing;
  const std::vector<Seconds> times = floors_.times_in_orders(all.front().spec, space_.orders_of(all.front().spec));
  std::vector<Open> opened;
  for (std::size_t i = 0; i < times.size(); ++i) {
    if (std::ranges::find(times, times[i]) != times.begin() + static_cast<std::ptrdiff_t>(i)) continue;
    Part part = parts_[number];
    part.step = Step::alike_orders;
    part.in_orders = times[i];
    part.floor.time = std::max(part.floor.time, times[i]);
    part.place += i << candidate_bits;
    part.space.layouts = std::ranges::count(times, times[i]) * static_cast<std::int64_t>(all.size());
    opened.push_back(open_part(std::move(part)));
  }
  return opened;
}

// The place of the part is that of its first order.
std::vector<Open> OpenParts::look_into_alike_orders(std::size_t number) {
  const Recomputing& all = *parts_[number].recomputing;
  const std::vector<AxisOrder> orders = space_.orders_of(all.front().spec);
  const std::vector<Seconds> times = floors_.times_in_orders(all.front().spec, orders);
  const auto first = static_cast<std::size_t>(std::ranges::find(times, parts_[number].in_orders) - times.begin());
  std::vector<Open> opened;
  for (std::size_t i = first; i < orders.size(); ++i) {
    if (times[i] != times[first]) continue;
    Recomputing group;
    for (const PlacedSpec& placed : all) {
      PlacedSpec& one = group.emplace_back(placed);
      one.place += static_cast<std::int64_t>(i);
      one.orders = 1;
      one.spec.mesh.order = orders[i];
    }
    Part part = parts_[number];
    part.place += (i - first) << candidate_bits;
    const ParallelSpec& spec = group.front().spec;
    const bool in_any_shards = !floors_.balances_replicas();
    part.step = in_any_shards ? Step::unlike_shards : Step::any_recompute;
    part.floor.time = std::max(part.floor.time, in_any_shards ? floors_.time_in_any_shards(spec, choices_of(group))
                                                              : floors_.time_of(spec, choices_of(group)));
    opened.push_back(open_recomputing(std::move(part), std::move(group)));
  }
  return opened;
}

std::vector<Open> OpenParts::look_into_unlike_shards(std::size_t number) {
  const Recomputing& all = *parts_[number].recomputing;
  std::vector<Open> opened;
  for (Recomputing& group : grouped(all, false)) {
    Part part = parts_[number];
    part.step = Step::any_recompute;
    part.place += static_cast<std::uint64_t>(group.front().place - all.front().place) << candidate_bits;
    part.floor.time = std::max(part.floor.time, floors_.data_time(group.front().spec));
    opened.push_back(open_recomputing(std::move(part), std::move(group)));
  }
  return opened;
}

// The devices are alike, and the objective is not memory.
std::vector<Open> OpenParts::look_into_shards(std::size_t number) {
  const Recomputing& all = *parts_[number].recomputing;
  const bool is_in_groups = all.front().spec.mesh.dp_shard != all.back().spec.mesh.dp_shard;
  if (is_in_groups && !has_room(Beyond::Room::any) &&
      floors_.lacks_room_in_any_shards(all.front().spec, choices_of(all)))
    return leave_out(number);
  std::vector<Open> opened;
  for (Recomputing& group : grouped(all, false)) {
    Part part = parts_[number];
    part.step = Step::any_recompute;
    part.place += static_cast<std::uint64_t>(group.front().place - all.front().place) << candidate_bits;
    part.floor.time = std::max(part.floor.time, floors_.data_time_of_any_order(group.front().spec, part.floor.time));
    opened.push_back(open_recomputing(std::move(part), std::move(group)));
  }
  return opened;
}

// The part becomes that of these layouts.
Open OpenParts::open_recomputing(Part part, Recomputing layouts) {
  const Recomputing& kept = recomputing_.emplace_back(std::move(layouts));
  part.space = {.spec = kept.front().spec, .layouts = 0};
  for (const PlacedSpec& placed : kept) part.space.layouts += placed.orders;
  part.groups = nullptr;
  part.recomputing = &kept;
  return open_part(std::move(part));
}

// What fits with some choice of recompute of its stages is in the first layout.
std::vector<Open> OpenParts::look_for_room(std::size_t number) {
  const ParallelSpec& spec = parts_[number].recomputing->front().spec;
  const std::vector<Recompute> choices = choices_of(*parts_[number].recomputing);
  if (has_room(Beyond::Room::any)) return look_into_recomputing(number);
  if (!floors_.can_hold(spec, choices)) return leave_out(number);
  Floor floor = parts_[number].floor;
  // Equal devices hold the same in every order of the axes.
  if (objective_ == Objective::memory) floor.memory = floors_.memory_of(spec, choices, floor.memory);
  if (floor == parts_[number].floor) return look_into_recomputing(number);
  return {open_again(number, Step::any_that_fits, floor)};
}

std::vector<Open> OpenParts::look_into_recomputing(std::size_t number) {
  const Recomputing& group = *parts_[number].recomputing;
  std::vector<Open> opened;
  for (const PlacedSpec& placed : group) {
    const std::span<const Recompute> choices = choices_of(placed.spec);
    const bool fits_alike = floors_.can_hold(placed.spec, {&placed.spec.recompute, 1});
    // Beyond what fits, the layout that recomputes nothing takes the least time.
    if (beyond_ && beyond_->room != Beyond::Room::enough &&
        ((fits_alike && !beyond_->also_what_fits) || &placed != &group.front()))
      continue;
    Part part{.step = are_equal() ? Step::any_order : Step::layout,
              .space = {.spec = placed.spec, .layouts = placed.orders},
              .floor = parts_[number].floor,
              .place = parts_[number].place +
                       (static_cast<std::uint64_t>(placed.place - group.front().place) << candidate_bits),
              .has_to_mix = choices.size() > 1 && !fits_alike};
    // What other recompute makes fit need not be among the choices of this layout.
    const bool may_fit = choices.size() > 1 || has_room(Beyond::Room::any) ||
                         has_room(Beyond::Room::with_other_recompute);
    if (!fits_alike && !may_fit) {
      parts_.push_back(std::move(part));
      leave_out(parts_.size() - 1);
    } else {
      opened.push_back(are_equal() ? open_part(std::move(part)) : open_layout(std::move(part)));
    }
  }
  return opened;
}

// `part`: of a single layout.
Open OpenParts::open_layout(Part part) {
  const ParallelSpec& spec = part.space.spec;
  if (objective_ != Objective::memory)
    part.floor.time = std::max(part.floor.time, floors_.time_of(spec, choices_of(spec)));
  return open_part(std::move(part));
}

std::vector<Open> OpenParts::open_orders(std::size_t number) {
  std::vector<Open> opened;
  for (PlacedSpec& placed : orders_of(number)) {
    Part part = parts_[number];
    part.step = Step::layout;
    part.space = {.spec = std::move(placed.spec), .layouts = 1};
    part.place += static_cast<std::uint64_t>(placed.place) << candidate_bits;
    opened.push_back(open_layout(std::move(part)));
  }
  return opened;
}

// The layouts of a part of any order, with places that count from the first.
std::vector<PlacedSpec> OpenParts::orders_of(std::size_t number) const {
  const SpacePart& space = parts_[number].space;
  return space_.orders({.place = 0, .spec = space.spec, .orders = space.layouts});
}

// The layouts of a part that are not single ones yet, with places that count from where its own do:
// all of them, but on equal devices the first of those that differ in the order of axes alone.
std::vector<PlacedSpec> OpenParts::layouts_of(std::size_t number) const {
  const Part& part = parts_[number];
  if (part.step == Step::any_order) return {{.place = 0, .spec = part.space.spec, .orders = 1}};
  if (part.recomputing == nullptr) {
    std::vector<PlacedSpec> listed = list_layouts(number, !are_equal());
    std::erase_if(listed, [this](const PlacedSpec& placed) { return !is_open(placed.spec); });
    return listed;
  }
  std::vector<PlacedSpec> all;
  for (const PlacedSpec& placed : *part.recomputing)
    if (placed.orders == 1 || are_equal())
      all.push_back(placed);
    else
      std::ranges::move(space_.orders(placed), std::back_inserter(all));
  const std::int64_t first = part.recomputing->front().place;
  for (PlacedSpec& one : all) one.place -= first;
  return all;
}

std::optional<std::vector<Open>> OpenParts::refine(std::size_t number, double enough) {
  const Part& part = parts_[number];
  const ParallelSpec& spec = part.space.spec;
  Floor floor = part.floor;
  const std::span<const Recompute> choices = choices_of(spec);
  if (objective_ == Objective::memory)
    floor.memory = floors_.memory_of(spec, choices, floor.memory);
  else if (part.has_to_mix && (!beyond_ || beyond_->room == Beyond::Room::enough))
    floor.time = std::max(floor.time, floors_.time_within_memory(spec, choices, time_for(spec, enough)));
  if (floor == part.floor) return std::nullopt;
  return std::vector{open_again(number, Step::refined_layout, floor)};
}

void OpenParts::keep_left_out(Part part) {
  parts_.push_back(std::move(part));
  left_out_.push_back(parts_.size() - 1);
}

std::optional<OpenParts::Layouts> OpenParts::take_smallest_left_out(std::optional<Bytes> most) {
  const auto needs_more = [this](std::size_t a, std::size_t b) {
    return std::pair(parts_[a].floor.memory, parts_[a].place) > std::pair(parts_[b].floor.memory, parts_[b].place);
  };
  if (!std::exchange(is_heap_, true)) std::ranges::make_heap(left_out_, needs_more);
  const auto add_left_out = [&](Part part) {
    keep_left_out(std::move(part));
    std::ranges::push_heap(left_out_, needs_more);
  };
  while (!left_out_.empty()) {
    std::ranges::pop_heap(left_out_, needs_more);
    const std::size_t number = left_out_.back();
    left_out_.pop_back();
    Part part = parts_[number];
    if (most && part.floor.memory >= *most) break;
    if (part.step == Step::micro_batch_at_peak) {
      part.step = Step::micro_batch;
      if (most && floors_.takes(part.space.spec, *most)) continue;
      if (const Bytes floor = floors_.memory_known(part.space.spec); floor > part.floor.memory) {
        part.floor.memory = floor;
        add_left_out(std::move(part));
        continue;
      }
    }
    if (part.step < Step::layout) {
      std::vector<PlacedSpec> layouts = layouts_of(number);
      part.step = Step::layout;
      part.recomputing = nullptr;
      part.space.layouts = 1;
      for (PlacedSpec& placed : layouts) {
        part.place = place_of(number, placed);
        part.space.spec = std::move(placed.spec);
        add_left_out(part);
      }
      continue;
    }
    // The first is looked at for a limit. What has no room within it is not taken.
    if (most && part.step != Step::refined_layout) {
      const ParallelSpec& spec = part.space.spec;
      const std::span<const Recompute> choices = choices_of(spec);
      if (are_equal() && !floors_.can_hold(spec, choices, {}, *most - Bytes(1))) continue;
      part.step = Step::refined_layout;
      const Bytes floor = floors_.memory_of(spec, choices, part.floor.memory);
      if (floor > part.floor.memory) {
        part.floor.memory = floor;
        add_left_out(std::move(part));
        continue;
      }
    }
    count_left_out_ -= part.space.layouts;
    return layouts(number);
  }
  return std::nullopt;
}

}  // namespace parplan
