#include "planner/search/search.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/base/parallel_for.h"
#include "planner/parallel/techniques.h"
#include "planner/search/best_first.h"
#include "planner/search/candidate_simulator.h"
#include "planner/search/candidates.h"
#include "planner/search/input_slots.h"
#include "planner/search/made_candidates.h"
#include "planner/search/open_parts.h"
#include "planner/search/other_cuts.h"
#include "planner/search/restrictions.h"
#include "planner/search/space_in_words.h"
#include "planner/search/stage_recompute.h"
#include "planner/search/tried_with_best.h"
#include "planner/search/variant_trials.h"

namespace parplan {
namespace {

SpaceWidth width_of(const OpGraph& graph, const TrainingSpec& training, const LayoutRequest& request,
                    const SearchOptions& options) {
  SpaceWidth width = usual_width(graph, training.engine, request);
  if (options.any_context_ranks) width = with_context(width);
  width.recomputes_fewest_layers = options.recomputes_fewest_layers;
  width.balances_replicas = options.balances_replicas;
  return width;
}

// One search, from the degrees to the plans: parts of its space are looked into (open_parts.h), the
// candidates of layouts are made, and simulated; other cuts of the layouts come last.
class SpaceSearch {
 public:
  SpaceSearch(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training, const LayoutRequest& request,
              const SearchOptions& options)
      : graph_(graph),
        cluster_(cluster),
        training_(training),
        request_(request),
        options_(options),
        width_(width_of(graph, training, request, options)),
        search_{.top = ranked_plans(options),
                .top_each = options.top_each,
                .tied = options.objective == Objective::memory ? 0.0 : tied_plans,
                .to_beat = options.to_beat,
                .elsewhere = options.ranked_elsewhere} {
    const int threads = options.threads > 0 ? options.threads : threads_of_this_machine();
    const std::shared_ptr<KnownBlockShapes> shapes =
        options.shapes ? options.shapes : std::make_shared<KnownBlockShapes>();
    for (int thread = 0; thread < threads; ++thread) {
      owned_.push_back(std::make_unique<CandidateMaker>(graph, cluster, training, options.objective, shapes, width_));
      makers_.push_back(owned_.back().get());
    }
    simulator_.emplace(space(), options, makers_);
    trials_.emplace(space(), options, *simulator_, search_);
    others_.emplace(space(), options, mixes(), makers_, *simulator_, *trials_, search_);
    floors_.emplace(graph, cluster, training, request, width_, *makers_.front());
    parts_.emplace(graph, cluster, training, request, width_, options.objective, least_devices(), *floors_);
  }

  // What it is made of refers to it.
  SpaceSearch(const SpaceSearch&) = delete;
  SpaceSearch& operator=(const SpaceSearch&) = delete;

  SearchResult run() {
    add(search_, options_.counts_layouts ? parts_->open_all() : parts_->open_uncounted());
    counts_.candidates = parts_->count_all();
    counts_.space = space_in_words(cluster_, training_.engine, request_, width_, options_.fewer_devices,
                                   parts_->named_values());
    if (options_.tries_more_with_best) counts_.space += tried_in_words(space(), parts_->named_values());
    // Once another cut is ahead of what was to be beaten, the plans behind it are ranked, too.
    bool ranked = false;
    do {
      parplan::run(search_, {.look_into = [this](const Open& part) { return look_into(part.part); },
                             .sharpened =
                                 [this](const Open& one) { return simulator_->sharpened(*one.candidate, one.bound); },
                             .may_be_plainer =
                                 [this](const Open& one, const Ranked& plan) {
                                   const Candidate& candidate = *one.candidate;
                                   return plainness(candidate.spec, candidate.bound.memory) < plainness_of(plan);
                                 },
                             .room = [this] { return room(); },
                             .is_new = [this](const Open& one) { return simulator_->take_if_new(*one.candidate); },
                             .simulate = [this](std::span<const Open> turns) { return simulator_->simulate(turns); }});
      ranked = is_ahead(search_);
      others_->try_all();
    } while (!ranked && is_ahead(search_));
    // With them, plans that are ranked beside those of other searches may beat these.
    if (options_.tries_more_with_best && (is_ahead(search_) || !search_.elsewhere.empty())) try_with_best();
    if (!is_ahead(search_)) drop_beaten_elsewhere(search_);
    if (options_.tries_more_with_best && is_ahead(search_)) try_with_each_behind();
    if (is_ahead(search_) || !search_.elsewhere.empty()) drop_idle_input_slots();
    return take_result();
  }

