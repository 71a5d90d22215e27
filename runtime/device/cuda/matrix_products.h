#pragma once

#include <memory>

#include "runtime/device/cuda/kernels/kernel_arguments.h"

namespace parplan {

// What a matrix product applies to its result before writing it.
enum class Epilogue {
  none,
  bias,           // + bias, one number per column of the row-major result
  gelu,           // gelu_tanh of the result (with bias where there is one); `before` keeps its argument if given
  gelu_gradient,  // times the derivative of gelu_tanh at `before`
};

// One product of row-major matrices: d [rows, columns] = left [rows, depth] * right [depth,
// columns] (+ d).
struct MatrixProduct {
  OpKind op{};                     // for messages
  DataType type = DataType::fp32;  // of left and right; fp8: 8 bits, e4m3 but for gradients
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t depth = 0;
  const void* left = nullptr;
  const void* right = nullptr;
  bool left_transposed = false;   // stored as [depth, rows]
  bool right_transposed = false;  // stored as [columns, depth]
  // fp8 alone: left is a gradient, in e5m2; in device memory, what left and right are multiplied
  // by. Units multiply rows by rows: left is not transposed, right is.
  bool left_is_gradient = false;
  const float* left_scale = nullptr;
  const float* right_scale = nullptr;
  void* result = nullptr;
  DataType result_type = DataType::fp32;
  bool accumulate = false;  // add to the present result
  Epilogue epilogue = Epilogue::none;
  const void* bias = nullptr;  // [columns], in the type of the result
  void* before = nullptr;      // [rows, columns], in the type of the result
  void* workspace = nullptr;   // matrix_workspace_bytes
};

// Products by cuBLASLt. Sums are in fp32 for every type (tf32 rounds the factors). The algorithm
// for a product is the first of cuBLASLt's suggestions, asked for once per kind, size, type and
// alignment; suggestions that need more workspace than there is are refused.
//
// Where the depth is split over blocks, the parts are kept in fp32 in the workspace and added by a
// separate kernel, in one order (CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE). Without `deterministic`,
// blocks may also take turns in adding to an fp32 result (..._INPLACE). Parts in a half type
// (..._OUTPUT_TYPE, or ..._INPLACE on such a result) are always refused: sums are in fp32.
class MatrixProducts {
 public:
  explicit MatrixProducts(bool deterministic);
  ~MatrixProducts();
  MatrixProducts(const MatrixProducts&) = delete;
  MatrixProducts& operator=(const MatrixProducts&) = delete;

  // Submits the product. Returns false, with nothing submitted, if cuBLASLt has no algorithm with
  // this epilogue for these sizes and addresses. If it has none for a product without epilogue, a
  // RunError is thrown.
  bool submit(const MatrixProduct& product, cudaStream_t stream);

 private:
  struct Library;
  std::unique_ptr<Library> library_;
};

// "13.1.0"; needs no driver.
std::string cublaslt_version();

}  // namespace parplan
