#include "runtime/launch/local_parent.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <fstream>
#include <thread>

#include "planner/base/error.h"
#include "runtime/launch/find_rendezvous.h"
#include "tests/temporary_folder.h"

using namespace parplan;

namespace {

struct Outcome {
  int code = 0;
  double seconds = 0.0;
  std::vector<std::string> lines;  // "[rank] line", sorted by rank
  std::vector<ChildEvent> events;
};

Outcome outcome_of(const std::vector<std::string>& arguments, int processes) {
  Outcome outcome;
  const auto begin = std::chrono::steady_clock::now();
  outcome.code = run_children(
      arguments,
      {.processes = processes, .program = PARPLAN_TEST_CHILD, .on_line = [&](int process, std::string_view line) {
         outcome.lines.push_back(fmt::format("[{}] {}", process, line));
       },
       .on_event = [&](const ChildEvent& event) { outcome.events.push_back(event); }});
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::stable_sort(outcome.lines.begin(), outcome.lines.end(),
                   [](const std::string& a, const std::string& b) { return a[1] < b[1]; });
  return outcome;
}

}  // namespace

TEST_CASE("children find each other by the variables that their parent sets") {
  const testing::TemporaryFolder folder;
  // The variables that another starter left in the environment do not apply to them.
  setenv("OMPI_COMM_WORLD_RANK", "5", 1);
  setenv("OMPI_COMM_WORLD_SIZE", "6", 1);
  const Outcome outcome = outcome_of({"meet", folder.path("met.txt")}, 4);
  unsetenv("OMPI_COMM_WORLD_RANK");
  unsetenv("OMPI_COMM_WORLD_SIZE");
  CHECK(outcome.code == 0);
  CHECK(outcome.lines == std::vector<std::string>{});
  CHECK(folder.read("met.txt") == "10 bytes, 4 here");
}

TEST_CASE("the children of each call have a token of their own, whatever the parent's is") {
  const testing::TemporaryFolder folder;
  setenv(token_variable, "the parent's", 1);
  std::vector<std::string> tokens;
  for (int call = 0; call < 2; ++call) {
    CHECK(outcome_of({"token", folder.root().string()}, 2).code == 0);
    CHECK(folder.read("0") == folder.read("1"));
    tokens.push_back(folder.read("0"));
    // 128 bits, by which nobody finds them.
    CHECK(tokens.back().size() == 32);
    CHECK(tokens.back().find_first_not_of("0123456789abcdef") == std::string::npos);
  }
  unsetenv(token_variable);
  CHECK(tokens[0] != tokens[1]);
}

TEST_CASE("both outputs of processes other than 0 come line by line, whose it is along with it") {
  const Outcome outcome = outcome_of({"write"}, 3);
  CHECK(outcome.code == 0);
  CHECK(outcome.lines == std::vector<std::string>{"[1] out of 1", "[1] error of 1", "[1] without an end",
                                                  "[2] out of 2", "[2] error of 2", "[2] without an end"});
}

TEST_CASE("the first exit code other than 0 is returned and the others are ended") {
  const Outcome outcome = outcome_of({"fail"}, 3);
  CHECK(outcome.code == 7);
  CHECK(outcome.lines == std::vector<std::string>{"[2] told to end"});  // by SIGTERM
}

TEST_CASE("a child that a signal ended counts as 128 and the signal's number, and the parent knows which it was") {
  const Outcome outcome = outcome_of({"crash"}, 3);
  CHECK(outcome.code == 128 + 9);
  REQUIRE(outcome.events.size() == 1);
  CHECK(outcome.events[0].process == 1);
  CHECK(outcome.events[0].kind == ChildEvent::Kind::killed);
  CHECK(outcome.events[0].number == SIGKILL);
  CHECK(outcome.events[0].last_step == std::nullopt);
}

