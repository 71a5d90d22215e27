// Plans every model that is shipped, and for every cluster that is shipped.
// tests/bench/first_use.sh covers all pairs, which takes minutes.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "cli/command_line.h"
#include "models/find_model.h"
#include "planner/cluster/find_cluster.h"

namespace parplan {

TEST_CASE("every model of models/ and every cluster of configs/ gives plans, or says what would make it fit") {
  const std::string source = PARPLAN_SOURCE_DIR;
  const ClusterCatalog catalog{.devices_folder = source + "/configs/devices",
                               .clusters_folder = source + "/configs/clusters"};
  const std::vector<std::string> models = zoo_names(source + "/models");
  REQUIRE(models.size() >= 12);
  for (const std::string& name : cluster_names(catalog)) {
    const Cluster cluster = find_cluster(name, catalog);
    // One node: few devices, so that the large models do not fit.
    const std::string devices = std::to_string(cluster.groups.front().devices_per_node());
    const bool grows = std::ranges::any_of(cluster.groups.front().node.vertices,
                                           [](const Vertex& vertex) { return vertex.kind == VertexKind::network; });
    std::vector<std::string> planned, refused;
    const auto begin = std::chrono::steady_clock::now();
    // All models on one cluster, some on all: small, with heterogeneous layers, and large.
    for (const std::string& model :
         name == "dgx-h100" ? models : std::vector<std::string>{"gpt2", "gemma2-9b", "llama3-405b"}) {
      REQUIRE(std::ranges::find(models, model) != models.end());
      std::ostringstream out, err;
      const int code = run_command_line({"suggest", model, "--cluster", source + "/configs/clusters/" + name + ".yaml",
                                         "--devices", devices, "--max-candidates", "4", "--csv", "-", "--quiet"},
                                        out, err);
      INFO(fmt::format("suggest {} --cluster {} --devices {}", model, name, devices));
      INFO(err.str());
      CHECK((code == 0 || code == 1));
      if (code == 0) {
        CHECK(std::ranges::count(out.str(), '\n') >= 2);  // the names of the columns, and at least one plan
        planned.push_back(model);
      } else {
        CHECK(err.str().find("no feasible plan: of ") == 0);
        CHECK(err.str().find("what would make it fit: ") != std::string::npos);
        if (grows) CHECK(err.str().find(" devices instead of " + devices) != std::string::npos);
        refused.push_back(model);
      }
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    MESSAGE(fmt::format("{} x {}: {} models planned, {} do not fit ({:.1f} s)", devices, name, planned.size(),
                        refused.size(), seconds));
    CHECK(std::ranges::find(planned, "gpt2") != planned.end());
  }
}

}  // namespace parplan
