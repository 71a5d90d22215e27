#include "planner/parallel/offload.h"

#include <algorithm>

#include <fmt/format.h>

#include "planner/parallel/recompute.h"
#include "planner/plan/layout.h"

namespace parplan {
namespace {

// Whether every rank would have all parameters of its blocks elsewhere, where one is enough.
bool repeats_parameters(const ParallelSpec& spec, const Offload& offload) {
  return offload.parameters != Home::device && spec.replicas() > 1 && spec.zero_stage < 3;
}

// Moments in 8 bits, which have scales beside them, are not read from NVMe.
bool drives_quantized_state(const TrainingSpec& training, const Offload& offload) {
  return offload.optimizer == Home::nvme && training.optimizer == Optimizer::adamw_8bit;
}

// The host would orthogonalize by matrix products, which no file of a cluster gives it a rate for.
bool multiplies_on_host(const TrainingSpec& training, const Offload& offload) {
  return training.optimizer == Optimizer::muon && offload.optimizer != Home::device;
}

// What an engine that has it demands of an offload of activations, as Megatron Core does: fewer
// layers than there are, neither a pipeline nor recompute
// (Megatron-LM@d98e8a64dd megatron/core/transformer/transformer_config.py, __post_init__).
std::optional<std::string> refused_by(const Engine& engine, const OpGraph& graph, const ParallelSpec& spec) {
  if (spec.offload != Offload{.activations = Home::host} || !engine.has_offload_of_some_layers)
    return fmt::format("offload {} is known of {} alone, and the engine is {}; leave offload or the engine out",
                       name(spec.offload), Engine{}.title, engine.name);
  const int layers = most_layers_of_a_stage(graph, spec);
  if (spec.offload_layers == 0 || spec.offload_layers >= layers)
    return fmt::format(
        "engine {} takes the activations of fewer layers off the device than there are; legal: "
        "offload_layers from 1 to {}, or offload none",
        engine.name, layers - 1);
  if (spec.pp() > 1)
    return fmt::format(
        "engine {} takes activations off the device without a pipeline, and pp is {}; legal: pp 1, or "
        "offload none",
        engine.name, spec.pp());
  if (spec.recompute != Recompute::none)
    return fmt::format(
        "engine {} takes activations off the device without recompute, and recompute is {}; legal: "
        "recompute none, or offload none",
        engine.name, name(spec.recompute));
  return std::nullopt;
}

}  // namespace

std::vector<int> legal_offloads(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec,
                                int most) {
  std::vector<int> values;
  ParallelSpec other = spec;
  for (const Offload& offload : all_offloads()) {
    other.offload = offload;
    if (const int value = number_of(offload); value <= most && !illegal_offload(graph, training, other))
      values.push_back(value);
  }
  std::ranges::sort(values);
  return values;
}

std::optional<std::string> illegal_offload(const OpGraph& graph, const TrainingSpec& training,
                                           const ParallelSpec& spec) {
  if (spec.offload_layers != 0) {
    if (spec.offload.activations == Home::device)
      return fmt::format(
          "offload_layers says of how many layers of each stage activations leave the device, and "
          "offload is {}; leave offload_layers out, or add activations to offload",
          name(spec.offload));
    if (const int most = most_layers_of_a_stage(graph, spec); spec.offload_layers > most || spec.offload_layers < 0)
      return fmt::format("offload_layers is {}, and {} {} layer{}; take 1 to {}, or leave it out: all layers",
                         spec.offload_layers, spec.stages() == 1 ? "the model has" : "no stage has more than", most,
                         most == 1 ? "" : "s", most);
  }
  if (spec.offload == Offload{}) return std::nullopt;
  if (const std::optional<std::string> reason = wrong_with(spec.offload))
    return fmt::format("there is no offload {}: {}", name(spec.offload), *reason);
  if (!is_own(training.engine))
    if (std::optional<std::string> reason = refused_by(training.engine, graph, spec)) return reason;
  Offload other = spec.offload;
  if (repeats_parameters(spec, spec.offload)) {
    other.parameters = Home::device;
    return fmt::format(
        "offload {} keeps parameters {}, of which each data-parallel rank has a shard with ZeRO stage 3, and "
        "zero_stage is {} on {} of them; legal: zero_stage 3, or offload {}",
        name(spec.offload), spec.offload.parameters == Home::host ? "in host memory" : "on NVMe", spec.zero_stage,
        spec.replicas(), name(other));
  }
  if (drives_quantized_state(training, spec.offload)) {
    other.optimizer = Home::host;
    return fmt::format(
        "offload {} keeps the optimizer's state in fp32 on NVMe, and optimizer {} has it in 8 bits; "
        "legal: offload {}, or another optimizer",
        name(spec.offload), name(training.optimizer), name(other));
  }
  if (multiplies_on_host(training, spec.offload))
    return fmt::format(
        "offload {} has the host update parameters, and optimizer muon multiplies matrices to do so; "
        "legal: offload none, activations or activations:nvme, or another optimizer",
        name(spec.offload));
  return std::nullopt;
}

void place_offload(const OpGraph& /*graph*/, const ParallelSpec& spec, Placements& placements) {
  placements.state.homes = state_homes(spec.offload);
}

}  // namespace parplan
