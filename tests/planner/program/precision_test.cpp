// What the precision changes in lowered Programs: master copies, the loss scale, workspaces of a
// backend.
#include <algorithm>

#include <doctest/doctest.h>

#include "planner/program/workspace.h"
#include "tests/planner/program/random_plans.h"

using namespace parplan;

namespace {

constexpr DataType precisions[] = {DataType::fp32, DataType::tf32, DataType::bf16, DataType::fp16};

TrainingSpec training_in(DataType precision) {
  TrainingSpec training;
  training.global_batch = 16;
  training.sequence_length = 16;
  training.precision = precision;
  return training;
}

// Visits every instruction in launch order: body(call, position in the call, instruction).
template <class Body>
void for_each_instruction(const Program& program, Body body) {
  for (std::size_t c = 0; c < program.calls.size(); ++c) {
    const Segment& segment = program.segments[program.calls[c].segment];
    for (std::size_t i = 0; i < segment.instructions.size(); ++i) body(c, program.calls[c], segment.instructions[i]);
  }
}

}  // namespace

TEST_CASE("a master copy stands behind the parameters of bf16 and fp16 alone, and the optimizer's shape says so") {
  const OpGraph graph = graph_of("tiny-gpt2");
  std::mt19937 random(6);
  for (const DataType precision : precisions)
    for (const Optimizer optimizer : {Optimizer::adamw, Optimizer::sgd}) {
      CAPTURE(name(precision));
      TrainingSpec training = training_in(precision);
      training.optimizer = optimizer;
      for (const Program& program : lower_all(job_of(graph, training, random_spec(graph, training, 4, random)))) {
        for (const Bucket& bucket : program.buckets)
          CHECK(bucket.master.has_value() == (precision == DataType::bf16 || precision == DataType::fp16));
        for_each_instruction(program, [&](std::size_t, const Call&, const Instruction& instruction) {
          if (instruction.op != OpKind::adamw && instruction.op != OpKind::sgd) return;
          if (instruction.kind != InstructionKind::kernel) return;
          CHECK(instruction.shape.master == is_half(precision));
          CHECK(instruction.shape.scaled == (precision == DataType::fp16));
          CHECK(instruction.shape.norm == (precision == DataType::fp16));  // no clipping was asked for
        });
      }
    }
}

TEST_CASE("tf32 takes the memory of fp32 and communicates fp32, and its kernels know it") {
  const OpGraph graph = graph_of("tiny-llama");
  std::mt19937 random(7);
  for (int trial = 0; trial < 20; ++trial) {
    const ParallelSpec spec = random_spec(graph, training_in(DataType::fp32), 4, random);
    const std::vector<Program> plain = lower_all(job_of(graph, training_in(DataType::fp32), spec));
    const std::vector<Program> rounded = lower_all(job_of(graph, training_in(DataType::tf32), spec));
    for (std::size_t rank = 0; rank < plain.size(); ++rank) {
      CHECK(plain[rank].buffers == rounded[rank].buffers);
      CHECK(plain[rank].communication == rounded[rank].communication);
      bool products = false;
      for_each_instruction(rounded[rank], [&](std::size_t, const Call&, const Instruction& instruction) {
        if (instruction.kind != InstructionKind::kernel) CHECK(instruction.type != DataType::tf32);
        products |= instruction.kind == InstructionKind::kernel && instruction.op == OpKind::linear &&
                    instruction.type == DataType::tf32;
      });
      bool has_linear = false;
      for_each_instruction(plain[rank], [&](std::size_t, const Call&, const Instruction& instruction) {
        has_linear |= instruction.kind == InstructionKind::kernel && instruction.op == OpKind::linear;
      });
      CHECK(products == has_linear);
    }
  }
}

