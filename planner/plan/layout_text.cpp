#include "planner/plan/layout_text.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/base/text.h"

namespace parplan {
namespace {

// "full,none*31,full*20": stages in a row that recompute alike.
std::string runs_of(const std::vector<Recompute>& stages) {
  std::vector<std::string> runs;
  for (auto first = stages.begin(); first != stages.end();) {
    const auto last = std::find_if(first, stages.end(), [&](Recompute recompute) { return recompute != *first; });
    runs.push_back(last - first == 1 ? std::string(name(*first)) : fmt::format("{}*{}", name(*first), last - first));
    first = last;
  }
  return join(runs, ",");
}

}  // namespace

std::string layout_text(const ParallelSpec& spec) {
  std::vector<std::string> words{fmt::format("dp{}", spec.dp()),
                                 fmt::format("tp{}{}", spec.tp(), spec.sequence_parallel ? "+sp" : ""),
                                 fmt::format("pp{}", spec.pp())};
  if (spec.dp() > 1) words.push_back(fmt::format("zero{}", spec.zero_stage));
  words.push_back(fmt::format("mb{}", spec.micro_batch));
  if (spec.pp() > 1) words.push_back(name(spec.schedule));
  if (spec.recompute == Recompute::per_stage)
    words.push_back("recompute=" + runs_of(spec.stage_recompute));
  else if (spec.recompute != Recompute::none)
    words.push_back(fmt::format("recompute={}", name(spec.recompute)));
  std::vector<std::string> axes;  // of several ranks, outermost first
  for (const Axis axis : spec.mesh.order)
    if (spec.mesh.degree_of(axis) > 1) axes.push_back(name(axis));
  if (axes.size() > 1) words.push_back(join(axes, ">"));
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

std::string stage_layers(const ParallelSpec& spec) { return fmt::format("{}", fmt::join(layers_of_stages(spec), ",")); }

std::string stage_recompute(const ParallelSpec& spec) {
  std::vector<std::string> stages;
  for (const Recompute recompute : spec.stage_recompute) stages.emplace_back(name(recompute));
  return fmt::format("{}", fmt::join(stages, ","));
}

}  // namespace parplan
