#include "planner/cost/collective_time.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <string_view>

#include "planner/cluster/find_cluster.h"
#include "planner/cost/nvlink_rings.h"
#include "planner/cost/nvls.h"
#include "planner/cost/pairwise.h"
#include "planner/cost/point_to_point.h"
#include "planner/cost/ring.h"
#include "planner/cost/shared_memory.h"
#include "planner/cost/tree.h"
#include "tests/planner/cost/unit_model.h"

namespace parplan {
namespace {

using doctest::Approx;

constexpr InstructionKind communications[] = {InstructionKind::all_reduce_sum, InstructionKind::all_reduce_max,
                                              InstructionKind::all_gather,     InstructionKind::reduce_scatter,
                                              InstructionKind::all_to_all,     InstructionKind::send,
                                              InstructionKind::receive,        InstructionKind::broadcast,
                                              InstructionKind::reduce_sum,     InstructionKind::gather,
                                              InstructionKind::scatter};
constexpr BackendKind backends[] = {BackendKind::cpu, BackendKind::cuda};

TEST_CASE("algorithms have distinct names, and each communication one that applies on each backend") {
  std::set<std::string> names;
  for (const CommunicationAlgorithm& row : communication_algorithms()) {
    CHECK(names.insert(std::string(row.name)).second);
    CHECK_FALSE(row.applies(InstructionKind::kernel, BackendKind::cpu));
    CHECK_FALSE(row.applies(InstructionKind::kernel, BackendKind::cuda));
  }
  for (const InstructionKind kind : communications)
    for (const BackendKind backend : backends)
      CHECK(fastest_algorithm(kind, Bytes(1), unit_network(2), backend) != nullptr);
}

TEST_CASE("every algorithm takes longer for more bytes, slower links and slower hops") {
  for (const CommunicationAlgorithm& row : communication_algorithms())
    for (const InstructionKind kind : communications)
      for (const BackendKind backend : backends)
        for (const int nodes : {1, 2, 4}) {
          if (!row.applies(kind, backend)) continue;
          CAPTURE(row.name);
          GroupNetwork network = unit_network(4, nodes);
          network.compute_capability = 90;
          network.nvls_bandwidth = network.uplink_bandwidth = BytesPerSecond(1.0);
          network.ring_protocols.low_latency_128 = network.tree_protocols.low_latency_128 = true;
          if (row.available != nullptr && !row.available(network)) continue;
          const Seconds time = row.time(kind, Bytes(1 << 20), network);
          CHECK(time > Seconds(0.0));
          CHECK(row.time(kind, Bytes(1 << 22), network) > time);
          GroupNetwork slower = network;
          slower.ring_bandwidth *= 0.5;
          slower.tree_bandwidth *= 0.5;
          slower.nvls_bandwidth *= 0.5;
          slower.uplink_bandwidth *= 0.5;
          CHECK(row.time(kind, Bytes(1 << 20), slower) > time);
          GroupNetwork farther = network;
          farther.intra_latency = farther.inter_latency = Seconds(1.0);
          CHECK(row.time(kind, Bytes(1 << 20), farther) > time);
        }
}

TEST_CASE("a group of one rank communicates nothing") {
  for (const InstructionKind kind : communications)
    for (const BackendKind backend : backends) {
      CHECK(collective_time(kind, Bytes(1000), unit_network(1), backend) == Seconds(0.0));
      CHECK(fastest_algorithm(kind, Bytes(1000), unit_network(1), backend) == nullptr);
    }
}

TEST_CASE("a communication's time comes from measured collectives, NCCL's model or links") {
  GroupNetwork network = unit_network(4);
  const auto origin = [&](InstructionKind kind, BackendKind backend = BackendKind::cuda) {
    return std::string(name(communication_origin(kind, Bytes(1 << 20), network, backend)));
  };
  CHECK(origin(InstructionKind::all_gather) == "formula");
  CHECK(origin(InstructionKind::all_to_all) == "links");
  CHECK(origin(InstructionKind::send) == "links");
  CHECK(origin(InstructionKind::all_gather, BackendKind::cpu) == "links");
  // Eight A100 in NVLink.
  network.ranks = 8;
  network.nvlink = true;
  network.compute_capability = 80;
  REQUIRE(measured_rings(network) != nullptr);
  CHECK(origin(InstructionKind::all_gather) == "fitted");
  CHECK(origin(InstructionKind::all_to_all) == "fitted");
  CHECK(origin(InstructionKind::send) == "links");
  // Two nodes: by NCCL's model, unless steps between nodes were measured.
  network = unit_network(16, 2);
  network.nvlink = true;
  network.compute_capability = 80;
  CHECK(origin(InstructionKind::all_gather) == "formula");
  network.post_overhead = Seconds(8e-6);
  CHECK(origin(InstructionKind::all_gather) == "fitted");
  CHECK(origin(InstructionKind::all_to_all) == "links");
  CHECK(origin(InstructionKind::send) == "links");
  // LL128 between nodes has constants of rings inside NVLink, and trees a share of their cap.
  network.post_overhead = {};
  network.ring_protocols.low_latency_128 = network.tree_protocols.low_latency_128 = true;
  for (const CommunicationAlgorithm& row : communication_algorithms())
    if (row.name.ends_with("LL128")) CHECK(row.fitted(network));
  const auto is_fitted = [&](std::string_view name) {
    const auto row = std::ranges::find(communication_algorithms(), name, &CommunicationAlgorithm::name);
    return row->fitted != nullptr && row->fitted(network);
  };
  CHECK(!is_fitted("ring"));
  CHECK(!is_fitted("tree"));
  CHECK(is_fitted("tree, LL128"));
  // NVLink SHARP: the base and what a chunk costs are fitted.
  CHECK(is_fitted("NVLS"));
  CHECK(is_fitted("NVLS tree"));
  // Nothing is on GPUs that were not measured.
  network.compute_capability = 70;
  for (const char* const algorithm : {"ring, LL128", "tree, LL128", "NVLS", "NVLS tree"}) CHECK(!is_fitted(algorithm));
}

TEST_CASE("a ring all-reduce takes 2(n-1) steps and moves 2(n-1)/n of the buffer") {
  GroupNetwork network = unit_network(4);
  // 2 * 3 / 4 * 800 B at 1 B/s = 1200 s; 6 hops of 2.8 us more than LL's; base 8.4 us.
  CHECK(ring_simple_time(InstructionKind::all_reduce_sum, Bytes(800), network).value ==
        Approx(1200.0 + 6 * 2.8e-6 + 8.4e-6).epsilon(1e-14));
  network.intra_latency = Seconds(10.0);  // 6 hops: 60 s
  CHECK(ring_simple_time(InstructionKind::all_reduce_max, Bytes(800), network).value ==
        Approx(1260.0 + 6 * 2.8e-6 + 8.4e-6).epsilon(1e-14));
}

TEST_CASE("a ring all-gather or reduce-scatter takes n-1 steps and moves (n-1)/n of the buffer") {
  GroupNetwork network = unit_network(4);
  network.intra_latency = Seconds(10.0);
  // 3 / 4 * 800 B = 600 s, 3 hops = 30 s.
  for (const InstructionKind kind : {InstructionKind::all_gather, InstructionKind::reduce_scatter})
    CHECK(ring_simple_time(kind, Bytes(800), network).value == Approx(630.0 + 3 * 2.8e-6 + 8.4e-6).epsilon(1e-14));
}

TEST_CASE("a broadcast or reduce passes the whole buffer along the ring, a gather or scatter what others have") {
  GroupNetwork network = unit_network(4);
  network.intra_latency = Seconds(10.0);
  // 800 B and 3 hops: 830 s. From or to the first rank: 3 / 4 of them and a hop: 610 s.
  for (const InstructionKind kind : {InstructionKind::broadcast, InstructionKind::reduce_sum})
    CHECK(ring_simple_time(kind, Bytes(800), network).value == Approx(830.0 + 3 * 2.8e-6 + 8.4e-6).epsilon(1e-14));
  for (const InstructionKind kind : {InstructionKind::gather, InstructionKind::scatter}) {
    CHECK(first_rank_time(kind, Bytes(800), network).value == Approx(610.0).epsilon(1e-6));
    CHECK(direct_time(kind, Bytes(800), network).value == Approx(610.0).epsilon(1e-12));
  }
  // On CPU ranks the three others read 800 B each from the first one's memory, or it reads theirs.
  for (const InstructionKind kind : {InstructionKind::broadcast, InstructionKind::reduce_sum})
    CHECK(direct_time(kind, Bytes(800), network).value == Approx(2410.0).epsilon(1e-12));
}

TEST_CASE("a ring over several nodes leaves each node once a pass, for the rank that is reached last") {
  GroupNetwork network = unit_network(8, 2);
  network.intra_latency = Seconds(1.0);
  network.inter_latency = Seconds(100.0);
  // All-gather of 8 ranks: 7 of a ring's 8 steps, both between nodes among them: 5 * 1 + 2 * 100 s;
  // 7/8 * 8 B = 7 s.
  CHECK(ring_simple_time(InstructionKind::all_gather, Bytes(8), network).value == Approx(212.0).epsilon(1e-6));
  // All-reduce: 10 * 1 + 4 * 100 = 410 s of hops; 14 s.
  CHECK(ring_simple_time(InstructionKind::all_reduce_sum, Bytes(8), network).value ==
        Approx(410.0 + 14.0).epsilon(1e-6));
}

TEST_CASE("all latency of a large all-reduce over several nodes counts 1.4 times") {
  GroupNetwork network = unit_network(8, 2);
  network.intra_latency = Seconds(0.6e-6);
  network.inter_latency = Seconds(2.7e-6);
  network.ring_bandwidth = BytesPerSecond(1e30);
  // Simple: 8.4 us, 10 hops of 3.4 and 4 of 14: 98.4 us. From 64 B for each of 16 channels and 8
  // ranks on, 8192 B, it counts 1.4 times: 137.76 us.
  CHECK(ring_simple_time(InstructionKind::all_reduce_sum, Bytes(8191), network).value ==
        Approx(98.4e-6).epsilon(1e-12));
  CHECK(ring_simple_time(InstructionKind::all_reduce_sum, Bytes(8192), network).value ==
        Approx(137.76e-6).epsilon(1e-12));
  // The others are unchanged: one pass, 8.4 + 5 * 3.4 + 2 * 14; low latency.
  CHECK(ring_simple_time(InstructionKind::all_gather, Bytes(1 << 20), network).value == Approx(53.4e-6).epsilon(1e-12));
  // Low latency: 6.6 us, 10 hops inside, which take the 1 us in which the CPU serves the network,
  // and 4 of 2.7: 27.4 us.
  CHECK(ring_low_latency_time(InstructionKind::all_reduce_sum, Bytes(0), network).value ==
        Approx(27.4e-6).epsilon(1e-12));
  // In one node hops have their own speed: 14 of 0.6 or 3.4.
  network.nodes = 1;
  CHECK(ring_low_latency_time(InstructionKind::all_reduce_sum, Bytes(0), network).value ==
        Approx(15e-6).epsilon(1e-12));
  CHECK(ring_simple_time(InstructionKind::all_reduce_sum, Bytes(1 << 20), network).value ==
        Approx(56e-6).epsilon(1e-12));
  // A node's only rank sends like a tree's: low latency 6.6 + 14 * 5.0, Simple 1.4 (8.4 + 14 * 14).
  network.nodes = 8;
  CHECK(ring_low_latency_time(InstructionKind::all_reduce_sum, Bytes(0), network).value ==
        Approx(76.6e-6).epsilon(1e-12));
  CHECK(ring_simple_time(InstructionKind::all_reduce_sum, Bytes(8192), network).value ==
        Approx(1.4 * 204.4e-6).epsilon(1e-12));
}

TEST_CASE("AMD's processors take twice as long to serve each hop inside a node of rings over several") {
  GroupNetwork network = unit_network(8, 2);
  network.intra_latency = Seconds(0.6e-6);
  network.inter_latency = Seconds(2.7e-6);
  network.ring_bandwidth = BytesPerSecond(1e30);
  network.amd_hosts = true;
  // All-gather: 5 hops inside, 2 between nodes. Simple: 8.4 + 5 * max(3.4, 6) + 2 * 14 us; low
  // latency: 6.6 + 5 * max(0.6, 2) + 2 * 2.7.
  CHECK(ring_simple_time(InstructionKind::all_gather, Bytes(0), network).value == Approx(66.4e-6).epsilon(1e-12));
  CHECK(ring_low_latency_time(InstructionKind::all_gather, Bytes(0), network).value == Approx(22e-6).epsilon(1e-12));
  // A hop over PCIe takes 5.7 us in Simple, also less.
  network.nvlink = false;
  network.intra_latency = Seconds(1e-6);
  CHECK(ring_simple_time(InstructionKind::all_gather, Bytes(0), network).value == Approx(66.4e-6).epsilon(1e-12));
  // Slower hops, and rings of one node, take what they take elsewhere.
  network.intra_latency = Seconds(2e-6);
  CHECK(ring_simple_time(InstructionKind::all_gather, Bytes(0), network).value ==
        Approx(8.4e-6 + 5 * 6.7e-6 + 2 * 14e-6).epsilon(1e-12));
  GroupNetwork inside = unit_network(8), of_amd = inside;
  of_amd.amd_hosts = true;
  CHECK(ring_simple_time(InstructionKind::all_gather, Bytes(8), of_amd) ==
        ring_simple_time(InstructionKind::all_gather, Bytes(8), inside));
}

TEST_CASE("GPUs older than sm_80 lose more, and hops over PCIe have latencies of their own") {
  GroupNetwork network = unit_network(8, 2);
  network.intra_latency = Seconds(0.6e-6);
  network.inter_latency = Seconds(2.7e-6);
  network.ring_bandwidth = network.tree_bandwidth = BytesPerSecond(1e30);
  // 98.4 us, as above.
  for (const auto& [capability, factor] : {std::pair{0, 1.4}, {80, 1.4}, {90, 1.4}, {70, 1.9}, {75, 1.9}}) {
    network.compute_capability = capability;
    CHECK(ring_simple_time(InstructionKind::all_reduce_sum, Bytes(8192), network).value ==
          Approx(factor * 98.4e-6).epsilon(1e-12));
  }
  // PCIe, one node: 14 hops of 5.7 us for Simple and 1.0 for low latency; a tree's are 4.0 and 1.0,
  // a transfer's 5.7.
  network = unit_network(8);
  network.intra_latency = Seconds(1e-6);
  network.ring_bandwidth = network.tree_bandwidth = BytesPerSecond(1e30);
  network.nvlink = false;
  CHECK(ring_simple_time(InstructionKind::all_reduce_sum, Bytes(8), network).value ==
        Approx(8.4e-6 + 14 * 5.7e-6).epsilon(1e-12));
  CHECK(ring_low_latency_time(InstructionKind::all_reduce_sum, Bytes(8), network).value ==
        Approx(6.6e-6 + 14 * 1e-6).epsilon(1e-12));
  CHECK(tree_simple_time(InstructionKind::all_reduce_sum, Bytes(8), network).value ==
        Approx(8.4e-6 + 14 * 4e-6).epsilon(1e-12));
  CHECK(tree_low_latency_time(InstructionKind::all_reduce_sum, Bytes(8), network).value ==
        Approx(6.8e-6 + 14 * 1e-6).epsilon(1e-12));
  CHECK(point_to_point_time(InstructionKind::send, Bytes(8), network).value == Approx(8.4e-6 + 5.7e-6).epsilon(1e-12));
}

TEST_CASE("in one node the GPUs cap low latency") {
  GroupNetwork network = unit_network(2);
  network.ring_bandwidth = network.tree_bandwidth = BytesPerSecond(1e15);
  const Bytes bytes(std::int64_t{1} << 50);  // latencies are negligible beside it
  for (const auto& [capability, cap] :
       {std::pair{70, 39e9}, {75, 39e9}, {80, 87.7e9}, {89, 87.7e9}, {90, 141e9}, {100, 282e9}}) {
    network.compute_capability = capability;
    // 2 * 1/2 of the buffer around the ring, two times it through the tree.
    network.nvlink = false;
    CHECK((bytes / ring_low_latency_time(InstructionKind::all_reduce_sum, bytes, network)).value == Approx(cap));
    CHECK((bytes / tree_low_latency_time(InstructionKind::all_reduce_sum, bytes, network)).value == Approx(cap / 2));
  }
}

TEST_CASE("rings inside NVLink take what was measured on their generation of GPUs") {
  GroupNetwork network = unit_network(4);
  network.intra_latency = Seconds(0.6e-6);
  network.ring_bandwidth = BytesPerSecond(1e30);
  network.compute_capability = 80;
  const InstructionKind gather = InstructionKind::all_gather;
  // Three hops: 26.2 + 3 * 7.5 us, and a fourth of 454 MB copied at 454 GB/s.
  CHECK(ring_simple_time(gather, Bytes(454'000'000), network).value == Approx(48.7e-6 + 0.25e-3).epsilon(1e-12));
  CHECK(ring_low_latency_time(gather, Bytes(0), network).value == Approx(9.1e-6 + 3 * 0.88e-6).epsilon(1e-12));
  // LL128: three fourths of 156 MB at 156 GB/s; on slower links 0.92 of their rate.
  CHECK(ring_low_latency_128_time(gather, Bytes(156'000'000), network).value ==
        Approx(27.2e-6 + 3 * 0.6e-6 + 0.75e-3).epsilon(1e-12));
  network.ring_bandwidth = BytesPerSecond(100e9);
  CHECK(ring_low_latency_128_time(gather, Bytes(92'000'000), network).value ==
        Approx(27.2e-6 + 3 * 0.6e-6 + 0.75e-3).epsilon(1e-12));
  // All-to-alls: 12.7 us up to 16 KiB to each of 4, 25.1 beyond; three fourths at 0.77 of the
  // links' 100 GB/s, and a fourth copied at 1142.
  const InstructionKind pairs = InstructionKind::all_to_all;
  const double bytes = 77e6, moved = 0.75 * bytes / 77e9 + 0.25 * bytes / 1142e9;
  CHECK(pairwise_time(pairs, Bytes(77'000'000), network).value == Approx(25.1e-6 + moved).epsilon(1e-12));
  CHECK(pairwise_time(pairs, Bytes(1), network).value == Approx(12.7e-6).epsilon(1e-5));
  CHECK(pairwise_time(pairs, Bytes(65536), network) < Seconds(14e-6));
  CHECK(pairwise_time(pairs, Bytes(65537), network) > Seconds(25e-6));
  // Other generations, hops off NVLink and other nodes: NCCL's own numbers.
  for (const int capability : {0, 70, 75, 86, 89, 120}) {
    network.compute_capability = capability;
    CHECK(measured_rings(network) == nullptr);
  }
  network.compute_capability = 90;
  CHECK(measured_rings(network) != nullptr);
  network.nvlink = false;
  CHECK(measured_rings(network) == nullptr);
  network.nvlink = true;
  network.nodes = 2;
  CHECK(measured_rings(network) == nullptr);
}

namespace {

GroupNetwork nvswitch(int gpus, double link, int capability) {
  return {.ranks = gpus,
          .nodes = 1,
          .ring_bandwidth = BytesPerSecond(link),
          .tree_bandwidth = BytesPerSecond(link),
          .intra_latency = Seconds(0.6e-6),
          .inter_latency = Seconds(0.0),
          .nvlink = true,
          .compute_capability = capability,
          .nvls_bandwidth = BytesPerSecond(capability < 90 ? 0.0 : link)};
}
// GB/s, as NCCL's tests count it.
double bus_bandwidth(const GroupNetwork& network, Bytes bytes) {
  const Seconds time = collective_time(InstructionKind::all_reduce_sum, bytes, network, BackendKind::cuda);
  return 2.0 * (network.ranks - 1) / network.ranks * (bytes / time).value / 1e9;
}
std::string_view chosen(const GroupNetwork& network, Bytes bytes) {
  return fastest_algorithm(InstructionKind::all_reduce_sum, bytes, network, BackendKind::cuda)->name;
}

}  // namespace

TEST_CASE("all-reduces of 1 MiB to 1 GiB on A100 take as long as those that vTrain measured") {
  // Bus bandwidths, GB/s, of NCCL's tests on 2, 4 and 6 GPUs (VIA-Research/vTrain f8dda8473a,
  // trace/a100): not among the measurements that the constants were fitted to.
  struct Row {
    int gpus;
    std::int64_t mebibytes;
    double measured;
  };
  for (const Row& row : {Row{2, 8, 96.53},
                         {2, 32, 145.88},
                         {2, 128, 175.77},
                         {2, 1024, 197.28},
                         {4, 8, 107.74},
                         {4, 32, 177.09},
                         {4, 128, 201.61},
                         {4, 1024, 221.86},
                         {6, 8, 110.34},
                         {6, 32, 183.97},
                         {6, 128, 199.58},
                         {6, 1024, 227.01}}) {
    CAPTURE(row.gpus);
    CAPTURE(row.mebibytes);
    CHECK(bus_bandwidth(nvswitch(row.gpus, 240e9, 80), Bytes(row.mebibytes << 20)) ==
          Approx(row.measured).epsilon(0.15));
  }
}

TEST_CASE("switches that add lift large all-reduces from five H100 and six B200 on") {
  // NVIDIA/nccl issue 1455 (H100, 2 to 4 GiB), ml-engineering 744d01e18b (B200, 8 GiB; rings 673 on
  // four).
  const Bytes large(std::int64_t{4} << 30);
  for (const auto& row : {std::pair{5, 420.0}, {7, 460.0}, {8, 480.0}}) {
    const int gpus = row.first;
    const double measured = row.second;
    CAPTURE(gpus);
    CHECK(bus_bandwidth(nvswitch(gpus, 370.8e9, 90), large) == Approx(measured).epsilon(0.06));
    CHECK(chosen(nvswitch(gpus, 370.8e9, 90), large) == "NVLS");
  }
  CHECK(bus_bandwidth(nvswitch(8, 721.8e9, 100), large) == Approx(741.0).epsilon(0.06));
  CHECK(chosen(nvswitch(4, 721.8e9, 100), large) == "ring");
  CHECK(bus_bandwidth(nvswitch(4, 721.8e9, 100), large) == Approx(673.0).epsilon(0.06));
  // Without such switches, or for other collectives, there is only the ring.
  CHECK(chosen(nvswitch(8, 240e9, 80), large) == "ring");
  CHECK(fastest_algorithm(InstructionKind::all_gather, large, nvswitch(8, 370.8e9, 90), BackendKind::cuda)->name ==
        "ring");
}

TEST_CASE("an NVLS all-reduce moves the buffer once, its share of sums, and what fills the pipeline") {
  GroupNetwork network = nvswitch(8, 1e9, 90);
  network.intra_latency = Seconds(0.0);
  // 1 TiB: chunks of 128 KiB for 8 heads and 16 channels, 16 MiB; 9/8 of it at 0.85 GB/s, and 4740
  // bytes more for each chunk.
  const double bytes = std::exp2(40) + std::exp2(24);
  CHECK(nvls_time(InstructionKind::all_reduce_sum, Bytes(std::int64_t{1} << 40), network).value ==
        Approx(31.9e-6 + 9.0 / 8 * bytes / 0.85e9 * (131072.0 + 4740) / 131072).epsilon(1e-12));
}

TEST_CASE("an NVLS tree is as fast as the slowest of switches, NICs and heads, and reaches two p5") {
  GroupNetwork network = nvswitch(16, 370.8e9, 90);
  network.nodes = 2;
  network.ring_bandwidth = network.tree_bandwidth = BytesPerSecond(370.8e9);
  network.uplink_bandwidth = BytesPerSecond(384e9);
  network.inter_latency = Seconds(20e-6);
  // 487 GB/s were measured at 16 GiB, 437 at 1 GiB, 343 at 256 MiB (AWS p5.48xlarge, published with
  // NCCL's tests).
  CHECK(chosen(network, Bytes(std::int64_t{1} << 30)) == "NVLS tree");
  CHECK(bus_bandwidth(network, Bytes(std::int64_t{16} << 30)) == Approx(487.0).epsilon(0.06));
  CHECK(bus_bandwidth(network, Bytes(std::int64_t{1} << 30)) == Approx(437.0).epsilon(0.06));
  CHECK(bus_bandwidth(network, Bytes(std::int64_t{256} << 20)) == Approx(343.0).epsilon(0.06));
  // Few NICs: once the buffer over two nodes, twice over more.
  network.uplink_bandwidth = BytesPerSecond(1e6);
  const Bytes bytes(std::int64_t{1} << 34);
  const double through = std::exp2(34) + 2 * std::exp2(24);
  CHECK(nvls_tree_time(InstructionKind::all_reduce_sum, bytes, network).value == Approx(through / 1e6).epsilon(1e-6));
  network.nodes = 4;
  network.ranks = 32;
  CHECK(nvls_tree_time(InstructionKind::all_reduce_sum, bytes, network).value ==
        Approx(2 * (std::exp2(34) + 3 * std::exp2(24)) / 1e6).epsilon(1e-6));
  // One GPU a node has no other to add to.
  network.ranks = 4;
  CHECK_FALSE(nvls_tree_available(network));
}

TEST_CASE("hops of a ring over several nodes take no less than the CPU needs for the network") {
  GroupNetwork network = unit_network(8, 2);
  network.ring_bandwidth = BytesPerSecond(1e30);
  // Hops that cost nothing: Simple 2.8 us, so 3; low latency 0, so 1. All-gather: 5 inside, 2
  // between (Simple 11.3).
  CHECK(ring_simple_time(InstructionKind::all_gather, Bytes(0), network).value ==
        Approx(8.4e-6 + 5 * 3e-6 + 2 * 11.3e-6).epsilon(1e-12));
  CHECK(ring_low_latency_time(InstructionKind::all_gather, Bytes(0), network).value ==
        Approx(6.6e-6 + 5 * 1e-6).epsilon(1e-12));
}

TEST_CASE("a measured overhead of the network stands for NCCL's, three times in Simple") {
  GroupNetwork network = unit_network(8, 2);
  network.intra_latency = Seconds(0.6e-6);
  network.inter_latency = Seconds(2.7e-6);
  network.ring_bandwidth = BytesPerSecond(1e30);
  network.post_overhead = Seconds(8e-6);
  for (const bool amd : {false, true}) {
    network.amd_hosts = amd;
    // All-gather: 5 hops inside, 2 between nodes.
    CHECK(ring_low_latency_time(InstructionKind::all_gather, Bytes(0), network).value ==
          Approx(6.6e-6 + 5 * 8e-6 + 2 * 2.7e-6).epsilon(1e-12));
    CHECK(ring_simple_time(InstructionKind::all_gather, Bytes(0), network).value ==
          Approx(8.4e-6 + 5 * 24e-6 + 2 * 14e-6).epsilon(1e-12));
  }
  // Slower hops take what they take.
  network.intra_latency = Seconds(30e-6);
  CHECK(ring_low_latency_time(InstructionKind::all_gather, Bytes(0), network).value ==
        Approx(6.6e-6 + 5 * 30e-6 + 2 * 2.7e-6).epsilon(1e-12));
}

TEST_CASE("LL128 over several nodes takes the root of the squares of hops and of sending at its cap") {
  const InstructionKind gather = InstructionKind::all_gather, reduce = InstructionKind::all_reduce_sum;
  GroupNetwork network = unit_network(16, 2);
  network.intra_latency = Seconds(0.6e-6);
  network.inter_latency = Seconds(2.7e-6);
  network.ring_bandwidth = network.tree_bandwidth = BytesPerSecond(400e9);
  network.compute_capability = 90;
  network.post_overhead = Seconds(1e-6);
  network.ring_protocols.low_latency_128 = network.tree_protocols.low_latency_128 = true;
  REQUIRE(ring_low_latency_128_available(network));
  // 25.8 us; 13 hops of 1.9 us and 2 of 4; 252 GB/s at most, of which 15/16 are sent.
  const double hops = 13 * 1.9e-6 + 2 * 4e-6;
  CHECK(ring_low_latency_128_time(gather, Bytes(0), network).value == Approx(25.8e-6 + hops).epsilon(1e-12));
  const double sending = 15.0 / 16 * 252e6 / 252e9;
  CHECK(ring_low_latency_128_time(gather, Bytes(252'000'000), network).value ==
        Approx(25.8e-6 + std::hypot(hops, sending)).epsilon(1e-12));
  // More where a step waits for the CPU, and where links are slower: 0.92 of 100 GB/s.
  network.post_overhead = Seconds(8e-6);
  network.ring_bandwidth = BytesPerSecond(100e9);
  CHECK(ring_low_latency_128_time(gather, Bytes(92'000'000), network).value ==
        Approx(25.8e-6 + std::hypot(13 * 8e-6 + 2 * 4e-6, 15.0 / 16 * 1e-3)).epsilon(1e-12));
  // A tree: 14 hops of 1.25 us and 2 of 8.5 us; two thirds of 252 GB/s up and down, and two chunks
  // of 16 channels: 1 GB are 108 chunks of a channel, more than 2.8 * 64 / 8 of them.
  REQUIRE(tree_low_latency_128_available(network));
  const double latency = 25.8e-6 + 14 * 1.25e-6 + 2 * 8.5e-6;
  CHECK(tree_low_latency_128_time(reduce, Bytes(1'000'000'000), network).value ==
        Approx(latency + 2 * (1e9 + 2 * 16 * 576e3) / 168e9).epsilon(1e-12));
  // 100 MB: 10, and 21 of half the size, which are too few; quarters are enough.
  CHECK(tree_low_latency_128_time(reduce, Bytes(100'000'000), network).value ==
        Approx(latency + 2 * (1e8 + 2 * 16 * 144e3) / 168e9).epsilon(1e-12));
  // Few bytes: halved until 32 KiB are not reached.
  CHECK(tree_low_latency_128_time(reduce, Bytes(0), network).value ==
        Approx(latency + 2 * 2 * 16 * 18e3 / 168e9).epsilon(1e-12));
  // Or its links': 0.92 of 120 in 128 bytes.
  network.tree_bandwidth = BytesPerSecond(100e9);
  CHECK(tree_low_latency_128_time(reduce, Bytes(1'000'000'000), network).value ==
        Approx(latency + 2 * (1e9 + 2 * 16 * 576e3) / 86.25e9).epsilon(1e-12));
  // Three nodes have one whole level: 24 chunks are enough, with 1.58 levels they were not.
  network.nodes = 3;
  network.ranks = 24;
  const double bytes = 24.0 * 16 * 576e3, levels = std::log2(3.0);
  CHECK(tree_low_latency_128_time(reduce, Bytes(static_cast<std::int64_t>(bytes)), network).value ==
        Approx(25.8e-6 + 14 * 1.25e-6 + 2 * levels * 8.5e-6 + 2 * (bytes + 2 * levels * 16 * 576e3) / 86.25e9)
            .epsilon(1e-12));
  network.nodes = 2;
  network.ranks = 16;
  // The network says who takes it, not whether its steps were measured.
  network.post_overhead = Seconds(0.0);
  CHECK(ring_low_latency_128_available(network));
  CHECK(tree_low_latency_128_available(network));
  CHECK(tree_simple_available(network));
  network.post_overhead = Seconds(8e-6);
  CHECK(tree_simple_available(network));
  network.ring_protocols = {.simple = true, .low_latency = false};
  CHECK(ring_simple_available(network));
  CHECK_FALSE(ring_low_latency_available(network));
  CHECK_FALSE(ring_low_latency_128_available(network));
  CHECK(tree_low_latency_128_available(network));
  network.tree_protocols = {.simple = false, .low_latency = true};
  CHECK_FALSE(tree_simple_available(network));
  CHECK(tree_low_latency_available(network));
  CHECK_FALSE(tree_low_latency_128_available(network));
  network.ring_protocols = {.simple = false, .low_latency = true, .low_latency_128 = true};
  CHECK_FALSE(ring_simple_available(network));
  CHECK(ring_low_latency_128_available(network));
  network.tree_protocols = {.simple = false, .low_latency = false, .low_latency_128 = true};
  CHECK_FALSE(tree_low_latency_available(network));
  CHECK(tree_low_latency_128_available(network));
  // Generations whose cap is not known, and nodes without NVLink, have neither; one node has rings.
  for (const int capability : {0, 70, 86, 120}) {
    network.compute_capability = capability;
    CHECK_FALSE(ring_low_latency_128_available(network));
    CHECK_FALSE(tree_low_latency_128_available(network));
  }
  network.compute_capability = 90;
  network.nvlink = false;
  CHECK_FALSE(ring_low_latency_128_available(network));
  network.nvlink = true;
  network.nodes = 1;
  network.compute_capability = 70;
  CHECK(ring_low_latency_128_available(network));
  CHECK_FALSE(tree_low_latency_128_available(network));
}

TEST_CASE("the low-latency protocol halves the bandwidth, with NCCL's caps between nodes") {
  GroupNetwork network = unit_network(2);
  // 2 * 1/2 * 100 B at 0.5 B/s = 200 s; base 6.6 us, hops as given (0).
  CHECK(ring_low_latency_time(InstructionKind::all_reduce_sum, Bytes(100), network).value ==
        Approx(200.0 + 6.6e-6).epsilon(1e-14));
  network.ring_bandwidth = BytesPerSecond(200e9);
  network.nodes = 2;
  // 39e9 B at 39 GB/s for two nodes; 2 hops of 2.3 us more, with one rank per node.
  CHECK(ring_low_latency_time(InstructionKind::all_reduce_sum, Bytes(39'000'000'000), network).value ==
        Approx(1.0 + 6.6e-6 + 2 * 2.3e-6).epsilon(1e-12));
  network.ranks = network.nodes = 4;
  // 2 * 3/4 * 20.4e9 B at 20.4 GB/s; 6 hops of 2.3 us more, with one rank per node.
  CHECK(ring_low_latency_time(InstructionKind::all_reduce_sum, Bytes(20'400'000'000), network).value ==
        Approx(1.5 + 6.6e-6 + 6 * 2.3e-6).epsilon(1e-12));
  // AMD's processors: 22.5 and 19 GB/s, and hops of the ring take the network's overhead twice.
  network.amd_hosts = true;
  const Seconds hops = ring_low_latency_time(InstructionKind::all_reduce_sum, Bytes(1), network);
  CHECK((ring_low_latency_time(InstructionKind::all_reduce_sum, Bytes(19'000'000'001), network) - hops).value ==
        Approx(1.5).epsilon(1e-9));
  network.ranks = network.nodes = 2;
  const Seconds hops_of_two = ring_low_latency_time(InstructionKind::all_reduce_sum, Bytes(1), network);
  CHECK((ring_low_latency_time(InstructionKind::all_reduce_sum, Bytes(22'500'000'001), network) - hops_of_two).value ==
        Approx(1.0).epsilon(1e-9));
}

TEST_CASE("a tree all-reduce climbs the chain of a node and log2 of the nodes, twice") {
  GroupNetwork network = unit_network(32, 4);
  network.intra_latency = Seconds(1.0);
  network.inter_latency = Seconds(10.0);
  network.tree_bandwidth = BytesPerSecond(100.0);
  // 2 * ((32/4 - 1) * 1 + log2(4) * 10) = 54 s; 2 * 46 B / (92 B/s) = 1 s (below 64 B nothing is
  // corrected). Excesses: Simple 7 * 2 * 3.4 us + 2 * 2 * 11.3 us.
  CHECK(tree_simple_time(InstructionKind::all_reduce_sum, Bytes(46), network).value ==
        Approx(55.0 + 8.4e-6 + 14 * 3.4e-6 + 4 * 11.3e-6).epsilon(1e-14));
  // LL: 2 * 46 / (92 / 3.8) = 3.8 s.
  CHECK(tree_low_latency_time(InstructionKind::all_reduce_sum, Bytes(46), network).value ==
        Approx(57.8 + 6.8e-6 + 4 * 2.3e-6).epsilon(1e-14));
}

TEST_CASE("a tree's bandwidth is corrected by size") {
  GroupNetwork network = unit_network(2);
  network.tree_bandwidth = BytesPerSecond(1.0 / 0.92);
  // Simple: 64 B * 2^11 = 131072 B reaches 0.5; 2 * 131072 / 0.5 = 524288 s.
  CHECK(tree_simple_time(InstructionKind::all_reduce_sum, Bytes(131072), network).value ==
        Approx(524288.0).epsilon(1e-9));
  // LL: one byte less is in the entry before, 0.6: 2 * 131071 * 3.8 / 0.6.
  CHECK(tree_low_latency_time(InstructionKind::all_reduce_sum, Bytes(131071), network).value ==
        Approx(2 * 131071 * 3.8 / 0.6).epsilon(1e-9));
  // Beyond the table there is no correction.
  CHECK(tree_simple_time(InstructionKind::all_reduce_sum, Bytes(std::int64_t{64} << 24), network).value ==
        Approx(2.0 * 1073741824.0).epsilon(1e-9));
}

TEST_CASE("a transfer takes one hop and all of the bytes") {
  GroupNetwork network = unit_network(2);
  network.intra_latency = Seconds(3.0);
  network.inter_latency = Seconds(30.0);
  CHECK(point_to_point_time(InstructionKind::send, Bytes(100), network).value ==
        Approx(103.0 + 8.4e-6 + 2.8e-6).epsilon(1e-14));
  network.nodes = 2;
  CHECK(point_to_point_time(InstructionKind::receive, Bytes(100), network).value ==
        Approx(130.0 + 8.4e-6 + 11.3e-6).epsilon(1e-14));
}

TEST_CASE("an all-to-all in a node takes one hop and moves (n-1)/n of the buffer") {
  GroupNetwork network = unit_network(4);
  network.intra_latency = Seconds(3.0);
  network.inter_latency = Seconds(30.0);
  // 3/4 of 800 B at 1 B/s; a hop of 3 s, and Simple's base and excess.
  CHECK(pairwise_time(InstructionKind::all_to_all, Bytes(800), network).value ==
        Approx(603.0 + 8.4e-6 + 2.8e-6).epsilon(1e-14));
  // One rank per node: the same bytes over the network, of each transfer the first 50 twice.
  network.nodes = 4;
  network.uplink_bandwidth = BytesPerSecond(1.0);
  network.transfer_chunk = Bytes(50);
  CHECK(pairwise_time(InstructionKind::all_to_all, Bytes(800), network).value ==
        Approx(3 * 250.0 + 30.0 + 8.4e-6 + 11.3e-6).epsilon(1e-14));
  // Shorter ones, twice altogether.
  CHECK(pairwise_time(InstructionKind::all_to_all, Bytes(160), network).value ==
        Approx(3 * 80.0 + 30.0 + 8.4e-6 + 11.3e-6).epsilon(1e-14));
  CHECK(fastest_algorithm(InstructionKind::all_to_all, Bytes(800), network, BackendKind::cuda)->name == "pairwise");
}

TEST_CASE("an all-to-all over several nodes leaves a node once a rank, where a ring leaves it once") {
  // 8 ranks on each of 2 nodes: 8 times half of 1600 B leave a node at 1 B/s.
  GroupNetwork pair = unit_network(16, 2);
  pair.transfer_chunk = Bytes(1);
  CHECK(pairwise_time(InstructionKind::all_to_all, Bytes(1600), pair).value == Approx(6464.0).epsilon(1e-6));
  // What stays inside is waited for where it takes longer: 15 of 100 B at a thousandth of that.
  pair.ring_bandwidth = BytesPerSecond(1e-3);
  CHECK(pairwise_time(InstructionKind::all_to_all, Bytes(1600), pair).value == Approx(1.5e6).epsilon(1e-6));
  // On DGX H100, each GPU sends to other nodes what a NIC carries, within a tenth of the measured
  // 48 GB/s (NVIDIA GTC 2025, s72583).
  const std::string configs = std::string(PARPLAN_SOURCE_DIR) + "/configs/";
  ClusterOptions eight_nodes;
  eight_nodes.nodes = 8;
  const ClusterCatalog catalog{.devices_folder = configs + "devices", .clusters_folder = configs + "clusters"};
  const Cluster cluster = find_cluster("dgx-h100", catalog, eight_nodes);
  const DeviceMesh mesh{.degree = {.dp = 64}, .order = {Axis::pp, Axis::dp, Axis::tp}};
  const GroupNetwork network = group_network(cluster, mesh, Axis::dp);
  const Bytes bytes(std::int64_t{1} << 34);
  const Seconds time = collective_time(InstructionKind::all_to_all, bytes, network, BackendKind::cuda);
  CHECK((bytes / time).value * 7 / 8 == Approx(48e9).epsilon(0.1));
}

TEST_CASE("ranks in shared memory wait once a pass and read the others' chunks") {
  GroupNetwork network = unit_network(4);
  network.intra_latency = Seconds(3.0);
  // All-reduce of 800 B: 2 * (3 + 3/4 * 800); half of it for the others; a transfer reads
  // everything.
  CHECK(collective_time(InstructionKind::all_reduce_sum, Bytes(800), network, BackendKind::cpu) == Seconds(1206.0));
  CHECK(collective_time(InstructionKind::all_gather, Bytes(800), network, BackendKind::cpu) == Seconds(603.0));
  CHECK(collective_time(InstructionKind::reduce_scatter, Bytes(800), network, BackendKind::cpu) == Seconds(603.0));
  CHECK(collective_time(InstructionKind::all_to_all, Bytes(800), network, BackendKind::cpu) == Seconds(603.0));
  CHECK(collective_time(InstructionKind::receive, Bytes(800), network, BackendKind::cpu) == Seconds(803.0));
}

TEST_CASE("small buffers over many nodes go through the tree, large ones inside a node through the ring") {
  GroupNetwork cluster{.ranks = 512,
                       .nodes = 64,
                       .ring_bandwidth = BytesPerSecond(50e9),
                       .tree_bandwidth = BytesPerSecond(50e9),
                       .intra_latency = Seconds(0.6e-6),
                       .inter_latency = Seconds(3e-6)};
  CHECK(fastest_algorithm(InstructionKind::all_reduce_sum, Bytes(1024), cluster, BackendKind::cuda)->name ==
        "tree, low latency");
  GroupNetwork node{.ranks = 8,
                    .nodes = 1,
                    .ring_bandwidth = BytesPerSecond(360e9),
                    .tree_bandwidth = BytesPerSecond(360e9),
                    .intra_latency = Seconds(0.6e-6),
                    .inter_latency = Seconds(0.0)};
  CHECK(fastest_algorithm(InstructionKind::all_reduce_sum, Bytes(1 << 28), node, BackendKind::cuda)->name == "ring");
  CHECK(fastest_algorithm(InstructionKind::all_gather, Bytes(1 << 10), node, BackendKind::cuda)->name ==
        "ring, low latency");
}

TEST_CASE("four H100 behind NVSwitch reduce 256 MiB within a tenth of the measured 340 GB/s") {
  // nccl-tests, NCCL 2.18.3, 12 channels of 30 GB/s; the bus bandwidth is 2(n-1)/n S / t.
  const GroupNetwork node{.ranks = 4,
                          .nodes = 1,
                          .ring_bandwidth = BytesPerSecond(360e9),
                          .tree_bandwidth = BytesPerSecond(360e9),
                          .intra_latency = Seconds(0.6e-6),
                          .inter_latency = Seconds(0.0)};
  const Bytes bytes(256 << 20);
  const Seconds time = collective_time(InstructionKind::all_reduce_sum, bytes, node, BackendKind::cuda);
  CHECK((bytes / time).value * 1.5 == Approx(340e9).epsilon(0.1));
}

}  // namespace
}  // namespace parplan
