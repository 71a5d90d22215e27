#include "planner/cluster/mesh.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
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

TEST_CASE("the groups in use, and those of a stage and of one replica's, are those that hold its ranks") {
  Cluster cluster;
  cluster.groups.assign(3, NodeGroup{});
  for (std::size_t g = 0; g < cluster.groups.size(); ++g) {
    cluster.groups[g].nodes = 1 + static_cast<int>(g);
    cluster.groups[g].node.devices.resize(g == 1 ? 4 : 8);
  }
  REQUIRE(cluster.devices() == 8 + 8 + 24);
  const auto group_at = [&](int rank) { return rank < 8 ? 0u : rank < 16 ? 1u : 2u; };
  for (const char* order : {"pp-dp-tp", "pp-tp-dp", "dp-pp-tp", "dp-tp-pp", "tp-pp-dp", "tp-dp-pp"})
    for (const int pp : {1, 2, 3})
      for (const int dp : {1, 2, 3, 6})
        for (const int cp : {1, 2})
          for (const int tp : {1, 2, 4}) {
            const DeviceMesh m{.degree = {.pp = pp, .dp = dp, .cp = cp, .tp = tp}, .order = parse_order(order)};
            if (m.size() > cluster.devices()) continue;
            CAPTURE(m.size());
            std::vector<std::uint64_t> of_stage(static_cast<std::size_t>(pp), 0);
            std::vector<std::uint64_t> of_replica(static_cast<std::size_t>(pp * dp), 0);
            std::size_t in_use = 0;
            for (int rank = 0; rank < m.size(); ++rank) {
              const Coordinates at = coordinates_of(m, rank);
              of_stage[static_cast<std::size_t>(at.pp)] |= std::uint64_t{1} << group_at(rank);
              of_replica[static_cast<std::size_t>(at.pp * dp + at.dp)] |= std::uint64_t{1} << group_at(rank);
              in_use = std::max<std::size_t>(in_use, group_at(rank) + 1);
            }
            CHECK(groups_in_use(cluster, m.size()).size() == in_use);
            for (int stage = 0; stage < pp; ++stage) {
              CHECK(groups_of_stage(cluster, m, stage) == of_stage[static_cast<std::size_t>(stage)]);
              for (int replica = 0; replica < dp; ++replica)
                CHECK(groups_of_stage(cluster, m, stage, replica) ==
                      of_replica[static_cast<std::size_t>(stage * dp + replica)]);
            }
          }
}
