#include "planner/search/simulate_spec.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "planner/plan/unlike_replicas.h"
#include "planner/program/job.h"
#include "planner/program/lower.h"
#include "planner/simulator/repeating_step.h"
#include "planner/simulator/simulate.h"
#include "planner/simulator/steady_state.h"

namespace parplan {
namespace {

// The step of a layout under a schedule's own order of actions. A long one is lowered with few
// micro-batches, from which the others follow: its middle repeats itself.
class LayoutStep {
 public:
  // `replicas`: unlike_replicas.
  LayoutStep(Job job, const ParallelSpec& spec, std::vector<int> replicas, const ScheduleRow& row,
             std::span<const CostModel> models, bool with_details, LoweredSteps* known = nullptr,
             KnownBlocks* blocks = nullptr)
      : job_(std::move(job)),
        spec_(spec),
        replicas_(std::move(replicas)),
        row_(row),
        group_(shape_of(spec, job_.training).group),
        models_(models),
        with_details_(with_details),
        known_(known),
        blocks_(blocks),
        all_(static_cast<int>(micro_batches(job_.layout, job_.training))) {}

  int micro_batches_in_all() const { return all_; }
  // Nothing where that would not be much shorter, or has more memory in use; nor for replicas with
  // unlike numbers of micro-batches, which end their steps at different times.
  std::optional<RepeatingStep> repeating() {
    if (!job_.layout.replica_micro_batches.empty()) return std::nullopt;
    int least = 0;
    for (int rank = 0; rank < pipeline_ranks(); ++rank) least = std::max(least, least_micro_batches(rank));
    for (int some = least; 2 * some <= all_; some *= 2) {
      some += (all_ - some) % period();
      if (!fills_pipeline(some)) continue;
      std::optional<RepeatingStep> step = repeating_step(lowered_by_rank(some), some, period());
      if (!step) continue;
      const int rest = (all_ - some) % step->period;
      if (rest == 0) return step;
      some += rest;
      step = repeating_step(lowered_by_rank(some), some, step->period);
      if (step.has_value() && (all_ - some) % step.value().period == 0) return step;
    }
    return std::nullopt;
  }
  Simulation in_full() {
    set_micro_batches(all_);
    return prepared(lowered_step(lower_replicas(job_, replicas_, blocks_)));
  }

 private:
  int pipeline_ranks() const { return job_.layout.mesh.degree_of(Axis::pp); }
  int stages() const { return static_cast<int>(job_.layout.stages.size()); }
  PipelineShape shape(int micro_batches) const { return {pipeline_ranks(), stages(), micro_batches, group_}; }
  // Whether a step with so many micro-batches has as many in flight as the layout's own.
  bool fills_pipeline(int micro_batches) const {
    for (int rank = 0; rank < pipeline_ranks(); ++rank)
      if (row_.in_flight(rank, shape(micro_batches)) != row_.in_flight(rank, shape(all_))) return false;
    return true;
  }
  int period() const { return row_.period(shape(all_)); }
  // In which a rank's middle surely shows that it repeats itself: beside those in flight two
  // periods, and some more for how the pipeline fills and drains. Where these do not suffice, more
  // are lowered.
  int least_micro_batches(int rank) const {
    // In the shape of a V, as many of both stages make sure that the schedule is not cut short.
    const int stages_of_rank = is_v_shaped(row_.kind) ? 1 : stages() / pipeline_ranks();
    const auto in_flight = ceil_div(row_.in_flight(rank, shape(all_)), stages_of_rank);
    return static_cast<int>(in_flight) + std::max(16, 2 * period() + 4);
  }
  void set_micro_batches(int count) {
    if (count != now_) job_.training.global_batch = job_.training.global_batch / now_ * count;
    now_ = count;
    job_.schedule = row_.actions(shape(count));
  }
  Simulation prepared(std::vector<PlayList> lists) const {
    return prepare(step_->programs, std::move(lists), models_,
                   with_details_ ? CallsInARow::apart : CallsInARow::joined, with_details_);
  }
  Simulation prepared(LoweredStep step) {
    std::vector<PlayList> lists = std::move(step.lists);
    step_ = std::make_shared<const LoweredStep>(std::move(step));
    return prepared(std::move(lists));
  }
  // Ready to be played; until the next one is lowered.
  Simulation lowered(int micro_batches) {
    set_micro_batches(micro_batches);
    return prepared(lowered_step(lower_representatives(job_, blocks_)));
  }
  // The same. The last ranks of a pipeline have fewer micro-batches in flight than the first, and
  // are lowered with fewer.
  Simulation lowered_by_rank(int micro_batches) {
    std::map<int, std::vector<int>> ranks;  // by micro-batches to lower
    std::vector<int> counts;                // of these, by rank
    for (int rank = 0; rank < pipeline_ranks(); ++rank) {
      // Whole repetitions, whichever multiple of the period these are.
      const int whole = 12 * period(), fewer = (micro_batches - least_micro_batches(rank)) / whole * whole;
      counts.push_back(micro_batches - fewer);
      ranks[counts.back()].push_back(rank);
    }
    const auto lower = [&] {
      std::vector<Program> all(static_cast<std::size_t>(pipeline_ranks()));
      for (const auto& [count, alike] : ranks) {
        set_micro_batches(count);
        std::vector<Program> programs = lower_representatives(job_, alike, blocks_);
        for (std::size_t i = 0; i < alike.size(); ++i) all[alike[i]] = std::move(programs[i]);
      }
      return lowered_step(std::move(all));
    };
    if (known_ != nullptr) step_ = known_->of(spec_, job_, counts, group_, lower);
    Simulation step = known_ != nullptr ? prepared(step_->lists) : prepared(lower());
    for (const auto& [count, alike] : ranks)
      for (const int rank : alike)
        if (!extend(step.ranks[rank], micro_batches - count)) return lowered(micro_batches);
    return step;
  }
  // False where its middle does not repeat itself.
  bool extend(PlayedRank& rank, int micro_batches) const {
    for (int period_of = period(); micro_batches > 0; period_of += period()) {
      if (micro_batches % period_of != 0) return false;
      const std::optional<Repeat> repeat = find_repeat(rank.list, period_of);
      if (!repeat) continue;
      rank.list = extended(rank.list, *repeat, micro_batches / period_of, sent_by_segment(rank));
      break;
    }
    return true;
  }

