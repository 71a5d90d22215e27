#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"

namespace parplan {

// Context parallelism: the ranks of an axis share out the tokens of each sequence, in every block.
// Attention needs the keys and values of all. Each rank gathers them (Llama Team 2024,
// arXiv:2407.21783, section 3.3.2) and holds two chunks of the sequence, so that all have equal
// work under the causal mask; or, with the same chunks, they go around the ring of the ranks (Liu
// et al. 2023, Ring Attention, arXiv:2310.01889); or tokens are exchanged for heads around
// attention (Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv:2309.14509). Hierarchical: groups of
// neighbours (cp_ulysses) hold two chunks together and exchange tokens for heads, and keys and
// values are gathered, or go around a ring, between ranks of different groups (Fang and Zhao 2024,
// USP, arXiv:2405.07719; Gu et al. 2024, LoongTrain, arXiv:2406.18485). All hold the same
// parameters: for gradients and ZeRO they are ranks of the data axis (replica_axes).
std::vector<int> legal_context_degrees(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec,
                                       int most);
std::optional<std::string> illegal_context(const OpGraph& graph, const TrainingSpec& training,
                                           const ParallelSpec& spec);
bool allows_context(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec);
// The greatest number of groups of a key/value head with its query heads that divides those of
// every attention; 0 without attention. Ranks that exchange tokens for heads share out what tensor
// parallelism leaves of them.
std::int64_t key_value_groups(const OpGraph& graph);
void place_context(const OpGraph& graph, const ParallelSpec& spec, Placements& placements);

}  // namespace parplan
