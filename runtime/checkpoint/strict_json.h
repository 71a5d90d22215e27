#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/json.h"

namespace parplan {

// Reads JSON that another program may have written or altered: a duplicate key, more than eight
// levels and anything that is no JSON are ConfigErrors that name the file and the byte.
Json parse_strict_json(std::string_view text, const std::string& file_name);

// The member of an object, and what it has to be: ConfigError says where ("files[3].bytes") and
// what was found.
const Json& member(const Json& object, const char* key, const std::string& where, const std::string& file_name);
std::int64_t whole(const Json& value, const std::string& where, const std::string& file_name);  // 0 or more
std::string text(const Json& value, const std::string& where, const std::string& file_name);
std::vector<std::int64_t> wholes(const Json& value, const std::string& where, const std::string& file_name);

}  // namespace parplan
