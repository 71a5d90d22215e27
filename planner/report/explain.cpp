#include "planner/report/explain.h"

#include <algorithm>
#include <array>
#include <cmath>

#include <fmt/format.h>

#include "planner/base/text.h"
#include "planner/report/parts.h"
#include "planner/report/row.h"
#include "planner/report/table.h"

namespace parplan {
namespace {

// From here on a plan counts as full: another micro-batch in flight or a ZeRO stage less rarely fits in a tenth.
constexpr double full_share = 0.9;

double memory_share(const Plan& plan) {
  return static_cast<double>(plan.prediction.memory.peak().count) / static_cast<double>(memory_capacity(plan.cluster, plan.spec.mesh, plan.prediction.memory_stage).count);
}

Seconds communication_of(const StepTime& time) { return time.tensor_exposed + time.data_exposed + time.pipeline_exposed; }

std::string indent(const std::string& text) {
  std::string out;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    out += "  " + text.substr(begin, end - begin) + '\n';
    begin = end == std::string::npos ? text.size() : end + 1;
  }
  return out;
}

std::string where_time_goes(const StepTime& time) {
  std::vector<std::vector<std::string>> rows;
  for (const TimePart& part : time_parts())
    if ((time.*part.part).value > 0.0)
      rows.push_back({std::string(part.name), format_duration(time.*part.part), format_share((time.*part.part).value, time.total().value)});
  return indent(align_columns(rows, 1));
}

std::string where_memory_goes(const MemoryUse& memory) {
  std::vector<std::vector<std::string>> rows;
  for (const MemoryPart& part : memory_parts())
    if ((memory.*part.part).count > 0)
      rows.push_back({std::string(part.name), format_bytes(memory.*part.part),
                      format_share(static_cast<double>((memory.*part.part).count), static_cast<double>(memory.peak().count))});
  return indent(align_columns(rows, 1));
}

// The parts of the step in which `other` differs from the plan by at least a thousandth of the step, largest first.
std::string differences(const StepTime& best, const StepTime& other) {
  struct Difference {
    std::string_view name;
    double seconds;
  };
  std::vector<Difference> found;
  for (const TimePart& part : time_parts()) {
    const double seconds = (other.*part.part - best.*part.part).value;
    if (std::abs(seconds) >= 1e-3 * best.total().value) found.push_back({part.name, seconds});
  }
  std::stable_sort(found.begin(), found.end(), [](const Difference& a, const Difference& b) { return std::abs(a.seconds) > std::abs(b.seconds); });
  std::vector<std::string> words;
  for (const Difference& difference : found)
    words.push_back(fmt::format("{} {}{}", difference.name, difference.seconds < 0.0 ? "-" : "+", format_duration(Seconds(std::abs(difference.seconds)))));
  return words.empty() ? "no part differs by a thousandth of the step" : join(words);
}

std::string runner_up(const Plan& plan) {
  if (plan.alternatives.empty()) return "runner-up: none is known\n";
  const RankedPlan& second = plan.alternatives.front();
  const double slower = second.result.time.total() / plan.prediction.time.total() - 1.0;
  std::string text = fmt::format("runner-up: {}, {} ({:.2f} % slower)\n", layout_text(second.spec), format_duration(second.result.time.total()), 100.0 * slower);
  text += fmt::format("  against the plan: {}\n", differences(plan.prediction.time, second.result.time));
  text += fmt::format("  it needs {} of memory, the plan {}\n", format_bytes(second.result.memory.peak()), format_bytes(plan.prediction.memory.peak()));
  return text;
}

std::string what_binds(const Plan& plan) {
  const StepTime& time = plan.prediction.time;
  const auto share = [&](Seconds part) { return format_share(part.value, time.total().value); };
  switch (binding_constraint(plan)) {
    case Constraint::memory:
      if (memory_share(plan) >= full_share)
        return fmt::format("memory: the peak is {:.1f} % of a device's {}; more memory would allow layouts that communicate or recompute less",
                           100.0 * memory_share(plan), format_bytes(memory_capacity(plan.cluster, plan.spec.mesh, plan.prediction.memory_stage)));
      return fmt::format("memory: {} of the step recomputes activations that there is no room to keep", share(time.recompute));
    case Constraint::compute:
      return fmt::format("compute: {} of the step computes; faster or more devices would help, more memory or bandwidth would not",
                         share(time.compute + time.recompute + time.optimizer));
    case Constraint::communication: {
      const std::array parts = {std::pair{time.tensor_exposed, "tensor-parallel communication"}, std::pair{time.data_exposed, "data-parallel communication"},
                                std::pair{time.pipeline_exposed, "transfers between stages"}};
      const auto most = std::max_element(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
      return fmt::format("communication: {} of the step waits for it, most for {}; faster links or a larger batch would help",
                         share(communication_of(time)), most->second);
    }
    case Constraint::bubble:
      return fmt::format("bubble: {} of the step waits for other stages; more micro-batches (a larger batch) would help", share(time.bubble));
  }
  return "";
}

}  // namespace

const char* name(Constraint constraint) {
  constexpr std::array names = {"compute", "communication", "bubble", "memory"};
  return names[static_cast<std::size_t>(constraint)];
}

Constraint binding_constraint(const Plan& plan) {
  const StepTime& time = plan.prediction.time;
  if (memory_share(plan) >= full_share) return Constraint::memory;
  const Seconds compute = time.compute + time.optimizer;
  const Seconds communication = communication_of(time);
  const Seconds most = std::max({compute, communication, time.bubble, time.recompute});
  // Nothing recomputes for any other reason than room.
  if (time.recompute == most || (time.recompute > communication && time.recompute > time.bubble)) return Constraint::memory;
  if (compute == most) return Constraint::compute;
  return communication == most ? Constraint::communication : Constraint::bubble;
}

std::string explain_search(const SearchCounts& search) {
  if (search.candidates == 0) return "no search was made: the layout was given";
  std::string text = fmt::format("{} candidates: {} do not fit in memory, {} cannot be faster by their lower bound, {} simulated",
                                 search.candidates, search.infeasible_memory, search.pruned_by_bound, search.simulated);
  if (search.certified) return text + "; certified: the fastest of this space under this cost model";
  if (search.gap) return text + fmt::format("; gap: at most {:.1f} % faster may be left", 100.0 * *search.gap);
  return text + "; not certified";
}

std::string explain(const Plan& plan) {
  const RowSubject subject = subject_of(plan);
  const StepTime& time = plan.prediction.time;
  const MemoryUse& memory = plan.prediction.memory;
  const std::int64_t count = micro_batches(plan.spec, plan.training);
  std::string text = fmt::format("plan {}: {} on {} of {} x {} ({})\n", plan_id(plan.model, plan.training, plan.spec), plan.model.name,
                                 plan.spec.mesh.size(), plan.cluster.devices(), device_name(plan.cluster), plan.cluster.name);
  text += fmt::format("layout: {}; {} micro-batch{} a step; layers per stage {}\n\n", layout_text(plan.spec), count, count == 1 ? "" : "es",
                      stage_layers(plan.spec));
  text += fmt::format("a step takes {} ({} tokens/s, {} a device):\n", format_duration(time.total()), format_count(tokens_per_second(subject)),
                      format_flop_rate(model_rate_per_device(subject)));
  text += where_time_goes(time);
  text += fmt::format("\nthe worst rank's memory peaks at {}, {:.1f} % of {}:\n", format_bytes(memory.peak()), 100.0 * memory_share(plan),
                      format_bytes(memory_capacity(plan.cluster, plan.spec.mesh, plan.prediction.memory_stage)));
  text += where_memory_goes(memory);
  text += "\n" + runner_up(plan);
  text += "\nbinding constraint: " + what_binds(plan) + "\n";
  text += "search: " + explain_search(plan.search) + "\n";
  for (const std::string& note : plan.notes) text += "note: " + note + "\n";
  return text;
}

}  // namespace parplan
