#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace parplan {

// The bytes of one buffer, cut where uses of it begin and end, with what a check knows of each
// piece.
template <class State>
class Intervals {
 public:
  struct Interval {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    State state;
  };

  explicit Intervals(std::int64_t bytes) {
    if (bytes > 0) all_.push_back({0, bytes, {}});
  }
  // Whole intervals that make up [begin, end). Valid until the next call.
  std::span<Interval> within(std::int64_t begin, std::int64_t end) {
    if (begin >= end) return {};
    const std::size_t first = cut(begin);
    const std::size_t last = cut(end);
    return {all_.data() + first, last - first};
  }
  std::span<Interval> all() { return all_; }

 private:
  // The position of the interval that begins at `at`, which is cut if none does.
  std::size_t cut(std::int64_t at) {
    const auto found =
        std::lower_bound(all_.begin(), all_.end(), at, [](const Interval& i, std::int64_t b) { return i.begin < b; });
    const std::size_t position = static_cast<std::size_t>(found - all_.begin());
    if ((found != all_.end() && found->begin == at) || at >= all_.back().end) return position;
    Interval tail = all_[position - 1];
    all_[position - 1].end = tail.begin = at;
    all_.insert(found, tail);
    return position;
  }

  std::vector<Interval> all_;
};

}  // namespace parplan
