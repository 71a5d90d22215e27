#include "planner/base/units.h"

#include <doctest/doctest.h>

#include "planner/base/error.h"
#include "tests/planner/base/error_of.h"

using namespace parplan;

namespace {
std::string bytes_error(const char* text) {
  return error_of<ConfigError>([&] { parse_bytes(text); });
}
}  // namespace

TEST_CASE("Bytes over bandwidth are seconds") {
  CHECK((Bytes(100) / BytesPerSecond(50.0)).value == 2.0);
  CHECK((Flops(30.0) / FlopsPerSecond(10.0)).value == 3.0);
  CHECK((Bytes(8) / Seconds(2.0)) == BytesPerSecond(4.0));
  CHECK(align_up(Bytes(65), 64) == Bytes(128));
}

TEST_CASE("Sizes are read in powers of 1000 and of 1024, with or without a space") {
  CHECK(parse_bytes("80 GiB") == Bytes(85899345920));  // 80 * 1024^3
  CHECK(parse_bytes("80GB") == Bytes(80000000000));
  CHECK(parse_bytes(" 7 B ") == Bytes(7));
  CHECK(parse_bytes("1.5 KiB") == Bytes(1536));
  CHECK(parse_bytes("0.3 GB") == Bytes(300000000));
  CHECK(parse_bytes("0 B") == Bytes(0));
  CHECK(parse_bytes("0.0 GiB") == Bytes(0));
  CHECK(parse_bytes("9223372036854775807 B") == Bytes(INT64_MAX));
}

TEST_CASE("A size with decimals is rounded down to a whole byte") {
  CHECK(parse_bytes("1.41 GiB") == Bytes(1513975971));      // 1.41 * 1024^3 = 1513975971.84
  CHECK(parse_bytes("23.6 GiB") == Bytes(25340307046));     // 25340307046.4
  CHECK(parse_bytes("79.1 GiB") == Bytes(84932978278));     // 84932978278.4
  CHECK(parse_bytes("12.345678901 kB") == Bytes(12345));
  CHECK(parse_bytes("1.999 B") == Bytes(1));
  for (int tenths = 1; tenths < 2000; ++tenths) {
    const Bytes bytes = parse_bytes(std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " GiB");
    CHECK(bytes == Bytes(tenths * (std::int64_t{1} << 30) / 10));
  }
}

TEST_CASE("Bandwidths are read in bytes and in bits") {
  CHECK(parse_bandwidth("450 GB/s").value == 450e9);
  CHECK(parse_bandwidth("400 Gbit/s").value == 50e9);
  CHECK(parse_bandwidth("400 Gb/s").value == 50e9);
  CHECK(parse_bandwidth("400Gbps").value == 50e9);
  CHECK(parse_line_rate("400 Gbps").value == 50e9);
  CHECK(parse_line_rate("1.6 Tbit/s").value == 200e9);
  CHECK(parse_bandwidth("1 GiB/s").value == 1073741824.0);
}

TEST_CASE("Durations and compute rates are read to the nearest double") {
  CHECK(parse_duration("2 us").value == 2e-6);
  CHECK(parse_duration("1.3 ns").value == 1.3e-9);
  CHECK(parse_duration("1.5 h").value == 5400.0);
  CHECK(parse_flop_rate("989 TFLOP/s").value == 989e12);
  CHECK(parse_power("700 W").value == 700.0);
  CHECK(parse_power("1.2 kW").value == 1200.0);
  CHECK(parse_power("5 mW").value == 0.005);
}

