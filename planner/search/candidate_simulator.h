#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "planner/cost/cost_model.h"
#include "planner/plan/objective.h"
#include "planner/plan/parallel_spec.h"
#include "planner/program/known_blocks.h"
#include "planner/search/best_first.h"
#include "planner/search/candidates.h"
#include "planner/search/restrictions.h"
#include "planner/search/search.h"
#include "planner/search/simulate_spec.h"

namespace parplan {

// Simulates the candidates of a search, equal work once, and counts how much work that is: in calls
// (forwards and backwards) that are played, the same on every machine. What it is made of must
// outlive it.
class CandidateSimulator {
 public:
  // `makers`: one for each thread.
  CandidateSimulator(const SearchedSpace& space, const SearchOptions& options,
                     std::span<CandidateMaker* const> makers)
      : space_(space), options_(options), makers_(makers) {}

  Score score_of(const ParallelSpec& spec, Seconds time, const MemoryUse& memory) const {
    return score(space_.objective, space_.cluster, spec, time, memory);
  }
  Score bound_of(const Candidate& candidate) const {
    return score_of(candidate.spec, candidate.bound.lower_bound, candidate.bound.memory);
  }
  // What a second of a step with this layout scores, by the objectives time and cost.
  double score_of_second(const ParallelSpec& spec) const { return score_of(spec, Seconds(1.0), {}).first; }

  // A better bound of a candidate than by the closed form of its pipeline, or the same.
  Score sharpened(const Candidate& candidate, const Score& bound);
  // Whether no equal work was taken before. What is new is taken; what is not counts as equal.
  bool take_if_new(const Candidate& candidate);
  // Whether equal work was taken before.
  bool is_known(const Candidate& candidate) const;
  // The candidates are those that were taken last, in this order. Returns them with another input
  // slot where they have room for it.
  std::vector<Ranked> simulate(std::span<const Open> turns);
  // One more, which is not counted.
  SimulatedSpec simulate_apart(const ParallelSpec& spec);

  const std::vector<Ranked>& simulated() const { return simulated_; }
  std::int64_t count() const { return static_cast<std::int64_t>(simulated_.size()); }
  std::int64_t equal() const { return equal_; }  // candidates that were not new
  std::int64_t calls() const { return calls_; }
  // What lowering was as much work as, in calls.
  std::int64_t lowered() const;
  // The calls of a step that is not shortened.
  std::int64_t all_calls(const ParallelSpec& spec) const {
    return 2 * spec.stages() * micro_batches(spec, space_.training);
  }
  // Whether so many calls are much work; and whether each simulation was.
  static bool is_long(std::int64_t calls) { return calls > long_calls; }
  bool are_long() const { return count() > 0 && is_long(calls_ / count()); }
  // Whether a search for which the user gives no limit goes on.
  bool is_little_work() const { return count() < usual_simulated || calls_ < free_calls; }
  // Candidates to simulate at once: fewer where each is much work, since one may rule out the next.
  std::int64_t together(bool long_ones) const;
  // The least bound of what lacked room for another input slot.
  double least_with_slot() const { return least_with_slot_; }

 private:
  // The inputs that determine a candidate's time and memory.
  struct Work {
    ParallelSpec spec;
    std::vector<CostModel> models;  // by rank of the pipeline
  };
  bool are_equal(const Work& a, const Work& b) const;
  Work work_of(const Candidate& candidate) const;
  bool is_known(const Work& work) const;
  SimulatedSpec simulate(CandidateMaker& maker, const ParallelSpec& spec, std::span<const CostModel> models);

  static constexpr std::int64_t usual_simulated = 64, free_calls = 400'000, long_calls = 20'000;

  SearchedSpace space_;
  const SearchOptions& options_;
  std::span<CandidateMaker* const> makers_;
  KnownBlocks blocks_;
  std::vector<Work> known_;
  std::vector<Ranked> simulated_;
  std::int64_t equal_ = 0, calls_ = 0;
  double least_with_slot_ = std::numeric_limits<double>::infinity();
};

}  // namespace parplan
