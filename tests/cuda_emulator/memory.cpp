#include "tests/cuda_emulator/memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "tests/cuda_emulator/cuda_runtime.h"
#include "tests/cuda_emulator/device.h"
#include "tests/cuda_emulator/grid.h"

namespace emulator {
namespace {

constexpr std::size_t alignment = 256;
constexpr unsigned char guard = 0xa5;
constexpr unsigned char poison = 0xff;  // of any type a NaN, or -1

// Pages: one without access, those of the allocation, one without access. The allocation ends
// within 255 bytes of the second, so that most accesses out of bounds, including reads, end the
// program where they happen; the rest is filled with a pattern and checked when the memory is
// freed.
struct Mapping {
  Allocation allocation;
  std::byte* pages = nullptr;
  std::size_t page_bytes = 0;  // all of them
};

struct Memory {
  std::mutex mutex;
  std::map<const std::byte*, Mapping> mappings;  // by begin
  std::map<int, std::size_t> used;               // of device memory, by device
  bool device_can_be_touched = false;
};
Memory& memory() {
  static auto* made = new Memory;
  return *made;
}

std::size_t page() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}
std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

bool strict() {
  static const char* value = std::getenv("PARPLAN_EMULATOR_STRICT");
  static const bool is_strict = value != nullptr && *value == '1';
  return is_strict;
}

void set_protection(const Mapping& mapping, int protection) {
  if (mprotect(mapping.pages + page(), mapping.page_bytes - 2 * page(), protection) != 0) fail("mprotect");
}

void let_device_memory_be_touched(bool can_be) {
  if (!strict()) return;
  const std::lock_guard lock(memory().mutex);
  memory().device_can_be_touched = can_be;
  for (const auto& [begin, mapping] : memory().mappings)
    if (mapping.allocation.type == cudaMemoryTypeDevice)
      set_protection(mapping, can_be ? PROT_READ | PROT_WRITE : PROT_NONE);
}

struct sigaction earlier_handler;

// Reports the allocation at the address of a fault, and lets the earlier handler have it.
void explain_fault(int, siginfo_t* information, void*) {
  sigaction(SIGSEGV, &earlier_handler, nullptr);
  const auto* at = static_cast<const std::byte*>(information->si_addr);
  if (!memory().mutex.try_lock()) return;
  for (const auto& [begin, mapping] : memory().mappings) {
    if (at < mapping.pages || at >= mapping.pages + mapping.page_bytes) continue;
    const Allocation& a = mapping.allocation;
    const char* kind = a.type == cudaMemoryTypeDevice ? "device" : "page-locked host";
    if (at < a.begin || at >= a.begin + a.bytes) {
      std::fprintf(stderr, "CUDA emulator: access to the byte %td %s an allocation of %zu bytes of %s memory\n",
                   at < a.begin ? a.begin - at : at - (a.begin + a.bytes), at < a.begin ? "before" : "behind", a.bytes,
                   kind);
    } else {
      std::fprintf(stderr,
                   "CUDA emulator: the host touched the byte %td of an allocation of %zu bytes of device memory\n",
                   at - a.begin, a.bytes);
    }
    break;
  }
  memory().mutex.unlock();
  if (const char* where = where_in_kernel(); *where != '\0') std::fprintf(stderr, "  in %s\n", where);
}

// Others install and remove handlers, too (doctest does for each test case).
void explain_faults() {
  struct sigaction current {};
  sigaction(SIGSEGV, nullptr, &current);
  if ((current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == explain_fault) return;
  struct sigaction action {};
  action.sa_sigaction = explain_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &earlier_handler);
}

cudaError_t allocate(void** result, std::size_t bytes, cudaMemoryType type) {
  if (result == nullptr) return cudaErrorInvalidValue;
  *result = nullptr;
  if (bytes == 0) return cudaSuccess;
  const int device = current_device();
  explain_faults();
  const std::lock_guard lock(memory().mutex);
  if (type == cudaMemoryTypeDevice && memory().used[device] + round_up(bytes, alignment) > total_memory())
    return cudaErrorMemoryAllocation;
  const std::size_t inner = round_up(round_up(bytes, alignment), page());
  Mapping mapping;
  mapping.page_bytes = inner + 2 * page();
  void* mapped = mmap(nullptr, mapping.page_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return cudaErrorMemoryAllocation;
  mapping.pages = static_cast<std::byte*>(mapped);
  std::byte* first = mapping.pages + page();
  if (mprotect(first, inner, PROT_READ | PROT_WRITE) != 0) {
    munmap(mapped, mapping.page_bytes);
    return cudaErrorMemoryAllocation;
  }
  std::byte* begin = first + inner - round_up(bytes, alignment);
  std::memset(first, guard, static_cast<std::size_t>(begin - first));
  std::memset(begin, poison, bytes);
  std::memset(begin + bytes, guard, round_up(bytes, alignment) - bytes);
  mapping.allocation = {.begin = begin, .bytes = bytes, .type = type, .device = device};
  if (type == cudaMemoryTypeDevice) memory().used[device] += round_up(bytes, alignment);
  memory().mappings.emplace(begin, mapping);
  if (strict() && type == cudaMemoryTypeDevice && !memory().device_can_be_touched) set_protection(mapping, PROT_NONE);
  *result = begin;
  return cudaSuccess;
}

// Checks the pattern around an allocation; ends the program where it was overwritten.
void check_guards(const Mapping& mapping) {
  const Allocation& a = mapping.allocation;
  const std::byte* first = mapping.pages + page();
  const std::byte* end = mapping.pages + mapping.page_bytes - page();
  const auto broken = [&](const std::byte* at) {
    char text[160];
    const bool before = at < a.begin;
    std::snprintf(text, sizeof(text), "the byte %td %s an allocation of %zu bytes was written",
                  before ? a.begin - at : at - (a.begin + a.bytes), before ? "before" : "behind", a.bytes);
    fail(text);
  };
  for (const std::byte* at = first; at < a.begin; ++at)
    if (*at != std::byte{guard}) broken(at);
  for (const std::byte* at = a.begin + a.bytes; at < end; ++at)
    if (*at != std::byte{guard}) broken(at);
}

cudaError_t release(void* freed, cudaMemoryType type) {
  if (freed == nullptr) return cudaSuccess;
  const std::lock_guard lock(memory().mutex);
  const auto place = memory().mappings.find(static_cast<const std::byte*>(freed));
  if (place == memory().mappings.end() || place->second.allocation.type != type) return cudaErrorInvalidValue;
  if (strict()) set_protection(place->second, PROT_READ);
  check_guards(place->second);
  munmap(place->second.pages, place->second.page_bytes);
  if (type == cudaMemoryTypeDevice)
    memory().used[place->second.allocation.device] -= round_up(place->second.allocation.bytes, alignment);
  memory().mappings.erase(place);
  return cudaSuccess;
}

}  // namespace

std::optional<Allocation> allocation_at(const void* address) {
  const auto* at = static_cast<const std::byte*>(address);
  const std::lock_guard lock(memory().mutex);
  auto place = memory().mappings.upper_bound(at);
  if (place == memory().mappings.begin()) return std::nullopt;
  const Allocation& found = std::prev(place)->second.allocation;
  if (at >= found.begin + found.bytes) return std::nullopt;
  return found;
}

bool lies_in(const Allocation& allocation, const void* begin, std::size_t bytes) {
  const auto* at = static_cast<const std::byte*>(begin);
  return at >= allocation.begin && bytes <= allocation.bytes && at + bytes <= allocation.begin + allocation.bytes;
}

DeviceMemoryAccess::DeviceMemoryAccess() { let_device_memory_be_touched(true); }
DeviceMemoryAccess::~DeviceMemoryAccess() { let_device_memory_be_touched(false); }
HostMemoryOnly::HostMemoryOnly() { let_device_memory_be_touched(false); }
HostMemoryOnly::~HostMemoryOnly() { let_device_memory_be_touched(true); }

}  // namespace emulator

