#include "planner/plan/schedule.h"

#include <sstream>

#include <doctest/doctest.h>

#include "planner/base/error.h"
#include "planner/plan/pipeline_time.h"
#include "tests/planner/base/error_of.h"

using namespace parplan;

namespace {

Schedule schedule_of(const std::vector<std::string>& stages) {
  std::vector<std::vector<Action>> ranks;
  for (const std::string& stage : stages) {
    std::istringstream words(stage);
    auto& actions = ranks.emplace_back();
    for (std::string word; words >> word;) actions.push_back(parse_action(word));
  }
  return one_stage_a_rank(std::move(ranks));
}

std::string fault(const std::vector<std::string>& stages, int micro_batches) {
  return find_fault(schedule_of(stages), micro_batches).value_or("none");
}

}  // namespace

TEST_CASE("Actions are written and read back") {
  CHECK(write_action({2, Phase::forward, 0}) == "2F0");
  CHECK(write_action({0, Phase::backward, 117}) == "0B117");
  CHECK(parse_action("12B3") == Action{12, Phase::backward, 3});
  CHECK(parse_action("2W0") == Action{2, Phase::backward_weights, 0});
  for (const char* text : {"2F0", "0B117", "15F511", "3I2", "3W2"}) CHECK(write_action(parse_action(text)) == text);
}

TEST_CASE("What is no action is refused") {
  for (const char* text : {"", "F0", "2F", "2X0", "2F0 ", "-1F0", "2F-1", "2f0", "20", "2F0x", "99999999999F0"})
    CHECK(error_of<ConfigError>([&] { parse_action(text); }) ==
          "error: expected an action: a stage, F (forward), B (backward), I or W (its two parts: gradients of inputs, "
          "of weights), and a micro-batch, such as 2F0; found '" +
              std::string(text) + "'");
}

TEST_CASE("Sound schedules have no fault") {
  CHECK(fault({"0F0 0B0"}, 1) == "none");
  CHECK(fault({"0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"}, 2) == "none");
  CHECK(fault({"0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"}, 2) == "none");
}

TEST_CASE("A planted fault of one stage is found and named") {
  CHECK(fault({}, 1) == "the schedule has no stages");
  CHECK(fault({"0F0 0B0"}, 0) == "the schedule needs at least 1 micro-batch, and there are 0");
  CHECK(fault({"0F0 0B0", "1F0"}, 1) == "stage 1 never runs 1B0");
  CHECK(fault({"0F0 0B0", ""}, 1) == "stage 1 never runs 1F0");
  CHECK(fault({"0F0 0F0 0B0"}, 1) == "stage 0 runs 0F0 twice");
  CHECK(fault({"0F0 0B0 0B0"}, 1) == "stage 0 runs 0B0 twice");
  CHECK(fault({"0F0 0B1 0F1 0B0"}, 2) == "stage 0 runs 0B1 before 0F1");
  CHECK(fault({"0F0 0F1 0B1 0B0"}, 2) ==
        "stage 0 runs 0B0 after 0B1; backwards must run in ascending order of micro-batches");
  CHECK(fault({"0F0 1B0"}, 1) == "stage 0 lists 1B0, an action of stage 1");
  CHECK(fault({"0F0 0F2 0B0 0B2"}, 2) == "stage 0 lists 0F2, and there are 2 micro-batches, numbered from 0");
}

TEST_CASE("Orders that cross between stages are found") {
  // Stage 0 waits for the gradient of 0 before it has sent 1, whose activations stage 1 needs
  // first.
  CHECK(fault({"0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"}, 2) ==
        "the schedule cannot run to its end: 0B0 waits for 1B0, 1F1 waits for 0F1");
  CHECK(fault({"0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1"}, 2) ==
        "the schedule cannot run to its end: 0B0 waits for 1B0, 1B0 waits for 2B0, 2F1 waits for 1F1");
  // It could run, but messages between neighbours match by order.
  CHECK(fault({"0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1"}, 2) ==
        "stage 0 sends 0F0 where stage 1 receives for 1F1; neighbours must run their forwards in one order");
}

TEST_CASE("Forwards need not ascend, as long as neighbours agree") {
  CHECK(fault({"0F0 0F2 0B0 0F1 0B1 0B2", "1F0 1F2 1B0 1F1 1B1 1B2"}, 3) == "none");
  CHECK(fault({"0F0 0F2 0F1 0B0 0B1 0B2", "1F0 1B0 1F2 1F1 1B1 1B2"}, 3) == "none");
}

