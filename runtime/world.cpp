#include "runtime/world.h"

#include <cstddef>
#include <numeric>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "runtime/comm/forwarding_communicator.h"
#include "runtime/comm/local/local_communicator.h"
#include "runtime/device/cpu/cpu_backend.h"
#include "runtime/device/cpu/host_update.h"

namespace parplan {
namespace {

std::vector<int> all_ranks(int ranks) {
  std::vector<int> numbers(static_cast<std::size_t>(ranks));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

std::vector<int> hosted_ranks(const Rendezvous& rendezvous, int ranks) {
  if (rendezvous.processes() == 1) return all_ranks(ranks);
  PARPLAN_ASSERT(rendezvous.processes() == ranks,
                 fmt::format("{} processes for {} ranks", rendezvous.processes(), ranks));
  return {rendezvous.process()};
}

class CpuThreads final : public World {
 public:
  CpuThreads(const GroupTable& groups, int ranks)
      : hosted_(all_ranks(ranks)), world_(ranks, groups.groups(), groups.channels()) {}
  const std::vector<int>& hosted() const override { return hosted_; }
  std::unique_ptr<Backend> make_backend(int) override { return make_cpu_backend(); }
  std::unique_ptr<Communicator> make_communicator(int rank, Backend&) override {
    return std::make_unique<ForwardingCommunicator>(world_.communicator(rank));
  }

 private:
  std::vector<int> hosted_;
  LocalWorld world_;
};

class CpuProcesses final : public World {
 public:
  CpuProcesses(const GroupTable& groups, int ranks, Rendezvous& rendezvous)
      : hosted_(hosted_ranks(rendezvous, ranks)),
        communicator_(rendezvous.make_communicator(groups.groups(), groups.channels())) {
    PARPLAN_ASSERT(communicator_ != nullptr, "a rendezvous of several processes connects CPU ranks");
  }
  const std::vector<int>& hosted() const override { return hosted_; }
  std::unique_ptr<Backend> make_backend(int) override { return make_cpu_backend(); }
  std::unique_ptr<Communicator> make_communicator(int, Backend&) override { return std::move(communicator_); }

 private:
  std::vector<int> hosted_;
  std::unique_ptr<Communicator> communicator_;
};

// The main program's kernels of the host are for all backends of the plugin.
GpuBackendOptions with_host_kernel(GpuBackendOptions options) {
  options.host_kernel = update_on_host;
  return options;
}

class OneGpu final : public World {
 public:
  OneGpu(const GroupTable& groups, int ranks, std::shared_ptr<Gpu> gpu, int device, GpuBackendOptions options)
      : hosted_(all_ranks(ranks)), gpu_(std::move(gpu)), device_(device), options_(with_host_kernel(options)),
        world_(gpu_->make_local_world(ranks, groups.groups(), groups.channels())) {}
  const std::vector<int>& hosted() const override { return hosted_; }
  std::unique_ptr<Backend> make_backend(int) override { return gpu_->make_backend(device_, options_); }
  std::unique_ptr<Communicator> make_communicator(int rank, Backend& backend) override {
    return world_->communicator(rank, backend);
  }

 private:
  std::vector<int> hosted_;
  std::shared_ptr<Gpu> gpu_;
  int device_;
  GpuBackendOptions options_;
  std::unique_ptr<GpuLocalWorld> world_;
};

class GpuPerRank final : public World {
 public:
  GpuPerRank(const GroupTable& groups, int ranks, std::shared_ptr<Gpu> gpu, std::vector<int> devices,
             Rendezvous& rendezvous, GpuBackendOptions options)
      : groups_(groups),
        ranks_(ranks),
        hosted_(hosted_ranks(rendezvous, ranks)),
        gpu_(std::move(gpu)),
        devices_(std::move(devices)),
        first_device_(rendezvous.processes() == 1 ? 0 : rendezvous.local_process()),
        options_(with_host_kernel(options)) {
    const bool makes_id = rendezvous.process() == 0;
    id_ = broadcast(rendezvous, makes_id ? gpu_->make_nccl_id() : std::vector<std::byte>{}, 0);
  }
  const std::vector<int>& hosted() const override { return hosted_; }
  std::unique_ptr<Backend> make_backend(int rank) override {
    const std::size_t at = static_cast<std::size_t>(first_device_ + rank - hosted_.front());
    PARPLAN_ASSERT(at < devices_.size(), fmt::format("rank {} and {} devices", rank, devices_.size()));
    return gpu_->make_backend(devices_[at], options_);
  }
  std::unique_ptr<Communicator> make_communicator(int rank, Backend& backend) override {
    return gpu_->make_nccl_communicator(id_, rank, ranks_, groups_.groups(), groups_.routes(), backend);
  }

 private:
  const GroupTable& groups_;
  int ranks_;
  std::vector<int> hosted_;
  std::shared_ptr<Gpu> gpu_;
  std::vector<int> devices_;
  int first_device_;
  GpuBackendOptions options_;
  std::vector<std::byte> id_;
};

}  // namespace

MakeWorld cpu_threads() {
  return [](const GroupTable& groups, int ranks) { return std::make_unique<CpuThreads>(groups, ranks); };
}

MakeWorld cpu_processes(Rendezvous& rendezvous) {
  return [&rendezvous](const GroupTable& groups, int ranks) {
    return std::make_unique<CpuProcesses>(groups, ranks, rendezvous);
  };
}

MakeWorld one_gpu(std::shared_ptr<Gpu> gpu, int device, GpuBackendOptions options) {
  return [gpu = std::move(gpu), device, options](const GroupTable& groups, int ranks) {
    return std::make_unique<OneGpu>(groups, ranks, gpu, device, options);
  };
}

MakeWorld gpu_per_rank(std::shared_ptr<Gpu> gpu, std::vector<int> devices, Rendezvous& rendezvous,
                       GpuBackendOptions options) {
  return
      [gpu = std::move(gpu), devices = std::move(devices), &rendezvous, options](const GroupTable& groups, int ranks) {
        return std::make_unique<GpuPerRank>(groups, ranks, gpu, devices, rendezvous, options);
      };
}

}  // namespace parplan
