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

// Letters: p stages, M micro-batches; f_s and b_s the times of stage s, c_s = f_s + b_s; k_s = min(p - s, M) the
// forwards that stage s runs before its first backward; D_s = sum_{j>s} c_j the way from stage s down and back.
//   T = max over s of  sum_{j<s} c_j + fill_s + (M - k_s) c_s + drain_s        fill_s  = max(k_s f_s, f_s + D_s)
//                                                                           drain_s = max(k_s b_s, b_s + D_s)
// Each is the length of a path that every run must take. Stage s gets its first input after sum_{j<s} f_j, and its last
// gradient has sum_{j<s} b_j to go. From its first forward to its first backward it runs k_s forwards, and the first
// micro-batch must go down and back; then it has M - k_s forwards and as many backwards to do; its last forward is
// followed by k_s backwards, and that micro-batch too must go down and back. With M = k_s there is no steady part
// between, and only one of the two ways down and back counts:
//   max(k_s c_s, D_s + f_s + k_s b_s, D_s + k_s f_s + b_s).
// Equal stages: every stage gives (M + p - 1)(f + b), a bubble of (p - 1)(f + b), which is exact. Unequal stages: the
// steady rate is exact (one micro-batch per max c_s); a path that turns back more than once can be longer, but is only
// where stages are very unlike: none was for forwards and backwards drawn apart, each within a factor of 1.5, and
// within a factor of 2 the schedule took 0.1% longer on average (tests/planner/schedule holds both).
Seconds one_f_one_b_time(std::span<const Seconds> forward, std::span<const Seconds> backward, int micro_batches) {
  PARPLAN_ASSERT(!forward.empty() && forward.size() == backward.size() && micro_batches >= 1,
                 fmt::format("{} forwards, {} backwards, {} micro-batches", forward.size(), backward.size(), micro_batches));
  const int stages = static_cast<int>(forward.size());
  Seconds before, after, longest;
  for (std::size_t s = 0; s < forward.size(); ++s) after += forward[s] + backward[s];
  for (int s = 0; s < stages; ++s) {
    const Seconds f = forward[static_cast<std::size_t>(s)], b = backward[static_cast<std::size_t>(s)];
    const int k = std::min(stages - s, micro_batches);
    after -= f + b;
    const Seconds own = micro_batches > k
                            ? std::max(k * f, f + after) + (micro_batches - k) * (f + b) + std::max(k * b, b + after)
                            : std::max({k * (f + b), after + f + k * b, after + k * f + b});
    longest = std::max(longest, before + own);
    before += f + b;
  }
  return longest;
}

int one_f_one_b_in_flight(int stage, int stages, int micro_batches) { return std::min(stages - stage, micro_batches); }

}  // namespace parplan
