#include "planner/search/space_in_words.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include "planner/base/text.h"
#include "planner/parallel/engine_layouts.h"
#include "planner/plan/parallel_spec.h"

namespace parplan {
namespace {

// The cuts of pipelines under a schedule that was asked for, after a comma.
std::string cuts_in_words(const Cluster& cluster, const LayoutRequest& request) {
  const std::optional<ScheduleKind> schedule = given<ScheduleKind>(request, Choice::schedule);
  if (cluster.devices() == 1 || !schedule) return "";
  if (runs_backward_in_parts(*schedule))
    return ", pipelines with ZeRO-0 or 1 in the cut whose slowest stage is fastest";
  if (*schedule == ScheduleKind::interleaved && !request[Choice::stage_blocks])
    return ", pipelines in the cut whose slowest stage is fastest";
  return "";
}

// Those of which layouts have several.
std::string values_in_words(const Space::NamedValues& named) {
  std::string words;
  for (const auto& [choice, values] : named) {
    std::vector<std::string> names;
    for (const ChoiceValue& value : values) names.push_back(write_value(value));
    if (names.size() > 1) words += fmt::format("; {} {}", row_of(choice).key, join(names));
  }
  return words;
}

// The groups over which ZeRO may shard, where some ranks have several.
std::string shards_in_words(const Cluster& cluster, const Engine& engine, const LayoutRequest& request,
                            const SpaceWidth& width, const Space::NamedValues& named) {
  constexpr std::int64_t fewest = 4;  // two groups of two
  const bool has_zero =
      request[Choice::zero_stage]
          ? given<std::int64_t>(request, Choice::zero_stage) > 0
          : std::ranges::any_of(named, [](const auto& one) {
              return one.first == Choice::zero_stage && one.second.size() > 1;
            });
  const std::int64_t replicas =
      given<std::int64_t>(request, Choice::dp).value_or(cluster.devices()) *
      given<std::int64_t>(request, Choice::cp).value_or(width.most_context_ranks > 1 ? fewest : 1);
  if (!engine.has_hybrid_sharding || request[Choice::dp_shard] || !has_zero || cluster.devices() < fewest ||
      replicas < fewest)
    return "";
  return width.shards_freely ? "; dp_shard every size" : "; dp_shard sizes that double at least";
}

// What the engine lacks, and what is recomputed.
std::string engine_in_words(const Engine& engine, const LayoutRequest& request, const SpaceWidth& width) {
  std::string words;
  if (const std::string lacking = lacking_in_words(engine); !lacking.empty())
    words += fmt::format("; engine {} has no {}", engine.name, lacking);
  if ((engine.equal_stages || engine.stages_share_weights) && engine.has_pipeline && !request[Choice::stage_blocks])
    words += fmt::format("; stages with equal {}, as engine {} cuts them",
                         engine.stages_share_weights ? "shares of products' weights" : "numbers of layers",
                         engine.name);
  if (request[Choice::recompute]) return words;
  std::vector<std::string> names;
  for (const Recompute recompute : searched_recomputes(engine)) names.emplace_back(name(recompute));
  return words + fmt::format("; recompute {}{}", join(names),
                             width.recomputes_fewest_layers ? ", in as few layers as memory demands"
                             : engine.has_recompute_per_stage || names.size() == 1 ? ""
                                                                                   : ", the same on all stages");
}

}  // namespace

std::string space_in_words(const Cluster& cluster, const Engine& engine, const LayoutRequest& request,
                           const SpaceWidth& width, bool fewer, const Space::NamedValues& named) {
  const int context = width.most_context_ranks;
  const std::string degrees = context == 1                   ? "dp x tp x pp"
                              : context == any_context_ranks ? "dp x tp x pp x cp"
                                                             : fmt::format("dp x tp x pp x cp up to {}", context);
  const std::string more = cuts_in_words(cluster, request) +
                           (width.balances_replicas ? ", with micro-batches shared out among replicas by what their "
                                                      "devices sustain"
                                                    : "") +
                           values_in_words(named) + shards_in_words(cluster, engine, request, width, named) +
                           engine_in_words(engine, request, width);
  if (gives_every_degree(request))
    return fmt::format("{} as given, on the first {}{}", degrees, pluralized(product_of_degrees(request), "device"),
                       more);
  const bool gives_one = product_of_degrees(request) > 1 || request[Choice::dp] || request[Choice::tp] ||
                         request[Choice::pp] || request[Choice::cp];
  return fmt::format("every {}{} on {} {} device{}{}", degrees, gives_one ? " with what is given" : "",
                     fewer ? "up to" : "all", cluster.devices(), cluster.devices() == 1 ? "" : "s", more);
}

}  // namespace parplan
