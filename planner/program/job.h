#pragma once

#include "planner/cluster/device.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/layout.h"
#include "planner/plan/schedule.h"
#include "planner/program/block_context.h"

namespace parplan {

struct Cluster;

// Everything that decides what each rank does.
struct Job {
  const OpGraph* graph = nullptr;
  TrainingSpec training;
  Layout layout;
  Schedule schedule;
  BackendKind backend = BackendKind::cpu;
  Bytes overhead;    // memory that libraries take outside the arena
  bool fuse = true;  // merge pairs of kernels (fusion.h); off for comparison
};

// What the ranks of the cluster do, with its backend and the memory that libraries take.
Job job_of(const OpGraph& graph, const Cluster& cluster, TrainingSpec training, const ParallelSpec& spec,
           const Placements& placements, Schedule schedule);
// What is gathered at once of a block (layout.h); each parameter by itself under engines with
// lists_shards.
GatherUnit gather_unit(const Job& job, int block);
// What a rank at `at` does with a block.
BlockContext block_context(const Job& job, int block, const Coordinates& at);

}  // namespace parplan
