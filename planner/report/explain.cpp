#include "planner/report/explain.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "planner/base/enum.h"
#include "planner/base/text.h"
#include "planner/cluster/running_costs.h"
#include "planner/report/result_parts.h"
#include "planner/report/plan_row.h"
#include "planner/report/table.h"

namespace parplan {
namespace {

constexpr std::size_t line_width = 140;  // of a line

// The words for more and less of what an objective counts.
struct ObjectiveWords {
  const char* best;  // of this space
  const char* less;
  const char* more;
  const char* same;
};
const ObjectiveWords& words_of(Objective objective) {
  static constexpr std::array table = {
      ObjectiveWords{"the fastest", "faster", "slower", "as fast"},
      ObjectiveWords{"the cheapest", "cheaper", "dearer", "as cheap"},
      ObjectiveWords{"the one of least memory", "less memory", "more memory", "as much memory"}};
  return table[index_of(objective)];
}
// "15.00 % slower", "as fast".
std::string compared(double change, Objective objective, int digits) {
  const ObjectiveWords& words = words_of(objective);
  const std::string share = fmt::format("{:.{}f}", 100.0 * std::abs(change), digits);
  if (share.find_first_not_of("0.") == std::string::npos) return words.same;
  return fmt::format("{} % {}", share, change < 0.0 ? words.less : words.more);
}
// "11.5 s (15.00 % slower)", and the value of the plan's objective if that is not time. `now` is
// the plan itself.
std::string measured_against(const Plan& plan, const RankedPlan& other, const RankedPlan& now, int digits) {
  const auto ratio = [](double a, double b) { return a / b - 1.0; };
  const Seconds time = other.result.time.total();
  std::string text = fmt::format("{} ({})", format_duration(time),
                                 compared(ratio(time.value, now.result.time.total().value), Objective::time, digits));
  const auto counted = [&](const RankedPlan& of) {
    return score(plan.search.objective, plan.cluster, of.spec, of.result.time.total(), of.result.memory).first;
  };
  const std::string change = compared(ratio(counted(other), counted(now)), plan.search.objective, digits);
  switch (plan.search.objective) {
    case Objective::time: break;
    case Objective::cost:
      text += fmt::format(", {} ({})", format_cost(plan.cluster, other.spec.mesh.size(), time), change);
      break;
    case Objective::memory: text += fmt::format(", {} ({})", format_bytes(other.result.memory.peak()), change); break;
  }
  return text;
}
RankedPlan own_of(const Plan& plan) { return {.spec = plan.spec, .result = plan.prediction}; }

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

// The parts of the step in which `other` differs from the plan by at least a thousandth of the
// step, largest first.
std::string differences(const StepTime& best, const StepTime& other) {
  struct Difference {
    std::string_view name;
    double seconds;
  };
  std::vector<Difference> found;
  for (const TimePart& part : time_parts()) {
    const double seconds = (part_of(other, part) - part_of(best, part)).value;
    if (std::abs(seconds) >= 1e-3 * best.total().value) found.push_back({part.name, seconds});
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Difference& a, const Difference& b) { return std::abs(a.seconds) > std::abs(b.seconds); });
  std::vector<std::string> words;
  for (const Difference& difference : found)
    words.push_back(fmt::format("{} {}{}", difference.name, difference.seconds < 0.0 ? "-" : "+",
                                format_duration(Seconds(std::abs(difference.seconds)))));
  return words.empty() ? "no part differs by a thousandth of the step" : join(words);
}

std::string runner_up(const Plan& plan, const RankedPlan& second) {
  std::string text =
      fmt::format("runner-up: {}, {}\n", layout_text(second.spec), measured_against(plan, second, own_of(plan), 2));
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
  return "runner-up: the plan keeps the best alone (--top 1); `parplan explain` finds the next\n";
}

// Waiting for unequal stages is mentioned from this share of the step on.
constexpr double worth_a_word = 0.05;

// The signs of a constraint in the plan itself.
std::string signs_of(Constraint constraint, const Plan& plan) {
  const StepTime& time = plan.prediction.time;
  const auto share = [&](Seconds part) { return format_share(part.value, time.total().value); };
  const Waiting waits = waiting(plan);
  const bool unequal = waits.unequal > worth_a_word * time.total();
  switch (constraint) {
    case Constraint::memory: {
      std::vector<std::string> signs;
      if (memory_share(plan) > 1.0) signs.push_back("the plan does not fit");
      if (time.recompute.value > 0.0)
        signs.push_back(
            fmt::format("{} of the step recomputes activations that there is no room to keep", share(time.recompute)));
      if (plan.spec.zero_stage >= 2 && time.exposed.dp.value > 0.0)
        signs.push_back(
            fmt::format("{} waits for the communication of ZeRO-{}", share(time.exposed.dp), plan.spec.zero_stage));
      signs.push_back(
          fmt::format("the peak is {:.1f} % of a device's {}", 100.0 * memory_share(plan),
                      format_bytes(memory_capacity(plan.cluster, plan.spec.mesh, plan.prediction.memory_stage))));
      return join(signs);
    }
    case Constraint::compute:
      return fmt::format("{} of the step computes{}{}", share(time.compute + time.recompute + time.optimizer),
                         time.recompute.value > 0.0 ? fmt::format(", {} recomputes", share(time.recompute)) : "",
                         unequal ? fmt::format(", {} waits for stages that take longer", share(waits.unequal)) : "");
    case Constraint::communication: {
      const Axis most = *std::ranges::max_element(inner_axes_first, {}, [&](Axis axis) { return time.exposed[axis]; });
      return fmt::format("{} of the step waits for it, most for {}", share(time.exposed_in_all()),
                         communication_words(most));
    }
    case Constraint::bubble:
      if (!unequal) return fmt::format("{} of the step waits for other stages", share(time.bubble));
      return fmt::format("{} of the step waits for other stages, {} more for those that take longer",
                         share(waits.filling), share(waits.unequal));
  }
  return "";
}

std::string what_binds(const Plan& plan, Constraint constraint) {
  // By Constraint.
  constexpr std::array helps = {"faster or more devices", "faster links or a larger batch",
                                "more micro-batches (a larger batch)", "more memory"};
  return fmt::format("{}: {}; {} would help first", name(constraint), signs_of(constraint, plan),
                     helps[index_of(constraint)]);
}

}  // namespace

