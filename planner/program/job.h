#pragma once

#include "planner/cluster/cluster.h"
#include "planner/program/lower.h"

namespace parplan {

// What ranks of the cluster do: its backend, and what libraries take of its memory.
Job job_of(const OpGraph& graph, const Cluster& cluster, TrainingSpec training, ParallelSpec spec,
           Placements placements, Schedule schedule);

}  // namespace parplan
