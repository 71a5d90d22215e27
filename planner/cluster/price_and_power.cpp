#include "planner/cluster/price_and_power.h"

#include <algorithm>

#include <fmt/format.h>

#include "planner/base/text.h"

namespace parplan {
namespace {

// The sum of a per-device value of the groups over the first devices, where all of these groups
// have one.
template <class Value>
std::optional<double> sum_over_devices(const Cluster& cluster, int devices, Value value_of_one) {
  double sum = 0.0;
  for (std::size_t g = 0; g < cluster.groups.size(); ++g) {
    const int taken = devices_of_group(cluster, g, devices);
    if (taken == 0) continue;
    const std::optional<double> value = value_of_one(cluster.groups[g]);
    if (!value) return std::nullopt;
    sum += taken * *value;
  }
  return sum;
}

}  // namespace

int devices_of_group(const Cluster& cluster, std::size_t group, int devices) {
  int before = 0;
  for (std::size_t g = 0; g < group; ++g) before += cluster.groups[g].devices();
  return std::clamp(devices - before, 0, cluster.groups[group].devices());
}

Cluster first_nodes(const Cluster& cluster, int devices) {
  Cluster first = cluster;
  first.groups.clear();
  for (std::size_t g = 0; g < cluster.groups.size(); ++g) {
    const int taken = devices_of_group(cluster, g, devices);
    if (taken == 0) break;
    first.groups.push_back(cluster.groups[g]);
    first.groups.back().nodes = static_cast<int>(ceil_div(taken, cluster.groups[g].devices_per_node()));
  }
  return first;
}

std::optional<std::string> currency(const Cluster& cluster) {
  std::optional<std::string> found;
  for (const NodeGroup& group : cluster.groups) {
    if (!group.price) continue;
    if (found && *found != group.price->currency) return std::nullopt;
    found = group.price->currency;
  }
  return found;
}

std::optional<std::string> problem_with_prices(const Cluster& cluster) {
  const NodeGroup* first = nullptr;
  for (const NodeGroup& group : cluster.groups) {
    if (!group.price) continue;
    if (first == nullptr) first = &group;
    else if (first->price->currency != group.price->currency)
      return fmt::format(
          "cluster '{}': {} costs {} and {} costs {}, and currencies cannot be added; give all prices in one currency",
          cluster.name, first->device.name, write_price(*first->price), group.device.name, write_price(*group.price));
  }
  return std::nullopt;
}

std::optional<std::string> missing_prices(const Cluster& cluster) {
  std::vector<std::string> without;
  for (const NodeGroup& group : cluster.groups)
    if (!group.price)
      without.push_back(fmt::format("{} ({} node{})", group.device.name, group.nodes, group.nodes == 1 ? "" : "s"));
  if (without.empty() || without.size() == cluster.groups.size()) return std::nullopt;
  return fmt::format(
      "no price is known of {}, so that plans with devices of it have no cost: give its group a 'price', or all "
      "devices one with --price",
      join(without));
}

std::optional<double> hourly_price(const Cluster& cluster, int devices) {
  if (!currency(cluster)) return std::nullopt;
  return sum_over_devices(cluster, devices, [](const NodeGroup& group) {
    return group.price ? std::optional<double>(group.price->per_device_hour) : std::nullopt;
  });
}

std::optional<Watts> board_power(const Cluster& cluster, int devices) {
  const std::optional<double> sum = sum_over_devices(cluster, devices, [](const NodeGroup& group) {
    return group.device.power ? std::optional<double>(group.device.power->value) : std::nullopt;
  });
  return sum ? std::optional<Watts>(*sum) : std::nullopt;
}

}  // namespace parplan
