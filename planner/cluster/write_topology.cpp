#include "planner/cluster/write_topology.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <map>
#include <optional>
#include <tuple>

#include "planner/base/enum_index.h"
#include "planner/base/text.h"
#include "planner/cluster/routes.h"

namespace parplan {
namespace {

const std::string& device_name_of(const NodeKind& node, std::size_t device) {
  return node.vertices[node.devices[device]].name;
}

// The kinds of the links along a path, repetitions merged: "NV12", "PCIe+SYS+PCIe".
std::string kinds_of(const NodeKind& node, const Path& path) {
  std::vector<std::string> kinds;
  for (const Arc arc : path.arcs) {
    const std::string& kind = node.links[link_of(arc)].kind;
    if (kinds.empty() || kinds.back() != kind) kinds.push_back(kind);
  }
  return join(kinds, "+");
}

// The name that nvidia-smi topo -m gives a path: X, NV12, PIX (one PCIe switch), PXB (several), PHB
// (a host bridge), NODE, SYS.
std::string label_of(const NodeKind& node, const Path& path) {
  switch (path.distance) {
    case PathClass::local: return "X";
    case PathClass::nvlink: return node.links[link_of(path.arcs.front())].kind;
    case PathClass::pcie_switch: return path.arcs.size() > 2 ? "PXB" : "PIX";
    case PathClass::host_bridge: return "PHB";
    case PathClass::node: return "NODE";
    case PathClass::socket: return "SYS";
    case PathClass::unreachable: break;
  }
  return "-";
}

// "24.0G" for 24.0 GB/s: cells are narrow.
std::string short_rate(BytesPerSecond rate) {
  std::string text = format_bandwidth(rate);  // "24.0 GB/s"
  text.resize(text.size() - std::string("B/s").size());
  std::erase(text, ' ');
  return text;
}

std::string in_columns(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line = "  ";
    for (std::size_t c = 0; c < row.size(); ++c)
      line += fmt::format("{:<{}}", row[c], std::max<std::size_t>(widths[c] + 2, c == 0 ? 10 : 0));
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

// The largest matrix that is printed; a wider one would be unreadable. It is like that of
// nvidia-smi topo -m, with the rate of each path one way, and a star at the NICs that a device
// uses.
constexpr std::size_t most_in_matrix = 16;
std::string matrix(const NodeRoutes& routes) {
  const NodeKind& node = routes.node;
  const std::size_t count = node.devices.size();
  if (count < 2 || count > most_in_matrix) return "";
  std::vector<std::size_t> nics;  // those that some device reaches
  for (std::size_t n = 0; n < routes.nics.size(); ++n)
    if (std::ranges::any_of(routes.to_nic, [&](const auto& row) { return row[n].distance != PathClass::unreachable; }))
      nics.push_back(n);
  if (nics.size() > most_in_matrix) nics.clear();
  std::vector<std::vector<std::string>> rows(1, {"B/s"});
  for (std::size_t i = 0; i < count; ++i) rows[0].push_back(device_name_of(node, i));
  for (const std::size_t n : nics) rows[0].push_back(node.vertices[routes.nics[n]].name);
  const auto cell = [&](const Path& path) {
    const std::string label = label_of(node, path);
    return label == "X" || label == "-" ? label : label + " " + short_rate(path.bandwidth);
  };
  for (std::size_t i = 0; i < count; ++i) {
    rows.push_back({device_name_of(node, i)});
    for (std::size_t j = 0; j < count; ++j) rows.back().push_back(cell(routes.between[i][j]));
    for (const std::size_t n : nics) {
      const bool used =
          std::ranges::any_of(routes.uplinks[i], [&](const Uplink& uplink) { return uplink.nic == routes.nics[n]; });
      rows.back().push_back(cell(routes.to_nic[i][n]) + (used ? "*" : ""));
    }
  }
  return in_columns(rows);
}

std::string describe_device(const NodeGroup& group) {
  const DeviceKind& device = group.device;
  const DeviceRates rates = rates_at(device, group.devices_per_node());
  std::string text =
      fmt::format("  memory    {}, {} of it for libraries; {} reached\n", format_bytes(device.memory_capacity),
                  format_bytes(device.memory_overhead), format_bandwidth(rates.memory));
  // A probe measures the reached rates and knows no peak.
  const auto reached = [](FlopsPerSecond rate, FlopsPerSecond of) {
    return format_flop_rate(rate) + " reached" + (of.value > 0.0 ? " of " + format_flop_rate(of) : "");
  };
  text += fmt::format("  fp32      {}\n", reached(rates.matrix_fp32, device.peak_fp32));
  if (rates.matrix_half.value > 0.0)
    text += fmt::format("  half      {}\n", reached(rates.matrix_half, device.peak_half));
  if (rates.matrix_tf32.value > 0.0)
    text += fmt::format("  tf32      {}\n", reached(rates.matrix_tf32, device.peak_tf32));
  if (rates.matrix_fp8.value > 0.0)
    text += fmt::format("  fp8       {}\n", reached(rates.matrix_fp8, device.peak_fp8));
  if (group.price) text += fmt::format("  price     {} an hour and device\n", write_price(*group.price));
  return text;
}

// Pairs of devices grouped by the path between them, nearest first.
std::string describe_pairs(const NodeRoutes& routes) {
  std::map<std::tuple<PathClass, double, std::string, double>, std::vector<std::string>> pairs;
  for (std::size_t i = 0; i < routes.between.size(); ++i)
    for (std::size_t j = i + 1; j < routes.between.size(); ++j) {
      const Path& path = routes.between[i][j];
      pairs[{path.distance, -path.bandwidth.value, kinds_of(routes.node, path), path.latency.value}].push_back(
          device_name_of(routes.node, i) + "-" + device_name_of(routes.node, j));
    }
  std::string text;
  for (const auto& [key, members] : pairs) {
    const auto& [distance, bandwidth, kinds, latency] = key;
    constexpr std::size_t shown = 8;
    std::vector<std::string> first(members.begin(),
                                   members.begin() + static_cast<std::ptrdiff_t>(std::min(shown, members.size())));
    if (members.size() > shown) first.push_back("...");
    text += fmt::format(
        "  {:<9} {}, {}: {}\n", kinds, format_bandwidth(BytesPerSecond(-bandwidth)), format_duration(Seconds(latency)),
        pairs.size() == 1 && members.size() > 1 ? fmt::format("all {} pairs", members.size()) : join(first));
  }
  // Where all pairs are equal and there is no NIC, the line above is sufficient.
  if (pairs.size() > 1 || !routes.nics.empty()) text += matrix(routes);
  return text;
}

// "GPUi by NICi": one text for all devices where the ways differ only in the device's own number;
// nothing where they differ otherwise, or are few.
std::optional<std::string> by_number(const std::vector<std::string>& ways) {
  constexpr std::size_t few = 4;
  if (ways.size() <= few) return std::nullopt;
  const auto pattern = [&](std::size_t i) {
    const std::string number = std::to_string(i);
    std::string text;
    for (std::size_t at = 0; at < ways[i].size();) {
      std::size_t end = at;
      while (end < ways[i].size() && std::isdigit(static_cast<unsigned char>(ways[i][end]))) ++end;
      text += end > at && ways[i].substr(at, end - at) == number
                  ? "i"
                  : ways[i].substr(at, std::max<std::size_t>(end - at, 1));
      at = std::max(end, at + 1);
    }
    return text;
  };
  const std::string first = pattern(0);
  for (std::size_t i = 1; i < ways.size(); ++i)
    if (pattern(i) != first) return std::nullopt;
  return fmt::format("{}, i from 0 to {}", first, ways.size() - 1);
}

std::string describe_uplinks(const NodeRoutes& routes, const Network& network) {
  if (routes.uplinks.empty() || routes.uplinks.front().empty()) return "  network   none\n";
  std::vector<std::string> ways;
  for (std::size_t i = 0; i < routes.uplinks.size(); ++i) {
    std::vector<std::string> nics;
    for (const Uplink& uplink : routes.uplinks[i]) nics.push_back(routes.node.vertices[uplink.nic].name);
    ways.push_back(device_name_of(routes.node, i) + " by " + join(nics, "+"));
  }
  const std::string fabric =
      network.levels.empty()
          ? fmt::format(", {}, oversubscription {}", format_duration(network.latency), network.oversubscription)
          : "";
  return fmt::format("  network   {} a node{}: {}\n", format_bandwidth(routes.network_bandwidth), fabric,
                     by_number(ways).value_or(join(ways)));
}

std::string describe_level(const FabricLevel& level) {
  return fmt::format("{}, {}, oversubscription {}",
                     level.nodes ? "blocks of " + pluralized(*level.nodes, "node") : "all nodes",
                     format_duration(level.latency), level.oversubscription);
}

std::string describe_rails(const Network& network) {
  return fmt::format(
      "a switch for each NIC of a node; {}",
      network.pxn ? "traffic changes rails inside nodes where there is NVLink" : "traffic changes rails above them");
}

// What the network says of NCCL, empty where it says nothing.
std::string describe_nccl(const Network& network) {
  std::vector<std::string> all;
  if (network.post_overhead)
    all.push_back(fmt::format("a ring's step keeps a CPU {}", format_duration(*network.post_overhead)));
  const auto add_protocols = [&](const char* of, const Protocols& protocols, const Protocols& usual) {
    if (protocols == usual) return;
    const std::vector<std::string> names = protocol_names(protocols);
    all.push_back(names.empty() ? fmt::format("no {} between nodes", of)
                                : fmt::format("{} between nodes in {}", of, join(names)));
  };
  add_protocols("rings", network.ring_protocols, Network().ring_protocols);
  add_protocols("trees", network.tree_protocols, Network().tree_protocols);
  if (network.transfer_chunk != Network().transfer_chunk)
    all.push_back(fmt::format("transfers in parts of {}", format_bytes(network.transfer_chunk)));
  if (network.one_ring) all.emplace_back("all rings enter a node by one NIC and leave it by another");
  return join(all, "; ");
}

std::string title_of(const NodeGroup& group) {
  const std::string machines =
      group.node.devices_per_machine ? fmt::format(", {} a machine", *group.node.devices_per_machine) : "";
  return fmt::format("{} of {} x {} ({}){}", pluralized(group.nodes, "node"), group.devices_per_node(),
                     group.device.title, group.device.name, machines);
}

}  // namespace

std::string describe(const Cluster& cluster) {
  std::string text;
  const bool alike = cluster.groups.size() == 1;
  if (!alike)
    text += fmt::format("{}: {} on {} of {} kinds\n", cluster.name, pluralized(cluster.devices(), "device"),
                        pluralized(cluster.nodes(), "node"), cluster.groups.size());
  int first = 0;
  for (const NodeGroup& group : cluster.groups) {
    const auto routes = routes_of(group.node);
    text += alike ? fmt::format("{}: {}\n", cluster.name, title_of(group))
                  : fmt::format("devices {} to {}: {}\n", first, first + group.devices() - 1, title_of(group));
    text += describe_device(group);
    text += describe_pairs(*routes);
    text += describe_uplinks(*routes, cluster.network);
    first += group.devices();
  }
  for (const FabricLevel& level : cluster.network.levels)
    text += fmt::format("  {:<9} {}\n", level.name, describe_level(level));
  if (cluster.network.rails) text += fmt::format("  rails     {}\n", describe_rails(cluster.network));
  const std::string nccl = describe_nccl(cluster.network);
  if (!nccl.empty()) text += fmt::format("  NCCL      {}\n", nccl);
  if (!cluster.device_ids.empty())
    text +=
        fmt::format("  selected  devices {} of their machine, in this order\n", fmt::join(cluster.device_ids, ", "));
  if (cluster.measured_on) text += fmt::format("  measured  {}\n", *cluster.measured_on);
  for (const std::string& note : cluster.notes) text += fmt::format("  note      {}\n", note);
  return text;
}

namespace {

// A string of the DOT language: a backslash would start an escape of a label.
std::string dot_string(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (c == '\n') result += "\\n";
    else result += c;
  }
  return result + "\"";
}

constexpr std::array<const char*, 7> shapes = {"box", "hexagon",  "ellipse", "trapezium",
                                               "cds", "cylinder", "point"};  // by VertexKind

std::string edge(const std::string& a, const std::string& b, const std::string& label) {
  return fmt::format("{} -- {}{};\n", a, b, label.empty() ? "" : fmt::format(" [label={}]", dot_string(label)));
}

}  // namespace

std::string draw_graphviz(const Cluster& cluster) {
  std::string text = fmt::format("graph {} {{\n  label={};\n  node [fontsize=10];\n  edge [fontsize=8];\n",
                                 dot_string(cluster.name), dot_string(cluster.name));
  std::string uplinks;
  std::size_t rails = 0;
  for (std::size_t g = 0; g < cluster.groups.size(); ++g) {
    const NodeGroup& group = cluster.groups[g];
    const auto name_of = [&](int vertex) { return fmt::format("g{}v{}", g, vertex); };
    text += fmt::format("  subgraph cluster_{} {{\n    label={};\n", g, dot_string(title_of(group)));
    std::map<int, std::size_t> rail_of;
    for (std::size_t v = 0; v < group.node.vertices.size(); ++v) {
      const Vertex& vertex = group.node.vertices[v];
      if (vertex.kind == VertexKind::nic) rail_of.emplace(static_cast<int>(v), rail_of.size());
      if (vertex.kind != VertexKind::network)
        text += fmt::format("    {} [label={}, shape={}];\n", name_of(static_cast<int>(v)), dot_string(vertex.name),
                            shapes[index_of(vertex.kind)]);
    }
    for (const Link& link : group.node.links) {
      const bool a_is_network = group.node.vertices[link.a].kind == VertexKind::network;
      const bool b_is_network = group.node.vertices[link.b].kind == VertexKind::network;
      if (a_is_network || b_is_network) {
        const int nic = a_is_network ? link.b : link.a;
        const std::string lowest = cluster.network.rails ? fmt::format("level0rail{}", rail_of[nic]) : "level0";
        uplinks += "  " + edge(name_of(nic), lowest, format_bandwidth(link.bandwidth));
      } else {
        text += "    " + edge(name_of(link.a), name_of(link.b), link.kind + " " + format_bandwidth(link.bandwidth));
      }
    }
    rails = std::max(rails, rail_of.size());
    text += "  }\n";
  }
  if (!uplinks.empty()) {
    const std::vector<FabricLevel> levels = levels_of(cluster.network);
    for (std::size_t l = 0; l < levels.size(); ++l) {
      const std::string label = fmt::format("{}\n{}", levels[l].name, describe_level(levels[l]));
      const bool has_rails = l == 0 && cluster.network.rails;
      for (std::size_t r = 0; r < (has_rails ? rails : 1); ++r) {
        const std::string name = has_rails ? fmt::format("level0rail{}", r) : fmt::format("level{}", l);
        text += fmt::format("  {} [label={}, shape=box3d];\n", name,
                            dot_string(has_rails ? fmt::format("rail {}, {}", r, label) : label));
        if (l + 1 < levels.size()) text += "  " + edge(name, fmt::format("level{}", l + 1), "");
      }
    }
  }
  return text + uplinks + "}\n";
}

namespace {

constexpr std::array<const char*, 7> path_class_names = {"local", "nvlink", "pcie_switch", "host_bridge",
                                                         "node",  "socket", "unreachable"};  // by PathClass

Json path_json(const NodeKind& node, const Path& path) {
  if (path.distance == PathClass::local || path.distance == PathClass::unreachable) return nullptr;
  return {{"class", path_class_names[index_of(path.distance)]},
          {"label", label_of(node, path)},
          {"bandwidth_bytes_per_s", json_number(path.bandwidth.value)},
          {"latency_s", json_number(path.latency.value)}};
}

Json group_json(const NodeGroup& group) {
  const auto routes = routes_of(group.node);
  Json json{{"nodes", group.nodes},
            {"device", group.device.name},
            {"title", group.device.title},
            {"memory_capacity_bytes", group.device.memory_capacity.count},
            {"devices", Json::array()},
            {"nics", Json::array()},
            {"network_bandwidth_bytes_per_s", json_number(routes->network_bandwidth.value)},
            {"between_devices", Json::array()},
            {"to_nics", Json::array()},
            {"nics_used", Json::array()}};
  for (const int nic : routes->nics) json["nics"].push_back(group.node.vertices[nic].name);
  for (std::size_t i = 0; i < group.node.devices.size(); ++i) {
    json["devices"].push_back(device_name_of(group.node, i));
    Json& between = json["between_devices"].emplace_back(Json::array());
    for (const Path& path : routes->between[i]) between.push_back(path_json(group.node, path));
    Json& to_nics = json["to_nics"].emplace_back(Json::array());
    for (const Path& path : routes->to_nic[i]) to_nics.push_back(path_json(group.node, path));
    Json& used = json["nics_used"].emplace_back(Json::array());
    for (const Uplink& uplink : routes->uplinks[i]) used.push_back(group.node.vertices[uplink.nic].name);
  }
  return json;
}

}  // namespace

Json topology_json(const Cluster& cluster, const std::string& version) {
  Json json;
  json["schema"] = "parplan.topology/1";
  json["tool"] = {{"name", "parplan"}, {"version", version}};
  json["name"] = cluster.name;
  json["devices"] = cluster.devices();
  json["nodes"] = cluster.nodes();
  json["backend"] = name(cluster.backend());
  json["groups"] = Json::array();
  bool any_nic = false;
  for (const NodeGroup& group : cluster.groups) {
    json["groups"].push_back(group_json(group));
    any_nic = any_nic || !json["groups"].back()["nics"].empty();
  }
  json["network"] = nullptr;
  if (any_nic) {
    json["network"] = {{"rails", cluster.network.rails},
                       {"pxn", cluster.network.rails && cluster.network.pxn},
                       {"post_overhead_s", cluster.network.post_overhead
                                               ? json_number(cluster.network.post_overhead->value)
                                               : Json(nullptr)},
                       {"ring_protocols", protocol_names(cluster.network.ring_protocols)},
                       {"tree_protocols", protocol_names(cluster.network.tree_protocols)},
                       {"transfer_chunk_bytes", cluster.network.transfer_chunk.count},
                       {"one_ring", cluster.network.one_ring},
                       {"levels", Json::array()}};
    for (const FabricLevel& level : levels_of(cluster.network))
      json["network"]["levels"].push_back({{"name", level.name},
                                           {"nodes", level.nodes ? Json(*level.nodes) : Json(nullptr)},
                                           {"oversubscription", json_number(level.oversubscription)},
                                           {"latency_s", json_number(level.latency.value)}});
  }
  json["device_ids"] = cluster.device_ids.empty() ? Json(nullptr) : Json(cluster.device_ids);
  json["measured_on"] = cluster.measured_on ? Json(*cluster.measured_on) : Json(nullptr);
  json["notes"] = cluster.notes;
  json["sources"] = cluster.sources;
  return json;
}

}  // namespace parplan
