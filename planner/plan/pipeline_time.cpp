#include "planner/plan/pipeline_time.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/base/enum_index.h"
#include "planner/base/error.h"

namespace parplan {
namespace {

// By stage: the place of its last backward among the actions of its rank.
std::vector<std::size_t> last_backwards(const Schedule& schedule) {
  std::vector<std::size_t> last(schedule.rank_of_stage.size());
  for (const std::vector<Action>& actions : schedule.ranks)
    for (std::size_t i = 0; i < actions.size(); ++i)
      if (actions[i].phase == Phase::backward) last[static_cast<std::size_t>(actions[i].stage)] = i;
  return last;
}

}  // namespace

Seconds Slowing::of(Seconds beside, Seconds duration) const {
  if (beside >= duration + throughout) return throughout;
  return std::max(share * (beside - kept), Seconds(0.0));
}

namespace {

// How much longer work of `duration` takes beside reductions that are in flight for so long from
// its start on, and make it take so much longer where they are `throughout`.
Seconds longer_beside(Seconds in_flight, Seconds duration, Seconds throughout) {
  if (in_flight <= Seconds(0.0) || throughout <= Seconds(0.0)) return Seconds(0.0);
  return std::min(throughout, in_flight * (throughout / (duration + throughout)));
}

}  // namespace

std::vector<PlayedEnd> played_ends(const Schedule& schedule, std::span<const Seconds> forward,
                                 std::span<const Seconds> backward, std::span<const Seconds> transfer,
                                 std::span<const Seconds> weights, int first_back,
                                 std::span<const StageReductions> reductions) {
  const int stages = schedule.stages();
  PARPLAN_ASSERT(stages >= 1 && forward.size() == schedule.rank_of_stage.size() && backward.size() == forward.size() &&
                     transfer.size() + 1 == forward.size(),
                 fmt::format("{} stages, {} forwards, {} backwards, {} transfers", stages, forward.size(),
                             backward.size(), transfer.size()));
  int micro_batches = 0;
  for (const std::vector<Action>& actions : schedule.ranks)
    for (const Action& action : actions) micro_batches = std::max(micro_batches, action.micro_batch + 1);
  const auto count = static_cast<std::size_t>(micro_batches);
  constexpr Seconds not_yet(-1.0);
  // Per flow, by stage: where its result goes and what its input waits for, as in input_of and
  // output_of; and when the link that it is sent over is free.
  struct Way {
    bool has_input = false, sends = false;
    Seconds transfer, link_free;
  };
  std::array<std::vector<Way>, 2> ways;
  for (auto& of_flow : ways) of_flow.resize(forward.size());
  for (int s = 0; s + 1 < stages; ++s) {
    const bool crosses = schedule.rank_of_stage[s] != schedule.rank_of_stage[s + 1];
    Way &down = ways[index_of(Flow::forward)][s], &up = ways[index_of(Flow::backward)][s + 1];
    down.sends = crosses;
    up.sends = crosses && s + 1 != first_back;
    down.transfer = up.transfer = transfer[s];
    ways[index_of(Flow::forward)][s + 1].has_input = ways[index_of(Flow::backward)][s].has_input = true;
  }
  // Per flow, by stage and micro-batch: when the result arrives where it is needed.
  std::array<std::vector<Seconds>, 2> there;
  for (auto& of_flow : there) of_flow.assign(forward.size() * count, not_yet);
  std::vector<std::size_t> next(schedule.ranks.size());
  std::vector<PlayedEnd> ranks(schedule.ranks.size());
  std::vector<Seconds> reduced(reductions.empty() ? 0 : schedule.ranks.size());  // what ranks have begun to reduce
  const std::vector<std::size_t> last_backward =
      reductions.empty() ? std::vector<std::size_t>() : last_backwards(schedule);
  for (bool advanced = true; std::exchange(advanced, false);)
    for (std::size_t r = 0; r < schedule.ranks.size(); ++r)
      for (; next[r] < schedule.ranks[r].size(); ++next[r], advanced = true) {
        const Action& action = schedule.ranks[r][next[r]];
        const auto stage = static_cast<std::size_t>(action.stage);
        if (action.phase == Phase::backward_weights) {
          ranks[r].time += weights[stage];
          continue;
        }
        const bool is_forward = action.phase == Phase::forward;
        if (!is_forward && action.stage < first_back) continue;
        const std::size_t flow = index_of(is_forward ? Flow::forward : Flow::backward);
        Way& way = ways[flow][stage];
        const std::size_t place = stage * count + static_cast<std::size_t>(action.micro_batch);
        Seconds start = ranks[r].time;
        if (way.has_input) {
          const Seconds ready = there[flow][is_forward ? place - count : place + count];
          if (ready == not_yet) break;
          start = std::max(start, ready);
        }
        Seconds end = start + (is_forward ? forward : backward)[stage];
        if (action.phase == Phase::backward_inputs) end -= weights[stage];
        const bool may_reduce = !reductions.empty() && !is_forward;
        if (may_reduce) {
          const StageReductions& reduces = reductions[stage];
          const bool is_last = last_backward[stage] == next[r];
          // Beside reductions of the rank's other stages, and of its own.
          const Seconds longer = reduces.backward.of(reduced[r] - start, end - start);
          ranks[r].slowed = is_last ? std::max(longer, reduces.own) : longer;
          end += ranks[r].slowed;
          if (is_last) reduced[r] = std::max(reduced[r] + reduces.all, end + reduces.left);
        }
        ranks[r].time = end;
        if (way.sends) {
          end = std::max(end, way.link_free);
          if (may_reduce) end += longer_beside(reduced[r] - end, way.transfer, reductions[stage].sends_back);
          way.link_free = end += way.transfer;
        }
        there[flow][place] = end;
      }
  for (std::size_t r = 0; r < schedule.ranks.size(); ++r)
    PARPLAN_ASSERT(next[r] == schedule.ranks[r].size(),
                   fmt::format("rank {} stops at {}", r, write_action(schedule.ranks[r][next[r]])));
  return ranks;
}

Seconds played_time(const Schedule& schedule, std::span<const Seconds> forward, std::span<const Seconds> backward,
                    std::span<const Seconds> transfer, std::span<const Seconds> weights, int first_back,
                    std::span<const StageReductions> reductions) {
  return std::ranges::max(played_ends(schedule, forward, backward, transfer, weights, first_back, reductions), {},
                          &PlayedEnd::time)
      .time;
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
