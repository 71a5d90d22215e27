#pragma once

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>

// Counts every allocation of the program that contains it: include it in exactly one file of a test
// program. operator new ends here too. Sanitizers have their own allocator; nothing is counted
// then.
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

inline std::atomic<std::int64_t> allocation_count{0};

extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);

void* malloc(std::size_t size) {
  ++allocation_count;
  return __libc_malloc(size);
}
void* calloc(std::size_t count, std::size_t size) {
  ++allocation_count;
  return __libc_calloc(count, size);
}
void* realloc(void* memory, std::size_t size) {
  ++allocation_count;
  return __libc_realloc(memory, size);
}
void* memalign(std::size_t alignment, std::size_t size) {
  ++allocation_count;
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(std::size_t alignment, std::size_t size) { return memalign(alignment, size); }
int posix_memalign(void** memory, std::size_t alignment, std::size_t size) {
  *memory = memalign(alignment, size);
  return *memory == nullptr ? ENOMEM : 0;
}
}

constexpr bool allocations_are_counted = true;

#else

inline std::atomic<std::int64_t> allocation_count{0};
constexpr bool allocations_are_counted = false;

#endif
