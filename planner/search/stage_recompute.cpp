#include "planner/search/stage_recompute.h"

#include <algorithm>
#include <utility>

#include "planner/parallel/cut_stages.h"
#include "planner/parallel/pipeline.h"
#include "planner/parallel/recompute.h"
#include "planner/parallel/techniques.h"
#include "planner/schedule/schedules.h"
#include "planner/search/layout_cuts.h"

namespace parplan {
namespace {

// The blocks of each of a rank's stages.
std::vector<BlockRange> blocks_of_rank(const ParallelSpec& spec, int rank) {
  std::vector<BlockRange> stages;
  for (int stage = 0, end = 0; stage < spec.stages(); ++stage) {
    const int begin = std::exchange(end, end + spec.stage_blocks[stage]);
    if (rank_of_stage(spec, stage) == rank) stages.push_back({begin, end});
  }
  return stages;
}

}  // namespace

bool may_mix(const LayoutRequest& request, const Engine& engine) {
  return !request[Choice::recompute] && !request[Choice::recompute_layers] && engine.has_recompute_per_stage;
}

std::span<const Recompute> recomputes_of(const ParallelSpec& spec, const Engine& engine, bool mixes) {
  if (mixes && spec.recompute == Recompute::none) return searched_recomputes(engine);
  return {&spec.recompute, 1};
}

bool lists_choices(int ranks, const Engine& engine) {
  std::size_t choices = 1;
  for (int rank = 0; rank < ranks && choices <= most_choices; ++rank) choices *= searched_recomputes(engine).size();
  return choices <= most_choices;
}

std::vector<std::vector<StageRecompute>> recompute_choices(const ParallelSpec& spec, const Engine& engine) {
  const std::span<const Recompute> each = searched_recomputes(engine);
  std::vector<std::vector<StageRecompute>> all;
  std::vector<std::size_t> numbers(static_cast<std::size_t>(spec.pp()), 0);  // by rank
  // Counts up, the first rank fastest.
  const auto next = [&] {
    return std::ranges::any_of(numbers, [&](std::size_t& number) {
      number = (number + 1) % each.size();
      return number != 0;
    });
  };
  while (next()) {
    if (std::ranges::adjacent_find(numbers, std::ranges::not_equal_to()) == numbers.end()) continue;
    std::vector<StageRecompute>& choices = all.emplace_back();
    for (int stage = 0; stage < spec.stages(); ++stage) choices.emplace_back(each[numbers[rank_of_stage(spec, stage)]]);
  }
  return all;
}

std::optional<ParallelSpec> recomputing_where_needed(Estimator& estimator, const OpGraph& graph,
                                                     const TrainingSpec& training, const Placements& placements,
                                                     const ParallelSpec& spec) {
  const std::span<const Recompute> recomputes = searched_recomputes(training.engine);
  if (!takes_fastest_cut_alone(spec)) {
    const LayoutCuts by_memory(estimator, spec, placements, shape_of(spec, training), recomputes);
    std::optional<std::vector<int>> choices = fastest_options(by_memory.options(), spec.stage_blocks);
    if (!choices) return std::nullopt;
    return with_cut(spec, {spec.stage_blocks, std::move(*choices)}, recomputes);
  }
  const ScheduleForms schedule = forms_of(row_of(spec.schedule));
  StageCut cut{spec.stage_blocks, std::vector<int>(static_cast<std::size_t>(spec.stages()), 0)};
  for (int rank = 0; rank < spec.pp(); ++rank) {
    const std::vector<BlockRange> stages = blocks_of_rank(spec, rank);
    std::optional<std::pair<Seconds, int>> fastest;
    for (int choice = 0; choice < static_cast<int>(recomputes.size()); ++choice) {
      if (estimator.peak(spec, placements, schedule, rank, stages, recomputes[choice]) >
          estimator.capacity(spec.mesh, rank))
        continue;
      const std::vector<Seconds> by_kind = estimator.kind_seconds(spec, placements, rank, recomputes[choice]);
      Seconds time;
      for (const BlockRange& stage : stages)
        for (int block = stage.first; block < stage.last; ++block) time += by_kind[graph.blocks[block].kind];
      if (!fastest || time < fastest->first) fastest = {time, choice};
    }
    if (!fastest) return std::nullopt;
    for (const int stage : stages_of_rank(spec, rank)) cut.options[stage] = fastest->second;
  }
  return with_cut(spec, cut, recomputes);
}

namespace {

// The blocks of a stage that are layers.
BlockRange layers_of(BlockRange stage, int blocks) {
  return {std::max(stage.first, 1), std::min(stage.last, blocks - 1)};
}

// Stages of ranks that recompute so many layers each, in the fewest words.
ParallelSpec with_layers(ParallelSpec spec, std::span<const StageRecompute> of_ranks, int blocks) {
  int most = 0, end = 0;
  for (int stage = 0; stage < spec.stages(); ++stage) {
    const int begin = std::exchange(end, end + spec.stage_blocks[stage]);
    const int layers = layers_of({begin, end}, blocks).size();
    most = std::max(most, layers);
    StageRecompute own = of_ranks[static_cast<std::size_t>(rank_of_stage(spec, stage))];
    if (own.layers >= layers) own.layers = 0;
    spec.stage_recompute.push_back(own);
  }
  spec.recompute = Recompute::per_stage;
  if (std::ranges::adjacent_find(of_ranks, std::ranges::not_equal_to()) == of_ranks.end()) {
    spec.stage_recompute.clear();
    spec.recompute = of_ranks.front().rule;
    spec.recompute_layers = of_ranks.front().layers < most ? of_ranks.front().layers : 0;
  }
  return spec;
}

}  // namespace

std::optional<ParallelSpec> recomputing_fewest_layers(Estimator& estimator, const OpGraph& graph,
                                                      const TrainingSpec& training, const Placements& placements,
                                                      const ParallelSpec& spec) {
  const ScheduleForms schedule = forms_of(row_of(spec.schedule));
  const int blocks = static_cast<int>(graph.blocks.size());
  std::vector<StageRecompute> of_ranks;
  bool some = false;
  for (int rank = 0; rank < spec.pp(); ++rank) {
    const std::vector<BlockRange> stages = blocks_of_rank(spec, rank);
    int most = 0;  // layers of a stage
    for (const BlockRange& stage : stages) most = std::max(most, layers_of(stage, blocks).size());
    const Bytes capacity = estimator.capacity(spec.mesh, rank);
    const auto fits = [&](StageRecompute recompute) {
      return estimator.peak(spec, placements, schedule, rank, stages, recompute) <= capacity;
    };
    if (fits(Recompute::none)) {
      of_ranks.emplace_back(Recompute::none);
      continue;
    }
    const std::vector<Seconds> kept = estimator.kind_seconds(spec, placements, rank, Recompute::none);
    std::optional<std::pair<Seconds, StageRecompute>> fastest;
    for (const Recompute rule : searched_recomputes(training.engine)) {
      const bool is_had = rule == Recompute::full ? training.engine.has_recompute_of_some_layers
                                                  : training.engine.has_modules_of_some_layers;
      if (rule == Recompute::none || !fits(rule)) continue;
      // More layers that recompute need no more memory.
      int too_few = is_had ? 0 : most - 1, enough = most;
      while (enough - too_few > 1) {
        const int middle = too_few + (enough - too_few) / 2;
        (fits({rule, middle}) ? enough : too_few) = middle;
      }
      const std::vector<Seconds> again = estimator.kind_seconds(spec, placements, rank, rule);
      Seconds added;
      for (const BlockRange& stage : stages) {
        const BlockRange layers = layers_of(stage, blocks);
        for (int block = layers.first; block < std::min(layers.first + enough, layers.last); ++block) {
          const auto kind = static_cast<std::size_t>(graph.blocks[block].kind);
          added += again[kind] - kept[kind];
        }
      }
      if (!fastest || added < fastest->first) fastest = {added, StageRecompute(rule, enough)};
      some = some || enough < most;
    }
    if (!fastest) return std::nullopt;
    of_ranks.push_back(fastest->second);
  }
  if (!some) return std::nullopt;
  ParallelSpec fewest = with_layers(spec, of_ranks, blocks);
  return recomputes_some_layers(fewest) ? std::optional(std::move(fewest)) : std::nullopt;
}

}  // namespace parplan
