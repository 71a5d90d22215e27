#pragma once

#include "planner/cluster/cluster.h"
#include "planner/program/lower.h"

namespace parplan {

// What the ranks of the cluster do, with its backend and the memory that libraries take.
Job job_of(const OpGraph& graph, const Cluster& cluster, TrainingSpec training, const ParallelSpec& spec,
           const Placements& placements, Schedule schedule);

}  // namespace parplan
