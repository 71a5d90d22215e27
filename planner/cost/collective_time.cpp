#include "planner/cost/collective_time.h"

#include <array>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/cost/nccl_protocol.h"
#include "planner/cost/nvlink_rings.h"
#include "planner/cost/nvls.h"
#include "planner/cost/pairwise.h"
#include "planner/cost/point_to_point.h"
#include "planner/cost/ring.h"
#include "planner/cost/shared_memory.h"
#include "planner/cost/tree.h"

namespace parplan {
namespace {

// Rings inside NVLink, and those over nodes whose steps were measured.
bool has_fitted_rings(const GroupNetwork& network) {
  return has_measured_rings(network) || (network.nodes > 1 && network.post_overhead > Seconds(0.0));
}
// LL128 has its base and its cap inside NVLink between nodes, too; NVLink SHARP its base and the
// cost of its chunks.
bool has_measured_devices(const GroupNetwork& network) {
  return generation_of_rings(network) != nullptr;
}

constexpr std::array algorithms = {
    CommunicationAlgorithm{.name = "ring",
                           .applies = ring_applies,
                           .available = ring_simple_available,
                           .time = ring_simple_time,
                           .fitted = has_fitted_rings},
    CommunicationAlgorithm{.name = "ring, low latency",
                           .applies = ring_applies,
                           .available = ring_low_latency_available,
                           .time = ring_low_latency_time,
                           .fitted = has_fitted_rings},
    CommunicationAlgorithm{.name = "ring, LL128",
                           .applies = ring_applies,
                           .available = ring_low_latency_128_available,
                           .time = ring_low_latency_128_time,
                           .fitted = has_measured_devices},
    CommunicationAlgorithm{
        .name = "tree", .applies = tree_applies, .available = tree_simple_available, .time = tree_simple_time},
    CommunicationAlgorithm{.name = "tree, low latency",
                           .applies = tree_applies,
                           .available = tree_low_latency_available,
                           .time = tree_low_latency_time},
    CommunicationAlgorithm{.name = "tree, LL128",
                           .applies = tree_applies,
                           .available = tree_low_latency_128_available,
                           .time = tree_low_latency_128_time,
                           .fitted = has_measured_devices},
    CommunicationAlgorithm{.name = "NVLS",
                           .applies = nvls_applies,
                           .available = nvls_available,
                           .time = nvls_time,
                           .fitted = has_measured_devices},
    CommunicationAlgorithm{.name = "NVLS tree",
                           .applies = nvls_applies,
                           .available = nvls_tree_available,
                           .time = nvls_tree_time,
                           .fitted = has_measured_devices},
    CommunicationAlgorithm{.name = "point to point",
                           .applies = point_to_point_applies,
                           .time = point_to_point_time,
                           .origin = CommunicationOrigin::links},
    CommunicationAlgorithm{.name = "pairwise",
                           .applies = pairwise_applies,
                           .time = pairwise_time,
                           .origin = CommunicationOrigin::links,
                           .fitted = has_measured_rings},
    CommunicationAlgorithm{.name = "first rank",
                           .applies = first_rank_applies,
                           .time = first_rank_time,
                           .origin = CommunicationOrigin::links},
    CommunicationAlgorithm{
        .name = "direct", .applies = direct_applies, .time = direct_time, .origin = CommunicationOrigin::links},
};

struct Choice {
  const CommunicationAlgorithm* algorithm = nullptr;
  Seconds time;
};

Choice choose(InstructionKind kind, Bytes bytes, const GroupNetwork& network, BackendKind backend) {
  Choice best;
  if (network.ranks <= 1) return best;
  for (const CommunicationAlgorithm& row : algorithms) {
    if (!row.applies(kind, backend) || (row.available != nullptr && !row.available(network))) continue;
    const Seconds time = row.time(kind, bytes, network);
    if (best.algorithm == nullptr || time < best.time) best = {.algorithm = &row, .time = time};
  }
  PARPLAN_ASSERT(best.algorithm != nullptr, fmt::format("no algorithm for {} on {}", name(kind), name(backend)));
  return best;
}

}  // namespace

std::span<const CommunicationAlgorithm> communication_algorithms() {
  return algorithms;
}

const CommunicationAlgorithm* fastest_algorithm(InstructionKind kind, Bytes bytes, const GroupNetwork& network,
                                                BackendKind backend) {
  return choose(kind, bytes, network, backend).algorithm;
}

Seconds collective_time(InstructionKind kind, Bytes bytes, const GroupNetwork& network, BackendKind backend) {
  return choose(kind, bytes, network, backend).time;
}

CommunicationOrigin communication_origin(InstructionKind kind, Bytes bytes, const GroupNetwork& network,
                                         BackendKind backend) {
  const CommunicationAlgorithm* row = fastest_algorithm(kind, bytes, network, backend);
  PARPLAN_ASSERT(row != nullptr, "the communication of one rank has no origin");
  return row->fitted != nullptr && row->fitted(network) ? CommunicationOrigin::fitted : row->origin;
}

}  // namespace parplan
