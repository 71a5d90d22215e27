#pragma once

#include <map>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/graph/training.h"
#include "planner/plan/layout.h"
#include "planner/plan/schedule.h"
#include "planner/program/block.h"
#include "planner/program/program.h"

namespace parplan {

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

// What a rank at `at` does with a block; the whole form is for blocks of no job.
BlockChoice block_choice(const Job& job, int block, const Coordinates& at);
BlockChoice block_choice(const BlockLayout& layout, const TensorLayout& entering, const Coordinates& at,
                         const TrainingSpec& training, BackendKind backend, bool fuse);

// Lowers the plan for one rank. Passes, in order: blocks to Segments (placements, redistributions,
// recompute, fusion, scratch), buckets (ZeRO), buffers, calls (schedule, gathers, reductions,
// pipeline transfers, optimizer), events, memory plan.
Program lower(const Job& job, int rank);

// One Program per rank of the pipeline, of the rank at coordinate 0 of every other axis.
std::vector<Program> lower_representatives(const Job& job);
// One Program per rank.
std::vector<Program> lower_all(const Job& job);

}  // namespace parplan
