#include "planner/plan/memory_verdict.h"

#include <doctest/doctest.h>

#include <string>

#include "planner/cluster/mesh.h"

namespace parplan {

TEST_CASE("a step fits with the headroom free, is tight within the device, and else does not fit") {
  // 600 of tensors, 200 that the allocator keeps, 100 of libraries.
  MemoryUse use;
  use.parameters = Bytes(600);
  use.reserve = Bytes(200);
  use.overhead = Bytes(100);
  CHECK(use.arena() == Bytes(600));
  CHECK(use.peak() == Bytes(900));
  const auto verdict = [&](int capacity, double headroom) {
    return std::string(name(memory_verdict(use, Bytes(capacity), headroom)));
  };
  CHECK(verdict(1000, 0.1) == "fits");
  CHECK(verdict(1000, 0.11) == "tight");
  CHECK(verdict(900, 0.0) == "fits");
  // The allocator gives back what it keeps.
  CHECK(verdict(899, 0.0) == "tight");
  CHECK(verdict(700, 0.0) == "tight");
  CHECK(verdict(699, 0.0) == "does_not_fit");
  CHECK(std::string(words_of(MemoryVerdict::does_not_fit)) == "does not fit");
  CHECK(usable_memory(Bytes(1000), 0.25) == Bytes(750));
}

}  // namespace parplan
