#include "runtime/device/cuda/linear.h"

#include <cstddef>

#include "planner/graph/cuda_workspace.h"
#include "runtime/device/cuda/kernels/cast_fp8.h"
#include "runtime/device/cuda/kernels/kernels.h"
#include "runtime/device/cuda/matrix_products.h"

namespace parplan {
namespace {

// The product of the same factors in fp8, which are cast behind cuBLASLt's workspace, rows by rows
// as its units multiply them; where the op is in it.
MatrixProduct in_its_precision(MatrixProduct product, bool left_is_gradient, const CudaKernelArguments& a) {
  if (!multiplies_in_fp8(a.shape)) return product;
  const std::int64_t depth = product.depth, padded = ceil_div(depth, fp8_multiple) * fp8_multiple;
  auto* const scales = reinterpret_cast<float*>(static_cast<std::byte*>(product.workspace) + matrix_workspace_bytes);
  constexpr std::int64_t floats_of_one = fp8_scales_bytes / 2 / 4;
  std::byte* const left = reinterpret_cast<std::byte*>(scales) + fp8_scales_bytes;
  std::byte* const right = left + fp8_factor_bytes(product.rows * padded);
  const auto cast = [&](const void* matrix, std::int64_t rows, std::int64_t columns, bool transposes, bool is_gradient,
                        std::byte* to, float* its_scales) {
    const Fp8Factor factor{.matrix = matrix,
                           .type = product.type,
                           .rows = rows,
                           .columns = columns,
                           .transposes = transposes,
                           .padded = transposes ? ceil_div(rows, fp8_multiple) * fp8_multiple : 0,
                           .is_gradient = is_gradient,
                           .cast = to,
                           .maxima = its_scales,
                           .divisor = its_scales + fp8_maxima};
    cast_to_fp8(factor, a.stream);
    return factor.divisor;
  };
  product.left_scale =
      cast(product.left, product.left_transposed ? depth : product.rows, product.left_transposed ? product.rows : depth,
           product.left_transposed, left_is_gradient, left, scales);
  product.right_scale = cast(product.right, product.right_transposed ? product.columns : depth,
                             product.right_transposed ? depth : product.columns, !product.right_transposed, false,
                             right, scales + floats_of_one);
  product.depth = padded;
  product.type = DataType::fp8;
  product.left = left;
  product.right = right;
  product.left_transposed = false;
  product.right_transposed = true;
  product.left_is_gradient = left_is_gradient;
  return product;
}

// y [rows, columns] = x [rows, inner] * weight [columns, inner]'
MatrixProduct forward_product(OpKind op, const CudaKernelArguments& a, void* y, void* workspace) {
  const OpShape& s = a.shape;
  return in_its_precision({.op = op,
                           .type = a.type,
                           .rows = s.rows,
                           .columns = s.columns,
                           .depth = s.inner,
                           .left = a.operands[0],
                           .right = a.operands[1],
                           .right_transposed = true,
                           .result = y,
                           .result_type = a.type,
                           .workspace = workspace},
                          false, a);
}

// dx [rows, inner] (+)= dy [rows, columns] * weight [columns, inner]
MatrixProduct input_gradient_product(OpKind op, const CudaKernelArguments& a, void* dx, void* workspace) {
  const OpShape& s = a.shape;
  return in_its_precision({.op = op,
                           .type = a.type,
                           .rows = s.rows,
                           .columns = s.inner,
                           .depth = s.columns,
                           .left = a.operands[0],
                           .right = a.operands[1],
                           .result = dx,
                           .result_type = a.type,
                           .accumulate = s.accumulate,
                           .workspace = workspace},
                          true, a);
}

// Runs another op on matrices of [rows, columns] in the same stream.
void run_elementwise(CudaKernel kernel, const CudaKernelArguments& a, const OpShape& shape,
                     std::initializer_list<void*> operands) {
  kernel({.shape = shape, .type = a.type, .operands = operands.begin(), .scalars = a.scalars, .stream = a.stream});
}

// The product, with a bias where there is one. The second step is in place: each element is read
// and written by one thread.
void submit_with_bias(MatrixProduct product, const CudaKernelArguments& a, void* bias) {
  if (bias != nullptr) {
    product.epilogue = Epilogue::bias;
    product.bias = bias;
    if (a.matrices->submit(product, a.stream)) return;
  }
  product.epilogue = Epilogue::none;
  product.bias = nullptr;
  a.matrices->submit(product, a.stream);
  if (bias != nullptr)
    run_elementwise(add, a, {.rows = product.rows, .columns = product.columns, .bias = true},
                    {product.result, bias, product.result});
}

}  // namespace

// x, weight, (bias), y, workspace
void linear(const CudaKernelArguments& a) {
  const int y = a.shape.bias ? 3 : 2;
  submit_with_bias(forward_product(OpKind::linear, a, a.operands[y], a.operands[y + 1]), a,
                   a.shape.bias ? a.operands[2] : nullptr);
}

// x, weight, (bias), before, y, workspace; where `before` and y share storage, it holds y.
void linear_gelu(const CudaKernelArguments& a) {
  const int before = a.shape.bias ? 3 : 2;
  void* bias = a.shape.bias ? a.operands[2] : nullptr;
  MatrixProduct product = forward_product(OpKind::linear_gelu, a, a.operands[before + 1], a.operands[before + 2]);
  product.epilogue = Epilogue::gelu;
  product.bias = bias;
  product.before = a.operands[before] == a.operands[before + 1] ? nullptr : a.operands[before];
  if (a.matrices->submit(product, a.stream)) return;
  product.result = a.operands[before];
  product.before = nullptr;
  submit_with_bias(product, a, bias);
  run_elementwise(activation, a,
                  {.rows = product.rows, .columns = product.columns, .activation = ActivationKind::gelu_tanh},
                  {a.operands[before], a.operands[before + 1]});
}

// dy, weight, dx, workspace
void linear_input_gradient(const CudaKernelArguments& a) {
  a.matrices->submit(input_gradient_product(OpKind::linear_input_gradient, a, a.operands[2], a.operands[3]), a.stream);
}

// dy, weight, before, dbefore, workspace
void linear_input_gradient_gelu(const CudaKernelArguments& a) {
  MatrixProduct product = input_gradient_product(OpKind::linear_input_gradient_gelu, a, a.operands[3], a.operands[4]);
  product.epilogue = Epilogue::gelu_gradient;
  product.before = a.operands[2];
  if (a.matrices->submit(product, a.stream)) return;
  product.epilogue = Epilogue::none;
  product.before = nullptr;
  a.matrices->submit(product, a.stream);
  run_elementwise(activation_gradient, a,
                  {.rows = product.rows, .columns = product.columns, .activation = ActivationKind::gelu_tanh},
                  {a.operands[3], a.operands[2], a.operands[3]});
}

// dy, x, dweight, (dbias), workspace: dweight [columns, inner] += dy [rows, columns]' * x [rows,
// inner], in fp32. The sums of the bias use the workspace first, then the product does.
void linear_weight_gradient(const CudaKernelArguments& a) {
  const OpShape& s = a.shape;
  void* workspace = a.operands[s.bias ? 4 : 3];
  if (s.bias) add_column_sums(a.operands[0], a.type, s.rows, s.columns, a.at<float>(3), workspace, a.stream);
  const MatrixProduct product{.op = OpKind::linear_weight_gradient,
                              .type = a.type,
                              .rows = s.columns,
                              .columns = s.inner,
                              .depth = s.rows,
                              .left = a.operands[0],
                              .right = a.operands[1],
                              .left_transposed = true,
                              .result = a.operands[2],
                              .result_type = DataType::fp32,
                              .accumulate = true,
                              .workspace = workspace};
  a.matrices->submit(in_its_precision(product, true, a), a.stream);
}

}  // namespace parplan
