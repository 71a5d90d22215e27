#pragma once

#include <functional>

#include "planner/base/error.h"
#include "runtime/launch/rendezvous.h"

namespace parplan {

// What another process of the job says already: this one ends as it would have, and says nothing.
class SaidElsewhere : public ConfigError {
 public:
  using ConfigError::ConfigError;
};

// Every process checks its inputs where it is, by `check`; when one refuses them (ConfigError),
// none goes on. Process 0 throws what all have to say, once, and with the processes it holds for
// where it does not hold for all; the others throw SaidElsewhere. Called by every process.
void agree(Rendezvous& rendezvous, const std::function<void()>& check);

}  // namespace parplan
