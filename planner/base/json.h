#pragma once

#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "planner/base/yaml.h"

namespace parplan {

// JSON that parplan prints: keys stay in the order in which they were set.
using Json = nlohmann::ordered_json;

// The number, or null where it is not finite: JSON has no NaN.
Json json_number(double value);
// The same, or null where there is none.
Json optional_number(const std::optional<double>& value);

// Indented by two spaces, ends with a newline.
std::string write_json(const Json& json);

// Reads a user's JSON file as strictly as YAML (JSON is a part of it): the same located errors,
// duplicate keys refused. What YAML would accept beyond JSON is refused too: "invalid JSON: ...".
YamlNode parse_json(const std::string& text, const std::string& file_name);

}  // namespace parplan
