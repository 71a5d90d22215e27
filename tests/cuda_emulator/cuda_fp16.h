#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "tests/cuda_emulator/cuda_runtime.h"

// CUDA's fp16: IEEE binary16.
namespace emulator {

inline float half_to_float(unsigned short half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x0400u) return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
  const float small = static_cast<float>(magnitude) * 0x1p-24f;
  return sign != 0 ? -small : small;
}

inline unsigned short half_from_float(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<unsigned short>(bits >> 16 & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;        // CUDA's NaN
  if (magnitude >= 0x477ff000u) return sign | 0x7c00;  // from 65520 on
  if (magnitude >= 0x38800000u)                      // from 2^-14 on
    return static_cast<unsigned short>(sign | (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13);
  // A multiple of 2^-24: adding 0.5 leaves it, rounded, in the last bits of the sum.
  const float sum = std::bit_cast<float>(magnitude) + 0.5f;
  return static_cast<unsigned short>(sign | (std::bit_cast<std::uint32_t>(sum) - 0x3f000000u));
}

inline unsigned short half_from_double(double value) {
  // Through the odd neighbouring float if anything was cut off, so that the double is rounded once.
  const auto nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value || value != value || std::isinf(nearest)) return half_from_float(nearest);
  auto bits = std::bit_cast<std::uint32_t>(nearest);
  if (std::fabs(static_cast<double>(nearest)) > std::fabs(value)) bits -= 1;
  return half_from_float(std::bit_cast<float>(bits | 1u));
}

}  // namespace emulator

struct __half_raw {
  unsigned short x;
};

struct alignas(2) __half {
  unsigned short __x;

  __half() = default;
  constexpr __half(__half_raw raw) : __x(raw.x) {}
  __half(float value) : __x(emulator::half_from_float(value)) {}
  __half(double value) : __x(emulator::half_from_double(value)) {}
  __half(int value) : __half(static_cast<double>(value)) {}
  __half(unsigned value) : __half(static_cast<double>(value)) {}
  operator float() const { return emulator::half_to_float(__x); }
  operator __half_raw() const { return {__x}; }
};

struct alignas(4) __half2 {
  __half x, y;

  __half2() = default;
  __half2(__half low, __half high) : x(low), y(high) {}
};

typedef __half half;
typedef __half2 half2;

namespace emulator {
template <>
inline constexpr bool can_be_shuffled<__half> = true;
template <>
inline constexpr bool can_be_shuffled<__half2> = true;
}  // namespace emulator

// Conversions round to nearest, ties to even.
inline __half __float2half(float x) { return __half(x); }
inline __half __float2half_rn(float x) { return __half(x); }
inline __half __double2half(double x) { return __half(x); }
inline float __half2float(__half x) { return static_cast<float>(x); }
inline __half2 __floats2half2_rn(float low, float high) { return {__half(low), __half(high)}; }
inline __half2 __float2half2_rn(float x) { return {__half(x), __half(x)}; }
inline __half2 __float22half2_rn(float2 x) { return {__half(x.x), __half(x.y)}; }
inline float2 __half22float2(__half2 x) { return {static_cast<float>(x.x), static_cast<float>(x.y)}; }
inline float __low2float(__half2 x) { return static_cast<float>(x.x); }
inline float __high2float(__half2 x) { return static_cast<float>(x.y); }
inline __half __low2half(__half2 x) { return x.x; }
inline __half __high2half(__half2 x) { return x.y; }
inline __half2 __halves2half2(__half low, __half high) { return {low, high}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline unsigned short __half_as_ushort(__half x) { return x.__x; }
inline __half __ushort_as_half(unsigned short x) { return __half(__half_raw{x}); }
inline short __half_as_short(__half x) { return static_cast<short>(x.__x); }
inline __half __short_as_half(short x) { return __half(__half_raw{static_cast<unsigned short>(x)}); }

// Every operation rounds its result to the type. (Two numbers of this type have a product that a
// float holds exactly; sums and quotients are rounded twice, which changes nothing: a float has
// more than 2p + 2 bits. Figueroa: When is double rounding innocuous?, 1995.)
inline __half __hadd(__half a, __half b) { return __half(static_cast<float>(a) + static_cast<float>(b)); }
inline __half __hsub(__half a, __half b) { return __half(static_cast<float>(a) - static_cast<float>(b)); }
inline __half __hmul(__half a, __half b) { return __half(static_cast<float>(a) * static_cast<float>(b)); }
inline __half __hdiv(__half a, __half b) { return __half(static_cast<float>(a) / static_cast<float>(b)); }
inline __half __hfma(__half a, __half b, __half c) {
  return __half(static_cast<double>(static_cast<float>(a)) * static_cast<float>(b) + static_cast<float>(c));
}
inline __half __hneg(__half x) { return __half(__half_raw{static_cast<unsigned short>(x.__x ^ 0x8000u)}); }
inline __half __habs(__half x) { return __half(__half_raw{static_cast<unsigned short>(x.__x & 0x7fffu)}); }
inline __half __hmax(__half a, __half b) { return __half(fmaxf(static_cast<float>(a), static_cast<float>(b))); }
inline __half __hmin(__half a, __half b) { return __half(fminf(static_cast<float>(a), static_cast<float>(b))); }
inline bool __hisnan(__half x) { return static_cast<float>(x) != static_cast<float>(x); }
inline int __hisinf(__half x) { return std::isinf(static_cast<float>(x)) ? (static_cast<float>(x) > 0 ? 1 : -1) : 0; }
inline __half2 __hadd2(__half2 a, __half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline __half2 __hsub2(__half2 a, __half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
inline __half2 __hmax2(__half2 a, __half2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }
inline __half operator+(__half a, __half b) { return __hadd(a, b); }
inline __half operator-(__half a, __half b) { return __hsub(a, b); }
inline __half operator*(__half a, __half b) { return __hmul(a, b); }
inline __half operator/(__half a, __half b) { return __hdiv(a, b); }
inline __half operator-(__half x) { return __hneg(x); }
inline __half& operator+=(__half& a, __half b) { return a = a + b; }
inline __half& operator-=(__half& a, __half b) { return a = a - b; }
inline __half& operator*=(__half& a, __half b) { return a = a * b; }
inline __half& operator/=(__half& a, __half b) { return a = a / b; }
inline bool operator==(__half a, __half b) { return static_cast<float>(a) == static_cast<float>(b); }
inline bool operator!=(__half a, __half b) { return static_cast<float>(a) != static_cast<float>(b); }
inline bool operator<(__half a, __half b) { return static_cast<float>(a) < static_cast<float>(b); }
inline bool operator>(__half a, __half b) { return static_cast<float>(a) > static_cast<float>(b); }
inline bool operator<=(__half a, __half b) { return static_cast<float>(a) <= static_cast<float>(b); }
inline bool operator>=(__half a, __half b) { return static_cast<float>(a) >= static_cast<float>(b); }
