#include "runtime/checkpoint/checkpoint_index.h"

#include <algorithm>
#include <bit>
#include <set>
#include <span>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/base/error.h"
#include "planner/base/json.h"
#include "runtime/checkpoint/crc32.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/checkpoint/strict_json.h"

namespace parplan {
namespace {

constexpr const char* schema = "parplan.checkpoint/1";
constexpr std::string_view last_member = ",\n  \"crc32\": \"";
constexpr std::int64_t most_elements = std::int64_t{1} << 60;

std::string crc_of(std::string_view text) {
  Crc32 crc;
  crc.add(std::as_bytes(std::span(text)));
  return fmt::format("{:08x}", crc.value());
}

std::vector<std::int64_t> offset_of(const CheckpointTensor& tensor, const LogicalSlice& slice) {
  return tensor.shape.size() == 1 ? std::vector{slice.row} : std::vector{slice.row, slice.column};
}
std::vector<std::int64_t> shape_of(const CheckpointTensor& tensor, const LogicalSlice& slice) {
  return tensor.shape.size() == 1 ? std::vector{slice.rows} : std::vector{slice.rows, slice.columns};
}

// Reads what an index says, and says where it cannot be.
struct IndexReader {
  const std::string& file;

  [[noreturn]] void fail(const std::string& message) const { throw ConfigError({file}, message); }

  CheckpointFile file_of(const Json& json, const std::string& where) const {
    CheckpointFile found{.name = text(member(json, "name", where, file), where + ".name", file),
                         .bytes = whole(member(json, "bytes", where, file), where + ".bytes", file)};
    if (found.name.empty() || found.name.find('/') != std::string::npos || found.name.starts_with('.'))
      fail(fmt::format("{}.name: a file of this folder is wanted, found {}", where, Json(found.name).dump()));
    const std::string crc = text(member(json, "crc32", where, file), where + ".crc32", file);
    if (crc.size() != 8 || crc.find_first_not_of("0123456789abcdef") != std::string::npos)
      fail(fmt::format("{}.crc32: expected eight hexadecimal digits", where));
    found.crc32 = static_cast<std::uint32_t>(std::stoul(crc, nullptr, 16));
    return found;
  }

  LogicalSlice slice_of(const Json& json, const CheckpointTensor& tensor, const std::string& where) const {
    const std::vector<std::int64_t> offset = wholes(member(json, "offset", where, file), where + ".offset", file);
    const std::vector<std::int64_t> shape = wholes(member(json, "shape", where, file), where + ".shape", file);
    if (offset.size() != tensor.shape.size() || shape.size() != tensor.shape.size())
      fail(fmt::format("{}: {} and {} dims; the tensor has {}", where, offset.size(), shape.size(),
                       tensor.shape.size()));
    for (std::size_t i = 0; i < shape.size(); ++i)
      if (shape[i] < 1 || offset[i] > tensor.shape[i] || shape[i] > tensor.shape[i] - offset[i])
        fail(fmt::format("{}: [{}] from [{}] on does not lie in [{}]", where, fmt::join(shape, ", "),
                         fmt::join(offset, ", "), fmt::join(tensor.shape, ", ")));
    return {.row = offset[0],
            .column = shape.size() == 2 ? offset[1] : 0,
            .rows = shape[0],
            .columns = shape.size() == 2 ? shape[1] : 1};
  }

  // The parts do not overlap and are everything.
  void check_parts(const CheckpointTensor& tensor, const std::string& where) const {
    std::vector<LogicalSlice> slices;
    for (const CheckpointPart& part : tensor.parts) slices.push_back(part.slice);
    std::ranges::sort(slices);
    std::int64_t elements = 0;
    std::vector<LogicalSlice> open;  // those that reach below the row that is looked at
    for (const LogicalSlice& slice : slices) {
      std::erase_if(open, [&](const LogicalSlice& other) { return other.row + other.rows <= slice.row; });
      for (const LogicalSlice& other : open)
        if (common(other, slice).rows > 0)
          fail(fmt::format("{}: the parts at [{}, {}] and [{}, {}] overlap", where, other.row, other.column, slice.row,
                           slice.column));
      open.push_back(slice);
      elements += slice.elements();
    }
    std::int64_t all = 1;
    for (const std::int64_t size : tensor.shape) all *= size;
    if (elements != all) fail(fmt::format("{}: the parts have {} elements of {}", where, elements, all));
  }

  CheckpointTensor tensor_of(const std::string& name, const Json& json, std::size_t files) const {
    const std::string where = fmt::format("tensors.{}", Json(name.substr(0, 200)).dump());
    CheckpointTensor tensor{.name = name,
                            .dtype = text(member(json, "dtype", where, file), where + ".dtype", file),
                            .shape = wholes(member(json, "shape", where, file), where + ".shape", file)};
    if (bytes_of_dtype(tensor.dtype) == 0) fail(where + ".dtype: unknown");
    if (tensor.shape.empty() || tensor.shape.size() > 2) fail(where + ".shape: one or two sizes are wanted");
    std::int64_t elements = 1;
    for (const std::int64_t size : tensor.shape)
      if (size < 1 || __builtin_mul_overflow(elements, size, &elements) || elements > most_elements)
        fail(fmt::format("{}.shape: [{}] cannot be", where, fmt::join(tensor.shape, ", ")));
    const Json& parts = member(json, "parts", where, file);
    if (!parts.is_array()) fail(where + ".parts: a list is wanted");
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::string at = fmt::format("{}.parts[{}]", where, i);
      CheckpointPart part;
      const std::int64_t number = whole(member(parts[i], "file", at, file), at + ".file", file);
      if (number >= static_cast<std::int64_t>(files)) fail(fmt::format("{}.file: {} of {} files", at, number, files));
      part.file = static_cast<int>(number);
      part.slice = slice_of(parts[i], tensor, at);
      tensor.parts.push_back(part);
    }
    check_parts(tensor, where);
    return tensor;
  }
};

}  // namespace

