#include "tests/cuda_emulator/streams.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "tests/cuda_emulator/cuda_runtime.h"
#include "tests/cuda_emulator/device.h"
#include "tests/cuda_emulator/grid.h"
#include "tests/cuda_emulator/memory.h"
#include "tests/cuda_emulator/symbols.h"

namespace emulator {
namespace {

class KernelWork final : public Work {
 public:
  KernelWork(Grid grid, std::uint64_t seed) : grid_(std::move(grid)), seed_(seed) {}
  std::string text() const override { return "kernel " + kernel_at(grid_.kernel).name; }
  void run() override { run_grid(grid_, seed_); }

 private:
  Grid grid_;
  std::uint64_t seed_;
};

bool is_possible(const dim3& blocks, const dim3& threads) {
  const auto positive = [](const dim3& size) { return size.x > 0 && size.y > 0 && size.z > 0; };
  return positive(blocks) && positive(threads) && blocks.x <= 2147483647u && blocks.y <= 65535 && blocks.z <= 65535 &&
         threads.x <= 1024 && threads.y <= 1024 && threads.z <= 64 && threads.x * threads.y * threads.z <= 1024;
}

// The memory at one end of a copy.
struct End {
  cudaError_t error = cudaSuccess;
  cudaMemoryType type = cudaMemoryTypeUnregistered;
};
End end_of(const void* begin, std::size_t bytes, std::optional<cudaMemoryType> claimed) {
  const std::optional<Allocation> found = allocation_at(begin);
  if (found.has_value() && !lies_in(*found, begin, bytes)) return {.error = cudaErrorInvalidValue, .type = found->type};
  const cudaMemoryType type = found.has_value() ? found->type : cudaMemoryTypeUnregistered;
  const bool on_device = type == cudaMemoryTypeDevice;
  if (claimed.has_value() && (*claimed == cudaMemoryTypeDevice) != on_device)
    return {.error = cudaErrorInvalidValue, .type = type};
  return {.error = cudaSuccess, .type = type};
}

// When the host continues after a copy ("API synchronization behavior").
enum class Return { at_once, when_done };

cudaError_t copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream,
                 bool asynchronous) {
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return cudaErrorInvalidMemcpyDirection;
  if (bytes == 0) return cudaSuccess;
  if (to == nullptr || from == nullptr) return cudaErrorInvalidValue;
  constexpr cudaMemoryType host = cudaMemoryTypeHost, device = cudaMemoryTypeDevice;
  std::optional<cudaMemoryType> from_claimed, to_claimed;
  if (kind != cudaMemcpyDefault) {
    from_claimed = kind == cudaMemcpyHostToHost || kind == cudaMemcpyHostToDevice ? host : device;
    to_claimed = kind == cudaMemcpyHostToHost || kind == cudaMemcpyDeviceToHost ? host : device;
  }
  const End source = end_of(from, bytes, from_claimed);
  const End target = end_of(to, bytes, to_claimed);
  if (source.error != cudaSuccess) return source.error;
  if (target.error != cudaSuccess) return target.error;
  const auto a = reinterpret_cast<std::uintptr_t>(from), b = reinterpret_cast<std::uintptr_t>(to);
  if (a < b + bytes && b < a + bytes) fail("a copy between ranges that overlap");

  const bool from_device = source.type == device, to_device = target.type == device;
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  if (const cudaError_t error = cudaStreamIsCapturing(stream, &capturing); error != cudaSuccess) return error;
  std::shared_ptr<Work> submitted;
  cudaError_t error = cudaSuccess;
  if (source.type == cudaMemoryTypeUnregistered && to_device && capturing == cudaStreamCaptureStatusNone) {
    // From pageable memory through a staging buffer, which is filled before the call returns.
    auto staged = std::make_shared<std::vector<std::byte>>(static_cast<const std::byte*>(from),
                                                           static_cast<const std::byte*>(from) + bytes);
    error = submit(
        stream, [=] { return make_work("a copy", [=] { std::memcpy(to, staged->data(), bytes); }); }, &submitted);
  } else {
    error = submit(stream, [=] { return make_work("a copy", [=] { std::memcpy(to, from, bytes); }); }, &submitted);
  }
  if (error != cudaSuccess || submitted == nullptr) return error;
  Return when = Return::at_once;
  if (!from_device && !to_device) when = Return::when_done;
  if (from_device && target.type == cudaMemoryTypeUnregistered) when = Return::when_done;
  if (!asynchronous && from_device != to_device && source.type != cudaMemoryTypeUnregistered) when = Return::when_done;
  if (when == Return::when_done) wait_for(submitted);
  return cudaSuccess;
}

cudaError_t set(void* memory, int value, std::size_t bytes, cudaStream_t stream, bool asynchronous) {
  if (bytes == 0) return cudaSuccess;
  const End target = end_of(memory, bytes, std::nullopt);
  if (target.error != cudaSuccess) return target.error;
  if (target.type == cudaMemoryTypeUnregistered) return cudaErrorInvalidValue;
  std::shared_ptr<Work> submitted;
  const cudaError_t error =
      submit(stream, [=] { return make_work("a memset", [=] { std::memset(memory, value, bytes); }); }, &submitted);
  if (error == cudaSuccess && !asynchronous && target.type == cudaMemoryTypeHost) wait_for(submitted);
  return error;
}

cudaError_t create_stream(cudaStream_t* handle, unsigned flags) {
  if (handle == nullptr || (flags & ~cudaStreamNonBlocking) != 0) return cudaErrorInvalidValue;
  if (const cudaError_t error = forbidden_in_host_function(); error != cudaSuccess) return error;
  auto stream = std::make_shared<CUstream_st>();
  stream->preference = next_random();
  const Lock lock(streams().mutex);
  stream->number = streams().numbers++;
  stream->device = current_device();
  stream->blocking = (flags & cudaStreamNonBlocking) == 0;
  *handle = stream.get();
  streams().open.emplace(stream.get(), stream);
  streams().all.push_back(stream);
  return cudaSuccess;
}

// Submitted work is still executed.
cudaError_t destroy_stream(cudaStream_t handle) {
  const Lock lock(streams().mutex);
  const auto place = streams().open.find(handle);
  if (place == streams().open.end() || streams().legacy[place->second->device] == handle)
    return cudaErrorInvalidResourceHandle;
  if (place->second->capture != nullptr) {
    invalidate(place->second->capture);
    if (place->second->capture->origin == handle) std::erase(streams().captures, place->second->capture);
  }
  place->second->destroyed = true;
  if (place->second->queue.empty()) std::erase(streams().all, place->second);
  streams().open.erase(place);
  return cudaSuccess;
}

// The stream of a query, which must not be captured.
cudaError_t asked_stream(const Lock& lock, cudaStream_t handle, CUstream_st*& stream) {
  stream = stream_of(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (stream->capture != nullptr) {
    invalidate(stream->capture);
    return cudaErrorStreamCaptureUnsupported;
  }
  return forbidden_in_capture(lock);
}

cudaError_t asked_event(const Lock& lock, cudaEvent_t handle, CUevent_st*& event) {
  const auto place = streams().events.find(handle);
  if (place == streams().events.end()) return cudaErrorInvalidResourceHandle;
  event = place->second.get();
  if (event->capture != nullptr) {
    invalidate(event->capture);
    return cudaErrorCapturedEvent;
  }
  return forbidden_in_capture(lock);
}

cudaError_t record(cudaEvent_t handle, cudaStream_t stream_handle, unsigned flags) {
  if (const cudaError_t error = forbidden_in_host_function(); error != cudaSuccess) return error;
  if (flags != cudaEventRecordDefault) return cudaErrorNotSupported;
  Lock lock(streams().mutex);
  const auto place = streams().events.find(handle);
  CUstream_st* stream = stream_of(stream_handle);
  if (place == streams().events.end() || stream == nullptr) return cudaErrorInvalidResourceHandle;
  CUevent_st& event = *place->second;
  if (stream->capture != nullptr) {
    if (stream->capture->invalid) return cudaErrorStreamCaptureInvalidated;
    event.record = nullptr;
    event.capture = stream->capture;
    event.tips = stream->tips;
    return cudaSuccess;
  }
  event.capture = nullptr;
  event.record = make_work("the record of an event", nullptr);
  enqueue(*stream, event.record);
  run_some(lock);
  return cudaSuccess;
}

cudaError_t wait_event(cudaStream_t stream_handle, cudaEvent_t handle, unsigned flags) {
  if (const cudaError_t error = forbidden_in_host_function(); error != cudaSuccess) return error;
  if (flags != cudaEventWaitDefault) return cudaErrorNotSupported;
  Lock lock(streams().mutex);
  const auto place = streams().events.find(handle);
  CUstream_st* stream = stream_of(stream_handle);
  if (place == streams().events.end() || stream == nullptr) return cudaErrorInvalidResourceHandle;
  const CUevent_st& event = *place->second;
  if (event.capture != nullptr) {
    if (event.capture->ended) return cudaErrorCapturedEvent;
    if (event.capture->invalid) return cudaErrorStreamCaptureInvalidated;
    if (stream->capture != nullptr && stream->capture != event.capture) {
      invalidate(stream->capture);
      invalidate(event.capture);
      return cudaErrorStreamCaptureMerge;
    }
    stream->capture = event.capture;
    for (int tip : event.tips)
      if (std::find(stream->tips.begin(), stream->tips.end(), tip) == stream->tips.end()) stream->tips.push_back(tip);
    return cudaSuccess;
  }
  if (stream->capture != nullptr) {
    if (stream->capture->invalid) return cudaErrorStreamCaptureInvalidated;
    invalidate(stream->capture);
    return cudaErrorStreamCaptureIsolation;
  }
  if (event.record == nullptr || event.record->done) return cudaSuccess;
  const std::shared_ptr<Work> work = make_work("the wait for an event", nullptr);
  work->after.push_back(event.record);
  enqueue(*stream, work);
  run_some(lock);
  return cudaSuccess;
}

cudaError_t elapsed(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  const Lock lock(streams().mutex);
  if (milliseconds == nullptr) return cudaErrorInvalidValue;
  std::chrono::steady_clock::time_point times[2];
  bool done = true;
  for (int i = 0; i < 2; ++i) {
    const auto place = streams().events.find(i == 0 ? start : end);
    if (place == streams().events.end()) return cudaErrorInvalidResourceHandle;
    const CUevent_st& event = *place->second;
    if (event.capture != nullptr) return cudaErrorCapturedEvent;
    if (event.record == nullptr || (event.flags & cudaEventDisableTiming) != 0) return cudaErrorInvalidResourceHandle;
    done = done && event.record->done;
    times[i] = event.record->time;
  }
  if (!done) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(times[1] - times[0]).count();
  return cudaSuccess;
}

}  // namespace

cudaError_t launch(const cudaLaunchConfig_t& launch, const void* kernel, std::function<void()> thread) {
  if (!is_possible(launch.gridDim, launch.blockDim)) return remember(cudaErrorInvalidConfiguration);
  const std::size_t allowed = allowed_shared_memory(kernel), own = kernel_at(kernel).shared_bytes;
  if (launch.dynamicSmemBytes > allowed || launch.dynamicSmemBytes + own > std::max(allowed, shared_bytes_by_default))
    return remember(cudaErrorInvalidValue);
  const int device = device_of(launch.stream);
  if (device != current_device()) return remember(cudaErrorInvalidResourceHandle);
  const Grid grid{.kernel = kernel,
                  .blocks = launch.gridDim,
                  .threads = launch.blockDim,
                  .shared = launch.dynamicSmemBytes,
                  .thread = std::move(thread)};
  return remember(
      submit(launch.stream, [grid] { return std::make_shared<KernelWork>(grid, next_random_with_lock_held()); }));
}

}  // namespace emulator

