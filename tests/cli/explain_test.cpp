// `parplan explain` as people call it.
#include <doctest/doctest.h>

#include <string>
#include <vector>

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

TEST_CASE("a plan with no more micro-batches than an interleaved pipeline needs is explained") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  const Called made =
      call({"suggest",       "gpt2", "--cluster", "dgx-a100", "--devices",  "4",           "--global-batch",   "4",
            "--seq-len",     "512",  "--pp",      "4",        "--schedule", "interleaved", "--virtual-stages", "3",
            "--micro-batch", "1",    "-o",        plan,       "--quiet"});
  INFO(made.err);
  REQUIRE(made.code == 0);
  // Half of the batch would be too few for it.
  const Called explained = call({"explain", plan, "--quiet"});
  CHECK(explained.err == "");
  CHECK(explained.code == 0);
}

TEST_CASE("What a plan's file says is escaped before it reaches a terminal") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  REQUIRE(call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--devices", "4", "--quiet", "-o", plan}).code == 0);
  std::string text = read_file(plan);
  const auto replace_all = [&](const std::string& from, const std::string& to) {
    REQUIRE(text.find(from) != std::string::npos);
    for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
      text.replace(at, from.size(), to);
  };
  replace_all("core0", R"("\x1b[31m\u202ecore0")");
  replace_all("name: cpu-core", R"(name: "\x1b[31m\u202ecpu-core")");
  replace_all("title: One core", R"(title: One core)" "\u202e");
  const std::size_t begin = text.find("\nnotes:"), end = text.find("\nalternatives:");
  REQUIRE(begin < end);
  text.replace(begin, end - begin, R"(
notes:
  - "a note\x1b[31m with\r two\n lines\u202e")");
  write_file_atomically(plan, text);
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"explain", plan, "--quick"}, {"simulate", plan}, {"explain", plan, "--json", "-"}}) {
    const Called called = call(words);
    CAPTURE(called.err);
    CHECK(called.code == 0);
    for (const char* raw : {"\x1b", "\r", "\u202e"}) CHECK((called.out + called.err).find(raw) == std::string::npos);
  }
  const std::string said = call({"explain", plan, "--quick"}).out;
  CHECK(said.find("a note\\u001b[31m with\\u000d two\\u000a lines\\u202e\n") != std::string::npos);
}

TEST_CASE("explain says why in words, or as JSON") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  REQUIRE(call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--devices", "4", "--quiet", "-o", plan}).code == 0);
  const Called whole = call({"explain", plan});
  CHECK(whole.code == 0);
  CHECK(whole.err == "");
  for (const char* wanted :
       {"the critical path: ", "binding constraint: ", "\n  with ", "how sure: ", "one choice away",
        "best of its family", "what the rules of the guides come to here:", "compute 20 % less"}) {
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

TEST_CASE("an edited plan is explained by what it comes to, and the file's promise is named") {
  const Folder folder;
  const std::string path = folder.path("plan.yaml");
  REQUIRE(call({"suggest", tiny_gpt2, "--cluster", cpu_8, "--devices", "4", "--pp", "2", "--schedule", "1f1b",
                "--quiet", "-o", path})
              .code == 0);
  CHECK(call({"explain", path, "--quick"}).out.find("the file promises") == std::string::npos);
  std::string text = read_file(path);
  const std::size_t begin = text.find("stage_blocks: [");
  REQUIRE(begin != std::string::npos);
  text.replace(begin, text.find('\n', begin) - begin, "stage_blocks: [1, 5]");
  write_file_atomically(path, text);
  const std::string why = call({"explain", path, "--quick"}).out;
  const auto between = [&](const std::string& before, const std::string& behind) {
    const std::size_t at = why.find(before);
    REQUIRE(at != std::string::npos);
    return why.substr(at + before.size(), why.find(behind, at) - at - before.size());
  };
  CHECK(between("a step takes ", " (") == between("the end of the step hangs on, ", " in all"));
  CHECK(why.find("note: the file promises a step of ") != std::string::npos);
  CHECK(why.find("search: no search was made: the layout was given\n") != std::string::npos);
  const Json json = Json::parse(call({"explain", path, "--quick", "--json", "-"}).out);
  double seconds = 0.0;
  for (const Json& work : json.at("critical_path")) seconds += work.at("time_s").get<double>();
  CHECK(seconds == doctest::Approx(json.at("plans")[0].at("step_time_s").get<double>()));
}

TEST_CASE("a plan of least cost is explained by its cost") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  const Called found = call(
      {"suggest", tiny_gpt2, "--cluster", cpu_8, "--objective", "cost", "--price", "3 USD", "--quiet", "-o", plan});
  REQUIRE(found.code == 0);
  CHECK(found.out.find("cost a step\n") != std::string::npos);
  CHECK(found.out.find("certified: the cheapest of this space under this cost model") != std::string::npos);
  CHECK(found.out.find("no plan on all of them costs less\n") != std::string::npos);
  CHECK(found.out.find("% slower)\n") == std::string::npos);  // it is faster or slower, and more expensive
  const Called json = call(
      {"suggest", tiny_gpt2, "--cluster", cpu_8, "--objective", "cost", "--price", "3 USD", "--quiet", "--json", "-"});
  CHECK(Json::parse(json.out).at("inputs").at("objective") == "cost");

  const Called why = call({"explain", plan});
  REQUIRE(why.code == 0);
  for (const char* wanted : {"objective: the cost of a step", "cost  vs plan", "certified: the cheapest", " USD ("}) {
    INFO(wanted);
    CHECK(why.out.find(wanted) != std::string::npos);
  }
  CHECK(why.out.find("without what was given") == std::string::npos);
  CHECK(Json::parse(call({"explain", plan, "--json", "-"}).out).at("inputs").at("objective") == "cost");
}

TEST_CASE("nothing is said to differ that does not, and lines are not wider than a screen") {
  const Folder folder;
  const std::string plan = folder.path("plan.yaml");
  for (const std::vector<std::string>& given :
       {std::vector<std::string>{"--devices", "1", "--top", "1"}, {"--pp", "4"}, {}}) {
    std::vector<std::string> command{"suggest", tiny_gpt2, "--cluster", cpu_8, "--quiet", "-o", plan};
    command.insert(command.end(), given.begin(), given.end());
    REQUIRE(call(command).code == 0);
    const std::string text = call({"explain", plan}).out;
    for (const char* wrong : {"-0.0 %", "+0.0 %", "-0.00 %", "(0.0", "(0 % ", "is known\n", "more)  (0"}) {
      INFO(wrong);
      CHECK(text.find(wrong) == std::string::npos);
    }
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t end = text.find('\n', begin);
      INFO(text.substr(begin, end - begin));
      CHECK(end - begin <= 140);
      begin = end + 1;
    }
  }
}

}  // namespace
}  // namespace parplan
