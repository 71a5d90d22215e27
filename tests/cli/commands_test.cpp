// Commands executed in this process, on the tiny models of tests/data.
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "cli/data_folder.h"
#include "cli/local_machine.h"
#include "cli/version.h"
#include "planner/base/file.h"
#include "planner/base/json.h"
#include "planner/base/yaml.h"
#include "planner/graph/engine_file.h"
#include "planner/plan/plan.h"
#include "planner/report/plan_row.h"
#include "tests/cli/call.h"
#include "tests/cli/shell.h"

namespace parplan {
namespace {

using namespace testing;

Json json_of(const std::vector<std::string>& arguments, int code = 0) {
  const Called called = call(arguments);
  INFO(called.err);
  REQUIRE(called.code == code);
  return Json::parse(called.out);
}

void check_row(const Json& row) {
  std::vector<std::string> keys;
  for (const auto& item : row.items()) keys.push_back(item.key());
  std::vector<std::string> wanted;
  for (const Column& column : columns()) wanted.push_back(std::string(column.key));
  CHECK(keys == wanted);

  double time = 0.0;
  std::int64_t memory = 0;
  for (const auto& [key, value] : row.items()) {
    if (key.starts_with("time_")) time += value.get<double>();
    if (key.starts_with("memory_") && key != "memory_capacity_bytes" && key != "memory_peak_bytes")
      memory += value.get<std::int64_t>();
  }
  const double step = row.at("step_time_s").get<double>();
  CHECK(std::abs(time - step) <= 1e-12 * step);
  CHECK(memory == row.at("memory_peak_bytes").get<std::int64_t>());
  CHECK(row.at("dp").get<int>() * row.at("tp").get<int>() * row.at("pp").get<int>() == row.at("devices").get<int>());
}

// Equal searches take different times.
Json without_seconds(Json json) {
  json["search"]["seconds"] = nullptr;
  return json;
}

TEST_CASE("suggest writes every key of the contract, parts that sum, and no NaN") {
  const Called called = call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--json", "-", "--quiet"});
  REQUIRE(called.code == 0);
  CHECK(called.err == "");
  CHECK(called.out.find("nan") == std::string::npos);
  CHECK(called.out.find("inf\"") == std::string::npos);
  const Json json = Json::parse(called.out);
  CHECK(json.at("schema") == "parplan.suggest/1");
  CHECK(json.at("tool").dump() == std::string(R"({"name":"parplan","version":")") + version() + "\"}");
  CHECK(json.at("inputs").at("model").at("name") == "tiny-gpt2");
  CHECK(json.at("inputs").at("cluster").at("devices") == 8);
  CHECK(json.at("inputs").at("training").at("global_batch") == 32);    // 4 a device
  CHECK(json.at("inputs").at("training").at("sequence_length") == 32); // the model's context is less than 256
  CHECK(json.at("inputs").at("training").at("precision") == "fp32");
  CHECK(json.at("inputs").at("training").at("defaults").dump() ==
        R"(["global_batch","sequence_length","precision","optimizer"])");
  const Json& search = json.at("search");
  std::int64_t counted = 0;
  for (const char* key : {"infeasible_memory", "pruned_by_bound", "simulated"})
    counted += search.at(key).get<std::int64_t>();
  CHECK(counted <= search.at("candidates").get<std::int64_t>());
  CHECK(json.at("columns").size() == columns().size());
  CHECK(json.at("plans").size() == 5);
  CHECK(json.at("changes").dump() == "[]");
  int rank = 0;
  double last = 0.0;
  for (const Json& row : json.at("plans")) {
    check_row(row);
    CHECK(row.at("rank") == ++rank);
    CHECK(row.at("step_time_s").get<double>() >= last);
    last = row.at("step_time_s").get<double>();
  }
}

TEST_CASE("the same input gives the same bytes") {
  const std::vector<std::string> arguments{"suggest", tiny_llama, "--cluster", cpu_8, "--json", "--quiet"};
  CHECK(without_seconds(json_of(arguments)).dump() == without_seconds(json_of(arguments)).dump());
}

TEST_CASE("the ranking has one plan of each degrees, unless variants are asked for or every degree is given") {
  const auto most_of_one = [](std::vector<std::string> more) {
    std::vector<std::string> arguments{"suggest", tiny_gpt2, "--cluster", cpu_8,    "--top",
                                       "6",       "--json",  "-",         "--quiet"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    std::map<std::string, int> plans;
    const Json json = json_of(arguments);
    for (const Json& row : json.at("plans"))
      ++plans[fmt::format("{} {} {} {}", row.at("dp").dump(), row.at("tp").dump(), row.at("pp").dump(),
                          row.at("cp").dump())];
    REQUIRE(!plans.empty());
    int most = 0;
    for (const auto& [degrees, number] : plans) most = std::max(most, number);
    return most;
  };
  CHECK(most_of_one({}) == 1);
  CHECK(most_of_one({"--top-each", "2"}) == 2);
  CHECK(most_of_one({"--dp", "4", "--tp", "2", "--pp", "1"}) == 6);
}

TEST_CASE("CSV has the header of the columns and a line a plan") {
  const Called called = call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--top", "3", "--csv", "-", "--quiet"});
  REQUIRE(called.code == 0);
  std::string header;
  for (const Column& column : columns()) header += (header.empty() ? "" : ",") + std::string(column.key);
  CHECK(called.out.starts_with(header + "\n1,"));
  CHECK(std::ranges::count(called.out, '\n') == 4);
}

TEST_CASE("defaults are printed and marked, given values are not") {
  const Called called = call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--global-batch", "16", "--top", "1"});
  REQUIRE(called.code == 0);
  CHECK(called.out.starts_with(
      "model     tiny-gpt2: 53856 parameters\n"
      "cluster   cpu-8: 8 x cpu-core, 1 node of 8\n"
      "training  global batch 16, sequence length 32 (default), precision fp32 (default), optimizer adamw (default)\n"
      "\nrank  layout"));
}

TEST_CASE("GPU clusters have their own defaults") {
  const Called called = call({"suggest", "gpt2", "--cluster", "dgx-a100", "--top", "1"});
  REQUIRE(called.code == 0);
  CHECK(called.out.find("training  global batch 512 (default), sequence length 1024 (default), precision bf16 "
                        "(default), optimizer adamw (default)\n") != std::string::npos);
}

TEST_CASE("a given layout fixes that part of the search") {
  const Json json = json_of({"suggest", tiny_gpt2, "--cluster", cpu_8, "--tp", "2", "--zero", "1", "--recompute",
                             "full", "--json", "--quiet"});
  REQUIRE_FALSE(json.at("plans").empty());
  for (const Json& row : json.at("plans")) {
    CHECK(row.at("tp") == 2);
    CHECK(row.at("zero_stage") == 1);
    CHECK(row.at("recompute") == "full");
  }
}

TEST_CASE("suggest says how to start a plan that is there, and how to write it where it is not") {
  const Folder folder;
  const std::string unwritten = call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--quiet"}).out;
  CHECK(unwritten.find("\nwrite     it with -o plan.yaml, and then\nstart     parplan run plan.yaml\n") !=
        std::string::npos);
  const std::string written =
      call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--quiet", "-o", folder.path("p.yaml")}).out;
  CHECK(written.find("\n\nstart     parplan run " + folder.path("p.yaml") + "\n") != std::string::npos);
  CHECK(written.find("\nwrite ") == std::string::npos);
}

TEST_CASE("a plan and a trace go to standard output alone where they are asked for there") {
  const Folder folder;
  const std::string file = folder.path("plan.yaml");
  REQUIRE(call({"suggest", tiny_gpt2, "--cluster", cpu_8, "-o", file}).code == 0);
  const std::string& written = folder.read("plan.yaml");
  const auto beginning = [](const std::string& plan) {
    return plan.substr(0, plan.find("backend:"));
  };  // how long the search took stands behind it
  for (const Called& called :
       {call({"suggest", tiny_gpt2, "--cluster", cpu_8, "-o", "-"}), call({"simulate", file, "-o", "-"})}) {
    CHECK(called.code == 0);
    CHECK(beginning(called.out) == beginning(written));
    CHECK(called.err.find("wrote") == std::string::npos);
  }
  CHECK(Json::parse(call({"simulate", file, "--trace", "-"}).out).contains("traceEvents"));
  CHECK(call({"suggest", tiny_gpt2, "--cluster", cpu_8, "-o", "-", "--json", "-"}).code == 2);
}

TEST_CASE("all of the memory is no limit") {
  CHECK(call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--memory-limit", "100%"}).err.find("memory limited") ==
        std::string::npos);
  CHECK(call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--memory-limit", "99%"}).err.find("memory limited") !=
        std::string::npos);
}

TEST_CASE("of unlike devices each kind is limited by itself") {
  const Folder folder;
  const std::string cluster = folder.write("unlike.yaml",
                                           "name: unlike\ngroups:\n"
                                           "  - {device: a100-sxm4-80gb, node: {devices: 8, intra: nvswitch, nics: "
                                           "{count: 8, line_rate: 200 Gbit/s}}, nodes: 1}\n"
                                           "  - {device: v100-sxm2-16gb, node: {devices: 8, intra: nvlink_mesh, "
                                           "bandwidth: 20 GB/s, nics: {count: 4, line_rate: 100 Gbit/s}}, nodes: 1}\n"
                                           "network: {latency: 1 us}\n");
  const auto said = [&](const std::string& limit) {
    return call({"suggest", "gpt2", "--cluster", cluster, "--memory-limit", limit, "--top", "1"}).err;
  };
  CHECK(said("50%").find("memory limited to 7.89 GiB to 39.6 GiB of a device's 15.8 GiB to 79.1 GiB") !=
        std::string::npos);
  CHECK(said("40 GiB").find("memory limited to 15.8 GiB to 40.0 GiB of a device's 15.8 GiB to 79.1 GiB") !=
        std::string::npos);
  CHECK(said("10 GiB").find("memory limited to 10.0 GiB of a device's 15.8 GiB to 79.1 GiB") != std::string::npos);
  CHECK(said("80 GiB").find("--memory-limit: a device of cluster 'unlike' has 15.8 GiB to 79.1 GiB, found 80.0 GiB; "
                            "give less, or a percentage") != std::string::npos);
}

TEST_CASE("exit code 1, no plans and what would make it fit where memory is short") {
  // The libraries need 16 MiB, 16,777,216 bytes of it.
  const std::vector<std::string> arguments{"suggest",        tiny_gpt2,  "--cluster", cpu_8,
                                           "--memory-limit", "16780 kB", "--json",    "-"};
  const Called called = call(arguments);
  CHECK(called.code == 1);
  const Json json = Json::parse(called.out);
  CHECK(json.at("plans").dump() == "[]");
  REQUIRE_FALSE(json.at("changes").empty());
  CHECK(json.at("search").at("infeasible_memory") == json.at("search").at("candidates"));
  CHECK(called.err.find("no feasible plan: of ") != std::string::npos);
  CHECK(called.err.find("what would make it fit: ") != std::string::npos);
}

TEST_CASE("every change that is said to make it fit does, typed as it is said") {
  struct Case {
    std::vector<std::string> arguments;
    std::string memory;
  };
  const std::vector<Case> cases = {
      {{tiny_gpt2, "--cluster", cpu_8}, "16780 kB"},
      {{"gpt2", "--cluster", "dgx-a100", "--devices", "2", "--dp", "2", "--tp", "1", "--pp", "1", "--zero", "0",
        "--micro-batch", "4", "--recompute", "none", "--global-batch", "16"},
       "4.5 GiB"},
      {{"gpt2", "--cluster",      "dgx-a100", "--devices",      "2",     "--dp",          "1", "--tp",
        "1",    "--pp",           "2",        "--schedule",     "gpipe", "--micro-batch", "1", "--recompute",
        "none", "--global-batch", "64",       "--stage-blocks", "7,7"},
       "5 GiB"},
      {{"gpt2", "--cluster", "dgx-a100", "--devices", "1", "--seq-len", "1024"}, "2.3 GiB"},
      {{"gpt2-xl", "--cluster", "dgx-a100", "--devices", "4", "--precision", "fp32", "--global-batch", "8"},
       "5.01 GiB"},
      {{"llama3-8b", "--cluster", "dgx-h100", "--devices", "8", "--global-batch", "16", "--pp", "2", "--tp", "1"},
       "19.9 GiB"},
      {{"mistral-7b", "--cluster", "hgx-h200", "--devices", "2", "--global-batch", "8"}, "40%"},
      {{"llama3-8b", "--cluster", "dgx-h100", "--devices", "1", "--global-batch", "8"}, "100%"},
      {{"t5-base", "--cluster", "titan-rtx-2", "--devices", "1", "--global-batch", "8"}, "1.5 GiB"},
  };
  const std::map<std::string, std::string> option_of = {{"devices", "--devices"},
                                                        {"zero_stage", "--zero"},
                                                        {"micro_batch", "--micro-batch"},
                                                        {"recompute", "--recompute"},
                                                        {"tp", "--tp"},
                                                        {"pp", "--pp"},
                                                        {"dp", "--dp"},
                                                        {"schedule", "--schedule"},
                                                        {"stage_blocks", "--stage-blocks"},
                                                        {"global_batch", "--global-batch"},
                                                        {"sequence_length", "--seq-len"},
                                                        {"precision", "--precision"},
                                                        {"optimizer", "--optimizer"},
                                                        {"offload", "--offload"},
                                                        {"offload_layers", "--offload-layers"},
                                                        {"trainable", "--trainable"}};
  std::set<std::string> seen;
  for (const Case& one : cases) {
    const auto with = [&](const std::string& option, const std::string& value, const std::string& memory) {
      std::vector<std::string> arguments{"suggest"};
      arguments.insert(arguments.end(), one.arguments.begin(), one.arguments.end());
      const auto at = std::ranges::find(arguments, option);
      if (at != arguments.end()) at[1] = value;
      else if (!option.empty()) arguments.insert(arguments.end(), {option, value});
      arguments.insert(arguments.end(), {"--memory-limit", memory, "--top", "1", "--quiet", "--json", "-"});
      return call(arguments);
    };
    const Called none = with("", "", one.memory);
    INFO(fmt::format("{} in {}: {}", one.arguments.front(), one.memory, none.err));
    REQUIRE(none.code == 1);
    const Json json = Json::parse(none.out);
    REQUIRE_FALSE(json.at("changes").empty());
    for (const Json& change : json.at("changes")) {
      const std::string of = change.at("change"), text = change.at("text");
      INFO(text);
      seen.insert(of);
      CHECK(none.err.find("what would make it fit: " + text + "\n") != std::string::npos);
      CHECK(change.at("plan").at("rank").is_null());
      CHECK(change.at("plan").size() == columns().size());
      CHECK(change.at("plan").at("memory_peak_bytes").get<std::int64_t>() <=
            change.at("plan").at("memory_capacity_bytes").get<std::int64_t>());
      if (of == "memory") {
        if (one.memory == "100%") continue;  // no option gives a device more memory than it has
        CHECK(with("", "", text.substr(0, text.find(" of memory"))).code == 0);
        CHECK(with("", "", fmt::format("{} B", change.at("value").get<std::int64_t>())).code == 0);
        CHECK(with("", "", fmt::format("{} B", change.at("value").get<std::int64_t>() - 1)).code == 1);
      } else {
        REQUIRE(option_of.contains(of));
        const Json& value = change.at("value");
        CHECK(with(option_of.at(of), value.is_string() ? value.get<std::string>() : value.dump(), one.memory).code ==
              0);
      }
    }
  }
  for (const char* of : {"memory", "devices", "zero_stage", "micro_batch", "recompute", "tp", "schedule",
                         "global_batch", "sequence_length", "optimizer", "trainable"}) {
    INFO(std::string(of));
    CHECK(seen.contains(of));
  }
}

TEST_CASE("a memory limit is what plans are held to, and the plan carries it") {
  const Folder folder;
  const Json json = json_of({"suggest", tiny_gpt2, "--cluster", cpu_8, "--memory-limit", "50%", "--json", "--quiet",
                             "-o", folder.path("plan.yaml")});
  const std::int64_t limit = std::int64_t{2} << 30;  // of 4 GiB
  for (const Json& row : json.at("plans")) {
    CHECK(row.at("memory_capacity_bytes") == limit);
    CHECK(row.at("memory_peak_bytes").get<std::int64_t>() <= limit);
  }
  CHECK(read_plan(folder.read("plan.yaml"), "plan.yaml").cluster.groups.front().device.memory_capacity == Bytes(limit));
}

TEST_CASE("device ids choose devices in their order") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  REQUIRE(call({"suggest", "gpt2", "--cluster", "dgx-a100", "--device-ids", "5,2", "--top", "1", "--quiet", "-o", plan})
              .code == 0);
  const Cluster cluster = read_plan(folder.read("plan.yaml"), "plan.yaml").cluster;
  REQUIRE(cluster.devices() == 2);
  CHECK(cluster.groups.front().node.vertices[cluster.groups.front().node.devices[0]].name == "GPU5");
  CHECK(cluster.groups.front().node.vertices[cluster.groups.front().node.devices[1]].name == "GPU2");
}

TEST_CASE("simulate of a layout and of its plan agree, and a trace is written") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  const Json layout = json_of({"simulate", tiny_llama, "--cluster", cpu_8, "--dp", "2", "--tp", "2", "--pp", "2",
                               "--zero", "1", "--json", "--quiet", "-o", plan, "--trace", folder.path("trace.json")});
  REQUIRE(layout.at("plans").size() == 1);
  check_row(layout.at("plans").at(0));
  CHECK(layout.at("schema") == "parplan.suggest/1");
  CHECK(json_of({"simulate", plan, "--json", "--quiet"}).at("plans") == layout.at("plans"));
  CHECK(Json::parse(folder.read("trace.json")).at("traceEvents").size() > 100);
}

TEST_CASE("sequences are at most 8192 tokens by default, and a longer context is named") {
  const Folder folder;
  std::string model = read_file(std::string(PARPLAN_SOURCE_DIR) + "/models/llama3.2-1b.yaml");
  const std::size_t at = model.find("context: ");
  REQUIRE(at != std::string::npos);
  model.replace(at, model.find('\n', at) - at, "context: 131072");
  const std::string path = folder.path("long.yaml");
  write_file_atomically(path, model);
  const std::vector<std::string> args = {"simulate", path, "--cluster", "dgx-a100", "--json", "-"};
  const Called called = call(args);
  CHECK(Json::parse(called.out).at("inputs").at("training").at("sequence_length") == 8192);
  CHECK(called.err.find("sequences of 8192 tokens by default, and its context is 131072") != std::string::npos);
  std::vector<std::string> given = args;
  given.insert(given.end(), {"--seq-len", "16384"});
  const Called with_length = call(given);
  CHECK(Json::parse(with_length.out).at("inputs").at("training").at("sequence_length") == 16384);
  CHECK(with_length.err.find("by default") == std::string::npos);
}

TEST_CASE("simulate draws the schedule as text under its table and as an image into a file") {
  const Folder folder;
  const std::vector<std::string> layout = {"simulate",       tiny_llama, "--cluster",     cpu_8, "--dp",       "1",
                                           "--tp",           "1",        "--pp",          "2",   "--schedule", "1f1b",
                                           "--global-batch", "4",        "--micro-batch", "1"};
  const auto with = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all = layout;
    all.insert(all.end(), more.begin(), more.end());
    return call(all);
  };
  const Called drawn = with({"--print-schedule", "--schedule-svg", folder.path("s.svg")});
  CHECK(drawn.code == 0);
  CHECK(drawn.out.find("\nstage 0 F0 F1 ") != std::string::npos);
  CHECK(drawn.out.find("\nstage 1  . F0 B0 ") != std::string::npos);
  CHECK(folder.read("s.svg").starts_with("<svg "));
  CHECK(with({"--schedule-svg", "-"}).out.starts_with("<svg "));
  const Called refused = with({"--print-schedule", "--json", "-"});
  CHECK(refused.code == 2);
  CHECK(refused.err.find("--json and --print-schedule cannot both go to standard output") != std::string::npos);
}

