#include "planner/report/explain_stages.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/base/text.h"
#include "planner/plan/parallel_spec_text.h"
#include "planner/report/explain_words.h"
#include "planner/report/part_names.h"
#include "planner/report/plan_row.h"
#include "planner/report/table.h"

namespace parplan {
namespace {

// One row per stage; equal neighbours share one, and columns in which no stage has anything are
// left out. A long pipeline shows the first stages, the last ones, and where `most` is largest.
// `names`: of the stages.
std::string stage_table(std::vector<std::string> heads, const std::vector<std::string>& names,
                        const std::vector<std::vector<std::string>>& cells, const std::vector<double>& most) {
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
          row_of(run.first == run.last ? names[run.first] : fmt::format("{}-{}", names[run.first], names[run.last]),
                 cells[run.first]));
    else if (rows.back().front() != "...")
      rows.push_back(row_of("...", std::vector<std::string>(heads.size())));
  }
  return indent(align_columns(rows, 1));
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

// Where ranks of unlike replicas are shown, one replica after the other: "2.0", stage 0 of replica
// 2; else by their place in the pipeline.
std::string short_name(const Plan& plan, const RankResult& rank) {
  return plan.spec.replica_micro_batches.empty() ? fmt::format("{}", rank.pipeline_rank)
                                                 : fmt::format("{}.{}", rank.replica, rank.pipeline_rank);
}

// "stages 0-2", or "stages 0.0, 2.0", by the places of ranks in the details, ascending.
std::string names_of(const Plan& plan, const Reasons& reasons, const std::vector<int>& ranks) {
  if (plan.spec.replica_micro_batches.empty())
    return fmt::format("stage{} {}", ranks.size() == 1 ? "" : "s", numbers(ranks));
  std::vector<std::string> words;
  for (const int rank : ranks) words.push_back(short_name(plan, reasons.details.ranks[static_cast<std::size_t>(rank)]));
  return fmt::format("stage{} {}", ranks.size() == 1 ? "" : "s", join(words));
}

// A line for each kind of device that shares ranks with a slower one.
std::string shared_by_kinds(const Plan& plan, const Reasons& reasons, const std::vector<DecidingDevice>& kinds) {
  std::string lines;
  for (const DecidingDevice& kind : kinds) {
    std::map<std::string, std::vector<int>> shared;  // by the kind that it waits for
    for (std::size_t i = 0; i < kind.ranks.size(); ++i)
      if (!kind.waits_for[i].empty()) shared[kind.waits_for[i]].push_back(kind.ranks[i]);
    for (const auto& [slower, ranks] : shared)
      lines += fmt::format("  {} waits for {}, with which it shares {}\n", kind.device, slower,
                           names_of(plan, reasons, ranks));
  }
  return lines;
}

// Whether a table about the plan has a column for the axis.
bool is_named(const Plan& plan, Axis axis) {
  return is_planned(axis) && (!may_be_unnamed(axis) || plan.spec.mesh.degree_of(axis) > 1);
}

// By group: the first that has the same kind of device.
std::vector<std::size_t> kinds_of_groups(const Cluster& cluster) {
  std::vector<std::size_t> kinds;
  for (const NodeGroup& group : cluster.groups)
    kinds.push_back(static_cast<std::size_t>(std::ranges::find(cluster.groups, group.device, &NodeGroup::device) -
                                             cluster.groups.begin()));
  return kinds;
}

// By group: the title of its device, with the number of the first such group where unlike devices
// have the same. `kinds`: kinds_of_groups.
std::vector<std::string> titles_of_groups(const Cluster& cluster, const std::vector<std::size_t>& kinds) {
  std::vector<std::string> titles;
  for (const std::size_t kind : kinds) {
    const std::string& title = cluster.groups[kind].device.title;
    const bool is_ambiguous = std::ranges::any_of(
        kinds, [&](std::size_t other) { return other != kind && cluster.groups[other].device.title == title; });
    titles.push_back(is_ambiguous ? fmt::format("{} of group {}", title, kind) : title);
  }
  return titles;
}

// After its own work a rank waits for the others until the end of the step.
Seconds waits(const Plan& plan, const RankResult& rank) {
  return rank.time.bubble + std::max(plan.prediction.time.total() - rank.time.total(), Seconds(0.0));
}

}  // namespace

