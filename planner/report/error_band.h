#pragma once

#include <array>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/cluster/cluster.h"
#include "planner/graph/engine.h"
#include "planner/plan/plan.h"

namespace parplan {

// Measured over predicted step time of published runs, as `validate` predicts them
// (docs/accuracy.md): 8 of 10 lie from `low` to `high` (the tenth and the ninetieth percentile).
// Runs whose facts are all published where there are `least_runs` of them; else those, too, of
// which some fact is assumed.
struct ErrorBand {
  std::string_view engine;  // "": all engines, each predicted as itself, and each as heavy as another
  std::string_view device;  // "": all devices; with no engine either, each engine on each device is as heavy
  std::string_view size;    // "": any number of devices; else the name of one of `run_sizes`
  int runs = 0;
  int assumed = 0;         // of these, runs of which some fact is assumed
  int fewest_devices = 0;  // of a run
  int most_devices = 0;
  double low = 1.0;
  double high = 1.0;
  // With fewer than `least_runs`, which are all that is known of the engine, `low` and `high` are
  // those of all of them.
  bool is_of_few() const;
};
// Those of one engine on one kind of device and in one size come first, then those in any size, of
// the engine on any device, of all engines on one, and of all on all.
std::span<const ErrorBand> error_bands();
inline constexpr int least_runs = 8;

// Numbers of devices that runs are told apart by: of a node, of some, of many.
struct RunSize {
  std::string_view name;
  int fewest = 1;
  int most = 0;
};
inline constexpr std::array run_sizes = {RunSize{"a node", 1, 8}, RunSize{"some nodes", 9, 256},
                                         RunSize{"many nodes", 257, std::numeric_limits<int>::max()}};

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

// The band of a prediction.
struct StepBand {
  double low = 1.0;  // of the predicted step
  double high = 1.0;
  // One band of the engine on the device, in that size where enough such runs are known. Where none
  // is, it spans all that is known of the engine, of the device, and of all runs.
  std::vector<ErrorBand> spans;
  std::optional<PairSpread> pairs;  // instead, of a calibrated cluster
  std::string engine, device;       // of the prediction, and its number of devices
  int devices = 0;
};

// None has fewer than `least_pairs`, of `least_jobs`.
std::span<const PairSpread> pair_spreads();
inline constexpr int least_pairs = 8;
inline constexpr int least_jobs = 4;

// The band of a step on the cluster's first devices, so many; nothing for clusters that have no
// accelerators, which no published run is of. The band of a calibrated cluster is that of pairs:
// what one layout's measured step tells of another's.
std::optional<StepBand> step_band(const Engine& engine, const Cluster& cluster, int devices);
std::optional<StepBand> step_band(const Plan& plan);
// The first that holds for the engine on the cluster's devices.
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

// "8 of 10 of the 8 published runs of megatron-2022 on a100-sxm4-80gb (8 to 512 devices) took 0.93
// to 1.00 of their prediction"
std::string words_of(const StepBand& band);
// "8 of 10 of the 179 pairs of layouts in published runs differ from their predictions by 9.0 % or
// less"
std::string words_of(const PairSpread& spread);

}  // namespace parplan
