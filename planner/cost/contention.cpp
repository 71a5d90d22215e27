#include "planner/cost/contention.h"

#include <cstdint>

#include "planner/cluster/communicators.h"
#include "planner/cost/ring.h"
#include "planner/graph/op_kind.h"

namespace parplan {
namespace {

// Channels that NCCL gives a collective: all, as long as each of their threads has 64 bytes
// (NVIDIA/nccl at 5067397c, src/enqueue.cc:2093 with NCCL_SIMPLE_THREAD_THRESHOLD and 512 threads a
// channel).
int channels_of(Bytes bytes, const GroupNetwork& network, bool nvlink) {
  constexpr std::int64_t of_a_channel = std::int64_t{64} * 512;
  const std::int64_t most = collective_channels(nvlink, network.ranks / network.nodes, network.nodes == 1);
  return static_cast<int>(std::clamp<std::int64_t>(bytes.count / of_a_channel, 1, most));
}

}  // namespace

// A ring over nodes leaves each of them once; other communication is taken to be on its slowest
// link all the time.
BoundTimes time_on_links(InstructionKind kind, Bytes bytes, Seconds duration, const GroupNetwork& network) {
  if (network.ranks <= 1 || (network.nodes == 1 && network.nvlink)) return {};
  const bool is_transfer = kind == InstructionKind::send || kind == InstructionKind::receive;
  const bool is_ring = !is_transfer && kind != InstructionKind::all_to_all;
  const BytesPerSecond link = is_ring && network.nodes > 1 ? network.uplink_bandwidth : network.ring_bandwidth;
  if (link.value <= 0.0) return {};
  const Seconds carried = std::min(duration, (is_transfer ? 1.0 : sent_share(kind, network.ranks)) * (bytes / link));
  return network.nodes > 1 ? BoundTimes{.nics = carried} : BoundTimes{.host_links = carried};
}

BoundTimes time_on_links(const Instruction& instruction, Seconds duration, const CostModel& model) {
  if (!is_accelerator(model.device->backend)) return {};
  if (instruction.stream == Stream::to_host || instruction.stream == Stream::from_host)
    return {.host_links = duration};
  if (!communicates(instruction.kind)) return {};
  return time_on_links(instruction.kind, communicated_bytes(instruction), duration, model.network(instruction.group));
}

Contention contention(InstructionKind kind, Bytes bytes, Seconds duration, const GroupNetwork& network,
                      const DeviceKind& device, const DeviceRates& rates) {
  if (!is_accelerator(device.backend) || network.ranks <= 1 || duration <= Seconds(0.0)) return {};
  const BytesPerSecond memory = rates.sustained_memory.value > 0.0 ? rates.sustained_memory : rates.memory;
  Contention taken{.memory = 2.0 * sent_share(kind, network.ranks) * ((bytes / memory) / duration)};
  const int channels = channels_of(bytes, network, device.nvlinks > 0);
  if (device.multiprocessors > 0) taken.multiprocessors = static_cast<double>(channels) / device.multiprocessors;
  const BoundTimes links = time_on_links(kind, bytes, duration, network);
  taken.nics = links.nics / duration;
  taken.host_links = links.host_links / duration;
  return taken;
}

Contention contention(const Instruction& instruction, Seconds duration, const CostModel& model) {
  if (!communicates(instruction.kind)) return {};
  if (instruction.kind == InstructionKind::send || instruction.kind == InstructionKind::receive) return {};
  if (model.execution.stream_of(instruction.stream) == model.execution.stream_of(Stream::compute)) return {};
  return contention(instruction.kind, communicated_bytes(instruction), duration, model.network(instruction.group),
                    *model.device, model.rates);
}

bool needs_multiprocessors(const Instruction& instruction) {
  const CostClass cost = row_of(instruction.op).cost;
  return cost == CostClass::product || cost == CostClass::attention;
}

}  // namespace parplan
