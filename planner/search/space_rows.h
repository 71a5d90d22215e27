#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "planner/cluster/cluster.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training.h"
#include "planner/plan/choice.h"

namespace parplan {

// What the values of a choice follow from, beside the layout.
struct SpaceContext {
  const OpGraph& graph;
  const TrainingSpec& training;
  int devices = 1;  // all of which a layout takes
};

// Choices as a set.
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

// What a choice can be. Functions that may be null say what null stands for.
struct SpaceRow {
  Choice choice{};
  // The choices before it that its values depend on; `values` reads no other part of the layout.
  ChoiceSet follows_from = {};
  // Whether `illegal` may forbid one of its values and allow another, given those before it. The
  // values of the others are all legal or none is.
  bool decides_legality = false;
  // Appends what it can be on so many devices once the choices before it are made, in the order of
  // the space.
  void (*values)(const SpaceContext&, const ParallelSpec&, std::vector<ChoiceValue>&) = nullptr;

  // What it is in layouts one choice away, legal or not. Null: no layout is one choice away by it.
  std::vector<ChoiceValue> (*neighbours)(const SpaceRow&, const SpaceContext&, const ParallelSpec& own) = nullptr;
  // Such a neighbour, where the value's own phrase does not say why it is one.
  std::string_view neighbour = "";

  // Values that need less memory than a given one, from the nearest on. Null: that follows from the
  // rest of the layout, and the search is left to find it.
  std::vector<ChoiceValue> (*frugaler)(const TrainingSpec&, const ChoiceValue& given) = nullptr;
  // The value with which most layouts of this cluster fit. Null: it follows from the rest, too.
  std::optional<ChoiceValue> (*frugalest)(const Cluster&) = nullptr;
  // Whether it can be what keeps a request from fitting.
  bool takes_memory = true;
};

// In the order of the space: the first changes slowest. Those that decide legality come first.
std::span<const SpaceRow> space_rows();
const SpaceRow& space_row_of(Choice choice);

}  // namespace parplan
