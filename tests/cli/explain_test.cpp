// `parplan explain` as people call it.
#include <doctest/doctest.h>

#include "planner/base/file.h"
#include "planner/base/json.h"
#include "tests/cli/call.h"

namespace parplan {
namespace {

using testing::call;
using testing::Called;
using testing::cpu_8;
using testing::Folder;
using testing::tiny_gpt2;

TEST_CASE("explain says why in words, or as JSON") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  REQUIRE(call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--devices", "4", "--quiet", "-o", plan}).code == 0);
  const Called whole = call({"explain", plan});
  CHECK(whole.code == 0);
  CHECK(whole.err == "");
  for (const char* wanted : {"the critical path: ", "binding constraint: ", "\n  with ", "how sure: ", "one choice away", "best of its family",
                             "what the rules of the guides come to here:", "compute 20 % less"}) {
    INFO(wanted);
    CHECK(whole.out.find(wanted) != std::string::npos);
  }
  CHECK(call({"explain", plan}).out == whole.out);

  const Called quick = call({"explain", plan, "--quick"});
  CHECK(quick.code == 0);
  CHECK(quick.out.find("one choice away") != std::string::npos);
  CHECK(quick.out.find("best of its family") == std::string::npos);

  const Called json = call({"explain", plan, "--json", "-"});
  CHECK(json.code == 0);
  const Json object = Json::parse(json.out);
  CHECK(object.at("schema") == "parplan.explain/1");
  CHECK(object.at("sensitivity").size() == 8);  // one node: no network
  double path = 0.0;
  for (const Json& work : object.at("critical_path")) path += work.at("time_s").get<double>();
  CHECK(path == doctest::Approx(object.at("plans")[0].at("step_time_s").get<double>()));

  const Called verbose = call({"explain", plan, "--quick", "--verbose", "--json", folder.path("why.json")});
  CHECK(verbose.err.starts_with("found in "));
  CHECK(verbose.err.find("wrote ") != std::string::npos);
  CHECK(Json::parse(read_file(folder.path("why.json"))).at("families").empty());
}

}  // namespace
}  // namespace parplan