TEST_CASE("simulate reports a layout that does not fit instead of refusing it") {
  const Called called = call({"simulate", "gpt3-175b", "--cluster", "dgx-a100", "--tp", "8", "--quiet", "--csv"});
  CHECK(called.code == 0);
  CHECK(called.err.starts_with("warning: the plan does not fit: it needs "));
}

TEST_CASE("run prints the loss of each step and predicted beside measured") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  const std::string text =
      folder.write("digits.txt", "3141592653589793238462643383279502884197169399375105820974944592307816406286");
  REQUIRE(call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--devices", "2", "--seq-len", "8", "--quiet", "-o", plan})
              .code == 0);
  const Called called = call({"run", plan, "--steps", "3", "--data", text, "--verbose"});
  INFO(called.err);
  REQUIRE(called.code == 0);
  CHECK(called.out.starts_with("step    0  loss "));
  for (const char* wanted : {"step    2  loss ", "predicted", "step time", "sent a step, data parallelism",
                             "peak of rank 0", "process memory growth", "segment", "optimizer"}) {
    INFO(wanted);
    CHECK(called.out.find(wanted) != std::string::npos);
  }
  CHECK(called.out.find("peak of rank 0") < called.out.find(" equal\n", called.out.find("peak of rank 0")));
}

TEST_CASE("the JSON of a run holds prediction and measurement with equal bytes") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  const std::string text =
      folder.write("digits.txt", "3141592653589793238462643383279502884197169399375105820974944592307816406286");
  REQUIRE(call({"suggest", tiny_llama, "--cluster", cpu_8, "--devices", "4", "--tp", "2", "--pp", "2", "--seq-len", "8",
                "--quiet", "-o", plan})
              .code == 0);
  const Json json = json_of({"run", plan, "--steps", "4", "--data", text, "--json", "--quiet"});
  CHECK(json.at("schema") == "parplan.run/1");
  check_row(json.at("predicted"));
  check_row(json.at("measured"));
  CHECK(json.at("loss").size() == 4);
  CHECK(json.at("loss").at(3).get<double>() < json.at("loss").at(0).get<double>());
  for (const auto& part : json.at("predicted").items())
    if (part.key().ends_with("_bytes")) {
      INFO(part.key());
      CHECK(part.value() == json.at("measured").at(part.key()));
    }
  CHECK(json.at("promised_arena_bytes") == json.at("touched_arena_bytes"));
  CHECK(json.at("promised_arena_bytes").size() == 4);
  REQUIRE_FALSE(json.at("instructions").empty());
  for (const Json& row : json.at("instructions")) CHECK(row.at("predicted_s").is_number());
}

