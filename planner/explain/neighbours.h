#pragma once

#include <vector>

#include "planner/explain/inquiry.h"
#include "planner/plan/explanation.h"

namespace parplan {

// The legal layouts one choice away, simulated.
std::vector<Neighbour> find_neighbours(const Inquiry& inquiry, NetworkCache& networks);

}  // namespace parplan
