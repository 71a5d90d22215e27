#pragma once

#include <memory>
#include <string>

#include "runtime/device/backend.h"
#include "runtime/device/cpu/instruction_sets.h"

namespace parplan {

// Runs every kernel immediately, in the calling thread: streams need no order and events no
// waiting, but for those of file transfers, each of which has a thread. Kernels allocate nothing
// and sum in a fixed order. A token's results do not depend on the other tokens of the call (except
// where sums run over tokens), so splitting a batch changes no bit. Workspace operands are aligned
// to 64 bytes.
std::unique_ptr<Backend> make_cpu_backend(const std::string& instruction_set = chosen_cpu_instruction_set());

}  // namespace parplan
