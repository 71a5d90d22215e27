#include "planner/cluster/cluster.h"

#include <array>

namespace parplan {
namespace {

constexpr std::array<const char*, 7> vertex_kind_names = {"device", "nvswitch", "pcie_switch", "host_bridge",
                                                          "nic",    "memory",   "network"};

}  // namespace

const char* name(VertexKind kind) { return vertex_kind_names[static_cast<std::size_t>(kind)]; }

}  // namespace parplan
