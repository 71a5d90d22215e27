#pragma once

#include <string>

namespace emulator {

// The name of the function at `address`, or the address where the program has no name for it.
std::string symbol_at(const void* address);

}  // namespace emulator
