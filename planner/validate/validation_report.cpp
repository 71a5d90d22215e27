#include "planner/validate/validation_report.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/base/text.h"
#include "planner/report/csv.h"
#include "planner/report/table.h"

namespace parplan {
namespace {

// Pairs of runs that are closer than this are ordered by noise.
constexpr double close_runs = 0.05;

std::string_view stated(const ValidatedRun& one) {
  if (!one.skipped.empty()) return "skipped";
  return one.assumed.empty() ? "exact" : "assumed";
}

using Pairs = std::vector<std::pair<double, double>>;  // predicted and measured
std::optional<std::pair<double, double>> steps_of(const ValidatedRun& one) {
  if (!one.step_error()) return std::nullopt;
  return std::pair(one.step.value, *one.run.step_seconds);
}
std::optional<std::pair<double, double>> memory_of(const ValidatedRun& one) {
  if (!one.memory_error()) return std::nullopt;
  return std::pair(static_cast<double>(one.memory.count), *one.run.memory_gib * 1024.0 * 1024.0 * 1024.0);
}

// Whether bandwidth or latency matters for a collective; nothing for runs.
std::string size_of_message(const PublishedRun& run) {
  constexpr std::int64_t mebibyte = 1 << 20;
  if (!run.collective) return "";
  return run.collective->bytes.value_or(0) >= mebibyte ? "messages of 1 MiB and more" : "messages below 1 MiB";
}

// What runs are summed up by.
struct Division {
  const char* key = nullptr;  // in JSON
  const char* title = nullptr;
  std::string (*of)(const PublishedRun&) = nullptr;
};
constexpr std::array divisions = {
    Division{"all", "all", [](const PublishedRun&) { return std::string("all runs"); }},
    Division{"sources", "source", [](const PublishedRun& run) { return run.source; }},
    Division{"engines", "engine", [](const PublishedRun& run) { return run.engine; }},
    Division{"devices", "device",
             [](const PublishedRun& run) { return run.device.empty() ? run.cluster : run.device; }},
    Division{"message_sizes", "message size", size_of_message},
};

// Names in the order of their first runs.
struct Part {
  std::string name;
  Pairs steps, memory;
};
std::vector<Part> parts_of(std::span<const ValidatedRun> runs, const Division& division, std::string_view with) {
  std::vector<Part> parts;
  for (const ValidatedRun& one : runs) {
    if (stated(one) != with) continue;
    const std::string name = division.of(one.run);
    if (name.empty()) continue;
    auto part = std::ranges::find(parts, name, &Part::name);
    if (part == parts.end()) part = parts.insert(parts.end(), Part{.name = name, .steps = {}, .memory = {}});
    if (const auto steps = steps_of(one)) part->steps.push_back(*steps);
    if (const auto memory = memory_of(one)) part->memory.push_back(*memory);
  }
  return parts;
}

std::string percent(double share) {
  return fmt::format("{:+.1f} %", 100.0 * share);
}
std::string unsigned_percent(double share) {
  return fmt::format("{:.1f} %", 100.0 * share);
}

// The first words of a long source.
std::string short_name(const std::string& name) {
  constexpr std::size_t most = 60;
  return name.size() <= most ? name : name.substr(0, name.rfind(' ', most)) + " ...";
}

std::string summary_table(std::span<const SummaryRow> summaries, std::string_view with, std::string_view quantity) {
  std::vector<std::vector<std::string>> rows{
      {fmt::format("{}, {} runs", quantity, with), "runs", "mean", "median", "largest", "bias", "rank correlation"}};
  for (const SummaryRow& one : summaries) {
    if (one.stated != with || one.quantity != quantity) continue;
    const ErrorSummary& of = one.errors;
    rows.push_back({short_name(printable_line(one.name)), std::to_string(of.count), unsigned_percent(of.mean_absolute),
                    unsigned_percent(of.median_absolute), unsigned_percent(of.largest_absolute), percent(of.bias),
                    of.rank_correlation ? fmt::format("{:.3f}", *of.rank_correlation) : "-"});
  }
  return rows.size() == 1 ? "" : align_columns(rows, 1) + "\n";
}

struct OutOfMemory {
  int recorded = 0, called_fits = 0, called_tight = 0;  // runs that did not fit
  int fitted = 0, refused = 0, tight = 0;               // runs that fitted
};
OutOfMemory out_of_memory(std::span<const ValidatedRun> runs) {
  OutOfMemory result;
  for (const ValidatedRun& one : runs) {
    if (!one.skipped.empty() || one.run.collective) continue;
    const bool ran_out = one.run.outcome == "oom";
    ++(ran_out ? result.recorded : result.fitted);
    const auto is = [&](MemoryVerdict verdict) { return one.verdict == verdict; };
    result.called_fits += ran_out && is(MemoryVerdict::fits);
    result.called_tight += ran_out && is(MemoryVerdict::tight);
    result.refused += !ran_out && is(MemoryVerdict::does_not_fit);
    result.tight += !ran_out && is(MemoryVerdict::tight);
  }
  return result;
}

Json json_of(const std::optional<ErrorSummary>& summary) {
  if (!summary) return nullptr;
  return {{"runs", summary->count},
          {"mean_absolute_error", summary->mean_absolute},
          {"median_absolute_error", summary->median_absolute},
          {"max_absolute_error", summary->largest_absolute},
          {"bias", summary->bias},
          {"rank_correlation", optional_number(summary->rank_correlation)}};
}

Json summary_json(std::span<const ValidatedRun> runs, std::string_view with) {
  Json summary;
  for (const Division& division : divisions) {
    Json list = Json::array();
    for (const Part& part : parts_of(runs, division, with))
      list.push_back({{"name", part.name},
                      {"step_time", json_of(summarise(part.steps))},
                      {"memory", json_of(summarise(part.memory))}});
    summary[division.key] = std::move(list);
  }
  return summary;
}

Json json_of(const OrderSummary& order) {
  return {{"groups", order.groups},
          {"pairs", order.pairs},
          {"pairs_right", order.pairs_right},
          {"mean_regret", order.regret}};
}

std::vector<Json> rows_of(std::span<const ValidatedRun> runs) {
  std::vector<Json> rows;
  for (const ValidatedRun& one : runs) {
    const bool is_predicted = one.skipped.empty();
    const auto if_predicted = [&](auto value) { return is_predicted ? Json(value) : Json(nullptr); };
    const auto if_any = [](const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); };
    rows.push_back(
        {{"id", one.run.id},
         {"source", one.run.source},
         {"engine", one.run.engine},
         {"predicted_engine", if_any(one.engine)},
         {"device", if_any(one.run.device)},
         {"cluster", if_any(one.run.cluster)},
         {"stated", std::string(stated(one))},
         {"assumed", one.assumed.empty() || !is_predicted ? Json(nullptr) : Json(join(one.assumed, "; "))},
         {"skipped", is_predicted ? Json(nullptr) : Json(one.skipped)},
         {"predicted_step_time_s", if_predicted(one.step.value)},
         {"measured_step_time_s", optional_number(one.run.step_seconds)},
         {"error", optional_number(one.step_error())},
         {"predicted_memory_peak_bytes", one.run.collective ? Json(nullptr) : if_predicted(one.memory.count)},
         {"measured_memory_peak_bytes",
          one.run.memory_gib ? json_number(*one.run.memory_gib * 1024.0 * 1024.0 * 1024.0) : Json(nullptr)},
         {"memory_error", optional_number(one.memory_error())},
         {"predicted_to_fit", one.run.collective || one.verdict == MemoryVerdict::tight
                                  ? Json(nullptr)
                                  : if_predicted(one.verdict == MemoryVerdict::fits)},
         {"outcome", one.run.outcome},
         {"memory_scope", one.run.collective ? Json(nullptr) : if_predicted(name(one.scope))},
         {"predicted_device_memory_bytes", one.run.collective ? Json(nullptr) : if_predicted(one.device_memory.count)},
         {"memory_capacity_bytes", one.run.collective ? Json(nullptr) : if_predicted(one.capacity.count)},
         {"memory_verdict", one.run.collective ? Json(nullptr) : if_predicted(name(one.verdict))},
         {"engine_differs", if_any(one.engine_differs)}});
  }
  return rows;
}

}  // namespace

