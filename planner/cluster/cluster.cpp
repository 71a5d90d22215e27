#include "planner/cluster/cluster.h"

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <sstream>

#include "planner/base/enum_index.h"
#include "planner/base/error.h"
#include "planner/base/text.h"
#include "planner/cluster/find_cluster.h"
#include "planner/cluster/node_layout.h"
#include "planner/cluster/routes.h"
#include "planner/graph/engine.h"

namespace parplan {
namespace {

constexpr std::array<const char*, 7> vertex_kind_names = {"device", "nvswitch", "pcie_switch", "host_bridge",
                                                          "nic",    "memory",   "network"};
constexpr std::array<const char*, 2> vendor_names = {"intel", "amd"};
constexpr std::array<const char*, 4> intra_names = {"nvswitch", "nvlink_mesh", "pcie", "memory"};
constexpr int most_devices = 1 << 20;
constexpr std::size_t most_groups = 64;  // of which a set is one number (groups_of_stage)
// Any two of a node have a route: seconds for these, which are more than NVLink has joined (576).
constexpr int most_devices_of_node = 1024;
constexpr int most_oversubscription = 1'000'000;
// In any currency: a device that costs 10 USD an hour costs some hundred thousand of the smallest
// units.
constexpr double most_price = 1e9;

BytesPerSecond read_positive_bandwidth(const YamlNode& value) {
  const BytesPerSecond bandwidth = value.as_bandwidth();
  if (bandwidth.value <= 0.0) value.fail("a bandwidth must be more than 0");
  return bandwidth;
}

BytesPerSecond read_line_rate(const YamlNode& value) {
  const BytesPerSecond rate = value.as_line_rate();
  if (rate.value <= 0.0) value.fail("a line rate must be more than 0");
  return rate;
}

// What plans may take of a machine.
Bytes read_room(const YamlNode& value, const char* key) {
  const Bytes room = value.as_bytes();
  if (room.count <= 0)
    value.fail(fmt::format("expected more than {}: without '{}', how much plans take is not checked", write_bytes(room),
                           key));
  return room;
}

std::optional<int> read_devices_per_machine(const YamlNode& value, int devices) {
  const auto given = value.find("devices_per_machine");
  if (!given) return std::nullopt;
  const auto per_machine = static_cast<int>(given->as_integer(1, most_devices));
  if (per_machine >= devices)
    given->fail(
        fmt::format("expected less than the node's {} devices: a node of one machine does not say it", devices));
  return per_machine;
}

int read_tiles_per_card(const YamlNode& value, int devices) {
  const auto given = value.find("tiles_per_card");
  if (!given) return 1;
  const auto tiles = static_cast<int>(given->as_integer(1, most_devices));
  if (devices % tiles != 0) given->fail(fmt::format("{} devices are not cards of {} tiles each", devices, tiles));
  return tiles;
}

NodeKind read_layout(const YamlNode& value, const std::string& cluster_name, const DeviceKind& device) {
  value.allow_keys(
      {"name", "devices", "intra", "bandwidth", "latency", "nics", "devices_per_machine", "tiles_per_card"});
  NodeLayout layout;
  layout.name = cluster_name;
  if (const auto given = value.find("name")) layout.name = given->as_name();
  layout.devices = static_cast<int>(value.at("devices").as_integer(1, most_devices_of_node));
  layout.intra = static_cast<Intra>(value.at("intra").as_choice({intra_names.begin(), intra_names.end()}));
  if (const auto bandwidth = value.find("bandwidth")) layout.bandwidth = read_positive_bandwidth(*bandwidth);
  if (const auto latency = value.find("latency")) layout.latency = latency->as_duration();
  if (const auto nics = value.find("nics")) {
    nics->allow_keys({"count", "line_rate", "reached"});
    layout.nics = NicLayout{.count = static_cast<int>(nics->at("count").as_integer(1, 4096)),
                            .line_rate = read_line_rate(nics->at("line_rate"))};
    if (const auto reached = nics->find("reached")) {
      layout.nics->reached = read_line_rate(*reached);
      if (*layout.nics->reached > layout.nics->line_rate) reached->fail("a NIC reaches no more than its line rate");
    }
  }
  if (const auto problem = problem_with(layout, device)) value.fail(*problem);
  NodeKind node = build_node(layout, device);
  node.devices_per_machine = read_devices_per_machine(value, layout.devices);
  node.tiles_per_card = read_tiles_per_card(value, layout.devices);
  return node;
}

NodeKind read_vertices_and_links(const YamlNode& value, const std::string& cluster_name) {
  value.allow_keys({"name", "vertices", "links", "devices", "devices_per_machine", "tiles_per_card"});
  NodeKind node;
  node.name = cluster_name;
  if (const auto given = value.find("name")) node.name = given->as_name();
  std::vector<std::string> names;
  const auto vertex_of = [&](const YamlNode& word) {
    const std::string text = word.as_name();
    const auto found = std::find(names.begin(), names.end(), text);
    if (found == names.end())
      word.fail(fmt::format("unknown vertex '{}'; the node has {}{}", text, join(names), did_you_mean(text, names)));
    return static_cast<int>(found - names.begin());
  };
  int networks = 0;
  for (const YamlNode& item : value.at("vertices").items()) {
    item.allow_keys({"name", "kind"});
    const std::string text = item.at("name").as_name();
    if (std::find(names.begin(), names.end(), text) != names.end())
      item.at("name").fail(fmt::format("a second vertex is named '{}'", text));
    names.push_back(text);
    const auto kind =
        static_cast<VertexKind>(item.at("kind").as_choice({vertex_kind_names.begin(), vertex_kind_names.end()}));
    if (kind == VertexKind::network && ++networks > 1) item.fail("a node has one network vertex, found a second");
    add_vertex(node, text, kind);
  }
  if (node.devices.empty()) value.at("vertices").fail("a node needs at least one vertex of kind device");
  for (const YamlNode& item : value.at("links").items()) {
    item.allow_keys({"between", "bandwidth", "latency", "kind", "line_rate"});
    const YamlNode between = item.at("between");
    if (!between.is_list() || between.size() != 2) between.fail("a link is 'between' a list of two vertices");
    const int a = vertex_of(between[0]);
    const int b = vertex_of(between[1]);
    if (a == b) between.fail(fmt::format("a link from '{}' to itself", names[a]));
    const auto kind = [&](int v) { return node.vertices[v].kind; };
    if ((kind(a) == VertexKind::network && kind(b) != VertexKind::nic) ||
        (kind(b) == VertexKind::network && kind(a) != VertexKind::nic))
      between.fail("only NICs have links to the network");
    const BytesPerSecond bandwidth = read_positive_bandwidth(item.at("bandwidth"));
    std::optional<BytesPerSecond> line_rate;
    if (const auto given = item.find("line_rate")) {
      line_rate = read_positive_bandwidth(*given);
      if (bandwidth > *line_rate) given->fail("a link reaches no more than its line rate");
    }
    add_link(node, a, b, bandwidth, item.at("latency").as_duration(), item.at("kind").as_string(), line_rate);
  }
  if (const auto order = value.find("devices")) {
    std::vector<int> devices;
    for (const YamlNode& item : order->items()) {
      const int vertex = vertex_of(item);
      if (node.vertices[vertex].kind != VertexKind::device)
        item.fail(fmt::format("'{}' is no device", item.as_string()));
      if (std::find(devices.begin(), devices.end(), vertex) != devices.end())
        item.fail(fmt::format("device '{}' is listed twice", item.as_string()));
      devices.push_back(vertex);
    }
    if (devices.size() != node.devices.size())
      order->fail(fmt::format("lists {} of the node's {} devices", devices.size(), node.devices.size()));
    node.devices = devices;
  }
  node.devices_per_machine = read_devices_per_machine(value, static_cast<int>(node.devices.size()));
  node.tiles_per_card = read_tiles_per_card(value, static_cast<int>(node.devices.size()));
  return node;
}

double read_oversubscription(const YamlNode& value) {
  const double oversubscription = value.as_number();
  if (oversubscription < 1.0 || oversubscription > most_oversubscription)
    value.fail(
        fmt::format("expected an oversubscription from 1 to {}, found '{}'", most_oversubscription, value.as_string()));
  return oversubscription;
}

// Protocols by their names in a list.
struct ProtocolRow {
  const char* name;
  bool Protocols::*taken;
};
constexpr std::array protocol_rows = {ProtocolRow{"simple", &Protocols::simple},
                                      ProtocolRow{"ll", &Protocols::low_latency},
                                      ProtocolRow{"ll128", &Protocols::low_latency_128}};

Protocols read_protocols(const YamlNode& value) {
  const std::vector<std::string> names =
      protocol_names({.simple = true, .low_latency = true, .low_latency_128 = true});
  if (!value.is_list()) value.fail(fmt::format("expected a list of protocols, such as [{}]", join(names)));
  Protocols protocols{.simple = false, .low_latency = false};
  for (const YamlNode& item : value.items()) {
    const std::string name = item.as_string();
    const auto row = std::ranges::find(protocol_rows, name, [](const ProtocolRow& one) { return one.name; });
    if (row == protocol_rows.end())
      item.fail(fmt::format("unknown protocol '{}'; allowed: {}{}", name, join(names), did_you_mean(name, names)));
    if (protocols.*row->taken) item.fail(fmt::format("'{}' stands twice in the list; leave one out", name));
    protocols.*row->taken = true;
  }
  return protocols;
}

Network read_network(const YamlNode& value) {
  value.allow_keys({"latency", "post_overhead", "ring_protocols", "tree_protocols", "transfer_chunk",
                    "oversubscription", "levels", "rails", "pxn", "one_ring"});
  Network network;
  network.latency = value.at("latency").as_duration();
  if (const auto overhead = value.find("post_overhead")) {
    network.post_overhead = overhead->as_duration();
    if (*network.post_overhead <= Seconds(0.0))
      overhead->fail("expected more than 0 s: without 'post_overhead', NCCL's model has one");
  }
  if (const auto protocols = value.find("ring_protocols")) {
    network.ring_protocols = read_protocols(*protocols);
    if (!network.ring_protocols.simple && !network.ring_protocols.low_latency)
      protocols->fail("expected 'simple' or 'll' among them: 'll128' is known of some GPUs alone");
  }
  if (const auto protocols = value.find("tree_protocols")) network.tree_protocols = read_protocols(*protocols);
  if (const auto chunk = value.find("transfer_chunk")) {
    network.transfer_chunk = chunk->as_bytes();
    if (network.transfer_chunk < Bytes(1)) chunk->fail("expected at least one byte");
  }
  const auto levels = value.find("levels");
  if (const auto over = value.find("oversubscription")) {
    if (levels) over->fail("'levels' have an oversubscription each; leave this one out");
    network.oversubscription = read_oversubscription(*over);
  }
  if (const auto rails = value.find("rails")) network.rails = rails->as_bool();
  if (const auto pxn = value.find("pxn")) {
    network.pxn = pxn->as_bool();
    if (!network.rails) pxn->fail("'pxn' says how traffic changes rails; it needs 'rails: true'");
  }
  if (const auto one_ring = value.find("one_ring")) {
    network.one_ring = one_ring->as_bool();
    if (network.one_ring && network.rails)
      one_ring->fail("rings that enter a node by one NIC and leave it by another change rails; leave out 'rails'");
  }
  if (!levels) return network;
  if (!levels->is_list() || levels->size() == 0)
    levels->fail("expected a list of levels from the nodes up, such as [{nodes: 32}, {oversubscription: 3}]");
  for (const YamlNode& item : levels->items()) {
    item.allow_keys({"name", "nodes", "oversubscription", "latency"});
    if (!network.levels.empty() && !network.levels.back().nodes)
      item.fail("the level before this one joins all nodes: it has no 'nodes'");
    FabricLevel level{.name = fmt::format("level {}", network.levels.size() + 1), .nodes = std::nullopt,
                      .latency = network.levels.empty() ? network.latency : network.levels.back().latency};
    if (const auto given = item.find("name")) level.name = given->as_name();
    if (const auto nodes = item.find("nodes")) {
      level.nodes = static_cast<int>(nodes->as_integer(1, most_devices));
      const int below = network.levels.empty() ? 1 : *network.levels.back().nodes;
      if (*level.nodes % below != 0)
        nodes->fail(fmt::format("expected a multiple of the {} nodes that a block of the level below joins, found {}",
                                below, *level.nodes));
    }
    if (const auto over = item.find("oversubscription")) level.oversubscription = read_oversubscription(*over);
    if (const auto latency = item.find("latency")) level.latency = latency->as_duration();
    network.levels.push_back(std::move(level));
  }
  return network;
}

// `nodes` counts those of the whole cluster.
std::optional<std::string> problem_with(const NodeGroup& group, int nodes) {
  const NodeKind& node = group.node;
  // This includes links that were built from a file's keys: the written form must be readable
  // again.
  for (const Link& link : node.links)
    if (link.bandwidth < least_bandwidth || link.bandwidth > most_bandwidth || link.latency > longest_duration)
      return fmt::format("the link between '{}' and '{}' comes to {} and {}; allowed are {} to {}, and up to {}",
                         node.vertices[link.a].name, node.vertices[link.b].name, format_bandwidth(link.bandwidth),
                         format_duration(link.latency), write_bandwidth(least_bandwidth),
                         write_bandwidth(most_bandwidth), write_duration(longest_duration));
  for (std::size_t v = 0; v < node.vertices.size(); ++v) {
    if (node.vertices[v].kind != VertexKind::nic) continue;
    int ways = 0;
    for (const Link& link : node.links) {
      const int other = link.a == static_cast<int>(v) ? link.b : link.b == static_cast<int>(v) ? link.a : -1;
      if (other >= 0 && node.vertices[other].kind == VertexKind::network) ++ways;
    }
    if (ways != 1)
      return fmt::format("NIC '{}' has {} links to the network; it needs one", node.vertices[v].name, ways);
  }
  const auto routes = routes_of(node);
  const auto name_of = [&](std::size_t i) { return node.vertices[node.devices[i]].name; };
  for (std::size_t i = 0; i < node.devices.size(); ++i) {
    for (std::size_t j = 0; j < node.devices.size(); ++j)
      if (routes->between[i][j].distance == PathClass::unreachable)
        return fmt::format("device '{}' does not reach device '{}' over links and switches", name_of(i), name_of(j));
    if (nodes > 1 && routes->uplinks[i].empty())
      return fmt::format("{} nodes, but device '{}' reaches no NIC", nodes, name_of(i));
  }
  return std::nullopt;
}

DeviceKind read_device_or_name(const YamlNode& device, const ClusterCatalog& catalog) {
  if (device.is_map()) return read_device(device);
  const std::string text = device.as_string();
  const std::vector<std::string> names = device_names(catalog);
  if (names.empty()) device.fail(fmt::format("expected the device written out, found the name '{}'", text));
  if (std::find(names.begin(), names.end(), text) == names.end())
    device.fail(fmt::format("unknown device '{}'; known are {}{}", text, join(names), did_you_mean(text, names)));
  return find_device(text, catalog);
}

bool has_nic(const NodeKind& node) {
  return std::any_of(node.vertices.begin(), node.vertices.end(),
                     [](const Vertex& vertex) { return vertex.kind == VertexKind::nic; });
}

Host read_host(const YamlNode& value) {
  value.allow_keys({"memory", "memory_bandwidth", "link"});
  Host host;
  if (const auto memory = value.find("memory")) host.memory = read_room(*memory, "memory");
  host.memory_bandwidth = read_positive_bandwidth(value.at("memory_bandwidth"));
  if (const auto link = value.find("link")) host.link = read_positive_bandwidth(*link);
  return host;
}

Nvme read_nvme(const YamlNode& value) {
  value.allow_keys({"read", "write", "latency", "capacity"});
  Nvme nvme{.read = read_positive_bandwidth(value.at("read")),
            .write = read_positive_bandwidth(value.at("write")),
            .latency = {},
            .capacity = {}};
  if (const auto latency = value.find("latency")) nvme.latency = latency->as_duration();
  if (const auto capacity = value.find("capacity")) nvme.capacity = read_room(*capacity, "capacity");
  return nvme;
}

// `device`, `node`, `nodes`, `price`, `processor`, `host` and `nvme` of a cluster of one kind of
// node, or of a group.
NodeGroup read_group(const YamlNode& value, const std::string& cluster_name, const ClusterCatalog& catalog) {
  NodeGroup group;
  group.device = read_device_or_name(value.at("device"), catalog);
  const YamlNode node = value.at("node");
  if (!node.is_map() || node.find("intra").has_value() == node.find("vertices").has_value())
    node.fail("expected a node with either 'devices' and 'intra' or 'vertices' and 'links'");
  group.node =
      node.find("intra") ? read_layout(node, cluster_name, group.device) : read_vertices_and_links(node, cluster_name);
  if (const auto nodes = value.find("nodes")) group.nodes = static_cast<int>(nodes->as_integer(1, most_devices));
  if (const auto price = value.find("price")) {
    try {
      group.price = parse_price(price->as_string());
    } catch (const ConfigError& error) {
      price->fail(error.message());
    }
  }
  if (const auto processor = value.find("processor"))
    group.processor = static_cast<ProcessorVendor>(processor->as_choice({vendor_names.begin(), vendor_names.end()}));
  if (const auto host = value.find("host")) group.host = read_host(*host);
  if (const auto nvme = value.find("nvme")) group.nvme = read_nvme(*nvme);
  return group;
}

}  // namespace

bool is_of_network(const NodeKind& node, const Link& link) {
  const auto is_network = [&](int vertex) { return node.vertices[vertex].kind == VertexKind::network; };
  return is_network(link.a) || is_network(link.b);
}

const char* name(VertexKind kind) { return vertex_kind_names[index_of(kind)]; }

int Cluster::nodes() const {
  int sum = 0;
  for (const NodeGroup& group : groups) sum += group.nodes;
  return sum;
}

int Cluster::devices() const {
  int sum = 0;
  for (const NodeGroup& group : groups) sum += group.devices();
  return sum;
}

const NodeGroup& Cluster::group_of(int device) const {
  int first = 0;
  for (const NodeGroup& group : groups) {
    if (device < first + group.devices()) return group;
    first += group.devices();
  }
  throw InternalError(fmt::format("device {} of {}", device, first));
}

std::vector<std::string> protocol_names(const Protocols& protocols) {
  std::vector<std::string> names;
  for (const ProtocolRow& row : protocol_rows)
    if (protocols.*row.taken) names.emplace_back(row.name);
  return names;
}

std::vector<FabricLevel> levels_of(const Network& network) {
  if (!network.levels.empty()) return network.levels;
  return {{.name = "network",
           .nodes = std::nullopt,
           .oversubscription = network.oversubscription,
           .latency = network.latency}};
}

std::string device_name(const Cluster& cluster) {
  std::string names = cluster.groups.front().device.name;
  for (std::size_t g = 1; g < cluster.groups.size(); ++g) names += "+" + cluster.groups[g].device.name;
  return names;
}

std::string describe_groups(const Cluster& cluster) {
  std::vector<std::string> groups;
  for (const NodeGroup& group : cluster.groups)
    groups.push_back(fmt::format("{} node{} of {} x {}", group.nodes, group.nodes == 1 ? "" : "s",
                                 group.devices_per_node(), group.device.name));
  return join(groups);
}

std::vector<std::string> without_sustained(const Cluster& cluster, DataType type) {
  std::vector<std::string> names;
  for (const NodeGroup& group : cluster.groups)
    if (!knows_sustained(group.device, type) && std::ranges::find(names, group.device.name) == names.end())
      names.push_back(group.device.name);
  return names;
}

std::string rates_of_loops(const Cluster& cluster, DataType type) {
  const std::vector<std::string> names = without_sustained(cluster, type);
  if (names.empty()) return "";
  return fmt::format(
      "products in {} on {} are timed as in benchmark loops, since no training rate is known: predicted steps are too "
      "short",
      name(type), join(names, " and "));
}

std::string device_title(const Cluster& cluster) {
  std::string titles;
  for (const NodeGroup& group : cluster.groups)
    titles += (titles.empty() ? "" : " and ") + (group.device.title.empty() ? group.device.name : group.device.title);
  return titles;
}

std::optional<std::string> lacks_fp8(const Cluster& cluster, const Engine& engine) {
  const auto instead = [&] {
    for (const DataType type : {DataType::bf16, DataType::fp16})
      if (has_units(cluster, type)) return name(type);
    return name(DataType::fp32);
  };
  if (!engine.has_fp8)
    return fmt::format("engine {} has no products in fp8: precision must be another, such as {}", engine.name,
                       instead());
  for (const NodeGroup& group : cluster.groups)
    if (!has_units(group.device, DataType::fp8))
      return fmt::format("precision fp8: {} of cluster '{}' has no units for it, or its file states no rate in fp8; {} "
                         "instead",
                         group.device.title, cluster.name, instead());
  return std::nullopt;
}

bool has_units(const Cluster& cluster, DataType type) {
  return std::ranges::all_of(cluster.groups, [&](const NodeGroup& group) { return has_units(group.device, type); });
}

namespace {

Bytes capacity(const NodeGroup& group) { return group.device.memory_capacity; }

}  // namespace

Bytes least_memory(const Cluster& cluster) { return capacity(*std::ranges::min_element(cluster.groups, {}, capacity)); }

std::string device_memory(const Cluster& cluster) {
  const Bytes least = least_memory(cluster);
  const Bytes most = capacity(*std::ranges::max_element(cluster.groups, {}, capacity));
  if (least == most) return format_bytes(least);
  return fmt::format("{} to {}", format_bytes(least), format_bytes(most));
}

void keep_kernels_of(const Engine& engine, Cluster& cluster) {
  if (is_own(engine)) return;
  for (NodeGroup& group : cluster.groups) group.device.measured.reset();
}

Price parse_price(const std::string& text) {
  const auto fail = [&](const std::string& why) {
    throw ConfigError(fmt::format("expected a price of a device for an hour, such as '2.50 USD', found '{}'{}", text,
                                  why.empty() ? "" : ": " + why));
  };
  const std::size_t end_of_number = std::min(text.find_first_not_of("0123456789.,+-"), text.size());
  if (text.find_first_of("0123456789") == std::string::npos) fail("");
  if (end_of_number == 0) fail("the amount stands before the currency, which is three letters of ISO 4217");
  if (text.substr(0, end_of_number).find(',') != std::string::npos)
    fail("decimals stand behind a point, and thousands have nothing between them");
  Price price;
  const char* last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, price.per_device_hour);
  if (end == last && error == std::errc()) fail("it names no currency");
  if (error == std::errc::result_out_of_range || std::abs(price.per_device_hour) > most_price)
    fail(fmt::format("at most {:.0f} is allowed", most_price));
  if (error != std::errc()) fail("");
  if (price.per_device_hour < 0.0) fail("a price is at least 0");
  if (*end != ' ') fail("a space stands between the amount and the currency");
  price.currency.assign(end + 1, last);
  const auto is_capital = [](char c) { return c >= 'A' && c <= 'Z'; };
  if (price.currency.find('/') != std::string::npos) fail("the hour is understood; leave what begins with '/' out");
  if (price.currency.size() != 3 || !std::ranges::all_of(price.currency, is_capital))
    fail(fmt::format("a currency is three capital letters (ISO 4217), found '{}'", price.currency));
  return price;
}

