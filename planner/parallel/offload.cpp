#include "planner/parallel/offload.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/plan/layout.h"

namespace parplan {
namespace {

// Whether every rank would have all parameters of its blocks on its host, where one is enough.
bool repeats_parameters(const ParallelSpec& spec, Offload offload) {
  return includes(offload, Offload::parameters) && spec.replicas() > 1 && spec.zero_stage < 3;
}

// Moments in 8 bits, which have scales beside them, are not read from NVMe.
bool drives_quantized_state(const TrainingSpec& training, Offload offload) {
  return includes(offload, Offload::nvme) && training.optimizer == Optimizer::adamw_8bit;
}

// The host would orthogonalize by matrix products, which no file of a cluster gives it a rate for.
bool multiplies_on_host(const TrainingSpec& training, const OffloadRow& row) {
  return training.optimizer == Optimizer::muon && row.state.optimizer != Home::device;
}

}  // namespace

std::vector<int> legal_offloads(const OpGraph& /*graph*/, const TrainingSpec& training, const ParallelSpec& spec,
                                int most) {
  std::vector<int> values;
  for (const OffloadRow& row : offload_rows())
    if (const int value = static_cast<int>(row.kind);
        value <= most && (row.kind == Offload::none || is_own(training.engine)) &&
        !repeats_parameters(spec, row.kind) && !multiplies_on_host(training, row) &&
        !drives_quantized_state(training, row.kind))
      values.push_back(value);
  std::ranges::sort(values);
  return values;
}

std::optional<std::string> illegal_offload(const OpGraph& /*graph*/, const TrainingSpec& training,
                                           const ParallelSpec& spec) {
  if (spec.offload == Offload::none) return std::nullopt;
  if (std::ranges::find(offload_rows(), spec.offload, &OffloadRow::kind) == offload_rows().end()) {
    std::vector<const char*> names;
    for (const OffloadRow& row : offload_rows()) names.push_back(row.name);
    return fmt::format("there is no offload {}; legal: {}", static_cast<int>(spec.offload), fmt::join(names, ", "));
  }
  if (is_own(training.engine) && repeats_parameters(spec, spec.offload))
    return fmt::format(
        "offload {} keeps parameters in host memory, of which each data-parallel rank has a shard with ZeRO stage 3, "
        "and zero_stage is {} on {} of them; legal: zero_stage 3, or offload {}",
        name(spec.offload), spec.zero_stage, spec.replicas(), name(without(spec.offload, Offload::parameters)));
  if (is_own(training.engine) && drives_quantized_state(training, spec.offload))
    return fmt::format("offload {} keeps the optimizer's state in fp32 on NVMe, and optimizer {} has it in 8 bits; "
                       "legal: offload {}, or another optimizer",
                       name(spec.offload), name(training.optimizer), name(without(spec.offload, Offload::nvme)));
  if (is_own(training.engine) &&
      multiplies_on_host(training, *std::ranges::find(offload_rows(), spec.offload, &OffloadRow::kind)))
    return fmt::format(
        "offload {} has the host update parameters, and optimizer muon multiplies matrices to do so; "
        "legal: offload none or activations, or another optimizer",
        name(spec.offload));
  if (is_own(training.engine)) return std::nullopt;
  return fmt::format("offload {} is known of {} alone, and the engine is {}; leave offload or the engine out",
                     name(spec.offload), Engine{}.title, training.engine.name);
}

void place_offload(const OpGraph& /*graph*/, const ParallelSpec& spec, Placements& placements) {
  placements.state.homes = state_homes(spec);
}

}  // namespace parplan
