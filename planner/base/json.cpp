#include "planner/base/json.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include <fmt/format.h>

namespace parplan {

Json json_number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

std::string write_json(const Json& json) { return json.dump(2) + "\n"; }

YamlNode parse_json(const std::string& text, const std::string& file_name) {
  try {
    [[maybe_unused]] const nlohmann::json accepted = nlohmann::json::parse(text);
  } catch (const nlohmann::json::parse_error& error) {
    // `byte` counts from 1 and is one past the end where the text ends too early.
    const std::string_view before = std::string_view(text).substr(0, error.byte == 0 ? 0 : error.byte - 1);
    const auto line = 1 + std::count(before.begin(), before.end(), '\n');
    const std::size_t line_start = before.rfind('\n') == std::string_view::npos ? 0 : before.rfind('\n') + 1;
    // "[json.exception.parse_error.101] parse error at line 3, column 5: syntax error while ... - unexpected ..."
    const std::string_view what = error.what();
    const std::size_t colon = what.find(": ");
    std::string_view reason = what.substr(colon == std::string_view::npos ? 0 : colon + 2);
    // "last read" repeats the file from where the value began, which may be long before.
    if (reason.size() > 160) reason = reason.substr(0, reason.find("; last read"));
    throw ConfigError({.file = file_name,
                       .line = static_cast<int>(line),
                       .column = static_cast<int>(before.size() - line_start) + 1},
                      fmt::format("invalid JSON: {}", reason));
  }
  return YamlNode::parse(text, file_name);
}

}  // namespace parplan
