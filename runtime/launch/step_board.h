#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

namespace parplan {

// Memory that a parent shares with the processes that it starts: each of them notes its last
// complete step there, so that the parent can say when one died, however it died.
class StepBoard {
 public:
  // The variable that tells children the number of the inherited descriptor.
  static constexpr const char* variable = "PARPLAN_STEP_BOARD";

  explicit StepBoard(int processes);  // the parent's; RunError where the system has no memory for it
  ~StepBoard();
  StepBoard(const StepBoard&) = delete;
  StepBoard& operator=(const StepBoard&) = delete;
  // The child's, or none where no parent has made one. `descriptor` is the variable's value, or
  // null; it is closed.
  static std::optional<StepBoard> inherited(const char* descriptor);
  StepBoard(StepBoard&& other) noexcept;
  StepBoard& operator=(StepBoard&&) = delete;

  int descriptor() const { return descriptor_; }  // the parent's: children inherit it
  void note(int process, std::int64_t step) noexcept;  // from 0
  std::optional<std::int64_t> last_step(int process) const noexcept;

 private:
  StepBoard() = default;
  using Cell = std::atomic<std::int64_t>;  // complete steps
  Cell* cells_ = nullptr;
  int count_ = 0;
  int descriptor_ = -1;
};

}  // namespace parplan
