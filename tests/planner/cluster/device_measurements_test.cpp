#include "planner/cluster/device.h"

#include <doctest/doctest.h>

#include "planner/base/error.h"
#include "planner/cluster/cluster.h"

using namespace parplan;

namespace {

// A device as `parplan measure --write-device` writes it.
const std::string measured_text =
    "name: d\ntitle: D\nbackend: cuda\nmemory: {capacity: 10 GB, overhead: 1 GB}\npeak: {fp32: 2 TFLOP/s, half: 4 "
    "TFLOP/s}\n"
    "kernel_launch: 2 us\nmultiprocessors: 10\n"
    "rates:\n  - {active: 1, matrix_fp32: 1 TFLOP/s, matrix_half: 3 TFLOP/s, vector: 1 TFLOP/s, memory: 1 TB/s}\n"
    "driver_names: [NVIDIA D]\n"
    "measured:\n"
    "  origin: parplan on a host\n"
    "  date: 2026-11-21\n"
    "  versions: CUDA 13.0\n"
    "  clocks: 1980 MHz\n"
    "  fits:\n"
    "    - {kernel: linear, type: bf16, floor: 1 us, rate: 3 TFLOP/s, half_length: 40, memory: 1 TB/s, rows: 12, "
    "error: 0.03}\n"
    "    - {kernel: attention, type: bf16, head_dim: 64, floor: 1 us, rate: 2 TFLOP/s, half_length: 100, memory: 1 "
    "TB/s, rows: 5, error: 0.02}\n"
    "    - {kernel: add, type: fp32, floor: 2 us, memory: 900 GB/s, rows: 4, error: 0.01}\n"
    "  launch: {alone: 3 us, replayed: 2 us}\n"
    "  library_memory: 600 MiB\n"
    "  copies:\n"
    "    - {route: to_host, bytes: 16 MiB, time: 640 us}\n"
    "  rows:\n"
    "    - {kernel: linear, type: bf16, rows: 1024, columns: 768, inner: 3072, time: 9 us}\n"
    "    - {kernel: attention, type: bf16, sequence: 512, batch: 2, heads: 12, kv_heads: 12, head_dim: 64, time: 30 "
    "us}\n"
    "    - {kernel: adamw, type: bf16, rows: 1000, time: 4 us}\n";

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}
std::string error_of(const std::string& from, const std::string& to) {
  try {
    read_device(YamlNode::parse(replaced(measured_text, from, to), "d.yaml"));
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("files that were measured before gates had several activations are read as gates of silu") {
  for (const auto& [written, kind] :
       {std::pair{"silu_gate", OpKind::gate}, {"silu_gate_gradient", OpKind::gate_gradient}, {"gate", OpKind::gate}}) {
    const YamlNode document =
        YamlNode::parse(replaced(measured_text, "kernel: add", std::string("kernel: ") + written), "d.yaml");
    CHECK(read_device(document).measured->fits[2].kind == kind);
  }
  CHECK(measured_kernel(OpKind::gate, DataType::fp32, {.rows = 2, .columns = 3}).shape.activation ==
        ActivationKind::silu);
}

TEST_CASE("a measured device is read with its fits, its rows stay in the file") {
  const YamlNode document = YamlNode::parse(measured_text, "d.yaml");
  const DeviceKind device = read_device(document);
  CHECK(device.multiprocessors == 10);
  CHECK(device.driver_names == std::vector<std::string>{"NVIDIA D"});
  REQUIRE(device.measured);
  CHECK(device.measured->origin == "parplan on a host");
  CHECK(device.measured->date == "2026-11-21");
  CHECK(device.measured->versions == "CUDA 13.0");
  CHECK(device.measured->clocks == "1980 MHz");
  REQUIRE(device.measured->fits.size() == 3);
  const KernelFit& fit = device.measured->fits[1];
  CHECK(fit == KernelFit{.kind = OpKind::attention,
                         .type = DataType::bf16,
                         .head_dim = 64,
                         .floor = Seconds(1e-6),
                         .rate = FlopsPerSecond(2e12),
                         .half_length = 100.0,
                         .memory = BytesPerSecond(1e12),
                         .rows = 5,
                         .error = 0.02});
  CHECK(device.measured->fits[2].rate == FlopsPerSecond(0.0));

  const Measurements measurements = read_measurements(document.at("measured"));
  CHECK(measurements.launch == Seconds(3e-6));
  CHECK(measurements.replayed_launch == Seconds(2e-6));
  CHECK(measurements.library_memory == Bytes(600 << 20));
  CHECK(measurements.copies ==
        std::vector<CopyMeasurement>{{.route = CopyRoute::to_host, .bytes = Bytes(16 << 20), .time = Seconds(640e-6)}});
  REQUIRE(measurements.kernels.size() == 3);
  CHECK(measurements.kernels[0].shape.inner == 3072);
  CHECK(measurements.kernels[1].shape.heads == 12);
  CHECK(measurements.kernels[2].shape.master);  // as it is measured
  CHECK(measurements.kernels[2].time == Seconds(4e-6));
}

TEST_CASE("a measured device is written and read back, with its rows or without") {
  const YamlNode document = YamlNode::parse(measured_text, "d.yaml");
  const DeviceKind device = read_device(document);
  const Measurements measurements = read_measurements(document.at("measured"));
  const std::string without = write_device(device);
  CHECK(read_device(YamlNode::parse(without, "written")) == device);
  CHECK(read_measurements(YamlNode::parse(without, "written").at("measured")) == Measurements{});
  const std::string with = write_device(device, measurements);
  CHECK(read_device(YamlNode::parse(with, "written")) == device);
  CHECK(read_measurements(YamlNode::parse(with, "written").at("measured")) == measurements);
}

TEST_CASE("what is wrong in a measured device is named with its place") {
  CHECK(error_of("multiprocessors: 10", "multiprocessors: 0") ==
        "d.yaml:7:18: error: expected a whole number from 1 to 4096, found '0'");
  CHECK(error_of("date: 2026", "dat: 2026") ==
        "d.yaml:13:3: error: unknown key 'dat'; allowed: origin, date, versions, clocks, fits, launch, library_memory, "
        "copies, rows; did you mean 'date'?");
  CHECK(error_of("rate: 3 TFLOP/s, ", "") == "d.yaml:17:7: error: a fit of linear needs a 'rate'");
  CHECK(error_of("floor: 2 us, memory", "floor: 2 us, rate: 1 TFLOP/s, memory") ==
        "d.yaml:19:7: error: a fit of add has no use for a 'rate'");
  CHECK(error_of("kernel: attention, type: bf16, head_dim: 64, floor", "kernel: linear, type: bf16, floor") ==
        "d.yaml:18:7: error: a second fit of linear in bf16");
  CHECK(error_of("type: fp32", "type: int8") ==
        "d.yaml:19:27: error: expected one of fp32, bf16, fp16, tf32, fp8, found 'int8'");
  CHECK(error_of("columns: 768, ", "") == "d.yaml:25:7: error: missing key 'columns' in 'measured.rows[0]'");
  CHECK(error_of("columns: 768", "columns: 768, head_dim: 64") ==
        "d.yaml:25:62: error: unknown key 'head_dim'; allowed: kernel, type, rows, columns, inner, time");
  CHECK(error_of("time: 9 us", "time: 0 us") == "d.yaml:25:81: error: 'time' must be more than 0");
  CHECK(error_of("route: to_host", "route: to_hose") ==
        "d.yaml:23:15: error: expected one of on_device, to_device, to_host, found 'to_hose'; did you mean 'to_host'?");
  CHECK(error_of("memory: 900 GB/s", "memory: 0 GB/s") == "d.yaml:19:54: error: 'memory' must be more than 0");
}
