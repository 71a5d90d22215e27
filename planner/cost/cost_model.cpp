#include "planner/cost/cost_model.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/cluster/nccl/import.h"
#include "planner/cost/collective_time.h"
#include "planner/cost/contention.h"
#include "planner/cost/host_time.h"
#include "planner/cost/kernel_time.h"
#include "planner/plan/unlike_replicas.h"

namespace parplan {

Execution execution_of(const DeviceKind& device, const Engine& engine) {
  if (!device.overlaps_communication) return sequential_execution;
  Execution execution;
  for (const Axis axis : all_axes) {
    const bool overlaps = axis == Axis::dp   ? engine.overlaps_data
                          : axis == Axis::pp ? engine.overlaps_pipeline
                                             : engine.overlaps_tensor;
    if (overlaps) continue;
    const AxisStreams streams = streams_of(axis);
    // Transfers around a ring that has streams of its own are made to overlap, where anything does.
    const bool overlaps_some = engine.overlaps_tensor || engine.overlaps_data || engine.overlaps_pipeline;
    if (overlaps_some && axis != Axis::pp && streams.transfers.send_next != streams.collectives) {
      execution.in_line |= 1u << index_of(streams.collectives);
      continue;
    }
    execution.in_line |= 1u << index_of(streams.collectives);
    for (const NeighbourStreams& way : {streams.transfers, streams.on_return})
      for (const Stream stream : {way.send_next, way.receive_next, way.send_previous, way.receive_previous})
        execution.in_line |= 1u << index_of(stream);
  }
  // What goes to the host and back goes with gradients.
  if (!engine.overlaps_data)
    for (const Stream stream : {Stream::to_host, Stream::from_host, Stream::host})
      execution.in_line |= 1u << index_of(stream);
  if (execution.in_line != 0) execution.in_line |= 1u << index_of(Stream::compute);
  return execution;
}

const GroupNetwork& CostModel::network(GroupKey group) const {
  static const GroupNetwork alone;
  auto found = networks.find(group);
  // Neighbours around an axis other than the pipeline are reached as the axis's whole group is.
  if (found == networks.end()) found = networks.find(all_along(group.axis));
  return found == networks.end() ? alone : found->second;
}

void set_context_groups(const GroupNetwork& exchange, const GroupNetwork& keys,
                        std::map<GroupKey, GroupNetwork>& networks) {
  networks[exchange_group] = exchange;
  for (const GroupKey group : {GroupKey{Axis::cp, Members::keys}, next_keys, previous_keys}) networks[group] = keys;
}

const GroupNetwork& NetworkCache::of_groups(const DeviceMesh& mesh, int size, int stride) {
  const auto [entry, added] = groups_.try_emplace({mesh.size(), size, stride});
  if (added) entry->second = group_network(*cluster_, mesh, size, stride);
  return entry->second;
}

const GroupNetwork& NetworkCache::group(const DeviceMesh& mesh, Axis axis) {
  return of_groups(mesh, group_size(mesh, axis), group_stride(mesh, axis));
}

const GroupNetwork& NetworkCache::shard(const DeviceMesh& mesh) {
  return of_groups(mesh, mesh.shard_ranks(), group_stride(mesh, Axis::dp));
}

const GroupNetwork& NetworkCache::replicas(const DeviceMesh& mesh) {
  return of_groups(mesh, mesh.replica_ranks() / mesh.shard_ranks(), group_stride(mesh, Axis::dp) * mesh.shard_ranks());
}

const GroupNetwork& NetworkCache::exchange(const DeviceMesh& mesh) {
  return of_groups(mesh, mesh.cp_ulysses, group_stride(mesh, Axis::cp));
}

const GroupNetwork& NetworkCache::keys(const DeviceMesh& mesh) {
  return of_groups(mesh, mesh.degree.cp / mesh.cp_ulysses, group_stride(mesh, Axis::cp) * mesh.cp_ulysses);
}

const GroupNetwork& NetworkCache::copies(const DeviceMesh& mesh, int ranks) {
  return of_groups(mesh, ranks, group_stride(mesh, Axis::tp));
}

const GroupNetwork& NetworkCache::stage(const DeviceMesh& mesh) {
  const int stages = mesh.degree_of(Axis::pp), ranks = mesh.size() / stages;
  return of_groups(mesh, ranks, mesh.stride_of(Axis::pp) == ranks ? 1 : stages);
}

const GroupNetwork& NetworkCache::stages(const DeviceMesh& mesh, int from_stage, int to_stage) {
  const std::array key{mesh.size(), mesh.degree_of(Axis::pp), mesh.stride_of(Axis::pp), from_stage, to_stage};
  const auto [entry, added] = stages_.try_emplace(key);
  if (added) entry->second = stage_network(*cluster_, mesh, from_stage, to_stage);
  return entry->second;
}

namespace {

// What a device sustains: what it reaches, unless less is known.
template <typename Rate>
Rate known(Rate sustained, Rate reached) {
  return sustained.value > 0.0 ? sustained : reached;
}

// In everything as slow as the slower of two.
DeviceRates slower(const DeviceRates& a, const DeviceRates& b) {
  const auto share_of = [](const DeviceRates& rates) {
    return rates.sustained_share > 0.0 ? rates.sustained_share : 1.0;
  };
  return {.active = a.active,
          .matrix_fp32 = std::min(a.matrix_fp32, b.matrix_fp32),
          .matrix_half = std::min(a.matrix_half, b.matrix_half),
          .matrix_tf32 = std::min(a.matrix_tf32, b.matrix_tf32),
          .matrix_fp8 = std::min(a.matrix_fp8, b.matrix_fp8),
          .vector = std::min(a.vector, b.vector),
          .memory = std::min(a.memory, b.memory),
          .sustained_half = std::min(known(a.sustained_half, a.matrix_half), known(b.sustained_half, b.matrix_half)),
          .sustained_weights =
              std::min(known(a.sustained_weights, a.matrix_half), known(b.sustained_weights, b.matrix_half)),
          .sustained_fp8 = std::min(known(a.sustained_fp8, a.matrix_fp8), known(b.sustained_fp8, b.matrix_fp8)),
          .sustained_fp8_weights =
              std::min(known(a.sustained_fp8_weights, a.matrix_fp8), known(b.sustained_fp8_weights, b.matrix_fp8)),
          .sustained_memory = std::min(known(a.sustained_memory, a.memory), known(b.sustained_memory, b.memory)),
          .sustained_share = std::min(share_of(a), share_of(b)),
          // 0, a share of the slower one's products, unless both are known.
          .attention = std::min(a.attention, b.attention),
          .attention_gradient = std::min(a.attention_gradient, b.attention_gradient),
          .unaligned_two_bytes = known(std::min(a.unaligned_two_bytes, b.unaligned_two_bytes),
                                       std::max(a.unaligned_two_bytes, b.unaligned_two_bytes)),
          .unaligned_four_bytes = known(std::min(a.unaligned_four_bytes, b.unaligned_four_bytes),
                                        std::max(a.unaligned_four_bytes, b.unaligned_four_bytes)),
          .origins = less_sure(a.origins, b.origins)};
}

// The rates with those of the attention that an engine has on the device: kernels for such GPUs, or
// for Ampere where they are newer than its own, or Triton's.
DeviceRates with_attention_of(const Engine& engine, const DeviceKind& device, DeviceRates rates) {
  const auto use = [&](Rate forward, FlopsPerSecond of_forward, Rate backward, FlopsPerSecond of_backward) {
    rates.attention = of_forward;
    rates.attention_gradient = of_backward;
    rates.origins[Rate::attention] = rates.origins[forward];
    rates.origins[Rate::attention_gradient] = rates.origins[backward];
  };
  if (engine.triton_attention) {
    use(Rate::triton_attention, rates.triton_attention, Rate::triton_attention_gradient,
        rates.triton_attention_gradient);
    return rates;
  }
  const int capability = compute_capability_of(device.name).value_or(0);
  // parplan's own kernels are for Ampere (docs/gpu.md): on an H200, forward reached 348 TFLOP/s
  // where PyTorch's FlashAttention-2 reached 332, and backward, with seven products instead of
  // five, 231 (5/7 of 279: 199).
  constexpr int own_kernels = 80;
  constexpr double own_gradient = 5.0 / 7.0;
  if (is_own(engine) && capability > own_kernels) {
    use(Rate::ampere_attention, rates.ampere_attention, Rate::ampere_attention_gradient,
        rates.ampere_attention_gradient * own_gradient);
    Origin& origin = rates.origins[Rate::attention_gradient];
    origin = std::max(origin, Origin::interpolated);
    return rates;
  }
  if (engine.attention_up_to == 0 || capability == 0) {
    rates.attention = rates.attention_gradient = {};
  } else if (capability > engine.attention_up_to) {
    use(Rate::ampere_attention, rates.ampere_attention, Rate::ampere_attention_gradient,
        rates.ampere_attention_gradient);
  }
  return rates;
}

// The rates with those of the products that an engine's library has on the device.
DeviceRates with_products_of(const Engine& engine, DeviceRates rates) {
  if (!engine.early_cublas) return rates;
  const auto use = [&](Rate as, FlopsPerSecond DeviceRates::*rate, Rate early, FlopsPerSecond of_early) {
    if (of_early.value <= 0.0) return;
    rates.*rate = of_early;
    rates.origins[as] = rates.origins[early];
  };
  use(Rate::sustained_half, &DeviceRates::sustained_half, Rate::early_half, rates.early_half);
  use(Rate::sustained_weights, &DeviceRates::sustained_weights, Rate::early_weights, rates.early_weights);
  return rates;
}

std::optional<HostShare> slower(const std::optional<HostShare>& a, const std::optional<HostShare>& b) {
  if (!a || !b) return std::nullopt;
  return HostShare{.link = std::min(a->link, b->link),
                   .latency = std::max(a->latency, b->latency),
                   .memory_bandwidth = std::min(a->memory_bandwidth, b->memory_bandwidth)};
}

std::optional<NvmeShare> slower(const std::optional<NvmeShare>& a, const std::optional<NvmeShare>& b) {
  if (!a || !b) return std::nullopt;
  return NvmeShare{.read = std::min(a->read, b->read),
                   .write = std::min(a->write, b->write),
                   .latency = std::max(a->latency, b->latency)};
}

DeviceKind slower(const DeviceKind& a, const DeviceKind& b) {
  if (a == b) return a;
  DeviceKind both = a;
  both.name = a.name + "+" + b.name;
  if (both.joins.empty()) both.joins = {a.name};
  both.joins.push_back(b.name);
  both.title = a.title + " and " + b.title;
  both.memory_capacity = std::min(a.memory_capacity, b.memory_capacity);
  both.memory_overhead = std::max(a.memory_overhead, b.memory_overhead);
  both.peak_fp32 = std::min(a.peak_fp32, b.peak_fp32);
  both.peak_half = std::min(a.peak_half, b.peak_half);
  both.peak_tf32 = std::min(a.peak_tf32, b.peak_tf32);
  both.peak_fp8 = std::min(a.peak_fp8, b.peak_fp8);
  std::erase_if(both.half_types,
                [&](DataType half) { return std::ranges::find(b.half_types, half) == b.half_types.end(); });
  both.kernel_launch = std::max(a.kernel_launch, b.kernel_launch);
  both.multiprocessors = std::min(a.multiprocessors, b.multiprocessors);
  both.overlaps_communication = a.overlaps_communication && b.overlaps_communication;
  both.measured.reset();  // fits of one do not hold for the other: rates stand for both
  return both;
}

}  // namespace

const NetworkCache::StageDevice& NetworkCache::device(const DeviceMesh& mesh, int stage) {
  return device_of(mesh, groups_of_stage(*cluster_, mesh, stage));
}

const NetworkCache::StageDevice& NetworkCache::device(const DeviceMesh& mesh, int stage, int replica) {
  return device_of(mesh, groups_of_stage(*cluster_, mesh, stage, replica));
}

const NetworkCache::StageDevice& NetworkCache::device_of(const DeviceMesh& mesh, std::uint64_t groups) {
  int most_active = 0;  // in a node
  for (const NodeGroup& group : cluster_->groups)
    most_active = std::max(most_active, std::min(mesh.size(), group.devices_per_node()));
  const auto [entry, added] = devices_.try_emplace({groups, most_active});
  StageDevice& result = entry->second;
  if (!added) return result;
  for (std::size_t g = 0; g < cluster_->groups.size(); ++g) {
    if ((groups >> g & 1u) == 0) continue;
    const NodeGroup& group = cluster_->groups[g];
    const DeviceRates rates = with_attention_of(
        engine_, group.device,
        with_products_of(engine_, rates_at(group.device, std::min(mesh.size(), group.devices_per_node()))));
    result.rates = result.device ? slower(result.rates, rates) : rates;
    const std::optional<HostShare> host = host_share(group, std::min(mesh.size(), group.devices_per_node()));
    result.host = result.device ? slower(result.host, host) : host;
    const std::optional<NvmeShare> nvme = nvme_share(group, std::min(mesh.size(), group.devices_per_node()));
    result.nvme = result.device ? slower(result.nvme, nvme) : nvme;
    result.device =
        std::make_shared<const DeviceKind>(result.device ? slower(*result.device, group.device) : group.device);
  }
  return result;
}

CostModel kernel_model(std::shared_ptr<const DeviceKind> device, const DeviceRates& rates, const Engine& engine) {
  const Execution execution = execution_of(*device, engine);
  const Seconds of_host = host_per_op(*device, engine);
  return {.device = std::move(device),
          .rates = rates,
          .execution = execution,
          .host_per_op = of_host,
          .blocks_launches = engine.blocks_launches,
          .fills_outputs = engine.fills_outputs,
          .lists_updates = engine.lists_updates,
          .networks = {}};
}

namespace {

CostModel model_of(NetworkCache& networks, const DeviceMesh& mesh, int rank, const NetworkCache::StageDevice& device) {
  const int ranks = mesh.degree_of(Axis::pp);
  PARPLAN_ASSERT(rank >= 0 && rank < ranks, fmt::format("rank {} of {}", rank, ranks));
  CostModel model = kernel_model(device.device, device.rates, networks.engine());
  model.host = device.host;
  model.nvme = device.nvme;
  const auto set = [&](GroupKey group, const GroupNetwork& network) { model.networks[group] = network; };
  for (const Axis axis : mesh.order) set(all_along(axis), networks.group(mesh, axis));
  if (mesh.degree_of(Axis::cp) > 1) set(all_along(Axis::cp), networks.group(mesh, Axis::cp));
  if (mesh.cp_ulysses > 1) set_context_groups(networks.exchange(mesh), networks.keys(mesh), model.networks);
  if (mesh.dp_shard > 0) {
    set(shard_group(mesh), networks.shard(mesh));
    set(shard_replicas, networks.replicas(mesh));
  }
  if (networks.engine().scale_history > 0) set(ranks_of_stage(mesh), networks.stage(mesh));
  // Any divisor may be how many ranks hold copies of the same key/value heads; all of them see the
  // axis's own network.
  for (int size = 2; 2 * size <= mesh.degree.tp; ++size)
    if (mesh.degree.tp % size == 0) set(holders_of_copies(size), networks.copies(mesh, size));
  if (ranks == 1) return model;
  set(tied_stages, networks.stages(mesh, 0, ranks - 1));
  set(next_stage, networks.stages(mesh, rank, (rank + 1) % ranks));
  set(previous_stage, networks.stages(mesh, rank, (rank + ranks - 1) % ranks));
  model.networks[previous_stage_on_return] = model.networks[next_stage];
  model.networks[next_stage_on_return] = model.networks[previous_stage];
  return model;
}

}  // namespace

CostModel cost_model(NetworkCache& networks, const DeviceMesh& mesh, int rank) {
  return model_of(networks, mesh, rank, networks.device(mesh, rank));
}

CostModel cost_model(NetworkCache& networks, const ParallelSpec& spec, int rank, int replica) {
  return spec.replica_micro_batches.empty()
             ? cost_model(networks, spec.mesh, rank)
             : model_of(networks, spec.mesh, rank, networks.device(spec.mesh, rank, replica));
}

CostModel cost_model(const Cluster& cluster, const DeviceMesh& mesh, int rank) {
  NetworkCache networks(cluster);
  return cost_model(networks, mesh, rank);
}

std::vector<CostModel> cost_models(NetworkCache& networks, const ParallelSpec& spec) {
  std::vector<CostModel> models;
  for (const int replica : unlike_replicas(networks.cluster(), spec))
    for (int rank = 0; rank < spec.pp(); ++rank) models.push_back(cost_model(networks, spec, rank, replica));
  return models;
}

Bytes communicated_bytes(const Instruction& instruction) {
  std::int64_t bytes = 0;
  for (const Operand& operand : instruction.operands) bytes = std::max(bytes, operand.bytes);
  return Bytes(bytes);
}

namespace {

// What filling the results of a product or of attention takes before, each by a kernel of its own;
// those of other kernels are not allocated by torch.empty.
Seconds filling_time(const Instruction& kernel, const CostModel& model) {
  Seconds time;
  if (!model.fills_outputs || kernel.kind != InstructionKind::kernel || kernel.home != Home::device ||
      !needs_multiprocessors(kernel))
    return time;
  for (const Operand& operand : kernel.operands)
    if (operand.access == Access::write)
      time += model.device->kernel_launch + Bytes(operand.bytes) / model.rates.memory;
  return time;
}

Seconds time_of(const Instruction& instruction, const CostModel& model) {
  if (instruction.kind == InstructionKind::copy && is_of_file(instruction.stream))
    return file_time(instruction.stream, communicated_bytes(instruction), model.nvme);
  if (instruction.kind == InstructionKind::copy)
    return host_copy_time(communicated_bytes(instruction), *model.device, model.rates, model.host);
  if (communicates(instruction.kind))
    return collective_time(instruction.kind, communicated_bytes(instruction), model.network(instruction.group),
                           model.device->backend);
  if (instruction.home == Home::host) return host_kernel_time(instruction, *model.device, model.rates, model.host);
  return kernel_time(instruction.op, instruction.shape, instruction.type, *model.device, model.rates);
}

}  // namespace

int launches(const Instruction& instruction) {
  return instruction.kind == InstructionKind::kernel ? launches(instruction.op, instruction.shape) : 1;
}

double submissions(const Instruction& instruction, bool lists_updates) {
  const bool is_listed = lists_updates && instruction.kind == InstructionKind::kernel &&
                         instruction.home == Home::device && row_of(instruction.op).listed &&
                         instruction.label == Label::optimizer && !instruction.shape.stepwise;
  // NVIDIA/apex csrc/multi_tensor_apply.cuh, and DeepSpeed's and PyTorch's after it: a launch has
  // at most 320 blocks, each with 65,536 elements (2048 * 32) of one tensor.
  constexpr double elements_of_launch = 320.0 * 65536.0;
  return is_listed ? static_cast<double>(instruction.shape.rows) / elements_of_launch : launches(instruction);
}

Seconds duration(const Instruction& instruction, const CostModel& model) {
  const Seconds time = time_of(instruction, model) + filling_time(instruction, model);
  return model.blocks_launches ? time + model.host_per_op * submissions(instruction, model.lists_updates) : time;
}

TimeByOrigin kernel_time_by_origin(const Instruction& instruction, const CostModel& model) {
  if (instruction.kind != InstructionKind::kernel) return {};
  if (instruction.home != Home::host || !is_accelerator(model.device->backend)) {
    TimeByOrigin times =
        kernel_time_by_origin(instruction.op, instruction.shape, instruction.type, *model.device, model.rates);
    times[model.rates.origins[Rate::memory]] += filling_time(instruction, model);
    return times;
  }
  TimeByOrigin times;  // a share of the datasheet's (host_update_share)
  times[Origin::datasheet] = time_of(instruction, model);
  return times;
}

TimeByCommunicationOrigin communication_time_by_origin(const Instruction& instruction, const CostModel& model) {
  TimeByCommunicationOrigin times;
  if (!communicates(instruction.kind) || instruction.kind == InstructionKind::send) return times;
  const GroupNetwork& network = model.network(instruction.group);
  if (network.ranks > 1)
    times[communication_origin(instruction.kind, communicated_bytes(instruction), network, model.device->backend)] =
        time_of(instruction, model);
  return times;
}

}  // namespace parplan
