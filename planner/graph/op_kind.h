#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/units.h"
#include "planner/graph/context_chunks.h"
#include "planner/graph/tensor.h"

namespace parplan {

struct LocalOp;  // planner/graph/local_op.h

// Every kind of computation that a rank can execute, forward and backward alike. Each has one row
// in the file of its family (planner/graph/ops/); the kernels of a backend have the same names.
enum class OpKind {
  // forward
  embedding,     // tokens, table -> rows of the table
  normalize_pixels,  // colours from 0 to 255 -> numbers from -1 to 1
  add_position,  // x, position table -> x + table[position]
  layer_norm,    // x, gamma, (beta) -> y, mean, rstd
  rms_norm,      // x, gamma -> y, rstd
  // Fused qkv, gamma of queries, gamma of keys -> norm of each query and key head, rstd per row and
  // head.
  head_norm,
  query_key_squares,  // fused qkv -> per row: sum of squares of all queries, of all keys (of this rank's heads)
  // Fused qkv, squares, gamma of queries, gamma of keys -> RMS norm of all queries and of all keys
  // of a row.
  query_key_norm,
  linear,  // x, weight [out, in], (bias) -> y
  rotary,  // fused qkv -> fused qkv with query and key rotated (in place)
  // Fused qkv, (keys and values of all ranks, or of one around a ring) -> output, log-sum-exp per
  // row and head; causal or bidirectional, perhaps windowed, capped, with ALiBi.
  attention,
  // Queries, packed keys and values, (rows of a table of relative position biases) -> output,
  // log-sum-exp per row and head; causal or bidirectional. There may be more keys than queries, or
  // fewer.
  packed_attention,
  activation,          // x -> gelu / relu / silu of x
  gate,                // gate, up -> activation(gate) * up
  scale,               // x -> x * factor
  softcap,             // x -> softcap * tanh(x / softcap)
  add,                 // a, (b), (bias) -> a + b + bias
  take_rows,           // x -> so many positions of x, from `begin` on
  put_rows,            // x, y -> x with y in the place of the positions from `begin` on
  append_rows,         // x, table -> x with the table's elements, for each sample, in rows behind it
  cross_entropy_max,   // logits -> maximum per token (of this shard of the vocabulary)
  cross_entropy_sums,  // logits, targets, maximum -> per token: sum of exp(x - max), target's x - max
  // Logits, targets, maximum, sums -> loss += sum over tokens of log(sum) - target. Tokens whose
  // target is negative have no loss and no gradient.
  cross_entropy_loss,
  // forward, two ops in one kernel (planner/program/fusion.cpp); no family writes them
  add_layer_norm,  // a, (b), (bias), gamma, (beta) -> sum, y, mean, rstd
  add_rms_norm,    // a, (b), (bias), gamma -> sum, y, rstd
  linear_gelu,     // x, weight, (bias) -> before, y = gelu_tanh(before); one storage for both: y alone
  // forward, of engines other than parplan's runtime (is_foreign); no family writes them
  // (planner/graph/engine_graph.h)
  attention_scores,   // fused qkv -> scores of every query and key, [sequence, batch, heads x keys]
  attention_softmax,  // scores -> causal softmax over keys
  attention_dropout,  // x -> x without dropped elements, a byte of mask for each
  attention_values,   // probabilities, fused qkv -> output
  dropout,            // x -> x without dropped elements, a byte of mask for each
  multiply,           // a, b -> a * b
  // Fused qkv -> fused qkv, with the keys and values of the first one, which its queries keep.
  copy_keys,
  repeat_keys,  // fused qkv -> fused qkv with a key and a value for each query head
  quantize,           // x -> x in fp8; the gradient of the one is that of the other
  widen,              // x -> x in fp32
  // backward
  embedding_gradient,          // dy, tokens -> dtable +=
  add_position_gradient,       // dy -> dtable +=
  layer_norm_gradient,         // dy, x, gamma, mean, rstd -> dx (+=), (dgamma +=), (dbeta +=)
  rms_norm_gradient,           // dy, x, gamma, rstd -> dx (+=), (dgamma +=)
  head_norm_gradient,          // dy, qkv, gammas, rstd -> dqkv, (dgammas +=)
  query_key_squares_gradient,  // dsquares, qkv -> dqkv (+=)
  query_key_norm_gradient,     // dy, qkv, squares, gammas -> dqkv, dsquares, (dgammas +=)
  linear_input_gradient,       // dy, weight -> dx (+=)
  linear_weight_gradient,      // dy, x -> dweight +=, (dbias +=)
  rotary_gradient,             // dy -> dx (in place)
  attention_gradient,          // dy, qkv, (all keys and values), y, log-sum-exp -> dqkv, (theirs)
  // dy, queries, keys and values, (biases), y, log-sum-exp -> gradients of the inputs
  packed_attention_gradient,
  activation_gradient,         // dy, x -> dx
  gate_gradient,               // dy, gate, up -> dgate, dup
  scale_gradient,              // dy -> dx
  softcap_gradient,            // dy, y -> dx
  bias_gradient,               // dy -> dbias +=   (of `add`)
  take_rows_gradient,          // dy -> dx (+=): the rows that were taken
  put_rows_gradient,           // dz -> dx: dz but for the rows of y, dy: these (the first in place)
  append_rows_gradient,        // dy -> dx, dtable +=
  cross_entropy_gradient,      // logits, targets, maximum, sums, (loss scale) -> dlogits (in place), times `scale`
  linear_input_gradient_gelu,  // dy, weight, before -> dbefore: both linear's input gradient and gelu_tanh's
  attention_probabilities_gradient,  // dy, qkv -> dprobabilities
  attention_values_gradient,         // dy, probabilities -> values of dqkv
  attention_softmax_gradient,        // dy, probabilities -> dscores (in place)
  attention_scores_gradient,         // dscores, qkv -> queries and keys of dqkv (+=)
  dropout_gradient,                  // dy, mask -> dx
  multiply_gradient,                 // dy, a, b -> da, db
  copy_keys_gradient,                // dy, the keys and values that were kept -> dx
  repeat_keys_gradient,              // dy -> dx
  widen_gradient,                    // dy in fp32 -> dx
  // around the step
  // Attention of another engine in steps: an output so far and a step's, each with its log-sum-exp
  // per row and head -> those of both, in fp32 while more steps follow (`second`), as the output so
  // far is behind the first two (`accumulate`).
  merge_attention,
  // In fp8, where scales follow from magnitudes of earlier casts (Engine::scale_history): the
  // largest magnitudes of all products' tensors side by side -> y; and y -> histories of `columns`
  // of each, and scales, which are no operands.
  join_magnitudes,
  update_scales,
  accumulate,         // x -> y +=
  fill_zero,          // -> y = 0
  copy,               // x -> y = x
  transpose_blocks,   // x [rows, inner, columns] -> y [inner, rows, columns]
  take_columns,       // x [rows, inner] -> y [rows, columns]: those from `begin` on
  put_columns,        // x [rows, columns] -> y [rows, inner]: the same ones
  load_tokens,        // the data loader's tokens of this micro-batch, or the colours of its images
  load_targets,       // the data loader's targets of this micro-batch
  sum_squares,        // x -> y += sum of x^2   (gradient norm)
  adamw,              // gradient, (norm), (loss scale) -> parameter, m, v, (master)
  adamw_8bit,         // gradient, (norm), (loss scale) -> parameter, m, v, scales of m and v, (master)
  sgd,                // gradient, (norm), (loss scale) -> parameter, (momentum), (master)
  muon_momentum,      // gradient, (norm), (loss scale) -> momentum; in the gradient's place, where to go
  normalize_matrix,   // x, sum of squares -> x / its Frobenius norm
  // A = X X^T, A A -> in the place of the second, the polynomial p(A) with which X is multiplied
  // next (planner/graph/newton_schulz.h).
  newton_schulz_polynomial,
  muon,               // direction, (norm), (loss scale) -> parameter, (master)
  update_loss_scale,  // norm -> loss scale: halved after an overflow, doubled after many steps without one
  count_
};

// Whether only engines other than parplan's runtime have it: no backend has a kernel, and `run`
// refuses plans for such engines.
constexpr bool is_foreign(OpKind kind) {
  return (kind >= OpKind::attention_scores && kind <= OpKind::widen) ||
         (kind >= OpKind::attention_probabilities_gradient && kind <= OpKind::update_scales);
}

enum class ActivationKind { gelu_tanh, gelu_erf, relu, silu };

// Products of layers in fp8: their factors are cast to numbers of 8 bits, e4m3 and for gradients
// e5m2 (Micikevicius et al. 2022, FP8 Formats for Deep Learning, arXiv:2209.05433), each tensor
// times a scale of its own. Sums and results are what they are without.
enum class Fp8Casts : std::uint8_t {
  none,          // not in fp8
  each_product,  // each product finds the scales of its two factors, and casts them (torchao's
                 // Float8Linear with dynamic scaling does; so does parplan's own runtime)
  but_weights,   // likewise, but for weights: a slice of the same product has cast it before, or it was
                 // cast as it was gathered (torchao's fp8 all-gather)
  once,          // an input and a gradient are cast as they are first read, for both of their products,
                 // and weights once a step (NVIDIA's TransformerEngine)
  once_transposed,  // likewise, and a weight in 8 bits is transposed for each gradient of an input
                    // (TransformerEngine 1.8 to 1.14, where parameters are in fp8)
};
constexpr bool casts_once(Fp8Casts casts) {
  return casts == Fp8Casts::once || casts == Fp8Casts::once_transposed;
}

// The local (per-rank, per micro-batch) size of one op. An op's row says which fields it reads; the
// others keep their defaults, so that equal work compares equal.
struct OpShape {
  std::int64_t rows = 0;       // tokens: local sequence x micro-batch; or elements for flat ops
  std::int64_t columns = 0;    // output features held by this rank
  // linear: input features held by this rank; transpose_blocks: blocks of a row; take_columns,
  // put_columns: all columns. load_tokens: numbers of a position, where there are several.
  // append_rows: elements of the table. packed_attention: the width of the rows that hold it.
  std::int64_t inner = 0;
  // linear and its gradients: of the columns, those of keys, a product of their own, and as many
  // of values, another; 0: all are one product.
  std::int64_t key_columns = 0;
  // take_rows, put_rows, append_rows: positions that are moved; the next field, too.
  // Attention, rotary and the norms of queries and keys; add_position reads the first two.
  std::int64_t sequence = 0;   // local positions
  std::int64_t batch = 0;      // samples of the micro-batch
  std::int64_t heads = 0;      // query heads held by this rank
  std::int64_t kv_heads = 0;   // key/value heads held by this rank
  std::int64_t head_dim = 0;
  std::int64_t rotary_dim = 0;  // rotary: how many features of a head are rotated, from the first on; 0: all
  std::int64_t window = 0;      // attention: a query sees the last `window` keys, its own among them; 0: all before it
  std::int64_t all_heads = 0;   // attention with ALiBi, query_key_norm: query heads of all ranks
  std::int64_t first_head = 0;  // attention with ALiBi: the first of this rank's query heads among all
  std::int64_t keys = 0;        // packed_attention: positions of keys, all of them on every rank; 0: another kind
  // packed_attention with relative position biases (relative_position.h): rows of the table, and
  // the distance from which on the last one serves.
  std::int64_t buckets = 0;
  std::int64_t most_distance = 0;
  // Embedding and cross-entropy: the first vocabulary row. load_tokens, load_targets, add_position
  // and rotary: the first position. take_columns, put_columns: the first column. take_rows,
  // put_rows, append_rows: the first position that is moved.
  std::int64_t begin = 0;
  std::int64_t valid = 0;       // vocabulary rows of this shard that are not padding
  int metrics = 0;              // cross_entropy_loss: metrics that compute it once more (Engine::loss_metrics)
  ActivationKind activation = ActivationKind::gelu_tanh;
  // load_tokens, load_targets, add_position, rotary, attention: the positions of rows, from `begin`
  // on.
  ContextChunks chunks = {};
  // Attention: the keys and values of all ranks of the chunks, or of the one that the chunks name,
  // are an operand.
  bool gathered = false;
  bool interleaved = false;   // rotary: pairs are elements 2i and 2i + 1 (GPT-J), not i and i + rotary_dim / 2
  // Attention: every query meets all keys, also those behind it (BERT); neither window nor ALiBi.
  bool bidirectional = false;
  // head_norm: LayerNorm, without a beta and with a gamma for each head (Command R+); else RMS norm
  // with one gamma for all.
  bool centered = false;
  bool bias = false;          // the optional bias operand is present
  bool without_beta = false;  // layer_norm, add_layer_norm: beta is no operand (Command R)
  // `add`: operand b is present; sgd: momentum is; packed_attention: the table; copy_keys: what is
  // kept. merge_attention: more steps follow. cross_entropy_sums: maxima are subtracted in a copy.
  // cross_entropy_loss and its gradient: that of the log-softmax is filled (fills_loss_gradient).
  bool second = false;
  // dx += instead of dx =; attention around a ring: with what the steps before it have left;
  // merge_attention: more than two steps are merged.
  bool accumulate = false;
  // The next three: adamw, adamw_8bit, sgd, muon; weight_decay and master not in muon_momentum.
  bool weight_decay = false;
  bool norm = false;          // the norm operand is present (one fp32: the global sum of squares)
  bool master = false;        // the fp32 master copy is present
  bool scaled = false;        // they and cross_entropy_gradient: the loss scale is present (LossScale)
  // cross_entropy_*, attention_softmax, activation, rotary, adamw: each step is a kernel on all
  // elements. layer_norm, rms_norm, linear with key_columns: a kernel behind the gradient adds it.
  bool stepwise = false;
  // attention_softmax: no one kernel serves it (SoftmaxKernel), and each step is one, in fp32.
  // layer_norm, rms_norm and linear: gradients of the norm's parameters, or of the bias, have a
  // kernel of their own. cross_entropy_*: the logits are a part of the vocabulary's.
  bool apart = false;
  // rms_norm and its gradient: each step is a kernel, in fp32. It has a result more, what it
  // scales, which the gradient reads; `widened` another, x in fp32, which it reads instead of x.
  bool composed = false;
  bool widened = false;
  bool drops = false;         // attention: drops probabilities, in its kernel
  bool in_sum = false;        // dropout: a part of the kernel of the sum behind it
  // Weight gradients of products: written in half precision, for a kernel behind it to add, or with
  // `accumulate` added to the sum in it; else added to the sum in fp32. accumulate: what is added
  // to a sum in fp32 is in half precision. attention_softmax: scores are, where its steps are not.
  bool in_half = false;
  Fp8Casts fp8 = Fp8Casts::none;  // products, where their sizes allow it (multiplies_in_fp8)
  // Gradients of norms: the gradient of the first, the second parameter is no operand.
  bool freezes_first = false;
  bool freezes_second = false;
  double epsilon = 0.0;       // norms
  double theta = 0.0;         // rotary base
  double scale = 0.0;         // cross_entropy_gradient: 1 / tokens of the global batch
  double factor = 0.0;        // scale; muon: of the direction; rotary: divisor of positions, 0: none
  double score_scale = 0.0;   // attention: multiplier of query times key; 0: 1 / sqrt(head_dim)
  double softcap = 0.0;       // softcap; attention: cap of the scores (Gemma 2); 0: none
  // Attention: multiplier of the head's slope times (key's - query's position), added to the score;
  // 0: none.
  double alibi = 0.0;
  // The position of local row `row`.
  constexpr std::int64_t position(std::int64_t row) const { return begin + chunks.position(row); }
  bool operator==(const OpShape&) const = default;
};

// Whether a product of a layer's weight, or a gradient of one, is in fp8. cuBLASLt has fp8 for
// depths and rows of memory that are multiples of 16 bytes (its documentation, "cublasLtMatmul()":
// dimensions of FP8 kernels; PyTorch's _scaled_mm asks for the same); other products stay in the
// type of their factors. Tokens are the depth of a weight's gradient alone, whose casts are padded.
inline constexpr std::int64_t fp8_multiple = 16;
constexpr bool multiplies_in_fp8(const OpShape& shape) {
  return shape.fp8 != Fp8Casts::none && shape.columns % fp8_multiple == 0 && shape.inner % fp8_multiple == 0;
}

// The slope of query head `head` of `all_heads` in attention with linear biases (Press et al. 2022,
// ALiBi, section 3): powers of 2^(-8/n) where the number n of heads is a power of two; otherwise
// those of the next smaller power of two and every other one of the next larger, as in the authors'
// code and in BLOOM's.
double alibi_slope(std::int64_t head, std::int64_t all_heads);

// What an operand of a kernel stands for. Indices count among the forward op's inputs, parameters,
// outputs. No row has a `contribution`: it is the gradient of an input by one of its uses, where
// the kernel cannot add it to those of the others (graph/backward.h).
enum class OperandSource {
  input,
  parameter,
  output,
  output_gradient,
  input_gradient,
  parameter_gradient,
  loss_scale,
  // The keys and values of all ranks of the context axis, or of one. Only lowering knows of them:
  // no operand of a TrainingOp stands for them.
  gathered,
  gathered_gradient,
  workspace,
  contribution
};
enum class Access { read, write, update };

// What the loss-scale operand holds in device memory. Gradients of fp16 activations are computed
// times `scale`, so that small ones do not vanish (Micikevicius et al., Mixed Precision Training,
// ICLR 2018); the optimizer divides by it and skips a step whose sum of squares is not finite.
struct LossScale {
  float scale = 65536.0f;
  float good_steps = 0.0f;     // since the scale last changed
  float skipped_steps = 0.0f;  // they do not count for bias correction
  float unused = 0.0f;
};
// As in PyTorch's GradScaler: times 2 after 2000 good steps, times 1/2 after an overflow.
inline constexpr float loss_scale_growth_interval = 2000.0f;

using ShapeFlag = bool OpShape::*;
using ShapeSize = std::int64_t OpShape::*;

// The contents of an operand's elements.
enum class OperandContent {
  values,        // activations and parameters, in the kernel's type
  fp32,          // statistics, gradients of parameters, optimizer state
  non_negative,  // fp32 that is never below 0: second moments
  ids,           // int32 rows of the vocabulary
  mask,          // a byte for each
  codes,         // a byte for each: of quantized state (planner/graph/dynamic_quantization.h)
  block_scales,  // fp32: one for each of its blocks
};
DataType type_of(OperandContent content, DataType kernel_type);

struct OperandSize {
  // How many of the operand's elements the kernel touches. A kernel may touch fewer elements of a
  // table of embeddings or positions than the operand has. Null: a workspace, whose size depends on
  // the backend.
  std::int64_t (*elements)(const OpShape&) = nullptr;
  OperandContent content = OperandContent::values;
};

struct OperandRow {
  OperandSource source{};
  int index = 0;
  Access access{};
  OperandSize size = {};
  ShapeFlag optional = nullptr;  // present only where this flag of the shape is set
  ShapeFlag omitted = nullptr;   // absent where this flag of the shape is set
};
// Whether a kernel of this shape has the operand. `workspace`: whether the backend's row has one.
bool is_present(const OperandRow& operand, const OpShape& shape, bool workspace);

// Arithmetic and memory traffic of one op on one rank: each operand is read once, written once, or
// both when it is updated. Only the rows of an embedding table that are looked up count.
struct OpWork {
  Flops flops;
  Bytes bytes;
  bool matrix = false;  // runs on matrix units (GEMM, attention)
};

// Elements of a product's factors that are cast to fp8 before it; of a weight that is cast already,
// and transposed before it, on the right.
struct CastElements {
  std::int64_t left = 0;
  std::int64_t right = 0;
};

// The width (size of the last dim) that the attributes of a forward op prescribe for an operand.
struct OperandWidth {
  OperandSource source{};
  int index = 0;
  std::int64_t width = 0;
};

// A matrix product as C[m, n] = A[m, k] B[k, n].
struct Product {
  std::int64_t m = 1;
  std::int64_t n = 1;
  std::int64_t k = 1;
  Bytes result;  // written, or read and written where the op adds to it
  bool operator==(const Product&) const = default;
};

// The products of a forward op by the convention of model FLOPs (model_flops_per_sample): each of
// `pairs` (a token and a weight, a query and a key) costs `multiply_adds`.
struct ModelProducts {
  double pairs = 0.0;
  double multiply_adds = 0.0;
};

// What determines the time of a kernel (planner/cost/kernel_time.h).
enum class CostClass {
  moving,     // bytes or arithmetic on vector units, whichever takes longer
  streaming,  // the same, but so simple that its bytes move at the rate of the device's memory
  product,    // tiles of a matrix product
  attention,  // blocks of queries and keys
  loading,    // the data loader's
};

// The sizes with which `parplan measure` times a kind (runtime/measure_kernels.cpp).
enum class MeasuredOver {
  nothing,      // not measured: bookkeeping, or a rare kind that costs as much as the kind it is `made_of`
  products,     // tokens times features
  attention,    // sequences, batches and heads
  elementwise,  // tokens times features of a layer
  vocabulary,   // tokens times vocabulary
  heads,        // sequences, with heads of one size
  flat,         // elements
  flat_fp32,    // elements, in fp32 only
};

// The fields of OpShape by which measured kernels differ.
inline constexpr ShapeSize matrix_sizes[] = {&OpShape::rows, &OpShape::columns};
inline constexpr ShapeSize product_sizes[] = {&OpShape::rows, &OpShape::columns, &OpShape::inner};
inline constexpr ShapeSize head_sizes[] = {&OpShape::sequence, &OpShape::batch, &OpShape::heads, &OpShape::kv_heads,
                                           &OpShape::head_dim};
inline constexpr ShapeSize flat_sizes[] = {&OpShape::rows};

// How placements pass through an op; `redistribute` is derived from it (planner/plan/placement.h).
enum class ShardingRule {
  tokenwise,    // any shard of token dims or features passes from input to output; Partial is resolved first
  contraction,  // linear: weight Shard(out) -> y Shard(out); weight Shard(in) -> y Partial(sum)
  lookup,       // embedding: table Shard(vocabulary) -> y Partial(sum)
  // Attention, rotary, norms of queries and keys: Shard(kv_groups) passes; the sequence must be
  // whole, but over an axis that gathers keys and values.
  heads,
  rows,             // moves between rows of the sequence, which must be whole
  head_sums,        // query_key_squares: Shard(kv_groups) -> Partial(sum); the same holds for the sequence
  vocabulary_max,   // logits Shard(vocabulary) -> Partial(max)
  vocabulary_sum,   // logits Shard(vocabulary) -> Partial(sum)
  vocabulary_loss,  // needs whole maxima and sums; every rank computes the same loss
  none,             // backward and around-the-step ops
};

// Positions of a read and a written operand that may share storage: the kernel reads an element
// before it writes it, and needs each element of the one for the same element of the other only.
struct InPlace {
  int read = 0;
  int write = 0;
};

// All that the planner knows about an op kind. Outside the rows, a kind is named only where it is
// chosen: families, fusion, lowering, kernel tables (a house test has the list).
enum class OpModule { none, norm, core_attention, activation };

struct OpRow {
  OpKind kind{};
  std::string_view name;

