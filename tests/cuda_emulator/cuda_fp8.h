#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "tests/cuda_emulator/cuda_runtime.h"

// CUDA's numbers of 8 bits (cuda_fp8.h; Micikevicius et al. 2022, arXiv:2209.05433, table 1): e4m3
// has no infinity, and one NaN of either sign; e5m2 has both, as IEEE's formats.
typedef unsigned char __nv_fp8_storage_t;
typedef enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE } __nv_saturation_t;
typedef enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 } __nv_fp8_interpretation_t;

namespace emulator {

struct Fp8Format {
  int fraction_bits;
  int bias;
  float most;
  unsigned nan;
};
inline constexpr Fp8Format e4m3{.fraction_bits = 3, .bias = 7, .most = 448.0f, .nan = 0x7f};
inline constexpr Fp8Format e5m2{.fraction_bits = 2, .bias = 15, .most = 57344.0f, .nan = 0x7f};

inline float fp8_to_float(const Fp8Format& format, unsigned char bits) {
  const unsigned magnitude = bits & 0x7fu;
  const float sign = (bits & 0x80u) != 0 ? -1.0f : 1.0f;
  const bool is_ieee = format.fraction_bits == e5m2.fraction_bits;
  if (is_ieee ? magnitude > 0x7cu : magnitude == 0x7fu) return __builtin_nanf("");
  if (is_ieee && magnitude == 0x7cu) return sign * __builtin_inff();
  const int exponent = static_cast<int>(magnitude >> format.fraction_bits);
  const int fraction = static_cast<int>(magnitude & ((1u << format.fraction_bits) - 1u));
  const int units = exponent == 0 ? fraction : fraction + (1 << format.fraction_bits);
  return sign * std::ldexp(static_cast<float>(units),
                           (exponent == 0 ? 1 : exponent) - format.bias - format.fraction_bits);
}

// To the nearest, of two the even one; beyond the largest number the largest, as with
// __NV_SATFINITE.
inline unsigned char fp8_from_float(const Fp8Format& format, float value) {
  if (value != value) return static_cast<unsigned char>(format.nan);
  const unsigned sign = std::signbit(value) ? 0x80u : 0u;
  const float magnitude = std::fabs(value);
  if (magnitude >= format.most) {
    // The largest number's code: e4m3 0x7e, e5m2 0x7b.
    return static_cast<unsigned char>(sign | (format.fraction_bits == e5m2.fraction_bits ? 0x7bu : 0x7eu));
  }
  int exponent = 0;
  if (magnitude > 0.0f) std::frexp(magnitude, &exponent);
  const int least = 1 - format.bias;  // the exponent of the least normal number
  const int unit = std::max(magnitude > 0.0f ? exponent - 1 : least, least) - format.fraction_bits;
  const auto units = static_cast<unsigned>(std::nearbyint(std::ldexp(magnitude, -unit)));
  // (A carry into the next exponent gives its code, too.)
  const unsigned normal = 1u << format.fraction_bits;
  const int steps = unit + format.fraction_bits - least;
  const unsigned code =
      units < normal ? units : (static_cast<unsigned>(steps + 1) << format.fraction_bits) + units - normal;
  return static_cast<unsigned char>(sign | code);
}

}  // namespace emulator

inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float value, __nv_saturation_t saturation,
                                                __nv_fp8_interpretation_t format) {
  static_cast<void>(saturation);
  return emulator::fp8_from_float(format == __NV_E4M3 ? emulator::e4m3 : emulator::e5m2, value);
}
