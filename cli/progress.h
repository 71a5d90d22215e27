#pragma once

#include <chrono>
#include <string>

#include "cli/commands.h"

namespace parplan {

enum class Talk { wanted, quiet };

// The progress of long work: one line of standard error that is overwritten. It appears only if a
// person watches and messages are wanted, and only once the work takes longer than `patience`; it
// changes at most ten times a second, and disappears when the work is done (or an exception leaves
// it).
class ProgressLine {
 public:
  ProgressLine(Terminal& terminal, Talk talk, std::chrono::milliseconds patience = std::chrono::seconds(1));
  ~ProgressLine() { clear(); }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void show(const std::string& text);
  void clear();

 private:
  Terminal& terminal_;
  bool shown_at_all_;
  std::chrono::steady_clock::time_point next_;
  std::size_t width_ = 0;  // of the line that is shown now
};

}  // namespace parplan
