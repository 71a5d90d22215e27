// Checkpoints as a user sees them: runs that go on, signals, folders that do not fit, and failures.
#include <algorithm>
#include <filesystem>
#include <fstream>

#include <fmt/format.h>

#include "planner/base/json.h"
#include "tests/cli/call.h"
#include "tests/cli/shell.h"

namespace parplan {
namespace {

using namespace testing;

// Plans of one training under several layouts.
struct Trainings {
  Folder folder;
  std::string checkpoints = folder.path("checkpoints");
  std::string json = folder.path("run.json");

  std::string plan(const std::string& name, const std::vector<std::string>& layout,
                   const std::string& cluster = cpu_8) const {
    std::ifstream file(tiny_gpt2);
    std::string model(std::istreambuf_iterator<char>(file), {});
    const std::size_t begin = model.find("vocabulary: ");
    model.replace(begin, model.find('\n', begin) - begin, "vocabulary: 256");
    std::vector<std::string> words = {"simulate",         folder.write("model.yaml", model),
                                      "--cluster",        cluster,
                                      "--seq-len",        "8",
                                      "--global-batch",   "8",
                                      "--quiet",          "-o",
                                      folder.path(name),  "--json",
                                      folder.path("json")};
    words.insert(words.end(), layout.begin(), layout.end());
    REQUIRE(call(words).code == 0);
    return folder.path(name);
  }
  // The losses of a run with these options.
  std::vector<double> losses(std::vector<std::string> words) const {
    words.insert(words.begin(), "run");
    words.insert(words.end(), {"--quiet", "--json", json});
    const Called called = call(words);
    INFO(called.err);
    REQUIRE(called.code == 0);
    return report().at("loss").get<std::vector<double>>();
  }
  Json report() const { return Json::parse(folder.read("run.json")); }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& entry : std::filesystem::directory_iterator(checkpoints)) {
      const std::string name = entry.path().filename().string();
      if (name != ".in-use") all.push_back(name);
    }
    std::ranges::sort(all);
    return all;
  }
};

const std::vector<std::string> two_data_ranks = {"--dp", "2", "--devices", "2"};

TEST_CASE("a run goes on from its checkpoints to the bit, and another layout from them as well") {
  const Trainings trainings;
  const std::string plan = trainings.plan("plan.yaml", two_data_ranks);
  const std::vector<double> whole = trainings.losses({plan, "--steps", "7"});
  CHECK(trainings.report().at("checkpoint").is_null());
  CHECK(trainings.report().at("first_step") == 0);
  const std::vector<double> first =
      trainings.losses({plan, "--steps", "5", "--checkpoint", trainings.checkpoints, "--every", "2"});
  CHECK(first == std::vector<double>(whole.begin(), whole.begin() + 5));
  CHECK(trainings.names() == std::vector<std::string>{"step-00000002", "step-00000004", "step-00000005"});
  CHECK(trainings.report().at("checkpoint") == trainings.checkpoints + "/step-00000005");
  const std::vector<double> rest =
      trainings.losses({plan, "--steps", "7", "--checkpoint", trainings.checkpoints, "--resume", "--keep", "2"});
  CHECK(rest == std::vector<double>(whole.begin() + 5, whole.end()));
  CHECK(trainings.report().at("first_step") == 5);
  CHECK(trainings.report().at("steps") == 2);
  CHECK(trainings.names() == std::vector<std::string>{"step-00000005", "step-00000007"});
  // From step 5 with another layout.
  std::filesystem::remove_all(trainings.checkpoints + "/step-00000007");
  const std::string other = trainings.plan("other.yaml", {"--pp", "2", "--dp", "2", "--zero", "1", "--devices", "4"});
  const std::vector<double> there =
      trainings.losses({other, "--steps", "7", "--checkpoint", trainings.checkpoints, "--resume"});
  REQUIRE(there.size() == 2);
  for (std::size_t i = 0; i < there.size(); ++i) CHECK(there[i] == doctest::Approx(rest[i]).epsilon(1e-6));
}

