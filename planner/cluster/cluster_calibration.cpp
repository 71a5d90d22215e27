#include "planner/cluster/cluster_calibration.h"

#include <algorithm>
#include <array>
#include <limits>

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include "planner/base/enum_index.h"
#include "planner/base/error.h"
#include "planner/base/text.h"
#include "planner/cluster/node_layout.h"

namespace parplan {
namespace {

// PCI Express Base Specification: a lane of generation 3, 4, 5 moves 8, 16, 32 GT/s in 128 of 130
// bits, where NCCL counts 60/80 GB/s a lane of generation 3 (pcie_bandwidth): 15.75 to 12 GB/s.
constexpr double pcie_over_counted = 15.754 / 12.0;

template <class Rate>
Rate or_reached(Rate sustained, Rate reached) {
  return sustained.value > 0.0 ? sustained : reached;
}

// ---- kernels ----

// What training sustains in products of that type.
FlopsPerSecond sustained_products(const DeviceKind& device, DataType type) {
  const DeviceRates& rates = device.rates.front();
  if (type == DataType::fp8 && rates.matrix_fp8.value > 0.0) return or_reached(rates.sustained_fp8, rates.matrix_fp8);
  if (type == DataType::tf32 && rates.matrix_tf32.value > 0.0) return rates.matrix_tf32;
  if (is_half(in_memory(type)) && has_units(device, in_memory(type)) && rates.matrix_half.value > 0.0)
    return or_reached(rates.sustained_half, rates.matrix_half);
  return rates.matrix_fp32;
}

double most_of_kernels(const Cluster& cluster, DataType precision) {
  double most = std::numeric_limits<double>::max();
  for (const NodeGroup& group : cluster.groups) {
    const FlopsPerSecond limit = peak(group.device, precision), now = sustained_products(group.device, precision);
    const bool has_datasheet = is_accelerator(group.device.backend) && limit.value > 0.0;
    most = std::min(most, has_datasheet ? limit / now : most_share_without_datasheet);
  }
  return most;
}

void take_of_kernels(DeviceKind& device, double share) {
  const bool bounded = is_accelerator(device.backend);
  const auto scale = [&](FlopsPerSecond& rate, FlopsPerSecond limit) {
    rate *= share;
    if (bounded && limit.value > 0.0) rate = std::min(rate, limit);
  };
  for (DeviceRates& rates : device.rates) {
    scale(rates.matrix_fp32, device.peak_fp32);
    scale(rates.matrix_half, device.peak_half);
    scale(rates.matrix_tf32, device.peak_tf32);
    scale(rates.matrix_fp8, device.peak_fp8);
    scale(rates.vector, device.peak_fp32);
    for (const OptionalRate& one : optional_rates()) scale(rates.*one.member, rates.*one.reached);
    // Copies reach what they did; no kernel moves its data faster.
    rates.sustained_memory = std::min(or_reached(rates.sustained_memory, rates.memory) * share, rates.memory);
  }
  if (!device.measured) return;
  for (KernelFit& fit : device.measured->fits) {
    scale(fit.rate, peak(device, fit.type));
    fit.memory *= share;
  }
}

// ---- links ----

bool is_nvlink(const Link& link) {
  return link.kind.starts_with("NV");
}

// Links over which devices of a node reach one another: NVLink where there is any, else all but
// those to the network.
std::vector<Link*> links_between_devices(NodeKind& node) {
  const bool nvlink = std::ranges::any_of(node.links, is_nvlink);
  std::vector<Link*> links;
  for (Link& link : node.links)
    if (nvlink ? is_nvlink(link) : !is_of_network(node, link)) links.push_back(&link);
  return links;
}

double most_of_node_links(const Cluster& cluster, DataType /*precision*/) {
  double most = std::numeric_limits<double>::max();
  for (NodeGroup group : cluster.groups) {
    const DeviceKind& device = group.device;
    for (const Link* link : links_between_devices(group.node)) {
      double of_link = most_share_without_datasheet;
      if (is_nvlink(*link) && device.nvlink_per_link_reached.value > 0.0)
        of_link = device.nvlink_per_link / device.nvlink_per_link_reached;
      else if (link->kind == "PCIe")
        of_link = pcie_over_counted;
      most = std::min(most, of_link);
    }
  }
  return most;
}

double most_of_network(const Cluster& cluster, DataType /*precision*/) {
  double most = std::numeric_limits<double>::max();
  for (const NodeGroup& group : cluster.groups)
    for (const Link& link : group.node.links)
      if (is_of_network(group.node, link))
        most = std::min(most, link.line_rate ? *link.line_rate / link.bandwidth : 1.0 / nic_reached_share);
  return most;
}

void take_of_link(Link& link, double share) {
  link.bandwidth *= share;
  if (link.line_rate) link.bandwidth = std::min(link.bandwidth, *link.line_rate);
}

constexpr std::array constant_rows = {
    ClusterConstantRow{ClusterConstant::kernels, "kernels", "what kernels sustain", "the datasheet's peak",
                       most_of_kernels,
                       [](Cluster& cluster, Engine& /*engine*/, double share) {
                         for (NodeGroup& group : cluster.groups) take_of_kernels(group.device, share);
                       }},
    ClusterConstantRow{ClusterConstant::node_links, "node_links", "what links inside a node reach",
                       "what such links carry", most_of_node_links,
                       [](Cluster& cluster, Engine& /*engine*/, double share) {
                         for (NodeGroup& group : cluster.groups)
                           for (Link* link : links_between_devices(group.node)) take_of_link(*link, share);
                       },
                       false},
    ClusterConstantRow{ClusterConstant::network, "network", "what NICs reach", "their line rate", most_of_network,
                       [](Cluster& cluster, Engine& /*engine*/, double share) {
                         for (NodeGroup& group : cluster.groups)
                           for (Link& link : group.node.links)
                             if (is_of_network(group.node, link)) {
                               // The line rate is known by what a NIC reaches: it must not follow.
                               link.line_rate = link.line_rate.value_or(link.bandwidth * (1.0 / nic_reached_share));
                               take_of_link(link, share);
                             }
                       },
                       false},
    ClusterConstantRow{ClusterConstant::host, "host", "the ops that a host submits", "twice as many",
                       [](const Cluster&, DataType) { return most_share_without_datasheet; },
                       [](Cluster& /*cluster*/, Engine& engine, double share) { engine.host_per_op *= 1.0 / share; }},
};

std::vector<std::string> kinds_of_devices(const Cluster& cluster) {
  std::vector<std::string> kinds;
  for (const NodeGroup& group : cluster.groups)
    if (std::ranges::find(kinds, group.device.name) == kinds.end()) kinds.push_back(group.device.name);
  return kinds;
}

std::vector<std::string> keys_of_constants() {
  std::vector<std::string> keys;
  for (const ClusterConstantRow& row : constant_rows) keys.emplace_back(row.key);
  return keys;
}

double read_share_or_percent(const YamlNode& node, double most) {
  const double value = node.as_number();
  if (!(value > 0.0 && value <= most))
    node.fail(fmt::format("expected a number above 0 and up to {}, found '{}'", most, node.as_string()));
  return value;
}

std::string six_digits(double value) {
  return fmt::format("{:.6g}", value);
}
std::string six_digits_of(Seconds time) {
  return fmt::format("{:.6g} s", time.value);
}

constexpr std::array step_precisions = {DataType::fp32, DataType::bf16, DataType::fp16, DataType::tf32,
                                         DataType::fp8};
constexpr std::int64_t most_of_a_step = std::int64_t{1} << 40;
constexpr const char* calibration_schema = "parplan.calibration/1";

}  // namespace

std::span<const ClusterConstantRow> cluster_constants() {
  return constant_rows;
}
const ClusterConstantRow& row_of(ClusterConstant constant) {
  return constant_rows[index_of(constant)];
}

ClusterCalibration read_calibration(const YamlNode& document) {
  document.allow_keys({"schema", "cluster", "devices", "engine", "shares", "steps"});
  document.at("schema").as_choice({calibration_schema});
  ClusterCalibration calibration;
  calibration.cluster = document.at("cluster").as_name();
  for (const YamlNode& item : document.at("devices").items()) calibration.devices.push_back(item.as_name());
  if (calibration.devices.empty()) document.at("devices").fail("expected the kinds of devices that it is for");
  calibration.engine = document.at("engine").as_name();
  const YamlNode shares = document.at("shares");
  shares.allow_keys(keys_of_constants());
  for (const ClusterConstantRow& row : constant_rows) {
    const auto given = shares.find(row.key);
    if (!given) continue;
    given->allow_keys({"share", "percent_per_percent"});
    constexpr double most_percent = 1e6;
    FittedShare share{.constant = row.constant,
                      .share = read_share_or_percent(given->at("share"), most_share),
                      .percent_per_percent = std::nullopt};
    if (share.share < least_share)
      given->at("share").fail(fmt::format("a share is at least {}: less has another cause", least_share));
    if (const auto percent = given->find("percent_per_percent"))
      share.percent_per_percent = read_share_or_percent(*percent, most_percent);
    calibration.shares.push_back(share);
  }
  if (calibration.shares.empty())
    shares.fail(fmt::format("expected the share of one of {}", join(keys_of_constants())));
  for (const YamlNode& item : document.at("steps").items()) {
    item.allow_keys(
        {"model", "layout", "devices", "global_batch", "sequence_length", "precision", "measured", "before", "after"});
    FittedStep step;
    step.model = item.at("model").as_name();
    step.layout = item.at("layout").as_name();
    step.devices = static_cast<int>(item.at("devices").as_integer(1, std::numeric_limits<int>::max()));
    step.global_batch = item.at("global_batch").as_integer(1, most_of_a_step);
    step.sequence_length = item.at("sequence_length").as_integer(1, most_of_a_step);
    std::vector<std::string> names;
    for (const DataType type : step_precisions) names.emplace_back(name(type));
    step.precision = step_precisions[item.at("precision").as_choice(names)];
    step.measured = item.at("measured").as_duration();
    step.before = item.at("before").as_duration();
    step.after = item.at("after").as_duration();
    calibration.steps.push_back(std::move(step));
  }
  return calibration;
}

std::string write_calibration(const ClusterCalibration& calibration) {
  YAML::Emitter out;
  out << YAML::BeginMap;
  out << YAML::Key << "schema" << YAML::Value << calibration_schema;
  out << YAML::Key << "cluster" << YAML::Value << calibration.cluster;
  out << YAML::Key << "devices" << YAML::Value << YAML::Flow << calibration.devices;
  out << YAML::Key << "engine" << YAML::Value << calibration.engine;
  out << YAML::Key << "shares" << YAML::Value << YAML::BeginMap;
  for (const FittedShare& share : calibration.shares) {
    out << YAML::Key << row_of(share.constant).key << YAML::Value << YAML::Flow << YAML::BeginMap;
    out << YAML::Key << "share" << YAML::Value << six_digits(share.share);
    if (share.percent_per_percent)
      out << YAML::Key << "percent_per_percent" << YAML::Value << six_digits(*share.percent_per_percent);
    out << YAML::EndMap;
  }
  out << YAML::EndMap;
  out << YAML::Key << "steps" << YAML::Value << YAML::BeginSeq;
  for (const FittedStep& step : calibration.steps) {
    out << YAML::BeginMap;
    out << YAML::Key << "model" << YAML::Value << step.model;
    out << YAML::Key << "layout" << YAML::Value << step.layout;
    out << YAML::Key << "devices" << YAML::Value << step.devices;
    out << YAML::Key << "global_batch" << YAML::Value << step.global_batch;
    out << YAML::Key << "sequence_length" << YAML::Value << step.sequence_length;
    out << YAML::Key << "precision" << YAML::Value << name(step.precision);
    out << YAML::Key << "measured" << YAML::Value << six_digits_of(step.measured);
    out << YAML::Key << "before" << YAML::Value << six_digits_of(step.before);
    out << YAML::Key << "after" << YAML::Value << six_digits_of(step.after);
    out << YAML::EndMap;
  }
  out << YAML::EndSeq << YAML::EndMap;
  return std::string(out.c_str()) + "\n";
}

void calibrate(Cluster& cluster, Engine& engine, const ClusterCalibration& calibration) {
  if (cluster.calibrated)
    throw ConfigError(fmt::format("cluster '{}' is calibrated already ({}); give the cluster that it was made of",
                                  cluster.name, *cluster.calibrated));
  for (const std::string& kind : kinds_of_devices(cluster))
    if (std::ranges::find(calibration.devices, kind) == calibration.devices.end())
      throw ConfigError(
          fmt::format("this calibration is of {}, and cluster '{}' has {}; calibrate by a step that ran on these "
                      "(simulate --measured-step)",
                      join(calibration.devices), cluster.name, kind));
  std::vector<std::string> taken, left_out;
  for (const FittedShare& share : calibration.shares) {
    const ClusterConstantRow& row = row_of(share.constant);
    if (!row.of_any_cluster && cluster.name != calibration.cluster) {
      left_out.emplace_back(row.words);
      continue;
    }
    row.take(cluster, engine, share.share);
    taken.push_back(fmt::format("{} {:.3g}", row.key, share.share));
  }
  if (taken.empty())
    throw ConfigError(
        fmt::format("this calibration is of the links of cluster '{}', and this is '{}'; calibrate by a "
                    "step that ran there (simulate --measured-step)",
                    calibration.cluster, cluster.name));
  if (!left_out.empty())
    cluster.notes.push_back(fmt::format("the calibration's share of {} is that of cluster '{}', and is left out",
                                        join(left_out, " and of "), calibration.cluster));
  cluster.calibrated =
      fmt::format("{} of their files' rates, by {} of {}", join(taken),
                  pluralized(static_cast<int>(calibration.steps.size()), "measured step"), calibration.engine);
}

}  // namespace parplan
