#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace parplan {

// Distributes sets of ranks over rounds so that the sets of a round are disjoint: one split of a
// communicator then makes them all. Each set goes to the first round in which its ranks are free.
// Returns the round of each set.
inline std::vector<int> split_rounds(const std::vector<std::vector<int>>& sets, int ranks) {
  std::vector<std::vector<bool>> taken;  // by round and rank
  std::vector<int> rounds;
  for (const std::vector<int>& set : sets) {
    const auto has_room = [&](const std::vector<bool>& round) {
      return std::none_of(set.begin(), set.end(), [&](int rank) { return round[rank]; });
    };
    auto round = std::find_if(taken.begin(), taken.end(), has_room);
    if (round == taken.end()) round = taken.insert(taken.end(), std::vector<bool>(static_cast<std::size_t>(ranks)));
    for (const int rank : set) (*round)[rank] = true;
    rounds.push_back(static_cast<int>(round - taken.begin()));
  }
  return rounds;
}

}  // namespace parplan
