#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "planner/search/best_first.h"
#include "planner/search/candidate_simulator.h"
#include "planner/search/candidates.h"
#include "planner/search/restrictions.h"
#include "planner/search/search.h"
#include "planner/search/variant_trials.h"

namespace parplan {

// The layouts of a search with other cuts than those of their candidates. The arguments must
// outlive it.
class OtherCuts {
 public:
  // `mixes`: whether stages may differ in what they recompute.
  OtherCuts(const SearchedSpace& space, const SearchOptions& options, bool mixes,
            std::span<CandidateMaker* const> makers, CandidateSimulator& simulator, VariantTrials& trials,
            BestFirst& search)
      : space_(space),
        options_(options),
        mixes_(mixes),
        makers_(makers),
        simulator_(simulator),
        trials_(trials),
        search_(search) {}

  void add(std::uint64_t place, OpenLayout layout) { layouts_.emplace_back(place, std::move(layout)); }
  // No cut of those that are not looked at scores less.
  void leave(double score) { least_left_ = std::min(least_left_, score); }
  double least_left() const { return least_left_; }

  // Looks at other cuts of the layouts that may beat the best plan with them.
  void try_all();

 private:
  // A layout that may beat the best plan, and what of its cuts may.
  struct Layout {
    const OpenLayout* layout = nullptr;
    std::uint64_t place = 0;
    Score bound;
    CutsBelow below = {};
  };
  std::vector<Layout> promising() const;
  std::vector<Layout> one_of_each(std::vector<Layout> open);

  SearchedSpace space_;
  const SearchOptions& options_;
  bool mixes_;
  std::span<CandidateMaker* const> makers_;
  CandidateSimulator& simulator_;
  VariantTrials& trials_;
  BestFirst& search_;
  std::vector<std::pair<std::uint64_t, OpenLayout>> layouts_;  // with their places
  double least_left_ = std::numeric_limits<double>::infinity();
};

}  // namespace parplan
