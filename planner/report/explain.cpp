#include "planner/report/explain.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "planner/base/text.h"
#include "planner/report/parts.h"
#include "planner/report/row.h"
#include "planner/report/table.h"

namespace parplan {
namespace {

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
                         share(exposed_communication(time)), most->second);
    }
    case Constraint::bubble:
      return fmt::format("bubble: {} of the step waits for other stages; more micro-batches (a larger batch) would help", share(time.bubble));
  }
  return "";
}

}  // namespace

std::string explain_search(const SearchCounts& search) {
  if (search.candidates == 0) return "no search was made: the layout was given";
  std::string text = fmt::format("{} candidates: {} do not fit in memory, {} cannot be faster by their lower bound, {} simulated",
                                 search.candidates, search.infeasible_memory, search.pruned_by_bound, search.simulated);
  if (search.certified) return text + "; certified: the fastest of this space under this cost model";
  if (search.gap) return text + fmt::format("; gap: at most {:.1f} % faster may be left", 100.0 * *search.gap);
  return text + "; not certified";
}

std::string describe(const CriticalWork& work) {
  // Segments of the end of a step and of communication by their names; those of blocks are BLOCK.forward and BLOCK.backward.
  struct Named {
    std::string_view segment, words;
  };
  static constexpr std::array table = {
      Named{"pipeline.send.activation", "transfers between stages"},   Named{"pipeline.receive.activation", "transfers between stages"},
      Named{"pipeline.send.gradient", "transfers between stages"},     Named{"pipeline.receive.gradient", "transfers between stages"},
      Named{"data.all_gather.parameters", "gathers of parameters"},    Named{"data.reduce_scatter.gradients", "reductions of gradients"},
      Named{"data.all_reduce_sum.gradients", "reductions of gradients"}, Named{"tensor.all_reduce.gradients", "reductions of gradients over tensor ranks"},
      Named{"pipeline.all_reduce.tied_gradients", "sums of tied gradients"}, Named{"add_tied_gradients", "sums of tied gradients"},
      Named{"gradient_norm", "gradient norm"},                         Named{"optimizer", "optimizer"},
      Named{"update_loss_scale", "loss scale"},                        Named{"fill_zero", "clearing gradients"},
  };
  const auto found = std::ranges::find(table, work.segment, &Named::segment);
  if (found != table.end()) return std::string(found->words);
  const std::string block = work.segment.substr(0, work.segment.rfind('.'));
  switch (work.label) {
    case Label::recompute: return block + " again (recompute)";
    case Label::tensor: return "tensor-parallel communication";
    case Label::data: return "data-parallel communication";
    case Label::pipeline: return "transfers between stages";
    default: return block;
  }
}

