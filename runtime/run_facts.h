#pragma once

#include <string_view>
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

// What a checkpoint says of the training that wrote it: the plan's, and the data's.
std::vector<Fact> checkpoint_facts(const Plan& plan, const TokenData& data);
// Whether a run that goes on from a checkpoint needs the same value.
bool has_to_match(std::string_view fact);
// What a checkpoint holds that does not say it: "absent", or what everybody did before it was a
// choice.
std::string_view value_before(std::string_view fact);

// The number of tokens, and the fingerprint of all of them; not where they were read from.
std::vector<Fact> data_facts(const TokenData& data);

}  // namespace parplan
