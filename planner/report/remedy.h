#pragma once

#include <string>

#include "planner/base/json.h"
#include "planner/plan/reasons.h"

namespace parplan {

// "24 devices instead of 8 (dp1 tp8 pp3 mb1 1f1b pp>tp, 2.31 s a step, 78.1 GiB a device)"
std::string describe(const Remedy& remedy);

// An object of "changes" (docs/json.md). The row of its plan has no rank.
Json remedy_json(const Remedy& remedy);

}  // namespace parplan