TEST_CASE("a promise that was edited in the file is made anew, and the run is held to that") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  const std::string text =
      folder.write("digits.txt", "3141592653589793238462643383279502884197169399375105820974944592307816406286");
  REQUIRE(call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--devices", "1", "--seq-len", "8", "--quiet", "-o", plan})
              .code == 0);
  // The first activations in the file are those of the plan's own prediction.
  std::string promised = folder.read("plan.yaml");
  const std::string key = "memory_activations_bytes: ";
  const std::size_t begin = promised.find(key) + key.size();
  promised.replace(begin, promised.find('\n', begin) - begin, "0");
  const std::string json = folder.path("run.json");
  const Called called = call({"run", folder.write("less.yaml", promised), "--data", text, "--quiet", "--json", json});
  CHECK(called.code == 0);
  const Json report = Json::parse(folder.read("run.json"));
  CHECK(report.at("notes").size() == 1);
  CHECK(report.at("predicted").at("memory_activations_bytes").get<std::int64_t>() > 0);
  CHECK(report.at("predicted").at("memory_activations_bytes") ==
        report.at("measured").at("memory_activations_bytes"));
}

TEST_CASE("a schedule of one's own runs with a prediction of its own, or is refused by simulate and run alike") {
  const Folder folder;
  const std::string text =
      folder.write("digits.txt", "3141592653589793238462643383279502884197169399375105820974944592307816406286");
  const auto with_schedule = [&](const char* global_batch, const std::string& first, const std::string& second) {
    const std::string plan = folder.path("plan.yaml");
    REQUIRE(call({"simulate", tiny_gpt2, "--cluster", cpu_8, "--dp", "1", "--tp", "1", "--pp", "2", "--micro-batch",
                  "1", "--global-batch", global_batch, "--seq-len", "8", "--quiet", "-o", plan})
                .code == 0);
    std::string written = folder.read("plan.yaml");
    const std::size_t begin = written.find("\n  - \"0F0"), end = written.find("\nsearch:");
    REQUIRE(begin < end);
    written.replace(begin, end - begin, "\n  - \"" + first + "\"\n  - \"" + second + "\"");
    return folder.write("own.yaml", written);
  };
  // The second stage holds two micro-batches, where 1F1B has it hold one.
  const std::string own = with_schedule("3", "0F0 0F2 0B0 0F1 0B1 0B2", "1F0 1F2 1B0 1F1 1B1 1B2");
  CHECK(call({"simulate", own, "--quiet"}).code == 0);
  const Called run = call({"run", own, "--data", text, "--steps", "2"});
  CHECK(run.code == 0);
  CHECK(run.err.find("note: the schedule is not 1f1b as parplan writes it; its prediction is made anew\n") !=
        std::string::npos);

  const std::string stuck = with_schedule("6", "0F0 0F1 0F2 0F3 0F4 0F5 0B0 0B1 0B2 0B3 0B4 0B5",
                                          "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5");
  const Called simulated = call({"simulate", stuck}), carried_out = call({"run", stuck, "--data", text});
  CHECK(simulated.code == 2);
  CHECK(carried_out.code == 2);
  CHECK(simulated.err == carried_out.err);
  CHECK(simulated.err.starts_with(stuck + ":"));
  CHECK(simulated.err.ends_with(": error: the schedule cannot run to its end: 0F5 waits for 1F3 to take what 0F3 sent, "
                                "1B2 waits for 0B0 to take what 1B0 sent\n"));
}