using namespace emulator;

cudaError_t cudaDeviceSynchronize() {
  if (const cudaError_t error = forbidden_in_capture(); error != cudaSuccess) return remember(error);
  finish_device_work();
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return remember(copy(to, from, bytes, kind, stream, true));
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  if (const cudaError_t error = forbidden_in_capture(); error != cudaSuccess) return remember(error);
  return remember(copy(to, from, bytes, kind, nullptr, false));
}
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream) {
  return remember(set(memory, value, bytes, stream, true));
}
cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) {
  if (const cudaError_t error = forbidden_in_capture(); error != cudaSuccess) return remember(error);
  return remember(set(memory, value, bytes, nullptr, false));
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return remember(create_stream(stream, cudaStreamDefault)); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return remember(create_stream(stream, flags));
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return remember(create_stream(stream, flags));
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return remember(destroy_stream(stream)); }

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Lock lock(streams().mutex);
  CUstream_st* stream = nullptr;
  if (const cudaError_t error = asked_stream(lock, handle, stream); error != cudaSuccess) return remember(error);
  wait_for(lock, std::shared_ptr<Work>(stream->last));
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Lock lock(streams().mutex);
  CUstream_st* stream = nullptr;
  if (const cudaError_t error = asked_stream(lock, handle, stream); error != cudaSuccess) return remember(error);
  const std::shared_ptr<Work> last = stream->last;
  run_for_query(lock);
  return last == nullptr || last->done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return remember(wait_event(stream, event, flags));
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  if (function == nullptr) return remember(cudaErrorInvalidValue);
  return remember(
      submit(stream, [=] { return make_work("a host function", [=] { run_host_function(function, data); }); }));
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (event == nullptr || (flags & ~(cudaEventBlockingSync | cudaEventDisableTiming)) != 0)
    return remember(cudaErrorInvalidValue);
  if (const cudaError_t error = forbidden_in_host_function(); error != cudaSuccess) return remember(error);
  auto made = std::make_unique<CUevent_st>();
  made->flags = flags;
  const Lock lock(streams().mutex);
  *event = made.get();
  streams().events.emplace(made.get(), std::move(made));
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return remember(record(event, stream, cudaEventRecordDefault));
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return remember(record(event, stream, flags));
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  Lock lock(streams().mutex);
  CUevent_st* event = nullptr;
  if (const cudaError_t error = asked_event(lock, handle, event); error != cudaSuccess) return remember(error);
  const std::shared_ptr<Work> awaited = event->record;
  if (awaited == nullptr) return cudaSuccess;
  run_for_query(lock);
  return awaited->done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Lock lock(streams().mutex);
  CUevent_st* event = nullptr;
  if (const cudaError_t error = asked_event(lock, handle, event); error != cudaSuccess) return remember(error);
  wait_for(lock, std::shared_ptr<Work>(event->record));
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Lock lock(streams().mutex);
  return remember(streams().events.erase(event) == 1 ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return remember(elapsed(milliseconds, start, end));
}
