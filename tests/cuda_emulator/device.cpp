#include "tests/cuda_emulator/device.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "tests/cuda_emulator/grid.h"
#include "tests/cuda_emulator/symbols.h"

namespace emulator {
namespace {

thread_local int device_of_thread = 0;
thread_local cudaError_t last_error = cudaSuccess;

constexpr int multiprocessors = 4;
constexpr int clock_khz = 1'980'000;
constexpr int memory_clock_khz = 3'201'000;
constexpr int memory_bus_bits = 6144;
constexpr int l2_bytes = 62'914'560;

std::size_t environment_number(const char* name, std::size_t otherwise) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return otherwise;
  char* end = nullptr;
  const unsigned long long number = std::strtoull(value, &end, 10);
  if (*end != '\0') {
    std::fprintf(stderr, "CUDA emulator: %s=%s is no number\n", name, value);
    std::abort();
  }
  return number;
}

struct SharedMemory {
  std::mutex mutex;
  std::map<std::pair<int, const void*>, std::size_t> allowed;  // by device and kernel
};
SharedMemory& shared_memory() {
  static auto* made = new SharedMemory;
  return *made;
}

struct ErrorRow {
  cudaError_t error;
  const char* name;
  const char* text;
};
constexpr ErrorRow error_rows[] = {
#define CUDA_EMULATOR_ROW(name, value, text) {name, #name, text},
    CUDA_EMULATOR_ERRORS(CUDA_EMULATOR_ROW)
#undef CUDA_EMULATOR_ROW
};

struct AttributeRow {
  cudaDeviceAttr attribute;
  int value;
};
constexpr AttributeRow attribute_rows[] = {
    {cudaDevAttrMaxThreadsPerBlock, 1024},
    {cudaDevAttrMaxBlockDimX, 1024},
    {cudaDevAttrMaxBlockDimY, 1024},
    {cudaDevAttrMaxBlockDimZ, 64},
    {cudaDevAttrMaxGridDimX, 2147483647},
    {cudaDevAttrMaxGridDimY, 65535},
    {cudaDevAttrMaxGridDimZ, 65535},
    {cudaDevAttrMaxSharedMemoryPerBlock, static_cast<int>(shared_bytes_by_default)},
    {cudaDevAttrWarpSize, 32},
    {cudaDevAttrMaxRegistersPerBlock, 65536},
    {cudaDevAttrClockRate, clock_khz},
    {cudaDevAttrMultiProcessorCount, multiprocessors},
    {cudaDevAttrMemoryClockRate, memory_clock_khz},
    {cudaDevAttrGlobalMemoryBusWidth, memory_bus_bits},
    {cudaDevAttrL2CacheSize, l2_bytes},
    {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
    {cudaDevAttrUnifiedAddressing, 1},
    {cudaDevAttrComputeCapabilityMajor, 9},
    {cudaDevAttrComputeCapabilityMinor, 0},
    {cudaDevAttrStreamPrioritiesSupported, 1},
    {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 228 * 1024},
    {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
    {cudaDevAttrMaxSharedMemoryPerBlockOptin, static_cast<int>(shared_bytes_at_most)},
    {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
    {cudaDevAttrReservedSharedMemoryPerBlock, 1024},
};

}  // namespace

int current_device() { return device_of_thread; }
std::size_t total_memory() {
  static const std::size_t bytes = environment_number("PARPLAN_EMULATED_MEMORY", std::size_t{8} << 30);
  return bytes;
}
int devices() {
  static const int count = static_cast<int>(environment_number("PARPLAN_EMULATED_DEVICES", 1));
  return count;
}

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

std::size_t allowed_shared_memory(const void* kernel) {
  const std::lock_guard lock(shared_memory().mutex);
  const auto place = shared_memory().allowed.find({current_device(), kernel});
  return place == shared_memory().allowed.end() ? shared_bytes_by_default : place->second;
}

}  // namespace emulator

using namespace emulator;

const char* cudaGetErrorName(cudaError_t error) {
  for (const ErrorRow& row : error_rows)
    if (row.error == error) return row.name;
  return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
  for (const ErrorRow& row : error_rows)
    if (row.error == error) return row.text;
  return "unrecognized error code";
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaDriverGetVersion(int* version) {
  if (version == nullptr) return remember(cudaErrorInvalidValue);
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

cudaError_t cudaGetDeviceCount(int* count) {
  if (count == nullptr) return remember(cudaErrorInvalidValue);
  *count = devices();
  return *count == 0 ? remember(cudaErrorNoDevice) : cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  if (device == nullptr) return remember(cudaErrorInvalidValue);
  *device = device_of_thread;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices()) return remember(cudaErrorInvalidDevice);
  device_of_thread = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (properties == nullptr) return remember(cudaErrorInvalidValue);
  if (device < 0 || device >= devices()) return remember(cudaErrorInvalidDevice);
  *properties = cudaDeviceProp{};
  std::snprintf(properties->name, sizeof(properties->name), "NVIDIA H200 (emulated)");
  properties->totalGlobalMem = total_memory();
  properties->sharedMemPerBlock = shared_bytes_by_default;
  properties->regsPerBlock = 65536;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  const std::array<int, 3> threads = {1024, 1024, 64}, blocks = {2147483647, 65535, 65535};
  std::memcpy(properties->maxThreadsDim, threads.data(), sizeof(threads));
  std::memcpy(properties->maxGridSize, blocks.data(), sizeof(blocks));
  properties->totalConstMem = 65536;
  properties->major = 9;
  properties->minor = 0;
  properties->multiProcessorCount = multiprocessors;
  properties->concurrentKernels = 1;
  properties->ECCEnabled = 1;
  properties->pciBusID = 0x1b + device;
  properties->asyncEngineCount = 3;
  properties->unifiedAddressing = 1;
  properties->memoryBusWidth = memory_bus_bits;
  properties->l2CacheSize = l2_bytes;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->streamPrioritiesSupported = 1;
  properties->sharedMemPerMultiprocessor = 228 * 1024;
  properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlockOptin = shared_bytes_at_most;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->reservedSharedMemPerBlock = 1024;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (value == nullptr) return remember(cudaErrorInvalidValue);
  if (device < 0 || device >= devices()) return remember(cudaErrorInvalidDevice);
  for (const AttributeRow& row : attribute_rows)
    if (row.attribute == attribute) {
      *value = row.value;
      return cudaSuccess;
    }
  return remember(cudaErrorInvalidValue);
}

cudaError_t cudaDeviceGetPCIBusId(char* bus_id, int length, int device) {
  if (bus_id == nullptr) return remember(cudaErrorInvalidValue);
  if (device < 0 || device >= devices()) return remember(cudaErrorInvalidDevice);
  if (length < 13) return remember(cudaErrorInvalidValue);
  std::snprintf(bus_id, static_cast<std::size_t>(length), "0000:%02X:00.0", 0x1b + device);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (kernel == nullptr) return remember(cudaErrorInvalidDeviceFunction);
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout)
    return remember(value >= -1 && value <= 100 ? cudaSuccess : cudaErrorInvalidValue);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
      static_cast<std::size_t>(value) + kernel_at(kernel).shared_bytes > shared_bytes_at_most)
    return remember(cudaErrorInvalidValue);
  const std::lock_guard lock(shared_memory().mutex);
  shared_memory().allowed[{current_device(), kernel}] = static_cast<std::size_t>(value);
  return cudaSuccess;
}
