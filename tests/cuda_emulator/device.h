#pragma once

#include <cstddef>
#include <string>

#include "tests/cuda_emulator/cuda_runtime_api.h"

namespace emulator {

// The host thread's current device, as set by cudaSetDevice.
int current_device();
// Memory of one device: PARPLAN_EMULATED_MEMORY bytes, by default 8 GiB.
std::size_t total_memory();
// Number of devices: PARPLAN_EMULATED_DEVICES, by default 1.
int devices();

// Keeps an error for cudaGetLastError of this host thread, and returns it.
cudaError_t remember(cudaError_t error);

// Returns cudaErrorStreamCaptureUnsupported, and invalidates a capture in progress, where this host
// thread may not make a call that is not for captured streams (cudaMalloc, cudaDeviceSynchronize).
cudaError_t forbidden_in_capture();
// Returns when all work submitted so far to the current device has run.
void finish_device_work();
// Waits like cudaFree: all work submitted to the device has run. Work of other host threads that
// cannot run yet is left: it is communication of NCCL that waits for this rank, which has its own
// device where NCCL is real.
void finish_work_before_release();
// The bytes of dynamic shared memory with which a kernel may be launched.
std::size_t allowed_shared_memory(const void* kernel);

}  // namespace emulator