TEST_CASE("what a plan promises to send and to hold is what its run sends and holds, uneven buffers too") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  const std::string text =
      folder.write("digits.txt", "3141592653589793238462643383279502884197169399375105820974944592307816406286");
  // `run` exits with 70 where they differ; the loss alone does not divide over four ranks.
  for (const std::vector<std::string>& layout : std::vector<std::vector<std::string>>{
           {"--dp", "4", "--zero", "0"}, {"--dp", "4", "--tp", "2", "--zero", "1", "--sequence-parallel"},
           {"--dp", "2", "--pp", "4", "--zero", "3"}, {"--dp", "2", "--tp", "2", "--pp", "2", "--zero", "2"},
           {"--tp", "4", "--pp", "2", "--recompute", "full"}}) {
    std::vector<std::string> arguments{"suggest", tiny_gpt2, "--cluster", cpu_8, "--global-batch", "16", "--seq-len",
                                       "8",       "--quiet", "-o",        plan};
    arguments.insert(arguments.end(), layout.begin(), layout.end());
    REQUIRE(call(arguments).code == 0);
    const Called called = call({"run", plan, "--steps", "2", "--data", text, "--quiet"});
    CHECK(called.err == "");
    CHECK(called.code == 0);
  }
}

TEST_CASE("explain needs the plan alone") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  REQUIRE(call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--quiet", "-o", plan}).code == 0);
  const Called called = call({"explain", plan});
  CHECK(called.code == 0);
  for (const char* wanted : {"a step takes ", "memory peaks at ", "runner-up: ", "binding constraint: ", "search: "}) {
    INFO(wanted);
    CHECK(called.out.find(wanted) != std::string::npos);
  }
}

