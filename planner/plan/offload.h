#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "planner/cluster/cluster.h"
#include "planner/plan/placement.h"

namespace parplan {

// What a rank keeps elsewhere than on its device: a home for each part of its data.
struct Offload {
  // With the parameters in fp32; the host's processor updates them (ZeRO-Offload, Ren et al. 2021,
  // arXiv:2101.06840). In a file, it is on the host only while the host updates a bucket
  // (ZeRO-Infinity, Rajbhandari et al. 2021, arXiv:2104.07857; DeepSpeed's offload_optimizer).
  Home optimizer{};
  // Sums, which are on the device only while a backward adds to them (also offload_optimizer). In a
  // file, they are read and written with each micro-batch, and are on the host only on their way.
  Home gradients{};
  // On the device only while their block computes (DeepSpeed's offload_param).
  Home parameters{};
  // What layers keep for their backward, copied out after the forward and back before the backward
  // (ZeRO-Infinity; Megatron-LM's --cpu-offloading).
  Home activations{};
  auto operator<=>(const Offload&) const = default;
};

// A part, in the order in which a word names them.
struct OffloadPart {
  Home Offload::*home = nullptr;
  const char* name = nullptr;   // "activations"
  const char* words = nullptr;  // "what layers keep for their backward"
  bool is_updated = false;      // by the host, so that it may be there where the optimizer's state is
};
std::span<const OffloadPart> offload_parts();

// All that there are, whatever the plan: nothing first, all that there is last; what uses more of
// NVMe behind what uses less.
std::span<const Offload> all_offloads();
// Why it is none of these, in words; nothing where it is one.
std::optional<std::string> wrong_with(const Offload& offload);

// "none", or the parts that are not on the device, joined by +: "optimizer:nvme+activations".
std::string name(const Offload& offload);
// "with the optimizer's state on NVMe, and gradients in host memory".
std::string phrase(const Offload& offload);
// Reads a name, whose parts may have any order. A ConfigError says what is wrong with it.
Offload parse_offload(const std::string& text);

// A number for each, 0 for nothing, from which it can be made again: for techniques, which list
// numbers.
int number_of(const Offload& offload);
Offload offload_of(int number);

// Whether every part is as far from the device as in another, or further.
bool includes(const Offload& whole, const Offload& part);
// Whether any part is in this home.
bool uses(const Offload& offload, Home home);
// The same, with what is in a file in the host's memory.
Offload on_host_instead(const Offload& offload);

// Where the state of parameters is.
StateHomes state_homes(const Offload& offload);

// Why what it uses of the host, or of its NVMe drives, cannot be timed on the cluster; nothing
// where it can.
std::optional<std::string> lacks_homes(const Cluster& cluster, const Offload& offload);

}  // namespace parplan
