#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "planner/cluster/cluster.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/plan.h"
#include "planner/plan/objective.h"
#include "planner/search/space.h"

namespace parplan {

struct SearchOptions {
  int top = 10;                         // plans to rank
  Objective objective = Objective::time;
  std::int64_t most_simulated = 64;     // programs are simulated for at most so many candidates; 0: only what fits is asked
  bool fewer_devices = true;            // also plans that leave devices idle
  int threads = 0;                      // 0: as many as the machine has cores; the result is the same for any number
  std::function<void(std::int64_t done, std::int64_t of)> progress;  // may be empty
};

struct SearchResult {
  // Best by the objective first, simulated; ties by the order of the space. Of candidates that differ in the order of axes alone, and to
  // whose groups the links are the same, the first.
  std::vector<RankedPlan> plans;
  SearchCounts counts;
  // The candidate that needs least memory: of those that fit, or of all where none does. Its times are estimated; its memory is what a
  // simulation would say.
  std::optional<RankedPlan> smallest;
};

// Estimates every candidate of the space (candidates.h), rejects those that do not fit, and simulates in the order of lower bounds until
// no unsimulated candidate's bound beats the worst of the best `top`, or `most_simulated` is reached.
SearchResult search(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training, const LayoutRequest& request,
                    const SearchOptions& options);

}  // namespace parplan
