#include "runtime/launch/flight_recorder.h"

#include <doctest/doctest.h>

#include <atomic>
#include <thread>

using namespace parplan;

TEST_CASE("a flight recorder keeps the last instructions, oldest first") {
  FlightRecorder flight;
  CHECK(flight.last().empty());
  CHECK(flight.position() == Position{});
  flight.begin_step(3);
  for (std::size_t i = 0; i < 10; ++i) flight.begin(7, i);
  std::vector<FlightRecorder::Entry> last = flight.last();
  REQUIRE(last.size() == 10);
  CHECK(last.front().instruction == 0);
  CHECK(last.back().instruction == 9);
  CHECK(last.back().step == 3);
  CHECK(last.back().call == 7);
  flight.begin_step(4);
  for (std::size_t i = 0; i < 5000; ++i) flight.begin(1000000 + i, 2);
  last = flight.last();
  REQUIRE(last.size() == FlightRecorder::kept - 1);
  for (std::size_t i = 0; i < last.size(); ++i)
    CHECK(last[i].call == static_cast<std::int32_t>(1005000 - last.size() + i));
  CHECK(flight.position().call == 1004999);
  CHECK(flight.position().step == 4);
}

TEST_CASE("a position says whether a rank waits, and moves with whatever it does") {
  FlightRecorder flight;
  flight.begin(0, 0);
  const std::int64_t moves = flight.position().moves;
  {
    const WaitingForRanks waiting(flight);
    CHECK(flight.position().waits);
    CHECK(flight.position().moves > moves);
  }
  CHECK(!flight.position().waits);
  CHECK(flight.position().moves > moves + 1);
}

TEST_CASE("what is read while the rank goes on is whole and in order") {
  FlightRecorder flight;
  std::atomic<bool> over = false;
  std::jthread rank([&] {
    for (std::size_t i = 0; !over; ++i) flight.begin(i, i % 1000);
  });
  for (int round = 0; round < 2000; ++round) {
    const std::vector<FlightRecorder::Entry> last = flight.last();
    for (std::size_t i = 0; i < last.size(); ++i) {
      REQUIRE(last[i].instruction == last[i].call % 1000);
      REQUIRE(last[i].call == last.front().call + static_cast<std::int32_t>(i));
    }
  }
  over = true;
}
