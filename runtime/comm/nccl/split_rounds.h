#pragma once

#include <vector>

namespace parplan {

// Distributes sets of ranks over rounds so that the sets of a round are disjoint: one split of the world's communicator
// then makes them all. Each set goes to the first round that has room. Returns the round of each set, in the sets' order.
std::vector<int> split_rounds(const std::vector<std::vector<int>>& sets, int ranks);

}  // namespace parplan
