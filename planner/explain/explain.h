#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/cost/cost_model.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/explanation.h"

namespace parplan {

struct ReasonsOptions {
  bool searches = true;             // without: only what simulations of the plan and its neighbours say
  std::int64_t most_simulated = 8;  // by each search
  std::function<void(const std::string& doing)> progress;  // may be empty
};

// The plan with the prediction that it has now. Where that is not the file's (another time by 1e-6
// of it or more, other memory), the plan was edited, or written by another version: a note says so,
// and the alternatives and counts of its search, which speak of another, are gone.
Plan simulated_anew(const OpGraph& graph, Plan plan);

// Why the plan is as it is, its prediction being simulated_anew: the plan simulated stage by stage,
// layouts one choice away, the best of each family, the rules of the guides as numbers, and the
// search made anew with more and less of everything.
Reasons find_reasons(const OpGraph& graph, const Plan& plan, const ReasonsOptions& options);

// From published runs in tests/data/published, which a test simulates anew. They are of one kind of
// GPU: nothing for a cluster of others.
std::optional<ModelError> model_error(const Cluster& cluster);

// A family of layouts as degrees: each of one or of several; of several whose groups lie inside a
// node each, or of which one lies across nodes.
enum class Degree { one, several, inside_node, across_nodes, any };
struct LayoutFamily {
  std::string_view name;
  Degree dp{}, tp{}, pp{};
  std::optional<int> zero_stage;
};
std::span<const LayoutFamily> layout_families();
bool belongs(const LayoutFamily& family, const ParallelSpec& spec, NetworkCache& networks);

// Says for each link of a node whether it belongs to the network: it is on a device's way there,
// and on no route between two devices. PCIe leads to the NICs alone where NVLink joins the devices,
// and carries both where nothing else does.
std::vector<bool> network_links(const NodeKind& node);

// The cluster with more or less of one resource: devices that compute `factor` times as fast (every
// kernel takes 1 / factor of its time), links that carry, or memory that holds, `factor` times as
// much. The fabric between nodes carries what the NICs do, by its oversubscription: it is varied
// with them.
Cluster varied(Cluster cluster, Resource resource, double factor);

}  // namespace parplan
