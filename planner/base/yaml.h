#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/error.h"
#include "planner/base/units.h"

namespace parplan {

// The text of a model's, cluster's or plan's file; where the file is too long for one, its begin.
std::string read_document(const std::filesystem::path& path);

// Strict reading of YAML over yaml-cpp: every error carries file:line:column; duplicate keys and
// files that are too large are errors as soon as a document is parsed; unknown keys are errors
// where `allow_keys` is called.
// This is a value type (it shares the parsed document). A YamlNode always exists; optional ones
// come from `find`.
class YamlNode {
 public:
  static YamlNode parse(const std::string& text, const std::string& file_name);
  static YamlNode load(const std::string& path);  // "cannot read 'path': reason" when it cannot

  bool is_map() const;
  bool is_list() const;
  bool is_scalar() const;
  bool is_null() const;
  Location location() const;

  // Maps. `at` throws "missing key 'k' in <what this map is>"; `find` gives nullopt when absent or
  // null.
  YamlNode at(std::string_view key) const;
  std::optional<YamlNode> find(std::string_view key) const;
  std::vector<std::string> keys() const;
  // Throws for the first key that is not allowed: "unknown key 'hiden'; allowed: a, b, c; did you
  // mean 'hidden'?".
  void allow_keys(const std::vector<std::string>& allowed) const;

  // Lists.
  std::size_t size() const;
  YamlNode operator[](std::size_t i) const;
  std::vector<YamlNode> items() const;

  // Scalars. Each throws what was found and what is wanted: "expected a whole number of at least 1,
  // found 'abc'".
  std::string as_string() const;
  // Text that names something, with what would act on a terminal escaped; not empty.
  std::string as_name() const;
  // Whether it stands in quotes: text, although it may read like a number.
  bool is_quoted() const;
  bool as_bool() const;
  std::int64_t as_integer(std::int64_t minimum = INT64_MIN, std::int64_t maximum = INT64_MAX) const;
  double as_number() const;  // finite
  Bytes as_bytes() const;
  BytesPerSecond as_bandwidth() const;
  BytesPerSecond as_line_rate() const;
  Seconds as_duration() const;
  FlopsPerSecond as_flop_rate() const;
  Watts as_power() const;
  // One of `allowed`, by its index: "expected one of a, b, found 'c'; did you mean 'b'?".
  std::size_t as_choice(const std::vector<std::string>& allowed) const;

  // Throws a ConfigError at this node's place.
  [[noreturn]] void fail(const std::string& message) const;

  struct Document;
  YamlNode(std::shared_ptr<const Document> document, std::shared_ptr<const void> node);

 private:
  std::shared_ptr<const Document> document_;
  std::shared_ptr<const void> node_;  // a YAML::Node
};

}  // namespace parplan
