#pragma once

#include <chrono>
#include <string>

#include "cli/commands.h"

namespace parplan {

enum class Talk { wanted, quiet };

// How far long work is: one line of standard error that is written over. Only where a person
// watches and talk is wanted, only once the work takes longer than `patience`, at most ten times a
// second, and gone when it is done (or thrown out of).
class Progress {
 public:
  Progress(Terminal& terminal, Talk talk, std::chrono::milliseconds patience = std::chrono::seconds(1));
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(const std::string& text);
  void clear();

 private:
  Terminal& terminal_;
  bool shown_at_all_;
  std::chrono::steady_clock::time_point next_;
  std::size_t width_ = 0;  // of what stands there now
};

}  // namespace parplan
