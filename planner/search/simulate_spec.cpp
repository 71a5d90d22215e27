#include "planner/search/simulate_spec.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/program/job.h"
#include "planner/program/lower.h"
#include "planner/simulator/simulate.h"
#include "planner/simulator/simulation_state.h"
#include "planner/simulator/steady_state.h"

namespace parplan {
namespace {

StepTime difference(const StepTime& longer, const StepTime& shorter) {
  StepTime apart = shorter;
  apart *= -1.0;
  apart += longer;
  return apart;
}
CommunicationVolume difference(const CommunicationVolume& longer, const CommunicationVolume& shorter) {
  CommunicationVolume apart;
  for (const Axis axis : all_axes) apart[axis] = longer[axis] - shorter[axis];
  return apart;
}

// Adds `times` periods.
void extend(StepTime& time, StepTime of_period, std::int64_t times) {
  of_period *= static_cast<double>(times);
  time += of_period;
}
void extend(CommunicationVolume& volume, const CommunicationVolume& of_period, std::int64_t times) {
  for (const Axis axis : all_axes) volume[axis] += of_period[axis] * times;
}
// False where the critical path lacks work that the step without a period has.
bool extend(StepDetails& details, const StepDetails& a_period_less, std::int64_t times) {
  for (std::size_t r = 0; r < details.ranks.size(); ++r) {
    RankResult& rank = details.ranks[r];
    const RankResult& less = a_period_less.ranks[r];
    extend(rank.time, difference(rank.time, less.time), times);
    extend(rank.communication, difference(rank.communication, less.communication), times);
  }
  std::size_t known = 0;
  for (CriticalWork& work : details.critical_path) {
    std::int64_t runs = work.runs;
    Seconds time = work.time;
    if (known < a_period_less.critical_path.size()) {
      const CriticalWork& less = a_period_less.critical_path[known];
      if (std::tie(less.rank, less.segment, less.label) == std::tie(work.rank, work.segment, work.label)) {
        runs -= less.runs;
        time -= less.time;
        ++known;
      }
    }
    if (runs < 0) return false;
    work.runs += runs * times;
    work.time += time * static_cast<double>(times);
  }
  return known == a_period_less.critical_path.size();
}

// Steps of a layout under a schedule's own order of actions, of any number of micro-batches. Long
// ones are lowered with few: their middle repeats itself.
class LayoutSteps {
 public:
  LayoutSteps(Job job, const ScheduleRow& row, int group, std::span<const CostModel> models, bool with_details)
      : job_(std::move(job)),
        row_(row),
        group_(group),
        models_(models),
        with_details_(with_details),
        all_(static_cast<int>(micro_batches(job_.layout, job_.training))) {
    prepare_short();
  }

  int all() const { return all_; }  // micro-batches of the layout's own step
  int stages() const { return static_cast<int>(job_.layout.stages.size()); }
  // The micro-batches over which dependencies reach. Unless steps are lowered with few: one for
  // each stage, and where ranks hold several, the groups that they run through these.
  int reach() const {
    return short_ ? reach_of(*short_) : stages() + (stages() > pipeline_ranks() ? 2 * shape(all_).group : 0);
  }
  int period() const { return row_.period(shape(all_)); }
  // Whether a step with so many micro-batches has as many in flight as the layout's own.
  bool fills_pipeline(int micro_batches) const {
    for (int rank = 0; rank < pipeline_ranks(); ++rank)
      if (row_.in_flight(rank, shape(micro_batches)) != row_.in_flight(rank, shape(all_))) return false;
    return true;
  }
  // Ready to be played; until the next one is asked for.
  Simulation step(int micro_batches) {
    if (short_ && micro_batches >= short_micro_batches_ && (micro_batches - short_micro_batches_) % repeat_ == 0)
      return longer(*short_, repeat_, (micro_batches - short_micro_batches_) / repeat_);
    programs_ = lower_step(micro_batches);
    return prepared(programs_);
  }

 private:
  int pipeline_ranks() const { return job_.layout.mesh.degree_of(Axis::pp); }
  PipelineShape shape(int micro_batches) const { return {pipeline_ranks(), stages(), micro_batches, group_}; }
  std::vector<Program> lower_step(int micro_batches) {
    job_.training.global_batch = job_.training.global_batch / all_now_ * micro_batches;
    all_now_ = micro_batches;
    job_.schedule = row_.actions(shape(micro_batches));
    return lower_representatives(job_);
  }
  Simulation prepared(std::span<const Program> programs) const {
    return prepare(programs, models_, with_details_ ? CallsInARow::apart : CallsInARow::joined, with_details_);
  }
  // The shortest step from which the layout's own, and others that are apart by periods, follow:
  // nothing where that is not much shorter.
  void prepare_short() {
    int most = 0;
    for (int rank = 0; rank < pipeline_ranks(); ++rank) most = std::max(most, row_.in_flight(rank, shape(all_)));
    most = static_cast<int>(ceil_div(most, stages() / pipeline_ranks()));
    // In which the middle shows that it repeats itself.
    const int middle = std::max(16, 5 * period());
    for (int some = most + middle; 2 * some <= all_ && !short_; some *= 2) {
      some += (all_ - some) % period();
      if (!fills_pipeline(some)) continue;
      short_programs_ = lower_step(some);
      short_ = prepared(short_programs_);
      const std::optional<int> repeat = repeating_period(*short_, period());
      if (repeat && (all_ - some) % *repeat != 0) {
        some += (all_ - some) % *repeat;
        short_programs_ = lower_step(some);
        short_ = prepared(short_programs_);
      }
      if (repeat && repeating_period(*short_, *repeat) == repeat) {
        repeat_ = *repeat;
        short_micro_batches_ = some;
      } else {
        short_.reset();
      }
    }
  }

