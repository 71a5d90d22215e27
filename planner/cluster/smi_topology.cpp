#include "planner/cluster/smi_topology.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <regex>
#include <set>
#include <sstream>

#include "planner/base/error.h"
#include "planner/base/text.h"
#include "planner/base/utf8.h"
#include "planner/cluster/node_layout.h"

namespace parplan {
namespace {

constexpr std::array<const char*, 3> affinity_titles = {"CPU Affinity", "NUMA Affinity", "GPU NUMA ID"};

// One line without escapes, carriage returns and exotic spaces; other characters that act on a
// terminal are written out, since names are made of what stands here.
std::string cleaned(std::string line) {
  // The escape character itself is sometimes lost or printed as ^[ in copies.
  static const std::regex escapes("(\x1B|\\^\\[)?\\[[0-9;]{0,16}m|\x1B\\[[0-9;?]{0,16}[A-Za-z]|\x1B\\([A-Z]");
  line = std::regex_replace(line, escapes, "");
  for (const std::string_view space : {"\xC2\xA0", "\xEF\xBB\xBF", "\r"})
    for (auto at = line.find(space); at != std::string::npos; at = line.find(space))
      line.replace(at, space.size(), 1, ' ');
  std::string shown;
  for (std::size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
    end = line.find('\t', begin);
    shown += printable_line(std::string_view(line).substr(begin, end - begin));
    if (end != std::string::npos) shown += '\t';
  }
  return shown;
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

// The parts of a word that ran together, if it consists of such parts and nothing else.
std::vector<std::string> parts_of(const std::string& word, const std::regex& part) {
  std::vector<std::string> parts;
  for (auto at = word.cbegin(); at != word.cend();) {
    std::smatch match;
    if (!std::regex_search(at, word.cend(), match, part, std::regex_constants::match_continuous)) return {};
    parts.push_back(match.str());
    at = match[0].second;
  }
  return parts;
}

// (All repetitions here are bounded: std::regex of libstdc++ recurses once per character, so an
// endless line of digits would overflow the stack.)
const std::regex& end_name() {
  static const std::regex pattern("GPU[0-9]{1,4}|NIC[0-9]{1,4}|mlx[0-9]{1,3}_[0-9]{1,3}");
  return pattern;
}
const std::regex& connection_name() {
  static const std::regex pattern("NV[0-9]{1,3}|SYS|SOC|NODE|PHB|PXB|PIX|X");
  return pattern;
}

bool is_gpu(const std::string& name) { return name.starts_with("GPU"); }

// The column where the affinities begin.
std::size_t affinity_start(const std::string& line) {
  std::size_t start = line.size();
  for (const char* title : affinity_titles) start = std::min(start, line.find(title));
  return start;
}

bool is_header(const std::string& line) {
  const std::vector<std::string> words = words_of(line.substr(0, affinity_start(line)));
  if (words.empty()) return false;
  const std::vector<std::string> first = parts_of(words[0], end_name());
  if (first.empty() || !is_gpu(first[0])) return false;
  return words.size() == 1 ? first.size() > 1 || affinity_start(line) < line.size()
                           : parts_of(words[1], connection_name()).empty();
}

struct Row {
  std::string label;
  int line = 0;
  std::vector<std::string> cells;  // connections; "" where a cell is empty
  std::vector<std::string> rest;   // affinities
};

// Connections first, then affinities. Tabs preserve empty cells; between spaces there are none.
Row read_row(const std::string& line, int number, const std::vector<std::string>& columns,
             const std::string& file_name) {
  Row row{.label = words_of(line)[0], .line = number, .cells = {}, .rest = {}};
  std::vector<std::string> fields;
  if (line.find('\t') != std::string::npos) {
    std::istringstream stream(line.substr(line.find(row.label) + row.label.size()));
    std::string field;
    std::getline(stream, field, '\t');  // what follows the label
    if (!words_of(field).empty()) fields.push_back(field);
    while (std::getline(stream, field, '\t')) fields.push_back(field);
  } else {
    fields = words_of(line);
    fields.erase(fields.begin());
  }
  bool connections = true;
  for (const std::string& field : fields) {
    const std::vector<std::string> words = words_of(field);
    if (words.empty()) (connections && row.cells.size() < columns.size() ? row.cells : row.rest).emplace_back();
    for (const std::string& word : words) {
      if (row.cells.size() == columns.size()) connections = false;
      const std::vector<std::string> parts = parts_of(word, connection_name());
      const bool affinity = std::isdigit(static_cast<unsigned char>(word[0])) || word == "N/A";
      if (affinity) connections = false;
      if (connections && parts.empty())
        throw ConfigError(
            {file_name, number, 0},
            fmt::format("unknown connection '{}' between {} and {}; known are X, NV#, PIX, PXB, PHB, NODE, SYS and SOC",
                        word, row.label, columns[row.cells.size()]));
      if (!parts.empty() && row.cells.size() + parts.size() > columns.size())
        throw ConfigError(
            {file_name, number, 0},
            fmt::format("row {} has more connections than the header's {} columns", row.label, columns.size()));
      if (connections)
        row.cells.insert(row.cells.end(), parts.begin(), parts.end());
      else
        row.rest.push_back(word);
    }
  }
  for (std::string& cell : row.cells)
    if (cell == "SOC") cell = std::string("SYS");
  while (!row.cells.empty() && row.cells.back().empty()) row.cells.pop_back();
  return row;
}

// Disjoint sets of ends.
struct Groups {
  std::vector<std::size_t> parent;
  explicit Groups(std::size_t count) : parent(count) { std::iota(parent.begin(), parent.end(), std::size_t{0}); }
  std::size_t of(std::size_t i) const { return parent[i] == i ? i : of(parent[i]); }
  void join(std::size_t a, std::size_t b) {
    const auto [low, high] = std::minmax({of(a), of(b)});
    parent[high] = low;
  }
};

// PCIe distance, or 0 where NVLink hides it.
int pcie_distance(const std::string& connection) {
  static const std::map<std::string, int> distances = {{"PIX", 1}, {"PXB", 1}, {"PHB", 2}, {"NODE", 3}, {"SYS", 4}};
  const auto found = distances.find(connection);
  return found == distances.end() ? 0 : found->second;
}

int nvlinks_in(const std::string& connection) {
  return connection.starts_with("NV") ? std::stoi(connection.substr(2)) : 0;
}

// Joins GPUs by NVLink: through a switch where each pair has more links than a card could have for
// it, otherwise directly. Returns whether every pair of GPUs has NVLink.
bool add_nvlinks(const SmiTopology& topology, const DeviceKind& device, NodeKind& node) {
  const std::size_t count = topology.gpus.size();
  std::set<int> distinct;
  std::vector<int> sums(count, 0);
  for (std::size_t i = 0; i < count; ++i)
    for (std::size_t j = 0; j < count; ++j) {
      if (i == j) continue;
      const int links = nvlinks_in(topology.connection[i][j]);
      distinct.insert(links);
      sums[i] += links;
      if (links > device.nvlinks)
        throw ConfigError(
            fmt::format("{} and {} are connected by {}, but device '{}' has {} NVLinks; is --device right?",
                        topology.gpus[i], topology.gpus[j], topology.connection[i][j], device.name, device.nvlinks));
    }
  const bool is_uniform = distinct.size() == 1;
  for (std::size_t i = 0; i < count; ++i)
    if (sums[i] > device.nvlinks && !is_uniform)
      throw ConfigError(fmt::format("{} has {} NVLinks to other GPUs, but device '{}' has {}; is --device right?",
                                    topology.gpus[i], sums[i], device.name, device.nvlinks));
  if (count > 2 && distinct.size() == 1 && *distinct.begin() * static_cast<int>(count - 1) > device.nvlinks) {
    const int links = *distinct.begin();
    const int center = add_vertex(node, "NVSwitch", VertexKind::nvswitch);
    for (std::size_t i = 0; i < count; ++i)
      add_link(node, static_cast<int>(i), center, device.nvlink_per_link_reached * links, nvlink_hop_latency / 2.0,
               fmt::format("NV{}", links));
    return true;
  }
  for (std::size_t i = 0; i < count; ++i)
    for (std::size_t j = i + 1; j < count; ++j)
      if (const int links = nvlinks_in(topology.connection[i][j]); links > 0)
        add_link(node, static_cast<int>(i), static_cast<int>(j), device.nvlink_per_link_reached * links,
                 nvlink_hop_latency, fmt::format("NV{}", links));
  return !distinct.contains(0);
}

// Adds cards and NICs under PCIe switches (PIX, PXB), those under host bridges (PHB), those in
// sockets (NODE or one NUMA node), and the links between sockets (SYS). `ends` are the vertices of
// the topology's GPUs and then NICs.
void add_pcie(const SmiTopology& topology, const DeviceKind& device, const std::vector<int>& ends, Cluster& cluster) {
  NodeKind& node = cluster.groups.front().node;
  const std::size_t count = ends.size();
  Groups switches(count);
  Groups bridges(count);
  Groups sockets(count);
  for (std::size_t i = 0; i < count; ++i)
    for (std::size_t j = i + 1; j < count; ++j) {
      const int distance = pcie_distance(topology.connection[i][j]);
      if (distance == 1) switches.join(i, j);
      if (distance >= 1 && distance <= 2) bridges.join(i, j);
      if (distance >= 1 && distance <= 3) sockets.join(i, j);
      if (j < topology.numa.size() && topology.numa[i] && topology.numa[i] == topology.numa[j]) sockets.join(i, j);
    }
  const BytesPerSecond pcie = pcie_bandwidth(device.pcie_generation, device.pcie_lanes);
  std::map<std::size_t, int> switch_sizes;
  for (std::size_t i = 0; i < count; ++i) ++switch_sizes[switches.of(i)];
  std::map<std::size_t, int> bridge_vertices;
  std::map<std::size_t, std::set<std::size_t>> bridges_in;  // socket -> bridges
  for (std::size_t i = 0; i < count; ++i) {
    if (bridges.of(i) == i)
      bridge_vertices[i] =
          add_vertex(node, fmt::format("host bridge {}", bridge_vertices.size()), VertexKind::host_bridge);
    bridges_in[sockets.of(i)].insert(bridges.of(i));
  }
  std::map<std::size_t, int> switch_vertices;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t group = switches.of(i);
    int near = bridge_vertices.at(bridges.of(i));
    if (switch_sizes[group] > 1) {
      if (!switch_vertices.contains(group)) {
        switch_vertices[group] =
            add_vertex(node, fmt::format("PCIe switch {}", switch_vertices.size()), VertexKind::pcie_switch);
        add_link(node, switch_vertices[group], near, pcie, pcie_link_latency, "PCIe");
      }
      near = switch_vertices[group];
    }
    add_link(node, ends[i], near, pcie, pcie_link_latency, "PCIe");
  }
  // A socket with several host bridges gets a central vertex, where the SYS links to other sockets
  // end too.
  std::vector<int> middles;
  bool any_sys = false;
  for (const auto& [socket, members] : bridges_in) {
    if (members.size() == 1) {
      middles.push_back(bridge_vertices.at(*members.begin()));
      continue;
    }
    middles.push_back(add_vertex(node, fmt::format("socket {}", middles.size()), VertexKind::host_bridge));
    for (const std::size_t bridge : members) {
      // Ends of one NUMA node may still be SYS apart; then no end of this bridge is nearer to
      // another bridge.
      bool far = false;
      bool near = false;
      for (std::size_t i = 0; i < count; ++i)
        for (std::size_t j = 0; j < count; ++j) {
          if (bridges.of(i) != bridge || sockets.of(j) != socket || bridges.of(j) == bridge) continue;
          far = far || pcie_distance(topology.connection[i][j]) == 4;
          near = near || pcie_distance(topology.connection[i][j]) == 3;
        }
      const bool sys = far && !near;
      any_sys = any_sys || sys;
      add_link(node, bridge_vertices.at(bridge), middles.back(), sys ? socket_bandwidth : within_socket_bandwidth,
               Seconds(0.0), sys ? "SYS" : "NODE");
    }
  }
  for (std::size_t i = 0; i < middles.size(); ++i)
    for (std::size_t j = i + 1; j < middles.size(); ++j) {
      add_link(node, middles[i], middles[j], socket_bandwidth, Seconds(0.0), "SYS");
      any_sys = true;
    }
  cluster.notes.push_back(
      fmt::format("PCIe links taken as generation {} x{}, the card's", device.pcie_generation, device.pcie_lanes));
  if (any_sys) cluster.notes.push_back("links between sockets taken as 16 GB/s, NCCL's for AMD (src/graph/topo.h)");
}

}  // namespace

bool is_smi_topology(const std::string& text) {
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);)
    if (is_header(cleaned(line))) return true;
  return false;
}

