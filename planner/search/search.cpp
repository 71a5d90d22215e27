#include "planner/search/search.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "planner/parallel/techniques.h"
#include "planner/schedule/schedules.h"
#include "planner/search/best_first.h"
#include "planner/search/candidates.h"
#include "planner/search/input_slots.h"
#include "planner/search/layout_floors.h"
#include "planner/search/parallel_for.h"
#include "planner/search/simulate_spec.h"
#include "planner/search/simulated_steps.h"

namespace parplan {
namespace {

// The inputs that determine a candidate's time and memory.
struct CandidateWork {
  ParallelSpec spec;
  std::vector<CostModel> models;  // by rank of the pipeline
};
// Candidates of one layout on equal networks are one plan, whatever the order of their axes.
bool equal_work(const CandidateWork& a, const CandidateWork& b) {
  ParallelSpec same_order = a.spec;
  same_order.mesh.order = b.spec.mesh.order;
  return same_order == b.spec && equal_costs(a.models, b.models);
}

// The degrees to consider: all that the devices allow, or those that use all of them.
std::vector<SpacePart> parts_of(Space& space, const Cluster& cluster, const LayoutRequest& request, bool fewer) {
  if (gives_every_degree(request)) return space.parts(static_cast<int>(product_of_degrees(request)), Devices::exactly);
  return space.parts(cluster.devices(), fewer ? Devices::at_most : Devices::exactly);
}

// What the space leaves out of the layouts of its degrees, each after a comma.
std::string left_out_in_words(const Cluster& cluster, const LayoutRequest& request) {
  std::string words;
  if (cluster.devices() == 1) return words;
  const std::optional<ScheduleKind> schedule = given<ScheduleKind>(request, Choice::schedule);
  const std::int64_t zero_stage = given<std::int64_t>(request, Choice::zero_stage).value_or(0);
  const bool has_pipelines = given<std::int64_t>(request, Choice::pp).value_or(2) > 1;
  if (schedule && runs_backward_in_parts(*schedule))
    words += ", in the fastest cut of each layout, with ZeRO-0 or 1";
  else if (schedule == ScheduleKind::interleaved && !request[Choice::stage_blocks])
    words += ", in the fastest cut of each layout";
  else if (!schedule && has_pipelines && zero_stage <= 1)
    words += request[Choice::stage_blocks] ? ", no zero_bubble_h1"
                                           : ", interleaved only in even stages with ZeRO-0 or 1, no zero_bubble_h1";
  const bool shards =
      given<std::int64_t>(request, Choice::dp).value_or(2) > 1 && (zero_stage > 0 || !request[Choice::zero_stage]);
  if (shards && !request[Choice::dp_shard]) words += ", no hybrid sharding";
  return words;
}

std::string space_in_words(const OpGraph& graph, const Cluster& cluster, const LayoutRequest& request, bool fewer) {
  const char* const degrees = shares_context(graph, request) ? "dp x tp x pp x cp" : "dp x tp x pp";
  const std::string left_out = left_out_in_words(cluster, request);
  if (gives_every_degree(request))
    return fmt::format("{} as given, on the first {} devices{}", degrees, product_of_degrees(request), left_out);
  const bool gives_one = product_of_degrees(request) > 1 || request[Choice::dp] || request[Choice::tp] ||
                         request[Choice::pp] || request[Choice::cp];
  return fmt::format("every {}{} on {} {} device{}{}", degrees, gives_one ? " with what is given" : "",
                     fewer ? "up to" : "all", cluster.devices(), cluster.devices() == 1 ? "" : "s", left_out);
}

// One search, from the degrees to the plans. Its space is looked into step by step: a part has all
// layouts of some degrees, then those with one micro-batch and one kind of tensor parallelism, then
// those that differ in the order of their axes alone, then a single layout without its cut, whose
// candidates are made last. The place of a candidate counts parts, layouts in their part, and
// candidates of a layout.
class SpaceSearch {
 public:
  SpaceSearch(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training, const LayoutRequest& request,
              const SearchOptions& options)
      : graph_(graph),
        cluster_(cluster),
        training_(training),
        request_(request),
        options_(options),
        space_(graph, training, request),
        search_{.top = options.top,
                .top_each = options.top_each,
                .tied = options.objective == Objective::memory ? 0.0 : tied_plans,
                .to_beat = options.to_beat} {
    const int threads = options.threads > 0 ? options.threads : threads_of_this_machine();
    const std::shared_ptr<KnownBlockShapes> shapes =
        options.shapes ? options.shapes : std::make_shared<KnownBlockShapes>();
    for (int thread = 0; thread < threads; ++thread) {
      owned_.push_back(std::make_unique<CandidateMaker>(graph, cluster, training, options.objective, shapes));
      makers_.push_back(owned_.back().get());
    }
    counts_.space = space_in_words(graph, cluster, request, options.fewer_devices);
    floors_.emplace(graph, cluster, training, request, *makers_.front());
    std::vector<Open> open;
    for (SpacePart& one : parts_of(space_, cluster, request, options.fewer_devices)) {
      counts_.candidates += one.layouts;
      Part part{.step = Step::devices, .space = std::move(one), .floor = {}, .place = open.size() << place_bits};
      part.floor = floors_->of_devices(part.space.spec.mesh.size());
      open.push_back(open_part(std::move(part)));
    }
    add(search_, open);
  }

