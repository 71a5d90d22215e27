#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "planner/cost/cost_model.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"
#include "planner/plan/plan.h"
#include "planner/plan/schedule.h"
#include "planner/plan/step_details.h"
#include "planner/plan/step_result.h"
#include "planner/program/known_blocks.h"
#include "planner/schedule/schedules.h"
#include "planner/search/lowered_steps.h"
#include "planner/simulator/timeline.h"

namespace parplan {

// Lowers one candidate with a given stage cut, and simulates the Programs, one for each rank of
// the pipeline with its cost model. `timeline` and `details` may be null; so may `blocks`, which
// keeps lowered blocks for other candidates of the model.
StepResult simulate_spec(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                         const ParallelSpec& spec, const Placements& placements, const Schedule& schedule,
                         std::span<const CostModel> models, Timeline* timeline, StepDetails* details = nullptr,
                         KnownBlocks* blocks = nullptr);
// How a step was simulated.
struct SimulatedSpec {
  StepResult result;
  std::int64_t micro_batches = 0;  // that were played to find it
};
// The same under the row's order of calls, lowered with few micro-batches and played until it is
// steady (planner/simulator/steady_state.h), equal up to rounding; nothing where it could not be
// lowered with fewer than half of the micro-batches, or all of them are in flight at once.
std::optional<SimulatedSpec> simulate_steady(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                                             const ParallelSpec& spec, const Placements& placements,
                                             const ScheduleRow& row, std::span<const CostModel> models,
                                             StepDetails* details = nullptr);
// The shorter one if possible, otherwise the full one, under the schedule's own order of calls.
// `known` keeps what is lowered for a shorter one; may be null, as `blocks`.
SimulatedSpec simulate_soon(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                            const ParallelSpec& spec, const Placements& placements, std::span<const CostModel> models,
                            StepDetails* details = nullptr, LoweredSteps* known = nullptr,
                            KnownBlocks* blocks = nullptr);
// The same for a plan, whose order of calls may be its own.
StepResult simulate_soon(const OpGraph& graph, NetworkCache& networks, const Plan& plan,
                         StepDetails* details = nullptr);
// In full, with cost models from the cluster's networks.
StepResult simulate_spec(const OpGraph& graph, NetworkCache& networks, const TrainingSpec& training,
                         const ParallelSpec& spec, const Placements& placements, const Schedule& schedule,
                         Timeline* timeline, KnownBlocks* blocks = nullptr);

}  // namespace parplan
