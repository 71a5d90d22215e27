#pragma once

#include <cstddef>
#include <string>

#include "tests/cuda_emulator/cuda_runtime_api.h"

namespace emulator {

// The host thread's; what cudaSetDevice made it.
int current_device();
// Of one device: PARPLAN_EMULATED_MEMORY bytes, by default 8 GiB.
std::size_t total_memory();
// Of PARPLAN_EMULATED_DEVICES, by default 1.
int devices();

// Keeps an error for cudaGetLastError of this host thread, and returns it.
cudaError_t remember(cudaError_t error);

// cudaErrorStreamCaptureUnsupported, and a capture that is under way is invalid, where this host thread may not make a call
// that is not for streams that are captured (cudaMalloc, cudaDeviceSynchronize).
cudaError_t forbidden_in_capture();
// Returns when all that was submitted so far has run.
void finish_device_work();
// The bytes of dynamic shared memory that a kernel may be launched with.
std::size_t allowed_shared_memory(const void* kernel);

}  // namespace emulator
