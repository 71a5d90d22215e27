#include "planner/base/units.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <span>
#include <vector>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/base/text.h"

namespace parplan {
namespace {

constexpr double KiB = 1024.0;
constexpr double bit = 1.0 / 8.0;

// A unit in terms of the base unit. `shown`: used by format_..., which takes ascending units;
// `written`: used by write_....
struct UnitRow {
  std::string_view name;
  double factor;
  bool shown;
  bool written;
};

constexpr UnitRow byte_units[] = {
    {"B", 1, true, true},
    {"kB", 1e3, false, true},
    {"MB", 1e6, false, true},
    {"GB", 1e9, false, true},
    {"TB", 1e12, false, true},
    {"KiB", KiB, true, true},
    {"MiB", KiB* KiB, true, true},
    {"GiB", KiB* KiB* KiB, true, true},
    {"TiB", KiB* KiB* KiB* KiB, true, true},
};

constexpr UnitRow bandwidth_units[] = {
    {"B/s", 1, true, true},
    {"kB/s", 1e3, true, true},
    {"MB/s", 1e6, true, true},
    {"GB/s", 1e9, true, true},
    {"TB/s", 1e12, true, true},
    {"KiB/s", KiB, false, false},
    {"MiB/s", KiB* KiB, false, false},
    {"GiB/s", KiB* KiB* KiB, false, false},
    {"TiB/s", KiB* KiB* KiB* KiB, false, false},
    {"bit/s", bit, false, false},
    {"kbit/s", 1e3 * bit, false, false},
    {"Mbit/s", 1e6 * bit, false, false},
    {"Gbit/s", 1e9 * bit, false, false},
    {"Tbit/s", 1e12 * bit, false, false},
    {"Gb/s", 1e9 * bit, false, false},  // the units in which network cards are sold
    {"Mbps", 1e6 * bit, false, false},
    {"Gbps", 1e9 * bit, false, false},
    {"Tbps", 1e12 * bit, false, false},
};
// Units of bits follow those of bytes.
constexpr auto first_of_bits = std::ranges::find(bandwidth_units, std::string_view("bit/s"), &UnitRow::name);
constexpr std::span<const UnitRow> bit_rate_units(first_of_bits, std::end(bandwidth_units));

// Below a second the divisor is exact and the factor is not, so these units are given as 1 /
// divisor in `parse`.
constexpr UnitRow duration_units[] = {
    {"ns", 1e-9, true, true}, {"us", 1e-6, true, true}, {"ms", 1e-3, true, true},
    {"s", 1, true, true},     {"min", 60, true, true},  {"h", 3600, true, true},
};

constexpr UnitRow flop_rate_units[] = {
    {"FLOP/s", 1, true, true},    {"kFLOP/s", 1e3, true, true},   {"MFLOP/s", 1e6, true, true},
    {"GFLOP/s", 1e9, true, true}, {"TFLOP/s", 1e12, true, true}, {"PFLOP/s", 1e15, true, true},
};

constexpr UnitRow power_units[] = {
    {"mW", 1e-3, true, true}, {"W", 1, true, true}, {"kW", 1e3, true, true}, {"MW", 1e6, true, true}};

// A quantity under its usual name, for messages.
struct Kind {
  std::string_view what;
  std::string_view example;
  std::span<const UnitRow> units;
  // The limits, in the base unit and as messages write them; 0 is always allowed.
  double least = 0.0;
  double most = std::numeric_limits<double>::max();
  std::string_view range = "";
};
constexpr Kind byte_kind{.what = "a size", .example = "80 GiB", .units = byte_units};
constexpr Kind bandwidth_kind{"a bandwidth",         "450 GB/s",           bandwidth_units,
                              least_bandwidth.value, most_bandwidth.value, "from 1 B/s to 1000000 TB/s"};
constexpr Kind line_rate_kind{"a line rate",         "400 Gbit/s",         bit_rate_units,
                              least_bandwidth.value, most_bandwidth.value, "from 8 bit/s to 8000000 Tbit/s"};
constexpr Kind duration_kind{"a duration", "2 us", duration_units, 0.0, longest_duration.value, "of at most 24 h"};
constexpr Kind flop_rate_kind{
    "a compute rate", "989 TFLOP/s", flop_rate_units, 1.0, 1e21, "from 1 FLOP/s to 1000000 PFLOP/s"};
constexpr Kind power_kind{"a power", "700 W", power_units, 0.0, 1e6, "of at most 1 MW"};

std::vector<std::string> unit_names(const Kind& kind) {
  std::vector<std::string> names;
  for (const UnitRow& unit : kind.units) names.emplace_back(unit.name);
  return names;
}

std::string_view trim(std::string_view text) {
  const auto blank = [](char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; };
  while (!text.empty() && blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && blank(text.back())) text.remove_suffix(1);
  return text;
}

// The number as text, and its unit.
struct Parsed {
  std::string_view number;
  double value = 0.0;
  const UnitRow* unit = nullptr;
};

Parsed parse(const Kind& kind, std::string_view whole) {
  const std::string_view text = trim(whole);
  Parsed parsed;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), parsed.value);
  const bool starts_as_number =
      !text.empty() && (std::string_view("0123456789.-").find(text[0]) != std::string_view::npos);
  if (error == std::errc::invalid_argument || !starts_as_number) {
    throw ConfigError(fmt::format("expected {} such as '{}', found '{}'", kind.what, kind.example, whole));
  }
  if (error != std::errc{} || !std::isfinite(parsed.value)) {
    throw ConfigError(fmt::format("expected {} within the range of a double, found '{}'", kind.what, whole));
  }
  if (parsed.value < 0.0 || std::signbit(parsed.value)) {
    throw ConfigError(fmt::format("expected {} of at least 0, found '{}'", kind.what, whole));
  }
  parsed.number = text.substr(0, static_cast<std::size_t>(end - text.data()));
  const std::string_view name = trim(text.substr(parsed.number.size()));
  for (const UnitRow& unit : kind.units) {
    if (unit.name == name) parsed.unit = &unit;
  }
  if (parsed.unit == nullptr) {
    const std::vector<std::string> names = unit_names(kind);
    if (name.empty()) {
      throw ConfigError(fmt::format("expected {} with its unit such as '{}', found '{}'; allowed units: {}", kind.what,
                                    kind.example, whole, join(names)));
    }
    throw ConfigError(fmt::format("unknown unit '{}' of {} in '{}'; allowed units: {}{}", name, kind.what, whole,
                                  join(names), did_you_mean(name, names)));
  }
  return parsed;
}

