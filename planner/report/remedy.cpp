#include "planner/report/remedy.h"

#include <fmt/format.h>

#include "planner/plan/parallel_spec_text.h"
#include "planner/report/plan_row.h"

namespace parplan {

std::string describe(const Remedy& remedy) {
  return fmt::format("{} ({}, {} a step, {} a device)", remedy.instead, layout_text(remedy.plan.spec),
                     format_duration(remedy.plan.result.time.total()), format_bytes(remedy.plan.result.memory.peak()));
}

Json remedy_json(const Remedy& remedy) {
  Json json;
  json["change"] = remedy.of;
  json["value"] = std::visit([](const auto& value) { return Json(value); }, remedy.value);
  json["text"] = describe(remedy);
  json["plan"] = row({.rank = 0,
                      .model = remedy.model,
                      .cluster = remedy.cluster,
                      .training = remedy.training,
                      .spec = remedy.plan.spec,
                      .result = remedy.plan.result});
  json["plan"]["rank"] = nullptr;
  return json;
}

}  // namespace parplan
