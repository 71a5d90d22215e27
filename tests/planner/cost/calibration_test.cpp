#include "planner/cost/calibration.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "planner/cost/kernel_time.h"

namespace parplan {
namespace {

DeviceKind device_of(BackendKind backend) {
  DeviceKind device;
  device.name = device.title = "device";
  device.backend = backend;
  device.multiprocessors = backend == BackendKind::cuda ? 132 : 0;
  device.peak_fp32 = FlopsPerSecond(67e12);
  device.peak_half = FlopsPerSecond(989.4e12);
  device.kernel_launch = Seconds(4e-6);
  device.rates = {{.active = 1,
                   .matrix_fp32 = FlopsPerSecond(50e12),
                   .matrix_half = FlopsPerSecond(700e12),
                   .vector = FlopsPerSecond(50e12),
                   .memory = BytesPerSecond(3e12)}};
  return device;
}

// A device that behaves according to these fits.
MeasuredKernels truth(BackendKind backend) {
  const bool gpu = backend == BackendKind::cuda;
  const DataType type = gpu ? DataType::bf16 : DataType::fp32;
  const FlopsPerSecond rate(gpu ? 800e12 : 150e9);
  const BytesPerSecond memory(gpu ? 4e12 : 12e9);
  const Seconds floor(gpu ? 2e-6 : 5e-6);
  MeasuredKernels measured;
  const auto fit = [&](OpKind kind, double share, double half_length, std::int64_t head_dim) {
    KernelFit one;
    one.kind = kind;
    one.type = type;
    one.head_dim = head_dim;
    one.floor = floor;
    if (share > 0.0) one.rate = rate * share;
    one.half_length = half_length;
    one.memory = memory;
    measured.fits.push_back(one);
  };
  fit(OpKind::linear, 1.0, 40.0, 0);
  fit(OpKind::linear_input_gradient, 0.95, 30.0, 0);
  fit(OpKind::linear_weight_gradient, 0.9, 60.0, 0);
  fit(OpKind::attention, 0.5, 100.0, 64);
  fit(OpKind::attention, 0.6, 120.0, 128);
  fit(OpKind::add, 0.0, 0.0, 0);
  return measured;
}

std::vector<KernelMeasurement> rows_of(const DeviceKind& device, double noise, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0.0, noise);
  std::vector<KernelMeasurement> rows;
  const DataType type = device.backend == BackendKind::cuda ? DataType::bf16 : DataType::fp32;
  const auto add = [&](OpKind kind, const OpShape& sizes) {
    KernelMeasurement row = measured_kernel(kind, type, sizes);
    row.time = kernel_time(kind, row.shape, type, device, device.rates.front()) * std::exp(normal(random));
    rows.push_back(row);
  };
  for (const OpKind kind : {OpKind::linear, OpKind::linear_input_gradient, OpKind::linear_weight_gradient})
    for (const std::int64_t tokens : {512, 1024, 4096, 16384})
      for (const auto& [out, in] : {std::pair{768, 768},
                                    {2304, 768},
                                    {3072, 768},
                                    {768, 3072},
                                    {4800, 1600},
                                    {1600, 6400},
                                    {8192, 2048},
                                    {1000, 1000}})
        add(kind, {.rows = tokens, .columns = out, .inner = in});
  for (const std::int64_t head_dim : {64, 128})
    for (const std::int64_t sequence : {512, 1024, 2048, 4096, 8192})
      add(OpKind::attention,
          {.sequence = sequence, .batch = 16384 / sequence, .heads = 16, .kv_heads = 16, .head_dim = head_dim});
  for (const std::int64_t tokens : {256, 1024, 4096, 16384}) add(OpKind::add, {.rows = tokens, .columns = 1600});
  return rows;
}

const KernelFit& find(const std::vector<KernelFit>& fits, OpKind kind, std::int64_t head_dim) {
  const auto found = std::find_if(fits.begin(), fits.end(),
                                  [&](const KernelFit& fit) { return fit.kind == kind && fit.head_dim == head_dim; });
  REQUIRE(found != fits.end());
  return *found;
}

TEST_CASE("rows of a device that behaves as the model says give its parameters back") {
  for (const BackendKind backend : {BackendKind::cuda, BackendKind::cpu}) {
    CAPTURE(name(backend));
    DeviceKind device = device_of(backend);
    device.measured = truth(backend);
    const std::vector<KernelMeasurement> rows = rows_of(device, 0.0, 1);
    const std::vector<KernelFit> fits = fit_kernels(rows, device_of(backend));
    REQUIRE(fits.size() == device.measured->fits.size());
    for (const KernelFit& wanted : device.measured->fits) {
      CAPTURE(name(wanted.kind));
      const KernelFit& found = find(fits, wanted.kind, wanted.head_dim);
      // Written with three digits.
      CHECK(found.floor.value == doctest::Approx(wanted.floor.value).epsilon(0.01));
      CHECK(found.rate.value == doctest::Approx(wanted.rate.value).epsilon(0.006));
      CHECK(found.half_length == doctest::Approx(wanted.half_length).epsilon(0.02));
      CHECK(found.memory.value == doctest::Approx(wanted.memory.value).epsilon(0.006));
      CHECK(found.error < 0.006);
    }
  }
}

TEST_CASE("noise of 5% moves predictions of sizes that were not measured by less than 5%, in the mean") {
  for (const BackendKind backend : {BackendKind::cuda, BackendKind::cpu})
    for (const unsigned seed : {1u, 2u, 3u}) {
      CAPTURE(name(backend));
      CAPTURE(seed);
      DeviceKind device = device_of(backend);
      device.measured = truth(backend);
      const std::vector<KernelMeasurement> rows = rows_of(device, 0.05, seed);
      DeviceKind fitted = device_of(backend);
      fitted.measured = MeasuredKernels{};
      fitted.measured->fits = fit_kernels(rows, fitted);
      double sum = 0.0;
      int count = 0;
      const DataType type = rows.front().type;
      for (const OpKind kind : {OpKind::linear, OpKind::linear_input_gradient, OpKind::linear_weight_gradient})
        for (const std::int64_t tokens : {700, 2048, 8192})
          for (const auto& [out, in] : {std::pair{1280, 1280}, {5120, 1280}, {1024, 4096}, {50304, 768}}) {
            const OpShape shape{.rows = tokens, .columns = out, .inner = in};
            sum += std::abs(kernel_time(kind, shape, type, fitted, fitted.rates[0]) /
                                kernel_time(kind, shape, type, device, device.rates[0]) -
                            1.0);
            ++count;
          }
      CHECK(sum / count < 0.05);
    }
}

TEST_CASE("products of queries, keys and values apart are three on a measured device too, with what runs beside them") {
  DeviceKind device = device_of(BackendKind::cuda);
  device.measured = truth(BackendKind::cuda);
  const auto time_of = [&](OpKind kind, const OpShape& shape) {
    return kernel_time(kind, shape, DataType::bf16, device, device.rates[0]).value;
  };
  // 32 heads of 128 and 8 of keys and of values.
  const OpShape together{.rows = 4096, .columns = (32 + 2 * 8) * 128, .inner = 4096};
  OpShape apart = together, queries = together, keys = together;
  apart.key_columns = keys.columns = 8 * 128;
  queries.columns = 32 * 128;
  const double element = 2.0, rows = 4096.0, inner = 4096.0, memory = 3e12, launch = 4e-6;
  for (const OpKind kind : {OpKind::linear, OpKind::linear_input_gradient, OpKind::linear_weight_gradient}) {
    const double three = time_of(kind, queries) + 2.0 * time_of(kind, keys);
    // Two sums of gradients of the input read one more each: in the norm's kernel, or in two.
    const bool sums = kind == OpKind::linear_input_gradient;
    CHECK(time_of(kind, apart) == doctest::Approx(three + (sums ? 2 * rows * inner * element / memory : 0.0)));
    OpShape stepwise = apart;
    stepwise.stepwise = true;
    CHECK(time_of(kind, stepwise) ==
          doctest::Approx(three + (sums ? 2 * launch + 2 * 3 * rows * inner * element / memory : 0.0)));
  }
  // The gradient of a bias, by a kernel of its own.
  OpShape bias = together;
  bias.bias = true;
  OpShape with_sum = bias;
  with_sum.apart = true;
  CHECK(time_of(OpKind::linear_weight_gradient, with_sum) ==
        doctest::Approx(time_of(OpKind::linear_weight_gradient, bias) + launch +
                        rows * together.columns * element / memory));
}

TEST_CASE("a row that was disturbed moves no fit") {
  DeviceKind device = device_of(BackendKind::cuda);
  device.measured = truth(BackendKind::cuda);
  std::vector<KernelMeasurement> rows = rows_of(device, 0.0, 1);
  rows[3].time *= 5.0;
  const KernelFit fit = find(fit_kernels(rows, device_of(BackendKind::cuda)), OpKind::linear, 0);
  CHECK(fit.rate.value == doctest::Approx(800e12).epsilon(0.01));
  CHECK(fit.half_length == doctest::Approx(40.0).epsilon(0.1));
}

TEST_CASE("the order of rows changes no bit of the fits") {
  DeviceKind device = device_of(BackendKind::cuda);
  device.measured = truth(BackendKind::cuda);
  std::vector<KernelMeasurement> rows = rows_of(device, 0.1, 7);
  const std::vector<KernelFit> fits = fit_kernels(rows, device);
  std::shuffle(rows.begin(), rows.end(), std::mt19937(3));
  CHECK(fit_kernels(rows, device) == fits);
}

TEST_CASE("too few rows give no fit, rows without a slope none either") {
  const DeviceKind device = device_of(BackendKind::cuda);
  std::vector<KernelMeasurement> rows;
  for (const std::int64_t tokens : {100, 200}) {
    rows.push_back(measured_kernel(OpKind::add, DataType::bf16, {.rows = tokens, .columns = 8}));
    rows.back().time = Seconds(1.0);
  }
  CHECK(fit_kernels(rows, device).empty());
  rows.push_back(measured_kernel(OpKind::add, DataType::bf16, {.rows = 300, .columns = 8}));
  rows.back().time = Seconds(1.0);
  CHECK(fit_kernels(rows, device).empty());
}

TEST_CASE("no fitted rate of a GPU lies above its peak") {
  DeviceKind fast = device_of(BackendKind::cuda);
  fast.peak_half = FlopsPerSecond(1e18);
  fast.measured = truth(BackendKind::cuda);
  for (KernelFit& fit : fast.measured->fits) fit.rate *= 2.0;
  const DeviceKind device = device_of(BackendKind::cuda);
  for (const KernelFit& fit : fit_kernels(rows_of(fast, 0.0, 1), device)) CHECK(fit.rate <= device.peak_half);
}

TEST_CASE("rows that know no arithmetic give no rate beyond twice their best") {
  const DeviceKind device = device_of(BackendKind::cpu);
  std::vector<KernelMeasurement> rows;
  FlopsPerSecond best;
  for (const std::int64_t sequence : {64, 128, 256, 512})
    for (const std::int64_t batch : {1, 4}) {
      KernelMeasurement row =
          measured_kernel(OpKind::attention, DataType::fp32,
                          {.sequence = sequence, .batch = batch, .heads = 4, .kv_heads = 4, .head_dim = 64});
      const AttentionWork work = attention_work(row.kind, row.shape, row.type, device.backend);
      row.time = Seconds(work.starts * 1e-9);  // only the tokens count
      best = std::max(best, FlopsPerSecond(work.flops / row.time.value));
      rows.push_back(row);
    }
  const std::vector<KernelFit> fits = fit_kernels(rows, device);
  REQUIRE(fits.size() == 1);
  CHECK(fits[0].rate.value == doctest::Approx(2.0 * best.value).epsilon(0.01));
}

TEST_CASE("rates for what was not measured come from the fits") {
  const MeasuredKernels measured = truth(BackendKind::cuda);
  const DeviceRates before = device_of(BackendKind::cuda).rates.front();
  const DeviceRates rates = fitted_rates(measured, before);
  CHECK(rates.memory == BytesPerSecond(4e12));
  CHECK(rates.matrix_half.value == doctest::Approx(3.0 / (1 / 800e12 + 1 / 760e12 + 1 / 720e12)));
  CHECK(rates.matrix_fp32 == before.matrix_fp32);
  CHECK(rates.vector == before.vector);
}

TEST_CASE("no step sustains more than was measured in a loop, and fp8 keeps its rates") {
  MeasuredKernels measured = truth(BackendKind::cuda);
  KernelFit with_casts = measured.fits.front();
  REQUIRE(with_casts.kind == OpKind::linear);
  with_casts.type = DataType::fp8;
  measured.fits.push_back(with_casts);
  DeviceRates before = device_of(BackendKind::cuda).rates.front();
  before.matrix_half = FlopsPerSecond(900e12);
  before.matrix_fp8 = FlopsPerSecond(1500e12);
  before.sustained_half = FlopsPerSecond(880e12);
  before.sustained_fp8 = FlopsPerSecond(1200e12);
  before.sustained_memory = BytesPerSecond(5e12);
  const DeviceRates rates = fitted_rates(measured, before);
  REQUIRE(rates.matrix_half < before.sustained_half);
  CHECK(rates.sustained_half == rates.matrix_half);
  CHECK(rates.matrix_fp8 == before.matrix_fp8);
  CHECK(rates.sustained_fp8 == before.sustained_fp8);
  CHECK(rates.sustained_memory == rates.memory);
}

}  // namespace
}  // namespace parplan
