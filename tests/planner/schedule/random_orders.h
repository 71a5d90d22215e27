#pragma once

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "planner/plan/schedule.h"

namespace parplan {

// Whether every backward is one action, or each may be two.
enum class Backwards { whole, in_parts };

// An independent order of forwards and backwards for each stage: backwards ascend, each after its
// forward. Forwards have one order on all stages, except that with `crossing` each stage draws its
// own.
inline Schedule random_orders(int stages, int micro_batches, bool crossing, std::mt19937& random,
                              Backwards backwards = Backwards::whole) {
  std::vector<int> order(static_cast<std::size_t>(micro_batches));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::shuffle(order, random);
  std::vector<std::vector<Action>> ranks;
  for (int s = 0; s < stages; ++s) {
    if (crossing) std::ranges::shuffle(order, random);
    std::vector<Action>& actions = ranks.emplace_back();
    std::vector<bool> forward(order.size());
    const unsigned eagerness = 1 + random() % 4;  // for backwards
    const unsigned parts = backwards == Backwards::whole ? 0 : random() % 4, haste = random() % 4;
    std::size_t next = 0;
    for (int backward = 0, weights = 0; weights < micro_batches;) {
      if (weights < backward && (backward == micro_batches || random() % 5 < haste)) {
        actions.push_back({s, Phase::backward_weights, weights++});
        continue;
      }
      if (backward == micro_batches) continue;
      const bool may_go_back = forward[backward];
      if (next == order.size() || (may_go_back && random() % 5 < eagerness)) {
        const bool in_parts = weights < backward || random() % 4 < parts;
        actions.push_back({s, in_parts ? Phase::backward_inputs : Phase::backward, backward++});
        if (!in_parts) ++weights;
        continue;
      }
      forward[order[next]] = true;
      actions.push_back({s, Phase::forward, order[next++]});
    }
  }
  return one_stage_a_rank(std::move(ranks));
}

}  // namespace parplan
