#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "planner/cluster/cluster.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/schedule.h"

// Random legal plans over all techniques together: whatever a plan may say, each beside any other.
namespace parplan::testing {

// A tiny model with a training, a cluster, and a legal plan of both.
struct RandomPlan {
  OpGraph graph;  // as it is trained
  TrainingSpec training;
  Cluster cluster;  // of 12 cores, which a plan may leave idle
  ParallelSpec spec;
  Schedule schedule;
  bool has_own_order = false;  // of actions; else that of its row
};

// The same for the same seed. The layout comes from a walk over the rows of choices in random
// order, each of which takes a random one of its values and gives it back where that is not legal.
RandomPlan random_plan(std::uint32_t seed);
std::string describe(const RandomPlan& plan);

// What a plan is: for each choice, and for each fact of its problem, in the same order for every
// plan, which of few values it has. Named values stand for themselves; numbers count as the one of
// the plainest layout, less or more, lists as alike or unlike.
struct Trait {
  std::string of;     // "zero_stage", "offload of gradients", "optimizer"
  std::string value;  // "3", "nvme", "muon"
  auto operator<=>(const Trait&) const = default;
};
std::vector<Trait> traits_of(const RandomPlan& plan);
// Those that there are by name, so that some plan has to have each.
std::vector<Trait> named_traits();

// The plan without all that changes no bit of what it trains: of which the arithmetic of each sum
// stays in the same order.
ParallelSpec plainest_of_same_bits(const RandomPlan& plan);

}  // namespace parplan::testing
