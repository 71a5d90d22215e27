#include "planner/search/made_candidates.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "planner/base/parallel_for.h"

namespace parplan {

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
    const auto memory = [&](CandidateMaker& maker, const auto& open) {
      return maker.least_memory(specs[open.first], open.second.room_in_all);
    };
    std::erase_if(open_by_memory, [&](const auto& open) { return !most || memory(*makers.front(), open) > *most; });
    std::vector<CandidateMaker::LeastCut> cuts(open_by_memory.size());
    parallel_for(static_cast<int>(makers.size()), open_by_memory.size(), [&](int thread, std::size_t i) {
      const ParallelSpec& spec = specs[open_by_memory[i].first];
      if (makers[thread]->has_one_cut(spec))
        cuts[i].others = memory(*makers[thread], open_by_memory[i]);
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
