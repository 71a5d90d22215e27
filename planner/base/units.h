#pragma once

#include <compare>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

namespace parplan {

// Real-valued quantities as (bytes^B * seconds^T * flops^F). Sums need equal units; products and
// quotients have the unit that follows on paper; nothing else compiles.
template <int B, int T, int F>
struct Quantity {
  double value = 0.0;

  constexpr Quantity() = default;
  constexpr explicit Quantity(double v) : value(v) {}
  constexpr auto operator<=>(const Quantity&) const = default;

  constexpr Quantity& operator+=(Quantity o) { value += o.value; return *this; }
  constexpr Quantity& operator-=(Quantity o) { value -= o.value; return *this; }
  constexpr Quantity& operator*=(double f) { value *= f; return *this; }
  friend constexpr Quantity operator+(Quantity a, Quantity b) { return Quantity(a.value + b.value); }
  friend constexpr Quantity operator-(Quantity a, Quantity b) { return Quantity(a.value - b.value); }
  friend constexpr Quantity operator*(Quantity a, double f) { return Quantity(a.value * f); }
  friend constexpr Quantity operator*(double f, Quantity a) { return Quantity(a.value * f); }
  friend constexpr Quantity operator/(Quantity a, double f) { return Quantity(a.value / f); }
  // A ratio of like quantities is a plain number.
  friend constexpr double operator/(Quantity a, Quantity b) { return a.value / b.value; }
};

using Seconds = Quantity<0, 1, 0>;
using Flops = Quantity<0, 0, 1>;  // a count of floating-point operations (multiply and add are two)
using FlopsPerSecond = Quantity<0, -1, 1>;
using BytesPerSecond = Quantity<1, -1, 0>;

// A count of bytes: whole, because memory is promised to the byte.
struct Bytes {
  std::int64_t count = 0;

  constexpr Bytes() = default;
  constexpr explicit Bytes(std::int64_t n) : count(n) {}
  constexpr auto operator<=>(const Bytes&) const = default;

  constexpr Bytes& operator+=(Bytes o) { count += o.count; return *this; }
  constexpr Bytes& operator-=(Bytes o) { count -= o.count; return *this; }
  friend constexpr Bytes operator+(Bytes a, Bytes b) { return Bytes(a.count + b.count); }
  friend constexpr Bytes operator-(Bytes a, Bytes b) { return Bytes(a.count - b.count); }
  friend constexpr Bytes operator*(Bytes a, std::int64_t n) { return Bytes(a.count * n); }
  friend constexpr Bytes operator*(std::int64_t n, Bytes a) { return Bytes(a.count * n); }
};

// Electric power, as boards are rated.
struct Watts {
  double value = 0.0;

  constexpr Watts() = default;
  constexpr explicit Watts(double v) : value(v) {}
  constexpr auto operator<=>(const Watts&) const = default;
};

constexpr Seconds operator/(Bytes b, BytesPerSecond r) { return Seconds(static_cast<double>(b.count) / r.value); }
constexpr Seconds operator/(Flops f, FlopsPerSecond r) { return Seconds(f.value / r.value); }
constexpr BytesPerSecond operator/(Bytes b, Seconds t) {
  return BytesPerSecond(static_cast<double>(b.count) / t.value);
}
constexpr FlopsPerSecond operator/(Flops f, Seconds t) { return FlopsPerSecond(f.value / t.value); }

// Rounds `bytes` up to a whole multiple of `alignment` (> 0).
constexpr Bytes align_up(Bytes bytes, std::int64_t alignment) {
  return Bytes((bytes.count + alignment - 1) / alignment * alignment);
}
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Units as text, as in files: a number, a space (optional) and a unit.
//   bytes      B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024); decimals
//              are rounded down to a whole byte
//   bandwidth  B/s .. TB/s, KiB/s .. TiB/s, bit/s, kbit/s, Mbit/s, Gbit/s, Tbit/s (and Gb/s,
//              Mbps, Gbps, Tbps)
//   line rate  those of bits alone: as network cards are sold, eight times a bandwidth in bytes
//   duration   ns, us, ms, s, min, h
//   rate       FLOP/s, kFLOP/s, MFLOP/s, GFLOP/s, TFLOP/s, PFLOP/s
//   power      mW, W, kW, MW
// Throws ConfigError (without a location; readers of files add theirs) that says what was found and
// which units are allowed. A number without its unit is an error, and so are negative and
// non-finite numbers and values that no machine has, so that results computed from them stay within
// the range of a double:
//   bytes      0, or from 1 B
//   bandwidth  0, or from 1 B/s to 1000000 TB/s
//   duration   up to 24 h
//   rate       0, or from 1 FLOP/s to 1000000 PFLOP/s
//   power      up to 1 MW
inline constexpr BytesPerSecond least_bandwidth{1.0};
inline constexpr BytesPerSecond most_bandwidth{1e18};
inline constexpr Seconds longest_duration{86400.0};
Bytes parse_bytes(std::string_view text);
BytesPerSecond parse_bandwidth(std::string_view text);
BytesPerSecond parse_line_rate(std::string_view text);
Seconds parse_duration(std::string_view text);
FlopsPerSecond parse_flop_rate(std::string_view text);
Watts parse_power(std::string_view text);

// For people: three significant digits and the fitting unit ("1.50 GiB", "450 GB/s", "12.3 ms",
// "989 TFLOP/s", "700 W"); durations from one to ten minutes in seconds with one decimal ("87.1
// s").
std::string format_bytes(Bytes bytes);
// The same for a reader who types it again: rounded up to `digits` significant digits (3 to 17), so
// that parse_bytes gives no fewer bytes.
std::string format_bytes_up(Bytes bytes, int digits = 3);
std::string format_bandwidth(BytesPerSecond rate);
std::string format_duration(Seconds seconds);
std::string format_flop_rate(FlopsPerSecond rate);
std::string format_power(Watts power);

// For files: the shortest text that the parse function above reads back to the same value, to the
// last bit, if it accepts the value.
std::string write_bytes(Bytes bytes);
std::string write_bandwidth(BytesPerSecond rate);
std::string write_duration(Seconds seconds);
std::string write_flop_rate(FlopsPerSecond rate);
std::string write_power(Watts power);

}  // namespace parplan
