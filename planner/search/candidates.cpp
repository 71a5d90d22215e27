#include "planner/search/candidates.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "planner/parallel/cut_stages.h"
#include "planner/parallel/techniques.h"
#include "planner/schedule/schedules.h"
#include "planner/search/parallel_for.h"

namespace parplan {
namespace {

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
                               Objective objective)
    : graph_(graph), training_(training), objective_(objective), estimator_(graph, cluster, training) {}

const Placements& CandidateMaker::placements_of(const ParallelSpec& spec) {
  const ParallelSpec key = placement_key(spec);
  const auto found = placements_.find(key);
  return found != placements_.end() ? found->second : placements_.emplace(key, place(graph_, spec)).first->second;
}

Candidate CandidateMaker::estimated(ParallelSpec spec) {
  Candidate candidate{.spec = std::move(spec), .bound = {}};
  candidate.bound =
      estimator_.bound(candidate.spec, placements_of(candidate.spec), forms_of(row_of(candidate.spec.schedule)));
  return candidate;
}

RankedPlan CandidateMaker::with_times(const Candidate& candidate) {
  const Estimate estimate =
      estimator_.estimate(candidate.spec, placements_of(candidate.spec), forms_of(row_of(candidate.spec.schedule)));
  return {
      candidate.spec,
      {.time = estimate.time, .memory = estimate.memory, .memory_stage = estimate.memory_stage, .communication = {}}};
}

const std::vector<int>& CandidateMaker::fastest_cut(const ParallelSpec& spec) {
  const Placements& placements = placements_of(spec);
  std::pair key{cut_key(spec), estimator_.paces(spec, placements)};
  const auto found = cuts_.find(key);
  if (found != cuts_.end()) return found->second;
  std::vector<int> cut;
  if (key.second.size() == 1) {
    cut = cut_stages(estimator_.block_seconds(spec, placements), spec.pp());
  } else {
    std::vector<std::vector<Seconds>> prefix;
    for (int s = 0; s < spec.pp(); ++s) {
      const std::vector<Seconds> seconds = estimator_.block_seconds(spec, placements, s);
      std::partial_sum(seconds.begin(), seconds.end(), prefix.emplace_back(seconds.size() + 1).begin() + 1);
    }
    std::vector<std::vector<StageOption>> stages;
    for (const std::vector<Seconds>& seconds : prefix)
      stages.push_back({StageOption{.seconds = seconds, .state = {}, .saved = {}}});
    cut = cut_stages(stages)->blocks;
  }
  return cuts_.emplace(std::move(key), std::move(cut)).first->second;
}

std::optional<Candidate> CandidateMaker::cut_that_fits(const ParallelSpec& spec, bool mixes) {
  const Placements& placements = placements_of(spec);
  const ScheduleForms schedule = forms_of(row_of(spec.schedule));
  const std::vector<Recompute> choices =
      mixes ? std::vector{Recompute::none, Recompute::full} : std::vector{spec.recompute};
  const Paces paces = estimator_.paces(spec, placements);
  const auto make = [&] {
    const PipelineShape shape = shape_of(spec, training_);
    std::vector<BlockTable> tables;  // by pace, then choice
    for (std::size_t pace = 0; pace < paces.size(); ++pace)
      for (const Recompute recompute : choices)
        tables.push_back(estimator_.block_table(spec, placements, static_cast<int>(pace), recompute));
    std::vector<std::vector<StageOption>> stages;
    for (int s = 0; s < spec.pp(); ++s) {
      std::vector<StageOption>& options = stages.emplace_back();
      for (std::size_t choice = 0; choice < choices.size(); ++choice) {
        const BlockTable& table =
            tables[(paces.size() == 1 ? 0 : static_cast<std::size_t>(s)) * choices.size() + choice];
        const std::int64_t capacity = estimator_.capacity(spec.mesh, s).count;
        const int in_flight = schedule.in_flight(s, shape);
        const auto fits = [this, &spec, &placements, &table, schedule, s, capacity, in_flight,
                           recompute = choices[choice], fixed = std::vector<std::pair<std::uint64_t, std::int64_t>>()](
                              std::size_t begin, std::size_t end) mutable {
          const BlockRange range{static_cast<int>(begin), static_cast<int>(end)};
          const std::int64_t growing =
              table.state[end] - table.state[begin] + in_flight * (table.saved[end] - table.saved[begin]);
          const std::uint64_t kinds = estimator_.kinds_in(range);
          auto known = std::ranges::find(fixed, kinds, &std::pair<std::uint64_t, std::int64_t>::first);
          if (known == fixed.end())
            known = fixed.insert(
                known, {kinds, estimator_.peak(spec, placements, schedule, s, range, recompute).count - growing});
          return growing + known->second <= capacity;
        };
        options.push_back({.seconds = table.seconds,
                           .state = table.state,
                           .saved = table.saved,
                           .in_flight = in_flight,
                           .surely_fits = capacity - table.most_fixed,
                           .may_fit = capacity - table.least_fixed,
                           .fits = fits});
      }
    }
    return cut_stages(stages);
  };
  const std::tuple key{fitting_cut_key(spec), paces, mixes};
  auto found = fitting_cuts_.find(key);
  if (found == fitting_cuts_.end()) found = fitting_cuts_.emplace(key, make()).first;
  const std::optional<StageCut>& cut = found->second;
  if (!cut) return std::nullopt;
  ParallelSpec chosen = spec;
  chosen.stage_blocks = cut->blocks;
  if (mixes) {
    for (const int option : cut->options) chosen.stage_recompute.push_back(choices[option]);
    const Recompute first = chosen.stage_recompute.front();
    if (std::ranges::all_of(chosen.stage_recompute, [&](Recompute recompute) { return recompute == first; }))
      return std::nullopt;  // not mixed
    chosen.recompute = Recompute::per_stage;
  }
  Candidate candidate = estimated(std::move(chosen));
  return candidate.bound.spare.count >= 0 ? std::optional(std::move(candidate)) : std::nullopt;
}

std::vector<int> CandidateMaker::cut_of(const ParallelSpec& spec) {
  ParallelSpec cut = spec;
  cut.stage_blocks = fastest_cut(spec);
  if (spec.recompute != Recompute::per_stage && estimated(cut).bound.spare.count < 0)
    if (std::optional<Candidate> other = cut_that_fits(spec, false)) return other->spec.stage_blocks;
  return cut.stage_blocks;
}

void CandidateMaker::add_all_cuts(const ParallelSpec& spec, bool mixes, std::vector<Candidate>& candidates) {
  std::vector<int> cut(static_cast<std::size_t>(spec.pp()), 1);
  cut.back() = static_cast<int>(graph_.blocks.size()) - spec.pp() + 1;
  do {
    ParallelSpec one = spec;
    one.stage_blocks = cut;
    candidates.push_back(estimated(one));
    const bool fits = candidates.back().bound.spare.count >= 0;
    // Stages that do not recompute are faster; where they fit, a mix can only need less memory.
    if ((fits && objective_ != Objective::memory) || !mixes || spec.recompute != Recompute::none ||
        spec.pp() > most_choosing_stages)
      continue;
    one.recompute = Recompute::per_stage;
    for (int bits = 1; bits + 1 < 1 << spec.pp(); ++bits) {
      one.stage_recompute.clear();
      for (int s = 0; s < spec.pp(); ++s)
        one.stage_recompute.push_back(bits >> s & 1 ? Recompute::full : Recompute::none);
      candidates.push_back(estimated(one));
    }
  } while (next_cut(cut));
}

void CandidateMaker::add(const ParallelSpec& spec, bool mixes, std::vector<Candidate>& candidates) {
  if (!spec.stage_blocks.empty()) {
    candidates.push_back(estimated(spec));
    return;
  }
  if (cuts_of(static_cast<int>(graph_.blocks.size()), spec.pp()) <= most_cuts) {
    const std::size_t before = candidates.size();
    add_all_cuts(spec, mixes, candidates);
    const auto fits = [](const Candidate& candidate) { return candidate.bound.spare.count >= 0; };
    if (mixes && spec.recompute == Recompute::none && spec.pp() > most_choosing_stages &&
        std::none_of(candidates.begin() + static_cast<std::ptrdiff_t>(before), candidates.end(), fits))
      if (std::optional<Candidate> mixed = cut_that_fits(spec, true)) candidates.push_back(std::move(*mixed));
    return;
  }
  ParallelSpec cut = spec;
  cut.stage_blocks = fastest_cut(spec);
  Candidate candidate = estimated(cut);
  if (candidate.bound.spare.count < 0) {
    std::optional<Candidate> other;
    if (spec.pp() > 1 && candidate.bound.spare_in_all.count >= 0) other = cut_that_fits(spec, false);
    if (other) {
      candidate = std::move(*other);
    } else if (spec.pp() > 1 && mixes && spec.recompute == Recompute::none) {
      cut.recompute = Recompute::full;
      if (estimated(cut).bound.spare_in_all.count >= 0)
        if (std::optional<Candidate> mixed = cut_that_fits(spec, true)) candidates.push_back(std::move(*mixed));
    }
  }
  candidates.push_back(std::move(candidate));
}

// Specs whose blocks have equal shapes go to one maker together, since they share lowered Segments.
MadeCandidates make_candidates(std::span<CandidateMaker* const> makers, std::span<const ParallelSpec> specs,
                               bool mixes) {
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
      makers[thread]->add(specs[i], mixes, candidates);
      to.count += static_cast<std::int64_t>(candidates.size());
      for (Candidate& candidate : candidates) {
        if (candidate.bound.spare.count >= 0)
          to.fitting.emplace_back(i, std::move(candidate));
        else if (Numbered one(i, std::move(candidate)); !to.smallest || smaller(one, *to.smallest))
          to.smallest = std::move(one);
      }
    }
  });
  MadeCandidates all;
  std::vector<Numbered> fitting;
  std::optional<Numbered> smallest;
  for (OfTask& one : made) {
    all.count += one.count;
    std::ranges::move(one.fitting, std::back_inserter(fitting));
    if (one.smallest && (!smallest || smaller(*one.smallest, *smallest))) smallest = std::move(one.smallest);
  }
  std::ranges::stable_sort(fitting, {}, &Numbered::first);
  for (auto& [number, candidate] : fitting) all.fitting.push_back(std::move(candidate));
  if (smallest) all.smallest = std::move(smallest->second);
  return all;
}

}  // namespace parplan
