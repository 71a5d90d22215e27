#pragma once

#include <cstdint>
#include <cstring>

#include "runtime/device/cpu/kernels/instruction_set.h"

// Sixteen floats at a time on every machine: GCC and Clang split the type where registers are
// narrower. The rest of a row goes through the same arithmetic, padded, and sums keep sixteen lanes
// that are added in one order. An element's result therefore depends neither on its address nor on
// its position in the row, nor on the other rows.
namespace parplan::PARPLAN_CPU_NAMESPACE {

typedef float Wide __attribute__((vector_size(64)));
typedef std::int32_t WideInt __attribute__((vector_size(64)));
typedef double WideDouble __attribute__((vector_size(128)));

#define PARPLAN_INLINE [[gnu::always_inline]] inline

struct Whole {};                 // all sixteen lanes hold elements
struct Rest { std::int64_t n; };  // only the first n do

PARPLAN_INLINE Wide splat(float x) { return x - Wide{}; }
PARPLAN_INLINE Wide load(const float* p, Whole, float = 0.0f) {
  Wide w;
  std::memcpy(&w, p, sizeof w);
  return w;
}
PARPLAN_INLINE Wide load(const float* p, Rest rest, float fill = 0.0f) {
  alignas(64) float lanes[16];
  for (float& lane : lanes) lane = fill;
  for (std::int64_t i = 0; i < rest.n; ++i) lanes[i] = p[i];
  return load(lanes, Whole{});
}
PARPLAN_INLINE void store(float* p, const Wide& w, Whole) { std::memcpy(p, &w, sizeof w); }
PARPLAN_INLINE void store(float* p, const Wide& w, Rest rest) {
  for (std::int64_t i = 0; i < rest.n; ++i) p[i] = w[i];
}

// body(first element, Whole or Rest) over n elements.
template <class Body>
PARPLAN_INLINE void for_each_wide(std::int64_t n, const Body& body) {
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16) body(i, Whole{});
  if (i < n) body(i, Rest{n - i});
}

PARPLAN_INLINE float sum_lanes(const Wide& w) {
  float s[8];
  for (int i = 0; i < 8; ++i) s[i] = w[i] + w[i + 8];
  return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}
PARPLAN_INLINE float max_lanes(const Wide& w) {
  float m = w[0];
  for (int i = 1; i < 16; ++i) m = w[i] > m ? w[i] : m;
  return m;
}
PARPLAN_INLINE Wide maximum(const Wide& a, const Wide& b) { return a > b ? a : b; }

// e^x to 2 units in the last place for x in [-87.3, 88.3], clamped outside; 1 exactly at 0; NaN
// stays NaN. Range reduction and polynomial of Cephes expf (S. Moshier).
PARPLAN_INLINE Wide exponential(const Wide& argument) {
  const Wide low = splat(-87.3f), high = splat(88.3f);
  Wide x = argument < low ? low : argument;
  x = x > high ? high : x;
  const Wide magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to whole numbers
  const Wide shifted = x * 1.44269504088896341f + magic;
  const Wide n = shifted - magic;
  const Wide r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Wide p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  WideInt bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + 0x3f800000;  // the low bits of `shifted` are n; 2^n
  Wide power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

// tanh(x), to 2 units in the last place. Cephes tanhf (S. Moshier): a polynomial near 0, where the
// other form cancels.
PARPLAN_INLINE Wide hyperbolic_tangent(const Wide& x) {
  const Wide z = x * x;
  Wide p = splat(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const Wide near = p * z * x + x;
  const Wide far = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
  return z < 0.390625f ? near : far;
}

// erf(x) to about 1e-7. Rational approximation of Eigen's generic_fast_erf_float.
PARPLAN_INLINE Wide error_function(const Wide& argument) {
  const Wide low = splat(-4.0f), high = splat(4.0f);
  Wide x = argument < low ? low : argument;
  x = x > high ? high : x;
  const Wide x2 = x * x;
  Wide p = splat(-2.72614225801306e-10f);
  p = p * x2 + 2.77068142495902e-08f;
  p = p * x2 - 2.10102402082508e-06f;
  p = p * x2 - 5.69250639462346e-05f;
  p = p * x2 - 7.34990630326855e-04f;
  p = p * x2 - 2.95459980854025e-03f;
  p = p * x2 - 1.60960333262415e-02f;
  p = p * x;
  Wide q = splat(-1.45660718464996e-05f);
  q = q * x2 - 2.13374055278905e-04f;
  q = q * x2 - 1.68282697438203e-03f;
  q = q * x2 - 7.37332916720468e-03f;
  q = q * x2 - 1.42647390514189e-02f;
  return p / q;
}

}  // namespace parplan::PARPLAN_CPU_NAMESPACE
