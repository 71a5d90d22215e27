#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "planner/base/units.h"
#include "planner/base/yaml.h"
#include "planner/graph/op_kind.h"

namespace YAML {
class Emitter;
}

namespace parplan {

// One kernel that was timed: the median of repeated runs.
struct KernelMeasurement {
  OpKind kind{};
  DataType type = DataType::fp32;
  OpShape shape;  // of measured_kernel
  Seconds time;
  bool operator==(const KernelMeasurement&) const = default;
};

enum class CopyRoute { on_device, to_device, to_host };
const char* name(CopyRoute route);

struct CopyMeasurement {
  CopyRoute route{};
  Bytes bytes;
  Seconds time;
  bool operator==(const CopyMeasurement&) const = default;
};

// Everything that `parplan measure` found out about one device.
struct Measurements {
  Seconds launch;           // a kernel with almost no work, submitted by itself after others
  Seconds replayed_launch;  // as part of recorded work
  Bytes library_memory;     // in use beyond what was allocated: context, modules, libraries
  std::vector<KernelMeasurement> kernels;
  std::vector<CopyMeasurement> copies;
  bool operator==(const Measurements&) const = default;
};

// The cost of kernels of one kind, type and (attention) head size on the measured device;
// planner/cost/kernel_time.h has the formula.
struct KernelFit {
  OpKind kind{};
  DataType type = DataType::fp32;
  std::int64_t head_dim = 0;  // attention; 0 for all others
  Seconds floor;              // of one kernel, launch included
  FlopsPerSecond rate;        // matrix products and attention: in the limit of large sizes; 0 for all others
  // The summed dim (attention: the sequence) at which half of `rate` is reached; for products on a
  // CPU, the multiply-adds that packing one element of an operand costs.
  double half_length = 0.0;
  BytesPerSecond memory;  // rate of reading and writing operands
  int rows = 0;           // number of rows that it was fitted to
  double error = 0.0;     // mean of |fit / measured - 1| over them
  bool operator==(const KernelFit&) const = default;
};

// The origin of a device's measurements, and the fits to them.
struct MeasuredKernels {
  std::string origin;            // program, device and host
  std::string date;              // "2026-11-21"
  std::string versions;          // driver and libraries
  std::string clocks;
  std::vector<KernelFit> fits;   // one for each kind, type and head size
  bool operator==(const MeasuredKernels&) const = default;
};

// The kernel of these sizes as it is measured: sums have their second operand, optimizers in half
// precision have their master copy, ...
KernelMeasurement measured_kernel(OpKind kind, DataType type, OpShape sizes);

// The `measured` section of a device's file. Its rows are checked and stay in the file: costs come
// from the fits.
MeasuredKernels read_measured_kernels(const YamlNode& section);
Measurements read_measurements(const YamlNode& section);
void write_measured_kernels(YAML::Emitter& out, const MeasuredKernels& measured, const Measurements* measurements);

}  // namespace parplan
