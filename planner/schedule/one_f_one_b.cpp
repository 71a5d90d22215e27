#include "planner/schedule/one_f_one_b.h"

#include <algorithm>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

Schedule one_f_one_b_actions(int stages, int micro_batches) {
  PARPLAN_ASSERT(stages >= 1 && micro_batches >= 1, fmt::format("{} stages, {} micro-batches", stages, micro_batches));
  Schedule schedule(static_cast<std::size_t>(stages));
  for (int s = 0; s < stages; ++s) {
    std::vector<Action>& actions = schedule[static_cast<std::size_t>(s)];
    const int warm_up = std::min(stages - 1 - s, micro_batches);
    for (int m = 0; m < warm_up; ++m) actions.push_back({s, Phase::forward, m});
    for (int m = warm_up; m < micro_batches; ++m) {
      actions.push_back({s, Phase::forward, m});
      actions.push_back({s, Phase::backward, m - warm_up});
    }
    for (int m = micro_batches - warm_up; m < micro_batches; ++m) actions.push_back({s, Phase::backward, m});
  }
  return schedule;
}

// Letters: p stages, M micro-batches, f_s and b_s the times of stage s, k_s = min(p - s, M) the forwards that
// stage s runs before its first backward.
//   T = max over s of  sum_{j<s} (f_j + b_j) + M (f_s + b_s)                                (never idle after filling)
//                      sum_j (f_j + b_j) + (M - k_s) f_s + (M - 1) b_s                      (idle before its first backward)
// Both are lengths of paths that any run must take. The first: stage s gets its first input after sum_{j<s} f_j, then
// has all its own work to do, and its last gradient has sum_{j<s} b_j to go. The second: its first gradient is there
// after sum_j f_j + sum_{j>s} b_j; by then it has run k_s forwards, M - k_s forwards and M backwards are left, and
// again sum_{j<s} b_j follows. Equal stages: the last one gives (M + p - 1)(f + b), a bubble of (p - 1)(f + b), which is
// exact. Unequal stages: exact where every backward is the same multiple of its forward; for forwards and backwards
// drawn apart (each within a factor of two) the schedule took up to 6.6% longer, 1 to 2% on average, shrinking
// with M. tests/planner/schedule holds both.
Seconds one_f_one_b_time(std::span<const Seconds> forward, std::span<const Seconds> backward, int micro_batches) {
  PARPLAN_ASSERT(!forward.empty() && forward.size() == backward.size() && micro_batches >= 1,
                 fmt::format("{} forwards, {} backwards, {} micro-batches", forward.size(), backward.size(), micro_batches));
  const int stages = static_cast<int>(forward.size());
  Seconds sum;
  for (std::size_t s = 0; s < forward.size(); ++s) sum += forward[s] + backward[s];
  Seconds before, longest;
  for (int s = 0; s < stages; ++s) {
    const Seconds f = forward[static_cast<std::size_t>(s)], b = backward[static_cast<std::size_t>(s)];
    const int first_forwards = std::min(stages - s, micro_batches);
    longest = std::max({longest, before + micro_batches * (f + b),
                        sum + (micro_batches - first_forwards) * f + (micro_batches - 1) * b});
    before += f + b;
  }
  return longest;
}

int one_f_one_b_in_flight(int stage, int stages, int micro_batches) { return std::min(stages - stage, micro_batches); }

}  // namespace parplan
