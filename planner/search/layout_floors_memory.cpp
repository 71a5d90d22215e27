#include "planner/search/layout_floors.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

// What layouts hold at least, and how fast they are at most within it.

namespace parplan {
namespace {

// The slots that the last block has of its own.
std::int64_t slots_of_last_block(const ParallelSpec& spec, const PipelineShape& shape) {
  return spec.virtual_stages > 1 ? row_of(spec.schedule).last_stage_in_flight(shape) : 0;
}

}  // namespace

double LayoutFloors::bytes_beside_state(const ParallelSpec& spec, const LeastBlocks& blocks) const {
  const int stages = spec.pp();
  double saved = 0.0;  // of all stages, for one micro-batch
  for (std::size_t kind = 0; kind < blocks_.size(); ++kind)
    saved += static_cast<double>(blocks_[kind]) * static_cast<double>(blocks.saved[kind]);
  const double scratch = static_cast<double>(stages == 1 ? blocks.scratch : blocks.least_scratch);
  return static_cast<double>(spec.mesh.size()) * (saved / stages + scratch);
}

// The largest smaller micro-batch whose blocks are known.
std::optional<std::int64_t> LayoutFloors::known_size_below(const ParallelSpec& spec) const {
  const auto known = least_blocks_.lower_bound(blocks_key(spec));
  if (known == least_blocks_.begin()) return std::nullopt;
  const BlocksKey& before = std::prev(known)->first;
  ParallelSpec smaller = spec;
  smaller.micro_batch = std::get<std::int64_t>(before);
  return blocks_key(smaller) == before ? std::optional(smaller.micro_batch) : std::nullopt;
}

Bytes LayoutFloors::memory_known(const ParallelSpec& spec) {
  if (may_be_unlike(spec)) return of_devices(spec.mesh.size()).memory;
  ParallelSpec known = spec;
  if (training_.engine.softmax_multiple <= 1 && !least_blocks_.contains(blocks_key(spec)))
    known.micro_batch = known_size_below(spec).value_or(spec.micro_batch);
  return bound_.memory(spec.mesh.size(), bytes_beside_state(known, least_blocks(known)));
}

// Blocks of a larger micro-batch take no less, unless one kernel makes its softmax (SoftmaxKernel):
// smaller ones that are known may tell. They take about in proportion to it, so that one that
// hardly lacks room tells for all that are larger.
bool LayoutFloors::tells(const ParallelSpec& spec, const std::function<bool(double)>& of_bytes) {
  const auto holds = [&](const ParallelSpec& of) { return of_bytes(bytes_beside_state(of, least_blocks(of))); };
  if (training_.engine.softmax_multiple > 1) return holds(spec);
  const auto with_size = [&](std::int64_t micro_batch) {
    ParallelSpec one = spec;
    one.micro_batch = micro_batch;
    return one;
  };
  const ParallelSpec smaller = with_size(known_size_below(spec).value_or(micro_batches_.front()));
  if (smaller.micro_batch >= spec.micro_batch) return holds(spec);
  if (holds(smaller)) return true;
  const double of_sample =
      bytes_beside_state(smaller, least_blocks(smaller)) / static_cast<double>(smaller.micro_batch);
  const auto likely = std::ranges::find_if(micro_batches_, [&](std::int64_t size) {
    return size > smaller.micro_batch && of_bytes(of_sample * static_cast<double>(size));
  });
  if (likely != micro_batches_.end() && *likely < spec.micro_batch && holds(with_size(*likely))) return true;
  return holds(spec);
}

bool LayoutFloors::lacks_room(const ParallelSpec& spec) {
  return tells(spec, [&](double bytes) { return bound_.lacks_room(spec.mesh.size(), bytes); });
}

bool LayoutFloors::takes(const ParallelSpec& spec, Bytes memory) {
  if (may_be_unlike(spec)) return of_devices(spec.mesh.size()).memory >= memory;
  return tells(spec, [&](double bytes) { return bound_.memory(spec.mesh.size(), bytes) >= memory; });
}

LayoutFloors::Holdings& LayoutFloors::holdings_of(const ParallelSpec& spec, Recompute choice, bool with_seconds) {
  const ParallelSpec plain;
  ParallelSpec key = spec;
  key.recompute = choice;
  key.schedule = plain.schedule;
  key.virtual_stages = plain.virtual_stages;
  key.micro_batch_group = plain.micro_batch_group;
  key.input_slots = plain.input_slots;
  if (!with_seconds) key.mesh.order = plain.mesh.order;
  const auto [entry, inserted] = holdings_.try_emplace({std::move(key), with_seconds});
  Holdings& holdings = entry->second;
  if (!inserted) return holdings;
  const Placements& placements = maker_.placements_of(spec);
  std::vector<std::pair<int, int>> paces = maker_.estimator().paces(spec, placements);
  if (!with_seconds) paces.resize(1);
  std::vector<std::pair<int, int>> known;
  for (std::size_t stage = 0; stage < paces.size(); ++stage) {
    const auto pace = std::ranges::find(known, paces[stage]);
    holdings.of_stage.push_back(static_cast<std::size_t>(pace - known.begin()));
    if (pace != known.end()) continue;
    known.push_back(paces[stage]);
    BlockTable room;
    if (!spare_tables_.empty()) {
      room = std::move(spare_tables_.back());
      spare_tables_.pop_back();
    }
    holdings.each.push_back(
        {.table = maker_.estimator().block_table(spec, placements, static_cast<int>(stage), choice, std::move(room)),
         .fixed = {}});
  }
  return holdings;
}

void LayoutFloors::forget_holdings() {
  for (auto& [key, holdings] : holdings_)
    for (Holding& one : holdings.each) spare_tables_.push_back(std::move(one.table));
  holdings_.clear();
}

bool LayoutFloors::has_own_peaks(const ParallelSpec& spec) {
  return spec.input_slots == InputSlots::one_more || runs_backward_in_parts(spec.schedule);
}

// Where some layers alone recompute, the others save what they do without, which may be less.
bool LayoutFloors::lacks_kept_layers(const ParallelSpec& spec, std::span<const Recompute> choices) {
  return spec.recompute_layers > 0 && std::ranges::find(choices, Recompute::none) == choices.end();
}

bool LayoutFloors::holds_anything(const ParallelSpec& spec) const {
  return spec.virtual_stages > 1 &&
         (!alike_inside_ || spec.input_slots == InputSlots::one_more || is_v_shaped(spec.schedule));
}

LayoutFloors::Shares LayoutFloors::shares_of(const ParallelSpec& spec, std::span<const Recompute> choices) {
  const Placements& placements = maker_.placements_of(spec);
  const ScheduleRow& row = row_of(spec.schedule);
  const PipelineShape shape = shape_of(spec, training_);
  KindBytes bytes = maker_.estimator().kind_bytes(spec, placements, choices.front());
  for (const Recompute recompute : choices.subspan(1)) {
    const KindBytes other = maker_.estimator().kind_bytes(spec, placements, recompute);
    for (std::size_t kind = 0; kind < bytes.saved.size(); ++kind)
      bytes.saved[kind] = std::min(bytes.saved[kind], other.saved[kind]);
  }
  const auto most = static_cast<std::size_t>(std::ranges::max_element(blocks_) - blocks_.begin());
  Shares shares{.of_byte = {}, .needed = 0.0, .least_fixed = bytes.least_fixed, .libraries = bytes.libraries};
  std::vector<double> least(blocks_.size(), std::numeric_limits<double>::infinity());
  // The last block has its own slots.
  const auto last = static_cast<std::size_t>(graph_.blocks.back().kind);
  const std::int64_t heads = slots_of_last_block(spec, shape);
  int in_flight = -1;
  for (int s = 0; s < shape.ranks; ++s) {
    // Ranks that hold equally much follow one another.
    if (const int now = row.in_flight(s, shape); std::exchange(in_flight, now) == now) {
      shares.of_byte.push_back(shares.of_byte.back());
      continue;
    }
    const auto takes = [&](std::size_t kind) {
      std::int64_t saved = in_flight * bytes.saved[kind] / spec.virtual_stages;
      if (spec.virtual_stages > 1 && kind == last) saved = std::min(saved, heads * bytes.saved[kind]);
      return static_cast<double>(bytes.state[kind] + saved);
    };
    shares.of_byte.push_back(1.0 / std::max(takes(most), 1.0));
    for (std::size_t kind = 0; kind < least.size(); ++kind)
      least[kind] = std::min(least[kind], takes(kind) * shares.of_byte.back());
  }
  for (std::size_t kind = 0; kind < least.size(); ++kind)
    shares.needed += static_cast<double>(blocks_[kind]) * least[kind];
  return shares;
}

// Shards over all ranks are the smallest; only libraries may take less with groups.
bool LayoutFloors::lacks_room_in_any_shards(const ParallelSpec& spec, std::span<const Recompute> choices) {
  if (holds_anything(spec) || has_own_peaks(spec)) return false;
  if (lacks_kept_layers(spec, choices))
    return lacks_room_in_any_shards(spec, std::array{choices.front(), Recompute::none});
  ParallelSpec smallest = spec;
  smallest.mesh.dp_shard = 0;
  const Shares shares = shares_of(smallest, choices);
  const std::int64_t capacity = maker_.estimator().capacities(smallest.mesh).front().count;
  double room = 0.0;
  for (const double of_byte : shares.of_byte)
    room += of_byte * static_cast<double>(capacity - (shares.least_fixed - shares.libraries));
  return shares.needed * (1 - 1e-9) > room;
}

Bytes LayoutFloors::memory_by_share(const ParallelSpec& spec, std::span<const Recompute> choices) {
  if (may_be_unlike_in_order(spec) || holds_anything(spec) || has_own_peaks(spec)) return Bytes(0);
  if (lacks_kept_layers(spec, choices)) return memory_by_share(spec, std::array{choices.front(), Recompute::none});
  const Shares shares = shares_of(spec, choices);
  double room = 0.0;
  for (const double of_byte : shares.of_byte) room += of_byte;
  return Bytes(shares.least_fixed + static_cast<std::int64_t>(shares.needed / room * (1 - 1e-9)));
}

// Letters: the blocks take t_0 seconds and grow by b_0 bytes without recompute, t_1 and b_1 where
// all of their layers recompute; F bytes of the stage's C do not grow. With a share f of alike
// layers that recompute, blocks that fit take b_0 - f (b_0 - b_1) <= C - F bytes, and at least
// t_0 + f (t_1 - t_0) seconds.
Seconds LayoutFloors::least_seconds_held(const ParallelSpec& spec, const BlockTable& none, const BlockTable& own,
                                         int in_flight, std::int64_t heads, std::int64_t capacity, std::size_t begin,
                                         std::size_t end) const {
  const Seconds all = own.seconds[end] - own.seconds[begin];
  const Seconds least = none.seconds[end] - none.seconds[begin];
  if (!alike_inside_ || runs_backward_in_parts(spec.schedule) || all <= least) return std::min(all, least);
  const auto grows = [&](const BlockTable& of) {
    const std::size_t shared = spec.virtual_stages > 1 && end + 1 == of.state.size() ? end - 1 : end;
    return static_cast<double>(of.state[end] - of.state[begin]) +
           static_cast<double>(in_flight) * static_cast<double>(of.saved[shared] - of.saved[begin]) /
               spec.virtual_stages +
           static_cast<double>(heads) * static_cast<double>(of.saved[end] - of.saved[shared]);
  };
  const double freed = grows(none) - grows(own),
               lacking = grows(none) + static_cast<double>(none.least_fixed - capacity);
  const double share = freed > 0.0 ? std::clamp(lacking / freed, 0.0, 1.0) : 0.0;
  return least + share * (1 - 1e-6) * (all - least);
}

bool LayoutFloors::can_hold(const ParallelSpec& spec, std::span<const Recompute> choices, std::optional<Seconds> most,
                            std::optional<Bytes> memory) {
  if (holds_anything(spec) || may_be_unlike_in_order(spec)) return true;
  if (lacks_kept_layers(spec, choices))
    return can_hold(spec, std::array{choices.front(), Recompute::none}, most, memory);
  if (!most && !has_own_peaks(spec)) {
    const std::vector<Bytes>& capacities = maker_.estimator().capacities(spec.mesh);
    const Shares shares = shares_of(spec, choices);
    double room = 0.0;
    for (std::size_t s = 0; s < shares.of_byte.size(); ++s)
      room += shares.of_byte[s] * static_cast<double>(memory.value_or(capacities[s]).count - shares.least_fixed);
    if (shares.needed * (1 - 1e-9) > room) return false;
  }
  return can_hold_in_turn(spec, choices, most, memory);
}

bool LayoutFloors::can_hold_in_turn(const ParallelSpec& spec, std::span<const Recompute> choices,
                                    std::optional<Seconds> most, std::optional<Bytes> memory) {
  const Placements& placements = maker_.placements_of(spec);
  Estimator& estimator = maker_.estimator();
  const ScheduleForms schedule = forms_of(row_of(spec.schedule));
  const PipelineShape shape = shape_of(spec, training_);
  const std::size_t blocks = graph_.blocks.size();
  const std::vector<Bytes>& capacities = estimator.capacities(spec.mesh);
  const bool in_parts = runs_backward_in_parts(spec.schedule);
  constexpr std::size_t most_kept = 256;
  if (holdings_.size() + choices.size() > most_kept) forget_holdings();
  std::vector<Holdings*> holdings;
  for (const Recompute choice : choices) holdings.push_back(&holdings_of(spec, choice, most.has_value()));
  // Each rank takes as many blocks as it can and leaves one for each stage of the later ranks: what
  // it can hold with more blocks it can with fewer, so no cut gets further. The last rank takes the
  // rest: it may hold that, although it could not hold less and send it on. Where ranks hold
  // several stages, this counts blocks: all but the first and the last, which are on the first and
  // the last rank, are alike. Slots of saved activations are as large as the largest stage needs;
  // the last block has its own.
  const int stages = spec.virtual_stages;  // of a rank
  const std::int64_t heads = slots_of_last_block(spec, shape);
  const auto of_none = [&](std::size_t stage) -> const BlockTable& {
    return holdings.front()->each[holdings.front()->of_stage[stage]].table;
  };
  const bool may_recompute_few = width_.recomputes_fewest_layers;
  const Seconds slowest = most ? *most * (1 + 1e-9) : infinite;
  std::vector<std::size_t> taken(choices.size(), 0);  // by the rank before, with each choice or those before it
  std::vector<std::size_t> turns(choices.size());     // of the choices: the one that took the rank before farthest
  std::iota(turns.begin(), turns.end(), std::size_t{0});
  std::size_t held = 0;
  for (int s = 0; s < shape.ranks; ++s) {
    const bool is_last = s + 1 == shape.ranks;
    const std::size_t last = blocks - static_cast<std::size_t>((shape.ranks - 1 - s) * stages);
    const std::int64_t capacity = memory.value_or(capacities[static_cast<std::size_t>(s)]).count;
    const int in_flight = schedule.in_flight(s, shape);
    std::size_t farthest = held;
    std::size_t farthest_turn = 0;
    for (std::size_t turn = 0; turn < turns.size(); ++turn) {
      const std::size_t choice = turns[turn];
      Holdings& of_choice = *holdings[choice];
      const std::size_t stage = of_choice.of_stage.size() == 1 ? 0 : static_cast<std::size_t>(s);
      Holding& holding = of_choice.each[of_choice.of_stage[stage]];
      const auto& table = holding.table;
      auto& fixed = holding.fixed;
      const auto fits = [&](std::size_t end) {
        if (most && table.seconds[end] - table.seconds[held] > slowest &&
            (!may_recompute_few || choice == 0 ||
             least_seconds_held(spec, of_none(stage), table, in_flight, heads, capacity, held, end) > slowest))
          return false;
        const std::size_t shared = stages > 1 && end == blocks ? end - 1 : end;  // of these blocks
        const std::int64_t state = table.state[end] - table.state[held];
        const BlockRange range{static_cast<int>(held), static_cast<int>(end)};
        if (in_parts)
          return state <= capacity &&
                 estimator.peak(spec, placements, schedule, s, range, choices[choice]).count <= capacity;
        const std::int64_t growing = state + in_flight * (table.saved[shared] - table.saved[held]) / stages +
                                     heads * (table.saved[end] - table.saved[shared]);
        if (growing + table.least_fixed > capacity) return false;
        // Some layers recompute, perhaps none that runs back: then no scratch is for that.
        const bool may_recompute_nothing = spec.recompute_layers > 0 && graph_.first_trained > 0;
        if (stages > 1 || may_recompute_nothing) return true;
        if (spec.input_slots == InputSlots::one_more)
          return estimator.peak(spec, placements, schedule, s, range, choices[choice]).count <= capacity;
        const std::pair kinds(spec.schedule,
                              estimator.kinds_in(range) << 1 | static_cast<std::uint64_t>(end == blocks));
        auto known = std::ranges::find_if(fixed, [&](const auto& one) { return one.first == kinds; });
        if (known == fixed.end())
          known = fixed.insert(
              known, {kinds, estimator.peak(spec, placements, schedule, s, range, choices[choice]).count - growing});
        return growing + known->second <= capacity;
      };
      if (is_last) {
        if (fits(blocks)) return true;
        continue;
      }
      const std::size_t farthest_before = farthest;
      // Mostly as many as the rank before.
      if (const std::size_t alike = held + taken[choice]; alike > farthest && alike <= last && fits(alike))
        farthest = alike;
      while (farthest < last && fits(farthest + 1)) {
        // In steps that double, from one anew.
        std::size_t step = 1;
        while (farthest + 2 * step <= last && fits(farthest + 2 * step)) step *= 2;
        farthest += step;
      }
      taken[choice] = farthest - held;
      if (farthest > farthest_before) farthest_turn = turn;
    }
    std::swap(turns.front(), turns[farthest_turn]);
    // Where layers are alike, a rank that cannot hold the next one cannot hold any; else it may
    // hold one that the ranks before it could.
    const std::size_t before = alike_inside_ ? held : static_cast<std::size_t>(s * stages);
    if (farthest < before + static_cast<std::size_t>(stages)) return false;
    held = farthest;
  }
  return false;
}

Seconds LayoutFloors::time_within_memory(const ParallelSpec& spec, std::span<const Recompute> choices, Seconds enough) {
  if (may_be_unlike_in_order(spec)) return of_devices(spec.mesh.size()).time;
  const PipelineShape shape = shape_of(spec, training_);
  const LeastLayout least = least_layout(spec, choices);
  // Tables have all layers of a stage alike.
  if (spec.recompute_layers > 0) return least.time;
  const auto floor_of = [&](Seconds slowest) {
    const LeastWork work{.all = least.all, .slowest = std::max(slowest, least.slowest)};
    return std::max(least.time, least_of_slowest(row_of(spec.schedule), work, least.transfer, shape) * (1 - 1e-9));
  };
  // What the slowest stage takes at least for a micro-batch, in steps.
  const Seconds first = least.time / (shape.micro_batches + shape.stages);
  const Seconds step = (least.time / shape.micro_batches * 2.0 - first) / 64;
  int below = 0, above = 64;
  const auto slowest = [&](int steps) { return first + steps * step; };
  if (floor_of(slowest(above)) >= enough) {
    int too_few = 0, steps = above;
    while (steps - too_few > 1) {
      const int middle = std::midpoint(too_few, steps);
      (floor_of(slowest(middle)) < enough ? too_few : steps) = middle;
    }
    (can_hold(spec, choices, slowest(steps)) ? above : below) = steps;
    if (below == steps) return floor_of(slowest(steps));
  }
  if (can_hold(spec, choices, first)) return least.time;
  while (above - below > 1) {
    const int middle = std::midpoint(below, above);
    (can_hold(spec, choices, slowest(middle)) ? above : below) = middle;
  }
  return floor_of(slowest(below));
}

Bytes LayoutFloors::memory_of(const ParallelSpec& spec, std::span<const Recompute> choices, Bytes least) {
  // On heterogeneous devices the fullest is not always the one that needs the most.
  if (cluster_.groups.size() > 1 || may_be_unlike()) return least;
  if (lacks_kept_layers(spec, choices)) return memory_of(spec, std::array{choices.front(), Recompute::none}, least);
  constexpr std::size_t most_kept = 4096;
  if (memories_.size() >= most_kept) memories_.clear();
  ParallelSpec key = spec;
  key.mesh.order = {};
  const auto [entry, inserted] = memories_.try_emplace({std::move(key), choices.size()}, least);
  if (!inserted) return std::max(entry->second, least);
  if (holds_anything(spec) || may_be_unlike_in_order(spec)) return least;
  least = std::max(least, memory_by_share(spec, choices));
  if (can_hold_in_turn(spec, choices, {}, least)) return entry->second = least;
  Bytes enough = std::max(2 * least, Bytes(1));
  for (; !can_hold_in_turn(spec, choices, {}, enough); enough = 2 * enough) least = enough;
  for (int halvings = 0; halvings < 10; ++halvings) {
    const Bytes middle = least + Bytes((enough - least).count / 2);
    (can_hold_in_turn(spec, choices, {}, middle) ? enough : least) = middle;
  }
  return entry->second = least;
}

}  // namespace parplan
