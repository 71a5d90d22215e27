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

// An order of the same for ranks that hold several stages, in which every action finds its input:
// what does not run lacks a buffer.
inline Schedule random_orders_of_several(std::vector<int> rank_of_stage, int micro_batches, std::mt19937& random,
                                         Backwards backwards = Backwards::in_parts) {
  const int stages = static_cast<int>(rank_of_stage.size()), ranks = 1 + std::ranges::max(rank_of_stage);
  Schedule schedule{.rank_of_stage = std::move(rank_of_stage),
                    .ranks = std::vector<std::vector<Action>>(static_cast<std::size_t>(ranks))};
  struct Counts {
    int forward = 0, backward = 0, weights = 0;
  };
  std::vector<Counts> done(static_cast<std::size_t>(stages));
  const unsigned eagerness = 1 + random() % 4, haste = random() % 4;  // for backwards, for their second parts
  for (int left = 2 * stages * micro_batches; left > 0;) {
    const int stage = static_cast<int>(random() % static_cast<unsigned>(stages));
    Counts& own = done[static_cast<std::size_t>(stage)];
    std::vector<Action>& actions = schedule.ranks[static_cast<std::size_t>(schedule.rank_of_stage[stage])];
    if (own.weights < own.backward && random() % 5 < haste) {
      actions.push_back({stage, Phase::backward_weights, own.weights++});
      continue;
    }
    const bool goes_back = random() % 5 < eagerness;
    const auto at = static_cast<std::size_t>(stage);
    if (goes_back && own.backward < own.forward && (stage + 1 == stages || done[at + 1].backward > own.backward)) {
      const bool in_parts = backwards == Backwards::in_parts && (own.weights < own.backward || random() % 2 == 0);
      actions.push_back({stage, in_parts ? Phase::backward_inputs : Phase::backward, own.backward++});
      if (!in_parts) ++own.weights;
      --left;
    } else if (!goes_back && own.forward < micro_batches && (stage == 0 || done[at - 1].forward > own.forward)) {
      actions.push_back({stage, Phase::forward, own.forward++});
      --left;
    }
  }
  for (int stage = 0; stage < stages; ++stage)
    for (Counts& own = done[static_cast<std::size_t>(stage)]; own.weights < own.backward;)
      schedule.ranks[static_cast<std::size_t>(schedule.rank_of_stage[stage])].push_back(
          {stage, Phase::backward_weights, own.weights++});
  return schedule;
}

// The same for two stages on each rank, down the ranks and back.
inline Schedule random_v_orders(int ranks, int micro_batches, std::mt19937& random) {
  std::vector<int> rank_of_stage;
  for (int stage = 0; stage < 2 * ranks; ++stage) rank_of_stage.push_back(v_rank(stage, ranks));
  return random_orders_of_several(std::move(rank_of_stage), micro_batches, random);
}

}  // namespace parplan
