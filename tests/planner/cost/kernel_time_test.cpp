#include "planner/cost/kernel_time.h"

#include <doctest/doctest.h>

#include <algorithm>

#include "planner/base/file.h"
#include "planner/cluster/find_cluster.h"

#include "tests/planner/cost/unit_model.h"

namespace parplan {
namespace {

const OpShape product = {.rows = 2, .columns = 3, .inner = 5};  // 2 * 2 * 3 * 5 = 60 FLOP

TEST_CASE("a product that computes longer than it reads takes flops over rate") {
  const DeviceKind device = unit_device(BackendKind::cuda);
  CHECK(kernel_time(OpKind::linear, product, DataType::fp32, device, device.rates[0]) == Seconds(60.0));
}

TEST_CASE("products in tf32 run at their own rate, at fp32's where a device has none, and all else as in fp32") {
  const DeviceKind device = unit_device(BackendKind::cpu);
  DeviceRates rates = device.rates[0];
  CHECK(kernel_time(OpKind::linear, product, DataType::tf32, device, rates) == Seconds(60.0));
  rates.matrix_tf32 = FlopsPerSecond(4.0);
  CHECK(kernel_time(OpKind::linear, product, DataType::tf32, device, rates) == Seconds(15.0));
  CHECK(kernel_time(OpKind::linear, product, DataType::fp32, device, rates) == Seconds(60.0));
  CHECK(kernel_time(OpKind::layer_norm, product, DataType::tf32, device, rates) ==
        kernel_time(OpKind::layer_norm, product, DataType::fp32, device, rates));
}

TEST_CASE("products in fp8 run at their own rate behind the casts of their factors") {
  DeviceKind device = unit_device(BackendKind::cuda);  // a FLOP and a byte a second, 2 FLOP in half precision
  device.kernel_launch = Seconds(1000.0);
  DeviceRates& rates = device.rates[0];
  rates.memory = BytesPerSecond(1.0);
  rates.matrix_fp8 = FlopsPerSecond(16.0);
  OpShape shape{.rows = 16, .columns = 32, .inner = 64, .fp8 = Fp8Casts::each_product};
  const auto time = [&](OpKind op) { return kernel_time(op, shape, DataType::bf16, device, rates).value; };
  const double flops = 2.0 * 16 * 32 * 64, x = 16 * 64, weight = 32 * 64, y = 16 * 32;
  // Two kernels a factor: read, read again and written.
  CHECK(time(OpKind::linear) ==
        doctest::Approx(5 * 1000.0 + std::max(flops / 16, x + weight + 2 * y) + 5 * (x + weight)));
  CHECK(time(OpKind::linear_input_gradient) ==
        doctest::Approx(5 * 1000.0 + std::max(flops / 16, y + weight + 2 * x) + 5 * (y + weight)));
  CHECK(time(OpKind::linear_weight_gradient) ==
        doctest::Approx(5 * 1000.0 + std::max(flops / 16, y + x + 8 * weight) + 5 * (y + x)));
  // One for an input, an op of its own, and one for a gradient, read and written twice.
  shape.fp8 = Fp8Casts::once;
  CHECK(time(OpKind::linear) == doctest::Approx(1000.0 + std::max(flops / 16, x + weight + 2 * y)));
  CHECK(kernel_time(OpKind::quantize, {.rows = 16, .columns = 64}, DataType::bf16, device, rates).value ==
        doctest::Approx(1000.0 + 4 * x));
  CHECK(time(OpKind::linear_input_gradient) ==
        doctest::Approx(2 * 1000.0 + std::max(flops / 16, y + weight + 2 * x) + 4 * y));
  CHECK(time(OpKind::linear_weight_gradient) == doctest::Approx(1000.0 + std::max(flops / 16, y + x + 8 * weight)));
  // One more before the input's gradient, which reads and writes the weight.
  shape.fp8 = Fp8Casts::once_transposed;
  CHECK(time(OpKind::linear) == doctest::Approx(1000.0 + std::max(flops / 16, x + weight + 2 * y)));
  CHECK(time(OpKind::linear_input_gradient) ==
        doctest::Approx(3 * 1000.0 + std::max(flops / 16, y + weight + 2 * x) + 4 * y + 2 * weight));
  CHECK(time(OpKind::linear_weight_gradient) == doctest::Approx(1000.0 + std::max(flops / 16, y + x + 8 * weight)));
  shape.fp8 = Fp8Casts::once;
  // What it sustains, where that is known.
  rates.sustained_fp8 = FlopsPerSecond(8.0);
  rates.sustained_fp8_weights = FlopsPerSecond(2.0);
  CHECK(time(OpKind::linear) == doctest::Approx(1000.0 + flops / 8));
  CHECK(time(OpKind::linear_weight_gradient) == doctest::Approx(1000.0 + flops / 2));
  // Other sizes, other kernels and other devices: as in bf16.
  for (const OpShape& odd : {OpShape{.rows = 16, .columns = 32, .inner = 65, .fp8 = Fp8Casts::once},
                             OpShape{.rows = 16, .columns = 8, .inner = 64, .fp8 = Fp8Casts::each_product}}) {
    OpShape half = odd;
    half.fp8 = Fp8Casts::none;
    for (const OpKind op : {OpKind::linear, OpKind::linear_input_gradient, OpKind::linear_weight_gradient})
      CHECK(kernel_time(op, odd, DataType::bf16, device, rates) ==
            kernel_time(op, half, DataType::bf16, device, rates));
  }
  CHECK(kernel_time(OpKind::layer_norm, shape, DataType::bf16, device, rates) ==
        kernel_time(OpKind::layer_norm, {.rows = 16, .columns = 32, .inner = 64}, DataType::bf16, device, rates));
  // Never faster than the datasheet says of fp8.
  device.peak_fp8 = FlopsPerSecond(0.5);
  CHECK(time(OpKind::linear_weight_gradient) == doctest::Approx(flops / 0.5));
}

TEST_CASE("half precision runs at its own rate, and at fp32's where it has none") {
  const DeviceKind device = unit_device(BackendKind::cuda);
  DeviceRates rates = device.rates[0];
  CHECK(kernel_time(OpKind::linear, product, DataType::bf16, device, rates) == Seconds(30.0));  // 60 / 2
  rates.matrix_half = FlopsPerSecond(0.0);
  CHECK(kernel_time(OpKind::linear, product, DataType::bf16, device, rates) == Seconds(60.0));
  DeviceKind older = unit_device(BackendKind::cuda);
  older.half_types = {DataType::fp16};  // V100
  CHECK(kernel_time(OpKind::linear, product, DataType::fp16, older, older.rates[0]) == Seconds(30.0));
  CHECK(kernel_time(OpKind::linear, product, DataType::bf16, older, older.rates[0]) == Seconds(60.0));
}

TEST_CASE("a kernel that reads longer than it computes takes bytes over memory rate") {
  const DeviceKind device = unit_device(BackendKind::cuda);
  DeviceRates rates = device.rates[0];
  rates.matrix_fp32 = FlopsPerSecond(1e30);
  rates.memory = BytesPerSecond(2.0);
  // x 2x5, weight 3x5, y 2x3: 31 numbers of 4 bytes, at 2 B/s.
  CHECK(kernel_time(OpKind::linear, product, DataType::fp32, device, rates) == Seconds(62.0));
}

TEST_CASE("eager gates, copied keys and rotary positions as complex numbers move what each of their kernels does") {
  DeviceKind device = unit_device(BackendKind::cuda);
  DeviceRates rates = device.rates[0];
  rates.vector = FlopsPerSecond(1e30);
  rates.memory = BytesPerSecond(2.0);
  const auto seconds = [&](OpKind op, OpShape shape, DataType type, bool stepwise) {
    shape.stepwise = stepwise;
    return kernel_time(op, shape, type, device, rates).value;
  };
  // 6 elements of 2 bytes at 2 B/s, read or written by one kernel, or by two (three backward).
  const OpShape gate{.rows = 2, .columns = 3, .activation = ActivationKind::silu};
  CHECK(seconds(OpKind::gate, gate, DataType::bf16, false) == 3 * 6);
  CHECK(seconds(OpKind::activation, gate, DataType::bf16, false) == 2 * 6);
  CHECK(seconds(OpKind::multiply, gate, DataType::bf16, false) == 3 * 6);
  CHECK(seconds(OpKind::gate_gradient, gate, DataType::bf16, false) == 5 * 6);
  CHECK(seconds(OpKind::activation_gradient, gate, DataType::bf16, false) == 3 * 6);
  CHECK(seconds(OpKind::multiply_gradient, gate, DataType::bf16, false) == 2 * 3 * 6);
  // 4 positions of 3 heads of 8 elements: queries, keys and values are copied once and keys and
  // values twice more, backward these once and all three twice.
  const OpShape heads{.sequence = 4, .batch = 1, .heads = 3, .kv_heads = 3, .head_dim = 8};
  const double tensor = 4 * 3 * 8 * 2 / 2.0;
  CHECK(seconds(OpKind::copy_keys, heads, DataType::bf16, false) == 2 * (3 + 2 + 2) * tensor);
  CHECK(seconds(OpKind::copy_keys_gradient, heads, DataType::bf16, false) == 2 * (2 + 3 + 3) * tensor);
  // 2 keys and 2 values of 8 elements read, 6 of each written, or the other way round.
  const OpShape groups{.sequence = 4, .batch = 1, .heads = 6, .kv_heads = 2, .head_dim = 8};
  for (const OpKind op : {OpKind::repeat_keys, OpKind::repeat_keys_gradient})
    CHECK(seconds(op, groups, DataType::bf16, false) == 4 * 8 * 2 * (2 + 6));
  // 4 positions of 2 query heads and one of keys, of 8 elements each: read in 2 bytes, written in
  // 4, read and written in 4, read in 4 and written in 2; in fp32 read and written once.
  const OpShape rotary{.sequence = 4, .batch = 1, .heads = 2, .kv_heads = 1, .head_dim = 8};
  for (const OpKind op : {OpKind::rotary, OpKind::rotary_gradient}) {
    CHECK(seconds(op, rotary, DataType::bf16, true) == 4 * 3 * 8 * (2 + 4 + 4 + 4 + 4 + 2) / 2);
    CHECK(seconds(op, rotary, DataType::fp32, true) == 4 * 3 * 8 * (4 + 4) / 2);
    CHECK(seconds(op, rotary, DataType::bf16, false) == 2 * 4 * 4 * 8 * 2 / 2);  // with the values
  }
}

TEST_CASE("queries, keys and values that are products apart take what three do, and a sum of their gradients") {
  DeviceKind device = unit_device(BackendKind::cuda);
  device.multiprocessors = 4;
  device.kernel_launch = Seconds(0.25);
  const DeviceRates& rates = device.rates[0];
  const auto seconds = [&](OpKind op, const OpShape& shape) {
    return kernel_time(op, shape, DataType::bf16, device, rates).value;
  };
  const auto one_product = [](std::int64_t columns) {
    return OpShape{.rows = 3000, .columns = columns, .inner = 640};
  };
  OpShape apart = one_product(512 + 2 * 128);
  apart.key_columns = 128;
  const double row = 3000 * 640 * 2 / rates.memory.value;
  for (const OpKind op : {OpKind::linear, OpKind::linear_input_gradient, OpKind::linear_weight_gradient})
    for (const bool stepwise : {false, true}) {
      CAPTURE(name(op));
      CAPTURE(stepwise);
      apart.stepwise = stepwise;
      const bool sums = op == OpKind::linear_input_gradient;
      // Read by the norm's kernel, or two kernels that read two tensors and write one.
      const double summing = !sums ? 0.0 : stepwise ? 6 * row + 2 * 0.25 : 2 * row;
      const double three = seconds(op, one_product(512)) + 2 * seconds(op, one_product(128));
      CHECK(seconds(op, apart) == doctest::Approx(three + summing).epsilon(1e-12));
      CHECK(launches(op, apart) == 3 + (sums && stepwise ? 2 : 0));
    }
}

TEST_CASE("a softmax apart moves the scores of each of its kernels, and every step of an op is a launch") {
  DeviceKind device = unit_device(BackendKind::cuda);
  device.kernel_launch = Seconds(1000.0);
  DeviceRates rates = device.rates[0];
  rates.vector = FlopsPerSecond(1e30);
  rates.memory = BytesPerSecond(1.0);
  const auto seconds = [&](OpKind op, const OpShape& shape, DataType type) {
    return kernel_time(op, shape, type, device, rates).value;
  };
  OpShape shape{.rows = 2, .columns = 3};
  const OpKind forward = OpKind::attention_softmax, backward = OpKind::attention_softmax_gradient;
  CHECK(seconds(forward, shape, DataType::fp16) == 1000 + 6 * (2 + 2));
  CHECK(seconds(backward, shape, DataType::fp16) == 1000 + 6 * (2 + 2 + 2));
  // In fp32: times a factor, masked, softmax; backward it reads two tensors, and the mask copies.
  shape.apart = true;
  CHECK(seconds(forward, shape, DataType::fp32) == 3000 + 6 * 3 * (4 + 4));
  CHECK(seconds(backward, shape, DataType::fp32) == 4000 + 6 * ((4 + 4 + 4) + 3 * (4 + 4)));
  shape.in_half = true;  // with two casts
  for (const DataType half : {DataType::fp16, DataType::bf16}) {
    CHECK(seconds(forward, shape, half) == 5000 + 6 * (3 * (4 + 4) + 2 * (2 + 4)));
    CHECK(seconds(backward, shape, half) == 6000 + 6 * ((4 + 4 + 4) + 3 * (4 + 4) + 2 * (2 + 4)));
  }
  // Kinds that may be several kernels move more then, but rotary positions, whose one kernel moves
  // what it leaves as it is, too. Others are several always.
  int in_steps = 0, always = 0;
  for (const OpRow& row : op_rows()) {
    CAPTURE(row.name);
    OpShape one{.rows = 4, .columns = 4, .sequence = 4, .batch = 1, .heads = 2, .kv_heads = 1, .head_dim = 8};
    one.accumulate = true;
    const int least = launches(row.kind, one);
    CHECK(least >= 1);
    always += least > 1 ? 1 : 0;
    one.stepwise = one.weight_decay = one.norm = true;
    const int kernels = launches(row.kind, one);
    if (kernels == least) continue;
    CHECK(kernels > least);
    ++in_steps;
    OpShape fused = one;
    fused.stepwise = false;
    if (row.kind != OpKind::rotary && row.kind != OpKind::rotary_gradient)
      CHECK(row.work(one, DataType::fp16).bytes > row.work(fused, DataType::fp16).bytes);
  }
  CHECK(in_steps == 11);
  CHECK(always == 3);  // attention's weighted sum, the gradient of its scores, and that of a product of two tensors
  CHECK(launches(OpKind::adamw, {.rows = 4, .weight_decay = true, .norm = true, .stepwise = true}) == 9);
  CHECK(launches(OpKind::activation, {.rows = 4, .stepwise = true}) == 8);
}

TEST_CASE("attention that drops elements is slower, backward more than forward, known or not") {
  DeviceKind device = unit_device(BackendKind::cuda);
  device.multiprocessors = 1;
  for (const double known : {0.0, 1.0}) {
    DeviceRates rates = device.rates[0];
    rates.attention = rates.attention_gradient = FlopsPerSecond(known);
    const auto ratio = [&](OpKind op) {
      OpShape shape{.sequence = 4096, .batch = 1, .heads = 1, .kv_heads = 1, .head_dim = 64};
      const double without = kernel_time(op, shape, DataType::bf16, device, rates).value;
      shape.drops = true;
      return kernel_time(op, shape, DataType::bf16, device, rates).value / without;
    };
    CHECK(ratio(OpKind::attention) == doctest::Approx(1.0 / 0.80));
    CHECK(ratio(OpKind::attention_gradient) == doctest::Approx(1.0 / 0.65));
  }
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

TEST_CASE("a kernel's time has the origin of the rate that decides it") {
  DeviceKind device = unit_device(BackendKind::cuda);
  device.kernel_launch = Seconds(7.0);
  DeviceRates& rates = device.rates[0];
  rates.origins[Rate::matrix_fp32] = Origin::measured;
  rates.origins[Rate::matrix_half] = Origin::measured;
  rates.origins[Rate::memory] = Origin::interpolated;
  const auto times = [&](OpKind op, DataType type) {
    return kernel_time_by_origin(op, product, type, device, device.rates[0]).of;
  };
  using Times = std::array<Seconds, 3>;  // measured, interpolated, datasheet
  // 60 FLOP at 1 or 2 FLOP/s, after a launch that is assumed.
  CHECK(times(OpKind::linear, DataType::fp32) == Times{Seconds(60.0), Seconds(0.0), Seconds(7.0)});
  CHECK(times(OpKind::linear, DataType::bf16) == Times{Seconds(30.0), Seconds(0.0), Seconds(7.0)});
  rates.sustained_half = FlopsPerSecond(1.5);
  rates.origins[Rate::sustained_half] = Origin::interpolated;
  CHECK(times(OpKind::linear, DataType::bf16) == Times{Seconds(0.0), Seconds(40.0), Seconds(7.0)});
  CHECK(times(OpKind::load_tokens, DataType::fp32) == Times{Seconds(0.0), Seconds(0.0), Seconds(7.0)});
  // Memory decides: 31 numbers of 4 bytes at 1 B/s.
  rates.memory = BytesPerSecond(1.0);
  CHECK(times(OpKind::linear, DataType::fp32) == Times{Seconds(0.0), Seconds(124.0), Seconds(7.0)});
  rates.origins[Rate::kernel_launch] = Origin::interpolated;
  CHECK(times(OpKind::linear, DataType::fp32) == Times{Seconds(0.0), Seconds(131.0), Seconds(0.0)});
}

TEST_CASE("times by origin sum to the kernel's time, on every device that there is a file of") {
  const std::string folder = std::string(PARPLAN_SOURCE_DIR) + "/configs/devices";
  const ClusterCatalog catalog{folder, ""};
  int measured = 0;
  for (const std::string& name : names_of_yaml_files(folder)) {
    const DeviceKind device = find_device(name, catalog);
    CAPTURE(name);
    for (const DeviceRates& rates : device.rates)
      for (const OpKind op : {OpKind::linear, OpKind::linear_weight_gradient, OpKind::attention, OpKind::layer_norm,
                              OpKind::copy, OpKind::adamw, OpKind::load_tokens})
        for (const DataType type : {DataType::fp32, DataType::bf16, DataType::fp16}) {
          const OpShape shape{.rows = 4096,
                              .columns = 4096,
                              .inner = 4096,
                              .sequence = 512,
                              .batch = 8,
                              .heads = 32,
                              .kv_heads = 32,
                              .head_dim = 128};
          const TimeByOrigin times = kernel_time_by_origin(op, shape, type, device, rates);
          CHECK(times.total().value == doctest::Approx(kernel_time(op, shape, type, device, rates).value));
          measured += times[Origin::datasheet] < times.total() ? 1 : 0;
        }
  }
  CHECK(measured > 0);
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

// 10 multiprocessors, 1 FLOP/s together, and memory that costs nothing.
DeviceKind tiled_device() {
  DeviceKind device = unit_device(BackendKind::cuda);
  device.multiprocessors = 10;
  return device;
}

TEST_CASE("matrix products of a GPU with known multiprocessors pay for whole waves of whole tiles") {
  const DeviceKind device = tiled_device();
  CHECK(kernel_time(OpKind::linear, {.rows = 2560, .columns = 128, .inner = 64}, DataType::fp32, device,
                    device.rates[0]) == Seconds(2.0 * 2560 * 128 * 64));
  CHECK(kernel_time(OpKind::linear, {.rows = 1, .columns = 1, .inner = 1}, DataType::fp32, device, device.rates[0]) ==
        Seconds(10 * 2.0 * 64 * 64 / 0.5));
}

TEST_CASE("products of single heads that do not lie at 16 bytes run on the ordinary cores") {
  DeviceKind device = tiled_device();
  device.rates[0].matrix_half = device.rates[0].matrix_fp32 * 16.0;
  const auto time = [&](OpKind op, std::int64_t head_dim, DataType type) {
    const OpShape shape{.rows = 2560, .sequence = 2560, .batch = 1, .heads = 4, .kv_heads = 4, .head_dim = head_dim};
    return kernel_time(op, shape, type, device, device.rates[0]) /
           Seconds(row_of(op).work(shape, type).flops / device.rates[0].vector);
  };
  for (const OpKind op : {OpKind::attention_scores, OpKind::attention_values, OpKind::attention_values_gradient}) {
    CAPTURE(name(op));
    CHECK(time(op, 100, DataType::fp16) == doctest::Approx(1.0).epsilon(1e-3));
    CHECK(time(op, 104, DataType::fp16) < 0.9);
    CHECK(time(op, 100, DataType::fp32) < 2.0);
  }
}

TEST_CASE("scores with ALiBi are added to biases, which are written and read besides") {
  DeviceKind device = tiled_device();
  device.kernel_launch = Seconds(0.5);
  const OpShape plain{.rows = 256, .sequence = 256, .batch = 2, .heads = 4, .kv_heads = 4, .head_dim = 8};
  OpShape with_alibi = plain;
  with_alibi.alibi = 1.0;
  const auto time = [&](OpKind op, const OpShape& shape) {
    return kernel_time(op, shape, DataType::fp16, device, device.rates[0]);
  };
  const Bytes scores(256 * 256 * 2 * 4 * size_of(DataType::fp16));
  CHECK((time(OpKind::attention_scores, with_alibi) - time(OpKind::attention_scores, plain)).value ==
        doctest::Approx(0.5 + 2.0 * (scores / device.rates[0].memory).value).scale(0.0));
  CHECK(time(OpKind::attention_values, with_alibi) == time(OpKind::attention_values, plain));
}

// What PyTorch runs forward and backward of baddbmm, softmax, bmm, permute and contiguous between a
// split and its gradient, counted by its profiler (torch 2.15: aten::copy_, mul and cat).
TEST_CASE("attention in several kernels copies its result, and scales and joins its gradients") {
  DeviceKind device = tiled_device();
  const OpShape shape{.rows = 256, .sequence = 256, .batch = 2, .heads = 4, .kv_heads = 2, .head_dim = 8};
  const auto without_launches = [&](OpKind op, const OpShape& of) {
    return kernel_time(op, of, DataType::fp16, device, device.rates[0]).value -
           (device.kernel_launch * launches(op, of)).value;
  };
  CHECK(launches(OpKind::attention_scores, shape) == 1);
  CHECK(launches(OpKind::attention_values, shape) == 2);
  CHECK(launches(OpKind::attention_probabilities_gradient, shape) == 1);
  CHECK(launches(OpKind::attention_values_gradient, shape) == 1);
  CHECK(launches(OpKind::attention_scores_gradient, shape) == 5);  // two products, two factors, one tensor
  // A head's width of queries, keys and values, read and written.
  const double width = 2.0 * (Bytes(256 * 2 * 8 * size_of(DataType::fp16)) / device.rates[0].memory).value;
  CHECK(without_launches(OpKind::attention_values, shape) -
            without_launches(OpKind::attention_values_gradient, shape) ==
        doctest::Approx(4 * width).epsilon(1e-6));
  const OpRow& row = row_of(OpKind::attention_scores_gradient);
  REQUIRE(static_cast<bool>(row.beside));
  CHECK(row.beside(shape, DataType::fp16) == Bytes(2 * (4 + 2 + 4 + 2 + 2) * 256 * 2 * 8 * 2));
}

TEST_CASE("a product of two tensors has two gradients, and dropout in a sum's kernel is no kernel") {
  const OpShape shape{.rows = 256, .columns = 64};
  CHECK(launches(OpKind::multiply, shape) == 1);
  CHECK(launches(OpKind::multiply_gradient, shape) == 2);
  OpShape in_sum = shape;
  in_sum.in_sum = true;
  CHECK(launches(OpKind::dropout, shape) == 1);
  CHECK(launches(OpKind::dropout, in_sum) == 0);
  DeviceKind device = tiled_device();
  const auto time = [&](const OpShape& of) {
    return kernel_time(OpKind::dropout, of, DataType::fp16, device, device.rates[0]);
  };
  const Seconds alone = time(shape), within = time(in_sum);
  device.kernel_launch += Seconds(0.5);
  CHECK(time(shape) > alone);
  CHECK(time(in_sum) == within);
}

TEST_CASE("attention of a GPU computes whole blocks, at a share of a product's rate") {
  const DeviceKind device = tiled_device();
  const OpShape shape{.sequence = 129, .batch = 1, .heads = 1, .kv_heads = 1, .head_dim = 2};
  // Two blocks of queries need one and two blocks of keys: 3 * 128 * 128 pairs, 4 * 2 operations
  // each.
  CHECK(kernel_time(OpKind::attention, shape, DataType::fp32, device, device.rates[0]).value ==
        doctest::Approx(3 * 128 * 128 * 8 / 0.6));
  CHECK(kernel_time(OpKind::attention_gradient, shape, DataType::fp32, device, device.rates[0]).value ==
        doctest::Approx(3 * 128 * 128 * 20 / 0.5));
}

TEST_CASE("attention of a GPU with a window computes the blocks that the window reaches") {
  const DeviceKind device = tiled_device();
  for (const std::int64_t sequence : {1, 128, 129, 1000})
    for (const std::int64_t window : {1, 2, 128, 129, 130, 500, 999, 1000, 5000}) {
      double squares = 0.0;  // counted one by one
      for (std::int64_t queries = 0; queries < sequence; queries += 128)
        for (std::int64_t keys = 0; keys <= queries; keys += 128)
          if (window >= sequence || queries - (keys + 127) < window) squares += 1.0;
      const OpShape shape{.sequence = sequence, .batch = 1, .heads = 3, .kv_heads = 1, .head_dim = 2, .window = window};
      CHECK(kernel_time(OpKind::attention, shape, DataType::fp32, device, device.rates[0]).value ==
            doctest::Approx(3 * squares * 128 * 128 * 8 / 0.6));
    }
}

// A fit of a second for the launch, 2 FLOP/s and 1 B/s.
KernelFit fit_of(OpKind kind, DataType type, std::int64_t head_dim = 0) {
  KernelFit fit;
  fit.kind = kind;
  fit.type = type;
  fit.head_dim = head_dim;
  fit.floor = Seconds(1.0);
  if (row_of(kind).work({}, type).matrix) fit.rate = FlopsPerSecond(2.0);
  fit.memory = BytesPerSecond(kind == OpKind::add ? 1.0 : 1e30);
  return fit;
}

DeviceKind measured_device(BackendKind backend, std::vector<KernelFit> fits) {
  DeviceKind device = unit_device(backend);
  device.kernel_launch = Seconds(1000.0);  // for what was not measured
  device.measured = MeasuredKernels{};
  device.measured->fits = std::move(fits);
  return device;
}

TEST_CASE("a kernel that was measured is priced by its fit, another by the device's rates") {
  const DeviceKind device =
      measured_device(BackendKind::cpu, {fit_of(OpKind::linear, DataType::fp32), fit_of(OpKind::add, DataType::fp32)});
  const auto time = [&](OpKind kind, const OpShape& shape) {
    return kernel_time(kind, shape, DataType::fp32, device, device.rates[0]);
  };
  CHECK(time(OpKind::linear, product) == Seconds(1.0 + 30.0));
  CHECK(time(OpKind::linear_gelu, product) == Seconds(1.0 + 30.0));  // it consists of linear
  CHECK(time(OpKind::linear_input_gradient, product) == Seconds(1000.0 + 60.0));
  CHECK(time(OpKind::add, {.rows = 2, .columns = 5, .second = true}) == Seconds(1.0 + 3 * 2 * 5 * 4));
  CHECK(kernel_time(OpKind::linear, product, DataType::bf16, device, device.rates[0]) == Seconds(1000.0 + 30.0));
}

TEST_CASE("moments of 8 bits take an H100, with as many multiprocessors, as long as was measured on an H200") {
  const ClusterCatalog catalog = {PARPLAN_SOURCE_DIR "/configs/devices", PARPLAN_SOURCE_DIR "/configs/clusters"};
  OpShape shape;
  shape.rows = std::int64_t{1} << 30;
  shape.weight_decay = shape.master = true;
  const auto seconds_on = [&](const char* name, OpKind kind) {
    const DeviceKind device = find_device(name, catalog);
    return kernel_time(kind, shape, DataType::bf16, device, device.rates.front()).value;
  };
  const double measured = seconds_on("h200-sxm-141gb", OpKind::adamw_8bit);
  CHECK(seconds_on("h100-sxm-80gb", OpKind::adamw_8bit) == doctest::Approx(measured).epsilon(0.05));
  CHECK(seconds_on("a100-sxm4-80gb", OpKind::adamw_8bit) > measured);  // fewer of them
  // Fewer bytes do not make up for it.
  for (const char* const name : {"h200-sxm-141gb", "h100-sxm-80gb", "b200-sxm-180gb", "a100-sxm4-80gb"})
    CHECK(seconds_on(name, OpKind::adamw_8bit) > seconds_on(name, OpKind::adamw));
}

TEST_CASE("a half precision that was not measured is priced as the other") {
  const DeviceKind device = measured_device(BackendKind::cpu, {fit_of(OpKind::linear, DataType::bf16)});
  CHECK(kernel_time(OpKind::linear, product, DataType::fp16, device, device.rates[0]) == Seconds(1.0 + 30.0));
}

TEST_CASE("devices that slow one another down do so where they were measured, too") {
  const DeviceKind device =
      measured_device(BackendKind::cpu, {fit_of(OpKind::linear, DataType::fp32), fit_of(OpKind::add, DataType::fp32)});
  DeviceRates several = device.rates[0];
  several.matrix_fp32 = FlopsPerSecond(0.5);
  several.memory *= 0.25;
  CHECK(kernel_time(OpKind::linear, product, DataType::fp32, device, several) == Seconds(1.0 + 60.0));
  // The unit device's add computes: its limit is the vector rate.
  several.vector = FlopsPerSecond(0.1);
  CHECK(kernel_time(OpKind::add, {.rows = 2, .columns = 5, .second = true}, DataType::fp32, device, several) ==
        Seconds(1.0 + 10 * 120.0));
}

TEST_CASE("a step sustains a share of what matrix units in half precision reached in a loop, where it is known") {
  const DeviceKind device =
      measured_device(BackendKind::cuda, {fit_of(OpKind::linear, DataType::bf16),
                                          fit_of(OpKind::linear, DataType::fp32), fit_of(OpKind::add, DataType::bf16)});
  DeviceRates step = device.rates[0];
  step.sustained_share = 0.5;
  const auto both = [&](OpKind kind, const OpShape& shape, DataType type) {
    return std::pair(kernel_time(kind, shape, type, device, device.rates[0]).value - 1.0,
                     kernel_time(kind, shape, type, device, step).value - 1.0);
  };
  const auto [half, half_in_step] = both(OpKind::linear, product, DataType::bf16);
  CHECK(half > 0.0);
  CHECK(half_in_step == doctest::Approx(2.0 * half));
  const auto [full, full_in_step] = both(OpKind::linear, product, DataType::fp32);
  CHECK(full_in_step == full);
  const auto [sum, sum_in_step] = both(OpKind::add, {.rows = 2, .columns = 5, .second = true}, DataType::bf16);
  CHECK(sum_in_step == sum);
}

TEST_CASE("products with rows that matrix units cannot read at once run at the rate that is known of them") {
  DeviceKind device = unit_device(BackendKind::cuda);
  device.multiprocessors = 1;
  DeviceRates rates = device.rates[0];
  rates.matrix_half = FlopsPerSecond(16.0);
  rates.memory = BytesPerSecond(1e12);
  rates.unaligned_two_bytes = FlopsPerSecond(2.0);
  rates.unaligned_four_bytes = FlopsPerSecond(4.0);
  const auto rate_of = [&](OpKind kind, std::int64_t columns, std::int64_t inner, DataType type) {
    const OpShape shape = {.rows = 4096, .columns = columns, .inner = inner};
    return 2.0 * 4096.0 * static_cast<double>(columns * inner) / kernel_time(kind, shape, type, device, rates).value;
  };
  for (const OpKind kind : {OpKind::linear, OpKind::linear_input_gradient, OpKind::linear_weight_gradient}) {
    CHECK(rate_of(kind, 4097, 512, DataType::bf16) == doctest::Approx(2.0).epsilon(0.01));
    CHECK(rate_of(kind, 4098, 512, DataType::bf16) == doctest::Approx(4.0).epsilon(0.01));
    CHECK(rate_of(kind, 4100, 512, DataType::fp16) == doctest::Approx(4.0).epsilon(0.01));
    CHECK(rate_of(kind, 4096, 511, DataType::bf16) == doctest::Approx(2.0).epsilon(0.01));
    CHECK(rate_of(kind, 4104, 512, DataType::bf16) > 8.0);
    // Never faster than a product whose rows are longer and aligned.
    CHECK(rate_of(kind, 3, 512, DataType::bf16) <= rate_of(kind, 8, 512, DataType::bf16));
    CHECK(rate_of(kind, 4097, 512, DataType::fp32) ==
          doctest::Approx(rate_of(kind, 4096, 512, DataType::fp32)).epsilon(0.05));
  }
}

TEST_CASE("attention between measured head sizes lies on a straight line, beyond them in proportion") {
  KernelFit large = fit_of(OpKind::attention, DataType::fp32, 4);
  large.rate = FlopsPerSecond(3.0);
  const DeviceKind device = measured_device(BackendKind::cpu, {large, fit_of(OpKind::attention, DataType::fp32, 2)});
  const auto time = [&](std::int64_t head_dim) {
    return kernel_time(OpKind::attention, {.sequence = 2, .batch = 1, .heads = 1, .kv_heads = 1, .head_dim = head_dim},
                       DataType::fp32, device, device.rates[0])
        .value;
  };
  // 3 pairs, 4 * head_dim operations each: 24 / 2 and 48 / 3, and a second for the launch.
  CHECK(time(2) == 13.0);
  CHECK(time(4) == 17.0);
  CHECK(time(3) == 15.0);
  CHECK(time(1) == 6.5);
  CHECK(time(8) == 34.0);
}

TEST_CASE("times of measured devices never fall when a size grows, nor below the peak") {
  DeviceKind device = measured_device(BackendKind::cuda, {});
  device.multiprocessors = 10;
  device.peak_fp32 = FlopsPerSecond(1.5);
  for (const OpRow& row : op_rows()) {
    if (!row.work) continue;
    if (row.kind == OpKind::attention || row.kind == OpKind::attention_gradient)
      for (const std::int64_t head_dim : {4, 8})
        device.measured->fits.push_back(fit_of(row.kind, DataType::fp32, head_dim));
    else
      device.measured->fits.push_back(fit_of(row.kind, DataType::fp32));
    device.measured->fits.back().half_length = row.work({}, DataType::fp32).matrix ? 3.0 : 0.0;
  }
  device.measured->fits.back().rate *= 100.0;
  const OpShape base{.rows = 100,
                     .columns = 100,
                     .inner = 100,
                     .sequence = 100,
                     .batch = 2,
                     .heads = 2,
                     .kv_heads = 2,
                     .head_dim = 4,
                     .valid = 100};
  for (const OpRow& row : op_rows()) {
    CAPTURE(row.name);
    const auto time = [&](const OpShape& shape) {
      return kernel_time(row.kind, shape, DataType::fp32, device, device.rates[0]);
    };
    for (std::int64_t OpShape::*size : {&OpShape::rows, &OpShape::columns, &OpShape::inner, &OpShape::sequence,
                                        &OpShape::batch, &OpShape::heads, &OpShape::head_dim, &OpShape::window}) {
      OpShape shape = base;
      if (size == &OpShape::window) shape.window = 1;
      for (int step = 0; step < 40; ++step) {
        const Seconds before = time(shape);
        const OpWork work = row.work(shape, DataType::fp32);
        if (work.matrix) CHECK(before >= work.flops / device.peak_fp32);
        shape.*size += shape.*size < 16 ? 1 : 7;
        CHECK(time(shape) >= before);
      }
    }
  }
}

}  // namespace
}  // namespace parplan