std::string write_price(const Price& price) { return fmt::format("{} {}", price.per_device_hour, price.currency); }

std::optional<std::string> problem_with(const Cluster& cluster) {
  if (cluster.groups.size() > most_groups)
    return fmt::format("{} kinds of nodes; a cluster has at most {}", cluster.groups.size(), most_groups);
  std::int64_t devices = 0;
  for (const NodeGroup& group : cluster.groups)
    devices += std::int64_t{group.nodes} * group.devices_per_node();
  if (devices > most_devices) return fmt::format("{} devices; a cluster has at most {}", devices, most_devices);
  for (const NodeGroup& group : cluster.groups) {
    if (group.device.backend != cluster.backend())
      return fmt::format("'{}' works by {} and '{}' by {}; a cluster needs one of them",
                         cluster.groups.front().device.name, name(cluster.backend()), group.device.name,
                         name(group.device.backend));
    if (auto problem = problem_with(group, cluster.nodes())) return problem;
    if (cluster.nodes() > 1 && cluster.network.rails && levels_of(cluster.network).size() == 1) {
      const auto routes = routes_of(group.node);
      const char* reason = !cluster.network.pxn         ? "do not, with 'pxn: false'"
                           : !routes->nvlink_everywhere ? "have no NVLink between all of them"
                           : routes->nics.size() != routes_of(cluster.groups.front().node)->nics.size()
                               ? "have another number of NICs than others"
                               : nullptr;
      if (reason != nullptr)
        return fmt::format(
            "rails that only devices of a node could join, and those of '{}' {}; give the network a level above the "
            "rails",
            group.device.name, reason);
    }
  }
  if (cluster.nodes() > 1) {
    const FabricLevel highest = levels_of(cluster.network).back();
    if (highest.nodes && *highest.nodes < cluster.nodes())
      return fmt::format(
          "{} nodes, but the highest level of the network, '{}', joins {}; take fewer nodes, or add a level above it",
          cluster.nodes(), highest.name, *highest.nodes);
  }
  return std::nullopt;
}

