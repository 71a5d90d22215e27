#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "runtime/comm/gpu_plugin.h"
#include "runtime/executor.h"
#include "runtime/launch/rendezvous.h"

namespace parplan {

// Where ranks run: the device and the communicator of each rank that this process hosts.
class World {
 public:
  virtual ~World() = default;
  // The ranks that are threads of this process, ascending.
  virtual const std::vector<int>& hosted() const = 0;
  // Each of these is called once for every hosted rank, by its thread.
  virtual std::unique_ptr<Backend> make_backend(int rank) = 0;
  virtual std::unique_ptr<Communicator> make_communicator(int rank, Backend& backend) = 0;
};

using MakeWorld = std::function<std::unique_ptr<World>(const GroupTable& groups, int ranks)>;

// All ranks are threads of this process, on its CPU cores.
MakeWorld cpu_threads();
// Every process hosts one rank, on a CPU core; they communicate as the rendezvous connects them.
MakeWorld cpu_processes(Rendezvous& rendezvous);
// All ranks are threads of this process and share one GPU.
MakeWorld one_gpu(std::shared_ptr<Gpu> gpu, int device, GpuBackendOptions options);
// A GPU for every rank, with NCCL between them. Every rank is a thread of this process
// (`rendezvous` is alone, rank r on devices[r]), or every process hosts one rank (on devices[its
// local process number]).
MakeWorld gpu_per_rank(std::shared_ptr<Gpu> gpu, std::vector<int> devices, Rendezvous& rendezvous,
                       GpuBackendOptions options);

}  // namespace parplan
