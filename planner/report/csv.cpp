#include "planner/report/csv.h"

#include "planner/base/text.h"
#include "planner/report/plan_row.h"

namespace parplan {
namespace {

// A text that a spreadsheet would take for a formula is told apart by an apostrophe, as OWASP
// recommends ("CSV injection"); numbers are no texts.
std::string field(const Json& value) {
  if (value.is_null()) return "";
  std::string text = value.is_string() ? value.get<std::string>() : value.dump();
  if (value.is_string() && !text.empty() && std::string_view("=+-@\t\r").find(text.front()) != std::string_view::npos)
    text.insert(text.begin(), '\'');
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + '"';
}

}  // namespace

std::string write_csv(std::span<const Json> rows) {
  std::vector<std::string> keys;
  for (const Column& column : columns()) keys.emplace_back(column.key);
  return write_csv(keys, rows);
}

std::string write_csv(const std::vector<std::string>& keys, std::span<const Json> rows) {
  std::string text = join(keys, ",") + '\n';
  for (const Json& row : rows) {
    bool first = true;
    for (const std::string& key : keys) {
      if (!first) text += ',';
      first = false;
      text += field(row.at(key));
    }
    text += '\n';
  }
  return text;
}

}  // namespace parplan
