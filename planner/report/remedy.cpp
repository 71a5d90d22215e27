#include "planner/report/remedy.h"

#include <fmt/format.h>

#include "planner/base/text.h"
#include "planner/plan/parallel_spec_text.h"
#include "planner/report/plan_row.h"

namespace parplan {

std::string why_none_fits(std::int64_t candidates, const Cluster& cluster, const std::optional<Shortage>& smallest) {
  const std::string none = fmt::format("of {} none fits", pluralized(candidates, "candidate"));
  if (smallest && smallest->home != Home::device)
    return none + "; of the one that needs the least memory on a device: " + words_of(*smallest);
  return none + fmt::format(" in {} of memory a device", device_memory(cluster));
}

std::string describe(const Remedy& remedy) {
  const StepResult& result = remedy.plan.result;
  const MemoryUse& use = result.memory;
  // It fits then, and is tight (MemoryVerdict).
  const bool gives_back = use.peak() > memory_capacity(remedy.cluster, remedy.plan.spec, result);
  return fmt::format("{} ({}, {} a step, {} a device{})", remedy.instead, layout_text(remedy.plan.spec),
                     format_duration(result.time.total()),
                     format_bytes(gives_back ? use.peak() - use.reserve : use.peak()),
                     gives_back ? " without what its allocator keeps" : "");
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
