#pragma once

#include <vector>

#include "planner/program/program.h"
#include "runtime/comm/communicator.h"

namespace parplan {

// Numbers of the communicator's groups and channels, equal on all ranks of a job.
class GroupTable {
 public:
  explicit GroupTable(const std::vector<Program>& programs);
  const std::vector<CommunicationGroup>& groups() const { return groups_; }
  const std::vector<SendRoute>& routes() const { return routes_; }
  int id_of(const std::vector<int>& ranks) const;

  // Sends to the next rank of an axis have a channel, and sends to the previous one another.
  int channel_to(GroupKey neighbour) const;
  int channels() const { return static_cast<int>(channels_.size()); }

 private:
  std::vector<CommunicationGroup> groups_;
  std::vector<GroupKey> channels_;  // the neighbours that some rank has, ascending
  std::vector<SendRoute> routes_;
};

}  // namespace parplan
