#pragma once

#include "planner/cluster/device.h"
#include "planner/graph/op.h"

namespace parplan {

// Time of one kernel on one device. The frame is the roofline (Williams, Waterman, Patterson, CACM
// 2009) over a floor
//
//     floor + max(arithmetic, bytes / memory rate)        and never less than flops / the
//     datasheet's peak
//
// bytes of the op's row (each byte of each operand counted once). Where the device was measured
// (DeviceKind::measured) and has a fit for the kind, floor, rates and half length are the fit's,
// else the device's launch floor and rates. Arithmetic is
//
//     matrix products   of tiles and waves, each tile started once (tiling.h) attention
//     (flops + flops / sequence * half length) / rate; on a GPU flops are of whole blocks of 128
//     queries by 128 keys, the ones
//                       that the diagonal or a window cuts included (attention_work). Without a
//                       fit, the rate is a share of a product's
//     others            flops / vector rate, or nothing where a fit has it in its memory rate
//
// A fit is of one device at work; with several the rates of `rates` against those of one scale it.
// load_tokens and load_targets are the data loader's: they cost a launch on a GPU and nothing on a
// CPU.
//
// The time does not fall when a size grows.
Seconds kernel_time(OpKind op, const OpShape& shape, DataType type, const DeviceKind& device, const DeviceRates& rates);

// No matrix product of linear layers goes faster on the device, whatever its shape and however many
// devices are at work.
FlopsPerSecond fastest_product(DataType type, const DeviceKind& device);

// Attention as a fit sees it: arithmetic, and what of it there is for a key (divided by the
// sequence).
struct AttentionWork {
  double flops = 0.0;
  double starts = 0.0;
};
AttentionWork attention_work(OpKind kind, const OpShape& shape, DataType type, BackendKind backend);

// The fit that prices a kernel: of its own kind and type, else of the kind that it is made of
// (linear_gelu: linear), else of the other half precision; null where nothing will do. Attention
// between the measured head sizes has two.
struct KernelFits {
  const KernelFit* lower = nullptr;
  const KernelFit* upper = nullptr;  // of attention only: the next larger head_dim; `lower` itself at the ends
};
KernelFits find_fits(const MeasuredKernels& measured, OpKind kind, DataType type, std::int64_t head_dim);

}  // namespace parplan
