#pragma once

#include <span>
#include <vector>

#include "planner/cluster/device.h"
#include "planner/cluster/device_measurements.h"

namespace parplan {

// Fits the cost model to measurements: for each kind, type and head size with at least three rows,
// the floor, rate, half length and memory rate with which kernel_time comes nearest to
// the rows.
//
//   others             time = floor + bytes / memory is linear in (floor, 1 / memory)
//   matrix products,   time = floor + (a + b half length) / rate + results / memory is linear in
//   attention          (floor, 1 / rate, half length / rate), with the memory rate of the streaming
//                      kernels and a, b of the best tiling (tiling.h), which is chosen again after
//                      each fit until nothing changes. Memory-bound rows say nothing about
//                      arithmetic and are left out, as long as there are others
//
// Each is a least-squares problem (Eigen, QR with column pivoting) in relative errors; unknowns
// that would be negative are held at 0. Rows far from the fit (other programs were at work) are
// weighted less: weights are those of least absolute errors (Holland and Welsch, Robust regression
// using iteratively reweighted least-squares, 1977). No rate is above twice the best row's. The
// same rows give the same fits in any order.
//
// `device` gives backend, multiprocessors and the peak, which no fitted rate exceeds on a GPU
// either.
std::vector<KernelFit> fit_kernels(std::span<const KernelMeasurement> rows, const DeviceKind& device);

// The rates that plans use where a kind was not measured, from `measured.fits`: memory at the rate
// of kernels that only add and copy, matrix rates as the harmonic mean over the products of a type.
// Rates that were not measured keep their values in `rates`, those in fp8 among them, but none is
// above what it is a share of: a file that says so would be refused.
DeviceRates fitted_rates(const MeasuredKernels& measured, DeviceRates rates);

}  // namespace parplan
