#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "runtime/comm/communicator.h"
#include "runtime/device/backend.h"

namespace parplan {

// One GPU as its driver describes it.
struct GpuProperties {
  std::string name;            // "NVIDIA H200"
  std::string bus_id;          // "0000:1B:00.0"
  int compute_major = 0;       // 9
  int compute_minor = 0;       // 0
  int multiprocessors = 0;
  Bytes memory;
  int clock_mhz = 0;  // highest of the multiprocessors; 0 where the driver does not tell
  int memory_clock_mhz = 0;
  bool operator==(const GpuProperties&) const = default;
};

struct GpuBackendOptions {
  // A fixed order of every sum: one algorithm per shape, and none that splits sums over blocks in
  // the order of arrival.
  bool deterministic = true;
  // Replay repeated work as CUDA graphs.
  bool graphs = true;
  // Wait after every kernel and replay none, so that an error is reported where it happened.
  bool synchronous = false;
  // The main program's (runtime/device/cpu/host_update.h): the plugin has no kernels of the host.
  HostKernel host_kernel = nullptr;
};

// The communicators of ranks that are threads of one process and share one GPU. Reductions add in
// order.
class GpuLocalWorld {
 public:
  virtual ~GpuLocalWorld() = default;
  // Called once for each rank, in its thread; valid as long as the world and the backend.
  virtual std::unique_ptr<Communicator> communicator(int rank, Backend& backend) = 0;
};

// The CUDA plugin as the main program sees it: everything that needs a CUDA library is behind it.
// Backends that are passed to it must be its own.
class Gpu {
 public:
  virtual ~Gpu() = default;
  virtual std::string versions() = 0;                 // "CUDA 13.0, driver 13.0, cuBLASLt 13.1.0, NCCL 2.28.9"
  virtual std::vector<GpuProperties> devices() = 0;   // in CUDA's order; RunError without a driver
  virtual std::unique_ptr<Backend> make_backend(int device, const GpuBackendOptions& options) = 0;

  virtual std::unique_ptr<GpuLocalWorld> make_local_world(int ranks, const std::vector<CommunicationGroup>& groups,
                                                          int channels) = 0;

  // NCCL: one rank of the job makes an id, and every rank, each in its own thread, passes the same
  // id with equal groups and routes. Sends use these routes only. Reductions add in NCCL's order.
  virtual std::vector<std::byte> make_nccl_id() = 0;
  virtual std::unique_ptr<Communicator> make_nccl_communicator(const std::vector<std::byte>& id, int rank, int ranks,
                                                               const std::vector<CommunicationGroup>& groups,
                                                               const std::vector<SendRoute>& routes,
                                                               Backend& backend) = 0;
};

// The plugin, or why there is none.
struct OpenedGpu {
  std::shared_ptr<Gpu> gpu;  // null when `missing` says why
  std::string missing;       // "no libparplan_cuda.so beside the program or in PARPLAN_PLUGINS ..."
};
// Looks for libparplan_cuda.so in the folder PARPLAN_PLUGINS if that is set, otherwise beside the
// program (and in ../lib/parplan), and opens it once (once for each such folder). An open plugin
// does not imply a driver or a GPU: `devices` tells.
OpenedGpu open_gpu();

// The plugin's export. `build` is the main program's (write_identity); the result is null if the
// plugin is of another one: the two exchange objects whose layout either may have changed.
using MakeGpu = Gpu* (*)(const char* build);
inline constexpr const char* make_gpu_symbol = "parplan_make_gpu";

}  // namespace parplan
