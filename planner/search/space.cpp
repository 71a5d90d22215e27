#include "planner/search/space.h"

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <ranges>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>

#include "planner/base/enum_index.h"
#include "planner/base/hash.h"
#include "planner/parallel/techniques.h"
#include "planner/program/lower_block.h"
#include "planner/search/device_count_bound.h"
#include "planner/search/space_rows.h"

namespace parplan {

int most_context_ranks(const OpGraph& graph, const LayoutRequest& request) {
  if (const std::optional<std::int64_t> degree = given<std::int64_t>(request, Choice::cp))
    return *degree > 1 ? any_context_ranks : 1;
  if (gives_every_degree(request)) return 1;
  const bool asks = request[Choice::cp_method] || given<std::int64_t>(request, Choice::cp_ulysses).value_or(1) > 1;
  if (graph.sequence >= long_sequence || asks) return any_context_ranks;
  const std::int64_t shortest = graph.blocks.size() > deep_model ? medium_sequence : shortest_shared_sequence;
  return graph.sequence < shortest ? 1 : static_cast<int>(graph.sequence / least_shared_tokens);
}

SpaceWidth usual_width(const OpGraph& graph, const Engine& engine, const LayoutRequest& request) {
  int ranks = most_context_ranks(graph, request);
  if (ranks < any_context_ranks && !engine.has_context) ranks = 1;
  const bool any = ranks == any_context_ranks;
  const auto is_layer = [&](const Block& one) { return may_recompute(one) && product_flops(graph, one) > 0.0; };
  const auto layers = std::ranges::count_if(graph.blocks, is_layer);
  const auto schedule = given<ScheduleKind>(request, Choice::schedule).value_or(ScheduleKind::one_f_one_b);
  const bool interleaves = schedule == ScheduleKind::interleaved || request[Choice::virtual_stages].has_value();
  return {.interleaves_freely = request[Choice::schedule].has_value(),
          .blocks_beside_layers = static_cast<int>(std::ssize(graph.blocks) - layers),
          .takes_larger_groups = interleaves && engine.has_other_groups,
          .most_context_ranks = ranks,
          .most_ring_ranks = any ? SpaceWidth().most_ring_ranks : 1,
          .most_exchange_ranks = any || graph.sequence >= medium_sequence ? any_context_ranks : 1,
          .shards_freely = !engine.has_tensor && !engine.has_pipeline,
          .unlike_replicas = static_cast<int>(
              given<std::vector<int>>(request, Choice::replica_micro_batches).value_or(std::vector<int>()).size())};
}

SpaceWidth with_context(SpaceWidth width) {
  width.most_context_ranks = any_context_ranks;
  return width;
}

namespace {

// The value as numbers, which no other value of its choice has.
void append_numbers(const ChoiceValue& value, std::vector<std::int64_t>& numbers) {
  std::visit(
      [&]<class Value>(const Value& one) {
        if constexpr (std::ranges::range<Value>) {
          numbers.push_back(std::ranges::distance(one));
          for (const auto& each : one) numbers.push_back(static_cast<std::int64_t>(each));
        } else if constexpr (std::is_same_v<Value, Offload>) {
          numbers.push_back(number_of(one));
        } else {
          numbers.push_back(static_cast<std::int64_t>(one));
        }
      },
      value);
}

}  // namespace

// How the choices of a row bear on those of others, as sets of rows.
struct RowLinks {
  unsigned followers = 0;  // the rows whose values follow from this choice
  // Whether neither its values follow from choices that do not decide legality, nor other values
  // from it.
  bool is_apart = false;
  unsigned decisive = 0;    // the earlier rows that this one, or a later one that is not apart, follows from
  std::size_t nearest = 0;  // the last of these; where there are none, the first row, which tells nothing
  bool is_kept = true;      // whether its layouts are kept: not by micro-batch, which has too many values
  unsigned nearest_to = 0;  // the rows of which this one is the nearest, and of which it is another decisive one
  unsigned decided_by_more = 0;
};

template <class Do>
void for_each_row(unsigned set, const Do& action) {
  for (; set != 0; set &= set - 1) action(static_cast<std::size_t>(std::countr_zero(set)));
}

// The number of layouts from a row on, by that row and the earlier choices that it follows from: of
// walks with the same model, training and request but for its degrees.
struct KnownLayouts {
  explicit KnownLayouts(const LayoutRequest& request);

