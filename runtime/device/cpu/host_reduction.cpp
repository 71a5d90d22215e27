#include "runtime/device/cpu/host_reduction.h"

#include "runtime/device/cpu/instruction_sets.h"

namespace parplan {

InOrder host_sum_in_order() { return cpu_kernels(chosen_cpu_instruction_set()).sum_in_order; }
InOrder host_max_in_order() { return cpu_kernels(chosen_cpu_instruction_set()).max_in_order; }

}  // namespace parplan