std::string describe(const CriticalWork& work) {
  // Segments of communication are named AXIS.KIND.WHAT, those at the end of a step are in this
  // table, and those of blocks are BLOCK.forward and BLOCK.backward.
  struct Named {
    std::string_view name, words;
  };
  static constexpr std::array whats = {
      Named{"activation", "transfers between stages"},
      Named{"gradient", "transfers between stages"},
      Named{"parameters", "gathers of parameters"},
      Named{"gradients", "reductions of gradients"},
      Named{"tied_gradients", "sums of tied gradients"},
  };
  static constexpr std::array segments = {
      Named{"add_tied_gradients", "sums of tied gradients"},
      Named{"gradient_norm", "gradient norm"},
      Named{"optimizer", "optimizer"},
      Named{"update_loss_scale", "loss scale"},
      Named{"fill_zero", "clearing gradients"},
  };
  if (const auto found = std::ranges::find(segments, work.segment, &Named::name); found != segments.end())
    return std::string(found->words);
  for (const Axis axis : all_axes) {
    if (!work.segment.starts_with(std::string(axis_word(axis)) + ".")) continue;
    const std::string what = work.segment.substr(work.segment.rfind('.') + 1);
    const auto found = std::ranges::find(whats, what, &Named::name);
    if (found == whats.end()) break;
    // The words stand for the axis where there is but one; they name an axis of blocks.
    const bool of_block = std::ranges::find(block_axes, axis) != block_axes.end();
    return of_block ? fmt::format("{} over {} ranks", found->words, axis_word(axis)) : std::string(found->words);
  }
  if (work.segment.starts_with("offload.")) return "copies of what is kept off the device";
  const std::string block = work.segment.substr(0, work.segment.rfind('.'));
  if (work.label == Label::recompute) return block + " again (recompute)";
  const std::optional<Axis> axis = axis_of(work.label);
  return axis ? communication_words(*axis) : block;
}

std::vector<DecidingDevice> deciding_devices(const Plan& plan, const Reasons& reasons) {
  const std::vector<RankResult>& ranks = reasons.details.ranks;
  const std::vector<std::size_t> kinds_of = kinds_of_groups(plan.cluster);
  const std::vector<std::string> titles = titles_of_groups(plan.cluster, kinds_of);
  std::vector<DecidingDevice> kinds;
  std::vector<std::size_t> deciding;  // by rank: the kind that it goes at the pace of
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const std::uint64_t groups = groups_of(plan, ranks[i]);
    std::map<std::size_t, Seconds> kernels;  // by kind, on its slowest group
    for (std::size_t g = 0; g < kinds_of.size(); ++g)
      if ((groups >> g & 1u) != 0) kernels.try_emplace(kinds_of[g]);
    for (const KernelsOnGroup& on : reasons.shared)
      if (on.rank == static_cast<int>(i))
        kernels.at(kinds_of[on.group]) = std::max(kernels.at(kinds_of[on.group]), on.kernels);
    const auto slowest = std::ranges::max_element(kernels, {}, [](const auto& kind) { return kind.second; });
    const std::string& pace = titles[slowest->first];
    for (const auto& [group, takes] : kernels) {
      const Seconds waiting = waits(plan, ranks[i]) + (slowest->second - takes);
      auto kind = std::ranges::find(kinds, titles[group], &DecidingDevice::device);
      if (kind == kinds.end()) kind = kinds.insert(kind, {.device = titles[group], .waits_least = waiting});
      kind->ranks.push_back(static_cast<int>(i));
      kind->waits_for.push_back(takes < slowest->second ? pace : "");
      kind->waits_least = std::min(kind->waits_least, waiting);
      kind->waits_most = std::max(kind->waits_most, waiting);
    }
    deciding.push_back(
        static_cast<std::size_t>(std::ranges::find(kinds, pace, &DecidingDevice::device) - kinds.begin()));
  }
  if (kinds.size() < 2) return {};
  Seconds total;
  for (const CriticalWork& work : reasons.details.critical_path) {
    if (work.label != Label::compute && work.label != Label::recompute) continue;
    kinds[deciding[static_cast<std::size_t>(work.rank)]].on_path += work.time;
    total += work.time;
  }
  if (total > Seconds())
    for (DecidingDevice& kind : kinds) kind.share = kind.on_path / total;
  std::ranges::stable_sort(kinds, std::ranges::greater(), &DecidingDevice::on_path);
  return kinds;
}