std::string write_index(const CheckpointIndex& index) {
  Json json;
  json["schema"] = schema;
  json["step"] = index.step;
  json["skipped_steps"] = index.skipped_steps;
  json["next_sample"] = index.next_sample;
  json["loss_scale"] = nullptr;
  if (index.loss_scale)  // their bits: what is read is what was written
    json["loss_scale"] = {{"scale", std::bit_cast<std::uint32_t>(index.loss_scale->scale)},
                          {"good_steps", std::bit_cast<std::uint32_t>(index.loss_scale->good_steps)},
                          {"skipped_steps", std::bit_cast<std::uint32_t>(index.loss_scale->skipped_steps)}};
  json["training"] = Json::object();
  for (const Fact& fact : index.facts) json["training"][fact.name] = fact.value;
  json["model"] = index.model;
  json["files"] = Json::array();
  for (const CheckpointFile& file : index.files)
    json["files"].push_back({{"name", file.name}, {"bytes", file.bytes}, {"crc32", fmt::format("{:08x}", file.crc32)}});
  json["tensors"] = Json::object();
  for (const CheckpointTensor& tensor : index.tensors) {
    Json parts = Json::array();
    for (const CheckpointPart& part : tensor.parts)
      parts.push_back(
          {{"file", part.file}, {"offset", offset_of(tensor, part.slice)}, {"shape", shape_of(tensor, part.slice)}});
    json["tensors"][tensor.name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"parts", parts}};
  }
  // One line for each member, and each file and tensor.
  std::string out = "{";
  for (const auto& item : json.items()) {
    out += fmt::format("{}\n  {}: ", out.size() > 1 ? "," : "", Json(item.key()).dump());
    const Json& value = item.value();
    if (!value.is_structured() || value.empty() || item.key() == "loss_scale") {
      out += value.dump();
      continue;
    }
    out += value.is_array() ? '[' : '{';
    bool first = true;
    for (const auto& inner : value.items()) {
      out += first ? "\n    " : ",\n    ";
      if (value.is_object()) out += Json(inner.key()).dump() + ": ";
      out += inner.value().dump();
      first = false;
    }
    out += value.is_array() ? "\n  ]" : "\n  }";
  }
  return fmt::format("{}{}{}\"\n}}\n", out, last_member, crc_of(out));
}

CheckpointIndex read_index(const std::string& text_of_file, const std::string& file_name) {
  const IndexReader reader{file_name};
  const std::size_t end = text_of_file.rfind(last_member);
  if (end == std::string::npos) reader.fail("it does not end with its checksum: it was altered or cut off");
  const std::string_view before = std::string_view(text_of_file).substr(0, end);
  if (text_of_file.substr(end) != fmt::format("{}{}\"\n}}\n", last_member, crc_of(before)))
    reader.fail("its checksum is not that of its text: it was altered or cut off");
  const Json json = parse_strict_json(text_of_file, file_name);
  const auto at = [&](const char* key) -> const Json& { return member(json, key, "checkpoint", file_name); };
  if (const std::string found = text(at("schema"), "schema", file_name); found != schema)
    reader.fail(fmt::format("schema {} can be read, found {}", schema, Json(found).dump()));
  CheckpointIndex index{.step = whole(at("step"), "step", file_name),
                        .skipped_steps = whole(at("skipped_steps"), "skipped_steps", file_name),
                        .next_sample = whole(at("next_sample"), "next_sample", file_name)};
  if (const Json& scale = at("loss_scale"); !scale.is_null()) {
    const auto bits = [&](const char* key) {
      const std::int64_t number = whole(member(scale, key, "loss_scale", file_name), "loss_scale", file_name);
      if (number > UINT32_MAX) reader.fail("loss_scale: 32 bits are wanted");
      return std::bit_cast<float>(static_cast<std::uint32_t>(number));
    };
    index.loss_scale =
        LossScale{.scale = bits("scale"), .good_steps = bits("good_steps"), .skipped_steps = bits("skipped_steps")};
  }
  index.model = text(at("model"), "model", file_name);
  if (!at("training").is_object()) reader.fail("training: an object is wanted");
  for (const auto& item : at("training").items())
    index.facts.push_back({.name = item.key(), .value = text(item.value(), "training", file_name)});
  if (!at("files").is_array()) reader.fail("files: a list is wanted");
  std::set<std::string> names;
  for (const Json& file : at("files")) {
    index.files.push_back(reader.file_of(file, fmt::format("files[{}]", index.files.size())));
    if (!names.insert(index.files.back().name).second)
      reader.fail(fmt::format("files: {} stands there twice", index.files.back().name));
  }
  if (!at("tensors").is_object()) reader.fail("tensors: an object is wanted");
  for (const auto& item : at("tensors").items())
    index.tensors.push_back(reader.tensor_of(item.key(), item.value(), index.files.size()));
  return index;
}

}  // namespace parplan
