#include "planner/simulator/steady_state.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>
#include <vector>

namespace parplan {
namespace {

constexpr Seconds infinite{std::numeric_limits<double>::infinity()};

// The tasks of a rank by micro-batch, for each stage and phase.
using Tasks = std::map<std::pair<int, Phase>, std::vector<const Task*>>;
Tasks tasks_of(const Program& program) {
  Tasks tasks;
  for (const Task& task : program.tasks) {
    if (!task.action) continue;
    std::vector<const Task*>& of_phase = tasks[{task.action->stage, task.action->phase}];
    const auto m = static_cast<std::size_t>(task.action->micro_batch);
    if (of_phase.size() <= m) of_phase.resize(m + 1, nullptr);
    of_phase[m] = &task;
  }
  return tasks;
}

// How much later calls are, at least and at most.
struct Apart {
  Seconds least;
  Seconds most;
};

// Whether the calls of a rank for micro-batches [begin + period, end + period) are those for
// [begin, end), and as much later as this.
bool are(Apart apart, const Program& program, const CallEnds& ends, const Tasks& tasks, int begin, int end,
         int period) {
  for (const auto& [stage_and_phase, by_micro_batch] : tasks)
    for (int m = begin; m < end; ++m) {
      if (static_cast<std::size_t>(m + period) >= by_micro_batch.size()) return false;
      const Task* one = by_micro_batch[m];
      const Task* other = by_micro_batch[m + period];
      if (one == nullptr || other == nullptr) return false;
      const int calls = one->last_call - one->first_call;
      if (other->last_call - other->first_call != calls) return false;
      for (int c = 0; c < calls; ++c) {
        const auto a = static_cast<std::size_t>(one->first_call + c);
        const auto b = static_cast<std::size_t>(other->first_call + c);
        if (program.calls[a].segment != program.calls[b].segment) return false;
        // One of them may have been played as one piece, the other instruction by instruction.
        if (ends.first[a + 1] - ends.first[a] != ends.first[b + 1] - ends.first[b]) return false;
        for (std::size_t i = ends.first[a], j = ends.first[b]; i < ends.first[a + 1]; ++i, ++j)
          if (const Seconds later = ends.times[j] - ends.times[i]; later < apart.least || later > apart.most)
            return false;
      }
    }
  return true;
}

// When the first call for a micro-batch ended.
Seconds first_end(const CallEnds& ends, const Tasks& tasks, int micro_batch) {
  const std::vector<const Task*>& by_micro_batch = tasks.begin()->second;
  const auto m = static_cast<std::size_t>(micro_batch);
  const Task* task = m < by_micro_batch.size() ? by_micro_batch[m] : nullptr;
  const std::size_t pieces = task == nullptr ? 0 : ends.first[static_cast<std::size_t>(task->first_call) + 1];
  return pieces == 0 ? infinite : ends.times[pieces - 1];
}

}  // namespace

std::optional<SteadyState> find_steady_state(std::span<const Program> programs, std::span<const CallEnds> ends,
                                             int first, int end, int window, int period, bool every_rank) {
  constexpr double rounding = 1e-9;
  std::vector<Tasks> tasks;
  for (const Program& program : programs) tasks.push_back(tasks_of(program));
  const auto bottleneck =
      static_cast<std::size_t>(std::ranges::find_if(ends, &CallEnds::is_bottleneck) - ends.begin());
  if (std::ranges::any_of(tasks, &Tasks::empty)) return std::nullopt;
  for (int multiple = period; end - window - multiple >= std::max(first, 0); multiple += period) {
    const int begin = end - window - multiple;
    const auto are_of_rank = [&](std::size_t rank, Apart apart) {
      return are(apart, programs[rank], ends[rank], tasks[rank], begin, begin + window, multiple);
    };
    const Seconds later = first_end(ends[bottleneck], tasks[bottleneck], begin + multiple) -
                          first_end(ends[bottleneck], tasks[bottleneck], begin);
    if (!(later > Seconds(0.0))) continue;
    const Apart equal{.least = later * (1 - rounding), .most = later * (1 + rounding)};
    bool holds = are_of_rank(bottleneck, equal);
    for (std::size_t rank = 0; rank < programs.size() && holds; ++rank)
      holds = are_of_rank(rank, {.least = every_rank ? equal.least : Seconds(0.0) - infinite, .most = equal.most});
    if (holds) return SteadyState{.period = multiple, .later = later};
  }
  return std::nullopt;
}

}  // namespace parplan
