// The error that explain states, computed from published steps.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <utility>
#include <vector>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/base/file.h"
#include "planner/cluster/find_cluster.h"
#include "planner/explain/published_error.h"
#include "planner/explain/sensitivity.h"
#include "planner/parallel/cut_stages.h"
#include "planner/suggest.h"

namespace parplan {
namespace {

const std::string source = PARPLAN_SOURCE_DIR;

struct PublishedRun {
  int dp = 0, tp = 0, pp = 0;
  std::int64_t micro_batch = 0;
  double seconds = 0.0;
};

std::vector<PublishedRun> published_runs(const std::string& path) {
  std::istringstream lines(read_file(path));
  std::vector<PublishedRun> runs;
  bool header = true;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with('#') || std::exchange(header, false)) continue;
    std::ranges::replace(line, ',', ' ');
    std::istringstream words(line);
    PublishedRun run;
    words >> run.dp >> run.tp >> run.pp >> run.micro_batch >> run.seconds;
    REQUIRE(words);
    runs.push_back(run);
  }
  return runs;
}

TEST_CASE("the stated error is that of the published steps of GPT-3 175B on 512 A100") {
  const OpGraph graph = build_graph(load_model(source + "/models/gpt3-175b.yaml", "").spec, 2048);
  Cluster cluster = find_cluster("dgx-a100", {source + "/configs/devices", source + "/configs/clusters"},
                                 {.device = {}, .network = {}, .devices = 512, .nodes = {}});
  // 800 Gbit/s per node instead of 1600.
  cluster = varied(cluster, Resource::network, 0.5);
  const std::vector<PublishedRun> runs = published_runs(source + "/tests/data/published/vtrain-175b.csv");
  double least = 1e9;
  double most = -1e9;
  for (const PublishedRun& run : runs) {
    SuggestRequest request;
    request.graph = &graph;
    request.cluster = cluster;
    request.training.global_batch = 1536;
    request.training.sequence_length = 2048;
    request.training.precision = DataType::fp16;
    request.layout[Choice::dp] = run.dp;
    request.layout[Choice::tp] = run.tp;
    request.layout[Choice::pp] = run.pp;
    request.layout[Choice::micro_batch] = run.micro_batch;
    request.layout[Choice::recompute] = Recompute::full;
    const double error = simulate_layout(request).prediction.time.total().value / run.seconds - 1.0;
    INFO(fmt::format("dp {} tp {} pp {} micro-batch {}: {:+.3f}", run.dp, run.tp, run.pp, run.micro_batch, error));
    CHECK(error > -0.3);
    CHECK(error < 0.0);
    least = std::min(least, error);
    most = std::max(most, error);
  }
  const ModelError stated = *model_error(cluster);
  CHECK(stated.runs == static_cast<int>(runs.size()));
  // As explain prints them.
  CHECK(fmt::format("{:.1f} to {:.1f}", 100.0 * least, 100.0 * most) ==
        fmt::format("{:.1f} to {:.1f}", 100.0 * stated.least, 100.0 * stated.most));
}

TEST_CASE("no error is stated for devices of which no published steps are known") {
  for (const std::string& name : {source + "/tests/data/clusters/cpu-8.yaml", std::string("mi300x-8"),
                                  std::string("gaudi2-8"), std::string("dgx-h100")}) {
    INFO(name);
    CHECK(!model_error(find_cluster(name, {source + "/configs/devices", source + "/configs/clusters"}, {})));
  }
}

}  // namespace
}  // namespace parplan
