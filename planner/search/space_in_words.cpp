#include "planner/search/space_in_words.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include "planner/base/text.h"
#include "planner/parallel/engine_layouts.h"
#include "planner/plan/parallel_spec.h"
#include "planner/search/space.h"

namespace parplan {
namespace {

// What the space leaves out of the layouts of its degrees, each after a comma.
std::string left_out_in_words(const Cluster& cluster, const Engine& engine, const LayoutRequest& request) {
  std::string words;
  if (cluster.devices() == 1) return words;
  const std::optional<ScheduleKind> schedule = given<ScheduleKind>(request, Choice::schedule);
  const std::int64_t zero_stage = given<std::int64_t>(request, Choice::zero_stage).value_or(0);
  const bool has_pipelines = given<std::int64_t>(request, Choice::pp).value_or(2) > 1;
  if (schedule && runs_backward_in_parts(*schedule))
    words += ", pipelines with ZeRO-0 or 1 in the cut whose slowest stage is fastest";
  else if (schedule == ScheduleKind::interleaved && !request[Choice::stage_blocks])
    words += ", pipelines in the cut whose slowest stage is fastest";
  else if (!schedule && has_pipelines && engine.has_pipeline && zero_stage <= 1) {
    if (!request[Choice::stage_blocks] && engine.has_interleaved)
      words += ", interleaved only in even stages with ZeRO-0 or 1";
    if (engine.has_zero_bubble) words += ", no zero_bubble_h1";
  }
  if (has_pipelines && engine.has_pipeline && !request[Choice::input_slots])
    words += ", input-slots+1 only where a plan fits with it";
  const bool shards =
      given<std::int64_t>(request, Choice::dp).value_or(2) > 1 && (zero_stage > 0 || !request[Choice::zero_stage]);
  if (shards && !request[Choice::dp_shard]) words += ", no hybrid sharding";
  return words;
}

// What is left out on any number of devices: what the engine lacks, other modules to recompute, and
// the memory of hosts.
std::string engine_in_words(const Cluster& cluster, const Engine& engine, const LayoutRequest& request) {
  std::string words;
  const bool has_host =
      std::ranges::any_of(cluster.groups, [](const NodeGroup& group) { return group.host.has_value(); });
  if (has_host && !request[Choice::offload]) words += ", no offload";
  if (const std::string lacking = lacking_in_words(engine); !lacking.empty())
    words += fmt::format("; engine {} has no {}", engine.name, lacking);
  if (request[Choice::recompute]) return words;
  std::vector<std::string> names;
  for (const Recompute recompute : searched_recomputes(engine)) names.emplace_back(name(recompute));
  return words + fmt::format("; recompute {}{}", join(names),
                             engine.has_recompute_per_stage || names.size() == 1 ? "" : ", the same on all stages");
}

}  // namespace

std::string space_in_words(const OpGraph& graph, const Cluster& cluster, const Engine& engine,
                           const LayoutRequest& request, bool fewer) {
  const char* const degrees = shares_context(graph, request) ? "dp x tp x pp x cp" : "dp x tp x pp";
  const std::string left_out =
      left_out_in_words(cluster, engine, request) + engine_in_words(cluster, engine, request);
  if (gives_every_degree(request))
    return fmt::format("{} as given, on the first {} devices{}", degrees, product_of_degrees(request), left_out);
  const bool gives_one = product_of_degrees(request) > 1 || request[Choice::dp] || request[Choice::tp] ||
                         request[Choice::pp] || request[Choice::cp];
  return fmt::format("every {}{} on {} {} device{}{}", degrees, gives_one ? " with what is given" : "",
                     fewer ? "up to" : "all", cluster.devices(), cluster.devices() == 1 ? "" : "s", left_out);
}

}  // namespace parplan
