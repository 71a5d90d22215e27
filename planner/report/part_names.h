#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "planner/plan/step_result.h"

namespace parplan {

// The parts of a result with their names for people, in the order in which they are shown.
struct TimePart {
  std::string_view name;
  std::optional<Label> label;  // nothing: the bubble
};
Seconds& part_of(StepTime& time, const TimePart& part);
Seconds part_of(const StepTime& time, const TimePart& part);
// "tensor-parallel communication", "transfers between stages".
const char* communication_words(Axis axis);
std::span<const TimePart> time_parts();

struct MemoryPart {
  std::string_view name;
  Bytes MemoryUse::* part;
};
std::span<const MemoryPart> memory_parts();

struct CommunicationPart {
  std::string_view name;
  Axis axis{};
};
std::span<const CommunicationPart> communication_parts();

}  // namespace parplan