  Job job_;
  const ParallelSpec& spec_;
  std::vector<int> replicas_;
  const ScheduleRow& row_;
  int group_ = 1;  // micro-batches
  std::span<const CostModel> models_;
  bool with_details_ = false;
  LoweredSteps* known_;
  KnownBlocks* blocks_;
  int all_ = 0;
  int now_ = all_;  // micro-batches of `job_`
  std::shared_ptr<const LoweredStep> step_;  // the one lowered last
};

std::optional<SimulatedSpec> play_steady(LayoutStep& layout, StepDetails* details) {
  const std::optional<RepeatingStep> step = layout.repeating();
  if (!step) return std::nullopt;
  const ExtendedStep played = play_until_steady(*step, layout.micro_batches_in_all(), details);
  return SimulatedSpec{.result = played.result, .micro_batches = played.micro_batches};
}

}  // namespace

StepResult simulate_spec(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                         const ParallelSpec& spec, const Placements& placements, const Schedule& schedule,
                         std::span<const CostModel> models, Timeline* timeline, StepDetails* details,
                         KnownBlocks* blocks) {
  const Job job = job_of(graph, cluster, training, spec, placements, schedule);
  return simulate(lower_replicas(job, unlike_replicas(cluster, spec), blocks), models, timeline, details);
}

std::optional<SimulatedSpec> simulate_steady(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                                             const ParallelSpec& spec, const Placements& placements,
                                             const ScheduleRow& row, std::span<const CostModel> models,
                                             StepDetails* details) {
  LayoutStep layout(job_of(graph, cluster, training, spec, placements, {}), spec, unlike_replicas(cluster, spec), row,
                    models, details != nullptr);
  return play_steady(layout, details);
}

SimulatedSpec simulate_soon(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                            const ParallelSpec& spec, const Placements& placements, std::span<const CostModel> models,
                            StepDetails* details, LoweredSteps* known, KnownBlocks* blocks) {
  LayoutStep layout(job_of(graph, cluster, training, spec, placements, {}), spec, unlike_replicas(cluster, spec),
                    row_of(spec.schedule), models, details != nullptr, known, blocks);
  if (const std::optional<SimulatedSpec> steady = play_steady(layout, details)) return *steady;
  Simulation step = layout.in_full();
  return {.result = play_step(step, details), .micro_batches = layout.micro_batches_in_all()};
}

StepResult simulate_soon(const OpGraph& graph, NetworkCache& networks, const Plan& plan, StepDetails* details) {
  const std::vector<CostModel> models = cost_models(networks, plan.spec);
  if (plan.schedule == schedule_of(plan.spec, plan.training))
    return simulate_soon(graph, plan.cluster, plan.training, plan.spec, plan.placements, models, details).result;
  return simulate_spec(graph, plan.cluster, plan.training, plan.spec, plan.placements, plan.schedule, models, nullptr,
                       details);
}

StepResult simulate_spec(const OpGraph& graph, NetworkCache& networks, const TrainingSpec& training,
                         const ParallelSpec& spec, const Placements& placements, const Schedule& schedule,
                         Timeline* timeline, KnownBlocks* blocks) {
  return simulate_spec(graph, networks.cluster(), training, spec, placements, schedule, cost_models(networks, spec),
                       timeline, nullptr, blocks);
}

}  // namespace parplan
