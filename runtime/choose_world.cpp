#include "runtime/choose_world.h"

#include <numeric>
#include <optional>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

// The CUDA architecture that a precision needs: bf16 and tf32 units came with Ampere, and kernels
// are built for nothing older; fp8 units came with Ada.
constexpr int least_compute_major = 8;
constexpr int least_of_fp8 = 89;

void check_processes(const Plan& plan, const Rendezvous& rendezvous) {
  const int ranks = plan.spec.mesh.size();
  if (rendezvous.processes() > 1 && rendezvous.processes() != ranks)
    throw ConfigError(fmt::format(
        "{} processes were started for a plan of {} ranks: start one process a rank, or one that hosts all ranks",
        rendezvous.processes(), ranks));
  int machines = 0;
  for (const NodeGroup& group : plan.cluster.groups) machines += group.machines();
  if (rendezvous.processes() == 1 && machines > 1 && ranks > plan.cluster.groups.front().devices_per_machine())
    throw ConfigError(
        fmt::format("the plan spreads over {} nodes and ranks of one process are on one machine: start a process for "
                    "each of the {} ranks "
                    "(mpirun, srun or torchrun's variables), or plan again with --nodes 1",
                    machines, ranks));
}

MakeWorld choose_cpu_world(const Plan& plan, Rendezvous& rendezvous) {
  if (plan.training.precision != DataType::fp32 && plan.training.precision != DataType::tf32)
    throw ConfigError(
        fmt::format("the plan computes in {}; the CPU backend computes in fp32: plan again with --precision fp32",
                    name(stated_precision(plan.training))));
  if (rendezvous.processes() == 1) return cpu_threads();
  return cpu_processes(rendezvous);
}

std::vector<GpuProperties> gpus_for(const Plan& plan, const OpenedGpu& opened) {
  const auto refuse = [&](const std::string& missing) {
    throw ConfigError(
        fmt::format("the plan is for {} and cannot run here. Missing: {}; make a plan for this machine with `parplan "
                    "suggest MODEL`",
                    device_title(plan.cluster), missing));
  };
  if (opened.gpu == nullptr) refuse(opened.missing);
  std::vector<GpuProperties> found;
  try {
    found = opened.gpu->devices();
  } catch (const RunError& error) {
    refuse(error.what());
  }
  if (found.empty()) refuse("a GPU that CUDA sees");
  for (const GpuProperties& gpu : found)
    if (gpu.compute_major < least_compute_major)
      refuse(fmt::format("a GPU of compute capability 8.0 or later ({} has {}.{})", gpu.name, gpu.compute_major,
                         gpu.compute_minor));
  for (const GpuProperties& gpu : found)
    if (plan.training.fp8 && 10 * gpu.compute_major + gpu.compute_minor < least_of_fp8)
      refuse(fmt::format("a GPU of compute capability 8.9 or later, which precision fp8 needs ({} has {}.{})", gpu.name,
                         gpu.compute_major, gpu.compute_minor));
  return found;
}

MakeWorld choose_gpu_world(const Plan& plan, const WorldOptions& options, Rendezvous& rendezvous) {
  const OpenedGpu opened = open_gpu();
  const int devices = static_cast<int>(gpus_for(plan, opened).size());
  const int ranks = plan.spec.mesh.size();
  if (rendezvous.processes() == 1 && (ranks == 1 || options.share_gpu)) return one_gpu(opened.gpu, 0, options.gpu);
  const int wanted = rendezvous.processes() == 1 ? ranks : rendezvous.local_processes();
  if (devices < wanted && rendezvous.processes() > 1)
    // The same words in every process, so that they are reported once.
    throw ConfigError(
        fmt::format("{} processes of the job are on one machine and each takes the GPU of its own number there, but "
                    "they see {} GPU{}: let each see "
                    "all GPUs of its machine (srun: --gpus-per-node={} instead of --gpus-per-task and --gpu-bind; "
                    "CUDA_VISIBLE_DEVICES "
                    "unset, or the same in all), or start at most one process a GPU",
                    wanted, devices, devices == 1 ? "" : "s", wanted));
  if (devices < wanted)
    throw ConfigError(
        fmt::format("the plan has {} ranks and this machine {} GPU{}: plan again with --devices {}, or try the plan "
                    "out on one GPU with "
                    "--share-gpu (one process, no timing that means anything)",
                    ranks, devices, devices == 1 ? "" : "s", devices));
  std::vector<int> numbers(static_cast<std::size_t>(wanted));
  std::iota(numbers.begin(), numbers.end(), 0);
  return gpu_per_rank(opened.gpu, std::move(numbers), rendezvous, options.gpu);
}

}  // namespace

MakeWorld choose_world(const Plan& plan, const WorldOptions& options, Rendezvous& rendezvous) {
  if (const BackendRow& backend = row_of(plan.cluster.backend()); !backend.runs)
    throw ConfigError(
        fmt::format("the plan is for {}, and parplan runs nothing on {}: carry it out with another framework, or make "
                    "a plan for this machine "
                    "with `parplan suggest MODEL`",
                    device_title(plan.cluster), backend.runtime));
  if (!is_own(plan.training.engine))
    throw ConfigError(fmt::format(
        "the plan predicts {} ({}), and parplan runs plans for its own runtime only: train it there, or plan again "
        "without --engine",
        plan.training.engine.title, plan.training.engine.name));
  check_processes(plan, rendezvous);
  return plan.cluster.backend() == BackendKind::cuda ? choose_gpu_world(plan, options, rendezvous)
                                                     : choose_cpu_world(plan, rendezvous);
}

}  // namespace parplan