std::vector<SummaryRow> summary_rows(std::span<const ValidatedRun> runs) {
  std::vector<SummaryRow> rows;
  for (const char* const with : {"exact", "assumed"})
    for (const Division& division : divisions)
      for (const Part& part : parts_of(runs, division, with)) {
        const auto add = [&](const char* quantity, const Pairs& pairs) {
          if (const std::optional<ErrorSummary> errors = summarise(pairs))
            rows.push_back({with, quantity, division.title, part.name, *errors});
        };
        add("step time", part.steps);
        add("memory", part.memory);
      }
  return rows;
}

namespace {

std::string runs_in_words(std::size_t count) {
  return fmt::format("{} run{}", count, count == 1 ? "" : "s");
}

// How layouts are ordered, and what is said to fit.
std::string order_and_memory(std::span<const ValidatedRun> runs) {
  std::string text;
  const OrderSummary all = summarise_order(runs, 0.0), apart = summarise_order(runs, close_runs);
  const auto right = [](const OrderSummary& order) {
    return fmt::format("{} of {} pairs", order.pairs_right, order.pairs);
  };
  if (all.groups > 0)
    text += fmt::format(
        "order: {} of runs of one model on one cluster are predicted in their order, {} where they differ by more "
        "than {:.0f} %; the run that is predicted to be the fastest is {:.1f} % slower than the fastest (mean of {} "
        "groups)\n",
        right(all), right(apart), 100.0 * close_runs, 100.0 * all.regret, all.groups);
  const OutOfMemory memory = out_of_memory(runs);
  if (memory.recorded + memory.fitted > 0)
    text += fmt::format(
        "memory: {} of {} runs that ran out of memory are predicted to fit, and {} to be tight; {} of {} "
        "that ran are predicted not to fit, and {} to be tight\n",
        memory.called_fits, memory.recorded, memory.called_tight, memory.refused, memory.fitted, memory.tight);
  return text;
}

}  // namespace

