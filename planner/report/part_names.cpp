#include "planner/report/part_names.h"

#include <array>
#include <vector>

namespace parplan {
namespace {

struct AxisWords {
  const char* communication;
  const char* parallelism;
};
constexpr std::array<AxisWords, count_of<Axis>> axis_words = {{
    {"transfers between stages", "between stages"},
    {"data-parallel communication", "data parallelism"},
    {"context-parallel communication", "context parallelism"},
    {"expert-parallel communication", "expert parallelism"},
    {"tensor-parallel communication", "tensor parallelism"},
}};

std::vector<TimePart> make_time_parts() {
  std::vector<TimePart> parts = {{"compute", Label::compute}, {"recompute", Label::recompute}};
  for (const Axis axis : inner_axes_first)
    if (is_planned(axis)) parts.push_back({communication_words(axis), label_of(axis)});
  parts.push_back({"bubble", std::nullopt});
  parts.push_back({"optimizer", Label::optimizer});
  parts.push_back({"copies to and from host memory and NVMe", Label::offload});
  return parts;
}

std::vector<CommunicationPart> make_communication_parts() {
  std::vector<CommunicationPart> parts;
  for (const Axis axis : inner_axes_first)
    if (is_planned(axis)) parts.push_back({axis_words[index_of(axis)].parallelism, axis});
  return parts;
}

constexpr std::array memory_rows = {
    MemoryPart{"parameters", &MemoryUse::parameters},
    MemoryPart{"gradients", &MemoryUse::gradients},
    MemoryPart{"optimizer state", &MemoryUse::optimizer},
    MemoryPart{"activations", &MemoryUse::activations},
    MemoryPart{"buffers", &MemoryUse::buffers},
    MemoryPart{"libraries (outside the arena)", &MemoryUse::overhead},
    MemoryPart{"kept by the allocator", &MemoryUse::reserve},
};

}  // namespace

const char* communication_words(Axis axis) { return axis_words[index_of(axis)].communication; }

Seconds& part_of(StepTime& time, const TimePart& part) { return part.label ? time.part(*part.label) : time.bubble; }
Seconds part_of(const StepTime& time, const TimePart& part) {
  StepTime copy = time;
  return part_of(copy, part);
}

std::span<const TimePart> time_parts() {
  static const std::vector<TimePart> parts = make_time_parts();
  return parts;
}
std::span<const MemoryPart> memory_parts() { return memory_rows; }
std::span<const CommunicationPart> communication_parts() {
  static const std::vector<CommunicationPart> parts = make_communication_parts();
  return parts;
}

}  // namespace parplan