std::string explain_search(const SearchCounts& search) {
  if (search.candidates == 0) return "no search was made: the layout was given";
  std::string text =
      fmt::format("{} candidates: {} do not fit in memory, {} cannot be {} by their lower bound, {} simulated",
                  search.candidates, search.infeasible_memory, search.pruned_by_bound,
                  search.objective == Objective::time ? "faster" : "better", search.simulated);
  if (const std::int64_t left =
          search.candidates - search.infeasible_memory - search.pruned_by_bound - search.simulated;
      left > 0)
    text += fmt::format(", {} not simulated", left);
  const ObjectiveWords& words = words_of(search.objective);
  if (search.certified) return text + fmt::format("; certified: {} of this space under this cost model", words.best);
  if (search.gap) return text + fmt::format("; gap: at most {:.1f} % {} may be left", 100.0 * *search.gap, words.less);
  return text + "; not certified";
}

std::string describe(const CriticalWork& work) {
  // Names of the Segments at the end of a step and of communication; those of blocks are
  // BLOCK.forward and BLOCK.backward.
  struct Named {
    std::string_view segment, words;
  };
  static constexpr std::array table = {
      Named{"pipeline.send.activation", "transfers between stages"},
      Named{"pipeline.receive.activation", "transfers between stages"},
      Named{"pipeline.send.gradient", "transfers between stages"},
      Named{"pipeline.receive.gradient", "transfers between stages"},
      Named{"data.all_gather.parameters", "gathers of parameters"},
      Named{"data.reduce_scatter.gradients", "reductions of gradients"},
      Named{"data.all_reduce_sum.gradients", "reductions of gradients"},
      Named{"tensor.all_reduce.gradients", "reductions of gradients over tensor ranks"},
      Named{"pipeline.all_reduce.tied_gradients", "sums of tied gradients"},
      Named{"add_tied_gradients", "sums of tied gradients"},
      Named{"gradient_norm", "gradient norm"},
      Named{"optimizer", "optimizer"},
      Named{"update_loss_scale", "loss scale"},
      Named{"fill_zero", "clearing gradients"},
  };
  const auto found = std::ranges::find(table, work.segment, &Named::segment);
  if (found != table.end()) return std::string(found->words);
  const std::string block = work.segment.substr(0, work.segment.rfind('.'));
  if (work.label == Label::recompute) return block + " again (recompute)";
  const std::optional<Axis> axis = axis_of(work.label);
  return axis ? communication_words(*axis) : block;
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
  if (plan.search.objective == Objective::cost) text += "objective: the cost of a step, its devices for its time\n";
  if (plan.search.objective == Objective::memory) text += "objective: the memory of the fullest device, then time\n";
  return text;
}

