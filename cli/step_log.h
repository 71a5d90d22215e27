#pragma once

#include <fstream>
#include <string>

#include "cli/commands.h"
#include "runtime/run.h"

namespace parplan {

// A file with a line of JSON for each step (docs/json.md), written when the step is done, so that
// it can be followed while the run goes on: what is there is whole lines, but the file grows under
// its own name, unlike other outputs. A file that cannot be written ends no run: it is said once.
class StepLog {
 public:
  // `path` may be "-" for standard output. An older file is replaced.
  StepLog(const std::string& path, Terminal& terminal);
  void add(const StepRecord& record);
  bool failed() const { return failed_; }

 private:
  std::string path_;
  Terminal& terminal_;
  std::ofstream file_;
  bool failed_ = false;
};

}  // namespace parplan