TEST_CASE("A quantity that cannot be read says what was found and what is allowed") {
  const std::string units = "B, kB, MB, GB, TB, KiB, MiB, GiB, TiB";
  CHECK(bytes_error("") == "error: expected a size such as '80 GiB', found ''");
  CHECK(bytes_error("lots") == "error: expected a size such as '80 GiB', found 'lots'");
  CHECK(bytes_error("inf B") == "error: expected a size such as '80 GiB', found 'inf B'");
  CHECK(bytes_error("1e999 B") == "error: expected a size within the range of a double, found '1e999 B'");
  CHECK(bytes_error("80") ==
        "error: expected a size with its unit such as '80 GiB', found '80'; allowed units: " + units);
  CHECK(bytes_error("80 Gib") == "error: unknown unit 'Gib' of a size in '80 Gib'; allowed units: " + units +
                                     "; did you mean 'GiB'?");
  CHECK(bytes_error("-3 GiB") == "error: expected a size of at least 0, found '-3 GiB'");
  CHECK(bytes_error("0.5 B") == "error: expected a size of 0 or at least 1 B, found '0.5 B' (0.5 B)");
  CHECK(bytes_error("1e-30 GiB").starts_with("error: expected a size of 0 or at least 1 B, found '1e-30 GiB'"));
  CHECK(bytes_error("9000000000 GiB") ==
        "error: expected a size below 9223372036854775807 B, found '9000000000 GiB'");
  CHECK(error_of<ConfigError>([] { parse_duration("1e308 h"); }) ==
        "error: expected a duration of at most 24 h, found '1e308 h'");
  CHECK(error_of<ConfigError>([] { parse_duration("2 sec"); }) ==
        "error: unknown unit 'sec' of a duration in '2 sec'; allowed units: ns, us, ms, s, min, h");
  CHECK(error_of<ConfigError>([] { parse_bandwidth("450 GB"); }) ==
        "error: unknown unit 'GB' of a bandwidth in '450 GB'; allowed units: B/s, kB/s, MB/s, GB/s, TB/s, KiB/s, "
        "MiB/s, GiB/s, TiB/s, bit/s, kbit/s, Mbit/s, Gbit/s, Tbit/s, Gb/s, Mbps, Gbps, Tbps");
  CHECK(error_of<ConfigError>([] { parse_line_rate("50 GB/s"); }) ==
        "error: a line rate is in bits a second, found '50 GB/s': write '400 Gbit/s' for as many bytes, or '50 "
        "Gbit/s' if bits were meant");
  CHECK(error_of<ConfigError>([] { parse_flop_rate("989 TFLOPS"); }) ==
        "error: unknown unit 'TFLOPS' of a compute rate in '989 TFLOPS'; allowed units: FLOP/s, kFLOP/s, MFLOP/s, "
        "GFLOP/s, TFLOP/s, PFLOP/s; did you mean 'TFLOP/s'?");
  CHECK(error_of<ConfigError>([] { parse_power("700 watt"); }) ==
        "error: unknown unit 'watt' of a power in '700 watt'; allowed units: mW, W, kW, MW");
  CHECK(error_of<ConfigError>([] { parse_power("700"); }) ==
        "error: expected a power with its unit such as '700 W', found '700'; allowed units: mW, W, kW, MW");
}

TEST_CASE("What no machine has is refused with the range") {
  const auto bandwidth = [](const char* text) { return error_of<ConfigError>([&] { parse_bandwidth(text); }); };
  CHECK(bandwidth("1e300 Gbit/s") == "error: expected a bandwidth from 1 B/s to 1000000 TB/s, found '1e300 Gbit/s'");
  CHECK(bandwidth("1e-30 B/s") == "error: expected a bandwidth from 1 B/s to 1000000 TB/s, found '1e-30 B/s'");
  CHECK(parse_bandwidth("1000000 TB/s").value == 1e18);
  CHECK(parse_bandwidth("8 bit/s").value == 1.0);
  CHECK(parse_bandwidth("0 B/s").value == 0.0);
  CHECK(error_of<ConfigError>([] { parse_duration("25 h"); }) ==
        "error: expected a duration of at most 24 h, found '25 h'");
  CHECK(error_of<ConfigError>([] { parse_flop_rate("0.5 FLOP/s"); }) ==
        "error: expected a compute rate from 1 FLOP/s to 1000000 PFLOP/s, found '0.5 FLOP/s'");
  CHECK(error_of<ConfigError>([] { parse_power("1e200 W"); }) ==
        "error: expected a power of at most 1 MW, found '1e200 W'");
}

