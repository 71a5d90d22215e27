#include "planner/parallel/offload.h"

#include <fmt/format.h>

#include "planner/plan/layout.h"

namespace parplan {

std::vector<int> legal_offloads(const OpGraph& /*graph*/, const TrainingSpec& training, const ParallelSpec& /*spec*/,
                                int most) {
  std::vector<int> values = {static_cast<int>(Offload::none)};
  if (is_own(training.engine) && most >= static_cast<int>(Offload::optimizer))
    values.push_back(static_cast<int>(Offload::optimizer));
  return values;
}

std::optional<std::string> illegal_offload(const OpGraph& /*graph*/, const TrainingSpec& training,
                                           const ParallelSpec& spec) {
  if (spec.offload == Offload::none) return std::nullopt;
  if (spec.offload != Offload::optimizer)
    return fmt::format("there is no offload {}; legal: none, optimizer", static_cast<int>(spec.offload));
  if (is_own(training.engine)) return std::nullopt;
  return fmt::format("offload {} is known of {} alone, and the engine is {}; leave offload or the engine out",
                     name(spec.offload), Engine{}.title, training.engine.name);
}

void place_offload(const OpGraph& /*graph*/, const ParallelSpec& spec, Placements& placements) {
  placements.state.homes = state_homes(spec);
}

}  // namespace parplan
