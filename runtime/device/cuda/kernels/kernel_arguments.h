#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "runtime/device/kernel_call.h"

namespace parplan {

class MatrixProducts;

// The arguments of a kernel's host function. Operands are in device memory, in the order of the
// op's row, without the optional ones that the shape leaves out; the workspace, where the row has
// one, comes last.
struct CudaKernelArguments {
  const OpShape& shape;
  DataType type;               // of parameters and activations
  void* const* operands;
  const StepScalars* scalars;  // in device memory
  cudaStream_t stream;
  MatrixProducts* matrices = nullptr;  // the backend's, for ops that are matrix products (matrix_products.h)

  template <class T>
  T* at(int i) const {
    return static_cast<T*>(operands[i]);
  }
};

// The last operands of the gradients of norms with two parameters, from `next` on: the gradients of
// both, null where they are frozen, and the workspace.
struct NormGradients {
  float* first = nullptr;
  float* second = nullptr;
  float* workspace = nullptr;

  NormGradients(const CudaKernelArguments& a, int next) {
    if (!a.shape.freezes_first) first = a.at<float>(next++);
    if (!a.shape.freezes_second) second = a.at<float>(next++);
    workspace = a.at<float>(next);
  }
};

// Submits the kernels of one op to the stream. Allocates nothing, waits for nothing.
using CudaKernel = void (*)(const CudaKernelArguments&);

}  // namespace parplan
