#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace parplan {

// What a rank does at a moment, as others may know it.
struct Position {
  std::int64_t step = -1;         // from 0; -1 before the first
  std::int32_t call = -1;         // of its Program
  std::int32_t instruction = -1;  // of the call's Segment
  bool waits = false;             // for other ranks
  std::int64_t moves = 0;         // raised with everything that the rank begins or ends
  bool operator==(const Position&) const = default;
};

// The last instructions of a rank, for the case that the job fails: a ring of fixed size, into
// which the rank's thread writes without allocating or locking, and from which any thread reads.
class FlightRecorder {
 public:
  static constexpr std::size_t kept = 256;
  using Clock = std::chrono::steady_clock;
  struct Entry {
    std::int64_t step = 0;
    std::int32_t call = 0;
    std::int32_t instruction = 0;
    Clock::time_point begun;
  };

  // By the rank's thread, or where that is known to wait. `step` counts from 0.
  void begin_step(std::int64_t step) noexcept { step_ = step; }
  void begin(std::size_t call, std::size_t instruction) noexcept {
    const std::int64_t number = begun_.load(std::memory_order_relaxed);
    Cell& cell = ring_[static_cast<std::size_t>(number) % kept];
    cell.step.store(step_, std::memory_order_relaxed);
    cell.place.store(static_cast<std::uint64_t>(call) << 32 | static_cast<std::uint32_t>(instruction),
                     std::memory_order_relaxed);
    cell.time.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
    begun_.store(number + 1, std::memory_order_release);
    move();
  }
  // Around what waits for other ranks.
  void begin_waiting() noexcept {
    waits_.store(true, std::memory_order_relaxed);
    move();
  }
  void end_waiting() noexcept {
    waits_.store(false, std::memory_order_relaxed);
    move();
  }

  Position position() const noexcept;
  // Oldest first. Those that the rank overwrites meanwhile are left out.
  std::vector<Entry> last() const;

 private:
  struct Cell {
    std::atomic<std::int64_t> step{0};
    std::atomic<std::uint64_t> place{0};
    std::atomic<Clock::rep> time{0};
  };
  void move() noexcept { moves_.store(moves_.load(std::memory_order_relaxed) + 1, std::memory_order_release); }
  Entry read(std::int64_t number) const noexcept;

  std::int64_t step_ = 0;
  std::array<Cell, kept> ring_;
  std::atomic<std::int64_t> begun_{0};
  std::atomic<std::int64_t> moves_{0};
  std::atomic<bool> waits_{false};
};

// Says of a rank that it waits, as long as this lives.
class WaitingForRanks {
 public:
  explicit WaitingForRanks(FlightRecorder& rank) : rank_(rank) { rank_.begin_waiting(); }
  ~WaitingForRanks() { rank_.end_waiting(); }
  WaitingForRanks(const WaitingForRanks&) = delete;
  WaitingForRanks& operator=(const WaitingForRanks&) = delete;

 private:
  FlightRecorder& rank_;
};

}  // namespace parplan