TEST_CASE("topology shows named clusters and files") {
  CHECK(call({"topology", "dgx-h100", "--nodes", "2"}).out.starts_with("dgx-h100: 2 nodes of 8 x "));
  CHECK(call({"topology", cpu_8}).out.starts_with("cpu-8: 1 node of 8 x "));
}

TEST_CASE(
    "this machine is measured once, cached with its date, and measured again on request or when the file is broken") {
  const Folder folder;
  Called called = call({"topology"});
  REQUIRE(called.code == 0);
  CHECK(called.err.starts_with("measuring this machine ("));
  const std::filesystem::path file = local_machine_file();
  // The test's machine may be busy.
  if (std::filesystem::exists(busy_machine_file())) std::filesystem::rename(busy_machine_file(), file);
  REQUIRE(std::filesystem::exists(file));
  CHECK(file.string().starts_with(folder.path("cache/parplan/machine-")));
  const Cluster machine = read_cluster(YamlNode::load(file.string()));
  CHECK(machine.devices() == usable_cores());
  CHECK(machine.measured_on->starts_with("20"));
  CHECK(machine.groups.front().device.backend == BackendKind::cpu);
  for (const DeviceRates& rates : machine.groups.front().device.rates) {
    CHECK(rates.matrix_fp32.value > 1e8);
    CHECK(rates.vector.value > 1e7);
    CHECK(rates.memory.value > 1e8);
  }
  const std::string first = called.out;
  called = call({"topology"});
  CHECK(called.err == "");
  CHECK(called.out == first);
  std::ofstream(file) << "name: broken\n";
  called = call({"topology"});
  CHECK(called.code == 0);
  CHECK(called.err.starts_with("the cached numbers of this machine cannot be used (" + file.string() +
                               ":1:1: error: missing key 'device'"));
  CHECK(call({"topology", "--measure-again"}).err.starts_with("measuring this machine ("));
}

