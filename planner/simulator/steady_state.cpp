#include "planner/simulator/steady_state.h"

#include <cmath>
#include <map>
#include <utility>
#include <vector>

namespace parplan {
namespace {

// The tasks of a Program by micro-batch, for each stage and phase.
std::map<std::pair<int, Phase>, std::vector<const Task*>> tasks_of(const Program& program) {
  std::map<std::pair<int, Phase>, std::vector<const Task*>> tasks;
  for (const Task& task : program.tasks) {
    if (!task.action) continue;
    std::vector<const Task*>& of_phase = tasks[{task.action->stage, task.action->phase}];
    const auto m = static_cast<std::size_t>(task.action->micro_batch);
    if (of_phase.size() <= m) of_phase.resize(m + 1, nullptr);
    of_phase[m] = &task;
  }
  return tasks;
}

}  // namespace

std::optional<Seconds> steady_seconds(std::span<const Program> programs, std::span<const CallEnds> ends, int first,
                                      int window, int period) {
  std::optional<Seconds> later;
  for (std::size_t r = 0; r < programs.size(); ++r) {
    const Program& program = programs[r];
    for (const auto& [stage_and_phase, tasks] : tasks_of(program))
      for (int m = first; m < first + window; ++m) {
        if (m < 0 || static_cast<std::size_t>(m + period) >= tasks.size()) return std::nullopt;
        const Task* one = tasks[m];
        const Task* other = tasks[m + period];
        if (one == nullptr || other == nullptr ||
            one->last_call - one->first_call != other->last_call - other->first_call)
          return std::nullopt;
        for (int c = 0; c < one->last_call - one->first_call; ++c) {
          const auto a = static_cast<std::size_t>(one->first_call + c),
                     b = static_cast<std::size_t>(other->first_call + c);
          if (program.calls[a].segment != program.calls[b].segment) return std::nullopt;
          // One of them may have been played as one piece, the other instruction by instruction.
          if (ends[r].first[a + 1] - ends[r].first[a] != ends[r].first[b + 1] - ends[r].first[b]) return std::nullopt;
          for (std::size_t i = ends[r].first[a], j = ends[r].first[b]; i < ends[r].first[a + 1]; ++i, ++j) {
            const Seconds difference = ends[r].times[j] - ends[r].times[i];
            if (!later) later = difference;
            if (std::abs((difference - *later).value) > 1e-9 * later->value) return std::nullopt;
          }
        }
      }
  }
  return later;
}

}  // namespace parplan
