#include "runtime/step_history.h"

#include <doctest/doctest.h>

#include <vector>

namespace parplan {
namespace {

JobStep step_of(double seconds) {
  return {.loss = seconds, .time = Seconds(seconds), .ranks = std::vector<StepMeasurement>(2)};
}

std::vector<double> numbers_of(const std::vector<JobStep>& steps) {
  std::vector<double> numbers;
  for (const JobStep& step : steps) numbers.push_back(step.loss);
  return numbers;
}

}  // namespace

TEST_CASE("a series is kept whole while it is short, then every second, every fourth value of it") {
  Thinned<int> series(4);
  const auto kept_after = [&](int count) {
    while (series.count() < count) series.add(static_cast<int>(series.count()));
    return series.kept();
  };
  CHECK(kept_after(4) == std::vector<int>{0, 1, 2, 3});
  CHECK(series.every() == 1);
  CHECK(kept_after(5) == std::vector<int>{0, 2, 4});
  CHECK(series.every() == 2);
  CHECK(kept_after(8) == std::vector<int>{0, 2, 4, 6});
  CHECK(kept_after(9) == std::vector<int>{0, 4, 8});
  CHECK(kept_after(16) == std::vector<int>{0, 4, 8, 12});
  CHECK(kept_after(17) == std::vector<int>{0, 8, 16});
  CHECK(series.every() == 8);
}

TEST_CASE("a series of a million values holds as much as one of a hundred thousand") {
  StepLists lists;
  for (int step = 0; step < 1'000'000; ++step) lists.loss.add(step);
  CHECK(lists.loss.every() == 16);
  CHECK(lists.loss.kept().size() == 1'000'000 / 16);
  CHECK(lists.loss.kept().capacity() <= 2 * StepLists::most);
  CHECK(lists.loss.kept().back() == 999'984.0);  // 16 * 62499
}

TEST_CASE("few steps are all kept in their order") {
  StepHistory history;
  CHECK(history.steps().empty());
  std::vector<double> all;
  for (int step = 0; step < 132; ++step) {
    history.add(step_of(step));
    all.push_back(step);
    CHECK(numbers_of(history.steps()) == all);
  }
  CHECK(history.steps().back().ranks.size() == 2);
}

TEST_CASE("the first steps and the last one stay, however many there are between them") {
  StepHistory history;
  for (int step = 0; step < 100'000; ++step) history.add(step_of(step));
  CHECK(history.count() == 100'000);
  const std::vector<double> kept = numbers_of(history.steps());
  REQUIRE(kept.size() > 4);
  CHECK(kept.size() <= StepHistory::first_ones + StepHistory::most_between + 1);
  CHECK(kept.size() >= StepHistory::first_ones + StepHistory::most_between / 2 + 1);
  CHECK(std::vector<double>(kept.begin(), kept.begin() + 3) == std::vector<double>{0, 1, 2});
  CHECK(kept.back() == 99'999.0);
  for (std::size_t i = 4; i + 1 < kept.size(); ++i) CHECK(kept[i] - kept[i - 1] == 1024.0);  // evenly spaced
}

}  // namespace parplan
