#include "planner/plan/step_result.h"

#include <array>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

constexpr std::array<const char*, count_of<Label>> label_names = {
    "compute", "recompute", "tensor", "expert", "context", "data", "pipeline", "optimizer", "offload"};

constexpr auto axes_of_labels = [] {
  std::array<std::optional<Axis>, count_of<Label>> axes;
  for (std::size_t i = 0; i < axes.size(); ++i) axes[i] = axis_of(static_cast<Label>(i));
  return axes;
}();

struct MemoryRow {
  MemoryCategory category;
  const char* name;
  Bytes MemoryUse::* part;
};
constexpr std::array<MemoryRow, static_cast<std::size_t>(MemoryCategory::count_)> memory_rows = {{
    {MemoryCategory::parameters, "parameters", &MemoryUse::parameters},
    {MemoryCategory::gradients, "gradients", &MemoryUse::gradients},
    {MemoryCategory::optimizer, "optimizer", &MemoryUse::optimizer},
    {MemoryCategory::activations, "activations", &MemoryUse::activations},
    {MemoryCategory::buffers, "buffers", &MemoryUse::buffers},
}};

const MemoryRow& row(MemoryCategory category) {
  const auto i = static_cast<std::size_t>(category);
  PARPLAN_ASSERT(i < memory_rows.size() && memory_rows[i].category == category, fmt::format("category {}", i));
  return memory_rows[i];
}

}  // namespace

const char* name(Label label) {
  PARPLAN_ASSERT(label < Label::count_, fmt::format("label {}", index_of(label)));
  return label_names[index_of(label)];
}

Seconds& StepTime::part(Label label) {
  PARPLAN_ASSERT(label < Label::count_, fmt::format("label {}", index_of(label)));
  if (const std::optional<Axis> axis = axes_of_labels[index_of(label)]) return exposed[*axis];
  switch (label) {
    case Label::compute: return compute;
    case Label::recompute: return recompute;
    case Label::offload: return offload;
    default: return optimizer;
  }
}

StepTime& StepTime::operator+=(const StepTime& other) {
  compute += other.compute;
  recompute += other.recompute;
  for (const Axis axis : all_axes) exposed[axis] += other.exposed[axis];
  bubble += other.bubble;
  optimizer += other.optimizer;
  offload += other.offload;
  return *this;
}

StepTime& StepTime::operator*=(double times) {
  for (Seconds* part : {&compute, &recompute, &bubble, &optimizer, &offload}) *part *= times;
  for (const Axis axis : all_axes) exposed[axis] *= times;
  return *this;
}

Bytes sum(const CommunicationVolume& volume) {
  Bytes bytes;
  for (const Axis axis : all_axes) bytes += volume[axis];
  return bytes;
}

CommunicationVolume& operator+=(CommunicationVolume& volume, const CommunicationVolume& other) {
  for (const Axis axis : all_axes) volume[axis] += other[axis];
  return volume;
}

const char* name(MemoryCategory category) { return row(category).name; }
Bytes& MemoryUse::part(MemoryCategory category, Home home) {
  return home == Home::device ? this->*row(category).part : home == Home::host ? host : nvme;
}

}  // namespace parplan
