#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "planner/cost/cost_model.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/objective.h"
#include "planner/plan/plan.h"
#include "planner/search/search.h"

namespace parplan {

struct ReasonsOptions {
  bool searches = true;             // without: only what simulations of the plan and its neighbours say
  std::int64_t most_simulated = 8;  // by each search
  std::function<void(const std::string& doing)> progress;  // may be empty
};

// Better by a smaller part is a tie: sums of the same parts in another order differ by as much.
inline constexpr double noise = 1e-9;

// All that a reason is found from. Refers to what it is made of.
struct Inquiry {
  const OpGraph& graph;
  const Plan& plan;
  const ReasonsOptions& options;

  void say(const std::string& doing) const;
  // In the plan's own schedule, which may be of the user's making, where it is one for `spec`.
  RankedPlan simulated(NetworkCache& networks, const TrainingSpec& training, const ParallelSpec& spec) const;
  // The whole space, by the plan's objective.
  SearchResult searched(const Cluster& cluster, const TrainingSpec& training, int top) const;
  Objective objective() const { return plan.search.objective; }
  Score score_of(const RankedPlan& of) const;
};

}  // namespace parplan
