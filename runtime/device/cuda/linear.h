#pragma once

#include "runtime/device/cuda/kernels/kernel_arguments.h"

// The ops that are matrix products, by cuBLASLt (matrix_products.h). Where cuBLASLt has no
// algorithm with the epilogue for the given (odd) sizes, the plain product is written and a
// separate kernel does the rest: its input is then rounded to the type once more.
namespace parplan {

void linear(const CudaKernelArguments& arguments);
void linear_gelu(const CudaKernelArguments& arguments);
void linear_input_gradient(const CudaKernelArguments& arguments);
void linear_input_gradient_gelu(const CudaKernelArguments& arguments);
void linear_weight_gradient(const CudaKernelArguments& arguments);

}  // namespace parplan