Cluster read_cluster(const YamlNode& document, const ClusterCatalog& catalog) {
  Cluster cluster;
  if (const auto schema = document.is_map() ? document.find("schema") : std::nullopt;
      schema && schema->is_scalar() && schema->as_string().starts_with("parplan.plan/"))
    schema->fail(
        "this is a plan, and a cluster is wanted: a cluster.yaml, a topology or the name of one; a plan's own cluster "
        "stands under its 'cluster'");
  const auto groups = document.find("groups");
  if (groups) {
    document.allow_keys({"name", "groups", "network", "device_ids", "memory_headroom", "measured_on", "calibrated",
                         "notes", "sources"});
  } else {
    document.allow_keys({"name", "device", "node", "nodes", "price", "processor", "host", "nvme", "groups", "network",
                         "device_ids", "memory_headroom", "measured_on", "calibrated", "notes", "sources"});
  }
  cluster.name = document.at("name").as_name();
  if (cluster.name.empty()) document.at("name").fail("expected a name, found ''");
  if (const auto network = document.find("network")) {
    cluster.network = read_network(*network);
  }
  cluster.groups.clear();
  if (groups) {
    if (!groups->is_list() || groups->size() == 0)
      groups->fail("expected a list of kinds of nodes, each with 'device', 'node' and 'nodes'");
    for (const YamlNode& item : groups->items()) {
      item.allow_keys({"device", "node", "nodes", "price", "processor", "host", "nvme"});
      cluster.groups.push_back(read_group(item, cluster.name, catalog));
    }
  } else {
    cluster.groups.push_back(read_group(document, cluster.name, catalog));
  }
  const bool any_nic = std::ranges::any_of(cluster.groups, [](const NodeGroup& group) { return has_nic(group.node); });
  if (any_nic && !document.find("network")) document.fail("a node with NICs needs 'network' with its 'latency'");
  if (const auto ids = document.find("device_ids")) {
    for (const YamlNode& item : ids->items()) {
      const auto id = static_cast<int>(item.as_integer(0, most_devices));
      if (std::ranges::find(cluster.device_ids, id) != cluster.device_ids.end())
        item.fail(fmt::format("device {} is listed twice", id));
      cluster.device_ids.push_back(id);
    }
    if (cluster.nodes() != 1)
      ids->fail(fmt::format("says which devices of one machine these are, and there are {} nodes", cluster.nodes()));
    if (static_cast<int>(cluster.device_ids.size()) != cluster.devices())
      ids->fail(fmt::format("lists {} numbers for {} devices", cluster.device_ids.size(), cluster.devices()));
  }
  if (const auto headroom = document.find("memory_headroom")) {
    cluster.memory_headroom = headroom->as_number();
    if (cluster.memory_headroom < 0.0 || cluster.memory_headroom > most_headroom)
      headroom->fail(fmt::format("expected a share from 0 to {}, found '{}'", most_headroom, headroom->as_string()));
  }
  if (const auto measured = document.find("measured_on")) cluster.measured_on = printable_line(measured->as_string());
  if (const auto by = document.find("calibrated")) cluster.calibrated = printable_line(by->as_string());
  if (const auto notes = document.find("notes"))
    for (const YamlNode& note : notes->items()) cluster.notes.push_back(printable_line(note.as_string()));
  // Until the two had keys of their own, 'post_overhead' alone stood for EFA, with LL128. The note
  // is also written, beside the keys, so it says what was given.
  if (const auto network = document.find("network");
      network && network->find("post_overhead") && !network->find("ring_protocols") && !network->find("tree_protocols"))
    cluster.notes.emplace_back(
        "'post_overhead' was given without 'ring_protocols' and 'tree_protocols': rings and trees over nodes were "
        "taken to use simple and ll; on EFA rings use [simple, ll, ll128] and trees [ll, ll128]");
  if (const auto sources = document.find("sources"))
    for (const YamlNode& source : sources->items()) cluster.sources.push_back(printable_line(source.as_string()));
  if (const auto problem = problem_with(cluster)) (groups ? *groups : document.at("node")).fail(*problem);
  return cluster;
}

