#pragma once

#include <span>
#include <string>
#include <vector>

#include "planner/base/json.h"
#include "planner/validate/validate.h"

namespace parplan {

// The errors of some runs of one quantity.
struct SummaryRow {
  std::string stated;    // "exact" or "assumed"
  std::string quantity;  // "step time" or "memory"
  std::string of;        // "all", "source", "engine", "device" or "message size"
  std::string name;      // of that
  ErrorSummary errors;
};
std::vector<SummaryRow> summary_rows(std::span<const ValidatedRun> runs);
// A sentence each on order and on memory that runs out, and a line for each reason why runs were
// skipped.
std::string summary_in_words(std::span<const ValidatedRun> runs);

// A line for each run that was predicted, with the engine that it was predicted as on demand; what
// was assumed of which runs, and which were skipped for what reason; then summaries by source,
// engine, device and size of message, the order of layouts, and whose memory runs out.
std::string validation_table(std::span<const ValidatedRun> runs, bool with_engines = false);

// parplan.validate/1 (docs/json.md).
Json validation_json(std::span<const ValidatedRun> runs, const std::string& version);
// Its rows as CSV.
std::string validation_csv(std::span<const ValidatedRun> runs);

}  // namespace parplan