TEST_CASE("What waits for an exchange buffer that the other never empties is found, with both actions") {
  // Stage 0 runs all forwards first; stage 1 turns back after each. The gradient of 2 waits for the
  // buffer of the gradient of 0, which stage 0 takes after its last forward. Two activations may be
  // on their way in addition to the three that stage 1 has taken: with six micro-batches the sixth
  // has no buffer.
  const auto fill_first = [](int micro_batches) {
    std::vector<std::string> stages(2);
    for (int m = 0; m < micro_batches; ++m) {
      stages[0] += "0F" + std::to_string(m) + " ";
      stages[1] += "1F" + std::to_string(m) + " 1B" + std::to_string(m) + " ";
    }
    for (int m = 0; m < micro_batches; ++m) stages[0] += "0B" + std::to_string(m) + " ";
    return stages;
  };
  CHECK(fault(fill_first(5), 5) == "none");
  CHECK(fault(fill_first(6), 6) ==
        "the schedule cannot run to its end: 0F5 waits for 1F3 to take what 0F3 sent, 1B2 waits for 0B0 to take what "
        "1B0 sent");
}

TEST_CASE("A rank may hold several stages") {
  const auto interleaved = [](const std::string& first, const std::string& second) {
    Schedule schedule = schedule_of({first, second});
    schedule.rank_of_stage = {0, 1, 0, 1};
    return schedule;
  };
  const std::string first = "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", second = "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1";
  CHECK(find_fault(interleaved(first, second), 2).value_or("none") == "none");
  CHECK(find_fault(interleaved(first + " 1F0", second), 2) == "rank 0 lists 1F0, an action of stage 1");
  CHECK(find_fault(interleaved("0F0 0F1 2F0 2F1 2B0 2B1 0B0", second), 2) == "stage 0 never runs 0B1");
  // Two channels of activations between the same two ranks, each in order.
  CHECK(find_fault(interleaved("0F0 0F1 2F1 2F0 2B0 2B1 0B0 0B1", second), 2) ==
        "stage 2 sends 2F1 where stage 3 receives for 3F0; neighbours must run their forwards in one order");
  Schedule outside = interleaved(first, second);
  outside.rank_of_stage[3] = 2;
  CHECK(find_fault(outside, 2) == "stage 3 is on rank 2 of the pipeline, which has 2");
  Schedule beside = interleaved(first, second);
  beside.rank_of_stage = {0, 0, 1, 1};
  CHECK(find_fault(beside, 2) ==
        "stage 1 is on rank 0 of the pipeline; stages go around the ring of ranks, so it must be on rank 1");
  Schedule uneven = interleaved(first, second);
  uneven.rank_of_stage = {0, 1, 0};
  CHECK(find_fault(uneven, 2) == "3 stages cannot be shared out among 2 ranks");
  Schedule alone = schedule_of({"0F0 1F0 1B0 0B0"});
  alone.rank_of_stage = {0, 0};
  CHECK(find_fault(alone, 1) == "one rank holds 2 stages; make them one");
}

TEST_CASE("Stages may go down the ranks and back") {
  const auto v = [](const std::string& first, const std::string& second) {
    Schedule schedule = schedule_of({first, second});
    schedule.rank_of_stage = {0, 1, 1, 0};
    return schedule;
  };
  const auto fault_of = [](const Schedule& schedule, int micro_batches) {
    return find_fault(schedule, micro_batches).value_or("none");
  };
  const std::string first = "0F0 0F1 3F0 3F1 3B0 3B1 0B0 0B1", second = "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1";
  CHECK(fault_of(v(first, second), 2) == "none");
  CHECK(is_v(v(first, second)));
  CHECK(hands_over(v(first, second), {1, Phase::forward, 0}));
  CHECK(hands_over(v(first, second), {2, Phase::backward, 0}));
  CHECK_FALSE(sends(v(first, second), {1, Phase::forward, 0}));
  CHECK_FALSE(hands_over(v(first, second), {3, Phase::forward, 0}));
  CHECK(fault_of(v(first, "1F0 1F1 2F1 2F0 2B0 1B0 2B1 1B1"), 2) ==
        "stage 2 sends 2F1 where stage 3 receives for 3F0; neighbours must run their forwards in one order");
  // The gradient that stage 2 leaves on its rank takes one of two buffers until 1B0 has run.
  const std::string three = "0F0 0F1 0F2 3F0 3F1 3F2 3B0 3B1 3B2 0B0 0B1 0B2";
  CHECK(fault_of(v(three, "1F0 2F0 1F1 2F1 1F2 2F2 2B0 2B1 1B0 2B2 1B1 1B2"), 3) == "none");
  CHECK(fault_of(v(three, "1F0 2F0 1F1 2F1 1F2 2F2 2B0 2B1 2B2 1B0 1B1 1B2"), 3) ==
        "the schedule cannot run to its end: 0B0 waits for 1B0, 2B2 waits for 1B0 to take what 2B0 sent");
}