  using Key = std::vector<std::int64_t>;
  std::unordered_map<Key, std::int64_t, NumbersHash> layouts;
  std::array<RowLinks, count_of<Choice>> links;
  std::size_t deciding = 0;  // number of rows that decide legality, which come first
};

KnownLayouts::KnownLayouts(const LayoutRequest& request) {
  const std::span<const SpaceRow> rows = space_rows();
  const auto contains = [](unsigned set, std::size_t row) { return (set >> row & 1u) != 0; };
  // What never changes changes nothing.
  const auto is_fixed = [&](const SpaceRow& row) { return row.has_one_value && !request[row.choice]; };
  for (std::size_t row = 0; row < rows.size(); ++row) {
    if (rows[row].decides_legality) deciding = row + 1;
    for (std::size_t later = 0; later < rows.size(); ++later)
      if (rows[later].follows_from.contains(rows[row].choice) && !is_fixed(rows[row]) && !is_fixed(rows[later]))
        links[row].followers |= 1u << later;
  }
  for (std::size_t row = deciding; row < rows.size(); ++row) {
    links[row].is_apart = links[row].followers == 0;
    for (std::size_t earlier = deciding; earlier < row; ++earlier)
      links[row].is_apart = links[row].is_apart && !contains(links[earlier].followers, row);
  }
  for (std::size_t row = deciding; row < rows.size(); ++row)
    for (std::size_t earlier = 0; earlier < row; ++earlier)
      for (std::size_t later = row; later < rows.size(); ++later)
        if (!links[later].is_apart && contains(links[earlier].followers, later)) {
          links[row].decisive |= 1u << earlier;
          links[row].nearest = earlier;
          links[row].is_kept = links[row].is_kept && rows[earlier].choice != Choice::micro_batch;
        }
  for (std::size_t row = 0; row < rows.size(); ++row)
    for (std::size_t later = row + 1; later < rows.size(); ++later)
      if (links[later].nearest == row)
        links[row].nearest_to |= 1u << later;
      else if (contains(links[later].decisive, row))
        links[row].decided_by_more |= 1u << later;
}

namespace {

// Whether layouts of the same degrees differ in nothing that comes before their micro-batches.
bool are_alike(const ParallelSpec& a, const ParallelSpec& b) {
  return a.sequence_parallel == b.sequence_parallel && a.tp_overlap == b.tp_overlap && a.cp_method == b.cp_method &&
         a.mesh.cp_ulysses == b.mesh.cp_ulysses;
}

// A walk over the rows of the space, with one layout in which each row in turn sets its choice. A
// row's values are kept until a choice that they follow from changes.
class SpaceWalk {
 public:
  SpaceWalk(const OpGraph& graph, const TrainingSpec& training, int devices, const LayoutRequest& request,
            const SpaceWidth& width, KnownLayouts& known, Devices wanted = Devices::exactly)
      : context_{graph, training, devices, wanted == Devices::exactly, width},
        request_(request),
        known_(known),
        deciding_(known.deciding) {
    for (const SpaceRow& row : space_rows()) {
      Step& step = steps_[count_];
      step.links = known.links[count_++];
      step.space = &row;
      step.choice = &row_of(row.choice);
    }
  }

  // Visits every legal layout.
  template <class Visit>
  void enumerate(const Visit& visit) {
    decide(0, [&] { choose(deciding_, count_, visit); });
  }

  // Visits the legal layouts of a group's micro-batch with the first order of their axes: with the
  // place of that among all layouts, and the number of orders.
  template <class Visit>
  void enumerate_group(const ParallelSpec& group, const Visit& visit) {
    std::int64_t place = 0;
    decide(0, [&] {
      if (are_alike(spec_, group))
        enumerate_micro_batch(deciding_, group.micro_batch, place, visit);
      else
        place += count_from(deciding_);
    });
  }

  // The number of legal layouts, without visiting choices from which nothing follows.
  std::int64_t count() {
    std::int64_t layouts = 0;
    decide(0, [&] { layouts += count_from(deciding_); });
    return layouts;
  }

  // Visits every legal combination of the choices that decide legality, with the number of layouts
  // that have it.
  template <class Visit>
  void count_each(const Visit& visit) {
    decide(0, [&] { visit(spec_, count_from(deciding_)); });
  }

  // Visits all degrees, also some of which no layout is legal.
  template <class Visit>
  void visit_degrees(const Visit& visit, std::size_t row = 0) {
    if (!steps_[row].choice->axis) {
      visit(spec_);
      return;
    }
    for (std::size_t at = 0; at < values(row).size(); ++at) {
      set(row, at);
      visit_degrees(visit, row + 1);
    }
  }

