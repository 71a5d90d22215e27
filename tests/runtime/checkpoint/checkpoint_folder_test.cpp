#include "runtime/checkpoint/checkpoint_folder.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "runtime/checkpoint/checkpoint_reader.h"
#include "runtime/checkpoint/shard_writer.h"
#include "tests/temporary_folder.h"

namespace parplan {
namespace {

using Steps = std::vector<std::int64_t>;

void make_checkpoint(const std::string& folder, std::int64_t step) {
  begin_checkpoint(folder, step);
  complete_checkpoint(folder, {.step = step});
}

TEST_CASE("whole checkpoints are found by their names, and nothing else is taken for one") {
  const testing::TemporaryFolder temporary;
  const std::string folder = temporary.path("checkpoints");
  CHECK(complete_checkpoints(folder) == Steps{});
  make_folder(folder);
  for (const std::int64_t step : {std::int64_t{20}, std::int64_t{3}, std::int64_t{123456789012}})
    make_checkpoint(folder, step);
  begin_checkpoint(folder, 30);
  for (const char* name : {"step-", "step-x", "step-5", "step--0000005", "step-00000005x", "step-00000040.removed"})
    std::filesystem::create_directory(folder + '/' + name);
  CHECK(complete_checkpoints(folder) == Steps{3, 20, 123456789012});
  remove_leftovers(folder);
  CHECK(!std::filesystem::exists(path_of_incomplete(folder, 30)));
  CHECK(!std::filesystem::exists(folder + "/step-00000040.removed"));
  CHECK(std::filesystem::exists(folder + "/step-x"));
  keep_newest(folder, 2);
  CHECK(complete_checkpoints(folder) == Steps{20, 123456789012});
  keep_newest(folder, 2);
  CHECK(complete_checkpoints(folder) == Steps{20, 123456789012});
}

TEST_CASE("a checkpoint that was begun and died is begun anew, and one that failed leaves nothing") {
  const testing::TemporaryFolder folder;
  const std::string path = folder.root().string();
  begin_checkpoint(path, 4);
  std::ofstream(path_of_incomplete(path, 4) + "/old") << "x";
  begin_checkpoint(path, 4);
  CHECK(std::filesystem::is_empty(path_of_incomplete(path, 4)));
  abandon_checkpoint(path, 4);
  CHECK(std::filesystem::is_empty(path));
}

TEST_CASE("a folder belongs to one job at a time, and others are told so") {
  const testing::TemporaryFolder folder;
  const std::string path = folder.root().string();
  {
    const FolderClaim claim(path, "first");
    CHECK(sees_claim(path, "first"));
    CHECK(!sees_claim(path, "second"));
    CHECK_THROWS_WITH_AS(
        FolderClaim(path, "second"),
        fmt::format("error: another run writes its checkpoints to '{}'; give this one a folder of its own", path)
            .c_str(),
        ConfigError);
    CHECK(sees_claim(path, "first"));
  }
  const FolderClaim claim(path, "second");
  CHECK(sees_claim(path, "second"));
  CHECK(!sees_claim(folder.path("none"), "second"));
}

TEST_CASE("files are written whole, and a file of that name or a folder that is gone is an error") {
  const testing::TemporaryFolder folder;
  const std::string path = folder.root().string();
  ShardWriter writer(path, {{.name = "a", .header = "head", .data = std::vector<std::byte>(10'000'000, std::byte{1})},
                            {.name = "b", .header = "1234", .data = {std::byte{'5'}}}});
  const std::vector<CheckpointFile> files = writer.files();
  REQUIRE(files.size() == 2);
  CHECK(files[0].bytes == 10'000'004);
  CHECK(folder.read("b") == "12345");
  CHECK(files[1].crc32 == 0xCBF53A1Cu);  // zlib.crc32(b"12345")
  for (const CheckpointFile& file : files) CHECK_NOTHROW(check_file(path, file));
  std::filesystem::resize_file(folder / "a", 10'000'003);
  CHECK_THROWS_WITH_AS(
      check_file(path, files[0]),
      fmt::format("{}/a: error: 10000003 bytes; 10000004 were written: it was cut off or altered", path).c_str(),
      ConfigError);
  folder.write("b", "12346");
  CHECK_THROWS_WITH_AS(
      check_file(path, files[1]),
      fmt::format("{}/b: error: its checksum is 52fc6ba6; that of what was written is cbf53a1c: it was altered", path)
          .c_str(),
      ConfigError);
  ShardWriter again(path, {{.name = "a", .header = "", .data = {}}});
  CHECK_THROWS_WITH_AS(again.files(), fmt::format("cannot write '{}/a': File exists", path).c_str(), RunError);
  ShardWriter nowhere(folder.path("none"), {{.name = "a", .header = "", .data = {}}});
  CHECK_THROWS_AS(nowhere.files(), RunError);
}

}  // namespace
}  // namespace parplan
