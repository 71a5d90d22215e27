#include "planner/search/rank_cuts.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <vector>

#include "planner/schedule/schedules.h"

namespace parplan {
namespace {

// What a rank can hold with one choice of recompute, and how long that takes.
struct RankChoice {
  int most = 0;      // blocks; 0: not even one for each of its stages
  Seconds of_ends;   // of the first and the last block of the model, where they are on the rank
  int ends = 0;      // how many of these are
  Seconds of_block;  // of any other
};

class RankCuts {
 public:
  RankCuts(Estimator& estimator, const OpGraph& graph, const ParallelSpec& spec, const Placements& placements,
           const PipelineShape& shape, std::span<const Recompute> recomputes)
      : estimator_(estimator),
        spec_(spec),
        placements_(placements),
        schedule_(forms_of(row_of(spec.schedule))),
        recomputes_(recomputes),
        blocks_(static_cast<int>(graph.blocks.size())),
        ranks_(shape.ranks),
        stages_(shape.stages / shape.ranks),
        begins_(begins_of_runs(graph)) {
    for (int rank = 0; rank < ranks_; ++rank) stages_of_rank_.push_back(stages_of_rank(spec, rank));
    const auto first = static_cast<std::size_t>(graph.blocks.front().kind),
               last = static_cast<std::size_t>(graph.blocks.back().kind);
    for (int rank = 0; rank < ranks_; ++rank) {
      std::vector<RankChoice>& choices = choices_.emplace_back();
      for (const Recompute recompute : recomputes) {
        const std::vector<Seconds> by_kind = estimator.kind_seconds(spec, placements, rank, recompute);
        RankChoice choice;
        for (int b = 1; b + 1 < blocks_; ++b)
          choice.of_block = std::max(choice.of_block, by_kind[static_cast<std::size_t>(graph.blocks[b].kind)]);
        if (rank == 0) choice.of_ends += by_kind[first], ++choice.ends;
        if (has_last(rank)) choice.of_ends += by_kind[last], ++choice.ends;
        // More blocks take more.
        int fitting = stages_ - 1, too_many = blocks_ - stages_ * (ranks_ - 1) + 1;
        while (too_many - fitting > 1) {
          const int middle = fitting + (too_many - fitting) / 2;
          (share_that_fits(rank, middle, recompute) ? fitting : too_many) = middle;
        }
        if (fitting >= stages_) choice.most = fitting;
        choices.push_back(choice);
      }
    }
  }

  std::optional<StageCut> fastest() const {
    Seconds most(0.0);  // of a rank with all that it can hold
    for (const std::vector<RankChoice>& rank : choices_)
      for (const RankChoice& choice : rank) most = std::max(most, time(choice, choice.most));
    std::vector<int> counts = counts_within(most);
    if (!are_enough(counts)) return std::nullopt;
    Seconds within = most, beyond(0.0);
    while (within - beyond > 1e-9 * most) {
      const Seconds middle = beyond + (within - beyond) / 2;
      if (std::vector<int> fewer = counts_within(middle); are_enough(fewer)) {
        within = middle;
        counts = std::move(fewer);
      } else {
        beyond = middle;
      }
    }
    for (int excess = std::accumulate(counts.begin(), counts.end(), -blocks_); excess > 0; --excess)
      --counts[slowest_of(counts)];
    return cut_of(counts);
  }

 private:
  // How many blocks each stage of a rank may have, first what is most even: stages with the first
  // and the last block of the model come first where there is one more. What is even takes the
  // least memory, as stages share it, but not in a V: there the first stage keeps nothing for
  // weight gradients, which the last one, beside it, does, and the input of the stage behind the
  // turn lies apart.
  std::vector<std::vector<int>> shares(int rank, int count) const {
    std::vector<int> sizes(static_cast<std::size_t>(stages_), count / stages_);
    const int more = count % stages_;
    // Behind the turn of a V, blocks save less.
    if (rank > 0 && (has_last(rank) || (is_v_shaped(spec_.schedule) && rank + 1 == ranks_)))
      std::for_each(sizes.end() - more, sizes.end(), [](int& size) { ++size; });
    else
      std::for_each(sizes.begin(), sizes.begin() + more, [](int& size) { ++size; });
    if (!is_v_shaped(spec_.schedule)) return {sizes};
    std::vector<std::vector<int>> all;
    for (int first = 1; first < count; ++first) all.push_back({first, count - first});
    const auto unevenness = [&](const std::vector<int>& one) { return std::abs(one.front() - sizes.front()); };
    std::ranges::stable_sort(all, {}, unevenness);
    return all;
  }
  // The first of them with which the rank has room, wherever its inner blocks begin.
  std::optional<std::vector<int>> share_that_fits(int rank, int count, Recompute recompute) const {
    const Bytes capacity = estimator_.capacity(spec_.mesh, rank);
    const StageRecompute of_stage(recompute, recompute == Recompute::none ? 0 : spec_.recompute_layers);
    for (std::vector<int>& sizes : shares(rank, count)) {
      bool fits = true;
      for (int begin = 1; begin <= begins_ && begin + count < blocks_ && fits; ++begin)
        fits = estimator_.peak(spec_, placements_, schedule_, rank, ranges(rank, sizes, begin), of_stage) <= capacity;
      if (fits) return std::move(sizes);
    }
    return std::nullopt;
  }
  // So many inner blocks follow one another before their kinds come round: 1 where all are alike.
  static int begins_of_runs(const OpGraph& graph) {
    const auto inner = std::span(graph.blocks).subspan(1, graph.blocks.size() - 2);
    constexpr int most = 8;
    for (int period = 1; period < most; ++period) {
      bool repeats = true;
      for (std::size_t b = static_cast<std::size_t>(period); b < inner.size(); ++b)
        repeats = repeats && inner[b].kind == inner[b - static_cast<std::size_t>(period)].kind;
      if (repeats) return period;
    }
    return most;
  }

