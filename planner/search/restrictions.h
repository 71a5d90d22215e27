#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "planner/cluster/cluster.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/layout_choices.h"
#include "planner/plan/objective.h"
#include "planner/plan/plan.h"
#include "planner/search/candidates.h"
#include "planner/search/layout_floors.h"
#include "planner/search/open_parts.h"
#include "planner/search/space_width.h"

namespace parplan {

// What a search looks at. The arguments must outlive it.
struct SearchedSpace {
  const OpGraph& graph;
  const Cluster& cluster;
  const TrainingSpec& training;
  const LayoutRequest& request;
  SpaceWidth width;
  Objective objective{};
  int least_devices = 1;
};

// A restriction of a space: legal layouts that a search leaves out, although no option excludes
// them, and the wider spaces in which all of them are.
struct Restriction {
  struct Wider {
    LayoutRequest request;
    SpaceWidth width;
    Beyond beyond;
    // Whether the floors of the space as it is hold here, too, and its parts are those of the wider
    // one but for what a part's layouts may choose.
    bool has_same_floors = false;
    SampleFloors samples = SampleFloors::as_run;
  };
  std::string what;                  // is left out, in words
  std::vector<std::string> options;  // see LeftOut::options
  std::vector<Wider> wider;
  // With `wider` empty: nothing but the devices bounds them, however many of these are used, and
  // however they are joined; or some of their replicas have a micro-batch more than others.
  enum class Bound { wider, devices, remainder } bound = Bound::wider;
  // Whether cuts may fit there that do not in layouts of the space, of which others do: no such cut
  // is faster than its own bound, with what the space keeps or recomputes.
  bool fits_other_cuts = false;
};

// Those of a space, but for stage cuts (SearchCounts::cut_gap) and buffers for arriving activations
// (input_slots.h).
std::vector<Restriction> restrictions(const SearchedSpace& space);

// Whether floors tell that context parallelism over more ranks than in the space is worth searching
// (`worth_context`). `floors`: of the space as it is.
bool is_worth_context(const SearchedSpace& space, LayoutFloors& floors, CandidateMaker& maker);

// What the layouts beyond a restriction score at least by their floors; nothing where none beats
// `best`. The best of them may score more: the search for the least floor ends after some number of
// parts. `than` and `floors`: of the space as it is, whose search has ended.
std::optional<double> least_beyond(const Restriction& restriction, const SearchedSpace& space, const Score& best,
                                   const OpenParts& than, LayoutFloors& floors, CandidateMaker& maker);

}  // namespace parplan
