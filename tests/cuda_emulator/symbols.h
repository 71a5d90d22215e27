#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace emulator {

// What a kernel's program file contains about it, if it was not stripped of its symbols.
struct Kernel {
  struct Variable {
    std::size_t offset;  // in the variables of a thread that belong to the program file
    std::size_t bytes;
  };
  std::string name;               // "parplan::fill(float*, int)", else its address
  std::vector<Variable> shared;   // its own __shared__ arrays; not those of functions that it calls
  std::size_t shared_bytes = 0;   // of all of them
  const void* program = nullptr;  // where the program file is loaded
};

// Found once for each kernel.
const Kernel& kernel_at(const void* address);
// Where this thread's variables of the kernel's program file begin; null where it has none yet.
std::byte* thread_variables(const Kernel& kernel);

}  // namespace emulator
