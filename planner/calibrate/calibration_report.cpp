#include "planner/calibrate/calibration_report.h"

#include <algorithm>
#include <array>
#include <vector>

#include <fmt/format.h>

#include "planner/base/enum_index.h"
#include "planner/base/text.h"
#include "planner/report/table.h"

namespace parplan {
namespace {

// The parts of a step that people tell apart.
struct StepPart {
  const char* title;
  const char* key;  // in JSON
  Seconds (*of)(const StepTime& time);
};
constexpr std::array step_parts = {
    StepPart{"computation", "time_compute_s", [](const StepTime& t) { return t.compute; }},
    StepPart{"recomputation", "time_recompute_s", [](const StepTime& t) { return t.recompute; }},
    StepPart{"exposed communication", "time_exposed_s", [](const StepTime& t) { return t.exposed_in_all(); }},
    StepPart{"bubble", "time_bubble_s", [](const StepTime& t) { return t.bubble; }},
    StepPart{"optimizer", "time_optimizer_s", [](const StepTime& t) { return t.optimizer; }},
    StepPart{"step", "step_time_s", [](const StepTime& t) { return t.total(); }},
};

const FittedShare* share_of(const CalibrationFit& fit, ClusterConstant constant) {
  const auto found = std::ranges::find(fit.calibration.shares, constant, &FittedShare::constant);
  return found == fit.calibration.shares.end() ? nullptr : &*found;
}

// By how much the step that follows a constant most shortens, in per cent for 1 %.
double largest_reach(const CalibrationFit& fit, ClusterConstant constant) {
  double reach = 0.0;
  for (const FittedPlan& plan : fit.plans) reach = std::max(reach, plan.reach[index_of(constant)]);
  return reach;
}

std::string signed_percent(Seconds after, Seconds before) {
  return before.value > 0.0 ? fmt::format("{:+.1f} %", 100.0 * (after / before - 1.0)) : std::string("-");
}

std::string table_of_shares(const CalibrationFit& fit) {
  std::vector<std::vector<std::string>> rows{
      {"constant", "share of the files' rates", "for 1 % of the step", "1 % of it in the step"}};
  for (const ClusterConstantRow& row : cluster_constants()) {
    const FittedShare* const share = share_of(fit, row.constant);
    rows.push_back({row.words, share == nullptr ? "as in the files" : fmt::format("{:.3f}", share->share),
                    share == nullptr             ? "-"
                    : share->percent_per_percent ? fmt::format("{:.2g} %", *share->percent_per_percent)
                    : fit.at_bound[index_of(row.constant)] ? std::string("at its bound")
                                                           : std::string("not told"),
                    fmt::format("{:.2f} %", largest_reach(fit, row.constant))});
  }
  return align_columns(rows, 1);
}

std::string table_of_parts(const FittedPlan& plan) {
  std::vector<std::vector<std::string>> rows{{"part", "before", "after", "change"}};
  for (const StepPart& part : step_parts) {
    const Seconds before = part.of(plan.before), after = part.of(plan.after);
    if (before.value == 0.0 && after.value == 0.0) continue;
    rows.push_back({part.title, format_duration(before), format_duration(after), signed_percent(after, before)});
  }
  return align_columns(rows, 1);
}

std::string table_of_steps(const CalibrationFit& fit) {
  std::vector<std::vector<std::string>> rows{{"layout", "model", "measured", "before", "after", "error"}};
  for (const FittedStep& step : fit.calibration.steps)
    rows.push_back({step.layout, step.model, format_duration(step.measured), format_duration(step.before),
                    format_duration(step.after), signed_percent(step.after, step.measured)});
  return align_columns(rows, 2);
}

}  // namespace

std::string describe(const CalibrationFit& fit) {
  const ClusterCalibration& calibration = fit.calibration;
  std::string text =
      fmt::format("calibration of {} on {}, by {} of {}\n", calibration.cluster, join(calibration.devices, " and "),
                  pluralized(static_cast<int>(calibration.steps.size()), "measured step"), calibration.engine);
  text += fmt::format("{}\n{}", table_of_shares(fit), table_of_steps(fit));
  if (fit.plans.size() == 1) text += fmt::format("\n{}", table_of_parts(fit.plans.front()));
  const std::size_t told = calibration.shares.size();
  if (told < constant_count)
    text += fmt::format("{} tell{} {} of {} constants, the one{} that the step follows most; the others stay\n",
                        pluralized(static_cast<int>(fit.plans.size()), "measured step"),
                        fit.plans.size() == 1 ? "s" : "", told, constant_count, told == 1 ? "" : "s");
  return text;
}

Json calibration_json(const CalibrationFit& fit) {
  const ClusterCalibration& calibration = fit.calibration;
  Json json;
  json["cluster"] = calibration.cluster;
  json["devices"] = calibration.devices;
  json["engine"] = calibration.engine;
  json["constants"] = Json::array();
  for (const ClusterConstantRow& row : cluster_constants()) {
    const FittedShare* const share = share_of(fit, row.constant);
    json["constants"].push_back(
        {{"constant", row.key},
         {"share", share == nullptr ? Json(nullptr) : json_number(share->share)},
         {"percent_per_percent", share == nullptr ? Json(nullptr) : optional_number(share->percent_per_percent)},
         {"step_percent_per_percent", json_number(largest_reach(fit, row.constant))}});
  }
  json["steps"] = Json::array();
  for (std::size_t i = 0; i < fit.plans.size(); ++i) {
    const FittedStep& step = calibration.steps[i];
    Json line = {{"model", step.model},
                 {"layout", step.layout},
                 {"devices", step.devices},
                 {"global_batch", step.global_batch},
                 {"sequence_length", step.sequence_length},
                 {"measured_step_time_s", json_number(step.measured.value)}};
    for (const auto& [name, time] :
         {std::pair("before", &fit.plans[i].before), std::pair("after", &fit.plans[i].after)})
      for (const StepPart& part : step_parts) line[name][part.key] = json_number(part.of(*time).value);
    json["steps"].push_back(std::move(line));
  }
  return json;
}

}  // namespace parplan