TEST_CASE("Activations in flight are counted at their worst") {
  CHECK(most_in_flight(schedule_of({"0F0 0F1 0B0 0F2 0B1 0B2"}).ranks[0]) == 2);
  CHECK(most_in_flight(schedule_of({"0F0 0B0 0F1 0B1"}).ranks[0]) == 1);
  CHECK(most_in_flight(schedule_of({"0F0 0F1 0F2 0B0 0B1 0B2"}).ranks[0]) == 3);
  CHECK(most_in_flight({}) == 0);
}

TEST_CASE("A backward may be one action or two, on every stage by itself") {
  CHECK(fault({"0F0 0I0 0W0"}, 1) == "none");
  CHECK(fault({"0F0 0F1 0B0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"}, 2) == "none");
  CHECK(fault({"0F0 0I0"}, 1) == "stage 0 never runs 0W0");
  CHECK(fault({"0F0 0W0 0I0"}, 1) == "stage 0 runs 0W0 before 0I0");
  CHECK(fault({"0F0 0I0 0W0 0W0"}, 1) == "stage 0 runs 0W0 twice");
  CHECK(fault({"0F0 0I0 0B0"}, 1) == "stage 0 runs 0B0 and 0I0; a backward is one action (B) or two (I and W)");
  CHECK(fault({"0F0 0B0 0I0 0W0"}, 1) == "stage 0 runs 0B0 and 0I0; a backward is one action (B) or two (I and W)");
  CHECK(fault({"0F0 0F1 0I0 0I1 0W1 0W0"}, 2) ==
        "stage 0 runs 0W0 after 0W1; backwards must run in ascending order of micro-batches");
  CHECK(fault({"0F0 0F1 0I0 0B1 0W0"}, 2) ==
        "stage 0 runs 0W0 after 0B1; backwards must run in ascending order of micro-batches");
  CHECK(fault({"0F0 0F1 0I1 0I0 0W0 0W1"}, 2) ==
        "stage 0 runs 0I0 after 0I1; backwards must run in ascending order of micro-batches");
  // What a stage waits for is named as it is listed.
  CHECK(fault({"0F0 0B0", "1I0 1F0 1W0"}, 1) == "stage 1 runs 1I0 before 1F0");
  CHECK(fault({"0F0 0B0 0F1 0B1", "1F0 1F1 1I0 1W0 1I1 1W1"}, 2).find("0B0 waits for 1I0") != std::string::npos);
}

TEST_CASE("Weight gradients wait for nothing, and nothing on other ranks waits for them") {
  const Schedule schedule = schedule_of({"0F0 0I0 0W0", "1F0 1I0 1W0"});
  const std::vector<Seconds> forward(2, Seconds(1.0)), backward(2, Seconds(5.0)), transfer(1, Seconds(10.0)),
      weights(2, Seconds(2.0));
  // Stage 1: 1 + 3 from 11 on, then 2. Its gradient arrives at 15 + 10; stage 0 has 3 + 2 left.
  CHECK(played_ends(schedule, forward, backward, transfer, weights) ==
        std::vector{PlayedEnd{Seconds(30.0), {}}, PlayedEnd{Seconds(17.0), {}}});
  CHECK(played_time(schedule, forward, backward, transfer, weights) == Seconds(30.0));
  CHECK(!input_of({0, Phase::backward_weights, 0}, 2));
  CHECK(!output_of({1, Phase::backward_weights, 0}, 2));
}

TEST_CASE("A gradient takes longer on its way as long as the reductions of its stage are in flight") {
  const Schedule schedule = schedule_of({"0F0 0B0", "1F0 1B0"});
  const std::vector<Seconds> forward(2, Seconds(1.0)), backward(2, Seconds(2.0)), transfer(1, Seconds(4.0));
  const auto end = [&](double left) {
    std::vector<StageReductions> reductions(2);
    reductions[1].all = reductions[1].left = Seconds(left);
    reductions[1].sends_back = Seconds(4.0);
    return played_time(schedule, forward, backward, transfer, {}, 0, reductions).value;
  };
  // 1 + 4 + 3, the way back, and 2.
  CHECK(end(0.0) == 14.0);
  CHECK(end(100.0) == 18.0);  // at half the rate
  CHECK(end(8.0) == 18.0);
  CHECK(end(2.0) == 15.0);  // 1 of 4 in 2, then 3
}
