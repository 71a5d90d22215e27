#include "runtime/comm/nccl/communicator_splits.h"

#include <doctest/doctest.h>

using namespace parplan;

TEST_CASE("disjoint groups of ranks are made in one round, whatever their number") {
  // A mesh of 2 x 2: rows, then columns, then all.
  CHECK(split_rounds({{0, 1}, {2, 3}, {0, 2}, {1, 3}, {0, 1, 2, 3}}, 4) == std::vector<int>{0, 0, 1, 1, 2});
  std::vector<std::vector<int>> rows;
  for (int row = 0; row < 128; ++row) rows.push_back({2 * row, 2 * row + 1});
  CHECK(split_rounds(rows, 256) == std::vector<int>(128, 0));
}

TEST_CASE("the routes of a pipeline take two rounds a direction, a ring of odd length three") {
  CHECK(split_rounds({{0, 1}, {1, 2}, {2, 3}, {3, 4}}, 5) == std::vector<int>{0, 1, 0, 1});
  CHECK(split_rounds({{0, 1}, {1, 2}, {2, 0}}, 3) == std::vector<int>{0, 1, 2});
}

TEST_CASE("a set goes to the first round with room, and no sets take no rounds") {
  CHECK(split_rounds({{0, 1}, {1, 2}, {2, 3}, {0}}, 4) == std::vector<int>{0, 1, 0, 1});
  CHECK(split_rounds({}, 4).empty());
}
