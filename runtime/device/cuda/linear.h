#pragma once

#include "runtime/device/cuda/kernels/arguments.h"

// The ops that are matrix products, by cuBLASLt (matrix_products.h). Where it has no algorithm with
// the epilogue for the sizes at hand (odd ones), the product is written plain and a kernel of its
// own does the rest: what the epilogue works on is then rounded to the type once more.
namespace parplan {

void linear(const CudaKernelArguments& arguments);
void linear_gelu(const CudaKernelArguments& arguments);
void linear_input_gradient(const CudaKernelArguments& arguments);
void linear_input_gradient_gelu(const CudaKernelArguments& arguments);
void linear_weight_gradient(const CudaKernelArguments& arguments);

}  // namespace parplan