std::string time_and_memory(const Plan& plan) {
  const RowSubject subject = subject_of(plan);
  const StepTime& time = plan.prediction.time;
  const MemoryUse& memory = plan.prediction.memory;
  const bool costs = plan.search.objective == Objective::cost || currency(plan.cluster);
  std::string text = fmt::format(
      "a step takes {}{} ({} tokens/s, {} a device):\n", format_duration(time.total()),
      costs ? fmt::format(" and costs {}", format_cost(plan.cluster, plan.spec.mesh.size(), time.total())) : "",
      format_count(tokens_per_second(subject)), format_flop_rate(model_rate_per_device(subject)));
  text += where_time_goes(time);
  text += fmt::format("\nthe worst rank's memory peaks at {}, {:.1f} % of {}:\n", format_bytes(memory.peak()),
                      100.0 * memory_share(plan),
                      format_bytes(memory_capacity(plan.cluster, plan.spec.mesh, plan.prediction.memory_stage)));
  return text + where_memory_goes(memory);
}

// With reasons ------------------------------------------------------------------------------------

std::string signed_share(double change) {
  if (std::abs(change) < 5e-4) return "0.0 %";
  return fmt::format("{:+.{}f} %", 100.0 * change, std::abs(change) < 0.0995 ? 1 : 0);
}
std::string more_or_less(double factor) {
  return fmt::format("{:.0f} % {}", 100.0 * std::abs(factor - 1.0), factor < 1.0 ? "less" : "more");
}
double slower(const StepResult& other, const StepResult& than) { return other.time.total() / than.time.total() - 1.0; }

// One row per stage; equal neighbours share one, and columns in which no stage has anything are
// left out. A long pipeline shows the first stages, the last ones, and where `most` is largest.
std::string stage_table(std::vector<std::string> heads, const std::vector<std::vector<std::string>>& cells,
                        const std::vector<double>& most) {
  constexpr std::size_t most_rows = 16;
  constexpr std::size_t ends = 4;
  std::vector<bool> wanted;
  for (std::size_t column = 0; column < heads.size(); ++column)
    wanted.push_back(std::ranges::any_of(
        cells, [&](const auto& stage) { return stage[column] != "0 s" && stage[column] != "0 B"; }));
  const std::size_t largest = static_cast<std::size_t>(std::ranges::max_element(most) - most.begin());
  struct Run {
    std::size_t first = 0, last = 0;
  };
  std::vector<Run> runs;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    if (!runs.empty() && cells[i] == cells[runs.back().first])
      runs.back().last = i;
    else
      runs.push_back({i, i});
  }
  const auto row_of = [&](std::string first, const std::vector<std::string>& others) {
    std::vector<std::string> row{std::move(first)};
    for (std::size_t column = 0; column < heads.size(); ++column)
      if (wanted[column]) row.push_back(others[column]);
    return row;
  };
  std::vector<std::vector<std::string>> rows{row_of("stage", heads)};
  for (std::size_t r = 0; r < runs.size(); ++r) {
    const Run& run = runs[r];
    const bool shown = runs.size() <= most_rows || r < ends || r + ends >= runs.size() ||
                       (run.first <= largest && largest <= run.last);
    if (shown)
      rows.push_back(
          row_of(run.first == run.last ? fmt::format("{}", run.first) : fmt::format("{}-{}", run.first, run.last),
                 cells[run.first]));
    else if (rows.back().front() != "...")
      rows.push_back(row_of("...", std::vector<std::string>(heads.size())));
  }
  return indent(align_columns(rows, 1));
}

