#include "planner/simulator/steady.h"

#include <array>
#include <cmath>
#include <vector>

#include "planner/base/enum.h"

namespace parplan {
namespace {

// The tasks of a Program by micro-batch, forwards and backwards.
std::array<std::vector<const Task*>, 2> tasks_of(const Program& program) {
  std::array<std::vector<const Task*>, 2> tasks;
  for (const Task& task : program.tasks) {
    if (!task.action) continue;
    std::vector<const Task*>& of_phase = tasks[index_of(task.action->phase)];
    const auto m = static_cast<std::size_t>(task.action->micro_batch);
    if (of_phase.size() <= m) of_phase.resize(m + 1, nullptr);
    of_phase[m] = &task;
  }
  return tasks;
}

}  // namespace

std::optional<double> steady_seconds(std::span<const Program> programs, std::span<const CallEnds> ends, int first,
                                     int window, int period) {
  std::optional<double> later;
  for (std::size_t s = 0; s < programs.size(); ++s) {
    const Program& program = programs[s];
    for (const std::vector<const Task*>& tasks : tasks_of(program))
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
          for (std::size_t i = ends[s].first[a], j = ends[s].first[b]; i < ends[s].first[a + 1]; ++i, ++j) {
            const double difference = ends[s].seconds[j] - ends[s].seconds[i];
            if (!later) later = difference;
            if (std::abs(difference - *later) > 1e-9 * *later) return std::nullopt;
          }
        }
      }
  }
  return later;
}

}  // namespace parplan