  // Ranges that hold blocks of the kinds of its stages, where inner ones begin with this block.
  std::vector<BlockRange> ranges(int rank, const std::vector<int>& sizes, int begin) const {
    std::vector<BlockRange> of_stages;
    for (const int size : sizes) of_stages.push_back({begin, begin + size});
    if (rank == 0) of_stages.front() = {0, sizes.front()};
    if (has_last(rank)) of_stages.back() = {blocks_ - sizes.back(), blocks_};
    return of_stages;
  }

  static Seconds time(const RankChoice& choice, int count) {
    return choice.of_ends + std::max(count - choice.ends, 0) * choice.of_block;
  }

  // What each rank can take within this time; 0 where that is less than a block for each stage.
  std::vector<int> counts_within(Seconds within) const {
    std::vector<int> counts;
    for (const std::vector<RankChoice>& rank : choices_) {
      int most = 0;
      for (const RankChoice& choice : rank) {
        int count = choice.most;
        if (time(choice, count) > within && choice.of_block > Seconds(0.0)) {
          const double blocks = (within - choice.of_ends) / choice.of_block;
          count = blocks < 0.0 ? 0 : std::min(count, static_cast<int>(blocks) + choice.ends);
        }
        if (count >= stages_) most = std::max(most, count);
      }
      counts.push_back(most);
    }
    return counts;
  }

  bool are_enough(const std::vector<int>& counts) const {
    return std::ranges::find(counts, 0) == counts.end() &&
           std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) >= blocks_;
  }

  // The fastest choice that can hold so many.
  int choice_of(std::size_t rank, int count) const {
    std::optional<int> best;
    for (int i = 0; i < static_cast<int>(choices_[rank].size()); ++i)
      if (choices_[rank][i].most >= count &&
          (!best || time(choices_[rank][i], count) < time(choices_[rank][*best], count)))
        best = i;
    return best.value();
  }

  // Among the ranks with a block to spare.
  std::size_t slowest_of(const std::vector<int>& counts) const {
    std::optional<std::pair<Seconds, std::size_t>> slowest;
    for (std::size_t rank = 0; rank < counts.size(); ++rank) {
      if (counts[rank] <= stages_) continue;
      const Seconds takes = time(choices_[rank][choice_of(rank, counts[rank])], counts[rank]);
      if (!slowest || takes > slowest->first) slowest = {takes, rank};
    }
    return slowest.value().second;
  }

  StageCut cut_of(const std::vector<int>& counts) const {
    const auto stages = static_cast<std::size_t>(stages_ * ranks_);
    StageCut cut{std::vector<int>(stages), std::vector<int>(stages)};
    for (int rank = 0; rank < ranks_; ++rank) {
      const int choice = choice_of(static_cast<std::size_t>(rank), counts[rank]);
      const std::vector<int> sizes = share_that_fits(rank, counts[rank], recomputes_[static_cast<std::size_t>(choice)])
                                         .value_or(shares(rank, counts[rank]).front());
      for (int stage = 0; stage < stages_; ++stage) {
        const auto number = static_cast<std::size_t>(stages_of_rank_[rank][stage]);
        cut.blocks[number] = sizes[stage];
        cut.options[number] = choice;
      }
    }
    return cut;
  }

  // Whether the rank holds the last block of the model.
  bool has_last(int rank) const { return stages_of_rank_[rank].back() + 1 == ranks_ * stages_; }

  Estimator& estimator_;
  const ParallelSpec& spec_;
  const Placements& placements_;
  ScheduleForms schedule_;
  std::span<const Recompute> recomputes_;
  int blocks_ = 0, ranks_ = 1, stages_ = 1;  // stages of a rank
  int begins_ = 1;
  std::vector<std::vector<int>> stages_of_rank_;
  std::vector<std::vector<RankChoice>> choices_;  // by rank
};

}  // namespace

std::optional<StageCut> fastest_cut_of_ranks(Estimator& estimator, const OpGraph& graph, const ParallelSpec& spec,
                                             const Placements& placements, const PipelineShape& shape,
                                             std::span<const Recompute> recomputes) {
  const std::vector<Block>& blocks = graph.blocks;
  if (shape.ranks == 1 || blocks.size() < 3 || shape.stages > static_cast<int>(blocks.size())) return std::nullopt;
  return RankCuts(estimator, graph, spec, placements, shape, recomputes).fastest();
}

}  // namespace parplan
