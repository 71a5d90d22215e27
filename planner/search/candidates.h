#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/parallel/cut_stages.h"
#include "planner/plan/objective.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"
#include "planner/plan/plan.h"
#include "planner/plan/spec_hash.h"
#include "planner/search/layout_cuts.h"
#include "planner/search/space.h"
#include "planner/simulator/estimate.h"

namespace parplan {

// A point of the space with its stage cut, estimated.
struct Candidate {
  ParallelSpec spec;
  Bound bound;
};

// What holds for any cut of a layout, with any recompute that the search may choose for each stage.
struct OfAnyCut {
  Seconds time;       // a lower bound of the step
  Bytes room_in_all;  // as in Bound
  std::optional<ParallelSpec> unfitting = {};  // the fastest cut, where it does not fit
};
// A layout of which not every cut is a candidate.
struct OpenLayout {
  ParallelSpec spec;  // not cut
  Seconds time;       // of any of its cuts, at least
};

// Cuts of a layout that may take less than a limit by their lower bounds, best first; no other cut
// takes less than `rest`, which is infinite where these are all.
struct CutsBelow {
  std::vector<Candidate> candidates;
  Seconds rest;
};

// A model's cuts are all candidates where they are few enough, and so are the choices of stages
// that recompute (most_choices); beyond that, a layout is represented by what the dynamic
// programming chooses.
inline constexpr std::int64_t most_cuts = 32;

// Makes candidates of enumerated specs. The graph, the cluster and the training must outlive it;
// used by one thread. Where `width` balances replicas, candidates are `balanced`, but by the
// objective memory, of which unlike numbers need no less.
class CandidateMaker {
 public:
  CandidateMaker(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                 Objective objective = Objective::time, std::shared_ptr<KnownBlockShapes> known_shapes = nullptr,
                 const SpaceWidth& width = {});

  // Appends the candidates of one spec of enumerate_specs, in a fixed order:
  // - with given stage blocks, or those of an engine that counts layers, that one; if it does not
  //   fit without recompute, also with the fastest choice of stages that recompute;
  // - where the model has at most `most_cuts` cuts into so many stages, each of them; where one
  //   does not fit without recompute (for the objective memory: always) also every choice of stages
  //   that recompute, or where these are more than `most_choices` the fastest choice that fits;
  // - else the cut whose slowest stage is fastest; if that does not fit, the best cut that fits;
  //   and if none fits without recompute, but one would with it, the best cut with stages choosing
  //   for themselves. With several stages on a rank, the cut whose slowest stage is fastest; if
  //   that does not fit without recompute, also with the ranks choosing for themselves; and if that
  //   does not fit either, the fastest cut that gives each rank what it can hold (rank_cuts.h).
  // Where the width says so, each cut that does not fit without recompute is also one with the
  // fewest layers that recompute (recomputing_fewest_layers), unless memory is the objective.
  // Estimates have bounds only, and where a candidate does not fit, only its memory. `mixes`:
  // whether stages may differ in what they recompute. Returns something where not every cut was
  // appended. A layout without recompute stands for those with the recompute of `mixes`, too.
  std::optional<OfAnyCut> add(const ParallelSpec& spec, bool mixes, std::vector<Candidate>& candidates);

  // Whether no cut of a layout but the one that `add` appends is ever looked for: it has few cuts,
  // or the cut is made for equal replicas, which these need not be.
  bool has_one_cut(const ParallelSpec& spec) const {
    return takes_fastest_cut_alone(spec) || may_have_unlike_replicas(spec);
  }
  // At most `most` cuts of an open layout; none where it has one cut.
  CutsBelow cuts_below(const ParallelSpec& spec, bool mixes, Seconds limit, std::size_t most);
  // The fastest of the cuts of an open layout whose fullest stage fills the least of its device;
  // nothing where all need more than `most`, and no candidate where `add` appends that cut.
  struct LeastCut {
    std::optional<Candidate> candidate;
    // What others need at least. Absent where none needs less than the candidate.
    std::optional<Bytes> others;
  };
  LeastCut least_cut(const ParallelSpec& spec, bool mixes, Bytes most);
  // A lower bound of the memory of the fullest stage of any cut.
  Bytes least_memory(const ParallelSpec& spec, Bytes room_in_all);

  // The cut of a layout that is complete but for its cut: the cut whose slowest stage is fastest,
  // among those that fit where any fits; or what the engine does.
  std::vector<int> cut_of(const ParallelSpec& spec);

  // A layout with its cut, and the times of its estimate.
  RankedPlan with_times(const ParallelSpec& spec);

  // The same layout, cut, with the numbers of micro-batches of its replicas for which the bound of
  // the slowest is least; nothing where the replicas are on equal devices, no other numbers are
  // legal, or none are better.
  std::optional<ParallelSpec> balanced(const ParallelSpec& spec);

  const Placements& placements_of(const ParallelSpec& spec);
  Estimator& estimator() { return estimator_; }

 private:
  bool may_have_unlike_replicas(const ParallelSpec& spec) const {
    return balances_replicas_ || !spec.replica_micro_batches.empty();
  }
  Candidate estimated(ParallelSpec spec);
  // What cuts other than one whose fullest stage needs the least need, LeastCut::others.
  std::optional<Bytes> least_beside(const ParallelSpec& spec, Bytes least);
  struct FastestCut {
    std::vector<int> blocks;
    Seconds slowest;    // of its stages
    Seconds computing;  // of all blocks, each where it is fastest
  };
  const FastestCut& fastest_cut(const ParallelSpec& spec);
  OfAnyCut of_any_cut(const ParallelSpec& spec, const FastestCut& fastest, Bytes room_in_all) const;
  // The best cut that fits with the recompute of the spec; if none does and `mixes`, the best in
  // which each stage recomputes or does not.
  std::optional<Candidate> cut_that_fits(const ParallelSpec& spec, bool mixes);
  // Appends that where stages then differ. The last candidate is the layout without recompute.
  void add_mix(const ParallelSpec& spec, std::vector<Candidate>& candidates);
  // Appends the cut with the fewest layers that recompute, where the space has it.
  void add_fewest_layers(const ParallelSpec& cut, bool mixes, std::vector<Candidate>& candidates);
  bool has_fewest_layers(const ParallelSpec& spec, bool mixes) const {
    return width_.recomputes_fewest_layers && mixes && spec.recompute == Recompute::none &&
           objective_ != Objective::memory;
  }
  void add_all_cuts(const ParallelSpec& spec, bool mixes, std::vector<Candidate>& candidates);

  const OpGraph& graph_;
  const Cluster& cluster_;
  TrainingSpec training_;
  Objective objective_;
  SpaceWidth width_;
  bool balances_replicas_ = false;
  Estimator estimator_;
  std::unordered_map<ParallelSpec, Placements, SpecHash> placements_;  // by placement_key
  using Paces = std::vector<std::pair<int, int>>;  // of stages
  std::map<std::pair<ParallelSpec, Paces>, FastestCut> cuts_;  // by cut_key
  // By fitting_cut_key, and by whether stages choose what they recompute.
  std::map<std::tuple<ParallelSpec, Paces, bool>, std::optional<StageCut>> fitting_cuts_;
};

}  // namespace parplan
