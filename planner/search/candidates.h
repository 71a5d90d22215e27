#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/parallel/cut_stages.h"
#include "planner/plan/objective.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"
#include "planner/plan/plan.h"
#include "planner/search/space.h"
#include "planner/simulator/estimate.h"

namespace parplan {

// A point of the space with its stage cut, estimated.
struct Candidate {
  ParallelSpec spec;
  Bound bound;
};

// A model's cuts are all candidates where they are few enough, and so are the choices of stages
// that recompute; beyond that, a layout is represented by what the dynamic programming chooses.
inline constexpr std::int64_t most_cuts = 32;
inline constexpr int most_choosing_stages = 5;  // 2^5 choices

// Makes candidates of enumerated specs. The graph, the cluster and the training must outlive it;
// used by one thread.
class CandidateMaker {
 public:
  CandidateMaker(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                 Objective objective = Objective::time);

  // Appends the candidates of one spec of enumerate_specs, in a fixed order:
  // - with given stage blocks, that one;
  // - where the model has at most `most_cuts` cuts into so many stages, each of them; where one
  //   does not fit without recompute (for the objective memory: always) also every choice of stages
  //   that recompute, or with more than `most_choosing_stages` stages, the best cut with stages
  //   choosing for themselves;
  // - else the cut whose slowest stage is fastest; if that does not fit, but all stages together
  //   have the memory, the best cut that fits; and if none fits without recompute, but one would
  //   with it, the best cut with stages choosing for themselves.
  // Estimates have bounds only, and where a candidate does not fit, only its memory. `mixes`:
  // whether stages may differ in what they recompute.
  void add(const ParallelSpec& spec, bool mixes, std::vector<Candidate>& candidates);

  // The cut of a layout that is complete but for its cut: the cut whose slowest stage is fastest,
  // among those that fit where any fits.
  std::vector<int> cut_of(const ParallelSpec& spec);

  // A candidate with the times of its estimate.
  RankedPlan with_times(const Candidate& candidate);

  const Placements& placements_of(const ParallelSpec& spec);
  Estimator& estimator() { return estimator_; }

 private:
  Candidate estimated(ParallelSpec spec);
  const std::vector<int>& fastest_cut(const ParallelSpec& spec);
  std::optional<Candidate> cut_that_fits(const ParallelSpec& spec, bool mixes);
  void add_all_cuts(const ParallelSpec& spec, bool mixes, std::vector<Candidate>& candidates);

  const OpGraph& graph_;
  TrainingSpec training_;
  Objective objective_;
  Estimator estimator_;
  std::map<ParallelSpec, Placements> placements_;  // by placement_key
  using Paces = std::vector<std::pair<int, int>>;  // of stages
  std::map<std::pair<ParallelSpec, Paces>, std::vector<int>> cuts_;  // by cut_key
  // By fitting_cut_key, and by whether stages choose what they recompute.
  std::map<std::tuple<ParallelSpec, Paces, bool>, std::optional<StageCut>> fitting_cuts_;
};

// Candidates of several specs, by whether they fit.
struct MadeCandidates {
  std::vector<Candidate> fitting;     // in the order of their specs
  // The candidate that needs the least memory among those that do not fit.
  std::optional<Candidate> smallest;
  std::int64_t count = 0;  // of all candidates
};
// Each maker works in a thread of its own; the result is the same for any number of them.
MadeCandidates make_candidates(std::span<CandidateMaker* const> makers, std::span<const ParallelSpec> specs,
                               bool mixes);

}  // namespace parplan
