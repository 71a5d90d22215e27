#include "planner/report/plan_table.h"

#include <algorithm>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include "planner/cluster/price_and_power.h"
#include "planner/plan/memory_verdict.h"
#include "planner/report/error_band.h"
#include "planner/report/plan_row.h"
#include "planner/report/table.h"

namespace parplan {
namespace {

std::string memory_line(const Plan& plan) {
  const MemoryUse& memory = plan.prediction.memory;
  std::string text = memory.overhead.count > 0
                         ? fmt::format("memory peak counts {} a device for libraries", format_bytes(memory.overhead))
                         : std::string("memory peak counts nothing for libraries");
  if (memory.reserve.count > 0)
    text += fmt::format(", and {} that the engine's allocator keeps", format_bytes(memory.reserve));
  if (memory.host.count > 0) text += fmt::format(", beside {} in its host's memory", format_bytes(memory.host));
  if (memory.nvme.count > 0)
    text += fmt::format("{} {} in its file on NVMe", memory.host.count > 0 ? " and" : ", beside",
                        format_bytes(memory.nvme));
  text += "; fragmentation is not modelled";
  if (const double headroom = plan.cluster.memory_headroom; headroom > 0.0)
    text += fmt::format("; plans leave {} of a device free", format_share(headroom, 1.0));
  return text + "\n";
}

// "83 %", and "97 % (tight)" where the plan does not fit with its headroom.
std::string share_of_capacity(const RowSubject& subject) {
  const Bytes capacity = memory_capacity(subject.cluster, subject.spec, subject.result);
  const MemoryVerdict verdict = verdict_of(subject);
  return format_share(static_cast<double>(subject.result.memory.peak().count), static_cast<double>(capacity.count)) +
         (verdict == MemoryVerdict::fits ? "" : fmt::format(" ({})", words_of(verdict)));
}

// "2 and 3", "2 to 5"; ranks ascend.
std::string list_ranks(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return fmt::format("{}", ranks.front());
  if (ranks.back() - ranks.front() + 1 == static_cast<int>(ranks.size()) && ranks.size() > 2)
    return fmt::format("{} to {}", ranks.front(), ranks.back());
  std::string text;
  for (std::size_t i = 0; i < ranks.size(); ++i)
    text += fmt::format("{}{}", i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ", ranks[i]);
  return text;
}

// How far measured steps are from such predictions, and which plans cannot be told apart; nothing
// where no runs are known.
std::string step_line(const Plan& plan) {
  const std::optional<StepBand> band = step_band(plan);
  if (!band) return "";
  std::string text = fmt::format("step: {}\n", words_of(*band));
  const int ranked = static_cast<int>(plan.alternatives.size()) + 1;
  std::vector<int> alike;
  for (int rank = 2; rank <= ranked; ++rank)
    if (!told_from_first(subject_of(plan, rank)).value_or(true)) alike.push_back(rank);
  if (ranked == 1) return text;
  const std::string pairs = words_of(*pair_spread(plan, plan.alternatives));
  if (alike.empty()) return text + fmt::format("every plan can be told apart from the first: {}\n", pairs);
  return text + fmt::format("plan{} {} cannot be told apart from the first: {}\n", alike.size() == 1 ? "" : "s",
                            list_ranks(alike), pairs);
}

}  // namespace

std::string write_table(const Plan& plan) {
  std::vector<std::vector<std::string>> rows{
      {"rank", "layout", "devices", "step", "tokens/s", "MFU", "memory peak", "of capacity", "bubble", "exposed comm"}};
  const bool costs = plan.search.objective == Objective::cost || currency(plan.cluster).has_value();
  if (costs) rows.front().push_back("cost a step");
  const bool elsewhere =
      std::ranges::any_of(plan.alternatives, [](const RankedPlan& one) { return one.on.has_value(); });
  if (elsewhere) rows.front().push_back("on");
  for (int rank = 1; rank <= static_cast<int>(plan.alternatives.size()) + 1; ++rank) {
    const RowSubject subject = subject_of(plan, rank);
    const StepTime& time = subject.result.time;
    const Json utilization = model_flops_utilization(subject);
    rows.push_back({fmt::format("{}", rank), layout_text(subject.spec), fmt::format("{}", subject.spec.mesh.size()),
                    format_duration(time.total()), format_count(tokens_per_second(subject)),
                    utilization.is_null() ? "-" : format_share(utilization.get<double>(), 1.0),
                    format_bytes(subject.result.memory.peak()), share_of_capacity(subject),
                    format_share(time.bubble.value, time.total().value),
                    format_share(time.exposed_in_all().value, time.total().value)});
    if (costs) rows.back().push_back(format_cost(subject.cluster, subject.spec.mesh.size(), time.total()));
    if (elsewhere && rank == 1)
      rows.back().push_back(describe_groups(first_nodes(plan.cluster, plan.spec.mesh.size())));
    else if (elsewhere)
      rows.back().push_back(describe_devices(plan, plan.alternatives[static_cast<std::size_t>(rank - 2)]));
  }
  return align_columns(rows, 2) + memory_line(plan) + step_line(plan);
}

}  // namespace parplan
