#include "cli/load_plan.h"

#include <cmath>
#include <filesystem>

#include <fmt/format.h>

#include "cli/model_graph.h"
#include "models/model_file.h"
#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/base/yaml.h"
#include "planner/graph/counting_limit.h"
#include "planner/parallel/techniques.h"

namespace parplan {

bool is_plan_file(const std::string& path) {
  if (!path.ends_with(".yaml") && !path.ends_with(".yml")) return false;
  const YamlNode root = YamlNode::parse(read_document(path), path);
  if (!root.is_map()) return false;
  const auto schema = root.find("schema");
  return schema && schema->is_scalar() && schema->as_string().starts_with("parplan.plan/");
}

namespace {

// A plan runs with the placements of the techniques, and no others.
void refuse_unknown_placements(const Placements& placed, const Placements& found, const std::string& path) {
  for (const Axis axis : block_axes)
    if (found.residual[axis] != placed.residual[axis])
      throw ConfigError({path}, fmt::format("placements: the residual is {} over {}; the plan's techniques place it as "
                                            "{}, and only that can be carried out; write it so",
                                            write_placement(found.residual[axis]), name(axis),
                                            write_placement(placed.residual[axis])));
  for (const auto& [parameter, layout] : placed.parameters) {
    const auto entry = found.parameters.find(parameter);
    const TensorLayout given = entry == found.parameters.end() ? TensorLayout{} : entry->second;
    for (const Axis axis : block_axes)
      if (given[axis] != layout[axis])
        throw ConfigError({path},
                          fmt::format("placements: '{}' is {} over {}; the plan's techniques place it as {}, and only "
                                      "that can be carried out; write it so",
                                      parameter, write_placement(given[axis]), name(axis),
                                      write_placement(layout[axis])));
  }
  for (const auto& [parameter, layout] : found.parameters)
    if (!placed.parameters.contains(parameter))
      throw ConfigError({path}, fmt::format("placements: the model has no parameter '{}'; take it out", parameter));
}

}  // namespace

LoadedPlan load_plan(const std::string& path) {
  if (!std::filesystem::exists(path) && std::filesystem::path(path).extension().empty())
    throw ConfigError(fmt::format(
        "there is no file '{}'; a plan is wanted, such as parplan suggest {} -o plan.yaml writes", path, path));
  return load_plan(read_document(path), path);
}

LoadedPlan load_plan(const std::string& text, const std::string& path) {
  if (text.find("parplan.plan/") == std::string::npos)  // its schema, anywhere in the text
    throw ConfigError(
        {path},
        "this is no plan: it has no 'schema: parplan.plan/1'; make one with parplan suggest MODEL -o plan.yaml");
  LoadedPlan loaded{.plan = read_plan(text, path), .graph = {}};
  const Plan& plan = loaded.plan;
  const ModelSpec model = read_model(plan.model_text, path + " (model)").spec;
  if (const auto problem = problem_with_trained(model, plan.training))
    throw ConfigError({path}, fmt::format("training: {}", problem->message));
  if (plan.training.fp8)
    if (const auto reason = lacks_fp8(plan.cluster, plan.training.engine))
      throw ConfigError({path}, fmt::format("training: {}", *reason));
  loaded.graph = graph_of(model, plan.training);
  if (parameter_count(loaded.graph) != plan.model.parameters)
    throw ConfigError({path}, fmt::format("the plan's model has {} parameters, and its summary says {}; plan again "
                                          "instead of changing the model in a plan",
                                          parameter_count(loaded.graph), plan.model.parameters));
  const Flops flops = model_flops_per_sample(loaded.graph);
  if (std::abs(plan.model.flops_per_sample.value - flops.value) > 1e-9 * flops.value)
    throw ConfigError({path}, fmt::format("the plan's model takes {} FLOPs a sample, and its summary says {} "
                                          "(flops_per_sample); plan again instead of changing it in a plan",
                                          flops.value, plan.model.flops_per_sample.value));
  if (const auto reason = beyond_counting(loaded.graph, plan.training)) throw ConfigError({path}, *reason);
  if (const auto reason = illegal(loaded.graph, plan.training, plan.spec)) throw ConfigError({path}, *reason);
  Placements placed = place(loaded.graph, plan.spec);
  refuse_unknown_placements(placed, plan.placements, path);
  loaded.plan.placements = std::move(placed);  // with what a file does not name
  return loaded;
}

}  // namespace parplan
