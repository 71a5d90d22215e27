#include "planner/explain/neighbours.h"

#include <array>
#include <deque>
#include <optional>
#include <string>
#include <utility>

#include "planner/base/parallel_for.h"
#include "planner/parallel/techniques.h"
#include "planner/search/candidates.h"
#include "planner/search/space_rows.h"

namespace parplan {
namespace {

// The order in which they are tried.
constexpr std::array neighbour_choices = {Choice::recompute,         Choice::zero_stage, Choice::dp_shard,
                                          Choice::sequence_parallel, Choice::schedule,   Choice::stage_blocks,
                                          Choice::micro_batch};

std::vector<std::pair<std::string, ParallelSpec>> specs_one_choice_away(const OpGraph& graph, const Plan& plan) {
  std::vector<std::pair<std::string, ParallelSpec>> specs;
  const SpaceContext context{graph, plan.training, plan.spec.mesh.size()};
  for (const ChoiceRow* choice : choice_rows(neighbour_choices)) {
    const SpaceRow& space = space_row_of(choice->choice);
    if (!space.neighbours) continue;
    for (const ChoiceValue& value : space.neighbours(space, context, plan.spec)) {
      ParallelSpec spec = plan.spec;
      choice->set(spec, value);
      for (const ChoiceRow& row : choice_rows())
        if (row.applies && !row.applies(spec)) row.set(spec, row.get(ParallelSpec{}));
      if (spec == plan.spec || illegal(graph, plan.training, spec)) continue;
      specs.emplace_back(space.neighbour.empty() ? phrase(*choice, value) : std::string(space.neighbour),
                         std::move(spec));
    }
  }
  return specs;
}

}  // namespace

std::vector<Neighbour> find_neighbours(const ExplainedPlan& explained) {
  const Plan& plan = explained.plan;
  const std::vector<std::pair<std::string, ParallelSpec>> specs = specs_one_choice_away(explained.graph, plan);
  std::deque<CandidateMaker> makers;  // by thread
  for (int thread = 0; thread < explained.threads(); ++thread)
    makers.emplace_back(explained.graph, plan.cluster, plan.training, plan.search.objective, explained.shapes);
  std::vector<Neighbour> neighbours(specs.size());
  parallel_for(explained.threads(), specs.size(), [&](int thread, std::size_t i) {
    const auto& [change, spec] = specs[i];
    explained.say("one choice away: " + change);
    CandidateMaker& maker = makers[static_cast<std::size_t>(thread)];
    NetworkCache& networks = maker.estimator().networks();
    // The memory of an estimate is that of the schedule's own order.
    std::optional<Rival> estimated;
    if (!explained.has_own_order) estimated = rival(plan.cluster, maker.with_times(spec));
    neighbours[i] = {.change = change,
                     .rival = estimated && !estimated->fits()
                                  ? *std::move(estimated)
                                  : rival(plan.cluster, explained.simulated(networks, plan.training, spec))};
  });
  return neighbours;
}

}  // namespace parplan
