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

// A step's parts, with what `times` more periods add to them.
StepTime extended(StepTime time, const StepTime& a_period_less, std::int64_t times) {
  StepTime of_periods = a_period_less;
  of_periods *= -1.0;
  of_periods += time;
  of_periods *= static_cast<double>(times);
  return time += of_periods;
}
CommunicationVolume extended(CommunicationVolume volume, const CommunicationVolume& a_period_less,
                             std::int64_t times) {
  for (const Axis axis : all_axes) volume[axis] += (volume[axis] - a_period_less[axis]) * times;
  return volume;
}

// False where the longer step's critical path lacks work that the shorter one's has.
bool extend(StepDetails& details, const StepDetails& a_period_less, std::int64_t times) {
  for (std::size_t r = 0; r < details.ranks.size(); ++r) {
    RankResult& rank = details.ranks[r];
    rank.time = extended(rank.time, a_period_less.ranks[r].time, times);
    rank.communication = extended(rank.communication, a_period_less.ranks[r].communication, times);
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
  std::vector<Program> programs;
  std::int64_t played = 0;
  const auto play = [&](int count, StepDetails* detailed, std::vector<CallEnds>* ends) {
    played += count;
    job.training.global_batch = count * spec.mesh.batch_ranks() * spec.micro_batch;
    job.schedule = row.actions(shape(count));
    programs = lower_representatives(job);
    return simulate(programs, models, nullptr, detailed, ends);
  };
  // The time to become steady, a window longer than any dependency reaches back, and the end of the
  // schedule; twice as many micro-batches where that was too short.
  int some = steady_micro_batches(stages);
  StepResult result, before;
  StepDetails of_result, of_before;
  std::vector<CommunicationVolume> sent;
  std::optional<SteadyState> steady;
  for (;; some *= 2) {
    some += static_cast<int>(((all - some) % period + period) % period);
    if (all < 3 * some) return std::nullopt;  // it would save too little
    for (int rank = 0; rank < spec.pp(); ++rank)
      if (row.in_flight(rank, shape(some - period)) != row.in_flight(rank, shape(static_cast<int>(all))))
        return std::nullopt;
    std::vector<CallEnds> ends;
    result = play(some, details ? &of_result : nullptr, &ends);
    steady = find_steady_state(programs, ends, stages, some - stages - 2, stages + 4, period, details != nullptr);
    if (!steady) continue;
    if (const auto remainder = static_cast<int>((all - some) % steady->period); remainder != 0)
      result = play(some += remainder, details ? &of_result : nullptr, nullptr);
    sent.clear();
    for (const Program& program : programs) sent.push_back(program.communication);
    before = play(some - steady->period, details ? &of_before : nullptr, nullptr);
    if (!(before.memory == result.memory)) return std::nullopt;
    // Otherwise the step ends with what does not keep pace, but still lags behind from its beginning.
    const Seconds grown = result.time.total() - before.time.total();
    if (std::abs((grown - steady->later).value) <= 1e-9 * steady->later.value) break;
  }

  const std::int64_t times = (all - some) / steady->period;
  result.time = extended(result.time, before.time, times);
  if (details) {
    if (!extend(of_result, of_before, times)) return std::nullopt;
    *details = std::move(of_result);
  }
  Bytes most(-1);
  for (std::size_t s = 0; s < programs.size(); ++s) {
    const CommunicationVolume volume = extended(sent[s], programs[s].communication, times);
    if (const Bytes in_all = sum(volume); in_all > most) {
      most = in_all;
      result.communication = volume;
    }
  }
  return SimulatedSpec{.result = result, .micro_batches = played};
}

SimulatedSpec simulate_soon(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                            const ParallelSpec& spec, const Placements& placements, std::span<const CostModel> models,
                            StepDetails* details) {
  const ScheduleRow& row = row_of(spec.schedule);
  if (std::optional<SimulatedSpec> steady =
          simulate_steady(graph, cluster, training, spec, placements, row, models, details))
    return *std::move(steady);
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
