// `parplan sweep` from its arguments to its output; the arithmetic is tested in
// tests/planner/report/.
#include <doctest/doctest.h>

#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "cli/arguments.h"
#include "planner/base/json.h"
#include "planner/plan/objective.h"
#include "tests/cli/call.h"
#include "tests/planner/base/error_of.h"

namespace parplan {
namespace {

using namespace testing;

Json sweep_json(std::vector<std::string> arguments) {
  arguments.insert(arguments.end(), {"--json", "-", "--quiet"});
  const Called called = call(arguments);
  INFO(called.err);
  REQUIRE(called.code == 0);
  return Json::parse(called.out);
}

std::vector<std::int64_t> of_rows(const Json& json, const char* key) {
  std::vector<std::int64_t> values;
  for (const Json& row : json.at("rows")) values.push_back(row.at(key).get<std::int64_t>());
  return values;
}

TEST_CASE("each point's plan is the first that suggest finds there") {
  const Json swept =
      sweep_json({"sweep", tiny_gpt2, "--cluster", cpu_8, "--devices", "1,2,8", "--global-batch", "8,16"});
  REQUIRE(swept.at("rows").size() == 6);
  for (const Json& row : swept.at("rows")) {
    const Json suggested = sweep_json({"suggest", tiny_gpt2, "--cluster", cpu_8, "--devices",
                                    fmt::format("{}", row.at("cluster_devices").get<int>()), "--global-batch",
                                    fmt::format("{}", row.at("global_batch").get<int>()), "--top", "1"});
    const Json& plan = suggested.at("plans").at(0);
    for (const auto& part : plan.items()) {
      INFO(part.key() << " on " << row.at("cluster_devices") << " devices, batch " << row.at("global_batch"));
      CHECK(row.at(part.key()) == part.value());
    }
  }
}

TEST_CASE("what suggest tries with plans of different degrees a sweep tries, too, and searches as much context") {
  for (const std::vector<std::string>& job :
       {std::vector<std::string>{"t5-large", "--cluster", "dgx-1-v100", "--devices", "5", "--global-batch", "9",
                                 "--seq-len", "1024"},
        {"vit-base", "--cluster", "rtx-4090-8", "--devices", "6", "--global-batch", "24"},
        {"llama3-8b", "--cluster", "dgx-h100", "--devices", "64", "--global-batch", "4", "--seq-len", "16384"}}) {
    std::vector<std::string> swept = {"sweep"}, suggested = {"suggest"};
    for (std::vector<std::string>* const words : {&swept, &suggested})
      words->insert(words->end(), job.begin(), job.end());
    const Json row = sweep_json(swept).at("rows").at(0);
    const Json plan = sweep_json(suggested).at("plans").at(0);
    for (const auto& part : plan.items()) {
      CAPTURE(job.front());
      CAPTURE(part.key());
      CHECK(row.at(part.key()) == part.value());
    }
  }
}

TEST_CASE("a cluster's rows are the same whatever other clusters, of another precision, are swept before it") {
  // tiny-gpt2's 61 rows of the vocabulary are padded in bf16 alone.
  const auto memory = [](const std::string& clusters) {
    std::map<std::string, std::int64_t> found;
    const Json swept = sweep_json({"sweep", tiny_gpt2, "--cluster", clusters, "--devices", "2", "--global-batch", "8",
                                   "--dp", "1", "--tp", "2", "--micro-batch", "4"});
    for (const Json& row : swept.at("rows"))
      found[row.at("cluster").get<std::string>()] = row.at("memory_peak_bytes").get<std::int64_t>();
    REQUIRE(found.size() == 2);
    return found;
  };
  CHECK(memory(std::string(cpu_8) + ",dgx-h100") == memory(std::string("dgx-h100,") + cpu_8));
}

TEST_CASE("a sweep tries slices of products with the best layouts, as suggest does") {
  const std::vector<std::string> job = {"llama3-70b", "--cluster",      "dgx-h100", "--devices",
                                        "64",         "--global-batch", "512"};
  const auto with = [&](const char* command) {
    std::vector<std::string> arguments{command};
    arguments.insert(arguments.end(), job.begin(), job.end());
    return sweep_json(arguments);
  };
  const Json swept = with("sweep").at("rows").at(0), suggested = with("suggest").at("plans").at(0);
  CHECK(suggested.at("tp_overlap") == "ring");
  CHECK(swept.at("tp_overlap") == "ring");
  // Which layouts slices are tried with depends on what else is ranked: 0.3 % here.
  CHECK(swept.at("step_time_s").get<double>() ==
        doctest::Approx(suggested.at("step_time_s").get<double>()).epsilon(0.005));
}

TEST_CASE("a sweep goes through every combination, sizes next to each other, and trains the same at all of them") {
  const Json json = sweep_json(
      {"sweep", tiny_gpt2, "--cluster", cpu_8, "--devices", "8,2", "--global-batch", "8,16", "--seq-len", "16,32"});
  CHECK(of_rows(json, "cluster_devices") == std::vector<std::int64_t>{8, 2, 8, 2, 8, 2, 8, 2});
  CHECK(of_rows(json, "global_batch") == std::vector<std::int64_t>{8, 8, 8, 8, 16, 16, 16, 16});
  CHECK(of_rows(json, "sequence_length") == std::vector<std::int64_t>{16, 16, 32, 32, 16, 16, 32, 32});
  CHECK(json.at("inputs").at("training").at("defaults") == Json::parse(R"(["precision", "optimizer"])"));
  // The default on CPUs is 4 sequences per device: that of the largest size, at every size.
  const std::string model =
      "name: plain\nfamily: decoder\nlayers: 2\nhidden: 32\nheads: 2\nfeature: 64\nvocabulary: 64\ncontext: "
      "32\nposition: rotary\nnorm: rms_norm\nactivation: gelu_tanh\n";
  const Folder folder;
  CHECK(of_rows(sweep_json({"sweep", folder.write("plain.yaml", model), "--cluster", cpu_8, "--devices", "2,8,4"}),
                "global_batch") == std::vector<std::int64_t>{32, 32, 32});
}

TEST_CASE("clusters are compared, each at its own price") {
  const Json json = sweep_json({"sweep", "gpt2", "--cluster", "dgx-a100,dgx-h100", "--devices", "8", "--tokens", "300B",
                             "--price", "dgx-a100=1.50 USD,3 USD", "--max-candidates", "4"});
  REQUIRE(json.at("rows").size() == 2);
  CHECK(json.at("rows").at(0).at("cluster") == "dgx-a100");
  CHECK(json.at("rows").at(1).at("cluster") == "dgx-h100");
  for (const Json& row : json.at("rows")) {
    const double price = row.at("cluster") == "dgx-a100" ? 1.5 : 3.0;
    const double days = 3e11 / row.at("tokens_per_s").get<double>() / 86400.0;
    CHECK(row.at("currency") == "USD");
    CHECK(row.at("price_per_hour").get<double>() == price * row.at("devices").get<double>());
    CHECK(row.at("days").get<double>() == doctest::Approx(days));
    CHECK(row.at("cost").get<double>() == doctest::Approx(days * 24.0 * price * row.at("devices").get<double>()));
    // Datasheets: 400 W for an A100 SXM4, 700 W for an H100 SXM5.
    CHECK(row.at("energy_kwh").get<double>() == doctest::Approx(days * 24.0 * row.at("devices").get<double>() *
                                                                (row.at("cluster") == "dgx-a100" ? 0.4 : 0.7)));
  }
}

TEST_CASE("goodput is a share or a percentage, and is said") {
  const auto days = [](const std::vector<std::string>& more) {
    std::vector<std::string> arguments{"sweep", tiny_gpt2, "--cluster", cpu_8, "--devices", "4", "--tokens", "1M"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return sweep_json(arguments).at("rows").at(0).at("days").get<double>();
  };
  CHECK(days({"--goodput", "0.5"}) == doctest::Approx(2.0 * days({})));
  CHECK(days({"--goodput", "50%"}) == days({"--goodput", "0.5"}));
  CHECK(call({"sweep", tiny_gpt2, "--cluster", cpu_8, "--goodput", "90%", "--quiet"})
            .out.find("\ngoodput   90 % of the time\n") != std::string::npos);
}

TEST_CASE("a price in the cluster's file counts, --price goes before it, and suggest fills in the cost of a step") {
  const Folder folder;
  std::ifstream file(cpu_8);
  const std::string priced =
      folder.write("priced.yaml", std::string(std::istreambuf_iterator<char>(file), {}) + "price: 0.36 EUR\n");
  const auto check = [&](const std::vector<std::string>& more, double price, const char* currency) {
    std::vector<std::string> arguments{"sweep", tiny_gpt2, "--cluster", priced, "--devices", "4"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Json row = sweep_json(arguments).at("rows").at(0);
    arguments.front() = "suggest";
    const Json plan = sweep_json(arguments).at("plans").at(0);
    const double of_step = price * row.at("devices").get<double>() / 3600.0 * row.at("step_time_s").get<double>();
    CHECK(row.at("cost_per_step").get<double>() == doctest::Approx(of_step));
    CHECK(plan.at("cost_per_step") == row.at("cost_per_step"));
    CHECK(plan.at("currency") == currency);
    CHECK(row.at("currency") == currency);
  };
  check({}, 0.36, "EUR");
  check({"--price", "7.2 USD"}, 7.2, "USD");
}

TEST_CASE("where a group has no price a plan that uses it has neither cost nor currency, and a note names the group") {
  const Folder folder;
  const std::string mixed = folder.write("mixed.yaml",
                                         "name: mixed\ngroups:\n"
                                         "  - {device: a100-sxm4-80gb, node: {devices: 8, intra: nvswitch, nics: "
                                         "{count: 8, line_rate: 200 Gbit/s}}, nodes: 1, price: 2 USD}\n"
                                         "  - {device: v100-sxm2-32gb, node: {devices: 8, intra: nvlink_mesh, "
                                         "bandwidth: 40 GB/s, nics: {count: 4, line_rate: 100 Gbit/s}}, nodes: 1}\n"
                                         "network: {latency: 1 us}\n");
  const std::string missing =
      "no price is known of v100-sxm2-32gb (1 node), so that plans with devices of it have no cost: give its group a "
      "'price', or all devices one with --price";
  for (const char* command : {"suggest", "sweep"}) {
    std::vector<std::string> arguments{command, "gpt2", "--cluster", mixed,   "--max-candidates",
                                       "2",     "--dp", "16",        "--json"};
    const Called of_all = call(arguments);
    CHECK(of_all.err.find("note: mixed: " + missing + "\n") != std::string::npos);
    const Json row = Json::parse(of_all.out).at(command == std::string("sweep") ? "rows" : "plans").at(0);
    CHECK(row.at("devices") == 16);
    CHECK(row.at("cost_per_step").is_null());
    CHECK(row.at("currency").is_null());
  }
  // For the first group alone everything is known.
  const Called of_first =
      call({"suggest", "gpt2", "--cluster", mixed, "--devices", "8", "--max-candidates", "2", "--json"});
  CHECK(of_first.err.find("no price is known") == std::string::npos);
  const Json row = Json::parse(of_first.out).at("plans").at(0);
  CHECK(row.at("cost_per_step").is_number());
  CHECK(row.at("currency") == "USD");
}

TEST_CASE("a sweep's table says what was swept, and notes what is in it alone") {
  const auto notes = [](const std::string& out) {
    std::string all;
    for (const char* word : {"energy is", "knee is", "no knee", "pareto weighs", "days are"})
      if (out.find(std::string("\nnote: ") + word) != std::string::npos)
        all += std::string(all.empty() ? "" : ", ") + word;
    return all;
  };
  const std::string one = call({"sweep", "gpt2", "--cluster", "dgx-a100", "--max-candidates", "2", "--quiet"}).out;
  CHECK(one.find("\ncluster   dgx-a100 of a100-sxm4-80gb: 1 point\n") != std::string::npos);
  CHECK(notes(one) == "pareto weighs");
  const std::string several = call({"sweep", "gpt2", "--cluster", "dgx-a100,dgx-h100", "--devices", "1,2,4",
                                    "--global-batch", "8,16", "--tokens", "1B", "--max-candidates", "2", "--quiet"})
                                  .out;
  CHECK(several.find("\ncluster   dgx-a100 of a100-sxm4-80gb and dgx-h100 of h100-sxm-80gb: 12 points\ntraining  "
                     "global batch 8 and 16, sequence length 1024 (default), ") != std::string::npos);
  CHECK(notes(several).starts_with("energy is, knee is, "));
  const Called nothing =
      call({"sweep", tiny_gpt2, "--cluster", cpu_8, "--devices", "1", "--memory-limit", "1 MB", "--quiet"});
  CHECK(nothing.code == 1);
  CHECK(nothing.out.find("\nnote: ") == std::string::npos);
}

TEST_CASE("a plan is simulated at another price") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  REQUIRE(call({"suggest", tiny_gpt2, "--cluster", cpu_8, "-o", plan, "--quiet"}).code == 0);
  CHECK(sweep_json({"simulate", plan}).at("plans").at(0).at("cost_per_step").is_null());
  const Json row = sweep_json({"simulate", plan, "--price", "36 USD"}).at("plans").at(0);
  CHECK(row.at("currency") == "USD");
  CHECK(row.at("cost_per_step").get<double>() ==
        doctest::Approx(0.01 * row.at("devices").get<double>() * row.at("step_time_s").get<double>()));
}

TEST_CASE("equal sweeps give equal bytes, however threads take their points") {
  const std::vector<std::string> arguments{"sweep",           tiny_gpt2,  "--cluster", cpu_8,     "--devices",
                                           "1,2,3,4,5,6,7,8", "--tokens", "1M",        "--price", "1 USD",
                                           "--json",          "-",        "--quiet"};
  const Called first = call(arguments);
  REQUIRE(first.code == 0);
  for (int again = 0; again < 3; ++again) CHECK(call(arguments).out == first.out);
}

TEST_CASE("a point where nothing fits is a row with the reason, and with no plan at all the exit code is 1") {
  const Called some = call({"sweep", "llama3-8b", "--cluster", "dgx-a100", "--devices", "1,8", "--csv", "-", "--quiet",
                            "--max-candidates", "1"});
  CHECK(some.code == 0);
  const Folder folder;
  const std::string file = folder.path("none.json");
  const Called none =
      call({"sweep", "llama3-70b", "--cluster", "dgx-a100", "--devices", "1,2", "--json", file, "--quiet"});
  CHECK(none.code == 1);
  CHECK(none.err == "no feasible plan at any point\n");
  const Json json = Json::parse(folder.read("none.json"));
  REQUIRE(json.at("rows").size() == 2);
  for (const Json& row : json.at("rows")) {
    CHECK(row.at("step_time_s").is_null());
    CHECK(row.at("reason").get<std::string>().find(" none fits in 79.1 GiB of memory a device; the smallest needs ") !=
          std::string::npos);
  }
  CHECK(none.out.find("nothing fits") != std::string::npos);
}

TEST_CASE("what one cluster of a sweep lacks is its point's reason, and the others are planned") {
  const Called called = call({"sweep", "gpt2", "--cluster", "dgx-a100,rtx-4090-4", "--devices", "2", "--global-batch",
                              "16", "--offload", "optimizer", "--json", "-", "--quiet"});
  REQUIRE_MESSAGE(called.code == 0, called.err);
  const Json rows = Json::parse(called.out).at("rows");
  REQUIRE(rows.size() == 2);
  CHECK(rows.at(0).at("reason").is_null());
  CHECK(rows.at(1).at("step_time_s").is_null());
  CHECK(rows.at(1).at("reason").get<std::string>().starts_with("offload needs the rates of the host, and cluster "
                                                               "'rtx-4090-4' states none"));
  // What all lack is refused.
  const Called refused = call({"sweep", "gpt2", "--cluster", "rtx-4090-4", "--devices", "1,2", "--global-batch", "16",
                               "--offload", "optimizer", "--quiet"});
  CHECK(refused.code == 2);
  CHECK(refused.err.find("offload needs the rates of the host") != std::string::npos);
}

TEST_CASE("the objective decides what is best at each point") {
  const std::vector<std::string> arguments{"sweep",     tiny_gpt2, "--cluster",      cpu_8,
                                           "--devices", "8",       "--global-batch", "8"};
  const auto with = [&](const char* objective) {
    std::vector<std::string> all = arguments;
    all.insert(all.end(), {"--objective", objective});
    return sweep_json(all);
  };
  const Json fastest = sweep_json(arguments).at("rows").at(0);
  CHECK(with("time").at("rows").at(0) == fastest);
  const Json cheapest = with("cost").at("rows").at(0);
  const Json smallest = with("memory").at("rows").at(0);
  const auto device_seconds = [](const Json& row) {
    return row.at("devices").get<double>() * row.at("step_time_s").get<double>();
  };
  CHECK(device_seconds(cheapest) < device_seconds(fastest));
  CHECK(smallest.at("memory_peak_bytes").get<std::int64_t>() < fastest.at("memory_peak_bytes").get<std::int64_t>());
  CHECK(with("cost").at("inputs").at("objective") == "cost");
}

TEST_CASE("a workbook is written beside the rest, and said") {
  const Folder folder;
  const Called called = call({"sweep", tiny_gpt2, "--cluster", cpu_8, "--devices", "1,2", "-o",
                              folder.path("plans.xlsx"), "--csv", folder.path("plans.csv")});
  CHECK(called.code == 0);
  CHECK(called.err.ends_with(fmt::format("wrote {}\nwrote {}\n", folder.path("plans.csv"), folder.path("plans.xlsx"))));
  CHECK(folder.read("plans.xlsx").starts_with("PK"));
  CHECK(called.out.find("tokens/s") != std::string::npos);
  const Called absent = call({"sweep", tiny_gpt2, "--cluster", cpu_8, "--devices", "1", "--quiet", "--xlsx",
                              folder.path("absent/plans.xlsx")});
  CHECK(absent.code == 1);
  CHECK(absent.err ==
        fmt::format("error: cannot write '{}': No such file or directory\n", folder.path("absent/plans.xlsx")));
}

TEST_CASE("counts are read with their letters, and whole") {
  const auto count = [](const char* text) { return parse_count("--tokens", text); };
  CHECK(count("1") == 1);
  CHECK(count("20971520") == 20971520);
  CHECK(count("15T") == 15000000000000);
  CHECK(count("1.1T") == 1100000000000);
  CHECK(count("300B") == 300000000000);
  CHECK(count("2.5M") == 2500000);
  CHECK(count("0.5K") == 500);
  CHECK(count("1e12") == 1000000000000);
  CHECK(count("1000T") == 1000000000000000);
  for (const char* wrong :
       {"", "T", "0", "-1", "1.5", "0.0001K", "1001T", "inf", "nan", "1e400", "15 T", "15TB", "15t", "0x10"}) {
    CHECK(error_of<ConfigError>([&] { count(wrong); }) ==
          fmt::format("error: --tokens: expected a whole number from 1 to 1000T, such as '300B' (K, M, B and T are "
                      "powers of a thousand) or '1e12', found '{}'",
                      wrong));
  }
}

TEST_CASE("what a sweep cannot do is refused before anything is planned") {
  const Folder folder;
  struct Wrong {
    std::vector<std::string> arguments;
    std::string message;
  };
  const std::vector<Wrong> all{
      {{"--devices", "8,,16"}, "--devices: expected values with commas between them, found '8,,16'"},
      {{"--devices", ",8"}, "--devices: expected values with commas between them, found ',8'"},
      {{"--devices", "8,16,8"}, "--devices: 8 is listed twice; name each once"},
      {{"--devices", "8,08"}, "--devices: 8 is listed twice; name each once"},
      {{"--devices", "8,0"}, "--devices: expected a whole number from 1 to 1048576, found '0'"},
      {{"--devices", "8,12"},
       "--devices 12: cluster 'dgx-a100' has 8 devices a node and any number of nodes; allowed are 1 to 8 devices and "
       "multiples of 8"},
      {{"--global-batch", "256,256"}, "--global-batch: 256 is listed twice; name each once"},
      {{"--seq-len", "512,x"}, "--seq-len: expected a whole number from 1 to 1099511627776, found 'x'"},
      {{"--seq-len", "512,2048"},
       "sequence length 2048 is longer than the 1024 learned positions of model 'gpt2'; allowed: 1 to 1024"},
      {{"--price", "2.50"},
       "--price: expected a price of a device for an hour, such as '2.50 USD', found '2.50': it names no currency"},
      {{"--price", "1 USD,2 USD"}, "--price: every cluster has two prices; give one"},
      {{"--price", "dgx-a100=1 USD,dgx-a100=2 USD"}, "--price: cluster 'dgx-a100' has two prices; give one"},
      {{"--price", "dgx-a10=1 USD"}, "--price: 'dgx-a10' is not among --cluster dgx-a100; did you mean 'dgx-a100'?"},
      {{"--goodput", "0"},
       "--goodput: expected the share of the time in which steps are made, from 0.01 to 1, such as 0.9 or 90%, found "
       "'0'"},
      {{"--goodput", "110%"},
       "--goodput: expected the share of the time in which steps are made, from 0.01 to 1, such as 0.9 or 90%, found "
       "'110%'"},
      {{"--objective", "tim"}, "--objective: expected one of time, cost, memory, found 'tim'; did you mean 'time'?"},
      {{"-o", "plans.csv"},
       "--output: a workbook's name ends in .xlsx, found 'plans.csv'; for other formats there are --json and --csv"},
      {{"--device", "h100-sxm-80gb,k80"},
       "--device h100-sxm-80gb: cluster 'dgx-a100' already says its device, a100-sxm4-80gb; --device is for texts of "
       "nvidia-smi topo -m and NCCL's topologies"},
      {{"--devices", "24,4", "--tp", "6"},
       "4 devices of dgx-a100, batch 512, sequence length 1024: the layout needs 6 devices (tp 6); the cluster has 4; "
       "lower a degree, or give more with --devices or --nodes"},
      {{"--global-batch", "8,7", "--dp", "2"},
       "8 devices of dgx-a100, batch 7, sequence length 1024: data parallelism over 2 cannot split a global batch of 7 "
       "sequences in micro-batches of 1; legal degrees: 1, 7, or any with replica_micro_batches"},
  };
  for (const Wrong& wrong : all) {
    std::vector<std::string> arguments{"sweep", "gpt2", "--cluster", "dgx-a100", "--quiet"};
    arguments.insert(arguments.end(), wrong.arguments.begin(), wrong.arguments.end());
    INFO(fmt::format("{}", fmt::join(arguments, " ")));
    const Called called = call(arguments);
    CHECK(called.code == 2);
    CHECK(called.err == "error: " + wrong.message + "\n");
    CHECK(called.out.empty());
  }
  // A cluster with a fixed number of devices.
  CHECK(call({"sweep", tiny_gpt2, "--cluster", cpu_8, "--devices", "8,16"}).err ==
        "error: --devices 16: cluster 'cpu-8' has 8 devices a node and no network, so it is one node; allowed are 1 to "
        "8 devices\n");
  CHECK(call({"sweep", "gpt2", "--cluster", "dgx-a100,dgx-a100"}).err ==
        "error: --cluster: dgx-a100 is listed twice; name each once\n");
  std::ifstream file(cpu_8);
  const std::string copy = folder.write("copy.yaml", {std::istreambuf_iterator<char>(file), {}});
  CHECK(
      call({"sweep", tiny_gpt2, "--cluster", cpu_8 + "," + copy, "--quiet"}).err ==
      "error: --cluster: two clusters are named 'cpu-8' and have the same devices; give one of them another 'name'\n");
  // Currencies.
  CHECK(call({"sweep", "gpt2", "--cluster", "dgx-a100,dgx-h100", "--price", "dgx-a100=2 USD,dgx-h100=3 EUR"}).err ==
        "error: cluster 'dgx-a100' is priced in USD and 'dgx-h100' in EUR, and currencies cannot be compared; give "
        "prices in one with --price NAME=PRICE,...\n");
  const std::string mixed =
      folder.write("mixed.yaml",
                   "name: mixed\ngroups:\n"
                   "  - {device: a100-sxm4-80gb, node: {devices: 8, intra: nvswitch, nics: {count: 8, line_rate: 200 "
                   "Gbit/s}}, nodes: 1, price: 2 USD}\n"
                   "  - {device: v100-sxm2-32gb, node: {devices: 8, intra: nvlink_mesh, bandwidth: 40 GB/s, nics: "
                   "{count: 4, line_rate: 100 Gbit/s}}, nodes: 1, price: 1 EUR}\n"
                   "network: {latency: 1 us}\n");
  const std::string message =
      "error: cluster 'mixed': a100-sxm4-80gb costs 2 USD and v100-sxm2-32gb costs 1 EUR, and currencies cannot be "
      "added; give all prices in one currency\n";
  CHECK(call({"sweep", "gpt2", "--cluster", mixed, "--devices", "16"}).err == message);
  CHECK(call({"suggest", "gpt2", "--cluster", mixed}).err == message);
}

}  // namespace
}  // namespace parplan