std::string each_stage(const Plan& plan, const Reasons& reasons) {
  const std::vector<RankResult>& stages = reasons.details.ranks;
  if (stages.size() < 2) return "";
  const Seconds step = plan.prediction.time.total();
  const std::vector<int> layers = layers_of_ranks(plan.spec);
  std::vector<std::vector<std::string>> times;
  std::vector<std::vector<std::string>> memory;
  std::vector<double> computing;
  std::vector<double> peaks;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const StepTime& time = stages[i].time;
    const MemoryUse& use = stages[i].memory;
    // After its own work a stage waits for the others until the end of the step.
    const Seconds waiting = time.bubble + std::max(step - time.total(), Seconds(0.0));
    times.push_back({fmt::format("{}", layers[i]), format_duration(time.compute), format_duration(time.recompute),
                     format_duration(time.exposed.tp), format_duration(time.exposed.dp),
                     format_duration(time.exposed.pp), format_duration(waiting),
                     format_duration(time.optimizer)});
    memory.push_back({});
    for (const MemoryPart& part : memory_parts()) memory.back().push_back(format_bytes(use.*part.part));
    memory.back().push_back(format_bytes(use.peak()));
    memory.back().push_back(
        format_share(static_cast<double>(use.peak().count), static_cast<double>(reasons.capacities[i].count)));
    computing.push_back((time.compute + time.recompute).value);
    peaks.push_back(static_cast<double>(use.peak().count));
  }
  return "\neach stage's time, communication as far as it is waited for:\n" +
         stage_table({"layers", "compute", "recompute", "tensor-parallel", "data-parallel", "transfers", "waiting",
                      "optimizer"},
                     times, computing) +
         "\neach stage's memory:\n" +
         stage_table({"parameters", "gradients", "optimizer state", "activations", "buffers", "libraries", "peak",
                      "of capacity"},
                     memory, peaks);
}

std::string numbers(const std::vector<int>& ascending) {
  std::vector<std::string> words;
  for (std::size_t i = 0; i < ascending.size();) {
    std::size_t end = i;
    while (end + 1 < ascending.size() && ascending[end + 1] == ascending[end] + 1) ++end;
    words.push_back(end == i ? fmt::format("{}", ascending[i]) : fmt::format("{}-{}", ascending[i], ascending[end]));
    i = end + 1;
  }
  return join(words, ",");
}

std::string critical_path(const Reasons& reasons) {
  const std::vector<CriticalWork>& path = reasons.details.critical_path;
  Seconds total;
  std::vector<double> by_stage(reasons.details.ranks.size(), 0.0);
  for (const CriticalWork& work : path) {
    total += work.time;
    by_stage[work.rank] += work.time.value;
  }
  // The stage with most of it is listed separately, the others together.
  const int main_stage = static_cast<int>(std::ranges::max_element(by_stage) - by_stage.begin());
  struct Row {
    bool on_main = false;
    std::string what;
    std::vector<int> stages;
    std::int64_t runs = 0;
    Seconds time;
  };
  std::vector<Row> rows;
  for (const CriticalWork& work : path) {
    const bool on_main = work.rank == main_stage;
    const std::string what = describe(work);
    auto row = std::ranges::find_if(rows, [&](const Row& r) { return r.on_main == on_main && r.what == what; });
    if (row == rows.end())
      row = rows.insert(rows.end(), {.on_main = on_main, .what = what, .stages = {}, .runs = 0, .time = {}});
    if (row->stages.empty() || row->stages.back() != work.rank) row->stages.push_back(work.rank);
    row->runs += work.runs;
    row->time += work.time;
  }
  std::ranges::stable_sort(
      rows, [](const Row& a, const Row& b) { return std::pair(!a.on_main, b.time) < std::pair(!b.on_main, a.time); });
  std::vector<std::vector<std::string>> cells;
  const bool several = by_stage.size() > 1;
  constexpr double least_share = 1e-3;
  Row rest{.on_main = false, .what = "the rest", .stages = {}, .runs = 0, .time = {}};
  for (const Row& row : rows) {
    if (row.time < least_share * total) {
      rest.runs += row.runs;
      rest.time += row.time;
      continue;
    }
    std::string where =
        several ? fmt::format("stage{} {}: ", row.stages.size() == 1 ? "" : "s", numbers(row.stages)) : "";
    cells.push_back({where + row.what, fmt::format("{} x", row.runs), format_duration(row.time),
                     format_share(row.time.value, total.value)});
  }
  if (rest.runs > 0)
    cells.push_back({rest.what, fmt::format("{} x", rest.runs), format_duration(rest.time),
                     format_share(rest.time.value, total.value)});
  return fmt::format("\nthe critical path: what the end of the step hangs on, {} in all:\n", format_duration(total)) +
         indent(align_columns(cells, 1));
}

