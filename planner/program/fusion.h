#pragma once

#include <span>
#include <vector>

#include "planner/program/block_context.h"
#include "planner/program/program.h"

namespace parplan {

// An operand of a fused kernel: its position in the row of the first or the second of the two
// kernels.
struct FusedOperand {
  int kernel = 0;  // 0: the first, 1: the second
  int position = 0;
};

// Two kernels that a single one can replace: the second directly reads what the first writes.
struct FusionRow {
  OpKind first{};
  int produced = 0;  // position of the intermediate result in the first's row
  OpKind second{};
  int consumed = 0;  // and in the second's
  OpKind fused{};
  std::span<const FusedOperand> operands;  // in the order of the fused op's row
  // The second may have overwritten the first's result: the fused kernel then gets the same storage
  // for both.
  bool overwrites = false;
};
std::span<const FusionRow> fusion_rows();

// Replaces pairs of kernels by fused ones, in a list of instructions that are not yet ordered by
// events. The fused kernel is in the place of the first. `temporary[b]`: nobody reads binding b
// after these instructions. The intermediate result need not be stored if nobody else reads it. A
// pair is left alone if somebody does, if another instruction (a redistribution) touches the result
// first, or if an instruction between the two conflicts with the second.
void fuse(std::vector<Instruction>& instructions, const std::vector<bool>& temporary, Fusions fusions);

}  // namespace parplan
