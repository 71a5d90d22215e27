#include "runtime/group_table.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

GroupTable::GroupTable(const std::vector<Program>& programs) {
  std::set<std::vector<int>> several;
  std::set<GroupKey> neighbours;
  for (const Program& program : programs)
    for (const Group& group : program.groups) {
      if (group.ranks.size() > 1) several.insert(group.ranks);
      if (is_neighbour(group.key)) neighbours.insert(group.key);
    }
  for (const std::vector<int>& ranks : several)
    groups_.push_back({.id = static_cast<int>(groups_.size()), .ranks = ranks});
  channels_.assign(neighbours.begin(), neighbours.end());
  for (const Program& program : programs)
    for (const Group& group : program.groups)
      if (is_neighbour(group.key))
        routes_.push_back(
            {.source = program.rank, .destination = group.ranks.front(), .channel = channel_to(group.key)});
  std::ranges::sort(routes_);
}

int GroupTable::channel_to(GroupKey neighbour) const {
  const auto found = std::ranges::find(channels_, neighbour);
  PARPLAN_ASSERT(found != channels_.end(), fmt::format("no rank has the neighbour '{}'", name(neighbour)));
  return static_cast<int>(found - channels_.begin());
}

int GroupTable::id_of(const std::vector<int>& ranks) const {
  const auto found = std::ranges::find(groups_, ranks, &CommunicationGroup::ranks);
  PARPLAN_ASSERT(found != groups_.end(), fmt::format("no group of {} ranks", ranks.size()));
  return found->id;
}

}  // namespace parplan
