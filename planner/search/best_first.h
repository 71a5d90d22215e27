#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "planner/plan/objective.h"
#include "planner/plan/plan.h"

namespace parplan {

struct Candidate;

// What is left of a space: a candidate that was not simulated or, where there is none yet, a part
// whose candidates were not made. Nothing of it scores below `bound`.
struct Open {
  Score bound;
  std::uint64_t place = 0;  // in the space; each has its own, and among equal bounds the first is next
  const Candidate* candidate = nullptr;
};

// A plan, once it was simulated.
struct Ranked {
  Score score;
  std::uint64_t place = 0;  // in the space; among equal scores the first is best
  RankedPlan plan;
  bool in_full = true;
};

struct BestFirst {
  int top = 1;
  std::vector<Open> open = {};    // a heap, the least bound in front
  std::vector<Ranked> best = {};  // at most `top`, the best first
  std::int64_t simulated = 0;
};

// What a space knows of itself.
struct BestFirstSteps {
  // Makes the candidates of a part; may be empty where all are made.
  std::function<std::vector<Open>(const Open& part)> look_into;
  // How many candidates may be simulated next, at once: none ends the search.
  std::function<std::int64_t()> room;
  // Whether nothing that comes to the same was taken before; may be empty.
  std::function<bool(const Open& candidate)> is_new;
  std::function<std::vector<Ranked>(std::span<const Open> candidates)> simulate;
};

void add(BestFirst& search, std::span<const Open> open);

// Takes what is open by its bound, the least first: looks into parts, simulates candidates. Ends
// once no bound that is left beats the worst of the best `top`, or there is no room.
void run(BestFirst& search, const BestFirstSteps& steps);

// Best first; what is beyond `top` is dropped.
void rank(BestFirst& search);

// Whether nothing that is left can be better than the best, once a plan was ranked.
bool is_certified(const BestFirst& search);

}  // namespace parplan
