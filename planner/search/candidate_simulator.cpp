#include "planner/search/candidate_simulator.h"

#include <algorithm>
#include <utility>

#include "planner/base/parallel_for.h"
#include "planner/schedule/schedules.h"
#include "planner/search/input_slots.h"
#include "planner/search/simulated_steps.h"

namespace parplan {
namespace {

// The longest steps whose actions are played for a bound, in calls.
constexpr std::int64_t most_played_for_bound = 65'536;
// To lower a block is about as much work as to play so many calls.
constexpr std::int64_t calls_per_block = 32;

// A GPipe layout as one of 1F1B where it is that, too: a single micro-batch has one order.
ParallelSpec as_1f1b(ParallelSpec spec, const TrainingSpec& training) {
  if (spec.schedule == ScheduleKind::gpipe && spec.pp() > 1 && spec.replica_micro_batches.empty() &&
      micro_batches(spec, training) == 1)
    spec.schedule = ScheduleKind::one_f_one_b;
  return spec;
}

}  // namespace

// Closed forms of pipelines miss what playing their actions shows, which is little work beside a
// simulation where the step is short.
Score CandidateSimulator::sharpened(const Candidate& candidate, const Score& bound) {
  const ParallelSpec& spec = candidate.spec;
  if (space_.objective == Objective::memory || spec.pp() == 1) return bound;
  const ScheduleForms schedule = forms_of(row_of(spec.schedule));
  if (schedule.closed_form == nullptr || all_calls(spec) > most_played_for_bound) return bound;
  CandidateMaker& maker = *makers_.front();
  const Seconds time = maker.estimator().bound(spec, maker.placements_of(spec), as_played(schedule)).lower_bound;
  return std::max(bound, score_of(spec, time, candidate.bound.memory));
}

// Candidates of one layout on equal networks are one plan, whatever the order of their axes, and
// that of forwards and backwards where there is one of each.
bool CandidateSimulator::are_equal(const Work& a, const Work& b) const {
  // Its ranks may then be of other kinds.
  if (!a.spec.replica_micro_batches.empty()) return a.spec == b.spec;
  ParallelSpec same_order = as_1f1b(a.spec, space_.training);
  same_order.mesh.order = b.spec.mesh.order;
  return same_order == as_1f1b(b.spec, space_.training) && equal_costs(a.models, b.models);
}

CandidateSimulator::Work CandidateSimulator::work_of(const Candidate& candidate) const {
  return {.spec = candidate.spec, .models = cost_models(makers_.front()->estimator().networks(), candidate.spec)};
}

bool CandidateSimulator::is_known(const Work& work) const {
  return std::ranges::any_of(known_, [&](const Work& other) { return are_equal(work, other); });
}

bool CandidateSimulator::is_known(const Candidate& candidate) const { return is_known(work_of(candidate)); }

bool CandidateSimulator::take_if_new(const Candidate& candidate) {
  Work work = work_of(candidate);
  if (is_known(work)) {
    ++equal_;
    return false;
  }
  known_.push_back(std::move(work));
  return true;
}

SimulatedSpec CandidateSimulator::simulate(CandidateMaker& maker, const ParallelSpec& spec,
                                           std::span<const CostModel> models) {
  const Placements& placements = maker.placements_of(spec);
  if (options_.steps != nullptr)
    return options_.steps->simulate(space_.graph, space_.cluster, space_.training, spec, placements, models);
  return simulate_soon(space_.graph, space_.cluster, space_.training, spec, placements, models, nullptr, nullptr,
                       &blocks_);
}

SimulatedSpec CandidateSimulator::simulate_apart(const ParallelSpec& spec) {
  CandidateMaker& maker = *makers_.front();
  return simulate(maker, spec, cost_models(maker.estimator().networks(), spec));
}

std::vector<Ranked> CandidateSimulator::simulate(std::span<const Open> turns) {
  const std::span<const Work> works = std::span(known_).last(turns.size());
  std::vector<ParallelSpec> specs(turns.size());
  std::vector<SimulatedSpec> simulated(turns.size());
  std::vector<char> lacks_room(turns.size(), 0);  // for another input slot
  parallel_for(static_cast<int>(makers_.size()), turns.size(), [&](int thread, std::size_t turn) {
    CandidateMaker& maker = *makers_[static_cast<std::size_t>(thread)];
    Candidate candidate = *turns[turn].candidate;
    if (!space_.request[Choice::schedule]) candidate.spec = as_1f1b(std::move(candidate.spec), space_.training);
    // The plans that are ranked in the end are simulated without the buffer, too.
    specs[turn] = candidate.spec;
    if (!space_.request[Choice::input_slots]) {
      WithInputSlot with = with_input_slot(maker, candidate, works[turn].models, space_.training, space_.objective);
      specs[turn] = std::move(with.spec);
      lacks_room[turn] = with.lacks_room ? 1 : 0;
    }
    simulated[turn] = simulate(maker, specs[turn], works[turn].models);
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
  }
  if (options_.progress)
    options_.progress(count(), options_.most_simulated.value_or(std::max(usual_simulated, count())));
  return ranked;
}

std::int64_t CandidateSimulator::lowered() const {
  return count() * calls_per_block * static_cast<std::int64_t>(space_.graph.blocks.size());
}

std::int64_t CandidateSimulator::together(bool long_ones) const {
  return long_ones ? std::max<std::int64_t>(options_.together / 2, 1) : options_.together;
}

}  // namespace parplan
