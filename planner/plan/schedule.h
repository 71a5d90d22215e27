#pragma once

#include <optional>
#include <string>
#include <vector>

namespace parplan {

enum class Phase { forward, backward };

// One task of a pipeline stage: "2F0" is the forward of micro-batch 0 on stage 2.
struct Action {
  int stage = 0;
  Phase phase{};
  int micro_batch = 0;
  bool operator==(const Action&) const = default;
};
std::string write_action(const Action& action);
Action parse_action(const std::string& text);  // throws ConfigError

// What every stage does, in order, in one step.
using Schedule = std::vector<std::vector<Action>>;

// Checks that each stage runs each micro-batch forward and then backward exactly once, backwards in
// ascending order, and that the whole can run to its end when a forward waits for the stage before
// and a backward for the stage after. Gives what is wrong and where, nothing when all is well.
std::optional<std::string> find_fault(const Schedule& schedule, int micro_batches);

// The most micro-batches of which a stage holds activations at once.
int most_in_flight(const std::vector<Action>& stage);

}  // namespace parplan
