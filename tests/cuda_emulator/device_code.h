#pragma once

#include <math.h>
#include <stdlib.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "tests/cuda_emulator/vector_types.h"
#include "tests/cuda_emulator/warp.h"

// CUDA C++'s additions to C++ in device code, apart from libraries: keywords, built-in variables
// and functions. Kernels run one block at a time on one thread of the host, so shared memory is
// that thread's, and device-wide atomics are plain.

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __shared__ thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

inline constexpr int warpSize = 32;
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;

// Must be reached by every thread of the block, at one place of the source; anything else ends the
// program with a message.
void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE());
int __syncthreads_count(int predicate, const char* file = __builtin_FILE(), int line = __builtin_LINE());
int __syncthreads_and(int predicate, const char* file = __builtin_FILE(), int line = __builtin_LINE());
int __syncthreads_or(int predicate, const char* file = __builtin_FILE(), int line = __builtin_LINE());
void __syncwarp(unsigned mask = emulator::full_warp, const char* file = __builtin_FILE(), int line = __builtin_LINE());

namespace emulator {

enum class Shuffle { index, up, down, exclusive_or };
// `bits` of the lane that `parameter` names; a lane that contributed nothing gives a pattern that
// is no sensible number.
std::uint64_t shuffle(Shuffle kind, unsigned mask, std::uint64_t bits, int parameter, int width, const char* file,
                      int line);
unsigned ballot(unsigned mask, int predicate, const char* file, int line);

template <class T>
T shuffle_value(Shuffle kind, unsigned mask, T value, int parameter, int width, const char* file, int line) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = shuffle(kind, mask, bits, parameter, width, file, line);
  std::memcpy(static_cast<void*>(&value), &bits, sizeof(T));
  return value;
}

// The types that CUDA's shuffles take (CUDA C++ Programming Guide, "Warp Shuffle Functions");
// cuda_bf16.h and cuda_fp16.h add theirs.
template <class T>
inline constexpr bool can_be_shuffled =
    std::is_same_v<T, int> || std::is_same_v<T, unsigned> || std::is_same_v<T, long> ||
    std::is_same_v<T, unsigned long> || std::is_same_v<T, long long> || std::is_same_v<T, unsigned long long> ||
    std::is_same_v<T, float> || std::is_same_v<T, double>;

}  // namespace emulator

