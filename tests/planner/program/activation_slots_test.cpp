#include "planner/program/activation_slots.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "planner/schedule/schedules.h"
#include "tests/planner/program/random_plans.h"
#include "tests/planner/schedule/random_orders.h"

namespace parplan {
namespace {

// "0F0 0F1 0B0 0B1" for stage 0 of two stages that do the same.
Slots slots_of(const std::vector<std::string>& actions) {
  std::vector<std::vector<Action>> ranks(2);
  for (const std::string& action : actions)
    for (int s = 0; s < 2; ++s) {
      ranks[s].push_back(parse_action(action));
      ranks[s].back().stage = s;
    }
  return play_slots(one_stage_a_rank(std::move(ranks)), 0, InputSlots::in_flight);
}

// What a Program saves for its backward: the bytes of one block, or of all.
std::int64_t saved_bytes(const Program& program, const std::string& block) {
  std::int64_t bytes = 0;
  for (const Buffer& buffer : program.buffers)
    if (buffer.name.starts_with("saved of " + block)) bytes += buffer.bytes;
  return bytes;
}

}  // namespace

TEST_CASE("micro-batches take the slots of GPipe and 1F1B in turn, and exchange buffers by two") {
  for (const ScheduleRow& row : schedule_rows())
    for (const int stages : {1, 2, 3, 4}) {
      if (is_v_shaped(row.kind)) continue;  // two stages a rank
      for (const int micro_batches : {1, 2, 3, 5, 8}) {
        const Schedule schedule = row.actions({stages, micro_batches});
        for (int s = 0; s < stages; ++s) {
          INFO(row.name << ", stage " << s << " of " << stages << ", " << micro_batches << " micro-batches");
          const Slots slots = play_slots(schedule, s, InputSlots::in_flight);
          CHECK(slots.saved == row.in_flight(s, {stages, micro_batches}));
          const int exchanges = stages == 1 || micro_batches == 1 ? 1 : 2;
          CHECK(slots.outputs == exchanges);
          CHECK(slots.gradients == exchanges);
          const SlotsForWeights for_weights =
              row.for_weights ? row.for_weights(s, {stages, micro_batches}) : SlotsForWeights{};
          CHECK(slots.for_weights == for_weights.saved);
          CHECK(slots.left == for_weights.left);
          const std::vector<Action>& actions = schedule.ranks[s];
          REQUIRE(slots.actions.size() == actions.size());
          for (std::size_t i = 0; i < actions.size(); ++i) {
            CHECK(slots.actions[i].saved == actions[i].micro_batch % slots.saved);
            if (actions[i].phase != Phase::backward_weights && (actions[i].phase != Phase::forward || s + 1 < stages))
              CHECK(slots.actions[i].exchange == actions[i].micro_batch % exchanges);
          }
        }
      }
    }
}

TEST_CASE("what a stage hands over to the next one on its rank stays where it is until it is taken") {
  std::mt19937 random(20261125);
  int kept = 0;
  for (int trial = 0; trial < 200; ++trial) {
    const int ranks = 2 + static_cast<int>(random() % 2), micro_batches = 1 + static_cast<int>(random() % 6);
    const Schedule schedule = random_v_orders(ranks, micro_batches, random);
    if (find_fault(schedule, micro_batches)) continue;
    for (const InputSlots inputs : {InputSlots::in_flight, InputSlots::one_more})
      for (int rank = 0; rank < ranks; ++rank) {
        const Slots slots = play_slots(schedule, rank, inputs);
        CHECK(slots.inputs == input_buffers(schedule, rank, inputs));
        if (inputs == InputSlots::in_flight && rank + 1 < ranks) CHECK(slots.inputs == 0);
        std::map<int, Action> held, gradients;  // buffers to what they hold, or wait with
        for (std::size_t i = 0; i < slots.actions.size(); ++i) {
          const Action& action = schedule.ranks[rank][i];
          const ActionSlots& own = slots.actions[i];
          const std::optional<Flow> flow = flow_of(action.phase);
          if (flow == Flow::forward && hands_over(schedule, action)) {
            CHECK(held.emplace(own.handed_over, Action{action.stage + 1, Phase::forward, action.micro_batch}).second);
            ++kept;
          }
          const bool takes_input =
              flow == Flow::forward && action.stage > 0 && hands_over(schedule, {action.stage - 1, Phase::forward, 0});
          if (takes_input) CHECK(held.at(own.input) == action);
          if (takes_input || (flow == Flow::forward && inputs == InputSlots::one_more && action.stage > 0))
            held[own.input] = action;
          if (flow != Flow::backward) continue;
          if (const auto at = held.find(own.input);
              at != held.end() && at->second == Action{action.stage, Phase::forward, action.micro_batch})
            held.erase(at);
          const bool takes_over =
              action.stage + 1 < schedule.stages() && hands_over(schedule, {action.stage + 1, Phase::backward, 0});
          const Action wanted{action.stage, Phase::backward, action.micro_batch};
          if (takes_over) {
            CHECK(gradients.at(own.exchange) == wanted);
            gradients.erase(own.exchange);
          }
          CHECK_FALSE(gradients.contains(own.exchange));
          if (hands_over(schedule, action))
            gradients[own.exchange] = {action.stage - 1, Phase::backward, action.micro_batch};
        }
        CHECK(held.empty());
        CHECK(gradients.empty());
      }
  }
  CHECK(kept > 100);
}

// Ranks 0 and 1 of three hold stages 0 and 5, and 1 and 4.
TEST_CASE("where the way down a V is frozen, a rank's gradients take turns in the buffers of the way back alone") {
  const int ranks = 3, micro_batches = 6;
  for (const ScheduleKind kind : {ScheduleKind::zero_bubble_v, ScheduleKind::dualpipe_v}) {
    const Schedule schedule = row_of(kind).actions({ranks, 2 * ranks, micro_batches});
    for (int first_back = 0; first_back <= ranks; ++first_back)
      for (int rank = 0; rank < ranks; ++rank) {
        INFO(name(kind) << ", rank " << rank << ", frozen before stage " << first_back);
        const Slots slots = play_slots(schedule, rank, InputSlots::in_flight, first_back);
        const bool both_ways = rank + 1 < ranks && rank >= first_back;
        CHECK(slots.gradients == (both_ways ? 4 : 2));
        std::vector<int> taken(static_cast<std::size_t>(slots.gradients), 0);
        for (std::size_t i = 0; i < slots.actions.size(); ++i) {
          const Action& action = schedule.ranks[rank][i];
          if (flow_of(action.phase) != Flow::backward || action.stage < first_back) continue;
          const int own = slots.actions[i].exchange;
          REQUIRE(own < slots.gradients);
          ++taken[static_cast<std::size_t>(own)];
        }
        for (const int count : taken) CHECK(count > 0);
        if (rank >= first_back) continue;
        CHECK(taken == std::vector<int>{micro_batches / 2, micro_batches / 2});
      }
  }
}

TEST_CASE("with one more buffer an activation arrives in one that the backward just before does not free") {
  const int stages = 3;
  for (const int micro_batches : {1, 2, 3, 8}) {
    const Schedule schedule = row_of(ScheduleKind::one_f_one_b).actions({stages, micro_batches});
    for (int s = 0; s < stages; ++s) {
      INFO("stage " << s << ", " << micro_batches << " micro-batches");
      const Slots slots = play_slots(schedule, s, InputSlots::one_more);
      CHECK(slots.saved == play_slots(schedule, s, InputSlots::in_flight).saved);
      // Nothing arrives at the first stage, and no more buffers are of use than activations arrive.
      CHECK(slots.inputs == (s == 0 ? 0 : std::min(slots.saved + 1, micro_batches)));
      for (std::size_t i = 0; i < slots.actions.size() && s > 0; ++i) {
        CHECK(slots.actions[i].input == schedule.ranks[s][i].micro_batch % slots.inputs);
        const bool follows_backward = i > 0 && schedule.ranks[s][i].phase == Phase::forward &&
                                      schedule.ranks[s][i - 1].phase == Phase::backward;
        if (!follows_backward) continue;
        CHECK(slots.actions[i].saved == slots.actions[i - 1].saved);
        CHECK(slots.actions[i].input != slots.actions[i - 1].input);
      }
    }
  }
}

TEST_CASE("a forward out of turn takes the slot that is free, and keeps it until its backward") {
  // Two at once. Micro-batch 2 takes the second slot and keeps it to the end; 1 gets that of 0.
  CHECK(slots_of({"0F0", "0F2", "0B0", "0F1", "0B1", "0B2"}) == Slots{.saved = 2,
                                                                      .outputs = 2,
                                                                      .gradients = 2,
                                                                      .actions = {{.saved = 0, .exchange = 0},
                                                                                  {.saved = 1, .exchange = 1},
                                                                                  {.saved = 0, .exchange = 0},
                                                                                  {.saved = 0, .exchange = 0},
                                                                                  {.saved = 0, .exchange = 1},
                                                                                  {.saved = 1, .exchange = 0}}});
  // Three at once. Slots 0 and 1 are free for 3 and 4: the slot that was freed first is taken
  // first.
  const Slots slots = slots_of({"0F0", "0F1", "0F2", "0B0", "0B1", "0F4", "0F3", "0B2", "0B3", "0B4"});
  CHECK(slots.saved == 3);
  CHECK(slots.actions[5].saved == 0);
  CHECK(slots.actions[6].saved == 1);
}

TEST_CASE("no slot is held by two micro-batches, and every slot is used") {
  std::mt19937 random(4);
  for (int trial = 0; trial < 300; ++trial) {
    const int stages = 1 + static_cast<int>(random() % 3), micro_batches = 1 + static_cast<int>(random() % 6);
    const Schedule schedule = random_orders(stages, micro_batches, false, random);
    for (int s = 0; s < stages; ++s) {
      const Slots slots = play_slots(schedule, s, InputSlots::in_flight);
      CHECK(slots.saved == most_in_flight(schedule.ranks[s]));
      std::map<int, int> held;  // slot to micro-batch
      int highest = 0;
      for (std::size_t i = 0; i < slots.actions.size(); ++i) {
        const Action& action = schedule.ranks[s][i];
        const int slot = slots.actions[i].saved;
        highest = std::max(highest, slot);
        if (action.phase == Phase::forward) {
          CHECK(held.emplace(slot, action.micro_batch).second);
        } else {
          REQUIRE(held.contains(slot));
          CHECK(held.at(slot) == action.micro_batch);
          held.erase(slot);
        }
      }
      CHECK(highest == slots.saved - 1);
    }
  }
}

TEST_CASE("what the weight gradients read is held until they are there, and all else until the first part ends") {
  std::mt19937 random(5);
  int in_parts = 0;
  for (int trial = 0; trial < 300; ++trial) {
    const int stages = 1 + static_cast<int>(random() % 3), micro_batches = 1 + static_cast<int>(random() % 6);
    const Schedule schedule = random_orders(stages, micro_batches, false, random, Backwards::in_parts);
    for (int s = 0; s < stages; ++s) {
      const Slots slots = play_slots(schedule, s, InputSlots::in_flight);
      CHECK(slots.saved == most_in_flight(schedule.ranks[s]));
      const bool splits = splits_backward(schedule, s);
      CHECK((splits_backward(schedule)[static_cast<std::size_t>(s)] != 0) == splits);
      CHECK((slots.for_weights > 0) == splits);
      CHECK((slots.left > 0) == splits);
      in_parts += splits;
      // By kind: slot to micro-batch, and the slots that were used.
      std::map<int, int> saved, for_weights, left, all_for_weights, all_left;
      const auto take = [](std::map<int, int>& held, int slot, int micro_batch) {
        CHECK(held.emplace(slot, micro_batch).second);
      };
      const auto free = [](std::map<int, int>& held, int slot, int micro_batch) {
        REQUIRE(held.contains(slot));
        CHECK(held.at(slot) == micro_batch);
        held.erase(slot);
      };
      for (std::size_t i = 0; i < slots.actions.size(); ++i) {
        const auto [stage, phase, m] = schedule.ranks[s][i];
        const ActionSlots& own = slots.actions[i];
        if (phase == Phase::forward) take(saved, own.saved, m);
        if (phase == Phase::backward || phase == Phase::backward_inputs) free(saved, own.saved, m);
        if (!splits) continue;
        if (phase == Phase::forward) take(for_weights, own.for_weights, m), all_for_weights[own.for_weights] = m;
        if (phase == Phase::backward_inputs) take(left, own.left, m), all_left[own.left] = m;
        if (phase == Phase::backward_weights) free(left, own.left, m);
        if (phase == Phase::backward || phase == Phase::backward_weights) free(for_weights, own.for_weights, m);
      }
      CHECK(static_cast<int>(all_for_weights.size()) == slots.for_weights);
      CHECK(static_cast<int>(all_left.size()) == slots.left);
    }
  }
  CHECK(in_parts > 100);
}

TEST_CASE("the last block has slots of its own where its rank holds other stages") {
  const ScheduleRow& row = row_of(ScheduleKind::interleaved);
  for (const int ranks : {1, 2, 3})
    for (const int chunks : {2, 3})
      for (const int micro_batches : {1, 2, 3, 5, 8}) {
        const PipelineShape shape{ranks, ranks * chunks, micro_batches, ranks + 1};
        const Schedule schedule = row.actions(shape);
        for (int rank = 0; rank < ranks; ++rank) {
          INFO(ranks << " ranks, " << chunks << " chunks, " << micro_batches << " micro-batches, rank " << rank);
          const Slots slots = play_slots(schedule, rank, InputSlots::in_flight);
          CHECK(slots.head == (rank + 1 == ranks ? row.last_stage_in_flight(shape) : 0));
          std::map<int, int> held;  // slot to micro-batch of the last stage
          int highest = -1;
          for (std::size_t i = 0; i < slots.actions.size(); ++i) {
            const auto [stage, phase, m] = schedule.ranks[rank][i];
            if (stage + 1 < schedule.stages()) continue;
            const int slot = slots.actions[i].head;
            highest = std::max(highest, slot);
            if (phase == Phase::forward) {
              CHECK(held.emplace(slot, m).second);
            } else {
              REQUIRE(held.contains(slot));
              CHECK(held.at(slot) == m);
              held.erase(slot);
            }
          }
          CHECK(highest == slots.head - 1);
        }
      }
  // With one stage a rank, the slots are those of all its blocks.
  CHECK(play_slots(row_of(ScheduleKind::one_f_one_b).actions({2, 4}), 1, InputSlots::in_flight).head == 0);
}

TEST_CASE("slots of several stages take what their largest blocks save, and the head what its own stage needs") {
  const OpGraph graph = graph_of("tiny-gpt2");
  TrainingSpec training;
  training.global_batch = 8;
  training.sequence_length = 16;
  ParallelSpec alone;
  alone.micro_batch = 1;
  const int blocks = static_cast<int>(graph.blocks.size());
  alone.stage_blocks = {blocks};
  const Program whole = lower(job_of(graph, training, alone), 0);
  const std::int64_t embedding = saved_bytes(whole, graph.blocks.front().name);
  const std::int64_t layer = saved_bytes(whole, graph.blocks[1].name);
  const std::int64_t head = saved_bytes(whole, graph.blocks.back().name);
  REQUIRE(embedding < layer);
  REQUIRE(head > 0);
  ParallelSpec spec = alone;
  spec.mesh.degree.pp = 2;
  spec.schedule = ScheduleKind::interleaved;
  spec.virtual_stages = 2;
  spec.stage_blocks = {2, 1, 1, blocks - 4};
  REQUIRE(blocks >= 6);
  REQUIRE(!illegal(graph, training, spec));
  const Job job = job_of(graph, training, spec);
  const PipelineShape shape = shape_of(spec, training);
  const ScheduleRow& row = row_of(spec.schedule);
  CHECK(saved_bytes(lower(job, 0), "") == row.in_flight(0, shape) * (layer + embedding));
  CHECK(saved_bytes(lower(job, 1), "") == row.in_flight(1, shape) * (blocks - 5) * layer + head);
}

TEST_CASE("the stages of one rank share its slots and buffers, and send only what leaves it") {
  // Stages 0 and 1 on rank 0, stage 2 on rank 1: find_fault would refuse this.
  const Schedule schedule{.rank_of_stage = {0, 0, 1},
                          .ranks = {{{0, Phase::forward, 0},
                                     {1, Phase::forward, 0},
                                     {0, Phase::forward, 1},
                                     {1, Phase::forward, 1},
                                     {1, Phase::backward, 0},
                                     {0, Phase::backward, 0},
                                     {1, Phase::backward, 1},
                                     {0, Phase::backward, 1}},
                                    {{2, Phase::forward, 0},
                                     {2, Phase::backward, 0},
                                     {2, Phase::forward, 1},
                                     {2, Phase::backward, 1}}}};
  const Slots slots = play_slots(schedule, 0, InputSlots::in_flight);
  CHECK(slots.saved == 4);
  CHECK(slots.actions[1] == ActionSlots{.saved = 1, .exchange = 0});
  // Stage 0 hands its activation over.
  CHECK(slots.actions[3] == ActionSlots{.saved = 3, .input = 1, .exchange = 1});
}

}  // namespace parplan