using namespace emulator;

cudaError_t cudaMalloc(void** result, std::size_t bytes) {
  if (const cudaError_t error = forbidden_in_capture(); error != cudaSuccess) return remember(error);
  return remember(allocate(result, bytes, cudaMemoryTypeDevice));
}

// Waits for the device, like the real one.
cudaError_t cudaFree(void* freed) {
  if (const cudaError_t error = forbidden_in_capture(); error != cudaSuccess) return remember(error);
  if (freed == nullptr) return cudaSuccess;
  finish_work_before_release();
  return remember(release(freed, cudaMemoryTypeDevice));
}

cudaError_t cudaMallocHost(void** result, std::size_t bytes) {
  if (const cudaError_t error = forbidden_in_capture(); error != cudaSuccess) return remember(error);
  return remember(allocate(result, bytes, cudaMemoryTypeHost));
}

cudaError_t cudaHostAlloc(void** result, std::size_t bytes, unsigned) { return cudaMallocHost(result, bytes); }

cudaError_t cudaFreeHost(void* freed) {
  if (const cudaError_t error = forbidden_in_capture(); error != cudaSuccess) return remember(error);
  if (freed == nullptr) return cudaSuccess;
  finish_work_before_release();
  return remember(release(freed, cudaMemoryTypeHost));
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  if (free == nullptr || total == nullptr) return remember(cudaErrorInvalidValue);
  const std::lock_guard lock(memory().mutex);
  *total = total_memory();
  *free = *total - memory().used[current_device()];
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  if (attributes == nullptr) return remember(cudaErrorInvalidValue);
  const std::optional<Allocation> found = allocation_at(address);
  void* pointer = const_cast<void*>(address);
  if (!found.has_value()) {
    *attributes = {.type = cudaMemoryTypeUnregistered, .device = -2, .devicePointer = nullptr, .hostPointer = pointer};
  } else {
    const bool host = found->type == cudaMemoryTypeHost;
    *attributes = {.type = found->type,
                   .device = found->device,
                   .devicePointer = pointer,
                   .hostPointer = host ? pointer : nullptr};
  }
  return cudaSuccess;
}
