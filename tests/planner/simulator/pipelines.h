#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "planner/base/enum_index.h"
#include "planner/plan/schedule.h"
#include "planner/simulator/play_list.h"
#include "tests/planner/simulator/hand_built.h"

namespace parplan {

inline std::vector<Action> gpipe(int stage, int micro_batches) {
  std::vector<Action> actions;
  for (const Phase phase : {Phase::forward, Phase::backward})
    for (int i = 0; i < micro_batches; ++i) actions.push_back({.stage = stage, .phase = phase, .micro_batch = i});
  return actions;
}

inline std::vector<Action> one_f_one_b(int stage, int stages, int micro_batches) {
  std::vector<Action> actions;
  const int warm_up = std::min(stages - 1 - stage, micro_batches);
  for (int i = 0; i < warm_up; ++i) actions.push_back({.stage = stage, .phase = Phase::forward, .micro_batch = i});
  for (int i = 0; i < micro_batches; ++i) {
    if (i + warm_up < micro_batches)
      actions.push_back({.stage = stage, .phase = Phase::forward, .micro_batch = i + warm_up});
    actions.push_back({.stage = stage, .phase = Phase::backward, .micro_batch = i});
  }
  return actions;
}

// No actions yet: stage s is on rank s % ranks.
inline Schedule round_robin(int ranks, int stages) {
  Schedule schedule{.rank_of_stage = std::vector<int>(static_cast<std::size_t>(stages)),
                    .ranks = std::vector<std::vector<Action>>(static_cast<std::size_t>(ranks))};
  for (int s = 0; s < stages; ++s) schedule.rank_of_stage[s] = s % ranks;
  return schedule;
}

// Interleaved 1F1B (Narayanan et al. 2021), in rounds of as many micro-batches as there are ranks.
inline Schedule interleaved(int ranks, int stages_per_rank, int micro_batches) {
  Schedule schedule = round_robin(ranks, ranks * stages_per_rank);
  const int round = ranks * stages_per_rank;
  for (int r = 0; r < ranks; ++r) {
    const auto action = [&](Phase phase, int k) {
      const int turn = k % round / ranks;
      const int chunk = phase == Phase::forward ? turn : stages_per_rank - 1 - turn;
      return Action{.stage = chunk * ranks + r, .phase = phase, .micro_batch = k / round * ranks + k % ranks};
    };
    const int all = micro_batches * stages_per_rank;
    const int warm_up = std::min((ranks - r - 1) * 2 + (stages_per_rank - 1) * ranks, all);
    for (int k = 0; k < warm_up; ++k) schedule.ranks[r].push_back(action(Phase::forward, k));
    for (int k = 0; k < all; ++k) {
      if (k + warm_up < all) schedule.ranks[r].push_back(action(Phase::forward, k + warm_up));
      schedule.ranks[r].push_back(action(Phase::backward, k));
    }
  }
  return schedule;
}

// Seconds of a stage.
struct StageWork {
  std::int64_t forward = 0;
  std::int64_t backward = 0;
};

// The Program of a rank of the pipeline: every forward and backward is received, computed and sent
// on. `work` is by stage; a transfer takes `transfer` seconds. Where ranks hold several stages, the
// first follows the last.
inline Program pipeline_rank(const Schedule& schedule, int rank, const std::vector<StageWork>& work,
                             std::int64_t transfer) {
  const int ranks = static_cast<int>(schedule.ranks.size());
  const int stages = schedule.stages();
  HandBuilt built(rank);
  if (stages > ranks && ranks > 1) {
    built.program.set_group(next_stage, {(rank + 1) % ranks});
    built.program.set_group(previous_stage, {(rank + ranks - 1) % ranks});
  }
  const auto receives = [&](const Action& action) {
    const std::optional<Action> input = input_of(action, stages);
    return input && schedule.rank_of_stage[input->stage] != rank;
  };
  std::array<int, 2> receive{}, send{};  // by phase, of which there are actions
  for (const Phase phase : {Phase::forward, Phase::backward}) {
    const auto any = [&](auto moves) {
      return std::ranges::any_of(schedule.ranks[rank], [&](const Action& a) { return a.phase == phase && moves(a); });
    };
    const auto add = [&](const char* name, InstructionKind kind, GroupKey group, Stream stream) {
      return built.segment(name, stream, {communication(kind, transfer, group, stream, Label::pp)});
    };
    const bool up = phase == Phase::forward;
    if (any(receives))
      receive[index_of(phase)] = add(up ? "receive forward" : "receive backward", InstructionKind::receive,
                                     up ? previous_stage : next_stage,
                                     up ? Stream::receive_previous : Stream::receive_next);
    if (any([&](const Action& action) { return sends(schedule, action); }))
      send[index_of(phase)] = add(up ? "send forward" : "send backward", InstructionKind::send,
                                  up ? next_stage : previous_stage, up ? Stream::send_next : Stream::send_previous);
  }
  std::vector<std::array<int, 2>> compute(work.size());  // by stage and phase
  for (int s = 0; s < stages; ++s)
    if (schedule.rank_of_stage[s] == rank)
      compute[s] = {built.segment("forward", Stream::compute, {kernel(work[s].forward)}),
                    built.segment("backward", Stream::compute, {kernel(work[s].backward)})};
  for (const Action& action : schedule.ranks[rank]) {
    const std::size_t phase = index_of(action.phase);
    const int first = static_cast<int>(built.program.calls.size());
    EventIds waits;
    if (receives(action)) waits.push_back(built.call(receive[phase]));
    const int done = built.call(compute[action.stage][phase], waits);
    if (sends(schedule, action)) built.call(send[phase], {done});
    built.program.tasks.push_back(
        {.action = action, .first_call = first, .last_call = static_cast<int>(built.program.calls.size())});
  }
  return built.program;
}

inline std::vector<Program> pipeline_ranks(const Schedule& schedule, const std::vector<StageWork>& work,
                                           std::int64_t transfer) {
  std::vector<Program> programs;
  for (int r = 0; r < static_cast<int>(schedule.ranks.size()); ++r)
    programs.push_back(pipeline_rank(schedule, r, work, transfer));
  return programs;
}

// The end of the last forward or backward by the recurrence of the schedule, with transfers as
// rendezvous on a stream for each rank and direction: a second implementation, without streams,
// events or queues.
inline double pipeline_recurrence(const Schedule& schedule, const std::vector<StageWork>& work, int transfer) {
  int micro_batches = 0;
  for (const Action& action : schedule.ranks[0]) micro_batches = std::max(micro_batches, action.micro_batch + 1);
  const auto n = static_cast<std::size_t>(micro_batches);
  // By phase, stage and micro-batch: when the result is where it is needed.
  std::array<std::vector<std::vector<std::optional<double>>>, 2> there;
  for (auto& of_phase : there) of_phase.assign(work.size(), std::vector<std::optional<double>>(n));
  std::vector<double> clock(schedule.ranks.size(), 0.0);
  std::vector<std::array<double, 2>> link(schedule.ranks.size());  // when the direction out of a rank is free
  std::vector<std::size_t> next(schedule.ranks.size(), 0);
  double end = 0.0;
  for (bool progress = true; progress;) {
    progress = false;
    for (std::size_t r = 0; r < schedule.ranks.size(); ++r) {
      if (next[r] == schedule.ranks[r].size()) continue;
      const Action action = schedule.ranks[r][next[r]];
      const std::size_t phase = index_of(action.phase);
      if (const std::optional<Action> input = input_of(action, schedule.stages())) {
        const std::optional<double> ready = there[phase][input->stage][input->micro_batch];
        if (!ready) continue;
        clock[r] = std::max(clock[r], *ready);
      }
      const StageWork& stage = work[action.stage];
      clock[r] += static_cast<double>(action.phase == Phase::forward ? stage.forward : stage.backward);
      end = std::max(end, clock[r]);
      std::optional<double>& arrives = there[phase][action.stage][action.micro_batch];
      arrives = clock[r];
      if (sends(schedule, action)) arrives = link[r][phase] = std::max(link[r][phase], clock[r]) + transfer;
      ++next[r];
      progress = true;
    }
  }
  return end;
}

}  // namespace parplan
