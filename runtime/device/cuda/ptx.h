#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

// The few PTX instructions of sm_80 for which CUDA C++ has no names; all inline PTX of the project
// is in this file. Names, operands and the fragments' layouts are those of PTX ISA 9.0, "Matrix
// multiply-accumulate operation using mma instruction" (m16n8k16, .bf16 and .f16), "ldmatrix",
// "cp.async", "ex2". T is __nv_bfloat16 or __half. The CUDA emulator of the tests has a file with
// the same path and functions.
namespace parplan::ptx {

// Two numbers as one register, rounded to nearest; `low` has the lower address in memory.
template <class T>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  std::uint32_t packed;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    static_assert(std::is_same_v<T, __half>);
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

template <class T>
__device__ __forceinline__ float2 unpack(std::uint32_t packed) {
  float2 numbers;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    numbers.x = __uint_as_float(packed << 16);
    numbers.y = __uint_as_float(packed & 0xffff0000u);
  } else {
    static_assert(std::is_same_v<T, __half>);
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(numbers.x), "=f"(numbers.y)
        : "r"(packed));
  }
  return numbers;
}

// d[16, 8] += a[16, 16] b[16, 8] over a warp, sums in fp32. With g = lane / 4 and t = lane % 4, a
// lane holds
//   a: {(g, 2t), (g, 2t+1)}, the same of row g+8, of columns +8, of both;
//   b: {(2t, g), (2t+1, g)}, the same of rows +8;
//   d: (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1).
// (Volatile, since the whole warp has to reach it: it must not be moved into a branch that only
// some lanes take.)
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                             std::uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(std::is_same_v<T, __half>);
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Four 8x8 matrices of 2-byte elements from shared memory: lane 8i + r names row r of matrix i (16
// bytes, aligned). Register i of a lane gets elements 2t and 2t+1 of row g of matrix i; transposed,
// it gets rows 2t and 2t+1 of column g.
__device__ __forceinline__ void ldmatrix_x4(std::uint32_t (&registers)[4], const void* shared_row) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_transposed(std::uint32_t (&registers)[4], const void* shared_row) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(address)
               : "memory");
}

// Starts a copy of 16 (4) bytes, aligned to as many; writes zeros without reading `global` where
// `present` is false. The bytes are visible to this thread after the wait for their group, and to
// others after a barrier that follows it.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool present) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  const std::uint32_t bytes = present ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(__cvta_generic_to_global(global)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void cp_async_4(void* shared, const void* global, bool present) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  const std::uint32_t bytes = present ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(__cvta_generic_to_global(global)),
               "r"(bytes)
               : "memory");
}
// Closes the group of the copies that this thread started since the last one; it may be empty.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most `pending` of this thread's groups, the youngest, are unfinished.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// 2^x to 2 units in the last place; subnormal results are 0.
__device__ __forceinline__ float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace parplan::ptx
