#include "planner/cluster/node_traffic.h"

#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "planner/base/error.h"

namespace parplan {
namespace {

const std::vector<Uplink>& uplinks_of(const NodeRoutes& routes, int device) {
  const auto& uplinks = routes.uplinks[device];
  PARPLAN_ASSERT(!uplinks.empty(),
                 "device " + std::to_string(device) + " of " + routes.node.name + " reaches no network");
  return uplinks;
}

void add_sent(const Uplink& uplink, double share, NodeLoad& load) {
  for (const Arc arc : uplink.path.arcs) load.arcs[arc] += share;
}

// The share of each rail (NIC, in the order of NodeRoutes::nics) in the traffic that `devices` send
// evenly.
std::vector<double> rail_shares(const NodeRoutes& routes, const std::vector<int>& devices) {
  std::vector<double> shares(routes.nics.size(), 0.0);
  for (const int device : devices)
    for (const Uplink& uplink : uplinks_of(routes, device))
      shares[std::ranges::find(routes.nics, uplink.nic) - routes.nics.begin()] +=
          uplink.share / static_cast<double>(devices.size());
  return shares;
}

// Where rail r of a node is entered from inside: the first device that uses its NIC.
struct RailEntry {
  int device = 0;
  const Uplink* uplink = nullptr;
};
std::optional<RailEntry> entry_of(const NodeRoutes& routes, std::size_t rail) {
  for (std::size_t device = 0; device < routes.uplinks.size(); ++device)
    for (const Uplink& uplink : routes.uplinks[device])
      if (uplink.nic == routes.nics[rail]) return RailEntry{.device = static_cast<int>(device), .uplink = &uplink};
  return std::nullopt;
}

// From the first member on, always the nearest remaining member, ties to the lowest rank.
std::vector<int> nearest_next(const NodeRoutes& routes, std::vector<int> members) {
  for (std::size_t i = 1; i + 1 < members.size(); ++i) {
    const auto& row = routes.between[members[i - 1]];
    const auto nearer = [&](int a, int b) {
      const Path& to_a = row[a];
      const Path& to_b = row[b];
      if (to_a.distance != to_b.distance) return to_a.distance < to_b.distance;
      if (to_a.bandwidth != to_b.bandwidth) return to_a.bandwidth > to_b.bandwidth;
      return a < b;
    };
    const auto best = std::min_element(members.begin() + static_cast<std::ptrdiff_t>(i), members.end(), nearer);
    std::rotate(members.begin() + static_cast<std::ptrdiff_t>(i), best, best + 1);
  }
  return members;
}

bool by_nvlink(const NodeRoutes& routes, int from, int to) {
  const Path& path = routes.between[from][to];
  return path.distance == PathClass::nvlink && path.arcs.size() == 1;
}
// The member with NVLinks to both, the widest; nothing where the two need none or there is none.
std::optional<int> relay_between(const NodeRoutes& routes, const std::vector<int>& members, int from, int to) {
  std::optional<int> best;
  if (routes.between[from][to].distance <= PathClass::nvlink) return best;
  const auto width = [&](int over) {
    return std::min(routes.between[from][over].bandwidth, routes.between[over][to].bandwidth);
  };
  for (const int over : members)
    if (by_nvlink(routes, from, over) && by_nvlink(routes, over, to) && (!best || width(over) > width(*best)))
      best = over;
  return best;
}
bool needs_relays(const NodeRoutes& routes, const std::vector<int>& ring) {
  for (std::size_t i = 0; i < ring.size(); ++i)
    if (relay_between(routes, ring, ring[i], ring[(i + 1) % ring.size()])) return true;
  return false;
}
// Around the ring and back, half of the share each way.
void add_relayed(const NodeRoutes& routes, const std::vector<int>& ring, double share, NodeLoad& load) {
  const auto add = [&](int from, int to) {
    const std::optional<int> over = relay_between(routes, ring, from, to);
    if (!over) return add_hop(routes, from, to, share / 2, load);
    add_hop(routes, from, *over, share / 2, load);
    add_hop(routes, *over, to, share / 2, load);
    load.intra_latency =
        std::max(load.intra_latency, routes.between[from][*over].latency + routes.between[*over][to].latency);
    load.nvlink = false;  // tuning.cc counts such hops as PCIe
  };
  for (std::size_t i = 0; i < ring.size(); ++i) {
    add(ring[i], ring[(i + 1) % ring.size()]);
    add(ring[(i + 1) % ring.size()], ring[i]);
  }
}

// Adds the traffic around each of the part's rings: on every hop the given share of one rank's
// rate, divided among the rings.
void add_several(const NodeRoutes& routes, const GroupPart& part, double share, NodeLoad& load) {
  for (const std::vector<int>& ring : part.rings)
    for (std::size_t i = 0; i < ring.size(); ++i)
      add_hop(routes, ring[i], ring[(i + 1) % ring.size()], share / static_cast<double>(part.rings.size()), load);
}

}  // namespace

void add_hop(const NodeRoutes& routes, int from, int to, double share, NodeLoad& load) {
  const Path& path = routes.between[from][to];
  PARPLAN_ASSERT(path.distance != PathClass::unreachable,
                 "device " + std::to_string(from) + " to " + std::to_string(to) + " of " + routes.node.name);
  for (const Arc arc : path.arcs) load.arcs[arc] += share;
  load.intra_latency = std::max(load.intra_latency, path.latency);
  // (Devices with a direct link, such as AMD's and Intel's, count too: RCCL treats XGMI like
  // NVLink.)
  load.nvlink = load.nvlink && (path.distance <= PathClass::nvlink || path.arcs.size() == 1);
}

void add_exchange(const NodeRoutes& routes, int device, double share, NodeLoad& load) {
  for (const Uplink& uplink : uplinks_of(routes, device)) {
    for (const Arc arc : uplink.path.arcs) {
      load.arcs[arc] += share * uplink.share;
      load.arcs[reversed(arc)] += share * uplink.share;
    }
    load.uplink_latency = std::max(load.uplink_latency, uplink.path.latency);
  }
  load.out += share;
}

void add_exchange_on_rails(const NodeRoutes& routes, const std::vector<int>& devices, const NodeRoutes& other_routes,
                           const std::vector<int>& others, double share, const Network& network, NodeLoad& load) {
  const std::vector<double> here = rail_shares(routes, devices);
  std::vector<double> there = rail_shares(other_routes, others);
  const bool moves = network.pxn && routes.nvlink_everywhere;
  // On rails where more arrives than leaves; only for those that this node has.
  double missing = 0.0;
  for (std::size_t rail = 0; rail < here.size() && rail < there.size(); ++rail)
    if (entry_of(routes, rail)) missing += std::max(0.0, there[rail] - here[rail]);
  there.resize(here.size(), 0.0);
  double surplus = 0.0;
  for (std::size_t rail = 0; rail < here.size(); ++rail) surplus += std::max(0.0, here[rail] - there[rail]);
  // The moved share of the traffic on the wrong rail.
  const double moved = moves && surplus > 0.0 ? std::min(1.0, missing / surplus) : 0.0;
  for (const int device : devices)
    for (const Uplink& uplink : uplinks_of(routes, device)) {
      const auto rail = static_cast<std::size_t>(std::ranges::find(routes.nics, uplink.nic) - routes.nics.begin());
      const double sent = share * uplink.share / static_cast<double>(devices.size());
      const double wrong = std::max(0.0, 1.0 - there[rail] / here[rail]) * moved;
      for (const Arc arc : uplink.path.arcs) load.arcs[reversed(arc)] += sent;
      add_sent(uplink, sent * (1.0 - wrong), load);
      load.uplink_latency = std::max(load.uplink_latency, uplink.path.latency);
      if (wrong == 0.0) continue;
      for (std::size_t to = 0; to < here.size(); ++to) {
        const auto entry = there[to] > here[to] ? entry_of(routes, to) : std::nullopt;
        if (!entry) continue;
        const double part = sent * wrong * (there[to] - here[to]) / missing;
        if (entry->device != device) add_hop(routes, device, entry->device, part, load);
        add_sent(*entry->uplink, part, load);
      }
    }
  load.out += share;
  load.between_rails += share * surplus * (1.0 - moved);
}

BytesPerSecond rate(const NodeRoutes& routes, double oversubscription, const NodeLoad& load) {
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t arc = 0; arc < load.arcs.size(); ++arc)
    if (load.arcs[arc] > 0.0) least = std::min(least, routes.node.links[arc / 2].bandwidth.value / load.arcs[arc]);
  if (load.out > 0.0) least = std::min(least, routes.network_bandwidth.value / (oversubscription * load.out));
  return BytesPerSecond(least);
}

