#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "planner/base/enum.h"
#include "planner/base/yaml.h"
#include "planner/graph/training.h"
#include "planner/plan/parallel_spec.h"

namespace parplan {

// What there is to choose of a layout. A new choice is a field of ParallelSpec, an enumerator here,
// a row in choice.cpp (what it is called) and one in planner/search/space_rows.cpp (what it can
// be): requests, the space and its size, options, plan.yaml, texts, neighbours and remedies follow.
enum class Choice {
  dp,
  tp,
  pp,
  mesh_order,
  sequence_parallel,
  zero_stage,
  micro_batch,
  schedule,
  recompute,
  stage_blocks,
  count_
};

// What a choice can be; each choice is always of one of these types.
using ChoiceValue = std::variant<std::int64_t, bool, ScheduleKind, Recompute, AxisOrder, std::vector<int>>;
// As plan.yaml has it: "8", "true", "1f1b", "pp-dp-tp", "[6, 6]".
std::string write_value(const ChoiceValue& value);

// What the user has fixed of a layout; choices without a value are searched.
class LayoutRequest {
 public:
  LayoutRequest() = default;
  LayoutRequest(std::initializer_list<std::pair<Choice, ChoiceValue>> given) {
    for (const auto& [choice, value] : given) (*this)[choice] = value;
  }
  std::optional<ChoiceValue>& operator[](Choice choice) { return given_[index_of(choice)]; }
  const std::optional<ChoiceValue>& operator[](Choice choice) const { return given_[index_of(choice)]; }
  bool operator==(const LayoutRequest&) const = default;

 private:
  std::array<std::optional<ChoiceValue>, count_of<Choice>> given_;
};

// A key of plan.yaml that comes with a choice and stands behind its own.
struct CompanionKey {
  std::string_view key = "";
  // Nothing where the key is absent.
  std::optional<std::string> (*write)(const ParallelSpec&, const TrainingSpec&) = nullptr;
  // From the layout's node, once the choice itself is read; a ConfigError has the place.
  void (*read)(const YamlNode& layout, const TrainingSpec&, ParallelSpec&) = nullptr;
};

// What a choice is called and how it is said. Functions that may be null say what null stands for.
struct ChoiceRow {
  Choice choice{};
  std::string_view key;     // in plan.yaml and of remedies
  std::string_view option;  // on the command line: "--zero"
  // What the option takes, as help shows it; empty for a flag and where the names of values tell.
  std::string_view operand = "";
  std::string_view description;
  std::optional<Axis> axis = {};  // whose degree it is

  ChoiceValue (*get)(const ParallelSpec&) = nullptr;
  void (*set)(ParallelSpec&, const ChoiceValue&) = nullptr;

  // Numbers, and those of lists: what can be given.
  std::int64_t minimum = 1;
  std::int64_t maximum = 0;
  // In a plan; null: as given.
  std::int64_t (*most_in_plan)(const TrainingSpec&, int devices) = nullptr;
  // Values with names: those that can be given, and those that only plans have (null: none).
  std::vector<ChoiceValue> (*named)() = nullptr;
  std::vector<ChoiceValue> (*only_in_plans)() = nullptr;

  // Where it does not apply, it is what it is by default, whatever was given. Null: everywhere.
  bool (*applies)(const ParallelSpec&) = nullptr;
  // Whether a given value is legal can be said only where this choice is given, too.
  std::optional<Choice> presumes = {};
  // Another choice that follows from a given value where it is not given itself. Null: none.
  std::pair<Choice, ChoiceValue> (*implies)(const ChoiceValue&) = nullptr;

  // Why it contradicts the rest of a plan that was read up to its key. Null: never.
  std::optional<std::string> (*fault)(const ParallelSpec&, const TrainingSpec&) = nullptr;
  CompanionKey companion = {};  // without a key: none

  // In layout_text: "mb4", empty where it goes without saying. Null: always.
  std::string (*word)(const ParallelSpec&) = nullptr;
  // A neighbour with this value: "micro-batch 4". Null: key and value.
  std::string (*phrase)(const ChoiceValue&) = nullptr;
  // A remedy: "ZeRO stage 2 instead of 0". Null: key and values.
  std::string (*instead)(const ParallelSpec& now, const ChoiceValue& given) = nullptr;
};

// In the order of plan.yaml.
std::span<const ChoiceRow> choice_rows();
const ChoiceRow& row_of(Choice choice);
// For a use with an order of its own: these first, those that it does not name behind them.
std::vector<const ChoiceRow*> choice_rows(std::span<const Choice> first);

std::string phrase(const ChoiceRow& row, const ChoiceValue& value);
std::string instead(const ChoiceRow& row, const ParallelSpec& now, const ChoiceValue& given);

// What was given, of a choice of that type.
template <class T>
std::optional<T> given(const LayoutRequest& request, Choice choice) {
  return request[choice] ? std::optional(std::get<T>(*request[choice])) : std::nullopt;
}
bool gives_every_degree(const LayoutRequest& request);
std::int64_t product_of_degrees(const LayoutRequest& request);
// The plainest layout with what was given of it.
ParallelSpec with_given(const LayoutRequest& request);

}  // namespace parplan
