#pragma once

#include <doctest/doctest.h>

#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "cli/command_line.h"
#include "tests/temporary_folder.h"

namespace parplan::testing {

inline const std::string data = std::string(PARPLAN_SOURCE_DIR) + "/tests/data";
inline const std::string tiny_gpt2 = data + "/models/tiny-gpt2.yaml";
inline const std::string tiny_llama = data + "/models/tiny-llama.yaml";
inline const std::string cpu_8 = data + "/clusters/cpu-8.yaml";

// The results of one call of parplan.
struct Called {
  int code = 0;
  std::string out;
  std::string err;
};
inline Called call(std::vector<std::string> arguments) {
  std::ostringstream out;
  std::ostringstream err;
  const int code = run_command_line(std::move(arguments), out, err);
  return {.code = code, .out = out.str(), .err = err.str()};
}

// A temporary folder that also holds parplan's cache.
class Folder : public TemporaryFolder {
 public:
  Folder() { setenv("XDG_CACHE_HOME", path("cache").c_str(), 1); }
};

}  // namespace parplan::testing