namespace {

// Facts about the plan ----------------------------------------------------------------------------------------------

std::string heading(const Plan& plan) {
  const std::int64_t count = micro_batches(plan.spec, plan.training);
  return fmt::format("plan {}: {} on {} of {} x {} ({})\nlayout: {}; {} micro-batch{} a step; layers per stage {}\n",
                     plan_id(plan.model, plan.training, plan.spec), plan.model.name, plan.spec.mesh.size(), plan.cluster.devices(),
                     device_name(plan.cluster), plan.cluster.name, layout_text(plan.spec), count, count == 1 ? "" : "es", stage_layers(plan.spec));
}

std::string time_and_memory(const Plan& plan) {
  const RowSubject subject = subject_of(plan);
  const StepTime& time = plan.prediction.time;
  const MemoryUse& memory = plan.prediction.memory;
  std::string text = fmt::format("a step takes {} ({} tokens/s, {} a device):\n", format_duration(time.total()), format_count(tokens_per_second(subject)),
                                 format_flop_rate(model_rate_per_device(subject)));
  text += where_time_goes(time);
  text += fmt::format("\nthe worst rank's memory peaks at {}, {:.1f} % of {}:\n", format_bytes(memory.peak()), 100.0 * memory_share(plan),
                      format_bytes(memory_capacity(plan.cluster, plan.spec.mesh, plan.prediction.memory_stage)));
  return text + where_memory_goes(memory);
}

// With reasons ------------------------------------------------------------------------------------------------------

std::string signed_share(double change) { return fmt::format("{:+.{}f} %", 100.0 * change, std::abs(change) < 0.0995 ? 1 : 0); }
std::string more_or_less(double factor) { return fmt::format("{:.0f} % {}", 100.0 * std::abs(factor - 1.0), factor < 1.0 ? "less" : "more"); }
double slower(const StepResult& other, const StepResult& than) { return other.time.total() / than.time.total() - 1.0; }

std::string each_stage(const Plan& plan, const Reasons& reasons) {
  const std::vector<StageResult>& stages = reasons.details.stages;
  if (stages.size() < 2) return "";
  const Seconds step = plan.prediction.time.total();
  // Of long pipelines the first, the last, and those that compute and hold most.
  constexpr std::size_t most_rows = 16;
  std::vector<bool> shown(stages.size(), stages.size() <= most_rows);
  const auto computes = [](const StageResult& s) { return s.time.compute + s.time.recompute; };
  for (std::size_t i = 0; i < 4; ++i) shown[std::min(i, stages.size() - 1)] = shown[stages.size() - 1 - std::min(i, stages.size() - 1)] = true;
  shown[static_cast<std::size_t>(std::ranges::max_element(stages, {}, computes) - stages.begin())] = true;
  shown[static_cast<std::size_t>(std::ranges::max_element(stages, {}, [](const StageResult& s) { return s.memory.peak(); }) - stages.begin())] = true;

  const std::vector<int> layers = layers_of_stages(plan.spec);
  std::vector<std::vector<std::string>> rows{{"stage", "layers", "compute", "recompute", "communication", "waiting", "optimizer", "memory peak", "of capacity"}};
  for (std::size_t i = 0; i < stages.size(); ++i) {
    if (!shown[i]) {
      if (shown[i - 1]) rows.push_back({"...", "", "", "", "", "", "", "", ""});
      continue;
    }
    const StageResult& stage = stages[i];
    // What is left of the step when a stage is done, it waits for the others.
    const Seconds waiting = stage.time.bubble + std::max(step - stage.time.total(), Seconds(0.0));
    rows.push_back({fmt::format("{}", i), fmt::format("{}", layers[i]), format_duration(stage.time.compute), format_duration(stage.time.recompute),
                    format_duration(exposed_communication(stage.time)), format_duration(waiting), format_duration(stage.time.optimizer),
                    format_bytes(stage.memory.peak()),
                    format_share(static_cast<double>(stage.memory.peak().count), static_cast<double>(reasons.capacities[i].count))});
  }
  return "\neach stage:\n" + indent(align_columns(rows, 1));
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
  std::vector<double> by_stage(reasons.details.stages.size(), 0.0);
  for (const CriticalWork& work : path) {
    total += work.time;
    by_stage[static_cast<std::size_t>(work.stage)] += work.time.value;
  }
  // The stage that most of it is on stands by itself, the others together.
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
    const bool on_main = work.stage == main_stage;
    const std::string what = describe(work);
    auto row = std::ranges::find_if(rows, [&](const Row& r) { return r.on_main == on_main && r.what == what; });
    if (row == rows.end()) row = rows.insert(rows.end(), {.on_main = on_main, .what = what, .stages = {}, .runs = 0, .time = {}});
    if (row->stages.empty() || row->stages.back() != work.stage) row->stages.push_back(work.stage);
    row->runs += work.runs;
    row->time += work.time;
  }
  std::ranges::stable_sort(rows, [](const Row& a, const Row& b) { return std::pair(!a.on_main, b.time) < std::pair(!b.on_main, a.time); });
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
    std::string where = several ? fmt::format("stage{} {}: ", row.stages.size() == 1 ? "" : "s", numbers(row.stages)) : "";
    cells.push_back({where + row.what, fmt::format("{} x", row.runs), format_duration(row.time), format_share(row.time.value, total.value)});
  }
  if (rest.runs > 0) cells.push_back({rest.what, fmt::format("{} x", rest.runs), format_duration(rest.time), format_share(rest.time.value, total.value)});
  return fmt::format("\nthe critical path: what the end of the step hangs on, {} in all:\n", format_duration(total)) + indent(align_columns(cells, 1));
}

std::string changed_to(const Variation& variation) {
  if (!variation.best) return "nothing fits";
  if (!variation.changes) return "the plan stays the best";
  const Rival& own = variation.plan;
  std::string text = fmt::format("best: {}, {}", layout_text(variation.best->spec), format_duration(variation.best->result.time.total()));
  if (own.fits()) text += fmt::format(" ({:.1f} % faster)", 100.0 * (1.0 - variation.best->result.time.total() / own.plan.result.time.total()));
  return text;
}

