#include "runtime/device/cuda/matrix_products.h"

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <bit>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/graph/cuda_workspace.h"

namespace parplan {
namespace {

// The only checked call of cuBLASLt.
void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw RunError(fmt::format("{}: {} ({})", what, cublasLtGetStatusName(status), cublasLtGetStatusString(status)));
}

// Owns one of cuBLASLt's descriptors.
template <auto destroy>
struct Destroyer {
  template <class T>
  void operator()(T* descriptor) const {
    static_cast<void>(destroy(descriptor));
  }
};
using Handle = std::unique_ptr<std::remove_pointer_t<cublasLtHandle_t>, Destroyer<cublasLtDestroy>>;
using Operation = std::unique_ptr<cublasLtMatmulDescOpaque_t, Destroyer<cublasLtMatmulDescDestroy>>;
using Layout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, Destroyer<cublasLtMatrixLayoutDestroy>>;
using Preference = std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, Destroyer<cublasLtMatmulPreferenceDestroy>>;

template <class T>
void set(const Operation& operation, cublasLtMatmulDescAttributes_t attribute, const T& value, const char* what) {
  check(cublasLtMatmulDescSetAttribute(operation.get(), attribute, &value, sizeof(value)), what);
}
template <class T>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, const T& value,
         const char* what) {
  check(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value)), what);
}

cudaDataType_t cuda_type(DataType type, bool is_gradient = false) {
  switch (type) {
    case DataType::fp8: return is_gradient ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3;
    case DataType::bf16: return CUDA_R_16BF;
    case DataType::fp16: return CUDA_R_16F;
    default: return CUDA_R_32F;
  }
}

// The largest power of two, at most 256, that divides the address: the alignment that cuBLASLt asks
// for.
std::uint32_t alignment_of(const void* address) {
  constexpr int most = 8;
  const auto bits = reinterpret_cast<std::uintptr_t>(address);
  return 1u << std::min(most, bits == 0 ? most : std::countr_zero(bits));
}

// cuBLASLt needs its workspace at a multiple of this (NVIDIA/TransformerEngine, pull request 2223;
// ml-explore/mlx, pull request 2466: on Hopper products fail without). Workspaces of a plan are
// aligned to 64 bytes, so the used part begins at the next multiple.
constexpr std::size_t workspace_alignment = 256;
constexpr std::size_t usable_workspace = static_cast<std::size_t>(matrix_workspace_bytes) - workspace_alignment;

void* aligned_workspace(void* workspace) {
  const auto address = reinterpret_cast<std::uintptr_t>(workspace);
  return static_cast<std::byte*>(workspace) +
         (workspace_alignment - address % workspace_alignment) % workspace_alignment;
}

// The key for which an algorithm is chosen.
struct ProductKey {
  DataType type{}, result_type{};
  std::int64_t rows = 0, columns = 0, depth = 0;
  bool left_transposed = false, right_transposed = false, left_is_gradient = false, accumulate = false;
  Epilogue epilogue{};
  bool bias = false, before = false;
  std::array<std::uint32_t, 5> alignments{};  // left, right, result, bias, before
  auto operator<=>(const ProductKey&) const = default;
};

ProductKey key_of(const MatrixProduct& p) {
  return {.type = p.type, .result_type = p.result_type, .rows = p.rows, .columns = p.columns, .depth = p.depth,
          .left_transposed = p.left_transposed, .right_transposed = p.right_transposed,
          .left_is_gradient = p.left_is_gradient, .accumulate = p.accumulate,
          .epilogue = p.epilogue, .bias = p.bias != nullptr, .before = p.before != nullptr,
          .alignments = {alignment_of(p.left), alignment_of(p.right), alignment_of(p.result), alignment_of(p.bias),
                         alignment_of(p.before)}};
}

struct Chosen {
  Operation operation;
  Layout a, b, d;
  std::optional<cublasLtMatmulAlgo_t> algorithm;  // none: cuBLASLt has no algorithm
  std::size_t workspace_bytes = 0;
};

cublasLtEpilogue_t epilogue_of(const MatrixProduct& p) {
  switch (p.epilogue) {
    case Epilogue::bias: return CUBLASLT_EPILOGUE_BIAS;
    case Epilogue::gelu:
      if (p.before == nullptr) return p.bias != nullptr ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
      return p.bias != nullptr ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    case Epilogue::gelu_gradient: return CUBLASLT_EPILOGUE_DGELU;
    default: return CUBLASLT_EPILOGUE_DEFAULT;
  }
}

// The leading dimension of `before` must be a multiple of 8 (cublasLt.h,
// CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD); its kernels read and write it 16 bytes at a time.
bool epilogue_fits(const MatrixProduct& p) {
  return p.before == nullptr || (p.columns % 8 == 0 && alignment_of(p.before) >= 16);
}

// Row-major matrices are cuBLASLt's column-major ones transposed, so d = left * right becomes d' =
// right' * left': A is `right`, B is `left`, and memory that holds [depth, columns] row by row is
// A' = [columns, depth] without transposition. The bias is then one number per row of D, as in the
// epilogue.
Layout layout_of(cudaDataType_t type, std::int64_t row_major_rows, std::int64_t row_major_columns) {
  cublasLtMatrixLayout_t layout = nullptr;
  check(cublasLtMatrixLayoutCreate(&layout, type, static_cast<std::uint64_t>(row_major_columns),
                                   static_cast<std::uint64_t>(row_major_rows), row_major_columns),
        "describe a matrix to cuBLASLt");
  return Layout(layout);
}

