#include "runtime/checkpoint/weight_files.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/base/json.h"
#include "runtime/checkpoint/mapped_file.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/checkpoint/weight_index.h"
#include "runtime/launch/fingerprint.h"

namespace parplan {
namespace {

constexpr const char* one_file = "model.safetensors";
constexpr const char* index_of_files = "model.safetensors.index.json";

struct NumberRow {
  std::string_view dtype;
  DataType type;
};
constexpr NumberRow numbers[] = {{"F32", DataType::fp32}, {"F16", DataType::fp16}, {"BF16", DataType::bf16}};

std::uint64_t joined(std::uint64_t first, std::uint64_t second) {
  const std::uint64_t parts[] = {first, second};
  return fingerprint(std::as_bytes(std::span(parts)));
}

constexpr std::size_t sampled_bytes = 4096;  // of each place: a page or two of the mapping

std::vector<std::string> files_of(const std::string& folder) {
  const std::string index = folder + '/' + index_of_files;
  if (!std::filesystem::exists(index)) return {one_file};
  return read_weight_index(read_file(index), index);
}

}  // namespace

WeightFiles::WeightFiles(const std::string& folder) : folder_(folder) {
  for (const std::string& name : files_of(folder)) add_file(fmt::format("{}/{}", folder, name));
}

WeightFiles::~WeightFiles() = default;

void WeightFiles::check_are_whole() const {
  for (const std::unique_ptr<MappedFile>& mapping : mappings_) mapping->check_is_whole();
}

void WeightFiles::add_file(const std::string& path) {
  mappings_.push_back(std::make_unique<MappedFile>(path));
  const std::span<const std::byte> mapped = mappings_.back()->bytes();
  if (mapped.empty()) throw ConfigError(fmt::format("cannot read '{}': it is empty", path));
  const std::string_view bytes(reinterpret_cast<const char*>(mapped.data()), mapped.size());
  const SafetensorsHeader header = parse_safetensors_header(bytes, static_cast<std::int64_t>(bytes.size()), path);
  headers_ = joined(headers_, fingerprint(bytes.substr(0, static_cast<std::size_t>(header.data_begin))));
  for (const SafetensorsEntry& entry : header.entries) {
    const auto* const number = std::ranges::find(numbers, entry.dtype, &NumberRow::dtype);
    const Weights weights{.shape = entry.shape,
                          .dtype = entry.dtype,
                          .type = number == std::end(numbers) ? DataType::int32 : number->type,
                          .data = reinterpret_cast<const std::byte*>(bytes.data()) + header.data_begin + entry.begin,
                          .bytes = static_cast<std::size_t>(entry.end - entry.begin),
                          .file = path};
    if (!weights_.emplace(entry.name, weights).second)
      throw ConfigError({path}, fmt::format("{} lies in another file, too", Json(entry.name).dump()));
  }
}

std::uint64_t WeightFiles::sampled_fingerprint() const {
  std::uint64_t all = headers_;
  for (const auto& [name, weights] : weights_) {
    const std::span<const std::byte> bytes(weights.data, weights.bytes);
    const std::size_t size = std::min(sampled_bytes, bytes.size());
    for (const std::size_t begin : {std::size_t{0}, (bytes.size() - size) / 2, bytes.size() - size})
      all = joined(all, fingerprint(bytes.subspan(begin, size)));
  }
  check_are_whole();
  return all;
}

std::vector<WeightFiles::Weights> WeightFiles::find(const std::vector<StoredTensor>& tensors) const {
  std::vector<Weights> all;
  for (const StoredTensor& tensor : tensors) {
    auto found = weights_.find(tensor.name);
    if (found == weights_.end() && !tensor.alias.empty()) found = weights_.find(tensor.alias);
    if (found == weights_.end())
      throw ConfigError({folder_}, fmt::format("the weights have no tensor {} of shape [{}]", tensor.name,
                                               fmt::join(tensor.shape, ", ")));
    const Weights& weights = found->second;
    if (weights.shape != tensor.shape)
      throw ConfigError({weights.file}, fmt::format("{} has shape [{}]; the plan's model has [{}]", found->first,
                                                    fmt::join(weights.shape, ", "), fmt::join(tensor.shape, ", ")));
    if (weights.type == DataType::int32)
      throw ConfigError({weights.file},
                        fmt::format("{} is {}; weights are read from F32, F16 and BF16", found->first, weights.dtype));
    all.push_back(weights);
  }
  return all;
}

std::vector<std::string> WeightFiles::beyond(const std::vector<StoredTensor>& tensors) const {
  std::set<std::string> wanted;
  for (const StoredTensor& tensor : tensors) {
    wanted.insert(tensor.name);
    wanted.insert(tensor.alias);
  }
  std::vector<std::string> names;
  for (const auto& [name, weights] : weights_)
    if (!wanted.contains(name)) names.push_back(name);
  return names;
}

}  // namespace parplan
