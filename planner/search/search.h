#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "planner/cluster/cluster.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/objective.h"
#include "planner/plan/plan.h"
#include "planner/search/best_first.h"
#include "planner/search/space.h"

namespace parplan {

class KnownBlockShapes;
class SimulatedSteps;

inline constexpr int any_number_each = std::numeric_limits<int>::max();

struct SearchOptions {
  int top = 10;  // plans to rank
  // The most of these with the same degrees: variants of one plan beyond it are left out.
  int top_each = any_number_each;
  Objective objective = Objective::time;
  // At most this number of candidates is simulated; with 0 only memory is checked. If absent: 64,
  // and more as long as that is little work, counted in calls (the same on every machine).
  std::optional<std::int64_t> most_simulated = {};
  bool fewer_devices = true;  // also plans that leave devices idle
  int least_devices = 1;      // with it: of these, those on so many or more
  int threads = 0;            // 0: as many as the machine has cores, 16 at most; the result does not depend on it
  std::int64_t together = 4;  // candidates that are simulated at once, whatever the number of threads
  std::function<void(std::int64_t done, std::int64_t of)> progress;  // may be empty
  // Whether to try groups of heads and overlap by slices with the layouts of the best plans.
  bool tries_more_with_best = false;
  // Whether to search more context parallelism where that promises much (space_width.h).
  bool widens_context = false;
  bool bounds_left_out = false;  // whether to say what is left out (SearchCounts::left_out)
  // Whether to search context parallelism over any number of ranks.
  bool any_context_ranks = false;
  // Whether to count the layouts of parts that are not looked into; else `candidates` and
  // `pruned_by_bound` are without them.
  bool counts_layouts = true;
  // Where nothing fits, whether to find the candidate that needs the least memory, and to say which
  // layouts outside of the space may fit.
  bool says_what_may_fit = true;
  bool recomputes_fewest_layers = false;  // SpaceWidth
  // Whether each layout gives its replicas the numbers of micro-batches that suit their devices by
  // the bound (replica_shares.h).
  bool balances_replicas = false;
  // Shared with other searches for the same model; may be null.
  SimulatedSteps* steps = nullptr;
  std::shared_ptr<KnownBlockShapes> shapes = {};
  // The best plan of other searches. Unless a plan beats it, this one ranks none for certain, and
  // its counts say what is open below that score.
  std::optional<Score> to_beat = {};
  // With it: the best plans of other searches, among which this one's are to be ranked
  // (best_first.h). It then returns those that may be among the best of all, too.
  std::vector<RankedElsewhere> ranked_elsewhere = {};
};

// How many plans a search ranks: as many as are asked for, and as it tries more with.
int ranked_plans(const SearchOptions& options);

// The search that `suggest` makes: also what is tried with the layouts of the best plans, and more
// context parallelism; and plans of different degrees are ranked, unless every degree is given, or
// `top_each` says how many may have the same.
SearchOptions as_suggested(SearchOptions options, const LayoutRequest& request);

// Legal layouts outside of a space, in words, none of which scores less than `least` (its first
// number): infinity where none fits or beats the best plan.
struct OutsideSpace {
  std::string what;
  std::vector<std::string> options;  // see LeftOut::options
  double least = 0.0;
};
// As counts have them: with their gaps to the best plan's score; without one, those that may fit.
std::vector<LeftOut> left_out(const std::vector<OutsideSpace>& outside, std::optional<double> best);

struct SearchResult {
  // Best by the objective first, simulated; ties by the order of the space. Candidates that differ
  // in the order of axes alone, and whose groups see the same links, are represented by the first.
  std::vector<RankedPlan> plans;
  SearchCounts counts;
  std::vector<OutsideSpace> outside;  // SearchOptions::bounds_left_out
  bool fits = false;                  // whether a candidate does
  // Where nothing fits, the candidate that needs the least memory
  // (SearchOptions::says_what_may_fit); else the one that does among those that were made and fit,
  // which by the objective memory no other beats. Its times are estimated; its memory equals the
  // simulated one.
  std::optional<RankedPlan> smallest;
};

// Best first. A part of the space is looked into once its floor (layout_floors.h) is the least open
// bound: parts of it are opened, or its candidates (candidates.h) are made and estimated, and those
// that do not fit are rejected. A candidate is simulated once its lower bound is the least open
// bound. The search goes on until no open bound beats the worst of the best `top`, or
// `most_simulated` is reached, or, without that, the best plan is certain and the ranks behind it
// would take more than little work; where variants of one plan are left out, what cannot beat those
// of its degrees is not looked into.
SearchResult search(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                    const LayoutRequest& request, const SearchOptions& options);

}  // namespace parplan