// What the plan itself does under a variation.
std::string plan_then(const Variation& variation, const Plan& plan) {
  const RankedPlan& own = variation.plan.plan;
  if (!variation.plan.fits()) return fmt::format("does not fit: {} of {}", format_bytes(own.result.memory.peak()), format_bytes(variation.plan.capacity));
  const double change = slower(own.result, plan.prediction);
  if (variation.resource != Resource::global_batch)
    return std::abs(change) < 5e-4 ? "as now" : fmt::format("{} ({})", format_duration(own.result.time.total()), signed_share(change));
  // A larger step is not a slower one.
  const double rate = variation.factor * (plan.prediction.time.total() / own.result.time.total()) - 1.0;
  return fmt::format("{}, {}", format_duration(own.result.time.total()), std::abs(rate) < 5e-4 ? "as many tokens/s" : "tokens/s " + signed_share(rate));
}

std::string resource_then(const Variation& variation) {
  return variation.resource == Resource::global_batch ? fmt::format("global batch {} ({})", variation.global_batch, more_or_less(variation.factor))
                                                      : fmt::format("{} {}", name(variation.resource), more_or_less(variation.factor));
}

std::string what_binds(const Plan& plan, const Reasons& reasons) {
  if (!reasons.relaxed) return what_binds(plan);
  const StepTime& time = plan.prediction.time;
  const auto share = [&](Seconds part) { return format_share(part.value, time.total().value); };
  std::string text;
  switch (binding_constraint(plan)) {
    case Constraint::memory:
      text = memory_share(plan) >= full_share ? fmt::format("memory: the peak is {:.1f} % of a device's", 100.0 * memory_share(plan))
                                              : fmt::format("memory: {} of the step recomputes activations that there is no room to keep", share(time.recompute));
      break;
    case Constraint::compute: text = fmt::format("compute: {} of the step computes", share(time.compute + time.recompute + time.optimizer)); break;
    case Constraint::communication: text = fmt::format("communication: {} of the step waits for it", share(exposed_communication(time))); break;
    case Constraint::bubble: text = fmt::format("bubble: {} of the step waits for other stages", share(time.bubble)); break;
  }
  const Variation& relaxed = *reasons.relaxed;
  const char* twice = relaxed.resource == Resource::compute ? "computation twice as fast"
                      : relaxed.resource == Resource::memory ? "twice the memory"
                      : relaxed.resource == Resource::global_batch ? "twice the global batch"
                      : relaxed.resource == Resource::network ? "twice the network"
                                                              : "twice the rate inside nodes";
  text += fmt::format("\n  with {}: the plan: {}; {}", twice, plan_then(relaxed, plan), changed_to(relaxed));
  return text;
}

std::string how_sure(const Plan& plan, const Reasons& reasons) {
  if (plan.alternatives.empty()) return "";
  const double gap = slower(plan.alternatives.front().result, plan.prediction);
  if (!reasons.error)
    return "how sure: no published steps of such devices are known to hold the model against; `parplan run` measures a plan\n";
  const ModelError& error = *reasons.error;
  const auto close = std::ranges::count_if(plan.alternatives, [&](const RankedPlan& p) { return slower(p.result, plan.prediction) < error.undecided(); });
  std::string text = fmt::format("how sure: predictions were {:.1f} to {:.1f} % below measured steps ({} {}),\n"
                                 "  so that plans that are predicted within {:.1f} % of one another may come out in the other order\n",
                                 -100.0 * error.most, -100.0 * error.least, error.runs, error.source, 100.0 * error.undecided());
  if (gap < error.undecided())
    return text + fmt::format("  the runner-up is {:.2f} % slower: the model cannot tell the two apart ({} of {} ranked alternatives are that close);\n"
                              "  a few steps of each (`parplan run`) decide, or a device file with measured kernels (`parplan measure`)\n",
                              100.0 * gap, close, plan.alternatives.size());
  return text + fmt::format("  the runner-up is {:.1f} % slower: more than that\n", 100.0 * gap);
}

