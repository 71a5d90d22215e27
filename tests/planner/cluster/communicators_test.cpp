#include "planner/cluster/communicators.h"

#include <doctest/doctest.h>

#include <string>

#include "planner/cluster/find_cluster.h"

namespace parplan {
namespace {

Cluster cluster_named(const std::string& name, int devices) {
  ClusterOptions options;
  options.devices = devices;
  const std::string source = PARPLAN_SOURCE_DIR;
  return find_cluster(
      name, {.devices_folder = source + "/configs/devices", .clusters_folder = source + "/configs/clusters"}, options);
}

DeviceMesh mesh_of(int dp, int tp, int pp) {
  DeviceMesh mesh;
  mesh.order = parse_order("pp-dp-tp");
  mesh.degree.dp = dp;
  mesh.degree.tp = tp;
  mesh.degree.pp = pp;
  return mesh;
}

std::int64_t mebibytes(const Cluster& cluster, const DeviceMesh& mesh) {
  return communicator_memory(cluster, mesh).count >> 20;
}

}  // namespace

TEST_CASE("communicators take buffers for each channel of each group and each neighbour") {
  const Cluster node = cluster_named("dgx-a100", 8), nodes = cluster_named("dgx-a100", 64);
  CHECK(mebibytes(node, mesh_of(1, 1, 1)) == 0);
  // 24 channels with 10 MiB at the receiver and 2 at the sender.
  CHECK(mebibytes(node, mesh_of(8, 1, 1)) == 288);
  CHECK(mebibytes(node, mesh_of(2, 4, 1)) == 2 * 288);
  // A neighbour: 320 MiB to receive and 64 to send, over 32 channels.
  CHECK(mebibytes(node, mesh_of(1, 1, 2)) == 384);
  CHECK(mebibytes(node, mesh_of(1, 1, 8)) == 2 * 384);
  CHECK(communicator_memory(node, mesh_of(1, 1, 8), {.pp = true}) == Bytes(4 * 384 << 20));  // both ways of a V
  // Between nodes: 2 channels of the rank's own NIC, with 10 MiB at both ends; 8 ranks of a node
  // share 16.
  CHECK(mebibytes(nodes, mesh_of(8, 8, 1)) == 288 + 2 * 20);
  CHECK(mebibytes(nodes, mesh_of(64, 1, 1)) == 16 * 20);
  CHECK(mebibytes(nodes, mesh_of(1, 8, 8)) == 288 + 2 * 2 * 20);
  // Around the ring of the context axis, neighbours; parameters are reduced over both axes.
  DeviceMesh context = mesh_of(2, 1, 1);
  context.degree.cp = 4;
  CHECK(communicator_memory(node, context) == Bytes(2 * 288 << 20));
  CHECK(communicator_memory(node, context, {.cp = true}) == Bytes((288 + 2 * 384) << 20));
  // Groups that exchange tokens for heads inside a node, and one neighbour, or a group, across
  // nodes; or two neighbours, around a ring of four.
  DeviceMesh hierarchical = mesh_of(1, 1, 1);
  hierarchical.degree.cp = 16;
  hierarchical.cp_ulysses = 8;
  CHECK(communicator_memory(nodes, hierarchical, {.cp = true}) == Bytes((16 * 20 + 288 + 2 * 20) << 20));
  CHECK(communicator_memory(nodes, hierarchical) == Bytes((16 * 20 + 288 + 2 * 20) << 20));
  hierarchical.cp_ulysses = 4;
  CHECK(communicator_memory(nodes, hierarchical, {.cp = true}) == Bytes((16 * 20 + 288 + 2 * 2 * 20) << 20));
}

TEST_CASE("what lies outside tensors is at least what the device's file says, and counts NCCL once") {
  const Cluster node = cluster_named("dgx-a100", 8);
  const Bytes of_device = memory_overhead(node, 8);
  CHECK(memory_overhead(node, {}, mesh_of(8, 1, 1)) == of_device);  // 288 of the 512 MiB in it
  CHECK(memory_overhead(node, {}, mesh_of(2, 4, 1)) == of_device + Bytes((2 * 288 - 512) << 20));
  Engine engine;
  engine.libraries = of_device;
  CHECK(memory_overhead(node, engine, mesh_of(8, 1, 1)) == of_device + assumed_communicators);
  Cluster cores;
  cores.groups.front().device.backend = BackendKind::cpu;
  cores.groups.front().device.memory_overhead = Bytes(16);
  CHECK(memory_overhead(cores, engine, mesh_of(2, 4, 1)) == memory_overhead(cores, 8));
}

}  // namespace parplan
