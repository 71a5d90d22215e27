#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "planner/cluster/cluster.h"
#include "planner/graph/engine.h"
#include "planner/plan/plan.h"

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
  bool of_pairs = false;  // of runs as another layout of their job was measured; `runs` counts pairs
};
// The runs of one engine on one kind of device come first, those of all engines on all devices
// last. None has fewer than `least_runs`.
std::span<const ErrorBand> error_bands();
inline constexpr int least_runs = 8;

// How far apart two layouts of one job are in measured over predicted step time: 8 of 10 pairs of
// such runs differ by less than `spread`, so that of two layouts whose predictions differ by more,
// the slower one was the faster in fewer than 1 of 10. Jobs are those of `validate`'s order.
struct PairSpread {
  std::string_view engine;  // as in ErrorBand
  std::string_view device;
  int pairs = 0;
  int jobs = 0;
  double spread = 0.0;
};
// None has fewer than `least_pairs`, of `least_jobs`.
std::span<const PairSpread> pair_spreads();
inline constexpr int least_pairs = 8;
inline constexpr int least_jobs = 4;

// The first that holds for the engine on the cluster's devices; nothing for clusters that have no
// accelerators, which no published run is of. The band of a calibrated cluster is that of pairs:
// what one layout's measured step tells of another's.
std::optional<ErrorBand> error_band(const Engine& engine, const Cluster& cluster);
std::optional<PairSpread> pair_spread(const Engine& engine, const Cluster& cluster);
// The same for a plan and others of its job: the first that holds for all devices that any of these
// uses. By it alone one is told from another, wherever both are shown.
std::optional<PairSpread> pair_spread(const Plan& plan, std::span<const RankedPlan> others);
// Whether `other` differs from the plan by more than that: in the cost of its step where that is
// the objective, else in its time.
bool are_apart(const Plan& plan, const RankedPlan& other, const PairSpread& pairs);

// The share of a device's memory that plans leave free by default: how far published runs went
// beyond their predicted memory, each as far as its figure counts it (docs/accuracy.md). 9 of 10
// used less than their prediction over 1 less this share. 0 for clusters without accelerators,
// where parplan's own runtime takes what it says.
double memory_headroom(const Engine& engine, const Cluster& cluster);

// "step: 8 of 10 of the 8 published runs of megatron-2022 on a100-sxm4-80gb took 0.93 to 1.00 of
// their prediction"
std::string words_of(const ErrorBand& band);
// "8 of 10 of the 179 pairs of layouts in published runs differ from their predictions by 9.0 % or
// less"
std::string words_of(const PairSpread& spread);

}  // namespace parplan