void add_exchange(const NodeRoutes& routes, const GroupPart& part, double exchanged, const Network& network,
                  NodeLoad& load) {
  if (part.closed) return;
  if (network.one_ring && part.members.size() == routes.node.devices.size()) {
    for (const Uplink& uplink : uplinks_of(routes, part.members.front())) {
      for (const Arc arc : uplink.path.arcs) load.arcs[reversed(arc)] += exchanged * uplink.share;
      load.uplink_latency = std::max(load.uplink_latency, uplink.path.latency);
    }
    for (const Uplink& uplink : uplinks_of(routes, part.members.back())) {
      add_sent(uplink, exchanged * uplink.share, load);
      load.uplink_latency = std::max(load.uplink_latency, uplink.path.latency);
    }
    load.out += exchanged;
    return;
  }
  if (part.next_routes != nullptr)
    return add_exchange_on_rails(routes, part.members, *part.next_routes, part.next, exchanged, network, load);
  for (const int member : part.members)
    add_exchange(routes, member, exchanged / static_cast<double>(part.members.size()), load);
}

void add_ring(const NodeRoutes& routes, GroupPart part, HopLayout layout, const Network& network, NodeLoad& load) {
  const auto count = part.members.size();
  const auto n = static_cast<double>(count);
  if (layout == HopLayout::nearest_next || layout == HopLayout::relayed)
    part.members = nearest_next(routes, std::move(part.members));
  if (layout == HopLayout::all_pairs) {
    const double share = part.closed ? 1.0 / (n - 1.0) : 1.0 / n;
    for (const int a : part.members)
      for (const int b : part.members)
        if (a != b) add_hop(routes, a, b, share, load);
  } else if (layout == HopLayout::several_rings && !part.rings.empty()) {
    add_several(routes, part, part.closed ? 1.0 : (n - 1.0) / n, load);
  } else if (layout == HopLayout::relayed && needs_relays(routes, part.members)) {
    add_relayed(routes, part.members, part.closed ? 1.0 : (n - 1.0) / n, load);
  } else if (count > 1) {
    const double share = part.closed ? 1.0 : (n - 1.0) / n;
    for (std::size_t i = 0; i < count; ++i)
      add_hop(routes, part.members[i], part.members[(i + 1) % count], share, load);
  }
  add_exchange(routes, part, 1.0, network, load);
}

void add_tree(const NodeRoutes& routes, GroupPart part, HopLayout layout, double exchanged, const Network& network,
              NodeLoad& load) {
  const auto count = part.members.size();
  const auto n = static_cast<double>(count);
  if (layout == HopLayout::nearest_next) part.members = nearest_next(routes, std::move(part.members));
  if (layout == HopLayout::all_pairs) {
    for (const int a : part.members)
      for (const int b : part.members)
        if (a != b) add_hop(routes, a, b, 1.0 / (n - 1.0), load);
  } else if (layout == HopLayout::several_rings && !part.rings.empty()) {
    // Chains, each cut at another place: NCCL's have the rings' rate.
    add_several(routes, part, 1.0, load);
  } else {
    for (std::size_t i = 0; i + 1 < count; ++i) add_hop(routes, part.members[i], part.members[i + 1], 1.0, load);
  }
  add_exchange(routes, part, exchanged, network, load);
}

}  // namespace parplan
