#pragma once

#include <vector>

#include "planner/explain/inquiry.h"
#include "planner/plan/explanation.h"
#include "planner/search/search.h"

namespace parplan {

// Says for each link of a node whether it belongs to the network: it is on a device's way there,
// and on no route between two devices. PCIe leads to the NICs alone where NVLink joins the devices,
// and carries both where nothing else does.
std::vector<bool> network_links(const NodeKind& node);

// The cluster with more or less of one resource: devices that compute `factor` times as fast (every
// kernel takes 1 / factor of its time), links that carry, or memory that holds, `factor` times as
// much. The fabric between nodes carries what the NICs do, by its oversubscription: it is varied
// with them.
Cluster varied(Cluster cluster, Resource resource, double factor);

// The plan with twice of each resource whose gain needs no search: all but memory.
std::vector<Variation> double_without_searches(const Inquiry& inquiry);

// As things are, beside the best that a search of the whole space found.
Variation as_things_are(const Inquiry& inquiry, const SearchResult& found);

struct Variations {
  std::vector<Variation> twice;        // of each resource
  std::vector<Variation> sensitivity;  // a fifth less and more
};
// `is_best_of_all`: nothing in the whole space is better than the plan as things are.
Variations vary_resources(const Inquiry& inquiry, bool is_best_of_all);

}  // namespace parplan