Cluster read_cluster(const YamlNode& document) { return read_cluster(document, ClusterCatalog{}); }

namespace {

void write_node(YAML::Emitter& out, const NodeKind& node) {
  const auto name_of = [&](int vertex) { return node.vertices[vertex].name; };
  out << YAML::BeginMap;
  out << YAML::Key << "name" << YAML::Value << node.name;
  out << YAML::Key << "vertices" << YAML::Value << YAML::BeginSeq;
  for (const Vertex& vertex : node.vertices) {
    out << YAML::Flow << YAML::BeginMap << YAML::Key << "name" << YAML::Value << vertex.name;
    out << YAML::Key << "kind" << YAML::Value << name(vertex.kind) << YAML::EndMap;
  }
  out << YAML::EndSeq;
  out << YAML::Key << "links" << YAML::Value << YAML::BeginSeq;
  for (const Link& link : node.links) {
    out << YAML::Flow << YAML::BeginMap;
    out << YAML::Key << "between" << YAML::Value << YAML::Flow << YAML::BeginSeq << name_of(link.a) << name_of(link.b)
        << YAML::EndSeq;
    out << YAML::Key << "bandwidth" << YAML::Value << write_bandwidth(link.bandwidth);
    out << YAML::Key << "latency" << YAML::Value << write_duration(link.latency);
    out << YAML::Key << "kind" << YAML::Value << link.kind;
    if (link.line_rate) out << YAML::Key << "line_rate" << YAML::Value << write_bandwidth(*link.line_rate);
    out << YAML::EndMap;
  }
  out << YAML::EndSeq;
  out << YAML::Key << "devices" << YAML::Value << YAML::Flow << YAML::BeginSeq;
  for (const int device : node.devices) out << name_of(device);
  out << YAML::EndSeq;
  if (node.devices_per_machine) out << YAML::Key << "devices_per_machine" << YAML::Value << *node.devices_per_machine;
  if (node.tiles_per_card > 1) out << YAML::Key << "tiles_per_card" << YAML::Value << node.tiles_per_card;
  out << YAML::EndMap;
}

void write_network(YAML::Emitter& out, const Network& network) {
  out << YAML::Flow << YAML::BeginMap;
  out << YAML::Key << "latency" << YAML::Value << write_duration(network.latency);
  if (network.post_overhead)
    out << YAML::Key << "post_overhead" << YAML::Value << write_duration(*network.post_overhead);
  const auto write_protocols = [&](const char* key, const Protocols& protocols, const Protocols& usual) {
    if (protocols == usual && !network.post_overhead) return;
    out << YAML::Key << key << YAML::Value << YAML::BeginSeq;
    for (const std::string& name : protocol_names(protocols)) out << name;
    out << YAML::EndSeq;
  };
  write_protocols("ring_protocols", network.ring_protocols, Network().ring_protocols);
  write_protocols("tree_protocols", network.tree_protocols, Network().tree_protocols);
  if (network.transfer_chunk != Network().transfer_chunk)
    out << YAML::Key << "transfer_chunk" << YAML::Value << write_bytes(network.transfer_chunk);
  if (network.levels.empty())
    out << YAML::Key << "oversubscription" << YAML::Value << fmt::format("{}", network.oversubscription);
  if (network.rails) out << YAML::Key << "rails" << YAML::Value << true;
  if (!network.pxn) out << YAML::Key << "pxn" << YAML::Value << false;
  if (network.one_ring) out << YAML::Key << "one_ring" << YAML::Value << true;
  if (!network.levels.empty()) {
    out << YAML::Key << "levels" << YAML::Value << YAML::BeginSeq;
    for (const FabricLevel& level : network.levels) {
      out << YAML::BeginMap << YAML::Key << "name" << YAML::Value << level.name;
      if (level.nodes) out << YAML::Key << "nodes" << YAML::Value << *level.nodes;
      out << YAML::Key << "oversubscription" << YAML::Value << fmt::format("{}", level.oversubscription);
      out << YAML::Key << "latency" << YAML::Value << write_duration(level.latency) << YAML::EndMap;
    }
    out << YAML::EndSeq;
  }
  out << YAML::EndMap;
}

std::string indented(const std::string& text, const std::string& by) {
  std::string result;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) result += by + line + "\n";
  return result;
}