  SearchResult run() {
    // Once another cut is ahead of what was to be beaten, the plans behind it are ranked, too.
    bool ranked = false;
    do {
      parplan::run(search_, {.look_into = [this](const Open& part) { return look_into(part.part); },
                             .room = [this] { return room(); },
                             .is_new = [this](const Open& candidate) { return is_new(candidate); },
                             .simulate = [this](std::span<const Open> turns) { return simulate(turns); }});
      ranked = is_ahead(search_);
      try_other_cuts();
    } while (!ranked && is_ahead(search_));
    if (is_ahead(search_)) drop_idle_input_slots();
    return take_result();
  }

 private:
  static constexpr int place_bits = 38;      // of a layout in its part, with its candidates
  static constexpr int candidate_bits = 14;

  // What is known of a part.
  enum class Step {
    devices,  // with the floor of their number alone
    degrees,
    micro_batch_at_peak,   // and tensor parallelism; with the floor of their degrees' devices
    micro_batch,           // with the floor of its kernels
    micro_batch_on_links,  // with that of the links that they cross
    any_recompute,         // with the floor of its schedule and ZeRO stage
    any_that_fits,         // and of its memory
    any_order,
    layout,
    refined_layout,  // with the best floor that there is
  };
  // Groups of a part that differ in their micro-batches, by their floors: while the first is open
  // it stands for all.
  struct Groups {
    ParallelSpec spec;
    struct Size : SpaceGroups::Size {
      Seconds floor;
    };
    std::vector<Size> sizes;
  };
  // Layouts that differ in what all of their stages recompute: the first leaves the choice to each
  // stage, where stages may choose.
  using Recomputing = std::vector<PlacedSpec>;
  struct Part {
    Step step{};
    SpacePart space;
    Floor floor;
    std::uint64_t place = 0;
    bool has_to_mix = false;  // layouts: fit only if some stages recompute
    // With the floor of the peak: the place in its groups.
    const Groups* groups = nullptr;
    std::size_t size = 0;
    const Recomputing* recomputing = nullptr;  // with any recompute
  };

  // Whether stages may differ in what they recompute.
  bool mixes() const { return !request_[Choice::recompute]; }

  Score score_of(const ParallelSpec& spec, Seconds time, const MemoryUse& memory) const {
    return score(options_.objective, cluster_, spec, time, memory);
  }

  Open open_part(Part part) {
    MemoryUse least;
    least.parameters = part.floor.memory;
    Open open{.bound = score_of(part.space.spec, part.floor.time, least), .place = part.place, .part = parts_.size()};
    parts_.push_back(std::move(part));
    open.mesh = &parts_.back().space.spec.mesh;
    return open;
  }

  // The same part once more is known of it.
  Open open_again(std::size_t number, Step step, const Floor& floor) {
    Part part = parts_[number];
    part.step = step;
    part.floor.time = std::max(part.floor.time, floor.time);
    part.floor.memory = std::max(part.floor.memory, floor.memory);
    return open_part(std::move(part));
  }

  std::vector<Open> look_into(std::size_t number) {
    switch (parts_[number].step) {
      case Step::devices:
        return {open_again(number, Step::degrees, floors_->of_degrees(parts_[number].space.spec))};
      case Step::degrees: return look_into_degrees(number);
      case Step::micro_batch_at_peak:
        return look_into_groups(number);
      case Step::micro_batch:
        return {open_on_links(number)};
      case Step::micro_batch_on_links:
        return look_into_micro_batch(number);
      case Step::any_recompute:
        return look_for_room(number);
      case Step::any_that_fits:
        return look_into_recomputing(number);
      case Step::any_order:
        return open_orders(number);
      case Step::layout:
        return refine(number);
      case Step::refined_layout: return make_candidates_of(number);
    }
    return {};
  }

