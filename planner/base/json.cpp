#include "planner/base/json.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include <fmt/format.h>

namespace parplan {

Json json_number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

Json optional_number(const std::optional<double>& value) { return value ? json_number(*value) : Json(nullptr); }

// In ASCII: terminals obey some other characters.
std::string write_json(const Json& json) { return json.dump(2, ' ', true) + "\n"; }

namespace {

// Accepts every value and keeps none; records the first error with its place.
struct SyntaxOnly : nlohmann::json_sax<nlohmann::json> {
  std::size_t byte = 0;  // counted from 1, one past the end where the text ends too early
  std::string error;

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return true; }
  bool key(string_t&) override { return true; }
  bool end_object() override { return true; }
  bool start_array(std::size_t) override { return true; }
  bool end_array() override { return true; }
  // `position` is where reading stopped. For a number that no double holds, which
  // nlohmann::json::parse reports without a place, it is the end of the number.
  bool parse_error(std::size_t position, const std::string& last_read,
                   const nlohmann::detail::exception& found) override {
    const bool too_large = dynamic_cast<const nlohmann::json::out_of_range*>(&found) != nullptr;
    byte = too_large ? position + 1 - last_read.size() : position;
    error = too_large ? fmt::format("the number {} is beyond what a double holds", last_read) : found.what();
    return false;
  }
};

}  // namespace

YamlNode parse_json(const std::string& text, const std::string& file_name) {
  if (SyntaxOnly syntax; !nlohmann::json::sax_parse(text, &syntax)) {
    const std::string_view before = std::string_view(text).substr(0, syntax.byte == 0 ? 0 : syntax.byte - 1);
    const auto line = 1 + std::count(before.begin(), before.end(), '\n');
    const std::size_t line_start = before.rfind('\n') == std::string_view::npos ? 0 : before.rfind('\n') + 1;
    // "[json.exception.parse_error.101] parse error at line 3, column 5: syntax error while ... -
    // unexpected ..."
    const std::string_view what = syntax.error;
    const std::size_t colon = what.find(": ");
    std::string_view reason = what.substr(colon == std::string_view::npos ? 0 : colon + 2);
    // "last read" repeats the file from the start of the value, which may be long.
    if (reason.size() > 160) reason = reason.substr(0, reason.find("; last read"));
    throw ConfigError({.file = file_name,
                       .line = static_cast<int>(line),
                       .column = static_cast<int>(before.size() - line_start) + 1},
                      fmt::format("invalid JSON: {}", reason));
  }
  return YamlNode::parse(text, file_name);
}

}  // namespace parplan