template <class T>
requires emulator::can_be_shuffled<T> T __shfl_sync(unsigned mask, T value, int source, int width = warpSize,
                                                    const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return emulator::shuffle_value(emulator::Shuffle::index, mask, value, source, width, file, line);
}
template <class T>
  requires emulator::can_be_shuffled<T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, const char* file = __builtin_FILE(),
                 int line = __builtin_LINE()) {
  return emulator::shuffle_value(emulator::Shuffle::up, mask, value, static_cast<int>(delta), width, file, line);
}
template <class T>
  requires emulator::can_be_shuffled<T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize, const char* file = __builtin_FILE(),
                   int line = __builtin_LINE()) {
  return emulator::shuffle_value(emulator::Shuffle::down, mask, value, static_cast<int>(delta), width, file, line);
}
template <class T>
  requires emulator::can_be_shuffled<T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE()) {
  return emulator::shuffle_value(emulator::Shuffle::exclusive_or, mask, value, lane_mask, width, file, line);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, const char* file = __builtin_FILE(),
                              int line = __builtin_LINE()) {
  return emulator::ballot(mask, predicate, file, line);
}
inline int __any_sync(unsigned mask, int predicate, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return emulator::ballot(mask, predicate, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return emulator::ballot(mask, !predicate, file, line) == 0;
}

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
[[noreturn]] inline void __trap() { emulator::fail("__trap"); }

// Loads and stores with cache hints. As on the device, the address must be aligned to the type.
namespace emulator {
template <class T>
void check_aligned(const T* address) {
  if (reinterpret_cast<std::uintptr_t>(address) % alignof(T) != 0) fail("misaligned address");
}
}  // namespace emulator
#define CUDA_EMULATOR_LOAD(name)      \
  template <class T>                  \
  T name(const T* address) {          \
    emulator::check_aligned(address); \
    return *address;                  \
  }
CUDA_EMULATOR_LOAD(__ldg)
CUDA_EMULATOR_LOAD(__ldca)
CUDA_EMULATOR_LOAD(__ldcg)
CUDA_EMULATOR_LOAD(__ldcs)
CUDA_EMULATOR_LOAD(__ldcv)
CUDA_EMULATOR_LOAD(__ldlu)
#undef CUDA_EMULATOR_LOAD
#define CUDA_EMULATOR_STORE(name)                         \
  template <class T>                                      \
  void name(T* address, std::type_identity_t<T> value) {  \
    emulator::check_aligned(address);                     \
    *address = value;                                     \
  }
CUDA_EMULATOR_STORE(__stcg)
CUDA_EMULATOR_STORE(__stcs)
CUDA_EMULATOR_STORE(__stwb)
CUDA_EMULATOR_STORE(__stwt)
#undef CUDA_EMULATOR_STORE

#define CUDA_EMULATOR_ATOMICS(T)                         \
  inline T atomicAdd(T* address, T value) {              \
    const T old = *address;                              \
    *address = old + value;                              \
    return old;                                          \
  }                                                      \
  inline T atomicExch(T* address, T value) {             \
    const T old = *address;                              \
    *address = value;                                    \
    return old;                                          \
  }
CUDA_EMULATOR_ATOMICS(int)
CUDA_EMULATOR_ATOMICS(unsigned)
CUDA_EMULATOR_ATOMICS(unsigned long long)
CUDA_EMULATOR_ATOMICS(float)
CUDA_EMULATOR_ATOMICS(double)
#undef CUDA_EMULATOR_ATOMICS
#define CUDA_EMULATOR_ATOMICS(T)                          \
  inline T atomicMax(T* address, T value) {               \
    const T old = *address;                               \
    if (value > old) *address = value;                    \
    return old;                                           \
  }                                                       \
  inline T atomicMin(T* address, T value) {               \
    const T old = *address;                               \
    if (value < old) *address = value;                    \
    return old;                                           \
  }                                                       \
  inline T atomicOr(T* address, T value) {                \
    const T old = *address;                               \
    *address = old | value;                               \
    return old;                                           \
  }                                                       \
  inline T atomicCAS(T* address, T expected, T value) {   \
    const T old = *address;                               \
    if (old == expected) *address = value;                \
    return old;                                           \
  }
CUDA_EMULATOR_ATOMICS(int)
CUDA_EMULATOR_ATOMICS(unsigned)
CUDA_EMULATOR_ATOMICS(unsigned long long)
#undef CUDA_EMULATOR_ATOMICS

inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(a) * b) >> 32);
}
inline int __mulhi(int a, int b) { return static_cast<int>((static_cast<std::int64_t>(a) * b) >> 32); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((((static_cast<std::uint64_t>(high) << 32) | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((static_cast<std::uint64_t>(high) << 32) | low) >> (shift & 31));
}

// The fast functions are as precise here as the others; on a device they differ in the last bits.
inline float __fdividef(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __float2int_rd(float x) { return static_cast<int>(floorf(x)); }
inline int __float2int_ru(float x) { return static_cast<int>(ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return static_cast<unsigned>(nearbyintf(x)); }
inline unsigned __float2uint_rz(float x) { return static_cast<unsigned>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
#if !defined(__GLIBC_PREREQ) || !__GLIBC_PREREQ(2, 42)
inline float rsqrtf(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float sinpif(float x) {
  return static_cast<float>(sin(3.14159265358979323846 * fmod(static_cast<double>(x), 2.0)));
}
inline float cospif(float x) {
  return static_cast<float>(cos(3.14159265358979323846 * fmod(static_cast<double>(x), 2.0)));
}
#endif
inline void sincospif(float x, float* sine, float* cosine) {
  *sine = sinpif(x);
  *cosine = cospif(x);
}
// (glibc's math.h has declared these names for itself.)
namespace emulator {
inline float fast_exp(float x) { return expf(x); }
inline float fast_exp10(float x) { return exp10f(x); }
inline float fast_log(float x) { return logf(x); }
inline float fast_log2(float x) { return log2f(x); }
inline float fast_log10(float x) { return log10f(x); }
inline float fast_sin(float x) { return sinf(x); }
inline float fast_cos(float x) { return cosf(x); }
inline float fast_tan(float x) { return tanf(x); }
inline float fast_tanh(float x) { return tanhf(x); }
inline float fast_pow(float x, float y) { return powf(x, y); }
inline void fast_sincos(float x, float* sine, float* cosine) {
  *sine = sinf(x);
  *cosine = cosf(x);
}
}  // namespace emulator
#define __expf emulator::fast_exp
#define __exp10f emulator::fast_exp10
#define __logf emulator::fast_log
#define __log2f emulator::fast_log2
#define __log10f emulator::fast_log10
#define __sinf emulator::fast_sin
#define __cosf emulator::fast_cos
#define __tanf emulator::fast_tan
#define __tanhf emulator::fast_tanh
#define __powf emulator::fast_pow
#define __sincosf emulator::fast_sincos

#define CUDA_EMULATOR_EXTREMA(A, B, T)                                                              \
  constexpr T min(A a, B b) { return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b); } \
  constexpr T max(A a, B b) { return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a); }
CUDA_EMULATOR_EXTREMA(int, int, int)
CUDA_EMULATOR_EXTREMA(unsigned, unsigned, unsigned)
CUDA_EMULATOR_EXTREMA(int, unsigned, unsigned)
CUDA_EMULATOR_EXTREMA(unsigned, int, unsigned)
CUDA_EMULATOR_EXTREMA(long, long, long)
CUDA_EMULATOR_EXTREMA(unsigned long, unsigned long, unsigned long)
CUDA_EMULATOR_EXTREMA(long, unsigned long, unsigned long)
CUDA_EMULATOR_EXTREMA(unsigned long, long, unsigned long)
CUDA_EMULATOR_EXTREMA(long long, long long, long long)
CUDA_EMULATOR_EXTREMA(unsigned long long, unsigned long long, unsigned long long)
CUDA_EMULATOR_EXTREMA(long long, unsigned long long, unsigned long long)
CUDA_EMULATOR_EXTREMA(unsigned long long, long long, unsigned long long)
#undef CUDA_EMULATOR_EXTREMA
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin(static_cast<double>(a), b); }
inline double max(float a, double b) { return fmax(static_cast<double>(a), b); }
inline double min(double a, float b) { return fmin(a, static_cast<double>(b)); }
inline double max(double a, float b) { return fmax(a, static_cast<double>(b)); }
