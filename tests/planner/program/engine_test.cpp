#include <doctest/doctest.h>

#include <algorithm>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/graph/engine_file.h"
#include "planner/graph/engine_graph.h"
#include "planner/parallel/techniques.h"
#include "planner/program/job.h"
#include "planner/program/lower_block.h"

namespace parplan {
namespace {

const std::string source = PARPLAN_SOURCE_DIR;

struct Sizes {
  std::int64_t sequence, batch, hidden, heads;
};

// A layer of a GPT as an engine runs it, on one rank of `tp`.
LoweredBlock layer(const Sizes& sizes, const Engine& engine, Recompute recompute, int tp = 1) {
  ModelSpec model = load_model("gpt3-175b", source + "/models").spec;
  model.hidden = sizes.hidden;
  model.heads = model.kv_heads = sizes.heads;
  model.head_dim = sizes.hidden / sizes.heads;
  model.feature = 4 * sizes.hidden;
  model.layers = 3;
  const OpGraph graph = as_run_by(engine, build_graph(model, sizes.sequence));
  TrainingSpec training;
  training.global_batch = sizes.batch;
  training.sequence_length = sizes.sequence;
  training.precision = DataType::bf16;
  training.engine = engine;
  ParallelSpec spec;
  spec.mesh.degree.tp = tp;
  spec.micro_batch = sizes.batch;
  spec.recompute = recompute;
  const Placements placements = place(graph, spec);
  const BlockContext context = block_context(block_layout(spec, placements, recompute), placements.residual, {},
                                             training, BackendKind::cuda, true);
  return lower_block(graph, 1, context);
}

Engine megatron_2021() { return find_engine("megatron-2021", source + "/configs/engines"); }

int count(const Segment& segment, InstructionKind kind) {
  return static_cast<int>(std::ranges::count(segment.instructions, kind, &Instruction::kind));
}

}  // namespace

TEST_CASE("a layer of Megatron-LM of 2021 saves what Korthikanti et al. counted") {
  // arXiv:2205.05198, equation 1: s b h (34 + 5 a s / h) bytes, and what they leave out: mean and
  // deviation of two norms in fp32.
  for (const Sizes& of : {Sizes{256, 1, 512, 8}, Sizes{128, 3, 1024, 16}, Sizes{512, 2, 256, 4}}) {
    const std::int64_t tokens = of.sequence * of.batch;
    const std::int64_t expected =
        34 * tokens * of.hidden + 5 * of.heads * of.sequence * tokens + 2 * 2 * 4 * tokens;
    CHECK(layer(of, megatron_2021(), Recompute::none).saved_bytes == expected);
    // Equation 2, over t tensor-parallel ranks: s b h (10 + 24 / t + 5 a s / (h t)).
    const std::int64_t over_two =
        (10 + 24 / 2) * tokens * of.hidden + 5 * of.heads * of.sequence * tokens / 2 + 2 * 2 * 4 * tokens;
    CHECK(layer(of, megatron_2021(), Recompute::none, 2).saved_bytes == over_two);
    // Selective recompute of attention's core leaves out what grows with the square of the
    // sequence (equation 6).
    CHECK(layer(of, megatron_2021(), Recompute::core_attn).saved_bytes ==
          expected - 5 * of.heads * of.sequence * tokens);
    CHECK(layer(of, megatron_2021(), Recompute::full).saved_bytes == 2 * tokens * of.hidden);
  }
}

TEST_CASE("an engine that repeats layers repeats all of their forward, with its communication") {
  const Sizes sizes{256, 1, 512, 8};
  Engine engine = megatron_2021();
  const LoweredBlock kept = layer(sizes, engine, Recompute::none, 2),
                     repeated = layer(sizes, engine, Recompute::full, 2);
  for (const InstructionKind kind : {InstructionKind::kernel, InstructionKind::all_reduce_sum})
    CHECK(count(repeated.backward, kind) == count(kept.backward, kind) + count(repeated.forward, kind));
  engine.repeats_layers = engine.dropout = false;  // masks would be needed again
  const LoweredBlock needed = layer(sizes, engine, Recompute::full, 2);
  CHECK(count(needed.backward, InstructionKind::all_reduce_sum) ==
        count(repeated.backward, InstructionKind::all_reduce_sum) - 1);  // the last product's
  CHECK(count(needed.backward, InstructionKind::kernel) < count(repeated.backward, InstructionKind::kernel));
}

TEST_CASE("what an engine does not fuse stays apart") {
  const Sizes sizes{256, 1, 512, 8};
  const auto kernels = [&](const Engine& engine, OpKind op) {
    const LoweredBlock block = layer(sizes, engine, Recompute::none);
    return std::ranges::count_if(block.forward.instructions, [&](const Instruction& one) {
      return one.kind == InstructionKind::kernel && one.op == op;
    });
  };
  Engine engine{.name = "other"};
  CHECK(kernels(engine, OpKind::add_layer_norm) == 1);
  CHECK(kernels(engine, OpKind::linear_gelu) == 1);
  engine.fused_norm = false;
  CHECK(kernels(engine, OpKind::add_layer_norm) == 0);
  CHECK(kernels(engine, OpKind::linear_gelu) == 1);
  engine.fused_activation = false;
  CHECK(kernels(engine, OpKind::linear_gelu) == 0);
  CHECK(kernels(engine, OpKind::activation) == 1);
}

}  // namespace parplan
