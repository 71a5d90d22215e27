#pragma once

#include <string>

#include "planner/base/json.h"
#include "planner/cluster/cluster.h"

namespace parplan {

// For people: each kind of node with the rates of its devices, a matrix of the paths between
// devices and NICs as nvidia-smi topo -m prints it, with rates, and the levels of the network.
std::string describe(const Cluster& cluster);

// The same as a graph in Graphviz's DOT language, undirected: one node of each kind with its links,
// and the network's levels.
std::string draw_graphviz(const Cluster& cluster);

// parplan.topology/1 (docs/json.md).
Json topology_json(const Cluster& cluster, const std::string& version);

}  // namespace parplan