void set_addresses(const Chosen& chosen, const MatrixProduct& p) {
  if (p.type == DataType::fp8) {
    set(chosen.operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.right_scale, "scale of a matrix product");
    set(chosen.operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.left_scale, "scale of a matrix product");
  }
  if (p.bias != nullptr) set(chosen.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias, "bias of a matrix product");
  if (p.before != nullptr)
    set(chosen.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.before, "what a matrix product keeps");
}

}  // namespace

struct MatrixProducts::Library {
  Handle handle;
  bool deterministic = true;
  std::map<ProductKey, Chosen> chosen;

  Preference preference(const MatrixProduct& p) const {
    cublasLtMatmulPreference_t created = nullptr;
    check(cublasLtMatmulPreferenceCreate(&created), "make cuBLASLt's preferences");
    Preference preference(created);
    std::uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    if (!deterministic && !is_half(p.result_type)) schemes |= CUBLASLT_REDUCTION_SCHEME_INPLACE;
    const char* what = "set cuBLASLt's preferences";
    set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(usable_workspace), what);
    set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes, what);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(p.right), what);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(p.left), what);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(p.result), what);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(p.result), what);
    return preference;
  }

  Chosen choose(const MatrixProduct& p) const {
    Chosen made;
    cublasLtMatmulDesc_t operation = nullptr;
    const cublasComputeType_t compute = p.type == DataType::tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    const char* what = "describe a matrix product to cuBLASLt";
    check(cublasLtMatmulDescCreate(&operation, compute, CUDA_R_32F), what);
    made.operation.reset(operation);
    set(made.operation, CUBLASLT_MATMUL_DESC_TRANSA, p.right_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, what);
    set(made.operation, CUBLASLT_MATMUL_DESC_TRANSB, p.left_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, what);
    set(made.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(p), what);
    if (p.before != nullptr) set(made.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.columns, what);
    // Sums of gradients take no short cut on Hopper (TransformerEngine, Float8Linear: the same).
    if (p.type == DataType::fp8)
      set(made.operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<std::int8_t>(p.left_is_gradient ? 0 : 1), what);
    set_addresses(made, p);
    const cudaDataType_t left = cuda_type(p.type, p.left_is_gradient), right = cuda_type(p.type);
    made.a = p.right_transposed ? layout_of(right, p.columns, p.depth) : layout_of(right, p.depth, p.columns);
    made.b = p.left_transposed ? layout_of(left, p.depth, p.rows) : layout_of(left, p.rows, p.depth);
    made.d = layout_of(cuda_type(p.result_type), p.rows, p.columns);

    const Preference wanted = preference(p);
    constexpr int most_suggestions = 8;
    std::array<cublasLtMatmulHeuristicResult_t, most_suggestions> suggestions{};
    int found = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle.get(), made.operation.get(), made.a.get(), made.b.get(), made.d.get(),
                                       made.d.get(), wanted.get(), most_suggestions, suggestions.data(), &found);
    // cublasLt.h: "no heuristic function available for current configuration"; this is also the
    // status for an epilogue that is not supported with these types and sizes at all.
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return made;
    if (status == CUBLAS_STATUS_INVALID_VALUE && p.epilogue != Epilogue::none) return made;
    check(status, "choose an algorithm for a matrix product");
    for (int i = 0; i < found; ++i) {
      const cublasLtMatmulHeuristicResult_t& suggestion = suggestions[i];
      if (suggestion.state != CUBLAS_STATUS_SUCCESS) continue;
      if (suggestion.workspaceSize > usable_workspace) continue;
      made.algorithm = suggestion.algo;
      made.workspace_bytes = suggestion.workspaceSize;
      break;
    }
    return made;
  }
};

MatrixProducts::MatrixProducts(bool deterministic) : library_(std::make_unique<Library>()) {
  cublasLtHandle_t handle = nullptr;
  check(cublasLtCreate(&handle), "open cuBLASLt");
  library_->handle.reset(handle);
  library_->deterministic = deterministic;
}

MatrixProducts::~MatrixProducts() = default;

bool MatrixProducts::submit(const MatrixProduct& p, cudaStream_t stream) {
  if (!epilogue_fits(p)) return false;
  const ProductKey key = key_of(p);
  auto place = library_->chosen.find(key);
  if (place == library_->chosen.end()) place = library_->chosen.emplace(key, library_->choose(p)).first;
  const Chosen& chosen = place->second;
  if (!chosen.algorithm.has_value()) {
    if (p.epilogue != Epilogue::none) return false;
    throw RunError(
        fmt::format("{}: cuBLASLt {} has no algorithm for [{}, {}] times [{}, {}] in {} within {} of workspace",
                    name(p.op), cublaslt_version(), p.rows, p.depth, p.depth, p.columns, name(p.type),
                    format_bytes(Bytes(matrix_workspace_bytes))));
  }
  set_addresses(chosen, p);
  const float one = 1.0f;
  const float added = p.accumulate ? 1.0f : 0.0f;
  check(cublasLtMatmul(library_->handle.get(), chosen.operation.get(), &one, p.right, chosen.a.get(), p.left,
                       chosen.b.get(), &added, p.result, chosen.d.get(), p.result, chosen.d.get(), &*chosen.algorithm,
                       aligned_workspace(p.workspace), chosen.workspace_bytes, stream),
        name(p.op));
  return true;
}

std::string cublaslt_version() {
  const std::size_t version = cublasLtGetVersion();
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace parplan
