#include "planner/graph/dynamic_quantization.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace parplan {
namespace {

// The map as it is published (bitsandbytes functional.py, `create_dynamic_map`): means of
// neighbours among equidistant numbers from 0.1 to 1 in each decade, 0 and 1, sorted.
std::vector<double> published_map(bool is_signed) {
  std::vector<double> map = {0.0, 1.0};
  for (int i = 0; i < 7; ++i) {
    const int steps = (1 << i) * (is_signed ? 1 : 2);
    for (int k = 0; k < steps; ++k) {
      const double mean = 0.5 * ((0.1 + 0.9 * k / steps) + (0.1 + 0.9 * (k + 1) / steps)) * std::pow(10.0, i - 6);
      map.push_back(mean);
      if (is_signed) map.push_back(-mean);
    }
  }
  std::ranges::sort(map);
  return map;
}

std::uint8_t code_of(bool is_signed, float x) {
  return is_signed ? quantized<true>(x) : quantized<false>(x);
}
const CodeValues& values_of(bool is_signed) {
  return is_signed ? signed_values : unsigned_values;
}

// How much farther from x the value of its code is than the nearest one.
double excess(const std::vector<double>& map, double x, double value) {
  double nearest = INFINITY;
  for (const double each : map) nearest = std::min(nearest, std::abs(each - x));
  return std::abs(value - x) - nearest;
}

}  // namespace

TEST_CASE("codes stand for the values of the published map") {
  for (const bool is_signed : {true, false}) {
    const std::vector<double> map = published_map(is_signed);
    REQUIRE(map.size() == 256);
    for (std::size_t code = 0; code < 256; ++code)
      CHECK(values_of(is_signed).of[code] == doctest::Approx(map[code]).epsilon(1e-7));
  }
  // Its ends and its smallest steps.
  CHECK(signed_values.of[0] == doctest::Approx(-0.99296875));  // 1 - 0.45 / 64
  CHECK(signed_values.of[127] == 0.0f);
  CHECK(signed_values.of[128] == doctest::Approx(5.5e-7));
  CHECK(signed_values.of[255] == 1.0f);
  CHECK(unsigned_values.of[0] == 0.0f);
  CHECK(unsigned_values.of[1] == doctest::Approx(3.25e-7));
  CHECK(unsigned_values.of[255] == 1.0f);
}

TEST_CASE("a number has the code of the nearest value") {
  std::mt19937 random(1);
  for (const bool is_signed : {true, false}) {
    const std::vector<double> map = published_map(is_signed);
    for (int trial = 0; trial < 20000; ++trial) {
      const double magnitude = std::pow(10.0, std::uniform_real_distribution<double>(-8.0, 0.0)(random));
      const auto x = static_cast<float>(is_signed && trial % 2 == 0 ? -magnitude : magnitude);
      const double found = map[code_of(is_signed, x)];
      // Half way between two values, rounding decides.
      if (excess(map, x, found) > 1e-6 * magnitude) FAIL_CHECK(x, " becomes ", found);
    }
    for (std::size_t code = 0; code < 256; ++code) CHECK(code_of(is_signed, values_of(is_signed).of[code]) == code);
  }
  CHECK(quantized<true>(NAN) == 127);
  CHECK(quantized<false>(NAN) == 0);
  CHECK(quantized<true>(-1.0f) == 0);
}

TEST_CASE("a scale is the number of the largest magnitude, with its sign") {
  CHECK(block_scale(2.0f, -3.0f) == -3.0f);
  CHECK(block_scale(3.0f, -3.0f) == 3.0f);
  CHECK(block_scale(-1.0f, -3.0f) == -3.0f);
  CHECK(block_scale(0.0f, 0.0f) == 0.0f);
  CHECK(block_scale(1e-39f, 0.0f) == 0.0f);  // no reciprocal
  CHECK(inverse_scale(0.0f) == 0.0f);
  CHECK(inverse_scale(-4.0f) == -0.25f);
  CHECK(std::isfinite(inverse_scale(least_scale)));
}

TEST_CASE("what was quantized once is quantized to the same bits again, and is off by half a step at most") {
  std::mt19937 random(2);
  for (const bool is_signed : {true, false})
    for (int trial = 0; trial < 200; ++trial) {
      const double spread = trial % 4 * 2.0;  // decades
      std::vector<float> numbers(quantization_block);
      for (float& x : numbers) {
        x = static_cast<float>(std::normal_distribution<double>(0.0, 1e-4)(random) *
                               std::pow(10.0, -std::uniform_real_distribution<double>(0.0, spread)(random)));
        if (!is_signed) x = std::abs(x);
      }
      const auto [lowest, highest] = std::ranges::minmax(numbers);
      const float scale = block_scale(highest, lowest);
      std::vector<std::uint8_t> codes;
      std::vector<float> again;
      for (const float x : numbers) codes.push_back(code_of(is_signed, x * inverse_scale(scale)));
      for (const std::uint8_t code : codes) again.push_back(values_of(is_signed).of[code] * scale);
      const auto [low, high] = std::ranges::minmax(again);
      CHECK(block_scale(high, low) == scale);
      for (std::size_t i = 0; i < codes.size(); ++i)
        CHECK(code_of(is_signed, again[i] * inverse_scale(scale)) == codes[i]);
      // In the upper decade, values are 0.9 / 64 (signed) or 0.9 / 128 apart.
      const double step = 0.9 / (is_signed ? 64 : 128);
      for (std::size_t i = 0; i < codes.size(); ++i)
        CHECK(std::abs(again[i] - numbers[i]) <= 0.501 * step * std::abs(scale));
    }
}

}  // namespace parplan