// The lines of a group from "device:" on, without indentation.
std::string write_group(const NodeGroup& group) {
  YAML::Emitter out;
  out << YAML::BeginMap << YAML::Key << "node" << YAML::Value;
  write_node(out, group.node);
  out << YAML::Key << "nodes" << YAML::Value << group.nodes;
  if (group.price) out << YAML::Key << "price" << YAML::Value << write_price(*group.price);
  if (group.processor) out << YAML::Key << "processor" << YAML::Value << vendor_names[index_of(*group.processor)];
  if (group.host) {
    out << YAML::Key << "host" << YAML::Value << YAML::Flow << YAML::BeginMap;
    if (group.host->memory) out << YAML::Key << "memory" << YAML::Value << write_bytes(*group.host->memory);
    out << YAML::Key << "memory_bandwidth" << YAML::Value << write_bandwidth(group.host->memory_bandwidth);
    if (group.host->link) out << YAML::Key << "link" << YAML::Value << write_bandwidth(*group.host->link);
    out << YAML::EndMap;
  }
  if (group.nvme) {
    out << YAML::Key << "nvme" << YAML::Value << YAML::Flow << YAML::BeginMap;
    out << YAML::Key << "read" << YAML::Value << write_bandwidth(group.nvme->read);
    out << YAML::Key << "write" << YAML::Value << write_bandwidth(group.nvme->write);
    if (group.nvme->latency > Seconds(0.0))
      out << YAML::Key << "latency" << YAML::Value << write_duration(group.nvme->latency);
    if (group.nvme->capacity) out << YAML::Key << "capacity" << YAML::Value << write_bytes(*group.nvme->capacity);
    out << YAML::EndMap;
  }
  out << YAML::EndMap;
  return "device:\n" + indented(write_device(group.device), "  ") + out.c_str() + "\n";
}

}  // namespace

