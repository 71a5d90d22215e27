#pragma once

#include <vector>

#include "planner/explain/inquiry.h"
#include "planner/plan/explanation.h"

namespace parplan {

// Layouts one choice away that are legal, simulated.
std::vector<Neighbour> find_neighbours(const Inquiry& inquiry, NetworkCache& networks);

}  // namespace parplan
