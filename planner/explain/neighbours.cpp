#include "planner/explain/neighbours.h"

#include <array>
#include <deque>
#include <string>
#include <utility>

#include "planner/parallel/techniques.h"
#include "planner/search/parallel_for.h"
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
  std::deque<NetworkCache> networks;  // by thread
  for (int thread = 0; thread < explained.threads(); ++thread)
    networks.emplace_back(plan.cluster, plan.training.engine);
  std::vector<Neighbour> neighbours(specs.size());
  parallel_for(explained.threads(), specs.size(), [&](int thread, std::size_t i) {
    const auto& [change, spec] = specs[i];
    explained.say("one choice away: " + change);
    const RankedPlan simulated = explained.simulated(networks[static_cast<std::size_t>(thread)], plan.training, spec);
    neighbours[i] = {.change = change, .rival = rival(plan.cluster, simulated)};
  });
  return neighbours;
}

}  // namespace parplan
