#include "planner/parallel/master.h"

#include <algorithm>

#include <fmt/format.h>

namespace parplan {

std::optional<std::string> illegal_master(const OpGraph& /*graph*/, const TrainingSpec& /*training*/,
                                          const ParallelSpec& spec) {
  if (spec.dp_method == DataMethod::all_reduce) return std::nullopt;
  if (spec.dp_method != DataMethod::master)
    return fmt::format("there is no dp_method {}; legal: all_reduce, master", static_cast<int>(spec.dp_method));
  if (spec.dp() == 1) return "dp_method master hands parameters to data-parallel replicas, and there is 1 rank (dp 1)";
  const auto alone = [](const char* what, int degree) {
    return fmt::format("dp_method master is one process of whole replicas, and {} is {}; {} must be 1", what, degree,
                       what);
  };
  if (spec.tp() > 1) return alone("tp", spec.tp());
  if (spec.pp() > 1) return alone("pp", spec.pp());
  if (spec.cp() > 1) return alone("cp", spec.cp());
  if (spec.zero_stage > 0)
    return fmt::format("dp_method master keeps all state on one device, and zero_stage is {}; legal stages: 0",
                       spec.zero_stage);
  if (spec.offload.optimizer != Home::device)
    return fmt::format("dp_method master updates on its device, and offload is {}; legal: none, {}", name(spec.offload),
                       name(Offload{.activations = Home::host}));
  return std::nullopt;
}

std::vector<int> legal_data_methods(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec,
                                    int most) {
  std::vector<int> values = {static_cast<int>(DataMethod::all_reduce)};
  ParallelSpec with_master = spec;
  with_master.dp_method = DataMethod::master;
  if (most >= static_cast<int>(DataMethod::master) && !illegal_master(graph, training, with_master))
    values.push_back(static_cast<int>(DataMethod::master));
  return values;
}

// Where its tensors lie follows from the method (propagate_placements.cpp): the logits on the first
// rank of the axis, parameters and gradients whole on each.
void place_master(const OpGraph& /*graph*/, const ParallelSpec& /*spec*/, Placements& /*placements*/) {}

}  // namespace parplan
