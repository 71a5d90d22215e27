#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "planner/plan/objective.h"
#include "planner/plan/parallel_spec.h"
#include "planner/search/best_first.h"
#include "planner/search/candidate_simulator.h"
#include "planner/search/candidates.h"
#include "planner/search/restrictions.h"
#include "planner/search/search.h"

namespace parplan {

// A candidate that varies a layout that a search has looked at.
struct Variant {
  Score bound;
  std::uint64_t place = 0;
  const Candidate* candidate = nullptr;
  std::size_t layout = 0;  // the number of what it varies, among those that are tried
  bool is_sharp = false;   // Open::is_sharp
};
// Variants come behind the candidates of the space.
inline constexpr std::uint64_t variant_place = std::uint64_t{1} << 63;

// Which variants are simulated: all of one layout are ranked as one plan, or each by itself, if it
// promises to be ranked at all.
enum class VariantsOf { one_layout, several };

// Simulates variants and ranks them in `search`, where a layout has the best of its cuts. The
// arguments must outlive it.
class VariantTrials {
 public:
  VariantTrials(const SearchedSpace& space, const SearchOptions& options, CandidateSimulator& simulator,
                BestFirst& search)
      : space_(space), options_(options), simulator_(simulator), search_(search) {}

  // The most promising first: by its bound, and by how far those of its layout were above theirs,
  // by layout `above` where that is known. Returns those that may beat the best plan and are left,
  // also since the others were work enough.
  std::vector<Variant> run(std::vector<Variant> variants, std::vector<std::optional<double>> above, VariantsOf of);

  // The layout of a plan, without its cut.
  ParallelSpec layout_of(ParallelSpec spec) const;

  std::int64_t tried() const { return tried_; }  // variants whose turn came

 private:
  void take(Ranked&& one);

  SearchedSpace space_;
  const SearchOptions& options_;
  CandidateSimulator& simulator_;
  BestFirst& search_;
  std::int64_t tried_ = 0;
};

}  // namespace parplan
