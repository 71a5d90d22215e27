#include "runtime/checkpoint/safetensors.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/base/error.h"
#include "runtime/checkpoint/open_file.h"
#include "runtime/checkpoint/strict_json.h"

namespace parplan {
namespace {

constexpr std::int64_t length_bytes = 8;
constexpr std::int64_t most_header_bytes = 100'000'000;  // the limit of the Rust library
constexpr std::int64_t alignment = 64;
constexpr std::size_t most_dims = 8;
constexpr const char* metadata_key = "__metadata__";

struct DtypeRow {
  std::string_view name;
  std::int64_t bytes;
};
constexpr DtypeRow dtypes[] = {
    {"BOOL", 1}, {"U8", 1},   {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1}, {"I16", 2}, {"U16", 2},
    {"F16", 2},  {"BF16", 2}, {"I32", 4}, {"U32", 4},     {"F32", 4},     {"F64", 8},     {"I64", 8}, {"U64", 8},
};

std::string shown(const std::string& name) {
  return Json(name.substr(0, 200)).dump(-1, ' ', true, Json::error_handler_t::replace);
}

// The bytes of a tensor; nothing where they exceed 63 bits.
std::optional<std::int64_t> size_of_tensor(const std::vector<std::int64_t>& shape, std::int64_t element) {
  std::int64_t bytes = element;
  for (const std::int64_t size : shape)
    if (__builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  return bytes;
}

SafetensorsEntry read_entry(const std::string& name, const Json& json, std::int64_t data_bytes,
                            const std::string& file) {
  const std::string where = fmt::format("tensor {}", shown(name));
  const auto fail = [&](const std::string& message) {
    throw ConfigError({file}, fmt::format("{}: {}", where, message));
  };
  SafetensorsEntry entry{.name = name,
                         .dtype = text(member(json, "dtype", where, file), where + ".dtype", file),
                         .shape = wholes(member(json, "shape", where, file), where + ".shape", file)};
  for (const auto& item : json.items())
    if (item.key() != "dtype" && item.key() != "shape" && item.key() != "data_offsets")
      fail(fmt::format("unknown key {}; allowed: dtype, shape, data_offsets", shown(item.key())));
  const std::int64_t element = bytes_of_dtype(entry.dtype);
  if (element == 0) {
    std::vector<std::string_view> names;
    for (const DtypeRow& row : dtypes) names.push_back(row.name);
    fail(fmt::format("unknown dtype {}; allowed: {}", shown(entry.dtype), fmt::join(names, ", ")));
  }
  if (entry.shape.size() > most_dims) fail(fmt::format("{} dims; at most {}", entry.shape.size(), most_dims));
  const std::vector<std::int64_t> offsets =
      wholes(member(json, "data_offsets", where, file), where + ".data_offsets", file);
  if (offsets.size() != 2) fail(fmt::format("data_offsets are two numbers, found {}", offsets.size()));
  entry.begin = offsets[0];
  entry.end = offsets[1];
  if (entry.begin > entry.end || entry.end > data_bytes)
    fail(fmt::format("bytes {} to {} of {} bytes of tensors", entry.begin, entry.end, data_bytes));
  const auto bytes = size_of_tensor(entry.shape, element);
  if (!bytes || *bytes != entry.end - entry.begin)
    fail(fmt::format("{} bytes from {} to {}; {} of shape [{}] takes {}", entry.end - entry.begin, entry.begin,
                     entry.end, entry.dtype, fmt::join(entry.shape, ", "),
                     bytes ? fmt::format("{}", *bytes) : "more than there can be"));
  return entry;
}

std::int64_t length_of(std::string_view bytes) {
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  return length > static_cast<std::uint64_t>(INT64_MAX) ? INT64_MAX : static_cast<std::int64_t>(length);
}

void check_length(std::int64_t header, std::int64_t file_bytes, const std::string& file) {
  if (header > most_header_bytes)
    throw ConfigError({file}, fmt::format("a header of {} bytes is promised, at most {} are read; this is no "
                                          "safetensors file",
                                          header, most_header_bytes));
  if (header > file_bytes - length_bytes)
    throw ConfigError({file}, fmt::format("a header of {} bytes is promised, and the file has {} bytes: it is cut off",
                                          header, file_bytes));
}

void check_has_length(std::int64_t file_bytes, const std::string& file) {
  if (file_bytes < length_bytes)
    throw ConfigError({file}, fmt::format("{} bytes; a safetensors file has at least {}", file_bytes, length_bytes));
}

}  // namespace

std::int64_t bytes_of_dtype(std::string_view dtype) {
  const auto* const row = std::ranges::find(dtypes, dtype, &DtypeRow::name);
  return row == std::end(dtypes) ? 0 : row->bytes;
}

std::string write_safetensors_header(const SafetensorsHeader& header) {
  Json json = Json::object();
  if (!header.metadata.empty()) json[metadata_key] = header.metadata;
  for (const SafetensorsEntry& entry : header.entries)
    json[entry.name] = {
        {"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", std::vector{entry.begin, entry.end}}};
  std::string text = json.dump();
  const auto size = static_cast<std::int64_t>(text.size()) + length_bytes;
  text.append(static_cast<std::size_t>((alignment - size % alignment) % alignment), ' ');
  const std::uint64_t length = text.size();
  std::string bytes(length_bytes, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + text;
}

SafetensorsHeader parse_safetensors_header(std::string_view bytes, std::int64_t file_bytes, const std::string& file) {
  check_has_length(static_cast<std::int64_t>(bytes.size()), file);
  const std::int64_t length = length_of(bytes);
  check_length(length, file_bytes, file);
  const std::string_view written = bytes.substr(length_bytes, static_cast<std::size_t>(length));
  if (!written.starts_with('{')) throw ConfigError({file}, "the header at byte 8 does not begin with '{'");
  const Json json = parse_strict_json(written, file);
  SafetensorsHeader header{.entries = {}, .metadata = {}, .data_begin = length_bytes + length};
  const std::int64_t data_bytes = file_bytes - header.data_begin;
  for (const auto& item : json.items()) {
    if (item.key() == metadata_key) {
      if (!item.value().is_object()) throw ConfigError({file}, "__metadata__ is no object");
      for (const auto& entry : item.value().items())
        header.metadata[entry.key()] = text(entry.value(), "__metadata__", file);
      continue;
    }
    header.entries.push_back(read_entry(item.key(), item.value(), data_bytes, file));
  }
  std::ranges::sort(header.entries, {},
                    [](const SafetensorsEntry& entry) { return std::pair(entry.begin, entry.end); });
  std::int64_t end = 0;
  for (const SafetensorsEntry& entry : header.entries) {
    if (entry.begin != end)
      throw ConfigError({file}, fmt::format("tensor {}: its bytes begin at {}, {} of the one before, which end at {}",
                                            shown(entry.name), entry.begin,
                                            entry.begin < end ? "within those" : "behind those", end));
    end = entry.end;
  }
  if (end != data_bytes)
    throw ConfigError({file}, fmt::format("the tensors end at byte {} of {} behind the header", end, data_bytes));
  return header;
}

SafetensorsHeader read_safetensors_header(const std::string& path) {
  const OpenFile file(path);
  const std::int64_t size = file.size();
  check_has_length(size, path);
  std::string bytes(length_bytes, '\0');
  file.read(0, bytes.data(), length_bytes);
  const std::int64_t length = length_of(bytes);
  check_length(length, size, path);
  bytes.resize(static_cast<std::size_t>(length_bytes + length));
  file.read(0, bytes.data(), length_bytes + length);
  return parse_safetensors_header(bytes, size, path);
}

}  // namespace parplan
