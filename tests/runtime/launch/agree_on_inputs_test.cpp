#include "runtime/launch/agree_on_inputs.h"

#include <doctest/doctest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "runtime/launch/free_port.h"
#include "runtime/launch/tcp_rendezvous.h"

using namespace parplan;
using namespace std::chrono_literals;

namespace {

// How each of four processes (threads here) ends: "went on", "silent", or its message.
std::vector<std::string> ends_of(const std::function<void(Rendezvous&, int)>& call) {
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
        call(*rendezvous, process);
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

// `refuse` gives a process's message, or "".
std::vector<std::string> ends(const std::function<std::string(int)>& refuse) {
  return ends_of([&](Rendezvous& rendezvous, int process) {
    agree(rendezvous, [&] {
      if (const std::string text = refuse(process); !text.empty())
        throw ConfigError({.file = "plan.yaml", .line = 3}, text);
    });
  });
}

// `facts` gives those of a process.
std::vector<std::string> ends_with(const std::function<std::vector<Fact>(int)>& facts) {
  return ends_of([&](Rendezvous& rendezvous, int process) { agree_on(rendezvous, facts(process)); });
}

// What process 0 says where only it speaks.
std::string said(const std::vector<std::string>& all) {
  for (std::size_t process = 1; process < all.size(); ++process) CHECK(all[process] == "silent");
  return all.front();
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

TEST_CASE("processes with the same facts go on") {
  CHECK(ends_with([](int) { return std::vector<Fact>{{"seed", "7"}, {"beta2", "0.9"}}; }) ==
        std::vector<std::string>(4, "went on"));
  CHECK(ends_with([](int) { return std::vector<Fact>{}; }) == std::vector<std::string>(4, "went on"));
}

TEST_CASE("facts that differ are named with their values and whose they are, and nobody goes on") {
  const std::string begin = "error: the processes of this job differ: ";
  const std::string end = "; start all of them with the same plan, data, options and build of parplan";
  CHECK(said(ends_with([](int process) {
          return std::vector<Fact>{{"seed", "7"}, {"learning rate", process == 1 ? "0.001" : "0.0003"}};
        })) == begin + "rank 1 has learning rate 0.001, ranks 0, 2, 3 have 0.0003" + end);
  CHECK(said(ends_with([](int process) {
          return std::vector<Fact>{{"--steps", process == 0 ? "3" : "4"}, {"seed", std::to_string(process / 2)}};
        })) == begin + "ranks 1, 2, 3 have --steps 4, rank 0 has 3; ranks 2, 3 have seed 1, ranks 0, 1 have 0" + end);
  CHECK(said(ends_with([](int process) {
          return std::vector<Fact>{{"beta2", std::to_string(process)}};
        })) == begin + "rank 1 has beta2 1, rank 2 has 2, rank 3 has 3, rank 0 has 0" + end);
}

TEST_CASE("a fact that a process does not have differs, and so does one that only it has") {
  CHECK(said(ends_with([](int process) {
          const bool is_last = process == 3;
          return std::vector<Fact>{{is_last ? "old" : "new", is_last ? "1" : "2"}};
        })) == "error: the processes of this job differ: rank 3 has new no value, ranks 0, 1, 2 have 2; rank 3 has old "
               "1, ranks 0, 1, 2 have no value; start all of them with the same plan, data, options and build of "
               "parplan");
}

TEST_CASE("of many facts that differ the first are named, and what is said holds no control characters") {
  CHECK(said(ends_with([](int process) {
          std::vector<Fact> facts;
          for (int i = 0; i < 8; ++i) facts.push_back({fmt::format("f{}", i), process == 2 ? "a\x1b[2J\n" : "b"});
          return facts;
        })) == "error: the processes of this job differ: rank 2 has f0 a?[2J?, ranks 0, 1, 3 have b; rank 2 has f1 "
               "a?[2J?, ranks 0, 1, 3 have b; rank 2 has f2 a?[2J?, ranks 0, 1, 3 have b; rank 2 has f3 a?[2J?, ranks "
               "0, 1, 3 have b; rank 2 has f4 a?[2J?, ranks 0, 1, 3 have b; rank 2 has f5 a?[2J?, ranks 0, 1, 3 have "
               "b; and 2 more differ; start all of them with the same plan, data, options and build of parplan");
}

TEST_CASE("one process alone has nobody to differ from") {
  const auto rendezvous = alone();
  CHECK_NOTHROW(agree_on(*rendezvous, std::vector<Fact>{{"seed", "7"}}));
}
