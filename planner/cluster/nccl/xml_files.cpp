#include "planner/cluster/nccl/xml_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <pugixml.hpp>
#include <set>
#include <string_view>
#include <system_error>

#include "planner/base/enum_index.h"
#include "planner/base/text.h"
#include "planner/base/utf8.h"

namespace parplan {
namespace {

// More than any machine has; NCCL itself reads 256 elements of a node (NCCL_TOPO_XML_MAX_NODES).
constexpr int most_elements = 1024;
constexpr std::size_t most_cpus = 64;
constexpr int deepest_pci = 32;
constexpr int nvswitch_class = 0x068000;

// A parsed text with the places of its elements.
class Document {
 public:
  Document(const std::string& text, std::string file) : file_(std::move(file)) {
    check_utf8(text, file_);
    lines_.push_back(0);
    for (std::size_t i = 0; i < text.size(); ++i)
      if (text[i] == '\n') lines_.push_back(i + 1);
    const pugi::xml_parse_result result =
        document_.load_buffer(text.data(), text.size(), pugi::parse_default, pugi::encoding_utf8);
    if (!result) throw ConfigError(place(static_cast<std::size_t>(std::max<std::ptrdiff_t>(result.offset, 0))),
                                   fmt::format("malformed XML: {}", lower(result.description())));
    check(document_, 0);
  }

  // The position of the element's '<'.
  Location where(const pugi::xml_node& node) const {
    const std::ptrdiff_t offset = node.offset_debug();
    return offset < 1 ? Location{.file = file_} : place(static_cast<std::size_t>(offset - 1));
  }
  [[noreturn]] void fail(const pugi::xml_node& node, const std::string& message) const {
    throw ConfigError(where(node), message);
  }
  pugi::xml_node root() const { return document_.document_element(); }
  const std::string& file() const { return file_; }

 private:
  // For a message: the text up to the end of the line.
  static std::string_view first_line(std::string_view text) {
    text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
    return text.substr(0, std::min({text.find_first_of("\r\n"), text.size(), std::size_t{40}}));
  }
  static std::string lower(std::string text) {
    if (!text.empty()) text[0] = static_cast<char>(std::tolower(static_cast<unsigned char>(text[0])));
    return text;
  }
  Location place(std::size_t offset) const {
    const auto line = std::upper_bound(lines_.begin(), lines_.end(), offset) - lines_.begin();
    return {.file = file_, .line = static_cast<int>(line), .column = static_cast<int>(offset - lines_[line - 1]) + 1};
  }
  // Checks for what XML forbids and pugixml accepts, and for more elements than any machine has.
  void check(const pugi::xml_node& node, int depth) {
    for (const pugi::xml_node& child : node.children()) {
      if (child.type() == pugi::node_pcdata || child.type() == pugi::node_cdata)
        throw ConfigError(
            place(static_cast<std::size_t>(std::max<std::ptrdiff_t>(child.offset_debug(), 0))),
            fmt::format("text inside <{}>: '{}'; expected elements only", node.name(), first_line(child.value())));
      if (child.type() != pugi::node_element) continue;
      if (depth == 0 && child != root())
        fail(child, fmt::format("a second <{}> after the first element; expected one", child.name()));
      if (++elements_ > most_elements) fail(child, fmt::format("more than {} elements", most_elements));
      if (depth > deepest_pci)
        fail(child, fmt::format("<{}> is nested deeper than {} elements", child.name(), deepest_pci));
      std::set<std::string_view> names;
      for (const pugi::xml_attribute& attribute : child.attributes())
        if (!names.insert(attribute.name()).second)
          fail(child, fmt::format("<{}> has '{}' twice", child.name(), attribute.name()));
      check(child, depth + 1);
    }
  }