// What another layout loses on, or by how much it does not fit.
std::string loss(const Plan& plan, const Rival& rival) {
  if (rival.fits()) return differences(plan.prediction.time, rival.plan.result.time);
  return fmt::format("does not fit: {} more than the {} of a device", format_bytes(rival.plan.result.memory.peak() - rival.capacity), format_bytes(rival.capacity));
}

std::vector<std::string> rival_cells(const Plan& plan, const Rival& rival, std::string first, bool with_layout) {
  std::vector<std::string> cells{std::move(first)};
  if (with_layout) cells.push_back(layout_text(rival.plan.spec));
  cells.push_back(rival.fits() ? format_duration(rival.plan.result.time.total()) : "-");
  cells.push_back(rival.fits() ? signed_share(slower(rival.plan.result, plan.prediction)) : "-");
  cells.push_back(format_bytes(rival.plan.result.memory.peak()));
  cells.push_back(loss(plan, rival));
  return cells;
}

// The last column flush left: it is a sentence.
std::string table_with_words(const std::vector<std::vector<std::string>>& rows, int left) {
  std::vector<std::vector<std::string>> columns = rows;
  for (std::vector<std::string>& row : columns) row.pop_back();
  const std::string aligned = align_columns(columns, left);
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < aligned.size();) {
    const std::size_t end = aligned.find('\n', begin);
    lines.push_back(aligned.substr(begin, end - begin));
    begin = end + 1;
  }
  std::size_t width = 0;
  for (const std::string& line : lines) width = std::max(width, line.size());
  std::string text;
  for (std::size_t i = 0; i < rows.size(); ++i) text += fmt::format("  {:<{}}  {}\n", lines[i], width, rows[i].back());
  return text;
}

std::string neighbours(const Plan& plan, const Reasons& reasons) {
  if (reasons.neighbours.empty()) return "";
  std::vector<std::vector<std::string>> rows{{"one choice away", "step", "slower by", "memory peak", "against the plan"}};
  for (const Neighbour& neighbour : reasons.neighbours) rows.push_back(rival_cells(plan, neighbour.rival, neighbour.change, false));
  return "\n" + table_with_words(rows, 1);
}

std::string families(const Plan& plan, const Reasons& reasons) {
  if (reasons.families.empty()) return "";
  std::vector<std::vector<std::string>> rows{{"best of its family", "layout", "step", "slower by", "memory peak", "against the plan"}};
  for (const FamilyBest& family : reasons.families) {
    if (!family.best)
      rows.push_back({std::string(family.family), "-", "-", "-", "-", "no layout is legal"});
    else if (family.best->plan.spec == plan.spec)
      rows.push_back({std::string(family.family), layout_text(plan.spec), format_duration(plan.prediction.time.total()), "", format_bytes(plan.prediction.memory.peak()), "the plan"});
    else
      rows.push_back(rival_cells(plan, *family.best, std::string(family.family), true));
  }
  return "\n" + table_with_words(rows, 2);
}

