#pragma once

#include <optional>
#include <vector>

#include "planner/explain/explained_plan.h"
#include "planner/plan/reasons.h"
#include "planner/search/search.h"

namespace parplan {

// Says for each link of a node whether it belongs to the network: it lies on a device's way to the
// network and on no route between two devices. PCIe leads only to the NICs where NVLink joins the
// devices, and carries both where nothing else joins them.
std::vector<bool> network_links(const NodeKind& node);

// The cluster with more or less of one resource: devices that compute `factor` times as fast (every
// kernel takes 1 / factor of its time), or links or memory with `factor` times the bandwidth or
// capacity. The fabric between nodes carries what the NICs do, divided by its oversubscription, so
// it is varied with them. The host's rates are that of the link that each device has to it, as
// the first `devices` devices of a job (all of them where not given) share it in a node, and that
// of its memory; links inside nodes leave them as they are.
Cluster varied(Cluster cluster, Resource resource, double factor, std::optional<int> devices = {});

// The plan with twice of each resource whose gain needs no search: all but memory.
std::vector<Variation> double_without_searches(const ExplainedPlan& explained);

// What a layout scores at most that is better than the plan and no tie; nothing where the plan does
// not fit.
std::optional<Score> to_beat(const ExplainedPlan& explained, const Rival& plan);

// The present situation, next to the best plan that a search of the whole space found.
Variation as_things_are(const ExplainedPlan& explained, const SearchResult& found);

struct Variations {
  std::vector<Variation> twice;        // of each resource
  std::vector<Variation> sensitivity;  // a fifth less and more
};
// `is_best_of_all`: nothing in the whole space beats the plan in the present situation.
Variations vary_resources(const ExplainedPlan& explained, bool is_best_of_all);

}  // namespace parplan
