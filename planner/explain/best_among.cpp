#include "planner/explain/best_among.h"

#include <algorithm>
#include <array>
#include <deque>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "planner/search/best_first.h"
#include "planner/search/input_slots.h"
#include "planner/search/layout_floors.h"
#include "planner/search/made_candidates.h"
#include "planner/search/open_parts.h"
#include "planner/search/stage_recompute.h"

namespace parplan {

namespace {

// As the search of the whole space: parts of it are looked into until single layouts are left, and
// the candidates of these are made once their turn comes.
class AmongLayouts {
 public:
  AmongLayouts(const ExplainedPlan& explained, CandidateMaker& maker, LayoutFloors& floors, const Among& among,
               std::optional<Score> to_beat)
      : explained_(explained),
        maker_(maker),
        among_(among),
        parts_(explained.graph, cluster(), explained.plan.training, among.request,
               usual_width(explained.graph, explained.plan.training.engine, among.request), explained.objective(),
               among.devices, floors),
        search_{.to_beat = to_beat} {
    add(search_, parts_.open_those({.of_degrees = among.of_degrees, .layout = among.layout}, among.devices));
  }

  BestAmong run() {
    const auto room = [this] {
      return std::min<std::int64_t>(explained_.options.most_simulated - search_.simulated, 1);
    };
    parplan::run(search_, {.look_into = [this](const Open& part) { return look_into(part); },
                           .room = room,
                           .is_new = {},
                           .simulate = [this](std::span<const Open> turns) { return simulate(turns); }});
    if (search_.to_beat && !is_ahead(search_))
      return {.rival = {},
              .certified = search_.to_beat->first <= least_of_other_cuts_ &&
                           (search_.open.empty() || search_.open.front().bound >= *search_.to_beat)};
    if (search_.best.empty()) return smallest();
    const bool is_best = is_certified(search_) && search_.best.front().score.first <= least_of_other_cuts_;
    RankedPlan& best = search_.best.front().plan;
    if (best.spec.input_slots == InputSlots::one_more) {
      ParallelSpec without = best.spec;
      without.input_slots = InputSlots::in_flight;
      RankedPlan plan = simulated(without);
      if (!needs_input_slot(best.result.time.total(), plan.result.time.total())) best = std::move(plan);
    }
    return {.rival = rival(cluster(), std::move(best)), .certified = is_best};
  }

 private:
  NetworkCache& networks() const { return maker_.estimator().networks(); }
  const Cluster& cluster() const { return networks().cluster(); }
  RankedPlan simulated(const ParallelSpec& spec) const {
    return explained_.simulated(networks(), explained_.plan.training, spec);
  }
  Score counted(const ParallelSpec& spec, Seconds time, const MemoryUse& memory) const {
    return score(explained_.objective(), cluster(), spec, time, memory);
  }

  bool mixes() const { return may_mix(among_.request, explained_.plan.training.engine); }
  bool is_among(std::size_t part) const {
    return !among_.in_order || !parts_.is_layout(part) || among_.in_order(parts_.layouts(part).spec);
  }

  std::vector<Open> look_into(const Open& part) {
    const std::optional<Score> limit = score_limit(search_);
    std::optional<std::vector<Open>> opened =
        parts_.look_into(part.part, limit ? limit->first : std::numeric_limits<double>::infinity());
    if (opened) {
      std::erase_if(*opened, [&](const Open& one) { return !is_among(one.part); });
      return *std::move(opened);
    }
    return candidates_of(parts_.layouts(part.part));
  }

  std::vector<Open> candidates_of(const OpenParts::Layouts& layout) {
    MadeCandidates made = make_candidates(std::array{&maker_}, {&layout.spec, 1}, mixes(), explained_.objective());
    if (made.smallest && (!smallest_ || made.smallest->bound.memory.peak() < smallest_->bound.memory.peak()))
      smallest_ = std::move(made.smallest);
    if (explained_.objective() != Objective::memory) {
      Seconds least_other = made.others_from;
      for (const OpenLayout& other : made.others) least_other = std::min(least_other, other.time);
      const Score least = counted(layout.spec, std::max(least_other, layout.floor.time), {});
      least_of_other_cuts_ = std::min(least_of_other_cuts_, least.first);
    } else if (made.least_memory_left) {
      least_of_other_cuts_ = std::min(least_of_other_cuts_, static_cast<double>(made.least_memory_left->count));
    }
    std::vector<Open> opened;
    for (Candidate& one : made.fitting) {
      const Candidate& candidate = candidates_.emplace_back(std::move(one));
      opened.push_back({.bound = counted(candidate.spec, candidate.bound.lower_bound, candidate.bound.memory),
                        .place = layout.place + opened.size(),
                        .candidate = &candidate,
                        .mesh = &candidate.spec.mesh});
    }
    return opened;
  }

  std::vector<Ranked> simulate(std::span<const Open> turns) {
    std::vector<Ranked> ranked;
    for (const Open& turn : turns) {
      const std::vector<CostModel> models = cost_models(networks(), turn.candidate->spec);
      RankedPlan plan = simulated(
          with_input_slot(maker_, *turn.candidate, models, explained_.plan.training, explained_.objective()).spec);
      const Score score = counted(plan.spec, plan.result.time.total(), plan.result.memory);
      ranked.push_back({.score = score, .bound = turn.bound, .place = turn.place, .plan = std::move(plan)});
    }
    return ranked;
  }

  // Where none fits.
  BestAmong smallest() {
    while (const std::optional<OpenParts::Layouts> layout =
               parts_.take_smallest_left_out(smallest_ ? std::optional(smallest_->bound.memory.peak()) : std::nullopt))
      if (!among_.in_order || among_.in_order(layout->spec)) candidates_of(*layout);
    if (!smallest_) return {};
    return {.rival = rival(cluster(), maker_.with_times(smallest_->spec))};
  }

  const ExplainedPlan& explained_;
  CandidateMaker& maker_;
  const Among& among_;
  OpenParts parts_;
  std::optional<Candidate> smallest_;
  std::deque<Candidate> candidates_;
  // What the layouts score at least with cuts that are no candidates.
  double least_of_other_cuts_ = std::numeric_limits<double>::infinity();
  BestFirst search_;
};

}  // namespace

LayoutFloors floors_of(const ExplainedPlan& explained, CandidateMaker& maker) {
  const TrainingSpec& training = explained.plan.training;
  return {explained.graph,
          maker.estimator().networks().cluster(),
          training,
          {},
          usual_width(explained.graph, training.engine, {}),
          maker};
}

BestAmong best_among(const ExplainedPlan& explained, CandidateMaker& maker, LayoutFloors& floors, const Among& among,
                     std::optional<Score> to_beat) {
  return AmongLayouts(explained, maker, floors, among, to_beat).run();
}

}  // namespace parplan
