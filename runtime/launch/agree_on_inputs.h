#pragma once

#include <functional>

#include "planner/base/error.h"
#include "runtime/launch/rendezvous.h"

namespace parplan {

// An error that another process of the job reports: this process ends as it would have, silently.
class SaidElsewhere : public ConfigError {
 public:
  using ConfigError::ConfigError;
};

// Every process checks its own inputs by `check`; when one refuses them (ConfigError), none
// continues. Process 0 throws what all have to say, once, with the numbers of the processes where
// it does not hold for all; the others throw SaidElsewhere. Called by every process.
void agree(Rendezvous& rendezvous, const std::function<void()>& check);

}  // namespace parplan
