#include "planner/search/candidates.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <utility>

#include "planner/base/parallel_for.h"
#include "planner/parallel/cut_stages.h"
#include "planner/parallel/pipeline.h"
#include "planner/parallel/recompute.h"
#include "planner/parallel/techniques.h"
#include "planner/plan/unlike_replicas.h"
#include "planner/schedule/schedules.h"
#include "planner/search/layout_cuts.h"
#include "planner/search/rank_cuts.h"
#include "planner/search/replica_shares.h"

namespace parplan {
namespace {

// What is recomputed need not be copied to the host.
bool is_faster_without_recompute(const ParallelSpec& spec) {
  return spec.offload.activations == Home::device;
}

// The number of ways of cutting `blocks` into `stages` runs; at most `most_cuts` + 1.
std::int64_t cuts_of(int blocks, int stages) {
  std::int64_t ways = 1;
  for (int i = 1; i < stages; ++i) {
    ways = ways * (blocks - i) / i;
    if (ways > most_cuts) return most_cuts + 1;
  }
  return ways;
}

// The next cut in lexicographic order, from {1, ..., 1, rest}; false after the last.
bool next_cut(std::vector<int>& cut) {
  for (std::size_t s = cut.size() - 1; s-- > 0;) {
    int behind = 0;
    for (std::size_t i = s + 1; i < cut.size(); ++i) behind += cut[i];
    const int stages_behind = static_cast<int>(cut.size() - s) - 1;
    if (behind == stages_behind) continue;  // nothing to give
    ++cut[s];
    for (std::size_t i = s + 1; i + 1 < cut.size(); ++i) cut[i] = 1;
    cut.back() = behind - 1 - (stages_behind - 1);
    return true;
  }
  return false;
}

}  // namespace

CandidateMaker::CandidateMaker(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                               Objective objective, std::shared_ptr<KnownBlockShapes> known_shapes,
                               const SpaceWidth& width)
    : graph_(graph),
      cluster_(cluster),
      training_(training),
      objective_(objective),
      width_(width),
      balances_replicas_(width.balances_replicas && objective != Objective::memory),
      estimator_(graph, cluster, training, std::move(known_shapes)) {}

const Placements& CandidateMaker::placements_of(const ParallelSpec& spec) {
  const ParallelSpec key = placement_key(spec);
  const auto found = placements_.find(key);
  return found != placements_.end() ? found->second : placements_.emplace(key, place(graph_, spec)).first->second;
}

std::optional<ParallelSpec> CandidateMaker::balanced(const ParallelSpec& spec) {
  const bool meets_each_micro_batch = spec.zero_stage > 1 && spec.mesh.dp_shard == 0;
  if (spec.dp() == 1 || !spec.replica_micro_batches.empty() || meets_each_micro_batch || is_v_shaped(spec.schedule) ||
      !is_own(training_.engine))
    return std::nullopt;
  const std::vector<int> kinds = kinds_of_replicas(cluster_, spec.mesh);
  if (std::ranges::adjacent_find(kinds, std::ranges::not_equal_to()) == kinds.end()) return std::nullopt;
  // Interleaved pipelines run whole groups.
  const int alike = static_cast<int>(micro_batches(spec, training_));
  const int unit = spec.schedule == ScheduleKind::interleaved ? shape_of(spec, training_).group : 1;
  if (alike % unit != 0) return std::nullopt;
  const Placements& placements = placements_of(spec);
  const ScheduleForms forms = forms_of(row_of(spec.schedule));
  ParallelSpec with = spec;
  with.replica_micro_batches.assign(kinds.size(), alike);
  const auto time_of = [&](int kind, int count) {
    with.replica_micro_batches[kind] = unit * count;
    const Bound bound = estimator_.bound_of_replica(with, placements, forms, kind);
    return bound.spare.count < 0 ? Seconds(std::numeric_limits<double>::infinity()) : bound.lower_bound;
  };
  // No numbers fit where one alone does not.
  for (int replica = 0; replica < spec.dp(); ++replica)
    if (kinds[replica] == replica && !std::isfinite(time_of(replica, 1).value)) return std::nullopt;
  const std::vector<int> units = balanced_shares(kinds, spec.dp() * (alike / unit), time_of);
  for (std::size_t replica = 0; replica < units.size(); ++replica)
    with.replica_micro_batches[replica] = unit * units[replica];
  if (illegal(graph_, training_, with)) return std::nullopt;
  const Bound unlike = estimator_.bound(with, placements, forms), own = estimator_.bound(spec, placements, forms);
  const bool is_better = unlike.spare.count >= 0 && (own.spare.count < 0 || unlike.lower_bound < own.lower_bound);
  return is_better ? std::optional(with) : std::nullopt;
}

Candidate CandidateMaker::estimated(ParallelSpec spec) {
  if (balances_replicas_)
    if (std::optional<ParallelSpec> with = balanced(spec)) spec = *std::move(with);
  Candidate candidate{.spec = std::move(spec), .bound = {}};
  candidate.bound =
      estimator_.bound(candidate.spec, placements_of(candidate.spec), forms_of(row_of(candidate.spec.schedule)));
  return candidate;
}

RankedPlan CandidateMaker::with_times(const ParallelSpec& spec) {
  const Estimate estimate = estimator_.estimate(spec, placements_of(spec), forms_of(row_of(spec.schedule)));
  return {spec,
          {.time = estimate.time,
           .memory = estimate.memory,
           .memory_stage = estimate.memory_stage,
           .memory_replica = estimate.memory_replica,
           .communication = {}}};
}

const CandidateMaker::FastestCut& CandidateMaker::fastest_cut(const ParallelSpec& spec) {
  const Placements& placements = placements_of(spec);
  std::pair key{cut_key(spec, training_), estimator_.paces(spec, placements)};
  const auto found = cuts_.find(key);
  if (found != cuts_.end()) return found->second;
  std::vector<std::vector<Seconds>> prefix;  // by pace
  std::vector<Seconds> least;                // by block
  for (int pace = 0; pace < static_cast<int>(key.second.size()); ++pace) {
    const std::vector<Seconds> seconds = estimator_.block_seconds(spec, placements, pace);
    std::partial_sum(seconds.begin(), seconds.end(), prefix.emplace_back(seconds.size() + 1).begin() + 1);
    if (least.empty()) least = seconds;
    for (std::size_t b = 0; b < seconds.size(); ++b) least[b] = std::min(least[b], seconds[b]);
  }
  std::vector<std::vector<StageOption>> stages;
  for (int s = 0; s < spec.stages(); ++s) {
    const int rank = rank_of_stage(spec, s);
    stages.push_back({StageOption{.seconds = prefix[prefix.size() == 1 ? 0 : rank], .state = {}, .saved = {}}});
  }
  FastestCut cut{.blocks = cut_stages(stages)->blocks,
                 .slowest = {},
                 .computing = std::accumulate(least.begin(), least.end(), Seconds())};
  std::size_t end = 0;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const std::size_t begin = std::exchange(end, end + static_cast<std::size_t>(cut.blocks[s]));
    cut.slowest = std::max(cut.slowest, stages[s].front().seconds[end] - stages[s].front().seconds[begin]);
  }
  return cuts_.emplace(std::move(key), std::move(cut)).first->second;
}

