#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "planner/base/units.h"

namespace parplan {

// What a log's lines are to be read with: some print tokens or samples a second instead of times.
struct LoggedJob {
  std::int64_t global_batch = 1;
  std::int64_t sequence_length = 1;
  int devices = 1;
};

// The steps that a training log tells of.
struct LoggedSteps {
  std::string_view written_by;  // "Megatron-LM"
  int lines = 0;                // that count: after the warm-up, of this global batch
  int other_batches = 0;        // lines that are left out for another global batch
  Seconds median;
  // The tenth and the ninetieth percentile: how steady the steps were.
  Seconds low, high;
};

// Reads the log of Megatron-LM (its forks, NeMo), DeepSpeed, torchtitan or nanotron, with whatever
// stands before and between its lines: ranks, dates, colours. The first tenth of the lines, at
// least one where there are several, is warm-up. ConfigError where there is no such line.
LoggedSteps read_training_log(const std::string& text, const std::string& file_name, const LoggedJob& job);

}  // namespace parplan