TEST_CASE("fp16 scales the loss: one scale a rank, read by the first gradient and the optimizer, updated behind them") {
  std::mt19937 random(8);
  for (const char* model : {"tiny-gpt2", "tiny-llama"}) {
    const OpGraph graph = graph_of(model);
    for (int trial = 0; trial < 30; ++trial) {
      TrainingSpec training = training_in(DataType::fp16);
      if (trial % 3 == 0) training.clip_norm = 1.0;
      constexpr int ranks[] = {1, 2, 4, 8};
      const ParallelSpec spec = random_spec(graph, training, ranks[trial % 4], random);
      INFO(model << ": " << describe(spec));
      for (const Program& program : lower_all(job_of(graph, training, spec, BackendKind::cuda))) {
        REQUIRE(program.loss_scale_buffer.has_value());
        REQUIRE(program.norm_buffer.has_value());
        const Buffer& scale = program.buffers[*program.loss_scale_buffer];
        CHECK(scale.bytes == 16);
        CHECK(scale.persistent);
        const auto holds = [&](const Call& call, const Operand& operand) {
          return call.buffers[operand.binding] == program.loss_scale_buffer;
        };
        int gradients = 0, optimizers = 0, updates = 0;
        std::size_t last_reader = 0, updated = 0;
        for_each_instruction(program, [&](std::size_t c, const Call& call, const Instruction& instruction) {
          const bool uses =
              std::ranges::any_of(instruction.operands, [&](const Operand& operand) { return holds(call, operand); });
          const bool kernel = instruction.kind == InstructionKind::kernel;
          const bool gradient = kernel && instruction.op == OpKind::cross_entropy_gradient;
          const bool optimizer = kernel && instruction.op == OpKind::adamw;
          const bool update = kernel && instruction.op == OpKind::update_loss_scale;
          CHECK(uses == (gradient || optimizer || update));
          CHECK(instruction.shape.scaled == (gradient || optimizer));
          gradients += gradient;
          optimizers += optimizer;
          if (gradient || optimizer) last_reader = c;
          if (update) ++updates, updated = c;
        });
        CHECK((gradients > 0) == program.loss_buffer.has_value());
        CHECK(optimizers > 0);
        CHECK(updates == 1);
        CHECK(updated > last_reader);

        // The norm is of the whole model on every rank: summed over every axis that splits it, but
        // not over replicas of a shard group, which hold the same.
        std::vector<GroupKey> summed;
        for_each_instruction(program, [&](std::size_t, const Call& call, const Instruction& instruction) {
          if (instruction.kind == InstructionKind::all_reduce_sum &&
              call.buffers[instruction.operands[0].binding] == program.norm_buffer)
            summed.push_back(instruction.group);
        });
        std::vector<GroupKey> wanted;
        if (spec.tp() > 1) wanted.push_back(all_along(Axis::tp));
        if (spec.replicas() > 1 && spec.zero_stage > 0) wanted.push_back(shard_group(spec.mesh));
        if (spec.pp() > 1) wanted.push_back(all_along(Axis::pp));
        CHECK(summed == wanted);
      }
    }
  }
  const Program other = lower(job_of(graph_of("tiny-gpt2"), training_in(DataType::bf16), [] {
                                ParallelSpec spec;
                                spec.stage_blocks = {6};
                                return spec;
                              }()), 0);
  CHECK_FALSE(other.loss_scale_buffer.has_value());
  CHECK_FALSE(other.norm_buffer.has_value());
}

TEST_CASE("every kernel has the workspace of its backend's row, in scratch") {
  const OpGraph graph = graph_of("tiny-gpt2");
  std::mt19937 random(9);
  for (const BackendKind backend : {BackendKind::cpu, BackendKind::cuda}) {
    int workspaces = 0;
    for (int trial = 0; trial < 20; ++trial) {
      TrainingSpec training = training_in(backend == BackendKind::cpu ? DataType::fp32 : DataType::bf16);
      training.clip_norm = 1.0;
      for (const Program& program :
           lower_representatives(job_of(graph, training, random_spec(graph, training, 4, random), backend)))
        for_each_instruction(program, [&](std::size_t, const Call& call, const Instruction& instruction) {
          if (instruction.kind != InstructionKind::kernel) return;
          CAPTURE(name(instruction.op));
          const std::int64_t bytes = workspace_bytes(instruction.op, instruction.shape, backend).count;
          CHECK(static_cast<int>(instruction.operands.size()) ==
                operand_count(row_of(instruction.op), instruction.shape, bytes > 0));
          if (bytes == 0) return;
          ++workspaces;
          const Operand& workspace = instruction.operands.back();
          CHECK(workspace.bytes == bytes);
          CHECK(workspace.access == Access::update);
          CHECK(program.buffers[call.buffers[workspace.binding]].name == "scratch");
        });
    }
    CHECK(workspaces > 1000);
  }
}
