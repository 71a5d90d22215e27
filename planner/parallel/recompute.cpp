#include "planner/parallel/recompute.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "planner/base/text.h"
#include "planner/plan/parallel_spec_text.h"

namespace parplan {

bool recomputes_some_layers(const ParallelSpec& spec) {
  return spec.recompute_layers > 0 ||
         std::ranges::any_of(spec.stage_recompute, [](const StageRecompute& stage) { return stage.layers > 0; });
}

int most_layers_of_a_stage(const OpGraph& graph, const ParallelSpec& spec) {
  if (!spec.stage_blocks.empty()) return std::max(std::ranges::max(layers_of_stages(spec)), 0);
  const int layers = static_cast<int>(graph.blocks.size()) - 2;
  return (std::max(layers, 0) + spec.stages() - 1) / spec.stages();
}

std::vector<int> legal_recompute_layers(const OpGraph& graph, const TrainingSpec& /*training*/,
                                        const ParallelSpec& spec, int most) {
  const bool has_one_rule = spec.recompute != Recompute::none && spec.recompute != Recompute::per_stage;
  std::vector<int> numbers(
      static_cast<std::size_t>(has_one_rule ? std::min(most, most_layers_of_a_stage(graph, spec)) + 1 : 1));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

std::optional<std::string> illegal_recompute(const OpGraph& graph, const TrainingSpec& /*training*/,
                                             const ParallelSpec& spec) {
  if (spec.recompute_layers != 0) {
    if (spec.recompute == Recompute::none || spec.recompute == Recompute::per_stage)
      return fmt::format("recompute_layers says how many layers of each stage recompute, and recompute is {}",
                         name(spec.recompute));
    if (const int most = most_layers_of_a_stage(graph, spec); spec.recompute_layers > most || spec.recompute_layers < 0)
      return fmt::format(
          "recompute_layers is {}, and {} {} layer{}; take 1 to {}, or leave it out: all layers recompute",
          spec.recompute_layers, spec.stages() == 1 ? "the model has" : "no stage has more than", most,
          most == 1 ? "" : "s", most);
  }
  if (spec.stage_blocks.size() != spec.stage_recompute.size()) return std::nullopt;
  const std::vector<int> layers = layers_of_stages(spec);
  for (std::size_t stage = 0; stage < layers.size(); ++stage) {
    const StageRecompute& own = spec.stage_recompute[stage];
    if (own.layers == 0) continue;
    if (own.layers > layers[stage])
      return fmt::format(
          "stage {} recomputes {} of its layers ({}), and it has {}; take at most {}, or {} for all of them", stage,
          own.layers, write_stage_recompute(own), layers[stage], layers[stage], name(own.rule));
    if (own.rule == Recompute::none)
      return fmt::format("stage {} recomputes nothing of {} layers; say what they recompute, or leave the number out",
                         stage, own.layers);
  }
  return std::nullopt;
}

void place_recompute(const OpGraph& /*graph*/, const ParallelSpec& /*spec*/, Placements& /*placements*/) {}

}  // namespace parplan
