#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "planner/base/units.h"
#include "planner/base/yaml.h"
#include "planner/cluster/device_measurements.h"
#include "planner/cluster/origin.h"
#include "planner/graph/tensor.h"

namespace parplan {

// What executes a device's kernels and communication: cores, CUDA with NCCL, and the runtimes of
// other vendors, for which parplan plans without having them.
enum class BackendKind { cpu, cuda, rocm, oneapi, synapse };
struct BackendRow {
  const char* name;         // in files
  const char* runtime;      // "ROCm"
  const char* collectives;  // the library that carries them out: "RCCL"
  bool runs;                // whether `parplan run` has it; otherwise plans for such devices cannot be run
};
const BackendRow& row_of(BackendKind backend);
const char* name(BackendKind backend);
std::vector<std::string> backend_names();
// Kernels and communication run on streams of their own; without measurements they are assumed to
// cost what CUDA's and NCCL's would.
constexpr bool is_accelerator(BackendKind backend) { return backend != BackendKind::cpu; }

// The rates that kernels reach when `active` devices of one node work at once (cores share caches,
// memory and clock; GPUs do not: they have one row with active = 1).
struct DeviceRates {
  int active = 1;
  FlopsPerSecond matrix_fp32;    // reachable, large GEMM, per device
  FlopsPerSecond matrix_half;    // bf16/fp16 with fp32 accumulation; 0 where absent
  FlopsPerSecond matrix_tf32{};  // 0 where absent: products in tf32 then run as in fp32
  FlopsPerSecond matrix_fp8{};   // with fp32 accumulation; 0 where absent
  FlopsPerSecond vector;         // arithmetic outside matrix units, fp32
  BytesPerSecond memory;         // reachable, per device
  // What training steps sustain, where it is known to be less than what one kernel reaches in a
  // loop: boards at their limit of power, results that leave the cache, other data. 0: as above.
  FlopsPerSecond sustained_half{};     // products in half precision
  FlopsPerSecond sustained_weights{};  // those that add to fp32 gradients of weights
  FlopsPerSecond early_half{};         // the same two by cuBLAS of CUDA 12.0 and 12.1
  FlopsPerSecond early_weights{};
  FlopsPerSecond sustained_fp8{};      // the first two in fp8
  FlopsPerSecond sustained_fp8_weights{};
  BytesPerSecond sustained_memory{};   // kernels that move data, but for copies and the like
  // What products and attention in half precision and fp8 sustain of the rate at which parplan
  // measure saw them in a loop (DeviceKind::measured). 0: not known, taken for all of it.
  double sustained_share = 0.0;
  // Fused attention in half precision, forward and backward: by kernels for such GPUs, by those for
  // Ampere, and by Triton's of 2022. 0: a share of products.
  FlopsPerSecond attention{};
  FlopsPerSecond attention_gradient{};
  FlopsPerSecond ampere_attention{};
  FlopsPerSecond ampere_attention_gradient{};
  FlopsPerSecond triton_attention{};
  FlopsPerSecond triton_attention_gradient{};
  // Products in half precision with rows that begin at odd multiples of 2 bytes, and at others that
  // 16 does not divide. 0: not known, as fast as others.
  FlopsPerSecond unaligned_two_bytes{};
  FlopsPerSecond unaligned_four_bytes{};
  RateOrigins origins = {};  // kernel_launch: of the device's
  bool operator==(const DeviceRates&) const = default;
};
// The rates of arithmetic that a file may leave out, in its order. The name of a rate is the
// section and the key that state it: "attention.forward". None is above `reached`.
struct OptionalRate {
  Rate rate{};
  FlopsPerSecond DeviceRates::*member = nullptr;
  FlopsPerSecond DeviceRates::*reached = &DeviceRates::matrix_half;
};
std::span<const OptionalRate> optional_rates();

// A kind of device. Peaks are the datasheet's; `rates` are what kernels reach. The file
// (configs/devices/*.yaml, or this machine's probe) states the origin of each number.
struct DeviceKind {
  std::string name;               // "h100-sxm-80gb"
  std::string title;              // "NVIDIA H100 SXM5 80 GB"
  std::vector<std::string> joins = {};  // names of the kinds whose slower one it stands for; empty: it is one
  BackendKind backend = BackendKind::cuda;
  Bytes memory_capacity;
  Bytes memory_overhead;       // of context, NCCL and BLAS libraries; not in the arena
  FlopsPerSecond peak_fp32;    // datasheet, dense (TF32 not counted as fp32)
  FlopsPerSecond peak_half;    // datasheet, dense bf16/fp16
  FlopsPerSecond peak_tf32{};  // datasheet, dense; 0 where absent
  FlopsPerSecond peak_fp8{};   // likewise
  // those that `peak_half` and `matrix_half` are for
  std::vector<DataType> half_types = {DataType::bf16, DataType::fp16};
  Seconds kernel_launch;    // floor of one kernel
  int multiprocessors = 0;  // number of units that share the tiles of a matrix product; 0: unknown, or irrelevant (CPU)
  bool overlaps_communication = true;  // false: a rank's core carries out its own communication (CPU ranks)
  std::vector<DeviceRates> rates;      // ascending in `active`, at least one
  // What the links of such a device reach one way, for clusters that state only which links exist.
  int nvlinks = 0;                         // NVLinks per device; 0 where absent
  BytesPerSecond nvlink_per_link;          // as `nvidia-smi nvlink -s` prints it
  BytesPerSecond nvlink_per_link_reached;  // the rate that NCCL assumes
  int pcie_generation = 0;                 // 0 where absent
  int pcie_lanes = 16;
  std::optional<Watts> power;               // rated power of the board
  std::vector<std::string> driver_names;    // what CUDA calls such a card: "NVIDIA H200"
  std::optional<MeasuredKernels> measured;  // by `parplan measure`
  std::vector<std::string> sources;
  bool operator==(const DeviceKind&) const = default;
};

// The row for `active` devices at work on a node: linear interpolation between rows, ends held.
DeviceRates rates_at(const DeviceKind& device, int active);
// Whether products of that type have units of their own. Otherwise, numbers are widened and
// multiplied as fp32.
bool has_units(const DeviceKind& device, DataType type);
FlopsPerSecond peak(const DeviceKind& device, DataType type);
// Whether it is known what training steps sustain of products of that type: by a rate of its own,
// or of kernels that parplan measure timed by a share. Where it is not, products have the rates of
// benchmark loops, and predicted steps are too short. Always true of cores, and of types of which
// no file says it, so that nothing is known of an error either: fp32, tf32, and half precision
// without units.
bool knows_sustained(const DeviceKind& device, DataType type);

// A device kind file (configs/devices/NAME.yaml).
DeviceKind read_device(const YamlNode& document);
std::string write_device(const DeviceKind& device);
// With the rows from which its fits were made; reading checks them and leaves them in the file.
std::string write_device(const DeviceKind& device, const Measurements& measurements);

}  // namespace parplan