std::string deciding_device(const Plan& plan, const Reasons& reasons) {
  const std::vector<DecidingDevice> kinds = deciding_devices(plan, reasons);
  if (kinds.empty()) return "";
  const bool by_replica = !plan.spec.replica_micro_batches.empty();
  std::vector<std::vector<std::string>> rows{{"device", by_replica ? "replica.stage" : "stage"}};
  if (by_replica) rows.front().emplace_back("micro-batches");
  rows.front().insert(rows.front().end(), {"computes on it", "share", "waits"});
  for (const DecidingDevice& kind : kinds) {
    std::vector<int> stages;
    std::vector<std::string> places, shares;
    for (const int i : kind.ranks) {
      const RankResult& rank = reasons.details.ranks[static_cast<std::size_t>(i)];
      stages.push_back(rank.pipeline_rank);
      places.push_back(short_name(plan, rank));
      if (!by_replica) continue;
      std::string share = fmt::format("{}", plan.spec.replica_micro_batches[static_cast<std::size_t>(rank.replica)]);
      if (shares.empty() || shares.back() != share) shares.push_back(std::move(share));
    }
    std::vector<std::string> row{kind.device, by_replica ? join(places) : numbers(stages)};
    if (by_replica) row.push_back(join(shares));
    const std::string least = format_duration(kind.waits_least), most = format_duration(kind.waits_most);
    row.insert(row.end(), {format_duration(kind.on_path), fmt::format("{:.1f} %", 100.0 * kind.share),
                           least == most ? least : fmt::format("{} to {}", least, most)});
    rows.push_back(std::move(row));
  }
  return fmt::format("\nwhich device decides: {}, with {:.1f} % of the computation on the critical path:\n",
                     kinds.front().device, 100.0 * kinds.front().share) +
         indent(align_columns(rows, 1)) + shared_by_kinds(plan, reasons, kinds);
}

std::string stage_tables(const Plan& plan, const Reasons& reasons) {
  const std::vector<RankResult>& stages = reasons.details.ranks;
  if (stages.size() < 2) return "";
  const std::vector<int> layers = layers_of_ranks(plan.spec);
  std::vector<std::string> names;
  std::vector<std::vector<std::string>> times;
  std::vector<std::vector<std::string>> memory;
  std::vector<double> computing;
  std::vector<double> peaks;
  const bool keeps = std::ranges::any_of(stages, [](const RankResult& one) { return one.memory.reserve.count > 0; });
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const StepTime& time = stages[i].time;
    const MemoryUse& use = stages[i].memory;
    names.push_back(short_name(plan, stages[i]));
    times.push_back({fmt::format("{}", layers[stages[i].pipeline_rank]), format_duration(time.compute),
                     format_duration(time.recompute)});
    for (const Axis axis : inner_axes_first)
      if (is_named(plan, axis)) times.back().push_back(format_duration(time.exposed[axis]));
    times.back().push_back(format_duration(waits(plan, stages[i])));
    times.back().push_back(format_duration(time.optimizer));
    memory.push_back({});
    for (const MemoryPart& part : memory_parts())
      if (part.part != &MemoryUse::reserve || keeps) memory.back().push_back(format_bytes(use.*part.part));
    memory.back().push_back(format_bytes(use.peak()));
    memory.back().push_back(
        format_share(static_cast<double>(use.peak().count), static_cast<double>(reasons.capacities[i].count)));
    computing.push_back((time.compute + time.recompute).value);
    peaks.push_back(static_cast<double>(use.peak().count));
  }
  std::vector<std::string> titles{"layers", "compute", "recompute"};
  for (const Axis axis : inner_axes_first)
    if (is_named(plan, axis))
      titles.push_back(axis == Axis::pp ? "transfers" : fmt::format("{}-parallel", axis_word(axis)));
  titles.insert(titles.end(), {"waiting", "optimizer"});
  std::vector<std::string> parts = {"parameters",  "gradients", "optimizer state",
                                    "activations", "buffers",   "libraries"};
  if (keeps) parts.emplace_back("kept");
  parts.insert(parts.end(), {"peak", "of capacity"});
  // Interleaved pipelines have several stages on a rank.
  const std::string each = plan.spec.virtual_stages == 1 ? "each stage" : "each pipeline rank";
  const std::string of = plan.spec.replica_micro_batches.empty() ? "" : " (replica.stage, of each kind of replica)";
  return fmt::format("\n{}'s time{}, communication as far as it is waited for:\n", each, of) +
         stage_table(std::move(titles), names, times, computing) + fmt::format("\n{}'s memory{}:\n", each, of) +
         stage_table(std::move(parts), names, memory, peaks);
}

