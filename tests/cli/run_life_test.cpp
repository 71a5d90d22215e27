// What a run says while it lives and when it ends: its log, edited plans, losses that are not
// finite, and signals.
#include <algorithm>
#include <csignal>
#include <fstream>

#include <fmt/format.h>

#include "planner/base/json.h"
#include "tests/cli/call.h"
#include "tests/cli/shell.h"

namespace parplan {
namespace {

using namespace testing;

// Plans of a model that reads bytes, on two threads.
struct Plans {
  Folder folder;
  std::string plan = folder.path("plan.yaml");
  std::string json = folder.path("run.json");
  std::string log = folder.path("steps.jsonl");

  explicit Plans(const std::vector<std::string>& layout = {"--dp", "2"}) {
    std::ifstream file(tiny_gpt2);
    std::string model(std::istreambuf_iterator<char>(file), {});
    const std::size_t begin = model.find("vocabulary: ");
    model.replace(begin, model.find('\n', begin) - begin, "vocabulary: 256");
    std::vector<std::string> words = {"simulate", folder.write("model.yaml", model), "--cluster", cpu_8, "--devices",
                                      "2", "--seq-len", "8", "--quiet", "-o", plan, "--json", folder.path("json")};
    words.insert(words.end(), layout.begin(), layout.end());
    REQUIRE(call(words).code == 0);
  }
  // The plan with another value of a key, by its first line after `section`.
  std::string with(const std::string& section, const std::string& key, const std::string& value) const {
    std::string text = folder.read("plan.yaml");
    const std::string line = "\n  " + key + ": ";
    const std::size_t begin = text.find(line, text.find("\n" + section + ":\n"));
    REQUIRE(begin != std::string::npos);
    text.replace(begin, text.find('\n', begin + 1) - begin, line + value);
    return folder.write("edited.yaml", text);
  }
  Json report() const { return Json::parse(folder.read("run.json")); }
  std::vector<Json> lines() const {
    std::vector<Json> all;
    std::ifstream file(log);
    for (std::string line; std::getline(file, line);) all.push_back(Json::parse(line));
    return all;
  }
};

std::vector<std::string> keys_of(const Json& json) {
  std::vector<std::string> keys;
  for (const auto& item : json.items()) keys.push_back(item.key());
  return keys;
}

TEST_CASE("an edited plan runs, with a note and a prediction that belongs to it") {
  const Plans plans;
  const std::string edited = plans.with("training", "clip_norm", "1");
  const Called called = call({"run", edited, "--steps", "2", "--json", plans.json});
  CHECK(called.code == 0);
  CHECK(called.err.find("note: the file promises a step of ") != std::string::npos);
  CHECK(called.err.find(": it was edited, or written by another version of parplan; its prediction is made anew\n") !=
        std::string::npos);
  const Json report = plans.report();
  CHECK(report.at("notes").size() == 1);
  CHECK(report.at("measured").at("memory_buffers_bytes") == report.at("predicted").at("memory_buffers_bytes"));
  // Bytes to be sent are a promise, too.
  const Called sent =
      call({"run", plans.with("prediction", "communication_dp_bytes", "12"), "--steps", "2", "--json", plans.json});
  CHECK(sent.code == 0);
  CHECK(sent.err.find("it was edited, or written by another version of parplan") != std::string::npos);
  // A plan as it was written says nothing.
  const Called own = call({"run", plans.plan, "--steps", "2", "--json", plans.json});
  CHECK(own.code == 0);
  CHECK(own.err.find("edited") == std::string::npos);
  CHECK(plans.report().at("notes").empty());
}

TEST_CASE("a log has a line for each step, with the numbers of the report") {
  for (const std::vector<std::string>& layout : {std::vector<std::string>{"--dp", "2"}, {"--pp", "2", "--dp", "1"}}) {
    const Plans plans(layout);
    const std::string plan = plans.with("training", "warmup_steps", "4");
    const Called called = call({"run", plan, "--steps", "5", "--log", plans.log, "--json", plans.json});
    CHECK(called.code == 0);
    CHECK(called.err.find("note: the gradient norm is computed for --log; the prediction is made anew with it\n") !=
          std::string::npos);
    const std::vector<Json> lines = plans.lines();
    const Json report = plans.report();
    REQUIRE(lines.size() == 5);
    for (std::size_t step = 0; step < lines.size(); ++step) {
      const Json& line = lines[step];
      CHECK(keys_of(line) == std::vector<std::string>{"step", "loss", "gradient_norm", "learning_rate", "step_time_s",
                                                      "skipped"});
      CHECK(line.at("step") == step);
      CHECK(line.at("loss") == report.at("loss")[step]);
      CHECK(line.at("step_time_s") == report.at("step_times_s")[step]);
      CHECK(line.at("gradient_norm").get<double>() > 0.0);
      CHECK(line.at("skipped") == false);
      const double warm = std::min(1.0, static_cast<double>(step + 1) / 4.0);
      CHECK(line.at("learning_rate").get<double>() == doctest::Approx(6e-4 * warm));
    }
    // The report names the plan of the file.
    const std::string text = plans.folder.read("edited.yaml");
    CHECK(report.at("predicted").at("plan_id").get<std::string>().size() == 8);
    // Another run replaces the log; without it the losses are the same to the bit.
    REQUIRE(call({"run", plan, "--steps", "2", "--log", plans.log, "--quiet", "--json", plans.json}).code == 0);
    CHECK(plans.lines().size() == 2);
    REQUIRE(call({"run", plan, "--steps", "5", "--quiet", "--json", plans.json}).code == 0);
    CHECK(plans.report().at("loss") == report.at("loss"));
  }
}

TEST_CASE("a log goes to standard output alone, and clashes with other outputs are refused") {
  const Plans plans;
  const Called called = call({"run", plans.plan, "--steps", "2", "--log", "-", "--quiet"});
  CHECK(called.code == 0);
  CHECK(std::ranges::count(called.out, '\n') == 2);
  CHECK(called.out.starts_with("{\"step\":0,\"loss\":"));
  CHECK(call({"run", plans.plan, "--log", "-", "--json", "-"}).err ==
        "error: --json and --log cannot both go to standard output; give one of them a file\n");
  CHECK(call({"run", plans.plan, "--log", plans.plan}).code == 2);
  CHECK(call({"run", plans.plan, "--log", plans.folder.path("none/steps")}).code == 1);
}

TEST_CASE("a log that cannot be written ends no run, but the run did not do all that was asked") {
  const Plans plans;
  const Called called =
      call({"run", plans.plan, "--steps", "3", "--quiet", "--log", "/dev/full", "--json", plans.json});
  CHECK(called.code == 1);
  CHECK(called.err == "error: cannot write '/dev/full': No space left on device; the run goes on without it\n");
  CHECK(plans.report().at("loss").size() == 3);
}

TEST_CASE("a loss that is not a number ends the run with 1, and the report holds what was done") {
  const Plans plans;
  const std::string plan = plans.with("training", "learning_rate", "1e36");
  const Called called = call({"run", plan, "--steps", "9", "--quiet", "--json", plans.json, "--log", plans.log});
  CHECK(called.code == 1);
  CHECK(called.err ==
        "error: the loss of step 1 is not a number: the run ended after 2 of 9 steps; with --on-nan skip, such steps "
        "change no parameter and the run goes on\n");
  CHECK(called.out.find("loss nan") != std::string::npos);
  const Json report = plans.report();
  CHECK(report.at("ended") == "the loss of step 1 is not a number");
  CHECK(report.at("steps") == 2);
  CHECK(report.at("loss").size() == 2);
  CHECK(report.at("loss")[1].is_null());
  CHECK(plans.lines().size() == 2);
  CHECK(plans.lines()[1].at("loss").is_null());
}

TEST_CASE("with --on-nan skip a run goes on to its end, and says how many steps changed nothing") {
  const Plans plans;
  const std::string plan = plans.with("training", "learning_rate", "1e36");
  const Called called = call({"run", plan, "--steps", "4", "--on-nan", "skip", "--json", plans.json});
  CHECK(called.code == 0);
  CHECK(called.err.find("note: 3 of 4 steps changed no parameter: their gradients were not finite\n") !=
        std::string::npos);
  CHECK(called.err.find("note: the gradient norm is computed for --on-nan skip; the prediction is made anew with it") !=
        std::string::npos);
  CHECK(plans.report().at("skipped_steps") == 3);
  CHECK(plans.report().at("ended").is_null());
  CHECK(call({"run", plan, "--on-nan", "ignore"}).code == 2);
}

TEST_CASE("a run that gets SIGINT or SIGTERM finishes its step, writes its report, and ends with 128 and the signal") {
  const Plans plans;
  for (const auto& [name, code] : {std::pair{"INT", 130}, std::pair{"TERM", 143}}) {
    // (A shell starts its background jobs with SIGINT ignored, and what is ignored stays so.)
    const Called called = shell(
        fmt::format("rm -f {2}; env --default-signal=INT {0} run {1} --steps 1000000000 --quiet --log {2} --json {3} "
                    "> {4} 2>&1 & while kill -0 $! && [ ! -s {2} ]; do sleep 0.01; done; kill -{5} $!; wait $!",
                    PARPLAN_BINARY, plans.plan, plans.log, plans.json, plans.folder.path("out"), name));
    CHECK(called.code == code);
    const Json report = plans.report();
    const auto steps = report.at("steps").get<std::int64_t>();
    CHECK(report.at("ended") == std::string("SIG") + name);
    CHECK(static_cast<std::int64_t>(plans.lines().size()) == steps);
    CHECK(report.at("measured").at("step_time_s").get<double>() > 0.0);
    const std::string said = plans.folder.read("out");
    CHECK(said.find(fmt::format("the run ended after {} of 1000000000 steps, because of SIG{}\n", steps, name)) !=
          std::string::npos);
  }
}

// A job that has begun its steps: runs `then` with its id in $! and says how it ends.
Called with_running_job(const Plans& plans, const std::string& before, const std::string& then) {
  return shell(fmt::format(
      "rm -f {2}; {5} {0} run {1} --steps {6} --quiet --log {2} --json {3} > {4} 2>&1 & "
      "while kill -0 $! 2> {7} && [ ! -s {2} ]; do sleep 0.01; done; {8}; wait $!",
      PARPLAN_BINARY, plans.plan, plans.log, plans.json, plans.folder.path("out"), before, 1000000000, "/dev/null",
      then));
}

TEST_CASE("a second signal ends a run at once, of whichever kind it is") {
  const Plans plans;
  // Both signals wait while the process is stopped: no step lies between them.
  const Called called = with_running_job(plans, "env --default-signal=INT",
                                         "kill -STOP $!; kill -INT $!; kill -TERM $!; kill -CONT $!");
  CHECK((called.code == 128 + 2 || called.code == 128 + 15));
  CHECK(plans.folder.read("out").find("because of") == std::string::npos);
}

TEST_CASE("a signal that was ignored when a run was started stays ignored") {
  const Plans plans;
  const Called called = with_running_job(plans, "env --ignore-signal=INT",
                                         "grep SigCgt /proc/$!/status; grep SigIgn /proc/$!/status; kill -KILL $!");
  const auto mask_of = [&](const std::string& key) {
    return std::stoull(called.out.substr(called.out.find(key) + key.size()), nullptr, 16);
  };
  const unsigned long long interrupt = 1ULL << (SIGINT - 1), terminate = 1ULL << (SIGTERM - 1);
  CHECK((mask_of("SigIgn:") & interrupt) != 0);
  CHECK((mask_of("SigCgt:") & interrupt) == 0);
  CHECK((mask_of("SigCgt:") & terminate) != 0);
}

}  // namespace
}  // namespace parplan
