#include "planner/parallel/pipeline.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace parplan {

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
  if (spec.stages() > blocks)
    return fmt::format("pipeline parallelism over {} cannot give every stage a block: the model has {} ({} to {}); "
                       "legal degrees: 1 to {}",
                       spec.stages(), blocks, graph.blocks.front().name, graph.blocks.back().name, blocks);
  if (spec.stage_blocks.empty()) return std::nullopt;  // still to be cut
  if (static_cast<int>(spec.stage_blocks.size()) != spec.stages())
    return fmt::format("the stage cut [{}] has {} stages, and {}", fmt::join(spec.stage_blocks, ", "),
                       spec.stage_blocks.size(), stages_text(spec));
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

}  // namespace parplan