SmiTopology read_smi_topology(const std::string& text, const std::string& file_name) {
  check_utf8(text, file_name);
  // The header, then rows up to the legend or to the first line that is no row.
  std::vector<std::string> columns;
  std::vector<std::string> titles;  // of the affinity columns, as in the text
  std::vector<Row> rows;
  int header_line = 0;
  std::istringstream stream(text);
  int number = 0;
  for (std::string raw; std::getline(stream, raw);) {
    ++number;
    const std::string line = cleaned(raw);
    const std::vector<std::string> words = words_of(line);
    if (words.empty() || words[0][0] == '#') continue;
    if (header_line == 0) {
      if (!is_header(line)) continue;
      header_line = number;
      for (const std::string& word : words_of(line.substr(0, affinity_start(line)))) {
        std::vector<std::string> parts = parts_of(word, end_name());
        if (parts.empty()) parts = {word};
        for (const std::string& part : parts) {
          if (std::find(columns.begin(), columns.end(), part) != columns.end())
            throw ConfigError({file_name, number, 0}, fmt::format("column '{}' appears twice in the header", part));
          columns.push_back(part);
        }
      }
      std::map<std::size_t, std::string> by_place;
      for (const char* title : affinity_titles)
        if (const auto at = line.find(title); at != std::string::npos) by_place[at] = title;
      for (const auto& [at, title] : by_place) titles.push_back(title);
      continue;
    }
    if (std::find(columns.begin(), columns.end(), words[0]) == columns.end()) {
      if (parts_of(words[0], end_name()).empty()) break;
      throw ConfigError({file_name, number, 0},
                        fmt::format("row '{}' has no column; the columns are {}", words[0], join(columns)));
    }
    for (const Row& row : rows)
      if (row.label == words[0])
        throw ConfigError({file_name, number, 0},
                          fmt::format("a second row '{}'; the first is line {}", words[0], row.line));
    rows.push_back(read_row(line, number, columns, file_name));
  }
  if (header_line == 0)
    throw ConfigError(Location{.file = file_name}, "found no header of nvidia-smi topo -m (a line of GPU0, GPU1, ...)");

  // The matrix, GPUs first; a cell that a row lacks is taken from the other half.
  SmiTopology topology;
  std::vector<std::string> order;
  for (const std::string& column : columns) (is_gpu(column) ? topology.gpus : topology.nics).push_back(column);
  order = topology.gpus;
  order.insert(order.end(), topology.nics.begin(), topology.nics.end());
  const std::size_t count = order.size();
  const std::size_t gpus = topology.gpus.size();
  topology.connection.assign(count, std::vector<std::string>(count));
  topology.numa.resize(gpus);
  const auto place_of = [&](const std::string& name) {
    return static_cast<std::size_t>(std::find(order.begin(), order.end(), name) - order.begin());
  };
  std::vector<const Row*> row_of(count, nullptr);
  const auto numa_title =
      static_cast<std::size_t>(std::find(titles.begin(), titles.end(), "NUMA Affinity") - titles.begin());
  for (const Row& row : rows) {
    const std::size_t i = place_of(row.label);
    row_of[i] = &row;
    for (std::size_t c = 0; c < row.cells.size(); ++c) {
      const std::size_t j = place_of(columns[c]);
      if (!row.cells[c].empty() && (row.cells[c] == "X") != (i == j))
        throw ConfigError({file_name, row.line, 0},
                          fmt::format("row {} has '{}' in column {}; X stands where a row meets its own column",
                                      row.label, row.cells[c], columns[c]));
      topology.connection[i][j] = row.cells[c];
    }
    if (i < gpus && numa_title < row.rest.size() && !row.rest[numa_title].empty() && row.rest[numa_title] != "N/A")
      topology.numa[i] = row.rest[numa_title];
  }
  const auto state_of = [&](std::size_t i) {
    return row_of[i] ? fmt::format("row {} (line {}) has {} of {} cells", order[i], row_of[i]->line,
                                   std::count_if(row_of[i]->cells.begin(), row_of[i]->cells.end(),
                                                 [](const std::string& cell) { return !cell.empty(); }),
                                   count)
                     : fmt::format("row {} is missing", order[i]);
  };
  int mended = 0;
  int lacking = 0;
  std::string first_lack;
  for (std::size_t i = 0; i < count; ++i) {
    topology.connection[i][i] = std::string("X");
    for (std::size_t j = i + 1; j < count; ++j) {
      std::string& above = topology.connection[i][j];
      std::string& below = topology.connection[j][i];
      if (!above.empty() && !below.empty() && above != below)
        throw ConfigError({file_name, row_of[j]->line, 0},
                          fmt::format("{} and {} are {} apart in row {} (line {}) but {} in row {} (line {})", order[i],
                                      order[j], above, order[i], row_of[i]->line, below, order[j], row_of[j]->line));
      if (above.empty() != below.empty()) ++mended;
      if (above.empty()) above = below;
      if (below.empty()) below = above;
      if (!above.empty() || i >= gpus) continue;
      if (lacking++ == 0)
        first_lack =
            fmt::format("no connection between {} and {}: {} and {}", order[i], order[j], state_of(i), state_of(j));
    }
  }
  if (lacking > 0)
    throw ConfigError({file_name, header_line, 0},
                      fmt::format("{}; {} pair{} lacking in all", first_lack, lacking, lacking == 1 ? " is" : "s are"));
  std::vector<std::string> missing;
  for (std::size_t i = 0; i < count; ++i)
    if (row_of[i] == nullptr) missing.push_back(order[i]);
  if (!missing.empty())
    topology.notes.push_back(
        fmt::format("row{} {} missing in the text; read from the other half of the matrix, where it has them",
                    missing.size() == 1 ? "" : "s", join(missing)));
  else if (mended > 0)
    topology.notes.push_back(fmt::format("{} empty cells read from the other half of the matrix", mended));
  return topology;
}

