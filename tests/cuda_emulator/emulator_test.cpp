// The emulator compared with the documentation of CUDA, cuBLASLt and NCCL; and the faults that it
// must find.
#include <doctest/doctest.h>

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <nccl.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/cuda_emulator/scheduler.h"

extern __shared__ __align__(16) unsigned char dynamic_shared[];

namespace {

// The standard error of a child process that runs `body`; the process must end by a signal.
std::string last_words(const std::function<void()>& body) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    signal(SIGABRT, SIG_DFL);
    dup2(ends[1], 2);
    if (freopen("/dev/null", "w", stdout) == nullptr) _exit(2);
    body();
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char buffer[4096];
  for (ssize_t got = 0; (got = read(ends[0], buffer, sizeof(buffer))) > 0;)
    text.append(buffer, static_cast<std::size_t>(got));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK((!WIFEXITED(status) || WEXITSTATUS(status) != 0));
  return text;
}

void check_says(const std::string& text, const std::string& part) {
  CAPTURE(text);
  CHECK(text.find(part) != std::string::npos);
}

#define OK(call) REQUIRE((call) == cudaSuccess)

// Copied on the legacy stream. (A wait for the device would wait for other ranks, which may wait
// for this one.)
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count) { OK(cudaMalloc(&data_, count * sizeof(T))); }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    OK(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
    OK(cudaStreamSynchronize(nullptr));
  }
  ~DeviceArray() { static_cast<void>(cudaFree(data_)); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  T* get() const { return data_; }
  std::vector<T> values() const {
    std::vector<T> values(count_);
    OK(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  T* data_ = nullptr;
  std::size_t count_;
};

template <class... Parameters, class... Arguments>
cudaError_t start(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, std::size_t shared, cudaStream_t stream,
                  Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

cudaStream_t new_stream(unsigned flags = cudaStreamNonBlocking) {
  cudaStream_t stream = nullptr;
  OK(cudaStreamCreateWithFlags(&stream, flags));
  return stream;
}
cudaEvent_t new_event(unsigned flags = cudaEventDisableTiming) {
  cudaEvent_t event = nullptr;
  OK(cudaEventCreateWithFlags(&event, flags));
  return event;
}

// One sum for each block.
__global__ void __launch_bounds__(1024) sum_blocks(const float* __restrict__ x, float* __restrict__ sums, int count) {
  __shared__ float parts[32];
  float sum = 0.0f;
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < count;
       i += static_cast<int>(gridDim.x * blockDim.x))
    sum += __ldg(x + i);
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = threadIdx.x < blockDim.x / 32 ? parts[threadIdx.x] : 0.0f;
  for (int offset = 16; offset > 0; offset /= 2)
    sum += __shfl_down_sync(0xffffffffu, sum, static_cast<unsigned>(offset));
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__global__ void write_indices(int* out) {
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned place = block * blockDim.x * blockDim.y * blockDim.z + thread;
  out[place] = static_cast<int>(place);
}

// Reads a neighbour's number without the necessary barrier.
__global__ void read_neighbour_too_early(int* out) {
  __shared__ int numbers[64];
  numbers[threadIdx.x] = static_cast<int>(threadIdx.x);
  out[threadIdx.x] = numbers[(threadIdx.x + 1) % 64];
}

__global__ void shuffle_all(int* out, int parameter, int width) {
  const int lane = static_cast<int>(threadIdx.x);
  out[lane] = __shfl_sync(~0u, lane, parameter, width);
  out[32 + lane] = __shfl_up_sync(~0u, lane, static_cast<unsigned>(parameter), width);
  out[64 + lane] = __shfl_down_sync(~0u, lane, static_cast<unsigned>(parameter), width);
  out[96 + lane] = __shfl_xor_sync(~0u, lane, parameter, width);
}

__global__ void vote(unsigned* out) {
  const bool odd = threadIdx.x % 2 == 1;
  if (odd) {
    out[0] = __ballot_sync(0xaaaaaaaau, threadIdx.x > 15);
    out[1] = static_cast<unsigned>(__any_sync(0xaaaaaaaau, threadIdx.x == 31));
    out[2] = static_cast<unsigned>(__all_sync(0xaaaaaaaau, threadIdx.x == 31));
  } else {
    out[3] = __ballot_sync(0x55555555u, 1);
  }
  out[4] = static_cast<unsigned>(__syncthreads_count(odd));
}

__global__ void read_dynamic_shared(float* out) {
  out[threadIdx.x] = reinterpret_cast<const float*>(dynamic_shared)[threadIdx.x];
}
__global__ void write_dynamic_shared(int count) { dynamic_shared[count] = 1; }

template <class T>
__global__ void read_static_shared(float* out) {
  __shared__ T numbers[32];
  out[threadIdx.x] = numbers[threadIdx.x];
  numbers[threadIdx.x] = 0.0f;
}
__global__ void take_much_static_shared(float* out) {
  __shared__ float numbers[10000];
  numbers[9999 - threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = numbers[9999];
}

__global__ void exit_before_barrier() {
  if (threadIdx.x < 10) return;
  __syncthreads();
}
__global__ void part_at_barrier() {
  if (threadIdx.x < 10) {
    __syncthreads();
  } else {
    __syncwarp(0xffff0000u | 0xfc00u);
    __shfl_sync(0xffffffffu, 1, 0);
  }
}
__global__ void two_barriers() {
  if (threadIdx.x < 10) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void lane_not_in_mask() { __syncwarp(0xfffffffeu); }
__global__ void different_calls() {
  if (threadIdx.x == 0) {
    __syncwarp();
  } else {
    __ballot_sync(~0u, 1);
  }
}

__global__ void set_number(int* out, int number) { *out = number; }
__global__ void copy_number(int* to, const int* from) { *to = *from; }
__global__ void add_number(int* to, int number) { *to += number; }
__global__ void write_at(float* out, long index) { out[index] = 1.0f; }

constexpr int seeds = 48;

}  // namespace

TEST_CASE("blocks of every size sum with shuffles, shared memory and barriers") {
  std::vector<float> x(10'000);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 17);
  const float wanted = std::accumulate(x.begin(), x.end(), 0.0f);
  const DeviceArray<float> on_device(x);
  for (unsigned threads : {32u, 64u, 96u, 256u, 1024u})
    for (unsigned blocks : {1u, 3u, 20u}) {
      const DeviceArray<float> sums(blocks);
      OK(start(sum_blocks, blocks, threads, 0, nullptr, on_device.get(), sums.get(), static_cast<int>(x.size())));
      const std::vector<float> found = sums.values();
      CHECK(std::accumulate(found.begin(), found.end(), 0.0f) == wanted);
    }
}

TEST_CASE("threads and blocks have their indices in three dimensions") {
  const dim3 blocks(3, 2, 4), threads(5, 7, 2);
  const DeviceArray<int> out(24 * 70);
  OK(start(write_indices, blocks, threads, 0, nullptr, out.get()));
  const std::vector<int> found = out.values();
  for (std::size_t i = 0; i < found.size(); ++i) CHECK(found[i] == static_cast<int>(i));
}

TEST_CASE("a missing barrier is found by the order of threads") {
  std::set<std::vector<int>> results;
  for (int i = 0; i < 8; ++i) {
    const DeviceArray<int> out(64);
    OK(start(read_neighbour_too_early, 1, 64, 0, nullptr, out.get()));
    results.insert(out.values());
  }
  std::vector<int> right(64);
  for (int i = 0; i < 64; ++i) right[static_cast<std::size_t>(i)] = (i + 1) % 64;
  CHECK((results.size() > 1 || !results.contains(right)));
}

TEST_CASE("shuffles read the lanes that the PTX ISA says") {
  for (int width : {1, 2, 4, 8, 16, 32})
    for (int parameter = 0; parameter < 32; ++parameter) {
      const DeviceArray<int> out(128);
      OK(start(shuffle_all, 1, 32, 0, nullptr, out.get(), parameter, width));
      const std::vector<int> found = out.values();
      for (int lane = 0; lane < 32; ++lane) {
        CAPTURE(width);
        CAPTURE(parameter);
        CAPTURE(lane);
        // The pseudo code of "shfl.sync": maxLane, minLane, j and whether it is in range.
        const int segment = 32 - width, lowest = lane & segment, highest = lowest | (31 & ~segment);
        const auto at = [&](std::size_t kind) { return found[32 * kind + static_cast<std::size_t>(lane)]; };
        CHECK(at(0) == (lowest | (parameter & ~segment & 31)));
        CHECK(at(1) == (lane - parameter >= lowest ? lane - parameter : lane));
        CHECK(at(2) == (lane + parameter <= highest ? lane + parameter : lane));
        CHECK(at(3) == ((lane ^ parameter) <= highest ? lane ^ parameter : lane));
      }
    }
}

TEST_CASE("lanes vote by mask and blocks count") {
  const DeviceArray<unsigned> out(5);
  OK(start(vote, 1, 32, 0, nullptr, out.get()));
  CHECK(out.values() == std::vector<unsigned>{0xaaaa0000u, 1, 0, 0x55555555u, 16});
}

TEST_CASE("barriers that not all threads reach end the program and say who waits where") {
  const auto words_of = [](void (*kernel)()) {
    return last_words([&] {
      static_cast<void>(start(kernel, 1, 32, 0, nullptr));
      static_cast<void>(cudaDeviceSynchronize());
    });
  };
  const std::string file = __FILE__;
  const std::string words = words_of(exit_before_barrier);  // whichever comes first
  check_says(words, "__syncthreads at " + file);
  check_says(words,
             words.find("have exited") == std::string::npos ? "exits while " : "threads of the block have exited");
  check_says(words_of(part_at_barrier), "no thread of the block can go on:");
  check_says(words_of(two_barriers), "threads of a block meet in different barriers: __syncthreads at " + file);
  check_says(words_of(lane_not_in_mask), "without the calling lane in its mask");
  check_says(words_of(different_calls), "lanes of a warp meet in different calls");
}

TEST_CASE("shared memory has a limit, comes poisoned and has a guard behind it") {
  const DeviceArray<float> out(32);
  OK(start(read_dynamic_shared, 1, 32, 128, nullptr, out.get()));
  for (float value : out.values()) CHECK(std::isnan(value));
  for (int launch = 0; launch < 2; ++launch) {
    OK(start(read_static_shared<float>, 3, 32, 0, nullptr, out.get()));
    for (float value : out.values()) CHECK(std::isnan(value));
  }
  OK(start(take_much_static_shared, 1, 32, 48 * 1024 - 40'000, nullptr, out.get()));
  CHECK(start(take_much_static_shared, 1, 32, 48 * 1024 - 40'000 + 1, nullptr, out.get()) == cudaErrorInvalidValue);
  CHECK(start(read_dynamic_shared, 1, 32, 48 * 1024 + 1, nullptr, out.get()) == cudaErrorInvalidValue);
  CHECK(cudaGetLastError() == cudaErrorInvalidValue);
  CHECK(cudaFuncSetAttribute(read_dynamic_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024 + 1) ==
        cudaErrorInvalidValue);
  OK(cudaFuncSetAttribute(read_dynamic_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024));
  OK(start(read_dynamic_shared, 1, 32, 227 * 1024, nullptr, out.get()));
  OK(cudaDeviceSynchronize());
  check_says(last_words([] {
               static_cast<void>(start(write_dynamic_shared, 1, 1, 100, nullptr, 100));
               static_cast<void>(cudaDeviceSynchronize());
             }),
             "wrote 0 bytes behind its 100 bytes of dynamic shared memory");
}

TEST_CASE("launches that a GPU refuses are refused") {
  const DeviceArray<int> out(1);
  CHECK(start(set_number, 1, 1025, 0, nullptr, out.get(), 1) == cudaErrorInvalidConfiguration);
  CHECK(start(set_number, 0, 1, 0, nullptr, out.get(), 1) == cudaErrorInvalidConfiguration);
  CHECK(start(set_number, dim3(1, 65536), 1, 0, nullptr, out.get(), 1) == cudaErrorInvalidConfiguration);
  CHECK(std::string(cudaGetErrorName(cudaGetLastError())) == "cudaErrorInvalidConfiguration");
  CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("writes out of bounds end the program where they happen or when the memory is freed") {
  const auto words_of = [](std::size_t bytes, long index) {
    return last_words([&] {
      float* memory = nullptr;
      static_cast<void>(cudaMalloc(&memory, bytes));
      static_cast<void>(start(write_at, 1, 1, 0, nullptr, memory, index));
      static_cast<void>(cudaDeviceSynchronize());
      static_cast<void>(cudaFree(memory));
    });
  };
  check_says(words_of(1024, 256),
             "access to the byte 0 behind an allocation of 1024 bytes of device memory\n  in kernel (anonymous "
             "namespace)::write_at(float*, long), block (0, 0, 0)");
  check_says(words_of(1000, 250), "the byte 0 behind an allocation of 1000 bytes was written");
  check_says(words_of(1024, -1), "the byte 4 before an allocation of 1024 bytes was written");
}

TEST_CASE("with PARPLAN_EMULATOR_STRICT the host cannot touch device memory, and kernels can") {
  const std::string words = last_words([] {
    setenv("PARPLAN_EMULATOR_STRICT", "1", 1);
    execl("/proc/self/exe", "test_cuda_emulator", "--no-skip", "--test-case=touches device memory on the host",
          nullptr);
  });
  check_says(words, "CUDA emulator: the host touched the byte 8 of an allocation of 16 bytes of device memory");
}

TEST_CASE("touches device memory on the host" * doctest::skip()) {
  const DeviceArray<float> array(std::vector<float>{1, 2, 3, 4});
  OK(start(write_at, 1, 1, 0, nullptr, array.get(), 2L));
  REQUIRE(array.values() == std::vector<float>{1, 2, 1, 4});
  CHECK(array.get()[2] == 1.0f);
}

TEST_CASE("device memory comes poisoned, aligned and counted") {
  std::size_t before = 0, after = 0, total = 0;
  OK(cudaMemGetInfo(&before, &total));
  {
    const DeviceArray<float> array(1000);
    CHECK(reinterpret_cast<std::uintptr_t>(array.get()) % 256 == 0);
    for (float value : array.values()) CHECK(std::isnan(value));
    OK(cudaMemGetInfo(&after, &total));
    CHECK(before - after == 4096);
    cudaPointerAttributes attributes{};
    OK(cudaPointerGetAttributes(&attributes, array.get() + 999));
    CHECK(attributes.type == cudaMemoryTypeDevice);
    OK(cudaPointerGetAttributes(&attributes, &before));
    CHECK(attributes.type == cudaMemoryTypeUnregistered);
    std::vector<float> host(1001);
    CHECK(cudaMemcpy(host.data(), array.get(), 1001 * 4, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
    CHECK(cudaMemcpy(array.get(), host.data(), 4, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
    static_cast<void>(cudaGetLastError());
  }
  void* much = nullptr;
  CHECK(cudaMalloc(&much, total + 1) == cudaErrorMemoryAllocation);
  CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
}

TEST_CASE("bf16 and fp16 round to the nearest, ties to even") {
  static_assert(sizeof(__nv_bfloat16) == 2 && sizeof(__nv_bfloat162) == 4 && sizeof(__half) == 2 &&
                sizeof(__half2) == 4);
  const auto check_type = [](auto from_float, auto to_float, auto from_bits, auto to_bits, int inf_bits) {
    // Every number, and the midpoints to its neighbour with the numbers beside them.
    for (int bits = 0; bits < inf_bits; ++bits) {
      const float low = to_float(from_bits(static_cast<unsigned short>(bits)));
      const double high = bits + 1 == inf_bits
                              ? static_cast<double>(low) +
                                    (static_cast<double>(low) -
                                     static_cast<double>(to_float(from_bits(static_cast<unsigned short>(bits - 1)))))
                              : static_cast<double>(to_float(from_bits(static_cast<unsigned short>(bits + 1))));
      REQUIRE(to_bits(from_float(low)) == bits);
      const double middle = (static_cast<double>(low) + high) / 2;
      const auto nearest = static_cast<float>(middle);
      if (static_cast<double>(nearest) != middle) continue;  // below the smallest float
      REQUIRE(to_bits(from_float(nearest)) == bits + bits % 2);
      REQUIRE(to_bits(from_float(std::nextafter(nearest, 0.0f))) == bits);
      REQUIRE(to_bits(from_float(std::nextafter(nearest, std::numeric_limits<float>::infinity()))) == bits + 1);
      REQUIRE(to_bits(from_float(-nearest)) == (0x8000 | (bits + bits % 2)));
    }
    CHECK(std::isnan(to_float(from_float(std::numeric_limits<float>::quiet_NaN()))));
    CHECK(to_bits(from_float(std::numeric_limits<float>::infinity())) == inf_bits);
    CHECK(to_bits(from_float(std::numeric_limits<float>::max())) == inf_bits);
  };
  check_type([](float x) { return __float2bfloat16_rn(x); }, [](__nv_bfloat16 x) { return __bfloat162float(x); },
             __ushort_as_bfloat16, [](__nv_bfloat16 x) { return static_cast<int>(__bfloat16_as_ushort(x)); }, 0x7f80);
  check_type([](float x) { return __float2half_rn(x); }, [](__half x) { return __half2float(x); }, __ushort_as_half,
             [](__half x) { return static_cast<int>(__half_as_ushort(x)); }, 0x7c00);
  CHECK(static_cast<float>(__nv_bfloat16(1.0 + 0x1p-8 + 0x1p-40)) == 1.0f + 0x1p-7f);  // a double is rounded once
  CHECK(__low2float(__floats2bfloat162_rn(1.0f, 2.0f)) == 1.0f);
  CHECK(__half22float2(__floats2half2_rn(1.0f, 2.0f)).y == 2.0f);
}

TEST_CASE("a missing event shows up for some seed and an event removes it for all") {
  for (bool with_event : {false, true}) {
    std::set<int> results;
    for (int seed = 0; seed < seeds; ++seed) {
      emulator::set_seed(static_cast<std::uint64_t>(seed));
      const DeviceArray<int> from(std::vector<int>{1}), to(1);
      const cudaStream_t first = new_stream(), second = new_stream();
      const cudaEvent_t event = new_event();
      OK(start(set_number, 1, 1, 0, first, from.get(), 2));
      OK(cudaEventRecord(event, first));
      if (with_event) OK(cudaStreamWaitEvent(second, event));
      OK(start(copy_number, 1, 1, 0, second, to.get(), from.get()));
      OK(cudaStreamSynchronize(second));
      OK(cudaStreamSynchronize(first));
      results.insert(to.values().front());
      OK(cudaEventDestroy(event));
      OK(cudaStreamDestroy(first));
      OK(cudaStreamDestroy(second));
    }
    CHECK(results == (with_event ? std::set<int>{2} : std::set<int>{1, 2}));
  }
}

TEST_CASE("page-locked memory is read when the copy runs and pageable memory when it is submitted") {
  int* pinned = nullptr;
  OK(cudaMallocHost(&pinned, sizeof(int)));
  int pageable = 0;
  for (int* source : {pinned, &pageable}) {
    std::set<int> results;
    for (int seed = 0; seed < seeds; ++seed) {
      emulator::set_seed(static_cast<std::uint64_t>(seed));
      const DeviceArray<int> to(1);
      const cudaStream_t stream = new_stream();
      *source = 1;
      OK(cudaMemcpyAsync(to.get(), source, sizeof(int), cudaMemcpyDefault, stream));
      *source = 2;
      OK(cudaStreamSynchronize(stream));
      results.insert(to.values().front());
      OK(cudaStreamDestroy(stream));
    }
    CHECK(results == (source == pinned ? std::set<int>{1, 2} : std::set<int>{1}));
  }
  OK(cudaFreeHost(pinned));
}

TEST_CASE("a wait is for the latest record before it and an event that was never recorded is over") {
  for (int seed = 0; seed < seeds; ++seed) {
    emulator::set_seed(static_cast<std::uint64_t>(seed));
    const DeviceArray<int> number(std::vector<int>{0});
    const cudaStream_t first = new_stream(), second = new_stream();
    const cudaEvent_t event = new_event(), never = new_event();
    CHECK(cudaEventQuery(never) == cudaSuccess);
    OK(cudaStreamWaitEvent(first, never));
    OK(start(set_number, 1, 1, 0, first, number.get(), 1));
    OK(cudaEventRecord(event, first));
    OK(start(set_number, 1, 1, 0, first, number.get(), 2));
    OK(cudaEventRecord(event, first));
    OK(cudaStreamWaitEvent(second, event));
    // A record after the wait does not delay it, not even one that can never happen.
    OK(cudaEventRecord(event, second));
    OK(start(add_number, 1, 1, 0, second, number.get(), 10));
    OK(cudaStreamSynchronize(second));
    CHECK(number.values().front() == 12);
    for (const cudaEvent_t each : {event, never}) OK(cudaEventDestroy(each));
    for (const cudaStream_t each : {first, second}) OK(cudaStreamDestroy(each));
  }
}

TEST_CASE("the legacy stream and blocking streams wait for each other and others do not") {
  for (unsigned flags : {cudaStreamDefault, cudaStreamNonBlocking}) {
    std::set<int> results;
    for (int seed = 0; seed < seeds; ++seed) {
      emulator::set_seed(static_cast<std::uint64_t>(seed));
      const DeviceArray<int> number(std::vector<int>{0});
      const cudaStream_t stream = new_stream(flags);
      OK(start(set_number, 1, 1, 0, stream, number.get(), 3));
      OK(start(add_number, 1, 1, 0, nullptr, number.get(), 4));
      OK(start(add_number, 1, 1, 0, stream, number.get(), 5));
      OK(cudaDeviceSynchronize());
      results.insert(number.values().front());
      OK(cudaStreamDestroy(stream));
    }
    CHECK((results == std::set<int>{12}) == (flags == cudaStreamDefault));
  }
}

TEST_CASE("queries and times of events") {
  const cudaStream_t stream = new_stream();
  const cudaEvent_t before = new_event(cudaEventDefault), after = new_event(cudaEventDefault), untimed = new_event();
  float milliseconds = -1.0f;
  CHECK(cudaEventElapsedTime(&milliseconds, before, after) == cudaErrorInvalidResourceHandle);
  OK(cudaEventRecord(before, stream));
  const DeviceArray<int> number(1);
  for (int i = 0; i < 100; ++i) OK(start(set_number, 1, 1, 0, stream, number.get(), i));
  OK(cudaEventRecord(after, stream));
  OK(cudaEventRecord(untimed, stream));
  while (cudaStreamQuery(stream) == cudaErrorNotReady) static_cast<void>(cudaGetLastError());
  CHECK(cudaEventQuery(after) == cudaSuccess);
  OK(cudaEventElapsedTime(&milliseconds, before, after));
  CHECK(milliseconds > 0.0f);
  CHECK(cudaEventElapsedTime(&milliseconds, before, untimed) == cudaErrorInvalidResourceHandle);
  CHECK(cudaGetLastError() == cudaErrorInvalidResourceHandle);
  int called = 0;
  OK(cudaLaunchHostFunc(stream, [](void* data) {
    if (cudaDeviceSynchronize() == cudaErrorNotPermitted) *static_cast<int*>(data) = 1;
  }, &called));
  OK(cudaStreamSynchronize(stream));
  CHECK(called == 1);
  static_cast<void>(cudaGetLastError());
  for (const cudaEvent_t each : {before, after, untimed}) OK(cudaEventDestroy(each));
  OK(cudaStreamDestroy(stream));
  CHECK(cudaStreamDestroy(stream) == cudaErrorInvalidResourceHandle);
  static_cast<void>(cudaGetLastError());
}

TEST_CASE("a captured graph with a fork and a join is replayed with its edges and no others") {
  std::set<int> results;
  for (int seed = 0; seed < seeds; ++seed) {
    emulator::set_seed(static_cast<std::uint64_t>(seed));
    const DeviceArray<int> a(std::vector<int>{0}), b(std::vector<int>{0}), sum(std::vector<int>{0}),
        raced(std::vector<int>{0});
    const cudaStream_t main = new_stream(), side = new_stream();
    const cudaEvent_t fork_point = new_event(), joined = new_event();
    OK(cudaStreamBeginCapture(main, cudaStreamCaptureModeThreadLocal));
    OK(start(add_number, 1, 1, 0, main, a.get(), 1));
    OK(cudaEventRecord(fork_point, main));
    OK(cudaStreamWaitEvent(side, fork_point));
    OK(start(copy_number, 1, 1, 0, side, b.get(), a.get()));
    OK(start(set_number, 1, 1, 0, side, raced.get(), 1));
    OK(cudaEventRecord(joined, side));
    OK(start(set_number, 1, 1, 0, main, raced.get(), 2));
    OK(cudaStreamWaitEvent(main, joined));
    OK(start(copy_number, 1, 1, 0, main, sum.get(), b.get()));
    cudaStreamCaptureStatus status{};
    OK(cudaStreamIsCapturing(side, &status));
    CHECK(status == cudaStreamCaptureStatusActive);
    CHECK(cudaStreamQuery(nullptr) == cudaErrorStreamCaptureUnsupported);  // and it invalidates the capture
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamEndCapture(main, &graph) == cudaErrorStreamCaptureInvalidated);
    CHECK(graph == nullptr);
    static_cast<void>(cudaGetLastError());

    OK(cudaStreamBeginCapture(main, cudaStreamCaptureModeThreadLocal));
    OK(start(add_number, 1, 1, 0, main, a.get(), 1));
    OK(cudaEventRecord(fork_point, main));
    OK(cudaStreamWaitEvent(side, fork_point));
    OK(start(copy_number, 1, 1, 0, side, b.get(), a.get()));
    OK(start(set_number, 1, 1, 0, side, raced.get(), 1));
    OK(cudaEventRecord(joined, side));
    OK(start(set_number, 1, 1, 0, main, raced.get(), 2));
    OK(cudaStreamWaitEvent(main, joined));
    OK(start(copy_number, 1, 1, 0, main, sum.get(), b.get()));
    OK(cudaStreamEndCapture(main, &graph));
    std::size_t nodes = 0;
    OK(cudaGraphGetNodes(graph, nullptr, &nodes));
    CHECK(nodes == 5);
    cudaGraphExec_t executable = nullptr;
    OK(cudaGraphInstantiate(&executable, graph, 0));
    OK(cudaGraphDestroy(graph));
    CHECK(a.values().front() == 0);  // nothing has run
    for (int launch = 0; launch < 3; ++launch) OK(cudaGraphLaunch(executable, launch == 1 ? side : main));
    OK(cudaGraphExecDestroy(executable));
    OK(cudaStreamSynchronize(main));
    OK(cudaStreamSynchronize(side));
    CHECK(a.values().front() == 3);
    CHECK(sum.values().front() == 3);
    results.insert(raced.values().front());
    for (const cudaEvent_t each : {fork_point, joined}) OK(cudaEventDestroy(each));
    for (const cudaStream_t each : {main, side}) OK(cudaStreamDestroy(each));
  }
  CHECK(results == std::set<int>{1, 2});
}

TEST_CASE("what may not be captured is refused and spoils the capture") {
  const DeviceArray<int> number(std::vector<int>{0});
  const cudaStream_t stream = new_stream(), other = new_stream();
  const cudaEvent_t event = new_event(), outside = new_event();
  OK(cudaEventRecord(outside, other));
  struct Case {
    const char* what;
    std::function<cudaError_t()> call;
    cudaError_t refused;
    cudaError_t ended;
  };
  void* memory = nullptr;
  const Case cases[] = {
      {"cudaMalloc", [&] { return cudaMalloc(&memory, 4); }, cudaErrorStreamCaptureUnsupported,
       cudaErrorStreamCaptureInvalidated},
      {"synchronize", [&] { return cudaStreamSynchronize(stream); }, cudaErrorStreamCaptureUnsupported,
       cudaErrorStreamCaptureInvalidated},
      {"an event that is captured", [&] { return cudaEventSynchronize(event); }, cudaErrorCapturedEvent,
       cudaErrorStreamCaptureInvalidated},
      {"an event from outside", [&] { return cudaStreamWaitEvent(stream, outside); }, cudaErrorStreamCaptureIsolation,
       cudaErrorStreamCaptureInvalidated},
      {"a fork that is not joined",
       [&] {
         OK(cudaStreamWaitEvent(other, event));
         return start(add_number, 1, 1, 0, other, number.get(), 1);
       },
       cudaSuccess, cudaErrorStreamCaptureUnjoined},
      {"nothing wrong", [&] { return start(add_number, 1, 1, 0, stream, number.get(), 1); }, cudaSuccess, cudaSuccess},
  };
  for (const Case& c : cases) {
    CAPTURE(c.what);
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaErrorIllegalState);
    OK(start(add_number, 1, 1, 0, stream, number.get(), 1));
    OK(cudaEventRecord(event, stream));
    CHECK(c.call() == c.refused);
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamEndCapture(stream, &graph) == c.ended);
    if (graph != nullptr) OK(cudaGraphDestroy(graph));
    static_cast<void>(cudaGetLastError());
  }
  // Other threads continue beside a capture that is this thread's alone, but not beside a global
  // one.
  for (cudaStreamCaptureMode mode : {cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeGlobal}) {
    OK(cudaStreamBeginCapture(stream, mode));
    cudaError_t allocated = cudaSuccess;
    std::thread([&] {
      allocated = cudaMalloc(&memory, 4);
      if (allocated == cudaSuccess) static_cast<void>(cudaFree(memory));
    }).join();
    CHECK(allocated == (mode == cudaStreamCaptureModeGlobal ? cudaErrorStreamCaptureUnsupported : cudaSuccess));
    cudaGraph_t graph = nullptr;
    CHECK((cudaStreamEndCapture(stream, &graph) == cudaSuccess) == (mode == cudaStreamCaptureModeThreadLocal));
    if (graph != nullptr) OK(cudaGraphDestroy(graph));
    static_cast<void>(cudaGetLastError());
  }
  CHECK(number.values().front() == 0);
  for (const cudaEvent_t each : {event, outside}) OK(cudaEventDestroy(each));
  for (const cudaStream_t each : {stream, other}) OK(cudaStreamDestroy(each));
}

TEST_CASE("streams that wait for each other for ever are reported with what they wait for") {
  const std::string words = last_words([] {
    setenv("PARPLAN_EMULATOR_PATIENCE", "1", 1);
    ncclUniqueId id;
    static_cast<void>(ncclGetUniqueId(&id));
    // The second receive waits for a send that never comes.
    std::thread peer([&] {
      ncclComm_t communicator = nullptr;
      static_cast<void>(ncclCommInitRank(&communicator, 2, id, 1));
      int* memory = nullptr;
      static_cast<void>(cudaMalloc(&memory, 64));
      const cudaStream_t stream = new_stream();
      static_cast<void>(ncclRecv(memory, 1, ncclInt32, 0, communicator, stream));
      static_cast<void>(ncclRecv(memory, 1, ncclInt32, 0, communicator, stream));
      static_cast<void>(cudaDeviceSynchronize());
    });
    ncclComm_t communicator = nullptr;
    static_cast<void>(ncclCommInitRank(&communicator, 2, id, 0));
    int* memory = nullptr;
    static_cast<void>(cudaMalloc(&memory, 64));
    static_cast<void>(ncclSend(memory, 1, ncclInt32, 1, communicator, new_stream()));
    peer.join();
  });
  check_says(words, "nothing can go on, and nothing was submitted for 1 s");
  check_says(words, "rank 1 calls ncclRecv of 1 int32 with peer 0");
}

namespace {

// A column-major matrix of numbers that every type holds exactly.
struct Matrix {
  std::size_t rows, columns, ld;
  std::vector<float> values;
  Matrix(std::size_t r, std::size_t c, std::size_t l, int seed) : rows(r), columns(c), ld(l), values(l * c, 0.0f) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>((static_cast<int>(i) * 7 + seed * 5) % 11 - 5) / 4;
  }
  double operator()(std::size_t i, std::size_t j, bool transposed = false) const {
    return static_cast<double>(transposed ? values[i * ld + j] : values[j * ld + i]);
  }
};

std::vector<unsigned char> as_bytes(const std::vector<float>& values, cudaDataType type) {
  std::vector<unsigned char> bytes(values.size() * (type == CUDA_R_32F ? 4 : 2));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (type == CUDA_R_32F) std::memcpy(&bytes[4 * i], &values[i], 4);
    const __nv_bfloat16 b = __float2bfloat16_rn(values[i]);
    const __half h = __float2half_rn(values[i]);
    if (type == CUDA_R_16BF) std::memcpy(&bytes[2 * i], &b, 2);
    if (type == CUDA_R_16F) std::memcpy(&bytes[2 * i], &h, 2);
  }
  return bytes;
}
std::vector<float> as_floats(const std::vector<unsigned char>& bytes, cudaDataType type) {
  std::vector<float> values(bytes.size() / (type == CUDA_R_32F ? 4 : 2));
  for (std::size_t i = 0; i < values.size(); ++i) {
    __nv_bfloat16 b;
    __half h;
    if (type == CUDA_R_32F) std::memcpy(&values[i], &bytes[4 * i], 4);
    if (type == CUDA_R_16BF) {
      std::memcpy(static_cast<void*>(&b), &bytes[2 * i], 2);
      values[i] = __bfloat162float(b);
    }
    if (type == CUDA_R_16F) {
      std::memcpy(static_cast<void*>(&h), &bytes[2 * i], 2);
      values[i] = __half2float(h);
    }
  }
  return values;
}

double gelu(double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x))); }

struct Lt {
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t op = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  std::vector<cublasLtMatrixLayout_t> layouts;
  Lt(cublasComputeType_t compute) {
    REQUIRE(cublasLtCreate(&handle) == CUBLAS_STATUS_SUCCESS);
    REQUIRE(cublasLtMatmulDescCreate(&op, compute, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS);
    REQUIRE(cublasLtMatmulPreferenceCreate(&preference) == CUBLAS_STATUS_SUCCESS);
  }
  ~Lt() {
    for (auto layout : layouts) cublasLtMatrixLayoutDestroy(layout);
    cublasLtMatmulPreferenceDestroy(preference);
    cublasLtMatmulDescDestroy(op);
    cublasLtDestroy(handle);
  }
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value) {
    REQUIRE(cublasLtMatmulDescSetAttribute(op, attribute, &value, sizeof(value)) == CUBLAS_STATUS_SUCCESS);
  }
  cublasLtMatrixLayout_t layout(cudaDataType type, std::size_t rows, std::size_t columns, std::size_t ld) {
    cublasLtMatrixLayout_t made = nullptr;
    REQUIRE(cublasLtMatrixLayoutCreate(&made, type, rows, columns, static_cast<std::int64_t>(ld)) ==
            CUBLAS_STATUS_SUCCESS);
    layouts.push_back(made);
    return made;
  }
};

}  // namespace

TEST_CASE("cublasLtMatmul equals a plain loop for all transpositions, types, epilogues and suggestions") {
  const std::size_t m = 24, n = 16, k = 40;
  const std::uint64_t workspace_bytes = 1 << 20;
  const DeviceArray<unsigned char> workspace(workspace_bytes);
  struct Types {
    cudaDataType in, out;
    cublasComputeType_t compute;
  };
  const Types types[] = {{CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F},
                         {CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32},
                         {CUDA_R_16BF, CUDA_R_16BF, CUBLAS_COMPUTE_32F},
                         {CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F},
                         {CUDA_R_16F, CUDA_R_16F, CUBLAS_COMPUTE_32F}};
  const unsigned epilogues[] = {
      CUBLASLT_EPILOGUE_DEFAULT,   CUBLASLT_EPILOGUE_BIAS,        CUBLASLT_EPILOGUE_GELU,
      CUBLASLT_EPILOGUE_GELU_BIAS, CUBLASLT_EPILOGUE_GELU_AUX,    CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
      CUBLASLT_EPILOGUE_DGELU,     CUBLASLT_EPILOGUE_DGELU_BGRAD, CUBLASLT_EPILOGUE_BGRADA,
      CUBLASLT_EPILOGUE_BGRADB,    CUBLASLT_EPILOGUE_RELU};
  int products = 0;
  for (const Types& t : types)
    for (int transposed = 0; transposed < 4; ++transposed)
      for (unsigned epilogue : epilogues)
        for (float beta : {0.0f, 0.5f}) {
          const bool ta = transposed % 2 == 1, tb = transposed / 2 == 1;
          CAPTURE(static_cast<int>(t.in));
          CAPTURE(static_cast<int>(t.out));
          CAPTURE(transposed);
          CAPTURE(epilogue);
          CAPTURE(beta);
          const Matrix a = ta ? Matrix(k, m, k + 8, 1) : Matrix(m, k, m, 1),
                       b = tb ? Matrix(n, k, n, 2) : Matrix(k, n, k, 2);
          const Matrix c(m, n, m + 8, 3), aux(m, n, m + 8, 4);
          std::vector<float> bias(std::max(m, n));
          for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = static_cast<float>(i % 5) / 2 - 1;
          const float alpha = 0.25f;

          Lt lt(t.compute);
          const DeviceArray<unsigned char> a_data(as_bytes(a.values, t.in)), b_data(as_bytes(b.values, t.in)),
              c_data(as_bytes(c.values, t.out)), d_data(as_bytes(std::vector<float>(c.values.size(), 99.0f), t.out)),
              bias_data(as_bytes(bias, t.out)), aux_data(as_bytes(aux.values, t.out));
          lt.set(CUBLASLT_MATMUL_DESC_TRANSA, ta ? CUBLAS_OP_T : CUBLAS_OP_N);
          lt.set(CUBLASLT_MATMUL_DESC_TRANSB, tb ? CUBLAS_OP_T : CUBLAS_OP_N);
          lt.set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
          lt.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(bias_data.get()));
          lt.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, static_cast<void*>(aux_data.get()));
          lt.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, static_cast<std::int64_t>(aux.ld));
          const auto al = lt.layout(t.in, a.rows, a.columns, a.ld), bl = lt.layout(t.in, b.rows, b.columns, b.ld),
                     dl = lt.layout(t.out, m, n, c.ld);
          REQUIRE(cublasLtMatmulPreferenceSetAttribute(lt.preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                       &workspace_bytes, 8) == CUBLAS_STATUS_SUCCESS);
          std::array<cublasLtMatmulHeuristicResult_t, 8> suggestions{};
          int found = 0;
          REQUIRE(cublasLtMatmulAlgoGetHeuristic(lt.handle, lt.op, al, bl, dl, dl, lt.preference, 8, suggestions.data(),
                                                 &found) == CUBLAS_STATUS_SUCCESS);
          REQUIRE(found >= 3);
          const auto& suggestion = suggestions[static_cast<std::size_t>(products++ % found)];
          CHECK(suggestion.workspaceSize <= workspace_bytes);
          if (suggestion.workspaceSize > 0)
            CHECK(cublasLtMatmul(lt.handle, lt.op, &alpha, a_data.get(), al, b_data.get(), bl, &beta, c_data.get(), dl,
                                 d_data.get(), dl, &suggestion.algo, workspace.get(), suggestion.workspaceSize - 1,
                                 nullptr) == CUBLAS_STATUS_INVALID_VALUE);
          REQUIRE(cublasLtMatmul(lt.handle, lt.op, &alpha, a_data.get(), al, b_data.get(), bl, &beta, c_data.get(), dl,
                                 d_data.get(), dl, &suggestion.algo, workspace.get(), workspace_bytes,
                                 nullptr) == CUBLAS_STATUS_SUCCESS);

          const std::vector<float> d = as_floats(d_data.values(), t.out), kept = as_floats(aux_data.values(), t.out),
                                   gradient = as_floats(bias_data.values(), t.out);
          const double tolerance = t.out == CUDA_R_32F ? 2e-5 : t.out == CUDA_R_16F ? 4e-3 : 3e-2;
          const auto close = [&](float value, double wanted) {
            return std::fabs(static_cast<double>(value) - wanted) <= tolerance * (1 + std::fabs(wanted));
          };
          std::vector<double> row_sums(m, 0.0);
          for (std::size_t j = 0; j < n; ++j)
            for (std::size_t i = 0; i < m; ++i) {
              double value = 0.0;
              for (std::size_t l = 0; l < k; ++l)
                value += (ta ? a(i, l, true) : a(i, l)) * (tb ? b(l, j, true) : b(l, j));
              value = alpha * value + (beta != 0.0f ? beta * c(i, j) : 0.0);
              if ((epilogue & 4u) != 0) value += static_cast<double>(bias[i]);
              if (epilogue == CUBLASLT_EPILOGUE_GELU_AUX || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS)
                REQUIRE(close(kept[j * aux.ld + i], value));
              if ((epilogue & 32u) != 0) value = gelu(value);
              if (epilogue == CUBLASLT_EPILOGUE_RELU) value = std::max(value, 0.0);
              if ((epilogue & 64u) != 0) value *= (gelu(aux(i, j) + 1e-6) - gelu(aux(i, j) - 1e-6)) / 2e-6;
              row_sums[i] += value;
              REQUIRE(close(d[j * c.ld + i], value));
            }
          for (std::size_t i = 0; i < m && epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD; ++i)
            REQUIRE(close(gradient[i], row_sums[i]));
          for (std::size_t i = 0; i < m && epilogue == CUBLASLT_EPILOGUE_BGRADA; ++i) {
            double sum = 0.0;
            for (std::size_t l = 0; l < k; ++l) sum += ta ? a(i, l, true) : a(i, l);
            REQUIRE(close(gradient[i], sum));
          }
          for (std::size_t j = 0; j < n && epilogue == CUBLASLT_EPILOGUE_BGRADB; ++j) {
            double sum = 0.0;
            for (std::size_t l = 0; l < k; ++l) sum += tb ? b(l, j, true) : b(l, j);
            REQUIRE(close(gradient[j], sum));
          }
        }
}

TEST_CASE("tf32 multiplies numbers of 10 bits of fraction") {
  for (const auto& [compute, wanted] :
       {std::pair(CUBLAS_COMPUTE_32F, 1.0f + 0x1p-12f), std::pair(CUBLAS_COMPUTE_32F_FAST_TF32, 1.0f)}) {
    Lt lt(compute);
    const DeviceArray<float> a(std::vector<float>{1.0f + 0x1p-12f}), b(std::vector<float>{1.0f}), d(1);
    const auto one = lt.layout(CUDA_R_32F, 1, 1, 1);
    const float alpha = 1.0f, beta = 0.0f;
    REQUIRE(cublasLtMatmul(lt.handle, lt.op, &alpha, a.get(), one, b.get(), one, &beta, d.get(), one, d.get(), one,
                           nullptr, nullptr, 0, nullptr) == CUBLAS_STATUS_SUCCESS);
    CHECK(d.values().front() == wanted);
  }
}

TEST_CASE("suggestions keep to the preferences and combinations that cuBLASLt does not have are refused") {
  Lt lt(CUBLAS_COMPUTE_32F);
  std::array<cublasLtMatmulHeuristicResult_t, 16> suggestions{};
  int found = 0;
  const auto ask = [&](cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t d) {
    return cublasLtMatmulAlgoGetHeuristic(lt.handle, lt.op, a, b, d, d, lt.preference, 16, suggestions.data(), &found);
  };
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    REQUIRE(cublasLtMatmulPreferenceSetAttribute(lt.preference, attribute, &value, sizeof(value)) ==
            CUBLAS_STATUS_SUCCESS);
  };
  const auto bf16 = lt.layout(CUDA_R_16BF, 64, 64, 64), single = lt.layout(CUDA_R_32F, 64, 64, 64),
             fp16 = lt.layout(CUDA_R_16F, 64, 64, 64);
  REQUIRE(ask(bf16, bf16, single) == CUBLAS_STATUS_SUCCESS);
  CHECK(found == 1);  // no workspace was allowed
  CHECK(suggestions[0].workspaceSize == 0);
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{64} << 20);
  REQUIRE(ask(bf16, bf16, bf16) == CUBLAS_STATUS_SUCCESS);
  const int all = found;
  CHECK(all >= 6);
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  REQUIRE(ask(bf16, bf16, bf16) == CUBLAS_STATUS_SUCCESS);
  CHECK(found == all - 2);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, 4u);
  REQUIRE(ask(bf16, bf16, bf16) == CUBLAS_STATUS_SUCCESS);
  CHECK(found == 2);
  CHECK(ask(bf16, bf16, fp16) == CUBLAS_STATUS_NOT_SUPPORTED);
  CHECK(ask(single, single, bf16) == CUBLAS_STATUS_NOT_SUPPORTED);
  CHECK(ask(bf16, fp16, single) == CUBLAS_STATUS_NOT_SUPPORTED);
  CHECK(ask(bf16, lt.layout(CUDA_R_16BF, 32, 64, 32), single) == CUBLAS_STATUS_INVALID_VALUE);
  CHECK(ask(bf16, lt.layout(CUDA_R_16BF, 64, 64, 63), single) == CUBLAS_STATUS_INVALID_VALUE);
  lt.set(CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<std::uint32_t>(CUBLASLT_EPILOGUE_GELU_AUX));
  lt.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, std::int64_t{68});
  CHECK(ask(bf16, bf16, bf16) == CUBLAS_STATUS_INVALID_VALUE);
  lt.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, std::int64_t{72});
  CHECK(ask(bf16, bf16, bf16) == CUBLAS_STATUS_SUCCESS);
  const std::int64_t wide = 0;
  CHECK(cublasLtMatmulDescSetAttribute(lt.op, CUBLASLT_MATMUL_DESC_TRANSA, &wide, sizeof(wide)) ==
        CUBLAS_STATUS_INVALID_VALUE);
}

