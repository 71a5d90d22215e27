#include "tests/numerics/golden.h"

#include <cstring>
#include <sstream>
#include <string_view>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/base/file.h"

namespace parplan {
namespace {

std::uint64_t fnv1a(std::string_view name) {
  std::uint32_t hash = 2166136261u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash;
}

// 24 bits of splitmix64 (Steele, Lea and Flood 2014).
std::int64_t number(std::string_view name, std::int64_t i) {
  std::uint64_t z = (fnv1a(name) << 32) + static_cast<std::uint64_t>(i) + 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return static_cast<std::int64_t>((z ^ (z >> 31)) >> 40);
}

}  // namespace

std::map<std::string, GoldenTensor> read_golden(const std::string& path) {
  const std::string content = read_file(path);
  const std::string last = "\nend\n";
  const std::size_t header_end = content.find(last);
  PARPLAN_ASSERT(content.starts_with("parplan-golden 1\n") && header_end != std::string::npos, path);
  const char* data = content.data() + header_end + last.size();
  const char* data_end = content.data() + content.size();

  std::map<std::string, GoldenTensor> tensors;
  std::istringstream header(content.substr(0, header_end));
  std::string line;
  std::getline(header, line);
  while (std::getline(header, line)) {
    std::istringstream words(line);
    std::string keyword, name;
    words >> keyword >> name;
    PARPLAN_ASSERT(keyword == "tensor", line);
    GoldenTensor& tensor = tensors[name];
    std::size_t count = 1;
    for (std::int64_t size = 0; words >> size; count *= static_cast<std::size_t>(size)) tensor.sizes.push_back(size);
    PARPLAN_ASSERT(count * sizeof(float) <= static_cast<std::size_t>(data_end - data), line);
    tensor.values.resize(count);
    std::memcpy(tensor.values.data(), data, count * sizeof(float));
    data += count * sizeof(float);
  }
  PARPLAN_ASSERT(data == data_end, fmt::format("{}: {} bytes too many", path, data_end - data));
  return tensors;
}

std::vector<float> golden_parameter(const Tensor& tensor) {
  const bool norm = tensor.name.find("norm") != std::string::npos && tensor.name.ends_with(".weight");
  std::vector<float> values;
  for (std::int64_t i = 0; i < element_count(tensor); ++i) {
    const double uniform = static_cast<double>(number(tensor.name, i)) / 8388608.0 - 1.0;
    values.push_back(static_cast<float>((norm ? 1.0 : 0.0) + 0.25 * uniform));
  }
  return values;
}

std::vector<std::int32_t> golden_text(std::int64_t count, std::int64_t vocabulary) {
  std::vector<std::int32_t> text;
  for (std::int64_t i = 0; i < count; ++i) text.push_back(static_cast<std::int32_t>(number("text", i) % vocabulary));
  return text;
}

}  // namespace parplan
