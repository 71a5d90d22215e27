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

#include "planner/base/enum_index.h"
#include "planner/base/yaml.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/parallel_spec.h"

namespace parplan {

// The choices that make up a layout. A new choice is a field of ParallelSpec, an enumerator here, a
// row in layout_choices.cpp (its names and texts) and a row in planner/search/space_rows.cpp (its
// values): requests, the space and its size, options, plan.yaml, texts, neighbours and remedies
// follow.
enum class Choice {
  dp,
  tp,
  pp,
  cp,
  mesh_order,
  sequence_parallel,
  cp_method,
  cp_ulysses,
  zero_stage,
  dp_shard,
  replica_micro_batches,
  micro_batch,
  schedule,
  virtual_stages,
  micro_batch_group,
  recompute,
  recompute_layers,
  stage_blocks,
  tied_gradients,
  input_slots,
  offload,
  offload_layers,
  dp_method,
  tp_overlap,
  prefetch_depth,
  gather_unit,
  count_
};

// The value of a choice; every choice always holds the same one of these types.
using ChoiceValue = std::variant<std::int64_t, bool, ScheduleKind, Recompute, TiedGradients, InputSlots, ContextMethod,
                                 Offload, DataMethod, TensorOverlap, GatherUnit, AxisOrder, std::vector<int>>;
// As in plan.yaml: "8", "true", "1f1b", "pp-dp-tp", "[6, 6]".
std::string write_value(const ChoiceValue& value);

// The part of a layout that the user has fixed; choices without a value are searched.
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

// A key of plan.yaml that belongs to a choice and follows the choice's own key.
struct CompanionKey {
  std::string_view key = "";
  // Nothing where the key is absent.
  std::optional<std::string> (*write)(const ParallelSpec&, const TrainingSpec&) = nullptr;
  // Reads it from the layout's node, once the choice itself is read; a ConfigError names the place.
  void (*read)(const YamlNode& layout, const TrainingSpec&, ParallelSpec&) = nullptr;
};

using ImpliedChoices = std::vector<std::pair<Choice, ChoiceValue>>;

// The names of a choice and the texts about it. Where a function may be null, its comment says what
// null means.
struct ChoiceRow {
  Choice choice{};
  std::string_view key;     // in plan.yaml and in remedies
  std::string_view option;  // on the command line: "--zero"
  // The option's operand as help shows it; empty for a flag and where the names of the values tell.
  std::string_view operand = "";
  std::string_view description;
  std::optional<Axis> axis = {};  // the axis whose degree it is

  ChoiceValue (*get)(const ParallelSpec&) = nullptr;
  void (*set)(ParallelSpec&, const ChoiceValue&) = nullptr;

  // The range of a number, or of the numbers of a list, that can be given.
  std::int64_t minimum = 1;
  std::int64_t maximum = 0;
  // The maximum in a plan. Null: `maximum`.
  std::int64_t (*most_in_plan)(const TrainingSpec&, int devices) = nullptr;
  // Values with names: those that can be given, and those that only plans contain. Null: none.
  std::vector<ChoiceValue> (*named)() = nullptr;
  std::vector<ChoiceValue> (*only_in_plans)() = nullptr;
  // Whether a plan without the key has the default value, which is then not written.
  bool may_be_absent = false;

  // Where it does not apply, it has its default value, whatever was given. Null: it applies
  // everywhere.
  bool (*applies)(const ParallelSpec&) = nullptr;
  // For a layout that is given, without a search: a given value stays where it does not apply, so
  // that what it contradicts is said.
  bool is_kept = false;
  // A given value can be checked only where this choice is given too.
  std::optional<Choice> presumes = {};
  // Values of other choices that follow from a given value, and from those given before it, where
  // these choices are not given. Null: none.
  ImpliedChoices (*implies)(const ChoiceValue&, const LayoutRequest& before) = nullptr;

  // Why it contradicts the part of a plan that was read before its key. Null: never.
  std::optional<std::string> (*fault)(const ParallelSpec&, const TrainingSpec&) = nullptr;
  CompanionKey companion = {};  // without a key: none

  // Its word in layout_text: "mb4"; empty where it goes without saying. Null: always empty.
  std::string (*word)(const ParallelSpec&) = nullptr;
  // Describes a neighbour with this value: "micro-batch 4". Null: key and value.
  std::string (*phrase)(const ChoiceValue&) = nullptr;
  // Describes a remedy: "ZeRO stage 2 instead of 0". Null: key and values.
  std::string (*instead)(const ParallelSpec& now, const ChoiceValue& given) = nullptr;
};

// In the order of plan.yaml.
std::span<const ChoiceRow> choice_rows();
const ChoiceRow& row_of(Choice choice);
// For a use with an order of its own: first the given choices, then all others.
std::vector<const ChoiceRow*> choice_rows(std::span<const Choice> first);

// Why the micro-batches of replicas with unlike numbers are not the global batch; nothing if
// they are.
std::optional<std::string> other_batch_than_replicas(const ParallelSpec& spec, const TrainingSpec& training);

std::string phrase(const ChoiceRow& row, const ChoiceValue& value);
std::string instead(const ChoiceRow& row, const ParallelSpec& now, const ChoiceValue& given);

// Whether activations are to leave the device.
bool offloads_activations(const LayoutRequest& request);

// The given value of a choice of that type.
template <class T>
std::optional<T> given(const LayoutRequest& request, Choice choice) {
  return request[choice] ? std::optional(std::get<T>(*request[choice])) : std::nullopt;
}
bool gives_every_degree(const LayoutRequest& request);
std::int64_t product_of_degrees(const LayoutRequest& request);
// The simplest layout with the given values.
ParallelSpec with_given(const LayoutRequest& request);
// The same, in which the size of micro-batches follows from their numbers where these are given and
// the size is not.
ParallelSpec with_given(const LayoutRequest& request, const TrainingSpec& training);

}  // namespace parplan
