#include "planner/schedule/dualpipe_v.h"

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/schedule/v_shaped.h"

namespace parplan {
namespace {

constexpr auto down = VRankActions::Way::down, back = VRankActions::Way::back;

// The list of a rank, with the weight gradients that it still owes in the order of their backwards.
struct DualPipeVRank : VRankActions {
  using VRankActions::VRankActions;

  void backward_in_parts(Way way) {
    backward_inputs(way);
    owed.push_back(way);
  }
  void oldest_weights() {
    backward_weights(owed.front());
    owed.pop_front();
  }

  std::deque<Way> owed;
};

std::vector<Action> steps_of(int rank, const PipelineShape& shape) {
  const int ranks = shape.ranks, others = ranks - 1 - rank;
  DualPipeVRank run(rank, ranks);
  for (int i = 0; i < 2 * others; ++i) run.forward(down);
  for (int i = 0; i <= rank; ++i) {
    run.forward(down);
    run.forward(back);
  }
  for (int i = 0; i < others; ++i) {
    run.backward_in_parts(back);
    run.oldest_weights();
    run.forward(back);
  }
  for (int i = 0; i < shape.micro_batches - 2 * ranks + rank + 1; ++i) {
    run.forward(down);
    run.backward(back);
    run.forward(back);
    run.backward(down);
  }
  for (int i = 0; i < others; ++i) {
    run.backward(back);
    run.forward(back);
    run.backward(down);
  }
  // From the middle on in parts: on odd ranks from its backward on the way back, on even ones from
  // the one on the way down.
  const int middle = (rank + 1) / 2;
  for (int i = 0; i <= rank; ++i)
    for (const auto way : {back, down})
      if (i > middle || (i == middle && (rank % 2 == 1 || way == down)))
        run.backward_in_parts(way);
      else
        run.backward(way);
  for (int i = 0; i < others; ++i) {
    run.oldest_weights();
    run.backward_in_parts(down);
  }
  while (!run.owed.empty()) run.oldest_weights();
  return std::move(run.actions);
}

}  // namespace

Schedule dualpipe_v_actions(const PipelineShape& shape) {
  PARPLAN_ASSERT(
      shape.ranks >= 2 && shape.stages == 2 * shape.ranks && shape.micro_batches >= 2 * shape.ranks,
      fmt::format("{} stages on {} ranks, {} micro-batches", shape.stages, shape.ranks, shape.micro_batches));
  std::vector<std::vector<Action>> ranks;
  for (int rank = 0; rank < shape.ranks; ++rank) ranks.push_back(steps_of(rank, shape));
  return v_shaped(std::move(ranks));
}

int dualpipe_v_in_flight(int /*rank*/, const PipelineShape& shape) {
  return 2 * shape.ranks + 1;
}

// The rank of the last stage runs its gradients before its next forward.
int dualpipe_v_last_stage_in_flight(const PipelineShape& /*shape*/) {
  return 1;
}

// A rank's list for more micro-batches goes on as it began.
SlotsForWeights dualpipe_v_for_weights(int rank, const PipelineShape& shape) {
  PipelineShape filled = shape;
  filled.micro_batches = std::min(shape.micro_batches, 4 * shape.ranks);
  return slots_for_weights(steps_of(rank, filled));
}

}  // namespace parplan
