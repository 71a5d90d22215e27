#pragma once

#include <optional>
#include <string>

#include "planner/base/units.h"
#include "planner/cluster/cluster.h"

namespace parplan {

// The running costs of a cluster's devices. A plan of n devices uses the first n of the cluster,
// group by group.

// How many of the first `devices` devices belong to group `group`.
int devices_of_group(const Cluster& cluster, std::size_t group, int devices);

// The nodes that hold the first `devices` devices.
Cluster first_nodes(const Cluster& cluster, int devices);

// The currency of all prices of the cluster's groups; nothing without prices, or where they differ.
std::optional<std::string> currency(const Cluster& cluster);

// The reason why the groups' prices cannot be added: they are in different currencies.
std::optional<std::string> problem_with_prices(const Cluster& cluster);

// Names the groups without a price where others have one, so that plans that use them have no cost;
// nothing where all have one or none has.
std::optional<std::string> missing_prices(const Cluster& cluster);

// The cost of the first `devices` devices for an hour, in `currency`; nothing where one of them has
// no price.
std::optional<double> hourly_price(const Cluster& cluster, int devices);

// The rated power of the boards of the first `devices` devices together; nothing where one of them
// has none.
std::optional<Watts> board_power(const Cluster& cluster, int devices);

}  // namespace parplan
