#include "planner/report/error_band.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

namespace parplan {
namespace {

// tests/cli/error_band_test.cpp computes them again from tests/data/published/runs.csv.
constexpr std::array bands = {
    ErrorBand{"bloom", "a100-sxm4-80gb", 50, 1.01, 1.15},
    ErrorBand{"megatron-2022", "a100-sxm4-80gb", 14, 0.95, 1.16},
    ErrorBand{"megatron", "b200-sxm-180gb", 8, 0.99, 1.12},
    ErrorBand{"bloom", "", 50, 1.01, 1.15},
    ErrorBand{"megatron-2022", "", 14, 0.95, 1.16},
    ErrorBand{"fsdp-torch1", "", 10, 1.06, 1.15},
    ErrorBand{"megatron", "", 8, 0.99, 1.12},
    ErrorBand{"", "a100-sxm4-80gb", 77, 0.96, 1.15},
    ErrorBand{"", "b200-sxm-180gb", 8, 0.99, 1.12},
    ErrorBand{"", "", 100, 0.96, 1.22},
};

// 1 less 1 over the ninetieth percentile of measured over predicted memory (the same test).
constexpr double default_headroom = 0.06;

}  // namespace

std::span<const ErrorBand> error_bands() { return bands; }

std::optional<ErrorBand> error_band(const Engine& engine, const Cluster& cluster) {
  if (!is_accelerator(cluster.backend())) return std::nullopt;
  const auto holds = [&](const ErrorBand& band) {
    return (band.engine.empty() || band.engine == engine.name) &&
           (band.device.empty() || std::ranges::all_of(cluster.groups, [&](const NodeGroup& group) {
              return group.device.name == band.device;
            }));
  };
  return *std::ranges::find_if(bands, holds);
}

double memory_headroom(const Engine& /*engine*/, const Cluster& cluster) {
  return is_accelerator(cluster.backend()) ? default_headroom : 0.0;
}

std::string words_of(const ErrorBand& band) {
  return fmt::format("step: 8 of 10 of the {} published runs{}{} took {:.2f} to {:.2f} of their prediction", band.runs,
                     band.engine.empty() ? "" : fmt::format(" of {}", band.engine),
                     band.device.empty() ? "" : fmt::format(" on {}", band.device), band.low, band.high);
}

}  // namespace parplan
