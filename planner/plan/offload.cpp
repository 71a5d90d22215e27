#include "planner/plan/offload.h"

#include <algorithm>
#include <iterator>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/cluster/host_share.h"

namespace parplan {
namespace {

constexpr StateHomes update_on_host_memory{.optimizer = Home::host};
constexpr StateHomes gradients_too{.gradients = Home::host, .optimizer = Home::host};
constexpr StateHomes parameters_too{.parameters = Home::host, .optimizer = Home::host};
constexpr StateHomes all_state{.parameters = Home::host, .gradients = Home::host, .optimizer = Home::host};

constexpr StateHomes update_from_nvme{.optimizer = Home::nvme};
constexpr StateHomes nvme_and_gradients{.gradients = Home::host, .optimizer = Home::nvme};
constexpr StateHomes nvme_and_parameters{.parameters = Home::host, .optimizer = Home::nvme};
constexpr StateHomes nvme_and_all{.parameters = Home::host, .gradients = Home::host, .optimizer = Home::nvme};

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
    {.kind = Offload::optimizer | Offload::gradients,
     .name = "optimizer+gradients",
     .phrase = "with the optimizer's state and gradients in host memory",
     .state = gradients_too},
    {.kind = Offload::optimizer | Offload::activations | Offload::gradients,
     .name = "optimizer+gradients+activations",
     .phrase = "with the optimizer's state, gradients and what layers keep for their backward in host memory",
     .state = gradients_too,
     .saved = Home::host},
    {.kind = Offload::optimizer | Offload::parameters,
     .name = "optimizer+parameters",
     .phrase = "with the optimizer's state and parameters in host memory",
     .state = parameters_too},
    {.kind = Offload::optimizer | Offload::activations | Offload::parameters,
     .name = "optimizer+parameters+activations",
     .phrase = "with the optimizer's state, parameters and what layers keep for their backward in host memory",
     .state = parameters_too,
     .saved = Home::host},
    {.kind = Offload::optimizer | Offload::gradients | Offload::parameters,
     .name = "optimizer+gradients+parameters",
     .phrase = "with the optimizer's state, gradients and parameters in host memory",
     .state = all_state},
    {.kind = Offload::optimizer | Offload::activations | Offload::gradients | Offload::parameters,
     .name = "optimizer+gradients+parameters+activations",
     .phrase = "with the optimizer's state, gradients, parameters and what layers keep for their backward in host "
               "memory",
     .state = all_state,
     .saved = Home::host},
    {.kind = Offload::nvme | Offload::optimizer,
     .name = "optimizer:nvme",
     .phrase = "with the optimizer's state on NVMe",
     .state = update_from_nvme},
    {.kind = Offload::nvme | Offload::optimizer | Offload::activations,
     .name = "optimizer:nvme+activations",
     .phrase = "with the optimizer's state on NVMe, and what layers keep for their backward in host memory",
     .state = update_from_nvme,
     .saved = Home::host},
    {.kind = Offload::nvme | Offload::optimizer | Offload::gradients,
     .name = "optimizer:nvme+gradients",
     .phrase = "with the optimizer's state on NVMe, and gradients in host memory",
     .state = nvme_and_gradients},
    {.kind = Offload::nvme | Offload::optimizer | Offload::activations | Offload::gradients,
     .name = "optimizer:nvme+gradients+activations",
     .phrase = "with the optimizer's state on NVMe, and gradients and what layers keep for their backward in host "
               "memory",
     .state = nvme_and_gradients,
     .saved = Home::host},
    {.kind = Offload::nvme | Offload::optimizer | Offload::parameters,
     .name = "optimizer:nvme+parameters",
     .phrase = "with the optimizer's state on NVMe, and parameters in host memory",
     .state = nvme_and_parameters},
    {.kind = Offload::nvme | Offload::optimizer | Offload::activations | Offload::parameters,
     .name = "optimizer:nvme+parameters+activations",
     .phrase = "with the optimizer's state on NVMe, and parameters and what layers keep for their backward in host "
               "memory",
     .state = nvme_and_parameters,
     .saved = Home::host},
    {.kind = Offload::nvme | Offload::optimizer | Offload::gradients | Offload::parameters,
     .name = "optimizer:nvme+gradients+parameters",
     .phrase = "with the optimizer's state on NVMe, and gradients and parameters in host memory",
     .state = nvme_and_all},
    {.kind = Offload::nvme | Offload::optimizer | Offload::activations | Offload::gradients | Offload::parameters,
     .name = "optimizer:nvme+gradients+parameters+activations",
     .phrase = "with the optimizer's state on NVMe, and gradients, parameters and what layers keep for their "
               "backward in host memory",
     .state = nvme_and_all,
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

std::optional<std::string> lacks_homes(const Cluster& cluster, Offload offload) {
  if (offload == Offload::none) return std::nullopt;
  if (std::optional<std::string> reason = lacks_host(cluster)) return reason;
  return includes(offload, Offload::nvme) ? lacks_nvme(cluster) : std::nullopt;
}

const char* name(Offload offload) {
  return row_of(offload).name;
}

}  // namespace parplan
