#pragma once

#include <span>
#include <string>
#include <string_view>

namespace parplan::fuzz {

// One kind of input from outside. `take` processes it as the program does, and checks what must
// hold for accepted input (its written form reads back equal). Refusals are ConfigErrors, which
// `take_input` expects and checks; any other exception is a finding.
struct Target {
  std::string_view name;  // and the folder of tests/fuzz/corpus that holds its inputs
  void (*take)(const std::string& input) = nullptr;
};
std::span<const Target> targets();

// ConfigError when no target has the name.
const Target& find_target(std::string_view name);

enum class Verdict { taken, refused };
Verdict take_input(const Target& target, const std::string& input);

}  // namespace parplan::fuzz
