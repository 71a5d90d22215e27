#include "planner/base/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <future>

#include <doctest/doctest.h>

#include "planner/base/error.h"
#include "tests/planner/base/error_of.h"
#include "tests/temporary_folder.h"

using namespace parplan;

namespace {

int files_in(const testing::TemporaryFolder& folder) {
  int count = 0;
  for ([[maybe_unused]] const auto& file : std::filesystem::directory_iterator(folder.root())) ++count;
  return count;
}

unsigned mode_of(const std::filesystem::path& path) {
  struct stat found {};
  REQUIRE(lstat(path.c_str(), &found) == 0);
  return found.st_mode & 07777;
}

void write_through_library(const std::filesystem::path& path, const std::string& text) {
  write_through_temporary(path, [&](const std::string& temporary) { std::ofstream(temporary) << text; });
}

}  // namespace

TEST_CASE("What was written is read back, and no temporary file stays") {
  const testing::TemporaryFolder folder;
  write_file_atomically(folder / "a.txt", "first");
  write_file_atomically(folder / "a.txt", std::string("zero\0byte", 9));
  CHECK(read_file(folder / "a.txt") == std::string("zero\0byte", 9));
  CHECK(files_in(folder) == 1);
  write_through_library(folder / "a.txt", "of a library");
  CHECK(read_file(folder / "a.txt") == "of a library");
  CHECK_THROWS_AS(write_through_temporary(folder / "a.txt", [](const std::string&) { throw RunError("no"); }),
                  RunError);
  CHECK(read_file(folder / "a.txt") == "of a library");
  CHECK(files_in(folder) == 1);
}

TEST_CASE("Files that cannot be read or written are named with the system's reason") {
  CHECK(error_of<ConfigError>([] { read_file("/nowhere/a.txt"); }) ==
        "error: cannot read '/nowhere/a.txt': No such file or directory");
  CHECK(error_of<ConfigError>([] { read_file("/tmp"); }) == "error: cannot read '/tmp': Is a directory");
  CHECK(error_of<RunError>([] { write_file_atomically("/nowhere/a.txt", "x"); }) ==
        "cannot write '/nowhere/a.txt': No such file or directory");
  CHECK(error_of<RunError>([] { write_file_atomically("/tmp", "x"); }) == "cannot write '/tmp': Is a directory");
  CHECK(error_of<RunError>([] { write_file_atomically("/dev/fd/987", "x"); }) ==
        "cannot write '/dev/fd/987': Bad file descriptor");
}

TEST_CASE("A new file has the mode that the umask leaves, an old one keeps its own") {
  const testing::TemporaryFolder folder;
  const mode_t before = umask(027);
  write_file_atomically(folder / "new.txt", "x");
  umask(before);
  CHECK(mode_of(folder / "new.txt") == 0640);
  for (const unsigned mode : {0600u, 0755u, 0666u, 0200u}) {
    chmod((folder / "new.txt").c_str(), mode);
    write_file_atomically(folder / "new.txt", "y");
    CHECK(mode_of(folder / "new.txt") == mode);
    write_through_library(folder / "new.txt", "z");
    CHECK(mode_of(folder / "new.txt") == mode);
  }
}

TEST_CASE("A file that is read-only is refused and stays, for root too") {
  const testing::TemporaryFolder folder;
  write_file_atomically(folder / "kept.txt", "kept");
  chmod((folder / "kept.txt").c_str(), 0400);
  const std::string path = (folder / "kept.txt").string();
  CHECK(error_of<RunError>([&] { write_file_atomically(path, "x"); }) ==
        "cannot write '" + path + "': it is read-only (mode 0400); allow writing (chmod u+w), or give another name");
  CHECK(error_of<RunError>([&] {
          write_through_library(path, "x");
        }).starts_with("cannot write '" + path + "': it is read-only"));
  chmod(path.c_str(), 0600);
  CHECK(read_file(path) == "kept");
  CHECK(files_in(folder) == 1);
}

TEST_CASE("A symbolic link stays one, and what it leads to gets the text") {
  const testing::TemporaryFolder folder;
  std::filesystem::create_directory(folder / "far");
  write_file_atomically(folder / "far/target.txt", "old");
  std::filesystem::create_symlink("far/target.txt", folder / "near.txt");
  std::filesystem::create_symlink(folder / "near.txt", folder / "nearer.txt");
  write_file_atomically(folder / "nearer.txt", "new");
  CHECK(read_file(folder / "far/target.txt") == "new");
  CHECK(std::filesystem::is_symlink(folder / "near.txt"));
  CHECK(std::filesystem::is_symlink(folder / "nearer.txt"));
  CHECK(file_behind(folder / "nearer.txt") == file_behind(folder / "far/target.txt"));
  CHECK(file_behind(folder / "far/../near.txt") == file_behind(folder / "far/target.txt"));
  CHECK(file_behind(folder / "far/other.txt") != file_behind(folder / "far/target.txt"));
  // A link whose target does not exist yet.
  std::filesystem::create_symlink("far/made.txt", folder / "dangling.txt");
  write_file_atomically(folder / "dangling.txt", "made");
  CHECK(read_file(folder / "far/made.txt") == "made");
  CHECK(std::filesystem::is_symlink(folder / "dangling.txt"));
  std::filesystem::create_symlink("circle.txt", folder / "circle.txt");
  CHECK(error_of<RunError>([&] {
          write_file_atomically(folder / "circle.txt", "x");
        }).ends_with(": Too many levels of symbolic links"));
}

TEST_CASE("A pipe stays a pipe and gets the text") {
  const testing::TemporaryFolder folder;
  REQUIRE(mkfifo((folder / "pipe").c_str(), 0600) == 0);
  std::filesystem::create_symlink("pipe", folder / "link");
  for (const char* name : {"pipe", "link"}) {
    std::future<std::string> read = std::async(std::launch::async, [&] { return read_file(folder / "pipe"); });
    write_file_atomically(folder / name, "through");
    CHECK(read.get() == "through");
    read = std::async(std::launch::async, [&] { return read_file(folder / "pipe"); });
    write_through_library(folder / name, "of a library");
    CHECK(read.get() == "of a library");
  }
  CHECK(std::filesystem::is_fifo(folder / "pipe"));
  CHECK(files_in(folder) == 2);
}

TEST_CASE("A descriptor of this process goes on where it stands") {
  const testing::TemporaryFolder folder;
  write_file_atomically(folder / "log.txt", "before ");
  const int descriptor = open((folder / "log.txt").c_str(), O_WRONLY);
  REQUIRE(descriptor >= 0);
  REQUIRE(lseek(descriptor, 0, SEEK_END) == 7);
  for (const char* folder_of_descriptors : {"/dev/fd/", "/proc/self/fd/"})
    write_file_atomically(folder_of_descriptors + std::to_string(descriptor), "and ");
  REQUIRE(write(descriptor, "after", 5) == 5);
  close(descriptor);
  CHECK(read_file(folder / "log.txt") == "before and and after");
}
