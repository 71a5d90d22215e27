#include "planner/schedule/gpipe.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

Schedule gpipe_actions(const PipelineShape& shape) {
  const int stages = shape.stages, micro_batches = shape.micro_batches;
  PARPLAN_ASSERT(stages >= 1 && stages == shape.ranks && micro_batches >= 1,
                 fmt::format("{} stages on {} ranks, {} micro-batches", stages, shape.ranks, micro_batches));
  std::vector<std::vector<Action>> ranks(static_cast<std::size_t>(stages));
  for (int s = 0; s < stages; ++s)
    for (Phase phase : {Phase::forward, Phase::backward})
      for (int m = 0; m < micro_batches; ++m) ranks[s].push_back({s, phase, m});
  return one_stage_a_rank(std::move(ranks));
}

// Letters: p stages, M micro-batches, f_s and b_s the times of stage s, t_s that of a transfer
// between the stages s and s + 1.
//   T = sum f + sum b + 2 sum t + (M - 1) (max(f, t) + max(b, t))
// The forwards are M equal jobs that pass through p machines and the links between them in a row,
// with room to wait: the first job takes sum f + sum t, and each later job leaves max(f, t) after
// the one before. Backwards start on the last stage when its last forward ends, which is the last
// of all forwards; they are thus the same row run in reverse, with every machine free. The formula
// is exact for any stages. Equal stages: (M + p - 1)(f + b), with a bubble of (p - 1)(f + b).
Seconds gpipe_time(std::span<const Seconds> forward, std::span<const Seconds> backward,
                   std::span<const Seconds> transfer, const PipelineShape& shape) {
  const int micro_batches = shape.micro_batches;
  PARPLAN_ASSERT(!forward.empty() && forward.size() == backward.size() && transfer.size() + 1 == forward.size() &&
                     micro_batches >= 1,
                 fmt::format("{} forwards, {} backwards, {} transfers, {} micro-batches", forward.size(),
                             backward.size(), transfer.size(), micro_batches));
  Seconds sum, slowest_transfer;
  for (std::size_t s = 0; s < forward.size(); ++s) sum += forward[s] + backward[s];
  for (const Seconds t : transfer) {
    sum += 2.0 * t;
    slowest_transfer = std::max(slowest_transfer, t);
  }
  const Seconds slowest = std::max(*std::ranges::max_element(forward), slowest_transfer) +
                          std::max(*std::ranges::max_element(backward), slowest_transfer);
  return sum + (micro_batches - 1) * slowest;
}

// The formula above with the maxima over stages taken at this one.
Seconds gpipe_through_stage(const StagePath& path, const PipelineShape& shape) {
  return path.before + path.round_trip +
         (shape.micro_batches - 1) *
             (std::max(path.forward, path.slowest_transfer) + std::max(path.backward, path.slowest_transfer));
}

Seconds gpipe_least_time(Seconds total, Seconds /*computing*/, Seconds slowest, const PipelineShape& shape) {
  return total + (shape.micro_batches - 1) * slowest;
}

// The formula above with max f + max b >= max (f + b), and some stage takes at least the mean.
Seconds least_gpipe_time(Seconds all, Seconds transfer, const PipelineShape& shape) {
  return all + 2 * (shape.stages - 1) * transfer +
         (shape.micro_batches - 1) * std::max(all / shape.stages, shape.stages > 1 ? 2.0 * transfer : Seconds(0.0));
}

int gpipe_in_flight(int /*rank*/, const PipelineShape& shape) { return shape.micro_batches; }

}  // namespace parplan
