#include <string>
#include <vector>

#include <fmt/format.h>

#include "planner/base/yaml.h"
#include "planner/cluster/cluster.h"
#include "planner/cost/calibration.h"
#include "tests/cli/call.h"

namespace parplan {
namespace {

using namespace testing;

TEST_CASE("measuring the CPU writes a cluster to plan with and a device with all that was timed") {
  const Folder folder;
  const std::string cluster_file = folder.path("cluster.yaml");
  const std::string device_file = folder.path("device.yaml");
  const Called called =
      call({"measure", "--device", "cpu", "--budget", "400ms", "-o", cluster_file, "--write-device", device_file});
  REQUIRE(called.code == 0);
  CHECK(called.err.starts_with("measuring cpu, about 400 ms ...\n"));
  CHECK(called.err.ends_with("wrote " + cluster_file + "\nwrote " + device_file + "\n"));
  CHECK(called.out.starts_with("parplan 0.1.0 measure --device cpu on "));
  CHECK(called.out.find("\nlaunch ") != std::string::npos);

  const Cluster cluster = read_cluster(YamlNode::load(cluster_file));
  REQUIRE(cluster.groups.front().device.measured);
  CHECK(cluster.groups.front().device.backend == BackendKind::cpu);
  CHECK(cluster.devices() >= 1);
  const YamlNode document = YamlNode::load(device_file);
  CHECK(read_device(document) == cluster.groups.front().device);
  const Measurements measurements = read_measurements(document.at("measured"));
  // On a busy machine some kernels do not end in time, and some times allow no fit; the existing
  // results must be consistent.
  const std::vector<KernelFit>& fits = cluster.groups.front().device.measured->fits;
  CHECK(fit_kernels(measurements.kernels, cluster.groups.front().device) == fits);
  CHECK_FALSE(fits.empty());
  for (const KernelFit& fit : fits)
    CHECK_MESSAGE(called.out.find(fmt::format("\n{:<28}{}", name(fit.kind), name(fit.type))) != std::string::npos,
                  name(fit.kind));

  const Called planned = call({"suggest", tiny_gpt2, "--cluster", cluster_file, "-o", folder.path("plan.yaml")});
  CHECK(planned.code == 0);
  CHECK(call({"simulate", folder.path("plan.yaml")}).code == 0);
}

TEST_CASE("what cannot be measured is said in full") {
  const auto error = [](const std::vector<std::string>& options) {
    std::vector<std::string> words{"measure"};
    words.insert(words.end(), options.begin(), options.end());
    const Called called = call(words);
    CHECK(called.code == 2);
    CHECK(called.out == "");
    return called.err;
  };
  CHECK(error({"--device", "gpu"}) == "error: --device: expected cpu, cuda or cuda:N, found 'gpu'\n");
  CHECK(error({"--device", "cuda:x"}) == "error: --device: expected a whole number from 0 to 1024, found 'x'\n");
  CHECK(error({"--budget", "5"}) ==
        "error: --budget: expected a duration with its unit such as '2 us', found '5'; allowed units: ns, us, ms, s, "
        "min, h\n");
  CHECK(
      error({"--device", "cpu", "--like", "k80"}) ==
      "error: --like names the card that is measured, and that is the CPU; leave --like out, or give --device cuda\n");
  CHECK(error({"model.yaml"}) == "error: unexpected argument 'model.yaml'; measure takes options only\n");
}

}  // namespace
}  // namespace parplan
