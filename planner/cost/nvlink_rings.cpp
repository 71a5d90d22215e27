#include "planner/cost/nvlink_rings.h"

#include <algorithm>
#include <array>

namespace parplan {
namespace {

constexpr std::array<NvlinkRings, 3> generations = {{
    // A100
    {.capability = 80,
     .below = 81,
     .low_latency = {Seconds(9.1e-6), Seconds(0.88e-6)},
     .low_latency_128 = {Seconds(27.2e-6), Seconds(0.6e-6)},
     .simple = {Seconds(26.2e-6), Seconds(7.5e-6)},
     .low_latency_cap = BytesPerSecond(57e9),
     .low_latency_128_cap = BytesPerSecond(156e9),
     .copy = BytesPerSecond(454e9),
     .pairs_low_latency_base = Seconds(12.7e-6),
     .pairs_base = Seconds(25.1e-6),
     .pairs_share = 0.77,
     .pairs_copy = BytesPerSecond(1142e9)},
    // H100, H200
    {.capability = 90,
     .below = 91,
     .low_latency = {Seconds(5.2e-6), Seconds(0.78e-6)},
     .low_latency_128 = {Seconds(25.8e-6), Seconds(0.73e-6)},
     .simple = {Seconds(16.4e-6), Seconds(0.98e-6)},
     .low_latency_cap = BytesPerSecond(131e9),
     .low_latency_128_cap = BytesPerSecond(252e9),
     .copy = BytesPerSecond(559e9),
     .pairs_low_latency_base = Seconds(8.1e-6),
     .pairs_base = Seconds(12.8e-6),
     .pairs_share = 0.84,
     .pairs_copy = BytesPerSecond(1808e9)},
    // B200, B300, GB200, GB300
    {.capability = 100,
     .below = 110,
     .low_latency = {Seconds(8.3e-6), Seconds(1.23e-6)},
     .low_latency_128 = {Seconds(9.8e-6), Seconds(1.12e-6)},
     .simple = {Seconds(12.4e-6), Seconds(5.75e-6)},
     .low_latency_cap = BytesPerSecond(253e9),
     .low_latency_128_cap = BytesPerSecond(257e9),
     .copy = BytesPerSecond(1167e9),
     .pairs_low_latency_base = Seconds(10.8e-6),
     .pairs_base = Seconds(16.2e-6),
     .pairs_share = 0.82,
     .pairs_copy = BytesPerSecond(805e9)},
}};

}  // namespace

const NvlinkRings* measured_rings(const GroupNetwork& network) {
  return network.nodes > 1 ? nullptr : generation_of_rings(network);
}

const NvlinkRings* generation_of_rings(const GroupNetwork& network) {
  if (!network.nvlink) return nullptr;
  const auto* const found = std::ranges::find_if(generations, [&](const NvlinkRings& rings) {
    return network.compute_capability >= rings.capability && network.compute_capability < rings.below;
  });
  return found == generations.end() ? nullptr : found;
}

}  // namespace parplan
