#include "planner/base/error.h"

#include <fmt/format.h>

namespace parplan {
namespace {

std::string with_place(const Location& where, const std::string& message) {
  if (where.file.empty()) return "error: " + message;
  if (where.line == 0) return fmt::format("{}: error: {}", where.file, message);
  if (where.column == 0) return fmt::format("{}:{}: error: {}", where.file, where.line, message);
  return fmt::format("{}:{}:{}: error: {}", where.file, where.line, where.column, message);
}

}  // namespace

ConfigError::ConfigError(const std::string& message) : ConfigError(Location{}, message) {}
ConfigError::ConfigError(const Location& where, const std::string& message)
    : std::runtime_error(with_place(where, message)), message_(message) {}

void assertion_failed(const char* condition, const char* file, int line, const std::string& numbers) {
  throw InternalError(fmt::format("{}:{}: assertion '{}' failed: {}", file, line, condition, numbers));
}

}  // namespace parplan
