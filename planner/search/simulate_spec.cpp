#include "planner/search/simulate_spec.h"

#include <cmath>

#include "planner/program/job.h"
#include "planner/program/lower.h"
#include "planner/simulator/simulate.h"
#include "planner/simulator/steady_state.h"

namespace parplan {

StepResult simulate_spec(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                         const ParallelSpec& spec, const Placements& placements, const Schedule& schedule,
                         std::span<const CostModel> models, Timeline* timeline) {
  const Job job = job_of(graph, cluster, training, spec, placements, schedule);
  return simulate(lower_representatives(job), models, timeline);
}

int steady_micro_batches(int stages) { return 6 * stages + 24; }

std::optional<StepResult> simulate_steady(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                                          const ParallelSpec& spec, const Placements& placements,
                                          const ScheduleRow& row, std::span<const CostModel> models) {
  const int stages = spec.stages();
  const int period = row.period(shape_of(spec, training));
  const std::int64_t all = micro_batches(spec, training);
  // The time to become steady, a window longer than any dependency reaches back, and the end of the
  // schedule.
  int some = steady_micro_batches(stages);
  some += static_cast<int>(((all - some) % period + period) % period);
  if (all < 3 * some) return std::nullopt;  // it would save too little
  const auto shape = [&](int count) { return PipelineShape(spec.pp(), stages, count); };
  for (int rank = 0; rank < spec.pp(); ++rank)
    if (row.in_flight(rank, shape(some - period)) != row.in_flight(rank, shape(static_cast<int>(all))))
      return std::nullopt;
  Job job = job_of(graph, cluster, training, spec, placements, {});
  std::vector<Program> programs;
  const auto play = [&](int count, std::vector<CallEnds>* ends) {
    job.training.global_batch = count * spec.mesh.batch_ranks() * spec.micro_batch;
    job.schedule = row.actions(shape(count));
    programs = lower_representatives(job);
    return simulate(programs, models, nullptr, nullptr, ends);
  };
  const StepResult before = play(some - period, nullptr);
  std::vector<CommunicationVolume> sent_before;
  for (const Program& program : programs) sent_before.push_back(program.communication);
  std::vector<CallEnds> ends;
  StepResult result = play(some, &ends);
  const int window = stages + 4;
  const std::optional<Seconds> later =
      steady_seconds(programs, ends, some - stages - 2 - period - window, window, period);
  const Seconds grown = result.time.total() - before.time.total();
  if (!later || std::abs((grown - *later).value) > 1e-9 * later->value || !(before.memory == result.memory))
    return std::nullopt;

  const std::int64_t times = (all - some) / period;
  StepTime of_period = result.time;
  StepTime less = before.time;
  less *= -1.0;
  of_period += less;
  of_period *= static_cast<double>(times);
  result.time += of_period;
  Bytes most(-1);
  for (std::size_t s = 0; s < programs.size(); ++s) {
    CommunicationVolume sent = programs[s].communication;
    const auto extend = [&](Bytes& volume, Bytes shorter) { volume += (volume - shorter) * times; };
    for (const Axis axis : all_axes) extend(sent[axis], sent_before[s][axis]);
    if (const Bytes in_all = sum(sent); in_all > most) {
      most = in_all;
      result.communication = sent;
    }
  }
  return result;
}

SimulatedSpec simulate_soon(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                            const ParallelSpec& spec, const Placements& placements, std::span<const CostModel> models) {
  const ScheduleRow& row = row_of(spec.schedule);
  if (const std::optional<StepResult> steady = simulate_steady(graph, cluster, training, spec, placements, row, models))
    return {.result = *steady, .in_full = false};
  return {
      .result = simulate_spec(graph, cluster, training, spec, placements, schedule_of(spec, training), models, nullptr),
      .in_full = true};
}

StepResult simulate_spec(const OpGraph& graph, NetworkCache& networks, const TrainingSpec& training,
                         const ParallelSpec& spec, const Placements& placements, const Schedule& schedule,
                         Timeline* timeline) {
  return simulate_spec(graph, networks.cluster(), training, spec, placements, schedule,
                       cost_models(networks, spec.mesh), timeline);
}

}  // namespace parplan
