#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "planner/base/enum_index.h"
#include "planner/base/units.h"

namespace parplan {

// Where the number behind a kernel's time comes from, the surest first.
enum class Origin : std::uint8_t {
  measured,      // a rate that was measured on such a device
  interpolated,  // a model that was fitted to kernels of several shapes, measured on such a device
  datasheet,     // the datasheet's number, a share of it, or what is assumed for a class of devices
  count_
};
const char* name(Origin origin);
std::vector<std::string> origin_names();

// What a kernel's time follows from: the rates of a device's row, and the launch.
enum class Rate : std::uint8_t {
  matrix_fp32,
  matrix_half,
  matrix_tf32,
  vector,
  memory,
  sustained_half,
  sustained_weights,
  sustained_memory,
  attention,
  attention_gradient,
  ampere_attention,
  ampere_attention_gradient,
  kernel_launch,
  count_
};
const char* name(Rate rate);  // in files: "sustained.half"
std::vector<std::string> rate_names();

// The origin of each rate: the datasheet, where a file states none.
struct RateOrigins {
  constexpr RateOrigins() { of.fill(Origin::datasheet); }
  constexpr Origin& operator[](Rate rate) { return of[index_of(rate)]; }
  constexpr Origin operator[](Rate rate) const { return of[index_of(rate)]; }
  bool operator==(const RateOrigins&) const = default;

  std::array<Origin, count_of<Rate>> of;
};
// Each rate as unsure as the less sure of two.
RateOrigins less_sure(const RateOrigins& a, const RateOrigins& b);

// Times of kernels by the origin of what they follow from.
struct TimeByOrigin {
  Seconds& operator[](Origin origin) { return of[index_of(origin)]; }
  const Seconds& operator[](Origin origin) const { return of[index_of(origin)]; }
  Seconds total() const;
  TimeByOrigin& operator+=(const TimeByOrigin& other);
  TimeByOrigin& operator*=(double times);
  bool operator==(const TimeByOrigin&) const = default;

  std::array<Seconds, count_of<Origin>> of;
};

}  // namespace parplan
