#pragma once

#include <cstddef>

namespace emulator {

// A separate stack to run on. Fibers stay in memory until the program ends, and run on whichever
// host thread switches to them: their code must not keep addresses of that thread's variables
// across a switch.
struct Fiber {
  void* stack_pointer = nullptr;
  void* stack_begin = nullptr;  // lowest address
  std::size_t stack_bytes = 0;
  void* fake_stack = nullptr;  // AddressSanitizer's
};

// A fiber that begins with `entry`, which never returns. `number` spreads stacks over the sets of
// the caches.
void make_fiber(Fiber& fiber, void (*entry)(), unsigned number);
// Continues where `to` left off; returns when somebody switches to `from`.
void switch_fiber(Fiber& from, Fiber& to);
// To be called first by an entry: the other half of the switch to it.
void entered_fiber();

}  // namespace emulator
