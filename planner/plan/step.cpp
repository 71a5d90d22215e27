#include "planner/plan/step.h"

#include <array>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

struct LabelRow {
  Label label;
  const char* name;
  Seconds StepTime::* part;
};
constexpr std::array<LabelRow, static_cast<std::size_t>(Label::count_)> label_rows = {{
    {Label::compute, "compute", &StepTime::compute},
    {Label::recompute, "recompute", &StepTime::recompute},
    {Label::tensor, "tensor", &StepTime::tensor_exposed},
    {Label::data, "data", &StepTime::data_exposed},
    {Label::pipeline, "pipeline", &StepTime::pipeline_exposed},
    {Label::optimizer, "optimizer", &StepTime::optimizer},
}};

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

const LabelRow& row(Label label) {
  const auto i = static_cast<std::size_t>(label);
  PARPLAN_ASSERT(i < label_rows.size() && label_rows[i].label == label, fmt::format("label {}", i));
  return label_rows[i];
}

const MemoryRow& row(MemoryCategory category) {
  const auto i = static_cast<std::size_t>(category);
  PARPLAN_ASSERT(i < memory_rows.size() && memory_rows[i].category == category, fmt::format("category {}", i));
  return memory_rows[i];
}

}  // namespace

const char* name(Label label) { return row(label).name; }

StepTime& StepTime::operator+=(const StepTime& other) {
  for (const LabelRow& row : label_rows) this->*row.part += other.*row.part;
  bubble += other.bubble;
  return *this;
}

StepTime& StepTime::operator*=(double times) {
  for (const LabelRow& row : label_rows) this->*row.part *= times;
  bubble *= times;
  return *this;
}

Seconds& StepTime::part(Label label) { return this->*row(label).part; }

const char* name(MemoryCategory category) { return row(category).name; }
Bytes& MemoryUse::part(MemoryCategory category) { return this->*row(category).part; }

}  // namespace parplan
