#include "planner/cluster/cluster_calibration.h"

#include <doctest/doctest.h>

#include <string>

#include "planner/base/error.h"
#include "planner/cluster/find_cluster.h"
#include "tests/planner/base/error_of.h"

namespace parplan {
namespace {

const ClusterCatalog catalog{PARPLAN_SOURCE_DIR "/configs/devices", PARPLAN_SOURCE_DIR "/configs/clusters"};

Cluster cluster_of(const std::string& name, int devices) {
  ClusterOptions options;
  options.devices = devices;
  return find_cluster(name, catalog, options);
}

ClusterCalibration of(ClusterConstant constant, double share, const Cluster& cluster) {
  return {.cluster = cluster.name,
          .devices = {cluster.groups.front().device.name},
          .engine = "megatron",
          .shares = {{.constant = constant, .share = share, .percent_per_percent = 1.25}},
          .steps = {{.model = "gpt3-175b",
                     .layout = "dp16 tp8 pp8",
                     .devices = 1024,
                     .global_batch = 1536,
                     .sequence_length = 2048,
                     .precision = DataType::bf16,
                     .measured = Seconds(32.0),
                     .before = Seconds(29.1),
                     .after = Seconds(32.01)}}};
}

Cluster calibrated(const std::string& name, ClusterConstant constant, double share) {
  Cluster cluster = cluster_of(name, 16);
  Engine engine;
  calibrate(cluster, engine, of(constant, share, cluster));
  return cluster;
}

BytesPerSecond rate_of(const Cluster& cluster, const std::string& kind) {
  for (const Link& link : cluster.groups.front().node.links)
    if (link.kind.starts_with(kind)) return link.bandwidth;
  return {};
}

}  // namespace

TEST_CASE("a share of kernels acts on each rate, within the peaks of the datasheet") {
  const DeviceKind was = cluster_of("dgx-a100", 16).groups.front().device;
  const DeviceRates& before = was.rates.front();
  const auto rates = [&](double share) {
    return calibrated("dgx-a100", ClusterConstant::kernels, share).groups.front().device.rates.front();
  };
  const DeviceRates less = rates(0.5);
  CHECK(less.matrix_half.value == before.matrix_half.value * 0.5);
  CHECK(less.sustained_half.value == before.sustained_half.value * 0.5);
  CHECK(less.sustained_weights.value == before.sustained_weights.value * 0.5);
  CHECK(less.sustained_memory.value == before.sustained_memory.value * 0.5);
  CHECK(less.memory == before.memory);  // what copies reach
  const DeviceRates more = rates(2.0);
  CHECK(more.matrix_half == was.peak_half);
  CHECK(more.sustained_half == was.peak_half);
  CHECK(more.matrix_fp32 == was.peak_fp32);
  CHECK(more.sustained_memory == before.memory);
  const ClusterConstantRow& row = row_of(ClusterConstant::kernels);
  CHECK(row.most(cluster_of("dgx-a100", 16), DataType::bf16) == was.peak_half / before.sustained_half);
  CHECK(row.most(cluster_of("dgx-a100", 16), DataType::fp32) == was.peak_fp32 / before.matrix_fp32);
}

TEST_CASE("shares of links act on NVLink inside the node and on NICs outside, within what these carry") {
  const Cluster before = cluster_of("dgx-a100", 16);
  const Cluster inside = calibrated("dgx-a100", ClusterConstant::node_links, 0.5);
  CHECK(rate_of(inside, "NV").value == rate_of(before, "NV").value * 0.5);
  CHECK(rate_of(inside, "PCIe") == rate_of(before, "PCIe"));
  CHECK(rate_of(inside, "network") == rate_of(before, "network"));
  const Cluster outside = calibrated("dgx-a100", ClusterConstant::network, 0.5);
  CHECK(rate_of(outside, "NV") == rate_of(before, "NV"));
  CHECK(rate_of(outside, "network").value == rate_of(before, "network").value * 0.5);
  // 200 Gbit/s, of which 96 % are reached; Jean Zay's file says 40.5 of 100.
  CHECK(rate_of(calibrated("dgx-a100", ClusterConstant::network, 3.0), "network").value == doctest::Approx(25e9));
  CHECK(row_of(ClusterConstant::network).most(before, DataType::bf16) == doctest::Approx(1.0 / 0.96));
  CHECK(row_of(ClusterConstant::network).most(cluster_of("jean-zay-a100", 16), DataType::bf16) ==
        doctest::Approx(100.0 / 40.5));
  CHECK(row_of(ClusterConstant::node_links).most(before, DataType::bf16) == doctest::Approx(25.0 / 20.0));
}

TEST_CASE("a NIC's link is one to the network, whatever its kind is called") {
  Cluster cluster = cluster_of("dgx-a100", 16);
  for (Link& link : cluster.groups.front().node.links)
    if (link.kind == "network") link.kind = "IB";
  const BytesPerSecond before = rate_of(cluster, "IB"), inside = rate_of(cluster, "NV");
  Engine engine;
  calibrate(cluster, engine, of(ClusterConstant::network, 0.5, cluster));
  CHECK(rate_of(cluster, "IB").value == before.value * 0.5);
  CHECK(rate_of(cluster, "NV") == inside);
  CHECK(row_of(ClusterConstant::network).most(cluster_of("dgx-a100", 16), DataType::bf16) ==
        doctest::Approx(1.0 / 0.96));
}

TEST_CASE("a share of the host acts on what the engine takes to submit an op") {
  Cluster cluster = cluster_of("dgx-a100", 8);
  Engine engine;
  engine.name = "megatron";
  engine.host_per_op = Seconds(12e-6);
  calibrate(cluster, engine, of(ClusterConstant::host, 0.5, cluster));
  CHECK(engine.host_per_op.value == doctest::Approx(24e-6));
  CHECK(cluster.groups == cluster_of("dgx-a100", 8).groups);
}

TEST_CASE("a calibrated cluster says so, and is written and read whole") {
  for (const ClusterConstantRow& row : cluster_constants()) {
    const Cluster cluster = calibrated("jean-zay-a100", row.constant, 0.75);
    CHECK(cluster.calibrated == std::string(row.key) + " 0.75 of their files' rates, by 1 measured step of megatron");
    CHECK(read_cluster(YamlNode::parse(write_cluster(cluster), "written")) == cluster);
  }
  // A device without sustained rates gets that of memory.
  const Cluster other = calibrated("dgx-1-v100", ClusterConstant::kernels, 0.75);
  CHECK(read_cluster(YamlNode::parse(write_cluster(other), "written")) == other);
}

TEST_CASE("calibration.yaml is read back, and refused with its place where it is wrong") {
  const ClusterCalibration calibration = of(ClusterConstant::kernels, 0.8976, cluster_of("dgx-a100", 8));
  const std::string text = write_calibration(calibration);
  CHECK(
      text ==
      "schema: parplan.calibration/1\ncluster: dgx-a100\ndevices: [a100-sxm4-80gb]\nengine: megatron\nshares:\n"
      "  kernels: {share: 0.8976, percent_per_percent: 1.25}\nsteps:\n  - model: gpt3-175b\n    layout: dp16 tp8 pp8\n"
      "    devices: 1024\n    global_batch: 1536\n    sequence_length: 2048\n    precision: bf16\n    measured: 32 s\n"
      "    before: 29.1 s\n    after: 32.01 s\n");
  CHECK(read_calibration(YamlNode::parse(text, "calibration.yaml")) == calibration);
  const auto error = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    changed.replace(changed.find(from), from.size(), to);
    return error_of<ConfigError>([&] { read_calibration(YamlNode::parse(changed, "calibration.yaml")); });
  };
  CHECK(error("kernels", "kernel") ==
        "calibration.yaml:6:3: error: unknown key 'kernel'; allowed: kernels, "
        "node_links, network, host; did you mean 'kernels'?");
  CHECK(error("0.8976", "0.02") == "calibration.yaml:6:20: error: a share is at least 0.1: less has another cause");
  CHECK(error("0.8976", "-1") == "calibration.yaml:6:20: error: expected a number above 0 and up to 10, found '-1'");
  CHECK(error("calibration/1", "calibration/2") ==
        "calibration.yaml:1:9: error: expected one of parplan.calibration/1, found 'parplan.calibration/2'; did you "
        "mean 'parplan.calibration/1'?");
  CHECK(error("devices: [a100-sxm4-80gb]", "devices: []") ==
        "calibration.yaml:3:10: error: expected the kinds of devices that it is for");
}

