#include "planner/graph/counting_limit.h"

#include <cmath>

#include <fmt/format.h>

namespace parplan {

std::optional<std::string> beyond_counting(const OpGraph& graph, const TrainingSpec& training) {
  // Every number of a sample and its gradient in fp32, compared with half of what 64 bits count.
  constexpr double bytes_of_number = 2 * 4;
  const double most = std::exp2(62);
  double numbers = 0.0;
  for (const Tensor& tensor : graph.tensors) {
    if (tensor.role == TensorRole::parameter) continue;
    double count = 1.0;
    for (const TensorDim& dim : tensor.dims) count *= static_cast<double>(dim.size);
    numbers += count;
  }
  const double sample = numbers * bytes_of_number;
  if (sample * static_cast<double>(training.global_batch) <= most) return std::nullopt;
  return fmt::format(
      "a global batch of {} sequences of {} tokens has {:.1e} bytes of activations and their gradients, more than can "
      "be counted; give at most {:.0f} sequences",
      training.global_batch, training.sequence_length, sample * static_cast<double>(training.global_batch),
      std::floor(most / sample));
}

}  // namespace parplan
