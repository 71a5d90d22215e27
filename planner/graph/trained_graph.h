#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"

namespace parplan {

// The graph as `training` trains it: with adapters beside the products that are their targets, and
// with all other parameters frozen but for those that `trainable` names. Throws ConfigError
// (without a place) where find_problem finds one.
OpGraph as_trained(const TrainingSpec& training, OpGraph graph);

// What of `training` does not fit the graph; `which`: the pattern or target that is to blame.
struct TrainedProblem {
  enum class Of { trainable, target_modules } of{};
  std::optional<std::size_t> which;
  std::string message;
  bool operator==(const TrainedProblem&) const = default;
};
std::optional<TrainedProblem> find_problem(const TrainingSpec& training, const OpGraph& graph);

// Whether a parameter belongs to an adapter; and the names that the two of an adapter beside the
// product with this weight have. A bias has none.
bool is_of_adapter(const Tensor& parameter);
struct AdapterNames {
  std::string in, out;  // A, B
};
std::optional<AdapterNames> adapter_of(const std::string& weight);

}  // namespace parplan
