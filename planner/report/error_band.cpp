#include "planner/report/error_band.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "planner/base/text.h"
#include "planner/cluster/mesh.h"
#include "planner/cluster/price_and_power.h"
#include "planner/plan/reasons.h"

namespace parplan {
namespace {

// tests/cli/error_band_test.cpp computes them again from tests/data/published/runs.csv.
constexpr std::array bands = {
    ErrorBand{"bloom", "a100-sxm4-80gb", "many nodes", 45, 0, 288, 384, 0.97, 1.08},
    ErrorBand{"megatron", "b200-sxm-180gb", "a node", 8, 0, 8, 8, 0.97, 1.25},
    ErrorBand{"megatron-2022", "a100-sxm4-80gb", "a node", 9, 7, 8, 8, 0.99, 1.05},
    ErrorBand{"megatron-2022", "a100-sxm4-80gb", "some nodes", 15, 13, 16, 256, 0.97, 1.37},
    ErrorBand{"megatron-deepspeed", "a100-sxm4-80gb", "a node", 9, 3, 2, 8, 0.78, 1.10},
    ErrorBand{"megatron-deepspeed", "a100-sxm4-80gb", "some nodes", 9, 9, 256, 256, 0.91, 1.16},
    ErrorBand{"megatron-deepspeed", "a100-sxm4-80gb", "many nodes", 18, 15, 512, 3360, 0.90, 1.12},
    ErrorBand{"bloom", "a100-sxm4-80gb", "", 50, 0, 8, 384, 0.97, 1.08},
    ErrorBand{"fsdp", "h100-sxm-80gb", "", 10, 8, 8, 512, 0.96, 1.02},
    ErrorBand{"megatron", "b200-sxm-180gb", "", 8, 0, 8, 8, 0.97, 1.25},
    ErrorBand{"megatron", "h100-sxm-80gb", "", 9, 9, 48, 6144, 0.67, 1.14},
    ErrorBand{"megatron-2021", "a100-sxm4-80gb", "", 11, 0, 32, 3072, 0.97, 1.01},
    ErrorBand{"megatron-2022", "a100-sxm4-80gb", "", 8, 0, 8, 512, 0.93, 1.03},
    ErrorBand{"megatron-deepspeed", "a100-sxm4-80gb", "", 9, 0, 2, 3360, 0.79, 1.15},
    ErrorBand{"nemo", "h100-sxm-80gb", "", 12, 7, 32, 2048, 0.98, 1.02},
    ErrorBand{"nemo-delayed", "h100-sxm-80gb", "", 9, 6, 8, 512, 0.97, 1.15},
    ErrorBand{"torchtitan-2024", "h100-96gb-hbm2e-500w", "", 10, 10, 8, 256, 0.98, 1.51},
    ErrorBand{"bloom", "", "", 50, 0, 8, 384, 0.97, 1.08},
    ErrorBand{"data-parallel", "", "", 1, 0, 2, 2, 0.98, 0.98},
    ErrorBand{"ddp", "", "", 2, 0, 2, 2, 0.98, 1.15},
    ErrorBand{"fsdp", "", "", 12, 8, 8, 512, 0.96, 1.02},
    ErrorBand{"fsdp-torch1", "", "", 8, 0, 16, 128, 0.95, 1.30},
    ErrorBand{"llm-c", "", "", 4, 0, 8, 8, 0.95, 1.10},
    ErrorBand{"megatron", "", "", 8, 0, 8, 8, 0.97, 1.25},
    ErrorBand{"megatron-2021", "", "", 11, 0, 32, 3072, 0.97, 1.01},
    ErrorBand{"megatron-2022", "", "", 8, 0, 8, 512, 0.93, 1.03},
    ErrorBand{"megatron-deepspeed", "", "", 9, 0, 2, 3360, 0.79, 1.15},
    ErrorBand{"megatron-fsdp", "", "", 5, 1, 64, 128, 0.93, 1.11},
    ErrorBand{"megatron-tests", "", "", 5, 1, 8, 8, 1.01, 1.15},
    ErrorBand{"nanotron", "", "", 3, 3, 2, 16, 1.10, 1.34},
    ErrorBand{"nemo", "", "", 8, 0, 8, 2048, 0.94, 1.02},
    ErrorBand{"nemo-2024", "", "", 5, 0, 128, 2048, 0.99, 1.04},
    ErrorBand{"nemo-delayed", "", "", 11, 8, 8, 512, 0.98, 1.13},
    ErrorBand{"torchtitan", "", "", 2, 0, 32, 64, 1.00, 1.01},
    ErrorBand{"torchtitan-2024", "", "", 10, 10, 8, 256, 0.98, 1.51},
    ErrorBand{"torchtitan-2024-04", "", "", 5, 5, 64, 64, 1.03, 1.08},
    ErrorBand{"torchtitan-eager-2024", "", "", 5, 5, 8, 128, 0.98, 1.03},
    ErrorBand{"", "a100-sxm4-40gb", "", 9, 2, 1, 128, 0.93, 1.02},
    ErrorBand{"", "a100-sxm4-80gb", "", 93, 8, 2, 3360, 0.95, 1.08},
    ErrorBand{"", "b200-sxm-180gb", "", 10, 1, 8, 128, 0.97, 1.18},
    ErrorBand{"", "gb200", "", 12, 6, 8, 512, 0.99, 1.15},
    ErrorBand{"", "h100-96gb-hbm2e-500w", "", 12, 12, 8, 256, 0.98, 1.20},
    ErrorBand{"", "h100-sxm-80gb", "", 51, 34, 2, 6144, 0.95, 1.14},
    ErrorBand{"", "", "", 197, 66, 1, 6144, 0.94, 1.12},
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
bool holds(const Row& row, std::string_view engine, const Cluster& cluster) {
  return (row.engine.empty() || row.engine == engine) &&
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
  return *std::ranges::find_if(spreads, [&](const PairSpread& row) { return holds(row, engine.name, cluster); });
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

std::optional<StepBand> step_band(const Engine& engine, const Cluster& whole, int devices) {
  const Cluster cluster = first_nodes(whole, devices);
  if (!is_accelerator(cluster.backend())) return std::nullopt;
  StepBand band{.spans = {}, .pairs = {}, .engine = engine.name, .device = device_name(cluster), .devices = devices};
  if (cluster.calibrated) {
    band.pairs = pair_spread(engine, cluster);
    band.low = 1.0 / (1.0 + band.pairs->spread);
    band.high = 1.0 + band.pairs->spread;
    return band;
  }
  const auto applies = [&](const ErrorBand& row) {
    const auto size = std::ranges::find(run_sizes, row.size, &RunSize::name);
    const bool of_size = size == run_sizes.end() || (size->fewest <= devices && devices <= size->most);
    return of_size && holds(row, engine.name, cluster);
  };
  for (const ErrorBand& row : bands) {
    if (!applies(row)) continue;
    band.spans.push_back(row);
    if (!row.engine.empty() && !row.device.empty()) break;  // the rows of the engine on the device come first
  }
  band.low = std::ranges::min(band.spans, {}, &ErrorBand::low).low;
  band.high = std::ranges::max(band.spans, {}, &ErrorBand::high).high;
  return band;
}

std::optional<StepBand> step_band(const Plan& plan) {
  return step_band(plan.training.engine, plan.cluster, plan.spec.mesh.size());
}

double memory_headroom(const Engine& /*engine*/, const Cluster& cluster) {
  return is_accelerator(cluster.backend()) ? default_headroom : 0.0;
}

namespace {

std::string ends_in_words(double low, double high) {
  const std::string first = fmt::format("{:.2f}", low), last = fmt::format("{:.2f}", high);
  return first == last ? first : fmt::format("{} to {}", first, last);
}

// "; facts of 8 are assumed"
std::string assumed_in_words(const ErrorBand& band) {
  if (band.assumed == 0) return "";
  return fmt::format("; facts of {} are assumed",
                     band.assumed == band.runs ? std::string("all") : std::to_string(band.assumed));
}

// "8 of 10 of 93 on a100-sxm4-80gb (0.95 to 1.09; facts of 8 are assumed)"
std::string spanned_in_words(const ErrorBand& band) {
  const bool is_of_all = band.engine.empty() && band.device.empty();
  const std::string which = band.runs == 1      ? "the only one"
                            : band.is_of_few() ? fmt::format("the {}", band.runs)
                                               : fmt::format("8 of 10 of {}{}", is_of_all ? "all " : "", band.runs);
  return fmt::format("{}{} ({}{})", which, whose(band.engine, band.device), ends_in_words(band.low, band.high),
                     assumed_in_words(band));
}

}  // namespace

bool ErrorBand::is_of_few() const {
  return runs < least_runs;
}

std::string words_of(const StepBand& band) {
  if (band.pairs)
    return fmt::format("8 of 10 of the {} pairs of layouts in published runs{} took {} of what one's measured step "
                       "told of the other's",
                       band.pairs->pairs, whose(band.pairs->engine, band.pairs->device),
                       ends_in_words(band.low, band.high));
  if (band.spans.size() == 1 && !band.spans.front().engine.empty()) {
    const ErrorBand& row = band.spans.front();
    const char* const beyond = band.devices > row.most_devices     ? ", none of them on as many"
                               : band.devices < row.fewest_devices ? ", none of them on as few"
                                                                   : "";
    const std::string devices =
        row.fewest_devices == row.most_devices
            ? fmt::format("{} device{}", row.most_devices, row.most_devices == 1 ? "" : "s")
            : fmt::format("{} to {} devices", row.fewest_devices, row.most_devices);
    return fmt::format("8 of 10 of the {} published runs{} ({}{}) took {} of their prediction{}", row.runs,
                       whose(row.engine, row.device), devices, assumed_in_words(row), ends_in_words(row.low, row.high),
                       beyond);
  }
  std::vector<std::string> parts;
  for (const ErrorBand& row : band.spans) parts.push_back(spanned_in_words(row));
  return fmt::format("fewer than {} published runs of {} on {}: {} of a prediction spans {}, where engines and devices "
                     "weigh the same",
                     least_runs, band.engine, band.device, ends_in_words(band.low, band.high), join(parts));
}

std::string words_of(const PairSpread& spread) {
  return fmt::format(
      "8 of 10 of the {} pairs of layouts in published runs{} differ from their predictions by {:.1f} % "
      "or less",
      spread.pairs, whose(spread.engine, spread.device), 100.0 * spread.spread);
}

}  // namespace parplan
