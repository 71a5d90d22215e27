#include "runtime/group_table.h"

#include <algorithm>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

GroupTable::GroupTable(const std::vector<Program>& programs) {
  std::vector<std::vector<int>> known;
  for (const Program& program : programs) {
    for (const Group& group : program.groups)
      if (group.ranks.size() > 1) known.push_back(group.ranks);
    for (const int next : program.group(next_stage)) {
      routes_.push_back({.source = program.rank, .destination = next, .channel = to_next});
      routes_.push_back({.source = next, .destination = program.rank, .channel = to_previous});
    }
  }
  std::sort(known.begin(), known.end());
  known.erase(std::unique(known.begin(), known.end()), known.end());
  for (std::size_t i = 0; i < known.size(); ++i) groups_.push_back({.id = static_cast<int>(i), .ranks = known[i]});
  std::sort(routes_.begin(), routes_.end());
}

int GroupTable::id_of(const std::vector<int>& ranks) const {
  const auto found = std::ranges::find(groups_, ranks, &CommunicationGroup::ranks);
  PARPLAN_ASSERT(found != groups_.end(), fmt::format("no group of {} ranks", ranks.size()));
  return found->id;
}

}  // namespace parplan