TEST_CASE("a signal that ended a child goes before the exit codes of those that lost it, also where they end first") {
  const testing::TemporaryFolder folder;
  std::vector<ChildEvent> events;
  // Both have ended before the parent waits for the first of them.
  const auto wait_for_both = [&](int, std::string_view line) {
    if (line.find(' ') == std::string_view::npos) return;
    const std::string ids(line);
    folder.write("go", "");
    for (const std::string& pid : {ids.substr(0, ids.find(' ')), ids.substr(ids.find(' ') + 1)})
      for (std::string state; state != "Z"; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
        std::ifstream stat(fmt::format("/proc/{}/stat", pid));
        std::string number, name;
        stat >> number >> name >> state;
      }
  };
  const int code = run_children({"lost", folder.path("go")},
                                {.processes = 3,
                                 .program = PARPLAN_TEST_CHILD,
                                 .on_line = wait_for_both,
                                 .on_event = [&](const ChildEvent& event) { events.push_back(event); }});
  CHECK(code == 128 + 9);
  REQUIRE(events.size() == 2);
  CHECK(events[0].process == 1);
  CHECK(events[0].kind == ChildEvent::Kind::killed);
  CHECK(events[1].process == 0);
  CHECK(events[1].number == 6);
}

TEST_CASE("the parent knows after which step a child ended, and with which exit code") {
  const Outcome outcome = outcome_of({"steps"}, 3);
  CHECK(outcome.code == 5);
  REQUIRE(outcome.events.size() == 1);
  CHECK(outcome.events[0].process == 1);
  CHECK(outcome.events[0].kind == ChildEvent::Kind::exited);
  CHECK(outcome.events[0].number == 5);
  CHECK(outcome.events[0].last_step == 41);
}

TEST_CASE("a child that is stopped is reported, and killed where another has failed") {
  Outcome outcome = outcome_of({"stopped"}, 3);
  CHECK(outcome.code == 4);
  REQUIRE(outcome.events.size() == 2);
  std::ranges::sort(outcome.events, {}, &ChildEvent::process);  // both may be seen at once
  CHECK(outcome.events[0].process == 1);
  CHECK(outcome.events[0].number == 4);
  CHECK(outcome.events[1].process == 2);
  CHECK(outcome.events[1].kind == ChildEvent::Kind::stopped);
  CHECK(outcome.events[1].number == SIGSTOP);
}

TEST_CASE("children die with their parent, also one that is stopped") {
  const testing::TemporaryFolder folder;
  const pid_t parent = fork();
  REQUIRE(parent >= 0);
  if (parent == 0) {
    // The stopped child's id is in the file when it has been stopped.
    run_children({"orphan"}, {.processes = 3,
                              .program = PARPLAN_TEST_CHILD,
                              .on_line = [&](int, std::string_view line) {
                                folder.write("pids", std::string(line));
                              },
                              .on_event = [](const ChildEvent&) { kill(getpid(), SIGKILL); }});
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(parent, &status, 0) == parent);
  CHECK(WIFSIGNALED(status));
  const pid_t child = static_cast<pid_t>(std::stol(folder.read("pids")));
  // Whoever inherits it may not have waited for it yet: a zombie is dead, too.
  const auto lives = [&] {
    std::ifstream stat(fmt::format("/proc/{}/stat", child));
    std::string pid, name, state;
    return static_cast<bool>(stat >> pid >> name >> state) && state != "Z";
  };
  while (lives()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

TEST_CASE("a child that does not heed SIGTERM is killed") {
  const Outcome outcome = outcome_of({"stubborn"}, 3);
  CHECK(outcome.code == 3);
  CHECK(outcome.lines == std::vector<std::string>{"[2] told to end"});  // it was, and would have stayed forever
  CHECK(outcome.seconds > 6.0);                                         // told after 1 s, killed 5 s later
}

TEST_CASE("a signal to the parent reaches the children and spares the parent") {
  const Outcome outcome = outcome_of({"signalled"}, 3);
  CHECK(outcome.code == 128 + 15);  // and not the 99 of children that nobody ended
}

TEST_CASE("a program that cannot be started is named") {
  try {
    run_children({}, {.processes = 2, .program = "/no/such/program", .on_line = {}});
    FAIL("nothing was thrown");
  } catch (const RunError& error) {
    CHECK(std::string(error.what()) == "/no/such/program cannot be started: No such file or directory");
  }
}
