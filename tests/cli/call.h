#pragma once

#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <unistd.h>

#include "cli/command_line.h"

namespace parplan::testing {

inline const std::string data = std::string(PARPLAN_SOURCE_DIR) + "/tests/data";
inline const std::string tiny_gpt2 = data + "/models/tiny-gpt2.yaml";
inline const std::string tiny_llama = data + "/models/tiny-llama.yaml";
inline const std::string cpu_8 = data + "/clusters/cpu-8.yaml";

// What one call of parplan gave.
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

// A folder of its own that is gone afterwards; parplan's cache lies in it meanwhile.
class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "parplan-test-XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path_ = name;
    setenv("XDG_CACHE_HOME", (path_ / "cache").c_str(), 1);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string path(const std::string& name) const { return (path_ / name).string(); }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
    return path(name);
  }
  std::string read(const std::string& name) const {
    std::ifstream file(path_ / name, std::ios::binary);
    REQUIRE(file.good());
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  std::filesystem::path path_;
};

}  // namespace parplan::testing
