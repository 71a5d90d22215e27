#include "runtime/device/offload_file.h"

#include <doctest/doctest.h>

#include <csignal>
#include <filesystem>
#include <string>
#include <vector>

#include <sys/resource.h>

#include "planner/base/error.h"
#include "runtime/device/cpu/cpu_backend.h"
#include "tests/temporary_folder.h"

namespace parplan {
namespace {

std::vector<std::byte> bytes(std::size_t count, int first) {
  std::vector<std::byte> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<std::byte>(first + static_cast<int>(i));
  return values;
}

constexpr StreamId compute = 0, writer = 7, reader = 8;

}  // namespace

TEST_CASE("a file for offload holds what is written, at any offset, and has no name") {
  const testing::TemporaryFolder own;
  const OffloadFile file(own.root().string(), Bytes(10'000));
  CHECK(std::filesystem::is_empty(own.root()));
  const std::vector<std::byte> written = bytes(4097, 3);
  file.write(5'001, written.data(), 4097);
  std::vector<std::byte> found(4097);
  file.read(5'001, found.data(), 4097);
  CHECK(found == written);
  std::byte before{1};
  file.read(5'000, &before, 1);
  CHECK(before == std::byte{0});
  CHECK_THROWS_WITH_AS(file.read(9'999, found.data(), 2), doctest::Contains("the file ends before byte 10001 in '"),
                       RunError);
}

TEST_CASE("a folder without room, or without leave to write, is named with what to do") {
  const testing::TemporaryFolder own;
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit little = before;
  little.rlim_cur = 4096;
  REQUIRE(setrlimit(RLIMIT_FSIZE, &little) == 0);
  std::string reason;
  try {
    const OffloadFile file(own.root().string(), Bytes(1 << 20));
  } catch (const RunError& error) {
    reason = error.what();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  CHECK(reason == "cannot take 1.00 MiB in '" + own.root().string() +
                      "' for what a rank keeps on NVMe: File too large; raise the limit on the size of files (ulimit "
                      "-f)");
}

TEST_CASE("the CPU's file transfers go in the order that events ask for, and its own work waits for them by events") {
  const auto backend = make_cpu_backend();
  const testing::TemporaryFolder own;
  const OffloadFile file(own.root().string(), Bytes(1 << 20));
  for (int round = 0; round < 20; ++round) {
    std::vector<std::byte> first = bytes(1 << 16, round), second(1 << 16);
    backend->transfer_file(writer, file.writing(0, first.data(), 1 << 16));
    backend->record(writer, 0);
    backend->wait(reader, 0);
    backend->transfer_file(reader, file.reading(0, second.data(), 1 << 16));
    backend->record(reader, 1);
    backend->wait(compute, 1);
    CHECK(second == first);
    // Written over once it is read.
    backend->wait(writer, 1);
    backend->transfer_file(writer, file.writing(0, second.data(), 1 << 16));
  }
  backend->synchronize();
}

TEST_CASE("what a file transfer throws is thrown where all work is awaited, once") {
  const auto backend = make_cpu_backend();
  static int carried_out;
  carried_out = 0;
  const FileTransfer fails{.carry_out = [](const FileTransfer&) -> void { throw RunError("the drive is gone"); }};
  const FileTransfer counts{.carry_out = [](const FileTransfer&) { ++carried_out; }};
  backend->transfer_file(writer, counts);
  backend->transfer_file(writer, fails);
  backend->transfer_file(writer, counts);  // is not carried out
  backend->record(writer, 3);
  backend->wait(compute, 3);  // does not hang
  CHECK_THROWS_WITH_AS(backend->synchronize(), "the drive is gone", RunError);
  CHECK(carried_out == 1);
  backend->transfer_file(writer, counts);
  backend->synchronize();
  CHECK(carried_out == 2);
}

}  // namespace parplan
