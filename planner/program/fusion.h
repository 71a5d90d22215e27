#pragma once

#include <span>
#include <vector>

#include "planner/program/program.h"

namespace parplan {

// An operand of a fused kernel: which one it is in the row of the first or the second of the two
// kernels.
struct FusedOperand {
  int kernel = 0;  // 0: the first, 1: the second
  int position = 0;
};

// Two kernels that one can stand for: the second reads at once what the first writes.
struct FusionRow {
  OpKind first{};
  int produced = 0;  // position of what lies between them, in the first's row
  OpKind second{};
  int consumed = 0;  // and in the second's
  OpKind fused{};
  std::span<const FusedOperand> operands;  // in the order of the fused op's row
  // The second may have written over what the first wrote: the fused kernel then gets one storage
  // for both.
  bool overwrites = false;
};
std::span<const FusionRow> fusion_rows();

// Replaces pairs of kernels by fused ones, in a list of instructions that are not yet ordered by
// events. The fused kernel stands where the first stood. `temporary[b]`: nobody reads binding b
// behind these instructions. What lies between the two need not be stored where nobody else reads
// it; a pair is left alone where that is not so, where another instruction (a redistribution)
// touches it first, or where an instruction between the two is in the second's way.
void fuse(std::vector<Instruction>& instructions, const std::vector<bool>& temporary);

}  // namespace parplan
