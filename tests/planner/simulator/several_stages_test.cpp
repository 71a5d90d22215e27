// Ranks of the pipeline that hold several stages each.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <utility>

#include "planner/plan/pipeline_time.h"
#include "planner/schedule/one_f_one_b.h"
#include "planner/simulator/repeating_step.h"
#include "planner/simulator/simulate.h"
#include "planner/simulator/simulation_state.h"
#include "planner/simulator/steady_state.h"
#include "tests/planner/simulator/pipelines.h"

namespace parplan {
namespace {

struct Step {
  StepResult result;
  StepDetails details;
  Timeline timeline;
};
Step play(const std::vector<Program>& programs, const CostModel& model) {
  const std::vector<CostModel> models(programs.size(), model);
  Step played;
  played.result = simulate(programs, models, &played.timeline, &played.details);
  return played;
}

TEST_CASE("two ranks with two stages each hand micro-batches round the ring") {
  const Schedule schedule = interleaved(2, 2, 2);
  REQUIRE(!find_fault(schedule, 2));
  // Forward 1 s, backward 2 s, transfers at once; starts:
  //   rank 0  0F0 0   0F1 1   2F0 2   2F1 3           2B0 6   2B1 9   0B0 11  0B1 13, until 15
  //   rank 1          1F0 1   1F1 2   3F0 3   3B0 4   3F1 6   3B1 7   1B0 9   1B1 11, until 13
  const std::vector<Program> programs = pipeline_ranks(schedule, std::vector<StageWork>(4, {1, 2}), 0);
  for (const CostModel& model : {concurrent(), sequential()}) {
    const Step played = play(programs, model);
    CHECK(played.result.time.compute == Seconds(12));
    CHECK(played.result.time.bubble == Seconds(3));
    CHECK(played.result.time.total() == Seconds(15));
    REQUIRE(played.details.ranks.size() == 2);
    CHECK(played.details.ranks[1].time.total() == Seconds(13));
    std::map<std::pair<int, int>, std::vector<double>> starts;  // of kernels, by rank and stage
    for (const TimelineEvent& event : played.timeline.events)
      if (event.stream == Stream::compute) starts[{event.rank, event.stage.value()}].push_back(event.start.value);
    CHECK(starts ==
          std::map<std::pair<int, int>, std::vector<double>>{
              {{0, 0}, {0, 1, 11, 13}}, {{0, 2}, {2, 3, 6, 9}}, {{1, 1}, {1, 2, 9, 11}}, {{1, 3}, {3, 4, 6, 7}}});
  }
}

TEST_CASE("a trace names the stages of a rank, and says for each event which it is of") {
  const std::vector<Program> programs = pipeline_ranks(interleaved(2, 2, 2), std::vector<StageWork>(4, {1, 2}), 1);
  const std::string trace = write_trace(play(programs, concurrent()).timeline);
  CHECK(trace.find(R"("pid":0,"tid":0,"args":{"name":"rank 0: stages 0, 2"})") != std::string::npos);
  CHECK(trace.find(R"("pid":1,"tid":0,"args":{"name":"rank 1: stages 1, 3"})") != std::string::npos);
  CHECK(trace.find(R"("args":{"stage":3})") != std::string::npos);
}

// Random orders of the actions of ranks that hold several stages, in which channels deliver in
// order.
Schedule random_order(int ranks, int stages, int micro_batches, std::mt19937& random) {
  Schedule schedule = round_robin(ranks, stages);
  // Per rank: what may run next. A rank's inputs from one channel come in the order in which they
  // were sent.
  std::vector<std::map<std::pair<int, Phase>, std::deque<Action>>> inputs(static_cast<std::size_t>(ranks));
  for (int m = 0; m < micro_batches; ++m) inputs[0][{-1, Phase::forward}].push_back({0, Phase::forward, m});
  for (int left = 2 * stages * micro_batches; left > 0;) {
    const auto rank = static_cast<int>(random() % static_cast<unsigned>(ranks));
    auto& channels = inputs[rank];
    std::erase_if(channels, [](const auto& channel) { return channel.second.empty(); });
    if (channels.empty()) continue;
    const auto channel = std::next(channels.begin(), static_cast<long>(random() % channels.size()));
    const Action action = channel->second.front();
    channel->second.pop_front();
    schedule.ranks[rank].push_back(action);
    --left;
    std::optional<Action> next = output_of(action, stages);
    if (!next && action.phase == Phase::forward) next = Action{action.stage, Phase::backward, action.micro_batch};
    if (!next) continue;
    const int to = schedule.rank_of_stage[next->stage];
    inputs[to][{rank, next->phase}].push_back(*next);
  }
  return schedule;
}

TEST_CASE("random orders of several stages a rank take what their recurrence says") {
  std::mt19937 random(10);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int round = 0; round < 200; ++round) {
    CAPTURE(round);
    const int ranks = draw(1, 4), stages = ranks * draw(1, 3), micro_batches = draw(1, 6), transfer = draw(0, 3);
    const Schedule schedule = random_order(ranks, stages, micro_batches, random);
    std::vector<StageWork> work;
    for (int s = 0; s < stages; ++s) {
      const int forward = draw(1, 9);
      work.push_back({forward, draw(1, 9)});
    }
    const Step played = play(pipeline_ranks(schedule, work, transfer), concurrent());
    CHECK(played.result.time.total() == Seconds(pipeline_recurrence(schedule, work, transfer)));
    Seconds path;
    for (const CriticalWork& one : played.details.critical_path) path += one.time;
    CHECK(path == played.result.time.total());
  }
}

TEST_CASE("a steady state is one of every stage that a rank holds") {
  const int micro_batches = 40, first = 24, window = 16, period = 4;  // the last three in forwards
  const std::vector<Program> programs =
      pipeline_ranks(interleaved(2, 2, micro_batches), std::vector<StageWork>(4, {1, 2}), 0);
  const std::vector<CostModel> models(programs.size(), concurrent());
  Simulation step = prepare(programs, models, CallsInARow::apart, false);
  play_step(step);
  // Two micro-batches on two stages, each for 1 + 2 s.
  const int end = first + window + period;
  const std::optional<SteadyState> steady = find_steady_state(step, first, end, window, period);
  REQUIRE(steady);
  CHECK(steady->later == Seconds(12));
  CHECK(steady->period == period);
  std::set<std::pair<int, Phase>> late;
  for (PlayedRank& rank : step.ranks) {
    int forwards = 0;
    for (const Task& task : rank.list.tasks) {
      forwards += task.action->phase == Phase::forward;
      if (forwards <= end - window || forwards > end) continue;
      CAPTURE(write_action(*task.action));
      late.insert({task.action->stage, task.action->phase});
      Seconds& ended = rank.pieces[static_cast<std::size_t>(rank.calls[task.first_call].first)].end;
      const Seconds then = std::exchange(ended, ended + Seconds(1));
      CHECK(!find_steady_state(step, first, end, window, period));
      ended = then;
    }
  }
  CHECK(late.size() == 8);  // forwards and backwards of four stages
}

TEST_CASE("what a steady state adds is what more micro-batches take, whatever its period") {
  std::mt19937 random(3);
  const auto draw = [&](int from, int to) { return std::uniform_int_distribution(from, to)(random); };
  int shortened = 0, slow = 0;
  for (int trial = 0; trial < 300; ++trial) {
    const int stages = draw(2, 6), count = stages + 12 + 2 * draw(0, 4), transfer = draw(0, 300);
    std::vector<StageWork> work;
    for (int s = 0; s < stages; ++s) {
      const int forward = draw(1000, 1010);
      work.push_back({forward, draw(2000, 2020)});
    }
    CAPTURE(trial);
    const auto programs_of = [&](int micro_batches) {
      return pipeline_ranks(one_f_one_b_actions({stages, stages, micro_batches}), work, transfer);
    };
    const std::vector<Program> programs = programs_of(count);
    const std::vector<CostModel> models(programs.size(), concurrent());
    const std::optional<RepeatingStep> step =
        repeating_step(prepare(programs, models, CallsInARow::joined, false), count, 2);
    REQUIRE(step);
    for (const int times : {1, 20, 47, 150}) {
      const int all = count + times * step->period;
      const ExtendedStep extended = play_until_steady(*step, all);
      CHECK(extended.result.time == play(programs_of(all), concurrent()).result.time);
      if (!extended.steady) continue;
      ++shortened;
      slow += extended.steady->period > 2;
    }
  }
  MESSAGE(shortened << " shortened, " << slow << " of them with a period of more than the buffers'");
  CHECK(shortened > 600);
  CHECK(slow > 100);
}

}  // namespace
}  // namespace parplan
