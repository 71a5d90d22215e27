#pragma once

#include "planner/cluster/device.h"
#include "planner/graph/op_kind.h"

namespace parplan {

// The time of one kernel on one device. The frame is the roofline (Williams, Waterman, Patterson,
// CACM 2009) over a floor
//
//     floor + max(arithmetic, bytes / memory rate)    never less than flops / the datasheet's peak
//
// with the bytes of the op's row (each byte of each operand counted once). Where the device was
// measured (DeviceKind::measured) and has a fit for the kind, floor, rates and half length are the
// fit's; otherwise they are the device's launch time and rates. Arithmetic is
//
//     matrix products   in tiles and waves, each tile started once (tiling.h)
//     attention         (flops + flops / sequence * half length) / rate; on a GPU, flops count
//                       whole blocks of 128 queries by 128 keys, including those that the diagonal
//                       or a window cuts (attention_work). Without a fit, the rate is a share of a
//                       product's
//     others            flops / vector rate, or nothing where a fit has it in its memory rate
//
// A fit is for one device at work; with several, it is scaled by the ratio of `rates` to those of
// one device. load_tokens and load_targets are the data loader's: they cost a launch on a GPU and
// nothing on a CPU.
//
// The time does not fall when a size grows.
Seconds kernel_time(OpKind op, const OpShape& shape, DataType type, const DeviceKind& device, const DeviceRates& rates);

// The same by the origin of the number that decides each part: the launch, and the rate, or the
// fit, of what takes longest. They sum to kernel_time.
TimeByOrigin kernel_time_by_origin(OpKind op, const OpShape& shape, DataType type, const DeviceKind& device,
                                   const DeviceRates& rates);

// No matrix product of linear layers is faster on the device, whatever its shape and however many
// devices are at work.
FlopsPerSecond fastest_product(DataType type, const DeviceKind& device);

// Whether its products write a tile's results beside the arithmetic of the next one, as kernels
// with warps that specialise do, from Hopper on (planner/cost/tiling.h).
bool hides_results(const DeviceKind& device);

// Attention from the view of a fit: its arithmetic, and the part of it per key (divided by the
// sequence).
struct AttentionWork {
  double flops = 0.0;
  double starts = 0.0;
};
AttentionWork attention_work(OpKind kind, const OpShape& shape, DataType type, BackendKind backend);

// The fit that a kernel's cost uses: that of its own kind and type, else of the kind of which it
// consists (linear_gelu: linear), else of the other half precision; null where none is suitable.
// Attention between the measured head sizes has two.
struct KernelFits {
  const KernelFit* lower = nullptr;
  const KernelFit* upper = nullptr;  // attention only: the next larger head_dim; equal to `lower` at the ends
};
KernelFits find_fits(const MeasuredKernels& measured, OpKind kind, DataType type, std::int64_t head_dim);

}  // namespace parplan
