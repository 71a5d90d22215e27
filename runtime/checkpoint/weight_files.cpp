#include "runtime/checkpoint/weight_files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/base/error.h"
#include "planner/base/file.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/checkpoint/strict_json.h"
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

std::vector<std::string> files_of(const std::string& folder) {
  const std::string index = folder + '/' + index_of_files;
  if (!std::filesystem::exists(index)) return {one_file};
  const Json json = parse_strict_json(read_file(index), index);
  const Json& map = member(json, "weight_map", "index", index);
  if (!map.is_object()) throw ConfigError({index}, "weight_map: an object is wanted");
  std::set<std::string> names;
  for (const auto& item : map.items()) {
    const std::string name = text(item.value(), "weight_map", index);
    if (name.empty() || name.find('/') != std::string::npos || name.starts_with('.'))
      throw ConfigError({index},
                        fmt::format("weight_map: a file of this folder is wanted, found {}", Json(name).dump()));
    names.insert(name);
  }
  return {names.begin(), names.end()};
}

}  // namespace

class WeightFiles::Mapping {
 public:
  explicit Mapping(const std::string& path) {
    const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat found {};
    const bool is_file = descriptor >= 0 && fstat(descriptor, &found) == 0 && S_ISREG(found.st_mode);
    void* const mapped = is_file && found.st_size > 0 ? mmap(nullptr, static_cast<std::size_t>(found.st_size),
                                                             PROT_READ, MAP_PRIVATE, descriptor, 0)
                                                      : MAP_FAILED;
    const int reason = errno;
    if (descriptor >= 0) close(descriptor);
    if (mapped == MAP_FAILED)
      throw ConfigError(fmt::format("cannot read '{}': {}", path,
                                    descriptor >= 0 && !is_file     ? "it is no regular file"
                                    : is_file && found.st_size == 0 ? "it is empty"
                                                                    : std::strerror(reason)));
    bytes_ = {static_cast<const char*>(mapped), static_cast<std::size_t>(found.st_size)};
  }
  ~Mapping() { munmap(const_cast<char*>(bytes_.data()), bytes_.size()); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  std::string_view bytes() const { return bytes_; }

 private:
  std::string_view bytes_;
};

WeightFiles::WeightFiles(const std::string& folder) : folder_(folder) {
  for (const std::string& name : files_of(folder)) add_file(fmt::format("{}/{}", folder, name));
}

WeightFiles::~WeightFiles() = default;

void WeightFiles::add_file(const std::string& path) {
  mappings_.push_back(std::make_unique<Mapping>(path));
  const std::string_view bytes = mappings_.back()->bytes();
  const SafetensorsHeader header = parse_safetensors_header(bytes, static_cast<std::int64_t>(bytes.size()), path);
  const std::uint64_t parts[] = {fingerprint_,
                                 fingerprint(bytes.substr(0, static_cast<std::size_t>(header.data_begin)))};
  fingerprint_ = fingerprint(std::as_bytes(std::span(parts)));
  for (const SafetensorsEntry& entry : header.entries) {
    const auto* const number = std::ranges::find(numbers, entry.dtype, &NumberRow::dtype);
    const Weights weights{.shape = entry.shape,
                          .dtype = entry.dtype,
                          .type = number == std::end(numbers) ? DataType::int32 : number->type,
                          .data = reinterpret_cast<const std::byte*>(bytes.data()) + header.data_begin + entry.begin,
                          .file = path};
    if (!weights_.emplace(entry.name, weights).second)
      throw ConfigError({path}, fmt::format("{} lies in another file, too", Json(entry.name).dump()));
  }
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
