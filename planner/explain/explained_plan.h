#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "planner/base/parallel_for.h"
#include "planner/cost/cost_model.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/objective.h"
#include "planner/plan/plan.h"
#include "planner/schedule/schedules.h"
#include "planner/search/search.h"
#include "planner/search/simulated_steps.h"
#include "planner/simulator/block_shapes.h"

namespace parplan {

struct ReasonsOptions {
  // Without searches, reasons are limited to simulations of the plan and its neighbours.
  bool searches = true;
  std::int64_t most_simulated = 8;  // by each search
  int threads = 0;                  // 0: as many as the machine has cores, 16 at most; the reasons do not depend on it
  // May be empty; called by one thread at a time.
  std::function<void(const std::string& doing)> progress;
};

// A smaller improvement is a tie: sums of the same parts in another order differ by as much.
inline constexpr double noise = 1e-9;

// What every reason is found from. Keeps references to its arguments.
struct ExplainedPlan {
  const OpGraph& graph;
  const Plan& plan;
  const ReasonsOptions& options;
  // Whether the plan's order of actions is not its schedule's.
  bool has_own_order = plan.schedule != schedule_of(plan.spec, plan.training);
  std::shared_ptr<SimulatedSteps> steps = std::make_shared<SimulatedSteps>();
  std::shared_ptr<KnownBlockShapes> shapes = std::make_shared<KnownBlockShapes>();
  std::shared_ptr<std::mutex> speaks = std::make_shared<std::mutex>();

  void say(const std::string& doing) const;
  // In the plan's own schedule, which can be the user's, where it is one for `spec`.
  RankedPlan simulated(NetworkCache& networks, const TrainingSpec& training, const ParallelSpec& spec) const;
  // What all searches hold, so that they take little work: they look at hybrid sharding and, but
  // for long sequences, at context parallelism where the plan has it.
  LayoutRequest request() const;
  // Searches the space with `request`, and with the plan's own context parallelism, by the plan's
  // objective, in this thread alone. With a score to beat, as SearchOptions::to_beat.
  SearchResult searched(const Cluster& cluster, const TrainingSpec& training, int top,
                        std::optional<Score> to_beat = {}) const;
  Objective objective() const { return plan.search.objective; }
  int threads() const { return options.threads > 0 ? options.threads : threads_of_this_machine(); }
  Score score_of(const RankedPlan& of) const;
};

}  // namespace parplan
