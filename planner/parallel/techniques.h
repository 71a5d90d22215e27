#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/placement.h"

namespace parplan {

// One way of spreading work. A new one needs a file and a row here; a test loops over the rows.
struct TechniqueRow {
  std::string_view name;
  // Degrees (ZeRO, offload, recompute, master: values) of 1 .. `most` (these: 0 .. `most`) that the
  // technique can have when everything else is as in `spec`, ascending.
  std::vector<int> (*legal_degrees)(const OpGraph&, const TrainingSpec&, const ParallelSpec&, int most) = nullptr;
  // Why `spec` is illegal, in words with the legal alternatives; nothing when it is legal.
  std::optional<std::string> (*illegal)(const OpGraph&, const TrainingSpec&, const ParallelSpec&) = nullptr;
  // Whether there is no such reason, where its words take long; null: `illegal` tells.
  bool (*allows)(const OpGraph&, const TrainingSpec&, const ParallelSpec&) = nullptr;
  // Sets the placements that the technique decides.
  void (*place)(const OpGraph&, const ParallelSpec&, Placements&) = nullptr;
};

std::span<const TechniqueRow> technique_rows();

// The placements of the tensors under `spec`: every technique in turn. `spec` is legal.
Placements place(const OpGraph& graph, const ParallelSpec& spec);

// The engine's reason against `spec` (engine_layouts.h), or the first technique's.
std::optional<std::string> illegal_technique(const OpGraph& graph, const TrainingSpec& training,
                                             const ParallelSpec& spec);
// That, or too_many_calls.
std::optional<std::string> illegal(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec);

// Whether there is none.
bool is_legal(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec);

// A plan lists every call of every stage: at most this many forwards and backwards.
inline constexpr std::int64_t most_calls = std::int64_t{1} << 19;
// The reason why `spec` has too many micro-batches for that (they divide the batch); nothing if it
// does not.
std::optional<std::string> too_many_calls(const TrainingSpec& training, const ParallelSpec& spec);
bool has_too_many_calls(const TrainingSpec& training, const ParallelSpec& spec);  // without the words

// Ascending, for numbers of at least 1. Kept as long as the thread lives.
const std::vector<std::int64_t>& divisors(std::int64_t number);

// "1, 5, 25"; "1 to 64" for a long ascending run of neighbours; "none" for no degree.
std::string list_degrees(const std::vector<std::int64_t>& degrees);

}  // namespace parplan
