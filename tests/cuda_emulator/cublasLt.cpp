#include "tests/cuda_emulator/cublasLt.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "tests/cuda_emulator/cuda_bf16.h"
#include "tests/cuda_emulator/cuda_fp16.h"
#include "tests/cuda_emulator/cuda_fp8.h"
#include "tests/cuda_emulator/memory.h"
#include "tests/cuda_emulator/random.h"
#include "tests/cuda_emulator/scheduler.h"

struct cublasLtContext {};

struct cublasLtMatmulDescOpaque_t {
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  cudaDataType_t scale = CUDA_R_32F;
  std::int32_t pointer_mode = CUBLASLT_POINTER_MODE_HOST;
  std::int32_t transa = CUBLAS_OP_N, transb = CUBLAS_OP_N;
  std::uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  void* bias = nullptr;
  std::int64_t bias_stride = 0;
  void* aux = nullptr;
  std::int64_t aux_ld = 0;
  std::int64_t aux_stride = 0;
  std::int32_t sm_count = 0;
  std::int32_t aux_type = -1;
  std::int32_t bias_type = -1;
  const float* a_scale = nullptr;
  const float* b_scale = nullptr;
  std::int8_t fast_accumulation = 0;
};

struct cublasLtMatrixLayoutOpaque_t {
  std::uint32_t type = CUDA_R_32F;
  std::int32_t order = CUBLASLT_ORDER_COL;
  std::uint64_t rows = 0, columns = 0;
  std::int64_t ld = 0;
  std::int32_t batch = 1;
  std::int64_t stride = 0;
  bool operator==(const cublasLtMatrixLayoutOpaque_t&) const = default;
};

struct cublasLtMatmulPreferenceOpaque_t {
  std::uint32_t search_mode = 0;
  std::uint64_t workspace = 0;
  std::uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
  std::uint32_t alignment_a = 256, alignment_b = 256, alignment_c = 256, alignment_d = 256;
  float waves = 0.0f;
};

