#pragma once

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "tests/temporary_folder.h"

namespace parplan::testing {

inline std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// A small tree with planted faults.
class FakeTree {
 public:
  explicit FakeTree(const std::map<std::string, std::string>& files) {
    for (const auto& [path, text] : files) {
      std::filesystem::create_directories((folder_ / path).parent_path());
      folder_.write(path, text);
    }
  }
  const std::filesystem::path& root() const { return folder_.root(); }

 private:
  TemporaryFolder folder_;
};

}  // namespace parplan::testing
