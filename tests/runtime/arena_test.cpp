#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "planner/base/error.h"
#include "runtime/arena.h"
#include "runtime/device/cpu/cpu_backend.h"
#include "runtime/check_promises.h"

namespace parplan {
namespace {

// Two buffers in each home, the last ones not of whole words.
Program program_of_all_homes() {
  Program program;
  program.rank = 3;
  for (const Home home : all_homes) {
    program.buffers.push_back({.name = "first", .bytes = 256, .offset = 0, .persistent = true, .home = home});
    program.buffers.push_back({.name = "last", .bytes = 103, .offset = 256, .persistent = true, .home = home});
    program.arena_bytes[home] = 359;
  }
  return program;
}
constexpr int host_first = 2, host_last = 3, nvme_first = 4, nvme_last = 5;

// Fills all buffers.
void touch(const Program& program, const Arena& arena) {
  for (std::size_t b = 0; b < program.buffers.size(); ++b) {
    const std::vector<char> values(static_cast<std::size_t>(program.buffers[b].bytes), 7);
    arena.write(static_cast<int>(b), values.data(), Bytes(program.buffers[b].bytes));
  }
}

std::string broken_promise(const Program& program, const Arena& arena) {
  try {
    check_promises(program, arena, {}, {});
  } catch (const InternalError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("an arena has a block in each home that a Program uses, and finds what was touched in it") {
  const auto backend = make_cpu_backend();
  const Program program = program_of_all_homes();
  const Arena arena(*backend, program);
  CHECK(arena.begin(Home::device) != arena.begin(Home::host));
  CHECK(std::set{arena.at(0), arena.at(1), arena.at(host_first), arena.at(host_last)}.size() == 4);
  CHECK(arena.at(host_last) == arena.begin(Home::host) + 256);
  CHECK(arena.highest_touched() == PerHome<std::int64_t>{.device = 0, .host = 0});

  const char value = 1;
  arena.write(host_first, &value, Bytes(1));
  CHECK(arena.highest_touched() == PerHome<std::int64_t>{.device = 0, .host = 4});  // a word
  CHECK(arena.highest_touched(host_first) == 4);
  CHECK(arena.highest_touched(host_last) == 0);
  arena.write(nvme_last, &value, Bytes(1));
  CHECK(arena.highest_touched() == PerHome<std::int64_t>{.device = 0, .host = 4, .nvme = 260});
  CHECK(arena.highest_touched(nvme_first) == 0);
  CHECK(arena.highest_touched(nvme_last) == 4);
  touch(program, arena);
  CHECK(arena.highest_touched() == program.arena_bytes);
  CHECK(arena.highest_touched(host_last) == 103);
  char found = 0;
  arena.read(nvme_last, &found, Bytes(1), Bytes(102));
  CHECK(found == 7);
  arena.refill();
  CHECK(arena.highest_touched() == PerHome<std::int64_t>{});
}

TEST_CASE("a Program without buffers on the host has no arena there") {
  const auto backend = make_cpu_backend();
  Program program;
  program.buffers.push_back({.name = "only", .bytes = 16});
  program.arena_bytes.device = 16;
  const Arena arena(*backend, program);
  CHECK(arena.begin(Home::host) == nullptr);
  touch(program, arena);
  CHECK(arena.highest_touched() == PerHome<std::int64_t>{.device = 16, .host = 0});
  CHECK(broken_promise(program, arena) == "");
}

TEST_CASE("the promised peak of each home is checked, and a write past the end of either arena is found") {
  const auto backend = make_cpu_backend();
  const Program program = program_of_all_homes();
  const Arena arena(*backend, program);
  touch(program, arena);
  CHECK(broken_promise(program, arena) == "");
  const char past_the_end = 1;
  arena.file().write(364, &past_the_end, 1);
  CHECK(broken_promise(program, arena) == "rank 3 was promised an arena of 359 bytes on NVMe and touched 368");
  arena.begin(Home::host)[360] = std::byte{1};  // past the last word, in the guard
  CHECK(broken_promise(program, arena) ==
        "rank 3 was promised an arena of 359 bytes on the host and touched 364");
  arena.begin(Home::device)[370] = std::byte{1};
  CHECK(broken_promise(program, arena) == "rank 3 was promised an arena of 359 bytes and touched 372");

  arena.refill();
  for (const int buffer : {0, 1, host_first}) arena.zero(buffer);
  CHECK(broken_promise(program, arena) ==
        "rank 3 was promised an arena of 359 bytes on the host and touched 256");
}

}  // namespace parplan
