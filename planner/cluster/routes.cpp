#include "planner/cluster/routes.h"

#include <algorithm>
#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/dijkstra_shortest_paths.hpp>
#include <boost/graph/filtered_graph.hpp>
#include <boost/property_map/function_property_map.hpp>
#include <boost/range/iterator_range.hpp>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "planner/base/error.h"

namespace parplan {
namespace {

// One arc per link and direction, with the arc as the edge's property.
using Graph = boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS, boost::no_property, Arc>;
using Edge = boost::graph_traits<Graph>::edge_descriptor;

// What is minimised along a path whose class and width are settled: links first, then latency.
struct Length {
  int links = 0;
  double latency = 0.0;
  auto operator<=>(const Length&) const = default;
  friend Length operator+(Length a, Length b) { return {a.links + b.links, a.latency + b.latency}; }
};

const Length unreachable_length = {std::numeric_limits<int>::max() / 2, 0.0};

bool is_transit(VertexKind kind) {
  return kind == VertexKind::nvswitch || kind == VertexKind::pcie_switch || kind == VertexKind::host_bridge ||
         kind == VertexKind::memory;
}

PathClass class_of(const NodeKind& node, const Link& link) {
  const VertexKind a = node.vertices[link.a].kind;
  const VertexKind b = node.vertices[link.b].kind;
  const auto either = [&](VertexKind kind) { return a == kind || b == kind; };
  if (either(VertexKind::memory) || either(VertexKind::nvswitch) || link.kind.starts_with("NV"))
    return PathClass::nvlink;
  if (a == VertexKind::host_bridge && b == VertexKind::host_bridge)
    return link.kind == "NODE" ? PathClass::node : PathClass::socket;
  if (either(VertexKind::host_bridge)) return PathClass::host_bridge;
  return PathClass::pcie_switch;
}

// The arcs that a search may use: at most `farthest`, at least `narrowest`, and leaving no end but
// the source.
struct Allowed {
  const Graph* graph = nullptr;
  const NodeKind* node = nullptr;
  const std::vector<PathClass>* classes = nullptr;
  PathClass farthest{};
  double narrowest = 0.0;
  int source = 0;