  // Visits every legal combination of these and a micro-batch, with its layouts where `counts`.
  template <class Visit>
  void visit_micro_batches(bool counts, const Visit& visit) {
    decide(0, [&] { visit_micro_batches(deciding_, counts, visit); });
  }

 private:
  struct Step {
    const SpaceRow* space = nullptr;
    const ChoiceRow* choice = nullptr;
    RowLinks links;
    bool is_known = false;  // whether `values` holds for the present layout
    std::vector<ChoiceValue> values;
    std::size_t at = 0;  // the present one
    std::optional<ChoiceValue> followed;  // the value that the known values of later rows follow from
    // From this row on, without rows apart, by the values of the nearest decisive row: where known
    // for the present choices of the others.
    std::vector<std::optional<std::int64_t>> layouts;
  };

  const std::vector<ChoiceValue>& values(std::size_t row) {
    Step& step = steps_[row];
    if (step.is_known) return step.values;
    step.is_known = true;
    step.values.clear();
    for_each_row(step.links.nearest_to, [&](std::size_t later) { steps_[later].layouts.clear(); });
    const std::optional<ChoiceValue>& given = request_[step.space->choice];
    const bool applies = !step.choice->applies || step.choice->applies(spec_);
    if (!given || !applies) {
      step.space->values(context_, spec_, step.values);
    } else if (!step.choice->axis) {
      if (!step.space->accepts || step.space->accepts(context_, spec_, *given)) step.values.push_back(*given);
    } else {
      // Degrees have to multiply to the number of devices, which no technique checks.
      step.space->values(context_, spec_, step.values);
      std::erase_if(step.values, [&](const ChoiceValue& value) { return value != *given; });
    }
    return step.values;
  }

  // Takes the value at this place.
  void set(std::size_t row, std::size_t at) {
    Step& step = steps_[row];
    step.at = at;
    step.choice->set(spec_, step.values[at]);
    if (step.followed == step.values[at]) return;
    step.followed = step.values[at];
    for_each_row(step.links.followers, [&](std::size_t later) {
      steps_[later].is_known = false;
      steps_[later].followed.reset();
    });
    for_each_row(step.links.decided_by_more, [&](std::size_t later) { steps_[later].layouts.clear(); });
  }

  // What a technique rejects with one value of the other choices, it rejects with every value.
  bool can_be_legal() {
    for (std::size_t row = deciding_; row < count_; ++row) {
      if (values(row).empty()) return false;
      set(row, 0);
    }
    return is_legal(context_.graph, context_.training, spec_);
  }

  template <class Visit>
  void decide(std::size_t row, const Visit& visit) {
    if (row == deciding_) {
      if (can_be_legal()) visit();
      return;
    }
    for (std::size_t at = 0; at < values(row).size(); ++at) {
      set(row, at);
      decide(row + 1, visit);
    }
  }

  template <class Visit>
  void choose(std::size_t row, std::size_t end, const Visit& visit) {
    if (row == end) {
      visit(spec_);
      return;
    }
    for (std::size_t at = 0; at < values(row).size(); ++at) {
      set(row, at);
      choose(row + 1, end, visit);
    }
  }

  // Rows before that of the micro-batch have no part in it.
  template <class Visit>
  void visit_micro_batches(std::size_t row, bool counts, const Visit& visit) {
    for (std::size_t at = 0; at < values(row).size(); ++at) {
      set(row, at);
      if (steps_[row].space->choice == Choice::micro_batch)
        visit(spec_, counts ? count_from(row + 1) : 0);
      else
        visit_micro_batches(row + 1, counts, visit);
    }
  }

  // `place`: of the first layout; afterwards of the next one.
  template <class Visit>
  void enumerate_micro_batch(std::size_t row, std::int64_t wanted, std::int64_t& place, const Visit& visit) {
    for (std::size_t at = 0; at < values(row).size(); ++at) {
      set(row, at);
      if (steps_[row].space->choice != Choice::micro_batch)
        enumerate_micro_batch(row + 1, wanted, place, visit);
      else if (spec_.micro_batch != wanted)
        place += count_from(row + 1);
      else
        choose(row + 1, count_ - 1, [&](const ParallelSpec& spec) {
          const std::vector<ChoiceValue>& orders = values(count_ - 1);
          if (orders.empty()) return;
          set(count_ - 1, 0);
          visit(spec, place, static_cast<std::int64_t>(orders.size()));
          place += static_cast<std::int64_t>(orders.size());
        });
    }
  }

