#pragma once

#include <string>

#include "planner/base/json.h"
#include "planner/calibrate/fit_calibration.h"

namespace parplan {

// For people: the shares and how well the steps tell them, and each step before and after, part by
// part where there is one.
std::string describe(const CalibrationFit& fit);

// The value of `calibration` in simulate's JSON (docs/json.md).
Json calibration_json(const CalibrationFit& fit);

}  // namespace parplan
