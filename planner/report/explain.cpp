#include "planner/report/explain.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "planner/base/enum_index.h"
#include "planner/base/text.h"
#include "planner/cluster/price_and_power.h"
#include "planner/plan/memory_verdict.h"
#include "planner/plan/parallel_spec_text.h"
#include "planner/report/error_band.h"
#include "planner/report/explain_rivals.h"
#include "planner/report/explain_rules.h"
#include "planner/report/explain_stages.h"
#include "planner/report/explain_words.h"
#include "planner/report/part_names.h"
#include "planner/report/plan_row.h"
#include "planner/report/table.h"

namespace parplan {
namespace {

RankedPlan own_of(const Plan& plan) {
  return {.spec = plan.spec, .result = plan.prediction};
}

std::string where_time_goes(const StepTime& time) {
  std::vector<std::vector<std::string>> rows;
  for (const TimePart& part : time_parts())
    if (part_of(time, part).value > 0.0)
      rows.push_back({std::string(part.name), format_duration(part_of(time, part)),
                      format_share(part_of(time, part).value, time.total().value)});
  return indent(align_columns(rows, 1));
}

std::string where_memory_goes(const MemoryUse& memory) {
  std::vector<std::vector<std::string>> rows;
  for (const MemoryPart& part : memory_parts())
    if ((memory.*part.part).count > 0)
      rows.push_back(
          {std::string(part.name), format_bytes(memory.*part.part),
           format_share(static_cast<double>((memory.*part.part).count), static_cast<double>(memory.peak().count))});
  return indent(align_columns(rows, 1));
}

std::string runner_up(const Plan& plan, const RankedPlan& second) {
  const std::string on = second.on ? " on " + describe_devices(plan, second) : "";
  std::string text = fmt::format("runner-up: {}{}, {}\n", layout_text(second.spec), on,
                                 measured_against(plan, second, own_of(plan), 2));
  text += fmt::format("  against the plan: {}\n", differences(plan.prediction.time, second.result.time));
  text += fmt::format("  it needs {} of memory, the plan {}\n", format_bytes(second.result.memory.peak()),
                      format_bytes(plan.prediction.memory.peak()));
  return text;
}

std::string runner_up(const Plan& plan) {
  if (!plan.alternatives.empty()) return runner_up(plan, plan.alternatives.front());
  if (plan.search.candidates == 0) return "runner-up: none; no other layout was looked at\n";
  if (plan.search.candidates - plan.search.infeasible_memory <= 1)
    return "runner-up: none; no other layout of the space fits\n";
  return "runner-up: the plan keeps no other; `parplan explain` finds the next of all layouts\n";
}

// The signs of a constraint in the plan itself.
std::string signs_of(Constraint constraint, const Plan& plan) {
  const StepTime& time = plan.prediction.time;
  const auto share = [&](Seconds part) { return format_share(part.value, time.total().value); };
  const Waiting waits = waiting(plan);
  const bool others = waits.others > worth_a_word * time.total();
  switch (constraint) {
    case Constraint::memory: {
      std::vector<std::string> signs;
      // The device's peak is said in any case.
      if (const std::optional<Shortage> lack = shortage_of(plan.cluster, plan.spec, plan.prediction))
        signs.push_back(lack->home == Home::device ? "the plan does not fit"
                                                   : fmt::format("the plan does not fit: {}", words_of(*lack)));
      if (time.recompute.value > 0.0)
        signs.push_back(
            fmt::format("{} of the step recomputes activations that there is no room to keep", share(time.recompute)));
      if (time.offload.value > 0.0)
        signs.push_back(fmt::format("{} waits for copies of what there is no room to keep", share(time.offload)));
      if (const Seconds updates = updates_on_host(plan); updates.value > 0.0)
        signs.push_back(fmt::format("{} updates parameters on the host", share(updates)));
      if (plan.spec.zero_stage >= 2 && time.exposed.dp.value > 0.0)
        signs.push_back(
            fmt::format("{} waits for the communication of ZeRO-{}", share(time.exposed.dp), plan.spec.zero_stage));
      signs.push_back(fmt::format("the peak is {:.1f} % of a device's {}", 100.0 * memory_share(plan),
                                  format_bytes(memory_capacity(plan.cluster, plan.spec, plan.prediction))));
      return join(signs);
    }
    case Constraint::compute:
      return fmt::format("{} of the step computes{}", share(computing(plan)),
                         time.recompute.value > 0.0 ? fmt::format(", {} recomputes", share(time.recompute)) : "");
    case Constraint::communication: {
      const Axis most = *std::ranges::max_element(inner_axes_first, {}, [&](Axis axis) { return time.exposed[axis]; });
      return fmt::format("{} of the step waits for it, most for {}{}", share(time.exposed_in_all()),
                         communication_words(most),
                         others ? fmt::format(", {} for that of other stages", share(waits.others)) : "");
    }
    case Constraint::bubble:
      if (!others) return fmt::format("{} of the step waits for other stages", share(time.bubble));
      return fmt::format("{} of the step waits for other stages, {} more for their communication", share(waits.filling),
                         share(waits.others));
    case Constraint::host:
    case Constraint::nvme: {
      const Seconds updates = updates_on_host(plan);
      return fmt::format(
          "{} of the step waits for copies to and from host memory{}{}", share(time.offload),
          constraint == Constraint::nvme ? " and NVMe" : "",
          updates.value > 0.0 ? fmt::format(", {} updates parameters on the host", share(updates)) : "");
    }
  }
  return "";
}

std::string what_binds(const Plan& plan, Constraint constraint) {
  // By Constraint.
  constexpr std::array helps = {"faster or more devices", "faster links or a larger batch",
                                "more micro-batches (a larger batch)", "more memory",
                                "faster links to the host, or faster memory there", "faster drives"};
  return fmt::format("{}: {}; {} would help first", name(constraint), signs_of(constraint, plan),
                     helps[index_of(constraint)]);
}

}  // namespace

std::string explain_search(const SearchCounts& search) {
  if (search.candidates == 0) return "no search was made: the layout was given";
  std::string text =
      fmt::format("{}: {} do not fit in memory, {} cannot be {} by their lower bound, {} simulated",
                  pluralized(search.candidates, "candidate"), search.infeasible_memory, search.pruned_by_bound,
                  search.objective == Objective::time ? "faster" : "better", search.simulated);
  if (const std::int64_t left =
          search.candidates - search.infeasible_memory - search.pruned_by_bound - search.simulated;
      left > 0)
    text += fmt::format(", {} not simulated", left);
  const ObjectiveWords& words = words_of(search.objective);
  const std::string others = search.cut_gap
                                 ? fmt::format("; with stage cuts that were not tried, at most {:.1f} % {} may be left",
                                               100.0 * better_by(search.objective, *search.cut_gap), words.less)
                                 : "";
  if (search.certified)
    return text + fmt::format("; certified: {} of this space under this cost model{}", words.best, others);
  if (search.gap)
    return text + fmt::format("; gap: at most {:.1f} % {} may be left{}",
                              100.0 * better_by(search.objective, *search.gap), words.less, others);
  return text + "; not certified";
}

std::string explain_space(const SearchCounts& search) {
  std::string text = search.space.empty() ? "" : fmt::format("space: {}\n", search.space);
  if (search.left_out.empty()) return text;
  const char* const less = words_of(search.objective).less;
  std::vector<std::string> all;
  for (const LeftOut& one : search.left_out) {
    const std::string gap = one.gap ? fmt::format("{:.1f}", 100.0 * better_by(search.objective, *one.gap)) : "";
    const std::string with_option = one.options.empty() ? "" : ": " + join(one.options, " or ");
    all.push_back(fmt::format("{} ({})", one.what,
                              !one.gap       ? "not bounded" + with_option
                              : gap == "0.0" ? fmt::format("not {}", less)
                                             : fmt::format("at most {} % {}{}", gap, less, with_option)));
  }
  return text + fmt::format("left out: {}\n", fmt::join(all, ", "));
}

namespace {

// Facts about the plan ----------------------------------------------------------------------------

// "1,2*30,1": consecutive stages with the same number of layers.
std::string layers_text(const ParallelSpec& spec) {
  const std::vector<int> layers = layers_of_stages(spec);
  std::vector<std::string> runs;
  for (std::size_t i = 0; i < layers.size();) {
    std::size_t end = i;
    while (end < layers.size() && layers[end] == layers[i]) ++end;
    runs.push_back(end - i < 3 ? join(std::vector<std::string>(end - i, fmt::format("{}", layers[i])), ",")
                               : fmt::format("{}*{}", layers[i], end - i));
    i = end;
  }
  return join(runs, ",");
}

std::string heading(const Plan& plan) {
  const std::int64_t count = micro_batches(plan.spec, plan.training);
  std::string text =
      fmt::format("plan {}: {} on {} of {} x {} ({})\nlayout: {}; {} micro-batch{} a step; layers per stage {}\n",
                  plan_id(plan.model, plan.training, plan.spec), plan.model.name, plan.spec.mesh.size(),
                  plan.cluster.devices(), device_name(plan.cluster), plan.cluster.name, layout_text(plan.spec), count,
                  count == 1 ? "" : "es", layers_text(plan.spec));
  if (plan.cluster.calibrated) text += fmt::format("calibrated: {}\n", *plan.cluster.calibrated);
  if (plan.search.objective == Objective::cost) text += "objective: the cost of a step, its devices for its time\n";
  if (plan.search.objective == Objective::memory) text += "objective: the memory of the fullest device, then time\n";
  return text;
}

// "3.10 s to 3.50 s by published runs; "
std::string step_in_band(const Plan& plan) {
  const std::optional<StepBand> band = step_band(plan);
  if (!band) return "";
  const Seconds step = plan.prediction.time.total();
  return fmt::format("{} to {} by published runs; ", format_duration(step * band->low),
                     format_duration(step * band->high));
}

std::string time_and_memory(const Plan& plan) {
  const RowSubject subject = subject_of(plan);
  const StepTime& time = plan.prediction.time;
  const MemoryUse& memory = plan.prediction.memory;
  const bool costs = plan.search.objective == Objective::cost || currency(plan.cluster);
  std::string text = fmt::format(
      "a step takes {}{} ({}{} tokens/s, {} a device):\n", format_duration(time.total()),
      costs ? fmt::format(" and costs {}", format_cost(plan.cluster, plan.spec.mesh.size(), time.total())) : "",
      step_in_band(plan), format_count(tokens_per_second(subject)), format_flop_rate(model_rate_per_device(subject)));
  text += where_time_goes(time);
  text +=
      fmt::format("\nthe worst rank's memory peaks at {}, {:.1f} % of {}:\n", format_bytes(memory.peak()),
                  100.0 * memory_share(plan), format_bytes(memory_capacity(plan.cluster, plan.spec, plan.prediction)));
  return text + where_memory_goes(memory);
}

// With reasons ------------------------------------------------------------------------------------

// How far predictions of such plans were from measured steps, where the time decides.
std::string how_far_off(const Plan& plan) {
  if (plan.search.objective == Objective::memory)
    return "how sure: memory is counted as the runtime allocates it, not estimated; libraries' share is a measured "
           "constant\n";
  const std::optional<StepBand> band = step_band(plan);
  return band ? fmt::format("how sure: {}\n", words_of(*band))
              : "how sure: no measured steps on such devices are published, to hold this against; `parplan run` "
                "measures a plan\n";
}

std::string how_sure(const Plan& plan, const Reasons& reasons) {
  std::string text = how_far_off(plan);
  if (plan.search.objective == Objective::memory) return text;
  const std::span<const RankedPlan> others = ranked_behind(plan, reasons);
  const std::optional<PairSpread> pairs = pair_spread(plan, others);
  if (!pairs) return text;
  text += fmt::format("  {}\n", words_of(*pairs));
  if (others.empty()) return text;
  const auto is_close = [&](const RankedPlan& other) { return !are_apart(plan, other, *pairs); };
  const RankedPlan& second = others.front();
  const double gap = excess(plan, cluster_of(plan, second), second.spec, second.result);
  if (!is_close(second)) {
    // Two are apart by what the worse of them has over the other.
    const bool is_worse = gap >= 0.0;
    return text + fmt::format("  the {} is {} than the {}: more than that\n", is_worse ? "runner-up" : "plan",
                              compared(is_worse ? gap : 1.0 / (1.0 + gap) - 1.0, plan.search.objective, 1),
                              is_worse ? "plan" : "runner-up");
  }
  const std::string is = "  the runner-up is " + compared(gap, plan.search.objective, 2);
  const std::string close =
      others.size() < 2 ? ""
                        : fmt::format(" ({} of {} ranked alternatives are that close)",
                                      std::ranges::count_if(others, is_close), others.size());
  return text + is +
         fmt::format(
             ": the model cannot tell the two apart{};\n"
             "  a few steps of each (`parplan run`) decide, or a device file with measured kernels (`parplan "
             "measure`)\n",
             close);
}

std::string what_binds(const Plan& plan, const Reasons& reasons) {
  if (reasons.twice.empty()) return what_binds(plan, reasons.binding) + "\n";
  return fmt::format("{}: {}\n", name(reasons.binding), signs_of(reasons.binding, plan)) + twice_table(plan, reasons);
}

std::string unrestricted(const Plan& plan, const Variation& found) {
  const char* where = plan.search.candidates == 0 || plan.search.certified ? "without what was given for the layout"
                                                                           : "where the search goes on";
  return fmt::format("note: {}, {} takes {}{}\n", where, layout_text(found.best->spec),
                     measured_against(plan, *found.best, own_of(plan), 1),
                     found.certified ? "" : "; others may be better yet");
}

}  // namespace

std::string explain(const Plan& plan) {
  std::string text = heading(plan) + "\n" + time_and_memory(plan);
  text += "\n" + runner_up(plan);
  text += how_far_off(plan);
  text += "\nbinding constraint: " + what_binds(plan, binding_constraint(plan)) + "\n";
  text += "search: " + explain_search(plan.search) + "\n" + explain_space(plan.search);
  for (const std::string& note : plan.notes) text += "note: " + printable_line(note) + "\n";
  return fold_lines(text, line_width);
}

std::string explain_briefly(const Plan& plan) {
  const std::string second = runner_up(plan);
  std::string text = "binding constraint: " + what_binds(plan, binding_constraint(plan)) + "\n";
  // Without the memory that it needs.
  return fold_lines(text + second.substr(0, std::min(second.find("  it needs"), second.size())), line_width);
}

std::string explain(const Plan& plan, const Reasons& reasons) {
  std::string text = heading(plan) + "\n" + time_and_memory(plan) + stage_tables(plan, reasons) +
                     deciding_device(plan, reasons) + critical_path_table(plan, reasons) +
                     where_kernel_times_come_from(plan, reasons) + where_communication_times_come_from(reasons);
  text += "\nbinding constraint: " + what_binds(plan, reasons);
  text += "\n" + (reasons.runner_up ? runner_up(plan, *reasons.runner_up) : runner_up(plan)) + how_sure(plan, reasons);
  text += neighbour_table(plan, reasons) + family_table(plan, reasons) + rules_of_thumb(plan, reasons) +
          sensitivity_table(plan, reasons);
  text += "\nsearch: " + explain_search(plan.search) + "\n" + explain_space(plan.search);
  if (reasons.unrestricted) text += unrestricted(plan, *reasons.unrestricted);
  for (const std::string& note : plan.notes) text += "note: " + printable_line(note) + "\n";
  return fold_lines(text, line_width);
}

}  // namespace parplan
