#include "planner/search/device_count_bound.h"

#include <algorithm>

#include "planner/cluster/mesh.h"
#include "planner/cluster/price_and_power.h"
#include "planner/cost/kernel_time.h"
#include "planner/program/memory.h"
#include "planner/program/orthogonalize.h"

namespace parplan {
namespace {

double product_flops(const OpGraph& graph) {
  double flops = 0.0;
  for (const Block& block : graph.blocks) flops += product_flops(graph, block);
  return flops;
}

}  // namespace

double product_flops(const OpGraph& graph, const Block& block) {
  const std::vector<bool> needs = needs_gradient(graph, block);
  double flops = 0.0;
  for (int i = block.first_op; i < block.last_op; ++i) {
    const Op& op = graph.ops[i];
    if (row_of(op.kind).cost != CostClass::product) continue;
    const ModelProducts products = model_products(graph, op);
    flops += product_passes(needs, op) * 2.0 * products.pairs * products.multiply_adds;
  }
  return flops;
}

DeviceCountBound::DeviceCountBound(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                                   const StateHomes& homes)
    : cluster_(cluster),
      precision_(stated_precision(training)),
      flops_(product_flops(graph) * static_cast<double>(training.global_batch)) {
  const std::int64_t trained = trained_parameter_count(graph);
  // Sharded parameters may take less.
  const DataShards shards{.parameters = training.engine.casts_shards};
  const BucketSizes all[] = {{.elements = trained,
                              .shards = shards,
                              .homes = homes,
                              .without_second = orthogonalized_elements(graph, training)},
                             {.elements = parameter_count(graph) - trained, .frozen = true, .homes = homes}};
  const MemoryUse use = rank_memory({.buckets = all, .saved = {}}, training);
  // Shards of one bucket may be rounded up less often than this bucket was.
  state_ = std::max(use.parameters + use.gradients + use.optimizer - Bytes(8 * buffer_alignment), Bytes(0));
}

Seconds DeviceCountBound::time(int devices) const {
  double rate = 0.0;
  for (std::size_t g = 0; g < cluster_.groups.size(); ++g) {
    const FlopsPerSecond fastest = fastest_product(precision_, cluster_.groups[g].device);
    if (fastest.value <= 0.0) return Seconds(0.0);
    rate += fastest.value * devices_of_group(cluster_, g, devices);
  }
  return Seconds(flops_ / rate);
}

Bytes DeviceCountBound::memory(int devices, double others) const {
  double all = 0.0;
  Bytes least = cluster_.groups.front().device.memory_capacity;
  for (std::size_t g = 0; g < cluster_.groups.size(); ++g) {
    const int taken = devices_of_group(cluster_, g, devices);
    if (taken == 0) continue;
    least = std::min(least, cluster_.groups[g].device.memory_capacity);
    all += static_cast<double>(taken) * static_cast<double>(cluster_.groups[g].device.memory_capacity.count);
  }
  const double used = static_cast<double>(state_.count) + others +
                      static_cast<double>(devices) * static_cast<double>(memory_overhead(cluster_, devices).count);
  // Rounded down, with allowance for the rounding of the quotients.
  return Bytes(static_cast<std::int64_t>(used / all * static_cast<double>(least.count) * (1.0 - 1e-12)));
}

bool DeviceCountBound::lacks_room(int devices, double others) const {
  std::int64_t room = 0;
  const Bytes overhead = memory_overhead(cluster_, devices);
  for (std::size_t g = 0; g < cluster_.groups.size(); ++g)
    room += devices_of_group(cluster_, g, devices) *
            std::max<std::int64_t>((usable_memory(cluster_.groups[g].device.memory_capacity, cluster_.memory_headroom) -
                                    overhead)
                                       .count,
                                   0);
  return static_cast<double>(state_.count) + others * (1.0 - 1e-12) > static_cast<double>(room);
}

}  // namespace parplan
