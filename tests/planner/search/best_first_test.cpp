#include "planner/search/best_first.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "planner/search/candidates.h"

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

TEST_CASE("a candidate whose sharper bound is above the best plan is not simulated") {
  BestFirst search{.top = 1};
  const Candidate candidate;
  const DeviceMesh mesh;
  std::vector<Open> all;
  for (std::uint64_t place = 0; place < 6; ++place)
    all.push_back({.bound = {1.0, 0.0}, .place = place, .candidate = &candidate, .part = 0, .mesh = &mesh});
  add(search, all);
  // The later a candidate's place, the less it takes, and the less its sharper bound.
  const auto sharp = [](const Open& one) { return 10.0 - static_cast<double>(one.place); };
  std::vector<std::uint64_t> asked, simulated;
  run(search, {.look_into = {},
               .sharpened = [&](const Open& one) {
                 asked.push_back(one.place);
                 return std::max(one.bound, Score{sharp(one), 0.0});
               },
               .room = [] { return std::int64_t{1}; },
               .is_new = {},
               .simulate = [&](std::span<const Open> turns) {
                 std::vector<Ranked> ranked;
                 for (const Open& one : turns) {
                   CHECK(one.bound.first == sharp(one));
                   simulated.push_back(one.place);
                   ranked.push_back(plan_of(1, sharp(one) + 0.5));
                 }
                 return ranked;
               }});
  // Each is asked once, and the first to be simulated rules the others out.
  CHECK(asked == std::vector<std::uint64_t>{0, 1, 2, 3, 4, 5});
  CHECK(simulated == std::vector<std::uint64_t>{5});
  CHECK(search.simulated == 1);
  CHECK(is_certified(search));
}

TEST_CASE("behind a certain best plan few variants of a set of degrees are simulated, none far above it") {
  const auto simulated = [](double apart, int variants) {
    BestFirst search{.top = 2, .top_each = 1};
    const Candidate candidate;
    DeviceMesh meshes[2];
    meshes[1].degree.dp = 2;
    const auto open = [&](double seconds, int degrees) {
      return Open{.bound = {seconds, 0.0}, .place = 0, .candidate = &candidate, .part = 0, .mesh = &meshes[degrees]};
    };
    std::vector<Open> all{open(1.0, 0)};
    for (int i = 0; i < variants; ++i) all.push_back(open(2.0 * (1.0 + apart * i), 1));
    for (std::size_t i = 0; i < all.size(); ++i) all[i].place = i;
    add(search, all);
    int behind = 0;
    // Each variant is a little slower than the one before, and every bound is below the first.
    run(search, {.look_into = {},
                 .room = [] { return std::int64_t{1}; },
                 .is_new = {},
                 .simulate = [&](std::span<const Open> turns) {
                   std::vector<Ranked> ranked;
                   for (const Open& one : turns) {
                     behind += one.mesh->degree.dp == 2;
                     const int dp = one.mesh->degree.dp;
                     ranked.push_back(plan_of(dp, one.bound.first * (dp == 2 ? 1.1 : 1.0)));
                     ranked.back().bound = one.bound;
                     ranked.back().place = one.place;
                   }
                   return ranked;
                 }});
    CHECK(search.best.size() == 2);
    CHECK(is_certified(search));
    return behind;
  };
  CHECK(simulated(1e-4, 10) == most_variants_behind);
  CHECK(simulated(1e-4, 3) == 3);
  CHECK(simulated(0.06, 10) == 2);
}

TEST_CASE("a search that has beaten no plan of other searches is settled by theirs") {
  BestFirst search{.top = 1, .top_each = 1, .tied = 0.0, .to_beat = Score{9.0, 0.0}};
  CHECK(is_settled(search));
  add(search, std::vector{open_at(9.5)});
  CHECK(is_settled(search));
  add(search, std::vector{open_at(8.0)});
  CHECK_FALSE(is_settled(search));
}
