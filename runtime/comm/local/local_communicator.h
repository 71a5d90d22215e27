#pragma once

#include <memory>
#include <vector>

#include "runtime/comm/communicator.h"

namespace parplan {

// Ranks as threads of this process, on CPUs; fp32. It holds all shared state and is made before the
// threads start; no call allocates memory.
class LocalWorld {
 public:
  // Group ids are distinct. Channels of sends are numbered from 0 to channels - 1.
  LocalWorld(int ranks, const std::vector<CommunicationGroup>& groups, int channels = 1);
  ~LocalWorld();
  LocalWorld(const LocalWorld&) = delete;
  LocalWorld& operator=(const LocalWorld&) = delete;

  // The communicator of rank `rank`'s thread; valid as long as the world.
  Communicator& communicator(int rank);

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace parplan