  // The number of legal layouts with the choices before this row, which decide legality or are
  // followed by it.
  std::int64_t count_from(std::size_t row) {
    std::int64_t layouts = 1;
    for (std::size_t later = row; later < count_; ++later)
      if (steps_[later].links.is_apart) layouts *= static_cast<std::int64_t>(values(later).size());
    return layouts == 0 ? 0 : layouts * count_dependent_from(row);
  }

  // Without the rows apart.
  std::int64_t count_dependent_from(std::size_t row) {
    while (row < count_ && steps_[row].links.is_apart) ++row;
    if (row == count_) return 1;
    Step& step = steps_[row];
    step.layouts.resize(steps_[step.links.nearest].values.size());
    const std::size_t at = steps_[step.links.nearest].at;
    if (step.layouts[at]) return *step.layouts[at];
    if (!step.links.is_kept) return *(step.layouts[at] = count_values_of(row));
    key_.assign(1, static_cast<std::int64_t>(row));
    for_each_row(step.links.decisive,
                 [&](std::size_t earlier) { append_numbers(steps_[earlier].choice->get(spec_), key_); });
    if (const auto known = known_.layouts.find(key_); known != known_.layouts.end())
      return *(step.layouts[at] = known->second);
    KnownLayouts::Key key = key_;
    const std::int64_t layouts = count_values_of(row);
    known_.layouts.emplace(std::move(key), layouts);
    return *(step.layouts[at] = layouts);
  }

  std::int64_t count_values_of(std::size_t row) {
    std::int64_t layouts = 0;
    for (std::size_t at = 0; at < values(row).size(); ++at) {
      set(row, at);
      layouts += count_dependent_from(row + 1);
    }
    return layouts;
  }