std::string guide(const Plan& plan, const Reasons& reasons) {
  const Guide& found = reasons.guide;
  std::vector<std::string> lines;
  if (found.one_device) {
    const Rival& least = found.one_device->least;
    const Bytes needed = least.plan.result.memory.peak();
    if (least.fits())
      lines.push_back(fmt::format("one device is enough: {} needs {} of {} and {} a step; more devices only make it faster", layout_text(least.plan.spec),
                                  format_bytes(needed), format_bytes(least.capacity), format_duration(least.plan.result.time.total())));
    else
      lines.push_back(fmt::format("one device is not enough: at least {} are needed ({}), {:.1f} times its {}; something has to be divided", format_bytes(needed),
                                  layout_text(least.plan.spec), static_cast<double>(needed.count) / static_cast<double>(least.capacity.count), format_bytes(least.capacity)));
  }
  if (found.largest_block)
    lines.push_back(fmt::format("parameters, gradients and optimizer state of '{}' alone take {} of a device's {}: only tensor parallelism or ZeRO divides them",
                                found.largest_block->block, format_bytes(found.largest_block->state), format_bytes(found.largest_block->capacity)));
  if (found.beyond_node) {
    const Guide::BeyondNode& beyond = *found.beyond_node;
    lines.push_back(fmt::format("tensor parallelism beyond a node: rings over {} devices reach {} a device, {:.1f} times less than the {} inside a node; the best such layout, {}, {}",
                                beyond.across_ranks, format_bandwidth(beyond.across), beyond.inside / beyond.across, format_bandwidth(beyond.inside),
                                layout_text(beyond.best.plan.spec),
                                beyond.best.fits() ? fmt::format("takes {} ({})", format_duration(beyond.best.plan.result.time.total()),
                                                                 signed_share(slower(beyond.best.plan.result, plan.prediction)))
                                                   : loss(plan, beyond.best)));
  }
  for (const Guide::ShardedPipeline& sharded : found.sharded_pipeline) {
    const StepResult& other = sharded.rival.plan.result;
    lines.push_back(fmt::format("ZeRO-{} in this pipeline {} in each of {} micro-batches: a device sends {} a step for it instead of {}, {:.1f} times as much; the step {} ({})",
                                sharded.rival.plan.spec.zero_stage, sharded.rival.plan.spec.zero_stage == 2 ? "reduces gradients" : "gathers parameters and reduces gradients",
                                sharded.micro_batches, format_bytes(other.communication.data), format_bytes(sharded.sent),
                                static_cast<double>(other.communication.data.count) / static_cast<double>(sharded.sent.count), format_duration(other.time.total()),
                                sharded.rival.fits() ? signed_share(slower(other, plan.prediction)) : "and it does not fit"));
  }
  if (found.gathered)
    lines.push_back(fmt::format("ZeRO-3 gathers parameters in each of {} micro-batches, forward and backward: a device sends {} a step for data parallelism; {} of it are waited for, the rest hides behind computation",
                                found.gathered->micro_batches, format_bytes(found.gathered->sent), format_duration(found.gathered->exposed)));
  if (found.bubble)
    lines.push_back(fmt::format("{} stages and {} micro-batches: (p - 1) / (m + p - 1) leaves {:.1f} % of the pipeline idle; simulated, {:.1f} % of the step",
                                found.bubble->stages, found.bubble->micro_batches, 100.0 * found.bubble->closed_form, 100.0 * found.bubble->simulated));
  std::string text = lines.empty() ? "" : "\nwhat the rules of the guides come to here:\n";
  for (const std::string& line : lines) text += "  - " + line + '\n';
  return text;
}

std::string sensitivity(const Plan& plan, const Reasons& reasons) {
  if (reasons.sensitivity.empty()) return "";
  std::vector<std::vector<std::string>> rows{{"with", "the plan", "then"}};
  for (const Variation& variation : reasons.sensitivity) rows.push_back({resource_then(variation), plan_then(variation, plan), changed_to(variation)});
  return "\n" + table_with_words(rows, 2);
}

}  // namespace

std::string explain(const Plan& plan) {
  std::string text = heading(plan) + "\n" + time_and_memory(plan);
  text += "\n" + runner_up(plan);
  text += "\nbinding constraint: " + what_binds(plan) + "\n";
  text += "search: " + explain_search(plan.search) + "\n";
  for (const std::string& note : plan.notes) text += "note: " + note + "\n";
  return text;
}

std::string explain_briefly(const Plan& plan) {
  const std::string second = runner_up(plan);
  std::string text = "binding constraint: " + what_binds(plan) + "\n";
  // Its heading and what it loses on, without what memory it needs.
  return text + second.substr(0, second.find('\n', second.find('\n') + 1) + 1);
}

std::string explain(const Plan& plan, const Reasons& reasons) {
  std::string text = heading(plan) + "\n" + time_and_memory(plan) + each_stage(plan, reasons) + critical_path(reasons);
  text += "\nbinding constraint: " + what_binds(plan, reasons) + "\n";
  text += "\n" + runner_up(plan) + how_sure(plan, reasons);
  text += neighbours(plan, reasons) + families(plan, reasons) + guide(plan, reasons) + sensitivity(plan, reasons);
  text += "\nsearch: " + explain_search(plan.search) + "\n";
  if (reasons.unrestricted && reasons.unrestricted->best)
    text += fmt::format("note: without what was given for the layout, {} takes {} ({})\n", layout_text(reasons.unrestricted->best->spec),
                        format_duration(reasons.unrestricted->best->result.time.total()), signed_share(slower(reasons.unrestricted->best->result, plan.prediction)));
  for (const std::string& note : plan.notes) text += "note: " + note + "\n";
  return text;
}

}  // namespace parplan
