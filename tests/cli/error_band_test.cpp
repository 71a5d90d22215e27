// The band beside every predicted step, computed from published runs.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "cli/data_folder.h"
#include "cli/published_model.h"
#include "planner/base/json.h"
#include "planner/report/error_band.h"
#include "planner/validate/validate.h"
#include "tests/cli/call.h"

namespace parplan {
namespace {

struct Measured {
  std::string engine, device;
  double share = 0.0;  // of the predicted step
};

// Nearest rank.
double percentile(const std::vector<double>& sorted, double share) {
  return sorted[static_cast<std::size_t>(std::lround(share * static_cast<double>(sorted.size() - 1)))];
}

}  // namespace

TEST_CASE("the bands of errors are those of the published runs whose facts are all published") {
  const testing::Called called =
      testing::call({"validate", PARPLAN_SOURCE_DIR "/tests/data/published/runs.csv", "--json", "-", "--quiet"});
  REQUIRE(called.code == 0);
  std::vector<Measured> runs;
  const Json answer = Json::parse(called.out);
  for (const Json& row : answer.at("rows"))
    if (row.at("stated") == "exact" && row.at("error").is_number())
      runs.push_back({row.at("predicted_engine"), row.at("device"), 1.0 / (1.0 + row.at("error").get<double>())});
  REQUIRE(runs.size() > 50);
  const auto shares_of = [&](std::string_view engine, std::string_view device) {
    std::vector<double> shares;
    for (const Measured& run : runs)
      if ((engine.empty() || run.engine == engine) && (device.empty() || run.device == device))
        shares.push_back(run.share);
    std::ranges::sort(shares);
    return shares;
  };
  for (const ErrorBand& band : error_bands()) {
    CAPTURE(band.engine);
    CAPTURE(band.device);
    const std::vector<double> shares = shares_of(band.engine, band.device);
    REQUIRE(static_cast<int>(shares.size()) == band.runs);
    CHECK(band.runs >= least_runs);
    CHECK(std::abs(band.low - percentile(shares, 0.1)) < 0.0051);
    CHECK(std::abs(band.high - percentile(shares, 0.9)) < 0.0051);
  }
  // None is missing.
  const auto has_band = [&](std::string_view engine, std::string_view device) {
    return std::ranges::any_of(error_bands(),
                               [&](const ErrorBand& band) { return band.engine == engine && band.device == device; });
  };
  for (const Measured& run : runs)
    for (const std::string& device : {run.device, std::string()})
      for (const std::string& engine : {run.engine, std::string()})
        if (static_cast<int>(shares_of(engine, device).size()) >= least_runs)
          CHECK_MESSAGE(has_band(engine, device), engine << " on " << device);
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