Cluster cluster_of(const SmiTopology& topology, const std::string& name, const DeviceKind& device,
                   std::optional<BytesPerSecond> network) {
  Cluster cluster;
  cluster.name = name;
  cluster.groups.front().device = device;
  cluster.notes = topology.notes;
  cluster.sources = {"nvidia-smi topo -m", "speeds: device kind and NCCL's constants (planner/cluster/node_layout.h)"};
  NodeKind& node = cluster.groups.front().node;
  node.name = name;
  std::vector<int> ends;
  for (const std::string& gpu : topology.gpus) ends.push_back(add_vertex(node, gpu, VertexKind::device));
  const bool all_nvlink = add_nvlinks(topology, device, node);
  if (network && topology.nics.empty())
    throw ConfigError(
        fmt::format("--network: '{}' lists no NICs, whose speed it is; leave it out for one node, or write a "
                    "cluster.yaml whose node has 'nics' (docs/cluster.md)",
                    name));
  if (network) {
    const int fabric = add_vertex(node, "network", VertexKind::network);
    for (const std::string& nic : topology.nics) {
      ends.push_back(add_vertex(node, nic, VertexKind::nic));
      add_link(node, ends.back(), fabric, *network * nic_reached_share, Seconds(0.0), "network");
    }
    cluster.network.latency = network_latency;
  } else if (!topology.nics.empty()) {
    cluster.notes.push_back(
        fmt::format("{} left out, as {} speed is not known: one node only; give --network for several",
                    topology.nics.size() == 1 ? "1 NIC is" : fmt::format("{} NICs are", topology.nics.size()),
                    topology.nics.size() == 1 ? "its" : "their"));
  }
  if (network || (!all_nvlink && topology.gpus.size() > 1)) {
    if (device.pcie_generation == 0)
      throw ConfigError(fmt::format("the GPUs are connected by PCIe, but device '{}' has none", device.name));
    add_pcie(topology, device, ends, cluster);
  }
  return cluster;
}

}  // namespace parplan