TEST_CASE("numbers that were measured beside other programs are said to be, and measured again when it is quiet") {
  const Folder folder;
  REQUIRE(call({"topology"}).code == 0);
  const std::filesystem::path quiet = local_machine_file(), busy = busy_machine_file();
  CHECK(std::filesystem::exists(quiet) != std::filesystem::exists(busy));
  if (std::filesystem::exists(quiet)) std::filesystem::rename(quiet, busy);
  const Called called = call({"topology"});
  CHECK(called.code == 0);
  const bool measured_again = called.err.starts_with("the cached numbers of this machine were measured while other");
  const bool said = called.err.starts_with("note: the numbers of this machine are low: they were measured while other");
  CHECK(measured_again != said);
  if (said) CHECK(std::filesystem::exists(busy));
  if (measured_again) CHECK(called.err.find("\nmeasuring this machine (") != std::string::npos);
  CHECK(std::filesystem::exists(quiet) != std::filesystem::exists(busy));
}

TEST_CASE("measuring again on a busy machine keeps the numbers of the quiet one") {
  const Folder folder;
  REQUIRE(call({"topology"}).code == 0);
  const std::filesystem::path quiet = local_machine_file(), busy = busy_machine_file();
  if (std::filesystem::exists(busy)) std::filesystem::rename(busy, quiet);
  const std::string numbers = read_file(quiet);
  std::atomic<bool> done = false;
  std::thread other([&] {  // always at work
    while (!done) {
    }
  });
  const Called called = call({"topology", "--measure-again"});
  done = true;
  other.join();
  CHECK(called.code == 0);
  // Some systems do not tell how many threads run.
  if (called.err.find("note: other programs were at work") == std::string::npos) return;
  CHECK(called.err.find(quiet.string() + " keeps the numbers of the quiet machine") != std::string::npos);
  CHECK(read_file(quiet) == numbers);
  CHECK(!std::filesystem::exists(busy));
}

TEST_CASE("a first command waits while another one measures this machine, and takes its numbers") {
  const Folder folder;
  REQUIRE(call({"topology"}).code == 0);
  const std::filesystem::path quiet = local_machine_file(), busy = busy_machine_file(), kept = folder.path("kept");
  std::filesystem::rename(std::filesystem::exists(quiet) ? quiet : busy, kept);
  // This test stands for the one that measures: it holds the lock.
  std::filesystem::path lock = quiet;
  const int measuring = open(lock.replace_extension(".lock").c_str(), O_RDWR | O_CLOEXEC);
  REQUIRE(measuring >= 0);
  REQUIRE(flock(measuring, LOCK_EX) == 0);
  FILE* const other = popen(fmt::format("'{}' topology 2>&1", PARPLAN_BINARY).c_str(), "r");
  REQUIRE(other != nullptr);
  std::string said;
  const auto read_until = [&](std::string_view what) {
    std::array<char, 4096> line{};
    while (said.find(what) == std::string::npos && fgets(line.data(), line.size(), other) != nullptr)
      said += line.data();
  };
  read_until("waiting for its numbers");
  CHECK(said.find("another parplan measures this machine") != std::string::npos);
  std::filesystem::rename(kept, quiet);
  close(measuring);
  read_until("what is never said");
  CHECK(pclose(other) == 0);
  CHECK(said.find("measuring this machine (") == std::string::npos);
  CHECK(said.find("this-machine: ") != std::string::npos);
}

TEST_CASE("an installed parplan finds its data beside itself, wherever it was moved") {
  const Folder folder;
  const std::filesystem::path source = PARPLAN_SOURCE_DIR, to = folder.path("moved");
  std::filesystem::create_directories(to / "bin");
  std::filesystem::create_directories(to / "share/parplan/models");
  std::filesystem::copy(source / "configs", to / "share/parplan/configs", std::filesystem::copy_options::recursive);
  std::filesystem::copy_file(source / "models/gpt2.yaml", to / "share/parplan/models/only-here.yaml");
  std::filesystem::copy_file(PARPLAN_BINARY, to / "bin/parplan");
  const Called called = shell(fmt::format("env -u PARPLAN_DATA '{}' suggest only-here --cluster dgx-a100 2>&1",
                                          (to / "bin/parplan").string()));
  CHECK(called.code == 0);
  CHECK(called.out.find("gpt2") != std::string::npos);
}

TEST_CASE("what a file or an argument holds is printed escaped, and a line rate in bytes is refused") {
  const Folder folder;
  folder.write("m.yaml", "name: \"a\\e[31mb\\u202Ec\\nd\"\nfamily: decoder\nhidden: \"\\e[2J\"\n");
  const Called in_file = call({"suggest", folder.path("m.yaml"), "--cluster", "dgx-a100"});
  CHECK(in_file.code == 2);
  CHECK(in_file.err.find('\x1b') == std::string::npos);
  const Called argument = call({"suggest", "\x1b[31m\rmodel"});
  CHECK(argument.code == 2);
  CHECK(argument.err.find("\\u001b[31m\\u000dmodel") != std::string::npos);
  CHECK(call({"suggest", "gpt2", "--cluster", "dgx-a100", "--network", "50 GB/s"}).err ==
        "error: --network: a line rate is in bits a second, found '50 GB/s': write '400 Gbit/s' for as many bytes, or "
        "'50 Gbit/s' if bits were meant\n");
  const Called bits = call({"suggest", "gpt2", "--cluster", "dgx-a100", "--network", "200Gbps"});
  CHECK(bits.code == 0);
  CHECK(bits.out == call({"suggest", "gpt2", "--cluster", "dgx-a100", "--network", "200 Gbit/s"}).out);
}

