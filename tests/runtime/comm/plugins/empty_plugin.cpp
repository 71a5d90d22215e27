// A plugin that accepts every version and knows no GPU.
#include "planner/base/error.h"
#include "runtime/comm/gpu_plugin.h"

namespace {

class EmptyGpu final : public parplan::Gpu {
 public:
  std::string versions() override { return "CUDA of nobody"; }
  std::vector<parplan::GpuProperties> devices() override { throw parplan::RunError("no GPU but in tales"); }
  std::unique_ptr<parplan::Backend> make_backend(int, const parplan::GpuBackendOptions&) override { return nullptr; }
  std::unique_ptr<parplan::GpuLocalWorld> make_local_world(int, const std::vector<parplan::CommunicationGroup>&,
                                                           int) override {
    return nullptr;
  }
  std::vector<std::byte> make_nccl_id() override { return {}; }
  std::unique_ptr<parplan::Communicator> make_nccl_communicator(const std::vector<std::byte>&, int, int,
                                                                const std::vector<parplan::CommunicationGroup>&,
                                                                const std::vector<parplan::SendRoute>&,
                                                                parplan::Backend&) override {
    return nullptr;
  }
};

}  // namespace

extern "C" __attribute__((visibility("default"))) parplan::Gpu* parplan_make_gpu(const char*) { return new EmptyGpu; }
