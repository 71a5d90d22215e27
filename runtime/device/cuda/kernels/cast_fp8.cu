#include "runtime/device/cuda/kernels/cast_fp8.h"

#include <cuda_fp8.h>

#include "planner/graph/cuda_workspace.h"
#include "runtime/device/cuda/kernels/load_store.h"
#include "runtime/device/cuda/kernels/thread_reduction.h"
#include "runtime/device/cuda/kernels/work_division.h"

namespace parplan {
namespace {

// The largest finite numbers (Micikevicius et al. 2022, table 1).
constexpr float most_e4m3 = 448.0f, most_e5m2 = 57344.0f;

// Each block's largest absolute number.
template <class T, int most>
__global__ void largest_numbers(FlatRange range, const T* matrix, float* maxima) {
  __shared__ float shared[1][most_warps];
  float largest = 0.0f;
  for_each_flat<most>(range, [&](std::int64_t i, auto count) {
    float values[decltype(count)::width];
    load(matrix + i, values);
    for (const float value : values) largest = Maximum::of(largest, fabsf(value));
  });
  largest = over_threads<Maximum>(largest, shared);
  if (threadIdx.x == 0) maxima[blockIdx.x] = largest;
}

// The largest of all blocks' numbers; every thread of a warp calls it.
__device__ inline float largest_of(const float* maxima, int blocks) {
  float largest = 0.0f;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < blocks; i += 32) largest = Maximum::of(largest, maxima[i]);
  return over_warp<Maximum>(largest);
}

// The power of two by which numbers up to `largest` are multiplied.
__device__ inline float fp8_scale(float largest, float most) {
  if (!(largest > 0.0f)) return largest == 0.0f ? 1.0f : __builtin_nanf("");
  if (largest == __builtin_inff()) return __builtin_nanf("");
  constexpr int most_exponent = 126;  // of a float whose inverse is normal, too
  int exponent = 0;
  frexpf(most / largest, &exponent);
  return ldexpf(1.0f, exponent - 1 < most_exponent ? exponent - 1 : most_exponent);
}

template <__nv_fp8_interpretation_t format>
__device__ __forceinline__ std::uint8_t to_fp8(float value) {
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, format);
}
template <__nv_fp8_interpretation_t format>
__device__ inline float scale_of(const float* maxima, int blocks, float* divisor) {
  const float scale = fp8_scale(largest_of(maxima, blocks), format == __NV_E4M3 ? most_e4m3 : most_e5m2);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0 && threadIdx.y == 0) *divisor = 1.0f / scale;
  return scale;
}

template <class T, __nv_fp8_interpretation_t format, int most>
__global__ void cast_in_order(FlatRange range, const T* matrix, const float* maxima, int blocks, std::uint8_t* cast,
                              float* divisor) {
  const float scale = scale_of<format>(maxima, blocks, divisor);
  for_each_flat<most>(range, [&](std::int64_t i, auto count) {
    constexpr int width = decltype(count)::width;
    float values[width];
    load(matrix + i, values);
    std::uint8_t numbers[width];
    for (int j = 0; j < width; ++j) numbers[j] = to_fp8<format>(values[j] * scale);
    if constexpr (width == 8) {
      uint2 bits;
      std::memcpy(&bits, numbers, sizeof(bits));
      *reinterpret_cast<uint2*>(cast + i) = bits;
    } else {
      for (int j = 0; j < width; ++j) cast[i + j] = numbers[j];
    }
  });
}

// Tiles of 32 by 32 numbers: read by rows, written by columns.
constexpr int tile = 32, tile_rows_at_once = 8;
template <class T, __nv_fp8_interpretation_t format>
__global__ void cast_transposed(std::int64_t rows, std::int64_t columns, std::int64_t padded, const T* matrix,
                                const float* maxima, int blocks, std::uint8_t* cast, float* divisor) {
  __shared__ std::uint8_t numbers[tile][tile + 4];
  const float scale = scale_of<format>(maxima, blocks, divisor);
  const std::int64_t first_column = static_cast<std::int64_t>(blockIdx.x) * tile;
  const int across = static_cast<int>(threadIdx.x);
  for (std::int64_t first_row = static_cast<std::int64_t>(blockIdx.y) * tile; first_row < padded;
       first_row += static_cast<std::int64_t>(gridDim.y) * tile) {
    __syncthreads();
    for (int row = static_cast<int>(threadIdx.y); row < tile; row += tile_rows_at_once) {
      const bool is_there = first_row + row < rows && first_column + across < columns;
      const float value = is_there ? to_float(matrix[(first_row + row) * columns + first_column + across]) : 0.0f;
      numbers[row][across] = to_fp8<format>(is_there ? value * scale : 0.0f);
    }
    __syncthreads();
    for (int column = static_cast<int>(threadIdx.y); column < tile; column += tile_rows_at_once)
      if (first_column + column < columns && first_row + across < padded)
        cast[(first_column + column) * padded + first_row + across] = numbers[across][column];
  }
}

template <class T, __nv_fp8_interpretation_t format>
void submit_cast(const Fp8Factor& f, int blocks, cudaStream_t stream) {
  const T* matrix = static_cast<const T*>(f.matrix);
  auto* cast = static_cast<std::uint8_t*>(f.cast);
  if (f.transposes) {
    constexpr std::int64_t most_blocks = 65535;
    const std::int64_t down = divide_up(f.padded, tile);
    const Grid grid{.blocks = dim3(static_cast<unsigned>(divide_up(f.columns, tile)),
                                   static_cast<unsigned>(down < most_blocks ? down : most_blocks)),
                    .threads = dim3(tile, tile_rows_at_once)};
    launch("cast_to_fp8", cast_transposed<T, format>, grid, stream, f.rows, f.columns, f.padded, matrix, f.maxima,
           blocks, cast, f.divisor);
    return;
  }
  submit_flat<vector_width<T>>(f.rows * f.columns, {matrix, cast}, [&](auto width, FlatRange range, const Grid& grid) {
    launch("cast_to_fp8", cast_in_order<T, format, decltype(width)::width>, grid, stream, range, matrix, f.maxima,
           blocks, cast, f.divisor);
  });
}

}  // namespace

void cast_to_fp8(const Fp8Factor& f, cudaStream_t stream) {
  dispatch(f.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T* matrix = static_cast<const T*>(f.matrix);
    int blocks = 0;
    submit_flat<vector_width<T>>(
        f.rows * f.columns, {matrix},
        [&](auto width, FlatRange range, const Grid& grid) {
          blocks = static_cast<int>(grid.blocks.x);
          launch("cast_to_fp8", largest_numbers<T, decltype(width)::width>, grid, stream, range, matrix, f.maxima);
        },
        fp8_maxima);
    if (f.is_gradient) {
      submit_cast<T, __NV_E5M2>(f, blocks, stream);
    } else {
      submit_cast<T, __NV_E4M3>(f, blocks, stream);
    }
  });
}

}  // namespace parplan