std::string changed_to(const Plan& plan, const Variation& variation) {
  if (!variation.best) return "nothing fits";
  const char* const found = variation.certified ? "" : " found";
  if (!variation.changes) return fmt::format("the plan stays the best{}", found);
  const RankedPlan& best = *variation.best;
  const std::string layout = fmt::format("best{}: {}, ", found, layout_text(best.spec));
  if (!variation.plan.fits()) return layout + format_duration(best.result.time.total());
  return layout + measured_against(plan, best, variation.plan.plan, 1);
}
template <class Found>  // Variation, FamilyBest
std::string what_found_means(const std::vector<Found>& several) {
  if (std::ranges::all_of(several, &Found::certified)) return "";
  return "  (found: of the most promising candidates, which were simulated; others may be better)\n";
}

// The plan itself under a variation.
std::string plan_then(const Variation& variation, const Plan& plan) {
  const RankedPlan& own = variation.plan.plan;
  if (!variation.plan.fits())
    return fmt::format("does not fit: {} of {}", format_bytes(own.result.memory.peak()),
                       format_bytes(variation.plan.capacity));
  const double change = slower(own.result, plan.prediction);
  if (variation.resource != Resource::global_batch)
    return std::abs(change) < 5e-4
               ? "as now"
               : fmt::format("{} ({})", format_duration(own.result.time.total()), signed_share(change));
  // A larger step need not be slower.
  const double rate = variation.factor * (plan.prediction.time.total() / own.result.time.total()) - 1.0;
  const std::string micro_batch =
      own.spec.micro_batch != plan.spec.micro_batch ? fmt::format(" (micro-batch {})", own.spec.micro_batch) : "";
  return fmt::format("{}{}, {}", format_duration(own.result.time.total()), micro_batch,
                     std::abs(rate) < 5e-4 ? "as many tokens/s" : "tokens/s " + signed_share(rate));
}

std::string resource_then(const Variation& variation) {
  return variation.resource == Resource::global_batch
             ? fmt::format("global batch {} ({})", variation.global_batch, more_or_less(variation.factor))
             : fmt::format("{} {}", name(variation.resource), more_or_less(variation.factor));
}

std::string how_sure(const Plan& plan, const Reasons& reasons) {
  if (plan.search.objective == Objective::memory)
    return "how sure: memory is counted as the runtime allocates it, not estimated; libraries' share is a measured "
           "constant\n";
  if (!reasons.error) {
    const std::string none =
        "how sure: no measured steps of such devices are known to hold the model against; `parplan run` measures a "
        "plan\n";
    if (!reasons.elsewhere) return none;
    const ModelError& seen = *reasons.elsewhere;
    return none +
           fmt::format("  (on other devices predictions were {:.1f} to {:.1f} % below measured steps:\n  {} {})\n",
                       -100.0 * seen.most, -100.0 * seen.least, seen.runs, seen.source);
  }
  const ModelError& error = *reasons.error;
  std::string text = fmt::format(
      "how sure: predictions were {:.1f} to {:.1f} % below measured steps\n"
      "  ({} {}),\n"
      "  so that plans that are predicted within {:.1f} % of one another may come out in the other order\n",
      -100.0 * error.most, -100.0 * error.least, error.runs, error.source, 100.0 * error.undecided());
  const RankedPlan* second = !plan.alternatives.empty() ? &plan.alternatives.front()
                             : reasons.runner_up        ? &*reasons.runner_up
                                                        : nullptr;
  if (second == nullptr) return text;
  // Whichever of the two is predicted to be slower.
  const auto is_close = [&](const RankedPlan& p) {
    return std::abs(excess(plan, p.spec, p.result)) < error.undecided();
  };
  const double gap = excess(plan, second->spec, second->result);
  const std::string is = "  the runner-up is " + compared(gap, plan.search.objective, is_close(*second) ? 2 : 1);
  if (!is_close(*second)) return text + is + ": more than that\n";
  const std::string others =
      plan.alternatives.size() < 2
          ? ""
          : fmt::format(" ({} of {} ranked alternatives are that close)",
                        std::ranges::count_if(plan.alternatives, is_close), plan.alternatives.size());
  return text + is +
         fmt::format(
             ": the model cannot tell the two apart{};\n"
             "  a few steps of each (`parplan run`) decide, or a device file with measured kernels (`parplan "
             "measure`)\n",
             others);
}