  pugi::xml_document document_;
  std::vector<std::size_t> lines_;  // where each begins
  std::string file_;
  int elements_ = 0;
};

std::optional<std::string> text_of(const pugi::xml_node& node, const char* key) {
  const pugi::xml_attribute attribute = node.attribute(key);
  if (!attribute) return std::nullopt;
  return std::string(attribute.value());
}

std::string required_text(const Document& document, const pugi::xml_node& node, const char* key) {
  const auto text = text_of(node, key);
  if (!text) document.fail(node, fmt::format("<{}> needs '{}'", node.name(), key));
  return *text;
}

// A whole number as NCCL reads it: decimal, or hexadecimal after 0x; with `base` 16 the 0x is
// optional.
template <typename Integer>
std::optional<Integer> whole_number(std::string_view text, int base = 10) {
  if (text.starts_with("0x") || text.starts_with("0X")) {
    text.remove_prefix(2);
    base = 16;
  }
  Integer value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

struct Range {
  int least = 0;
  int most = std::numeric_limits<int>::max();
};

std::optional<int> optional_int(const Document& document, const pugi::xml_node& node, const char* key, Range range) {
  const auto text = text_of(node, key);
  if (!text) return std::nullopt;
  const auto value = whole_number<int>(*text);
  if (!value || *value < range.least || *value > range.most)
    document.fail(node, fmt::format("<{}> has {}=\"{}\"; expected a whole number {}", node.name(), key, *text,
                                    range.most == std::numeric_limits<int>::max()
                                        ? fmt::format("from {} on", range.least)
                                        : fmt::format("from {} to {}", range.least, range.most)));
  return value;
}

int required_int(const Document& document, const pugi::xml_node& node, const char* key, Range range) {
  required_text(document, node, key);
  return *optional_int(document, node, key, range);
}

float required_float(const Document& document, const pugi::xml_node& node, const char* key) {
  const std::string text = required_text(document, node, key);
  float value = 0.0F;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value) || value < 0.0F)
    document.fail(node, fmt::format("<{}> has {}=\"{}\"; expected a number from 0 on", node.name(), key, text));
  return value;
}

std::optional<std::uint64_t> optional_hexadecimal(const Document& document, const pugi::xml_node& node,
                                                  const char* key) {
  const auto text = text_of(node, key);
  if (!text) return std::nullopt;
  const auto value = whole_number<std::uint64_t>(*text, 16);
  if (!value)
    document.fail(node, fmt::format("<{}> has {}=\"{}\"; expected a hexadecimal number of at most 64 bits", node.name(),
                                    key, *text));
  return value;
}

// "0000:83:00.0" as the number that NCCL makes of it: its digits.
std::int64_t bus_id_of(const Document& document, const pugi::xml_node& node, const char* key) {
  const std::string text = required_text(document, node, key);
  std::string digits;
  for (const char c : text)
    if (c != ':' && c != '.') digits += c;
  const auto value = whole_number<std::uint64_t>(digits, 16);
  const auto separators =
      static_cast<std::size_t>(std::count(text.begin(), text.end(), ':') + std::count(text.begin(), text.end(), '.'));
  if (!value || digits.size() > 15 || digits.find_first_of("xX") != std::string::npos || separators < 2)
    document.fail(
        node, fmt::format("<{}> has {}=\"{}\"; expected a PCI bus id such as 0000:83:00.0", node.name(), key, text));
  return static_cast<std::int64_t>(*value);
}

// Unknown elements are left out, as in NCCL, but with a note, since one may be a typing error.
void note_unknown(const Document& document, const pugi::xml_node& node, const std::vector<std::string>& known,
                  std::vector<std::string>& notes) {
  for (const pugi::xml_node& child : node.children()) {
    if (child.type() != pugi::node_element || std::find(known.begin(), known.end(), child.name()) != known.end())
      continue;
    notes.push_back(fmt::format("<{}> in <{}> (line {}) left out, as NCCL does{}", child.name(), node.name(),
                                document.where(child).line, did_you_mean(child.name(), known)));
  }
}

int class_of(const Document& document, const pugi::xml_node& node, const char* key) {
  const std::string text = required_text(document, node, key);
  // /sys has six digits; NCCL itself writes "0x03" and "0x02" where it could not read them.
  const auto value = whole_number<int>(text);
  if (!value || !text.starts_with("0x") || text.size() > 8 || text.size() % 2 != 0)
    document.fail(node,
                  fmt::format("<{}> has {}=\"{}\"; expected a PCI class such as 0x030200", node.name(), key, text));
  return *value << 4 * (8 - static_cast<int>(text.size()));
}

// 16 bits of the device's id. The file may lack it.
std::uint64_t id_part(const Document& document, const pugi::xml_node& node, const char* key) {
  const auto value = optional_hexadecimal(document, node, key);
  if (value && *value > 0xffff)
    document.fail(node,
                  fmt::format("<{}> has {}=\"{}\"; expected at most 0xffff", node.name(), key, *text_of(node, key)));
  return value.value_or(0);
}

// Per second, for the generations of PCIe.
constexpr std::array<std::string_view, 6> gigatransfers = {"2.5", "5",  "8", "16",  "32", "64"};

// As Linux and NCCL write it: "16 GT/s", "16.0 GT/s PCIe".
std::optional<int> generation_of(std::string_view speed) {
  for (std::size_t g = 0; g < gigatransfers.size(); ++g) {
    std::string_view rest = speed;
    if (!rest.starts_with(gigatransfers[g])) continue;
    rest.remove_prefix(gigatransfers[g].size());
    if (rest.starts_with(".0")) rest.remove_prefix(2);
    if (rest == " GT/s" || rest == " GT/s PCIe") return static_cast<int>(g) + 1;
  }
  return std::nullopt;
}
bool is_unknown_speed(std::string_view speed) {
  return speed.empty() || speed.starts_with("Unknown") || speed.starts_with("unknown");
}

NcclNet read_net(const Document& document, const pugi::xml_node& node) {
  NcclNet net;
  net.where = document.where(node);
  net.name = printable_line(text_of(node, "name").value_or(""));
  net.dev = required_int(document, node, "dev", {0, 1 << 20});
  net.megabits = std::max(0, optional_int(document, node, "speed", {-1, std::numeric_limits<int>::max()}).value_or(0));
  if (text_of(node, "latency")) net.latency = required_float(document, node, "latency");
  net.port = optional_int(document, node, "port", {0, 1 << 20}).value_or(0);
  net.guid = optional_hexadecimal(document, node, "guid");
  net.direct_rdma = optional_int(document, node, "gdr", {0, 1}).value_or(0) == 1;
  net.collectives = optional_int(document, node, "coll", {0, 1}).value_or(0) == 1;
  const auto or_undefined = [](std::optional<int> value) { return value && *value < 0 ? std::nullopt : value; };
  net.rail = or_undefined(optional_int(document, node, "rail", {-1, 1 << 20}));
  net.plane = or_undefined(optional_int(document, node, "plane", {-1, 1 << 20}));
  return net;
}

void read_nic(const Document& document, const pugi::xml_node& node, NcclPci& pci, std::vector<std::string>& notes) {
  note_unknown(document, node, {"net"}, notes);
  pci.has_nic = true;
  for (const pugi::xml_node& child : node.children("net")) {
    if (!child.attribute("dev")) {
      notes.push_back(fmt::format("<net> (line {}) left out, as it has no 'dev'", document.where(child).line));
      continue;
    }
    // It may serve others than NCCL's collectives: GPU-initiated or one-sided traffic.
    if (optional_int(document, child, "net", {0, 1}).value_or(1) == 0) continue;
    pci.nets.push_back(read_net(document, child));
  }
}

NcclGpu read_gpu(const Document& document, const pugi::xml_node& node, std::vector<std::string>& notes) {
  note_unknown(document, node, {"nvlink", "c2c"}, notes);
  NcclGpu gpu;
  gpu.where = document.where(node);
  gpu.dev = required_int(document, node, "dev", {0, 1 << 20});
  gpu.rank = optional_int(document, node, "rank", {-1, 1 << 24});
  if (gpu.rank && *gpu.rank < 0) gpu.rank.reset();
  gpu.compute_capability = required_int(document, node, "sm", {10, 1000});
  gpu.direct_rdma = optional_int(document, node, "gdr", {0, 1}).value_or(0) == 1;
  if (node.attribute("mlopart"))
    document.fail(node,
                  "<gpu> with 'mlopart' is a part of a GPU; parplan plans for whole ones: capture the topology with "
                  "GPUs that are not split");
  for (const pugi::xml_node& child : node.children("nvlink")) {
    NcclNvlink link;
    link.where = document.where(child);
    link.target = bus_id_of(document, child, "target");
    link.target_name = required_text(document, child, "target");
    link.count = required_int(document, child, "count", {1, 1024});
    link.target_class = child.attribute("tclass") ? class_of(document, child, "tclass") : 0;
    gpu.nvlinks.push_back(std::move(link));
  }
  for (const pugi::xml_node& child : node.children("c2c"))
    gpu.c2c_bandwidth += static_cast<double>(required_int(document, child, "bw", {1, 1 << 30})) *
                         required_int(document, child, "count", {1, 1024}) / 1000.0;
  return gpu;
}

NcclPci read_pci(const Document& document, const pugi::xml_node& node, std::vector<std::string>& notes) {
  note_unknown(document, node, {"pci", "gpu", "nic", "pcilink"}, notes);
  NcclPci pci;
  pci.where = document.where(node);
  pci.bus_id = bus_id_of(document, node, "busid");
  pci.bus_name = required_text(document, node, "busid");
  if (node.attribute("class")) pci.pci_class = class_of(document, node, "class");
  pci.device = id_part(document, node, "vendor") << 48 | id_part(document, node, "device") << 32 |
               id_part(document, node, "subsystem_vendor") << 16 | id_part(document, node, "subsystem_device");
  pci.link_speed = text_of(node, "link_speed").value_or("");
  if (!is_unknown_speed(pci.link_speed) && !generation_of(pci.link_speed))
    document.fail(node, fmt::format("<pci> has link_speed=\"{}\"; expected 2.5, 5, 8, 16, 32 or 64 GT/s, such as "
                                    "\"16.0 GT/s PCIe\", or \"\" where not known",
                                    pci.link_speed));
  const std::string width = text_of(node, "link_width").value_or("");
  // 255 is Linux's value for an unknown width (PCI_LNK_WIDTH_UNKNOWN).
  if (!width.empty()) {
    pci.link_width = *optional_int(document, node, "link_width", {0, 255});
    constexpr std::array<int, 9> widths = {0, 1, 2, 4, 8, 12, 16, 32, 255};
    if (std::find(widths.begin(), widths.end(), pci.link_width) == widths.end())
      document.fail(
          node,
          fmt::format("<pci> has link_width=\"{}\"; PCIe links have 1, 2, 4, 8, 12, 16 or 32 lanes, 0 where not known",
                      width));
  }
  for (const pugi::xml_node& child : node.children("gpu")) {
    if (pci.gpu)
      document.fail(child,
                    "a second <gpu> in one PCI device is a GPU that ranks share; parplan gives each rank its own");
    pci.gpu = read_gpu(document, child, notes);
  }
  if (pci.gpu && !pci.pci_class) pci.pci_class = 0x030000;
  if (pci.gpu && !pci.is_gpu())
    document.fail(node, fmt::format("<pci> has a <gpu> but class=\"{}\", which is no GPU's; those begin with 0x03",
                                    *text_of(node, "class")));
  if (const pugi::xml_node nic = node.child("nic")) read_nic(document, nic, pci, notes);
  if (pci.gpu && pci.has_nic) document.fail(node, "<pci> has a <gpu> and a <nic>; a device is one of them");
  for (const pugi::xml_node& child : node.children("pcilink"))
    pci.peers.push_back(bus_id_of(document, child, "target"));
  for (const pugi::xml_node& child : node.children("pci")) {
    if (pci.is_gpu() || pci.is_nic() || pci.pci_class.value_or(0) >> 8 == nvswitch_class >> 8)
      document.fail(child, "<pci> inside of a GPU, NIC or NVSwitch; only bridges have devices behind them");
    pci.children.push_back(read_pci(document, child, notes));
  }
  return pci;
}

NcclCpu read_cpu(const Document& document, const pugi::xml_node& node, std::vector<std::string>& notes) {
  note_unknown(document, node, {"pci", "nic"}, notes);
  NcclCpu cpu;
  cpu.where = document.where(node);
  cpu.numa = required_int(document, node, "numaid", {-1, 1 << 16});
  cpu.host = optional_hexadecimal(document, node, "host_hash");
  const std::string architecture = text_of(node, "arch").value_or("");
  if (architecture == "x86_64") cpu.architecture = CpuArchitecture::x86;
  if (architecture == "arm64") cpu.architecture = CpuArchitecture::arm;
  if (architecture == "ppc64") cpu.architecture = CpuArchitecture::power;
  const std::string vendor = text_of(node, "vendor").value_or("");
  if (vendor == "GenuineIntel") cpu.vendor = CpuVendor::intel;
  if (vendor == "AuthenticAMD") cpu.vendor = CpuVendor::amd;
  if (vendor == "CentaurHauls" || vendor == "  Shanghai  ") cpu.vendor = CpuVendor::zhaoxin;
  cpu.family = optional_int(document, node, "familyid", {0, 1 << 16}).value_or(0);
  cpu.model = optional_int(document, node, "modelid", {0, 1 << 16}).value_or(0);
  for (const pugi::xml_node& child : node.children()) {
    if (std::string_view(child.name()) == "pci") cpu.children.push_back(read_pci(document, child, notes));
    if (std::string_view(child.name()) == "nic") {
      NcclPci place;
      place.where = document.where(child);
      read_nic(document, child, place, notes);
      cpu.children.push_back(std::move(place));
    }
  }
  return cpu;
}

template <typename Pci>
void collect(std::vector<Pci*>& all, auto& children) {
  for (auto& child : children) {
    if (!child.bus_name.empty()) all.push_back(&child);
    collect(all, child.children);
  }
}

// Finds the other end of NVLinks for which the file has none: a device of the file, or an NVSwitch
// that the machine hides.
void find_targets(NcclTopology& topology) {
  const std::vector<NcclPci*> all = pci_devices(topology);
  for (NcclPci* pci : all)
    if (pci->gpu)
      for (NcclNvlink& link : pci->gpu->nvlinks) {
        if (link.target_class != 0) continue;
        const auto target =
            std::find_if(all.begin(), all.end(), [&](const NcclPci* one) { return one->bus_id == link.target; });
        link.target_class = target == all.end() ? nvswitch_class : (*target)->pci_class.value_or(nvswitch_class);
      }
}

// What no machine has: two devices with one bus id, rank or NVML number; NVLinks to something other
// than a GPU.
void check_topology(const Document& document, const NcclTopology& topology) {
  const auto fail = [](const Location& where, const std::string& message) { throw ConfigError(where, message); };
  if (topology.cpus.size() > most_cpus)
    fail(topology.cpus[most_cpus].where, fmt::format("more than {} <cpu>", most_cpus));
  for (std::size_t i = 0; i < topology.cpus.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) {
      const NcclCpu& a = topology.cpus[j];
      const NcclCpu& b = topology.cpus[i];
      if (a.host != b.host)
        fail(b.where, fmt::format("a second host (host_hash of the <cpu> in line {} is another); parplan reads one "
                                  "node from a file and repeats it "
                                  "by --nodes: keep the <cpu> elements of one host",
                                  a.where.line));
      if (a.numa == b.numa)
        fail(b.where, fmt::format("a second <cpu> with numaid {}; the first is line {}", b.numa, a.where.line));
    }
  std::map<std::int64_t, const NcclPci*> by_bus_id;
  std::map<int, const NcclGpu*> by_rank;
  std::map<int, const NcclGpu*> by_dev;
  const std::vector<const NcclPci*> all = pci_devices(topology);
  for (const NcclPci* pci : all) {
    if (const auto [known, fresh] = by_bus_id.try_emplace(pci->bus_id, pci); !fresh)
      fail(pci->where,
           fmt::format("a second <pci> with busid {}; the first is line {}", pci->bus_name, known->second->where.line));
    if (!pci->gpu) continue;
    const NcclGpu& gpu = *pci->gpu;
    if (const auto [known, fresh] = by_dev.try_emplace(gpu.dev, &gpu); !fresh)
      fail(gpu.where,
           fmt::format("a second <gpu> with dev {}; the first is line {}", gpu.dev, known->second->where.line));
    if (!gpu.rank) continue;
    if (const auto [known, fresh] = by_rank.try_emplace(*gpu.rank, &gpu); !fresh)
      fail(gpu.where,
           fmt::format("a second <gpu> with rank {}; the first is line {}", *gpu.rank, known->second->where.line));
  }
  for (const NcclPci* pci : all) {
    for (const NcclNvlink& link : pci->gpu ? pci->gpu->nvlinks : std::vector<NcclNvlink>{}) {
      const auto target = by_bus_id.find(link.target);
      const int high = link.target_class >> 16;
      if (high != 0x03 && link.target_class >> 8 != 0x0680)
        fail(link.where,
             fmt::format(
                 "<nvlink> to class 0x{:06x}; expected a GPU (0x03....), an NVSwitch (0x068000) or a CPU (0x068001)",
                 link.target_class));
      if (target == by_bus_id.end()) continue;
      const bool to_gpu = high == 0x03;
      if (to_gpu && !target->second->is_gpu())
        fail(link.where,
             fmt::format("<nvlink> to {}, which is no GPU (line {})", link.target_name, target->second->where.line));
      if (!to_gpu && target->second->is_gpu())
        fail(link.where, fmt::format("<nvlink> to {} says class 0x{:06x}, but that is a GPU (line {})",
                                     link.target_name, link.target_class, target->second->where.line));
      if (!to_gpu || target->second == pci || !pci->gpu->rank || !target->second->gpu || !target->second->gpu->rank)
        continue;
      // All links between two GPUs appear at both ends.
      const auto count = [](const NcclGpu& from, std::int64_t to) {
        int sum = 0;
        for (const NcclNvlink& one : from.nvlinks)
          if (one.target == to) sum += one.count;
        return sum;
      };
      const NcclGpu& other = *target->second->gpu;
      if (count(*pci->gpu, link.target) != count(other, pci->bus_id))
        fail(link.where, fmt::format("{} NVLinks from {} to {}, but {} back (line {})", count(*pci->gpu, link.target),
                                     pci->bus_name, link.target_name, count(other, pci->bus_id), other.where.line));
    }
    for (const std::int64_t peer : pci->peers)
      if (peer == pci->bus_id) fail(pci->where, fmt::format("<pcilink> from {} to itself", pci->bus_name));
  }
  // A NIC without a PCI device of its own is listed at the CPU of every rank that found it.
  std::map<int, std::pair<const NcclNet*, bool>> nets;  // by dev: the first, and whether it is a PCI device's
  const auto visit = [&](const auto& self, const std::vector<NcclPci>& children) -> void {
    for (const NcclPci& child : children) {
      for (const NcclNet& net : child.nets) {
        const auto [known, fresh] = nets.try_emplace(net.dev, &net, !child.bus_name.empty());
        const bool same = !known->second.second && child.bus_name.empty() && known->second.first->name == net.name;
        if (!fresh && !same)
          fail(net.where, fmt::format("a second <net> with dev {}; the first is line {}", net.dev,
                                      known->second.first->where.line));
      }
      self(self, child.children);
    }
  };
  for (const NcclCpu& cpu : topology.cpus) visit(visit, cpu.children);
  if (topology.cpus.empty()) fail(document.where(document.root()), "<system> has no <cpu>; expected NCCL's topology");
}

constexpr std::array<const char*, 12> distance_names = {"LOC", "NVL", "NVB", "C2C", "PIX", "PXB",
                                                        "P2C", "PXN", "PHB", "SYS", "NET", "DIS"};
constexpr std::array<const char*, 5> algorithm_names = {"ring", "tree", "collnet chain", "nvls", "collnet direct"};

NcclDistance distance_of(const Document& document, const pugi::xml_node& node, const char* key) {
  const std::string text = required_text(document, node, key);
  const auto found = std::find(distance_names.begin(), distance_names.end(), text);
  if (found == distance_names.end())
    document.fail(node, fmt::format("<graph> has {}=\"{}\"; expected one of {}", key, text,
                                    join(std::vector<std::string>(distance_names.begin(), distance_names.end()))));
  return static_cast<NcclDistance>(found - distance_names.begin());
}

// NCCL writes `dev` in hexadecimal, with 0x where it is not 0.
int device_of(const Document& document, const pugi::xml_node& node) {
  const std::string text = required_text(document, node, "dev");
  const auto value = whole_number<int>(text, 16);
  if (!value || *value < 0)
    document.fail(node, fmt::format("<{}> has dev=\"{}\"; expected a hexadecimal number", node.name(), text));
  return *value;
}

}  // namespace