  Job job_;
  const ScheduleRow& row_;
  int group_ = 1;  // micro-batches
  std::span<const CostModel> models_;
  bool with_details_ = false;
  int all_ = 0;
  int all_now_ = all_;  // micro-batches of `job_`
  std::vector<Program> short_programs_;
  std::optional<Simulation> short_;  // of short_programs_
  int short_micro_batches_ = 0, repeat_ = 0;
  std::vector<Program> programs_;
};

std::vector<CommunicationVolume> sent_by(const Simulation& step) {
  std::vector<CommunicationVolume> sent;
  for (const PlayedRank& rank : step.ranks) sent.push_back(rank.list.sent);
  return sent;
}

std::optional<SimulatedSpec> play_steady(LayoutSteps& steps, StepDetails* details) {
  const int reach = steps.reach(), period = steps.period(), all = steps.all();
  std::int64_t played = 0;
  const auto step_of = [&](int micro_batches) {
    played += micro_batches;
    return steps.step(micro_batches);
  };
  // The time to become steady, a window longer than any dependency reaches back, and the end of the
  // schedule; twice as many micro-batches where that was too short.
  StepResult result;
  std::vector<CommunicationVolume> sent;
  SteadyStep::Period added;
  std::int64_t times = 0;
  for (int some = steady_micro_batches(reach, period); times == 0; some *= 2) {
    some += ((all - some) % period + period) % period;
    // It would save too little: mostly one play, up to three, and it may be in vain.
    if (played + std::int64_t{2} * some > all || !steps.fills_pipeline(some - period)) return std::nullopt;
    SteadyStep step = play_until_steady(step_of(some), reach, some - reach - 2, reach + 4, period);
    if (!step.steady) continue;
    const SteadyState steady = *step.steady;
    const int count = some + (all - some) % steady.period;
    result = step.result;
    sent = std::move(step.sent);
    StepDetails before;
    if (count != some || details) {
      Simulation longer = step_of(count);
      result = play_step(longer, details);
      sent = sent_by(longer);
    }
    if (step.of_period && !details) {
      added = *std::move(step.of_period);
    } else {
      Simulation shorter = step_of(count - steady.period);
      const StepResult less = play_step(shorter, details ? &before : nullptr);
      const Seconds grown = result.time.total() - less.time.total();
      if (std::abs((grown - steady.later).value) > 1e-9 * steady.later.value || !(less.memory == result.memory))
        return std::nullopt;
      added = {.time = difference(result.time, less.time), .sent = {}};
      const std::vector<CommunicationVolume> sent_before = sent_by(shorter);
      for (std::size_t r = 0; r < sent.size(); ++r) added.sent.push_back(difference(sent[r], sent_before[r]));
    }
    times = (all - count) / steady.period;
    if (details && !extend(*details, before, times)) return std::nullopt;
  }
  extend(result.time, added.time, times);
  Bytes most(-1);
  for (std::size_t r = 0; r < sent.size(); ++r) {
    extend(sent[r], added.sent[r], times);
    if (const Bytes in_all = sum(sent[r]); in_all > most) {
      most = in_all;
      result.communication = sent[r];
    }
  }
  return SimulatedSpec{.result = result, .micro_batches = played};
}

}  // namespace

StepResult simulate_spec(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                         const ParallelSpec& spec, const Placements& placements, const Schedule& schedule,
                         std::span<const CostModel> models, Timeline* timeline, StepDetails* details) {
  const Job job = job_of(graph, cluster, training, spec, placements, schedule);
  return simulate(lower_representatives(job), models, timeline, details);
}

int steady_micro_batches(int reach, int period) { return 3 * reach + std::max(reach + 16, 4 * period); }

std::optional<SimulatedSpec> simulate_steady(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                                             const ParallelSpec& spec, const Placements& placements,
                                             const ScheduleRow& row, std::span<const CostModel> models,
                                             StepDetails* details) {
  LayoutSteps steps(job_of(graph, cluster, training, spec, placements, {}), row, shape_of(spec, training).group, models,
                    details != nullptr);
  return play_steady(steps, details);
}

SimulatedSpec simulate_soon(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                            const ParallelSpec& spec, const Placements& placements, std::span<const CostModel> models,
                            StepDetails* details) {
  LayoutSteps steps(job_of(graph, cluster, training, spec, placements, {}), row_of(spec.schedule),
                    shape_of(spec, training).group, models, details != nullptr);
  if (const std::optional<SimulatedSpec> steady = play_steady(steps, details)) return *steady;
  Simulation step = steps.step(steps.all());
  return {.result = play_step(step, details), .micro_batches = steps.all()};
}

StepResult simulate_soon(const OpGraph& graph, NetworkCache& networks, const Plan& plan, StepDetails* details) {
  const std::vector<CostModel> models = cost_models(networks, plan.spec.mesh);
  if (plan.schedule == schedule_of(plan.spec, plan.training))
    return simulate_soon(graph, plan.cluster, plan.training, plan.spec, plan.placements, models, details).result;
  return simulate_spec(graph, plan.cluster, plan.training, plan.spec, plan.placements, plan.schedule, models, nullptr,
                       details);
}

StepResult simulate_spec(const OpGraph& graph, NetworkCache& networks, const TrainingSpec& training,
                         const ParallelSpec& spec, const Placements& placements, const Schedule& schedule,
                         Timeline* timeline) {
  return simulate_spec(graph, networks.cluster(), training, spec, placements, schedule,
                       cost_models(networks, spec.mesh), timeline);
}

}  // namespace parplan
