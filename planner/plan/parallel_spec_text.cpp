#include "planner/plan/parallel_spec_text.h"

#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/base/text.h"
#include "planner/plan/layout_choices.h"

namespace parplan {

std::string layout_text(const ParallelSpec& spec) {
  // The order of the axes ends the text.
  std::vector<std::string> words;
  const auto add = [&](const ChoiceRow& row) {
    const std::string word = row.word ? row.word(spec) : "";
    if (!word.empty()) words.push_back(word);
  };
  for (const ChoiceRow& row : choice_rows())
    if (row.choice != Choice::mesh_order) add(row);
  add(row_of(Choice::mesh_order));
  return join(words, " ");
}

std::vector<int> layers_of_stages(const ParallelSpec& spec) {
  std::vector<int> layers = spec.stage_blocks;
  // The first block is the embedding and the last one the head (models/decoder.h, models/mlp.h).
  if (!layers.empty()) {
    layers.front() -= 1;
    layers.back() -= 1;
  }
  return layers;
}

std::vector<int> layers_of_ranks(const ParallelSpec& spec) {
  std::vector<int> layers(static_cast<std::size_t>(spec.pp()));
  const std::vector<int> of_stages = layers_of_stages(spec);
  for (std::size_t stage = 0; stage < of_stages.size(); ++stage) layers[stage % layers.size()] += of_stages[stage];
  return layers;
}

std::string stage_layers(const ParallelSpec& spec) { return fmt::format("{}", fmt::join(layers_of_stages(spec), ",")); }

std::string stage_recompute(const ParallelSpec& spec) {
  std::vector<std::string> stages;
  for (const StageRecompute& stage : spec.stage_recompute) stages.push_back(write_stage_recompute(stage));
  return fmt::format("{}", fmt::join(stages, ","));
}

}  // namespace parplan