bool has_unlike_devices(const Cluster& cluster) {
  return std::ranges::any_of(
      cluster.groups, [&](const NodeGroup& group) { return group.device.name != cluster.groups.front().device.name; });
}

// The parts on which another layout loses, or by how much it does not fit.
std::string loss(const Plan& plan, const Rival& rival) {
  if (rival.fits()) return differences(plan.prediction.time, rival.plan.result.time);
  return fmt::format("does not fit: {} more than the {} of a device",
                     format_bytes(rival.plan.result.memory.peak() - rival.capacity), format_bytes(rival.capacity));
}

// The column heads for a rival, and its numbers: by how much they are more or less than the plan's.
std::vector<std::string> rival_heads(const Plan& plan) {
  switch (plan.search.objective) {
    case Objective::time: break;
    case Objective::cost: return {"step", "vs plan", "cost", "vs plan", "memory peak"};
    case Objective::memory: return {"step", "vs plan", "memory peak", "vs plan"};
  }
  return {"step", "vs plan", "memory peak"};
}
std::vector<std::string> rival_cells(const Plan& plan, const Rival& rival) {
  const RankedPlan& other = rival.plan;
  const Seconds time = other.result.time.total();
  const auto if_fits = [&](std::string text) { return rival.fits() ? std::move(text) : "-"; };
  const std::string more = if_fits(signed_share(excess(plan, other.spec, other.result)));
  std::vector<std::string> cells{if_fits(format_duration(time)),
                                 if_fits(signed_share(slower(other.result, plan.prediction)))};
  if (plan.search.objective == Objective::cost) {
    cells.push_back(if_fits(format_cost(plan.cluster, other.spec.mesh.size(), time)));
    cells.push_back(more);
  }
  cells.push_back(format_bytes(other.result.memory.peak()));
  if (plan.search.objective == Objective::memory) cells.push_back(more);
  return cells;
}

std::vector<std::string> row_of(std::string first, std::vector<std::string> numbers, std::string last) {
  std::vector<std::string> row{std::move(first)};
  std::ranges::move(numbers, std::back_inserter(row));
  row.push_back(std::move(last));
  return row;
}

// The last column is aligned left and folded: it is a sentence. A text of `below` goes under its
// row.
std::string table_with_words(const std::vector<std::vector<std::string>>& rows, int left,
                             const std::vector<std::string>& below = {}) {
  std::vector<std::vector<std::string>> columns = rows;
  for (std::vector<std::string>& row : columns) row.pop_back();
  const std::string aligned = align_columns(columns, left);
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < aligned.size();) {
    const std::size_t end = aligned.find('\n', begin);
    lines.push_back(aligned.substr(begin, end - begin));
    begin = end + 1;
  }
  std::size_t widest = 0;
  for (const std::string& line : lines) widest = std::max(widest, line.size());
  constexpr std::size_t least = 40;  // columns for the words, even if a line becomes longer
  const std::size_t room = std::max(line_width - std::min(line_width, widest + 4), least);
  std::string text;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::string words = fold_lines(rows[i].back(), room);
    for (std::size_t begin = 0; begin < words.size();) {
      const std::size_t end = words.find('\n', begin);
      text += fmt::format("  {:<{}}  {}\n", begin == 0 ? lines[i] : "", widest, words.substr(begin, end - begin));
      begin = end + 1;
    }
    if (i < below.size() && !below[i].empty()) text += fold_lines(fmt::format("      {}\n", below[i]), line_width);
  }
  return text;
}

std::string neighbours(const Plan& plan, const Reasons& reasons) {
  if (reasons.neighbours.empty()) return "";
  std::vector<std::vector<std::string>> rows{row_of("one choice away", rival_heads(plan), "against the plan")};
  for (const Neighbour& neighbour : reasons.neighbours)
    rows.push_back(row_of(neighbour.change, rival_cells(plan, neighbour.rival), loss(plan, neighbour.rival)));
  return "\n" + table_with_words(rows, 1);
}

