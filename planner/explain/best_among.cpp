#include "planner/explain/best_among.h"

#include <algorithm>
#include <array>
#include <deque>
#include <utility>
#include <vector>

#include "planner/search/best_first.h"
#include "planner/search/input_slots.h"
#include "planner/search/layout_floors.h"

namespace parplan {

namespace {

// As the search of the whole space: layouts are opened with floors of their time; whether they fit
// is asked, and their candidates are made, once their turn comes.
class AmongSpecs {
 public:
  AmongSpecs(const ExplainedPlan& explained, CandidateMaker& maker, LayoutFloors& floors,
             std::span<const ParallelSpec> specs, std::optional<Score> to_beat)
      : explained_(explained), maker_(maker), specs_(specs), floors_(floors), search_{.to_beat = to_beat} {
    // Layouts of one size of micro-batch follow one another.
    std::optional<std::pair<ParallelSpec, Seconds>> last;
    for (std::size_t i = 0; i < specs.size(); ++i) {
      ParallelSpec spec = of_micro_batch(specs[i]);
      if (last && cluster().groups.size() == 1) spec.mesh.order = last->first.mesh.order;
      if (!last || last->first != spec) {
        spec.mesh.order = specs[i].mesh.order;
        const Seconds floor = floors_.of_micro_batch(spec).time;
        last.emplace(std::move(spec), floor);
      }
      const Open open = opened(i, last->second);
      add(search_, {&open, 1});
    }
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
      return {.rival = {}, .certified = search_.open.empty() || search_.open.front().bound >= *search_.to_beat};
    if (search_.best.empty()) return smallest();
    RankedPlan& best = search_.best.front().plan;
    if (best.spec.input_slots == InputSlots::one_more) {
      ParallelSpec without = best.spec;
      without.input_slots = InputSlots::in_flight;
      RankedPlan plan = simulated(without);
      if (!needs_input_slot(best.result.time.total(), plan.result.time.total())) best = std::move(plan);
    }
    return {.rival = rival(cluster(), std::move(best)), .certified = is_certified(search_)};
  }

 private:
  static constexpr int candidate_bits = 14;

  NetworkCache& networks() const { return maker_.estimator().networks(); }
  const Cluster& cluster() const { return networks().cluster(); }
  RankedPlan simulated(const ParallelSpec& spec) const {
    return explained_.simulated(networks(), explained_.plan.training, spec);
  }
  Score counted(const ParallelSpec& spec, Seconds time, const MemoryUse& memory) const {
    return score(explained_.objective(), cluster(), spec, time, memory);
  }

  // What the stages of a layout may choose from.
  std::span<const Recompute> choices_of(const ParallelSpec& spec) const {
    const bool may_mix = mixes() && spec.recompute == Recompute::none;
    return may_mix ? searched_recomputes(explained_.plan.training.engine) : std::span(&spec.recompute, 1);
  }
  bool mixes() const { return explained_.plan.training.engine.has_recompute_per_stage; }

  // What LayoutFloors::of_micro_batch follows from: neither the schedule, nor what is sharded and
  // recomputed, nor, on devices that are alike, the order of the axes.
  static ParallelSpec of_micro_batch(const ParallelSpec& layout) {
    ParallelSpec spec;
    spec.mesh = layout.mesh;
    spec.micro_batch = layout.micro_batch;
    spec.sequence_parallel = layout.sequence_parallel;
    spec.tp_overlap = layout.tp_overlap;
    spec.cp_method = layout.cp_method;
    spec.dp_method = layout.dp_method;
    return spec;
  }

  // Layouts are numbered, and once more where the best floor is known.
  Open opened(std::size_t number, Seconds floor) const {
    const std::size_t i = number % specs_.size();
    return {.bound = counted(specs_[i], floor, {}),
            .place = static_cast<std::uint64_t>(i) << candidate_bits,
            .part = number,
            .mesh = &specs_[i].mesh};
  }

  std::vector<Open> look_into(const Open& part) {
    const bool has_best_floor = part.part >= specs_.size();
    const std::size_t number = part.part % specs_.size();
    const ParallelSpec& layout = specs_[number];
    if (!has_best_floor)
      return {opened(number + specs_.size(), std::max(floors_.of_micro_batch(of_micro_batch(layout)).time,
                                                      floors_.time_of(layout, choices_of(layout))))};
    std::vector<Open> opened;
    if (!floors_.can_hold(layout, choices_of(layout))) return opened;
    for (Candidate& one : make_candidates(std::array{&maker_}, specs_.subspan(number, 1), mixes()).fitting) {
      const Candidate& candidate = candidates_.emplace_back(std::move(one));
      opened.push_back({.bound = counted(candidate.spec, candidate.bound.lower_bound, candidate.bound.memory),
                        .place = part.place + opened.size(),
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
    const MadeCandidates made = make_candidates(std::array{&maker_}, specs_, mixes());
    if (!made.smallest) return {};
    return {.rival = rival(cluster(), maker_.with_times(made.smallest->spec))};
  }

  const ExplainedPlan& explained_;
  CandidateMaker& maker_;
  std::span<const ParallelSpec> specs_;
  LayoutFloors& floors_;
  std::deque<Candidate> candidates_;
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

BestAmong best_among(const ExplainedPlan& explained, CandidateMaker& maker, LayoutFloors& floors,
                     std::span<const ParallelSpec> specs, std::optional<Score> to_beat) {
  return AmongSpecs(explained, maker, floors, specs, to_beat).run();
}

}  // namespace parplan