  // Forward ops: how they are sharded, and what they require.
  ShardingRule sharding = ShardingRule::none;
  // Fills in the sizes that one rank computes (planner/graph/local_op.h); `rows` is already set.
  void (*localize)(const LocalOp&, OpShape&) = nullptr;
  // Widths that follow from the attributes, in addition to those that the sharding rule fixes.
  std::vector<OperandWidth> (*widths)(const OpShape& attributes) = nullptr;
  // Describes the fault of the attributes; empty where there is none.
  std::string (*fault)(const OpShape& attributes) = nullptr;

  // In the order in which the kernel receives them.
  std::span<const OperandRow> operands = {};
  // Backward ops in the order in which they run. The inputs and outputs of the forward op that they
  // read are what the op saves.
  std::span<const OpKind> gradients = {};
  // `input_gradient(i)` is `output_gradient(0)` itself (add, add_position).
  bool passes_gradient = false;
  // Backward ops: `input_gradient(0)` can be added to (OpShape::accumulate) instead of written.
  bool accumulates = false;
  // Forward ops: the part of a layer whose results selective recompute keeps or computes again
  // together.
  OpModule module = OpModule::none;
  // A product that adds to fp32 gradients of weights, and the kind that stands for it where the
  // weight is frozen and its bias is not.
  bool of_weights = false;
  std::optional<OpKind> of_bias_alone = {};
  // Products of each head alone: rows of their operands begin head_dim elements apart.
  bool by_head = false;
  // The operands that may share storage if the read one is not needed again.
  std::optional<InPlace> in_place = {};

