#include "planner/parallel/techniques.h"

#include <array>

#include <fmt/format.h>

#include "planner/base/text.h"
#include "planner/parallel/data.h"
#include "planner/parallel/pipeline.h"
#include "planner/parallel/tensor.h"
#include "planner/parallel/zero.h"

namespace parplan {
namespace {

constexpr std::array rows = {
    TechniqueRow{"tensor", legal_tensor_degrees, illegal_tensor, place_tensor},
    TechniqueRow{"pipeline", legal_pipeline_degrees, illegal_pipeline, place_pipeline},
    TechniqueRow{"data", legal_data_degrees, illegal_data, place_data},
    TechniqueRow{"zero", legal_zero_stages, illegal_zero, place_zero},
};

}  // namespace

std::span<const TechniqueRow> technique_rows() { return rows; }

Placements place(const OpGraph& graph, const ParallelSpec& spec) {
  Placements placements;
  for (const TechniqueRow& row : rows) row.place(graph, spec, placements);
  return placements;
}

std::optional<std::string> illegal(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec) {
  for (const TechniqueRow& row : rows)
    if (auto reason = row.illegal(graph, training, spec)) return reason;
  return std::nullopt;
}

std::string list_degrees(const std::vector<int>& degrees) {
  if (degrees.empty()) return "none";
  constexpr std::size_t readable = 8;
  if (degrees.size() > readable && degrees.back() - degrees.front() + 1 == static_cast<int>(degrees.size()))
    return fmt::format("{} to {}", degrees.front(), degrees.back());
  std::vector<std::string> words;
  for (int degree : degrees) words.push_back(fmt::format("{}", degree));
  return join(words);
}

}  // namespace parplan