const char* name(NcclDistance distance) { return distance_names[index_of(distance)]; }
const char* name(NcclAlgorithm algorithm) { return algorithm_names[index_of(algorithm)]; }

bool is_xml(const std::string& text) {
  std::string_view rest = text;
  if (rest.starts_with("\xEF\xBB\xBF")) rest.remove_prefix(3);
  const auto first = rest.find_first_not_of(" \t\r\n");
  return first != std::string_view::npos && rest[first] == '<';
}

NcclTopology read_nccl_topology(const std::string& text, const std::string& file_name) {
  const Document document(text, file_name);
  const pugi::xml_node root = document.root();
  const std::string_view element = root.name();
  constexpr const char* wanted =
      "expected NCCL's topology (<system>), which NCCL writes to the file named by NCCL_TOPO_DUMP_FILE";
  if (element == "graphs")
    document.fail(root, fmt::format("found NCCL's graphs (<graphs>: rings and trees); {}", wanted));
  if (element == "topology") document.fail(root, fmt::format("found hwloc's topology (<topology>); {}", wanted));
  if (element != "system") document.fail(root, fmt::format("found <{}>; {}", element, wanted));
  if (const int version = required_int(document, root, "version", {}); version != 1)
    document.fail(root, fmt::format("<system> has version=\"{}\"; NCCL and parplan read version 1", version));
  NcclTopology topology;
  topology.file = file_name;
  note_unknown(document, root, {"cpu"}, topology.notes);
  for (const pugi::xml_node& child : root.children("cpu"))
    topology.cpus.push_back(read_cpu(document, child, topology.notes));
  find_targets(topology);
  check_topology(document, topology);
  return topology;
}

