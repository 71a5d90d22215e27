#include "tests/cuda_emulator/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <pthread.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulator {
namespace {

// Frames of unoptimised kernels with their arrays in registers; only touched pages are taken from
// the machine.
#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t stack_bytes = 512 * 1024;
#else
constexpr std::size_t stack_bytes = 256 * 1024;
#endif

void* make_stack() {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* memory =
      mmap(nullptr, stack_bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) {
    std::perror("CUDA emulator: no memory for the stack of a CUDA thread");
    std::abort();
  }
  return static_cast<std::byte*>(memory) + page;
}

}  // namespace

#if defined(__x86_64__)

// Saves the registers that the System V ABI asks a function to keep. (The control words of the FPU
// never differ here.)
extern "C" void cuda_emulator_switch_stack(void** from, void* to);
asm(R"(
  .text
  .p2align 4
  .hidden cuda_emulator_switch_stack
  .globl cuda_emulator_switch_stack
  .type cuda_emulator_switch_stack, @function
cuda_emulator_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size cuda_emulator_switch_stack, . - cuda_emulator_switch_stack
)");

void make_fiber(Fiber& fiber, void (*entry)(), unsigned number) {
  fiber.stack_begin = make_stack();
  fiber.stack_bytes = stack_bytes;
  auto top = reinterpret_cast<std::uintptr_t>(fiber.stack_begin) + stack_bytes - number % 21 * 192;
  top &= ~std::uintptr_t{15};
  auto* words = reinterpret_cast<void**>(top);
  *--words = nullptr;  // the return address of `entry`, which does not return; keeps its stack aligned as after a call
  *--words = reinterpret_cast<void*>(entry);
  for (int saved = 0; saved < 6; ++saved) *--words = nullptr;
  fiber.stack_pointer = words;
}

namespace {
void switch_stack(Fiber& from, Fiber& to) { cuda_emulator_switch_stack(&from.stack_pointer, to.stack_pointer); }
}  // namespace

#else

void make_fiber(Fiber& fiber, void (*entry)(), unsigned) {
  fiber.stack_begin = make_stack();
  fiber.stack_bytes = stack_bytes;
  auto* context = new ucontext_t;
  getcontext(context);
  context->uc_stack.ss_sp = fiber.stack_begin;
  context->uc_stack.ss_size = stack_bytes;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  fiber.stack_pointer = context;
}

namespace {
void switch_stack(Fiber& from, Fiber& to) {
  if (from.stack_pointer == nullptr) from.stack_pointer = new ucontext_t;
  swapcontext(static_cast<ucontext_t*>(from.stack_pointer), static_cast<ucontext_t*>(to.stack_pointer));
}
}  // namespace

#endif

#if defined(__SANITIZE_ADDRESS__)

void switch_fiber(Fiber& from, Fiber& to) {
  if (from.stack_begin == nullptr) {  // a thread's own stack
    pthread_attr_t attributes;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &from.stack_begin, &from.stack_bytes);
    pthread_attr_destroy(&attributes);
  }
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack_begin, to.stack_bytes);
  switch_stack(from, to);
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
}
void entered_fiber() { __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr); }

#else

void switch_fiber(Fiber& from, Fiber& to) { switch_stack(from, to); }
void entered_fiber() {}

#endif

}  // namespace emulator