namespace {

// Runs a body for each rank in its own thread.
void on_ranks(int ranks, const std::function<void(int rank, ncclComm_t communicator)>& body) {
  ncclUniqueId id;
  REQUIRE(ncclGetUniqueId(&id) == ncclSuccess);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      ncclComm_t communicator = nullptr;
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = 1;
      CHECK(ncclCommInitRankConfig(&communicator, ranks, id, rank, &config) == ncclSuccess);
      body(rank, communicator);
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

TEST_CASE("three ranks of NCCL reduce, gather, scatter, broadcast and send") {
  for (int seed = 0; seed < 6; ++seed) {
    emulator::set_seed(static_cast<std::uint64_t>(seed));
    on_ranks(3, [&](int rank, ncclComm_t communicator) {
      const auto r = static_cast<std::size_t>(rank);
      const cudaStream_t stream = new_stream(), other = new_stream();
      const float mine = static_cast<float>(rank + 1);
      const auto filled = [](std::size_t count, float value) { return std::vector<float>(count, value); };
      {
        const DeviceArray<float> data(filled(7, mine));
        CHECK(ncclAllReduce(data.get(), data.get(), 7, ncclFloat32, ncclSum, communicator, stream) == ncclSuccess);
        OK(cudaStreamSynchronize(stream));
        CHECK(data.values() == filled(7, 6.0f));
        CHECK(ncclAllReduce(data.get(), data.get(), 7, ncclFloat32, ncclAvg, communicator, stream) == ncclSuccess);
        OK(cudaStreamSynchronize(stream));
        CHECK(std::fabs(data.values().front() - 6.0f) < 1e-5f);
      }
      {
        std::vector<float> parts(6);
        std::iota(parts.begin(), parts.end(), mine);
        const DeviceArray<float> data(parts);
        CHECK(ncclReduceScatter(data.get(), data.get() + 2 * r, 2, ncclFloat32, ncclMax, communicator, stream) ==
              ncclSuccess);
        CHECK(ncclAllGather(data.get() + 2 * r, data.get(), 2, ncclFloat32, communicator, stream) == ncclSuccess);
        OK(cudaStreamSynchronize(stream));
        CHECK(data.values() == std::vector<float>{3, 4, 5, 6, 7, 8});
      }
      {
        const DeviceArray<float> data(filled(4, mine)), received(filled(4, 0.0f));
        CHECK(ncclBroadcast(data.get(), received.get(), 4, ncclFloat32, 1, communicator, stream) == ncclSuccess);
        CHECK(ncclReduce(data.get(), data.get(), 4, ncclFloat32, ncclSum, 2, communicator, other) == ncclSuccess);
        OK(cudaStreamSynchronize(stream));
        OK(cudaStreamSynchronize(other));
        CHECK(received.values() == filled(4, 2.0f));
        CHECK(data.values() == filled(4, rank == 2 ? 6.0f : mine));
        // A ring, which runs concurrently only as a group of calls.
        CHECK(ncclGroupStart() == ncclSuccess);
        CHECK(ncclSend(data.get(), 4, ncclFloat32, (rank + 1) % 3, communicator, stream) == ncclSuccess);
        CHECK(ncclRecv(received.get(), 4, ncclFloat32, (rank + 2) % 3, communicator, stream) == ncclSuccess);
        CHECK(ncclGroupEnd() == ncclSuccess);
        OK(cudaStreamSynchronize(stream));
        const int left = (rank + 2) % 3;
        CHECK(received.values() == filled(4, left == 2 ? 6.0f : static_cast<float>(left + 1)));
      }
      {
        ncclComm_t pair = nullptr;
        CHECK(ncclCommSplit(communicator, rank == 1 ? NCCL_SPLIT_NOCOLOR : 7, -rank, &pair, nullptr) == ncclSuccess);
        CHECK((pair == nullptr) == (rank == 1));
        if (pair != nullptr) {
          int new_rank = -1, count = 0;
          CHECK(ncclCommUserRank(pair, &new_rank) == ncclSuccess);
          CHECK(ncclCommCount(pair, &count) == ncclSuccess);
          CHECK(count == 2);
          CHECK(new_rank == (rank == 2 ? 0 : 1));
          const DeviceArray<__nv_bfloat16> data(std::vector<__nv_bfloat16>(5, __nv_bfloat16(mine)));
          CHECK(ncclAllReduce(data.get(), data.get(), 5, ncclBfloat16, ncclSum, pair, stream) == ncclSuccess);
          OK(cudaStreamSynchronize(stream));
          CHECK(static_cast<float>(data.values().front()) == 4.0f);
          CHECK(ncclCommDestroy(pair) == ncclSuccess);
        }
      }
      CHECK(ncclCommDestroy(communicator) == ncclSuccess);
      for (const cudaStream_t each : {stream, other}) OK(cudaStreamDestroy(each));
    });
  }
}

TEST_CASE("sums of 16 bits are not those of ascending ranks") {
  std::vector<float> found(3);
  on_ranks(3, [&](int rank, ncclComm_t communicator) {
    // 256 + 1 is 256 in bf16, 1 + 1 + 256 is 258.
    const float values[3] = {256.0f, 1.0f, 1.0f};
    const cudaStream_t stream = new_stream();
    const DeviceArray<__nv_bfloat16> data(std::vector<__nv_bfloat16>(3, __nv_bfloat16(values[rank])));
    CHECK(ncclAllReduce(data.get(), data.get(), 3, ncclBfloat16, ncclSum, communicator, stream) == ncclSuccess);
    OK(cudaStreamSynchronize(stream));
    OK(cudaStreamDestroy(stream));
    const std::vector<__nv_bfloat16> sums = data.values();
    if (rank == 0) std::copy(sums.begin(), sums.end(), found.begin());
    CHECK(ncclCommDestroy(communicator) == ncclSuccess);
  });
  CHECK(std::set<float>(found.begin(), found.end()) == std::set<float>{256.0f, 258.0f});
}

TEST_CASE("an abort ends a rank's communication that waits, on the host and on the device") {
  on_ranks(2, [&](int rank, ncclComm_t communicator) {
    const DeviceArray<float> data(std::vector<float>(4, 1.0f));
    const cudaStream_t stream = new_stream();
    CHECK(ncclAllReduce(data.get(), data.get(), 4, ncclFloat32, ncclSum, communicator, stream) == ncclSuccess);
    OK(cudaStreamSynchronize(stream));
    if (rank == 0) {
      // Connected, alone.
      CHECK(ncclAllReduce(data.get(), data.get(), 4, ncclFloat32, ncclSum, communicator, stream) == ncclSuccess);
      std::thread aborter([&] {
        while (emulator::ranks_that_wait() == 0) std::this_thread::yield();
        CHECK(ncclCommAbort(communicator) == ncclSuccess);
      });
      // Waits to be connected.
      CHECK(ncclSend(data.get(), 4, ncclFloat32, 1, communicator, stream) == ncclInternalError);
      aborter.join();
      OK(cudaStreamSynchronize(stream));
    } else {
      CHECK(ncclCommDestroy(communicator) == ncclSuccess);
    }
    OK(cudaStreamDestroy(stream));
  });
}

TEST_CASE("calls of NCCL that do not match end the program and name both") {
  check_says(last_words([] {
               ncclUniqueId id;
               static_cast<void>(ncclGetUniqueId(&id));
               const auto be = [&](int rank) {
                 ncclComm_t communicator = nullptr;
                 static_cast<void>(ncclCommInitRank(&communicator, 2, id, rank));
                 float* memory = nullptr;
                 static_cast<void>(cudaMalloc(&memory, 64));
                 static_cast<void>(ncclAllReduce(memory, memory, rank == 0 ? 4 : 5, ncclFloat32, ncclSum, communicator,
                                                 new_stream()));
                 static_cast<void>(cudaDeviceSynchronize());
               };
               std::thread other(be, 1);
               be(0);
               other.join();
             }),
             "NCCL: calls that do not match: ");
}
