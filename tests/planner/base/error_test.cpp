#include "planner/base/error.h"

#include <string_view>

#include <doctest/doctest.h>

#include "tests/planner/base/error_of.h"

using namespace parplan;

TEST_CASE("A user's error begins with its place as far as it is known") {
  const auto text = [](Location where) { return std::string(ConfigError(where, "bad").what()); };
  CHECK(text({.file = "a.yaml", .line = 3, .column = 7}) == "a.yaml:3:7: error: bad");
  CHECK(text({.file = "a.yaml", .line = 3, .column = 0}) == "a.yaml:3: error: bad");
  CHECK(text({.file = "a.yaml", .line = 0, .column = 0}) == "a.yaml: error: bad");
  CHECK(text({}) == "error: bad");
  CHECK(std::string(ConfigError("bad").what()) == "error: bad");
}

TEST_CASE("An assertion carries its condition and the numbers") {
  const std::string message = error_of<InternalError>([] { PARPLAN_ASSERT(1 + 1 == 3, "1 + 1 is 2"); });
  CHECK(std::string_view(message).ends_with("assertion '1 + 1 == 3' failed: 1 + 1 is 2"));
  CHECK(error_of<InternalError>([] { PARPLAN_ASSERT(true, ""); }) == "no error");
}
