#include "runtime/device/cpu/instruction_sets.h"

#include <algorithm>
#include <cstdlib>

#include <fmt/core.h>

#include "planner/base/error.h"
#include "planner/base/text.h"

namespace parplan {

namespace {

struct InstructionSet {
  const char* name;
  const CpuKernelTable& (*kernels)();
  bool (*supported)();
};

bool always() { return true; }

#if defined(__x86_64__)
bool has_v3() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("avx");
}
bool has_v4() {
  return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

constexpr InstructionSet instruction_sets[] = {
    {"baseline", cpu_baseline::kernel_table, always},
#if defined(__x86_64__)
    {"v3", cpu_v3::kernel_table, has_v3},
    {"v4", cpu_v4::kernel_table, has_v4},
#endif
};

}  // namespace

std::vector<std::string> cpu_instruction_sets() {
  std::vector<std::string> names;
  for (const InstructionSet& set : instruction_sets)
    if (set.supported()) names.push_back(set.name);
  return names;
}

const CpuKernelTable& cpu_kernels(const std::string& instruction_set) {
  std::vector<std::string> all;
  for (const InstructionSet& set : instruction_sets) {
    all.push_back(set.name);
    if (instruction_set != set.name) continue;
    if (!set.supported())
      throw ConfigError(fmt::format("PARPLAN_CPU_ISA: this machine lacks the instructions of '{}'; it has {}",
                                    instruction_set, join(cpu_instruction_sets())));
    return set.kernels();
  }
  throw ConfigError(fmt::format("PARPLAN_CPU_ISA: unknown instruction set '{}'; allowed: {}{}", instruction_set,
                                join(all), did_you_mean(instruction_set, all)));
}

std::string chosen_cpu_instruction_set() {
  const char* wanted = std::getenv("PARPLAN_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return cpu_instruction_sets().back();
  cpu_kernels(wanted);
  return wanted;
}

}  // namespace parplan
