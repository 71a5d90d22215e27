#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "planner/cluster/cluster.h"
#include "planner/graph/engine.h"

namespace parplan {

// Measured over predicted step time of published runs, as `validate` predicts those whose facts are
// all published (docs/accuracy.md): 8 of 10 runs lie from `low` to `high` (the tenth and the
// ninetieth percentile).
struct ErrorBand {
  std::string_view engine;  // "": all engines, each predicted as itself
  std::string_view device;  // "": all devices
  int runs = 0;
  double low = 1.0;
  double high = 1.0;
};
// The runs of one engine on one kind of device come first, those of all engines on all devices
// last. None has fewer than `least_runs`.
std::span<const ErrorBand> error_bands();
inline constexpr int least_runs = 8;

// The first that holds for the engine on the cluster's devices; nothing for clusters that have no
// accelerators, which no published run is of.
std::optional<ErrorBand> error_band(const Engine& engine, const Cluster& cluster);

// The share of a device's memory that plans leave free by default: how far published runs went
// beyond their predicted memory, each as far as its figure counts it (docs/accuracy.md). 9 of 10
// used less than their prediction over 1 less this share. 0 for clusters without accelerators,
// where parplan's own runtime takes what it says.
double memory_headroom(const Engine& engine, const Cluster& cluster);

// "step: 8 of 10 of the 14 published runs of megatron-2022 on a100-sxm4-80gb took 0.95 to 1.16 of
// their prediction"
std::string words_of(const ErrorBand& band);

}  // namespace parplan
