#pragma once

#include <string>
#include <vector>

#include "runtime/device/cpu/kernels/kernel_table.h"

namespace parplan {

// The instruction sets for which the kernels were built and that this machine supports, slowest
// first: "baseline", "v3" (x86-64-v3: AVX2, FMA), "v4" (x86-64-v4: AVX-512 F, BW, CD, DQ, VL).
std::vector<std::string> cpu_instruction_sets();

// The last of cpu_instruction_sets(), or the one that the environment variable PARPLAN_CPU_ISA
// names. ConfigError when it names an unknown one or one that this machine lacks.
std::string chosen_cpu_instruction_set();

// ConfigError as above.
const CpuKernelTable& cpu_kernels(const std::string& instruction_set);

}  // namespace parplan
