#pragma once

#include <span>
#include <string_view>

#include "planner/plan/step.h"

namespace parplan {

// The parts of a result with the names that people read, in the order in which they are shown.
struct TimePart {
  std::string_view name;
  Seconds StepTime::* part;
};
std::span<const TimePart> time_parts();

struct MemoryPart {
  std::string_view name;
  Bytes MemoryUse::* part;
};
std::span<const MemoryPart> memory_parts();

struct CommunicationPart {
  std::string_view name;
  Bytes CommunicationVolume::* part;
};
std::span<const CommunicationPart> communication_parts();

}  // namespace parplan
