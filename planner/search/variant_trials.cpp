#include "planner/search/variant_trials.h"

#include <algorithm>
#include <span>
#include <utility>

namespace parplan {
namespace {

// Simulations, or as many calls as are little work; and calls that are played for bounds.
constexpr std::int64_t most_variants = 8, free_variant_calls = 100'000, most_played_for_variants = 4'194'304;

}  // namespace

std::vector<Variant> VariantTrials::run(std::vector<Variant> variants, std::vector<std::optional<double>> above,
                                        VariantsOf of) {
  const std::int64_t calls = simulator_.calls();
  std::int64_t tried = 0, played = 0;  // the latter for bounds, in calls
  // Among variants that are ranked as one plan, one rules out the others.
  const bool may_be_long = of == VariantsOf::one_layout && std::ranges::any_of(variants, [&](const Variant& one) {
    return CandidateSimulator::is_long(simulator_.all_calls(one.candidate->spec));
  });
  const auto promised = [&](const Variant& one) { return one.bound.first * above[one.layout].value_or(1.0); };
  const auto promises = [&](const Variant& one) { return std::pair(promised(one), one.place); };
  while (true) {
    const Score best = *best_score(search_);
    std::erase_if(variants, [&](const Variant& one) { return one.bound >= best; });
    const bool are_long = simulator_.are_long();
    const std::int64_t most = are_long ? simulator_.together(true) : most_variants;
    std::int64_t room = 0;
    if (options_.most_simulated)
      room = std::clamp<std::int64_t>(*options_.most_simulated - simulator_.count(), 0, simulator_.together(are_long));
    else if (tried < most || simulator_.calls() - calls < free_variant_calls)
      room = simulator_.together(are_long || may_be_long);
    const double limit = score_limit(search_).value_or(search_.best.empty() ? best : search_.best.back().score).first;
    room = std::min<std::int64_t>(room, std::ranges::count_if(variants, [&](const Variant& one) {
                                    return of == VariantsOf::one_layout || promised(one) < limit;
                                  }));
    if (room == 0) return variants;
    const auto end = variants.begin() + room;
    std::ranges::partial_sort(variants, end, {}, promises);
    bool are_sharp = true;
    for (auto one = variants.begin(); one != end; ++one)
      if (!std::exchange(one->is_sharp, true) && played < most_played_for_variants) {
        played += simulator_.all_calls(one->candidate->spec);
        const Score sharper = simulator_.sharpened(*one->candidate, one->bound);
        are_sharp = are_sharp && sharper == one->bound;
        one->bound = sharper;
      }
    if (!are_sharp) continue;
    std::vector<Open> together;
    std::vector<std::size_t> layout_of;
    for (auto one = variants.begin(); one != end; ++one) {
      if (!simulator_.take_if_new(*one->candidate)) continue;
      together.push_back({.bound = one->bound,
                          .place = one->place,
                          .candidate = one->candidate,
                          .mesh = &one->candidate->spec.mesh});
      layout_of.push_back(one->layout);
    }
    variants.erase(variants.begin(), end);
    tried_ += room;
    tried += static_cast<std::int64_t>(together.size());
    std::vector<Ranked> ranked = simulator_.simulate(together);
    for (std::size_t i = 0; i < ranked.size(); ++i) {
      const double ratio = ranked[i].score.first / together[i].bound.first;
      std::optional<double>& known = above[layout_of[i]];
      known = std::min(known.value_or(ratio), ratio);
      take(std::move(ranked[i]));
    }
  }
}

ParallelSpec VariantTrials::layout_of(ParallelSpec spec) const {
  const LayoutRequest& request = space_.request;
  if (!request[Choice::input_slots]) spec.input_slots = ParallelSpec().input_slots;
  if (!request[Choice::stage_blocks]) spec.stage_blocks.clear();
  if (!request[Choice::recompute]) spec.stage_recompute.clear();
  const bool chooses = spec.recompute == Recompute::per_stage || spec.recompute_layers > 0;
  if (chooses && !request[Choice::recompute] && !request[Choice::recompute_layers]) {
    spec.recompute = Recompute::none;
    spec.recompute_layers = 0;
  }
  return spec;
}

// A layout is ranked with its best cut.
void VariantTrials::take(Ranked&& one) {
  const auto ranked = std::ranges::find_if(search_.best, [&](const Ranked& other) {
    return layout_of(other.plan.spec) == layout_of(one.plan.spec);
  });
  if (ranked == search_.best.end())
    search_.best.push_back(std::move(one));
  else if (one.score < ranked->score)
    *ranked = std::move(one);
  rank(search_);
}

}  // namespace parplan
