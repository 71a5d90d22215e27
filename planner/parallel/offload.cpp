#include "planner/parallel/offload.h"

#include <algorithm>

#include <fmt/format.h>

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

}  // namespace

std::vector<int> legal_offloads(const OpGraph& /*graph*/, const TrainingSpec& training, const ParallelSpec& spec,
                                int most) {
  std::vector<int> values;
  for (const Offload& offload : all_offloads())
    if (const int value = number_of(offload); value <= most && (offload == Offload{} || is_own(training.engine)) &&
                                              !repeats_parameters(spec, offload) &&
                                              !multiplies_on_host(training, offload) &&
                                              !drives_quantized_state(training, offload))
      values.push_back(value);
  std::ranges::sort(values);
  return values;
}

std::optional<std::string> illegal_offload(const OpGraph& /*graph*/, const TrainingSpec& training,
                                           const ParallelSpec& spec) {
  if (spec.offload == Offload{}) return std::nullopt;
  if (const std::optional<std::string> reason = wrong_with(spec.offload))
    return fmt::format("there is no offload {}: {}", name(spec.offload), *reason);
  if (!is_own(training.engine))
    return fmt::format("offload {} is known of {} alone, and the engine is {}; leave offload or the engine out",
                       name(spec.offload), Engine{}.title, training.engine.name);
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
