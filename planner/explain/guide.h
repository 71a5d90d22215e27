#pragma once

#include <span>

#include "planner/explain/inquiry.h"
#include "planner/plan/explanation.h"
#include "planner/search/candidates.h"

namespace parplan {

// The guides' rules as numbers; `neighbours` are the plan's.
Guide find_guide(const Inquiry& inquiry, CandidateMaker& maker, std::span<const Neighbour> neighbours);

}  // namespace parplan
