#include "planner/plan/schedule.h"

#include <sstream>

#include <doctest/doctest.h>

#include "planner/base/error.h"
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
  for (const char* text : {"2F0", "0B117", "15F511"}) CHECK(write_action(parse_action(text)) == text);
}

TEST_CASE("What is no action is refused") {
  for (const char* text : {"", "F0", "2F", "2W0", "2F0 ", "-1F0", "2F-1", "2f0", "20", "2F0x", "99999999999F0"})
    CHECK(error_of<ConfigError>([&] { parse_action(text); }) ==
          "error: expected an action: a stage, F (forward) or B (backward), and a micro-batch, such as 2F0; found '" +
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

TEST_CASE("Activations in flight are counted at their worst") {
  CHECK(most_in_flight(schedule_of({"0F0 0F1 0B0 0F2 0B1 0B2"}).ranks[0]) == 2);
  CHECK(most_in_flight(schedule_of({"0F0 0B0 0F1 0B1"}).ranks[0]) == 1);
  CHECK(most_in_flight(schedule_of({"0F0 0F1 0F2 0B0 0B1 0B2"}).ranks[0]) == 3);
  CHECK(most_in_flight({}) == 0);
}
