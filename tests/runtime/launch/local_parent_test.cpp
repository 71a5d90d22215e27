#include "runtime/launch/local_parent.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "planner/base/error.h"
#include "tests/temporary_folder.h"

using namespace parplan;

namespace {

struct Outcome {
  int code = 0;
  double seconds = 0.0;
  std::vector<std::string> lines;  // "[rank] line", sorted by rank
};

Outcome outcome_of(const std::vector<std::string>& arguments, int processes) {
  Outcome outcome;
  const auto begin = std::chrono::steady_clock::now();
  outcome.code = run_children(
      arguments,
      {.processes = processes, .program = PARPLAN_TEST_CHILD, .on_line = [&](int process, std::string_view line) {
         outcome.lines.push_back(fmt::format("[{}] {}", process, line));
       }});
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

TEST_CASE("a child that a signal ended counts as 128 and the signal's number") {
  CHECK(outcome_of({"crash"}, 3).code == 128 + 9);
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