TEST_CASE("People see three significant digits and the fitting unit") {
  CHECK(format_bytes(Bytes(0)) == "0 B");
  CHECK(format_bytes(Bytes(1023)) == "1023 B");
  CHECK(format_bytes(Bytes(1536)) == "1.50 KiB");
  CHECK(format_bytes(Bytes(1610612736)) == "1.50 GiB");
  CHECK(format_bytes(Bytes(85899345920)) == "80.0 GiB");
  CHECK(format_bytes(Bytes(1073741823)) == "1.00 GiB");  // 1024 MiB would be four digits
  CHECK(format_bytes(Bytes(-2048)) == "-2.00 KiB");
  CHECK(format_bandwidth(BytesPerSecond(450e9)) == "450 GB/s");
  CHECK(format_bandwidth(BytesPerSecond(0.5)) == "0.50 B/s");
  CHECK(format_duration(Seconds(0.0123)) == "12.3 ms");
  CHECK(format_duration(Seconds(0.0009996)) == "1.00 ms");
  CHECK(format_duration(Seconds(9.996)) == "10.0 s");
  CHECK(format_duration(Seconds(59.94)) == "59.9 s");
  CHECK(format_duration(Seconds(90)) == "90.0 s");
  CHECK(format_duration(Seconds(-123.44)) == "-123.4 s");
  CHECK(format_duration(Seconds(599.9)) == "599.9 s");
  CHECK(format_duration(Seconds(600)) == "10.0 min");
  CHECK(format_duration(Seconds(7200)) == "2.00 h");
  CHECK(format_duration(Seconds(0)) == "0 s");
  CHECK(format_flop_rate(FlopsPerSecond(989e12)) == "989 TFLOP/s");
  CHECK(format_power(Watts(700)) == "700 W");
  CHECK(format_power(Watts(11.2e6)) == "11.2 MW");
}

TEST_CASE("A size rounded up is enough when it is typed, and no more than the last digit too much") {
  CHECK(format_bytes_up(Bytes(0)) == "0 B");
  CHECK(format_bytes_up(Bytes(1023)) == "1023 B");
  CHECK(format_bytes_up(Bytes(1024)) == "1.00 KiB");
  CHECK(format_bytes_up(Bytes(1025)) == "1.01 KiB");
  CHECK(format_bytes_up(Bytes(1025), 5) == "1.0010 KiB");  // 1.0009765625
  CHECK(format_bytes_up(Bytes(1025), 11) == "1.0009765625 KiB");
  CHECK(format_bytes_up(Bytes(9999 * 1024LL / 1000)) == "10.0 KiB");
  CHECK(format_bytes_up(Bytes(1513975971)) == "1.41 GiB");
  CHECK(format_bytes_up(Bytes(1513975972)) == "1.42 GiB");
  CHECK(format_bytes_up(Bytes(100LL << 30)) == "100 GiB");
  CHECK(format_bytes_up(Bytes((100LL << 30) + 1)) == "101 GiB");
  CHECK(format_bytes_up(Bytes((1LL << 30) - 1)) == "1.00 GiB");
  CHECK(format_bytes_up(Bytes(1LL << 62)) == "4194304 TiB");
  for (std::int64_t bytes = 1000; bytes < std::int64_t{1} << 50; bytes += bytes / 7 + 1)
    for (const int digits : {3, 4, 7, 12, 17}) {
      const std::string text = format_bytes_up(Bytes(bytes), digits);
      INFO(bytes << " B is " << text);
      CHECK(parse_bytes(text) >= Bytes(bytes));
      CHECK(static_cast<double>(parse_bytes(text).count) <= static_cast<double>(bytes) * (1.0 + 0.011));
      if (digits == 17) CHECK(parse_bytes(text) == Bytes(bytes));
    }
}

TEST_CASE("Files get the shortest text that is read back to the same bits") {
  CHECK(write_bytes(Bytes(85899345920)) == "80 GiB");
  CHECK(write_bytes(Bytes(80000000000)) == "80 GB");
  CHECK(write_bytes(Bytes(1025)) == "1025 B");
  CHECK(write_bytes(Bytes(0)) == "0 B");
  CHECK(write_bandwidth(BytesPerSecond(50e9)) == "50 GB/s");
  CHECK(write_duration(Seconds(2e-6)) == "2 us");
  CHECK(write_flop_rate(FlopsPerSecond(989e12)) == "989 TFLOP/s");
  CHECK(write_power(Watts(700)) == "700 W");
  // An awkward value of every size.
  for (double value = 1e-13; value < 1e18; value *= 3.7) {
    if (value <= 86400.0) CHECK(parse_duration(write_duration(Seconds(value))).value == value);
    if (value >= 1.0) CHECK(parse_bandwidth(write_bandwidth(BytesPerSecond(value))).value == value);
    if (value >= 1.0) CHECK(parse_flop_rate(write_flop_rate(FlopsPerSecond(value))).value == value);
    if (value <= 1e6) CHECK(parse_power(write_power(Watts(value))).value == value);
    const Bytes bytes(static_cast<std::int64_t>(value));
    CHECK(parse_bytes(write_bytes(bytes)) == bytes);
  }
}
