#include "planner/search/candidates.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <utility>

#include "planner/parallel/cut_stages.h"
#include "planner/parallel/pipeline.h"
#include "planner/parallel/recompute.h"
#include "planner/parallel/techniques.h"
#include "planner/plan/unlike_replicas.h"
#include "planner/schedule/schedules.h"
#include "planner/search/rank_cuts.h"
#include "planner/search/replica_shares.h"
#include "planner/search/stage_recompute.h"

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

void CandidateMaker::add_fewest_layers(const ParallelSpec& cut, bool mixes, std::vector<Candidate>& candidates) {
  ParallelSpec none = cut;
  none.recompute = Recompute::none;
  none.recompute_layers = 0;
  none.stage_recompute.clear();
  if (!has_fewest_layers(none, mixes)) return;
  std::optional<ParallelSpec> fewest =
      recomputing_fewest_layers(estimator_, graph_, training_, placements_of(none), none);
  if (!fewest) return;
  Candidate candidate = estimated(std::move(*fewest));
  if (candidate.bound.spare.count >= 0) candidates.push_back(std::move(candidate));
}

std::optional<Candidate> CandidateMaker::cut_that_fits(const ParallelSpec& spec, bool mixes) {
  const Placements& placements = placements_of(spec);
  const std::span<const Recompute> recomputes = recomputes_of(spec, training_.engine, mixes);
  const auto make = [&]() -> std::optional<StageCut> {
    if (takes_fastest_cut_alone(spec))
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
  std::optional<ParallelSpec> mixed =
      recomputing_where_needed(estimator_, graph_, training_, placements_of(spec), spec);
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
  if (takes_fastest_cut_alone(spec)) time = std::max(time, row.least(fastest.computing, Seconds(0.0), shape));
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
    if (takes_fastest_cut_alone(spec)) {
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

}  // namespace parplan
