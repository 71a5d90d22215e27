#include "planner/report/error_band.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "planner/cluster/mesh.h"
#include "planner/plan/reasons.h"

namespace parplan {
namespace {

// tests/cli/error_band_test.cpp computes them again from tests/data/published/runs.csv.
constexpr std::array bands = {
    ErrorBand{"bloom", "a100-sxm4-80gb", 50, 0.97, 1.08},
    ErrorBand{"megatron-2021", "a100-sxm4-80gb", 11, 0.97, 1.01},
    ErrorBand{"megatron-2022", "a100-sxm4-80gb", 8, 0.93, 0.99},
    ErrorBand{"megatron-deepspeed", "a100-sxm4-80gb", 9, 0.84, 1.12},
    ErrorBand{"megatron", "b200-sxm-180gb", 8, 0.98, 1.18},
    ErrorBand{"nemo", "h100-sxm-80gb", 10, 1.01, 1.09},
    ErrorBand{"bloom", "", 50, 0.97, 1.08},
    ErrorBand{"megatron-2021", "", 11, 0.97, 1.01},
    ErrorBand{"megatron-2022", "", 8, 0.93, 0.99},
    ErrorBand{"megatron-deepspeed", "", 9, 0.84, 1.12},
    ErrorBand{"fsdp-torch1", "", 8, 0.96, 1.02},
    ErrorBand{"megatron", "", 8, 0.98, 1.18},
    ErrorBand{"nemo", "", 13, 0.97, 1.09},
    ErrorBand{"", "a100-sxm4-80gb", 85, 0.95, 1.09},
    ErrorBand{"", "b200-sxm-180gb", 9, 0.97, 1.18},
    ErrorBand{"", "h100-sxm-80gb", 14, 0.97, 1.09},
    ErrorBand{"", "", 128, 0.95, 1.10},
};

// The same test computes these.
constexpr std::array spreads = {
    PairSpread{"bloom", "a100-sxm4-80gb", 166, 8, 0.085},
    PairSpread{"bloom", "", 166, 8, 0.085},
    PairSpread{"", "a100-sxm4-80gb", 174, 14, 0.086},
    PairSpread{"", "", 179, 17, 0.091},
};

// Whether a row of either table is of that engine on those devices.
template <class Row>
bool holds(const Row& row, const Engine& engine, const Cluster& cluster) {
  return (row.engine.empty() || row.engine == engine.name) &&
         (row.device.empty() ||
          std::ranges::all_of(cluster.groups, [&](const NodeGroup& group) { return group.device.name == row.device; }));
}

std::string whose(std::string_view engine, std::string_view device) {
  return (engine.empty() ? "" : fmt::format(" of {}", engine)) + (device.empty() ? "" : fmt::format(" on {}", device));
}

// 1 less 1 over the ninetieth percentile of measured over predicted memory (the same test).
constexpr double default_headroom = 0.055;

}  // namespace

std::span<const ErrorBand> error_bands() {
  return bands;
}
std::span<const PairSpread> pair_spreads() {
  return spreads;
}

std::optional<PairSpread> pair_spread(const Engine& engine, const Cluster& cluster) {
  if (!is_accelerator(cluster.backend())) return std::nullopt;
  return *std::ranges::find_if(spreads, [&](const PairSpread& row) { return holds(row, engine, cluster); });
}

std::optional<PairSpread> pair_spread(const Plan& plan, std::span<const RankedPlan> others) {
  Cluster all = plan.cluster;
  const auto groups_of = [](const Cluster& cluster, const ParallelSpec& spec) {
    return groups_in_use(cluster, spec.mesh.size());
  };
  const std::span<const NodeGroup> own = groups_of(plan.cluster, plan.spec);
  all.groups.assign(own.begin(), own.end());
  for (const RankedPlan& other : others) {
    const std::span<const NodeGroup> groups = groups_of(cluster_of(plan, other), other.spec);
    all.groups.insert(all.groups.end(), groups.begin(), groups.end());
  }
  return pair_spread(plan.training.engine, all);
}

bool are_apart(const Plan& plan, const RankedPlan& other, const PairSpread& pairs) {
  const double ratio = plan.search.objective == Objective::cost
                           ? 1.0 + excess(plan, cluster_of(plan, other), other.spec, other.result)
                           : other.result.time.total() / plan.prediction.time.total();
  return std::max(ratio, 1.0 / ratio) > 1.0 + pairs.spread;
}

std::optional<ErrorBand> error_band(const Engine& engine, const Cluster& cluster) {
  if (!is_accelerator(cluster.backend())) return std::nullopt;
  if (!cluster.calibrated)
    return *std::ranges::find_if(bands, [&](const ErrorBand& row) { return holds(row, engine, cluster); });
  const PairSpread pairs = *pair_spread(engine, cluster);
  return ErrorBand{.engine = pairs.engine,
                   .device = pairs.device,
                   .runs = pairs.pairs,
                   .low = 1.0 / (1.0 + pairs.spread),
                   .high = 1.0 + pairs.spread,
                   .of_pairs = true};
}

double memory_headroom(const Engine& /*engine*/, const Cluster& cluster) {
  return is_accelerator(cluster.backend()) ? default_headroom : 0.0;
}

std::string words_of(const ErrorBand& band) {
  return fmt::format("step: 8 of 10 of the {} {}{} took {:.2f} to {:.2f} of {}", band.runs,
                     band.of_pairs ? "pairs of layouts in published runs" : "published runs",
                     whose(band.engine, band.device), band.low, band.high,
                     band.of_pairs ? "what one's measured step told of the other's" : "their prediction");
}

std::string words_of(const PairSpread& spread) {
  return fmt::format(
      "8 of 10 of the {} pairs of layouts in published runs{} differ from their predictions by {:.1f} % "
      "or less",
      spread.pairs, whose(spread.engine, spread.device), 100.0 * spread.spread);
}

}  // namespace parplan
