#include "runtime/measure_nvme.h"

#include <doctest/doctest.h>

#include <filesystem>

#include "planner/base/error.h"
#include "tests/temporary_folder.h"

namespace parplan {

TEST_CASE("a folder's files are measured into rates that a cluster can state, and leave nothing behind") {
  const testing::TemporaryFolder folder;
  const Nvme nvme = measure_nvme(folder.root().string(), Seconds(0.0));
  CHECK(nvme.read.value > 0.0);
  CHECK(nvme.write.value > 0.0);
  CHECK(nvme.latency > Seconds(0.0));
  CHECK(nvme.latency < Seconds(1.0));
  REQUIRE(nvme.capacity);
  CHECK(*nvme.capacity > Bytes(0));
  CHECK(std::filesystem::is_empty(folder.root()));
  CHECK_THROWS_WITH_AS(measure_nvme(folder.path("missing"), Seconds(0.0)), doctest::Contains("No such file"), RunError);
}

}  // namespace parplan
