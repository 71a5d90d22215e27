#include "planner/report/suggest_and_run_json.h"

#include <algorithm>

#include "planner/graph/trained_file.h"
#include "planner/report/launch_line.h"
#include "planner/report/plan_row.h"
#include "planner/report/remedy.h"

namespace parplan {
namespace {

// Null where nodes differ.
Json devices_per_node(const Cluster& cluster) {
  const int first = cluster.groups.front().devices_per_node();
  return std::ranges::all_of(cluster.groups, [&](const NodeGroup& group) { return group.devices_per_node() == first; })
             ? Json(first)
             : Json(nullptr);
}

Json head(const char* schema, const ReportInputs& inputs) {
  const Cluster& cluster = inputs.cluster;
  Json json;
  json["schema"] = schema;
  json["tool"] = {{"name", "parplan"}, {"version", inputs.version}};
  json["inputs"]["model"] = {{"name", inputs.model.name},
                             {"parameters", inputs.model.parameters},
                             {"flops_per_sample", json_number(inputs.model.flops_per_sample.value)}};
  json["inputs"]["cluster"] = {{"name", cluster.name},
                               {"devices", cluster.devices()},
                               {"device", device_name(cluster)},
                               {"devices_per_node", devices_per_node(cluster)},
                               {"nodes", cluster.nodes()},
                               {"backend", name(cluster.backend())},
                               {"memory_capacity_bytes", least_memory(cluster).count},
                               {"device_ids", cluster.device_ids.empty() ? Json(nullptr) : Json(cluster.device_ids)},
                               {"measured_on", cluster.measured_on ? Json(*cluster.measured_on) : Json(nullptr)},
                               {"calibrated", cluster.calibrated ? Json(*cluster.calibrated) : Json(nullptr)}};
  json["inputs"]["training"] = {{"global_batch", inputs.training.global_batch},
                                {"sequence_length", inputs.training.sequence_length},
                                {"precision", name(stated_precision(inputs.training))},
                                {"optimizer", name(inputs.training.optimizer)},
                                {"engine", inputs.training.engine.name},
                                {"trained", describe_trained(inputs.training)},
                                {"defaults", inputs.defaults}};
  return json;
}

Json search_json(const SearchCounts& search) {
  Json left_out = Json::array();
  for (const LeftOut& one : search.left_out)
    left_out.push_back({{"what", one.what},
                        {"gap", optional_number(one.gap)},
                        {"option", one.options.empty() ? Json() : Json(one.options.front())},
                        {"options", one.options}});
  return {{"space", search.space.empty() ? Json(nullptr) : Json(search.space)},
          {"candidates", search.candidates},
          {"infeasible_memory", search.infeasible_memory},
          {"pruned_by_bound", search.pruned_by_bound},
          {"simulated", search.simulated},
          {"seconds", json_number(search.seconds)},
          {"certified", search.certified},
          {"gap", optional_number(search.gap)},
          {"cut_gap", optional_number(search.cut_gap)},
          {"left_out", left_out}};
}

Json columns_json() {
  Json json = Json::array();
  for (const Column& column : columns())
    json.push_back({{"key", column.key},
                    {"unit", column.unit.empty() ? Json(nullptr) : Json(column.unit)},
                    {"description", column.description}});
  return json;
}

Json bytes_json(const std::vector<Bytes>& values) {
  Json json = Json::array();
  for (const Bytes value : values) json.push_back(value.count);
  return json;
}

}  // namespace

Json suggest_json(const ReportInputs& inputs, const SearchCounts& search, const Plan* plan,
                  std::span<const Remedy> remedies, const std::string& plan_file) {
  Json json = head("parplan.suggest/1", inputs);
  json["inputs"]["objective"] = name(search.objective);
  json["search"] = search_json(search);
  json["columns"] = columns_json();
  json["plans"] = Json::array();
  if (plan != nullptr)
    for (int rank = 1; rank <= static_cast<int>(plan->alternatives.size()) + 1; ++rank)
      json["plans"].push_back(row(subject_of(*plan, rank)));
  json["changes"] = Json::array();
  for (const Remedy& remedy : remedies) json["changes"].push_back(remedy_json(remedy));
  json["notes"] = plan != nullptr ? Json(plan->notes) : Json::array();
  const LaunchLine launch = plan != nullptr ? launch_line(*plan, plan_file) : LaunchLine{};
  json["environment"] = Json::object();
  for (const auto& [name, value] : launch.environment) json["environment"][name] = value;
  json["launch"] = launch.commands.empty() ? Json(nullptr) : Json(launch.commands.front());
  return json;
}

Json run_json(const ReportInputs& inputs, const Plan& plan, const RunComparison& comparison) {
  Json json = head("parplan.run/1", inputs);
  json["columns"] = columns_json();
  json["predicted"] = row(subject_of(plan));
  json["measured"] = comparison.is_profiled ? row(subject_of(plan, comparison.measured)) : Json(nullptr);
  json["first_step"] = comparison.first_step;
  json["steps"] = comparison.steps;
  json["skipped_steps"] = comparison.skipped_steps;
  json["ended"] = comparison.ended.empty() ? Json(nullptr) : Json(comparison.ended);
  json["checkpoint"] = comparison.checkpoint.empty() ? Json(nullptr) : Json(comparison.checkpoint);
  json["listed_every"] = comparison.listed_every;
  json["loss"] = Json::array();
  for (const double loss : comparison.loss) json["loss"].push_back(json_number(loss));
  json["step_times_s"] = Json::array();
  for (const Seconds time : comparison.step_times) json["step_times_s"].push_back(json_number(time.value));
  json["promised_arena_bytes"] = bytes_json(comparison.promised.device);
  json["touched_arena_bytes"] = bytes_json(comparison.touched.device);
  json["process_growth_bytes"] = comparison.process_growth.count;
  json["instructions"] = Json::array();
  for (const InstructionTimes& times : comparison.instructions)
    json["instructions"].push_back(
        {{"segment", times.segment},
         {"instruction", times.instruction},
         {"runs_per_step", times.runs_per_step},
         {"predicted_s", times.predicted ? json_number(times.predicted->value) : Json(nullptr)},
         {"measured_s", json_number(times.measured.value)}});
  json["notes"] = comparison.notes;
  return json;
}

}  // namespace parplan