std::vector<NcclGraph> read_nccl_graphs(const std::string& text, const std::string& file_name) {
  const Document document(text, file_name);
  const pugi::xml_node root = document.root();
  if (std::string_view(root.name()) != "graphs")
    document.fail(root, fmt::format("found <{}>; expected NCCL's graphs (<graphs>), which NCCL writes to the file "
                                    "named by NCCL_GRAPH_DUMP_FILE",
                                    root.name()));
  if (const int version = required_int(document, root, "version", {}); version != 1)
    document.fail(root, fmt::format("<graphs> has version=\"{}\"; NCCL and parplan read version 1", version));
  std::vector<NcclGraph> graphs;
  for (const pugi::xml_node& node : root.children("graph")) {
    NcclGraph graph;
    graph.algorithm = static_cast<NcclAlgorithm>(required_int(document, node, "id", {0, 4}));
    graph.pattern = static_cast<NcclPattern>(required_int(document, node, "pattern", {1, 6}));
    graph.cross_nic = required_int(document, node, "crossnic", {0, 2});
    graph.speed_intra = required_float(document, node, "speedintra");
    graph.speed_inter = required_float(document, node, "speedinter");
    if (node.attribute("latencyinter")) graph.latency_inter = required_float(document, node, "latencyinter");
    graph.type_intra = distance_of(document, node, "typeintra");
    graph.type_inter = distance_of(document, node, "typeinter");
    graph.same_channels = required_int(document, node, "samechannels", {0, 1}) == 1;
    for (const pugi::xml_node& item : node.children("channel")) {
      NcclChannel channel;
      for (const pugi::xml_node& gpu : item.children("gpu")) channel.gpus.push_back(device_of(document, gpu));
      for (const pugi::xml_node& net : item.children("net")) channel.nets.push_back(device_of(document, net));
      graph.channels.push_back(std::move(channel));
    }
    const int said = required_int(document, node, "nchannels", {0, 64});
    if (said != static_cast<int>(graph.channels.size()))
      document.fail(node, fmt::format("<graph> has nchannels=\"{}\" but {} <channel>", said, graph.channels.size()));
    graphs.push_back(std::move(graph));
  }
  return graphs;
}