TEST_CASE("what a run does with its folder of checkpoints is said") {
  const Trainings trainings;
  const std::string plan = trainings.plan("plan.yaml", two_data_ranks);
  const std::vector<std::string> words = {"run", plan, "--steps", "2", "--checkpoint", trainings.checkpoints};
  const auto with = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all = words;
    all.insert(all.end(), more.begin(), more.end());
    return call(all);
  };
  const Called fresh = with({"--resume"});
  CHECK(fresh.code == 0);
  CHECK(fresh.err.find(fmt::format("note: '{}' holds no whole checkpoint: the run begins with step 0\n",
                                   trainings.checkpoints)) != std::string::npos);
  CHECK(fresh.err.find(fmt::format("note: wrote checkpoint {}/step-00000002\n", trainings.checkpoints)) !=
        std::string::npos);
  const Called mixed = with({});
  CHECK(mixed.code == 2);
  CHECK(mixed.err == fmt::format("error: '{}' holds checkpoints up to step 2; go on from there with --resume, or give "
                                 "a folder of its own to a run from the first step\n",
                                 trainings.checkpoints));
  const Called done = with({"--resume", "--json", trainings.json});
  CHECK(done.code == 0);
  CHECK(done.err.find(fmt::format("note: the run goes on with step 2 from {}/step-00000002\n"
                                  "note: all 2 steps were done: nothing is left to do\n",
                                  trainings.checkpoints)) != std::string::npos);
  CHECK(trainings.report().at("loss").empty());
  // What differs: said, or refused.
  std::string text = trainings.folder.read("plan.yaml");
  const auto edited = [&](const std::string& key, const std::string& value) {
    std::string other = text;
    const std::size_t begin = other.find("\n  " + key + ": ", other.find("\ntraining:\n"));
    REQUIRE(begin != std::string::npos);
    other.replace(begin, other.find('\n', begin + 1) - begin, "\n  " + key + ": " + value);
    return trainings.folder.write("edited.yaml", other);
  };
  const Called faster = call(
      {"run", edited("learning_rate", "0.125"), "--steps", "3", "--checkpoint", trainings.checkpoints, "--resume"});
  CHECK(faster.code == 0);
  CHECK(faster.err.find("note: learning rate is 0.125, and was 0.0006 in the checkpoint\n") != std::string::npos);
  const Called seed =
      call({"run", edited("seed", "5"), "--steps", "4", "--checkpoint", trainings.checkpoints, "--resume"});
  CHECK(seed.code == 2);
  CHECK(seed.err == fmt::format("{}/step-00000003/checkpoint.json: error: this checkpoint is not of the plan's "
                                "training: seed is 1234 there and 5 in the plan; resume with the plan's own "
                                "checkpoints, or give another folder\n",
                                trainings.checkpoints));
  for (const std::vector<std::string>& alone :
       {std::vector<std::string>{"--resume"}, {"--every", "2"}, {"--keep", "2"}}) {
    std::vector<std::string> all = {"run", plan};
    all.insert(all.end(), alone.begin(), alone.end());
    CHECK(call(all).err ==
          fmt::format("error: {} needs --checkpoint DIR, the folder of the checkpoints\n", alone.front()));
  }
}

TEST_CASE("a run that gets SIGTERM or SIGINT writes a checkpoint of the step that it ends with") {
  const Trainings trainings;
  const std::string plan = trainings.plan("plan.yaml", two_data_ranks);
  const std::string log = trainings.folder.path("log");
  std::vector<double> losses;
  for (const auto& [name, code] : {std::pair{"INT", 130}, std::pair{"TERM", 143}}) {
    const Called called = shell(fmt::format(
        "rm -f {2}; env --default-signal=INT {0} run {1} --steps 1000000000 --quiet --log {2} --checkpoint {3} "
        "--resume > {4} 2>&1 & while kill -0 $! && ! [ -s {2} ]; do sleep 0.01; done; kill -{5} $!; wait $!",
        PARPLAN_BINARY, plan, log, trainings.checkpoints, trainings.folder.path("out"), name));
    CHECK(called.code == code);
    std::ifstream lines(log);
    for (std::string line; std::getline(lines, line);) {
      const Json json = Json::parse(line);
      CHECK(json.at("step") == losses.size());
      losses.push_back(json.at("loss").get<double>());
    }
    CHECK(trainings.names().back() == fmt::format("step-{:08}", losses.size()));
  }
  CHECK(trainings.losses({plan, "--steps", fmt::format("{}", losses.size()), "--log", log}).size() == losses.size());
  std::ifstream lines(log);
  for (std::size_t step = 0; step < losses.size(); ++step) {
    std::string line;
    REQUIRE(std::getline(lines, line));
    CHECK(Json::parse(line).at("loss") == losses[step]);
  }
}

