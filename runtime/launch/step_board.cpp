#include "runtime/launch/step_board.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {

StepBoard::StepBoard(int processes) : count_(processes) {
  const std::size_t bytes = sizeof(Cell) * static_cast<std::size_t>(processes);
  descriptor_ = memfd_create("parplan steps", 0);
  void* memory = MAP_FAILED;
  if (descriptor_ >= 0 && ftruncate(descriptor_, static_cast<off_t>(bytes)) == 0)
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (memory == MAP_FAILED) {
    const int error = errno;
    if (descriptor_ >= 0) close(descriptor_);
    throw RunError(fmt::format("memory to share with the processes of this job: {}", std::strerror(error)));
  }
  cells_ = static_cast<Cell*>(memory);  // zeros
}

StepBoard::StepBoard(StepBoard&& other) noexcept
    : cells_(std::exchange(other.cells_, nullptr)),
      count_(std::exchange(other.count_, 0)),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

StepBoard::~StepBoard() {
  if (cells_ != nullptr) munmap(cells_, sizeof(Cell) * static_cast<std::size_t>(count_));
  if (descriptor_ >= 0) close(descriptor_);
}

std::optional<StepBoard> StepBoard::inherited(const char* descriptor) {
  if (descriptor == nullptr) return std::nullopt;
  const std::string_view text = descriptor;
  int number = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  struct stat found {};
  if (error != std::errc() || end != text.data() + text.size() || number <= STDERR_FILENO ||
      fstat(number, &found) != 0 || !S_ISREG(found.st_mode) || found.st_size <= 0)
    return std::nullopt;
  void* memory = mmap(nullptr, static_cast<std::size_t>(found.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, number, 0);
  close(number);
  if (memory == MAP_FAILED) return std::nullopt;
  StepBoard board;
  board.cells_ = static_cast<Cell*>(memory);
  board.count_ = static_cast<int>(found.st_size / static_cast<off_t>(sizeof(Cell)));
  return board;
}

void StepBoard::note(int process, std::int64_t step) noexcept {
  if (process >= 0 && process < count_) cells_[process].store(step + 1, std::memory_order_relaxed);
}

std::optional<std::int64_t> StepBoard::last_step(int process) const noexcept {
  const std::int64_t steps = process >= 0 && process < count_ ? cells_[process].load(std::memory_order_relaxed) : 0;
  return steps == 0 ? std::nullopt : std::optional(steps - 1);
}

}  // namespace parplan
