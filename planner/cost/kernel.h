#pragma once

#include "planner/cluster/device.h"
#include "planner/graph/op.h"

namespace parplan {

// Time of one kernel on one device: the launch floor, and then the roofline (Williams, Waterman, Patterson, CACM 2009)
//
//     launch + max(flops / rate, bytes / memory rate)
//
// flops, bytes   of the op's row (each byte of each operand counted once)
// rate           what a large matrix product reaches at the precision for matrix ops, else the vector rate
//
// load_tokens and load_targets are the data loader's: they cost a launch on a GPU and nothing on a CPU.
//
// Tiles and waves of GPU matrix products (NVIDIA, "Matrix Multiplication Background User's Guide", sections on tile and
// wave quantisation) are not modelled: waves need the number of SMs, which no device file states, and tiles alone
// round 128-aligned shapes up by nothing.
Seconds kernel_time(OpKind op, const OpShape& shape, DataType type, const DeviceKind& device, const DeviceRates& rates);

}  // namespace parplan
