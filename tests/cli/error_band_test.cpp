// The band beside every predicted step, computed from published runs.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/data_folder.h"
#include "cli/published_model.h"
#include "planner/base/json.h"
#include "planner/graph/engine_file.h"
#include "planner/report/error_band.h"
#include "planner/validate/validate.h"
#include "tests/cli/call.h"

namespace parplan {
namespace {

// Nearest rank.
double percentile(const std::vector<double>& sorted, double share) {
  return sorted[static_cast<std::size_t>(std::lround(share * static_cast<double>(sorted.size() - 1)))];
}

}  // namespace

namespace {

struct Measured {
  std::string engine, device;
  int devices = 0;
  bool exact = false;
  double share = 0.0;  // of the predicted step
};

std::vector<Measured> measured_runs() {
  std::vector<Measured> runs;
  for (const ValidatedRun& one : validate(
           read_published_runs(PARPLAN_SOURCE_DIR "/tests/data/published/runs.csv"),
           {.catalog = cluster_catalog(), .engines = engines_folder(), .engine = {}}, graph_of_published, 0, nullptr))
    if (const std::optional<double> error = one.step_error())
      runs.push_back({one.engine, one.run.device, static_cast<int>(one.run.devices.value()), one.assumed.empty(),
                      1.0 / (1.0 + *error)});
  return runs;
}

// Runs whose facts are all published, where they are enough.
std::vector<Measured> evidence(std::vector<Measured> runs) {
  if (std::ranges::count_if(runs, &Measured::exact) >= least_runs)
    std::erase_if(runs, [](const Measured& run) { return !run.exact; });
  return runs;
}

// The band of groups of runs that weigh the same. Runs beyond either end have a tenth of the weight
// at most, and no other end that is nearer leaves so little.
ErrorBand band_of(const std::vector<std::vector<Measured>>& groups) {
  std::vector<std::pair<double, double>> shares;  // and their weights
  ErrorBand band;
  band.fewest_devices = std::numeric_limits<int>::max();
  for (const std::vector<Measured>& group : groups)
    for (const Measured& run : group) {
      shares.emplace_back(run.share, 1.0 / static_cast<double>(group.size() * groups.size()));
      ++band.runs;
      band.assumed += !run.exact;
      band.fewest_devices = std::min(band.fewest_devices, run.devices);
      band.most_devices = std::max(band.most_devices, run.devices);
    }
  std::ranges::sort(shares);
  const double beyond = band.is_of_few() ? 0.0 : 0.1 + 1e-9;
  double below = shares.front().second, above = shares.back().second;
  std::size_t low = 0, high = shares.size() - 1;
  while (below <= beyond) below += shares[++low].second;
  while (above <= beyond) above += shares[--high].second;
  band.low = shares[low].first;
  band.high = shares[high].first;
  return band;
}

}  // namespace

TEST_CASE("the bands of errors are those of published runs, of assumed ones where others are too few") {
  const std::vector<Measured> runs = measured_runs();
  REQUIRE(runs.size() > 200);
  std::set<std::string> engines{""}, devices{""};
  for (const Measured& run : runs) {
    engines.insert(run.engine);
    devices.insert(run.device);
  }
  int expected = 0;
  std::string listed;  // as error_band.cpp has them
  const auto check = [&](const std::string& engine, const std::string& device, const RunSize* size) {
    // By engine and device, of those that are asked for.
    std::map<std::pair<std::string, std::string>, std::vector<Measured>> groups;
    for (const Measured& run : runs) {
      const bool is_of = (engine.empty() || run.engine == engine) && (device.empty() || run.device == device) &&
                         (size == nullptr || (size->fewest <= run.devices && run.devices <= size->most));
      if (!is_of) continue;
      groups[engine.empty() ? std::pair(run.engine, run.device) : std::pair(engine, device)].push_back(run);
    }
    std::vector<std::vector<Measured>> each;
    for (const auto& [of, group] : groups) each.push_back(evidence(group));
    if (each.empty()) return;
    ErrorBand band = band_of(each);
    // What is known of an engine at all counts, however little.
    if (band.is_of_few() && (engine.empty() || !device.empty())) return;
    ++expected;
    const std::string_view name = size == nullptr ? "" : size->name;
    listed += fmt::format("    ErrorBand{{\"{}\", \"{}\", \"{}\", {}, {}, {}, {}, {:.2f}, {:.2f}}},\n", engine, device,
                          name, band.runs, band.assumed, band.fewest_devices, band.most_devices, band.low, band.high);
    CAPTURE(engine);
    CAPTURE(device);
    CAPTURE(name);
    const auto stated = std::ranges::find_if(error_bands(), [&](const ErrorBand& one) {
      return one.engine == engine && one.device == device && one.size == name;
    });
    const bool is_stated = stated != error_bands().end();
    CHECK(is_stated);
    if (!is_stated) return;
    CHECK(stated->runs == band.runs);
    CHECK(stated->assumed == band.assumed);
    CHECK(stated->fewest_devices == band.fewest_devices);
    CHECK(stated->most_devices == band.most_devices);
    CHECK(std::abs(stated->low - band.low) < 0.0051);
    CHECK(std::abs(stated->high - band.high) < 0.0051);
  };
  const auto all_but_any = [](const std::set<std::string>& names) {
    std::set<std::string> named = names;
    named.erase("");
    return named;
  };
  for (const std::string& engine : all_but_any(engines))
    for (const std::string& device : all_but_any(devices))
      for (const RunSize& size : run_sizes) check(engine, device, &size);
  for (const std::string& engine : all_but_any(engines))
    for (const std::string& device : all_but_any(devices)) check(engine, device, nullptr);
  for (const std::string& engine : all_but_any(engines)) check(engine, "", nullptr);
  for (const std::string& device : all_but_any(devices)) check("", device, nullptr);
  check("", "", nullptr);
  const bool as_many = expected == static_cast<int>(error_bands().size());
  CHECK_MESSAGE(as_many, "planner/report/error_band.cpp should have:\n" << listed);
}

Cluster nodes_of_eight(const std::string& device, int devices) {
  Cluster cluster;
  NodeGroup& group = cluster.groups.front();
  group.device.backend = BackendKind::cuda;
  group.device.name = device;
  group.node.devices.resize(8);
  group.nodes = (devices + 7) / 8;
  return cluster;
}

TEST_CASE("a prediction has the band of the devices that it takes, whatever else the cluster has") {
  Cluster cluster = nodes_of_eight("h100-sxm-80gb", 64);
  Engine nemo;
  nemo.name = "nemo";
  const StepBand alone = *step_band(nemo, cluster, 64);
  cluster.groups.push_back(nodes_of_eight("v100-sxm2-32gb", 16).groups.front());
  const StepBand first = *step_band(nemo, cluster, 64), all = *step_band(nemo, cluster, 80);
  CHECK(words_of(first) == words_of(alone));
  CHECK(all.device == "h100-sxm-80gb+v100-sxm2-32gb");
  CHECK(words_of(all) != words_of(alone));
}

TEST_CASE("a prediction has the band of its engine, device and size, or of all that is known where there is none") {
  const auto band_on = [](const std::string& engine, const std::string& device, int devices) {
    const Cluster cluster = nodes_of_eight(device, devices);
    Engine of;
    of.name = engine;
    return *step_band(of, cluster, devices);
  };
  const auto stated = [](std::string_view engine, std::string_view device, std::string_view size) {
    return *std::ranges::find_if(error_bands(), [&](const ErrorBand& one) {
      return one.engine == engine && one.device == device && one.size == size;
    });
  };
  const auto check_one = [&](const StepBand& band, const ErrorBand& row) {
    REQUIRE(band.spans.size() == 1);
    CHECK(band.low == row.low);
    CHECK(band.high == row.high);
    CHECK(band.spans.front().size == row.size);
  };
  const char* const deepspeed = "megatron-deepspeed";
  check_one(band_on(deepspeed, "a100-sxm4-80gb", 256), stated(deepspeed, "a100-sxm4-80gb", "some nodes"));
  check_one(band_on(deepspeed, "a100-sxm4-80gb", 4096), stated(deepspeed, "a100-sxm4-80gb", "many nodes"));
  check_one(band_on("nemo", "h100-sxm-80gb", 8), stated("nemo", "h100-sxm-80gb", ""));
  CHECK(words_of(band_on(deepspeed, "a100-sxm4-80gb", 4096))
            .ends_with(" of their prediction, none of them on as many"));
  CHECK(words_of(band_on("megatron-2021", "a100-sxm4-80gb", 8))
            .ends_with(" of their prediction, none of them on as few"));
  CHECK(words_of(band_on("nemo", "h100-sxm-80gb", 64)).ends_with(" of their prediction"));
  const ErrorBand all = stated("", "", "");
  // Three runs are known of nanotron, and none on such devices.
  const StepBand few = band_on("nanotron", "v100-sxm2-32gb", 8);
  const ErrorBand own = stated("nanotron", "", "");
  CHECK(own.is_of_few());
  REQUIRE(few.spans.size() == 2);
  CHECK(few.low == std::min(own.low, all.low));
  CHECK(few.high == std::max(own.high, all.high));
  const std::string words = words_of(few);
  CHECK(words.starts_with("fewer than 8 published runs of nanotron on v100-sxm2-32gb: "));
  CHECK(words.find(" of a prediction spans the 3 of nanotron (1.10 to 1.34; facts of all are assumed), 8 of 10 of "
                   "all ") != std::string::npos);
  // No band that spans others is narrower than the one of all.
  for (const char* const device : {"h100-sxm-80gb", "a100-sxm4-80gb", "mi300x"}) {
    const StepBand none = band_on("parplan", device, 512);
    CHECK(none.low <= all.low);
    CHECK(none.high >= all.high);
    CHECK(none.spans.size() == (std::string_view(device) == "mi300x" ? 1 : 2));
  }
}

TEST_CASE("a sweep's table has a line for each band of its steps") {
  const auto lines = [](const std::string& devices) {
    const testing::Called called =
        testing::call({"sweep", "gpt2", "--cluster", "dgx-a100", "--devices", devices, "--global-batch", "64",
                       "--seq-len", "512", "--engine", "megatron-2022", "--dp", "8", "--tp", "1", "--quiet"});
    CHECK(called.code == 0);
    std::vector<std::string> found;
    std::istringstream text(called.out);
    for (std::string line; std::getline(text, line);)
      if (line.starts_with("step: ") || line.starts_with("step on ")) found.push_back(line);
    return found;
  };
  const auto words = [](int devices) {
    const Cluster cluster = nodes_of_eight("a100-sxm4-80gb", devices);
    return words_of(*step_band(find_engine("megatron-2022", engines_folder()), cluster, devices));
  };
  CHECK(lines("8") == std::vector<std::string>{"step: " + words(8)});
  CHECK(lines("8,16,32") ==
        std::vector<std::string>{"step on 8 devices: " + words(8), "step on 16, 32 devices: " + words(16)});
}

TEST_CASE("spreads of pairs are those of the published runs of one job whose facts are all published") {
  std::vector<ValidatedRun> runs = validate(read_published_runs(PARPLAN_SOURCE_DIR "/tests/data/published/runs.csv"),
                                            {.catalog = cluster_catalog(), .engines = engines_folder(), .engine = {}},
                                            graph_of_published, 0, nullptr);
  std::erase_if(runs, [](const ValidatedRun& one) { return !one.assumed.empty() || !one.step_error(); });
  struct Pair {
    std::string engine, device;
    std::size_t job = 0;
    double ratio = 1.0;  // of one's error over the other's, at least 1
  };
  std::vector<Pair> pairs;
  const std::vector<std::vector<std::size_t>> jobs = jobs_of(runs);
  for (std::size_t j = 0; j < jobs.size(); ++j)
    for (const std::size_t a : jobs[j])
      for (const std::size_t b : jobs[j]) {
        if (a >= b) continue;
        const double ratio = (1.0 + *runs[a].step_error()) / (1.0 + *runs[b].step_error());
        pairs.push_back({runs[a].engine, runs[a].run.device, j, std::max(ratio, 1.0 / ratio)});
      }
  struct Chosen {
    std::vector<double> ratios;
    std::set<std::size_t> jobs;
  };
  const auto chosen = [&](std::string_view engine, std::string_view device) {
    Chosen result;
    for (const Pair& pair : pairs)
      if ((engine.empty() || pair.engine == engine) && (device.empty() || pair.device == device)) {
        result.ratios.push_back(pair.ratio);
        result.jobs.insert(pair.job);
      }
    std::ranges::sort(result.ratios);
    return result;
  };
  for (const PairSpread& spread : pair_spreads()) {
    CAPTURE(spread.engine);
    CAPTURE(spread.device);
    const Chosen of = chosen(spread.engine, spread.device);
    REQUIRE(static_cast<int>(of.ratios.size()) == spread.pairs);
    CHECK(static_cast<int>(of.jobs.size()) == spread.jobs);
    CHECK(spread.pairs >= least_pairs);
    CHECK(spread.jobs >= least_jobs);
    CHECK(std::abs(1.0 + spread.spread - percentile(of.ratios, 0.8)) < 0.00051);
  }
  // None is missing.
  for (const Pair& pair : pairs)
    for (const std::string& device : {pair.device, std::string()})
      for (const std::string& engine : {pair.engine, std::string()}) {
        const Chosen of = chosen(engine, device);
        if (static_cast<int>(of.ratios.size()) < least_pairs || static_cast<int>(of.jobs.size()) < least_jobs) continue;
        CHECK_MESSAGE(std::ranges::any_of(
                          pair_spreads(),
                          [&](const PairSpread& spread) { return spread.engine == engine && spread.device == device; }),
                      engine << " on " << device);
      }
}

TEST_CASE("the default headroom is how far published runs went beyond their predicted memory") {
  const testing::Called called =
      testing::call({"validate", PARPLAN_SOURCE_DIR "/tests/data/published/runs.csv", "--json", "-", "--quiet"});
  REQUIRE(called.code == 0);
  std::vector<double> shares;  // of the predicted memory
  int refused = 0, called_fits = 0;
  const Json answer = Json::parse(called.out);
  for (const Json& row : answer.at("rows")) {
    if (row.at("stated") == "exact" && row.at("memory_error").is_number())
      shares.push_back(1.0 / (1.0 + row.at("memory_error").get<double>()));
    if (!row.at("skipped").is_null()) continue;
    refused += row.at("outcome") != "oom" && row.at("memory_verdict") == "does_not_fit";
    called_fits += row.at("outcome") == "oom" && row.at("memory_verdict") == "fits";
  }
  REQUIRE(shares.size() > 30);
  std::ranges::sort(shares);
  Cluster cluster;
  cluster.groups.front().device.backend = BackendKind::cpu;
  CHECK(memory_headroom({}, cluster) == 0.0);
  cluster.groups.front().device.backend = BackendKind::cuda;
  CHECK(std::abs(memory_headroom({}, cluster) - (1.0 - 1.0 / percentile(shares, 0.9))) < 0.0051);
  // There are 6 and 213 such runs (docs/accuracy.md).
  CHECK(called_fits <= 1);
  CHECK(refused <= 20);
}

}  // namespace parplan