namespace {

// What each stage of a layout may recompute.
std::span<const Recompute> recomputes_of(const ParallelSpec& spec, const Engine& engine, bool mixes) {
  if (mixes && spec.recompute == Recompute::none) return searched_recomputes(engine);
  return {&spec.recompute, 1};
}

// Whether all choices of so many ranks are few.
bool lists_choices(int ranks, const Engine& engine) {
  std::size_t choices = 1;
  for (int rank = 0; rank < ranks && choices <= most_choices; ++rank) choices *= searched_recomputes(engine).size();
  return choices <= most_choices;
}

}  // namespace

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

std::optional<ParallelSpec> CandidateMaker::recomputing_where_needed(const ParallelSpec& spec) {
  const Placements& placements = placements_of(spec);
  const std::span<const Recompute> recomputes = searched_recomputes(training_.engine);
  if (!has_few_cuts(spec)) {
    const LayoutCuts by_memory(estimator_, spec, placements, shape_of(spec, training_), recomputes);
    std::optional<std::vector<int>> choices = fastest_options(by_memory.options(), spec.stage_blocks);
    if (!choices) return std::nullopt;
    return with_cut(spec, {spec.stage_blocks, std::move(*choices)}, recomputes);
  }
  const ScheduleForms schedule = forms_of(row_of(spec.schedule));
  StageCut cut{spec.stage_blocks, std::vector<int>(static_cast<std::size_t>(spec.stages()), 0)};
  for (int rank = 0; rank < spec.pp(); ++rank) {
    std::vector<BlockRange> stages;
    for (int stage = 0, end = 0; stage < spec.stages(); ++stage) {
      const int begin = std::exchange(end, end + spec.stage_blocks[stage]);
      if (rank_of_stage(spec, stage) == rank) stages.push_back({begin, end});
    }
    std::optional<std::pair<Seconds, int>> fastest;
    for (int choice = 0; choice < static_cast<int>(recomputes.size()); ++choice) {
      if (estimator_.peak(spec, placements, schedule, rank, stages, recomputes[choice]) >
          estimator_.capacity(spec.mesh, rank))
        continue;
      const std::vector<Seconds> by_kind = estimator_.kind_seconds(spec, placements, rank, recomputes[choice]);
      Seconds time;
      for (const BlockRange& stage : stages)
        for (int block = stage.first; block < stage.last; ++block) time += by_kind[graph_.blocks[block].kind];
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

std::optional<ParallelSpec> CandidateMaker::recomputing_fewest_layers(const ParallelSpec& spec) {
  const Placements& placements = placements_of(spec);
  const ScheduleForms schedule = forms_of(row_of(spec.schedule));
  const int blocks = static_cast<int>(graph_.blocks.size());
  std::vector<StageRecompute> of_ranks;
  bool some = false;
  for (int rank = 0; rank < spec.pp(); ++rank) {
    std::vector<BlockRange> stages;
    int most = 0;  // layers of a stage
    for (int stage = 0, end = 0; stage < spec.stages(); ++stage) {
      const int begin = std::exchange(end, end + spec.stage_blocks[stage]);
      if (rank_of_stage(spec, stage) != rank) continue;
      stages.push_back({begin, end});
      most = std::max(most, layers_of(stages.back(), blocks).size());
    }
    const Bytes capacity = estimator_.capacity(spec.mesh, rank);
    const auto fits = [&](StageRecompute recompute) {
      return estimator_.peak(spec, placements, schedule, rank, stages, recompute) <= capacity;
    };
    if (fits(Recompute::none)) {
      of_ranks.emplace_back(Recompute::none);
      continue;
    }
    const std::vector<Seconds> kept = estimator_.kind_seconds(spec, placements, rank, Recompute::none);
    std::optional<std::pair<Seconds, StageRecompute>> fastest;
    for (const Recompute rule : searched_recomputes(training_.engine)) {
      const bool is_had = rule == Recompute::full ? training_.engine.has_recompute_of_some_layers
                                                  : training_.engine.has_modules_of_some_layers;
      if (rule == Recompute::none || !fits(rule)) continue;
      // More layers that recompute need no more memory.
      int too_few = is_had ? 0 : most - 1, enough = most;
      while (enough - too_few > 1) {
        const int middle = too_few + (enough - too_few) / 2;
        (fits({rule, middle}) ? enough : too_few) = middle;
      }
      const std::vector<Seconds> again = estimator_.kind_seconds(spec, placements, rank, rule);
      Seconds added;
      for (const BlockRange& stage : stages) {
        const BlockRange layers = layers_of(stage, blocks);
        for (int block = layers.first; block < std::min(layers.first + enough, layers.last); ++block) {
          const auto kind = static_cast<std::size_t>(graph_.blocks[block].kind);
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

void CandidateMaker::add_fewest_layers(const ParallelSpec& cut, bool mixes, std::vector<Candidate>& candidates) {
  ParallelSpec none = cut;
  none.recompute = Recompute::none;
  none.recompute_layers = 0;
  none.stage_recompute.clear();
  if (!has_fewest_layers(none, mixes)) return;
  std::optional<ParallelSpec> fewest = recomputing_fewest_layers(none);
  if (!fewest) return;
  Candidate candidate = estimated(std::move(*fewest));
  if (candidate.bound.spare.count >= 0) candidates.push_back(std::move(candidate));
}

std::optional<Candidate> CandidateMaker::cut_that_fits(const ParallelSpec& spec, bool mixes) {
  const Placements& placements = placements_of(spec);
  const std::span<const Recompute> recomputes = recomputes_of(spec, training_.engine, mixes);
  const auto make = [&]() -> std::optional<StageCut> {
    if (has_few_cuts(spec))
      return fastest_cut_of_ranks(estimator_, graph_, spec, placements, shape_of(spec, training_), recomputes);
    const LayoutCuts cuts(estimator_, spec, placements, shape_of(spec, training_), recomputes);
    if (cuts.surely_none()) return std::nullopt;
    std::optional<StageCut> cut = mixes && cuts.surely_none(1) ? std::nullopt : cuts.fastest(1);
    return cut || !mixes ? cut : cuts.fastest();
  };
  const std::tuple key{fitting_cut_key(spec), estimator_.paces(spec, placements), mixes};
  auto found = fitting_cuts_.find(key);
  if (found == fitting_cuts_.end()) found = fitting_cuts_.emplace(key, make()).first;
  if (!found->second) return std::nullopt;
  Candidate candidate = estimated(with_cut(spec, *found->second, recomputes));
  return candidate.bound.spare.count >= 0 ? std::optional(std::move(candidate)) : std::nullopt;
}

std::vector<int> CandidateMaker::cut_of(const ParallelSpec& spec) {
  if (std::optional<std::vector<int>> fixed = stages_of_engine(graph_, training_.engine, spec.stages())) return *fixed;
  ParallelSpec cut = spec;
  cut.stage_blocks = fastest_cut(spec).blocks;
  if (spec.recompute != Recompute::per_stage && estimated(cut).bound.spare.count < 0)
    if (std::optional<Candidate> other = cut_that_fits(spec, false)) return other->spec.stage_blocks;
  return cut.stage_blocks;
}

// What fits with all stages recomputing alike is the layout with that recompute.
void CandidateMaker::add_mix(const ParallelSpec& spec, std::vector<Candidate>& candidates) {
  if (candidates.back().bound.room_in_all.count < 0) return;
  std::optional<ParallelSpec> mixed = recomputing_where_needed(spec);
  if (mixed && mixed->recompute == Recompute::per_stage) candidates.push_back(estimated(std::move(*mixed)));
}

void CandidateMaker::add_all_cuts(const ParallelSpec& spec, bool mixes, std::vector<Candidate>& candidates) {
  const int stages = spec.stages();
  std::vector<int> cut(static_cast<std::size_t>(stages), 1);
  cut.back() = static_cast<int>(graph_.blocks.size()) - stages + 1;
  do {
    ParallelSpec one = spec;
    one.stage_blocks = cut;
    candidates.push_back(estimated(one));
    const bool fits = candidates.back().bound.spare.count >= 0;
    if (!fits && spec.recompute == Recompute::none) add_fewest_layers(one, mixes, candidates);
    // Where stages that do not recompute are faster and fit, a mix can only need less memory.
    const bool is_fastest = fits && objective_ != Objective::memory && is_faster_without_recompute(spec);
    if (is_fastest || !mixes || spec.recompute != Recompute::none) continue;
    if (!lists_choices(spec.pp(), training_.engine)) {
      if (!fits) add_mix(one, candidates);
      continue;
    }
    one.recompute = Recompute::per_stage;
    for (std::vector<StageRecompute>& choices : recompute_choices(spec, training_.engine)) {
      one.stage_recompute = std::move(choices);
      candidates.push_back(estimated(one));
    }
  } while (next_cut(cut));
}

OfAnyCut CandidateMaker::of_any_cut(const ParallelSpec& spec, const FastestCut& fastest, Bytes room_in_all) const {
  // The fastest cut is one for stages as slow as their slowest devices.
  if (may_have_unlike_replicas(spec)) return {.time = Seconds(0.0), .room_in_all = room_in_all};
  const PipelineShape shape = shape_of(spec, training_);
  const ScheduleRow& row = row_of(spec.schedule);
  // The slowest stage was found to within 1e-9.
  Seconds time = least_pipeline_time(forms_of(row), fastest.computing, fastest.computing, fastest.slowest, shape);
  if (has_few_cuts(spec)) time = std::max(time, row.least(fastest.computing, Seconds(0.0), shape));
  return {.time = time * (1 - 1e-8), .room_in_all = room_in_all};
}

// State is spread over the stages: the fullest is filled at least as much as all together.
Bytes CandidateMaker::least_memory(const ParallelSpec& spec, Bytes room_in_all) {
  double capacity = 0.0, least = std::numeric_limits<double>::infinity();
  for (int s = 0; s < spec.pp(); ++s) {
    const double of_stage = static_cast<double>(estimator_.capacity(spec.mesh, s).count);
    capacity += of_stage;
    least = std::min(least, of_stage);
  }
  const double memory = (capacity - static_cast<double>(room_in_all.count)) / capacity * least;
  return Bytes(static_cast<std::int64_t>(memory * (1 - 1e-9)));
}

std::optional<OfAnyCut> CandidateMaker::add(const ParallelSpec& spec, bool mixes, std::vector<Candidate>& candidates) {
  if (spec.stage_blocks.empty())
    if (std::optional<std::vector<int>> fixed = stages_of_engine(graph_, training_.engine, spec.stages())) {
      ParallelSpec cut = spec;
      cut.stage_blocks = std::move(*fixed);
      return add(cut, mixes, candidates);
    }
  if (!spec.stage_blocks.empty()) {
    candidates.push_back(estimated(spec));
    const bool may_mix = mixes && spec.recompute == Recompute::none && spec.pp() > 1;
    const bool fits = candidates.back().bound.spare.count >= 0;
    if (may_mix && !fits) add_mix(spec, candidates);
    if (spec.recompute == Recompute::none && !fits) add_fewest_layers(spec, mixes, candidates);
    return std::nullopt;
  }
  // Layouts that recompute are among the mixes of those that do not.
  const bool is_covered = mixes && spec.recompute != Recompute::none && is_faster_without_recompute(spec);
  if (cuts_of(static_cast<int>(graph_.blocks.size()), spec.stages()) <= most_cuts) {
    add_all_cuts(spec, mixes, candidates);
    const bool has_all = !mixes || lists_choices(spec.pp(), training_.engine) || objective_ != Objective::memory;
    if (is_covered || has_all) return std::nullopt;
    return of_any_cut(spec, fastest_cut(spec), candidates.back().bound.room_in_all);
  }
  const FastestCut& fastest = fastest_cut(spec);
  ParallelSpec cut = spec;
  cut.stage_blocks = fastest.blocks;
  Candidate candidate = estimated(std::move(cut));
  const bool may_mix = mixes && spec.recompute == Recompute::none;
  std::optional<OfAnyCut> others;
  if (!is_covered) others = of_any_cut(spec, fastest, candidate.bound.room_in_all);
  if (others && candidate.bound.spare.count < 0) others->unfitting = candidate.spec;
  if (candidate.bound.spare.count < 0 && candidate.bound.room_in_all.count >= 0) {
    if (!is_covered) add_fewest_layers(candidate.spec, mixes, candidates);
    if (has_few_cuts(spec)) {
      if (may_mix) {
        const ParallelSpec none = candidate.spec;
        candidates.push_back(std::move(candidate));
        add_mix(none, candidates);
        if (candidates.back().bound.spare.count >= 0) return others;
        std::optional<Candidate> other = cut_that_fits(spec, true);
        if (other && other->spec.recompute != spec.recompute) add_fewest_layers(other->spec, mixes, candidates);
        if (other && (other->spec.recompute == Recompute::per_stage || other->spec.recompute == spec.recompute))
          candidates.push_back(std::move(*other));
        return others;
      }
    }
    if (std::optional<Candidate> other = cut_that_fits(spec, may_mix)) {
      if (other->spec.recompute != spec.recompute) add_fewest_layers(other->spec, mixes, candidates);
      if (other->spec.recompute == spec.recompute)
        candidate = std::move(*other);
      else if (other->spec.recompute == Recompute::per_stage)
        candidates.push_back(std::move(*other));
      // Where all stages recompute alike, the layout with that recompute has it.
    }
  }
  candidates.push_back(std::move(candidate));
  return others;
}

namespace {

// The cut with one block moved from one stage to another; the blocks of the stages in between
// shift.
bool move_block(std::vector<int>& blocks, std::size_t from, std::size_t to) {
  if (from == to || blocks[from] == 1) return false;
  --blocks[from];
  ++blocks[to];
  return true;
}

}  // namespace

CutsBelow CandidateMaker::cuts_below(const ParallelSpec& spec, bool mixes, Seconds limit, std::size_t most) {
  constexpr double none = std::numeric_limits<double>::infinity();
  const Placements& placements = placements_of(spec);
  const ScheduleForms schedule = forms_of(row_of(spec.schedule));
  const std::span<const Recompute> recomputes = recomputes_of(spec, training_.engine, mixes);
  const int blocks = static_cast<int>(graph_.blocks.size());
  CutsBelow below{.candidates = {}, .rest = Seconds(none)};
  if (has_one_cut(spec)) {
    below.rest = of_any_cut(spec, fastest_cut(spec), {}).time;
    return below;
  }

  CutFrame frame = estimator_.cut_frame(spec, placements, recomputes);
  const CutWindow window = cut_window(blocks, spec.pp(),
                                      [&](int stage, int begin, int end) {
                                        return estimator_.least_through(frame, schedule, stage, {begin, end}).value;
                                      },
                                      limit.value);
  if (window.empty()) return below;
  const LayoutCuts by_memory(estimator_, spec, placements, shape_of(spec, training_), recomputes);
  if (by_memory.surely_none()) return below;
  const std::vector<std::vector<StageOption>> options = by_memory.options();
  // Stages that recompute some of their layers take no less than without recompute: where all that
  // they save stays on the device.
  const bool has_fewest = has_fewest_layers(spec, mixes);
  if (has_fewest && !is_faster_without_recompute(spec)) {
    below.rest = of_any_cut(spec, fastest_cut(spec), {}).time;
    return below;
  }
  const auto stage_of = [&](int stage, int begin, int end) -> std::optional<StageOfCut> {
    const std::optional<int> choice =
        fastest_option(options[stage], static_cast<std::size_t>(begin), static_cast<std::size_t>(end));
    if (!choice) return std::nullopt;
    return estimator_.stage_of_cut(frame, spec, placements, schedule, stage, {begin, end},
                                   has_fewest ? 0 : static_cast<std::size_t>(*choice));
  };
  // What the first stage adds, at least.
  Seconds opening(none);
  for (int end = window[1].first; end <= window[1].second; ++end)
    if (const std::optional<StageOfCut> first = stage_of(0, 0, end)) opening = std::min(opening, first->opening);
  const StageCost cost = [&](int stage, int begin, int end) {
    if (estimator_.least_through(frame, schedule, stage, {begin, end}) >= limit) return none;
    const std::optional<StageOfCut> of = stage_of(stage, begin, end);
    if (!of) return none;
    const Seconds opens = stage == 0 ? of->opening : opening;
    return (std::max(opens + of->pipeline, of->alone) + of->end).value * (1 - 1e-12);
  };
  const CheapCuts cheap = cheap_cuts(window, cost, limit.value, most);

  const auto consider = [&](std::vector<int> cut) -> std::optional<Candidate> {
    std::optional<std::vector<int>> choices = fastest_options(options, cut);
    if (!choices) return std::nullopt;
    Candidate candidate = estimated(with_cut(spec, {std::move(cut), std::move(*choices)}, recomputes));
    std::vector<Candidate> fewest;
    if (has_fewest && candidate.spec.recompute != Recompute::none) add_fewest_layers(candidate.spec, mixes, fewest);
    if (!fewest.empty() && fewest.front().bound.lower_bound < candidate.bound.lower_bound)
      candidate = std::move(fewest.front());
    if (candidate.bound.spare.count < 0 || candidate.bound.lower_bound >= limit) return std::nullopt;
    return candidate;
  };
  const auto is_better = [](const Candidate& a, const Candidate& b) {
    return std::tie(a.bound.lower_bound, a.spec.stage_blocks) < std::tie(b.bound.lower_bound, b.spec.stage_blocks);
  };
  for (const std::vector<int>& cut : cheap.cuts)
    if (std::optional<Candidate> candidate = consider(cut)) below.candidates.push_back(std::move(*candidate));
  if (!cheap.all) {
    below.rest = Seconds(cheap.least);
    // Among too many cuts, from the best of those that were made to better ones that differ by one
    // block.
    constexpr std::size_t kept = 8;
    constexpr int most_moves = 8;
    for (int move = 0; move < most_moves && !below.candidates.empty(); ++move) {
      std::ranges::sort(below.candidates, is_better);
      below.candidates.resize(std::min(below.candidates.size(), kept));
      const Candidate best = below.candidates.front();
      for (std::size_t from = 0; from < best.spec.stage_blocks.size(); ++from)
        for (std::size_t to = 0; to < best.spec.stage_blocks.size(); ++to) {
          std::vector<int> moved = best.spec.stage_blocks;
          if (!move_block(moved, from, to) || cheap.costliest(moved) > best.bound.lower_bound.value) continue;
          std::optional<Candidate> candidate = consider(std::move(moved));
          if (candidate && is_better(*candidate, best)) below.candidates.push_back(std::move(*candidate));
        }
      if (below.candidates.size() <= kept && !is_better(below.candidates.back(), best)) break;
    }
  }
  std::ranges::sort(below.candidates, is_better);
  const auto equal = [](const Candidate& a, const Candidate& b) { return a.spec == b.spec; };
  below.candidates.erase(std::unique(below.candidates.begin(), below.candidates.end(), equal), below.candidates.end());
  return below;
}

// Where stages have unequal memory, the fullest may be one that has more than the least.
std::optional<Bytes> CandidateMaker::least_beside(const ParallelSpec& spec, Bytes least) {
  for (int s = 1; s < spec.pp(); ++s)
    if (estimator_.capacity(spec.mesh, s) != estimator_.capacity(spec.mesh, 0)) return least - Bytes(1);
  return std::nullopt;
}

CandidateMaker::LeastCut CandidateMaker::least_cut(const ParallelSpec& spec, bool mixes, Bytes most) {
  const std::span<const Recompute> recomputes = recomputes_of(spec, training_.engine, mixes);
  const LayoutCuts cuts(estimator_, spec, placements_of(spec), shape_of(spec, training_), recomputes);
  const std::optional<Bytes> least = cuts.least_peak(most);
  if (!least) return {};
  ParallelSpec chosen = with_cut(spec, *cuts.fastest_within(*least), recomputes);
  const bool is_candidate =
      chosen.recompute != Recompute::per_stage && chosen.stage_blocks == fastest_cut(chosen).blocks;
  LeastCut result{.candidate = std::nullopt, .others = least_beside(spec, *least)};
  if (!is_candidate) result.candidate = estimated(std::move(chosen));
  return result;
}

// Specs whose blocks have equal shapes go to one maker together, since they share lowered Segments.
MadeCandidates make_candidates(std::span<CandidateMaker* const> makers, std::span<const ParallelSpec> specs,
                               bool mixes, Objective objective) {
  std::map<std::tuple<std::int64_t, int, bool>, std::vector<std::size_t>> by_shape;
  for (std::size_t i = 0; i < specs.size(); ++i)
    by_shape[{specs[i].micro_batch, specs[i].tp(), specs[i].sequence_parallel}].push_back(i);
  std::vector<const std::vector<std::size_t>*> tasks;
  for (const auto& [shape, members] : by_shape) tasks.push_back(&members);
  using Numbered = std::pair<std::size_t, Candidate>;  // with the number of its spec
  struct OfTask {
    std::vector<Numbered> fitting;
    std::optional<Numbered> smallest;
    std::int64_t count = 0;
    std::vector<std::pair<std::size_t, OfAnyCut>> others;
    std::vector<ParallelSpec> unfitting;
  };
  const auto smaller = [](const Numbered& a, const Numbered& b) {
    return std::pair(a.second.bound.memory.peak(), a.first) < std::pair(b.second.bound.memory.peak(), b.first);
  };
  std::vector<OfTask> made(tasks.size());
  parallel_for(static_cast<int>(makers.size()), tasks.size(), [&](int thread, std::size_t task) {
    std::vector<Candidate> candidates;
    OfTask& to = made[task];
    for (const std::size_t i : *tasks[task]) {
      candidates.clear();
      if (const std::optional<OfAnyCut> open = makers[thread]->add(specs[i], mixes, candidates)) {
        to.others.emplace_back(i, *open);
        if (open->unfitting) to.unfitting.push_back(*open->unfitting);
      }
      to.count += static_cast<std::int64_t>(candidates.size());
      for (Candidate& candidate : candidates) {
        if (candidate.bound.spare.count >= 0) {
          to.fitting.emplace_back(i, std::move(candidate));
          continue;
        }
        if (candidate.spec.recompute == specs[i].recompute && (!mixes || specs[i].recompute == Recompute::none))
          to.unfitting.push_back(candidate.spec);
        if (Numbered one(i, std::move(candidate)); !to.smallest || smaller(one, *to.smallest))
          to.smallest = std::move(one);
      }
    }
  });
  MadeCandidates all;
  std::vector<Numbered> fitting;
  std::optional<Numbered> smallest;
  std::vector<std::pair<std::size_t, OfAnyCut>> others;
  for (OfTask& one : made) {
    all.count += one.count;
    std::ranges::move(one.unfitting, std::back_inserter(all.unfitting));
    std::ranges::move(one.fitting, std::back_inserter(fitting));
    std::ranges::move(one.others, std::back_inserter(others));
    if (one.smallest && (!smallest || smaller(*one.smallest, *smallest))) smallest = std::move(one.smallest);
  }
  std::ranges::stable_sort(fitting, {}, &Numbered::first);
  std::ranges::sort(others, {}, &std::pair<std::size_t, OfAnyCut>::first);
  if (objective == Objective::memory || fitting.empty()) {
    // Where no candidate fits, another cut may: by the objectives time and cost, `others` keeps
    // these layouts.
    std::vector<std::pair<std::size_t, OfAnyCut>> open_by_memory = others;
    const auto peak = [](const Numbered& one) { return one.second.bound.memory.peak(); };
    const auto least = std::ranges::min_element(fitting, {}, peak);
    std::optional<Bytes> most;
    if (least != fitting.end())
      most = peak(*least);
    else if (smallest)
      most = peak(*smallest);
    const auto memory = [&](const auto& open) {
      return makers.front()->least_memory(specs[open.first], open.second.room_in_all);
    };
    std::erase_if(open_by_memory, [&](const auto& open) { return !most || memory(open) > *most; });
    std::vector<CandidateMaker::LeastCut> cuts(open_by_memory.size());
    parallel_for(static_cast<int>(makers.size()), open_by_memory.size(), [&](int thread, std::size_t i) {
      const ParallelSpec& spec = specs[open_by_memory[i].first];
      if (makers[thread]->has_one_cut(spec))
        cuts[i].others = memory(open_by_memory[i]);
      else
        cuts[i] = makers[thread]->least_cut(spec, mixes, *most);
    });
    for (std::size_t i = 0; i < open_by_memory.size(); ++i) {
      if (const std::optional<Bytes> least_left = cuts[i].others; least_left && objective == Objective::memory)
        all.least_memory_left = std::min(all.least_memory_left.value_or(*least_left), *least_left);
      if (!cuts[i].candidate) continue;
      Numbered one(open_by_memory[i].first, *std::move(cuts[i].candidate));
      if (one.second.bound.spare.count >= 0) {
        fitting.push_back(std::move(one));
        ++all.count;
      } else if (!smallest || smaller(one, *smallest)) {
        smallest = std::move(one);
      }
    }
    std::ranges::stable_sort(fitting, {}, &Numbered::first);
    if (objective == Objective::memory) others.clear();
  }
  // The best plan seldom takes twice as long as the least bound.
  constexpr double far = 2.0;
  Seconds least(std::numeric_limits<double>::infinity());
  for (const auto& [number, candidate] : fitting) least = std::min(least, candidate.bound.lower_bound);
  all.others_from = Seconds(std::numeric_limits<double>::infinity());
  for (const auto& [number, open] : others) {
    if (open.time >= far * least) {
      all.others_from = std::min(all.others_from, open.time);
      continue;
    }
    all.others.push_back({.spec = specs[number], .time = open.time});
  }
  for (auto& [number, candidate] : fitting) all.fitting.push_back(std::move(candidate));
  if (smallest) all.smallest = std::move(smallest->second);
  return all;
}

}  // namespace parplan
