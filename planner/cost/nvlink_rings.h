#pragma once

#include "planner/cluster/group_network.h"

namespace parplan {

// What rings inside NVLink take on one generation of GPUs, as measured. tuning.cc, by which NCCL
// chooses among its algorithms, has one latency for all generations, and expects on an A100 half as
// much again of LL128 as it reaches.
//
// The numbers are those that come nearest to all-reduce, all-gather and reduce-scatter of 512 bytes
// to 512 MiB on 2, 4 and 8 GPUs behind NVSwitch, measured by NVIDIA in loops (aiconfigurator-core
// 0.12.0, PyPI, Apache-2.0; NCCL 2.23 to 2.29): mean error 7.7% (A100), 5.7% (H100 and H200) and
// 5.5% (B200, B300, GB200 and GB300); of all-to-alls from 1 MiB on 8.0%, 6.4% and 5.8%.
// tests/golden/fit_nvlink_rings.py finds them. They are for one node; NCCL's own (nccl_protocol.h)
// hold for other generations, between nodes and over PCIe.
struct NvlinkRings {
  struct Protocol {
    Seconds base;
    Seconds hop;  // on links of 0.6 us
  };
  int capability = 0;  // of the GPUs, 80 for 8.0, and of later ones before `below`
  int below = 0;
  Protocol low_latency, low_latency_128, simple;
  BytesPerSecond low_latency_cap, low_latency_128_cap;  // the most that a ring reaches
  // Simple: while a rank copies its own part, or a received one to its place, its share of the
  // links is idle; the channels copy so fast.
  BytesPerSecond copy;
  // All-to-alls (pairwise.h): of LL and of Simple, the share of the links' rate that transfers to
  // all others at once reach, and the rate at which a rank copies its own part.
  Seconds pairs_low_latency_base, pairs_base;
  double pairs_share = 1.0;
  BytesPerSecond pairs_copy;
};

// The latency of a link's hop for which the numbers are (nvlink_hop_latency).
inline constexpr Seconds measured_link_latency{0.6e-6};

// Null where NCCL's own figures are taken.
const NvlinkRings* measured_rings(const GroupNetwork& network);
// The same generation for groups over any number of nodes, whose members of one node NVLink joins:
// what does not depend on the network, as the cap of LL128, which copies line by line.
const NvlinkRings* generation_of_rings(const GroupNetwork& network);
inline bool has_measured_rings(const GroupNetwork& network) {
  return measured_rings(network) != nullptr;
}

}  // namespace parplan
