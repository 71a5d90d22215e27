#include "planner/plan/offload.h"

#include <algorithm>
#include <iterator>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

constexpr StateHomes update_on_host_memory{.optimizer = Home::host};

constexpr OffloadRow rows[] = {
    {.kind = Offload::none, .name = "none", .phrase = "without anything in host memory"},
    {.kind = Offload::optimizer,
     .name = "optimizer",
     .phrase = "with the optimizer's state in host memory",
     .state = update_on_host_memory},
    {.kind = Offload::activations,
     .name = "activations",
     .phrase = "with what layers keep for their backward in host memory",
     .saved = Home::host},
    {.kind = Offload::optimizer | Offload::activations,
     .name = "optimizer+activations",
     .phrase = "with the optimizer's state and what layers keep for their backward in host memory",
     .state = update_on_host_memory,
     .saved = Home::host},
};

}  // namespace

std::span<const OffloadRow> offload_rows() {
  return rows;
}

const OffloadRow& row_of(Offload offload) {
  const auto* const found = std::ranges::find(rows, offload, &OffloadRow::kind);
  PARPLAN_ASSERT(found != std::end(rows), fmt::format("offload {}", static_cast<int>(offload)));
  return *found;
}

const char* name(Offload offload) {
  return row_of(offload).name;
}

}  // namespace parplan