std::string summary_in_words(std::span<const ValidatedRun> runs) {
  std::string text = order_and_memory(runs);
  std::map<std::string, std::size_t> skipped;
  for (const ValidatedRun& one : runs)
    if (!one.skipped.empty()) ++skipped[one.skipped];
  for (const auto& [why, count] : skipped)
    text += fmt::format("skipped: {}: {}\n", runs_in_words(count), printable_line(why));
  return text;
}

namespace {

// "  micro-batch 1 (2 runs): this run, that run" for each text that runs have, in the order of
// their first.
std::string listed_by(std::span<const ValidatedRun> runs,
                      const std::function<std::string(const ValidatedRun&)>& text_of) {
  constexpr std::size_t width = 140;
  std::vector<std::pair<std::string, std::vector<std::string>>> lists;
  for (const ValidatedRun& one : runs) {
    const std::string text = text_of(one);
    if (text.empty()) continue;
    auto list = std::ranges::find(lists, text, &std::pair<std::string, std::vector<std::string>>::first);
    if (list == lists.end()) list = lists.insert(lists.end(), {text, {}});
    list->second.push_back(printable_line(one.run.id));
  }
  std::string lines;
  for (const auto& [text, ids] : lists)
    lines += fmt::format("  {} ({}): {}\n", printable_line(text), runs_in_words(ids.size()), join(ids));
  return fold_lines(lines, width);
}

// What was filled in of which runs, and which were not predicted for what reason.
std::string assumed_and_skipped(std::span<const ValidatedRun> runs) {
  const std::string assumed = listed_by(runs, [](const ValidatedRun& one) {
    return one.skipped.empty() ? join(one.assumed, "; ") : std::string();
  });
  const std::string skipped = listed_by(runs, [](const ValidatedRun& one) { return one.skipped; });
  return (assumed.empty() ? "" : "assumed, and of which runs:\n" + assumed + "\n") +
         (skipped.empty() ? "" : "skipped, and which runs:\n" + skipped + "\n");
}

}  // namespace

std::string validation_table(std::span<const ValidatedRun> runs, bool with_engines) {
  std::vector<std::vector<std::string>> rows{
      {"run", "stated", "predicted", "measured", "error", "predicted memory", "measured", "error"}};
  if (with_engines) rows.front().emplace_back("as engine");
  const auto seconds = [](double value) { return format_duration(Seconds(value)); };
  const auto error = [](const std::optional<double>& of) { return of ? percent(*of) : "-"; };
  for (const ValidatedRun& one : runs) {
    if (!one.skipped.empty()) continue;
    const bool is_collective = one.run.collective.has_value();
    rows.push_back(
        {printable_line(one.run.id), std::string(stated(one)), seconds(one.step.value),
         one.run.step_seconds ? seconds(*one.run.step_seconds) : printable_line(one.run.outcome),
         error(one.step_error()),
         is_collective ? "-"
                       : format_bytes(one.memory) +
                             (one.verdict == MemoryVerdict::fits ? "" : fmt::format(" ({})", words_of(one.verdict))),
         one.run.memory_gib ? fmt::format("{:.1f} GiB", *one.run.memory_gib) : "-", error(one.memory_error())});
    if (with_engines) rows.back().push_back(is_collective ? "-" : printable_line(one.engine));
  }
  std::string text = align_columns(rows, 2) + "\n" + assumed_and_skipped(runs);
  const std::vector<SummaryRow> summaries = summary_rows(runs);
  for (const std::string_view with : {"exact", "assumed"})
    for (const std::string_view quantity : {"step time", "memory"}) text += summary_table(summaries, with, quantity);
  return text + order_and_memory(runs);
}

std::string validation_csv(std::span<const ValidatedRun> runs) {
  const std::vector<Json> rows = rows_of(runs);
  std::vector<std::string> keys;
  if (!rows.empty())
    for (const auto& [key, value] : rows.front().items()) keys.push_back(key);
  return write_csv(keys, rows);
}

Json validation_json(std::span<const ValidatedRun> runs, const std::string& version) {
  const OutOfMemory memory = out_of_memory(runs);
  return {{"schema", "parplan.validate/1"},
          {"tool", {{"name", "parplan"}, {"version", version}}},
          {"rows", rows_of(runs)},
          {"summary",
           {{"exact", summary_json(runs, "exact")},
            {"assumed", summary_json(runs, "assumed")},
            {"order", json_of(summarise_order(runs, 0.0))},
            {"order_beyond_5_percent", json_of(summarise_order(runs, close_runs))},
            {"out_of_memory",
             {{"recorded", memory.recorded},
              {"predicted_to_fit", memory.called_fits},
              {"fitted", memory.fitted},
              {"predicted_not_to_fit", memory.refused},
              {"recorded_predicted_tight", memory.called_tight},
              {"fitted_predicted_tight", memory.tight}}}}}};
}

}  // namespace parplan
