#include "planner/cluster/host_share.h"

#include <doctest/doctest.h>

#include <string>

#include "planner/cluster/find_cluster.h"

namespace parplan {
namespace {

// Four GPUs: two behind a PCIe switch, two at a host bridge of their own.
Cluster four_gpus(const std::string& host) {
  const std::string text = R"(
name: four
device:
  name: card
  title: A card
  backend: cuda
  memory: {capacity: 24 GiB, overhead: 768 MiB}
  peak: {fp32: 16 TFLOP/s, half: 130 TFLOP/s}
  kernel_launch: 4 us
  rates:
    - {active: 1, matrix_fp32: 12 TFLOP/s, matrix_half: 112 TFLOP/s, vector: 12 TFLOP/s, memory: 591 GB/s}
  sources: [test]
node:
  vertices:
    - {name: GPU0, kind: device}
    - {name: GPU1, kind: device}
    - {name: GPU2, kind: device}
    - {name: GPU3, kind: device}
    - {name: switch, kind: pcie_switch}
    - {name: bridge 0, kind: host_bridge}
    - {name: bridge 1, kind: host_bridge}
  links:
    - {between: [GPU0, switch], bandwidth: 24 GB/s, latency: 0.5 us, kind: PCIe}
    - {between: [GPU1, switch], bandwidth: 24 GB/s, latency: 0.5 us, kind: PCIe}
    - {between: [switch, bridge 0], bandwidth: 20 GB/s, latency: 0.25 us, kind: PCIe}
    - {between: [GPU2, bridge 1], bandwidth: 12 GB/s, latency: 0.5 us, kind: PCIe}
    - {between: [GPU3, bridge 1], bandwidth: 12 GB/s, latency: 0.5 us, kind: PCIe}
    - {between: [bridge 0, bridge 1], bandwidth: 16 GB/s, latency: 0 s, kind: SYS}
)";
  return read_cluster(YamlNode::parse(text + host, "four.yaml"));
}

DeviceMesh ranks(int dp) {
  DeviceMesh mesh;
  mesh.degree.dp = dp;
  return mesh;
}

constexpr const char* with_host = "host: {memory: 512 GiB, memory_bandwidth: 200 GB/s}\n";

TEST_CASE("devices behind one PCIe switch share its way to the host, and all share its memory") {
  const NodeGroup group = four_gpus(with_host).groups.front();
  const auto one = host_share(group, 1);
  REQUIRE(one);
  CHECK(one->link == BytesPerSecond(20e9));
  CHECK(one->latency == Seconds(0.75e-6) + Seconds(4e-6));
  CHECK(one->memory_bandwidth == BytesPerSecond(200e9));
  const auto two = host_share(group, 2);
  CHECK(two->link == BytesPerSecond(10e9));
  CHECK(two->memory_bandwidth == BytesPerSecond(100e9));
  const auto four = host_share(group, 4);
  CHECK(four->link == BytesPerSecond(10e9));  // of the slowest
  CHECK(four->memory_bandwidth == BytesPerSecond(50e9));
}

TEST_CASE("a stated rate of the link takes the place of the node's links") {
  const auto share = host_share(four_gpus("host: {memory_bandwidth: 200 GB/s, link: 7 GB/s}\n").groups.front(), 4);
  REQUIRE(share);
  CHECK(share->link == BytesPerSecond(7e9));
}

TEST_CASE("a cluster without facts of its hosts says what to add") {
  Cluster cluster = four_gpus("");
  CHECK(lacks_host(cluster) ==
        "offload needs the rates of the host, and cluster 'four' states none for card; add to its file, with the rate "
        "of each device while all copy, host: {memory: 1 TiB, memory_bandwidth: 400 GB/s, link: 12 GB/s}");
  cluster = four_gpus(with_host);
  CHECK(!lacks_host(cluster));
  NodeKind& node = cluster.groups.front().node;
  std::erase_if(node.links, [](const Link& link) { return link.bandwidth == BytesPerSecond(20e9); });
  CHECK(lacks_host(cluster) ==
        "offload needs the way from each device to its host, and the node of card in cluster 'four' has none over PCIe "
        "switches; add 'link' to its 'host', the rate of each device while all copy");
}

TEST_CASE("ranks of a machine share out what its host's memory has") {
  const Cluster cluster = four_gpus(with_host);
  constexpr std::uint64_t all = 1;
  CHECK(host_memory(cluster, ranks(4), all) == Bytes(std::int64_t{128} << 30));
  CHECK(host_memory(cluster, ranks(1), all) == Bytes(std::int64_t{512} << 30));
  CHECK(!host_memory(four_gpus(""), ranks(4), all));
}

TEST_CASE("devices share out what their machine's drives do, and a cluster without them says what to add") {
  const Cluster cluster = four_gpus("nvme: {read: 24 GB/s, write: 12 GB/s, latency: 100 us, capacity: 8 TB}\n");
  CHECK(nvme_share(cluster.groups.front(), 4) ==
        NvmeShare{.read = BytesPerSecond(6e9), .write = BytesPerSecond(3e9), .latency = Seconds(100e-6)});
  CHECK(nvme_share(cluster.groups.front(), 1)->read == BytesPerSecond(24e9));
  CHECK(nvme_capacity(cluster, ranks(4), 1) == Bytes(2'000'000'000'000));
  CHECK(!lacks_nvme(cluster));
  const Cluster without = four_gpus("");
  CHECK(!nvme_share(without.groups.front(), 4));
  CHECK(!nvme_capacity(without, ranks(4), 1));
  CHECK(lacks_nvme(without) ==
        "offload to NVMe needs the rates of the drives, and cluster 'four' states none for card; add to its file, with "
        "what all drives of a machine do together, nvme: {read: 25 GB/s, write: 12 GB/s, capacity: 15 TB} (parplan "
        "measure --nvme-dir measures them)");
  const Cluster again = read_cluster(YamlNode::parse(write_cluster(cluster), "again.yaml"));
  CHECK(again.groups.front().nvme == cluster.groups.front().nvme);
}

TEST_CASE("facts of the host are read back from a cluster's file") {
  const Cluster cluster = four_gpus("host: {memory_bandwidth: 200 GB/s, link: 7 GB/s}\n");
  const Cluster again = read_cluster(YamlNode::parse(write_cluster(cluster), "again.yaml"));
  CHECK(again.groups.front().host == cluster.groups.front().host);
}

}  // namespace
}  // namespace parplan
