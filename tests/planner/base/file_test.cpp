#include "planner/base/file.h"

#include <filesystem>

#include <doctest/doctest.h>

#include "planner/base/error.h"
#include "tests/planner/base/error_of.h"

using namespace parplan;

TEST_CASE("What was written is read back, and no temporary file stays") {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / "parplan_file_test";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directory(folder);
  write_file_atomically(folder / "a.txt", "first");
  write_file_atomically(folder / "a.txt", std::string("zero\0byte", 9));
  CHECK(read_file(folder / "a.txt") == std::string("zero\0byte", 9));
  int files = 0;
  for ([[maybe_unused]] const auto& file : std::filesystem::directory_iterator(folder)) ++files;
  CHECK(files == 1);
  std::filesystem::remove_all(folder);
}

TEST_CASE("Files that cannot be read or written are named with the system's reason") {
  CHECK(error_of<ConfigError>([] { read_file("/nowhere/a.txt"); }) ==
        "error: cannot read '/nowhere/a.txt': No such file or directory");
  CHECK(error_of<ConfigError>([] { read_file("/tmp"); }) == "error: cannot read '/tmp': Is a directory");
  CHECK(error_of<RunError>([] { write_file_atomically("/nowhere/a.txt", "x"); }) ==
        "cannot write '/nowhere/a.txt': No such file or directory");
}
