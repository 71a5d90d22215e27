#include "planner/cluster/mesh.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "planner/base/error.h"

using namespace parplan;

namespace {

DeviceMesh mesh(int pp, int dp, int tp, const std::string& order = "pp-dp-tp") {
  return {.degree = {.pp = pp, .dp = dp, .tp = tp}, .order = parse_order(order)};
}

}  // namespace

TEST_CASE("ranks run along the innermost axis first") {
  const DeviceMesh m = mesh(2, 3, 4);
  CHECK(m.stride_of(Axis::tp) == 1);
  CHECK(m.stride_of(Axis::dp) == 4);
  CHECK(m.stride_of(Axis::pp) == 12);
  CHECK(coordinates_of(m, 17) == Coordinates{.pp = 1, .dp = 1, .tp = 1});  // 17 = 1 * 12 + 1 * 4 + 1
  CHECK(rank_at(m, {.pp = 1, .dp = 1, .tp = 1}) == 17);
  CHECK(group_of(m, 17, Axis::dp) == std::vector<int>{13, 17, 21});
  CHECK(group_of(m, 17, Axis::pp) == std::vector<int>{5, 17});
  CHECK(group_of(m, 17, Axis::tp) == std::vector<int>{16, 17, 18, 19});
}

TEST_CASE("ranks of the data axis share out the batch") {
  const DeviceMesh m = mesh(2, 3, 4);
  CHECK(m.batch_ranks() == 3);
  CHECK(batch_rank(m, {.pp = 1, .dp = 2, .tp = 3}) == 2);
}

TEST_CASE("every rank's coordinates lead back to it in each of the six orders") {
  for (const char* order : {"pp-dp-tp", "pp-tp-dp", "dp-pp-tp", "dp-tp-pp", "tp-pp-dp", "tp-dp-pp"}) {
    const DeviceMesh m = mesh(2, 3, 4, order);
    CHECK(write_order(m.order) == order);
    for (int rank = 0; rank < m.size(); ++rank) CHECK(rank_at(m, coordinates_of(m, rank)) == rank);
  }
}

TEST_CASE("an unknown order of axes lists the six") {
  CHECK_THROWS_WITH_AS(
      parse_order("pp-dp-pt"),
      "error: expected an order of the mesh axes, one of pp-dp-tp, pp-tp-dp, dp-pp-tp, dp-tp-pp, tp-pp-dp, tp-dp-pp, "
      "found 'pp-dp-pt'; did you mean 'pp-dp-tp'?",
      ConfigError);
}
