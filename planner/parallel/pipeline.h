#pragma once

#include <optional>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"

namespace parplan {

// Pipeline parallelism: the graph's blocks in runs, one run per stage. It splits time, not tensors,
// so it sets no placement.
std::vector<int> legal_pipeline_degrees(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec,
                                        int most);
std::optional<std::string> illegal_pipeline(const OpGraph& graph, const TrainingSpec& training,
                                            const ParallelSpec& spec);
// The blocks of each stage where an engine counts layers: as many on each stage, with what comes
// before them on the first and what comes behind on the last; else all blocks alike, as if the
// embedding and the head were layers (Megatron-LM's --account-for-embedding-in-pipeline-split and
// --account-for-loss-in-pipeline-split, DeepSpeed's 'type:transformer|embedding'), and if these do
// not divide either, one layer more on the first stages. With `last_stages_take_more` layers alone
// are counted, and the last stages have one more. `stages` is at most the number of blocks.
std::vector<int> equal_stages(const OpGraph& graph, const Engine& engine, int stages);
// The same where it counts the weights that products multiply with: each stage takes blocks until
// those so far exceed its share of all, so that the last ones may get none (nanotron@c252843039
// src/nanotron/models/base.py build_model). Keys and values count as wide as queries also where
// heads share them (models/llama.py get_block_compute_costs: 4 h^2 + 3 h f for a layer).
std::vector<int> stages_by_weights(const OpGraph& graph, int stages);
// The cut that an engine makes, whatever stages would take; nothing where it takes any.
std::optional<std::vector<int>> stages_of_engine(const OpGraph& graph, const Engine& engine, int stages);
// Whether an interleaved pipeline of so many ranks may run so many micro-batches in groups of
// `group`: a last group of fewer has one for each rank at least, as Megatron-LM demands.
bool allows_group(std::int64_t micro_batches, int ranks, std::int64_t group);
// The smallest of more micro-batches than ranks; more than all where there is none.
std::int64_t next_group(std::int64_t micro_batches, int ranks);
// The smallest that so many micro-batches allow: 0 for as many as ranks, as layouts write it;
// nothing where no group is large enough.
std::optional<std::int64_t> smallest_group(std::int64_t micro_batches, int ranks);
void place_pipeline(const OpGraph& graph, const ParallelSpec& spec, Placements& placements);

}  // namespace parplan
