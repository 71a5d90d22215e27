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
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "planner/base/parallel_for.h"
#include "planner/parallel/techniques.h"
#include "planner/plan/spec_hash.h"
#include "planner/search/best_first.h"
#include "planner/search/candidates.h"
#include "planner/search/input_slots.h"
#include "planner/search/open_parts.h"
#include "planner/search/restrictions.h"
#include "planner/search/simulate_spec.h"
#include "planner/search/simulated_steps.h"
#include "planner/search/space_in_words.h"
#include "planner/search/tried_with_best.h"

namespace parplan {
namespace {

// The inputs that determine a candidate's time and memory.
struct CandidateWork {
  ParallelSpec spec;
  std::vector<CostModel> models;  // by rank of the pipeline
};
// A GPipe layout as one of 1F1B where it is that, too: a single micro-batch has one order.
ParallelSpec as_1f1b(ParallelSpec spec, const TrainingSpec& training) {
  if (spec.schedule == ScheduleKind::gpipe && spec.pp() > 1 && spec.replica_micro_batches.empty() &&
      micro_batches(spec, training) == 1)
    spec.schedule = ScheduleKind::one_f_one_b;
  return spec;
}

// Candidates of one layout on equal networks are one plan, whatever the order of their axes, and
// that of forwards and backwards where there is one of each.
bool equal_work(const CandidateWork& a, const CandidateWork& b, const TrainingSpec& training) {
  // Its ranks may then be of other kinds.
  if (!a.spec.replica_micro_batches.empty()) return a.spec == b.spec;
  ParallelSpec same_order = as_1f1b(a.spec, training);
  same_order.mesh.order = b.spec.mesh.order;
  return same_order == as_1f1b(b.spec, training) && equal_costs(a.models, b.models);
}

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
    floors_.emplace(graph, cluster, training, request, width_, *makers_.front());
    parts_.emplace(graph, cluster, training, request, width_, options.objective, least_devices(), *floors_);
  }

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
                             .sharpened = [this](const Open& one) { return sharpened(*one.candidate, one.bound); },
                             .may_be_plainer =
                                 [this](const Open& one, const Ranked& plan) {
                                   const Candidate& candidate = *one.candidate;
                                   return plainness(candidate.spec, candidate.bound.memory) < plainness_of(plan);
                                 },
                             .room = [this] { return room(); },
                             .is_new = [this](const Open& candidate) { return is_new(candidate); },
                             .simulate = [this](std::span<const Open> turns) { return simulate(turns); }});
      ranked = is_ahead(search_);
      try_other_cuts();
    } while (!ranked && is_ahead(search_));
    // With them, plans that are ranked beside those of other searches may beat these.
    if (options_.tries_more_with_best && (is_ahead(search_) || !search_.elsewhere.empty())) try_with_best();
    if (!is_ahead(search_)) drop_beaten_elsewhere(search_);
    if (is_ahead(search_) || !search_.elsewhere.empty()) drop_idle_input_slots();
    return take_result();
  }

  // Whether more context parallelism than in this space should be searched (`worth_context`). Not
  // under a schedule that was asked for: with backwards in parts, that would take several times as
  // long.
  bool promises_context() {
    return options_.bounds_left_out && !request_[Choice::schedule] && graph_.sequence >= medium_sequence &&
           training_.global_batch < cluster_.devices() && is_worth_context(space(), *floors_, *makers_.front());
  }

 private:
  int least_devices() const { return options_.fewer_devices ? options_.least_devices : cluster_.devices(); }
  SearchedSpace space() const {
    return {graph_, cluster_, training_, request_, width_, options_.objective, least_devices()};
  }
  // Whether stages may differ in what they recompute.
  bool mixes() const {
    return !request_[Choice::recompute] && !request_[Choice::recompute_layers] &&
           training_.engine.has_recompute_per_stage;
  }

  Score score_of(const ParallelSpec& spec, Seconds time, const MemoryUse& memory) const {
    return score(options_.objective, cluster_, spec, time, memory);
  }

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
        !part.spec.replica_micro_batches.empty() || (has_few_cuts(part.spec) && !request_[Choice::schedule])) {
      for (const OpenLayout& other : made.others)
        leave(score_of_second(other.spec) * std::max(other.time, part.floor.time).value);
      made.others.clear();
    }
    // The floor of the part holds for every cut of the layout, too.
    for (OpenLayout& other : made.others) {
      other.time = std::max(other.time, part.floor.time);
      others_.emplace_back(part.place, std::move(other));
    }
    leave(score_of_second(part.spec) * std::max(made.others_from, part.floor.time).value);
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

  // Closed forms of pipelines miss what playing their actions shows, which is little work beside a
  // simulation where the step is short.
  Score sharpened(const Candidate& candidate, const Score& bound) {
    const ParallelSpec& spec = candidate.spec;
    if (options_.objective == Objective::memory || spec.pp() == 1) return bound;
    const ScheduleForms schedule = forms_of(row_of(spec.schedule));
    if (schedule.closed_form == nullptr || 2 * spec.stages() * micro_batches(spec, training_) > most_played_for_bound)
      return bound;
    CandidateMaker& maker = *makers_.front();
    const Seconds time = maker.estimator().bound(spec, maker.placements_of(spec), as_played(schedule)).lower_bound;
    return std::max(bound, score_of(spec, time, candidate.bound.memory));
  }

  // Several at once: as many as the best `top` still lack, then a few, whatever the number of
  // threads.
  std::int64_t room() const {
    const bool only_first = search_.to_beat && !is_ahead(search_);
    const std::int64_t missing = only_first ? 1 : search_.top - static_cast<std::int64_t>(search_.best.size());
    const std::int64_t room = std::max(missing, together());
    if (options_.most_simulated) return std::min(room, *options_.most_simulated - search_.simulated);
    if (is_settled(search_)) return calls_ + lowered_ < free_calls_behind ? room : 0;
    return search_.simulated < usual_simulated || calls_ < free_calls ? room : 0;
  }

  // Whether each simulation is much work.
  bool are_long() const { return search_.simulated > 0 && calls_ / search_.simulated > long_calls; }
  // Fewer at once where they are long: one may rule out the next.
  std::int64_t together() const {
    return are_long() ? std::max<std::int64_t>(options_.together / 2, 1) : options_.together;
  }

  bool is_new(const Open& one) {
    const ParallelSpec& spec = one.candidate->spec;
    CandidateWork work{.spec = spec, .models = cost_models(makers_.front()->estimator().networks(), spec)};
    if (std::ranges::any_of(known_, [&](const CandidateWork& other) { return equal_work(work, other, training_); })) {
      ++counts_.simulated;
      return false;
    }
    known_.push_back(std::move(work));
    return true;
  }

  SimulatedSpec simulate_one(CandidateMaker& maker, const ParallelSpec& spec, std::span<const CostModel> models) {
    const Placements& placements = maker.placements_of(spec);
    return options_.steps != nullptr
               ? options_.steps->simulate(graph_, cluster_, training_, spec, placements, models)
               : simulate_soon(graph_, cluster_, training_, spec, placements, models, nullptr, nullptr, &blocks_);
  }

  // The candidates are those that were last found new, in this order.
  std::vector<Ranked> simulate(std::span<const Open> turns) {
    const std::span<const CandidateWork> works = std::span(known_).last(turns.size());
    std::vector<ParallelSpec> specs(turns.size());
    std::vector<SimulatedSpec> simulated(turns.size());
    std::vector<char> lacks_room(turns.size(), 0);  // for another input slot
    parallel_for(static_cast<int>(makers_.size()), turns.size(), [&](int thread, std::size_t turn) {
      CandidateMaker& maker = *makers_[thread];
      Candidate candidate = *turns[turn].candidate;
      if (!request_[Choice::schedule]) candidate.spec = as_1f1b(std::move(candidate.spec), training_);
      // The plans that are ranked in the end are simulated without the buffer, too
      // (drop_idle_input_slots).
      specs[turn] = candidate.spec;
      if (!request_[Choice::input_slots]) {
        WithInputSlot with = with_input_slot(maker, candidate, works[turn].models, training_, options_.objective);
        specs[turn] = std::move(with.spec);
        lacks_room[turn] = with.lacks_room;
      }
      simulated[turn] = simulate_one(maker, specs[turn], works[turn].models);
    });
    std::vector<Ranked> ranked;
    for (std::size_t turn = 0; turn < turns.size(); ++turn) {
      const ParallelSpec& spec = specs[turn];
      const auto& [result, played] = simulated[turn];
      ranked.push_back({.score = score_of(spec, result.time.total(), result.memory),
                        .bound = turns[turn].bound,
                        .place = turns[turn].place,
                        .plan = {spec, result}});
      simulated_.push_back(ranked.back());
      if (lacks_room[turn] != 0) least_with_slot_ = std::min(least_with_slot_, turns[turn].bound.first);
      calls_ += 2 * spec.stages() * played;
      lowered_ += calls_per_block * static_cast<std::int64_t>(graph_.blocks.size());
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
    bool is_sharp = false;   // Open::is_sharp
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

  // One of those that differ in their groups of shards and the order of their axes alone, which
  // bear little on how well a cut suits a layout: the fastest that was simulated, else that of the
  // least bound. The others are left.
  std::vector<OtherCuts> one_of_each(std::vector<OtherCuts> open) {
    std::unordered_map<ParallelSpec, double, SpecHash> scores;  // by layout
    for (const Ranked& one : simulated_) {
      const auto [score, is_new] = scores.try_emplace(layout_of(one.plan.spec), one.score.first);
      if (!is_new) score->second = std::min(score->second, one.score.first);
    }
    std::ranges::stable_sort(open, {}, [&](const OtherCuts& one) {
      const auto score = scores.find(one.layout->spec);
      return score == scores.end() ? std::numeric_limits<double>::infinity() : score->second;
    });
    std::vector<OtherCuts> kept;
    std::unordered_set<ParallelSpec, SpecHash> known;
    for (const OtherCuts& one : open) {
      ParallelSpec key = one.layout->spec;
      key.mesh.order = ParallelSpec().mesh.order;
      key.mesh.dp_shard = 0;
      if (known.insert(std::move(key)).second)
        kept.push_back(one);
      else
        leave(one.bound.first);
    }
    std::ranges::stable_sort(kept, {}, [](const OtherCuts& one) { return std::pair(one.bound, one.place); });
    return kept;
  }

  // No cut of those that were not looked at scores less.
  void leave(double score) { least_left_ = std::min(least_left_, score); }

  // Looks at other cuts of the layouts that may beat the best plan with them.
  void try_other_cuts() {
    if (!best_score(search_) || options_.objective == Objective::memory) return;
    std::vector<OtherCuts> open = layouts_with_other_cuts();
    const auto places_of = [&](const OtherCuts& one) {
      return one.layout->spec.stages() * static_cast<std::int64_t>(graph_.blocks.size());
    };
    std::int64_t all_places = 0;
    for (const OtherCuts& one : open) all_places += places_of(one);
    if (all_places > few_other_places) open = one_of_each(std::move(open));
    const std::int64_t room =
        options_.most_simulated ? *options_.most_simulated - search_.simulated : most_other_simulated;
    std::size_t looked_at = 0;
    for (std::int64_t places = 0; room > 0 && looked_at < open.size(); ++looked_at)
      if ((places += places_of(open[looked_at])) > most_other_places) break;
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
    for (const OtherCandidate& one :
         simulate_others(std::move(turns), std::vector<std::optional<double>>(open.size()), false))
      leave(one.bound.first);
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
    if (row.with_each && !are_long()) try_with(row, simulated_, tried);
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
                                             .layout = layout_of(one.plan.spec),
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
    std::vector<OtherCandidate> turns;
    for (std::size_t i = 0; i < layouts.size(); ++i) {
      for (Candidate& candidate : candidates_with(layouts[i])) {
        candidates_.push_back(std::move(candidate));
        const Candidate& made = candidates_.back();
        turns.push_back({.bound = score_of(made.spec, made.bound.lower_bound, made.bound.memory),
                         .place = other_place + turns.size(),
                         .candidate = &made,
                         .layout = i});
      }
    }
    simulate_others(std::move(turns), std::move(above), true);
  }

  // The most promising first: by its bound, and by how far those of its layout were above theirs,
  // by layout `above` where that is known. `leaves`: what does not promise to be ranked.
  // Returns those that may beat the best plan and are left, also since the others were work enough.
  std::vector<OtherCandidate> simulate_others(std::vector<OtherCandidate> turns,
                                              std::vector<std::optional<double>> above, bool leaves) {
    const std::int64_t calls = calls_;
    std::int64_t tried = 0, sharp = 0;
    const auto promised = [&](const OtherCandidate& one) { return one.bound.first * above[one.layout].value_or(1.0); };
    const auto promises = [&](const OtherCandidate& one) { return std::pair(promised(one), one.place); };
    while (true) {
      const Score best = *best_score(search_);
      std::erase_if(turns, [&](const OtherCandidate& one) { return one.bound >= best; });
      const auto batch = static_cast<std::size_t>(together());
      const std::int64_t most = are_long() ? together() : most_other_simulated;
      std::size_t room = tried < most || calls_ - calls < free_other_calls ? batch : 0;
      if (options_.most_simulated)
        room = static_cast<std::size_t>(
            std::clamp<std::int64_t>(*options_.most_simulated - search_.simulated, 0, together()));
      const double limit = score_limit(search_).value_or(search_.best.empty() ? best : search_.best.back().score).first;
      room = std::min(room, static_cast<std::size_t>(std::ranges::count_if(turns, [&](const OtherCandidate& one) {
                        return !leaves || promised(one) < limit;
                      })));
      if (room == 0) break;
      std::ranges::partial_sort(turns, turns.begin() + static_cast<std::ptrdiff_t>(room), {}, promises);
      bool are_sharp = true;
      for (OtherCandidate& one : std::span(turns).first(room))
        if (!std::exchange(one.is_sharp, true) && sharp++ < most_other_sharp) {
          const Score sharper = sharpened(*one.candidate, one.bound);
          are_sharp = are_sharp && sharper == one.bound;
          one.bound = sharper;
        }
      if (!are_sharp) continue;
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
    return turns;
  }

  // The layout of a plan, without its cut.
  ParallelSpec layout_of(ParallelSpec spec) const {
    if (!request_[Choice::input_slots]) spec.input_slots = ParallelSpec().input_slots;
    if (!request_[Choice::stage_blocks]) spec.stage_blocks.clear();
    if (!request_[Choice::recompute]) spec.stage_recompute.clear();
    const bool chooses = spec.recompute == Recompute::per_stage || spec.recompute_layers > 0;
    if (chooses && !request_[Choice::recompute] && !request_[Choice::recompute_layers]) {
      spec.recompute = Recompute::none;
      spec.recompute_layers = 0;
    }
    return spec;
  }

  // A layout is ranked with its best cut.
  void take_cut(Ranked&& one) {
    const auto ranked = std::ranges::find_if(
        search_.best, [&](const Ranked& other) { return layout_of(other.plan.spec) == layout_of(one.plan.spec); });
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
    std::int64_t calls = 0, most = 0;  // of all, and of one
    for (Ranked& one : search_.best) {
      if (one.plan.spec.input_slots != InputSlots::one_more) continue;
      if (calls + most > free_other_calls) break;
      ParallelSpec spec = one.plan.spec;
      spec.input_slots = InputSlots::in_flight;
      const SimulatedSpec without = simulate_one(maker, spec, cost_models(maker.estimator().networks(), spec));
      const std::int64_t its_calls = 2 * spec.stages() * without.micro_batches;
      calls += its_calls;
      most = std::max(most, its_calls);
      if (needs_input_slot(one.plan.result.time.total(), without.result.time.total())) continue;
      one.score = score_of(spec, without.result.time.total(), without.result.memory);
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
    if (!fits_any_ && !search_.to_beat) find_smallest();
    SearchResult result;
    if (smallest_) result.smallest = makers_.front()->with_times(smallest_->spec);
    result.counts = counts_;
    result.counts.infeasible_memory += parts_->count_left_out();
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
    if (options_.bounds_left_out) result.counts.left_out = left_out(winner, result.counts);
    put_plainest_first();
    search_.best = first_of_each(std::move(search_.best), options_.top_each);
    if (search_.best.size() > static_cast<std::size_t>(options_.top))
      search_.best.erase(search_.best.begin() + options_.top, search_.best.end());
    for (Ranked& one : search_.best) result.plans.push_back(std::move(one.plan));
    return result;
  }

  // How much better than the best plan anything may be that scores no less than `least`.
  static double gap_to(double least, const Score& winner) { return std::max(winner.first / least - 1.0, 0.0); }

  std::vector<LeftOut> left_out(const Score& winner, const SearchCounts& counts) {
    std::vector<LeftOut> all;
    for (const Restriction& restriction : restrictions(space())) {
      const std::optional<double> least =
          least_beyond(restriction, space(), winner, *parts_, *floors_, *makers_.front());
      // What the search did not look into is bounded with it.
      const double gap = std::max(least ? gap_to(*least, winner) : 0.0, counts.gap.value_or(0.0));
      all.push_back({.what = restriction.what, .gap = gap, .options = restriction.options});
    }
    if (least_with_slot_ < std::numeric_limits<double>::infinity() && options_.objective != Objective::memory)
      all.push_back({.what = "another input slot where only more recompute makes room for it",
                     .gap = gap_to(least_with_slot_, winner),
                     .options = {"--input-slots in_flight+1"}});
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
    const double gap = winner.first / least_left_ - 1.0;
    if (gap <= 0.0) return std::nullopt;
    return std::max(gap, counts.gap.value_or(0.0));
  }

  // Limits on looking at other cuts.
  // Places of a block on a stage, over layouts: up to the first number, all layouts are looked at.
  static constexpr std::int64_t few_other_places = 16'384, most_other_places = 262'144;
  static constexpr std::size_t most_other_cuts = 1024;
  static constexpr std::int64_t most_other_simulated = 8, most_other_sharp = 64;
  static constexpr std::int64_t free_other_calls = 100'000;
  static constexpr std::uint64_t other_place = std::uint64_t{1} << 63;

  // Limits that hold where the user gives none: the first two together end the search for the best
  // plan, and the third one that for the ranks behind it. To lower a block is about as much work as
  // to play so many calls.
  static constexpr std::int64_t usual_simulated = 64;
  static constexpr std::int64_t free_calls = 400'000, free_calls_behind = 250'000, long_calls = 20'000;
  static constexpr std::int64_t calls_per_block = 32;
  // The longest steps whose actions are played for a bound, in calls.
  static constexpr std::int64_t most_played_for_bound = 65'536;

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
  KnownBlocks blocks_;
  std::deque<Candidate> candidates_;  // those that fit
  BestFirst search_;
  std::vector<CandidateWork> known_;
  std::vector<Ranked> simulated_;
  SearchCounts counts_;
  std::optional<Candidate> smallest_;
  bool fits_any_ = false;
  // Layouts with other cuts than those of their candidates, with their places.
  std::vector<std::pair<std::uint64_t, OpenLayout>> others_;
  double least_left_ = std::numeric_limits<double>::infinity();       // of the scores of other cuts
  double least_with_slot_ = std::numeric_limits<double>::infinity();  // of those that need more recompute for a slot
  std::int64_t calls_ = 0, lowered_ = 0;                              // simulated so far; the latter as calls
};

}  // namespace

int ranked_plans(const SearchOptions& options) {
  constexpr int least_tried = 5;  // layouts with which groups of heads and slices are tried
  return options.tries_more_with_best ? std::max(options.top, least_tried) : options.top;
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
