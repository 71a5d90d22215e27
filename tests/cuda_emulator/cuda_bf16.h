#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "tests/cuda_emulator/cuda_runtime.h"

// CUDA's bf16: the upper half of a float.
namespace emulator {

inline float bfloat16_to_float(unsigned short bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

inline unsigned short bfloat16_from_float(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // CUDA's NaN
  return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// A double that a float cannot hold goes through the odd neighbouring float if anything was cut
// off, so that it is rounded once.
inline float round_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value || value != value || std::isinf(nearest)) return nearest;
  auto bits = std::bit_cast<std::uint32_t>(nearest);
  if (std::fabs(static_cast<double>(nearest)) > std::fabs(value)) bits -= 1;
  return std::bit_cast<float>(bits | 1u);
}
inline unsigned short bfloat16_from_double(double value) { return bfloat16_from_float(round_to_odd(value)); }

}  // namespace emulator

struct __nv_bfloat16_raw {
  unsigned short x;
};

struct alignas(2) __nv_bfloat16 {
  unsigned short __x;

  __nv_bfloat16() = default;
  constexpr __nv_bfloat16(__nv_bfloat16_raw raw) : __x(raw.x) {}
  __nv_bfloat16(float value) : __x(emulator::bfloat16_from_float(value)) {}
  __nv_bfloat16(double value) : __x(emulator::bfloat16_from_double(value)) {}
  __nv_bfloat16(int value) : __nv_bfloat16(static_cast<double>(value)) {}
  __nv_bfloat16(unsigned value) : __nv_bfloat16(static_cast<double>(value)) {}
  operator float() const { return emulator::bfloat16_to_float(__x); }
  operator __nv_bfloat16_raw() const { return {__x}; }
};

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;

  __nv_bfloat162() = default;
  __nv_bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) : x(low), y(high) {}
};

typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

namespace emulator {
template <>
inline constexpr bool can_be_shuffled<__nv_bfloat16> = true;
template <>
inline constexpr bool can_be_shuffled<__nv_bfloat162> = true;
}  // namespace emulator

// Conversions round to nearest, ties to even.
inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __double2bfloat16(double x) { return __nv_bfloat16(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return static_cast<float>(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return {__nv_bfloat16(low), __nv_bfloat16(high)}; }
inline __nv_bfloat162 __float2bfloat162_rn(float x) { return {__nv_bfloat16(x), __nv_bfloat16(x)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 x) { return {__nv_bfloat16(x.x), __nv_bfloat16(x.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {static_cast<float>(x.x), static_cast<float>(x.y)}; }
inline float __low2float(__nv_bfloat162 x) { return static_cast<float>(x.x); }
inline float __high2float(__nv_bfloat162 x) { return static_cast<float>(x.y); }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 x) { return x.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 x) { return x.y; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) { return {low, high}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.__x; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return __nv_bfloat16(__nv_bfloat16_raw{x}); }
inline short __bfloat16_as_short(__nv_bfloat16 x) { return static_cast<short>(x.__x); }
inline __nv_bfloat16 __short_as_bfloat16(short x) {
  return __nv_bfloat16(__nv_bfloat16_raw{static_cast<unsigned short>(x)});
}

// Every operation rounds its result to the type. (Two numbers of this type have a product that a
// float holds exactly; sums and quotients are rounded twice, which changes nothing: a float has
// more than 2p + 2 bits. Figueroa: When is double rounding innocuous?, 1995.)
inline __nv_bfloat16 __hadd(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __nv_bfloat16(static_cast<float>(a) + static_cast<float>(b));
}
inline __nv_bfloat16 __hsub(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __nv_bfloat16(static_cast<float>(a) - static_cast<float>(b));
}
inline __nv_bfloat16 __hmul(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __nv_bfloat16(static_cast<float>(a) * static_cast<float>(b));
}
inline __nv_bfloat16 __hdiv(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __nv_bfloat16(static_cast<float>(a) / static_cast<float>(b));
}
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
  return __nv_bfloat16(static_cast<double>(static_cast<float>(a)) * static_cast<float>(b) + static_cast<float>(c));
}
inline __nv_bfloat16 __hneg(__nv_bfloat16 x) {
  return __nv_bfloat16(__nv_bfloat16_raw{static_cast<unsigned short>(x.__x ^ 0x8000u)});
}
inline __nv_bfloat16 __habs(__nv_bfloat16 x) {
  return __nv_bfloat16(__nv_bfloat16_raw{static_cast<unsigned short>(x.__x & 0x7fffu)});
}
inline __nv_bfloat16 __hmax(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __nv_bfloat16(fmaxf(static_cast<float>(a), static_cast<float>(b)));
}
inline __nv_bfloat16 __hmin(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __nv_bfloat16(fminf(static_cast<float>(a), static_cast<float>(b)));
}
inline bool __hisnan(__nv_bfloat16 x) { return static_cast<float>(x) != static_cast<float>(x); }
inline int __hisinf(__nv_bfloat16 x) {
  return std::isinf(static_cast<float>(x)) ? (static_cast<float>(x) > 0 ? 1 : -1) : 0;
}
inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }
inline __nv_bfloat16 operator+(__nv_bfloat16 a, __nv_bfloat16 b) { return __hadd(a, b); }
inline __nv_bfloat16 operator-(__nv_bfloat16 a, __nv_bfloat16 b) { return __hsub(a, b); }
inline __nv_bfloat16 operator*(__nv_bfloat16 a, __nv_bfloat16 b) { return __hmul(a, b); }
inline __nv_bfloat16 operator/(__nv_bfloat16 a, __nv_bfloat16 b) { return __hdiv(a, b); }
inline __nv_bfloat16 operator-(__nv_bfloat16 x) { return __hneg(x); }
inline __nv_bfloat16& operator+=(__nv_bfloat16& a, __nv_bfloat16 b) { return a = a + b; }
inline __nv_bfloat16& operator-=(__nv_bfloat16& a, __nv_bfloat16 b) { return a = a - b; }
inline __nv_bfloat16& operator*=(__nv_bfloat16& a, __nv_bfloat16 b) { return a = a * b; }
inline __nv_bfloat16& operator/=(__nv_bfloat16& a, __nv_bfloat16 b) { return a = a / b; }
inline bool operator==(__nv_bfloat16 a, __nv_bfloat16 b) { return static_cast<float>(a) == static_cast<float>(b); }
inline bool operator!=(__nv_bfloat16 a, __nv_bfloat16 b) { return static_cast<float>(a) != static_cast<float>(b); }
inline bool operator<(__nv_bfloat16 a, __nv_bfloat16 b) { return static_cast<float>(a) < static_cast<float>(b); }
inline bool operator>(__nv_bfloat16 a, __nv_bfloat16 b) { return static_cast<float>(a) > static_cast<float>(b); }
inline bool operator<=(__nv_bfloat16 a, __nv_bfloat16 b) { return static_cast<float>(a) <= static_cast<float>(b); }
inline bool operator>=(__nv_bfloat16 a, __nv_bfloat16 b) { return static_cast<float>(a) >= static_cast<float>(b); }
