#pragma once

#include <cstddef>

namespace emulator {

// A stack of its own to run on. Fibers stay in memory until the program ends, and stay on whichever
// host thread switches to them: what runs on one must not keep addresses of that thread's variables
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
// Goes on where `to` left off; returns when somebody switches to `from`.
void switch_fiber(Fiber& from, Fiber& to);
// To be called first by an entry: the other half of the switch to it.
void entered_fiber();

}  // namespace emulator
