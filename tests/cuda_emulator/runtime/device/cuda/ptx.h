#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "tests/cuda_emulator/warp.h"

// Replaces runtime/device/cuda/ptx.h, function by function. The fragments' layouts are those of the
// PTX ISA ("Matrix fragments for mma.m16n8k16", "ldmatrix"), written as there and not as the
// kernels use them. A copy that cp.async started takes effect when its group is waited for, as late
// as the real one may.
namespace parplan::ptx {

namespace emulated {

template <class T>
float number(std::uint32_t packed, int high) {
  const auto bits = static_cast<std::uint16_t>(high == 0 ? packed : packed >> 16);
  T value;
  static_assert(sizeof(value) == sizeof(bits));
  std::memcpy(&value, &bits, sizeof(bits));
  return static_cast<float>(value);
}

template <class T>
std::uint32_t bits(float value) {
  const T rounded = static_cast<T>(value);
  std::uint16_t result;
  static_assert(sizeof(rounded) == sizeof(result));
  std::memcpy(&result, &rounded, sizeof(result));
  return result;
}

// A lane's arguments of ldmatrix.
struct MatrixRows {
  std::uint32_t (*registers)[4];
  const unsigned char* row;
};

// Register i of a lane with groupID = lane >> 2 and threadID_in_group = lane % 4 gets elements
// threadID_in_group * 2, + 1 of row groupID of matrix i; with .trans, of its column groupID. The
// rows of matrix i are named by lanes 8i to 8i + 7.
template <bool transposed>
void load_matrices(unsigned, void* const* lanes) {
  const auto element = [&](int matrix, int row, int column) {
    std::uint16_t bits;
    std::memcpy(&bits, static_cast<const MatrixRows*>(lanes[8 * matrix + row])->row + 2 * column, sizeof(bits));
    return static_cast<std::uint32_t>(bits);
  };
  for (int lane = 0; lane < 32; ++lane) {
    const int group = lane >> 2;
    const int pair = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      (*static_cast<const MatrixRows*>(lanes[lane])->registers)[i] =
          transposed ? element(i, pair, group) | element(i, pair + 1, group) << 16
                     : element(i, group, pair) | element(i, group, pair + 1) << 16;
    }
  }
}

template <bool transposed>
void ldmatrix(std::uint32_t (&registers)[4], const void* shared_row, const char* file, int line) {
  if (reinterpret_cast<std::uintptr_t>(shared_row) % 16 != 0)
    emulator::fail("ldmatrix: a row is not aligned to 16 bytes");
  MatrixRows mine{&registers, static_cast<const unsigned char*>(shared_row)};
  emulator::whole_warp_meeting(transposed ? "ldmatrix.trans" : "ldmatrix", &mine, load_matrices<transposed>, file,
                               line);
}

// A lane's arguments of mma.
struct Fragments {
  float (*d)[4];
  std::uint32_t a[4];
  std::uint32_t b[2];
};

// With groupID = lane >> 2 and threadID_in_group = lane % 4, of a lane's eight elements of A, i is
// in row groupID for i in {0, 1, 4, 5}, else groupID + 8; column threadID_in_group * 2 + (i & 1), +
// 8 for i >= 4; four elements of B, i is in row threadID_in_group * 2 + (i & 1), + 8 for i >= 2;
// column groupID; four elements of C and D, i is in row groupID, + 8 for i >= 2; column
// threadID_in_group * 2 + (i & 1).
template <class T>
void multiply(unsigned, void* const* lanes) {
  float a[16][16];
  float b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& fragments = *static_cast<const Fragments*>(lanes[lane]);
    for (int i = 0; i < 8; ++i) {
      a[(lane >> 2) + (i % 4 < 2 ? 0 : 8)][lane % 4 * 2 + (i & 1) + (i >= 4 ? 8 : 0)] =
          number<T>(fragments.a[i / 2], i & 1);
    }
    for (int i = 0; i < 4; ++i)
      b[lane % 4 * 2 + (i & 1) + (i >= 2 ? 8 : 0)][lane >> 2] = number<T>(fragments.b[i / 2], i & 1);
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      float& d = (*static_cast<const Fragments*>(lanes[lane])->d)[i];
      for (int k = 0; k < 16; ++k) d += a[(lane >> 2) + (i >= 2 ? 8 : 0)][k] * b[k][lane % 4 * 2 + (i & 1)];
    }
  }
}

struct Copy {
  void* to;
  const void* from;
  std::size_t bytes;
  bool present;
};
// The pending copies of one thread, by group.
struct Copies {
  std::deque<std::vector<Copy>> groups;
  std::vector<Copy> open;
};

// The copies of the running thread. Blocks run one after the other on a thread of the host: what
// the last block left is dropped.
inline Copies& copies() {
  static thread_local std::vector<Copies> of_threads;
  static thread_local uint3 block{};
  if (block.x != blockIdx.x || block.y != blockIdx.y || block.z != blockIdx.z) {
    of_threads.clear();
    block = blockIdx;
  }
  const std::size_t thread =
      threadIdx.x + blockDim.x * (threadIdx.y + static_cast<std::size_t>(blockDim.y) * threadIdx.z);
  if (of_threads.size() <= thread) of_threads.resize(thread + 1);
  return of_threads[thread];
}

inline void start_copy(void* shared, const void* global, std::size_t bytes, bool present) {
  if (reinterpret_cast<std::uintptr_t>(shared) % bytes != 0 || reinterpret_cast<std::uintptr_t>(global) % bytes != 0) {
    emulator::fail("cp.async: an address is not aligned to the bytes that are copied");
  }
  copies().open.push_back({shared, global, bytes, present});
}

}  // namespace emulated

template <class T>
std::uint32_t pack(float low, float high) {
  return emulated::bits<T>(low) | emulated::bits<T>(high) << 16;
}

template <class T>
float2 unpack(std::uint32_t packed) {
  return {emulated::number<T>(packed, 0), emulated::number<T>(packed, 1)};
}

template <class T>
void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                  const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulated::Fragments mine{&d, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  emulator::whole_warp_meeting("mma", &mine, emulated::multiply<T>, file, line);
}

inline void ldmatrix_x4(std::uint32_t (&registers)[4], const void* shared_row, const char* file = __builtin_FILE(),
                        int line = __builtin_LINE()) {
  emulated::ldmatrix<false>(registers, shared_row, file, line);
}
inline void ldmatrix_x4_transposed(std::uint32_t (&registers)[4], const void* shared_row,
                                   const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulated::ldmatrix<true>(registers, shared_row, file, line);
}

inline void cp_async_16(void* shared, const void* global, bool present) {
  emulated::start_copy(shared, global, 16, present);
}
inline void cp_async_4(void* shared, const void* global, bool present) {
  emulated::start_copy(shared, global, 4, present);
}
inline void cp_async_commit() {
  emulated::Copies& copies = emulated::copies();
  copies.groups.push_back(std::move(copies.open));
  copies.open.clear();
}
template <int pending>
void cp_async_wait() {
  emulated::Copies& copies = emulated::copies();
  while (copies.groups.size() > static_cast<std::size_t>(pending)) {
    for (const emulated::Copy& copy : copies.groups.front()) {
      if (copy.present) {
        std::memcpy(copy.to, copy.from, copy.bytes);
      } else {
        std::memset(copy.to, 0, copy.bytes);
      }
    }
    copies.groups.pop_front();
  }
}

inline float exp2_approximate(float x) {
  return std::exp2(x);
}

}  // namespace parplan::ptx