  // The part holds nothing that fits.
  std::vector<Open> leave_out(std::size_t number) {
    counts_.infeasible_memory += parts_[number].space.layouts;
    left_out_.push_back(number);
    return {};
  }

  std::vector<Open> look_into_degrees(std::size_t number) {
    std::vector<Open> opened;
    std::vector<std::pair<std::int64_t, Seconds>> floors;  // by micro-batch
    const auto floor_of = [&](ParallelSpec spec, std::int64_t micro_batch) {
      const auto known = std::ranges::find(floors, micro_batch, &std::pair<std::int64_t, Seconds>::first);
      if (known != floors.end()) return known->second;
      spec.micro_batch = micro_batch;
      return floors.emplace_back(micro_batch, floors_->of_micro_batch_at_peak(spec).time).second;
    };
    for (SpaceGroups& listed : space_.groups(parts_[number].space)) {
      Groups& groups = groups_.emplace_back(Groups{.spec = std::move(listed.spec), .sizes = {}});
      for (const SpaceGroups::Size& size : listed.sizes)
        groups.sizes.push_back({size, floor_of(groups.spec, size.micro_batch)});
      std::ranges::stable_sort(groups.sizes, {}, &Groups::Size::floor);
      opened.push_back(open_groups(number, groups, 0));
    }
    return opened;
  }