  // Whether more context parallelism than in this space should be searched (`worth_context`). Not
  // under a schedule that was asked for: with backwards in parts, that would take several times as
  // long.
  bool promises_context() {
    return options_.widens_context && !request_[Choice::schedule] && graph_.sequence >= medium_sequence &&
           training_.global_batch < cluster_.devices() && is_worth_context(space(), *floors_, *makers_.front());
  }

 private:
  int least_devices() const { return options_.fewer_devices ? options_.least_devices : cluster_.devices(); }
  SearchedSpace space() const {
    return {graph_, cluster_, training_, request_, width_, options_.objective, least_devices()};
  }
  bool mixes() const { return may_mix(request_, training_.engine); }

  std::vector<Open> look_into(std::size_t number) {
    const std::optional<Score> limit = score_limit(search_);
    std::optional<std::vector<Open>> opened =
        parts_->look_into(number, limit ? limit->first : std::numeric_limits<double>::infinity());
    return opened ? *std::move(opened) : make_candidates_of(parts_->layouts(number));
  }

  // `part`: a single layout.
  std::vector<Open> make_candidates_of(const OpenParts::Layouts& part) {
    MadeCandidates made = make_candidates(std::span(makers_).first(1), {&part.spec, 1}, mixes(), options_.objective);
    counts_.candidates += made.count - part.count;
    counts_.infeasible_memory += made.count - static_cast<std::int64_t>(made.fitting.size());
    // Interleaved pipelines have the cuts of their candidates alone, unless they are asked for;
    // zero-bubble ones have no others in any case. How much faster these may be is said.
    if (runs_backward_in_parts(part.spec.schedule) || width_.balances_replicas ||
        !part.spec.replica_micro_batches.empty() ||
        (takes_fastest_cut_alone(part.spec) && !request_[Choice::schedule])) {
      for (const OpenLayout& other : made.others)
        others_->leave(simulator_->score_of_second(other.spec) * std::max(other.time, part.floor.time).value);
      made.others.clear();
    }
    // The floor of the part holds for every cut of the layout, too.
    for (OpenLayout& other : made.others) {
      other.time = std::max(other.time, part.floor.time);
      others_->add(part.place, std::move(other));
    }
    others_->leave(simulator_->score_of_second(part.spec) * std::max(made.others_from, part.floor.time).value);
    if (options_.bounds_left_out)
      for (ParallelSpec& spec : made.unfitting)
        unfitting_.push_back({.spec = std::move(spec), .time = part.floor.time});
    if (made.least_memory_left) others_->leave(static_cast<double>(made.least_memory_left->count));
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
      opened.push_back({.bound = simulator_->bound_of(candidate),
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
    const std::int64_t missing = only_first ? 1 : search_.top - static_cast<std::int64_t>(search_.best.size());
    const std::int64_t room = std::max(missing, simulator_->together(simulator_->are_long()));
    if (options_.most_simulated) return std::min(room, *options_.most_simulated - simulator_->count());
    const bool is_little_work = is_settled(search_) ? simulator_->calls() + simulator_->lowered() < free_calls_behind
                                                    : simulator_->is_little_work();
    return is_little_work ? room : 0;
  }

  // What the space leaves out, but for the layouts of the best plans; and once more with what one
  // row has found for all of them.
  void try_with_best() {
    const std::optional<Score> before = best_score(search_);
    for (const TriedRow& row : tried_rows())
      if (is_tried(row, space())) try_with_best(row);
    if (best_score(search_) == before) return;
    for (const TriedRow& row : tried_rows())
      if (std::vector<ParallelSpec> tried; is_tried(row, space())) try_with(row, search_.best, tried);
  }
  void try_with_best(const TriedRow& row) {
    std::vector<ParallelSpec> tried;
    try_with(row, search_.best, tried);
    if (row.with_each && !simulator_->are_long()) try_with(row, simulator_->simulated(), tried);
  }
  // A layout that is tried, and the cut of the plan that it is tried for.
  struct Tried {
    ParallelSpec spec;
    std::vector<int> cut;
  };
  // With those of these plans, but for what was tried. A layout is taken to be as far above its
  // bound as the plan.
  void try_with(const TriedRow& row, std::span<const Ranked> plans, std::vector<ParallelSpec>& tried) {
    const double best = best_score(search_)->first;
    std::vector<Tried> layouts;
    std::vector<std::optional<double>> above;
    for (const Ranked& one : plans)
      for (ParallelSpec& spec : row.layouts({.space = space(),
                                             .networks = makers_.front()->estimator().networks(),
                                             .layout = trials_->layout_of(one.plan.spec),
                                             .time = one.plan.result.time,
                                             .behind = one.score.first / best}))
        if (is_legal(graph_, training_, spec) && std::ranges::find(tried, spec) == tried.end()) {
          tried.push_back(spec);
          layouts.push_back({std::move(spec), one.plan.spec.stage_blocks});
          above.push_back(one.score.first / one.bound.first);
        }
    try_layouts(layouts, std::move(above));
  }

  // The candidates of a layout, and those with another cut.
  std::vector<Candidate> candidates_with(const Tried& layout) {
    const auto made = [&](const ParallelSpec& spec) {
      return make_candidates(std::span(makers_).first(1), {&spec, 1}, mixes(), options_.objective).fitting;
    };
    std::vector<Candidate> all = made(layout.spec);
    const auto has_cut = [&](const Candidate& one) { return one.spec.stage_blocks == layout.cut; };
    if (!layout.spec.stage_blocks.empty() || std::ranges::any_of(all, has_cut)) return all;
    ParallelSpec with_cut = layout.spec;
    with_cut.stage_blocks = layout.cut;
    if (is_legal(graph_, training_, with_cut)) std::ranges::move(made(with_cut), std::back_inserter(all));
    return all;
  }

  // `above`: by layout, what its plan is taken to score over its bound.
  void try_layouts(const std::vector<Tried>& layouts, std::vector<std::optional<double>> above) {
    std::vector<Variant> variants;
    for (std::size_t i = 0; i < layouts.size(); ++i) {
      for (Candidate& candidate : candidates_with(layouts[i])) {
        candidates_.push_back(std::move(candidate));
        const Candidate& made = candidates_.back();
        variants.push_back({.bound = simulator_->bound_of(made),
                            .place = variant_place + variants.size(),
                            .candidate = &made,
                            .layout = i});
      }
    }
    trials_->run(std::move(variants), std::move(above), VariantsOf::several);
  }

  // What cannot beat the best plan may still beat plans behind it: with the cut of each, as far as
  // that is little work.
  void try_with_each_behind() {
    std::int64_t calls = 0;
    for (std::size_t i = 1; i < search_.best.size(); ++i) {
      Ranked& one = search_.best[i];
      for (const TriedRow& row : tried_rows()) {
        if (!row.with_each || !is_tried(row, space())) continue;
        for (const ParallelSpec& spec : row.layouts({.space = space(),
                                                     .networks = makers_.front()->estimator().networks(),
                                                     .layout = trials_->layout_of(one.plan.spec),
                                                     .time = one.plan.result.time,
                                                     .behind = 1.0})) {
          if (!is_legal(graph_, training_, spec)) continue;
          for (const Candidate& candidate : candidates_with({.spec = spec, .cut = one.plan.spec.stage_blocks})) {
            if (candidate.spec.stage_blocks != one.plan.spec.stage_blocks || simulator_->is_known(candidate) ||
                simulator_->bound_of(candidate) >= one.score)
              continue;
            calls += simulator_->all_calls(candidate.spec);
            const bool may_simulate =
                !options_.most_simulated || *options_.most_simulated > simulator_->count() + tried_behind_;
            if (calls > free_calls_each_behind || !may_simulate) return rank(search_);
            ++tried_behind_;
            const SimulatedSpec with = simulator_->simulate_apart(candidate.spec);
            const Score its = simulator_->score_of(candidate.spec, with.result.time.total(), with.result.memory);
            if (its >= one.score) continue;
            one.score = its;
            one.plan = {candidate.spec, with.result};
          }
        }
      }
    }
    rank(search_);
  }

  // Plans that are as fast without another buffer for arriving activations go without: the best
  // ones, as far as looking at them is little work.
  void drop_idle_input_slots() {
    if (request_[Choice::input_slots]) return;
    std::int64_t calls = 0, most = 0;  // of all, and of one
    for (Ranked& one : search_.best) {
      if (one.plan.spec.input_slots != InputSlots::one_more) continue;
      if (calls + most > free_calls_for_slots) break;
      ParallelSpec spec = one.plan.spec;
      spec.input_slots = InputSlots::in_flight;
      const SimulatedSpec without = simulator_->simulate_apart(spec);
      const std::int64_t its_calls = 2 * spec.stages() * without.micro_batches;
      calls += its_calls;
      most = std::max(most, its_calls);
      if (needs_input_slot(one.plan.result.time.total(), without.result.time.total())) continue;
      one.score = simulator_->score_of(spec, without.result.time.total(), without.result.memory);
      one.plan = {std::move(spec), without.result};
    }
    rank(search_);
  }

  // Where nothing fits, the candidate that needs the least memory is in a part that was left out.
  void find_smallest() {
    while (const std::optional<OpenParts::Layouts> layout =
               parts_->take_smallest_left_out(smallest_ ? std::optional(smallest_->bound.memory.peak()) : std::nullopt))
      make_candidates_of(*layout);
  }

  SearchResult take_result() {
    const bool says_nothing = !fits_any_ && !options_.says_what_may_fit;
    if (!fits_any_ && !search_.to_beat && !says_nothing) find_smallest();
    SearchResult result;
    result.fits = fits_any_;
    if (smallest_) result.smallest = makers_.front()->with_times(smallest_->spec);
    result.counts = counts_;
    result.counts.candidates += trials_->tried() + tried_behind_;
    result.counts.simulated = simulator_->count() + simulator_->equal() + tried_behind_;
    result.counts.infeasible_memory += parts_->count_left_out();
    if (options_.bounds_left_out && !says_nothing) {
      result.outside = outside_of_space();
      if (!best_score(search_)) result.counts.left_out = parplan::left_out(result.outside, std::nullopt);
    }
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
        result.counts.pruned_by_bound += left.candidate != nullptr ? 1 : parts_->count(left.part);
    if (!result.counts.certified) {
      const Score& bound = search_.open.front().bound;
      result.counts.gap =
          winner.first > bound.first ? winner.first / bound.first - 1.0 : winner.second / bound.second - 1.0;
    }
    result.counts.cut_gap = cut_gap(winner, result.counts);
    // What the search did not look into is bounded with what is outside of the space.
    if (result.counts.gap)
      for (OutsideSpace& one : result.outside)
        one.least = std::min(one.least, winner.first / (1.0 + *result.counts.gap));
    if (options_.bounds_left_out) result.counts.left_out = left_out(result.outside, winner.first);
    put_plainest_first();
    search_.best = first_of_each(std::move(search_.best), options_.top_each);
    if (search_.best.size() > static_cast<std::size_t>(options_.top))
      search_.best.erase(search_.best.begin() + options_.top, search_.best.end());
    for (Ranked& one : search_.best) result.plans.push_back(std::move(one.plan));
    return result;
  }

  // What layouts take at least with cuts that do not fit, although others do.
  double least_unfitting() {
    CandidateMaker& maker = *makers_.front();
    constexpr std::size_t most = 16'384;  // each takes as long as a candidate
    double least = std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < unfitting_.size(); ++i) {
      const ParallelSpec& spec = unfitting_[i].spec;
      const double of_second = simulator_->score_of_second(spec);
      if (of_second * unfitting_[i].time.value >= least) continue;
      Seconds time = unfitting_[i].time;
      if (i < most)
        time = std::max(time, maker.estimator()
                                  .estimate(spec, maker.placements_of(spec), forms_of(row_of(spec.schedule)))
                                  .lower_bound);
      least = std::min(least, of_second * time.value);
    }
    return least;
  }

  std::vector<OutsideSpace> outside_of_space() {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    std::vector<OutsideSpace> all;
    const Score best = best_score(search_).value_or(Score{infinity, 0.0});
    std::optional<double> unfitting;
    for (const Restriction& restriction : restrictions(space())) {
      double least =
          least_beyond(restriction, space(), best, *parts_, *floors_, *makers_.front()).value_or(infinity);
      if (restriction.fits_other_cuts && best_score(search_)) {
        if (!unfitting) unfitting = least_unfitting();
        if (*unfitting < best.first) least = std::min(least, *unfitting);
      }
      all.push_back({.what = restriction.what, .options = restriction.options, .least = least});
    }
    const double with_slot = simulator_->least_with_slot();
    if (with_slot < infinity && options_.objective != Objective::memory)
      all.push_back({.what = "another input slot where only more recompute makes room for it",
                     .options = {"--input-slots in_flight+1"},
                     .least = with_slot});
    return all;
  }

  // What a plan needs beyond the plain: tensor parallelism across nodes, gathers of parameters,
  // shards over groups of ranks, context parallelism, products by slices, a schedule other than
  // 1F1B.
  int needs_of(const ParallelSpec& spec) const {
    const bool leaves_node =
        spec.tp() > 1 && makers_.front()->estimator().networks().group(spec.mesh, Axis::tp).nodes > 1;
    return (leaves_node ? 1 : 0) + (spec.zero_stage == 3 ? 1 : 0) + (spec.mesh.dp_shard > 0 ? 1 : 0) +
           (spec.cp() > 1 ? 1 : 0) + (spec.tp_overlap != TensorOverlap::none ? 1 : 0) +
           (spec.pp() > 1 && spec.schedule != ScheduleKind::one_f_one_b ? 1 : 0);
  }

  // Less is plainer: what a plan needs beyond the plain, its devices, its memory.
  std::tuple<int, int, Bytes> plainness(const ParallelSpec& spec, const MemoryUse& memory) const {
    return {needs_of(spec), spec.mesh.size(), memory.peak()};
  }
  std::tuple<int, int, Bytes> plainness_of(const Ranked& one) const {
    return plainness(one.plan.spec, one.plan.result.memory);
  }

  // The plainest among ranked plans that are as good as the best one but for a tie.
  void put_plainest_first() {
    if (options_.objective == Objective::memory || search_.best.empty()) return;
    const double limit = search_.best.front().score.first * (1.0 + tied_plans);
    const auto end = std::ranges::find_if(search_.best, [&](const Ranked& one) {
      return one.score.first > limit || (search_.to_beat && one.score >= *search_.to_beat);
    });
    const auto plainest = std::ranges::min_element(search_.best.begin(), end, {},
                                                   [&](const Ranked& one) { return plainness_of(one); });
    if (plainest != end) std::rotate(search_.best.begin(), plainest, plainest + 1);
  }

  // How much better other cuts may be than the best plan; nothing where none is.
  std::optional<double> cut_gap(const Score& winner, const SearchCounts& counts) const {
    const double gap = winner.first / others_->least_left() - 1.0;
    if (gap <= 0.0) return std::nullopt;
    return std::max(gap, counts.gap.value_or(0.0));
  }

  // Calls that are little work: behind a certain best plan for the ranks behind it, lowering
  // included; to try more with these; and to look for idle buffers.
  static constexpr std::int64_t free_calls_behind = 250'000, free_calls_each_behind = 100'000,
                                free_calls_for_slots = 100'000;

  const OpGraph& graph_;
  const Cluster& cluster_;
  const TrainingSpec& training_;
  const LayoutRequest& request_;
  const SearchOptions& options_;
  SpaceWidth width_;
  std::vector<std::unique_ptr<CandidateMaker>> owned_;
  std::vector<CandidateMaker*> makers_;  // by thread
  std::optional<LayoutFloors> floors_;
  std::optional<OpenParts> parts_;
  std::deque<Candidate> candidates_;  // those that fit
  BestFirst search_;
  std::optional<CandidateSimulator> simulator_;
  std::optional<VariantTrials> trials_;
  std::optional<OtherCuts> others_;
  SearchCounts counts_;  // without what was simulated
  std::int64_t tried_behind_ = 0;  // layouts that were simulated with the cuts of plans behind the best
  std::optional<Candidate> smallest_;
  bool fits_any_ = false;
  std::vector<OpenLayout> unfitting_;  // MadeCandidates::unfitting, with the floors of their parts
};

}  // namespace

std::vector<LeftOut> left_out(const std::vector<OutsideSpace>& outside, std::optional<double> best) {
  std::vector<LeftOut> all;
  for (const OutsideSpace& one : outside)
    if (best)
      all.push_back({.what = one.what, .gap = std::max(*best / one.least - 1.0, 0.0), .options = one.options});
    else if (one.least < std::numeric_limits<double>::infinity())
      all.push_back({.what = one.what, .gap = std::nullopt, .options = one.options});
  return all;
}

int ranked_plans(const SearchOptions& options) {
  // Layouts with which more is tried: of so many different degrees, however many of each are
  // ranked.
  constexpr int least_tried = 5;
  const int each = options.top_each == any_number_each ? 1 : options.top_each;
  return options.tries_more_with_best ? std::max(options.top, least_tried * each) : options.top;
}

SearchOptions as_suggested(SearchOptions options, const LayoutRequest& request) {
  options.tries_more_with_best = options.widens_context = true;
  if (options.top_each == any_number_each && !gives_every_degree(request)) options.top_each = 1;
  return options;
}

SearchResult search(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                    const LayoutRequest& request, const SearchOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  SearchOptions usual = options;
  if (!usual.shapes) usual.shapes = std::make_shared<KnownBlockShapes>();  // for both spaces
  std::optional<SpaceSearch> space(std::in_place, graph, cluster, training, request, usual);
  if (space->promises_context()) {
    usual.any_context_ranks = true;
    space.emplace(graph, cluster, training, request, usual);
  }
  SearchResult result = space->run();
  result.counts.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

}  // namespace parplan
