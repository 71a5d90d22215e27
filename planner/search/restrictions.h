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

// A restriction of a space: legal layouts that a search leaves out, although no option excludes
// them, and the wider space in which they are.
struct Restriction {
  std::string what;         // is left out, in words
  bool is_context = false;  // context parallelism as a whole
  // Nothing where no bound is taken.
  struct Wider {
    LayoutRequest request;
    SpaceWidth width;
    Beyond beyond;
  };
  std::optional<Wider> wider;
};

// Those of a space, but for stage cuts (SearchCounts::cut_gap) and buffers for arriving activations
// (input_slots.h).
std::vector<Restriction> restrictions(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                                      const LayoutRequest& request, const SpaceWidth& width);

// What the layouts beyond a restriction score at least by their floors; nothing where none beats
// `best`, or no bound is taken. The best of them may score more: the search for the least floor
// ends after some number of parts. `than` and `floors`: of the space as it is, whose search has
// ended.
struct LeastBeyond {
  bool is_bounded = false;
  std::optional<double> score;
};
LeastBeyond least_beyond(const Restriction& restriction, const OpGraph& graph, const Cluster& cluster,
                         const TrainingSpec& training, Objective objective, bool fewer_devices, const Score& best,
                         const OpenParts& than, LayoutFloors& floors, CandidateMaker& maker);

}  // namespace parplan
