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

  static constexpr int to_next = 0;  // channels of sends
  static constexpr int to_previous = 1;
  static constexpr int channels = 2;

 private:
  std::vector<CommunicationGroup> groups_;
  std::vector<SendRoute> routes_;
};

}  // namespace parplan
