#include "planner/cost/contention.h"

#include <doctest/doctest.h>

#include "planner/program/bucket_work.h"
#include "tests/planner/cost/unit_model.h"

namespace parplan {
namespace {

using doctest::Approx;

// A GPU of 100 multiprocessors whose memory moves 4 B/s, in a group along the data axis.
CostModel beside(const GroupNetwork& network) {
  DeviceKind device = unit_device(BackendKind::cuda);
  device.multiprocessors = 100;
  device.nvlinks = 12;
  device.rates.front().memory = BytesPerSecond(4.0);
  CostModel model;
  model.rates = device.rates.front();
  model.device = std::make_shared<const DeviceKind>(device);
  model.networks[all_along(Axis::dp)] = network;
  return model;
}

Instruction communication(InstructionKind kind, std::int64_t bytes) {
  Instruction instruction;
  instruction.kind = kind;
  instruction.group = all_along(Axis::dp);
  instruction.stream = stream_of(kind, instruction.group);
  instruction.operands = {{.bytes = bytes, .access = Access::update}};
  return instruction;
}

// The least size that fills a channel: 64 bytes of each of 512 threads.
constexpr std::int64_t channel = 64 * 512;

TEST_CASE("a collective holds a multiprocessor for each channel, and moves what it sends and receives") {
  const CostModel model = beside(unit_network(8));
  const std::int64_t bytes = 100 * channel;
  const Contention taken =
      contention(communication(InstructionKind::all_gather, bytes), Seconds(static_cast<double>(bytes)), model);
  CHECK(taken.multiprocessors == 24.0 / 100.0);
  CHECK(taken.memory == Approx(2.0 * 7.0 / 8.0 / 4.0));  // 7/8 B/s out and in, of 4
  const Contention all =
      contention(communication(InstructionKind::all_reduce_sum, bytes), Seconds(static_cast<double>(bytes)), model);
  CHECK(all.multiprocessors == taken.multiprocessors);
  CHECK(all.memory == Approx(2.0 * taken.memory));
}

TEST_CASE("small collectives have fewer channels, and groups over nodes two for each of their NICs") {
  const auto channels = [](const GroupNetwork& network, std::int64_t bytes) {
    const Instruction gather = communication(InstructionKind::all_gather, bytes);
    return contention(gather, Seconds(1.0), beside(network)).multiprocessors * 100.0;
  };
  CHECK(channels(unit_network(8), 3 * channel) == Approx(3.0));
  CHECK(channels(unit_network(8), 1) == Approx(1.0));
  CHECK(channels(unit_network(16, 2), 1000 * channel) == Approx(16.0));
  CHECK(channels(unit_network(2, 2), 1000 * channel) == Approx(2.0));
}

TEST_CASE("kernels, transfers, ranks of one core, lone ranks and what is in line with kernels take nothing") {
  const Instruction gather = communication(InstructionKind::all_gather, 1000 * channel);
  CostModel model = beside(unit_network(2));
  REQUIRE(contention(gather, Seconds(1.0), model).takes_any());
  const Instruction send = communication(InstructionKind::send, 1000 * channel);
  CHECK(!contention(send, Seconds(1.0), model).takes_any());
  const Instruction kernel = flat_kernel(OpKind::adamw, 100, Stream::compute, Label::optimizer, DataType::bf16);
  CHECK(!contention(kernel, Seconds(1.0), model).takes_any());
  CHECK(!contention(gather, Seconds(1.0), beside(unit_network(1))).takes_any());
  model.execution = execution_of(*model.device, {.name = "other", .overlaps_data = false});
  CHECK(!contention(gather, Seconds(1.0), model).takes_any());
  CostModel core = beside(unit_network(2));
  core.device = std::make_shared<const DeviceKind>(unit_device(BackendKind::cpu));
  CHECK(!contention(gather, Seconds(1.0), core).takes_any());
}

TEST_CASE("products and attention are slowed by multiprocessors held, others by memory moved") {
  const Contention half{.multiprocessors = 0.5, .memory = 0.2};
  CHECK(slowed_by({.multiprocessors = Seconds(3.0), .memory = {}}, half).value == Approx(3.0));
  CHECK(slowed_by({.multiprocessors = {}, .memory = Seconds(4.0)}, half).value == Approx(1.0));
  // A quarter is always left.
  CHECK(slowed_by({.multiprocessors = Seconds(1.0), .memory = {}}, half + half).value == Approx(3.0));
  Instruction product;
  product.op = OpKind::linear_weight_gradient;
  CHECK(needs_multiprocessors(product));
  product.op = OpKind::attention_gradient;
  CHECK(needs_multiprocessors(product));
  product.op = OpKind::layer_norm;
  CHECK(!needs_multiprocessors(product));
}

TEST_CASE("links carry what a group moves: NICs between nodes, ways to the host where nothing else joins devices") {
  GroupNetwork network = unit_network(8, 2);
  network.uplink_bandwidth = BytesPerSecond(4.0);
  const auto on = [&](InstructionKind kind, double duration) {
    return time_on_links(communication(kind, 80), Seconds(duration), beside(network));
  };
  CHECK(on(InstructionKind::all_gather, 1000.0).nics.value == Approx(80.0 * 7.0 / 8.0 / 4.0));
  CHECK(on(InstructionKind::all_reduce_sum, 1000.0).nics.value == Approx(2.0 * 80.0 * 7.0 / 8.0 / 4.0));
  CHECK(on(InstructionKind::all_gather, 3.0).nics == Seconds(3.0));  // no longer than it takes
  CHECK(on(InstructionKind::all_gather, 1000.0).host_links == Seconds(0.0));
  CHECK(contention(communication(InstructionKind::all_gather, 80), Seconds(35.0), beside(network)).nics ==
        Approx(0.5));
  network = unit_network(2, 2);
  CHECK(on(InstructionKind::send, 1000.0).nics == Seconds(80.0));
  network = unit_network(2);
  CHECK(!on(InstructionKind::send, 1000.0).is_communication());
  network.nvlink = false;
  CHECK(on(InstructionKind::all_gather, 1000.0).host_links == Seconds(40.0));
  Instruction copy;
  copy.kind = InstructionKind::copy;
  copy.stream = Stream::to_host;
  CHECK(time_on_links(copy, Seconds(5.0), beside(network)).host_links == Seconds(5.0));
  // Half of a link is left.
  CHECK(slowed_by({.nics = Seconds(3.0)}, {.nics = 0.9}).value == Approx(3.0));
  CHECK(slowed_by({.host_links = Seconds(3.0)}, {.host_links = 0.25}).value == Approx(1.0));
  CHECK(slowed_by({.nics = Seconds(3.0)}, {.host_links = 1.0}) == Seconds(0.0));
}

}  // namespace
}  // namespace parplan