  // The groups from this size on. `number`: the part that they are in.
  Open open_groups(std::size_t number, const Groups& groups, std::size_t size) {
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

  std::vector<Open> look_into_groups(std::size_t number) {
    std::vector<Open> opened;
    const Groups& groups = *parts_[number].groups;
    const std::size_t size = parts_[number].size;
    if (size + 1 < groups.sizes.size()) opened.push_back(open_groups(number, groups, size + 1));
    Part& part = parts_[number];
    part.space.layouts = groups.sizes[size].layouts;
    if (floors_->lacks_room(part.space.spec))
      leave_out(number);
    else
      opened.push_back(open_again(number, Step::micro_batch, floors_->of_micro_batch(part.space.spec)));
    return opened;
  }

  // What the stages of a layout may choose from.
  std::vector<Recompute> choices_of(const ParallelSpec& spec) const {
    if (request_[Choice::recompute] || spec.recompute != Recompute::none) return {spec.recompute};
    return {searched_recomputes().begin(), searched_recomputes().end()};
  }

  std::uint64_t place_of(std::size_t part, const PlacedSpec& placed) const {
    return parts_[part].place + (static_cast<std::uint64_t>(placed.place) << candidate_bits);
  }

  // Layouts of this part. Equal devices hold the same in every order of the axes.
  std::vector<PlacedSpec> list_layouts(std::size_t number, bool each_order) const {
    std::vector<PlacedSpec> placed = space_.specs(parts_[number].space);
    if (!each_order) return placed;
    std::vector<PlacedSpec> all;
    for (const PlacedSpec& one : placed) std::ranges::move(space_.orders(one), std::back_inserter(all));
    return all;
  }

  Open open_on_links(std::size_t number) {
    Floor floor = parts_[number].floor;
    if (options_.objective != Objective::memory) floor.time = floors_->time_on_links(parts_[number].space.spec);
    return open_again(number, Step::micro_batch_on_links, floor);
  }

  // Equal devices hold the same in every order of the axes.
  bool are_equal() const { return cluster_.groups.size() == 1; }

  std::vector<Open> look_into_micro_batch(std::size_t number) {
    std::vector<std::pair<ParallelSpec, Recomputing>> groups;  // by the layout without recompute
    for (PlacedSpec& placed : list_layouts(number, !are_equal())) {
      ParallelSpec key = placed.spec;
      key.recompute = Recompute::none;
      auto group = std::ranges::find(groups, key, &std::pair<ParallelSpec, Recomputing>::first);
      if (group == groups.end()) group = groups.emplace(group, std::move(key), Recomputing());
      group->second.push_back(std::move(placed));
    }
    std::vector<Open> opened;
    for (auto& [key, layouts] : groups) {
      const Recomputing& group = recomputing_.emplace_back(std::move(layouts));
      Part part{.step = Step::any_recompute,
                .space = {.spec = group.front().spec, .layouts = 0},
                .floor = parts_[number].floor,
                .place = place_of(number, group.front()),
                .recomputing = &group};
      for (const PlacedSpec& placed : group) part.space.layouts += placed.orders;
      if (options_.objective != Objective::memory)
        part.floor.time =
            std::max(part.floor.time, are_equal() ? floors_->time_of_any_order(part.space.spec)
                                                  : floors_->time_of(part.space.spec, choices_of(part.space.spec)));
      else if (are_equal())
        part.floor.memory =
            std::max(part.floor.memory, floors_->memory_by_share(part.space.spec, choices_of(part.space.spec)));
      opened.push_back(open_part(std::move(part)));
    }
    return opened;
  }

  // What fits with some choice of recompute of its stages is in the first layout.
  std::vector<Open> look_for_room(std::size_t number) {
    const ParallelSpec& spec = parts_[number].recomputing->front().spec;
    const std::vector<Recompute> choices = choices_of(spec);
    if (!floors_->can_hold(spec, choices)) return leave_out(number);
    Floor floor = parts_[number].floor;
    // Equal devices hold the same in every order of the axes.
    if (options_.objective == Objective::memory) floor.memory = floors_->memory_of(spec, choices, floor.memory);
    if (floor == parts_[number].floor) return look_into_recomputing(number);
    return {open_again(number, Step::any_that_fits, floor)};
  }

  std::vector<Open> look_into_recomputing(std::size_t number) {
    const Recomputing& group = *parts_[number].recomputing;
    std::vector<Open> opened;
    for (const PlacedSpec& placed : group) {
      const std::vector<Recompute> choices = choices_of(placed.spec);
      const bool fits_alike = floors_->can_hold(placed.spec, {&placed.spec.recompute, 1});
      Part part{.step = are_equal() ? Step::any_order : Step::layout,
                .space = {.spec = placed.spec, .layouts = placed.orders},
                .floor = parts_[number].floor,
                .place = parts_[number].place +
                         (static_cast<std::uint64_t>(placed.place - group.front().place) << candidate_bits),
                .has_to_mix = choices.size() > 1 && !fits_alike};
      if (!fits_alike && choices.size() == 1) {
        parts_.push_back(std::move(part));
        leave_out(parts_.size() - 1);
      } else {
        opened.push_back(are_equal() ? open_part(std::move(part)) : open_layout(std::move(part)));
      }
    }
    return opened;
  }

  // `part`: of a single layout.
  Open open_layout(Part part) {
    const ParallelSpec& spec = part.space.spec;
    if (options_.objective != Objective::memory)
      part.floor.time = std::max(part.floor.time, floors_->time_of(spec, choices_of(spec)));
    return open_part(std::move(part));
  }

  std::vector<Open> open_orders(std::size_t number) {
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
  std::vector<PlacedSpec> orders_of(std::size_t number) const {
    const SpacePart& space = parts_[number].space;
    return space_.orders({.place = 0, .spec = space.spec, .orders = space.layouts});
  }

  // All layouts of a part that are not single ones yet, with places that count from where its own
  // do.
  std::vector<PlacedSpec> layouts_of(std::size_t number) const {
    const Part& part = parts_[number];
    if (part.step == Step::any_order) return orders_of(number);
    if (part.recomputing == nullptr) return list_layouts(number, true);
    std::vector<PlacedSpec> all;
    for (const PlacedSpec& placed : *part.recomputing)
      if (placed.orders == 1)
        all.push_back(placed);
      else
        std::ranges::move(space_.orders(placed), std::back_inserter(all));
    const std::int64_t first = part.recomputing->front().place;
    for (PlacedSpec& one : all) one.place -= first;
    return all;
  }

  std::vector<Open> refine(std::size_t number) {
    const Part& part = parts_[number];
    const ParallelSpec& spec = part.space.spec;
    Floor floor = part.floor;
    const std::vector<Recompute> choices = choices_of(spec);
    if (options_.objective == Objective::memory)
      floor.memory = floors_->memory_of(spec, choices, floor.memory);
    else if (part.has_to_mix)
      floor.time = std::max(floor.time, floors_->time_within_memory(spec, choices));
    if (floor == part.floor) return make_candidates_of(number);
    return {open_again(number, Step::refined_layout, floor)};
  }

  std::vector<Open> make_candidates_of(std::size_t number) {
    const Part& part = parts_[number];
    MadeCandidates made =
        make_candidates(std::span(makers_).first(1), {&part.space.spec, 1}, mixes(), options_.objective);
    counts_.candidates += made.count - part.space.layouts;
    counts_.infeasible_memory += made.count - static_cast<std::int64_t>(made.fitting.size());
    // Interleaved pipelines have the cuts of their candidates alone, unless they are asked for;
    // zero-bubble ones have no others in any case.
    if (runs_backward_in_parts(part.space.spec.schedule) ||
        (has_few_cuts(part.space.spec) && !request_[Choice::schedule])) {
      made.others.clear();
      made.others_from = Seconds(std::numeric_limits<double>::infinity());
      made.least_memory_left.reset();
    }
    // The floor of the part holds for every cut of the layout, too.
    for (OpenLayout& other : made.others) {
      other.time = std::max(other.time, part.floor.time);
      others_.emplace_back(part.place, std::move(other));
    }
    leave(score_of_second(part.space.spec) * std::max(made.others_from, part.floor.time).value);
    if (made.least_memory_left) leave(static_cast<double>(made.least_memory_left->count));
    // The smallest candidate that fits; where none fits, the smallest of all.
    const auto take_smallest = [this](const Candidate& one, bool fits) {
      if (!smallest_ || (fits && !fits_any_) ||
          (fits == fits_any_ && one.bound.memory.peak() < smallest_->bound.memory.peak()))
        smallest_ = one;
      fits_any_ = fits_any_ || fits;
    };
    if (made.fitting.empty() && made.smallest) take_smallest(*made.smallest, false);
    std::vector<Open> opened;
    for (Candidate& one : made.fitting) {
      take_smallest(one, true);
      candidates_.push_back(std::move(one));
      const Candidate& candidate = candidates_.back();
      opened.push_back({.bound = score_of(candidate.spec, candidate.bound.lower_bound, candidate.bound.memory),
                        .place = part.place + opened.size(),
                        .candidate = &candidate,
                        .mesh = &candidate.spec.mesh});
    }
    return opened;
  }

  // Several at once: as many as the best `top` still lack, then a few, whatever the number of
  // threads.
  std::int64_t room() const {
    const bool only_first = search_.to_beat && !is_ahead(search_);
    const std::int64_t missing = only_first ? 1 : options_.top - static_cast<std::int64_t>(search_.best.size());
    const std::int64_t room = std::max(missing, options_.together);
    if (options_.most_simulated) return std::min(room, *options_.most_simulated - search_.simulated);
    return search_.simulated < usual_simulated || calls_ < free_calls ? room : 0;
  }

  bool is_new(const Open& one) {
    const ParallelSpec& spec = one.candidate->spec;
    CandidateWork work{.spec = spec, .models = cost_models(makers_.front()->estimator().networks(), spec.mesh)};
    if (std::ranges::any_of(known_, [&](const CandidateWork& other) { return equal_work(work, other); })) {
      ++counts_.simulated;
      return false;
    }
    known_.push_back(std::move(work));
    return true;
  }

  SimulatedSpec simulate_one(CandidateMaker& maker, const ParallelSpec& spec, std::span<const CostModel> models) const {
    const Placements& placements = maker.placements_of(spec);
    return options_.steps != nullptr
               ? options_.steps->simulate(graph_, cluster_, training_, spec, placements, models)
               : simulate_soon(graph_, cluster_, training_, spec, placements, models);
  }

  // The candidates are those that were last found new, in this order.
  std::vector<Ranked> simulate(std::span<const Open> turns) {
    const std::span<const CandidateWork> works = std::span(known_).last(turns.size());
    std::vector<ParallelSpec> specs(turns.size());
    std::vector<SimulatedSpec> simulated(turns.size());
    parallel_for(static_cast<int>(makers_.size()), turns.size(), [&](int thread, std::size_t turn) {
      CandidateMaker& maker = *makers_[thread];
      const Candidate& candidate = *turns[turn].candidate;
      // The plans that are ranked in the end are simulated without the buffer, too
      // (drop_idle_input_slots).
      specs[turn] = request_[Choice::input_slots]
                        ? candidate.spec
                        : with_input_slot(maker, candidate, works[turn].models, training_, options_.objective);
      simulated[turn] = simulate_one(maker, specs[turn], works[turn].models);
    });
    std::vector<Ranked> ranked;
    for (std::size_t turn = 0; turn < turns.size(); ++turn) {
      const ParallelSpec& spec = specs[turn];
      const auto& [result, played] = simulated[turn];
      ranked.push_back({.score = score_of(spec, result.time.total(), result.memory),
                        .place = turns[turn].place,
                        .plan = {spec, result}});
      calls_ += 2 * spec.stages() * played;
      ++counts_.simulated;
    }
    if (options_.progress)
      options_.progress(search_.simulated,
                        options_.most_simulated.value_or(std::max(usual_simulated, search_.simulated)));
    return ranked;
  }

  // A layout that was open to other cuts, and what is left of it.
  struct OtherCuts {
    const OpenLayout* layout = nullptr;
    std::uint64_t place = 0;
    Score bound;
    CutsBelow below = {};
  };
  struct OtherCandidate {
    Score bound;
    std::uint64_t place = 0;
    const Candidate* candidate = nullptr;
    std::size_t layout = 0;  // among those that are looked at
  };

  double score_of_second(const ParallelSpec& spec) const { return score_of(spec, Seconds(1.0), {}).first; }

  // The layouts whose other cuts might beat the best plan, the least bound first.
  std::vector<OtherCuts> layouts_with_other_cuts() {
    std::vector<OtherCuts> open;
    for (const auto& [place, layout] : others_)
      open.push_back({.layout = &layout, .place = place, .bound = score_of(layout.spec, layout.time, {})});
    const Score best = *best_score(search_);
    std::erase_if(open, [&](const OtherCuts& one) { return one.bound >= best; });
    std::ranges::stable_sort(open, {}, [](const OtherCuts& one) { return std::pair(one.bound, one.place); });
    return open;
  }

  // No cut of those that were not looked at scores less.
  void leave(double score) { least_left_ = std::min(least_left_, score); }

  // Looks at other cuts of the layouts that may beat the best plan with them.
  void try_other_cuts() {
    if (!best_score(search_) || options_.objective == Objective::memory) return;
    std::vector<OtherCuts> open = layouts_with_other_cuts();
    const std::int64_t room =
        options_.most_simulated ? *options_.most_simulated - search_.simulated : most_other_simulated;
    std::size_t looked_at = 0;
    const auto blocks = static_cast<std::int64_t>(graph_.blocks.size());
    for (std::int64_t places = 0; room > 0 && looked_at < open.size(); ++looked_at)
      if ((places += open[looked_at].layout->spec.stages() * blocks) > most_other_places) break;
    for (std::size_t i = looked_at; i < open.size(); ++i) leave(open[i].bound.first);
    open.resize(looked_at);
    if (open.empty()) return;
    const double best = best_score(search_)->first;
    const std::size_t most = std::clamp<std::size_t>(most_other_cuts / open.size(), 16, 1024);
    parallel_for(static_cast<int>(makers_.size()), open.size(), [&](int thread, std::size_t i) {
      const ParallelSpec& spec = open[i].layout->spec;
      open[i].below = makers_[thread]->cuts_below(spec, mixes(), Seconds(best / score_of_second(spec)), most);
    });
    std::vector<OtherCandidate> turns;
    for (std::size_t i = 0; i < open.size(); ++i) {
      leave(score_of_second(open[i].layout->spec) * std::max(open[i].below.rest, open[i].layout->time).value);
      for (const Candidate& candidate : open[i].below.candidates)
        turns.push_back({.bound = score_of(candidate.spec, candidate.bound.lower_bound, candidate.bound.memory),
                         .place = other_place + turns.size(),
                         .candidate = &candidate,
                         .layout = i});
    }
    simulate_other_cuts(std::move(turns), open.size());
  }

  // The most promising first: by its bound, and by how far those of its layout were above theirs.
  void simulate_other_cuts(std::vector<OtherCandidate> turns, std::size_t layouts) {
    const std::int64_t calls = calls_;
    std::int64_t tried = 0;
    std::vector<std::optional<double>> above(layouts);
    const auto promises = [&](const OtherCandidate& one) {
      return std::pair(one.bound.first * above[one.layout].value_or(1.0), one.place);
    };
    while (true) {
      const Score best = *best_score(search_);
      std::erase_if(turns, [&](const OtherCandidate& one) { return one.bound >= best; });
      const auto batch = static_cast<std::size_t>(options_.together);
      std::size_t room = tried < most_other_simulated || calls_ - calls < free_other_calls ? batch : 0;
      if (options_.most_simulated)
        room = static_cast<std::size_t>(
            std::clamp<std::int64_t>(*options_.most_simulated - search_.simulated, 0, options_.together));
      room = std::min(room, turns.size());
      if (room == 0) break;
      std::ranges::partial_sort(turns, turns.begin() + static_cast<std::ptrdiff_t>(room), {}, promises);
      std::vector<Open> together;
      std::vector<std::size_t> layout_of;
      for (std::size_t i = 0; i < room; ++i) {
        const Open one{.bound = turns[i].bound,
                       .place = turns[i].place,
                       .candidate = turns[i].candidate,
                       .mesh = &turns[i].candidate->spec.mesh};
        ++counts_.candidates;
        if (!is_new(one)) continue;
        together.push_back(one);
        layout_of.push_back(turns[i].layout);
      }
      turns.erase(turns.begin(), turns.begin() + static_cast<std::ptrdiff_t>(room));
      tried += static_cast<std::int64_t>(together.size());
      search_.simulated += static_cast<std::int64_t>(together.size());
      std::vector<Ranked> ranked = simulate(together);
      for (std::size_t i = 0; i < ranked.size(); ++i) {
        const double ratio = ranked[i].score.first / together[i].bound.first;
        std::optional<double>& known = above[layout_of[i]];
        known = std::min(known.value_or(ratio), ratio);
        take_cut(std::move(ranked[i]));
      }
    }
    for (const OtherCandidate& one : turns) leave(one.bound.first);
  }

  // A layout is ranked with its best cut.
  void take_cut(Ranked&& one) {
    const auto of_layout = [this](ParallelSpec spec) {
      if (!request_[Choice::input_slots]) spec.input_slots = ParallelSpec().input_slots;
      spec.stage_blocks.clear();
      spec.stage_recompute.clear();
      if (spec.recompute == Recompute::per_stage) spec.recompute = Recompute::none;
      return spec;
    };
    const auto ranked = std::ranges::find_if(
        search_.best, [&](const Ranked& other) { return of_layout(other.plan.spec) == of_layout(one.plan.spec); });
    if (ranked == search_.best.end())
      search_.best.push_back(std::move(one));
    else if (one.score < ranked->score)
      *ranked = std::move(one);
    rank(search_);
  }

  // Plans that are as fast without another buffer for arriving activations go without: the best
  // ones, as far as looking at them is little work.
  void drop_idle_input_slots() {
    if (request_[Choice::input_slots]) return;
    CandidateMaker& maker = *makers_.front();
    std::int64_t calls = 0;
    for (Ranked& one : search_.best) {
      if (one.plan.spec.input_slots != InputSlots::one_more) continue;
      if (calls >= free_calls) break;
      ParallelSpec spec = one.plan.spec;
      spec.input_slots = InputSlots::in_flight;
      const SimulatedSpec without = simulate_one(maker, spec, cost_models(maker.estimator().networks(), spec.mesh));
      calls += 2 * spec.stages() * without.micro_batches;
      if (needs_input_slot(one.plan.result.time.total(), without.result.time.total())) continue;
      one.score = score_of(spec, without.result.time.total(), without.result.memory);
      one.plan = {std::move(spec), without.result};
    }
    rank(search_);
  }

  // Where nothing fits, the candidate that needs the least memory is in a part that was left out.
  void find_smallest() {
    std::vector<std::size_t> left = std::exchange(left_out_, {});
    const auto needs_more = [this](std::size_t a, std::size_t b) {
      return std::pair(parts_[a].floor.memory, parts_[a].place) > std::pair(parts_[b].floor.memory, parts_[b].place);
    };
    std::ranges::make_heap(left, needs_more);
    const auto add_left = [&](Part part) {
      parts_.push_back(std::move(part));
      left.push_back(parts_.size() - 1);
      std::ranges::push_heap(left, needs_more);
    };
    while (!left.empty()) {
      std::ranges::pop_heap(left, needs_more);
      const std::size_t number = left.back();
      left.pop_back();
      Part part = parts_[number];
      if (smallest_ && part.floor.memory >= smallest_->bound.memory.peak()) break;
      if (part.step < Step::layout) {
        std::vector<PlacedSpec> layouts = layouts_of(number);
        part.step = Step::layout;
        part.recomputing = nullptr;
        part.space.layouts = 1;
        for (PlacedSpec& placed : layouts) {
          part.place = place_of(number, placed);
          part.space.spec = std::move(placed.spec);
          add_left(part);
        }
        continue;
      }
      if (part.step != Step::refined_layout) {
        part.step = Step::refined_layout;
        const Bytes floor = floors_->memory_of(part.space.spec, choices_of(part.space.spec), part.floor.memory);
        if (floor > part.floor.memory) {
          part.floor.memory = floor;
          add_left(std::move(part));
          continue;
        }
      }
      counts_.infeasible_memory -= part.space.layouts;
      make_candidates_of(number);
    }
  }

  SearchResult take_result() {
    if (!fits_any_ && !search_.to_beat) find_smallest();
    SearchResult result;
    if (smallest_) result.smallest = makers_.front()->with_times(*smallest_);
    result.counts = counts_;
    if (!best_score(search_)) return result;
    const Score winner = *best_score(search_);
    // A plan that takes equally long is no better, however little memory it needs; one that needs
    // equal memory may be.
    const auto is_no_better = [&](const Score& bound) {
      return options_.objective == Objective::memory ? bound >= winner : bound.first >= winner.first;
    };
    result.counts.certified = search_.open.empty() || is_no_better(search_.open.front().bound);
    for (const Open& left : search_.open)
      if (is_no_better(left.bound))
        result.counts.pruned_by_bound += left.candidate != nullptr ? 1 : parts_[left.part].space.layouts;
    if (!result.counts.certified) {
      const Score& bound = search_.open.front().bound;
      result.counts.gap =
          winner.first > bound.first ? winner.first / bound.first - 1.0 : winner.second / bound.second - 1.0;
    }
    result.counts.cut_gap = cut_gap(winner, result.counts);
    put_plainest_first();
    search_.best = first_of_each(std::move(search_.best), options_.top_each);
    for (Ranked& one : search_.best) result.plans.push_back(std::move(one.plan));
    return result;
  }

  // What a plan needs beyond the plain: tensor parallelism across nodes, gathers of parameters,
  // context parallelism, a schedule other than 1F1B.
  int needs_of(const ParallelSpec& spec) const {
    const bool leaves_node =
        spec.tp() > 1 && makers_.front()->estimator().networks().group(spec.mesh, Axis::tp).nodes > 1;
    return (leaves_node ? 1 : 0) + (spec.zero_stage == 3 ? 1 : 0) + (spec.cp() > 1 ? 1 : 0) +
           (spec.pp() > 1 && spec.schedule != ScheduleKind::one_f_one_b ? 1 : 0);
  }

  // Among ranked plans that are as good as the best one but for a tie, that which needs the least:
  // least beyond the plain, then least memory.
  void put_plainest_first() {
    if (options_.objective == Objective::memory || search_.best.empty()) return;
    const double limit = search_.best.front().score.first * (1.0 + tied_plans);
    const auto end = std::ranges::find_if(search_.best, [&](const Ranked& one) {
      return one.score.first > limit || (search_.to_beat && one.score >= *search_.to_beat);
    });
    const auto plainest = std::ranges::min_element(search_.best.begin(), end, {}, [&](const Ranked& one) {
      return std::pair(needs_of(one.plan.spec), one.plan.result.memory.peak());
    });
    if (plainest != end) std::rotate(search_.best.begin(), plainest, plainest + 1);
  }

  // How much better other cuts may be than the best plan; nothing where none is.
  std::optional<double> cut_gap(const Score& winner, const SearchCounts& counts) const {
    const double gap = winner.first / least_left_ - 1.0;
    if (gap <= 0.0) return std::nullopt;
    return std::max(gap, counts.gap.value_or(0.0));
  }

  // Limits on looking at other cuts.
  static constexpr std::int64_t most_other_places = 262'144;  // of a block on a stage, over layouts
  static constexpr std::size_t most_other_cuts = 4096;
  static constexpr std::int64_t most_other_simulated = 8;
  static constexpr std::int64_t free_other_calls = 100'000;
  static constexpr std::uint64_t other_place = std::uint64_t{1} << 63;

  // Limits that hold where the user gives none.
  static constexpr std::int64_t usual_simulated = 64;
  static constexpr std::int64_t free_calls = 400'000;

  const OpGraph& graph_;
  const Cluster& cluster_;
  const TrainingSpec& training_;
  const LayoutRequest& request_;
  const SearchOptions& options_;
  Space space_;
  std::vector<std::unique_ptr<CandidateMaker>> owned_;
  std::vector<CandidateMaker*> makers_;  // by thread
  std::optional<LayoutFloors> floors_;
  std::deque<Part> parts_;
  std::deque<Groups> groups_;
  std::deque<Recomputing> recomputing_;
  std::vector<std::size_t> left_out_;  // parts that hold nothing that fits
  std::deque<Candidate> candidates_;   // those that fit
  BestFirst search_;
  std::vector<CandidateWork> known_;
  SearchCounts counts_;
  std::optional<Candidate> smallest_;
  bool fits_any_ = false;
  // Layouts with other cuts than those of their candidates, with their places.
  std::vector<std::pair<std::uint64_t, OpenLayout>> others_;
  double least_left_ = std::numeric_limits<double>::infinity();  // of the scores of other cuts
  std::int64_t calls_ = 0;  // simulated so far
};

}  // namespace

SearchResult search(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                    const LayoutRequest& request, const SearchOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  SearchResult result = SpaceSearch(graph, cluster, training, request, options).run();
  result.counts.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

}  // namespace parplan
