#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "planner/base/units.h"
#include "planner/graph/tensor.h"

namespace parplan {

// Every kind of computation a rank can be told to do, forward and backward alike. One row each in the table
// of op.cpp; the kernels of a backend are found by the same name.
enum class OpKind {
  // forward
  embedding,            // tokens, table -> rows of the table
  add_position,         // x, position table -> x + table[position]
  layer_norm,           // x, gamma, beta -> y, mean, rstd
  rms_norm,             // x, gamma -> y, rstd
  linear,               // x, weight [out, in], (bias) -> y
  rotary,               // fused qkv -> fused qkv with query and key rotated (in place)
  attention,            // fused qkv -> output, log-sum-exp per row and head; causal
  activation,           // x -> gelu / relu of x
  silu_gate,            // gate, up -> silu(gate) * up
  add,                  // a, (b), (bias) -> a + b + bias
  cross_entropy_max,    // logits -> maximum per token (of this shard of the vocabulary)
  cross_entropy_sums,   // logits, targets, maximum -> per token: sum of exp(x - max), target's x - max
  cross_entropy_loss,   // logits, targets, maximum, sums -> loss += sum over tokens of log(sum) - target
  // forward, two ops in one kernel (planner/graph/fusion.cpp); no family writes them
  add_layer_norm,       // a, (b), (bias), gamma, beta -> sum, y, mean, rstd
  add_rms_norm,         // a, (b), (bias), gamma -> sum, y, rstd
  linear_gelu,          // x, weight, (bias) -> before, y = gelu_tanh(before); one storage for both: y alone
  // backward
  embedding_gradient,        // dy, tokens -> dtable +=
  add_position_gradient,     // dy -> dtable +=
  layer_norm_gradient,       // dy, x, gamma, mean, rstd -> dx (+=), dgamma +=, dbeta +=
  rms_norm_gradient,         // dy, x, gamma, rstd -> dx (+=), dgamma +=
  linear_input_gradient,     // dy, weight -> dx (+=)
  linear_weight_gradient,    // dy, x -> dweight +=, (dbias +=)
  rotary_gradient,           // dy -> dx (in place)
  attention_gradient,        // dy, qkv, y, log-sum-exp -> dqkv
  activation_gradient,       // dy, x -> dx
  silu_gate_gradient,        // dy, gate, up -> dgate, dup
  bias_gradient,             // dy -> dbias +=   (of `add`)
  cross_entropy_gradient,    // logits, targets, maximum, sums, (loss scale) -> dlogits (in place), times `scale`
  linear_input_gradient_gelu,  // dy, weight, before -> dbefore: both linear's input gradient and gelu_tanh's
  // around the step
  accumulate,           // x -> y +=
  fill_zero,            // -> y = 0
  copy,                 // x -> y = x
  load_tokens,          // the data loader's tokens of this micro-batch
  load_targets,         // the data loader's targets of this micro-batch
  sum_squares,          // x -> y += sum of x^2   (gradient norm)
  adamw,                // gradient, (norm), (loss scale) -> parameter, m, v, (master)
  sgd,                  // gradient, (norm), (loss scale) -> parameter, (momentum), (master)
  update_loss_scale,    // norm -> loss scale: halved after an overflow, doubled after many steps without one
  count_
};

enum class ActivationKind { gelu_tanh, gelu_erf, relu };

// The local (per-rank, per micro-batch) size of one op. Which fields an op reads stands in its row; the
// others keep their defaults, so that equal work compares equal.
struct OpShape {
  std::int64_t rows = 0;       // tokens: local sequence x micro-batch; or elements for flat ops
  std::int64_t columns = 0;    // output features held by this rank
  std::int64_t inner = 0;      // linear: input features held by this rank
  std::int64_t sequence = 0;   // attention, rotary, add_position: local positions
  std::int64_t batch = 0;      // attention, rotary, add_position: samples of the micro-batch
  std::int64_t heads = 0;      // attention, rotary: query heads held by this rank
  std::int64_t kv_heads = 0;   // attention, rotary: key/value heads held by this rank
  std::int64_t head_dim = 0;
  std::int64_t begin = 0;      // embedding, cross-entropy: first vocabulary row; add_position, rotary: first position
  std::int64_t valid = 0;      // vocabulary rows of this shard that are not padding
  ActivationKind activation = ActivationKind::gelu_tanh;
  bool bias = false;           // the optional bias operand is present
  bool second = false;         // `add`: operand b is present; sgd: momentum is
  bool accumulate = false;     // dx += instead of dx =
  bool weight_decay = false;   // adamw, sgd
  bool norm = false;           // adamw, sgd: the norm operand is present (one fp32: the global sum of squares)
  bool master = false;         // adamw, sgd: the fp32 master copy is present
  bool scaled = false;         // cross_entropy_gradient, adamw, sgd: the loss scale is present (LossScale)
  double epsilon = 0.0;        // norms
  double theta = 0.0;          // rotary base
  double scale = 0.0;          // cross_entropy_gradient: 1 / tokens of the global batch
  bool operator==(const OpShape&) const = default;
};

// What an operand of a kernel stands for. Indices count among the forward op's inputs, parameters, outputs.
enum class OperandSource { input, parameter, output, output_gradient, input_gradient, parameter_gradient, loss_scale, workspace };
enum class Access { read, write, update };

// What the loss-scale operand holds in device memory: gradients of fp16 activations are computed times `scale`, so that
// small ones do not vanish (Micikevicius et al., Mixed Precision Training, ICLR 2018); the optimizer divides by it and
// skips a step whose sum of squares is not finite.
struct LossScale {
  float scale = 65536.0f;
  float good_steps = 0.0f;     // since the scale last changed
  float skipped_steps = 0.0f;  // they do not count for bias correction
  float unused = 0.0f;
};
// As PyTorch's GradScaler: times 2 after 2000 good steps, times 1/2 after an overflow.
inline constexpr float loss_scale_growth_interval = 2000.0f;

using ShapeFlag = bool OpShape::*;

struct OperandRow {
  OperandSource source{};
  int index = 0;
  Access access{};
  ShapeFlag optional = nullptr;  // present only where this flag of the shape is set
};
// Whether a kernel of this shape has the operand; `workspace`: whether the backend's row has one.
bool is_present(const OperandRow& operand, const OpShape& shape, bool workspace);

// Arithmetic and memory traffic of one op on one rank: each operand is read once, written once, or both when it is
// updated. Of an embedding table only the rows that are looked up count.
struct OpWork {
  Flops flops;
  Bytes bytes;
  bool matrix = false;  // runs on matrix units (GEMM, attention)
};

// How placements pass through an op; `redistribute` is derived from it (planner/program/placement.h).
enum class ShardingRule {
  tokenwise,    // any shard of token dims or features passes from input to output; Partial is resolved first
  contraction,  // linear: weight Shard(out) -> y Shard(out); weight Shard(in) -> y Partial(sum)
  lookup,       // embedding: table Shard(vocabulary) -> y Partial(sum)
  heads,        // attention and rotary: Shard(kv_groups) passes; the sequence must be whole
  vocabulary_max,   // logits Shard(vocabulary) -> Partial(max)
  vocabulary_sum,   // logits Shard(vocabulary) -> Partial(sum)
  vocabulary_loss,  // needs whole maxima and sums; every rank computes the same loss
  none,         // backward and around-the-step ops
};

struct OpRow {
  OpKind kind{};
  std::string_view name;
  ShardingRule sharding = ShardingRule::none;
  // In the order in which the kernel receives them.
  std::span<const OperandRow> operands = {};
  // Backward ops in the order in which they run. What they read of the forward op's inputs and outputs is what
  // the op saves.
  std::span<const OpKind> gradients = {};
  // `input_gradient(i)` is `output_gradient(0)` itself (add, add_position).
  bool passes_gradient = false;
  // Backward ops: `input_gradient(0)` can be added to (OpShape::accumulate) instead of written.
  bool accumulates = false;
  // Operand positions {read, written} that may share storage when the read one is not needed again; -1 none.
  int in_place_read = -1;
  int in_place_write = -1;
  OpWork (*work)(const OpShape&, DataType) = nullptr;
  // Bytes of the workspace operand on each backend (null or 0: none). CPU: packing and attention scratch, fp32. CUDA: cuBLASLt's cap
  // and partial sums (planner/graph/cuda_workspace.h).
  Bytes (*cpu_workspace)(const OpShape&) = nullptr;
  Bytes (*cuda_workspace)(const OpShape&) = nullptr;
};

// How many operands a kernel of this shape receives.
int operand_count(const OpRow& row, const OpShape& shape, bool workspace);

std::span<const OpRow> op_rows();
const OpRow& row_of(OpKind kind);
inline const char* name(OpKind kind) { return row_of(kind).name.data(); }

}  // namespace parplan
