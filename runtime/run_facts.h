#pragma once

#include <vector>

#include "planner/plan/plan.h"
#include "runtime/launch/agree_on_inputs.h"
#include "runtime/run.h"
#include "runtime/token_data.h"

// What all processes of a job must have alike (agree_on): everything that decides what they compute
// and when they stop. A plan's prediction, search, alternatives and notes do not.
namespace parplan {

// The build, the options and the plan.
std::vector<Fact> run_facts(const Plan& plan, const RunOptions& options);

// The number of tokens, and the fingerprint of all of them; not where they were read from.
std::vector<Fact> data_facts(const TokenData& data);

}  // namespace parplan
