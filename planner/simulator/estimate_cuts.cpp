#include "planner/simulator/estimate.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "planner/cost/collective_time.h"
#include "planner/simulator/estimate_sizes.h"

// The estimate of a cut by its terms for one stage.
namespace parplan {

CutFrame Estimator::cut_frame(const ParallelSpec& spec, const Placements& placements,
                              std::span<const Recompute> recomputes) {
  MeshView& view = views_.of(spec.mesh);
  CutFrame frame{.shape = {spec.pp(), spec.pp(), static_cast<int>(micro_batches(spec, training_))},
                 .synchronises = computes_norm(training_),
                 .agreed = {},
                 .forward = {Seconds()},
                 .computing = {Seconds()},
                 .crossing = {Seconds()},
                 .slowest_transfer = {},
                 .ways = {}};
  if (frame.synchronises) frame.agreed = agreement(spec, placements, view);
  std::int64_t crossing = std::numeric_limits<std::int64_t>::max();
  std::vector<int> shapes;
  for (const Recompute recompute : recomputes) {
    shapes.push_back(costs_.number_of(spec, placements, recompute, 0));
    crossing = std::min(crossing, crossing_bytes(costs_.shapes(shapes.back()).kinds.front()));
  }
  std::vector<Seconds> forward, backward;  // by kind of block
  const auto take_least = [](std::vector<Seconds>& least, const std::vector<Seconds>& seconds) {
    if (least.empty()) least = seconds;
    for (std::size_t kind = 0; kind < least.size(); ++kind) least[kind] = std::min(least[kind], seconds[kind]);
  };
  for (int s = 0; s < frame.shape.stages; ++s) {
    const int environment = view.environments[s];
    if (s > 0 && environment == view.environments[s - 1]) {
      frame.ways.push_back(frame.ways.back());
      continue;
    }
    std::vector<CutFrame::Way>& ways = frame.ways.emplace_back();
    for (const int number : shapes) {
      const BlockCosts& costs = costs_.of(number, environment);
      take_least(forward, costs.forward_seconds);
      take_least(backward, costs.backward_seconds);
      ways.push_back({.shapes = number,
                      .costs = &costs,
                      .data = &data_.of(spec, placements, costs_.shapes(number), view, environment),
                      .copies = costs_.copies(spec, number, environment),
                      .sequential = views_.is_sequential(environment)});
    }
  }
  for (int block = 0; block < blocks_.count(); ++block) {
    const std::size_t kind = blocks_.kind_of(block);
    frame.forward.push_back(frame.forward.back() + forward[kind]);
    frame.computing.push_back(frame.computing.back() + (forward[kind] + backward[kind]));
  }
  const GroupNetwork* known = nullptr;
  Seconds transfer;
  for (int s = 0; s + 1 < frame.shape.stages; ++s) {
    const GroupNetwork* next = &views_.between(spec.mesh, view, s, s + 1);
    if (known == nullptr || !(next == known || *next == *known))
      transfer = collective_time(InstructionKind::send, sent_bytes(crossing, spec, placements, training_), *next,
                                 views_.cluster().backend());
    known = next;
    // The next stage begins with this block or a later one.
    const bool surely_returns = passes_gradient_on(graph_, s + 1);
    frame.crossing.push_back(frame.crossing.back() + (surely_returns ? transfer : Seconds(0.0)));
    if (surely_returns) frame.slowest_transfer = std::max(frame.slowest_transfer, transfer);
  }
  return frame;
}

namespace {

StagePath path_of(const CutFrame& frame, int stage, BlockRange range) {
  const Seconds sent = frame.crossing.back() - frame.crossing[stage];
  return {.stage = stage,
          .forward = frame.forward[range.last] - frame.forward[range.first],
          .backward = (frame.computing[range.last] - frame.computing[range.first]) -
                      (frame.forward[range.last] - frame.forward[range.first]),
          .before = frame.computing[range.first] + 2.0 * frame.crossing[stage],
          .after = frame.computing.back() - frame.computing[range.last] + 2.0 * sent,
          .round_trip = frame.computing.back() - frame.computing[range.first] + 2.0 * sent,
          .slowest_transfer = frame.slowest_transfer};
}

}  // namespace

Seconds Estimator::least_through(const CutFrame& frame, const ScheduleForms& schedule, int stage,
                                 BlockRange range) const {
  return time_through_stage(schedule, path_of(frame, stage, range), frame.shape) + frame.agreed;
}

// As the estimate of a whole cut, by its terms for one stage; what the other stages hold adds at
// least their computation. The end of the step is that of the slowest stage, so at least this
// one's.
StageOfCut Estimator::stage_of_cut(CutFrame& frame, const ParallelSpec& spec, const Placements& placements,
                                   const ScheduleForms& schedule, int stage, BlockRange range, std::size_t choice) {
  const CutFrame::Way& way = frame.ways[stage][choice];
  const auto find_bound = [&] {
    const WayOfBlocks blocks{way.costs, way.copies};
    return stage_bounds_.of(spec, placements,
                            {.stage = stage,
                             .blocks = range,
                             .tied_on_rank = blocks_.tied_in(range),
                             .sequential = way.sequential,
                             .micro_batches = frame.shape.micro_batches},
                            {.recomputing = blocks, .keeping = blocks, .first_kept = range.last},
                            costs_.shapes(way.shapes), *way.data);
  };
  StageBound bound;
  if (blocks_.are_alike(range) && !blocks_.uses_tied(range.first)) {
    const CutFrame::AlikeKey key{.costs = way.costs,
                                 .data = way.data,
                                 .kind = blocks_.kind_of(range.first),
                                 .blocks = range.size(),
                                 .is_first = stage == 0};
    const auto [entry, inserted] = frame.alike.try_emplace(key);
    if (inserted) entry->second = find_bound();
    bound = entry->second;
  } else {
    bound = find_bound();
  }
  StagePath path = path_of(frame, stage, range);
  path.round_trip += bound.forward + bound.backward - (path.forward + path.backward);
  path.forward = bound.forward;
  path.backward = bound.backward;
  StageOfCut result{
      .opening = {}, .pipeline = time_through_stage(schedule, path, frame.shape), .alone = bound.data, .end = {}};
  // The end of the stage's last backward, which slow transfers between stages before it do not
  // delay.
  const Seconds back = frame.computing[range.first] - frame.forward[range.first] + frame.crossing[stage];
  path.slowest_transfer = {};
  const Seconds last_backward =
      (frame.slowest_transfer > std::min(path.forward, path.backward) ? time_through_stage(schedule, path, frame.shape)
                                                                      : result.pipeline) -
      back;
  if (frame.synchronises) {
    const Seconds before = frame.forward[range.first] + frame.crossing[stage];
    const Seconds busy = frame.shape.micro_batches * std::max(bound.forward + bound.backward, bound.occupied);
    result.opening = bound.begin + bound.behind + bound.norms;
    result.alone = std::max({result.alone, before + busy + bound.behind + bound.norms,
                             before + frame.shape.micro_batches * std::max(bound.out, bound.back),
                             last_backward + bound.behind + bound.norms});
    result.end = frame.agreed + bound.finish;
  } else {
    result.opening = bound.begin + std::max(bound.behind + bound.regathers, bound.finish_behind);
    result.alone = std::max(result.alone, last_backward + result.opening - bound.begin);
  }
  return result;
}

}  // namespace parplan
