#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/device/backend.h"

namespace parplan {

// The instruction sets that the kernels were built for and that this machine runs, slowest first:
// "baseline", "v3" (x86-64-v3: AVX2, FMA), "v4" (x86-64-v4: AVX-512 F, BW, CD, DQ, VL).
std::vector<std::string> cpu_instruction_sets();

// The last of cpu_instruction_sets(), or what the environment variable PARPLAN_CPU_ISA names. ConfigError when it
// names something unknown or something that this machine lacks.
std::string chosen_cpu_instruction_set();

// Runs every kernel at once, in the calling thread: streams need no order and events no waiting. Kernels allocate
// nothing and sum in a fixed order; a token's results do not depend on the other tokens of the call (except where
// sums run over tokens), so splitting a batch changes no bit.
std::unique_ptr<Backend> make_cpu_backend(const std::string& instruction_set = chosen_cpu_instruction_set());

}  // namespace parplan
