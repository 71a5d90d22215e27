#include "planner/report/explain_words.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "planner/base/enum_index.h"
#include "planner/base/text.h"
#include "planner/report/part_names.h"
#include "planner/report/table.h"

namespace parplan {

const ObjectiveWords& words_of(Objective objective) {
  static constexpr std::array table = {
      ObjectiveWords{"the fastest", "faster", "slower", "as fast"},
      ObjectiveWords{"the cheapest", "cheaper", "dearer", "as cheap"},
      ObjectiveWords{"the one of least memory", "less memory", "more memory", "as much memory"}};
  return table[index_of(objective)];
}

double better_by(Objective objective, double gap) {
  return objective == Objective::time ? gap : 1.0 - 1.0 / (1.0 + gap);
}

std::string compared(double change, Objective objective, int digits) {
  const ObjectiveWords& words = words_of(objective);
  const double by = change < 0.0 ? better_by(objective, 1.0 / (1.0 + change) - 1.0) : change;
  const std::string share = fmt::format("{:.{}f}", 100.0 * by, digits);
  if (share.find_first_not_of("0.") == std::string::npos) return words.same;
  return fmt::format("{} % {}", share, change < 0.0 ? words.less : words.more);
}

std::string measured_against(const Plan& plan, const RankedPlan& other, const RankedPlan& now, int digits) {
  const auto ratio = [](double a, double b) { return a / b - 1.0; };
  const Seconds time = other.result.time.total();
  std::string text = fmt::format("{} ({})", format_duration(time),
                                 compared(ratio(time.value, now.result.time.total().value), Objective::time, digits));
  const double more = excess(plan.search.objective, {cluster_of(plan, other), other.spec, other.result},
                             {cluster_of(plan, now), now.spec, now.result});
  const std::string change = compared(more, plan.search.objective, digits);
  switch (plan.search.objective) {
    case Objective::time: break;
    case Objective::cost:
      text += fmt::format(", {} ({})", format_cost(cluster_of(plan, other), other.spec.mesh.size(), time), change);
      break;
    case Objective::memory: text += fmt::format(", {} ({})", format_bytes(other.result.memory.peak()), change); break;
  }
  return text;
}

double slower(const StepResult& other, const StepResult& than) { return other.time.total() / than.time.total() - 1.0; }

std::string signed_share(double change) {
  if (std::abs(change) < 5e-4) return "0.0 %";
  return fmt::format("{:+.{}f} %", 100.0 * change, std::abs(change) < 0.0995 ? 1 : 0);
}

std::string differences(const StepTime& best, const StepTime& other) {
  struct Difference {
    std::string_view name;
    Seconds time;
  };
  std::vector<Difference> found;
  for (const TimePart& part : time_parts()) {
    const Seconds time = part_of(other, part) - part_of(best, part);
    if (std::abs(time.value) >= 1e-3 * best.total().value) found.push_back({part.name, time});
  }
  std::stable_sort(found.begin(), found.end(), [](const Difference& a, const Difference& b) {
    return std::abs(a.time.value) > std::abs(b.time.value);
  });
  std::vector<std::string> words;
  for (const Difference& difference : found)
    words.push_back(fmt::format("{} {}{}", difference.name, difference.time.value < 0.0 ? "-" : "+",
                                format_duration(Seconds(std::abs(difference.time.value)))));
  return words.empty() ? "no part differs by a thousandth of the step" : join(words);
}

std::string loss(const Plan& plan, const Rival& rival) {
  if (rival.fits()) return differences(plan.prediction.time, rival.plan.result.time);
  const Shortage& lack = *rival.shortage;
  if (lack.home != Home::device) return fmt::format("does not fit: {}", words_of(lack));
  return fmt::format("does not fit: {} more than the {} of a device", format_bytes(lack.needed - lack.available),
                     format_bytes(lack.available));
}

std::string indent(const std::string& text) {
  std::string out;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    out += "  " + text.substr(begin, end - begin) + '\n';
    begin = end == std::string::npos ? text.size() : end + 1;
  }
  return out;
}

}  // namespace parplan
