#include "runtime/device/cuda/kernels/kernels.h"
#include "runtime/device/cuda/kernels/work_division.h"

namespace parplan {
namespace {

__global__ void fill_with_words(FlatRange range, std::uint32_t* words, std::uint32_t pattern) {
  for_each_flat<4>(range, [&](std::int64_t i, auto count) {
    if constexpr (decltype(count)::width == 4) {
      *reinterpret_cast<uint4*>(words + i) = uint4{pattern, pattern, pattern, pattern};
    } else {
      words[i] = pattern;
    }
  });
}

__global__ void set_end(std::int64_t* end) { *end = 0; }

// (Whole numbers: the maximum does not depend on the order of blocks.)
__global__ void raise_end(FlatRange range, const std::uint32_t* words, std::uint32_t pattern, std::int64_t* end) {
  std::int64_t unlike = 0;
  for_each_flat<4>(range, [&](std::int64_t i, auto count) {
    constexpr int n = decltype(count)::width;
    std::uint32_t read[n];
    if constexpr (n == 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(words + i);
      read[0] = four.x;
      read[1] = four.y;
      read[2] = four.z;
      read[3] = four.w;
    } else {
      read[0] = words[i];
    }
#pragma unroll
    for (int k = 0; k < n; ++k)
      if (read[k] != pattern && i + k >= unlike) unlike = i + k + 1;
  });
  if (unlike > 0) atomicMax(reinterpret_cast<unsigned long long*>(end), static_cast<unsigned long long>(unlike));
}

}  // namespace

void fill_words(std::uint32_t* words, std::uint32_t pattern, std::int64_t count, cudaStream_t stream) {
  submit_flat<4>(count, {words}, [&](auto, FlatRange range, const Grid& grid) {
    launch("fill words", fill_with_words, grid, stream, range, words, pattern);
  });
}

void find_end_of_unlike(const std::uint32_t* words, std::uint32_t pattern, std::int64_t count, std::int64_t* end,
                        cudaStream_t stream) {
  launch("find the end of unlike words", set_end, Grid{.blocks = dim3(1), .threads = dim3(1)}, stream, end);
  // (Enough blocks to fill any GPU.)
  submit_flat<4>(
      count, {words},
      [&](auto, FlatRange range, const Grid& grid) {
        launch("find the end of unlike words", raise_end, grid, stream, range, words, pattern, end);
      },
      4096);
}

}  // namespace parplan
