#pragma once

#include <cstdint>

#include "planner/graph/local_op.h"
#include "planner/graph/op_kind.h"

// What the rows of several families are written in. Only the files of this folder include it.
namespace parplan {

// Optional operands: the flag of the shape that says whether they are there.
inline constexpr ShapeFlag if_bias = &OpShape::bias;
inline constexpr ShapeFlag if_second = &OpShape::second;
inline constexpr ShapeFlag if_composed = &OpShape::composed;
inline constexpr ShapeFlag if_widened = &OpShape::widened;
inline constexpr ShapeFlag if_gathered = &OpShape::gathered;
inline constexpr ShapeFlag if_norm = &OpShape::norm;
inline constexpr ShapeFlag if_master = &OpShape::master;
inline constexpr ShapeFlag if_scaled = &OpShape::scaled;
// Gradients of parameters that may be frozen.
constexpr OperandRow of_first(OperandSize size) {
  return {OperandSource::parameter_gradient, 0, Access::update, size, nullptr, &OpShape::freezes_first};
}
constexpr OperandRow of_second(OperandSize size) {
  return {OperandSource::parameter_gradient, 1, Access::update, size, nullptr, &OpShape::freezes_second};
}
// The beta of a LayerNorm that has one.
constexpr OperandRow beta_of(int index, OperandSize size) {
  return {OperandSource::parameter, index, Access::read, size, nullptr, &OpShape::without_beta};
}
// How many of these a kernel of norms with two parameters, or with one, adds to.
constexpr std::int64_t trained_of_two(const OpShape& s) {
  return (s.freezes_first ? 0 : 1) + (s.freezes_second ? 0 : 1);
}
constexpr std::int64_t trained_of_one(const OpShape& s) {
  return s.freezes_first ? 0 : 1;
}

// Sizes of operands -------------------------------------------------------------------------------

// The same number of elements in fp32: gradients of parameters, optimizer state.
constexpr OperandSize in_fp32(const OperandSize& size) {
  return {size.elements, OperandContent::fp32};
}

inline constexpr OperandSize one{[](const OpShape&) { return std::int64_t{1}; }, OperandContent::fp32};
inline constexpr OperandSize scale_state{[](const OpShape&) { return std::int64_t{sizeof(LossScale) / sizeof(float)}; },
                                         OperandContent::fp32};
// One per row (token), one per column; flat ops have only rows.
inline constexpr OperandSize flat{[](const OpShape& s) { return s.rows; }};
inline constexpr OperandSize per_row = in_fp32(flat);
inline constexpr OperandSize vocabulary_ids{[](const OpShape& s) { return s.rows; }, OperandContent::ids};
inline constexpr OperandSize per_column{[](const OpShape& s) { return s.columns; }};
inline constexpr OperandSize matrix{[](const OpShape& s) { return s.rows * s.columns; }};

// Local shapes and measured shapes ----------------------------------------------------------------

// Ops whose rows are as wide as their output.
inline void localize_elementwise(const LocalOp& local, OpShape& shape) {
  shape.columns = local.output.size;
}
inline void with_second(OpShape& shape, DataType) {
  shape.second = true;
}

// Work --------------------------------------------------------------------------------------------
// Letters: r rows, c columns, k inner, e bytes of an element of `type`. Statistics, tokens, the
// loss, gradients of parameters and optimizer state have 4 bytes. An updated operand is read and
// written. Outside matrix products, operations per element are counted from the formula, with exp,
// tanh, erf and sqrt as one each: these kernels are memory-bound, so only the order of magnitude
// matters.

constexpr std::int64_t e(DataType type) {
  return size_of(type);
}
inline Flops flops(std::int64_t count) {
  return Flops(static_cast<double>(count));
}
// The memory passes of dx: written, or read as well.
constexpr std::int64_t input_gradient_passes(const OpShape& s) {
  return s.accumulate ? 2 : 1;
}

}  // namespace parplan
