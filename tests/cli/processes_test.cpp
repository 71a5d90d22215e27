// The output of several processes of one job, with the program itself.
#include <algorithm>

#include <fmt/format.h>

#include "planner/base/json.h"
#include "planner/base/units.h"
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

// How two processes end whose arguments differ: what both say, and then their exit codes.
struct Pair {
  std::string out;
  std::string codes;
};

Pair run_pair(const std::string& first, const std::string& second) {
  const LoopbackPort port;
  const std::string variables =
      fmt::format("WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={}", port.number());
  const Called called = outputs_of(
      fmt::format("{0} RANK=1 LOCAL_RANK=1 {1} run {3} & {0} RANK=0 LOCAL_RANK=0 {1} run {2}; code=$?; wait $!; "
                  "echo codes $code $?",
                  variables, PARPLAN_BINARY, first, second));
  const std::size_t codes = called.out.rfind("codes ");
  REQUIRE(codes != std::string::npos);
  return {.out = called.out.substr(0, codes), .codes = called.out.substr(codes)};
}

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

TEST_CASE("a command that runs out of memory says how much it asked for, and is no bug") {
  // The smallest limits are too small for the loader, the largest suffice. Which limit leaves no
  // memory even for the whole message depends on the machine's libraries.
  int named = 0;
  for (int mebibytes = 14; mebibytes <= 64; mebibytes += 2) {
    const Called called =
        outputs_of(fmt::format("ulimit -v {}; exec {} suggest gpt2 --cluster dgx-a100 --threads 1 --quiet --json {}",
                               mebibytes * 1024, PARPLAN_BINARY, "/dev/null"));
    INFO(mebibytes << " MiB: " << called.out);
    CHECK((called.code == 0 || called.code == 1 || called.code == 127));
    if (called.code != 1) continue;
    CHECK(called.out.starts_with("error: out of memory"));
    named += called.out.find(" were asked for; this process held ") != std::string::npos;
  }
  CHECK(named > 0);
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

TEST_CASE("processes whose plans or options differ end before the first step and say in what") {
  const Job job;
  const std::string plan = job.folder.read("plan.yaml");
  const auto value_of = [&](const std::string& key) {
    const std::size_t begin = plan.find("\n  " + key + ": ", plan.find("\ntraining:\n")) + key.size() + 5;
    return plan.substr(begin, plan.find('\n', begin) - begin);
  };
  const auto with = [&](const std::string& key, const std::string& value) {
    const std::string line = "\n  " + key + ": ";
    const std::size_t begin = plan.find(line, plan.find("\ntraining:\n"));
    REQUIRE(begin != std::string::npos);
    std::string edited = plan;
    edited.replace(begin, edited.find('\n', begin + 1) - begin, line + value);
    return job.folder.write("edited.yaml", edited);
  };
  const auto differ = [&](const std::string& second, const std::string& what) {
    const Pair ended = run_pair(job.plan + " --quiet", second + " --quiet");
    CHECK(ended.codes == "codes 2 2\n");
    CHECK(ended.out == "error: the processes of this job differ: " + what +
                           "; start all of them with the same plan, data, options and build of parplan\n");
  };
  struct Edit {
    std::string key, value, fact;
    std::string own = {};  // as in the plan where empty
  };
  for (const Edit& edit : {Edit{"learning_rate", "0.125", "learning rate"},
                           {"learning_rate_schedule", "linear", "learning rate schedule"},
                           {"warmup_steps", "3", "warm-up steps"},
                           {"decay_steps", "30", "decay steps"},
                           {"final_learning_rate", "0.25", "final learning rate"},
                           {"beta1", "0.5", "beta1"},
                           {"beta2", "0.5", "beta2"},
                           {"epsilon", "0.5", "epsilon", "1e-08"},
                           {"weight_decay", "0.5", "weight decay"},
                           {"momentum", "0.5", "momentum"},
                           {"seed", "99", "seed"}})
    differ(with(edit.key, edit.value),
           fmt::format("rank 1 has {} {}, rank 0 has {}", edit.fact, edit.value,
                       edit.own.empty() ? value_of(edit.key) : edit.own));
  differ(job.plan + " --steps 7", "rank 1 has --steps 7, rank 0 has 20");
  differ(job.plan + " --deterministic", "rank 1 has --deterministic true, rank 0 has false");

  // Another batch and another layout change what follows from them, too.
  const auto another = [&](const std::string& options) {
    const std::string path = job.folder.path("another.yaml");
    REQUIRE(shell(fmt::format("{} simulate {} --cluster {} --devices 2 --seq-len 8 --quiet -o {} --json {} {}",
                              PARPLAN_BINARY, tiny_gpt2, cpu_8, path, job.folder.path("json"), options))
                .code == 0);
    return run_pair(job.plan + " --quiet", path + " --quiet");
  };
  const Pair batch = another("--dp 2 --global-batch 16");
  CHECK(batch.codes == "codes 2 2\n");
  CHECK(batch.out.find("rank 1 has global batch 16, rank 0 has 8") != std::string::npos);
  CHECK(std::ranges::count(batch.out, '\n') == 1);
  const Pair layout = another("--pp 2 --dp 1");
  CHECK(layout.codes == "codes 2 2\n");
  CHECK(layout.out.find("rank 1 has layout.dp 1, rank 0 has 2; rank 1 has layout.pp 2, rank 0 has 1") !=
        std::string::npos);
  CHECK(std::ranges::count(layout.out, '\n') == 1);
}

TEST_CASE("processes whose weights differ in a single value end before the first step, and equal copies do not") {
  const Job job;
  const std::string text = job.folder.write("digits.txt", "31415926535897932384626433832795028841971693993751");
  const std::string run = job.plan + " --quiet --steps 1 --data " + text;
  const std::string first = job.folder.path("first"), second = job.folder.path("second");
  REQUIRE(shell(fmt::format("{} run {} --export-weights {} && cp -r {} {}", PARPLAN_BINARY, run, first, first, second))
              .code == 0);
  CHECK(run_pair(run + " --weights " + first, run + " --weights " + second).codes == "codes 0 0\n");
  std::string weights = job.folder.read("second/model.safetensors");
  weights.back() = static_cast<char>(weights.back() ^ 1);
  job.folder.write("second/model.safetensors", weights);
  const Pair ended = run_pair(run + " --weights " + first, run + " --weights " + second);
  CHECK(ended.codes == "codes 2 2\n");
  CHECK(ended.out.starts_with("error: the processes of this job differ: rank 1 has --weights of the fingerprint "));
}

TEST_CASE("processes with equal plans in different files are not told apart") {
  const Job job;
  const std::string copy = job.folder.write("copy.yaml", job.folder.read("plan.yaml"));
  const std::string text = job.folder.write("digits.txt", "31415926535897932384626433832795028841971693993751");
  const std::string options = " --quiet --data " + text;
  const Pair ended = run_pair(job.plan + options, copy + options);
  CHECK(ended.codes == "codes 0 0\n");
}

// The losses that a command prints.
std::vector<std::string> losses_of(const std::string& command) {
  const Called called = outputs_of(command);
  CHECK_MESSAGE(called.code == 0, called.out);
  std::vector<std::string> losses;
  for (std::size_t at = 0; (at = called.out.find("  loss ", at)) != std::string::npos; ++at)
    losses.push_back(called.out.substr(at, called.out.find(' ', at + 7) - at));
  return losses;
}

TEST_CASE("processes that parplan starts itself train as threads do") {
  const Folder folder;
  const std::string text = folder.write("digits.txt", "31415926535897932384626433832795028841971693993751");
  for (const std::string layout : {"--dp 2 --tp 1 --pp 1", "--dp 1 --tp 1 --pp 2", "--dp 1 --tp 2 --pp 1"}) {
    const std::string plan = folder.path("plan.yaml");
    REQUIRE(outputs_of(fmt::format("{} simulate {} --cluster {} --devices 2 --seq-len 8 {} --quiet -o {} --json {}",
                                   PARPLAN_BINARY, tiny_gpt2, cpu_8, layout, plan, folder.path("json")))
                .code == 0);
    const std::string run = fmt::format("{} run {} --steps 4 --data {}", PARPLAN_BINARY, plan, text);
    const std::vector<std::string> threads = losses_of(run);
    CHECK(threads.size() == 4);
    CHECK(losses_of(run + " --processes 2") == threads);
  }
}

TEST_CASE("what a process grows by is compared with the arenas of its own ranks") {
  const Folder folder;
  const std::string text = folder.write("digits.txt", "31415926535897932384626433832795028841971693993751");
  const std::string plan = folder.path("plan.yaml"), json = folder.path("run.json");
  REQUIRE(outputs_of(fmt::format("{} simulate {} --cluster {} --devices 2 --seq-len 8 --dp 1 --tp 1 --pp 2 --quiet "
                                 "-o {}",
                                 PARPLAN_BINARY, tiny_gpt2, cpu_8, plan))
              .code == 0);
  const std::string run = fmt::format("{} run {} --steps 1 --data {} --json {}", PARPLAN_BINARY, plan, text, json);
  const auto promised_in = [&](const std::string& command, const std::string& row) {
    const Called called = outputs_of(command);
    REQUIRE_MESSAGE(called.code == 0, called.out);
    const std::size_t at = called.out.find(row);
    REQUIRE_MESSAGE(at != std::string::npos, called.out);
    return called.out.substr(at + row.size(), called.out.find('\n', at) - at - row.size());
  };
  const auto begins = [](const std::string& rest, std::int64_t bytes) {
    return rest.substr(rest.find_first_not_of(' ')).rfind(format_bytes(Bytes(bytes)) + " ", 0) == 0;
  };
  for (const bool together : {true, false}) {
    const std::string rest = together ? promised_in(run, "process memory growth")
                                      : promised_in(run + " --processes 2", "memory growth of the first process");
    const Json arenas = Json::parse(folder.read("run.json")).at("promised_arena_bytes");
    REQUIRE(arenas.size() == 2);
    const std::int64_t first = arenas[0], second = arenas[1];
    INFO(rest);
    CHECK(begins(rest, together ? first + second : first));
  }
}

TEST_CASE("the parent says which process died, of what and when, and nothing is left behind") {
  const Job job;
  const std::string text = job.folder.write("digits.txt", "31415926535897932384626433832795028841971693993751");
  for (const int rank : {0, 1}) {
    // The process is found by its place in its environment.
    const Called called = outputs_of(fmt::format(
        "rm -f {3}; {0} run {1} --processes 2 --steps 1000000000 --quiet --log {3} --data {2} --failure-records {5} & "
        "parent=$!; while kill -0 $parent 2> /dev/null && [ ! -s {3} ]; do sleep 0.01; done; "
        "for child in $(cat /proc/$parent/task/$parent/children); do "
        "tr '\\0' '\\n' < /proc/$child/environ | grep -qx RANK={4} && kill -9 $child; done; wait $parent",
        PARPLAN_BINARY, job.plan, text, job.folder.path("log"), rank, job.folder.root().string()));
    INFO(called.out);
    CHECK(called.code == 128 + 9);
    CHECK(called.out.find(fmt::format("error: process {} of 2 was ended by SIGKILL ", rank)) != std::string::npos);
    CHECK(called.out.find(" s after its start, after step ") != std::string::npos);
    CHECK(called.out.find(fmt::format("error: process {} was lost: ", rank)) != std::string::npos);
    CHECK(called.out.find("the last instructions of a rank are in '") != std::string::npos);
  }
}

}  // namespace
}  // namespace parplan
