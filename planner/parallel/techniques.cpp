#include "planner/parallel/techniques.h"

#include <algorithm>
#include <array>
#include <unordered_map>

#include <fmt/format.h>

#include "planner/base/text.h"
#include "planner/parallel/context.h"
#include "planner/parallel/data.h"
#include "planner/parallel/engine_layouts.h"
#include "planner/parallel/master.h"
#include "planner/parallel/offload.h"
#include "planner/parallel/pipeline.h"
#include "planner/parallel/recompute.h"
#include "planner/parallel/tensor.h"
#include "planner/parallel/zero.h"

namespace parplan {
namespace {

constexpr std::array rows = {
    TechniqueRow{.name = "tensor",
                 .legal_degrees = legal_tensor_degrees,
                 .illegal = illegal_tensor,
                 .allows = allows_tensor,
                 .place = place_tensor},
    TechniqueRow{.name = "context",
                 .legal_degrees = legal_context_degrees,
                 .illegal = illegal_context,
                 .allows = allows_context,
                 .place = place_context},
    TechniqueRow{.name = "pipeline",
                 .legal_degrees = legal_pipeline_degrees,
                 .illegal = illegal_pipeline,
                 .place = place_pipeline},
    TechniqueRow{.name = "data", .legal_degrees = legal_data_degrees, .illegal = illegal_data, .place = place_data},
    TechniqueRow{.name = "zero", .legal_degrees = legal_zero_stages, .illegal = illegal_zero, .place = place_zero},
    TechniqueRow{
        .name = "offload", .legal_degrees = legal_offloads, .illegal = illegal_offload, .place = place_offload},
    TechniqueRow{.name = "recompute",
                 .legal_degrees = legal_recompute_layers,
                 .illegal = illegal_recompute,
                 .place = place_recompute},
    TechniqueRow{
        .name = "master", .legal_degrees = legal_data_methods, .illegal = illegal_master, .place = place_master},
};

}  // namespace

std::span<const TechniqueRow> technique_rows() { return rows; }

Placements place(const OpGraph& graph, const ParallelSpec& spec) {
  Placements placements;
  for (const TechniqueRow& row : rows) row.place(graph, spec, placements);
  return placements;
}

std::optional<std::string> illegal_technique(const OpGraph& graph, const TrainingSpec& training,
                                             const ParallelSpec& spec) {
  if (auto reason = lacked_by_engine(training.engine, spec)) return reason;
  if (auto reason = lacked_by_engine(training.engine, training.optimizer)) return reason;
  for (const TechniqueRow& row : rows)
    if (auto reason = row.illegal(graph, training, spec)) return reason;
  return std::nullopt;
}

std::optional<std::string> illegal(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec) {
  if (auto reason = illegal_technique(graph, training, spec)) return reason;
  return too_many_calls(training, spec);
}

bool is_legal(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec) {
  return !lacked_by_engine(training.engine, spec) && !lacked_by_engine(training.engine, training.optimizer) &&
         std::ranges::all_of(rows,
                             [&](const TechniqueRow& row) {
                               return row.allows != nullptr ? row.allows(graph, training, spec)
                                                            : !row.illegal(graph, training, spec);
                             }) &&
         !has_too_many_calls(training, spec);
}

namespace {
std::int64_t most_micro_batches(const ParallelSpec& spec) { return most_calls / 2 / spec.stages(); }
}  // namespace

bool has_too_many_calls(const TrainingSpec& training, const ParallelSpec& spec) {
  return micro_batches(spec, training) > most_micro_batches(spec);
}

std::optional<std::string> too_many_calls(const TrainingSpec& training, const ParallelSpec& spec) {
  if (!has_too_many_calls(training, spec)) return std::nullopt;
  const std::int64_t count = micro_batches(spec, training), most = most_micro_batches(spec);
  return fmt::format(
      "a step would be {} micro-batches of {} on each data-parallel rank; with {} stage{} a plan holds at most {}: "
      "take larger micro-batches, more data parallelism, "
      "or a smaller batch",
      count, spec.micro_batch, spec.stages(), spec.stages() == 1 ? "" : "s", most);
}

// A walk over a space asks for those of a few numbers many times.
const std::vector<std::int64_t>& divisors(std::int64_t number) {
  thread_local std::unordered_map<std::int64_t, std::vector<std::int64_t>> known;
  const auto [entry, is_new] = known.try_emplace(number);
  std::vector<std::int64_t>& low = entry->second;
  if (!is_new) return low;
  std::vector<std::int64_t> high;
  for (std::int64_t d = 1; d <= number / d; ++d) {
    if (number % d != 0) continue;
    low.push_back(d);
    if (d != number / d) high.push_back(number / d);
  }
  low.insert(low.end(), high.rbegin(), high.rend());
  return low;
}

std::string list_degrees(const std::vector<std::int64_t>& degrees) {
  if (degrees.empty()) return "none";
  constexpr std::size_t readable = 8;
  if (degrees.size() > readable && degrees.back() - degrees.front() + 1 == static_cast<std::int64_t>(degrees.size()))
    return fmt::format("{} to {}", degrees.front(), degrees.back());
  std::vector<std::string> words;
  for (const std::int64_t degree : degrees) words.push_back(fmt::format("{}", degree));
  return join(words);
}

}  // namespace parplan
