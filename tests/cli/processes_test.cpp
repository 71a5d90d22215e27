// The output of several processes of one job, with the program itself.
#include <algorithm>

#include <fmt/format.h>

#include "runtime/launch/free_port.h"
#include "tests/cli/call.h"
#include "tests/cli/shell.h"

namespace parplan {
namespace {

using namespace testing;

// The exit code, and both outputs in one.
Called outputs_of(const std::string& command) { return shell("( " + command + " ) 2>&1"); }

struct Job {
  Folder folder;
  std::string plan = folder.path("plan.yaml");
  Job() {
    REQUIRE(call({"simulate", tiny_gpt2, "--cluster", cpu_8, "--dp", "2", "--tp", "1", "--pp", "1", "--devices", "2",
                  "--seq-len", "8", "--quiet", "-o", plan, "--json", folder.path("json")})
                .code == 0);
  }
  // Two processes as torchrun starts them, with the arguments of each.
  Called run(const std::string& first, const std::string& second) const {
    const LoopbackPort port;
    const std::string variables =
        fmt::format("WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={}", port.number());
    return outputs_of(
        fmt::format("{0} RANK=1 LOCAL_RANK=1 {1} run {3} & {0} RANK=0 LOCAL_RANK=0 {1} run {2}; code=$?; wait $! && "
                    "exit 99; exit $code",
                    variables, PARPLAN_BINARY, first, second));
  }
};

TEST_CASE("a standard output that is full or closed fails, and no file that is written gets what it was to have") {
  const Folder folder;
  CHECK(outputs_of(fmt::format("{} --help > /dev/full", PARPLAN_BINARY)).out ==
        "error: cannot write to standard output: No space left on device\n");
  const Called closed =
      outputs_of(fmt::format("{} topology {} --quiet --json {} >&-", PARPLAN_BINARY, cpu_8, folder.path("a.json")));
  CHECK(closed.code == 1);
  CHECK(closed.out == "error: cannot write to standard output: Bad file descriptor\n");
  CHECK(folder.read("a.json").starts_with("{\n  \"schema\": "));
  CHECK(folder.read("a.json").ends_with("}\n"));
}

TEST_CASE("what all processes refuse is said once") {
  const Job job;
  const Called missing = job.run("/nowhere/plan.yaml", "/nowhere/plan.yaml");
  CHECK(missing.code == 2);
  CHECK(missing.out == "error: cannot read '/nowhere/plan.yaml': No such file or directory\n");
  const Called backend = job.run(job.plan + " --backend cuda", job.plan + " --backend cuda");
  CHECK(backend.code == 2);
  CHECK(backend.out.starts_with("error: --backend cuda: the plan is for "));
  CHECK(std::ranges::count(backend.out, '\n') == 1);
}

TEST_CASE("what one process refuses is said by the first with whose it is, and the other does not wait for it") {
  const Job job;
  const Called called = job.run(job.plan + " --quiet", "/nowhere/plan.yaml");
  CHECK(called.code == 2);
  CHECK(called.out == "error: process 1 of 2: cannot read '/nowhere/plan.yaml': No such file or directory\n");
}

TEST_CASE("processes that parplan starts itself refuse once, too") {
  const Job job;
  const std::string text = job.folder.write("digits.txt", "31415926535897932384626433832795028841971693993751");
  const Called called =
      outputs_of(fmt::format("{} run {} --processes 2 --quiet --data {}", PARPLAN_BINARY, job.plan, text));
  CHECK(called.code == 2);
  CHECK(called.out ==
        "error: CPU ranks of several processes exchange through MPI: start them with mpirun or srun, or run the plan "
        "in one process\n");
}

}  // namespace
}  // namespace parplan
