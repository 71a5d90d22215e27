#include "planner/program/fusion.h"

#include <algorithm>
#include <cstddef>
#include <optional>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

constexpr FusedOperand add_layer_norm_operands[] = {{0, 0}, {0, 1}, {0, 2}, {1, 1}, {1, 2},
                                                    {0, 3}, {1, 3}, {1, 4}, {1, 5}};
constexpr FusedOperand add_rms_norm_operands[] = {{0, 0}, {0, 1}, {0, 2}, {1, 1}, {0, 3}, {1, 2}, {1, 3}};
constexpr FusedOperand linear_gelu_operands[] = {{0, 0}, {0, 1}, {0, 2}, {0, 3}, {1, 1}, {0, 4}};
constexpr FusedOperand linear_input_gradient_gelu_operands[] = {{0, 0}, {0, 1}, {1, 1}, {1, 2}, {0, 3}};

constexpr FusionRow rows[] = {
    {.first = OpKind::add, .produced = 3,
     .second = OpKind::layer_norm, .consumed = 0,
     .fused = OpKind::add_layer_norm, .operands = add_layer_norm_operands},
    {.first = OpKind::add, .produced = 3,
     .second = OpKind::rms_norm, .consumed = 0,
     .fused = OpKind::add_rms_norm, .operands = add_rms_norm_operands},
    {.first = OpKind::linear, .produced = 3,
     .second = OpKind::activation, .consumed = 0,
     .fused = OpKind::linear_gelu, .operands = linear_gelu_operands, .overwrites = true},
    {.first = OpKind::linear_input_gradient, .produced = 2,
     .second = OpKind::activation_gradient, .consumed = 0,
     .fused = OpKind::linear_input_gradient_gelu, .operands = linear_input_gradient_gelu_operands},
};

bool overlap(const Operand& a, const Operand& b) {
  return a.binding == b.binding && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
}
bool same_bytes(const Operand& a, const Operand& b) {
  return a.binding == b.binding && a.offset == b.offset && a.bytes == b.bytes;
}
bool touches(const Instruction& instruction, const Operand& operand) {
  return std::ranges::any_of(instruction.operands, [&](const Operand& other) { return overlap(other, operand); });
}
// Whether one writes what the other reads or writes.
bool conflict(const Instruction& a, const Instruction& b) {
  for (const Operand& x : a.operands)
    for (const Operand& y : b.operands)
      if ((x.access != Access::read || y.access != Access::read) && overlap(x, y)) return true;
  return false;
}

bool is_kernel(const Instruction& instruction, OpKind op) {
  return instruction.kind == InstructionKind::kernel && instruction.op == op;
}
// The operand at a position of the op's row; null where it is absent.
const Operand* operand_at(const Instruction& instruction, int position) {
  const std::optional<std::vector<int>> positions = operand_positions(instruction);
  PARPLAN_ASSERT(positions.has_value(),
                 fmt::format("the operands of {} '{}' do not fit its row", name(instruction.op), instruction.name));
  const auto found = std::ranges::find(*positions, position);
  return found == positions->end() ? nullptr : &instruction.operands[found - positions->begin()];
}

bool is_with_activation(const FusionRow& row) {
  return row.second == OpKind::activation || row.second == OpKind::activation_gradient;
}

// Both in one instruction, if possible: their sizes agree, and no operand is written while it is
// read except where the fused op's row allows it.
std::optional<Instruction> fused(const FusionRow& row, const Instruction& first, const Instruction& second) {
  const bool alike = first.type == second.type && first.stream == second.stream && first.label == second.label &&
                     first.shape.rows == second.shape.rows && !first.shape.accumulate && !second.shape.accumulate &&
                     !second.shape.composed;
  const bool activates = is_with_activation(row);
  if (!alike || (activates && second.shape.activation != ActivationKind::gelu_tanh)) return std::nullopt;

  Instruction result = first;
  result.op = row.fused;
  result.shape.activation = second.shape.activation;
  if (!activates) {
    result.shape.epsilon = second.shape.epsilon;
    result.shape.without_beta = second.shape.without_beta;
  }
  result.operands.clear();
  std::vector<int> at;  // positions in the fused op's row
  for (std::size_t i = 0; i < row.operands.size(); ++i) {
    const FusedOperand& from = row.operands[i];
    const Operand* operand = operand_at(from.kernel == 0 ? first : second, from.position);
    if (operand == nullptr) continue;
    result.operands.push_back(*operand);
    at.push_back(static_cast<int>(i));
  }
  const OpRow& op = row_of(row.fused);
  for (std::size_t r = 0; r < at.size(); ++r)
    for (std::size_t w = 0; w < at.size(); ++w) {
      const Operand& a = result.operands[r];
      const Operand& b = result.operands[w];
      if (r == w || b.access == Access::read || !overlap(a, b)) continue;
      const bool in_place = op.in_place && at[r] == op.in_place->read && at[w] == op.in_place->write;
      const bool over = row.overwrites && a.access == Access::write && b.access == Access::write;
      if (!same_bytes(a, b) || !(in_place || over)) return std::nullopt;
    }
  return result;
}

// The kernel that reads the result of instruction `i`, and both in one instruction.
struct Match {
  std::size_t second = 0;
  Instruction fused;
};
std::optional<Match> match(const FusionRow& row, const std::vector<Instruction>& instructions, std::size_t i,
                           const std::vector<bool>& temporary) {
  const Instruction& first = instructions[i];
  if (!is_kernel(first, row.first)) return std::nullopt;
  const Operand between = *operand_at(first, row.produced);
  std::size_t j = i + 1;
  while (j < instructions.size() && !touches(instructions[j], between)) ++j;
  if (j == instructions.size() || !is_kernel(instructions[j], row.second)) return std::nullopt;
  const Instruction& second = instructions[j];
  if (!same_bytes(*operand_at(second, row.consumed), between)) return std::nullopt;
  // The second moves up to the first.
  for (std::size_t k = i + 1; k < j; ++k)
    if (conflict(instructions[k], second)) return std::nullopt;

  const bool kept = std::ranges::any_of(
      row.operands, [&](const FusedOperand& from) { return from.kernel == 0 && from.position == row.produced; });
  const bool overwritten = std::ranges::any_of(second.operands, [&](const Operand& operand) {
    return operand.access == Access::write && same_bytes(operand, between);
  });
  if (!kept && !overwritten) {
    if (!temporary[between.binding]) return std::nullopt;
    for (std::size_t k = j + 1; k < instructions.size(); ++k)
      if (touches(instructions[k], between)) return std::nullopt;
  }
  std::optional<Instruction> both = fused(row, first, second);
  if (!both) return std::nullopt;
  return Match{j, std::move(*both)};
}

}  // namespace

std::span<const FusionRow> fusion_rows() { return rows; }

void fuse(std::vector<Instruction>& instructions, const std::vector<bool>& temporary, Fusions fusions) {
  const auto wanted = [&](const FusionRow& row) {
    return is_with_activation(row) ? fusions.activations : fusions.norms;
  };
  for (std::size_t i = 0; i < instructions.size(); ++i)
    for (const FusionRow& row : rows) {
      std::optional<Match> found = wanted(row) ? match(row, instructions, i, temporary) : std::nullopt;
      if (!found) continue;
      instructions[i] = std::move(found->fused);
      instructions.erase(instructions.begin() + static_cast<std::ptrdiff_t>(found->second));
      break;
    }
}

}  // namespace parplan
