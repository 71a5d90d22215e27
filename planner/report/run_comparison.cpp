#include "planner/report/run_comparison.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "planner/report/part_names.h"
#include "planner/report/table.h"

namespace parplan {
namespace {

// "+12.3 %": the difference between measurement and prediction, relative to the prediction.
std::string difference(double predicted, double measured) {
  if (predicted == measured) return "equal";
  return predicted > 0.0 ? fmt::format("{:+.1f} %", 100.0 * (measured / predicted - 1.0)) : "-";
}

}  // namespace

std::string write_comparison(const Plan& plan, const RunComparison& comparison) {
  const StepResult& predicted = plan.prediction;
  const StepResult& measured = comparison.measured;
  std::vector<std::vector<std::string>> rows{{"", "predicted", "measured", "difference"}};
  const auto time = [&](std::string_view what, Seconds p, Seconds m) {
    rows.push_back({std::string(what), format_duration(p), format_duration(m), difference(p.value, m.value)});
  };
  time("step time", predicted.time.total(), measured.time.total());
  for (const TimePart& part : time_parts()) {
    const Seconds p = part_of(predicted.time, part);
    const Seconds m = part_of(measured.time, part);
    if (p.value > 0.0 || m.value > 0.0) time(fmt::format("  {}", part.name), p, m);
  }
  const auto bytes = [&](std::string_view what, Bytes p, Bytes m) {
    rows.push_back({std::string(what), fmt::format("{} B", p.count), fmt::format("{} B", m.count),
                    difference(static_cast<double>(p.count), static_cast<double>(m.count))});
  };
  const auto is_named = [&](Axis axis) {
    return !may_be_unnamed(axis) || predicted.communication[axis].count > 0 || measured.communication[axis].count > 0;
  };
  for (const CommunicationPart& part : communication_parts())
    if (is_named(part.axis)) bytes(fmt::format("sent a step, {}", part.name), predicted.communication[part.axis],
          measured.communication[part.axis]);
  Bytes arenas;
  for (const Home home : all_homes) {
    const std::vector<Bytes>& promised = comparison.promised[home];
    const Bytes of_home = std::accumulate(promised.begin(), promised.end(), Bytes(0));
    if (home != Home::nvme && !promised.empty())
      for (const int rank : comparison.hosted) arenas += promised[static_cast<std::size_t>(rank)];
    if (home != Home::device && of_home == Bytes(0)) continue;
    for (std::size_t rank = 0; rank < promised.size(); ++rank)
      bytes(fmt::format("peak of rank {}{}", rank, where(home)), promised[rank], comparison.touched[home][rank]);
  }
  if (comparison.device_used) {
    rows.push_back({"device memory in use", format_bytes(predicted.memory.peak()),
                    format_bytes(*comparison.device_used),
                    difference(static_cast<double>(predicted.memory.peak().count),
                               static_cast<double>(comparison.device_used->count))});
    return align_columns(rows, 1);
  }
  // A process holds the arenas in memory of its ranks; the rest of its growth is threads, the text
  // and libraries.
  const bool has_all = comparison.hosted.size() == comparison.promised[Home::device].size();
  rows.push_back({has_all ? "process memory growth" : "memory growth of the first process", format_bytes(arenas),
                  format_bytes(comparison.process_growth),
                  difference(static_cast<double>(arenas.count), static_cast<double>(comparison.process_growth.count))});
  return align_columns(rows, 1);
}

std::string write_instructions(const RunComparison& comparison, int most) {
  std::vector<InstructionTimes> sorted = comparison.instructions;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const InstructionTimes& a, const InstructionTimes& b) { return a.measured > b.measured; });
  std::vector<std::vector<std::string>> rows{
      {"segment", "instruction", "runs a step", "predicted", "measured", "difference"}};
  const auto add = [&](const std::string& segment, const std::string& instruction, const std::string& runs,
                       std::optional<Seconds> predicted, Seconds measured) {
    rows.push_back({segment, instruction, runs, predicted ? format_duration(*predicted) : "-",
                    format_duration(measured), predicted ? difference(predicted->value, measured.value) : "-"});
  };
  Seconds predicted_sum;
  Seconds measured_sum;
  std::int64_t runs = 0;
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    const InstructionTimes& times = sorted[i];
    predicted_sum += times.predicted.value_or(Seconds(0.0));
    measured_sum += times.measured;
    runs += times.runs_per_step;
    if (static_cast<int>(i) < most)
      add(times.segment, times.instruction, fmt::format("{}", times.runs_per_step), times.predicted, times.measured);
  }
  add("all", fmt::format("{} instructions", sorted.size()), fmt::format("{}", runs), predicted_sum, measured_sum);
  return align_columns(rows, 2);
}

}  // namespace parplan
