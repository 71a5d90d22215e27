#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/parallel/pipeline.h"
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
  Estimate estimate;
};

// Cuts of a model that are few enough are candidates all, and so are choices of stages that
// recompute; beyond that, a layout stands with what the dynamic programme chooses.
inline constexpr std::int64_t most_cuts = 32;
inline constexpr int most_choosing_stages = 5;  // as many choices

// Makes candidates of enumerated specs. The graph, the cluster and the training must outlive it;
// used by one thread.
class CandidateMaker {
 public:
  CandidateMaker(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                 Objective objective = Objective::time);

  // Candidates of one spec of enumerate_specs, appended in a fixed order:
  // - with given stage blocks, that one;
  // - where the model has at most `most_cuts` cuts into so many stages, each of them; where one
  //   does not fit without recompute (for the objective memory: always) also every choice of stages
  //   that recompute, and with more than `most_choosing_stages` the best cut with stages choosing
  //   for themselves;
  // - else the cut whose slowest stage is fastest; if it does not fit, but all stages together have
  //   room, the best cut that fits; and if there is none without recompute, but would be with it,
  //   the best with stages choosing for themselves.
  // Estimates have bounds alone, and where a candidate does not fit no more than its memory.
  // `mixes`: whether stages may differ in what they recompute.
  void add(const ParallelSpec& spec, bool mixes, std::vector<Candidate>& candidates);

  // The cut for one layout that is given but for its cut: the one whose slowest stage is fastest,
  // of those that fit where any does.
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
  std::map<std::tuple<int, bool, int>, Placements> placements_;  // tp, sequence parallel, ZeRO stage
  using Paces = std::vector<std::pair<int, int>>;  // of stages
  std::map<std::pair<int, Paces>, std::vector<int>> cuts_;  // by stages and their paces
  // The same for cuts that fit: with data degree, ZeRO stage, schedule and whether stages choose
  // what they recompute.
  std::map<std::tuple<int, Paces, int, int, ScheduleKind, bool>, std::optional<StageCut>> fitting_cuts_;
};

// Candidates of several specs, by whether they fit.
struct MadeCandidates {
  std::vector<Candidate> fitting;     // in the order of their specs
  std::optional<Candidate> smallest;  // of those that do not fit, the one that needs least memory
  std::int64_t count = 0;             // of all
};
// Each maker works in a thread of its own; the result is the same for any number of them.
MadeCandidates make_candidates(std::span<CandidateMaker* const> makers, std::span<const ParallelSpec> specs,
                               bool mixes);

}  // namespace parplan
