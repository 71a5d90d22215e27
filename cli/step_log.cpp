#include "cli/step_log.h"

#include <cerrno>
#include <cstring>

#include <fmt/ostream.h>

#include "planner/base/json.h"

namespace parplan {
namespace {

std::string line_of(const StepRecord& record) {
  const Json json = {{"step", record.step},
                     {"loss", json_number(record.loss)},
                     {"gradient_norm", optional_number(record.gradient_norm)},
                     {"learning_rate", json_number(record.learning_rate)},
                     {"step_time_s", json_number(record.time.value)},
                     {"skipped", record.skipped}};
  return json.dump() + '\n';
}

}  // namespace

StepLog::StepLog(const std::string& path, Terminal& terminal) : path_(path), terminal_(terminal) {
  if (path != "-") file_.open(path, std::ios::trunc);
}

void StepLog::add(const StepRecord& record) {
  if (failed_) return;
  errno = 0;
  std::ostream& to = path_ == "-" ? terminal_.out : file_;
  to << line_of(record);
  to.flush();
  if (to.good() || path_ == "-") return;  // what standard output did not take is said at the end
  failed_ = true;
  fmt::print(terminal_.err, "error: cannot write '{}': {}; the run goes on without it\n", path_,
             errno == 0 ? "it takes no more" : std::strerror(errno));
}

}  // namespace parplan
