#include "planner/report/table.h"

#include <algorithm>

#include <fmt/format.h>

#include "planner/cluster/price_and_power.h"

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
      if (space == std::string::npos || space < indent.size())
        space = line.find(' ', std::max(width, indent.size()));
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
  return fmt::format("{} {}", cost >= 99.95 ? fmt::format("{:.0f}", cost) : fmt::format("{:#.3g}", cost),
                     priced ? *of : "device-seconds");
}

std::string format_count(double value) {
  return value >= 999.5 ? fmt::format("{:.0f}", value) : fmt::format("{:.3g}", value);
}

std::string format_share(double part, double whole) {
  return whole > 0.0 ? fmt::format("{:.1f} %", 100.0 * part / whole) : "-";
}

}  // namespace parplan
