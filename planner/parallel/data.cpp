#include "planner/parallel/data.h"

#include <algorithm>

#include <fmt/format.h>

#include "planner/parallel/techniques.h"

namespace parplan {
std::vector<int> legal_data_degrees(const OpGraph& /*graph*/, const TrainingSpec& training, const ParallelSpec& spec,
                                    int most) {
  if (spec.micro_batch < 1 || training.global_batch % spec.micro_batch != 0) return {};
  std::vector<int> degrees;
  for (const std::int64_t degree : divisors(training.global_batch / spec.micro_batch))
    if (degree <= most) degrees.push_back(static_cast<int>(degree));
  return degrees;
}

std::optional<std::string> illegal_data(const OpGraph& /*graph*/, const TrainingSpec& training,
                                        const ParallelSpec& spec) {
  const std::int64_t batch = training.global_batch;
  if (spec.dp() < 1) return fmt::format("the data-parallel degree is {}; it must be at least 1", spec.dp());
  if (spec.micro_batch < 1 || batch % spec.micro_batch != 0)
    return fmt::format("micro-batches of {} cannot split a global batch of {} sequences; legal micro-batches: {}",
                       spec.micro_batch, batch, list_degrees(divisors(batch)));
  if (batch / spec.micro_batch % spec.mesh.batch_ranks() == 0) return std::nullopt;
  return fmt::format(
      "data parallelism over {} cannot split a global batch of {} sequences in micro-batches of {}; legal degrees: {}",
      spec.dp(), batch, spec.micro_batch,
      list_degrees(divisors(batch / spec.micro_batch)));
}

void place_data(const OpGraph& /*graph*/, const ParallelSpec& /*spec*/, Placements& placements) {
  placements.state.parameters.dp = placements.state.gradients.dp = placements.state.optimizer.dp = replicate();
}

}  // namespace parplan