std::string families(const Plan& plan, const Reasons& reasons) {
  if (reasons.families.empty()) return "";
  std::vector<std::vector<std::string>> rows{
      row_of("best of its family, and what it loses on", rival_heads(plan), "layout")};
  std::vector<std::string> below{""};
  for (const FamilyBest& family : reasons.families) {
    const bool is_plan = family.best && family.best->plan.spec == plan.spec;
    std::vector<std::string> cells =
        family.best ? rival_cells(plan, *family.best) : std::vector<std::string>(rival_heads(plan).size(), "-");
    if (is_plan) cells[1] = "the plan";
    rows.push_back(row_of(std::string(family.family), std::move(cells),
                          family.best ? layout_text(family.best->plan.spec) : "no layout is legal"));
    std::string words = family.best && !is_plan ? loss(plan, *family.best) : "";
    if (!family.certified) words = words.empty() ? "best found" : "best found: " + words;
    below.push_back(std::move(words));
  }
  // The plan's alternatives are considered on any number of devices.
  const int devices = plan.spec.mesh.size() > 1 ? plan.spec.mesh.size() : plan.cluster.devices();
  const std::string which = devices < plan.cluster.devices() || plan.search.objective != Objective::time
                                ? fmt::format("  (of layouts on {} devices, and of the plan's alternatives)\n", devices)
                                : "";
  return "\n" + table_with_words(rows, 1, below) + which + what_found_means(reasons.families);
}

std::string bubble_rule(const Guide::Bubble& bubble) {
  std::string text = fmt::format(
      "a pipeline of p = {} stages and m = {} micro-batches is idle for (p - 1) / (m + p - 1) = {:.1f} % of its time; "
      "simulated, {:.1f} % of the step waits: ",
      bubble.stages, bubble.micro_batches, 100.0 * bubble.closed_form, 100.0 * bubble.simulated);
  // Waiting beyond the closed form, which assumes equal stages.
  const char* const unequal =
      bubble.simulated - bubble.closed_form > worth_a_word ? ", the rest for stages that take longer" : "";
  if (bubble.micro_batches >= bubble.enough)
    return text + fmt::format("enough, at least 4 p = {} micro-batches{}", bubble.enough, unequal);
  return text + fmt::format(
                    "too few; 4 p = {} micro-batches (a larger batch, smaller micro-batches or fewer data-parallel "
                    "ranks) would leave {:.1f} %",
                    bubble.enough, 100.0 * bubble.closed_form_then);
}

std::string guide(const Plan& plan, const Reasons& reasons) {
  const Guide& found = reasons.guide;
  std::vector<std::string> lines;
  if (found.one_device) {
    const Rival& least = found.one_device->least;
    const Bytes needed = least.plan.result.memory.peak();
    const std::string kind = has_unlike_devices(plan.cluster) ? device_name(found.one_device->cluster) : "";
    if (least.fits())
      lines.push_back(fmt::format(
          "one device{} is enough: {} needs {} of {} and {} a step; more devices only make it faster",
          kind.empty() ? kind : fmt::format(" ({})", kind), layout_text(least.plan.spec), format_bytes(needed),
          format_bytes(least.capacity), format_duration(least.plan.result.time.total())));
    else
      lines.push_back(fmt::format(
          "one device is not enough{}: at least {} are needed ({}), {:.1f} times its {}; something has to be divided",
          kind.empty() ? kind : ", not even " + kind, format_bytes(needed), layout_text(least.plan.spec),
          static_cast<double>(needed.count) / static_cast<double>(least.capacity.count), format_bytes(least.capacity)));
  }
  if (found.largest_block)
    lines.push_back(
        fmt::format("parameters, gradients and optimizer state of '{}' alone take {} of {} {}: only tensor parallelism "
                    "or ZeRO divides them",
                    found.largest_block->block, format_bytes(found.largest_block->state),
                    has_unlike_devices(plan.cluster) ? "the largest device's" : "a device's",
                    format_bytes(found.largest_block->capacity)));
  if (found.beyond_node) {
    const Guide::BeyondNode& beyond = *found.beyond_node;
    lines.push_back(fmt::format(
        "tensor parallelism beyond a node: rings over {} devices reach {} a device, {:.1f} times less than the {} "
        "inside a node; the best such layout{}, {}, {}",
        beyond.across_ranks, format_bandwidth(beyond.across), beyond.inside / beyond.across,
        format_bandwidth(beyond.inside), beyond.certified ? "" : " found", layout_text(beyond.best.plan.spec),
        beyond.best.fits() ? fmt::format("takes {} ({})", format_duration(beyond.best.plan.result.time.total()),
                                         signed_share(slower(beyond.best.plan.result, plan.prediction)))
                           : loss(plan, beyond.best)));
  }
  for (const Guide::ShardedPipeline& sharded : found.sharded_pipeline) {
    const StepResult& other = sharded.rival.plan.result;
    lines.push_back(fmt::format(
        "ZeRO-{} in this pipeline {} in each of {} micro-batches: a device sends {} a step for it instead of {}, "
        "{:.1f} times as much; the step {} ({})",
        sharded.rival.plan.spec.zero_stage,
        sharded.rival.plan.spec.zero_stage == 2 ? "reduces gradients" : "gathers parameters and reduces gradients",
        sharded.micro_batches, format_bytes(other.communication.dp), format_bytes(sharded.sent),
        static_cast<double>(other.communication.dp.count) / static_cast<double>(sharded.sent.count),
        format_duration(other.time.total()),
        sharded.rival.fits() ? signed_share(slower(other, plan.prediction)) : "and it does not fit"));
  }
  if (found.gathered)
    lines.push_back(fmt::format(
        "ZeRO-3 gathers parameters in each of {} micro-batches, forward and backward: a device sends {} a step for "
        "data parallelism; {} of it are waited for, the rest hides behind computation",
        found.gathered->micro_batches, format_bytes(found.gathered->sent), format_duration(found.gathered->exposed)));
  if (found.bubble) lines.push_back(bubble_rule(*found.bubble));
  std::string text = lines.empty() ? "" : "\nwhat the rules of the guides come to here:\n";
  for (const std::string& line : lines) text += "  - " + line + '\n';
  return text;
}

