// The band beside every predicted step, computed from published runs.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "planner/base/json.h"
#include "planner/report/error_band.h"
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
    return std::ranges::any_of(error_bands(), [&](const ErrorBand& band) {
      return band.engine == engine && band.device == device;
    });
  };
  for (const Measured& run : runs)
    for (const std::string& device : {run.device, std::string()})
      for (const std::string& engine : {run.engine, std::string()})
        if (static_cast<int>(shares_of(engine, device).size()) >= least_runs)
          CHECK_MESSAGE(has_band(engine, device), engine << " on " << device);
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
