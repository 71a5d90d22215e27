#include "planner/report/launch_line.h"

#include <doctest/doctest.h>

#include "planner/cluster/visible_devices.h"
#include "tests/planner/report/small_plan.h"

using namespace parplan;

namespace {

// A node of a number of devices with a network.
NodeGroup group(BackendKind backend, int devices, int nodes) {
  NodeGroup group;
  group.device.backend = backend;
  for (int i = 0; i < devices; ++i) {
    group.node.vertices.push_back({.name = "device", .kind = VertexKind::device});
    group.node.devices.push_back(i);
  }
  group.nodes = nodes;
  return group;
}

Plan plan_of(std::vector<NodeGroup> groups, int ranks) {
  Plan plan;
  plan.cluster.groups = std::move(groups);
  plan.spec.mesh.degree = {.dp = ranks};
  return plan;
}

std::string lines(const Plan& plan, const std::string& file = "plan.yaml") {
  return write_launch_line(launch_line(plan, file));
}

}  // namespace

TEST_CASE("one node is one process, whatever its devices") {
  CHECK(lines(plan_of({group(BackendKind::cuda, 8, 1)}, 8)) == "start     parplan run plan.yaml\n");
  CHECK(lines(plan_of({group(BackendKind::cpu, 8, 1)}, 4)) == "start     parplan run plan.yaml\n");
  // More nodes than ranks need.
  CHECK(lines(plan_of({group(BackendKind::cuda, 8, 4)}, 8)) == "start     parplan run plan.yaml\n");
}

TEST_CASE("selected GPUs are put before the command by their numbers on the machine, rank 0's first") {
  Plan plan = plan_of({group(BackendKind::cuda, 3, 1)}, 3);
  plan.cluster.device_ids = {2, 0, 5};
  CHECK(lines(plan) == "start     CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=2,0,5 parplan run plan.yaml\n");
  plan.spec.mesh.degree = {.dp = 2};  // the plan uses the first two
  CHECK(lines(plan) == "start     CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=2,0 parplan run plan.yaml\n");
}

TEST_CASE("a plan's file is quoted for the shell") {
  const Plan plan = plan_of({group(BackendKind::cuda, 1, 1)}, 1);
  CHECK(launch_line(plan, "my plans/it's.yaml").commands ==
        std::vector<std::string>{"parplan run 'my plans/it'\\''s.yaml'"});
  CHECK(launch_line(plan, "/tmp/plan-1_a.yaml").commands == std::vector<std::string>{"parplan run /tmp/plan-1_a.yaml"});
}

TEST_CASE("several nodes of GPUs are started by mpirun, srun or torchrun") {
  CHECK(lines(plan_of({group(BackendKind::cuda, 8, 4)}, 32)) ==
        "start     mpirun -n 32 --hostfile hosts --map-by ppr:8:node parplan run plan.yaml\n"
        "  or      srun --mpi=pmix --kill-on-bad-exit=1 --nodes 4 --ntasks-per-node 8 parplan run plan.yaml\n"
        "  or      torchrun --no-python --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node1:29400 "
        "parplan run plan.yaml\n"
        "          ('hosts' holds a line a node, such as 'node1 slots=8', in the cluster's order: slots=8 of nodes 1 "
        "to 4)\n");
}

TEST_CASE("several nodes of cores need MPI, and a core for each rank") {
  CHECK(lines(plan_of({group(BackendKind::cpu, 2, 2)}, 4)) ==
        "start     mpirun -n 4 --hostfile hosts --map-by ppr:2:node --bind-to core parplan run plan.yaml\n"
        "  or      srun --mpi=pmix --kill-on-bad-exit=1 --nodes 2 --ntasks-per-node 2 parplan run plan.yaml\n"
        "          ('hosts' holds a line a node, such as 'node1 slots=2', in the cluster's order: slots=2 of nodes 1 "
        "to 2)\n");
}

