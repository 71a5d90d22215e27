#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "planner/cluster/cluster.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/layout_choices.h"
#include "planner/search/space_width.h"

namespace parplan {

// What the values of a choice follow from, besides the layout.
struct SpaceContext {
  const OpGraph& graph;
  const TrainingSpec& training;
  int devices = 1;
  bool uses_all = true;  // of the devices; else at most so many
  SpaceWidth width = {};
};

// A set of choices.
class ChoiceSet {
 public:
  constexpr ChoiceSet() = default;
  constexpr ChoiceSet(std::initializer_list<Choice> choices) {
    for (const Choice choice : choices) bits_ |= 1u << index_of(choice);
  }
  constexpr bool contains(Choice choice) const { return (bits_ >> index_of(choice) & 1u) != 0; }

 private:
  unsigned bits_ = 0;
  static_assert(count_of<Choice> <= 32);
};

// The values of a choice. Where a function may be null, its comment says what null means.
struct SpaceRow {
  Choice choice{};
  // The earlier choices that its values depend on; `values` reads no other part of the layout.
  ChoiceSet follows_from = {};
  // Whether `illegal` may reject one of its values and accept another, given the choices before it.
  // The values of the other rows are either all legal or all illegal.
  bool decides_legality = false;
  // Whether it has one value, the same for every layout, unless the request gives another.
  bool has_one_value = false;
  // Appends its values on so many devices, once the choices before it are made, in the order of the
  // space.
  void (*values)(const SpaceContext&, const ParallelSpec&, std::vector<ChoiceValue>&) = nullptr;
  // Whether a given value is among the legal ones. Null: `illegal` decides.
  bool (*accepts)(const SpaceContext&, const ParallelSpec&, const ChoiceValue& given) = nullptr;

  // Its values in layouts one choice away, legal or not. Null: no layout is one choice away by it.
  std::vector<ChoiceValue> (*neighbours)(const SpaceRow&, const SpaceContext&, const ParallelSpec& own) = nullptr;
  // Describes such a neighbour where the value's own phrase does not say why it is one.
  std::string_view neighbour = "";

  // Values that need less memory than a given one, the nearest first. Null: this follows from the
  // rest of the layout, and the search has to find it.
  std::vector<ChoiceValue> (*frugaler)(const TrainingSpec&, const ChoiceValue& given) = nullptr;
  // The value with which most layouts of this cluster fit beside what is given. Null, or none: it
  // follows from the rest too.
  std::optional<ChoiceValue> (*frugalest)(const Cluster&, const LayoutRequest& given) = nullptr;
  // Whether it can be the reason why a request does not fit.
  bool takes_memory = true;
};

// In the order of the space: the first changes most slowly. Those that decide legality come first.
std::span<const SpaceRow> space_rows();
const SpaceRow& space_row_of(Choice choice);

}  // namespace parplan
