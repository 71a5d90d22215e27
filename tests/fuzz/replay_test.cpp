// Every input of the corpus goes through its target, in every build and with any compiler.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/base/error.h"
#include "tests/fuzz/targets.h"

namespace parplan::fuzz {
namespace {

const std::filesystem::path corpus = std::filesystem::path(PARPLAN_SOURCE_DIR) / "tests" / "fuzz" / "corpus";

std::vector<std::filesystem::path> inputs_of(const Target& target) {
  std::vector<std::filesystem::path> inputs;
  for (const auto& entry : std::filesystem::directory_iterator(corpus / target.name)) inputs.push_back(entry.path());
  std::ranges::sort(inputs);
  return inputs;
}

std::string text_of(const std::filesystem::path& path) {
  std::ifstream input(path, std::ios::binary);
  REQUIRE(input.good());
  return {std::istreambuf_iterator<char>(input), {}};
}

TEST_CASE("every kept input is taken or refused in words, and each target takes one and refuses one") {
  for (const Target& target : targets()) {
    int taken = 0;
    int refused = 0;
    for (const std::filesystem::path& path : inputs_of(target)) {
      const std::string name = path.string();
      INFO(name);
      const std::string input = text_of(path);
      Verdict verdict{};
      CHECK_NOTHROW(verdict = take_input(target, input));
      ++(verdict == Verdict::taken ? taken : refused);
    }
    const std::string name(target.name);
    INFO(name);
    CHECK(taken > 0);
    // The writer of CSV refuses no text.
    CHECK((refused > 0 || target.name == "csv"));
  }
}

TEST_CASE("a folder of kept inputs, a target and a program of libFuzzer belong to each other") {
  std::set<std::string> folders;
  for (const auto& entry : std::filesystem::directory_iterator(corpus))
    folders.insert(entry.path().filename().string());
  std::set<std::string> names;
  std::vector<std::string> in_order;
  for (const Target& target : targets()) {
    names.emplace(target.name);
    in_order.emplace_back(target.name);
  }
  CHECK(folders == names);
  CHECK(fmt::format("{}", fmt::join(in_order, ",")) == PARPLAN_FUZZ_TARGETS);
  CHECK_THROWS_WITH_AS(find_target("modle"),
                       fmt::format("error: unknown target 'modle'; allowed: {}", fmt::join(in_order, ", ")).c_str(),
                       ConfigError);
}

TEST_CASE("kept inputs are small: the largest has 64 KiB") {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(corpus)) {
    if (!entry.is_regular_file()) continue;
    const std::string name = entry.path().string();
    INFO(name);
    CHECK(entry.file_size() <= 64 * 1024);
  }
}

}  // namespace
}  // namespace parplan::fuzz
