#include "planner/explain/best_among.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "planner/search/best_first.h"

namespace parplan {

std::optional<BestAmong> best_among(const ExplainedPlan& explained, CandidateMaker& maker,
                                    std::span<const ParallelSpec> specs) {
  NetworkCache& networks = maker.estimator().networks();
  const Cluster& cluster = networks.cluster();
  const MadeCandidates made = make_candidates(std::array{&maker}, specs, true);
  if (made.fitting.empty()) {
    if (!made.smallest) return std::nullopt;
    return BestAmong{.rival = rival(cluster, maker.with_times(*made.smallest))};
  }
  const auto counted = [&](const ParallelSpec& spec, Seconds time, const MemoryUse& memory) {
    return score(explained.objective(), cluster, spec, time, memory);
  };
  std::vector<Open> open;
  for (const Candidate& candidate : made.fitting)
    open.push_back({.bound = counted(candidate.spec, candidate.bound.lower_bound, candidate.bound.memory),
                    .candidate = &candidate,
                    .mesh = &candidate.spec.mesh});
  // The least bound is the best among equal scores.
  std::ranges::stable_sort(open, {}, &Open::bound);
  for (std::size_t place = 0; place < open.size(); ++place) open[place].place = place;
  BestFirst search;
  add(search, open);
  const auto simulate = [&](std::span<const Open> turns) {
    std::vector<Ranked> ranked;
    for (const Open& turn : turns) {
      RankedPlan plan = explained.simulated(networks, explained.plan.training, turn.candidate->spec);
      const Score score = counted(plan.spec, plan.result.time.total(), plan.result.memory);
      ranked.push_back({.score = score, .place = turn.place, .plan = std::move(plan)});
    }
    return ranked;
  };
  const auto room = [&] { return std::min<std::int64_t>(explained.options.most_simulated - search.simulated, 1); };
  run(search, {.look_into = {}, .room = room, .is_new = {}, .simulate = simulate});
  return BestAmong{.rival = rival(cluster, std::move(search.best.front().plan)), .certified = is_certified(search)};
}

}  // namespace parplan
