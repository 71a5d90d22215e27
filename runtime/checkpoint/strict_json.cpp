#include "runtime/checkpoint/strict_json.h"

#include <set>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

constexpr int most_levels = 8;

[[noreturn]] void fail(const std::string& file_name, const std::string& where, const std::string& wanted,
                       const Json& found) {
  std::string shown = found.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (shown.size() > 60) shown = shown.substr(0, 57) + "...";
  throw ConfigError({file_name}, fmt::format("{}: expected {}, found {}", where, wanted, shown));
}

// Text from a file that anybody may have written, as a message can show it.
std::string shown(const std::string& name) {
  return Json(name.substr(0, 200)).dump(-1, ' ', true, Json::error_handler_t::replace);
}

}  // namespace

Json parse_strict_json(std::string_view text, const std::string& file_name) {
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto check = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > most_levels)
      throw ConfigError({file_name}, fmt::format("JSON of more than {} levels; no such file has them", most_levels));
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second)
      throw ConfigError({file_name}, fmt::format("the key {} stands there twice", shown(value.get<std::string>())));
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), check);
  } catch (const Json::parse_error& error) {
    throw ConfigError({file_name}, fmt::format("invalid JSON at byte {} of {}", error.byte, text.size()));
  } catch (const Json::exception&) {
    throw ConfigError({file_name}, "a number in it is too large");
  }
}

const Json& member(const Json& object, const char* key, const std::string& where, const std::string& file_name) {
  if (!object.is_object()) fail(file_name, where, "an object", object);
  const auto found = object.find(key);
  if (found == object.end()) throw ConfigError({file_name}, fmt::format("{}: missing key '{}'", where, key));
  return *found;
}

std::int64_t whole(const Json& value, const std::string& where, const std::string& file_name) {
  constexpr std::uint64_t most = INT64_MAX;
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > most)
    fail(file_name, where, "a whole number of at least 0", value);
  return value.get<std::int64_t>();
}

std::string text(const Json& value, const std::string& where, const std::string& file_name) {
  if (!value.is_string()) fail(file_name, where, "a text", value);
  return value.get<std::string>();
}

std::vector<std::int64_t> wholes(const Json& value, const std::string& where, const std::string& file_name) {
  if (!value.is_array()) fail(file_name, where, "a list of whole numbers", value);
  std::vector<std::int64_t> numbers;
  for (const Json& item : value) numbers.push_back(whole(item, where, file_name));
  return numbers;
}

}  // namespace parplan
