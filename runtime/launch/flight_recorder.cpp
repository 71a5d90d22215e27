#include "runtime/launch/flight_recorder.h"

#include <algorithm>

namespace parplan {

FlightRecorder::Entry FlightRecorder::read(std::int64_t number) const noexcept {
  const Cell& cell = ring_[static_cast<std::size_t>(number) % kept];
  const std::uint64_t place = cell.place.load(std::memory_order_relaxed);
  return {.step = cell.step.load(std::memory_order_relaxed),
          .call = static_cast<std::int32_t>(place >> 32),
          .instruction = static_cast<std::int32_t>(place & 0xffffffffu),
          .begun = Clock::time_point(Clock::duration(cell.time.load(std::memory_order_relaxed)))};
}

Position FlightRecorder::position() const noexcept {
  Position position;
  position.moves = moves_.load(std::memory_order_acquire);
  position.waits = waits_.load(std::memory_order_relaxed);
  if (const std::int64_t begun = begun_.load(std::memory_order_acquire); begun > 0) {
    const Entry entry = read(begun - 1);
    position.step = entry.step;
    position.call = entry.call;
    position.instruction = entry.instruction;
  }
  return position;
}

// The cell after the last entry may be being written: it is the oldest one's.
std::vector<FlightRecorder::Entry> FlightRecorder::last() const {
  const auto size = static_cast<std::int64_t>(kept);
  const std::int64_t end = begun_.load(std::memory_order_acquire);
  const std::int64_t begin = std::max<std::int64_t>(0, end - size + 1);
  std::vector<Entry> entries;
  for (std::int64_t number = begin; number < end; ++number) entries.push_back(read(number));
  std::atomic_thread_fence(std::memory_order_acquire);
  const std::int64_t overwritten = begun_.load(std::memory_order_relaxed) - size + 1 - begin;
  entries.erase(entries.begin(),
                entries.begin() + std::clamp<std::int64_t>(overwritten, 0, static_cast<std::int64_t>(entries.size())));
  return entries;
}

}  // namespace parplan
