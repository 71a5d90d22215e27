#pragma once

#include <span>
#include <vector>

#include "planner/program/job.h"
#include "planner/program/program.h"

namespace parplan {

class KnownBlocks;

// Lowers the plan for one rank. Passes, in order: blocks to Segments (placements, redistributions,
// recompute, fusion, scratch), buckets (ZeRO), buffers, calls (schedule, gathers, reductions,
// pipeline transfers, optimizer), events, memory plan.
Program lower(const Job& job, int rank);

// One Program per rank of the pipeline, of the rank at coordinate 0 of every other axis.
// `blocks`: shared with other jobs of the model; may be null.
std::vector<Program> lower_representatives(const Job& job, KnownBlocks* blocks = nullptr);
// Those of the ranks of the pipeline that are named.
std::vector<Program> lower_representatives(const Job& job, std::span<const int> ranks, KnownBlocks* blocks = nullptr);
// One Program per rank of the pipeline, of one of these replicas after the other, which are
// coordinates on the data axis; at coordinate 0 of the other axes.
std::vector<Program> lower_replicas(const Job& job, std::span<const int> replicas, KnownBlocks* blocks = nullptr);
// One Program per rank.
std::vector<Program> lower_all(const Job& job);

}  // namespace parplan
