#include "planner/cost/kernel.h"

#include <doctest/doctest.h>

#include "tests/planner/cost/unit_model.h"

namespace parplan {
namespace {

const OpShape product = {.rows = 2, .columns = 3, .inner = 5};  // 2 * 2 * 3 * 5 = 60 FLOP

TEST_CASE("a product that computes longer than it reads takes flops over rate") {
  const DeviceKind device = unit_device(BackendKind::cuda);
  CHECK(kernel_time(OpKind::linear, product, DataType::fp32, device, device.rates[0]) == Seconds(60.0));
}

TEST_CASE("half precision runs at its own rate, and at fp32's where it has none") {
  const DeviceKind device = unit_device(BackendKind::cuda);
  DeviceRates rates = device.rates[0];
  CHECK(kernel_time(OpKind::linear, product, DataType::bf16, device, rates) == Seconds(30.0));  // 60 / 2
  rates.matrix_half = FlopsPerSecond(0.0);
  CHECK(kernel_time(OpKind::linear, product, DataType::bf16, device, rates) == Seconds(60.0));
}

TEST_CASE("a kernel that reads longer than it computes takes bytes over memory rate") {
  const DeviceKind device = unit_device(BackendKind::cuda);
  DeviceRates rates = device.rates[0];
  rates.matrix_fp32 = FlopsPerSecond(1e30);
  rates.memory = BytesPerSecond(2.0);
  // x 2x5, weight 3x5, y 2x3: 31 numbers of 4 bytes, at 2 B/s.
  CHECK(kernel_time(OpKind::linear, product, DataType::fp32, device, rates) == Seconds(62.0));
}

TEST_CASE("the launch floor is paid by every kernel") {
  DeviceKind device = unit_device(BackendKind::cuda);
  device.kernel_launch = Seconds(7.0);
  CHECK(kernel_time(OpKind::linear, product, DataType::fp32, device, device.rates[0]) == Seconds(67.0));
}

TEST_CASE("arithmetic outside matrix units runs at the vector rate") {
  const DeviceKind device = unit_device(BackendKind::cuda);
  DeviceRates rates = device.rates[0];
  rates.matrix_fp32 = FlopsPerSecond(1e30);
  const OpShape shape = {.rows = 4, .columns = 8, .second = true};
  const OpWork work = row_of(OpKind::add).work(shape, DataType::fp32);
  REQUIRE_FALSE(work.matrix);
  CHECK(kernel_time(OpKind::add, shape, DataType::fp32, device, rates) == Seconds(work.flops.value));
}

TEST_CASE("loading tokens costs a launch on a GPU and nothing on a CPU") {
  for (const OpKind op : {OpKind::load_tokens, OpKind::load_targets}) {
    DeviceKind gpu = unit_device(BackendKind::cuda);
    gpu.kernel_launch = Seconds(7.0);
    CHECK(kernel_time(op, {.rows = 100}, DataType::fp32, gpu, gpu.rates[0]) == Seconds(7.0));
    DeviceKind cpu = unit_device(BackendKind::cpu);
    cpu.kernel_launch = Seconds(7.0);
    CHECK(kernel_time(op, {.rows = 100}, DataType::fp32, cpu, cpu.rates[0]) == Seconds(0.0));
  }
}

TEST_CASE("every op kind has a finite time that does not fall when the device slows down") {
  const DeviceKind device = unit_device(BackendKind::cuda);
  DeviceRates slow = device.rates[0];
  slow.matrix_fp32 *= 0.5;
  slow.vector *= 0.5;
  slow.memory *= 0.5;
  const OpShape shape = {.rows = 4, .columns = 8, .inner = 8, .sequence = 4, .batch = 1, .heads = 2, .kv_heads = 2,
                         .head_dim = 4, .valid = 8};
  for (const OpRow& row : op_rows()) {
    CAPTURE(row.name);
    const Seconds time = kernel_time(row.kind, shape, DataType::fp32, device, device.rates[0]);
    CHECK(time >= Seconds(0.0));
    CHECK(time < Seconds(1e9));
    CHECK(kernel_time(row.kind, shape, DataType::fp32, device, slow) >= time);
  }
}

}  // namespace
}  // namespace parplan
