#pragma once

#include <optional>
#include <string>
#include <vector>

namespace parplan {

// A backward is one action, or two: backward_inputs computes the gradients that the stage before
// waits for, and backward_weights, at any later time, the weight gradients of the stage's products
// (Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241).
enum class Phase { forward, backward, backward_inputs, backward_weights };

// What passes between stages: activations one way, gradients of them the other way.
enum class Flow { forward, backward };
// Nothing for backward_weights.
constexpr std::optional<Flow> flow_of(Phase phase) {
  if (phase == Phase::backward_weights) return std::nullopt;
  return phase == Phase::forward ? Flow::forward : Flow::backward;
}

// One task of a pipeline stage: "2F0" is the forward of micro-batch 0 on stage 2, 2B0 its backward,
// 2I0 and 2W0 the two parts of one, as in PyTorch's pipeline CSV.
struct Action {
  int stage = 0;
  Phase phase{};
  int micro_batch = 0;
  bool operator==(const Action&) const = default;
};
std::string write_action(const Action& action);
Action parse_action(const std::string& text);  // throws ConfigError

// The action whose result this one takes as its input, on the stage before or after; nothing where
// it is the first of its flow to process a micro-batch. There, the backward may be one action where
// it is two here, and the other way round.
std::optional<Action> input_of(const Action& action, int stages);
// The action that takes this one's result.
std::optional<Action> output_of(const Action& action, int stages);

// What the ranks of the pipeline do, in order, in one step. A rank may hold several stages, as in
// interleaved schedules: as many as its recipe says.
struct Schedule {
  std::vector<int> rank_of_stage;          // along the pipeline axis
  std::vector<std::vector<Action>> ranks;
  int exchanges = 2;                       // most_exchange_buffers
  bool operator==(const Schedule&) const = default;

  int stages() const { return static_cast<int>(rank_of_stage.size()); }
};
// The pipeline that a schedule is made for.
struct PipelineShape {
  int ranks = 1;
  int stages = 1;  // a multiple of ranks
  int micro_batches = 1;
  // Micro-batches that an interleaved schedule runs through one of a rank's stages before the next.
  int group = 1;

  constexpr PipelineShape(int for_ranks, int for_stages, int for_micro_batches)
      : PipelineShape(for_ranks, for_stages, for_micro_batches, for_ranks) {}
  constexpr PipelineShape(int for_ranks, int for_stages, int for_micro_batches, int in_groups_of)
      : ranks(for_ranks), stages(for_stages), micro_batches(for_micro_batches), group(in_groups_of) {}
  // One stage a rank.
  constexpr PipelineShape(int for_stages, int for_micro_batches)
      : PipelineShape(for_stages, for_stages, for_micro_batches) {}
};
// The rank of a stage: stages go around the ring of ranks, as in Megatron-LM's interleaved
// schedule; with one stage a rank it is the stage.
inline int ring_rank(int stage, const PipelineShape& shape) { return stage % shape.ranks; }
// The same in the shape of a V: stages go down the ranks and back, so that each holds two, and the
// first rank the first and the last stage.
inline int v_rank(int stage, int ranks) { return stage < ranks ? stage : 2 * ranks - 1 - stage; }
bool is_v(const Schedule& schedule);
// Whether an action's result goes to another rank, or to the next action of its flow on this one.
bool sends(const Schedule& schedule, const Action& action);
bool hands_over(const Schedule& schedule, const Action& action);
// ranks[s] runs stage s.
Schedule one_stage_a_rank(std::vector<std::vector<Action>> ranks);

// The number of buffers on which a rank's transfers and computation take turns: this number for
// activations to send, and the same number for gradients of activations; in a V for each way
// (exchange_ways). Two, so that one can be sent while the other is computed; and where groups have
// more micro-batches than there are ranks, as many more: these wait in the sender's buffers until
// the first rank has run its group through the stage before.
int most_exchange_buffers(const PipelineShape& shape);
// Those that are used.
int exchange_buffers(const PipelineShape& shape);
// How many ways have exchange buffers of their own on a rank. The stages of a rank share them, but
// for a V, where what a stage sends on the way down would wait behind what waits to be taken on the
// way back: each stage has its own, except that the last rank sends activations on the way back
// alone, and keeps a gradient from there where it is; the last stage sends no activation. Stages
// before `first_back` have no backward, since nothing is trained up to there: where that on the way
// down is one of them, gradients go one way.
struct ExchangeWays {
  int outputs = 1;
  int gradients = 1;
};
constexpr ExchangeWays exchange_ways(bool is_v, int rank, int ranks, int first_back = 0) {
  if (!is_v) return {};
  return {.outputs = rank > 0 && rank + 1 < ranks ? 2 : 1,
          .gradients = rank + 1 < ranks && rank >= first_back ? 2 : 1};
}
// The number of the way on which a stage's actions send: 0, or 1 on the way back of a V, where the
// rank has more than one.
int output_way(const Schedule& schedule, int stage);
int gradient_way(const Schedule& schedule, int stage, int first_back = 0);

// What a replica with fewer micro-batches does: the same but for the actions of those that it does
// not have. What can run can run without its last micro-batches.
Schedule first_micro_batches(Schedule schedule, int micro_batches);

// Checks that stages go around the ring, or down the ranks and back; that each stage runs each
// micro-batch forward and then backward exactly once, with backwards, and the weight gradients, in
// ascending order; that both ends of every channel (from one rank to another, forwards or
// backwards) have the same order of micro-batches; and that the whole runs to its end as CPU ranks
// run it: a forward waits for the previous stage, a backward for the next stage, and both for an
// exchange buffer whose last content was taken. A gradient that stays on its rank is kept in its
// buffer until the backward that takes it. Concurrent streams wait for less. Returns what is wrong
// and where; nothing where the schedule is correct.
std::optional<std::string> find_fault(const Schedule& schedule, int micro_batches);

// The largest number of micro-batches (of each stage on the rank) whose activations a rank holds at
// once, until backward or backward_inputs.
int most_in_flight(const std::vector<Action>& rank);
// The same of the last stage alone.
int most_in_flight_of_last_stage(const Schedule& schedule);

// The slots that a rank has for what weight gradients read: of micro-batches between their forward
// and the end of their backward, and between its two parts. None where backwards are whole.
struct SlotsForWeights {
  int saved = 0;
  int left = 0;
  bool operator==(const SlotsForWeights&) const = default;
};
// Those that a rank's list needs: of the stages that run some backward in two parts.
SlotsForWeights slots_for_weights(const std::vector<Action>& rank);

// Whether the stage runs some backward in two parts.
bool splits_backward(const Schedule& schedule, int stage);
// The same of all stages.
std::vector<char> splits_backward(const Schedule& schedule);

}  // namespace parplan
