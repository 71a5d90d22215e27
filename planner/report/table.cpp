#include "planner/report/table.h"

#include <algorithm>

#include <fmt/format.h>

#include "planner/cluster/price_and_power.h"
#include "planner/report/plan_row.h"

namespace parplan {

std::string align_columns(const std::vector<std::vector<std::string>>& rows, int left) {
  std::vector<std::size_t> widths;
  for (const std::vector<std::string>& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  for (const std::vector<std::string>& row : rows) {
    std::string line;
    for (std::size_t c = 0; c < row.size(); ++c) {
      if (c > 0) line += "  ";
      line += static_cast<int>(c) < left ? fmt::format("{:<{}}", row[c], widths[c])
                                         : fmt::format("{:>{}}", row[c], widths[c]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

std::string fold_lines(const std::string& text, std::size_t width) {
  std::string out;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    std::string line = text.substr(begin, end - begin);
    begin = end + 1;
    const std::size_t first = std::min(line.find_first_not_of(' '), line.size());
    const std::string indent(first + 2, ' ');
    while (line.size() > width) {
      std::size_t space = line.rfind(' ', width);
      if (space == std::string::npos || space < indent.size()) space = line.find(' ', width);
      if (space == std::string::npos) break;
      out += line.substr(0, line.find_last_not_of(' ', space) + 1) + '\n';
      line = indent + line.substr(std::min(line.find_first_not_of(' ', space), line.size()));
    }
    out += line + '\n';
  }
  return out;
}

std::string format_cost(const Cluster& cluster, int devices, Seconds time) {
  const std::optional<double> hour = hourly_price(cluster, devices);
  const std::optional<std::string> of = currency(cluster);
  const bool priced = hour && of;
  const double cost = priced ? *hour / 3600.0 * time.value : devices * time.value;
  return fmt::format("{} {}", cost >= 999.5 ? fmt::format("{:.0f}", cost) : fmt::format("{:#.3g}", cost),
                     priced ? *of : "device-seconds");
}

std::string format_count(double value) {
  return value >= 999.5 ? fmt::format("{:.0f}", value) : fmt::format("{:.3g}", value);
}

std::string format_share(double part, double whole) {
  return whole > 0.0 ? fmt::format("{:.1f} %", 100.0 * part / whole) : "-";
}

std::string write_table(const Plan& plan) {
  std::vector<std::vector<std::string>> rows{
      {"rank", "layout", "devices", "step", "tokens/s", "MFU", "memory peak", "of capacity", "bubble", "exposed comm"}};
  const bool costs = plan.search.objective == Objective::cost || currency(plan.cluster).has_value();
  if (costs) rows.front().push_back("cost a step");
  for (int rank = 1; rank <= static_cast<int>(plan.alternatives.size()) + 1; ++rank) {
    const RowSubject subject = subject_of(plan, rank);
    const StepTime& time = subject.result.time;
    const Json utilization = model_flops_utilization(subject);
    rows.push_back(
        {fmt::format("{}", rank), layout_text(subject.spec), fmt::format("{}", subject.spec.mesh.size()),
         format_duration(time.total()), format_count(tokens_per_second(subject)),
         utilization.is_null() ? "-" : format_share(utilization.get<double>(), 1.0),
         format_bytes(subject.result.memory.peak()),
         format_share(static_cast<double>(subject.result.memory.peak().count),
                      static_cast<double>(
                          memory_capacity(subject.cluster, subject.spec.mesh, subject.result.memory_stage).count)),
         format_share(time.bubble.value, time.total().value),
         format_share(time.exposed_in_all().value, time.total().value)});
    if (costs) rows.back().push_back(format_cost(subject.cluster, subject.spec.mesh.size(), time.total()));
  }
  return align_columns(rows, 2);
}

}  // namespace parplan