// Dividing by 1e9 rounds once where multiplying by 1e-9 rounds twice: '2 us' is the double nearest
// to 2e-6.
double scaled(const Parsed& parsed) {
  const double factor = parsed.unit->factor;
  return factor < 1.0 ? parsed.value / std::round(1.0 / factor) : parsed.value * factor;
}

double parse_real(const Kind& kind, std::string_view text) {
  const double value = scaled(parse(kind, text));
  if (value > kind.most || (value != 0.0 && value < kind.least)) {
    throw ConfigError(fmt::format("expected {} {}, found '{}'", kind.what, kind.range, text));
  }
  return value;
}

// Three significant digits of a value of at least 0.
std::string three_digits(double value) {
  for (const int decimals : {2, 1}) {
    std::string text = fmt::format("{:.{}f}", value, decimals);
    if (std::stod(text) < (decimals == 2 ? 10.0 : 100.0)) return text;
  }
  return fmt::format("{:.0f}", value);
}

// The largest unit that keeps the shown number at 1 or above; the smallest unit below that.
std::string format(const Kind& kind, double value) {
  PARPLAN_ASSERT(std::isfinite(value), fmt::format("value {}", value));
  const double size = std::abs(value);
  std::string text;
  for (const UnitRow& unit : kind.units) {
    if (!unit.shown) continue;
    const std::string number = three_digits(size / unit.factor);
    if (!text.empty() && size / unit.factor < 1.0 && std::stod(number) < 1.0) break;
    text = fmt::format("{}{} {}", value < 0 ? "-" : "", number, unit.name);
  }
  return text;
}

// The shortest text in one of the units that is read back to `value`; without an exponent where
// there is such a text.
std::string write(const Kind& kind, double value) {
  PARPLAN_ASSERT(std::isfinite(value) && value >= 0.0, fmt::format("value {}", value));
  const auto cost = [](const std::string& text) {
    return text.size() + (text.find("e+") != std::string::npos || text.find("e-") != std::string::npos ? 1000u : 0u);
  };
  std::string best;
  for (const UnitRow& unit : kind.units) {
    if (!unit.written) continue;
    const std::string text = fmt::format("{} {}", value / unit.factor, unit.name);
    if (scaled(parse(kind, text)) == value && (best.empty() || cost(text) < cost(best))) best = text;
  }
  PARPLAN_ASSERT(!best.empty(), fmt::format("value {}", value));  // the base unit always reads back
  return best;
}

}  // namespace

Bytes parse_bytes(std::string_view text) {
  const Parsed parsed = parse(byte_kind, text);
  const auto too_large = [&] {
    throw ConfigError(
        fmt::format("expected a size below {} B, found '{}'", std::numeric_limits<std::int64_t>::max(), text));
  };
  const std::int64_t factor = static_cast<std::int64_t>(parsed.unit->factor);
  std::int64_t whole = 0;
  const char* const last = parsed.number.data() + parsed.number.size();
  const auto [end, error] = std::from_chars(parsed.number.data(), last, whole);
  if (end == last && error == std::errc{}) {
    if (whole > std::numeric_limits<std::int64_t>::max() / factor) too_large();
    return Bytes(whole * factor);
  }
  // 0.3 GB means 300000000 bytes, though no double is 0.3: two roundings are tolerated. A fraction
  // of a byte is dropped.
  const double value = scaled(parsed);
  const double rounded = std::round(value);
  const double bytes = std::abs(value - rounded) > value * 0x1p-51 ? std::floor(value) : rounded;
  if (bytes >= 0x1p63) too_large();
  if (value > 0.0 && bytes < 1.0)
    throw ConfigError(fmt::format("expected a size of 0 or at least 1 B, found '{}' ({} B)", text, value));
  return Bytes(static_cast<std::int64_t>(bytes));
}

