#include "planner/plan/recompute.h"

#include <algorithm>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

bool everything(const OpGraph& /*graph*/, const Block& /*block*/, TensorId /*tensor*/) { return true; }
bool nothing(const OpGraph& /*graph*/, const Block& /*block*/, TensorId /*tensor*/) { return false; }

constexpr RecomputeRow rows[] = {
    {.kind = Recompute::none, .name = "none", .keeps = everything},
    {.kind = Recompute::full, .name = "full", .keeps = nothing},
};

}  // namespace

std::span<const RecomputeRow> recompute_rows() { return rows; }

const RecomputeRow& row_of(Recompute recompute) {
  const auto* const found = std::ranges::find(rows, recompute, &RecomputeRow::kind);
  PARPLAN_ASSERT(found != std::end(rows), fmt::format("recompute {}", static_cast<int>(recompute)));
  return *found;
}

const char* name(Recompute recompute) {
  return recompute == Recompute::per_stage ? "per_stage" : row_of(recompute).name;
}

}  // namespace parplan