std::string write_cluster(const Cluster& cluster) {
  YAML::Emitter title;
  title << YAML::BeginMap << YAML::Key << "name" << YAML::Value << cluster.name << YAML::EndMap;
  std::string text = std::string(title.c_str()) + "\n";
  if (cluster.groups.size() == 1) {
    text += write_group(cluster.groups.front());
  } else {
    text += "groups:\n";
    for (const NodeGroup& group : cluster.groups) {
      std::string item = indented(write_group(group), "    ");
      item[2] = '-';
      text += item;
    }
  }
  YAML::Emitter out;
  out << YAML::BeginMap;
  out << YAML::Key << "network" << YAML::Value;
  write_network(out, cluster.network);
  if (!cluster.device_ids.empty()) out << YAML::Key << "device_ids" << YAML::Value << YAML::Flow << cluster.device_ids;
  if (cluster.memory_headroom > 0.0)
    out << YAML::Key << "memory_headroom" << YAML::Value << fmt::format("{}", cluster.memory_headroom);
  if (cluster.measured_on) out << YAML::Key << "measured_on" << YAML::Value << *cluster.measured_on;
  if (cluster.calibrated) out << YAML::Key << "calibrated" << YAML::Value << *cluster.calibrated;
  const auto write_list = [&](const char* key, const std::vector<std::string>& items) {
    if (items.empty()) return;
    out << YAML::Key << key << YAML::Value << YAML::BeginSeq;
    for (const std::string& item : items) out << item;
    out << YAML::EndSeq;
  };
  write_list("notes", cluster.notes);
  write_list("sources", cluster.sources);
  out << YAML::EndMap;
  return text + out.c_str() + "\n";
}

}  // namespace parplan
