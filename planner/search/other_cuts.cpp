#include "planner/search/other_cuts.h"

#include <cstddef>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "planner/base/parallel_for.h"
#include "planner/plan/spec_hash.h"

namespace parplan {
namespace {

// Places of a block on a stage, over layouts: up to the first number, all layouts are looked at.
constexpr std::int64_t few_places = 16'384, most_places = 262'144;
constexpr std::size_t most_cuts_in_all = 1024;

}  // namespace

// The least bound first.
std::vector<OtherCuts::Layout> OtherCuts::promising() const {
  std::vector<Layout> open;
  for (const auto& [place, layout] : layouts_)
    open.push_back(
        {.layout = &layout, .place = place, .bound = simulator_.score_of(layout.spec, layout.time, {})});
  const Score best = *best_score(search_);
  std::erase_if(open, [&](const Layout& one) { return one.bound >= best; });
  std::ranges::stable_sort(open, {}, [](const Layout& one) { return std::pair(one.bound, one.place); });
  return open;
}

// One of those that differ in their groups of shards and the order of their axes alone, which bear
// little on how well a cut suits a layout: the fastest that was simulated, else that of the least
// bound. The others are left.
std::vector<OtherCuts::Layout> OtherCuts::one_of_each(std::vector<Layout> open) {
  std::unordered_map<ParallelSpec, double, SpecHash> scores;  // by layout
  for (const Ranked& one : simulator_.simulated()) {
    const auto [score, is_new] = scores.try_emplace(trials_.layout_of(one.plan.spec), one.score.first);
    if (!is_new) score->second = std::min(score->second, one.score.first);
  }
  std::ranges::stable_sort(open, {}, [&](const Layout& one) {
    const auto score = scores.find(one.layout->spec);
    return score == scores.end() ? std::numeric_limits<double>::infinity() : score->second;
  });
  std::vector<Layout> kept;
  std::unordered_set<ParallelSpec, SpecHash> known;
  for (const Layout& one : open) {
    ParallelSpec key = one.layout->spec;
    key.mesh.order = ParallelSpec().mesh.order;
    key.mesh.dp_shard = 0;
    if (known.insert(std::move(key)).second)
      kept.push_back(one);
    else
      leave(one.bound.first);
  }
  std::ranges::stable_sort(kept, {}, [](const Layout& one) { return std::pair(one.bound, one.place); });
  return kept;
}

void OtherCuts::try_all() {
  if (!best_score(search_) || space_.objective == Objective::memory) return;
  std::vector<Layout> open = promising();
  const auto places_of = [&](const Layout& one) {
    return one.layout->spec.stages() * static_cast<std::int64_t>(space_.graph.blocks.size());
  };
  std::int64_t all_places = 0;
  for (const Layout& one : open) all_places += places_of(one);
  if (all_places > few_places) open = one_of_each(std::move(open));
  const bool may_simulate = !options_.most_simulated || *options_.most_simulated > simulator_.count();
  std::size_t looked_at = 0;
  for (std::int64_t places = 0; may_simulate && looked_at < open.size(); ++looked_at)
    if ((places += places_of(open[looked_at])) > most_places) break;
  for (std::size_t i = looked_at; i < open.size(); ++i) leave(open[i].bound.first);
  open.resize(looked_at);
  if (open.empty()) return;
  const double best = best_score(search_)->first;
  const std::size_t most = std::clamp<std::size_t>(most_cuts_in_all / open.size(), 16, most_cuts_in_all);
  parallel_for(static_cast<int>(makers_.size()), open.size(), [&](int thread, std::size_t i) {
    const ParallelSpec& spec = open[i].layout->spec;
    open[i].below = makers_[static_cast<std::size_t>(thread)]->cuts_below(
        spec, mixes_, Seconds(best / simulator_.score_of_second(spec)), most);
  });
  std::vector<Variant> variants;
  for (std::size_t i = 0; i < open.size(); ++i) {
    leave(simulator_.score_of_second(open[i].layout->spec) *
          std::max(open[i].below.rest, open[i].layout->time).value);
    for (const Candidate& candidate : open[i].below.candidates)
      variants.push_back({.bound = simulator_.bound_of(candidate),
                          .place = variant_place + variants.size(),
                          .candidate = &candidate,
                          .layout = i});
  }
  std::vector<std::optional<double>> above(open.size());
  for (const Variant& one : trials_.run(std::move(variants), std::move(above), VariantsOf::one_layout))
    leave(one.bound.first);
}

}  // namespace parplan