  OpWork (*work)(const OpShape&, DataType) = nullptr;
  // How many elements a second one multiprocessor takes at most of a flat op that neither memory
  // nor vector units limit; 0: they do.
  double elements_of_multiprocessor = 0.0;
  // How many kernels it is, each of which the host submits; null: one.
  int (*launches)(const OpShape&) = nullptr;
  bool listed = false;  // a fused optimizer takes tensors in lists (Engine::lists_updates)
  CostClass cost = CostClass::moving;
  // CostClass::product: the matrix product that the kernel computes.
  Product (*product)(const OpShape&, DataType) = nullptr;
  // Products that may be in fp8: the elements of their factors that are cast, the left's and the
  // right's.
  CastElements (*casts)(const OpShape&) = nullptr;
  // Products that add to what a kernel before them wrote: the elements of that.
  std::int64_t (*added_to)(const OpShape&) = nullptr;
  // Products with kernels beside them, which `launches` counts: the bytes that these read and
  // write.
  Bytes (*beside)(const OpShape&, DataType) = nullptr;
  // Forward ops that count in model FLOPs: their products with the sizes of one rank.
  ModelProducts (*model_products)(const OpShape&) = nullptr;
  // Fused and rare kinds: the kind whose measured time serves where this one was not measured.
  std::optional<OpKind> made_of = {};
  // CostClass::attention: the share of a product's rate that it reaches where nothing was measured.
  double unmeasured_share = 1.0;

  MeasuredOver measured_over = MeasuredOver::nothing;
  std::span<const ShapeSize> measured_sizes = matrix_sizes;
  // Sets the other parts of a measured kernel's shape: operands that it has in plans, table rows,
  // ...
  void (*measured_with)(OpShape&, DataType) = nullptr;

  // Bytes of the workspace operand on each backend (null or 0: none). CPU: packing and attention
  // scratch in fp32. CUDA: cuBLASLt's cap and partial sums (planner/graph/cuda_workspace.h).
  Bytes (*cpu_workspace)(const OpShape&) = nullptr;
  Bytes (*cuda_workspace)(const OpShape&) = nullptr;
};

// How many operands a kernel of this shape receives.
int operand_count(const OpRow& row, const OpShape& shape, bool workspace);

// How many kernels an op of this shape is.
int launches(OpKind kind, const OpShape& shape);

std::span<const OpRow> op_rows();
const OpRow& row_of(OpKind kind);
inline const char* name(OpKind kind) { return row_of(kind).name.data(); }

}  // namespace parplan
