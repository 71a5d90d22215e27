#include "planner/simulator/simulate.h"

#include "planner/simulator/critical_path.h"
#include "planner/simulator/play_calls.h"
#include "planner/simulator/simulation_results.h"
#include "planner/simulator/simulation_state.h"

namespace parplan {

StepResult simulate(std::span<const Program> programs, std::span<const CostModel> models, Timeline* timeline,
                    StepDetails* details, std::vector<CallEnds>* ends) {
  Simulation simulation = prepare(programs, models, details != nullptr);
  play_calls(simulation);
  if (timeline != nullptr) write(simulation, *timeline);
  if (details != nullptr) *details = {.ranks = rank_results(simulation), .critical_path = critical_path(simulation)};
  if (ends != nullptr) *ends = call_ends(simulation);
  return result_of(simulation);
}

}  // namespace parplan