TEST_CASE("several processes write one checkpoint, and go on from it and from that of one process") {
  const Trainings trainings;
  const std::string plan = trainings.plan("plan.yaml", {"--pp", "2", "--dp", "2", "--zero", "1", "--devices", "4"});
  const std::vector<double> whole = trainings.losses({plan, "--steps", "5"});
  std::vector<double> losses;
  for (const auto& [steps, processes] : {std::pair{2, 4}, {3, 1}, {5, 4}}) {
    const Called called =
        shell(fmt::format("{} run {} --steps {} --processes {} --checkpoint {} --resume --quiet "
                          "--json {} 2>&1",
                          PARPLAN_BINARY, plan, steps, processes, trainings.checkpoints, trainings.json));
    INFO(called.out);
    REQUIRE(called.code == 0);
    const Json report = trainings.report();
    for (const Json& loss : report.at("loss")) losses.push_back(loss.get<double>());
  }
  CHECK(losses == whole);
  CHECK(trainings.names() == std::vector<std::string>{"step-00000002", "step-00000003", "step-00000005"});
}

TEST_CASE("a checkpoint that cannot be written ends no run, leaves nothing, and is said") {
  const Trainings trainings;
  const std::string plan = trainings.plan("plan.yaml", two_data_ranks);
  // Files of at most 64 KiB: the shards of this model are larger, plan and report are not.
  const Called called =
      shell(fmt::format("( ulimit -f 64; {} run {} --quiet --steps 3 --every 2 --checkpoint {} ) 2>&1", PARPLAN_BINARY,
                        plan, trainings.checkpoints));
  CHECK(called.code == 1);
  for (const int step : {2, 3})
    CHECK(called.out.find(fmt::format("error: no checkpoint of step {}: cannot write '{}/step-{:08}.incomplete/"
                                      "rank-00000-of-00002.safetensors': File too large; the run goes on\n",
                                      step, trainings.checkpoints, step)) != std::string::npos);
  CHECK(trainings.names().empty());
}

TEST_CASE("a file for offload that is larger than the limit on files ends the run, and the error says so") {
  const Trainings trainings;
  std::ifstream cores(cpu_8);
  const std::string cluster(std::istreambuf_iterator<char>(cores), {});
  const std::string with_drives =
      trainings.folder.write("cluster.yaml", cluster + "nvme: {read: 1 GB/s, write: 1 GB/s, latency: 100 us}\n");
  const std::string plan = trainings.plan("plan.yaml", {"--devices", "1", "--offload", "optimizer:nvme"}, with_drives);
  const Called called = shell(fmt::format("( ulimit -f 64; {} run {} --quiet --steps 1 --nvme-dir {} ) 2>&1",
                                          PARPLAN_BINARY, plan, trainings.folder.path("")));
  CHECK(called.code == 1);
  CHECK(called.out.find("for what a rank keeps on NVMe: File too large; raise the limit on the size of files (ulimit "
                        "-f) (rank 0, before the first step)") != std::string::npos);
}

TEST_CASE("a loss that is not a number leaves no checkpoint, and those before it stay") {
  const Trainings trainings;
  std::string text =
      trainings.folder.read(std::filesystem::path(trainings.plan("plan.yaml", two_data_ranks)).filename().string());
  const std::size_t begin = text.find("\n  learning_rate: ");
  text.replace(begin, text.find('\n', begin + 1) - begin, "\n  learning_rate: 1e36");
  const Called called = call({"run", trainings.folder.write("edited.yaml", text), "--steps", "9", "--quiet", "--every",
                              "1", "--checkpoint", trainings.checkpoints});
  CHECK(called.code == 1);
  CHECK(trainings.names() == std::vector<std::string>{"step-00000001"});
}

}  // namespace
}  // namespace parplan
