#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "planner/base/units.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/memory_verdict.h"
#include "planner/validate/published_run.h"
#include "planner/validate/stated_run.h"

namespace parplan {

// A published run beside its prediction.
struct ValidatedRun {
  PublishedRun run;
  std::string engine;                // that was predicted; empty: the run was skipped before it was known
  std::string engine_differs;        // as StatedRun
  std::string skipped;               // why there is no prediction; else empty
  std::vector<std::string> assumed;  // as StatedRun
  Seconds step;                      // predicted, as is all from here on; of a collective its time
  Bytes memory;                      // of the fullest device, as far as `scope` counts it
  MemoryScope scope = MemoryScope::device;
  Bytes device_memory;               // all of that device's
  Bytes capacity;                    // of that device
  MemoryVerdict verdict{};
  // Predicted over measured, less 1; nothing where either is missing.
  std::optional<double> step_error() const;
  std::optional<double> memory_error() const;
};

// The model's graph; ConfigError where there is none.
using GraphOfModel = std::function<OpGraph(const StatedModel&)>;
ValidatedRun validate(const PublishedRun& run, const ValidationRequest& of, const GraphOfModel& graph_of);
// All of them, in their order, on several threads (0: one for each core). `progress` may be empty;
// one thread at a time calls it.
std::vector<ValidatedRun> validate(std::span<const PublishedRun> runs, const ValidationRequest& request,
                                   const GraphOfModel& graph_of, int threads,
                                   const std::function<void(std::size_t done, std::size_t all)>& progress);

// Errors of several predictions. Absolute ones are without their signs.
struct ErrorSummary {
  int count = 0;
  double mean_absolute = 0.0, median_absolute = 0.0, largest_absolute = 0.0;
  double bias = 0.0;  // the mean of the signed errors
  // Spearman's, of predicted and measured values; nothing where all of either are equal.
  std::optional<double> rank_correlation;
};
// Takes predicted and measured values, each above 0; nothing for none.
std::optional<ErrorSummary> summarise(std::span<const std::pair<double, double>> predicted_and_measured);

// The runs of each job, a model with a batch on a set of devices of one source: their places in
// `runs`, of those with a measured and a predicted step, where there are two or more.
std::vector<std::vector<std::size_t>> jobs_of(std::span<const ValidatedRun> runs);

// How layouts of one model that ran on one cluster are ordered. A pair counts where the measured
// steps differ by more than `apart` of the faster.
struct OrderSummary {
  int groups = 0;  // of two runs or more
  int pairs = 0, pairs_right = 0;
  // How much slower the run that is predicted to be the fastest of its group was than the fastest:
  // the mean over groups.
  double regret = 0.0;
};
OrderSummary summarise_order(std::span<const ValidatedRun> runs, double apart);

}  // namespace parplan
