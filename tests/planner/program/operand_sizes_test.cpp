// The sizes of operands in the rows of op kinds agree with those that lowering computes.
#include <array>
#include <set>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "planner/program/verify.h"
#include "tests/planner/program/random_plans.h"

using namespace parplan;

namespace {

// The bytes that an operand's row promises, and the operand's own.
struct Sizes {
  Bytes row;
  Bytes operand;
};
Sizes sizes_of(const Instruction& instruction, int position, const Operand& operand) {
  const OperandSize& size = row_of(instruction.op).operands[position].size;
  return {Bytes(size.elements(instruction.shape) * size_of(type_of(size.content, instruction.type))),
          Bytes(operand.bytes)};
}

}  // namespace

TEST_CASE("operands of lowered kernels are as large as their rows say, tables at least so") {
  std::mt19937 random(7);
  std::set<OpKind> seen;
  for (const char* model : {"tiny-gpt2", "tiny-llama", "tiny-mlp"}) {
    const OpGraph graph = graph_of(model);
    for (int trial = 0; trial < 32; ++trial) {
      TrainingSpec training;
      training.global_batch = 16;
      training.sequence_length = 16;
      training.precision = std::array{DataType::fp32, DataType::bf16, DataType::fp16}[random() % 3];
      if (trial % 4 == 3) training.clip_norm = 0.5;
      if (trial % 5 == 3) training.optimizer = Optimizer::adamw_8bit;
      if (trial % 5 == 4) training.optimizer = Optimizer::sgd;
      if (trial % 5 == 2) training.optimizer = Optimizer::muon;
      if (trial % 10 == 4) training.momentum = 0.9;
      constexpr int ranks[] = {1, 2, 4, 8};
      const ParallelSpec spec = or_with_master(random_spec(graph, training, ranks[trial % 4], random), random);
      for (const Program& program : lower_all(job_of(graph, training, spec)))
        for (const Segment& segment : program.segments)
          for (const Instruction& instruction : segment.instructions) {
            if (instruction.kind != InstructionKind::kernel) continue;
            seen.insert(instruction.op);
            const std::optional<std::vector<int>> positions = operand_positions(instruction);
            REQUIRE(positions.has_value());
            for (std::size_t i = 0; i < positions->size(); ++i) {
              const OperandRow& row = row_of(instruction.op).operands[(*positions)[i]];
              if (row.source == OperandSource::workspace) continue;
              const Sizes sizes = sizes_of(instruction, (*positions)[i], instruction.operands[i]);
              const bool table =
                  (row.source == OperandSource::parameter || row.source == OperandSource::parameter_gradient) &&
                  (instruction.shape.valid > 0 || instruction.shape.sequence > 0);
              const std::string where = fmt::format("{} of {}, operand {} of {}", describe(spec), model, i,
                                                    name(instruction.op));
              if (table ? sizes.row > sizes.operand : sizes.row != sizes.operand)
                FAIL_CHECK(where << ": " << sizes.operand.count << " bytes, its row says " << sizes.row.count);
            }
          }
    }
  }
  // The kinds that models use: all but norms of queries and keys, scale, softcap.
  CHECK(seen.size() >= 30);
}
