#include "planner/report/explain_rivals.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/plan/parallel_spec_text.h"
#include "planner/report/explain_words.h"
#include "planner/report/table.h"

namespace parplan {
namespace {

std::string more_or_less(double factor) {
  return fmt::format("{:.0f} % {}", 100.0 * std::abs(factor - 1.0), factor < 1.0 ? "less" : "more");
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
  if (const std::optional<Shortage>& lack = variation.plan.shortage)
    return lack->home == Home::device
               ? fmt::format("does not fit: {} of {}", format_bytes(lack->needed), format_bytes(lack->available))
               : fmt::format("does not fit: {}", words_of(*lack));
  const double change = slower(own.result, plan.prediction);
  if (variation.resource != Resource::global_batch)
    return std::abs(change) < tied_plans
               ? "as now"
               : fmt::format("{} ({})", format_duration(own.result.time.total()), signed_share(change));
  // A larger step need not be slower.
  const double rate = variation.factor * (plan.prediction.time.total() / own.result.time.total()) - 1.0;
  const std::string micro_batch =
      own.spec.micro_batch != plan.spec.micro_batch ? fmt::format(" (micro-batch {})", own.spec.micro_batch) : "";
  return fmt::format("{}{}, {}", format_duration(own.result.time.total()), micro_batch,
                     std::abs(rate) < tied_plans ? "as many tokens/s" : "tokens/s " + signed_share(rate));
}

std::string resource_then(const Variation& variation) {
  return variation.resource == Resource::global_batch
             ? fmt::format("global batch {} ({})", variation.global_batch, more_or_less(variation.factor))
             : fmt::format("{} {}", name(variation.resource), more_or_less(variation.factor));
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

}  // namespace

std::string neighbour_table(const Plan& plan, const Reasons& reasons) {
  if (reasons.neighbours.empty()) return "";
  std::vector<std::vector<std::string>> rows{row_of("one choice away", rival_heads(plan), "against the plan")};
  for (const Neighbour& neighbour : reasons.neighbours)
    rows.push_back(row_of(neighbour.change, rival_cells(plan, neighbour.rival), loss(plan, neighbour.rival)));
  return "\n" + table_with_words(rows, 1);
}

std::string family_table(const Plan& plan, const Reasons& reasons) {
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

std::string twice_table(const Plan& plan, const Reasons& reasons) {
  std::vector<std::vector<std::string>> rows{{"with twice", "the plan", "then"}};
  for (const Variation& variation : reasons.twice)
    rows.push_back({name(variation.resource), plan_then(variation, plan), changed_to(plan, variation)});
  return table_with_words(rows, 2) + what_found_means(reasons.twice);
}

std::string sensitivity_table(const Plan& plan, const Reasons& reasons) {
  if (reasons.sensitivity.empty()) return "";
  std::vector<std::vector<std::string>> rows{{"with", "the plan", "then"}};
  for (const Variation& variation : reasons.sensitivity)
    rows.push_back({resource_then(variation), plan_then(variation, plan), changed_to(plan, variation)});
  const bool lessened = std::ranges::any_of(
      reasons.sensitivity, [](const Variation& v) { return v.resource == Resource::global_batch && v.factor < 1.0; });
  if (!lessened)
    rows.push_back({"global batch less", "-",
                    plan.training.global_batch == plan.spec.mesh.batch_ranks()
                        ? "it cannot be less: each data-parallel rank has one sequence"
                        : "no smaller batch near it is legal in this layout"});
  return "\n" + table_with_words(rows, 2) + what_found_means(reasons.sensitivity);
}

}  // namespace parplan
