#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/share_results.h"
#include "runtime/thinned.h"

namespace parplan {

// The steps of a run that choose the one that stands for it (typical_step), in constant memory: the
// first three, which warm up, the last one, and of those between them as many as `most_between`,
// evenly spaced.
class StepHistory {
 public:
  static constexpr std::size_t first_ones = 3;
  static constexpr std::size_t most_between = 128;

  void add(const JobStep& step);
  // In their order; all steps while there are few.
  std::vector<JobStep> steps() const;
  std::int64_t count() const { return count_; }

 private:
  std::vector<JobStep> first_;
  Thinned<JobStep> between_{most_between};
  std::optional<JobStep> last_;
  std::int64_t count_ = 0;
};

// The numbers of a run that reports list.
struct StepLists {
  static constexpr std::size_t most = 100'000;
  Thinned<double> loss{most};
  Thinned<Seconds> time{most};
};

}  // namespace parplan
