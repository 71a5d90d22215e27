#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "planner/cluster/cluster.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/plan.h"
#include "planner/search/space.h"

namespace parplan {

struct SearchOptions {
  int top = 10;                         // plans to rank
  std::optional<Bytes> memory_limit;    // of a device; its capacity otherwise
  std::int64_t most_simulated = 64;     // programs are simulated for at most so many candidates
  bool fewer_devices = true;            // also plans that leave devices idle
  std::function<void(std::int64_t done, std::int64_t of)> progress;  // may be empty
};

struct SearchResult {
  std::vector<RankedPlan> plans;  // by simulated time; ties by the order of the space
  SearchCounts counts;
  // The candidate that needs least memory, where none fits.
  std::optional<RankedPlan> smallest;
};

// Estimates every candidate of the space, rejects those that do not fit, and simulates best-first until no
// unsimulated candidate's lower bound beats the worst of the best `top`, or `most_simulated` is reached.
SearchResult search(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training, const LayoutRequest& request,
                    const SearchOptions& options);

}  // namespace parplan
