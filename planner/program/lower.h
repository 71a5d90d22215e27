#pragma once

#include <map>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/graph/training.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"
#include "planner/plan/schedule.h"
#include "planner/program/block.h"
#include "planner/program/program.h"

namespace parplan {

// Everything that decides what each rank does.
struct Job {
  const OpGraph* graph = nullptr;
  TrainingSpec training;
  ParallelSpec spec;
  Placements placements;
  Schedule schedule;
  BackendKind backend = BackendKind::cpu;
  Bytes overhead;    // memory that libraries take outside the arena
  bool fuse = true;  // merge pairs of kernels (fusion.h); off for comparison
};

BlockChoice block_choice(const Job& job, int stage, int tensor_rank);
// Blocks [first, last) of a stage.
struct BlockRange {
  int first = 0;
  int last = 0;
};
BlockRange blocks_of_stage(const ParallelSpec& spec, int stage);

// Lowers the plan for one rank. Passes, in order: blocks to Segments (placements, redistributions,
// recompute, fusion, scratch), buckets (ZeRO), buffers, calls (schedule, gathers, reductions,
// pipeline transfers, optimizer), events, memory plan.
Program lower(const Job& job, int rank);

// One Program per stage, of the rank at data and tensor coordinate 0.
std::vector<Program> lower_representatives(const Job& job);
// One Program per rank.
std::vector<Program> lower_all(const Job& job);

}  // namespace parplan
