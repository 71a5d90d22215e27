// The plugin's Gpu, and the only function that libparplan_cuda.so exports.
#include <cuda_runtime.h>

#include <array>
#include <cstdlib>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "runtime/comm/cuda_local/cuda_local_world.h"
#include "runtime/comm/gpu_plugin.h"
#include "runtime/comm/nccl/nccl_communicator.h"
#include "runtime/device/cuda/cuda_backend.h"
#include "runtime/device/cuda/cuda_check.h"
#include "runtime/device/cuda/matrix_products.h"
#include "runtime/plugin/build_identity.h"

namespace parplan {
namespace {

// CUDA's versions are 1000 * major + 10 * minor (cuda_runtime_api.h, cudaRuntimeGetVersion).
std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

int attribute_of(int device, cudaDeviceAttr attribute) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, attribute, device), "ask for an attribute of a GPU");
  return value;
}

int device_count() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  if (error == cudaErrorInsufficientDriver) {
    int driver = 0;
    static_cast<void>(cudaDriverGetVersion(&driver));
    int runtime = 0;
    check(cudaRuntimeGetVersion(&runtime), "ask for CUDA's version");
    throw_cuda_error(error, driver == 0 ? "no NVIDIA driver"
                                        : fmt::format("the NVIDIA driver is for CUDA {}, this build for {}",
                                                      version_text(driver), version_text(runtime)));
  }
  check(error, "count GPUs");
  return count;
}

// Clocks are attributes, in kHz: CUDA 13 removed them from cudaDeviceProp.
GpuProperties properties_of(int device) {
  cudaDeviceProp said{};
  check(cudaGetDeviceProperties(&said, device), "ask for the properties of a GPU");
  std::array<char, 32> bus_id{};
  check(cudaDeviceGetPCIBusId(bus_id.data(), static_cast<int>(bus_id.size()), device), "ask for the bus id of a GPU");
  return {.name = said.name,
          .bus_id = bus_id.data(),
          .compute_major = said.major,
          .compute_minor = said.minor,
          .multiprocessors = said.multiProcessorCount,
          .memory = Bytes(static_cast<std::int64_t>(said.totalGlobalMem)),
          .clock_mhz = attribute_of(device, cudaDevAttrClockRate) / 1000,
          .memory_clock_mhz = attribute_of(device, cudaDevAttrMemoryClockRate) / 1000};
}

class CudaGpu final : public Gpu {
 public:
  std::string versions() override {
    int runtime = 0, driver = 0;
    check(cudaRuntimeGetVersion(&runtime), "ask for CUDA's version");
    check(cudaDriverGetVersion(&driver), "ask for the driver's version");
    return fmt::format("CUDA {}, {}, cuBLASLt {}, NCCL {}", version_text(runtime),
                       driver == 0 ? "no driver" : "driver " + version_text(driver), cublaslt_version(),
                       nccl_version());
  }

  std::vector<GpuProperties> devices() override {
    std::vector<GpuProperties> found;
    const int count = device_count();
    for (int device = 0; device < count; ++device) found.push_back(properties_of(device));
    return found;
  }

  std::unique_ptr<Backend> make_backend(int device, const GpuBackendOptions& options) override {
    const int count = device_count();
    if (device < 0 || device >= count)
      throw RunError(fmt::format("there is no GPU {}: this machine has {}", device, count));
    return std::make_unique<CudaBackend>(device, CudaBackendOptions{.deterministic = options.deterministic,
                                                                    .graphs = options.graphs,
                                                                    .synchronous = options.synchronous,
                                                                    .host_kernel = options.host_kernel});
  }

  std::unique_ptr<GpuLocalWorld> make_local_world(int ranks, const std::vector<CommunicationGroup>& groups,
                                                  int channels) override {
    return make_cuda_local_world(ranks, groups, channels);
  }

  std::vector<std::byte> make_nccl_id() override { return parplan::make_nccl_id(); }

  std::unique_ptr<Communicator> make_nccl_communicator(const std::vector<std::byte>& id, int rank, int ranks,
                                                       const std::vector<CommunicationGroup>& groups,
                                                       const std::vector<SendRoute>& routes,
                                                       Backend& backend) override {
    auto* own = dynamic_cast<CudaBackend*>(&backend);
    PARPLAN_ASSERT(own != nullptr, fmt::format("a backend named {} is not the plugin's", backend.name()));
    return parplan::make_nccl_communicator(id, rank, ranks, groups, routes, *own);
  }
};

}  // namespace
}  // namespace parplan

extern "C" __attribute__((visibility("default"))) parplan::Gpu* parplan_make_gpu(const char* build) {
  if (build != parplan::write_identity(parplan::build_identity())) return nullptr;
  // Streams share 8 work queues of a GPU unless the driver is told otherwise before it starts, at
  // most 32 (CUDA C++ Programming Guide, CUDA environment variables). A rank has up to 7 streams
  // besides NCCL's own. A send behind a receive in one queue waits for it, as the other rank's may.
  // A value that the user set is kept.
  static_cast<void>(setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0));
  return new parplan::CudaGpu;
}
