#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "planner/explain/best_among.h"
#include "planner/explain/explained_plan.h"
#include "planner/plan/reasons.h"
#include "planner/search/candidates.h"

namespace parplan {

// A family of layouts, as degrees of the axes: one where nothing else is said, or several; a degree
// of several can further ask that every group lie inside one node, or that some group lie across
// nodes.
enum class Degree { one, several, inside_node, across_nodes, any };
struct LayoutFamily {
  std::string_view name;
  PerAxis<Degree> degree;
  std::optional<int> zero_stage = {};
};
std::span<const LayoutFamily> layout_families();
bool belongs(const LayoutFamily& family, const ParallelSpec& spec, NetworkCache& networks);

struct Families {
  std::vector<FamilyBest> best;  // of each family that the devices allow
  // What was searched for on them beside the plan and its alternatives: tensor parallelism across
  // nodes; nothing where they do not allow it.
  std::optional<BestAmong> across_nodes;
};
Families find_families(const ExplainedPlan& explained);

// Tensor groups of adjacent devices, on the largest number of devices that `tp` divides.
DeviceMesh adjacent_tensor_groups(int devices, int tp);
bool tensor_inside_nodes(const DeviceMesh& mesh, NetworkCache& networks);

}  // namespace parplan
