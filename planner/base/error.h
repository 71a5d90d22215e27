#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace parplan {

// A place in a user's file. Lines and columns count from 1; 0 means "not known".
struct Location {
  std::string file;
  int line = 0;
  int column = 0;
  bool operator==(const Location&) const = default;
};

// A mistake of the user: bad usage or bad input. `what()` reads `file:line:column: error: message`,
// or `error: message` where there is no place. The message says what was found, what is allowed
// and, where a similar name exists, "did you mean". The command line maps it to exit code 2.
class ConfigError : public std::runtime_error {
 public:
  explicit ConfigError(const std::string& message);
  ConfigError(const Location& where, const std::string& message);
  // The message without the place, for callers who know a better one.
  const std::string& message() const { return message_; }

 private:
  std::string message_;
};

// A failure while running a correct plan on a real machine (a file vanished, a rank failed). The
// command line maps it to exit code 1.
class RunError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A bug of parplan, or a promise that a run broke. The command line maps it to exit code 70.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

[[noreturn]] void assertion_failed(const char* condition, const char* file, int line,
                                   const std::string& numbers);

}  // namespace parplan

// An invariant of parplan; `numbers` is a string (fmt::format(...)) with the values involved.
#define PARPLAN_ASSERT(condition, numbers)                                         \
  do {                                                                             \
    if (!(condition)) ::parplan::assertion_failed(#condition, __FILE__, __LINE__, (numbers)); \
  } while (false)