std::string what_binds(const Plan& plan, const Reasons& reasons) {
  if (reasons.twice.empty()) return what_binds(plan, reasons.binding) + "\n";
  std::vector<std::vector<std::string>> rows{{"with twice", "the plan", "then"}};
  for (const Variation& variation : reasons.twice)
    rows.push_back({name(variation.resource), plan_then(variation, plan), changed_to(plan, variation)});
  return fmt::format("{}: {}\n", name(reasons.binding), signs_of(reasons.binding, plan)) + table_with_words(rows, 2) +
         what_found_means(reasons.twice);
}

std::string sensitivity(const Plan& plan, const Reasons& reasons) {
  if (reasons.sensitivity.empty()) return "";
  std::vector<std::vector<std::string>> rows{{"with", "the plan", "then"}};
  for (const Variation& variation : reasons.sensitivity)
    rows.push_back({resource_then(variation), plan_then(variation, plan), changed_to(plan, variation)});
  const bool lessened = std::ranges::any_of(
      reasons.sensitivity, [](const Variation& v) { return v.resource == Resource::global_batch && v.factor < 1.0; });
  if (!lessened)
    rows.push_back({"global batch less", "-", "it cannot be less: each data-parallel rank has one sequence"});
  return "\n" + table_with_words(rows, 2) + what_found_means(reasons.sensitivity);
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
  text += "\nbinding constraint: " + what_binds(plan, binding_constraint(plan)) + "\n";
  text += "search: " + explain_search(plan.search) + "\n";
  for (const std::string& note : plan.notes) text += "note: " + note + "\n";
  return fold_lines(text, line_width);
}

std::string explain_briefly(const Plan& plan) {
  const std::string second = runner_up(plan);
  std::string text = "binding constraint: " + what_binds(plan, binding_constraint(plan)) + "\n";
  // Without the memory that it needs.
  return fold_lines(text + second.substr(0, std::min(second.find("  it needs"), second.size())), line_width);
}

std::string explain(const Plan& plan, const Reasons& reasons) {
  std::string text = heading(plan) + "\n" + time_and_memory(plan) + each_stage(plan, reasons) + critical_path(reasons);
  text += "\nbinding constraint: " + what_binds(plan, reasons);
  text += "\n" + (reasons.runner_up ? runner_up(plan, *reasons.runner_up) : runner_up(plan)) + how_sure(plan, reasons);
  text += neighbours(plan, reasons) + families(plan, reasons) + guide(plan, reasons) + sensitivity(plan, reasons);
  text += "\nsearch: " + explain_search(plan.search) + "\n";
  if (reasons.unrestricted) text += unrestricted(plan, *reasons.unrestricted);
  for (const std::string& note : plan.notes) text += "note: " + note + "\n";
  return fold_lines(text, line_width);
}

}  // namespace parplan
