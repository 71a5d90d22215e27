#include "planner/search/simulate_spec.h"

#include <cmath>
#include <tuple>
#include <utility>

#include "planner/program/job.h"
#include "planner/program/lower.h"
#include "planner/simulator/simulate.h"
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

}  // namespace

StepResult simulate_spec(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                         const ParallelSpec& spec, const Placements& placements, const Schedule& schedule,
                         std::span<const CostModel> models, Timeline* timeline, StepDetails* details) {
  const Job job = job_of(graph, cluster, training, spec, placements, schedule);
  return simulate(lower_representatives(job), models, timeline, details);
}

int steady_micro_batches(int stages) { return 4 * stages + 16; }

std::optional<SimulatedSpec> simulate_steady(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                                             const ParallelSpec& spec, const Placements& placements,
                                             const ScheduleRow& row, std::span<const CostModel> models,
                                             StepDetails* details) {
  const int stages = spec.stages();
  const int period = row.period(shape_of(spec, training));
  const std::int64_t all = micro_batches(spec, training);
  const auto shape = [&](int count) { return PipelineShape(spec.pp(), stages, count); };
  Job job = job_of(graph, cluster, training, spec, placements, {});
  std::int64_t played = 0;
  const auto programs_of = [&](int count) {
    played += count;
    job.training.global_batch = std::int64_t{count} * spec.mesh.batch_ranks() * spec.micro_batch;
    job.schedule = row.actions(shape(count));
    return lower_representatives(job);
  };
  const auto sent_by = [](std::span<const Program> programs) {
    std::vector<CommunicationVolume> sent;
    for (const Program& program : programs) sent.push_back(program.communication);
    return sent;
  };
  // The time to become steady, a window longer than any dependency reaches back, and the end of the
  // schedule; twice as many micro-batches where that was too short.
  StepResult result;
  std::vector<CommunicationVolume> sent;
  SteadyStep::Period added;
  std::int64_t times = 0;
  for (int some = steady_micro_batches(stages); times == 0; some *= 2) {
    some += static_cast<int>(((all - some) % period + period) % period);
    // It would save too little: details take up to three plays, the result mostly one.
    if (played + std::int64_t{details ? 3 : 2} * some > all) return std::nullopt;
    for (int rank = 0; rank < spec.pp(); ++rank)
      if (row.in_flight(rank, shape(some - period)) != row.in_flight(rank, shape(static_cast<int>(all))))
        return std::nullopt;
    std::vector<Program> programs = programs_of(some);
    SteadyStep step = simulate_until_steady(programs, models, stages, some - stages - 2, stages + 4, period);
    if (!step.steady) continue;
    const SteadyState steady = *step.steady;
    const int count = some + static_cast<int>((all - some) % steady.period);
    result = step.result;
    StepDetails before;
    if (count != some || details) {
      programs = programs_of(count);
      result = simulate(programs, models, nullptr, details);
    }
    sent = sent_by(programs);
    if (step.of_period && !details) {
      added = *std::move(step.of_period);
    } else {
      programs = programs_of(count - steady.period);
      const StepResult less = simulate(programs, models, nullptr, details ? &before : nullptr);
      const Seconds grown = result.time.total() - less.time.total();
      if (std::abs((grown - steady.later).value) > 1e-9 * steady.later.value || !(less.memory == result.memory))
        return std::nullopt;
      added = {.time = difference(result.time, less.time), .sent = {}};
      for (std::size_t r = 0; r < sent.size(); ++r)
        added.sent.push_back(difference(sent[r], programs[r].communication));
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

SimulatedSpec simulate_soon(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                            const ParallelSpec& spec, const Placements& placements, std::span<const CostModel> models,
                            StepDetails* details) {
  const ScheduleRow& row = row_of(spec.schedule);
  if (const std::optional<SimulatedSpec> steady =
          simulate_steady(graph, cluster, training, spec, placements, row, models, details))
    return *steady;
  const Schedule schedule = schedule_of(spec, training);
  return {.result = simulate_spec(graph, cluster, training, spec, placements, schedule, models, nullptr, details),
          .micro_batches = micro_batches(spec, training)};
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