  bool operator()(const Edge& edge) const {
    const auto link = static_cast<std::size_t>(link_of((*graph)[edge]));
    const auto from = boost::source(edge, *graph);
    return (*classes)[link] <= farthest && node->links[link].bandwidth.value >= narrowest &&
           (static_cast<int>(from) == source || is_transit(node->vertices[from].kind));
  }
};

struct LengthOfLink {
  using result_type = Length;
  const Graph* graph = nullptr;
  const NodeKind* node = nullptr;
  Length operator()(const Edge& edge) const { return {1, node->links[link_of((*graph)[edge])].latency.value}; }
};

// The NIC's link to the network, away from it; nothing where it has none.
std::optional<Arc> network_arc(const NodeKind& node, int nic) {
  for (std::size_t i = 0; i < node.links.size(); ++i) {
    const Link& link = node.links[i];
    const int other = link.a == nic ? link.b : link.b == nic ? link.a : -1;
    if (other >= 0 && node.vertices[other].kind == VertexKind::network)
      return static_cast<Arc>(2 * i + (link.a == nic ? 0 : 1));
  }
  return std::nullopt;
}

void append(const NodeKind& node, Arc arc, Path& path) {
  const Link& link = node.links[link_of(arc)];
  path.arcs.push_back(arc);
  path.bandwidth = std::min(path.bandwidth, link.bandwidth);
  path.latency += link.latency;
}

// Paths from one vertex to all others. Classes and widths are tried from the best on; a vertex
// keeps the first path found, which therefore has the best class, then the greatest width, then the
// least length.
std::vector<Path> paths_from(const NodeKind& node, const Graph& graph, const std::vector<PathClass>& classes,
                             int source) {
  const std::size_t count = node.vertices.size();
  std::vector<Path> paths(count);
  paths[source] = {.distance = PathClass::local,
                   .arcs = {},
                   .bandwidth = BytesPerSecond(std::numeric_limits<double>::infinity()),
                   .latency = {}};
  // The network is behind NICs, which no path crosses.
  auto left =
      std::ranges::count_if(node.vertices, [](const Vertex& vertex) { return vertex.kind != VertexKind::network; }) - 1;
  const std::set<PathClass> distinct_classes(classes.begin(), classes.end());
  for (const PathClass farthest : distinct_classes) {
    std::set<double, std::greater<>> widths;
    for (std::size_t link = 0; link < classes.size(); ++link)
      if (classes[link] <= farthest) widths.insert(node.links[link].bandwidth.value);
    for (const double narrowest : widths) {
      if (left == 0) return paths;
      const Allowed allowed{&graph, &node, &classes, farthest, narrowest, source};
      const boost::filtered_graph<Graph, Allowed> filtered(graph, allowed);
      std::vector<Length> length(count);
      std::vector<std::size_t> previous(count);
      boost::dijkstra_shortest_paths(
          filtered, static_cast<std::size_t>(source),
          boost::predecessor_map(previous.data())
              .distance_map(length.data())
              .weight_map(boost::make_function_property_map<Edge>(LengthOfLink{&graph, &node}))
              .distance_compare(std::less<Length>())
              .distance_combine(std::plus<Length>())
              .distance_inf(unreachable_length)
              .distance_zero(Length{}));
      for (std::size_t v = 0; v < count; ++v) {
        if (paths[v].distance != PathClass::unreachable || length[v] == unreachable_length) continue;
        Path path{.distance = farthest,
                  .arcs = {},
                  .bandwidth = BytesPerSecond(std::numeric_limits<double>::infinity()),
                  .latency = {}};
        for (std::size_t at = v; at != static_cast<std::size_t>(source); at = previous[at]) {
          // Among parallel links the least allowed one is taken, so that the choice does not depend
          // on anything else. They are sought at the end with fewer links: a switch has one to
          // every device.
          const std::size_t before = previous[at];
          const bool from_behind = boost::out_degree(at, graph) < boost::out_degree(before, graph);
          std::optional<Arc> best;
          for (const auto& edge : boost::make_iterator_range(boost::out_edges(from_behind ? at : before, graph))) {
            const Arc arc = from_behind ? reversed(graph[edge]) : graph[edge];
            const auto link = static_cast<std::size_t>(link_of(arc));
            if (boost::target(edge, graph) != (from_behind ? before : at) || classes[link] > farthest ||
                node.links[link].bandwidth.value < narrowest)
              continue;
            const auto latency_of = [&](Arc a) { return node.links[link_of(a)].latency; };
            if (!best || std::tuple(latency_of(arc), arc) < std::tuple(latency_of(*best), *best)) best = arc;
          }
          path.arcs.push_back(best.value());
        }
        const std::vector<Arc> backwards = std::exchange(path.arcs, {});
        for (auto arc = backwards.rbegin(); arc != backwards.rend(); ++arc) append(node, *arc, path);
        paths[v] = std::move(path);
        --left;
      }
    }
  }
  return paths;
}

bool starts_with(const Path& path, Arc arc) { return !path.arcs.empty() && path.arcs.front() == arc; }

bool is_star(const std::vector<std::vector<Path>>& between) {
  if (between.size() < 2) return true;
  const Path& one = between[0][1];
  for (std::size_t i = 0; i < between.size(); ++i)
    for (std::size_t j = 0; j < between.size(); ++j) {
      if (i == j) continue;
      const Path& path = between[i][j];
      if (path.arcs.size() != 2 || path.bandwidth != one.bandwidth || path.latency != one.latency ||
          path.distance != one.distance)
        return false;
      const std::size_t other = j == 0 ? (i == 1 ? 2 : 1) : (i == 0 ? (j == 1 ? 2 : 1) : 0);  // neither i nor j
      if (other < between.size() && !starts_with(between[i][other], path.arcs[0])) return false;
      if (!starts_with(between[j][i], reversed(path.arcs[1]))) return false;
    }
  return true;
}

std::shared_ptr<const NodeRoutes> find_routes(const NodeKind& node) {
  auto routes = std::make_shared<NodeRoutes>();
  routes->node = node;
  Graph graph(node.vertices.size());
  std::vector<PathClass> classes;
  std::vector<int>& nics = routes->nics;
  for (std::size_t i = 0; i < node.links.size(); ++i) {
    const Link& link = node.links[i];
    boost::add_edge(static_cast<std::size_t>(link.a), static_cast<std::size_t>(link.b), static_cast<Arc>(2 * i), graph);
    boost::add_edge(static_cast<std::size_t>(link.b), static_cast<std::size_t>(link.a), static_cast<Arc>(2 * i + 1),
                    graph);
    classes.push_back(class_of(node, link));
  }
  for (std::size_t v = 0; v < node.vertices.size(); ++v)
    if (node.vertices[v].kind == VertexKind::nic && network_arc(node, static_cast<int>(v)))
      nics.push_back(static_cast<int>(v));

  // Devices grouped by the set of NICs nearest to them.
  std::map<std::vector<int>, std::vector<std::size_t>> devices_near;
  std::vector<std::vector<Path>>& to_nic = routes->to_nic;
  to_nic.resize(node.devices.size());
  for (std::size_t device = 0; device < node.devices.size(); ++device) {
    const std::vector<Path> paths = paths_from(node, graph, classes, node.devices[device]);
    auto& row = routes->between.emplace_back();
    for (const int other : node.devices) {
      row.push_back(paths[other]);
      routes->nvlink_everywhere = routes->nvlink_everywhere && row.back().distance <= PathClass::nvlink;
    }
    using Nearness = std::tuple<PathClass, double, std::size_t, double>;
    const auto nearness = [](const Path& path) {
      return Nearness(path.distance, -path.bandwidth.value, path.arcs.size(), path.latency.value);
    };
    std::vector<int> nearest;
    for (std::size_t n = 0; n < nics.size(); ++n) {
      to_nic[device].push_back(paths[nics[n]]);
      if (to_nic[device][n].distance == PathClass::unreachable) continue;
      if (!nearest.empty() && nearness(to_nic[device][n]) > nearness(to_nic[device][nearest[0]])) continue;
      if (!nearest.empty() && nearness(to_nic[device][n]) < nearness(to_nic[device][nearest[0]])) nearest.clear();
      nearest.push_back(static_cast<int>(n));
    }
    if (!nearest.empty()) devices_near[nearest].push_back(device);
  }
  routes->star = is_star(routes->between);
  routes->uplinks.resize(node.devices.size());
  std::set<int> used;
  for (const auto& [near, devices] : devices_near) {
    for (std::size_t i = 0; i < devices.size(); ++i) {
      std::vector<Uplink>& uplinks = routes->uplinks[devices[i]];
      BytesPerSecond sum;
      for (std::size_t n = i % near.size(); n < near.size(); n += devices.size()) {
        const auto nic = static_cast<std::size_t>(near[n]);
        Uplink uplink{.nic = nics[nic], .path = to_nic[devices[i]][nic]};
        append(node, *network_arc(node, uplink.nic), uplink.path);
        sum += uplink.path.bandwidth;
        used.insert(uplink.nic);
        uplinks.push_back(std::move(uplink));
      }
      for (Uplink& uplink : uplinks) uplink.share = uplink.path.bandwidth / sum;
    }
  }
  for (const int nic : used)
    routes->network_bandwidth += node.links[link_of(*network_arc(node, nic))].bandwidth;
  return routes;
}

}  // namespace

std::shared_ptr<const NodeRoutes> routes_of(const NodeKind& node) {
  constexpr std::size_t remembered = 32;
  using Routes = std::deque<std::shared_ptr<const NodeRoutes>>;
  const auto find_in = [&](const Routes& routes) {
    const auto found = std::ranges::find_if(routes, [&](const auto& known) { return known->node == node; });
    return found == routes.end() ? nullptr : *found;
  };
  const auto remember = [&](Routes& routes, const std::shared_ptr<const NodeRoutes>& found) {
    routes.push_front(found);
    if (routes.size() > remembered) routes.pop_back();
  };
  // The results of this thread and of other threads: finding takes long, and a lookup should not
  // wait.
  thread_local Routes recent;
  if (const auto found = find_in(recent)) return found;
  static std::mutex mutex;
  static Routes of_all_threads;
  const std::lock_guard lock(mutex);
  auto found = find_in(of_all_threads);
  if (!found) {
    found = find_routes(node);
    remember(of_all_threads, found);
  }
  remember(recent, found);
  return found;
}

Route route(const NodeKind& node, int from_device, std::optional<int> to_device) {
  const auto routes = routes_of(node);
  const auto count = static_cast<int>(node.devices.size());
  const int to = to_device.value_or(from_device);
  PARPLAN_ASSERT(from_device >= 0 && from_device < count && to >= 0 && to < count,
                 std::to_string(from_device) + " to " + std::to_string(to) + " of " + std::to_string(count));
  Route result;
  const auto add_links = [&](const Path& path) {
    for (const Arc arc : path.arcs)
      if (std::find(result.links.begin(), result.links.end(), link_of(arc)) == result.links.end())
        result.links.push_back(link_of(arc));
  };
  const auto from = static_cast<std::size_t>(from_device);
  if (to_device) {
    const Path& path = routes->between[from][to];
    add_links(path);
    result.bandwidth = path.bandwidth;
    result.latency = path.latency;
    return result;
  }
  // With several NICs the path has all their links, at the rate at which the first of them is full.
  std::map<int, double> load;
  for (const Uplink& uplink : routes->uplinks[from]) {
    add_links(uplink.path);
    result.latency = std::max(result.latency, uplink.path.latency);
    for (const Arc arc : uplink.path.arcs) load[link_of(arc)] += uplink.share;
  }
  if (!load.empty()) result.bandwidth = BytesPerSecond(std::numeric_limits<double>::infinity());
  for (const auto& [link, share] : load)
    result.bandwidth = std::min(result.bandwidth, node.links[link].bandwidth / share);
  return result;
}

}  // namespace parplan