TEST_CASE("a pipeline that is to be interleaved has groups that its number of micro-batches allows") {
  const std::vector<std::string> job = {"suggest", "gpt2", "--cluster", "dgx-a100", "--devices", "4",
                                        "--global-batch", "7", "--pp", "4", "--quiet", "--json"};
  for (const std::vector<std::string>& options :
       {std::vector<std::string>{"--schedule", "interleaved"}, {"--virtual-stages", "3"}}) {
    std::vector<std::string> words = job;
    words.insert(words.end(), options.begin(), options.end());
    const Called called = call(words);
    REQUIRE_MESSAGE(called.code == 0, called.err);
    const Json best = Json::parse(called.out).at("plans").at(0);
    CHECK(best.at("schedule") == "interleaved");
    CHECK(best.at("micro_batch_group") == 7);
    // An engine that has no others.
    words.insert(words.end(), {"--engine", "megatron-2021"});
    const Called refused = call(words);
    CHECK(refused.code == 2);
    CHECK(refused.err.find("micro-batches") != std::string::npos);
  }
}

TEST_CASE("the more modules recompute, the less a step of adapters keeps, as one of all parameters does") {
  for (const char* const trained : {"all", "lora"}) {
    std::vector<std::int64_t> kept;
    for (const char* const recompute : {"none", "norms+activation", "norms+mlp", "full"}) {
      const Called called = call({"simulate", "llama3-8b", "--cluster", "dgx-h100", "--devices", "8", "--dp", "8",
                                  "--zero", "3", "--micro-batch", "1", "--global-batch", "8", "--trainable", trained,
                                  "--recompute", recompute, "--quiet", "--json"});
      REQUIRE_MESSAGE(called.code == 0, called.err);
      kept.push_back(Json::parse(called.out).at("plans").at(0).at("memory_activations_bytes"));
    }
    CAPTURE(trained);
    CHECK(std::ranges::is_sorted(kept, std::ranges::greater()));
    CHECK(std::ranges::adjacent_find(kept) == kept.end());
  }
}

TEST_CASE("tight plans are in the order of their memory, what the engine's allocator keeps included") {
  const Called called = call({"suggest", "gemma2-9b", "--cluster", "rtx-3090-8", "--devices", "4", "--seq-len", "4096",
                              "--engine", "torchtitan", "--global-batch", "8", "--optimizer", "sgd", "--objective",
                              "memory", "--quiet", "--json"});
  REQUIRE_MESSAGE(called.code == 0, called.err);
  std::vector<std::int64_t> peaks;
  const Json json = Json::parse(called.out);
  for (const Json& plan : json.at("plans")) {
    CHECK(plan.at("fit") == "tight");
    peaks.push_back(plan.at("memory_peak_bytes"));
  }
  CHECK(peaks.size() > 1);
  CHECK(std::ranges::is_sorted(peaks));
}

TEST_CASE("the version is printed") {
  const Called called = call({"--version"});
  CHECK(called.code == 0);
  CHECK(called.out == std::string("parplan ") + version() + "\n");
}

// How a layout shows that an option which is named for what is left out searches it.
struct NamedOption {
  std::string option;
  std::vector<std::string> values = {""};  // where the option is named without one: some engine has each
  // The layout in which the option decides, and the key and the value of its plans' rows.
  std::vector<std::string> layout = {};
  std::string key = {};
  std::optional<Json> of_plans = {};  // absent: the value
};

const std::vector<NamedOption>& named_options() {
  static const std::vector<NamedOption> all = {
      {"--schedule interleaved", {""}, {"--pp", "2"}, "schedule", "interleaved"},
      {"--micro-batch-group", {"4"}, {"--pp", "2"}, "micro_batch_group", 4},
      {"--virtual-stages", {"2"}},
      {"--replica-micro-batches", {"10,10,10,9,9", "4,3,3,3,3", "13,13,13,13,12"}},
      {"--schedule zero_bubble_h1", {""}, {"--pp", "2"}, "schedule", "zero_bubble_h1"},
      {"--schedule zero_bubble_v", {""}, {"--pp", "2"}, "schedule", "zero_bubble_v"},
      {"--schedule dualpipe_v", {""}, {"--pp", "2"}, "schedule", "dualpipe_v"},
      {"--dp-shard", {"3"}, {"--dp", "6", "--zero", "1"}, "dp_shard", 3},
      {"--prefetch-depth", {"0"}, {"--dp", "6", "--zero", "3"}, "prefetch_depth", 0},
      {"--gather-unit parameter", {""}, {"--dp", "6", "--zero", "3"}, "gather_unit", "parameter"},
      {"--dp-method master", {""}, {"--dp", "6"}, "dp_method", "master"},
      {"--balance-replicas"},
      {"--tp-overlap ring", {""}, {"--tp", "2"}, "tp_overlap", "ring"},
      {"--cp", {"2"}, {}, "cp", 2},
      {"--cp-method ring", {""}, {"--cp", "2"}, "cp_method", "ring"},
      {"--cp-method ulysses", {""}, {"--cp", "2"}, "cp_method", "ulysses"},
      {"--cp-ulysses", {"2"}, {"--cp", "4"}, "cp_ulysses", 2},
      {"--offload", {"optimizer"}, {}, "offload", "optimizer"},
      {"--offload-layers", {"2"}, {}, "offload_layers", 2},
      {"--recompute", {"mlp", "activation", "core_attn"}, {}, "recompute"},
      {"--recompute-fewest-layers"},
      {"--recompute-layers", {"2"}, {}, "recompute_layers", 2},
      {"--input-slots in_flight+1", {""}, {"--pp", "2"}, "input_slots", "in_flight+1"},
  };
  return all;
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream in(text);
  return {std::istream_iterator<std::string>(in), {}};
}

// What is left out of a search, with the options that are named for it.
std::map<std::string, std::vector<std::string>> left_out(const Json& json) {
  std::map<std::string, std::vector<std::string>> all;
  for (const Json& one : json.at("search").at("left_out")) all[one.at("what")] = one.at("options");
  return all;
}

// A job whose search leaves something out.
struct LeavingJob {
  std::vector<std::string> arguments;
  bool takes_layouts = true;  // NamedOption::layout
  std::string only = {};      // what options that are tried begin with
};

