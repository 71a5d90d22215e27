#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "planner/plan/objective.h"
#include "planner/plan/plan.h"

namespace parplan {

struct Candidate;

// An open part of a space: a candidate that was not simulated or, where `candidate` is null, a part
// whose candidates were not made yet. Nothing in it scores below `bound`.
struct Open {
  Score bound;
  // The place in the space. Each has its own; among equal bounds the first place is next.
  std::uint64_t place = 0;
  const Candidate* candidate = nullptr;
  bool is_sharp = false;             // a candidate's bound: no better one is known (BestFirstSteps::sharpened)
  std::size_t part = 0;              // without a candidate: the space's own number of the part
  const DeviceMesh* mesh = nullptr;  // with the degrees of all that is in it
};

// A plan that was simulated.
struct Ranked {
  Score score;
  Score bound;              // of its candidate
  std::uint64_t place = 0;  // in the space; among equal scores the first is best
  RankedPlan plan;
};

// A plan of another space.
struct RankedElsewhere {
  Score score;
  Degrees degrees;
};

struct BestFirst {
  int top = 1;
  // Plans of the same degrees (data, tensor, pipeline, context) that are ranked among the best
  // `top`. Those that are as good as the best but for `tied` of its score are kept beside them: one
  // of these may be the plainest.
  int top_each = std::numeric_limits<int>::max();
  double tied = 0.0;
  // The best plan of other spaces. Until one of this space beats it, nothing else here matters, but
  // for what may be ranked among the best plans of all spaces: where those of the others are given,
  // the best first, `top` at most and `top_each` at most of the same degrees.
  std::optional<Score> to_beat = {};
  std::vector<RankedElsewhere> elsewhere = {};
  std::vector<Open> open = {};    // a heap, the least bound in front
  std::vector<Ranked> best = {};  // those that are kept, the best first
  std::vector<Degrees> behind = {};  // of what was simulated for the ranks behind a certain best plan
  std::int64_t simulated = 0;
};

// The functions that a space supplies.
struct BestFirstSteps {
  // Makes the candidates of a part; may be empty where all are made.
  std::function<std::vector<Open>(const Open& part)> look_into;
  // A better bound of a candidate than its first one, or the same, asked for when its turn comes;
  // may be empty.
  std::function<Score(const Open& candidate)> sharpened = {};
  // Whether a candidate may be plainer than a plan: among those that are as good as the best but
  // for a tie, the plainest is wanted, and they are simulated until none is left that may be it.
  // Empty: all of them are.
  std::function<bool(const Open& candidate, const Ranked& plan)> may_be_plainer = {};
  // How many candidates may be simulated next, together; zero ends the search.
  std::function<std::int64_t()> room;
  // Whether no equivalent candidate was taken before; may be empty.
  std::function<bool(const Open& candidate)> is_new;
  std::function<std::vector<Ranked>(std::span<const Open> candidates)> simulate;
};

void add(BestFirst& search, std::span<const Open> open);

// Once none can be the best plan, or tie with it, no others of the same degrees are taken to be
// faster than a ranked one after so many were simulated.
inline constexpr std::int64_t most_variants_behind = 4;

// Takes open parts by their bounds, the least bound first: looks into parts, simulates candidates.
// Ends once no remaining bound beats the worst of the best `top` (or, before any plan does, what is
// to be beaten), or there is no room. The ranks behind a certain best plan may lack a variant of
// their degrees (`most_variants_behind`).
void run(BestFirst& search, const BestFirstSteps& steps);

// The best score of all spaces so far.
std::optional<Score> best_score(const BestFirst& search);
// Nothing that scores as much, or worse, can be ranked; nothing while anything can.
std::optional<Score> score_limit(const BestFirst& search);
// Whether the best plan is one of this space.
bool is_ahead(const BestFirst& search);

// Sorts, best first; drops what is beyond `top` and `top_each`.
void rank(BestFirst& search);
// Drops what is not ranked beside the plans of other spaces.
void drop_beaten_elsewhere(BestFirst& search);
// The plans of `ranked`, in its order, without those beyond the first `top_each` of their degrees.
std::vector<Ranked> first_of_each(std::vector<Ranked> ranked, int top_each);

// Whether no open part can be better than the best, once a plan is ranked.
bool is_certified(const BestFirst& search);
// Whether no open part can beat the best plan of all spaces or tie with it, and each rank has a
// plan.
bool is_settled(const BestFirst& search);

}  // namespace parplan
