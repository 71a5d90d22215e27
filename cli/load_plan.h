#pragma once

#include <string>

#include "planner/graph/op_graph.h"
#include "planner/plan/plan.h"

namespace parplan {

// A plan that was read from a file and its model's graph, checked against each other.
struct LoadedPlan {
  Plan plan;
  OpGraph graph;
};
LoadedPlan load_plan(const std::string& path);
LoadedPlan load_plan(const std::string& text, const std::string& path);
bool is_plan_file(const std::string& path);

}  // namespace parplan