std::vector<const NcclPci*> pci_devices(const NcclTopology& topology) {
  std::vector<const NcclPci*> all;
  for (const NcclCpu& cpu : topology.cpus) collect(all, cpu.children);
  return all;
}

std::vector<NcclPci*> pci_devices(NcclTopology& topology) {
  std::vector<NcclPci*> all;
  for (NcclCpu& cpu : topology.cpus) collect(all, cpu.children);
  return all;
}

std::optional<int> pcie_generation(const std::string& link_speed) { return generation_of(link_speed); }

int broadcom_generation(std::uint64_t device, int level) {
  const std::uint64_t model = device & 0xfffffffffffff000;
  if (model == 0x1000c0101000a000) return 4;
  if (model == (0x1000c03010000000 | static_cast<std::uint64_t>(level) * 0x1000)) return 5;
  return 0;
}

double nvlink_bandwidth(int compute_capability) {
  struct Row {
    int from;
    double bandwidth;
  };
  constexpr std::array<Row, 6> rows = {{{100, 40.1}, {90, 20.6}, {87, 20.0}, {86, 12.0}, {70, 20.0}, {60, 18.0}}};
  for (const Row& row : rows)
    if (compute_capability >= row.from) return row.bandwidth;
  return 20.0;
}

double inter_cpu_bandwidth(const NcclCpu& cpu) {
  if (cpu.architecture == CpuArchitecture::power) return 32.0;
  if (cpu.architecture == CpuArchitecture::arm) return 6.0;
  if (cpu.architecture == CpuArchitecture::x86) {
    if (cpu.vendor == CpuVendor::amd) return 16.0;
    if (cpu.vendor == CpuVendor::zhaoxin) return cpu.family == 7 && cpu.model == 0x5b ? 9.0 : 6.0;
    if (cpu.vendor == CpuVendor::intel) {
      const int model = cpu.family == 6 ? cpu.model : 0;
      return model >= 0xcf   ? 40.0
             : model >= 0x8f ? 22.0
             : model >= 0x55 ? 10.0
                             : 6.0;  // Emerald Rapids, Sapphire Rapids, Skylake, Broadwell
    }
  }
  return 5000.0;
}

}  // namespace parplan
