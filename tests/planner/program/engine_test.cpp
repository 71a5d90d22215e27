#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/graph/engine_file.h"
#include "planner/graph/engine_graph.h"
#include "planner/graph/trained_graph.h"
#include "planner/parallel/techniques.h"
#include "planner/program/bucket_work.h"
#include "planner/program/job.h"
#include "planner/program/lower.h"
#include "planner/program/lower_block.h"
#include "planner/program/memory.h"
#include "planner/program/verify.h"
#include "tests/planner/program/random_plans.h"

namespace parplan {
namespace {

const std::string source = PARPLAN_SOURCE_DIR;

struct Sizes {
  std::int64_t sequence, batch, hidden, heads;
};

// A layer of a GPT as an engine runs it, on one rank of `tp`.
LoweredBlock layer(const Sizes& sizes, const Engine& engine, Recompute recompute, int tp = 1, bool fp8 = false) {
  ModelSpec model = load_model("gpt3-175b", source + "/models").spec;
  model.hidden = sizes.hidden;
  model.heads = model.kv_heads = sizes.heads;
  model.head_dim = sizes.hidden / sizes.heads;
  model.feature = 4 * sizes.hidden;
  model.layers = 3;
  model.context = std::max(model.context, sizes.sequence);
  const OpGraph graph = as_run_by(engine, build_graph(model, sizes.sequence), fp8 ? DataType::fp8 : DataType::bf16);
  TrainingSpec training;
  training.global_batch = sizes.batch;
  training.sequence_length = sizes.sequence;
  training.precision = DataType::bf16;
  training.fp8 = fp8;
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

// A layer of a Llama of 8 query heads and 2 key heads of 32, with 3 samples of 128 tokens.
struct LlamaLayer {
  Engine engine;
  int tp = 1, cp = 1, dp = 1;
  int zero_stage = 0;
  bool sequence_parallel = false;
  DataType precision = DataType::bf16;
  Recompute recompute = Recompute::none;
  TensorOverlap tp_overlap = TensorOverlap::none;

  LoweredBlock lowered(Coordinates at = {}) const {
    ModelSpec model = load_model("llama3-8b", source + "/models").spec;
    model.hidden = 256;
    model.heads = 8;
    model.kv_heads = 2;
    model.head_dim = 32;
    model.feature = 512;
    model.layers = 3;
    const OpGraph graph = as_run_by(engine, build_graph(model, 128), precision);
    TrainingSpec training{.global_batch = 3, .sequence_length = 128};
    state_precision(training, precision);
    training.engine = engine;
    ParallelSpec spec;
    spec.mesh.degree.tp = tp;
    spec.mesh.degree.cp = cp;
    spec.mesh.degree.dp = dp;
    spec.zero_stage = zero_stage;
    spec.micro_batch = 3;
    spec.recompute = recompute;
    spec.sequence_parallel = sequence_parallel;
    spec.tp_overlap = tp_overlap;
    const Placements placements = place(graph, spec);
    return lower_block(graph, 1,
                       block_context(block_layout(spec, placements, recompute), placements.residual, at, training,
                                     BackendKind::cuda, true));
  }
};

// The same on one rank of `tp`. With `slices`, in fp8 and by slices beside the ring of these ranks.
LoweredBlock gated_layer(const Engine& engine, Recompute recompute, int tp = 1, bool slices = false) {
  return LlamaLayer{.engine = engine,
                    .tp = tp,
                    .sequence_parallel = slices,
                    .precision = slices ? DataType::fp8 : DataType::bf16,
                    .recompute = recompute,
                    .tp_overlap = slices ? TensorOverlap::ring : TensorOverlap::none}
      .lowered();
}

Engine megatron_2021() { return find_engine("megatron-2021", source + "/configs/engines"); }

int count(const Segment& segment, InstructionKind kind) {
  return static_cast<int>(std::ranges::count(segment.instructions, kind, &Instruction::kind));
}

// The kernels that compute again, by op and name.
std::string computed_again(const LoweredBlock& block) {
  std::string kernels;
  for (const Instruction& instruction : block.backward.instructions)
    if (instruction.label == Label::recompute && instruction.kind == InstructionKind::kernel)
      kernels += fmt::format("{} {}; ", name(instruction.op), instruction.name);
  return kernels;
}

// Megatron-LM's _vocab_size_with_padding.
std::int64_t padded_as_megatron_does(std::int64_t vocabulary, int tensor_parallel) {
  std::int64_t after = vocabulary;
  while (after % (128 * tensor_parallel) != 0) ++after;
  return after;
}

}  // namespace

TEST_CASE("the vocabulary is padded as Megatron-LM pads it, in time and memory and not in parameters") {
  ModelSpec model = load_model("gpt2", source + "/models").spec;
  model.vocabulary = 50257;
  for (const Engine& engine : {megatron_2021(), Engine{}}) {
    const OpGraph graph = as_run_by(engine, build_graph(model, 128));
    CHECK(parameter_count(graph) == parameter_count(build_graph(model, 128)));
    CHECK(model_flops_per_sample(graph).value == model_flops_per_sample(build_graph(model, 128)).value);
    for (const int tp : {1, 2, 4}) {
      CAPTURE(engine.name);
      CAPTURE(tp);
      TrainingSpec training{.global_batch = 1, .sequence_length = 128};
      training.engine = engine;
      ParallelSpec spec;
      spec.mesh.degree.tp = tp;
      spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
      const Program program = lower(job_of(graph, training, spec, BackendKind::cuda), 0);
      const std::int64_t rows =
          is_own(engine) ? ceil_div(model.vocabulary, tp) : padded_as_megatron_does(model.vocabulary, tp) / tp;
      bool table = false, logits = false;
      for (const ParameterPart& part : program.parameters)
        if (graph.tensors[part.tensor].dims.front().dim == Dim::vocabulary) {
          table = true;
          CHECK(part.rows == rows);
        }
      for (const Segment& segment : program.segments)
        for (const Instruction& instruction : segment.instructions)
          if (instruction.op == OpKind::cross_entropy_max) {
            logits = true;
            CHECK(instruction.shape.columns == rows);
            CHECK(instruction.shape.valid == std::min<std::int64_t>(rows, model.vocabulary));
          }
      CHECK(table);
      CHECK(logits);
    }
  }
}

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

TEST_CASE("a softmax that no one kernel serves keeps probabilities in fp32, and is as many ops as it has steps") {
  struct Case {
    Sizes sizes;
    int tp;
    bool is_apart;
  };
  // Megatron-LM@v2.5 asks for heads times samples that 4 divides, and more than 16 and at most 2048
  // positions that 4 divides.
  const Case cases[] = {{{256, 1, 512, 8}, 1, false}, {{256, 1, 512, 8}, 2, false},  {{256, 1, 512, 8}, 4, true},
                        {{256, 2, 512, 8}, 4, false}, {{256, 6, 512, 8}, 8, true},   {{256, 4, 512, 8}, 8, false},
                        {{256, 3, 512, 6}, 1, true},  {{256, 2, 512, 6}, 1, false},  {{16, 1, 512, 8}, 1, true},
                        {{20, 1, 512, 8}, 1, false},  {{22, 1, 512, 8}, 1, true},    {{2048, 1, 64, 4}, 1, false},
                        {{2052, 1, 64, 4}, 1, true}};
  for (const Case& row : cases)
    for (const bool drops : {true, false}) {
      const Sizes& sizes = row.sizes;
      const int tp = row.tp;
      const bool is_apart = row.is_apart;
      CAPTURE(sizes.sequence);
      CAPTURE(sizes.batch);
      CAPTURE(tp);
      Engine engine = megatron_2021(), any = engine;
      engine.dropout = any.dropout = drops;
      any.softmax_multiple = 1;
      any.softmax_up_to = 0;
      Sizes of = sizes;
      of.hidden = of.hidden / of.heads * of.heads;
      const LoweredBlock block = layer(of, engine, Recompute::none, tp), fused = layer(of, any, Recompute::none, tp);
      const std::int64_t scores = of.heads / tp * of.sequence * of.sequence * of.batch;
      // PyTorch's softmax keeps its result, in fp32; what it is narrowed to is kept where it is
      // multiplied, and not where elements of it are dropped.
      CHECK(block.saved_bytes - fused.saved_bytes == (is_apart ? (drops ? 4 - 2 : 4) * scores : 0));
      // Where scores are most of what a layer holds, temporaries in fp32 are the most at once.
      const bool shows = is_apart && of.sequence > 2048;
      CHECK((block.forward.scratch_bytes > fused.forward.scratch_bytes) >= shows);
      CHECK((block.backward.scratch_bytes > fused.backward.scratch_bytes) >= shows);
      if (!is_apart) CHECK(block.forward.scratch_bytes == fused.forward.scratch_bytes);
      const auto ops = [](const Segment& segment, OpKind kind) {
        int sum = 0;
        for (const Instruction& one : segment.instructions)
          if (one.kind == InstructionKind::kernel && one.op == kind) sum += launches(one.op, one.shape);
        return sum;
      };
      // Widened, times a factor, masked, softmax, narrowed; the mask's gradient is a copy, masked.
      CHECK(ops(block.forward, OpKind::attention_softmax) == (is_apart ? 5 : 1));
      CHECK(ops(block.backward, OpKind::attention_softmax_gradient) == (is_apart ? 6 : 1));
      // With the core computed again it is the same, but that nothing of it is kept.
      CHECK(layer(of, engine, Recompute::core_attn, tp).saved_bytes ==
            layer(of, any, Recompute::core_attn, tp).saved_bytes);
    }
}

TEST_CASE("eager gates keep the activation, and copied keys and values the first ones where each query has its own") {
  const auto block = [](const Engine& engine, int key_heads, int tp, Recompute recompute) {
    ModelSpec model = load_model("llama3-8b", source + "/models").spec;
    model.hidden = 256;
    model.heads = 8;
    model.kv_heads = key_heads;
    model.head_dim = 32;
    model.feature = 512;
    model.layers = 3;
    const OpGraph graph = as_run_by(engine, build_graph(model, 128));
    TrainingSpec training{.global_batch = 3, .sequence_length = 128, .precision = DataType::bf16};
    training.engine = engine;
    ParallelSpec spec;
    spec.mesh.degree.tp = tp;
    spec.micro_batch = 3;
    spec.recompute = recompute;
    const Placements placements = place(graph, spec);
    return lower_block(graph, 1,
                       block_context(block_layout(spec, placements, recompute), placements.residual, {}, training,
                                     BackendKind::cuda, true));
  };
  const Engine fused{.name = "other"}, eager{.name = "other", .fused_gate = false},
      copies{.name = "other", .copies_keys = true};
  const std::int64_t tokens = 3 * 128;
  for (const int tp : {1, 2, 4})
    for (const int key_heads : {8, 4}) {
      CAPTURE(tp);
      CAPTURE(key_heads);
      const auto more = [&](const Engine& engine, Recompute recompute) {
        return block(engine, key_heads, tp, recompute).saved_bytes - block(fused, key_heads, tp, recompute).saved_bytes;
      };
      CHECK(more(eager, Recompute::none) == 2 * tokens * 512 / tp);
      CHECK(more(eager, Recompute::full) == 0);
      CHECK(more(eager, Recompute::activation) == 0);  // it is computed again with the product
      CHECK(more(copies, Recompute::none) == (key_heads == 8 ? 2 * 2 * tokens * 256 / tp : 0));
      CHECK(more(copies, Recompute::full) == 0);
    }
}

namespace {

// What a Segment's kernels of some kinds do together.
struct KernelSum {
  int kernels = 0;
  double flops = 0.0;
  std::int64_t bytes = 0;
};
KernelSum sum_of(const Segment& segment, const std::set<OpKind>& kinds, const std::string& named = "") {
  KernelSum sum;
  for (const Instruction& one : segment.instructions) {
    if (one.kind != InstructionKind::kernel || !kinds.contains(one.op)) continue;
    if (one.name.find(named) == std::string::npos) continue;
    const OpWork work = row_of(one.op).work(one.shape, one.type);
    ++sum.kernels;
    sum.flops += work.flops.value;
    sum.bytes += work.bytes.count;
  }
  return sum;
}

}  // namespace

TEST_CASE("keys that are repeated for all heads are kept so, and so many times as many bytes are gathered") {
  const Engine plain{.name = "other"}, repeats{.name = "other", .repeats_keys = true};
  constexpr std::int64_t tokens = 3 * 128, head = 32 * 2;
  for (const int tp : {1, 2, 4}) {
    CAPTURE(tp);
    const LoweredBlock own = LlamaLayer{plain, tp}.lowered(), other = LlamaLayer{repeats, tp}.lowered();
    // Ranks that share a group of key heads hold copies of it, and of repeated ones their own.
    const std::int64_t heads = 8 / tp, key_heads = std::max(2 / tp, 1);
    CHECK(other.saved_bytes - own.saved_bytes == tokens * head * 2 * (heads - key_heads));
    const KernelSum forward = sum_of(other.forward, {OpKind::repeat_keys});
    CHECK(forward.kernels == 1);
    CHECK(forward.bytes == tokens * head * 2 * (heads + key_heads));
    CHECK(sum_of(other.backward, {OpKind::repeat_keys_gradient}).bytes == forward.bytes);
    const std::set<OpKind> attention{OpKind::attention, OpKind::attention_gradient};
    CHECK(sum_of(other.forward, attention).flops == sum_of(own.forward, attention).flops);
    CHECK(sum_of(other.backward, attention).flops == sum_of(own.backward, attention).flops);
  }
  const auto gathered = [](const Engine& engine) {
    const LoweredBlock block = LlamaLayer{.engine = engine, .cp = 4}.lowered();
    std::int64_t bytes = 0;
    for (const Segment* segment : {&block.forward, &block.backward})
      for (const Instruction& one : segment->instructions)
        if (one.kind == InstructionKind::all_gather && one.group == keys_group(1)) bytes += one.operands.back().bytes;
    return bytes;
  };
  CHECK(gathered(plain) == 2 * tokens * head * 2 * 2);
  CHECK(gathered(repeats) == 8 / 2 * gathered(plain));
}

TEST_CASE("keys are products apart of as many columns as a rank has of them") {
  for (const int tp : {1, 2, 4}) {
    const LoweredBlock block = LlamaLayer{.engine = {.name = "other", .separate_keys = true}, .tp = tp}.lowered();
    const std::int64_t key_heads = std::max(2 / tp, 1);
    int apart = 0;
    for (const Segment* segment : {&block.forward, &block.backward})
      for (const Instruction& one : segment->instructions) {
        if (one.kind != InstructionKind::kernel || one.shape.key_columns == 0) continue;
        ++apart;
        CHECK(one.shape.key_columns == key_heads * 32);
        CHECK(one.shape.columns == (8 / tp + 2 * key_heads) * 32);
      }
    CHECK(apart == 3);  // forward, and two gradients
  }
}

TEST_CASE("attention rank by rank computes as much, and moves what its closed form says") {
  const std::set<OpKind> sums{OpKind::widen, OpKind::accumulate};
  for (const int cp : {2, 4, 8})
    for (const bool waits : {false, true}) {
      CAPTURE(cp);
      CAPTURE(waits);
      const Engine gathers{.name = "other"},
          steps{.name = "other", .attends_in_steps = true, .overlaps_tensor = !waits};
      for (const int rank : {0, cp - 1}) {
        const LoweredBlock whole = LlamaLayer{.engine = gathers, .cp = cp}.lowered({.cp = rank});
        const LoweredBlock block = LlamaLayer{.engine = steps, .cp = cp}.lowered({.cp = rank});
        const std::int64_t tokens = 3 * 128 / cp, queries = tokens * 8 * 32, keys = tokens * 2 * 2 * 32;

        const KernelSum attention = sum_of(block.forward, {OpKind::attention});
        CHECK(attention.kernels == cp);
        CHECK(attention.flops == sum_of(whole.forward, {OpKind::attention}).flops);
        CHECK(count(block.forward, InstructionKind::all_gather) == 1);
        CHECK(count(block.forward, InstructionKind::send) == 0);
        // Two outputs in bf16 become one in fp32, to which others in bf16 are added: 2 + 2 + 4,
        // 4 + 2 + 4, and 4 + 2 + 2 bytes, or of two ranks 2 + 2 + 2; and three log-sum-exps.
        const KernelSum merges = sum_of(block.forward, {OpKind::merge_attention});
        CHECK(merges.kernels == cp - 1);
        CHECK(merges.bytes == queries * (10 * cp - 14) + (cp - 1) * 3 * 4 * tokens * 8);
        CHECK(sum_of(whole.forward, {OpKind::merge_attention}).kernels == 0);

        const KernelSum gradients = sum_of(block.backward, {OpKind::attention_gradient});
        CHECK(gradients.kernels == cp);
        CHECK(gradients.flops == sum_of(whole.backward, {OpKind::attention_gradient}).flops);
        // Read in bf16 and written in fp32, then added: 2 + 4 and 2 + 4 + 4 bytes.
        CHECK(sum_of(block.backward, sums, "gradients").bytes == (queries + keys) * (6 + 10 * (cp - 1)));
        CHECK(sum_of(block.backward, {OpKind::widen_gradient}).bytes == (queries + keys) * 6);
        CHECK(count(block.backward, InstructionKind::all_gather) == 1);
        CHECK(count(block.backward, InstructionKind::reduce_scatter) == 0);
        int transfers = 0;
        for (const Instruction& one : block.backward.instructions) {
          if (one.kind != InstructionKind::send && one.kind != InstructionKind::receive) continue;
          ++transfers;
          CHECK(one.type == DataType::fp32);
          CHECK(one.operands.front().bytes == 4 * keys);
          CHECK((one.stream == Stream::cp) == waits);
        }
        CHECK(transfers == 2 * cp);
      }
    }
}

TEST_CASE("weights that are cast as they are gathered are cast by no product, and inputs by as many") {
  struct Casts {
    std::int64_t weights = 0, others = 0;
  };
  const auto casts = [](const Engine& engine, int dp, int zero_stage) {
    const LoweredBlock block =
        LlamaLayer{.engine = engine, .dp = dp, .zero_stage = zero_stage, .precision = DataType::fp8}.lowered();
    Casts sum;
    for (const Segment* segment : {&block.forward, &block.backward})
      for (const Instruction& one : segment->instructions) {
        if (one.kind != InstructionKind::kernel || row_of(one.op).casts == nullptr) continue;
        const CastElements elements = row_of(one.op).casts(one.shape);
        sum.others += elements.left;
        (row_of(one.op).of_weights ? sum.others : sum.weights) += elements.right;
      }
    return sum;
  };
  const Engine plain{.name = "other"}, gathers{.name = "other", .casts_weights_apart = true};
  const Casts own = casts(plain, 2, 3), apart = casts(gathers, 2, 3);
  // Each for the product forward and for its input's gradient: fused queries, keys and values, the
  // output, and three.
  CHECK(own.weights == 2 * (256 * (8 + 2 * 2) * 32 + 256 * 256 + 3 * 256 * 512));
  CHECK(apart.weights == 0);
  CHECK(apart.others == own.others);
  // Where nothing is gathered, products cast.
  for (const auto& layout : {std::pair(1, 3), std::pair(2, 0), std::pair(2, 1), std::pair(2, 2)}) {
    const int dp = layout.first, zero_stage = layout.second;
    CAPTURE(dp);
    CAPTURE(zero_stage);
    CHECK(casts(gathers, dp, zero_stage).weights == own.weights);
    CHECK(casts(gathers, dp, zero_stage).others == own.others);
  }
}

TEST_CASE("weights in fp8 are transposed once for each gradient of an input, also by slices, and by no other product") {
  for (const bool slices : {false, true}) {
    CAPTURE(slices);
    const auto elements = [&](const Engine& engine) {
      const LoweredBlock block = LlamaLayer{.engine = engine,
                                            .tp = slices ? 2 : 1,
                                            .sequence_parallel = slices,
                                            .precision = DataType::fp8,
                                            .tp_overlap = slices ? TensorOverlap::ring : TensorOverlap::none}
                                     .lowered();
      CastElements sum;
      for (const Segment* segment : {&block.forward, &block.backward})
        for (const Instruction& one : segment->instructions) {
          if (one.kind != InstructionKind::kernel || row_of(one.op).casts == nullptr) continue;
          const CastElements own = row_of(one.op).casts(one.shape);
          if (own.right > 0) CHECK(one.op == OpKind::linear_input_gradient);
          sum.left += own.left;
          sum.right += own.right;
        }
      return sum;
    };
    const CastElements once = elements({.name = "other", .fp8_casts_once = true}),
                       transposed = elements({.name = "other", .fp8_casts_once = true, .transposes_weights = true});
    CHECK(once.right == 0);
    // Fused queries, keys and values, the output, and three of the feed-forward, on as many ranks.
    CHECK(transposed.right * (slices ? 2 : 1) == 256 * (8 + 2 * 2) * 32 + 256 * 256 + 3 * 256 * 512);
    CHECK(transposed.left == once.left);
  }
}

TEST_CASE("rows are copied behind each gather over tensor-parallel ranks and before each scatter, not in fp8") {
  const Engine plain{.name = "other"}, copies{.name = "other", .copies_rows = true};
  for (const int tp : {2, 4})
    for (const bool sequence_parallel : {false, true})
      for (const bool fp8 : {false, true}) {
        CAPTURE(tp);
        CAPTURE(sequence_parallel);
        CAPTURE(fp8);
        const auto lowered = [&](const Engine& engine) {
          return LlamaLayer{.engine = engine,
                            .tp = tp,
                            .sequence_parallel = sequence_parallel,
                            .precision = fp8 ? DataType::fp8 : DataType::bf16}
              .lowered();
        };
        const LoweredBlock own = lowered(plain), other = lowered(copies);
        for (const auto& [of_own, of_other] :
             {std::pair(&own.forward, &other.forward), std::pair(&own.backward, &other.backward)}) {
          std::int64_t moved = 0;
          for (const Instruction& one : of_other->instructions)
            if (one.kind == InstructionKind::all_gather || one.kind == InstructionKind::reduce_scatter)
              moved += one.operands.back().bytes;
          CHECK((moved > 0) == sequence_parallel);
          const std::int64_t copied =
              sum_of(*of_other, {OpKind::copy}).bytes - sum_of(*of_own, {OpKind::copy}).bytes;
          CHECK(copied == (fp8 ? 0 : 2 * moved));
        }
      }
}

namespace {

// The head of a small GPT-2 with many tokens in its vocabulary: two samples of 512 in bf16.
constexpr std::int64_t logits_of_head = std::int64_t{2} * 512 * 131072;
LoweredBlock head_of(const Engine& engine, int tp) {
  ModelSpec model = load_model("gpt2", source + "/models").spec;
  model.hidden = 64;
  model.heads = model.kv_heads = 2;
  model.head_dim = 32;
  model.feature = 256;
  model.layers = 1;
  model.vocabulary = 131072;
  const OpGraph graph = as_run_by(engine, build_graph(model, 512));
  TrainingSpec training{.global_batch = 2, .sequence_length = 512, .precision = DataType::bf16};
  training.engine = engine;
  ParallelSpec spec;
  spec.mesh.degree.tp = tp;
  spec.micro_batch = 2;
  const Placements placements = place(graph, spec);
  return lower_block(graph, static_cast<int>(graph.blocks.size()) - 1,
                     block_context(block_layout(spec, placements, Recompute::none), placements.residual, {}, training,
                                   BackendKind::cuda, true));
}

}  // namespace

TEST_CASE("a loss that subtracts into another copy has two of the logits in fp32 at once") {
  for (const int tp : {1, 2}) {
    const auto head = [&](bool copies) {
      return head_of({.name = "other", .fused_loss = false, .copies_logits = copies}, tp);
    };
    const std::int64_t logits = logits_of_head / tp;
    const LoweredBlock copied = head(true), in_place = head(false);
    CHECK(copied.saved_bytes == in_place.saved_bytes);
    CHECK(copied.saved_bytes >= 4 * logits);
    // In place of the logits that were widened, 2 bytes of each, beside which a product works.
    CHECK(copied.forward.scratch_bytes >= 4 * logits);
    CHECK(copied.forward.scratch_bytes < 5 * logits);
    CHECK(in_place.forward.scratch_bytes >= 2 * logits);
    CHECK(in_place.forward.scratch_bytes < 3 * logits);
  }
}

TEST_CASE("a loss that metrics compute moves 14 bytes a logit in half precision, and none that lasts") {
  const auto loss_of = [](const LoweredBlock& head) {
    const auto loss = std::ranges::find_if(head.forward.instructions, [](const Instruction& one) {
      return one.kind == InstructionKind::kernel && one.op == OpKind::cross_entropy_loss;
    });
    REQUIRE(loss != head.forward.instructions.end());
    return loss->shape;
  };
  for (const bool fused : {true, false}) {
    const LoweredBlock without = head_of({.name = "other", .fused_loss = fused}, 1),
                       with = head_of({.name = "other", .fused_loss = fused, .loss_metrics = 2}, 1);
    const DataType type = fused ? DataType::bf16 : DataType::fp32;  // of the logits that the loss reads
    const auto bytes = [&](const LoweredBlock& head) {
      return row_of(OpKind::cross_entropy_loss).work(loss_of(head), type).bytes.count;
    };
    CHECK(bytes(with) - bytes(without) == 2 * (fused ? 14 : 8) * logits_of_head);
    CHECK(launches(OpKind::cross_entropy_loss, loss_of(with)) ==
          launches(OpKind::cross_entropy_loss, loss_of(without)) + 2 * 3);
    CHECK(with.saved_bytes == without.saved_bytes);
    CHECK(with.forward.scratch_bytes == without.forward.scratch_bytes);
  }
}

TEST_CASE("PyTorch's cross-entropy has three of the logits in fp32 at once, four where they are parts") {
  for (const int tp : {1, 2}) {
    const auto head = [&](bool fills) {
      return head_of({.name = "other", .fused_loss = false, .fills_loss_gradient = fills}, tp);
    };
    const std::int64_t logits = logits_of_head / tp;
    const LoweredBlock filled = head(true), in_place = head(false);
    CHECK(filled.saved_bytes == in_place.saved_bytes);  // one of them
    CHECK(filled.forward.scratch_bytes == in_place.forward.scratch_bytes);
    const std::int64_t more = (tp == 1 ? 2 : 3) * 4 * logits;
    CHECK(filled.backward.scratch_bytes >= more);
    CHECK(filled.backward.scratch_bytes < more + logits);
    CHECK(in_place.backward.scratch_bytes < 3 * logits);  // the gradient in bf16
  }
}

TEST_CASE("where products' inputs are cast to fp8 once, these are saved, and those in bf16 only if others read them") {
  const Engine engine = find_engine("megatron", source + "/configs/engines");
  for (const Sizes& of : {Sizes{256, 1, 512, 8}, Sizes{128, 3, 1024, 16}})
    for (const int tp : {1, 2}) {
      CAPTURE(tp);
      const std::int64_t elements = of.sequence * of.batch * of.hidden;
      const auto less = [&](Recompute recompute) {
        return layer(of, engine, recompute, tp).saved_bytes - layer(of, engine, recompute, tp, true).saved_bytes;
      };
      // A byte less for what two norms and the activation give, and one more for what attention
      // gives, which its own gradient reads in bf16.
      CHECK(less(Recompute::none) == 2 * elements + (4 - 1) * elements / tp);
      CHECK(less(Recompute::norms) == (4 - 1) * elements / tp);
      CHECK(less(Recompute::mlp) == 2 * elements - elements / tp);
      CHECK(less(Recompute::full) == 0);
    }
  // A product that casts its own factors saves what it does in bf16.
  Engine each = engine;
  each.fp8_casts_once = false;
  const Sizes sizes{256, 1, 512, 8};
  CHECK(layer(sizes, each, Recompute::none, 1, true).saved_bytes == layer(sizes, each, Recompute::none).saved_bytes);
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

TEST_CASE("every other product is computed again with all that is neither product nor attention") {
  // query, key and value (kept), output (again), up (kept), down (read by the next block alone).
  const LoweredBlock block = layer({.sequence = 512, .batch = 1, .hidden = 1024, .heads = 16}, {.name = "other"},
                                   Recompute::every_other_product);
  CHECK(computed_again(block) ==
        "layer_norm layers.0.attention_norm; linear layers.0.attention.output; add_layer_norm layers.0.attention_add; "
        "activation layers.0.feed_forward.activation; ");
}

TEST_CASE("a product that is kept is not computed again for what is made of it") {
  // Attention reads queries and keys as rotary positions turned them, which are made again from
  // their product. Kept: the input, queries with keys and values, attention's result and a number
  // of each head, and the gate's product.
  const Engine engine{.name = "other"};
  const LoweredBlock block = gated_layer(engine, Recompute::every_other_product);
  CHECK(computed_again(block) ==
        "rms_norm layers.0.attention_norm; rotary layers.0.attention.rotary; linear layers.0.attention.output; "
        "add_rms_norm layers.0.attention_add; linear layers.0.feed_forward.up; gate layers.0.feed_forward.gated; ");
  const std::int64_t tokens = 3 * 128;
  CHECK(block.saved_bytes == tokens * (2 * (256 + 256 + 2 * 2 * 32 + 256 + 512) + 4 * 8));
  // Eager PyTorch keeps the last product's result, too, which no backward reads.
  const Engine eager{.name = "other", .keeps_unread_products = true};
  const LoweredBlock unread = gated_layer(eager, Recompute::every_other_product);
  CHECK(unread.saved_bytes == block.saved_bytes + 2 * tokens * 256);
  CHECK(computed_again(unread) == computed_again(block));
  for (const Recompute other : {Recompute::none, Recompute::full, Recompute::norms | Recompute::mlp})
    CHECK(gated_layer(eager, other).saved_bytes == gated_layer(engine, other).saved_bytes);
}

namespace {

// What the first rank of a small GPT holds, of `batch` sequences in micro-batches.
MemoryUse memory_of(const Engine& engine, std::int64_t sequence, int batch, int micro_batch, int zero_stage = 0,
                    int pp = 1) {
  ModelSpec model = load_model("gpt2", source + "/models").spec;
  model.hidden = 256;
  model.heads = model.kv_heads = 4;
  model.head_dim = 64;
  model.feature = 1024;
  model.layers = 4;
  model.vocabulary = 1000;
  model.context = 4096;
  const OpGraph graph = as_run_by(engine, build_graph(model, sequence));
  const int dp = zero_stage == 0 ? 1 : 2;
  TrainingSpec training{.global_batch = std::int64_t{dp} * batch, .sequence_length = sequence,
                        .precision = DataType::bf16};
  training.engine = engine;
  ParallelSpec spec;
  spec.mesh.degree.dp = dp;
  spec.mesh.degree.pp = pp;
  spec.zero_stage = zero_stage;
  spec.micro_batch = micro_batch;
  const int blocks = static_cast<int>(graph.blocks.size());
  spec.stage_blocks = pp == 1 ? std::vector<int>{blocks} : std::vector<int>{blocks / 2, blocks - blocks / 2};
  return lower(job_of(graph, training, spec, BackendKind::cuda), 0).memory;
}

}  // namespace

TEST_CASE("gradients that come late are in use instead of what was saved, and reserved beside it") {
  const Engine early{.name = "other"}, late{.name = "other", .makes_gradients_late = true};
  // More is saved than there are gradients, or less.
  const MemoryUse many = memory_of(early, 512, 4, 4), many_late = memory_of(late, 512, 4, 4);
  CHECK(many.gradients > Bytes(0));
  CHECK(many_late.gradients == Bytes(0));
  CHECK(many_late.activations == many.activations);
  const MemoryUse few = memory_of(early, 32, 1, 1), few_late = memory_of(late, 32, 1, 1);
  CHECK(few_late.gradients == few.gradients);
  CHECK(few_late.activations < few.activations);
  for (const auto& [before, after] : {std::pair(many, many_late), std::pair(few, few_late)}) {
    CHECK(before.reserve == Bytes(0));
    CHECK(after.reserve > Bytes(0));
    CHECK(after.peak() == before.peak());
  }
  CHECK(many_late.reserve == many.gradients);
  // Sums over micro-batches are there from the first backward on.
  CHECK(memory_of(late, 512, 4, 2) == memory_of(early, 512, 4, 2));
  CHECK(memory_of(late, 512, 4, 4, 0, 2) == memory_of(early, 512, 4, 4, 0, 2));
}

TEST_CASE("gradients that wait for their reduction are where the last block's activations were, as far as they go") {
  const Engine apart{.name = "other"}, freed{.name = "other", .reduces_where_freed = true};
  // Two buffers take turns, each of the gradients of positions; the head saves its logits.
  const auto freed_of = [&](std::int64_t sequence) {
    return memory_of(apart, sequence, 4, 4, 3).buffers - memory_of(freed, sequence, 4, 4, 3).buffers;
  };
  CHECK(memory_of(apart, 512, 4, 4, 1) == memory_of(freed, 512, 4, 4, 1));
  CHECK(freed_of(64) == Bytes(0));
  const Bytes one = freed_of(512);
  CHECK(one.count >= std::int64_t{4096} * 256 * 4);
  CHECK(one.count < std::int64_t{4200} * 256 * 4);
  CHECK(freed_of(4096) == 2 * one);
  CHECK(memory_of(apart, 512, 4, 4, 3).peak() > memory_of(freed, 512, 4, 4, 3).peak());
}

TEST_CASE("slices of a product in fp8 cast its weight once, and in parplan's own runtime each its own") {
  for (const int tp : {2, 4})
    for (const bool own : {false, true}) {
      const LoweredBlock block = gated_layer(own ? Engine{} : Engine{.name = "other"}, Recompute::none, tp, true);
      int products = 0;
      for (const Segment* segment : {&block.forward, &block.backward})
        for (const OpKind op : {OpKind::linear, OpKind::linear_input_gradient}) {
          std::map<std::string, std::vector<OpShape>> slices;
          for (const Instruction& one : segment->instructions)
            if (one.kind == InstructionKind::kernel && one.op == op) slices[one.name].push_back(one.shape);
          for (const auto& product : slices) {
            const std::vector<OpShape>& shapes = product.second;
            CAPTURE(product.first);
            std::int64_t cast = 0;
            for (const OpShape& shape : shapes) cast += row_of(op).casts(shape).right;
            const std::int64_t weight = shapes.front().columns * shapes.front().inner;
            CHECK(cast == weight * (own ? static_cast<std::int64_t>(shapes.size()) : 1));
            products += static_cast<int>(shapes.size()) == tp ? 1 : 0;
          }
        }
      CHECK(products >= 5);  // whose rows come around the ring or go around it
    }
}

TEST_CASE("an RMS norm in steps is eight kernels, and its gradient sixteen, which move what PyTorch's do") {
  const auto moved = [](const Engine& engine, OpKind op, bool of_backward) {
    const LoweredBlock block = gated_layer(engine, Recompute::none);
    std::pair<int, std::int64_t> of_all{};
    for (const Instruction& one : (of_backward ? block.backward : block.forward).instructions)
      if (one.kind == InstructionKind::kernel && one.op == op) {
        of_all.first += launches(one.op, one.shape);
        of_all.second += row_of(op).work(one.shape, one.type).bytes.count;
      }
    return of_all;
  };
  const Engine engine{.name = "other", .fused_norm = false, .fused_rms_norm = false, .fused_sums = false};
  const std::int64_t elements = 3 * 128 * 256;
  CHECK(moved(engine, OpKind::rms_norm, false) == std::pair(2 * 8, 2 * 36 * elements));
  // Behind each, a kernel adds the residual sum's gradient: it reads two tensors and writes one.
  CHECK(moved(engine, OpKind::rms_norm_gradient, true) == std::pair(2 * (16 + 1), 2 * (92 + 3 * 2) * elements));
}

TEST_CASE("an RMS norm in steps keeps its input in fp32 and what it scales, instead of its input") {
  const Engine fused{.name = "other", .fused_norm = false};
  Engine steps = fused;
  steps.fused_rms_norm = false;
  const std::int64_t elements = 3 * 128 * 256;
  // The first norm's input is the layer's, which is kept in any case.
  CHECK(gated_layer(steps, Recompute::none).saved_bytes - gated_layer(fused, Recompute::none).saved_bytes ==
        (6 + 6 - 2) * elements);
  CHECK(gated_layer(steps, Recompute::full).saved_bytes == gated_layer(fused, Recompute::full).saved_bytes);
  // In fp32 there is nothing to widen: what is scaled is kept beside the inputs.
  const auto in_fp32 = [](const Engine& engine) {
    return LlamaLayer{.engine = engine, .precision = DataType::fp32}.lowered().saved_bytes;
  };
  CHECK(in_fp32(steps) - in_fp32(fused) == (4 + 4) * elements);
  // It is in no kernel with the sum before it.
  steps.fused_norm = true;
  const LoweredBlock block = gated_layer(steps, Recompute::none);
  const auto kernels = [&](OpKind op) {
    return std::ranges::count(block.forward.instructions, op, &Instruction::op);
  };
  CHECK(kernels(OpKind::rms_norm) == 2);
  CHECK(kernels(OpKind::add_rms_norm) == 0);
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

TEST_CASE("kernels of their own add gradients of norms, sum those of their parameters, and those of biases") {
  const Sizes sizes{256, 2, 512, 8};
  const auto backward = [&](const Engine& engine, OpKind op) {
    int kernels = 0;
    Bytes bytes;
    for (const Instruction& one : layer(sizes, engine, Recompute::none).backward.instructions)
      if (one.kind == InstructionKind::kernel && one.op == op) {
        const OpRow& row = row_of(op);
        kernels += launches(one.op, one.shape);
        bytes += row.work(one.shape, one.type).bytes + (row.beside ? row.beside(one.shape, one.type) : Bytes());
      }
    return std::pair(kernels, bytes);
  };
  const std::int64_t pass = 256 * 2 * 512 * size_of(DataType::bf16);  // over all tokens of the residual stream
  for (const bool fuses_others : {true, false}) {
    Engine engine{.name = "other", .fused_norm = fuses_others, .fused_activation = fuses_others};
    const auto [norms, norm_bytes] = backward(engine, OpKind::layer_norm_gradient);
    const auto [weights, weight_bytes] = backward(engine, OpKind::linear_weight_gradient);
    CHECK(norms == 2);
    CHECK(weights == 4);
    engine.fused_sums = false;  // the gradient is written, and read again with the other: two passes more
    CHECK(backward(engine, OpKind::layer_norm_gradient) == std::pair(norms + 2, norm_bytes + Bytes(2 * 2 * pass)));
    engine.fused_norm_gradient = false;
    CHECK(backward(engine, OpKind::layer_norm_gradient) == std::pair(norms + 4, norm_bytes + Bytes(2 * 4 * pass)));
    CHECK(backward(engine, OpKind::linear_weight_gradient) == std::pair(weights, weight_bytes));
    engine.fused_bias_gradient = false;  // of queries, keys and values, and of the feed-forward's first product
    CHECK(backward(engine, OpKind::linear_weight_gradient) ==
          std::pair(weights + 2, weight_bytes + Bytes((3 + 4) * pass)));
  }
}

namespace {

// What rank `pipeline_rank` does in a step of a small GPT on two pipeline stages, two data-parallel
// and two tensor-parallel ranks, in four micro-batches.
constexpr DeviceMesh small_mesh{.degree = {.pp = 2, .dp = 2, .tp = 2}, .order = {}};
Program small_step(const Engine& engine, DataType precision, int zero, int pipeline_rank) {
  const OpGraph graph = as_run_by(engine, graph_of("tiny-gpt2"), precision);
  TrainingSpec training;
  training.global_batch = 8;
  training.sequence_length = 16;
  state_precision(training, precision);
  training.engine = engine;
  ParallelSpec spec;
  spec.mesh = small_mesh;
  spec.micro_batch = 1;
  spec.zero_stage = zero;
  spec.schedule = ScheduleKind::one_f_one_b;
  const int blocks = static_cast<int>(graph.blocks.size());
  spec.stage_blocks = {blocks / 2, blocks - blocks / 2};
  const Job job = job_of(graph, training, spec, BackendKind::cuda);
  return lower(job, 4 * pipeline_rank);
}

// Two micro-batches of tiny-llama in fp8, with scales that follow from earlier casts.
Program step_with_scales(const Degrees& degrees, std::vector<std::string> trained = {}) {
  TrainingSpec training;
  training.global_batch = 2 * degrees.dp;
  training.sequence_length = 16;
  training.engine = {.name = "other", .fp8_casts_once = true, .scale_history = 16};
  state_precision(training, DataType::fp8);
  if (!trained.empty()) training.trainable = {.all = false, .patterns = std::move(trained)};
  const OpGraph graph = as_trained(training, as_run_by(training, graph_of("tiny-llama")));
  ParallelSpec spec;
  spec.mesh.degree = degrees;
  spec.micro_batch = 1;
  spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
  return lower(job_of(graph, training, spec, BackendKind::cuda), 0);
}

struct Step {
  std::string call;
  const Instruction* instruction;
};
// Its instructions in the order of launch.
std::vector<Step> steps_of(const Program& program) {
  std::vector<Step> steps;
  for (const Call& call : program.calls)
    for (const Instruction& one : program.segments[call.segment].instructions)
      steps.push_back({program.segments[call.segment].name, &one});
  return steps;
}
std::int64_t bytes_of(const Instruction& instruction) {
  return instruction.operands.front().bytes;
}
int calls_named(const Program& program, const std::string& words) {
  return static_cast<int>(std::ranges::count_if(
      steps_of(program), [&](const Step& step) { return step.call.find(words) != std::string::npos; }));
}

}  // namespace

TEST_CASE("engines with attention in parts share out key/value heads, and sum gradients in their own type") {
  // Scores are as wide as a rank's query heads: 4 heads of 2 key/value heads on 1, 2 and 4 ranks.
  for (const DataType precision : {DataType::fp32, DataType::fp16}) {
    const Engine engine = megatron_2021();
    const OpGraph graph = as_run_by(engine, graph_of("tiny-llama"));
    TrainingSpec training;
    training.global_batch = 8;
    training.sequence_length = 16;
    training.precision = precision;
    training.engine = engine;
    std::int64_t scores = 0;
    for (const int tp : {1, 2, 4})
      for (int zero = 0; zero <= engine.most_zero; ++zero) {
        ParallelSpec spec;
        spec.mesh.degree = {.dp = 2, .tp = tp};
        spec.zero_stage = zero;
        spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
        REQUIRE(!illegal(graph, training, spec));
        const std::vector<Program> programs = lower_all(job_of(graph, training, spec, BackendKind::cuda));
        // (The engine's kernels around half gradients are only simulated, and do not verify.)
        std::string found;
        if (precision == DataType::fp32)
          for (const Fault& fault : find_faults(programs)) found += write_fault(fault) + "\n";
        CHECK(found == "");
        for (const Program& program : programs)
          for (const Segment& segment : program.segments)
            for (const Instruction& instruction : segment.instructions) {
              if (instruction.op == OpKind::attention_scores) {
                const std::int64_t bytes = instruction.operands.back().bytes;
                if (tp == 1) scores = bytes;
                CHECK(bytes * tp == scores);
                CHECK(instruction.shape.kv_heads == std::max(2 / tp, 1));
              }
              if (instruction.group.members == Members::copies) CHECK(instruction.type == gradient_type(training));
            }
        CHECK(programs[1].group(holders_of_copies(2)).size() == (tp == 4 ? 2 : 0));
      }
  }
}

TEST_CASE("an engine that does not overlap reductions with the backward runs them when all transfers are done") {
  const auto reduces_before_a_transfer = [&](bool overlaps) {
    const Program program = small_step({.name = "other", .overlaps_data = overlaps}, DataType::bf16, 0, 1);
    const std::vector<Step> steps = steps_of(program);
    const auto is_send = [](const Step& step) { return step.instruction->kind == InstructionKind::send; };
    const auto is_reduction = [](const Step& step) { return step.call.starts_with("data.all_reduce"); };
    const auto last_send = std::ranges::find_if(steps.rbegin(), steps.rend(), is_send).base();
    CHECK(std::ranges::count_if(steps, is_reduction) > 1);
    return std::ranges::any_of(steps.begin(), last_send, is_reduction);
  };
  CHECK(reduces_before_a_transfer(true));
  CHECK_FALSE(reduces_before_a_transfer(false));
}

TEST_CASE("in fp8 magnitudes are reduced over all ranks of a stage behind each pass through it, before the transfer") {
  const auto is_reduction = [](const Step& step) { return step.call == "scales.all_reduce"; };
  for (const int rank : {0, 1}) {
    const Engine engine{.name = "other", .fp8_casts_once = true, .scale_history = 16};
    const Program program = small_step(engine, DataType::fp8, 1, rank);
    const std::vector<int> stage = program.group(ranks_of_stage(small_mesh));
    CHECK(stage == std::vector<int>{4 * rank, 4 * rank + 1, 4 * rank + 2, 4 * rank + 3});
    CHECK(calls_named(small_step(engine, DataType::bf16, 1, rank), "scales") == 0);
    CHECK(calls_named(small_step({.name = "other", .fp8_casts_once = true}, DataType::fp8, 1, rank), "scales") == 0);
    const std::vector<Step> steps = steps_of(program);
    // A layer has four products, and a stage all blocks but the embedding or the head as layers.
    const OpGraph graph = as_run_by(engine, graph_of("tiny-gpt2"), DataType::fp8);
    const int blocks = static_cast<int>(graph.blocks.size()), half = blocks / 2;
    const int layers = rank == 0 ? half - 1 : blocks - half - 1;
    std::vector<std::int64_t> bytes;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      if (!is_reduction(steps[i]) || communicates(steps[i].instruction->kind)) continue;
      const Instruction& first = *steps[i].instruction;
      if (first.op == OpKind::update_scales) continue;
      REQUIRE(i + 2 < steps.size());
      CHECK(first.op == OpKind::join_magnitudes);
      const Instruction &reduction = *steps[i + 1].instruction, &update = *steps[i + 2].instruction;
      CHECK(reduction.kind == InstructionKind::all_reduce_max);
      CHECK(reduction.group == ranks_of_stage(small_mesh));
      CHECK(update.op == OpKind::update_scales);
      CHECK(update.shape.columns == 16);
      for (const Instruction* one : {&first, &reduction, &update}) {
        CHECK(one->stream == Stream::compute);
        CHECK(bytes_of(*one) == bytes_of(first));
      }
      bytes.push_back(bytes_of(first));
    }
    // Four micro-batches: forward an input, a weight and an output, backward two gradients.
    const std::int64_t of_each = 4 * 4 * layers;  // bytes of fp32
    CHECK(std::ranges::count(bytes, 3 * of_each) == 4);
    CHECK(std::ranges::count(bytes, 2 * of_each) == 4);
    CHECK(bytes.size() == 8);
    // Each transfer of a pass follows its reduction.
    int reductions = 0, sends = 0;
    for (const Step& step : steps) {
      reductions += step.instruction->op == OpKind::update_scales && is_reduction(step);
      if (step.instruction->kind != InstructionKind::send) continue;
      ++sends;
      CHECK(reductions >= sends);
    }
    CHECK(sends == 4);
    CHECK(program.memory == small_step({.name = "other", .fp8_casts_once = true}, DataType::fp8, 1, rank).memory);
  }
}

TEST_CASE("reductions of scales count under an axis that has ranks, and are none of one rank") {
  const auto reductions = [](const Degrees& degrees) {
    std::vector<Label> labels;
    const Program program = step_with_scales(degrees);
    for (const Step& step : steps_of(program))
      if (step.call == "scales.all_reduce" && communicates(step.instruction->kind)) {
        CHECK(step.instruction->label == label_of(step.instruction->group.axis));
        labels.push_back(step.instruction->label);
      }
    return labels;
  };
  // Two micro-batches, forward and backward.
  CHECK(reductions({.dp = 2}) == std::vector<Label>(4, Label::dp));
  CHECK(reductions({.dp = 2, .tp = 2}) == std::vector<Label>(4, Label::dp));
  CHECK(reductions({.cp = 2, .tp = 2}) == std::vector<Label>(4, Label::cp));
  CHECK(reductions({.tp = 2}) == std::vector<Label>(4, Label::tp));
  CHECK(reductions({}).empty());
  // Magnitudes of one rank are joined and enter the histories all the same.
  int joins = 0, updates = 0;
  const Program alone = step_with_scales({});
  for (const Step& step : steps_of(alone)) {
    joins += step.instruction->op == OpKind::join_magnitudes;
    updates += step.instruction->op == OpKind::update_scales;
  }
  CHECK(joins == 4);
  CHECK(updates == 4);
}

TEST_CASE("scales are reduced behind backwards that run a product in fp8 alone") {
  const auto reductions = [](std::vector<std::string> trained) {
    int count = 0;
    const Program program = step_with_scales({.dp = 2}, std::move(trained));
    for (const Step& step : steps_of(program))
      count += step.call == "scales.all_reduce" && communicates(step.instruction->kind);
    return count;
  };
  CHECK(reductions({}) == 4);
  CHECK(reductions({"head"}) == 2);  // the head's product is in bf16
}

TEST_CASE("transfers split over the tensor axis are gathered, and send as many bytes less") {
  const auto sent = [&](const Program& program, InstructionKind kind) {
    std::int64_t bytes = 0;
    for (const Step& step : steps_of(program))
      if (step.instruction->kind == kind && step.call.find("pipeline.") == 0) bytes += bytes_of(*step.instruction);
    return bytes;
  };
  for (const int rank : {0, 1}) {
    const Program whole = small_step({.name = "other"}, DataType::bf16, 0, rank),
                  split = small_step({.name = "other", .splits_transfers = true}, DataType::bf16, 0, rank);
    for (const InstructionKind kind : {InstructionKind::send, InstructionKind::receive})
      CHECK(2 * sent(split, kind) == sent(whole, kind));
    CHECK(sent(whole, InstructionKind::all_gather) == 0);
    CHECK(sent(split, InstructionKind::all_gather) == sent(whole, InstructionKind::receive));
  }
}

TEST_CASE("sharded gradients are flattened, and gathered parameters copied, once for each use") {
  const Engine plain{.name = "other"}, copies{.name = "other", .flattens_gradients = true, .copies_gathered = true};
  const auto kernels = [&](const Engine& engine, DataType precision, int zero, const char* words) {
    return calls_named(small_step(engine, precision, zero, 0), words);
  };
  // Four micro-batches; a copy in half precision and its widening for each reduction of the first
  // stage's buckets, and a copy of what is gathered, forward and backward.
  const Program program = small_step(copies, DataType::bf16, 3, 0);
  const int reductions = calls_named(program, "data.reduce_scatter.gradients") / 2;
  CHECK(reductions > 0);
  CHECK(calls_named(program, "gradients.flatten") == 2 * reductions);
  CHECK(calls_named(program, "parameters.copy") == calls_named(program, "data.all_gather.parameters"));
  CHECK(kernels(plain, DataType::bf16, 3, "gradients.flatten") == 0);
  CHECK(kernels(plain, DataType::bf16, 3, "parameters.copy") == 0);
  for (const int zero : {0, 1}) {
    CHECK(kernels(copies, DataType::bf16, zero, "gradients.flatten") == 0);
    CHECK(kernels(copies, DataType::bf16, zero, "parameters.copy") == 0);
  }
  CHECK(kernels(copies, DataType::fp32, 3, "gradients.flatten") == 0);  // what a backward leaves is reduced as it is
}

TEST_CASE("an engine that gathers by lists of shards fills, gathers and copies each parameter in a call of its own") {
  Engine lists{.name = "other", .lists_shards = true};
  lists.host_per_listed_shard = Seconds(2);
  lists.host_per_copied_shard = Seconds(8);
  const Program plain = small_step({.name = "other"}, DataType::bf16, 3, 0),
                program = small_step(lists, DataType::bf16, 3, 0);
  // Four micro-batches, forward and backward; the ranks of the data axis are two.
  int parameters = 0, gathers = 0, reductions = 0;
  for (const Bucket& bucket : program.buckets) parameters += static_cast<int>(bucket.units.size());
  for (const Bucket& bucket : plain.buckets) CHECK(bucket.units.size() == 1);
  CHECK(parameters > static_cast<int>(program.buckets.size()));
  for (const Call& call : program.calls) {
    const Segment& segment = program.segments[call.segment];
    const std::vector<Instruction>& all = segment.instructions;
    if (segment.name == "data.all_gather.parameters") {
      ++gathers;
      REQUIRE(all.size() == 3);
      CHECK(all[0].op == OpKind::fill_zero);
      CHECK(all[1].kind == InstructionKind::all_gather);
      CHECK(all[2].op == OpKind::copy);
      CHECK(all[0].submission == Seconds(0));
      CHECK(all[1].submission == Seconds(2 * 2));
      CHECK(all[2].submission == Seconds(2 * 8));
      CHECK(all[0].shape.rows == all[2].shape.rows);
      CHECK(all[1].operands.back().bytes == 2 * all[0].shape.rows);
    }
    if (segment.name != "data.reduce_scatter.gradients") continue;
    REQUIRE(all.size() % 4 == 0);
    reductions += static_cast<int>(all.size() / 4);
    for (std::size_t i = 0; i < all.size(); i += 4) {
      CHECK(all[i].op == OpKind::copy);
      CHECK(all[i + 1] == all[i]);
      CHECK(all[i + 2].kind == InstructionKind::reduce_scatter);
    }
  }
  CHECK(gathers == 4 * 2 * parameters);
  CHECK(reductions == 4 * parameters);
  // Below ZeRO-3 no parameter is a shard.
  CHECK(calls_named(small_step(lists, DataType::bf16, 2, 0), "data.all_gather.parameters") ==
        calls_named(small_step({.name = "other"}, DataType::bf16, 2, 0), "data.all_gather.parameters"));
}

TEST_CASE("lists of gradients take the host as long as there are parameters and ranks, beside backwards") {
  const auto lower_for = [](int ranks, int zero, BackendKind backend) {
    Engine lists{.name = "other", .lists_shards = true};
    lists.host_per_listed_shard = Seconds(2);
    lists.host_per_copied_shard = Seconds(8);
    const OpGraph graph = as_run_by(lists, graph_of("tiny-gpt2"));
    TrainingSpec training{.global_batch = ranks, .sequence_length = 16, .precision = DataType::bf16};
    training.engine = lists;
    ParallelSpec spec;
    spec.mesh.degree = {.dp = ranks};
    spec.zero_stage = zero;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
    return lower(job_of(graph, training, spec, backend), 0);
  };
  // The blocks' own buckets are the first; behind them is that of the tied parameter.
  const auto parameters_of = [](const Program& program) {
    std::vector<std::set<TensorId>> of_bucket(program.buckets.size());
    for (const ParameterPart& part : program.parameters) of_bucket[part.bucket].insert(part.tensor);
    std::multiset<std::size_t> numbers;
    for (std::size_t block = 0; block < graph_of("tiny-gpt2").blocks.size(); ++block)
      numbers.insert(of_bucket[block].size());
    return numbers;
  };
  const auto of_backwards = [](const Program& program) {
    std::multiset<double> times;
    for (const Call& call : program.calls)
      if (const Segment& segment = program.segments[call.segment]; segment.name.ends_with(".backward"))
        for (std::size_t i = 0; i < segment.instructions.size(); ++i) {
          const Seconds host = segment.instructions[i].submission;
          if (i + 1 == segment.instructions.size()) times.insert(host.value);
          else CHECK(host == Seconds(0));
        }
    return times;
  };
  for (const int ranks : {2, 4}) {
    const Program program = lower_for(ranks, 3, BackendKind::cuda);
    std::multiset<double> wanted;
    for (const std::size_t parameters : parameters_of(program))
      wanted.insert(static_cast<double>(parameters) * ranks * (2 + 8));
    CHECK(of_backwards(program) == wanted);
  }
  // Nothing of it where gradients are whole, and on cores, which are their own host.
  for (const Program& program : {lower_for(2, 1, BackendKind::cuda), lower_for(2, 3, BackendKind::cpu)})
    for (const double host : of_backwards(program)) CHECK(host == 0.0);
}

TEST_CASE("parameters of few elements persist, and are gathered once a step") {
  Engine all{.name = "other", .lists_shards = true}, large = all;
  large.persists_below = 100;
  large.host_per_persistent_shard = Seconds(14);
  const Program by_one = small_step(all, DataType::bf16, 3, 0), program = small_step(large, DataType::bf16, 3, 0);
  CHECK(calls_named(by_one, "persistent") == 0);
  REQUIRE(by_one.buckets.size() == program.buckets.size());
  int with_small = 0, fewer = 0;
  for (std::size_t b = 0; b < program.buckets.size(); ++b) {
    const std::vector<BucketUnit>&units = program.buckets[b].units, &apart = by_one.buckets[b].units;
    std::int64_t end = 0;
    for (const BucketUnit& unit : units) {
      CHECK(unit.range.begin == end);
      end = unit.range.end;
      CHECK((unit.range.size() >= large.persists_below || units.size() == 1));
    }
    CHECK(end == program.buckets[b].elements);
    CHECK(units.size() <= apart.size());
    fewer += units.size() < apart.size() ? 1 : 0;
    std::map<TensorId, std::int64_t> elements;
    for (const ParameterPart& part : program.parameters)
      if (part.bucket == static_cast<int>(b)) elements[part.tensor] += part.rows * part.columns;
    with_small += std::ranges::any_of(elements, [](const auto& one) { return one.second < 100; }) ? 1 : 0;
  }
  CHECK(fewer > 0);
  // A gather and a copy of them for each such bucket, behind all updates.
  const std::vector<Step> steps = steps_of(program);
  const auto is_persistent = [](const Step& step) { return step.call.find("persistent") != std::string::npos; };
  const auto first = std::ranges::find_if(steps, is_persistent);
  CHECK(std::ranges::count_if(steps, is_persistent) == 2 * with_small);
  CHECK(std::none_of(first, steps.end(), [](const Step& step) { return step.instruction->op == OpKind::adamw; }));
  // The host's time is that of a whole number of parameters over two ranks.
  for (const Step& step : steps)
    if (is_persistent(step) && step.instruction->kind == InstructionKind::kernel)
      CHECK(std::fmod(step.instruction->submission.value, 2 * 14.0) == 0.0);
}

TEST_CASE("parameters of a recomputed block are gathered again for its backward where the engine says so") {
  const auto gathered = [](bool again, Recompute recompute) {
    const Engine engine{.name = "other", .gathers_again = again};
    const OpGraph graph = as_run_by(engine, graph_of("tiny-gpt2"));
    TrainingSpec training{.global_batch = 2, .sequence_length = 16, .precision = DataType::bf16};
    training.engine = engine;
    ParallelSpec spec;
    spec.mesh.degree = {.dp = 2};
    spec.zero_stage = 3;
    spec.recompute = recompute;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
    const Program program = lower(job_of(graph, training, spec, BackendKind::cuda), 0);
    const auto layers = std::ranges::count_if(graph.blocks, [](const Block& block) { return may_recompute(block); });
    return std::pair(calls_named(program, "data.all_gather.parameters"), static_cast<int>(layers));
  };
  const auto [once, layers] = gathered(false, Recompute::full);
  CHECK(layers > 0);
  CHECK(gathered(true, Recompute::full).first == once + layers);
  CHECK(gathered(true, Recompute::none).first == once);
}

TEST_CASE("where the master copy is cast as it is gathered, no half-precision shard is kept beside it") {
  const auto parameters = [&](bool casts, DataType precision, int zero) {
    return small_step({.name = "other", .casts_shards = casts}, precision, zero, 0).memory.parameters;
  };
  CHECK(parameters(true, DataType::bf16, 3) == Bytes(0));
  CHECK(parameters(false, DataType::bf16, 3) > Bytes(0));
  // There is no master copy of fp32, and below ZeRO-3 parameters are whole.
  CHECK(parameters(true, DataType::fp32, 3) == parameters(false, DataType::fp32, 3));
  CHECK(parameters(true, DataType::bf16, 2) == parameters(false, DataType::bf16, 2));
}

TEST_CASE("products leave gradients of weights in half precision where other kernels add or copy them") {
  struct Expected {
    Engine engine;
    DataType precision;
    int zero;
    bool in_half;
  };
  for (const Expected& expected : {Expected{{.name = "other"}, DataType::bf16, 1, false},
                                   Expected{{.name = "other", .half_gradients = true}, DataType::bf16, 1, true},
                                   Expected{{.name = "other", .half_gradients = true}, DataType::fp32, 1, false},
                                   Expected{{.name = "other", .fused_accumulation = false}, DataType::bf16, 1, true},
                                   Expected{{.name = "other", .sums_half = true}, DataType::bf16, 1, true},
                                   Expected{{.name = "other", .flattens_gradients = true}, DataType::bf16, 1, true},
                                   Expected{{.name = "other", .flattens_gradients = true}, DataType::bf16, 3, true},
                                   Expected{{.name = "other", .widens_gradients = true}, DataType::bf16, 3, true}}) {
    const Program program = small_step(expected.engine, expected.precision, expected.zero, 0);
    int products = 0;
    for (const Step& step : steps_of(program)) {
      if (step.instruction->op != OpKind::linear_weight_gradient) continue;
      ++products;
      CHECK(step.instruction->shape.in_half == expected.in_half);
    }
    CHECK(products > 0);
  }
  // Where nothing else sums them, one kernel adds them to the sum in fp32, of which it reads and
  // writes 4 bytes an element.
  const Program apart = small_step({.name = "other", .fused_accumulation = false}, DataType::bf16, 1, 0);
  CHECK(calls_named(apart, "gradients.add") == 4 * static_cast<int>(apart.buckets.size()));
  // Or where they are copied once they are sharded, and are whole.
  for (const int zero : {1, 3}) {
    const Program whole = small_step({.name = "other", .flattens_gradients = true}, DataType::bf16, zero, 0);
    CHECK(calls_named(whole, "gradients.add") == (zero == 1 ? calls_named(apart, "gradients.add") : 0));
  }
  for (const Step& step : steps_of(apart))
    if (step.call == "gradients.add") {
      const OpShape& shape = step.instruction->shape;
      CHECK(row_of(step.instruction->op).work(shape, step.instruction->type).bytes == Bytes(10 * shape.rows));
    }
  // A sum in half precision is read and written by the product.
  const Program summed = small_step({.name = "other", .sums_half = true}, DataType::bf16, 1, 0);
  for (const Step& step : steps_of(summed))
    if (step.instruction->op == OpKind::linear_weight_gradient) {
      const OpShape& shape = step.instruction->shape;
      OpShape written = shape;
      written.accumulate = false;
      const auto bytes = [&](const OpShape& of) { return row_of(step.instruction->op).work(of, DataType::bf16).bytes; };
      const std::int64_t weights = shape.columns * shape.inner + (shape.bias ? shape.columns : 0);
      CHECK(bytes(shape) - bytes(written) == Bytes(2 * weights));
    }
  // FSDP2 widens as it copies.
  const Engine widens{.name = "other", .widens_gradients = true}, copies{.name = "other", .flattens_gradients = true};
  CHECK(2 * calls_named(small_step(widens, DataType::bf16, 3, 0), "gradients.flatten") ==
        calls_named(small_step(copies, DataType::bf16, 3, 0), "gradients.flatten"));
}

TEST_CASE("rows that the gradient of a weight reads are gathered before the product that makes the input's") {
  ModelSpec model = load_model("gpt2", source + "/models").spec;
  const OpGraph graph = build_graph(model, 128);
  TrainingSpec training{.global_batch = 1, .sequence_length = 128, .precision = DataType::bf16};
  ParallelSpec spec;
  spec.mesh.degree.tp = 2;
  spec.sequence_parallel = true;
  const Placements placements = place(graph, spec);
  const BlockContext context = block_context(block_layout(spec, placements, Recompute::none), placements.residual, {},
                                             training, BackendKind::cuda, true);
  const std::vector<Instruction> backward = lower_block(graph, 1, context).backward.instructions;
  int gathered = 0;
  for (const char* const norm : {"layers.0.attention_norm.all-gather", "layers.0.feed_forward_norm.all-gather"}) {
    CAPTURE(norm);
    const auto gather = std::ranges::find(backward, norm, &Instruction::name);
    REQUIRE(gather != backward.end());
    const auto product = std::ranges::find_if(gather, backward.end(), [](const Instruction& instruction) {
      return row_of(instruction.op).cost == CostClass::product;
    });
    REQUIRE(product != backward.end());
    CHECK(product->op == OpKind::linear_input_gradient);
    ++gathered;
  }
  CHECK(gathered == 2);
}

TEST_CASE("gradients are summed and reduced in the types that the engine has for them") {
  const Engine own{.name = "other"}, half{.name = "other", .half_gradients = true},
      in_half{.name = "other", .sums_half = true},
      apart{.name = "other", .fused_accumulation = false, .sums_half = true},
      reduced{.name = "other", .half_gradients = true, .scatters_gradients = false, .reduces_half = true};
  struct Expected {
    const Engine& engine;
    DataType precision;
    int element, reduced;  // bytes
    InstructionKind kind;
    int added_of_4;  // micro-batches whose gradients a kernel adds
    int kernels;     // of each
  };
  using enum InstructionKind;
  for (const Expected& expected : {Expected{own, DataType::bf16, 4, 4, reduce_scatter, 0, 0},
                                   Expected{own, DataType::fp16, 4, 4, reduce_scatter, 0, 0},
                                   Expected{in_half, DataType::bf16, 2, 2, reduce_scatter, 0, 0},
                                   Expected{in_half, DataType::fp32, 4, 4, reduce_scatter, 0, 0},
                                   Expected{apart, DataType::bf16, 2, 2, reduce_scatter, 3, 1},
                                   Expected{half, DataType::bf16, 4, 4, reduce_scatter, 4, 2},
                                   Expected{half, DataType::fp16, 2, 2, reduce_scatter, 3, 1},
                                   Expected{reduced, DataType::bf16, 4, 2, all_reduce_sum, 4, 2},
                                   Expected{reduced, DataType::fp16, 2, 2, all_reduce_sum, 3, 1}}) {
    CAPTURE(name(expected.precision));
    const Program program = small_step(expected.engine, expected.precision, 1, 0);
    std::int64_t elements = 0, sums = 0, sent = 0;
    for (const Bucket& bucket : program.buckets) {
      elements += bucket.elements;
      sums += program.buffers[*bucket.gradients].bytes;
    }
    for (const Step& step : steps_of(program))
      if (step.instruction->kind == expected.kind && step.call.ends_with(".gradients") &&
          step.call.starts_with("data."))
        sent += bytes_of(*step.instruction);
    CHECK(sums >= elements * expected.element);
    CHECK(sums < elements * expected.element + 256 * static_cast<std::int64_t>(program.buckets.size()));
    CHECK(sent == elements * expected.reduced);
    // Two accumulators of the tied embedding or one: it is on both stages.
    CHECK(calls_named(program, "gradients.add") ==
          static_cast<int>(program.buckets.size()) * expected.added_of_4 * expected.kernels);
  }
}

TEST_CASE("parameters that are gathered together are copied before it and behind it") {
  const Engine coalesced{.name = "other", .copies_coalesced = true};
  const Program plain = small_step({.name = "other"}, DataType::bf16, 3, 0),
                program = small_step(coalesced, DataType::bf16, 3, 0);
  std::multiset<std::int64_t> gathered, copied;  // bytes
  for (const Call& call : program.calls) {
    const Segment& segment = program.segments[call.segment];
    const std::vector<Instruction>& all = segment.instructions;
    if (segment.name == "parameters.copy") {
      REQUIRE(all.size() == 1);
      CHECK(all[0].stream == Stream::compute);
      copied.insert(2 * all[0].shape.rows);
    }
    if (segment.name != "data.all_gather.parameters") continue;
    // Each of two data-parallel ranks holds a half.
    REQUIRE(all.size() == 2);
    CHECK(all[0].op == OpKind::copy);
    CHECK(all[0].stream == Stream::dp);
    CHECK(all[1].kind == InstructionKind::all_gather);
    const std::int64_t whole = all[1].operands.back().bytes;
    CHECK(2 * 2 * all[0].shape.rows == whole);
    gathered.insert(whole);
  }
  CHECK(!gathered.empty());
  CHECK(gathered == copied);
  CHECK(static_cast<int>(gathered.size()) == calls_named(plain, "data.all_gather.parameters"));
  // Lists have copies of their own, and no others.
  const Engine lists{.name = "other", .lists_shards = true},
               both{.name = "other", .copies_coalesced = true, .lists_shards = true};
  CHECK(small_step(both, DataType::bf16, 3, 0).calls.size() == small_step(lists, DataType::bf16, 3, 0).calls.size());
  CHECK(calls_named(small_step(both, DataType::bf16, 3, 0), "parameters.copy") == 0);
  // Below ZeRO-3, parameters are gathered in place, behind the update.
  for (const int zero : {1, 2}) {
    const Program in_place = small_step(coalesced, DataType::bf16, zero, 0);
    for (const Step& step : steps_of(in_place))
      if (step.call == "data.all_gather.parameters") CHECK(step.instruction->kind == InstructionKind::all_gather);
  }
}

TEST_CASE("sharded gradients in tensors of their own are copied, divided and copied, and not cleared") {
  const Engine apart{.name = "other", .fused_accumulation = false, .sums_half = true};
  Engine copies = apart;
  copies.copies_sharded = true;
  copies.bucket_elements = 1000;
  for (const int zero : {2, 3}) {
    CAPTURE(zero);
    const Program plain = small_step(apart, DataType::bf16, zero, 0),
                  program = small_step(copies, DataType::bf16, zero, 0);
    std::multiset<std::int64_t> reduced, copied;  // bytes
    for (const Call& call : program.calls) {
      const Segment& segment = program.segments[call.segment];
      if (segment.name == "gradients.bucket") {
        REQUIRE(segment.instructions.size() == 3);
        for (const Instruction& one : segment.instructions) {
          CHECK(one.op == OpKind::copy);
          CHECK(one.type == DataType::bf16);
          CHECK(one.shape.rows == segment.instructions.front().shape.rows);
        }
        copied.insert(2 * segment.instructions.front().shape.rows);
      }
      if (segment.name == "data.reduce_scatter.gradients") reduced.insert(bytes_of(segment.instructions.front()));
    }
    CHECK(!reduced.empty());
    CHECK(reduced == copied);
    // One tensor is cleared for each of them otherwise, but that of the tied parameter, which adds
    // up over blocks, is so in both, in each of four micro-batches.
    CHECK(calls_named(plain, "fill_zero") - calls_named(program, "fill_zero") == static_cast<int>(reduced.size()) - 4);
    CHECK(program.memory.buffers - plain.memory.buffers == align_up(Bytes(2 * 1000), buffer_alignment));
    // What products add to is cleared, and is no tensor of its own.
    Engine fused = copies;
    fused.fused_accumulation = true;
    fused.sums_half = false;
    const Program adds = small_step(fused, DataType::bf16, zero, 0);
    CHECK(calls_named(adds, "fill_zero") == calls_named(plain, "fill_zero"));
    CHECK(calls_named(adds, "gradients.bucket") == 0);
  }
  const Program whole = small_step(copies, DataType::bf16, 1, 0);
  CHECK(whole.memory == small_step(apart, DataType::bf16, 1, 0).memory);
  CHECK(calls_named(whole, "gradients.bucket") == 0);
}

TEST_CASE("which gradients are scattered is said for ZeRO-1 and for ZeRO-2, and those of ZeRO-3 always are") {
  using enum InstructionKind;
  for (const bool whole : {true, false})
    for (const bool sharded : {true, false})
      for (const int zero : {1, 2, 3}) {
        CAPTURE(zero);
        const Engine engine{.name = "other", .scatters_gradients = whole, .scatters_sharded = sharded};
        const bool scatters = zero == 3 || (zero == 2 ? sharded : whole);
        const Program program = small_step(engine, DataType::bf16, zero, 0);
        int reductions = 0;
        for (const Step& step : steps_of(program))
          if (step.call.starts_with("data.") && step.call.ends_with(".gradients") &&
              step.instruction->kind != InstructionKind::kernel) {
            ++reductions;
            CHECK(step.instruction->kind == (scatters ? reduce_scatter : all_reduce_sum));
          }
        CHECK(reductions > 0);
      }
}

TEST_CASE("gradients in half precision are copied, widened and scaled before an update, which moves 22 bytes more") {
  Engine plain{.name = "other", .sums_half = true}, copies = plain;
  copies.copies_to_update = true;
  const auto moved = [](const Engine& engine, DataType precision, const char* call) {
    std::pair<std::int64_t, std::int64_t> bytes_and_elements{};
    const Program program = small_step(engine, precision, 3, 0);
    for (const Step& step : steps_of(program)) {
      const Instruction& one = *step.instruction;
      if (step.call != call || one.kind != InstructionKind::kernel) continue;
      bytes_and_elements.first += row_of(one.op).work(one.shape, one.type).bytes.count;
      if (one.op == OpKind::adamw) bytes_and_elements.second += one.shape.rows;
    }
    return bytes_and_elements;
  };
  const auto [without, elements] = moved(plain, DataType::bf16, "optimizer");
  CHECK(elements > 0);
  CHECK(moved(copies, DataType::bf16, "optimizer") == std::pair(without + 22 * elements, elements));
  CHECK(moved(copies, DataType::fp32, "optimizer") == moved(plain, DataType::fp32, "optimizer"));
  // A norm of a copy in fp64 moves 14 bytes more.
  TrainingSpec training{.precision = DataType::bf16};
  training.engine = copies;
  std::int64_t bytes = 0;
  for (const Instruction& one : norm_copies(1000, training))
    bytes += row_of(one.op).work(one.shape, one.type).bytes.count;
  CHECK(bytes == 14 * 1000);
  training.precision = DataType::fp32;
  CHECK(norm_copies(1000, training).empty());
}

TEST_CASE("hooks take the host's time around each module of sharded parameters, and behind each sharded gradient") {
  Engine hooks{.name = "other", .repeats_layers = true};
  hooks.host_per_module_forward = Seconds(1);
  hooks.host_per_module_backward = Seconds(100);
  hooks.host_per_sharded_gradient = Seconds(10000);
  // By the name of a block's Segment, what its instructions have together.
  const auto host = [&](int zero, Recompute recompute, BackendKind backend) {
    const OpGraph graph = as_run_by(hooks, graph_of("tiny-gpt2"));
    TrainingSpec training{.global_batch = 4, .sequence_length = 16, .precision = DataType::bf16};
    training.engine = hooks;
    ParallelSpec spec;
    spec.mesh.degree = {.dp = 2};
    spec.zero_stage = zero;
    spec.recompute = recompute;
    spec.stage_blocks = {static_cast<int>(graph.blocks.size())};
    const Program program = lower(job_of(graph, training, spec, backend), 0);
    std::map<std::string, double> of_segment;
    for (const Segment& segment : program.segments)
      for (const Instruction& one : segment.instructions)
        if (one.submission > Seconds(0)) {
          CHECK(one.kind == InstructionKind::kernel);
          of_segment[segment.name] += one.submission.value;
        }
    for (auto& [name, seconds] : of_segment) seconds = std::round(seconds * 1e6) / 1e6;
    return of_segment;
  };
  // A layer of a GPT: two norms, four products, an activation, attention; and around these itself
  // and its feed-forward: 10 modules. Norms and products have a weight and a bias: 12 parameters.
  // Two tables are before them, and a norm and a product behind, whose weight is a table's.
  using Seen = std::map<std::string, double>;
  CHECK(host(3, Recompute::none, BackendKind::cuda) ==
        Seen{{"embedding.forward", 2}, {"embedding.backward", 2 * 100 + 2 * 10000},
             {"layers.forward", 10}, {"layers.backward", 10 * 100 + 12 * 10000},
             {"head.forward", 2}, {"head.backward", 2 * 100 + 3 * 10000}});
  Seen again = host(3, Recompute::full, BackendKind::cuda);
  CHECK(again["layers.backward"] == 10 + 10 * 100 + 12 * 10000);
  CHECK(again["layers.forward"] == 10);
  CHECK(again["head.backward"] == 2 * 100 + 3 * 10000);
  CHECK(host(2, Recompute::full, BackendKind::cuda) ==
        Seen{{"embedding.backward", 2 * 10000}, {"layers.backward", 12 * 10000}, {"head.backward", 3 * 10000}});
  CHECK(host(1, Recompute::full, BackendKind::cuda).empty());
  CHECK(host(3, Recompute::none, BackendKind::cpu).empty());  // cores are their own host
}

TEST_CASE("the host makes lists of gradients and runs hooks, one after the other") {
  Engine lists{.name = "other", .lists_shards = true}, hooks{.name = "other"}, both;
  lists.host_per_listed_shard = Seconds(2);
  hooks.host_per_module_backward = Seconds(3);
  hooks.host_per_sharded_gradient = Seconds(5);
  both = hooks;
  both.lists_shards = true;
  both.host_per_listed_shard = lists.host_per_listed_shard;
  hooks.lists_shards = true;  // whose lists take no time
  const auto of_backwards = [](const Engine& engine) {
    const Program program = small_step(engine, DataType::bf16, 3, 0);
    std::vector<double> times;
    for (const Segment& segment : program.segments) {
      double host = 0.0;
      if (segment.name.ends_with(".backward"))
        for (const Instruction& one : segment.instructions) host += one.submission.value;
      times.push_back(host);
    }
    return times;
  };
  const std::vector<double> of_lists = of_backwards(lists), of_hooks = of_backwards(hooks),
                            of_both = of_backwards(both);
  REQUIRE(of_lists.size() == of_both.size());
  REQUIRE(of_hooks.size() == of_both.size());
  double listed = 0.0;
  for (std::size_t s = 0; s < of_both.size(); ++s) {
    listed += of_lists[s];
    CHECK(of_both[s] == doctest::Approx(of_lists[s] + of_hooks[s]));
  }
  CHECK(listed > 0.0);
}

TEST_CASE("engines that copy reduced gradients do so twice before an all-reduce, and once behind") {
  const Engine engine{.name = "other", .scatters_gradients = false, .copies_reduced = true, .reduces_half = true};
  for (const DataType precision : {DataType::fp32, DataType::bf16})
    for (const int zero : {0, 1, 2}) {
      CAPTURE(zero);
      const Program program = small_step(engine, precision, zero, 0);
      std::vector<const Instruction*> around;
      for (const Step& step : steps_of(program))
        if (step.call.starts_with("data.") && step.call.ends_with(".gradients")) around.push_back(step.instruction);
      const auto is_copy = [](const Instruction* one) {
        return one->kind == InstructionKind::kernel && one->op == OpKind::copy;
      };
      if (zero == 2) {
        CHECK(std::ranges::none_of(around, is_copy));
        continue;
      }
      REQUIRE(around.size() == 4 * program.buckets.size());
      for (std::size_t i = 0; i < around.size(); i += 4) {
        const std::int64_t sent = bytes_of(*around[i + 2]);
        CHECK(around[i + 2]->kind == InstructionKind::all_reduce_sum);
        for (const std::size_t copy : {i, i + 1, i + 3}) {
          CHECK(is_copy(around[copy]));
          CHECK(around[copy]->shape.rows * size_of(around[copy]->type) == sent);
          CHECK(around[copy]->stream == Stream::dp);
        }
      }
    }
}

TEST_CASE("gradients are copied to buckets and back where they are whole, and the buckets stay") {
  const Engine engine{.name = "other", .half_gradients = true, .copies_to_buckets = true};
  for (const DataType precision : {DataType::fp32, DataType::bf16})
    for (const int zero : {0, 1, 2}) {
      CAPTURE(zero);
      const Program program = small_step(engine, precision, zero, 0);
      std::int64_t buckets = 0, elements = 0;
      for (const Buffer& buffer : program.buffers)
        if (buffer.name.ends_with("as they are reduced")) buckets += buffer.bytes;
      for (const Bucket& bucket : program.buckets) elements += bucket.elements;
      std::vector<const Instruction*> around;
      for (const Step& step : steps_of(program))
        if (step.call.starts_with("data.") && step.call.ends_with(".gradients")) around.push_back(step.instruction);
      const auto is_copy = [](const Instruction* one) {
        return one->kind == InstructionKind::kernel && one->op == OpKind::copy;
      };
      if (zero > 0) {
        CHECK(buckets == 0);
        CHECK(std::ranges::none_of(around, is_copy));
        continue;
      }
      CHECK(buckets == elements * size_of(precision));
      REQUIRE(around.size() == 3 * program.buckets.size());
      for (std::size_t i = 0; i < around.size(); i += 3) {
        CHECK(around[i + 1]->kind == InstructionKind::all_reduce_sum);
        CHECK(bytes_of(*around[i + 1]) == around[i]->shape.rows * 4);  // sums are in fp32
        for (const std::size_t copy : {i, i + 2}) {
          CHECK(is_copy(around[copy]));
          CHECK(around[copy]->type == precision);
        }
      }
    }
}

TEST_CASE("in fp8 the products of layers are cast as the engine casts them, and no others") {
  for (const bool once : {false, true}) {
    // Kernels that may be fused, are where that takes no more scratch.
    const Engine engine{.name = "other", .fused_norm = false, .fused_activation = false, .fp8_casts_once = once};
    const Program bf16 = small_step(engine, DataType::bf16, 1, 1);
    const Program fp8 = small_step(engine, DataType::fp8, 1, 1);
    int products = 0, of_vocabulary = 0;
    std::vector<Step> steps = steps_of(fp8);
    const std::vector<Step> without = steps_of(bf16);
    // Forward, each product of a layer has a cast before it.
    const auto is_forward_product = [](const Step& step) {
      const OpKind op = step.instruction->op;
      return (op == OpKind::linear || op == OpKind::linear_gelu) && multiplies_in_fp8(step.instruction->shape);
    };
    const auto is_cast = [](const Step& step) { return step.instruction->op == OpKind::quantize; };
    CHECK(std::ranges::count_if(steps, is_cast) == (once ? std::ranges::count_if(steps, is_forward_product) : 0));
    std::erase_if(steps, is_cast);
    REQUIRE(steps.size() == without.size());
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const Instruction& instruction = *steps[i].instruction;
      CHECK(instruction.type == without[i].instruction->type);
      const bool reads_cast = once && is_forward_product(steps[i]);
      const std::int64_t cast = reads_cast ? instruction.shape.rows * instruction.shape.inner : 0;
      CHECK(bytes_of(instruction) == bytes_of(*without[i].instruction) - cast);
      if (instruction.kind != InstructionKind::kernel) continue;
      if (row_of(instruction.op).cost != CostClass::product) {
        CHECK(instruction.shape == without[i].instruction->shape);
        continue;
      }
      const bool is_head = steps[i].call.find("head") != std::string::npos;
      (is_head ? of_vocabulary : products) += 1;
      CAPTURE(steps[i].call);
      CHECK(instruction.shape.fp8 == (is_head ? Fp8Casts::none : once ? Fp8Casts::once : Fp8Casts::each_product));
      CHECK(multiplies_in_fp8(instruction.shape) == !is_head);
    }
    CHECK(products > 0);
    CHECK(of_vocabulary > 0);
    // All that is sent is bf16's, and what is kept but for inputs that are cast once; a product's
    // workspace has the factors in 8 bits that it casts itself.
    CHECK(fp8.communication == bf16.communication);
    CHECK(fp8.memory.parameters == bf16.memory.parameters);
    CHECK(fp8.memory.gradients == bf16.memory.gradients);
    CHECK(fp8.memory.optimizer == bf16.memory.optimizer);
    if (!once) CHECK(fp8.memory.peak() > bf16.memory.peak());
  }
}

}  // namespace parplan
