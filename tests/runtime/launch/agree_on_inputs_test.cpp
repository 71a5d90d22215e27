#include "runtime/launch/agree_on_inputs.h"

#include <doctest/doctest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "runtime/launch/free_port.h"
#include "runtime/launch/tcp_rendezvous.h"

using namespace parplan;
using namespace std::chrono_literals;

namespace {

// How each of four processes (threads here) ends: "went on", "silent", or its message. `refuse`
// gives a process's message, or "".
std::vector<std::string> ends(const std::function<std::string(int)>& refuse) {
  const LoopbackPort port;
  std::vector<std::string> all(4);
  std::vector<std::jthread> threads;
  for (int process = 0; process < 4; ++process)
    threads.emplace_back([&, process] {
      std::string& end = all[process];
      try {
        const auto rendezvous = tcp_rendezvous({.process = process,
                                                .processes = 4,
                                                .local_process = process,
                                                .local_processes = 4,
                                                .address = "127.0.0.1",
                                                .port = port.number()},
                                               20s);
        agree(*rendezvous, [&] {
          if (const std::string text = refuse(process); !text.empty())
            throw ConfigError({.file = "plan.yaml", .line = 3}, text);
        });
        end = "went on";
      } catch (const SaidElsewhere&) {
        end = "silent";
      } catch (const std::exception& error) {
        end = error.what();
      }
    });
  threads.clear();
  return all;
}

}  // namespace

TEST_CASE("processes that all accept go on") {
  CHECK(ends([](int) { return ""; }) == std::vector<std::string>(4, "went on"));
}

TEST_CASE("what all refuse is said once, as one process would say it") {
  CHECK(ends([](int) { return "no dp"; }) ==
        std::vector<std::string>{"plan.yaml:3: error: no dp", "silent", "silent", "silent"});
}

TEST_CASE("what some refuse is said by process 0 with whose it is, and nobody goes on") {
  CHECK(ends([](int process) { return process == 2 ? "no dp" : ""; }) ==
        std::vector<std::string>{"error: process 2 of 4: plan.yaml:3: error: no dp", "silent", "silent", "silent"});
  CHECK(ends([](int process) {
          return process == 0 ? "no tp" : process == 1 ? "" : "no dp";
        }) == std::vector<std::string>{
                  "error: process 0 of 4: plan.yaml:3: error: no tp\nprocesses 2, 3 of 4: plan.yaml:3: error: no dp",
                  "silent", "silent", "silent"});
}

TEST_CASE("one process alone says what it refuses") {
  const auto rendezvous = alone();
  CHECK_THROWS_WITH_AS(agree(*rendezvous, [] { throw ConfigError("no dp"); }), "error: no dp", ConfigError);
  CHECK_NOTHROW(agree(*rendezvous, [] {}));
  CHECK_THROWS_WITH_AS(agree(*rendezvous, [] { throw RunError("disk gone"); }), "disk gone", RunError);
}
