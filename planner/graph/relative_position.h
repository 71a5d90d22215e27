#pragma once

#include <cstdint>

namespace parplan {

// The row of a table of relative position biases for a key that is `distance` positions behind its
// query, or before it where that is negative (Raffel et al. 2020, arXiv:1910.10683, section 2.1;
// `_relative_position_bucket` of Mesh TensorFlow and transformers): a row for each distance up to
// half of them, then rows of logarithmic width up to `most`, beyond which all distances share the
// last. Bidirectional attention has half of the rows for keys behind the query; causal attention
// sees none. Kernels of all backends call it. It compares powers, where the formula has logarithms,
// so that rounding decides on no backend to which side of a bound a distance belongs.
constexpr std::int64_t relative_bucket(std::int64_t distance, std::int64_t buckets, std::int64_t most,
                                       bool bidirectional) {
  const std::int64_t own = bidirectional ? buckets / 2 : buckets;
  const std::int64_t first = bidirectional && distance > 0 ? own : 0;
  const std::int64_t away = distance < 0 ? -distance : bidirectional ? distance : 0;
  const std::int64_t exact = own / 2;
  if (away < exact) return first + away;
  const double ratio = static_cast<double>(away) / static_cast<double>(exact);
  const double widest = static_cast<double>(most) / static_cast<double>(exact);
  // Bucket exact + k begins where ratio^(own - exact) = widest^k.
  double reached = 1.0 + 1e-9;
  for (std::int64_t i = exact; i < own; ++i) reached *= ratio;
  std::int64_t beyond = 0;
  for (double bound = widest; bound <= reached && beyond + 1 < own - exact; bound *= widest) ++beyond;
  return first + exact + beyond;
}

}  // namespace parplan
