#include "runtime/device/cuda/kernels/attention.h"

#include <cmath>
#include <initializer_list>
#include <string>

#include "planner/base/error.h"
#include "planner/graph/attention_span.h"
#include "runtime/device/cuda/cuda_check.h"
#include "runtime/device/cuda/kernels/attention_kernels.h"

// Attention without the [sequence, sequence] matrix in memory. From the literature:
// - softmax over blocks of keys with a running maximum and sum: Milakov, Gimelshein, Online
//   normalizer calculation for softmax, 2018; attention by tiles on top of it, and its backward
//   from the log-sum-exp with D = rowsum(dy * y): Dao, Fu, Ermon, Rudra, Re, FlashAttention,
//   NeurIPS 2022, algorithms 1 and 4;
// - one block of threads per tile of queries, with one division by the sum at the end, warps that
//   split queries (and not keys), tiles above the diagonal skipped and only those on the diagonal
//   masked: Dao, FlashAttention-2, ICLR 2024.
// Specific to parplan: the fused qkv [sequence, batch, groups x (queries, key, value)] is read in
// place. The backward has one kernel for query gradients, which also writes D, and one for key and
// value gradients, which goes over all query heads of the group. Scores and dP are thus computed
// twice (seven products instead of FlashAttention-2's five), but nothing is added atomically: no
// fp32 accumulator for dq in memory, and the same bits in every run. The second kernel computes S^T
// = K Q^T, so that P^T and dS^T are already, lane by lane, the left operands of dv += P^T dy and dk
// += dS^T q and never go through shared memory. Windows skip the tiles before them as the diagonal
// skips those behind it. Bidirectional attention has all its queries behind all keys, in whatever
// order these lie. Kernels exist twice: `plain`, and with the other options of heads
// (AttentionScores) and gathered keys, which cost registers. A step around a ring
// (attention_span.h) is a plain one over some of the rows, which ends with adding to what is there.
namespace parplan {

namespace {

AttentionLayout layout_of(const OpShape& s) {
  if (s.head_dim > most_attention_head_dim) {
    throw RunError("attention on CUDA: head_dim " + std::to_string(s.head_dim) + " is larger than " +
                   std::to_string(most_attention_head_dim));
  }
  const bool packed = s.keys > 0, apart = s.gathered || packed;
  const std::int64_t y_width = s.heads * s.head_dim;
  const std::int64_t qkv_width = packed ? y_width : (s.heads + 2 * s.kv_heads) * s.head_dim;
  const std::int64_t key_width = apart ? 2 * s.kv_heads * s.head_dim : qkv_width;
  const bool around_ring = s.chunks.holder.has_value();
  const RingStep step = around_ring ? ring_step(s) : RingStep{};
  const std::int64_t rows = s.sequence - step.first_query;
  const std::int64_t keys = around_ring ? step.keys : packed ? s.keys : s.gathered ? s.chunks.positions() : s.sequence;
  const bool meets_all = s.bidirectional || (around_ring && !step.causal);
  const std::int64_t ahead = meets_all ? keys : 0;
  const std::int64_t positions = around_ring || meets_all ? ahead + rows : keys;
  return {.sequence = static_cast<int>(rows),
          .keys = static_cast<int>(keys),
          .positions = static_cast<int>(positions),
          .ahead = static_cast<int>(ahead),
          .statistics_rows = static_cast<int>(s.sequence),
          .apart = apart,
          .accumulates = around_ring && s.accumulate,
          .chunks = s.gathered && !around_ring && !meets_all ? s.chunks : ContextChunks{},
          .heads = static_cast<int>(s.heads),
          .per_group = static_cast<int>(s.heads / s.kv_heads),
          .group_width = static_cast<int>(qkv_width / s.kv_heads),
          .head_dim = static_cast<int>(s.head_dim),
          .qkv_width = qkv_width,
          .y_width = y_width,
          .qkv_stride = s.batch * qkv_width,
          .y_stride = s.batch * y_width,
          .key_stride = s.batch * key_width,
          .scale = s.score_scale != 0.0 ? static_cast<float>(s.score_scale)
                                        : 1.0f / std::sqrt(static_cast<float>(s.head_dim)),
          .window = static_cast<int>(s.window > 0 && s.window < keys ? s.window : positions),
          .softcap = static_cast<float>(s.softcap),
          .alibi = static_cast<float>(s.alibi),
          .all_heads = static_cast<int>(s.all_heads),
          .first_head = static_cast<int>(s.first_head)};
}

// The element of an array from which a step around a ring works on it: rows of queries come before
// that meet none of the keys.
struct Start {
  std::int64_t row = 0;
  DataType type{};
  template <class Byte>
  Byte* in(Byte* array, std::int64_t stride) const {
    return array + row * stride * size_of(type);
  }
};
Start start_of(const CudaKernelArguments& a) {
  return {.row = a.shape.chunks.holder ? ring_step(a.shape).first_query : 0, .type = a.type};
}

bool aligned(std::initializer_list<const void*> pointers) {
  for (const void* pointer : pointers) {
    if (reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) return false;
  }
  return true;
}

}  // namespace

void attention(const CudaKernelArguments& a) {
  const int next = a.shape.gathered ? 2 : 1;
  const AttentionLayout layout = layout_of(a.shape);
  const Start start = start_of(a);
  const AttentionForward work{.layout = layout,
                              .batch = static_cast<int>(a.shape.batch),
                              .qkv = start.in(a.at<const std::byte>(0), layout.qkv_stride),
                              .keys = a.at<const void>(next - 1),
                              .y = start.in(a.at<std::byte>(next), layout.y_stride),
                              .log_sum_exp = a.at<float>(next + 1) + start.row};
  if (aligned({work.qkv, work.keys, work.y}) && attention_on_matrix_units(work, a.type, a.stream)) return;
  attention_general(work, a.type, a.stream);
}

void attention_gradient(const CudaKernelArguments& a) {
  const OpShape& s = a.shape;
  const int next = s.gathered ? 3 : 2, last = s.gathered ? next + 3 : next + 2;
  const AttentionLayout layout = layout_of(s);
  const Start start = start_of(a);
  const auto clear = [&](std::byte* array, std::int64_t rows, std::int64_t stride) {
    const std::int64_t bytes = rows * stride * size_of(a.type);
    check(cudaMemsetAsync(array, 0, static_cast<std::size_t>(bytes), a.stream), "attention_gradient");
  };
  auto* const dqkv = a.at<std::byte>(next + 2);
  auto* const dkeys = a.at<std::byte>(last);
  const AttentionBackward work{.layout = layout,
                               .batch = static_cast<int>(s.batch),
                               .dy = start.in(a.at<const std::byte>(0), layout.y_stride),
                               .qkv = start.in(a.at<const std::byte>(1), layout.qkv_stride),
                               .keys = a.at<const void>(next - 1),
                               .y = start.in(a.at<const std::byte>(next), layout.y_stride),
                               .log_sum_exp = a.at<const float>(next + 1) + start.row,
                               .dqkv = start.in(dqkv, layout.qkv_stride),
                               .dkeys = dkeys,
                               .sums = a.at<float>(last + 1) + start.row};
  // The columns of keys and values, whose gradients are elsewhere.
  if (s.gathered && !layout.accumulates) clear(dqkv, s.sequence, layout.qkv_stride);
  // The keys that no query of a step meets.
  if (s.chunks.holder && layout.keys < s.sequence) clear(dkeys, s.sequence, layout.key_stride);
  if (aligned({work.dy, work.qkv, work.keys, work.y, work.dqkv, work.dkeys}) &&
      attention_gradient_on_matrix_units(work, a.type, a.stream))
    return;
  attention_gradient_general(work, a.type, a.stream);
}

namespace {

BiasTable table_of(const OpShape& s, const void* rows) {
  return {.rows = rows,
          .buckets = static_cast<int>(s.buckets),
          .most_distance = static_cast<int>(s.most_distance),
          .bidirectional = s.bidirectional,
          .inner = static_cast<int>(s.inner),
          .all_heads = static_cast<int>(s.all_heads),
          .first_head = static_cast<int>(s.first_head)};
}

}  // namespace

void packed_attention(const CudaKernelArguments& a) {
  const OpShape& s = a.shape;
  const int next = s.second ? 3 : 2, batch = static_cast<int>(s.batch);
  AttentionLayout layout = layout_of(s);
  if (s.second) {
    auto* const biases = a.at<float>(next + 2);
    expand_biases(layout, batch, table_of(s, a.at<const void>(2)), biases, a.type, a.stream);
    layout.biases = biases;
  }
  const AttentionForward work{.layout = layout,
                              .batch = batch,
                              .qkv = a.at<const void>(0),
                              .keys = a.at<const void>(1),
                              .y = a.at<void>(next),
                              .log_sum_exp = a.at<float>(next + 1)};
  if (aligned({work.qkv, work.keys, work.y}) && attention_on_matrix_units(work, a.type, a.stream)) return;
  attention_general(work, a.type, a.stream);
}

// The workspace: sums of dy * y, then biases, then their gradients by tile.
void packed_attention_gradient(const CudaKernelArguments& a) {
  const OpShape& s = a.shape;
  const int next = s.second ? 4 : 3, batch = static_cast<int>(s.batch), last = s.second ? next + 5 : next + 4;
  AttentionLayout layout = layout_of(s);
  float* const sums = a.at<float>(last);
  float* const biases =
      sums + cuda_attention_gradient_workspace(s.sequence, s.batch, s.heads).count / std::int64_t{sizeof(float)};
  if (s.second) {
    expand_biases(layout, batch, table_of(s, a.at<const void>(3)), biases, a.type, a.stream);
    layout.biases = biases;
  }
  const AttentionBackward work{.layout = layout,
                               .batch = batch,
                               .dy = a.at<const void>(0),
                               .qkv = a.at<const void>(1),
                               .keys = a.at<const void>(2),
                               .y = a.at<const void>(next),
                               .log_sum_exp = a.at<const float>(next + 1),
                               .dqkv = a.at<void>(next + 2),
                               .dkeys = a.at<void>(next + 3),
                               .sums = sums};
  const bool on_matrix_units = aligned({work.dy, work.qkv, work.keys, work.y, work.dqkv, work.dkeys}) &&
                               attention_gradient_on_matrix_units(work, a.type, a.stream);
  if (!on_matrix_units) attention_gradient_general(work, a.type, a.stream);
  if (!s.second) return;
  float* const parts =
      biases + cuda_biases_workspace(s.sequence, s.keys, s.batch, s.heads).count / std::int64_t{sizeof(float)};
  bias_gradients(work, table_of(s, a.at<const void>(3)), parts, a.at<void>(next + 4), a.type, a.stream);
}

}  // namespace parplan
