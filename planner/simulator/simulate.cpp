#include "planner/simulator/simulate.h"

#include "planner/simulator/critical_path.h"
#include "planner/simulator/play_calls.h"
#include "planner/simulator/simulation_results.h"
#include "planner/simulator/simulation_state.h"

namespace parplan {

StepResult simulate(std::span<const Program> programs, std::span<const CostModel> models, Timeline* timeline,
                    StepDetails* details) {
  const bool by_call = timeline != nullptr || details != nullptr;
  Simulation simulation =
      prepare(programs, models, by_call ? CallsInARow::apart : CallsInARow::joined, details != nullptr);
  const StepResult result = play_step(simulation, details);
  if (timeline != nullptr) write(simulation, *timeline);
  return result;
}

StepResult play_step(Simulation& simulation, StepDetails* details) {
  play_calls(simulation);
  if (details != nullptr) *details = {.ranks = rank_results(simulation), .critical_path = critical_path(simulation)};
  return result_of(simulation);
}

}  // namespace parplan
