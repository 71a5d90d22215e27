#include "planner/report/csv.h"

#include "planner/report/row.h"

namespace parplan {
namespace {

std::string field(const Json& value) {
  if (value.is_null()) return "";
  const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
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
  std::string text;
  for (const Column& column : columns()) {
    if (!text.empty()) text += ',';
    text += column.key;
  }
  text += '\n';
  for (const Json& row : rows) {
    bool first = true;
    for (const Column& column : columns()) {
      if (!first) text += ',';
      first = false;
      text += field(row.at(std::string(column.key)));
    }
    text += '\n';
  }
  return text;
}

}  // namespace parplan
