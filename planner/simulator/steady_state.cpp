#include "planner/simulator/steady_state.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "planner/simulator/simulation_results.h"
#include "planner/simulator/simulation_state.h"

namespace parplan {
namespace {

// The tasks of a rank by micro-batch, for each stage and phase.
using Tasks = std::map<std::pair<int, Phase>, std::vector<const Task*>>;
Tasks tasks_of(const PlayList& list) {
  Tasks tasks;
  for (const Task& task : list.tasks) {
    if (!task.action) continue;
    std::vector<const Task*>& of_phase = tasks[{task.action->stage, task.action->phase}];
    const auto m = static_cast<std::size_t>(task.action->micro_batch);
    if (of_phase.size() <= m) of_phase.resize(m + 1, nullptr);
    of_phase[m] = &task;
  }
  return tasks;
}

// Whether the calls of a rank for micro-batches [begin + period, end + period) are those for
// [begin, end), and later by `later`.
bool repeats(const PlayList& list, const CallEnds& ends, const Tasks& tasks, int begin, int end,
             const SteadyState& state) {
  const Seconds rounding = 1e-9 * state.later, least = state.later - rounding, most = state.later + rounding;
  for (const auto& [stage_and_phase, by_micro_batch] : tasks)
    for (int m = begin; m < end; ++m) {
      if (static_cast<std::size_t>(m + state.period) >= by_micro_batch.size()) return false;
      const Task* one = by_micro_batch[m];
      const Task* other = by_micro_batch[m + state.period];
      if (one == nullptr || other == nullptr) return false;
      const int calls = one->last_call - one->first_call;
      if (other->last_call - other->first_call != calls) return false;
      for (int c = 0; c < calls; ++c) {
        const auto a = static_cast<std::size_t>(one->first_call + c);
        const auto b = static_cast<std::size_t>(other->first_call + c);
        if (list.calls[a].segment != list.calls[b].segment) return false;
        // One of them may have been played as one piece, the other instruction by instruction.
        if (ends.first[a + 1] - ends.first[a] != ends.first[b + 1] - ends.first[b]) return false;
        for (std::size_t i = ends.first[a], j = ends.first[b]; i < ends.first[a + 1]; ++i, ++j)
          if (const Seconds later = ends.times[j] - ends.times[i]; later < least || later > most) return false;
      }
    }
  return true;
}

// When the first call for a micro-batch ended; nothing where there is none.
std::optional<Seconds> first_end(const CallEnds& ends, const Tasks& tasks, int micro_batch) {
  const std::vector<const Task*>& by_micro_batch = tasks.begin()->second;
  const auto m = static_cast<std::size_t>(micro_batch);
  const Task* task = m < by_micro_batch.size() ? by_micro_batch[m] : nullptr;
  const std::size_t pieces = task == nullptr ? 0 : ends.first[static_cast<std::size_t>(task->first_call) + 1];
  if (pieces == 0) return std::nullopt;
  return ends.times[pieces - 1];
}

}  // namespace

std::optional<SteadyState> find_steady_state(std::span<const PlayList> lists, std::span<const CallEnds> ends, int first,
                                             int end, int window, int period) {
  std::vector<Tasks> tasks;
  for (const PlayList& list : lists) tasks.push_back(tasks_of(list));
  if (std::ranges::any_of(tasks, &Tasks::empty)) return std::nullopt;
  for (int multiple = period; end - window - multiple >= std::max(first, 0); multiple += period) {
    const int begin = end - window - multiple;
    const std::optional<Seconds> one = first_end(ends.front(), tasks.front(), begin),
                                 other = first_end(ends.front(), tasks.front(), begin + multiple);
    if (!one || !other || *other <= *one) continue;
    const SteadyState state{.period = multiple, .later = *other - *one};
    bool holds = true;
    for (std::size_t rank = 0; rank < lists.size() && holds; ++rank)
      holds = repeats(lists[rank], ends[rank], tasks[rank], begin, begin + window, state);
    if (holds) return state;
  }
  return std::nullopt;
}

SteadyStep play_until_steady(Simulation step, int first, int end, int window, int period) {
  SteadyStep played{.result = play_step(step), .sent = {}, .steady = std::nullopt, .of_period = std::nullopt};
  const std::vector<CallEnds> ends = call_ends(step);
  std::vector<PlayList> lists;
  for (const PlayedRank& rank : step.ranks) {
    lists.push_back(rank.list);
    played.sent.push_back(rank.list.sent);
  }
  played.steady = find_steady_state(lists, ends, first, end, window, period);
  if (!played.steady) return played;
  const PlayedRank& bottleneck = bottleneck_of(step);
  const int last = end - played.steady->period - 1;  // micro-batch of the window
  const Tasks tasks = tasks_of(bottleneck.list);
  const std::vector<const Task*>& by_micro_batch = tasks.begin()->second;
  // Until the last computation of the bottleneck's first task for a micro-batch.
  const auto parts_until = [&](int micro_batch) {
    int call = by_micro_batch[micro_batch]->last_call - 1;
    while (call > by_micro_batch[micro_batch]->first_call &&
           bottleneck.program_segment_of(call).stream != Stream::compute)
      --call;
    return time_until(bottleneck, call);
  };
  const std::optional<StepTime> before = parts_until(last), after = parts_until(last + played.steady->period);
  if (!before || !after) return played;
  SteadyStep::Period added{.time = *before, .sent = {}};
  added.time *= -1.0;
  added.time += *after;
  if (std::abs((added.time.total() - played.steady->later).value) > 1e-9 * played.steady->later.value) return played;
  for (const PlayedRank& rank : step.ranks) {
    const std::vector<CommunicationVolume> by_segment = sent_by_segment(rank);
    CommunicationVolume& sent = added.sent.emplace_back();
    for (const auto& [stage_and_phase, of_phase] : tasks_of(rank.list))
      for (int m = last + 1; m <= last + played.steady->period; ++m)
        for (int call = of_phase[m]->first_call; call < of_phase[m]->last_call; ++call)
          sent += by_segment[rank.list.calls[call].segment];
  }
  played.of_period = std::move(added);
  return played;
}

}  // namespace parplan
