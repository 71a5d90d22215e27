#include "planner/cluster/device.h"

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "planner/base/enum_index.h"
#include "planner/base/error.h"
#include "planner/base/text.h"

namespace parplan {
namespace {

constexpr std::array<BackendRow, 5> backend_rows = {
    {{.name = "cpu", .runtime = "CPU", .collectives = "", .runs = true},
     {.name = "cuda", .runtime = "CUDA", .collectives = "NCCL", .runs = true},
     {.name = "rocm", .runtime = "ROCm", .collectives = "RCCL", .runs = false},
     {.name = "oneapi", .runtime = "oneAPI", .collectives = "oneCCL", .runs = false},
     {.name = "synapse", .runtime = "SynapseAI", .collectives = "HCCL", .runs = false}}};

constexpr Bytes most_memory{std::int64_t{1} << 50};  // more than any device has, and sums over many devices fit 64 bits

constexpr std::array<DataType, 2> halves = {DataType::bf16, DataType::fp16};

constexpr std::array optional_rate_rows = {
    OptionalRate{Rate::sustained_half, &DeviceRates::sustained_half},
    OptionalRate{Rate::sustained_weights, &DeviceRates::sustained_weights},
    OptionalRate{Rate::early_half, &DeviceRates::early_half},
    OptionalRate{Rate::early_weights, &DeviceRates::early_weights},
    OptionalRate{Rate::sustained_fp8, &DeviceRates::sustained_fp8, &DeviceRates::matrix_fp8},
    OptionalRate{Rate::sustained_fp8_weights, &DeviceRates::sustained_fp8_weights, &DeviceRates::matrix_fp8},
    OptionalRate{Rate::attention, &DeviceRates::attention},
    OptionalRate{Rate::attention_gradient, &DeviceRates::attention_gradient},
    OptionalRate{Rate::ampere_attention, &DeviceRates::ampere_attention},
    OptionalRate{Rate::ampere_attention_gradient, &DeviceRates::ampere_attention_gradient},
    OptionalRate{Rate::triton_attention, &DeviceRates::triton_attention},
    OptionalRate{Rate::triton_attention_gradient, &DeviceRates::triton_attention_gradient},
    OptionalRate{Rate::unaligned_two_bytes, &DeviceRates::unaligned_two_bytes},
    OptionalRate{Rate::unaligned_four_bytes, &DeviceRates::unaligned_four_bytes},
};

const std::array<std::string, 3> optional_sections = {"sustained", "attention", "unaligned"};

// The two parts of a rate's name.
std::string section_of(Rate rate) {
  const std::string_view both = name(rate);
  return std::string(both.substr(0, both.find('.')));
}
std::string key_of(Rate rate) {
  const std::string_view both = name(rate);
  return std::string(both.substr(both.find('.') + 1));
}

template <typename Unit>
Unit between(Unit low, Unit high, double t) {
  return low + (high - low) * t;
}
// 0, not known, where one of them is.
double between_known(double low, double high, double t) {
  return low > 0.0 && high > 0.0 ? between(low, high, t) : 0.0;
}
template <class Rate>
Rate between_known(Rate low, Rate high, double t) {
  return Rate(between_known(low.value, high.value, t));
}

// {measured: [memory], interpolated: [sustained.half]}: rates that `row` states, and the launch.
RateOrigins read_origins(const YamlNode& section, const YamlNode& row) {
  section.allow_keys(origin_names());
  const auto is_stated = [&](std::string_view rate) {
    if (rate == name(Rate::kernel_launch)) return true;
    const std::size_t dot = rate.find('.');
    const auto stated = row.find(rate.substr(0, dot));
    return stated && (dot == std::string_view::npos || stated->find(rate.substr(dot + 1)));
  };
  RateOrigins origins;
  std::array<bool, count_of<Rate>> is_known{};
  for (std::size_t i = 0; i < count_of<Origin>; ++i) {
    const auto list = section.find(name(static_cast<Origin>(i)));
    if (!list) continue;
    for (const YamlNode& item : list->items()) {
      const std::size_t rate = item.as_choice(rate_names());
      if (std::exchange(is_known[rate], true)) item.fail(fmt::format("{} has two origins", rate_names()[rate]));
      if (!is_stated(rate_names()[rate]))
        item.fail(fmt::format("an origin of {}, which the row does not state; state it, or leave the origin out",
                              rate_names()[rate]));
      origins.of[rate] = static_cast<Origin>(i);
    }
  }
  return origins;
}

}  // namespace

std::span<const OptionalRate> optional_rates() {
  return optional_rate_rows;
}

const BackendRow& row_of(BackendKind backend) { return backend_rows[index_of(backend)]; }
const char* name(BackendKind backend) { return row_of(backend).name; }
std::vector<std::string> backend_names() {
  std::vector<std::string> names;
  for (const BackendRow& row : backend_rows) names.push_back(row.name);
  return names;
}

DeviceRates rates_at(const DeviceKind& device, int active) {
  PARPLAN_ASSERT(!device.rates.empty() && active >= 1, device.name + " with " + std::to_string(active) + " active");
  const auto above = std::find_if(device.rates.begin(), device.rates.end(),
                                  [&](const DeviceRates& row) { return row.active >= active; });
  if (above == device.rates.begin() || above == device.rates.end()) {
    DeviceRates row = above == device.rates.end() ? device.rates.back() : *above;
    row.active = active;
    return row;
  }
  const DeviceRates& low = *(above - 1);
  const DeviceRates& high = *above;
  const double t = static_cast<double>(active - low.active) / (high.active - low.active);
  DeviceRates rates{.active = active,
                    .matrix_fp32 = between(low.matrix_fp32, high.matrix_fp32, t),
                    .matrix_half = between_known(low.matrix_half, high.matrix_half, t),
                    .matrix_tf32 = between_known(low.matrix_tf32, high.matrix_tf32, t),
                    .matrix_fp8 = between_known(low.matrix_fp8, high.matrix_fp8, t),
                    .vector = between(low.vector, high.vector, t),
                    .memory = between(low.memory, high.memory, t),
                    .sustained_memory = between_known(low.sustained_memory, high.sustained_memory, t),
                    .sustained_share = between_known(low.sustained_share, high.sustained_share, t),
                    .origins = less_sure(low.origins, high.origins)};
  for (const OptionalRate& one : optional_rate_rows)
    rates.*one.member = between_known(low.*one.member, high.*one.member, t);
  return rates;
}

bool has_units(const DeviceKind& device, DataType type) {
  PARPLAN_ASSERT(!device.rates.empty(), device.name);
  const DeviceRates& alone = device.rates.front();
  if (type == DataType::fp8) return device.peak_fp8.value > 0.0 || alone.matrix_fp8.value > 0.0;
  if (type == DataType::tf32) return device.peak_tf32.value > 0.0 || alone.matrix_tf32.value > 0.0;
  if (!is_half(type)) return true;
  return (device.peak_half.value > 0.0 || alone.matrix_half.value > 0.0) &&
         std::find(device.half_types.begin(), device.half_types.end(), type) != device.half_types.end();
}

FlopsPerSecond peak(const DeviceKind& device, DataType type) {
  if (type == DataType::fp8 && device.peak_fp8.value > 0.0) return device.peak_fp8;
  const DataType half = in_memory(type);
  if (is_half(half) && has_units(device, half)) return device.peak_half;
  return type == DataType::tf32 && device.peak_tf32.value > 0.0 ? device.peak_tf32 : device.peak_fp32;
}

bool knows_sustained(const DeviceKind& device, DataType type) {
  if (!is_accelerator(device.backend) || (type != DataType::fp8 && !is_half(type)) || !has_units(device, type))
    return true;
  const DeviceRates& alone = device.rates.front();
  if (device.measured) return alone.sustained_share > 0.0;
  return (type == DataType::fp8 ? alone.sustained_fp8 : alone.sustained_half).value > 0.0;
}

DeviceKind read_device(const YamlNode& document) {
  document.allow_keys({"name", "title", "backend", "memory", "peak", "half_types", "kernel_launch", "multiprocessors",
                       "overlaps_communication", "rates", "nvlink", "pcie", "power", "driver_names", "measured",
                       "sources"});
  DeviceKind device;
  device.name = document.at("name").as_name();
  if (device.name.empty()) document.at("name").fail("expected a name, found ''");
  device.title = printable_line(document.at("title").as_string());
  device.backend = static_cast<BackendKind>(document.at("backend").as_choice(backend_names()));
  const YamlNode memory = document.at("memory");
  memory.allow_keys({"capacity", "overhead"});
  device.memory_capacity = memory.at("capacity").as_bytes();
  if (device.memory_capacity > most_memory)
    memory.at("capacity")
        .fail(fmt::format("expected a capacity of at most {}, found '{}'", write_bytes(most_memory),
                          memory.at("capacity").as_string()));
  device.memory_overhead = memory.at("overhead").as_bytes();
  if (device.memory_overhead >= device.memory_capacity)
    memory.at("overhead")
        .fail(fmt::format("the overhead of {} leaves nothing of the capacity of {}",
                          write_bytes(device.memory_overhead), write_bytes(device.memory_capacity)));
  const YamlNode peak_rates = document.at("peak");
  peak_rates.allow_keys({"fp32", "half", "tf32", "fp8"});
  device.peak_fp32 = peak_rates.at("fp32").as_flop_rate();
  if (const auto half = peak_rates.find("half")) device.peak_half = half->as_flop_rate();
  if (const auto tf32 = peak_rates.find("tf32")) device.peak_tf32 = tf32->as_flop_rate();
  if (const auto fp8 = peak_rates.find("fp8")) device.peak_fp8 = fp8->as_flop_rate();
  if (const auto types = document.find("half_types")) {
    device.half_types.clear();
    for (const YamlNode& item : types->items()) {
      const DataType type = halves[item.as_choice({name(halves[0]), name(halves[1])})];
      if (std::find(device.half_types.begin(), device.half_types.end(), type) != device.half_types.end())
        item.fail(fmt::format("{} is listed twice", name(type)));
      device.half_types.push_back(type);
    }
    if (device.half_types.empty())
      types->fail("expected bf16, fp16 or both; a device without units for either has no 'half' peak");
  }
  device.kernel_launch = document.at("kernel_launch").as_duration();
  if (const auto count = document.find("multiprocessors"))
    device.multiprocessors = static_cast<int>(count->as_integer(1, 4096));
  if (const auto overlaps = document.find("overlaps_communication"))
    device.overlaps_communication = overlaps->as_bool();

  const YamlNode rates = document.at("rates");
  for (const YamlNode& item : rates.items()) {
    item.allow_keys(
        {"active", "matrix_fp32", "matrix_half", "matrix_tf32", "matrix_fp8", "vector", "memory", "sustained",
         "attention", "unaligned", "origins"});
    DeviceRates row;
    const auto positive_rate = [&](const char* key) {
      const YamlNode value = item.at(key);
      const FlopsPerSecond rate = value.as_flop_rate();
      if (rate.value <= 0.0) value.fail(fmt::format("'{}' must be more than 0", key));
      return rate;
    };
    row.active = static_cast<int>(item.at("active").as_integer(1, 1 << 20));
    row.matrix_fp32 = positive_rate("matrix_fp32");
    if (const auto half = item.find("matrix_half")) row.matrix_half = half->as_flop_rate();
    if (const auto tf32 = item.find("matrix_tf32")) row.matrix_tf32 = tf32->as_flop_rate();
    if (const auto fp8 = item.find("matrix_fp8")) row.matrix_fp8 = fp8->as_flop_rate();
    row.vector = positive_rate("vector");
    row.memory = item.at("memory").as_bandwidth();
    if (row.memory.value <= 0.0) item.at("memory").fail("'memory' must be more than 0");
    for (const std::string& section : optional_sections) {
      const auto stated = item.find(section);
      if (!stated) continue;
      std::vector<std::string> keys;
      for (const OptionalRate& one : optional_rate_rows)
        if (section_of(one.rate) == section) keys.push_back(key_of(one.rate));
      if (section == "sustained") keys.insert(keys.end(), {"memory", "share"});
      stated->allow_keys(keys);
      for (const OptionalRate& one : optional_rate_rows) {
        const auto value = section_of(one.rate) == section ? stated->find(key_of(one.rate)) : std::nullopt;
        if (!value) continue;
        row.*one.member = value->as_flop_rate();
        if ((row.*one.member).value <= 0.0 || row.*one.member > row.*one.reached)
          value->fail(fmt::format("expected more than 0 and at most what a {} reaches, found '{}'",
                                  section == "sustained" ? "kernel" : "product", value->as_string()));
      }
      if (section != "sustained") continue;
      if (const auto share = stated->find("share")) {
        row.sustained_share = share->as_number();
        if (!(row.sustained_share > 0.0 && row.sustained_share <= 1.0))
          share->fail(fmt::format("expected more than 0 and at most 1, found '{}'", share->as_string()));
      }
      const auto memory_rate = stated->find("memory");
      if (!memory_rate) continue;
      row.sustained_memory = memory_rate->as_bandwidth();
      if (row.sustained_memory.value <= 0.0 || row.sustained_memory > row.memory)
        memory_rate->fail(fmt::format("expected more than 0 and at most what a kernel reaches, found '{}'",
                                      memory_rate->as_string()));
    }
    if (const auto origins = item.find("origins")) row.origins = read_origins(*origins, item);
    if (!device.rates.empty() && row.active <= device.rates.back().active)
      item.at("active").fail(
          fmt::format("rows must ascend in 'active', found {} after {}", row.active, device.rates.back().active));
    // A processor may run above its rated clock; a card's matrix units do not exceed their
    // datasheet.
    const auto at_most = [&](const char* key, FlopsPerSecond reached, FlopsPerSecond most) {
      if (is_accelerator(device.backend) && reached > most)
        item.at(key).fail(
            fmt::format("reached rate {} is above the peak of {}", write_flop_rate(reached), write_flop_rate(most)));
    };
    at_most("matrix_fp32", row.matrix_fp32, device.peak_fp32);
    at_most("matrix_half", row.matrix_half, device.peak_half);
    at_most("matrix_tf32", row.matrix_tf32, device.peak_tf32);
    at_most("matrix_fp8", row.matrix_fp8, device.peak_fp8);
    device.rates.push_back(row);
  }
  if (device.rates.empty()) rates.fail("'rates' needs at least one row");

  if (const auto nvlink = document.find("nvlink")) {
    nvlink->allow_keys({"links", "per_link", "per_link_reached"});
    device.nvlinks = static_cast<int>(nvlink->at("links").as_integer(1, 72));
    device.nvlink_per_link = nvlink->at("per_link").as_bandwidth();
    device.nvlink_per_link_reached = nvlink->at("per_link_reached").as_bandwidth();
    if (device.nvlink_per_link_reached > device.nvlink_per_link || device.nvlink_per_link_reached.value <= 0.0)
      nvlink->at("per_link_reached")
          .fail(fmt::format("expected more than 0 and at most the link's {}, found {}",
                            write_bandwidth(device.nvlink_per_link), write_bandwidth(device.nvlink_per_link_reached)));
  }
  if (const auto pcie = document.find("pcie")) {
    pcie->allow_keys({"generation", "lanes"});
    device.pcie_generation = static_cast<int>(pcie->at("generation").as_integer(1, 6));
    device.pcie_lanes = static_cast<int>(pcie->at("lanes").as_integer(1, 16));
  }
  if (const auto power = document.find("power")) {
    device.power = power->as_power();
    if (device.power->value <= 0.0) power->fail("'power' must be more than 0");
  }
  if (const auto names = document.find("driver_names"))
    for (const YamlNode& one : names->items()) device.driver_names.push_back(one.as_string());
  if (const auto measured = document.find("measured")) device.measured = read_measured_kernels(*measured);
  if (const auto sources = document.find("sources"))
    for (const YamlNode& source : sources->items()) device.sources.push_back(printable_line(source.as_string()));
  return device;
}

namespace {

void write_origins(YAML::Emitter& out, const RateOrigins& origins) {
  out << YAML::Key << "origins" << YAML::Value << YAML::BeginMap;
  for (const Origin origin : {Origin::measured, Origin::interpolated}) {
    if (std::ranges::find(origins.of, origin) == origins.of.end()) continue;
    out << YAML::Key << name(origin) << YAML::Value << YAML::BeginSeq;
    for (std::size_t rate = 0; rate < origins.of.size(); ++rate)
      if (origins.of[rate] == origin) out << name(static_cast<Rate>(rate));
    out << YAML::EndSeq;
  }
  out << YAML::EndMap;
}

// `measurements` are the rows from which the fits were made, where the file is to hold them.
std::string write_device(const DeviceKind& device, const Measurements* measurements) {
  YAML::Emitter out;
  out << YAML::BeginMap;
  out << YAML::Key << "name" << YAML::Value << device.name;
  out << YAML::Key << "title" << YAML::Value << device.title;
  out << YAML::Key << "backend" << YAML::Value << name(device.backend);
  out << YAML::Key << "memory" << YAML::Value << YAML::Flow << YAML::BeginMap;
  out << YAML::Key << "capacity" << YAML::Value << write_bytes(device.memory_capacity);
  out << YAML::Key << "overhead" << YAML::Value << write_bytes(device.memory_overhead) << YAML::EndMap;
  out << YAML::Key << "peak" << YAML::Value << YAML::Flow << YAML::BeginMap;
  out << YAML::Key << "fp32" << YAML::Value << write_flop_rate(device.peak_fp32);
  out << YAML::Key << "half" << YAML::Value << write_flop_rate(device.peak_half);
  if (device.peak_tf32.value > 0.0) out << YAML::Key << "tf32" << YAML::Value << write_flop_rate(device.peak_tf32);
  if (device.peak_fp8.value > 0.0) out << YAML::Key << "fp8" << YAML::Value << write_flop_rate(device.peak_fp8);
  out << YAML::EndMap;
  if (device.half_types != DeviceKind{}.half_types) {
    out << YAML::Key << "half_types" << YAML::Value << YAML::Flow << YAML::BeginSeq;
    for (const DataType type : device.half_types) out << name(type);
    out << YAML::EndSeq;
  }
  out << YAML::Key << "kernel_launch" << YAML::Value << write_duration(device.kernel_launch);
  if (device.multiprocessors > 0) out << YAML::Key << "multiprocessors" << YAML::Value << device.multiprocessors;
  out << YAML::Key << "overlaps_communication" << YAML::Value << device.overlaps_communication;
  out << YAML::Key << "rates" << YAML::Value << YAML::BeginSeq;
  for (const DeviceRates& row : device.rates) {
    out << YAML::Flow << YAML::BeginMap;
    out << YAML::Key << "active" << YAML::Value << row.active;
    out << YAML::Key << "matrix_fp32" << YAML::Value << write_flop_rate(row.matrix_fp32);
    out << YAML::Key << "matrix_half" << YAML::Value << write_flop_rate(row.matrix_half);
    if (row.matrix_tf32.value > 0.0)
      out << YAML::Key << "matrix_tf32" << YAML::Value << write_flop_rate(row.matrix_tf32);
    if (row.matrix_fp8.value > 0.0) out << YAML::Key << "matrix_fp8" << YAML::Value << write_flop_rate(row.matrix_fp8);
    out << YAML::Key << "vector" << YAML::Value << write_flop_rate(row.vector);
    out << YAML::Key << "memory" << YAML::Value << write_bandwidth(row.memory);
    const auto write_known = [&](const std::string& key, FlopsPerSecond rate, auto write) {
      if (rate.value > 0.0) out << YAML::Key << key << YAML::Value << write(rate);
    };
    for (const std::string& section : optional_sections) {
      const bool has_memory = section == "sustained" && row.sustained_memory.value > 0.0;
      const bool has_share = section == "sustained" && row.sustained_share > 0.0;
      if (!has_memory && !has_share && std::ranges::none_of(optional_rate_rows, [&](const OptionalRate& one) {
            return section_of(one.rate) == section && (row.*one.member).value > 0.0;
          }))
        continue;
      out << YAML::Key << section << YAML::Value << YAML::BeginMap;
      for (const OptionalRate& one : optional_rate_rows)
        if (section_of(one.rate) == section) write_known(key_of(one.rate), row.*one.member, write_flop_rate);
      if (has_memory) out << YAML::Key << "memory" << YAML::Value << write_bandwidth(row.sustained_memory);
      if (has_share) out << YAML::Key << "share" << YAML::Value << fmt::format("{}", row.sustained_share);
      out << YAML::EndMap;
    }
    if (row.origins != RateOrigins{}) write_origins(out, row.origins);
    out << YAML::EndMap;
  }
  out << YAML::EndSeq;
  if (device.nvlinks > 0) {
    out << YAML::Key << "nvlink" << YAML::Value << YAML::Flow << YAML::BeginMap;
    out << YAML::Key << "links" << YAML::Value << device.nvlinks;
    out << YAML::Key << "per_link" << YAML::Value << write_bandwidth(device.nvlink_per_link);
    out << YAML::Key << "per_link_reached" << YAML::Value << write_bandwidth(device.nvlink_per_link_reached)
        << YAML::EndMap;
  }
  if (device.pcie_generation > 0) {
    out << YAML::Key << "pcie" << YAML::Value << YAML::Flow << YAML::BeginMap;
    out << YAML::Key << "generation" << YAML::Value << device.pcie_generation;
    out << YAML::Key << "lanes" << YAML::Value << device.pcie_lanes << YAML::EndMap;
  }
  if (device.power) out << YAML::Key << "power" << YAML::Value << write_power(*device.power);
  if (!device.driver_names.empty())
    out << YAML::Key << "driver_names" << YAML::Value << YAML::Flow << device.driver_names;
  if (device.measured) {
    out << YAML::Key << "measured" << YAML::Value;
    write_measured_kernels(out, *device.measured, measurements);
  }
  out << YAML::Key << "sources" << YAML::Value << YAML::BeginSeq;
  for (const std::string& source : device.sources) out << source;
  out << YAML::EndSeq << YAML::EndMap;
  return std::string(out.c_str()) + "\n";
}

}  // namespace

std::string write_device(const DeviceKind& device) { return write_device(device, nullptr); }
std::string write_device(const DeviceKind& device, const Measurements& measurements) {
  return write_device(device, &measurements);
}

}  // namespace parplan
