#pragma once

#include <span>
#include <string>
#include <string_view>

namespace parplan::fuzz {

// One kind of input that comes from outside. `take` does with it what the program does, and checks
// what must hold of anything that was accepted (what is written from it reads back equal). Refusals
// are ConfigErrors, which `take_input` expects and checks; whatever else comes out of it is a
// finding.
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
