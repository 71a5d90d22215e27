#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "planner/plan/objective.h"
#include "planner/plan/parallel_spec.h"
#include "planner/search/candidates.h"

namespace parplan {

// Candidates of several specs, by whether they fit.
struct MadeCandidates {
  std::vector<Candidate> fitting;     // in the order of their specs
  // The candidate that needs the least memory among those that do not fit.
  std::optional<Candidate> smallest;
  std::int64_t count = 0;  // of all candidates
  // By the objectives time and cost, the layouts with other cuts, as far as these may be of use: no
  // cut of those that were left out takes less than `others_from`.
  std::vector<OpenLayout> others;
  Seconds others_from;
  // By the objective memory, the least that the layouts may take with other cuts.
  std::optional<Bytes> least_memory_left;
  // Layouts with cuts that do not fit, without what mixes add: with those that are candidates, else
  // with the fastest.
  std::vector<ParallelSpec> unfitting;
};
// Each maker works in a thread of its own; the result is the same for any number of them.
MadeCandidates make_candidates(std::span<CandidateMaker* const> makers, std::span<const ParallelSpec> specs,
                               bool mixes, Objective objective = Objective::time);

}  // namespace parplan
