#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planner/base/error.h"

namespace parplan {

// A series of any length in constant memory: all of its values while they are few, then every
// second, every fourth, and so on, counted from the first.
template <class T>
class Thinned {
 public:
  // Keeps between half of `most` (even) and `most` values once there are more.
  explicit Thinned(std::size_t most) : most_(most) { PARPLAN_ASSERT(most >= 2 && most % 2 == 0, "an even number"); }

  void add(const T& value) {
    if (count_ % every_ == 0 && kept_.size() == most_) {
      for (std::size_t i = 0; i < most_ / 2; ++i) kept_[i] = kept_[2 * i];
      kept_.resize(most_ / 2);
      every_ *= 2;
    }
    if (count_ % every_ == 0) kept_.push_back(value);
    ++count_;
  }
  // Element i is value i * every() of the series.
  const std::vector<T>& kept() const { return kept_; }
  std::int64_t every() const { return every_; }
  std::int64_t count() const { return count_; }

 private:
  std::size_t most_;
  std::vector<T> kept_;
  std::int64_t every_ = 1;
  std::int64_t count_ = 0;
};

}  // namespace parplan
