#include "planner/search/layout_cuts.h"

#include <algorithm>
#include <cmath>

#include "planner/schedule/schedules.h"

namespace parplan {

LayoutCuts::LayoutCuts(Estimator& estimator, const ParallelSpec& spec, const Placements& placements,
                       const PipelineShape& shape, std::span<const Recompute> recomputes)
    : estimator_(estimator),
      spec_(spec),
      placements_(placements),
      recomputes_(recomputes),
      schedule_(forms_of(row_of(spec.schedule))) {
  const std::size_t paces = estimator.paces(spec, placements).size();
  alike_ = paces == 1;
  tables_.reserve(paces * recomputes.size());
  for (std::size_t pace = 0; pace < paces; ++pace)
    for (const Recompute recompute : recomputes)
      tables_.push_back(estimator.block_table(spec, placements, static_cast<int>(pace), recompute));
  for (int s = 0; s < shape.stages; ++s) in_flight_.push_back(schedule_.in_flight(s, shape));
  for (const Bytes capacity : estimator.capacities(spec.mesh)) capacities_.push_back(capacity.count);
  least_ = std::max<std::int64_t>(std::ranges::min(capacities_), 1);
  fixed_.resize(recomputes.size());
}

const BlockTable& LayoutCuts::table(int stage, std::size_t choice) const {
  return tables_[(alike_ ? 0 : static_cast<std::size_t>(stage)) * recomputes_.size() + choice];
}

std::int64_t LayoutCuts::growing(int stage, std::size_t choice, int begin, int end) const {
  const BlockTable& of = table(stage, choice);
  return of.state[end] - of.state[begin] + in_flight_[stage] * (of.saved[end] - of.saved[begin]);
}

std::int64_t LayoutCuts::peak(int stage, std::size_t choice, int begin, int end) const {
  Fixed& fixed = fixed_[choice];
  const BlockRange range{begin, end};
  if (spec_.input_slots == InputSlots::one_more)
    return estimator_.peak(spec_, placements_, schedule_, stage, range, recomputes_[choice]).count;
  const std::int64_t grows = growing(stage, choice, begin, end);
  // The last stage alone sends nothing on.
  const bool is_last = stage + 1 == spec_.pp();
  const std::uint64_t kinds = estimator_.kinds_in(range) << 1 | static_cast<std::uint64_t>(is_last);
  auto known = std::ranges::find(fixed, kinds, &std::pair<std::uint64_t, std::int64_t>::first);
  if (known == fixed.end())
    known = fixed.insert(
        known,
        {kinds,
         estimator_.peak(spec_, placements_, schedule_, stage, range, recomputes_[choice]).count - grows});
  return grows + known->second;
}

std::int64_t LayoutCuts::least_peak_of(int stage, int begin, int end) const {
  std::int64_t least = peak(stage, 0, begin, end);
  for (std::size_t choice = 1; choice < recomputes_.size(); ++choice)
    least = std::min(least, peak(stage, choice, begin, end));
  return least;
}

std::vector<std::vector<StageOption>> LayoutCuts::options(std::size_t choices) const {
  return options_within(capacities_, choices == 0 ? recomputes_.size() : choices);
}

std::vector<std::vector<StageOption>> LayoutCuts::options_within(std::span<const std::int64_t> room,
                                                                 std::size_t choices) const {
  std::vector<std::vector<StageOption>> stages(in_flight_.size());
  for (int s = 0; s < static_cast<int>(stages.size()); ++s) {
    stages[s].reserve(choices);
    for (std::size_t choice = 0; choice < choices; ++choice) {
      const BlockTable& of = table(s, choice);
      const std::int64_t capacity = room[s];
      stages[s].push_back({.seconds = of.seconds,
                           .state = of.state,
                           .saved = of.saved,
                           .in_flight = in_flight_[s],
                           .surely_fits = capacity - of.most_fixed,
                           .may_fit = capacity - of.least_fixed,
                           .fits = [this, s, choice, capacity](std::size_t begin, std::size_t end) {
                             return peak(s, choice, static_cast<int>(begin), static_cast<int>(end)) <= capacity;
                           }});
    }
  }
  return stages;
}

// Letters: block i takes a_is bytes on stage s, with the recompute that takes least; R_s is what
// stage s has beyond the bytes that do not grow with blocks; w_s are any positive weights. Where
// the blocks of each stage fit, the sum over all blocks of w_s a_is on their stages is at most sum
// w_s R_s, and at least the sum of min over s of w_s a_is. The weights 1 / a_ms for the block m in
// the middle make that sharp where most blocks are alike.
bool LayoutCuts::surely_none(std::size_t choices) const {
  if (choices == 0) choices = recomputes_.size();
  const std::size_t stages = in_flight_.size(), blocks = tables_.front().state.size() - 1;
  const auto takes = [&](std::size_t stage, std::size_t block) {
    const int s = static_cast<int>(stage), b = static_cast<int>(block);
    std::int64_t least = growing(s, 0, b, b + 1);
    for (std::size_t choice = 1; choice < choices; ++choice)
      least = std::min(least, growing(s, choice, b, b + 1));
    return static_cast<double>(least);
  };
  double room = 0.0, needed = 0.0, of_block = 0.0;
  std::vector<double> weights;
  for (std::size_t s = 0; s < stages; ++s) {
    weights.push_back(1.0 / std::max(takes(s, blocks / 2), 1.0));
    std::int64_t fixed = table(static_cast<int>(s), 0).least_fixed;
    for (std::size_t choice = 1; choice < choices; ++choice)
      fixed = std::min(fixed, table(static_cast<int>(s), choice).least_fixed);
    room += weights.back() * static_cast<double>(capacities_[s] - fixed);
  }
  const auto alike = [&](std::size_t a, std::size_t b) {
    return std::ranges::all_of(tables_, [&](const BlockTable& of) {
      return of.state[a + 1] - of.state[a] == of.state[b + 1] - of.state[b] &&
             of.saved[a + 1] - of.saved[a] == of.saved[b + 1] - of.saved[b];
    });
  };
  for (std::size_t b = 0; b < blocks; ++b) {
    if (b == 0 || !alike(b, b - 1)) {
      of_block = std::numeric_limits<double>::infinity();
      for (std::size_t s = 0; s < stages; ++s) of_block = std::min(of_block, weights[s] * takes(s, b));
    }
    needed += of_block;
  }
  return needed * (1.0 - 1e-9) > room;
}

std::optional<StageCut> LayoutCuts::fastest(std::size_t choices) const {
  return cut_stages(options(choices));
}

std::optional<StageCut> LayoutCuts::fastest_within(Bytes room) const {
  return cut_stages(options_within(rooms(room.count), recomputes_.size()));
}

std::vector<std::int64_t> LayoutCuts::rooms(std::int64_t of_least) const {
  std::vector<std::int64_t> rooms;
  for (int s = 0; s < static_cast<int>(in_flight_.size()); ++s)
    rooms.push_back(static_cast<std::int64_t>(std::ceil(static_cast<double>(of_least) * times_least(s))));
  return rooms;
}

std::optional<Bytes> LayoutCuts::least_peak(Bytes most) const {
  const int stages = static_cast<int>(in_flight_.size()), blocks = static_cast<int>(tables_.front().state.size()) - 1;
  const StageCost cost = [this](int stage, int begin, int end) {
    return static_cast<double>(least_peak_of(stage, begin, end)) / times_least(stage);
  };
  const auto some_within = [&](std::int64_t bytes) {
    return some_cut_fits(options_within(rooms(bytes), recomputes_.size()));
  };
  if (!some_within(most.count)) return std::nullopt;
  // A few halvings leave few cuts to compare.
  std::int64_t too_little = 0, enough = most.count;
  constexpr int halvings = 12;
  for (int i = 0; i < halvings; ++i) {
    const std::int64_t middle = too_little + (enough - too_little) / 2;
    (some_within(middle) ? enough : too_little) = middle;
  }
  const double limit = static_cast<double>(enough) + 1.0;
  const double least = cheap_cuts(cut_window(blocks, stages, cost, limit), cost, limit, 0).least;
  return Bytes(static_cast<std::int64_t>(std::ceil(least)));
}

ParallelSpec with_cut(const ParallelSpec& spec, const StageCut& cut, std::span<const Recompute> recomputes) {
  ParallelSpec chosen = spec;
  chosen.stage_blocks = cut.blocks;
  if (recomputes.size() == 1) return chosen;
  chosen.stage_recompute.clear();
  for (const int option : cut.options) chosen.stage_recompute.emplace_back(recomputes[option]);
  const StageRecompute first = chosen.stage_recompute.front();
  if (std::ranges::all_of(chosen.stage_recompute, [&](const StageRecompute& stage) { return stage == first; })) {
    chosen.recompute = first.rule;
    chosen.stage_recompute.clear();
  } else {
    chosen.recompute = Recompute::per_stage;
  }
  return chosen;
}

}  // namespace parplan