TEST_CASE("shares are refused on other devices, and those of links are left out on other clusters") {
  const Cluster from = cluster_of("dgx-a100", 8);
  Engine engine;
  const auto refused = [&](Cluster cluster, const ClusterCalibration& calibration) {
    return error_of<ConfigError>([&] { calibrate(cluster, engine, calibration); });
  };
  CHECK(refused(cluster_of("dgx-h100", 8), of(ClusterConstant::kernels, 0.9, from)) ==
        "error: this calibration is of a100-sxm4-80gb, and cluster 'dgx-h100' has h100-sxm-80gb; calibrate by a step "
        "that ran on these (simulate --measured-step)");
  CHECK(refused(cluster_of("jean-zay-a100", 8), of(ClusterConstant::network, 0.9, from)) ==
        "error: this calibration is of the links of cluster 'dgx-a100', and this is 'jean-zay-a100'; calibrate by a "
        "step that ran there (simulate --measured-step)");
  CHECK(refused(calibrated("dgx-a100", ClusterConstant::kernels, 0.9), of(ClusterConstant::kernels, 0.9, from)) ==
        "error: cluster 'dgx-a100' is calibrated already (kernels 0.9 of their files' rates, by 1 measured step of "
        "megatron); give the cluster that it was made of");
  ClusterCalibration both = of(ClusterConstant::kernels, 0.9, from);
  both.shares.push_back({.constant = ClusterConstant::network, .share = 0.5, .percent_per_percent = std::nullopt});
  Cluster cluster = cluster_of("jean-zay-a100", 16);
  const BytesPerSecond before = rate_of(cluster, "network");
  calibrate(cluster, engine, both);
  CHECK(rate_of(cluster, "network") == before);
  CHECK(cluster.notes ==
        std::vector<std::string>{
            "the calibration's share of what NICs reach is that of cluster 'dgx-a100', and is left out"});
}

}  // namespace parplan
