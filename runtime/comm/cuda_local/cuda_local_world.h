#pragma once

#include <memory>
#include <vector>

#include "runtime/comm/gpu_plugin.h"

namespace parplan {

// Ranks as threads of this process, each with its own CudaBackend on one GPU. The threads meet on
// the host, their streams at events; nothing waits for the device. Group ids are distinct; channels
// are numbered from 0 to channels - 1.
std::unique_ptr<GpuLocalWorld> make_cuda_local_world(int ranks, const std::vector<CommunicationGroup>& groups,
                                                     int channels);

}  // namespace parplan
