#include "runtime/step_history.h"

namespace parplan {

void StepHistory::add(const JobStep& step) {
  ++count_;
  if (first_.size() < first_ones) {
    first_.push_back(step);
    return;
  }
  if (last_) between_.add(*last_);
  last_ = step;
}

std::vector<JobStep> StepHistory::steps() const {
  std::vector<JobStep> all = first_;
  all.insert(all.end(), between_.kept().begin(), between_.kept().end());
  if (last_) all.push_back(*last_);
  return all;
}

}  // namespace parplan