std::vector<LeavingJob> leaving_jobs(const std::string& unlike_nodes) {
  const std::vector<std::string> usual = {"gpt2", "--cluster", "dgx-a100", "--devices", "6", "--global-batch", "48"};
  std::vector<LeavingJob> jobs;
  // Sequences so long that ranks share them out.
  const std::vector<std::string> is_long = {"llama3.2-1b", "--cluster", "dgx-a100", "--devices", "8",
                                            "--global-batch", "8", "--seq-len", "16384"};
  for (const std::string& engine : engine_names(engines_folder())) {
    jobs.push_back({usual});
    jobs.push_back({is_long, false, "--cp"});
    for (LeavingJob* const job : {&jobs.back(), &jobs[jobs.size() - 2]})
      job->arguments.insert(job->arguments.end(), {"--engine", engine});
  }
  for (const char* const length : {"4096", "32768"})
    jobs.push_back({{"llama3-8b", "--cluster", "dgx-a100", "--devices", "16", "--global-batch", "16", "--seq-len",
                     length},
                    false});
  jobs.push_back({usual, false});
  jobs.back().arguments.insert(jobs.back().arguments.end(), {"--stage-blocks", "4,4,3,3"});
  jobs.push_back({usual, false});
  jobs.back().arguments.insert(jobs.back().arguments.end(), {"--offload", "activations"});
  jobs.push_back({{"gpt2", "--cluster", unlike_nodes, "--global-batch", "48"}, false});
  jobs.push_back({{"gpt3-175b", "--cluster", "dgx-a100", "--devices", "64", "--global-batch", "64", "--pp", "4",
                   "--memory-limit", "79 GiB"},
                  false});
  return jobs;
}

TEST_CASE("each option named for what is left out searches it under every engine, and docs/search.md lists them") {
  const Folder folder;
  const std::string unlike = folder.write(
      "unlike.yaml",
      "name: unlike\ngroups:\n"
      "  - {device: a100-sxm4-80gb, nodes: 1, node: {devices: 8, intra: nvswitch, nics: {count: 8, line_rate: 200 "
      "Gbit/s}}}\n"
      "  - {device: v100-sxm2-32gb, nodes: 1, node: {devices: 4, intra: nvlink_mesh, bandwidth: 40 GB/s, nics: {count: "
      "4, line_rate: 100 Gbit/s}}}\n"
      "network: {latency: 1 us}\n");
  const std::string help = call({"suggest", "--help"}).out;
  std::set<std::string> named;
  int searched = 0, joined = 0;
  for (const LeavingJob& job : leaving_jobs(unlike)) {
    CAPTURE(fmt::format("{}", fmt::join(job.arguments, " ")));
    const auto try_with = [&](const std::vector<std::string>& more) {
      std::vector<std::string> arguments = {"suggest"};
      arguments.insert(arguments.end(), job.arguments.begin(), job.arguments.end());
      arguments.insert(arguments.end(), more.begin(), more.end());
      arguments.insert(arguments.end(), {"--json", "-", "--quiet"});
      return call(arguments);
    };
    const auto suggest = [&](const std::vector<std::string>& more) {
      const Called called = try_with(more);
      INFO(fmt::format("{}: {}", fmt::join(more, " "), called.err));
      REQUIRE(called.code == 0);
      return Json::parse(called.out);
    };
    for (const auto& left : left_out(suggest({}))) {
      const std::string& what = left.first;
      const auto& options = left.second;
      CAPTURE(what);
      const bool has_none = what == "stages that recompute differently" || what.starts_with("other devices of ");
      CHECK((!options.empty() || has_none));
      // With one value of each option.
      std::map<std::string, std::vector<std::string>> together;
      for (const std::string& option : options) {
        CAPTURE(option);
        if (!option.starts_with(job.only)) continue;
        named.insert(option);
        CHECK(help.find(words_of(option).front() + " ") != std::string::npos);
        const auto row = std::ranges::find(named_options(), option, &NamedOption::option);
        REQUIRE(row != named_options().end());
        const auto value = std::ranges::find_if(row->values, [&](const std::string& one) {
          return &one == &row->values.back() || try_with(words_of(fmt::format("{} {}", option, one))).code == 0;
        });
        std::vector<std::string> more = words_of(option + " " + *value);
        if (try_with(more).code == 1) continue;  // searched, and nothing fits
        Json json = suggest(more);
        together[words_of(option).front()] = more;
        if (options.size() == 1) CHECK(!left_out(json).contains(what));
        if (option == "--recompute-fewest-layers")
          CHECK(json.at("search").at("space").get<std::string>().find("in as few layers as memory demands") !=
                std::string::npos);
        if (!job.takes_layouts || row->key.empty()) continue;
        more.insert(more.end(), row->layout.begin(), row->layout.end());
        json = suggest(more);
        for (const Json& plan : json.at("plans")) CHECK(plan.at(row->key) == row->of_plans.value_or(*value));
        ++searched;
      }
      if (options.size() == 1 || together.empty()) continue;
      std::vector<std::string> all;
      for (const auto& [name, words] : together) all.insert(all.end(), words.begin(), words.end());
      CAPTURE(fmt::format("{}", fmt::join(all, " ")));
      const Called called = try_with(all);
      if (called.code != 0) continue;  // an engine may have each, and not both in one layout
      CHECK(!left_out(Json::parse(called.out)).contains(what));
      ++joined;
    }
  }
  CHECK(searched > 50);
  CHECK(joined > 10);
  // The page's table.
  std::istringstream page(read_file(std::string(PARPLAN_SOURCE_DIR) + "/docs/search.md"));
  std::set<std::string> listed;
  bool is_table = false;
  for (std::string line; std::getline(page, line);) {
    is_table = line.starts_with("| left out |") || (is_table && line.starts_with("|"));
    if (!is_table) continue;
    for (std::size_t at = line.find("`--"); at != std::string::npos; at = line.find("`--", at + 1))
      listed.insert(line.substr(at + 1, line.find('`', at + 1) - at - 1));
  }
  CHECK(listed == named);
}

}  // namespace
}  // namespace parplan
