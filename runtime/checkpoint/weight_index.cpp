#include "runtime/checkpoint/weight_index.h"

#include <set>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "runtime/checkpoint/strict_json.h"

namespace parplan {

std::vector<std::string> read_weight_index(std::string_view written, const std::string& file) {
  const Json json = parse_strict_json(written, file);
  const Json& map = member(json, "weight_map", "index", file);
  if (!map.is_object()) throw ConfigError({file}, "weight_map: an object is wanted");
  std::set<std::string> names;
  for (const auto& item : map.items()) {
    const std::string name = text(item.value(), "weight_map", file);
    if (name.empty() || name.find('/') != std::string::npos || name.starts_with('.'))
      throw ConfigError({file},
                        fmt::format("weight_map: a file of this folder is wanted, found {}", Json(name).dump()));
    names.insert(name);
  }
  return {names.begin(), names.end()};
}

}  // namespace parplan
