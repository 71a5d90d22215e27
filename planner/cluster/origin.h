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
  matrix_fp8,
  vector,
  memory,
  sustained_half,
  sustained_weights,
  early_half,
  early_weights,
  sustained_fp8,
  sustained_fp8_weights,
  sustained_memory,
  attention,
  attention_gradient,
  ampere_attention,
  ampere_attention_gradient,
  triton_attention,
  triton_attention_gradient,
  unaligned_two_bytes,
  unaligned_four_bytes,
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

// Where the time of a communication comes from.
enum class CommunicationOrigin : std::uint8_t {
  fitted,   // constants that were fitted to measured collectives of such GPUs, or of such a network
  formula,  // NCCL's own model of its algorithms (src/graph/tuning.cc), at the rates of the cluster's links
  links,    // the rates and latencies of the cluster's links
  count_
};
const char* name(CommunicationOrigin origin);

// Times by the origin of what they follow from.
template <class Of>
struct TimeBy {
  Seconds& operator[](Of origin) { return of[index_of(origin)]; }
  const Seconds& operator[](Of origin) const { return of[index_of(origin)]; }
  Seconds total() const {
    Seconds sum;
    for (const Seconds& time : of) sum += time;
    return sum;
  }
  TimeBy& operator+=(const TimeBy& other) {
    for (std::size_t i = 0; i < of.size(); ++i) of[i] += other.of[i];
    return *this;
  }
  TimeBy& operator*=(double times) {
    for (Seconds& time : of) time = time * times;
    return *this;
  }
  bool operator==(const TimeBy&) const = default;

  std::array<Seconds, count_of<Of>> of;
};
using TimeByOrigin = TimeBy<Origin>;
using TimeByCommunicationOrigin = TimeBy<CommunicationOrigin>;

}  // namespace parplan