namespace emulator {
namespace {

using Description = cublasLtMatmulDescOpaque_t;
using Matrix = cublasLtMatrixLayoutOpaque_t;

// The suggestions of the heuristics, in place of cuBLASLt's kernels. The depth may be cut into
// parts whose sums are added by the given scheme ("cublasLtReductionScheme_t"). All of them
// overwrite the workspace that they asked for.
struct AlgorithmRow {
  int id;
  int parts;
  std::uint32_t scheme;
  std::uint32_t alignment;        // bytes, of all operands and leading dimensions; 1: that of the type
  std::uint64_t fixed_workspace;  // bytes; and for COMPUTE_TYPE and OUTPUT_TYPE those of the parts
};
constexpr AlgorithmRow algorithm_rows[] = {
    {31, 3, CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE, 16, 4096},
    {32, 4, CUBLASLT_REDUCTION_SCHEME_INPLACE, 16, 8192},
    {33, 1, CUBLASLT_REDUCTION_SCHEME_NONE, 16, std::uint64_t{48} << 20},
    {34, 4, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, 16, 1024},
    {35, 1, CUBLASLT_REDUCTION_SCHEME_NONE, 16, 65536},
    {36, 2, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, 1, 0},
    {37, 1, CUBLASLT_REDUCTION_SCHEME_NONE, 1, 0},
};

const AlgorithmRow* row_of(const cublasLtMatmulAlgo_t& algorithm) {
  for (const AlgorithmRow& row : algorithm_rows)
    if (algorithm.data[0] == static_cast<std::uint64_t>(row.id)) return &row;
  return nullptr;
}

bool is_fp8(std::uint32_t type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
std::size_t size_of(std::uint32_t type) { return type == CUDA_R_32F ? 4 : is_fp8(type) ? 1 : 2; }
bool is_known(std::uint32_t type) {
  return type == CUDA_R_32F || type == CUDA_R_16BF || type == CUDA_R_16F || is_fp8(type);
}

float load(const void* data, std::uint32_t type, std::size_t i) {
  if (type == CUDA_R_32F) return static_cast<const float*>(data)[i];
  if (is_fp8(type))
    return fp8_to_float(type == CUDA_R_8F_E4M3 ? e4m3 : e5m2, static_cast<const unsigned char*>(data)[i]);
  const unsigned short bits = static_cast<const unsigned short*>(data)[i];
  return type == CUDA_R_16BF ? bfloat16_to_float(bits) : half_to_float(bits);
}
void store(void* data, std::uint32_t type, std::size_t i, float value) {
  if (type == CUDA_R_32F) {
    static_cast<float*>(data)[i] = value;
  } else {
    static_cast<unsigned short*>(data)[i] = type == CUDA_R_16BF ? bfloat16_from_float(value) : half_from_float(value);
  }
}
float rounded(std::uint32_t type, float value) {
  if (type == CUDA_R_32F) return value;
  return type == CUDA_R_16BF ? bfloat16_to_float(bfloat16_from_float(value)) : half_to_float(half_from_float(value));
}
// tf32 has 10 bits of fraction.
float to_tf32(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7f800000u) == 0x7f800000u) return value;
  return std::bit_cast<float>((bits + 0x1000u) & ~0x1fffu);
}

std::size_t place(const Matrix& matrix, std::size_t row, std::size_t column) {
  const auto ld = static_cast<std::size_t>(matrix.ld);
  return matrix.order == CUBLASLT_ORDER_COL ? column * ld + row : row * ld + column;
}
std::size_t bytes_of(const Matrix& matrix) {
  return (place(matrix, matrix.rows - 1, matrix.columns - 1) + 1 +
          static_cast<std::size_t>(matrix.batch - 1) * static_cast<std::size_t>(matrix.stride)) *
         size_of(matrix.type);
}

struct Sizes {
  std::size_t m = 0, n = 0, k = 0;
};

bool uses_bias(std::uint32_t epilogue) {
  return (epilogue & (CUBLASLT_EPILOGUE_BIAS | 16u | CUBLASLT_EPILOGUE_BGRADA | CUBLASLT_EPILOGUE_BGRADB)) != 0;
}
bool uses_aux(std::uint32_t epilogue) { return (epilogue & 128u) != 0; }

// "To use FP8 kernels, the following set of requirements must be satisfied" (cuBLAS documentation,
// cublasLtMatmul): depths and rows of memory in multiples of 16 bytes; A transposed and B not (but
// on Blackwell); a sum in fp32; not both factors in e5m2. Biases are the only epilogues with them
// that this emulator has.
bool supports_fp8(const Description& op, const Matrix& a, const Matrix& b, const Matrix& d, const Sizes& sizes) {
  if (!is_fp8(a.type) || !is_fp8(b.type) || is_fp8(d.type)) return false;
  if (a.type == CUDA_R_8F_E5M2 && b.type == CUDA_R_8F_E5M2) return false;
  if (op.transa != CUBLAS_OP_T || op.transb != CUBLAS_OP_N || op.compute != CUBLAS_COMPUTE_32F) return false;
  if (sizes.m % 16 != 0 || sizes.k % 16 != 0) return false;
  return op.epilogue == CUBLASLT_EPILOGUE_DEFAULT || (op.epilogue == CUBLASLT_EPILOGUE_BIAS && d.type != CUDA_R_32F);
}

// The checks of every call. The types: cuBLAS documentation, table of cublasLtMatmul's
// "computeType, scaleType, Atype/Btype, Ctype, bias type"; its footnote says that bias and GELU
// need column order.
cublasStatus_t check(const Description& op, const Matrix& a, const Matrix& b, const Matrix& c, const Matrix& d,
                     Sizes& sizes) {
  for (const Matrix* matrix : {&a, &b, &c, &d}) {
    if (matrix->rows == 0 || matrix->columns == 0 || matrix->batch < 1) return CUBLAS_STATUS_INVALID_VALUE;
    const std::uint64_t least = matrix->order == CUBLASLT_ORDER_COL ? matrix->rows : matrix->columns;
    if (matrix->ld < static_cast<std::int64_t>(least)) return CUBLAS_STATUS_INVALID_VALUE;
    if (matrix->batch != d.batch) return CUBLAS_STATUS_INVALID_VALUE;
    if (!is_known(matrix->type)) return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  const bool at = op.transa != CUBLAS_OP_N, bt = op.transb != CUBLAS_OP_N;
  sizes = {.m = at ? a.columns : a.rows, .n = bt ? b.rows : b.columns, .k = at ? a.rows : a.columns};
  if ((bt ? b.columns : b.rows) != sizes.k || d.rows != sizes.m || d.columns != sizes.n || c.rows != d.rows ||
      c.columns != d.columns)
    return CUBLAS_STATUS_INVALID_VALUE;
  if (c.type != d.type) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (is_fp8(a.type) || is_fp8(b.type)) {
    if (!supports_fp8(op, a, b, d, sizes)) return CUBLAS_STATUS_NOT_SUPPORTED;
  } else {
    if (a.type != b.type) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (d.type != CUDA_R_32F && d.type != a.type) return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  if (op.scale != CUDA_R_32F || op.pointer_mode != CUBLASLT_POINTER_MODE_HOST) return CUBLAS_STATUS_NOT_SUPPORTED;
  const bool compute_known = op.compute == CUBLAS_COMPUTE_32F || op.compute == CUBLAS_COMPUTE_32F_PEDANTIC ||
                             (op.compute == CUBLAS_COMPUTE_32F_FAST_TF32 && a.type == CUDA_R_32F);
  if (!compute_known) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (op.epilogue != CUBLASLT_EPILOGUE_DEFAULT) {
    for (const Matrix* matrix : {&a, &b, &c, &d})
      if (matrix->order != CUBLASLT_ORDER_COL) return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  if (uses_bias(op.epilogue) && op.bias_type != -1 && static_cast<std::uint32_t>(op.bias_type) != d.type)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  if (uses_aux(op.epilogue)) {
    if (op.aux_ld < static_cast<std::int64_t>(sizes.m) || op.aux_ld % 8 != 0) return CUBLAS_STATUS_INVALID_VALUE;
    if (op.aux_type != -1 && static_cast<std::uint32_t>(op.aux_type) != d.type) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (reinterpret_cast<std::uintptr_t>(op.aux) % 16 != 0) return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  if (uses_bias(op.epilogue) && reinterpret_cast<std::uintptr_t>(op.bias) % size_of(d.type) != 0)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  return CUBLAS_STATUS_SUCCESS;
}

std::uint64_t workspace_of(const AlgorithmRow& row, const Sizes& sizes, const Matrix& d) {
  std::uint64_t bytes = row.fixed_workspace;
  const std::uint64_t part = static_cast<std::uint64_t>(sizes.m) * sizes.n * static_cast<std::uint64_t>(d.batch);
  if (row.scheme == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) bytes += part * 4 * static_cast<std::uint64_t>(row.parts);
  if (row.scheme == CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE)
    bytes += part * size_of(d.type) * static_cast<std::uint64_t>(row.parts);
  return bytes;
}

bool can_run(const AlgorithmRow& row, const Description& op, const Matrix& a, const Matrix& b, const Matrix& c,
             const Matrix& d, const Sizes& sizes) {
  for (const Matrix* matrix : {&a, &b, &c, &d})
    if (static_cast<std::uint64_t>(matrix->ld) * size_of(matrix->type) % row.alignment != 0) return false;
  if (row.parts > static_cast<int>(sizes.k)) return false;
  // (Sums that are added to the result part by part cannot pass through a function first.)
  return row.scheme != CUBLASLT_REDUCTION_SCHEME_INPLACE || op.epilogue == CUBLASLT_EPILOGUE_DEFAULT;
}

bool is_aligned(const void* pointer, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

void must_be_device_memory(const char* what, const void* begin, std::size_t bytes) {
  if (bytes == 0) return;
  const std::optional<Allocation> found = allocation_at(begin);
  if (!found.has_value() || found->type != cudaMemoryTypeDevice || !lies_in(*found, begin, bytes))
    fail((std::string("cublasLtMatmul: ") + what + " of " + std::to_string(bytes) +
          " bytes lies in no allocation of device memory")
             .c_str());
}

// One product, with everything that its descriptors held when it was submitted.
struct Product {
  Description op;
  Matrix a, b, c, d;
  Sizes sizes;
  float alpha = 1.0f, beta = 0.0f;
  const std::byte *a_data = nullptr, *b_data = nullptr, *c_data = nullptr;
  std::byte* d_data = nullptr;
  AlgorithmRow algorithm{};
  std::byte* workspace = nullptr;
  std::uint64_t workspace_bytes = 0;
  std::uint64_t seed = 0;
};

// c [columns][m] += a [depth][m] b [columns][depth], m fastest.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
__attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#endif
void add_product(float* __restrict__ c, const float* __restrict__ a, const float* __restrict__ b, std::size_t m,
                 std::size_t columns, std::size_t depth, std::size_t b_stride) {
  for (std::size_t j = 0; j < columns; ++j) {
    float* __restrict__ sums = c + j * m;
    for (std::size_t k = 0; k < depth; ++k) {
      const float factor = b[j * b_stride + k];
      const float* __restrict__ column = a + k * m;
      for (std::size_t i = 0; i < m; ++i) sums[i] += factor * column[i];
    }
  }
}

float gelu_tanh(float x) {
  const double u = 0.7978845608028654 * (static_cast<double>(x) + 0.044715 * x * x * static_cast<double>(x));
  return static_cast<float>(0.5 * x * (1.0 + std::tanh(u)));
}
float gelu_tanh_derivative(float value) {
  const double x = value;
  const double t = std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x));
  return static_cast<float>(0.5 * (1.0 + t) +
                            0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 3 * 0.044715 * x * x));
}

void run_one(const Product& p, std::size_t batch) {
  const auto [m, n, depth] = p.sizes;
  const auto offset = [&](const Matrix& matrix) {
    return batch * static_cast<std::size_t>(matrix.stride) * size_of(matrix.type);
  };
  const std::byte* a_data = p.a_data + offset(p.a);
  const std::byte* b_data = p.b_data + offset(p.b);
  const std::byte* c_data = p.c_data == nullptr ? nullptr : p.c_data + offset(p.c);
  std::byte* d_data = p.d_data + offset(p.d);
  const bool tf32 = p.op.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
  const bool at = p.op.transa != CUBLAS_OP_N, bt = p.op.transb != CUBLAS_OP_N;

  std::vector<float> a(depth * m), b(n * depth);
  for (std::size_t k = 0; k < depth; ++k)
    for (std::size_t i = 0; i < m; ++i) {
      const float value = load(a_data, p.a.type, at ? place(p.a, k, i) : place(p.a, i, k));
      a[k * m + i] = tf32 ? to_tf32(value) : value;
    }
  for (std::size_t j = 0; j < n; ++j)
    for (std::size_t k = 0; k < depth; ++k) {
      const float value = load(b_data, p.b.type, bt ? place(p.b, j, k) : place(p.b, k, j));
      b[j * depth + k] = tf32 ? to_tf32(value) : value;
    }

  // The parts of the depth, in order; those that are added in place come in any order.
  const auto parts = static_cast<std::size_t>(p.algorithm.parts);
  std::vector<std::size_t> order(parts);
  std::iota(order.begin(), order.end(), std::size_t{0});
  const bool in_output_type = p.algorithm.scheme == CUBLASLT_REDUCTION_SCHEME_INPLACE ||
                              p.algorithm.scheme == CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
  if (p.algorithm.scheme == CUBLASLT_REDUCTION_SCHEME_INPLACE) {
    Random random(p.seed + batch);
    for (std::size_t i = parts; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  }
  std::vector<float> sums(n * m, 0.0f);
  if (parts == 1) {
    add_product(sums.data(), a.data(), b.data(), m, n, depth, depth);
  } else {
    std::vector<float> part(n * m);
    for (std::size_t number : order) {
      const std::size_t begin = depth * number / parts, end = depth * (number + 1) / parts;
      std::fill(part.begin(), part.end(), 0.0f);
      add_product(part.data(), a.data() + begin * m, b.data() + begin, m, n, end - begin, depth);
      for (std::size_t i = 0; i < sums.size(); ++i)
        sums[i] = in_output_type ? rounded(p.d.type, sums[i] + rounded(p.d.type, part[i])) : sums[i] + part[i];
    }
  }

  // (Read when the product runs: the kernels before it write them.)
  const auto scale_of = [](const float* factor) { return factor == nullptr ? 1.0f : *factor; };
  const float scale = scale_of(p.op.a_scale) * scale_of(p.op.b_scale);
  const std::uint32_t epilogue = p.op.epilogue;
  const auto bias_at = [&](std::size_t i) { return i + batch * static_cast<std::size_t>(p.op.bias_stride); };
  const auto aux_at = [&](std::size_t i, std::size_t j) {
    return j * static_cast<std::size_t>(p.op.aux_ld) + i + batch * static_cast<std::size_t>(p.op.aux_stride);
  };
  std::vector<float> bias_gradient(m, 0.0f);
  for (std::size_t j = 0; j < n; ++j)
    for (std::size_t i = 0; i < m; ++i) {
      float value = p.alpha * scale * sums[j * m + i];
      if (p.beta != 0.0f) value += p.beta * load(c_data, p.c.type, place(p.c, i, j));
      if ((epilogue & CUBLASLT_EPILOGUE_BIAS) != 0) value += load(p.op.bias, p.d.type, bias_at(i));
      if ((epilogue & CUBLASLT_EPILOGUE_RELU) != 0) value = std::max(value, 0.0f);
      if ((epilogue & CUBLASLT_EPILOGUE_GELU) != 0) {
        if (uses_aux(epilogue)) store(p.op.aux, p.d.type, aux_at(i, j), value);
        value = gelu_tanh(value);
      }
      if ((epilogue & 64u) != 0) value *= gelu_tanh_derivative(load(p.op.aux, p.d.type, aux_at(i, j)));
      if ((epilogue & 16u) != 0) bias_gradient[i] += value;
      store(d_data, p.d.type, place(p.d, i, j), value);
    }
  if ((epilogue & 16u) != 0)
    for (std::size_t i = 0; i < m; ++i) store(p.op.bias, p.d.type, bias_at(i), bias_gradient[i]);
  // Gradients of a bias of A's rows or B's columns: sums over the depth.
  if ((epilogue & CUBLASLT_EPILOGUE_BGRADA) != 0)
    for (std::size_t i = 0; i < m; ++i) {
      float sum = 0.0f;
      for (std::size_t k = 0; k < depth; ++k) sum += a[k * m + i];
      store(p.op.bias, p.d.type, bias_at(i), sum);
    }
  if ((epilogue & CUBLASLT_EPILOGUE_BGRADB) != 0)
    for (std::size_t j = 0; j < n; ++j) {
      float sum = 0.0f;
      for (std::size_t k = 0; k < depth; ++k) sum += b[j * depth + k];
      store(p.op.bias, p.d.type, bias_at(j), sum);
    }
}

class ProductWork final : public Work {
 public:
  explicit ProductWork(const Product& product) : product_(product) {}
  std::string text() const override {
    return "cublasLtMatmul of " + std::to_string(product_.sizes.m) + " by " + std::to_string(product_.sizes.n) +
           " by " + std::to_string(product_.sizes.k);
  }
  // Others that share the workspace lose its contents, before and after.
  void run() override {
    Random random(product_.seed);
    if (product_.workspace_bytes > 0)
      std::memset(product_.workspace, static_cast<int>(random.below(256)), product_.workspace_bytes);
    for (int batch = 0; batch < product_.d.batch; ++batch) run_one(product_, static_cast<std::size_t>(batch));
    if (product_.workspace_bytes > 0) std::memset(product_.workspace, 0xff, product_.workspace_bytes);
  }

 private:
  Product product_;
};

template <class Object, class Attribute>
struct AttributeRow {
  Attribute attribute;
  std::size_t bytes;
  void* (*place)(Object&);
};

template <class Object, class Attribute, std::size_t count>
cublasStatus_t set(Object* object, const AttributeRow<Object, Attribute> (&rows)[count], Attribute attribute,
                   const void* value, std::size_t bytes) {
  if (object == nullptr || value == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  for (const auto& row : rows) {
    if (row.attribute != attribute) continue;
    if (row.bytes != bytes) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(row.place(*object), value, bytes);
    return CUBLAS_STATUS_SUCCESS;
  }
  return CUBLAS_STATUS_INVALID_VALUE;
}

#define CUDA_EMULATOR_ATTRIBUTE(Object, name, member) \
  {name, sizeof(Object::member), [](Object& object) -> void* { return &object.member; }}

constexpr AttributeRow<Description, cublasLtMatmulDescAttributes_t> description_attributes[] = {
    CUDA_EMULATOR_ATTRIBUTE(Description, CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, compute),
    CUDA_EMULATOR_ATTRIBUTE(Description, CUBLASLT_MATMUL_DESC_SCALE_TYPE, scale),
    CUDA_EMULATOR_ATTRIBUTE(Description, CUBLASLT_MATMUL_DESC_POINTER_MODE, pointer_mode),
    CUDA_EMULATOR_ATTRIBUTE(Description, CUBLASLT_MATMUL_DESC_TRANSA, transa),
    CUDA_EMULATOR_ATTRIBUTE(Description, CUBLASLT_MATMUL_DESC_TRANSB, transb),
    CUDA_EMULATOR_ATTRIBUTE(Description, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue),
    CUDA_EMULATOR_ATTRIBUTE(Description, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias),
    CUDA_EMULATOR_ATTRIBUTE(Description, CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, bias_stride),
    CUDA_EMULATOR_ATTRIBUTE(Description, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux),
    CUDA_EMULATOR_ATTRIBUTE(Description, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, aux_ld),
    CUDA_EMULATOR_ATTRIBUTE(Description, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, aux_stride),
    CUDA_EMULATOR_ATTRIBUTE(Description, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, sm_count),
    CUDA_EMULATOR_ATTRIBUTE(Description, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, aux_type),
    CUDA_EMULATOR_ATTRIBUTE(Description, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, bias_type),
    CUDA_EMULATOR_ATTRIBUTE(Description, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, a_scale),
    CUDA_EMULATOR_ATTRIBUTE(Description, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, b_scale),
    CUDA_EMULATOR_ATTRIBUTE(Description, CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast_accumulation),
};
constexpr AttributeRow<Matrix, cublasLtMatrixLayoutAttribute_t> layout_attributes[] = {
    CUDA_EMULATOR_ATTRIBUTE(Matrix, CUBLASLT_MATRIX_LAYOUT_TYPE, type),
    CUDA_EMULATOR_ATTRIBUTE(Matrix, CUBLASLT_MATRIX_LAYOUT_ORDER, order),
    CUDA_EMULATOR_ATTRIBUTE(Matrix, CUBLASLT_MATRIX_LAYOUT_ROWS, rows),
    CUDA_EMULATOR_ATTRIBUTE(Matrix, CUBLASLT_MATRIX_LAYOUT_COLS, columns),
    CUDA_EMULATOR_ATTRIBUTE(Matrix, CUBLASLT_MATRIX_LAYOUT_LD, ld),
    CUDA_EMULATOR_ATTRIBUTE(Matrix, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, batch),
    CUDA_EMULATOR_ATTRIBUTE(Matrix, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride),
};
using Wanted = cublasLtMatmulPreferenceOpaque_t;
constexpr AttributeRow<Wanted, cublasLtMatmulPreferenceAttributes_t> preference_attributes[] = {
    CUDA_EMULATOR_ATTRIBUTE(Wanted, CUBLASLT_MATMUL_PREF_SEARCH_MODE, search_mode),
    CUDA_EMULATOR_ATTRIBUTE(Wanted, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace),
    CUDA_EMULATOR_ATTRIBUTE(Wanted, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes),
    CUDA_EMULATOR_ATTRIBUTE(Wanted, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_a),
    CUDA_EMULATOR_ATTRIBUTE(Wanted, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_b),
    CUDA_EMULATOR_ATTRIBUTE(Wanted, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_c),
    CUDA_EMULATOR_ATTRIBUTE(Wanted, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_d),
    CUDA_EMULATOR_ATTRIBUTE(Wanted, CUBLASLT_MATMUL_PREF_MAX_WAVES_COUNT, waves),
};

struct StatusRow {
  cublasStatus_t status;
  const char* name;
  const char* text;
};
constexpr StatusRow status_rows[] = {
    {CUBLAS_STATUS_SUCCESS, "CUBLAS_STATUS_SUCCESS", "success"},
    {CUBLAS_STATUS_NOT_INITIALIZED, "CUBLAS_STATUS_NOT_INITIALIZED", "the library was not initialized"},
    {CUBLAS_STATUS_ALLOC_FAILED, "CUBLAS_STATUS_ALLOC_FAILED", "the resource allocation failed"},
    {CUBLAS_STATUS_INVALID_VALUE, "CUBLAS_STATUS_INVALID_VALUE",
     "an unsupported value or parameter was passed to the function"},
    {CUBLAS_STATUS_ARCH_MISMATCH, "CUBLAS_STATUS_ARCH_MISMATCH", "an absent device architectural feature is required"},
    {CUBLAS_STATUS_MAPPING_ERROR, "CUBLAS_STATUS_MAPPING_ERROR", "an access to GPU memory space failed"},
    {CUBLAS_STATUS_EXECUTION_FAILED, "CUBLAS_STATUS_EXECUTION_FAILED", "the function failed to launch on the GPU"},
    {CUBLAS_STATUS_INTERNAL_ERROR, "CUBLAS_STATUS_INTERNAL_ERROR", "an internal operation failed"},
    {CUBLAS_STATUS_NOT_SUPPORTED, "CUBLAS_STATUS_NOT_SUPPORTED", "the functionality requested is not supported"},
    {CUBLAS_STATUS_LICENSE_ERROR, "CUBLAS_STATUS_LICENSE_ERROR", "the functionality requested requires a license"},
};

// The suggestions for a product, the best first; which one is best changes from size to size.
std::vector<const AlgorithmRow*> suggestions(const Description& op, const Matrix& a, const Matrix& b, const Matrix& c,
                                             const Matrix& d, const Sizes& sizes, const Wanted& wanted) {
  std::vector<const AlgorithmRow*> found;
  const std::size_t rows = std::size(algorithm_rows);
  const std::size_t first = (sizes.m + 3 * sizes.n + 5 * sizes.k + op.epilogue) % rows;
  for (std::size_t i = 0; i < rows; ++i) {
    const AlgorithmRow& row = algorithm_rows[(first + i) % rows];
    const std::uint32_t least =
        std::min({wanted.alignment_a, wanted.alignment_b, wanted.alignment_c, wanted.alignment_d});
    if (row.alignment > least || !can_run(row, op, a, b, c, d, sizes)) continue;
    if ((row.scheme & ~wanted.schemes) != 0 || workspace_of(row, sizes, d) > wanted.workspace) continue;
    found.push_back(&row);
  }
  return found;
}

}  // namespace
}  // namespace emulator

using namespace emulator;

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  if (handle == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  *handle = new cublasLtContext;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
std::size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
const char* cublasLtGetStatusName(cublasStatus_t status) {
  for (const StatusRow& row : status_rows)
    if (row.status == status) return row.name;
  return "unknown";
}
const char* cublasLtGetStatusString(cublasStatus_t status) {
  for (const StatusRow& row : status_rows)
    if (row.status == status) return row.text;
  return "unknown";
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* description, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  if (description == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  *description = new Description;
  (*description)->compute = compute;
  (*description)->scale = scale;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
  delete description;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                              cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              std::size_t bytes) {
  return set(description, description_attributes, attribute, value, bytes);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, std::uint64_t rows,
                                          std::uint64_t columns, std::int64_t leading_dimension) {
  if (layout == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  *layout = new Matrix;
  (*layout)->type = type;
  (*layout)->rows = rows;
  (*layout)->columns = columns;
  (*layout)->ld = leading_dimension;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                std::size_t bytes) {
  return set(layout, layout_attributes, attribute, value, bytes);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  if (preference == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  *preference = new Wanted;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    std::size_t bytes) {
  return set(preference, preference_attributes, attribute, value, bytes);
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algorithm,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute, void* value,
                                                    std::size_t bytes, std::size_t* written) {
  const AlgorithmRow* row = algorithm == nullptr ? nullptr : row_of(*algorithm);
  if (row == nullptr || value == nullptr || bytes != 4) return CUBLAS_STATUS_INVALID_VALUE;
  std::int32_t answer = 0;
  switch (attribute) {
    case CUBLASLT_ALGO_CONFIG_ID: answer = row->id; break;
    case CUBLASLT_ALGO_CONFIG_SPLITK_NUM: answer = row->parts; break;
    case CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME: answer = static_cast<std::int32_t>(row->scheme); break;
  }
  std::memcpy(value, &answer, sizeof(answer));
  if (written != nullptr) *written = sizeof(answer);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t description,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int* returned) {
  if (handle == nullptr || description == nullptr || a == nullptr || b == nullptr || c == nullptr || d == nullptr ||
      preference == nullptr || requested <= 0 || results == nullptr || returned == nullptr)
    return CUBLAS_STATUS_INVALID_VALUE;
  *returned = 0;
  Sizes sizes;
  if (const cublasStatus_t status = check(*description, *a, *b, *c, *d, sizes); status != CUBLAS_STATUS_SUCCESS)
    return status;
  const auto found = suggestions(*description, *a, *b, *c, *d, sizes, *preference);
  if (found.empty()) return CUBLAS_STATUS_NOT_SUPPORTED;
  for (const AlgorithmRow* row : found) {
    if (*returned == requested) break;
    cublasLtMatmulHeuristicResult_t& result = results[(*returned)++];
    result = {};
    result.algo.data[0] = static_cast<std::uint64_t>(row->id);
    result.workspaceSize = workspace_of(*row, sizes, *d);
    result.state = CUBLAS_STATUS_SUCCESS;
    result.wavesCount = 1.0f;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t description, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace, std::size_t workspace_bytes,
                              cudaStream_t stream) {
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (description == nullptr || alpha == nullptr || beta == nullptr || a == nullptr || b == nullptr || d == nullptr ||
      a_layout == nullptr || b_layout == nullptr || c_layout == nullptr || d_layout == nullptr)
    return CUBLAS_STATUS_INVALID_VALUE;
  Product p;
  p.op = *description;
  p.a = *a_layout;
  p.b = *b_layout;
  p.c = *c_layout;
  p.d = *d_layout;
  std::memcpy(&p.alpha, alpha, sizeof(float));
  std::memcpy(&p.beta, beta, sizeof(float));
  if (p.beta != 0.0f && c == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  if (c == d && !(p.c == p.d)) return CUBLAS_STATUS_INVALID_VALUE;
  if (const cublasStatus_t status = check(p.op, p.a, p.b, p.c, p.d, p.sizes); status != CUBLAS_STATUS_SUCCESS)
    return status;
  if (uses_bias(p.op.epilogue) && p.op.bias == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  if (uses_aux(p.op.epilogue) && p.op.aux == nullptr) return CUBLAS_STATUS_INVALID_VALUE;

  const AlgorithmRow* row = nullptr;
  if (algorithm != nullptr) {
    row = row_of(*algorithm);
    if (row == nullptr || !can_run(*row, p.op, p.a, p.b, p.c, p.d, p.sizes)) return CUBLAS_STATUS_INVALID_VALUE;
  } else {
    Wanted wanted;
    wanted.workspace = workspace_bytes;
    wanted.alignment_a = wanted.alignment_b = wanted.alignment_c = wanted.alignment_d = 1;
    const auto found = suggestions(p.op, p.a, p.b, p.c, p.d, p.sizes, wanted);
    if (found.empty()) return CUBLAS_STATUS_NOT_SUPPORTED;
    row = found.front();
  }
  p.algorithm = *row;
  p.workspace_bytes = workspace_of(*row, p.sizes, p.d);
  if (p.workspace_bytes > workspace_bytes || (p.workspace_bytes > 0 && workspace == nullptr))
    return CUBLAS_STATUS_INVALID_VALUE;
  // Checked whether or not the algorithm uses it; the library itself may also fail later
  // (ml-explore/mlx, pull request 2466).
  if (!is_aligned(workspace, 256)) return CUBLAS_STATUS_INVALID_VALUE;
  const std::pair<const void*, const Matrix*> operands[] = {
      {a, &p.a}, {b, &p.b}, {p.beta != 0.0f ? c : nullptr, &p.c}, {d, &p.d}};
  for (const auto& [data, matrix] : operands)
    if (!is_aligned(data, std::max<std::size_t>(size_of(matrix->type), row->alignment)))
      return CUBLAS_STATUS_INVALID_VALUE;

  if (is_fp8(p.a.type)) {
    if (p.op.a_scale == nullptr || p.op.b_scale == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    must_be_device_memory("the scale of A", p.op.a_scale, sizeof(float));
    must_be_device_memory("the scale of B", p.op.b_scale, sizeof(float));
  }
  must_be_device_memory("A", a, bytes_of(p.a));
  must_be_device_memory("B", b, bytes_of(p.b));
  if (p.beta != 0.0f) must_be_device_memory("C", c, bytes_of(p.c));
  must_be_device_memory("D", d, bytes_of(p.d));
  must_be_device_memory("the workspace", workspace, p.workspace_bytes);
  const auto batches = static_cast<std::size_t>(p.d.batch - 1);
  if (uses_bias(p.op.epilogue)) {
    const std::size_t length = (p.op.epilogue & CUBLASLT_EPILOGUE_BGRADB) != 0 ? p.sizes.n : p.sizes.m;
    must_be_device_memory("the bias", p.op.bias,
                          (length + batches * static_cast<std::size_t>(p.op.bias_stride)) * size_of(p.d.type));
  }
  if (uses_aux(p.op.epilogue)) {
    const std::size_t length = (p.sizes.n - 1) * static_cast<std::size_t>(p.op.aux_ld) + p.sizes.m;
    must_be_device_memory("what the epilogue keeps", p.op.aux,
                          (length + batches * static_cast<std::size_t>(p.op.aux_stride)) * size_of(p.d.type));
  }

  p.a_data = static_cast<const std::byte*>(a);
  p.b_data = static_cast<const std::byte*>(b);
  p.c_data = static_cast<const std::byte*>(c);
  p.d_data = static_cast<std::byte*>(d);
  p.workspace = static_cast<std::byte*>(workspace);
  const cudaError_t error = submit(stream, [p]() mutable {
    p.seed = next_random_with_lock_held();
    return std::make_shared<ProductWork>(p);
  });
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