std::string critical_path_table(const Plan& plan, const Reasons& reasons) {
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
    const std::string where = several ? fmt::format("{}: ", names_of(plan, reasons, row.stages)) : "";
    cells.push_back({where + row.what, fmt::format("{} x", row.runs), format_duration(row.time),
                     format_share(row.time.value, total.value)});
  }
  if (rest.runs > 0)
    cells.push_back({rest.what, fmt::format("{} x", rest.runs), format_duration(rest.time),
                     format_share(rest.time.value, total.value)});
  return fmt::format("\nthe critical path: what the end of the step hangs on, {} in all:\n", format_duration(total)) +
         indent(align_columns(cells, 1));
}

namespace {

// One line: the share of each origin, in its words, where there is any work at all.
template <class Of>
std::string by_origin(std::string_view what, const TimeBy<Of>& times,
                      const std::array<const char*, count_of<Of>>& words, const Reasons& reasons) {
  const Seconds total = times.total();
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < words.size(); ++i)
    if (times.of[i].value > 0.0)
      parts.push_back(fmt::format("{} {}", format_share(times.of[i].value, total.value), words[i]));
  if (parts.empty()) return "";
  return fmt::format("\n{}, {} of work{}: {}\n", what, format_duration(total),
                     reasons.details.ranks.size() > 1 ? " on all stages together" : "", join(parts));
}

}  // namespace

TimeByOrigin kernels_by_origin(const Reasons& reasons) {
  TimeByOrigin sum;
  for (const RankResult& rank : reasons.details.ranks) sum += rank.kernels;
  return sum;
}

TimeByCommunicationOrigin collectives_by_origin(const Reasons& reasons) {
  TimeByCommunicationOrigin sum;
  for (const RankResult& rank : reasons.details.ranks) sum += rank.collectives;
  return sum;
}

std::string where_kernel_times_come_from(const Plan& plan, const Reasons& reasons) {
  std::string text =
      by_origin("kernels", kernels_by_origin(reasons),
                {"at rates measured on such devices", "interpolated between kernels measured on such devices",
                 "from datasheets, or assumed for a class of devices"},
                reasons);
  const std::string loops = rates_of_loops(plan.cluster, stated_precision(plan.training));
  if (!text.empty() && !loops.empty()) text += loops + "\n";
  return text;
}

std::string where_communication_times_come_from(const Reasons& reasons) {
  return by_origin("communication", collectives_by_origin(reasons),
                   {"fitted to collectives measured on such GPUs or networks", "by NCCL's own model of its algorithms",
                    "from the rates and latencies of links"},
                   reasons);
}

}  // namespace parplan
