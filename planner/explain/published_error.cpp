#include "planner/explain/published_error.h"

#include <algorithm>
#include <string_view>

namespace parplan {
namespace {

// GPT-3 175B in 14 layouts, as tests/planner/explain/published_error_test.cpp simulates them.
constexpr ModelError published_error{
    .least = -0.152,
    .most = -0.062,
    .runs = 15,
    .source = "runs of GPT-3 175B in 14 layouts on 512 A100 80 GB, by vTrain, MICRO 2024"};
constexpr std::string_view published_device = "a100-sxm4-80gb";

}  // namespace

std::optional<ModelError> model_error(const Cluster& cluster) {
  const bool such =
      std::ranges::all_of(cluster.groups, [](const NodeGroup& group) { return group.device.name == published_device; });
  return such ? std::optional(published_error) : std::nullopt;
}

std::optional<ModelError> model_error_elsewhere(const Cluster& cluster) {
  return !model_error(cluster) && is_accelerator(cluster.backend()) ? std::optional(published_error) : std::nullopt;
}

}  // namespace parplan