BytesPerSecond parse_bandwidth(std::string_view text) { return BytesPerSecond(parse_real(bandwidth_kind, text)); }
BytesPerSecond parse_line_rate(std::string_view text) {
  const Parsed parsed = parse(bandwidth_kind, text);
  if (std::ranges::find(bit_rate_units, parsed.unit->name, &UnitRow::name) == bit_rate_units.end())
    throw ConfigError(
        fmt::format("a line rate is in bits a second, found '{}': write '{} Gbit/s' for as many bytes, or '{} Gbit/s' "
                    "if bits were meant",
                    text, scaled(parsed) / (1e9 * bit), scaled(parsed) / 1e9));
  return BytesPerSecond(parse_real(line_rate_kind, text));
}
Seconds parse_duration(std::string_view text) { return Seconds(parse_real(duration_kind, text)); }
FlopsPerSecond parse_flop_rate(std::string_view text) { return FlopsPerSecond(parse_real(flop_rate_kind, text)); }
Watts parse_power(std::string_view text) { return Watts(parse_real(power_kind, text)); }

std::string format_bytes(Bytes bytes) {
  if (bytes.count > -1024 && bytes.count < 1024) return fmt::format("{} B", bytes.count);
  return format(byte_kind, static_cast<double>(bytes.count));
}
std::string format_bytes_up(Bytes bytes, int digits) {
  PARPLAN_ASSERT(bytes.count >= 0 && digits >= 3 && digits <= 17,
                 fmt::format("{} bytes, {} digits", bytes.count, digits));
  if (bytes.count < 1024) return fmt::format("{} B", bytes.count);
  const UnitRow* unit = nullptr;
  const UnitRow* next = nullptr;
  for (const UnitRow& row : byte_units) {
    if (!row.shown) continue;
    if (static_cast<std::int64_t>(row.factor) <= bytes.count) unit = &row;
    else if (next == nullptr) next = &row;
  }
  const auto factor = static_cast<std::int64_t>(unit->factor);
  const auto power_of_ten = [](int exponent) {
    std::int64_t power = 1;
    while (exponent-- > 0) power *= 10;
    return power;
  };
  const std::int64_t most = power_of_ten(digits);
  for (int decimals = digits - 1;; --decimals) {
    const std::int64_t power = power_of_ten(decimals);
    std::int64_t number = bytes.count / factor, rest = bytes.count % factor;
    if (decimals > 0 && number >= most / power) continue;
    for (int i = 0; i < decimals; ++i) {  // long division, which is exact
      rest *= 10;
      number = 10 * number + rest / factor;
      rest %= factor;
    }
    if (rest > 0) ++number;
    if (next != nullptr && number / power >= 1024)
      return format_bytes_up(Bytes(static_cast<std::int64_t>(next->factor)), digits);
    if (decimals == 0) return fmt::format("{} {}", number, unit->name);
    if (number < most) return fmt::format("{}.{:0{}} {}", number / power, number % power, decimals, unit->name);
  }
}
std::string format_bandwidth(BytesPerSecond rate) { return format(bandwidth_kind, rate.value); }
std::string format_duration(Seconds seconds) {
  // Minutes would hide the difference between two steps.
  const double size = std::abs(seconds.value);
  if (size >= 59.5 && size < 600.0) return fmt::format("{:.1f} s", seconds.value);
  return seconds.value == 0.0 ? "0 s" : format(duration_kind, seconds.value);
}
std::string format_flop_rate(FlopsPerSecond rate) { return format(flop_rate_kind, rate.value); }
std::string format_power(Watts power) { return format(power_kind, power.value); }

std::string write_bytes(Bytes bytes) {
  PARPLAN_ASSERT(bytes.count >= 0, fmt::format("{} bytes", bytes.count));
  // Whole numbers only, which are exact beyond the range of a double.
  std::string best = fmt::format("{} B", bytes.count);
  for (const UnitRow& unit : byte_units) {
    const std::int64_t factor = static_cast<std::int64_t>(unit.factor);
    if (bytes.count % factor != 0 || bytes.count == 0) continue;
    const std::string text = fmt::format("{} {}", bytes.count / factor, unit.name);
    if (text.size() < best.size()) best = text;
  }
  return best;
}
std::string write_bandwidth(BytesPerSecond rate) { return write(bandwidth_kind, rate.value); }
std::string write_duration(Seconds seconds) { return write(duration_kind, seconds.value); }
std::string write_flop_rate(FlopsPerSecond rate) { return write(flop_rate_kind, rate.value); }
std::string write_power(Watts power) { return write(power_kind, power.value); }

}  // namespace parplan
