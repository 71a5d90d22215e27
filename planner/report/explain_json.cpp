#include "planner/report/explain_json.h"

#include <algorithm>
#include <span>

#include <fmt/format.h>

#include "planner/base/enum_index.h"
#include "planner/report/error_band.h"
#include "planner/report/explain_stages.h"
#include "planner/report/plan_row.h"

namespace parplan {
namespace {

constexpr const char* key(Resource resource) {
  constexpr const char* keys[] = {"compute", "node_links", "network", "links",
                                    "host",    "nvme",       "memory",  "global_batch"};
  return keys[index_of(resource)];
}

// The circumstances of a layout: another cluster, or another batch than the plan's.
struct Circumstances {
  const Cluster& cluster;
  const TrainingSpec& training;
};

Json row_of(const Plan& plan, const RankedPlan& other, const Circumstances& where) {
  return row({.rank = 0,
              .model = plan.model,
              .cluster = where.cluster,
              .training = where.training,
              .spec = other.spec,
              .result = other.result});
}
// A row with the values for a comparison: rows of rivals have no rank.
Json rival_json(const Plan& plan, const Rival& rival, const Circumstances& where) {
  Json json = row_of(plan, rival.plan, where);
  json["rank"] = nullptr;
  json["memory_capacity_bytes"] = rival.capacity.count;
  json["fits"] = rival.fits();
  json["slower"] = json_number(rival.plan.result.time.total() / plan.prediction.time.total() - 1.0);
  json["objective_excess"] = json_number(excess(plan, where.cluster, rival.plan.spec, rival.plan.result));
  return json;
}
Json rival_json(const Plan& plan, const Rival& rival) {
  return rival_json(plan, rival, {.cluster = plan.cluster, .training = plan.training});
}

Json band_json(const std::optional<StepBand>& band) {
  if (!band) return nullptr;
  Json spans = Json::array();
  const auto name = [](std::string_view text) { return text.empty() ? Json(nullptr) : Json(std::string(text)); };
  for (const ErrorBand& row : band->spans)
    spans.push_back({{"engine", name(row.engine)},
                     {"device", name(row.device)},
                     {"size", name(row.size)},
                     {"runs", row.runs},
                     {"assumed", row.assumed},
                     {"fewest_devices", row.fewest_devices},
                     {"most_devices", row.most_devices},
                     {"low", json_number(row.low)},
                     {"high", json_number(row.high)}});
  return {{"low", json_number(band->low)},
          {"high", json_number(band->high)},
          {"words", words_of(*band)},
          {"engine", band->engine},
          {"device", band->device},
          {"devices", band->devices},
          {"pairs", band->pairs ? Json(band->pairs->pairs) : Json(nullptr)},
          {"pairs_engine", band->pairs ? name(band->pairs->engine) : Json(nullptr)},
          {"pairs_device", band->pairs ? name(band->pairs->device) : Json(nullptr)},
          {"spans", spans}};
}

Json variation_json(const Plan& plan, const Variation& variation) {
  TrainingSpec training = plan.training;
  training.global_batch = variation.global_batch;
  const Circumstances then{.cluster = variation.cluster, .training = training};
  Json json;
  json["resource"] = key(variation.resource);
  json["factor"] = json_number(variation.factor);
  json["global_batch"] = variation.global_batch;
  json["plan"] = rival_json(plan, variation.plan, then);
  json["changes"] = variation.changes;
  json["certified"] = variation.certified;
  json["best"] = variation.best ? rival_json(plan, rival(variation.cluster, *variation.best), then) : Json(nullptr);
  return json;
}

Json guide_json(const Plan& plan, const Guide& guide) {
  Json json = Json::array();
  const auto add = [&](const char* rule) -> Json& {
    json.push_back({{"rule", rule}});
    return json.back();
  };
  if (guide.one_device) {
    Json& rule = add("one_device");
    rule["device"] = device_name(guide.one_device->cluster);
    rule["least"] =
        rival_json(plan, guide.one_device->least, {.cluster = guide.one_device->cluster, .training = plan.training});
  }
  if (guide.largest_block) {
    Json& rule = add("largest_block");
    rule["block"] = guide.largest_block->block;
    rule["state_bytes"] = guide.largest_block->state.count;
    rule["memory_capacity_bytes"] = guide.largest_block->capacity.count;
  }
  if (guide.beyond_node) {
    Json& rule = add("tensor_parallel_beyond_node");
    rule["inside_ranks"] = guide.beyond_node->inside_ranks;
    rule["inside_bytes_per_s"] = json_number(guide.beyond_node->inside.value);
    rule["across_ranks"] = guide.beyond_node->across_ranks;
    rule["across_bytes_per_s"] = json_number(guide.beyond_node->across.value);
    rule["best"] = rival_json(plan, guide.beyond_node->best);
    rule["certified"] = guide.beyond_node->certified;
  }
  for (const Guide::ShardedPipeline& sharded : guide.sharded_pipeline) {
    Json& rule = add("sharding_in_pipeline");
    rule["zero_stage"] = sharded.rival.plan.spec.zero_stage;
    rule["micro_batches"] = sharded.micro_batches;
    rule["plan_communication_dp_bytes"] = sharded.sent.count;
    rule["with"] = rival_json(plan, sharded.rival);
  }
  if (guide.gathered) {
    Json& rule = add("parameters_gathered_each_micro_batch");
    rule["micro_batches"] = guide.gathered->micro_batches;
    rule["communication_dp_bytes"] = guide.gathered->sent.count;
    rule["time_dp_exposed_s"] = json_number(guide.gathered->exposed.value);
  }
  if (guide.bubble) {
    Json& rule = add("bubble");
    rule["stages"] = guide.bubble->stages;
    rule["micro_batches"] = guide.bubble->micro_batches;
    rule["closed_form"] = json_number(guide.bubble->closed_form);
    rule["simulated"] = json_number(guide.bubble->simulated);
    rule["enough_micro_batches"] = guide.bubble->enough;
    rule["closed_form_then"] = json_number(guide.bubble->closed_form_then);
  }
  return json;
}

}  // namespace

Json explain_json(const ReportInputs& inputs, const Plan& plan, const Reasons& reasons) {
  Json json = suggest_json(inputs, plan.search, &plan, {});
  json["schema"] = "parplan.explain/1";
  for (const char* of_suggest : {"changes", "environment", "launch"}) json.erase(of_suggest);

  const Seconds step = plan.prediction.time.total();
  const bool has_replicas = !plan.spec.replica_micro_batches.empty();
  json["stages"] = Json::array();
  for (std::size_t i = 0; i < reasons.details.ranks.size(); ++i) {
    const RankResult& stage = reasons.details.ranks[i];
    // The columns of a plan's row, for this stage alone; after its work the stage waits until the
    // end of the step.
    RankedPlan of_stage{.spec = plan.spec,
                        .result = {.time = stage.time,
                                   .memory = stage.memory,
                                   .memory_stage = stage.pipeline_rank,
                                   .memory_replica = stage.replica,
                                   .communication = stage.communication}};
    of_stage.result.time.bubble += std::max(step - stage.time.total(), Seconds(0.0));
    const Json whole = row_of(plan, of_stage, {.cluster = plan.cluster, .training = plan.training});
    Json part{{"stage", stage.pipeline_rank}, {"layers", layers_of_ranks(plan.spec)[stage.pipeline_rank]}};
    if (has_replicas) part["replica"] = stage.replica;
    for (const auto& [column, value] : whole.items())
      if (column.starts_with("time_") || column.starts_with("memory_") || column.starts_with("communication_"))
        part[column] = value;
    part["memory_capacity_bytes"] = reasons.capacities[i].count;
    json["stages"].push_back(std::move(part));
  }
  json["critical_path"] = Json::array();
  for (const CriticalWork& work : reasons.details.critical_path)
    json["critical_path"].push_back({{"stage", reasons.details.ranks[work.rank].pipeline_rank},
                                     {"what", describe(work)},
                                     {"segment", work.segment},
                                     {"label", name(work.label)},
                                     {"runs", work.runs},
                                     {"time_s", json_number(work.time.value)}});
  if (has_replicas)
    for (std::size_t i = 0; i < reasons.details.critical_path.size(); ++i)
      json["critical_path"][i]["replica"] = reasons.details.ranks[reasons.details.critical_path[i].rank].replica;
  json["deciding_devices"] = Json::array();
  for (const DecidingDevice& kind : deciding_devices(plan, reasons)) {
    Json ranks = Json::array();
    for (std::size_t i = 0; i < kind.ranks.size(); ++i) {
      const RankResult& result = reasons.details.ranks[static_cast<std::size_t>(kind.ranks[i])];
      ranks.push_back({{"stage", result.pipeline_rank}});
      if (has_replicas) ranks.back()["replica"] = result.replica;
      if (!kind.waits_for[i].empty()) ranks.back()["waits_for"] = kind.waits_for[i];
    }
    json["deciding_devices"].push_back({{"device", kind.device},
                                        {"ranks", std::move(ranks)},
                                        {"critical_path_compute_s", json_number(kind.on_path.value)},
                                        {"critical_path_share", json_number(kind.share)},
                                        {"least_waiting_s", json_number(kind.waits_least.value)},
                                        {"most_waiting_s", json_number(kind.waits_most.value)}});
  }
  json["kernels"] = Json::object();
  for (std::size_t i = 0; i < count_of<Origin>; ++i) {
    const auto origin = static_cast<Origin>(i);
    json["kernels"][fmt::format("{}_s", name(origin))] = json_number(kernels_by_origin(reasons)[origin].value);
  }
  json["kernels"]["at_rates_of_loops"] = without_sustained(plan.cluster, stated_precision(plan.training));
  json["communication"] = Json::object();
  for (std::size_t i = 0; i < count_of<CommunicationOrigin>; ++i) {
    const auto origin = static_cast<CommunicationOrigin>(i);
    json["communication"][fmt::format("{}_s", name(origin))] =
        json_number(collectives_by_origin(reasons)[origin].value);
  }
  json["binding_constraint"] = name(reasons.binding);
  const Variation* const of_what_binds = relaxed(reasons);
  json["relaxed"] = of_what_binds != nullptr ? variation_json(plan, *of_what_binds) : Json(nullptr);
  json["twice"] = Json::array();
  for (const Variation& variation : reasons.twice) json["twice"].push_back(variation_json(plan, variation));
  json["error_band"] = band_json(step_band(plan));
  const std::span<const RankedPlan> behind = ranked_behind(plan, reasons);
  const std::optional<PairSpread> pairs = pair_spread(plan, behind);
  json["undecided_below"] = pairs ? json_number(pairs->spread) : Json(nullptr);
  json["runner_up"] = nullptr;
  if (!behind.empty()) {
    const RankedPlan& second = behind.front();
    json["runner_up"] = rival_json(plan, rival(cluster_of(plan, second), second),
                                   {.cluster = cluster_of(plan, second), .training = training_of(plan, second)});
  }
  json["one_choice_away"] = Json::array();
  for (const Neighbour& neighbour : reasons.neighbours) {
    Json other{{"change", neighbour.change}};
    other.update(rival_json(plan, neighbour.rival));
    json["one_choice_away"].push_back(std::move(other));
  }
  json["families"] = Json::array();
  for (const FamilyBest& family : reasons.families)
    json["families"].push_back({{"family", family.family},
                                {"of_the_plan", family.of_the_plan},
                                {"certified", family.certified},
                                {"best", family.best ? rival_json(plan, *family.best) : Json(nullptr)}});
  json["guide"] = guide_json(plan, reasons.guide);
  json["sensitivity"] = Json::array();
  for (const Variation& variation : reasons.sensitivity) json["sensitivity"].push_back(variation_json(plan, variation));
  json["unrestricted"] = reasons.unrestricted ? variation_json(plan, *reasons.unrestricted) : Json(nullptr);
  return json;
}

}  // namespace parplan
