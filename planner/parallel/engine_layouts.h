#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "planner/graph/engine.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/layout_choices.h"
#include "planner/plan/parallel_spec.h"

namespace parplan {

// A technique that an engine has or lacks, as a fact of its file. A new one is a fact and a row;
// tests loop over the rows.
struct EngineLayoutRow {
  Choice choice{};  // that it restricts
  bool Engine::*has = nullptr;
  std::string_view name;  // "sequence parallelism"
  std::string_view must;  // what a layout without it is: "sequence_parallel must be false"
  bool (*uses)(const ParallelSpec&) = nullptr;
};
std::span<const EngineLayoutRow> engine_layout_rows();

// Why the engine cannot run a layout: "engine bloom has no sequence parallelism: sequence_parallel
// must be false". Nothing where it has all that the layout uses.
std::optional<std::string> lacked_by_engine(const Engine& engine, const ParallelSpec& spec);
// The same of what a user has given, whether it applies to a layout or not.
std::optional<std::string> lacked_by_engine(const Engine& engine, const LayoutRequest& request);
// The request with what the engine has one way of: replicas of a single process, where it has no
// others; of what is asked for, context-parallel ranks that exchange tokens for heads, or groups of
// such ranks between which keys and values go around a ring; neither a pipeline nor recompute
// beside an offload, unless they are asked for.
LayoutRequest with_implied(const Engine& engine, LayoutRequest request);
// Why its trainings with an optimizer are not predicted.
std::optional<std::string> lacked_by_engine(const Engine& engine, Optimizer optimizer);

// What it lacks beside ways to recompute, which a search lists: "sequence parallelism, GPipe".
// Empty where nothing is lacking.
std::string lacking_in_words(const Engine& engine);

}  // namespace parplan
