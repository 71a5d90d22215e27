#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "planner/base/file.h"
#include "planner/base/json.h"
#include "planner/plan/layout_choices.h"
#include "planner/plan/plan.h"
#include "planner/report/plan_row.h"
#include "tests/cli/call.h"

namespace parplan {
namespace {

using namespace testing;

// What is typed for each choice, in addition to dp 2, tp 2 and pp 2.
const std::map<std::string_view, std::vector<std::string>> typed = {
    {"dp", {"2"}},
    {"tp", {"2"}},
    {"pp", {"2"}},
    {"cp", {"2"}},
    {"cp_method", {"all_gather", "ulysses", "ring"}},
    {"cp_ulysses", {"2"}},
    {"mesh_order", {"dp-tp-pp", "tp-dp-pp"}},
    {"sequence_parallel", {"true"}},
    {"zero_stage", {"0", "1", "2", "3"}},
    {"dp_shard", {"2"}},
    {"replica_micro_batches", {"20,12", "3,1"}},
    {"micro_batch", {"1", "2"}},
    {"schedule", {"gpipe", "1f1b"}},
    {"virtual_stages", {"2", "3"}},
    {"micro_batch_group", {"2", "4"}},
    {"recompute", {"none", "full"}},
    {"recompute_layers", {"1", "2"}},
    {"stage_blocks", {"1,5", "4,2"}},
    {"tied_gradients", {"together", "apart"}},
    {"input_slots", {"in_flight", "in_flight+1"}},
    {"offload",
     {"none", "optimizer", "activations", "optimizer+activations", "optimizer+gradients",
      "optimizer+gradients+activations"}},
    {"offload_layers", {"1", "2"}},
    {"dp_method", {"all_reduce", "master"}},
    {"tp_overlap", {"none", "ring"}},
    {"prefetch_depth", {"0", "1", "2"}},
    {"gather_unit", {"block", "parameter"}},
};

std::string in_json(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

TEST_CASE("the best plan does not depend on how few are ranked") {
  const std::vector<std::string> suggest = {"suggest",     "bert-large",     "--cluster", "titan-rtx-2-nvlink",
                                            "--global-batch", "4", "--json",    "-",         "--top"};
  const auto ranked = [&](const std::string& top) {
    std::vector<std::string> arguments = suggest;
    arguments.push_back(top);
    return Json::parse(call(arguments).out).at("plans");
  };
  const Json five = ranked("5"), one = ranked("1");
  CHECK(one.size() == 1);
  CHECK(one.at(0).at("plan_id") == five.at(0).at("plan_id"));
  CHECK(one.at(0).at("step_time_s") == five.at(0).at("step_time_s"));
}

TEST_CASE("simulate says what a layout has no use for") {
  const std::string folder = PARPLAN_SOURCE_DIR "/tests/data";
  const auto said = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments = {"simulate", folder + "/models/tiny-llama.yaml", "--cluster",
                                          folder + "/clusters/cpu-two-kinds.yaml", "--global-batch", "16", "--tp", "1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return call(arguments).out;
  };
  const std::string note = "note: replicas have equally many micro-batches";
  CHECK(said({"--dp", "8", "--pp", "1", "--zero", "3", "--balance-replicas"}).find(note) != std::string::npos);
  CHECK(said({"--dp", "8", "--pp", "1"}).find("note: ") == std::string::npos);
  CHECK(said({"--dp", "8", "--pp", "1", "--schedule", "gpipe"}).find("note: --schedule gpipe does not apply to dp8") !=
        std::string::npos);
}

TEST_CASE("a single micro-batch runs by 1F1B, and a value that another implies is not said to be of no use") {
  const std::vector<std::string> pipeline = {"suggest", "llama3-8b",   "--cluster", "dgx-h100", "--devices", "4",
                                             "--dp",    "1",           "--tp",      "1",        "--pp",      "4",
                                             "--global-batch", "1",    "--seq-len", "2048",     "--json",    "-"};
  const auto plans_of = [](std::vector<std::string> arguments) { return Json::parse(call(arguments).out).at("plans"); };
  std::vector<std::string> gpipe = pipeline;
  gpipe.insert(gpipe.end(), {"--schedule", "gpipe"});
  const Json best = plans_of(pipeline).at(0), asked = plans_of(gpipe).at(0);
  CHECK(best.at("schedule") == "1f1b");
  CHECK(asked.at("schedule") == "gpipe");
  CHECK(best.at("step_time_s") == asked.at("step_time_s"));
  CHECK(best.at("memory_peak_bytes") == asked.at("memory_peak_bytes"));
  const Called called =
      call({"suggest", "gpt2", "--cluster", "dgx-a100", "--devices", "8", "--schedule", "dualpipe_v"});
  CHECK(called.code == 0);
  CHECK(called.out.find("does not apply") == std::string::npos);
}

TEST_CASE("every choice of a layout has an option, which plan.yaml and the row of results tell") {
  for (const ChoiceRow& row : choice_rows()) {
    CAPTURE(row.key);
    REQUIRE(typed.contains(row.key));
    for (const std::string& text : typed.at(row.key)) {
      Folder folder;
      std::vector<std::string> arguments{"simulate", tiny_gpt2, "--cluster",           cpu_8,    "--json",
                                         "-",        "-o",      folder.path("p.yaml"), "--quiet"};
      // Context parallelism instead of a pipeline: there are eight cores.
      const bool with_context = row.choice == Choice::cp || row.choice == Choice::cp_method;
      const bool in_exchanging_groups = row.choice == Choice::cp_ulysses;
      const bool in_groups = row.choice == Choice::dp_shard;
      const bool has_master = text == "master";  // of whole replicas
      if (in_exchanging_groups) arguments.insert(arguments.end(), {"--cp", "4", "--dp", "2", "--tp", "1", "--pp", "1"});
      for (const Choice degree : {Choice::dp, Choice::tp, with_context ? Choice::cp : Choice::pp})
        if (degree != row.choice && !in_exchanging_groups) {
          arguments.emplace_back(row_of(degree).option);
          arguments.emplace_back(has_master && degree != Choice::dp ? "1"
                                 : !in_groups                       ? "2"
                                 : degree == Choice::dp             ? "4"
                                 : degree == Choice::tp             ? "2"
                                                                    : "1");
        }
      if (in_groups) arguments.insert(arguments.end(), {"--zero", "2"});
      if (row.choice == Choice::micro_batch_group) arguments.insert(arguments.end(), {"--virtual-stages", "2"});
      if (row.choice == Choice::tp_overlap) arguments.emplace_back("--sequence-parallel");
      if (row.choice == Choice::prefetch_depth || row.choice == Choice::gather_unit)
        arguments.insert(arguments.end(), {"--zero", "3"});
      arguments.emplace_back(row.option);
      if (!std::holds_alternative<bool>(row.get(ParallelSpec{}))) arguments.push_back(text);
      const Called called = call(arguments);
      INFO(called.err);
      REQUIRE(called.code == 0);
      const Plan plan = read_plan(read_file(folder.path("p.yaml")), "p.yaml");
      const bool is_list = text.find(',') != std::string::npos;
      const std::size_t comma = is_list ? text.find(',') + 1 : 0;
      CHECK(write_value(row.get(plan.spec)) ==
            (is_list ? "[" + text.substr(0, comma) + " " + text.substr(comma) + "]" : text));
      // The cut is shown in layers: without embedding and head.
      const Json shown = Json::parse(called.out).at("plans").at(0);
      if (row.choice == Choice::stage_blocks)
        CHECK(in_json(shown.at("stage_layers")) == stage_layers(plan.spec));
      else
        CHECK(in_json(shown.at(std::string(row.key))) == text);
    }
  }
}

TEST_CASE("replicas on unlike devices get the micro-batches that suit them, and explain says which decides") {
  const std::string two_kinds = std::string(PARPLAN_SOURCE_DIR) + "/tests/data/clusters/cpu-two-kinds.yaml";
  Folder folder;
  const auto simulate = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments{"simulate", tiny_gpt2, "--cluster", two_kinds, "--global-batch", "64",
                                       "--tp",     "2",       "--pp",      "1",       "--json",         "-",
                                       "--quiet",  "-o",      folder.path("p.yaml")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return call(arguments);
  };
  const auto step_of = [](const Called& called) {
    return Json::parse(called.out).at("plans").at(0).at("step_time_s").get<double>();
  };
  const Called alike = simulate({"--dp", "4", "--micro-batch", "1"});
  REQUIRE(alike.code == 0);
  const Called balanced = simulate({"--dp", "4", "--micro-batch", "1", "--balance-replicas"});
  INFO(balanced.err);
  REQUIRE(balanced.code == 0);
  const std::vector<int> shares =
      read_plan(read_file(folder.path("p.yaml")), "p.yaml").spec.replica_micro_batches;
  REQUIRE(shares.size() == 4);
  CHECK(shares[0] + shares[1] + shares[2] + shares[3] == 64);
  CHECK(shares[0] > 2 * shares[2]);
  CHECK(step_of(balanced) < 0.8 * step_of(alike));
  const Called explained = call({"explain", folder.path("p.yaml"), "--quick", "--json", folder.path("e.json")});
  INFO(explained.out);
  REQUIRE(explained.code == 0);
  // What replicas compute on the critical path; the first two are on the fast cores.
  const Json reasons = Json::parse(read_file(folder.path("e.json")));
  std::map<std::string, double> computed{{"One fast core", 0.0}, {"One slow core", 0.0}};
  for (const Json& work : reasons.at("critical_path"))
    if (work.at("label") == "compute" || work.at("label") == "recompute")
      computed[work.at("replica") < 2 ? "One fast core" : "One slow core"] += work.at("time_s").get<double>();
  const double all = computed.at("One fast core") + computed.at("One slow core");
  const std::string decides =
      computed.at("One fast core") >= computed.at("One slow core") ? "One fast core" : "One slow core";
  REQUIRE(reasons.at("deciding_devices").size() == 2);
  CHECK(reasons.at("deciding_devices")[0].at("device") == decides);
  for (const Json& kind : reasons.at("deciding_devices"))
    CHECK(kind.at("critical_path_share").get<double>() ==
          doctest::Approx(computed.at(kind.at("device").get<std::string>()) / all));
  const std::string said = fmt::format("which device decides: {}, with {:.1f} % of the computation on the critical",
                                       decides, 100.0 * computed.at(decides) / all);
  CHECK(explained.out.find(said) != std::string::npos);

  CHECK(simulate({"--replica-micro-batches", "20,12", "--balance-replicas"}).err ==
        "error: --balance-replicas chooses what --replica-micro-batches gives; leave one of them out\n");
  CHECK(simulate({"--dp", "4", "--micro-batch", "1", "--balance-replicas", "--zero", "2"}).code == 0);
  const Called of_other = simulate({"--replica-micro-batches", "40,24", "--engine", "megatron-2021"});
  CHECK(of_other.code == 2);
  CHECK(of_other.err.find("gives all replicas equally many micro-batches: replica_micro_batches must be left out") !=
        std::string::npos);
}

}  // namespace
TEST_CASE("unlike replicas send what their plan promised, whichever of them are alike") {
  const std::string source = PARPLAN_SOURCE_DIR;
  Folder folder;
  write_file_atomically(folder.path("data"), std::string(4096, '\1'));
  for (const char* shares : {"3,2,1", "2,2,1", "1,1,4", "4,3,2,1"}) {
    CAPTURE(shares);
    int sequences = 0, replicas = 0;
    std::istringstream numbers(shares);
    for (std::string number; std::getline(numbers, number, ','); ++replicas) sequences += std::stoi(number);
    const Called planned = call({"simulate", tiny_gpt2, "--cluster", source + "/tests/data/clusters/cpu-8.yaml", "--dp",
                                 std::to_string(replicas), "--tp", "1", "--pp", "1", "--replica-micro-batches", shares,
                                 "--micro-batch", "1", "--global-batch", std::to_string(sequences), "--quiet", "-o",
                                 folder.path("p.yaml")});
    INFO(planned.err);
    REQUIRE(planned.code == 0);
    const Called ran = call({"run", folder.path("p.yaml"), "--data", folder.path("data"), "--steps", "1", "--quiet"});
    INFO(ran.err);
    CHECK(ran.code == 0);
  }
}

TEST_CASE("choices of data-parallel ranks count where dp follows from the other degrees") {
  const auto simulate = [](const std::vector<std::string>& more) {
    std::vector<std::string> arguments{"simulate", "llama3-8b", "--cluster", "aws-p4d", "--devices", "32", "--tp", "1",
                                       "--pp",     "1",         "--micro-batch", "1", "--global-batch", "64",
                                       "--seq-len", "1024",     "--recompute", "full", "--json", "-", "--quiet"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return call(arguments);
  };
  for (const std::vector<std::string>& choice : {std::vector<std::string>{"--zero", "3", "--dp-shard", "8"},
                                                 std::vector<std::string>{"--zero", "3", "--prefetch-depth", "2"}}) {
    CAPTURE(choice);
    std::vector<std::string> with_dp = choice;
    with_dp.insert(with_dp.end(), {"--dp", "32"});
    const Called given = simulate(with_dp);
    REQUIRE(given.code == 0);
    CHECK(simulate(choice).out == given.out);
    CHECK(simulate({"--zero", "3"}).out != given.out);
  }
  CHECK(simulate({"--zero", "3", "--dp-shard", "3"}).code == 2);
  CHECK(simulate({"--zero", "0", "--dp-shard", "8"}).err ==
        simulate({"--zero", "0", "--dp-shard", "8", "--dp", "32"}).err);
}

TEST_CASE("every plan has the stages that were given") {
  const Called found = call({"suggest", "llama3-8b", "--cluster", "dgx-h100", "--devices", "16", "--global-batch", "64",
                             "--seq-len", "2048", "--stage-blocks", "10,24", "--json", "-", "--quiet"});
  INFO(found.err);
  REQUIRE(found.code == 0);
  const Json plans = Json::parse(found.out).at("plans");
  CHECK(plans.size() > 1);
  for (const Json& plan : plans) {
    CHECK(plan.at("stage_layers") == "9,23");
  }
}

TEST_CASE("what was given and does not apply is said") {
  const auto notes = [](const std::vector<std::string>& more) {
    std::vector<std::string> arguments{"suggest", "llama3-8b", "--cluster", "dgx-h100", "--devices", "16",
                                       "--global-batch", "64", "--seq-len", "2048", "--json", "-", "--quiet"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Called called = call(arguments);
    INFO(called.err);
    REQUIRE(called.code == 0);
    return Json::parse(called.out).at("notes").dump();
  };
  const std::string of_stages = "--virtual-stages 4 does not apply to dp";
  CHECK(notes({"--pp", "1", "--virtual-stages", "4"}).find(of_stages) != std::string::npos);
  CHECK(notes({"--pp", "2", "--schedule", "interleaved", "--virtual-stages", "4"}).find("not apply") ==
        std::string::npos);
}

}  // namespace parplan