TEST_CASE("nodes that hold unlike numbers of ranks are filled in order") {
  CHECK(lines(plan_of({group(BackendKind::cuda, 8, 2)}, 12)) ==
        "start     mpirun -n 12 --hostfile hosts --map-by ppr:8:node parplan run plan.yaml\n"
        "          ('hosts' holds a line a node, such as 'node1 slots=8', in the cluster's order: slots=8 of node 1, "
        "slots=4 of node 2)\n");
  std::vector<NodeGroup> unlike{group(BackendKind::cuda, 4, 1), group(BackendKind::cuda, 8, 2)};
  unlike[0].device.name = "old";
  unlike[1].device.name = "new";
  CHECK(lines(plan_of(unlike, 20)) ==
        "start     mpirun -n 20 --hostfile hosts --map-by slot parplan run plan.yaml\n"
        "          ('hosts' holds a line a node, such as 'node1 slots=4', in the cluster's order: slots=4 of node 1 "
        "(old), slots=8 of nodes 2 to 3 (new))\n");
}

TEST_CASE("nodes that a plan leaves idle do not make those that it takes unlike") {
  std::vector<NodeGroup> unlike{group(BackendKind::cuda, 8, 2), group(BackendKind::cuda, 8, 2)};
  unlike[0].device.name = "new";
  unlike[1].device.name = "old";
  CHECK(lines(plan_of(unlike, 16)) ==
        "start     mpirun -n 16 --hostfile hosts --map-by ppr:8:node parplan run plan.yaml\n"
        "  or      srun --mpi=pmix --kill-on-bad-exit=1 --nodes 2 --ntasks-per-node 8 parplan run plan.yaml\n"
        "  or      torchrun --no-python --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node1:29400 "
        "parplan run plan.yaml\n"
        "          ('hosts' holds a line a node, such as 'node1 slots=8', in the cluster's order: slots=8 of nodes 1 "
        "to 2 (new))\n");
  CHECK(launch_line(plan_of(unlike, 32), "plan.yaml").commands.size() == 2);  // torchrun numbers nodes in any order
}

TEST_CASE("machines of a rack are started one by one, though the rack is a node") {
  NodeGroup rack = group(BackendKind::cuda, 6, 2);
  rack.node.devices_per_machine = 2;
  CHECK(lines(plan_of({rack}, 12)) ==
        "start     mpirun -n 12 --hostfile hosts --map-by ppr:2:node parplan run plan.yaml\n"
        "  or      srun --mpi=pmix --kill-on-bad-exit=1 --nodes 6 --ntasks-per-node 2 parplan run plan.yaml\n"
        "          ('hosts' holds a line a node, such as 'node1 slots=2', in the cluster's order: slots=2 of nodes 1 "
        "to 6)\n");
  CHECK(lines(plan_of({rack}, 2)) == "start     parplan run plan.yaml\n");
}

TEST_CASE("devices that parplan does not run have variables at most") {
  Plan plan = plan_of({group(BackendKind::oneapi, 2, 1)}, 2);
  CHECK(lines(plan) == "          (parplan runs nothing on oneAPI: another framework has to carry the plan out)\n");
  plan.cluster.device_ids = {3, 1};
  CHECK(lines(plan) ==
        "start     ZE_ENABLE_PCI_ID_DEVICE_ORDER=1 ZE_FLAT_DEVICE_HIERARCHY=FLAT ZE_AFFINITY_MASK=3,1\n"
        "          (the driver shows these devices in its own order, not in that of 3,1)\n"
        "          (parplan runs nothing on oneAPI: another framework has to carry the plan out)\n");
}

TEST_CASE("a plan of another engine is not parplan's to start") {
  Plan plan = plan_of({group(BackendKind::cuda, 8, 2)}, 16);
  plan.training.engine.name = "other";
  plan.training.engine.title = "Another Engine";
  CHECK(launch_line(plan, "plan.yaml").commands.empty());
  CHECK(lines(plan) ==
        "          (the plan is for Another Engine, which has to carry it out: parplan runs plans for its own "
        "runtime)\n");
}
