#include "planner/plan/pipeline_time.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/base/enum_index.h"
#include "planner/base/error.h"

namespace parplan {

Seconds played_time(const Schedule& schedule, std::span<const Seconds> forward, std::span<const Seconds> backward,
                    std::span<const Seconds> transfer) {
  const int stages = schedule.stages();
  PARPLAN_ASSERT(stages >= 1 && forward.size() == schedule.rank_of_stage.size() && backward.size() == forward.size() &&
                     transfer.size() + 1 == forward.size(),
                 fmt::format("{} stages, {} forwards, {} backwards, {} transfers", stages, forward.size(),
                             backward.size(), transfer.size()));
  int micro_batches = 0;
  for (const std::vector<Action>& actions : schedule.ranks)
    for (const Action& action : actions) micro_batches = std::max(micro_batches, action.micro_batch + 1);
  const auto count = static_cast<std::size_t>(micro_batches);
  const auto at = [&](const Action& action) {
    return static_cast<std::size_t>(action.stage) * count + static_cast<std::size_t>(action.micro_batch);
  };
  // Per phase, by stage and micro-batch: when the result arrives where it is needed.
  std::array<std::vector<std::optional<Seconds>>, 2> there;
  for (auto& of_phase : there) of_phase.resize(forward.size() * count);
  // Per phase, by the sending stage.
  std::array<std::vector<Seconds>, 2> link_free{std::vector<Seconds>(forward.size()),
                                                std::vector<Seconds>(forward.size())};
  std::vector<std::size_t> next(schedule.ranks.size());
  std::vector<Seconds> rank_free(schedule.ranks.size());
  for (bool advanced = true; std::exchange(advanced, false);)
    for (std::size_t r = 0; r < schedule.ranks.size(); ++r)
      for (; next[r] < schedule.ranks[r].size(); ++next[r], advanced = true) {
        const Action& action = schedule.ranks[r][next[r]];
        const std::size_t phase = index_of(action.phase);
        Seconds start = rank_free[r];
        if (const std::optional<Action> input = input_of(action, stages)) {
          const std::optional<Seconds>& ready = there[phase][at(*input)];
          if (!ready) break;
          start = std::max(start, *ready);
        }
        const Seconds end = start + (action.phase == Phase::forward ? forward : backward)[action.stage];
        rank_free[r] = end;
        std::optional<Seconds>& arrives = there[phase][at(action)];
        arrives = end;
        if (!sends(schedule, action)) continue;
        Seconds& link = link_free[phase][action.stage];
        link = std::max(end, link) + transfer[action.phase == Phase::forward ? action.stage : action.stage - 1];
        arrives = link;
      }
  for (std::size_t r = 0; r < schedule.ranks.size(); ++r)
    PARPLAN_ASSERT(next[r] == schedule.ranks[r].size(),
                   fmt::format("rank {} stops at {}", r, write_action(schedule.ranks[r][next[r]])));
  return *std::ranges::max_element(rank_free);
}

Seconds pipeline_time(const ScheduleForms& schedule, std::span<const Seconds> forward,
                      std::span<const Seconds> backward, std::span<const Seconds> transfer,
                      const PipelineShape& shape) {
  if (schedule.closed_form != nullptr) return schedule.closed_form(forward, backward, transfer, shape);
  return played_time(schedule.actions(shape), forward, backward, transfer);
}

Seconds time_through_stage(const ScheduleForms& schedule, const StagePath& path, const PipelineShape& shape) {
  if (schedule.through_stage != nullptr) return schedule.through_stage(path, shape);
  return shape.micro_batches * (path.forward + path.backward);
}

Seconds least_pipeline_time(const ScheduleForms& schedule, Seconds total, Seconds computing, Seconds slowest,
                            const PipelineShape& shape) {
  if (schedule.least_time != nullptr) return schedule.least_time(total, computing, slowest, shape);
  return shape.micro_batches * slowest;
}

}  // namespace parplan
