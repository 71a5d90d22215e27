#include "planner/base/allocated.h"

#include <doctest/doctest.h>

#include <limits>
#include <string>

#include "planner/base/error.h"

namespace parplan {
namespace {

// An element for whose first one there is no memory.
struct Refused {
  Refused() { throw std::bad_alloc(); }
  std::int64_t words[128] = {};
};

template <class T>
std::string refusal(std::int64_t count) {
  try {
    allocated<T>(count, "the tokens of a step");
  } catch (const RunError& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("large memory is zero, and where there is none it is said how much was asked for, and for what") {
  CHECK(allocated<float>(3, "numbers") == std::vector<float>(3, 0.0f));
  CHECK(allocated<float>(0, "numbers").empty());
  std::vector<int> grown = {7};
  allocate(grown, 2, "numbers");
  CHECK(grown == std::vector<int>{7, 0});
  CHECK(refusal<Refused>(3 * 1024) == "out of memory: 3.00 MiB were asked for, for the tokens of a step");
  CHECK(refusal<float>(std::numeric_limits<std::int64_t>::max()) ==
        "out of memory: more than 8 EiB were asked for, for the tokens of a step");
}

TEST_CASE("what the system refuses is said with its size, where that is known") {
  CHECK(out_of_memory_text(std::bad_alloc()) == "out of memory");
  CHECK(out_of_memory_text(RefusedAllocation(3 * 1024 * 1024)) == "out of memory: 3.00 MiB were asked for");
}

}  // namespace
}  // namespace parplan
