#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "planner/base/enum_index.h"

namespace parplan {

// The axes of a device mesh: pipeline, data, context, expert and tensor parallelism. Every table,
// stream, label and volume that has something for each axis is made of these; one table in axis.cpp
// holds their names.
enum class Axis : std::uint8_t { pp, dp, cp, ep, tp, count_ };
inline constexpr std::array<Axis, count_of<Axis>> all_axes = {Axis::pp, Axis::dp, Axis::cp, Axis::ep, Axis::tp};
// From the axis whose communication is awaited most closely to the one that is awaited least: the
// order in which times and volumes are listed and summed.
inline constexpr std::array<Axis, count_of<Axis>> inner_axes_first = {Axis::tp, Axis::ep, Axis::cp, Axis::dp, Axis::pp};
// The axes over which each tensor of a block has a placement of its own. Over the data axis a
// bucket of parameters is sharded as a whole, and the pipeline's ranks hold different blocks.
inline constexpr std::array block_axes = {Axis::tp, Axis::ep, Axis::cp};
// The axes over which a parameter is cut, or whole on each rank with gradients to be reduced.
inline constexpr std::array parameter_axes = {Axis::tp, Axis::ep};
// The axes whose ranks hold the same parameters, with gradients of their own tokens: buckets are
// reduced and sharded over all of these ranks together, which are the data axis's group.
inline constexpr std::array replica_axes = {Axis::dp, Axis::cp};
// The axes whose ranks have sequences of their own: they share out the global batch.
inline constexpr std::array batch_axes = {Axis::dp};
// The axes that plans lay out today: the others have degree 1, and files and tables do not name
// them.
constexpr bool is_planned(Axis axis) { return axis != Axis::ep; }
// The planned axis that files and tables name only where it has several ranks or took part: files
// written before it was planned lack it.
constexpr bool may_be_unnamed(Axis axis) { return axis == Axis::cp; }

const char* name(Axis axis);       // "tp": options, columns, keys of files
const char* axis_word(Axis axis);  // "tensor": groups, streams and labels

// A value for each axis, by name (`volume.tp`) and by axis (`volume[axis]`).
template <class T>
struct PerAxis {
  T pp{};
  T dp{};
  T cp{};
  T ep{};
  T tp{};

  constexpr T& operator[](Axis axis) { return this->*members[index_of(axis)]; }
  constexpr const T& operator[](Axis axis) const { return this->*members[index_of(axis)]; }
  auto operator<=>(const PerAxis&) const = default;

 private:
  static constexpr std::array<T PerAxis::*, count_of<Axis>> members = {&PerAxis::pp, &PerAxis::dp, &PerAxis::cp,
                                                                        &PerAxis::ep, &PerAxis::tp};
};

// How many ranks a mesh has along each axis.
struct Degrees {
  int pp = 1;
  int dp = 1;
  int cp = 1;
  int ep = 1;
  int tp = 1;

  constexpr int& operator[](Axis axis) { return this->*members[index_of(axis)]; }
  constexpr int operator[](Axis axis) const { return this->*members[index_of(axis)]; }
  constexpr int product() const { return pp * dp * cp * ep * tp; }
  auto operator<=>(const Degrees&) const = default;

 private:
  static constexpr std::array<int Degrees::*, count_of<Axis>> members = {&Degrees::pp, &Degrees::dp, &Degrees::cp,
                                                                          &Degrees::ep, &Degrees::tp};
};

// Axes from the outermost (largest stride over device indices) to the innermost (neighbouring
// devices). An axis that an order leaves out has degree 1, but for the context axis: it then lies
// directly inside the data axis, so that the ranks of both together are a regular group.
class AxisOrder {
 public:
  constexpr AxisOrder() : AxisOrder({Axis::pp, Axis::dp, Axis::tp}) {}
  constexpr AxisOrder(std::initializer_list<Axis> axes) {
    for (const Axis axis : axes) axes_[size_++] = axis;
  }
  // The order with one more axis, directly inside `axis`.
  constexpr AxisOrder with_inside(Axis axis, Axis added) const {
    AxisOrder result;
    result.axes_ = {};
    result.size_ = 0;
    for (const Axis own : *this) {
      result.axes_[result.size_++] = own;
      if (own == axis) result.axes_[result.size_++] = added;
    }
    return result;
  }
  constexpr Axis* begin() { return axes_.data(); }
  constexpr Axis* end() { return axes_.data() + size_; }
  constexpr const Axis* begin() const { return axes_.data(); }
  constexpr const Axis* end() const { return axes_.data() + size_; }
  auto operator<=>(const AxisOrder&) const = default;

 private:
  std::array<Axis, count_of<Axis>> axes_{};
  std::uint8_t size_ = 0;
};

// "pp-dp-tp".
std::string write_order(const AxisOrder& order);
// ConfigError lists the orders of the planned axes.
AxisOrder parse_order(const std::string& text);

}  // namespace parplan
