#include "planner/search/best_first.h"

#include <doctest/doctest.h>

using namespace parplan;

namespace {

Ranked plan_of(int dp, double seconds) {
  Ranked one{.score = {seconds, 0.0}, .bound = {seconds, 0.0}, .place = static_cast<std::uint64_t>(dp), .plan = {}};
  one.plan.spec.mesh.degree.dp = dp;
  return one;
}

Open open_at(double seconds) {
  static const DeviceMesh mesh;
  return {.bound = {seconds, 0.0}, .place = 0, .candidate = nullptr, .part = 0, .mesh = &mesh};
}

}  // namespace

TEST_CASE("a search is settled once none can beat its best plan or tie with it, and every rank has a plan") {
  BestFirst search{.top = 2, .top_each = 1, .tied = 0.01};
  CHECK_FALSE(is_settled(search));
  search.best = {plan_of(1, 10.0)};
  CHECK(is_certified(search));
  CHECK_FALSE(is_settled(search));
  // A second plan of the same degrees is no second rank.
  search.best = {plan_of(1, 10.0), plan_of(1, 11.0)};
  CHECK_FALSE(is_settled(search));
  search.best = {plan_of(1, 10.0), plan_of(2, 11.0)};
  CHECK(is_settled(search));
  add(search, std::vector{open_at(10.2)});
  CHECK(is_settled(search));
  add(search, std::vector{open_at(10.05)});
  CHECK(is_certified(search));
  CHECK_FALSE(is_settled(search));
  add(search, std::vector{open_at(9.0)});
  CHECK_FALSE(is_certified(search));
  CHECK_FALSE(is_settled(search));
}

TEST_CASE("a search that has beaten no plan of other searches is settled by theirs") {
  BestFirst search{.top = 1, .top_each = 1, .tied = 0.0, .to_beat = Score{9.0, 0.0}};
  CHECK(is_settled(search));
  add(search, std::vector{open_at(9.5)});
  CHECK(is_settled(search));
  add(search, std::vector{open_at(8.0)});
  CHECK_FALSE(is_settled(search));
}
