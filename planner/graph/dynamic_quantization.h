#pragma once

#include <cstdint>

namespace parplan {

// Block-wise dynamic quantization of optimizer state (Dettmers et al. 2021, arXiv:2110.02861): a
// number is a code of 8 bits, which stands for a value in [-1, 1] or [0, 1], times the scale of its
// block. Kernels of all backends, and what reads and writes checkpoints, call what is here.

// Consecutive elements with one scale in fp32. bitsandbytes (optimizer.py, `blocksize`; 2,048
// before version 0.44) and torchao (optim/subclass_8bit.py, `block_size`) have 256, too.
inline constexpr std::int64_t quantization_block = 256;
constexpr std::int64_t quantization_blocks(std::int64_t elements) {
  return (elements + quantization_block - 1) / quantization_block;
}

// Smaller magnitudes than this, 2^-126, have no reciprocal in fp32: a block of them is one of
// zeros.
inline constexpr float least_scale = 0x1p-126f;

// The values of the codes, in ascending order: 0, 1, and in each of seven decades, from 10^(decade
// - 7) to 10^(decade - 6), the means of equal steps, twice as many as in the decade below
// (bitsandbytes functional.py, `create_dynamic_map`). Signed values are for first moments: one step
// in the first decade, and the negative of each, but none of 1; unsigned ones for second moments,
// twice as many.
//
// Counted from the value 0, which is number `zero`, the steps of a decade are numbers
// [steps, 2 * steps).
struct DynamicMap {
  bool is_signed = false;

  constexpr int zero() const { return is_signed ? 0 : 1; }
  constexpr int one() const { return is_signed ? 128 : 256; }
  // Steps of a decade, 0 to 6.
  constexpr int steps(int decade) const { return (is_signed ? 1 : 2) << decade; }
  // 10^(decade - 6)
  static constexpr double end(int decade) {
    double power = 1e-6;
    for (int i = 0; i < decade; ++i) power *= 10.0;
    return power;
  }

  // The number of a code without its sign.
  constexpr int number(int code) const {
    if (!is_signed) return code + 1;
    return code < 127 ? 127 - code : code - 127;
  }
  constexpr float value(int code) const {
    const int n = number(code);
    if (n == zero()) return 0.0f;
    if (n == one()) return 1.0f;
    int decade = 0;
    while (n >= 2 * steps(decade)) ++decade;
    const double magnitude = end(decade) * (0.1 + 0.9 * (n - steps(decade) + 0.5) / steps(decade));
    return static_cast<float>(is_signed && code < 127 ? -magnitude : magnitude);
  }

  // Where the nearest number to a magnitude changes: it is `zero` up to above(-1), of a decade
  // between above(decade - 1) and above(decade), and `one` beyond above(6). Each is the mean of the
  // values on either side; the last of a decade is end (1 - 0.45 / steps), the first of the next
  // end (1 + 2.25 / steps).
  constexpr float above(int decade) const {
    if (decade < 0) return static_cast<float>(0.5 * end(0) * (0.1 + 0.45 / steps(0)));
    if (decade < 6) return static_cast<float>(end(decade) * (1.0 + 0.9 / steps(decade)));
    return static_cast<float>(1.0 - 0.225 / steps(6));
  }
  // Inside of a decade numbers are equidistant: the nearest one of x is slope x + offset, rounded
  // down, and at most 2 steps - 1.
  constexpr float slope(int decade) const { return static_cast<float>(steps(decade) / (0.9 * end(decade))); }
  constexpr float offset(int decade) const { return static_cast<float>(steps(decade) * 8.0 / 9.0); }
};

// What kernels ask of a decade.
struct Decade {
  float above, slope, offset, last;  // it begins above `above`; its last number
};
struct Decades {
  Decade all[7];
  float above_last;  // where `one` begins
};
constexpr Decades decades_of(const DynamicMap& map) {
  Decades decades{};
  for (int i = 0; i < 7; ++i)
    decades.all[i] = {.above = map.above(i - 1),
                      .slope = map.slope(i),
                      .offset = map.offset(i),
                      .last = static_cast<float>(2 * map.steps(i) - 1)};
  decades.above_last = map.above(6);
  return decades;
}

// The code of the nearest value to `x`, a number over the scale of its block; NaN has that of 0.
template <bool is_signed>
constexpr std::uint8_t quantized(float x) {
  constexpr Decades decades = decades_of({.is_signed = is_signed});
  const float magnitude = x < 0.0f ? -x : x;
  float number = is_signed ? 0.0f : 1.0f;
  for (const Decade& decade : decades.all) {
    const float nearest = decade.slope * magnitude + decade.offset;
    number = magnitude > decade.above ? (nearest < decade.last ? nearest : decade.last) : number;
  }
  if (is_signed && x < 0.0f) return static_cast<std::uint8_t>(127 - static_cast<int>(number));
  if (magnitude > decades.above_last) return 255;
  return static_cast<std::uint8_t>(static_cast<int>(number) + (is_signed ? 127 : -1));
}

// The scale of a block: its number of the largest magnitude, with its sign, the positive one of
// two. bitsandbytes and torchao take the magnitude, and then a negative extreme, which has no code,
// loses 0.7%. With the sign it is 1 times the scale, exactly, so what was quantized once is
// quantized to the same bits again: a checkpoint in fp32 loses nothing.
constexpr float block_scale(float highest, float lowest) {
  const float extreme = highest >= -lowest ? highest : lowest;
  const float magnitude = extreme < 0.0f ? -extreme : extreme;
  return magnitude < least_scale ? 0.0f : extreme;
}
// What its numbers are multiplied by to be quantized.
constexpr float inverse_scale(float scale) {
  return scale == 0.0f ? 0.0f : 1.0f / scale;
}

// The values of all codes.
struct CodeValues {
  float of[256];
};
constexpr CodeValues values_of(const DynamicMap& map) {
  CodeValues values{};
  for (int code = 0; code < 256; ++code) values.of[code] = map.value(code);
  return values;
}
inline constexpr CodeValues signed_values = values_of({.is_signed = true});
inline constexpr CodeValues unsigned_values = values_of({.is_signed = false});

}  // namespace parplan
