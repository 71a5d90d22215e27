#include "planner/cluster/device_measurements.h"

#include <algorithm>
#include <array>
#include <map>
#include <tuple>

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include "planner/base/enum_index.h"
#include "planner/base/text.h"

namespace parplan {
namespace {

constexpr double most_half_length = 1e12;  // longer than any product

constexpr std::array<const char*, 3> route_names = {"on_device", "to_device", "to_host"};

// How files name an OpShape's sizes.
struct SizeRow {
  const char* name;
  ShapeSize field;
};
constexpr SizeRow size_rows[] = {{"rows", &OpShape::rows},         {"columns", &OpShape::columns},
                                 {"inner", &OpShape::inner},       {"sequence", &OpShape::sequence},
                                 {"batch", &OpShape::batch},       {"heads", &OpShape::heads},
                                 {"kv_heads", &OpShape::kv_heads}, {"head_dim", &OpShape::head_dim}};
const char* name(ShapeSize size) {
  for (const SizeRow& row : size_rows)
    if (size == row.field) return row.name;
  throw InternalError("a kernel is measured over a size without a name");
}

// What kernels compute in.
constexpr DataType kernel_types[] = {DataType::fp32, DataType::bf16, DataType::fp16, DataType::tf32,
                                     DataType::fp8};

// Files from before there were several kinds of gates use these names.
struct FormerName {
  std::string_view written;
  std::string_view now;
};
constexpr FormerName former_names[] = {{"silu_gate", "gate"}, {"silu_gate_gradient", "gate_gradient"}};

OpKind read_kind(const YamlNode& node) {
  std::vector<std::string> names;
  for (const OpRow& row : op_rows()) names.emplace_back(row.name);
  const std::string written = node.as_string();
  for (const FormerName& former : former_names)
    if (written == former.written) return std::ranges::find(op_rows(), former.now, &OpRow::name)->kind;
  return op_rows()[node.as_choice(names)].kind;
}
DataType read_type(const YamlNode& node) {
  std::vector<std::string> names;
  for (const DataType type : kernel_types) names.emplace_back(name(type));
  return kernel_types[node.as_choice(names)];
}

KernelFit read_fit(const YamlNode& item) {
  item.allow_keys({"kernel", "type", "head_dim", "floor", "rate", "half_length", "memory", "rows", "error"});
  KernelFit fit;
  fit.kind = read_kind(item.at("kernel"));
  fit.type = read_type(item.at("type"));
  if (const auto head_dim = item.find("head_dim")) fit.head_dim = head_dim->as_integer(1, 1 << 20);
  fit.floor = item.at("floor").as_duration();
  if (const auto rate = item.find("rate")) {
    fit.rate = rate->as_flop_rate();
    if (fit.rate.value <= 0.0) rate->fail("'rate' must be more than 0");
  }
  if (const auto half = item.find("half_length")) {
    fit.half_length = half->as_number();
    if (fit.half_length < 0.0 || fit.half_length > most_half_length)
      half->fail(fmt::format("'half_length' must be from 0 to {}", most_half_length));
  }
  fit.memory = item.at("memory").as_bandwidth();
  if (fit.memory.value <= 0.0) item.at("memory").fail("'memory' must be more than 0");
  fit.rows = static_cast<int>(item.at("rows").as_integer(1, 1 << 20));
  fit.error = item.at("error").as_number();
  return fit;
}

KernelMeasurement read_row(const YamlNode& item) {
  const OpKind kind = read_kind(item.at("kernel"));
  OpShape sizes;
  std::vector<std::string> keys{"kernel", "type"};
  for (const ShapeSize size : row_of(kind).measured_sizes) {
    sizes.*size = item.at(name(size)).as_integer(1, std::int64_t{1} << 40);
    keys.emplace_back(name(size));
  }
  keys.emplace_back("time");
  item.allow_keys(keys);
  KernelMeasurement row = measured_kernel(kind, read_type(item.at("type")), sizes);
  row.time = item.at("time").as_duration();
  if (row.time.value <= 0.0) item.at("time").fail("'time' must be more than 0");
  return row;
}

void allow_section_keys(const YamlNode& section) {
  section.allow_keys({"origin", "date", "versions", "clocks", "fits", "launch", "library_memory", "copies", "rows"});
}

}  // namespace

const char* name(CopyRoute route) { return route_names[index_of(route)]; }

KernelMeasurement measured_kernel(OpKind kind, DataType type, OpShape sizes) {
  const OpRow& row = row_of(kind);
  sizes.second = sizes.bias = sizes.master = sizes.weight_decay = false;
  if (row.measured_with) row.measured_with(sizes, type);
  if (type == DataType::fp8) sizes.fp8 = Fp8Casts::each_product;
  if (std::ranges::equal(row.measured_sizes, matrix_sizes) && sizes.valid == 0) sizes.valid = sizes.columns;
  sizes.epsilon = 1e-5;
  sizes.theta = 10000.0;
  sizes.scale = 1.0;
  return {.kind = kind, .type = type, .shape = sizes, .time = {}};
}

MeasuredKernels read_measured_kernels(const YamlNode& section) {
  read_measurements(section);  // for its errors
  MeasuredKernels measured{.origin = printable_line(section.at("origin").as_string()),
                           .date = printable_line(section.at("date").as_string()),
                           .versions = printable_line(section.at("versions").as_string()),
                           .clocks = printable_line(section.at("clocks").as_string()),
                           .fits = {}};
  std::map<std::tuple<OpKind, DataType, std::int64_t>, int> seen;
  for (const YamlNode& item : section.at("fits").items()) {
    measured.fits.push_back(read_fit(item));
    const KernelFit& fit = measured.fits.back();
    if (++seen[{fit.kind, fit.type, fit.head_dim}] > 1)
      item.fail(fmt::format("a second fit of {} in {}{}", name(fit.kind), name(fit.type),
                            fit.head_dim > 0 ? fmt::format(" with head_dim {}", fit.head_dim) : ""));
    const bool matrix = row_of(fit.kind).work(OpShape{}, fit.type).matrix;
    if (matrix != (fit.rate.value > 0.0))
      item.fail(fmt::format("a fit of {} {} a 'rate'", name(fit.kind), matrix ? "needs" : "has no use for"));
  }
  return measured;
}

Measurements read_measurements(const YamlNode& section) {
  allow_section_keys(section);
  Measurements measurements;
  if (const auto launch = section.find("launch")) {
    launch->allow_keys({"alone", "replayed"});
    measurements.launch = launch->at("alone").as_duration();
    measurements.replayed_launch = launch->at("replayed").as_duration();
  }
  if (const auto memory = section.find("library_memory")) measurements.library_memory = memory->as_bytes();
  if (const auto copies = section.find("copies"))
    for (const YamlNode& item : copies->items()) {
      item.allow_keys({"route", "bytes", "time"});
      measurements.copies.push_back(
          {.route = static_cast<CopyRoute>(item.at("route").as_choice({route_names.begin(), route_names.end()})),
           .bytes = item.at("bytes").as_bytes(),
           .time = item.at("time").as_duration()});
    }
  if (const auto rows = section.find("rows"))
    for (const YamlNode& item : rows->items()) measurements.kernels.push_back(read_row(item));
  return measurements;
}

void write_measured_kernels(YAML::Emitter& out, const MeasuredKernels& measured, const Measurements* measurements) {
  using YAML::Key, YAML::Value, YAML::Flow, YAML::BeginMap, YAML::EndMap, YAML::BeginSeq, YAML::EndSeq;
  out << YAML::Block << BeginMap;
  out << Key << "origin" << Value << measured.origin;
  out << Key << "date" << Value << measured.date;
  out << Key << "versions" << Value << measured.versions;
  out << Key << "clocks" << Value << measured.clocks;
  out << Key << "fits" << Value << YAML::Block << BeginSeq;
  for (const KernelFit& fit : measured.fits) {
    out << Flow << BeginMap << Key << "kernel" << Value << name(fit.kind) << Key << "type" << Value << name(fit.type);
    if (fit.head_dim > 0) out << Key << "head_dim" << Value << fit.head_dim;
    out << Key << "floor" << Value << write_duration(fit.floor);
    if (fit.rate.value > 0.0) {
      out << Key << "rate" << Value << write_flop_rate(fit.rate);
      out << Key << "half_length" << Value << fmt::format("{}", fit.half_length);
    }
    out << Key << "memory" << Value << write_bandwidth(fit.memory) << Key << "rows" << Value << fit.rows << Key
        << "error" << Value << fmt::format("{}", fit.error) << EndMap;
  }
  out << EndSeq;
  if (measurements != nullptr) {
    out << Key << "launch" << Value << Flow << BeginMap << Key << "alone" << Value
        << write_duration(measurements->launch) << Key << "replayed" << Value
        << write_duration(measurements->replayed_launch) << EndMap;
    out << Key << "library_memory" << Value << write_bytes(measurements->library_memory);
    out << Key << "copies" << Value << YAML::Block << BeginSeq;
    for (const CopyMeasurement& copy : measurements->copies)
      out << Flow << BeginMap << Key << "route" << Value << name(copy.route) << Key << "bytes" << Value
          << write_bytes(copy.bytes) << Key << "time" << Value << write_duration(copy.time) << EndMap;
    out << EndSeq << Key << "rows" << Value << YAML::Block << BeginSeq;
    for (const KernelMeasurement& row : measurements->kernels) {
      out << Flow << BeginMap << Key << "kernel" << Value << name(row.kind) << Key << "type" << Value << name(row.type);
      for (const ShapeSize size : row_of(row.kind).measured_sizes)
        out << Key << name(size) << Value << row.shape.*size;
      out << Key << "time" << Value << write_duration(row.time) << EndMap;
    }
    out << EndSeq;
  }
  out << EndMap;
}

}  // namespace parplan
