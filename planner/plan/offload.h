#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "planner/cluster/cluster.h"
#include "planner/plan/placement.h"

namespace parplan {

// What a rank keeps in its host's memory, or on its drives: nothing; the optimizer's state, with
// the parameters in fp32, where the host's processor updates them (ZeRO-Offload, Ren et al. 2021,
// arXiv:2101.06840); what layers keep for their backward, copied out after the forward and back
// before the backward (ZeRO-Infinity, Rajbhandari et al. 2021, arXiv:2104.07857; Megatron-LM's
// --cpu-offloading). Beside the optimizer's state: sums of gradients, which are on the device only
// while a backward adds to them (DeepSpeed's offload_optimizer), and parameters, which are there
// only while their block computes (offload_param; FSDP's CPUOffload is all three). With `nvme`, the
// optimizer's state is in a file on the machine's NVMe drives, and on the host only while the host
// updates a bucket (ZeRO-Infinity; DeepSpeed's offload_optimizer with device nvme). Bits: rows hold
// the combinations that there are.
enum class Offload : std::uint8_t {
  none = 0,
  optimizer = 1,
  activations = 2,
  gradients = 4,
  parameters = 8,
  nvme = 16
};
inline constexpr std::array offload_parts = {Offload::optimizer, Offload::activations, Offload::gradients,
                                             Offload::parameters, Offload::nvme};
constexpr Offload operator|(Offload a, Offload b) {
  return static_cast<Offload>(static_cast<std::uint8_t>(a) | static_cast<std::uint8_t>(b));
}
constexpr Offload without(Offload whole, Offload part) {
  return static_cast<Offload>(static_cast<std::uint8_t>(whole) & ~static_cast<std::uint8_t>(part));
}
constexpr bool includes(Offload whole, Offload part) {
  return (static_cast<std::uint8_t>(whole) & static_cast<std::uint8_t>(part)) == static_cast<std::uint8_t>(part);
}
const char* name(Offload offload);

// Where each kind of a rank's data lies under one of them.
struct OffloadRow {
  Offload kind{};
  const char* name = nullptr;    // "optimizer+activations"
  const char* phrase = nullptr;  // "with ... in host memory"
  StateHomes state = {};         // of parameters
  Home saved{};                  // what a layer keeps from its forward for its backward
};
// In the order of help and of `legal_offloads`: nothing first, all that there is last.
std::span<const OffloadRow> offload_rows();
// InternalError where no row has it.
const OffloadRow& row_of(Offload offload);

// Why what it uses of the host, or of its NVMe drives, cannot be timed on the cluster; nothing
// where it can.
std::optional<std::string> lacks_homes(const Cluster& cluster, Offload offload);

}  // namespace parplan
