// `--memory-headroom`: plans leave memory free, and tight ones are said to be.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "planner/base/json.h"
#include "tests/cli/call.h"

namespace parplan {
namespace {

using namespace testing;

struct Answer {
  Json json;
  Called called;
};
Answer suggest_gpt2(std::vector<std::string> more, int code = 0) {
  std::vector<std::string> arguments = {"suggest",        "gpt2", "--cluster", "dgx-a100", "--devices", "2",
                                        "--global-batch", "16",   "--seq-len", "512",      "--json",    "-"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  Answer answer{.json = {}, .called = call(arguments)};
  INFO(answer.called.err);
  REQUIRE(answer.called.code == code);
  if (code == 0) answer.json = Json::parse(answer.called.out);
  return answer;
}

}  // namespace

TEST_CASE("plans on accelerators leave the default headroom, and none where memory is limited or 0% is given") {
  const Json row = suggest_gpt2({}).json.at("plans").at(0);
  const double capacity = row.at("memory_capacity_bytes").get<double>();
  CHECK(row.at("fit") == "fits");
  CHECK(row.at("usable_bytes").get<double>() == doctest::Approx(0.945 * capacity));
  for (const std::vector<std::string>& none :
       {std::vector<std::string>{"--memory-headroom", "0%"}, std::vector<std::string>{"--memory-limit", "50%"}}) {
    const Json without = suggest_gpt2(none).json.at("plans").at(0);
    CHECK(without.at("usable_bytes") == without.at("memory_capacity_bytes"));
  }
}

TEST_CASE("what fits only without the headroom is found, and said to be tight") {
  const Folder folder;
  // The least that the batch needs on these devices; with it, the headroom leaves too little.
  const Json least = suggest_gpt2({"--objective", "memory", "--top", "1"}).json.at("plans").at(0);
  const std::string all = std::to_string(least.at("memory_peak_bytes").get<std::int64_t>() + 1) + " B";
  const std::string plan = folder.path("plan.yaml");
  const Answer tight = suggest_gpt2({"--memory-limit", all, "--memory-headroom", "10%", "-o", plan});
  for (const Json& row : tight.json.at("plans")) CHECK(row.at("fit") == "tight");
  CHECK(tight.json.at("notes").dump().find("tight: takes") != std::string::npos);
  // The plan keeps it, and explain works on it.
  const Called again = call({"simulate", plan, "--json", "-", "--quiet"});
  REQUIRE(again.code == 0);
  CHECK(Json::parse(again.out).at("plans").at(0).at("fit") == "tight");
  CHECK(again.err.find("warning: the plan is tight") != std::string::npos);
  CHECK(call({"explain", plan}).code == 0);
  // Without a headroom it fits, and with less memory nothing does.
  CHECK(suggest_gpt2({"--memory-limit", all}).json.at("plans").at(0).at("fit") == "fits");
  suggest_gpt2({"--memory-limit", "1100 MiB"}, 1);
  // What the allocator of an engine keeps does not make a layout infeasible.
  const Json torch = suggest_gpt2({"--engine", "ddp", "--objective", "memory", "--top", "1"}).json.at("plans").at(0);
  const std::int64_t kept = torch.at("memory_reserve_bytes").get<std::int64_t>();
  CHECK(kept > 0);
  const std::string without = std::to_string(torch.at("memory_peak_bytes").get<std::int64_t>() - kept / 2) + " B";
  const Json row = suggest_gpt2({"--engine", "ddp", "--memory-limit", without}).json.at("plans").at(0);
  CHECK(row.at("fit") == "tight");
  CHECK(row.at("memory_reserve_bytes").get<std::int64_t>() > 0);
}

TEST_CASE("a headroom that is no share is refused") {
  for (const std::string wrong : {"-1%", "95%", "a tenth", "%"}) {
    const Called called = call({"suggest", "gpt2", "--cluster", "dgx-a100", "--memory-headroom", wrong});
    CAPTURE(wrong);
    CHECK(called.code == 2);
    CHECK(called.err.find("--memory-headroom: expected a percentage from 0% to 90%") != std::string::npos);
  }
}

}  // namespace parplan
