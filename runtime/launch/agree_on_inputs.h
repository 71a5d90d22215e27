#pragma once

#include <functional>
#include <span>
#include <string>

#include "planner/base/error.h"
#include "runtime/launch/rendezvous.h"

namespace parplan {

// An error that another process of the job reports: this process ends as it would have, silently.
class SaidElsewhere : public ConfigError {
 public:
  using ConfigError::ConfigError;
};

// An error of which all processes of the job know, and which this one reports.
class SaidForAll : public ConfigError {
 public:
  explicit SaidForAll(const ConfigError& error) : ConfigError(error) {}
};

// Every process checks its own inputs by `check`; when one refuses them (ConfigError), none
// continues. Process 0 throws what all have to say (SaidForAll), once, with the numbers of the
// processes where it does not hold for all; the others throw SaidElsewhere. Called by every
// process.
void agree(Rendezvous& rendezvous, const std::function<void()>& check);

// Something that all processes of a job must have alike: "learning rate", "0.0003".
struct Fact {
  std::string name;
  std::string value;
  bool operator==(const Fact&) const = default;
};

// Returns when all processes have the same facts. Otherwise none continues: process 0 throws
// SaidForAll, which says what differs, in which processes, with the values (rank r is process r),
// and the others throw SaidElsewhere. Called by every process.
void agree_on(Rendezvous& rendezvous, std::span<const Fact> facts);

}  // namespace parplan
