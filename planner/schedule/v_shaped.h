#pragma once

#include <vector>

#include "planner/base/units.h"
#include "planner/plan/schedule.h"

namespace parplan {

// What schedules have in common whose stages go down the ranks and back (v_rank). Letters: p ranks,
// M micro-batches; rank r holds stage r, on the way down, and stage 2 p - 1 - r, on the way back.

// One rank's list, as it is appended to. It counts micro-batches by itself: the next forward of a
// stage is of the one after the last, and so are its backwards and weight gradients.
class VRankActions {
 public:
  enum class Way { down, back };
  VRankActions(int rank, int ranks);

  void forward(Way way) { append(way, Phase::forward); }
  void backward(Way way) { append(way, Phase::backward); }
  // The first part of a backward, or the whole of one on the first stage, whose inputs' gradients
  // nobody waits for.
  void backward_inputs(Way way);
  // The weight gradients of the stage's oldest backward without them; nothing on the first stage.
  void backward_weights(Way way);
  // The number of those so far.
  int forwards(Way way) const { return counts_[at(way)].forwards; }
  int backwards(Way way) const { return counts_[at(way)].backwards; }
  int weights(Way way) const { return counts_[at(way)].weights; }

  std::vector<Action> actions;

 private:
  struct Counts {
    int forwards = 0, backwards = 0, weights = 0;
  };
  static std::size_t at(Way way) { return way == Way::down ? 0 : 1; }
  void append(Way way, Phase phase);

  int stages_[2];
  Counts counts_[2];
};

// The schedule in which each rank runs its list.
Schedule v_shaped(std::vector<std::vector<Action>> ranks);

// Some rank has at least the mean of the work, and each does that of its slowest stage. The time of
// a micro-batch on its way through all stages is no bound: weight gradients are not on it.
Seconds v_shaped_least_time(Seconds total, Seconds computing, Seconds slowest, const PipelineShape& shape);
// The least time of the pipeline, however stages are cut; see schedules.h.
Seconds least_v_shaped_time(Seconds all, Seconds transfer, const PipelineShape& shape);

}  // namespace parplan
