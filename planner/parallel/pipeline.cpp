#include "planner/parallel/pipeline.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

// Multiply-adds of a block's matrix products for one token: linear layers by their weights, attention by scores and
// values over the whole sequence (not halved for causality, as model_flops_per_sample counts).
double block_weight(const OpGraph& graph, const Block& block) {
  double weight = 0;
  for (int i = block.first_op; i < block.last_op; ++i) {
    const Op& op = graph.ops[static_cast<std::size_t>(i)];
    if (op.kind == OpKind::linear)
      weight += static_cast<double>(element_count(graph.tensors[static_cast<std::size_t>(op.parameters[0])]));
    if (op.kind == OpKind::attention)
      weight += 2.0 * static_cast<double>(graph.sequence * op.attributes.heads * op.attributes.head_dim);
  }
  return weight;
}

}  // namespace

std::vector<int> legal_pipeline_degrees(const OpGraph& graph, const TrainingSpec& /*training*/,
                                        const ParallelSpec& /*spec*/, int most) {
  std::vector<int> degrees(static_cast<std::size_t>(std::min(most, static_cast<int>(graph.blocks.size()))));
  std::iota(degrees.begin(), degrees.end(), 1);
  return degrees;
}

std::optional<std::string> illegal_pipeline(const OpGraph& graph, const TrainingSpec& /*training*/,
                                            const ParallelSpec& spec) {
  const int blocks = static_cast<int>(graph.blocks.size());
  if (spec.pp() < 1) return fmt::format("the pipeline-parallel degree is {}; it must be at least 1", spec.pp());
  if (spec.pp() > blocks)
    return fmt::format("pipeline parallelism over {} cannot give every stage a block: the model has {} ({} to {}); "
                       "legal degrees: 1 to {}",
                       spec.pp(), blocks, graph.blocks.front().name, graph.blocks.back().name, blocks);
  if (spec.stage_blocks.empty()) return std::nullopt;  // still to be cut
  if (static_cast<int>(spec.stage_blocks.size()) != spec.pp())
    return fmt::format("the stage cut [{}] has {} stages, and pp is {}", fmt::join(spec.stage_blocks, ", "),
                       spec.stage_blocks.size(), spec.pp());
  for (std::size_t s = 0; s < spec.stage_blocks.size(); ++s)
    if (spec.stage_blocks[s] < 1)
      return fmt::format("the stage cut [{}] leaves stage {} without a block", fmt::join(spec.stage_blocks, ", "), s);
  const int sum = std::accumulate(spec.stage_blocks.begin(), spec.stage_blocks.end(), 0);
  if (sum != blocks)
    return fmt::format("the stage cut [{}] holds {} blocks, and the model has {} ({} to {})",
                       fmt::join(spec.stage_blocks, ", "), sum, blocks, graph.blocks.front().name,
                       graph.blocks.back().name);
  return std::nullopt;
}

void place_pipeline(const OpGraph& /*graph*/, const ParallelSpec& /*spec*/, Placements& /*placements*/) {}

std::vector<int> cut_stages(std::span<const double> block_cost, int stages) {
  const std::size_t n = block_cost.size(), p = static_cast<std::size_t>(stages);
  PARPLAN_ASSERT(stages >= 1 && p <= n, fmt::format("{} stages, {} blocks", stages, n));
  std::vector<double> prefix(n + 1);
  std::partial_sum(block_cost.begin(), block_cost.end(), prefix.begin() + 1);
  const auto cost = [&](std::size_t begin, std::size_t end) { return prefix[end] - prefix[begin]; };
  const auto at = [&](std::size_t s, std::size_t end) { return s * (n + 1) + end; };
  constexpr double infinite = std::numeric_limits<double>::infinity();

  // least[s][e]: the first e blocks in s + 1 stages. First the least possible maximum ...
  std::vector<double> least(p * (n + 1), infinite);
  for (std::size_t e = 1; e <= n; ++e) least[at(0, e)] = cost(0, e);
  for (std::size_t s = 1; s < p; ++s)
    for (std::size_t e = s + 1; e <= n; ++e)
      for (std::size_t b = s; b < e; ++b)
        least[at(s, e)] = std::min(least[at(s, e)], std::max(least[at(s - 1, b)], cost(b, e)));
  // (differences of prefix sums carry rounding, which must not decide between equal stages)
  const double largest = least[at(p - 1, n)] * (1 + 1e-12);

  // ... then the least sum of squares among cuts that reach it.
  std::vector<double> squares(p * (n + 1), infinite);
  std::vector<std::size_t> begin(p * (n + 1), 0);
  for (std::size_t e = 1; e <= n && cost(0, e) <= largest; ++e) squares[at(0, e)] = cost(0, e) * cost(0, e);
  for (std::size_t s = 1; s < p; ++s)
    for (std::size_t e = s + 1; e <= n; ++e)
      for (std::size_t b = s; b < e; ++b) {
        if (cost(b, e) > largest) continue;
        const double sum = squares[at(s - 1, b)] + cost(b, e) * cost(b, e);
        if (sum < squares[at(s, e)] * (1 - 1e-12)) {
          squares[at(s, e)] = sum;
          begin[at(s, e)] = b;
        }
      }
  std::vector<int> blocks(p);
  for (std::size_t s = p, end = n; s-- > 0;) {
    const std::size_t first = begin[at(s, end)];
    blocks[s] = static_cast<int>(end - first);
    end = first;
  }
  return blocks;
}

std::vector<int> even_stages(const OpGraph& graph, int stages) {
  std::vector<double> weights;
  for (const Block& block : graph.blocks) weights.push_back(block_weight(graph, block));
  return cut_stages(weights, stages);
}

}  // namespace parplan