  SpaceContext context_;
  const LayoutRequest& request_;
  KnownLayouts& known_;
  std::array<Step, count_of<Choice>> steps_;
  std::size_t count_ = 0;
  std::size_t deciding_ = 0;
  ParallelSpec spec_;
  KnownLayouts::Key key_;  // of the layouts asked for last
};

}  // namespace

std::vector<ParallelSpec> enumerate_specs(const OpGraph& graph, const TrainingSpec& training, int devices,
                                          const LayoutRequest& request) {
  std::vector<ParallelSpec> specs;
  KnownLayouts known(request);
  SpaceWalk(graph, training, devices, request, usual_width(graph, training.engine, request), known)
      .enumerate([&](const ParallelSpec& spec) { specs.push_back(spec); });
  return specs;
}

std::int64_t count_specs(const OpGraph& graph, const TrainingSpec& training, int devices,
                         const LayoutRequest& request) {
  KnownLayouts known(request);
  return SpaceWalk(graph, training, devices, request, usual_width(graph, training.engine, request), known).count();
}

Space::Space(const OpGraph& graph, const TrainingSpec& training, const LayoutRequest& request, const SpaceWidth& width)
    : graph_(graph),
      training_(training),
      request_(request),
      width_(width),
      known_(std::make_unique<KnownLayouts>(request)) {}
Space::~Space() = default;

namespace {

// Layouts that are visited in the order of the space, by their degrees.
SpacePart& part_of(const ParallelSpec& spec, std::vector<SpacePart>& parts) {
  if (parts.empty() || parts.back().spec.mesh.degree != spec.mesh.degree) {
    parts.emplace_back();
    parts.back().spec.mesh.degree = spec.mesh.degree;
  }
  return parts.back();
}

std::vector<SpacePart> most_devices_first(std::vector<SpacePart> parts) {
  std::vector<std::pair<int, SpacePart*>> order;  // a part is large, and slow to swap
  for (SpacePart& part : parts) order.emplace_back(part.spec.mesh.size(), &part);
  std::ranges::stable_sort(order, std::greater<>(), &std::pair<int, SpacePart*>::first);
  std::vector<SpacePart> sorted;
  sorted.reserve(parts.size());
  for (const auto& [devices, part] : order) sorted.push_back(std::move(*part));
  return sorted;
}

// Notes the values that a legal layout has, or may have beside it: those of the schedule follow
// from whether there is a pipeline, and from its ZeRO stage.
// `its`: a buffer.
void note_values(const SpaceContext& context, const ParallelSpec& spec, Space::NamedValues& named,
                 std::vector<ChoiceValue>& its) {
  for (auto& [choice, values] : named) {
    const ChoiceRow& row = row_of(choice);
    if (row.applies && !row.applies(spec)) continue;
    its.clear();
    if (choice == Choice::schedule)
      space_row_of(choice).values(context, spec, its);
    else
      its.push_back(row.get(spec));
    for (const ChoiceValue& value : its)
      if (std::ranges::find(values, value) == values.end()) values.push_back(value);
  }
}

LayoutRequest with_degrees(LayoutRequest request, const ParallelSpec& spec) {
  for (const ChoiceRow& row : choice_rows())
    if (row.axis) request[row.choice] = row.get(spec);
  return request;
}

}  // namespace

std::vector<SpacePart> Space::parts(int devices, Devices wanted) {
  std::vector<SpacePart> parts;
  named_values_.clear();
  for (const Choice choice : {Choice::zero_stage, Choice::sequence_parallel, Choice::cp_method, Choice::schedule})
    if (!request_[choice]) named_values_.emplace_back(choice, std::vector<ChoiceValue>());
  const SpaceContext context{graph_, training_, devices, wanted == Devices::exactly, width_};
  std::vector<ChoiceValue> buffer;
  SpaceWalk(graph_, training_, devices, request_, width_, *known_, wanted)
      .count_each([&](const ParallelSpec& spec, std::int64_t layouts) {
        part_of(spec, parts).layouts += layouts;
        if (layouts > 0) note_values(context, spec, named_values_, buffer);
      });
  for (auto& [choice, values] : named_values_) std::ranges::sort(values);
  return most_devices_first(std::move(parts));
}

std::vector<SpacePart> Space::degrees(int devices, Devices wanted) {
  std::vector<SpacePart> parts;
  SpaceWalk(graph_, training_, devices, request_, width_, *known_, wanted).visit_degrees([&](const ParallelSpec& spec) {
    part_of(spec, parts);
  });
  return most_devices_first(std::move(parts));
}

std::vector<SpaceGroups> Space::groups(const SpacePart& part, bool counts) {
  std::vector<SpaceGroups> all;
  const LayoutRequest fixed = with_degrees(request_, part.spec);
  SpaceWalk(graph_, training_, part.spec.mesh.size(), fixed, width_, *known_)
      .visit_micro_batches(counts, [&](const ParallelSpec& spec, std::int64_t layouts) {
        auto groups = std::ranges::find_if(all, [&](const SpaceGroups& one) { return are_alike(one.spec, spec); });
        if (groups == all.end()) {
          groups = all.insert(all.end(), {.spec = part.spec, .sizes = {}});
          groups->spec.sequence_parallel = spec.sequence_parallel;
          groups->spec.tp_overlap = spec.tp_overlap;
          groups->spec.cp_method = spec.cp_method;
          groups->spec.mesh.cp_ulysses = spec.mesh.cp_ulysses;
        }
        auto& sizes = groups->sizes;
        auto size = std::ranges::lower_bound(sizes, spec.micro_batch, {}, &SpaceGroups::Size::micro_batch);
        if (size == sizes.end() || size->micro_batch != spec.micro_batch)
          size = sizes.insert(size, {.micro_batch = spec.micro_batch, .layouts = 0});
        size->layouts += layouts;
      });
  return all;
}

std::vector<PlacedSpec> Space::specs(const SpacePart& group) const {
  std::vector<PlacedSpec> specs;
  const LayoutRequest fixed = with_degrees(request_, group.spec);
  SpaceWalk(graph_, training_, group.spec.mesh.size(), fixed, width_, *known_)
      .enumerate_group(group.spec, [&](const ParallelSpec& spec, std::int64_t place, std::int64_t orders) {
        specs.push_back({.place = place, .spec = spec, .orders = orders});
      });
  return specs;
}

std::vector<AxisOrder> Space::orders_of(const ParallelSpec& spec) const {
  if (request_[Choice::mesh_order]) return {spec.mesh.order};
  std::vector<ChoiceValue> values;
  space_row_of(Choice::mesh_order).values({graph_, training_, spec.mesh.size()}, spec, values);
  std::vector<AxisOrder> orders;
  for (const ChoiceValue& value : values) orders.push_back(std::get<AxisOrder>(value));
  return orders;
}

std::vector<PlacedSpec> Space::orders(const PlacedSpec& placed) const {
  std::vector<PlacedSpec> specs;
  for (const AxisOrder& order : orders_of(placed.spec)) {
    specs.push_back(
        {.place = placed.place + static_cast<std::int64_t>(specs.size()), .spec = placed.spec, .orders = 1});
    specs.back().spec.mesh.order = order;
  }
  return specs;
}

}  // namespace parplan
