#include "planner/explain/neighbours.h"

#include <array>
#include <string>
#include <utility>

#include "planner/parallel/techniques.h"
#include "planner/search/space_rows.h"

namespace parplan {
namespace {

// The order in which they are tried.
constexpr std::array neighbour_choices = {Choice::recompute, Choice::zero_stage,   Choice::sequence_parallel,
                                          Choice::schedule,  Choice::stage_blocks, Choice::micro_batch};

std::vector<std::pair<std::string, ParallelSpec>> specs_one_choice_away(const OpGraph& graph, const Plan& plan) {
  std::vector<std::pair<std::string, ParallelSpec>> specs;
  const SpaceContext context{graph, plan.training, plan.spec.mesh.size()};
  for (const ChoiceRow* choice : choice_rows(neighbour_choices)) {
    const SpaceRow& space = space_row_of(choice->choice);
    if (!space.neighbours) continue;
    for (const ChoiceValue& value : space.neighbours(space, context, plan.spec)) {
      ParallelSpec spec = plan.spec;
      choice->set(spec, value);
      if (spec == plan.spec || illegal(graph, plan.training, spec)) continue;
      specs.emplace_back(space.neighbour.empty() ? phrase(*choice, value) : std::string(space.neighbour),
                         std::move(spec));
    }
  }
  return specs;
}

}  // namespace

std::vector<Neighbour> find_neighbours(const ExplainedPlan& explained, NetworkCache& networks) {
  std::vector<Neighbour> neighbours;
  for (auto& [change, spec] : specs_one_choice_away(explained.graph, explained.plan)) {
    explained.say("one choice away: " + change);
    neighbours.push_back(
        {.change = change,
         .rival = rival(networks.cluster(), explained.simulated(networks, explained.plan.training, spec))});
  }
  return neighbours;
}

}  // namespace parplan
