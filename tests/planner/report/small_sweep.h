#pragma once

#include <string>
#include <vector>

#include "planner/report/sweep.h"
#include "tests/planner/report/small_plan.h"

namespace parplan::testing {

// `nodes` nodes of 4 devices at 3 USD per hour and 250 W each, all of them used; a step of 20
// tokens takes `step` seconds.
inline SweepPoint planned_point(const std::string& cluster, int nodes, double step) {
  const Plan plan = small_plan();
  SweepPoint point{.model = plan.model,
                   .cluster = plan.cluster,
                   .training = plan.training,
                   .best = RankedPlan{plan.spec, plan.prediction},
                   .search = plan.search,
                   .reason = {},
                   .arranged = {}};
  point.cluster.name = cluster;
  NodeGroup& group = point.cluster.groups.front();
  group.nodes = nodes;
  group.price = Price{3.0, "USD"};
  group.device.power = Watts(250.0);
  point.best->spec.mesh.degree = {.pp = 2, .dp = 2 * nodes};
  point.best->result.time *= step / plan.prediction.time.total().value;
  return point;
}

inline SweepPoint point_without_plan(const std::string& cluster) {
  SweepPoint point = planned_point(cluster, 1, 10.0);
  point.best.reset();
  point.reason = "none of 12 candidates fits in 1000 B of memory a device";
  return point;
}

inline Sweep small_sweep() {
  Sweep sweep;
  sweep.version = "0";
  sweep.points.push_back(planned_point("four", 1, 10.0));
  return sweep;
}

// Fields of each line (RFC 4180).
inline std::vector<std::vector<std::string>> read_csv(const std::string& text) {
  std::vector<std::vector<std::string>> lines;
  std::vector<std::string> line;
  std::string field;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c != '"') field += c;
      else if (i + 1 < text.size() && text[i + 1] == '"') field += text[++i];
      else quoted = false;
    } else if (c == '"') {
      quoted = true;
    } else if (c == ',' || c == '\n') {
      line.push_back(field);
      field.clear();
      if (c == '\n') {
        lines.push_back(line);
        line.clear();
      }
    } else if (c != '\r') {
      field += c;
    }
  }
  return lines;
}

}  // namespace parplan::testing
