#include "runtime/checkpoint/mapped_file.h"

#include <doctest/doctest.h>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <string>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "tests/temporary_folder.h"

namespace parplan {
namespace {

// What a child says on its standard error, and how it ends (as wait says it).
struct Ended {
  std::string said;
  int status = 0;
};

template <class Work>
Ended in_child(const Work& work) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    const rlimit none{.rlim_cur = 0, .rlim_max = 0};
    setrlimit(RLIMIT_CORE, &none);
    work();
    _exit(0);
  }
  close(ends[1]);
  Ended ended;
  char piece[512];
  for (ssize_t count = 0; (count = read(ends[0], piece, sizeof piece)) > 0;)
    ended.said.append(piece, static_cast<std::size_t>(count));
  close(ends[0]);
  waitpid(child, &ended.status, 0);
  return ended;
}

volatile std::byte last_read;

TEST_CASE("a mapped file that is cut off ends the process with 1 and its name, and no other fault is taken for that") {
  const testing::TemporaryFolder folder;
  const std::string path = folder.write("tokens\x1b.bin", std::string(1 << 20, 'a'));
  {
    const MappedFile file(path);
    CHECK(file.bytes().size() == 1 << 20);
    CHECK(file.bytes()[(1 << 20) - 1] == std::byte{'a'});
    CHECK_NOTHROW(file.check_is_whole());
    const Ended ended = in_child([&] {
      std::filesystem::resize_file(path, 4096);
      last_read = file.bytes()[1 << 19];
    });
    CHECK(ended.said ==
          fmt::format("error: cannot read '{}' any more: it was cut off while it was being read\n",
                      folder.path("tokens\\u001b.bin")));
    CHECK(WIFEXITED(ended.status));
    CHECK(WEXITSTATUS(ended.status) == 1);
    CHECK_THROWS_WITH_AS(file.check_is_whole(),
                         fmt::format("cannot read '{}' any more: it was cut off while it was being read",
                                     folder.path("tokens\\u001b.bin"))
                             .c_str(),
                         RunError);
    // Another file of that name is none of its business.
    std::filesystem::remove(path);
    CHECK_NOTHROW(file.check_is_whole());
    folder.write("tokens\x1b.bin", "b");
    CHECK_NOTHROW(file.check_is_whole());
  }
  const Ended raised = in_child([] { raise(SIGBUS); });
  CHECK(raised.said.find("cut off") == std::string::npos);
}

TEST_CASE("what cannot be mapped is refused with its name, and an empty file has no bytes") {
  const testing::TemporaryFolder folder;
  CHECK(MappedFile(folder.write("empty", "")).bytes().empty());
  CHECK_THROWS_WITH_AS(MappedFile(folder.path("none")),
                       fmt::format("error: cannot read '{}': No such file or directory", folder.path("none")).c_str(),
                       ConfigError);
  CHECK_THROWS_WITH_AS(MappedFile(folder.root().string()),
                       fmt::format("error: cannot read '{}': it is no regular file", folder.root().string()).c_str(),
                       ConfigError);
}

}  // namespace
}  // namespace parplan
