#include "runtime/device/cuda/kernels/attention.h"

#include <cmath>
#include <initializer_list>
#include <string>

#include "planner/base/error.h"
#include "runtime/device/cuda/cuda_check.h"
#include "runtime/device/cuda/kernels/attention_kernels.h"

// Causal attention without the [sequence, sequence] matrix in memory. From the literature:
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
// fp32 accumulator for dq in memory, and the same bits in every run. The second kernel computes
// S^T = K Q^T, so that P^T and dS^T are already, lane by lane, the left operands of dv += P^T dy
// and dk += dS^T q and never go through shared memory. Windows skip the tiles before them as the
// diagonal skips those behind it. Kernels exist twice: `plain`, and with the other options of heads
// (AttentionScores) and gathered keys, which cost registers.
namespace parplan {

namespace {

AttentionLayout layout_of(const OpShape& s) {
  if (s.head_dim > most_attention_head_dim) {
    throw RunError("attention on CUDA: head_dim " + std::to_string(s.head_dim) + " is larger than " +
                   std::to_string(most_attention_head_dim));
  }
  const std::int64_t qkv_width = (s.heads + 2 * s.kv_heads) * s.head_dim;
  const std::int64_t y_width = s.heads * s.head_dim;
  const std::int64_t key_width = s.gathered ? 2 * s.kv_heads * s.head_dim : qkv_width;
  const std::int64_t keys = s.gathered ? s.chunks.positions() : s.sequence;
  return {.sequence = static_cast<int>(s.sequence),
          .keys = static_cast<int>(keys),
          .chunks = s.gathered ? s.chunks : ContextChunks{},
          .heads = static_cast<int>(s.heads),
          .per_group = static_cast<int>(s.heads / s.kv_heads),
          .head_dim = static_cast<int>(s.head_dim),
          .qkv_width = qkv_width,
          .y_width = y_width,
          .qkv_stride = s.batch * qkv_width,
          .y_stride = s.batch * y_width,
          .key_stride = s.batch * key_width,
          .scale = s.score_scale != 0.0 ? static_cast<float>(s.score_scale)
                                        : 1.0f / std::sqrt(static_cast<float>(s.head_dim)),
          .window = static_cast<int>(s.window > 0 && s.window < keys ? s.window : keys),
          .softcap = static_cast<float>(s.softcap),
          .alibi = static_cast<float>(s.alibi),
          .all_heads = static_cast<int>(s.all_heads),
          .first_head = static_cast<int>(s.first_head)};
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
  const AttentionForward work{.layout = layout_of(a.shape),
                              .batch = static_cast<int>(a.shape.batch),
                              .qkv = a.at<const void>(0),
                              .keys = a.at<const void>(next - 1),
                              .y = a.at<void>(next),
                              .log_sum_exp = a.at<float>(next + 1)};
  if (aligned({work.qkv, work.keys, work.y}) && attention_on_matrix_units(work, a.type, a.stream)) return;
  attention_general(work, a.type, a.stream);
}

void attention_gradient(const CudaKernelArguments& a) {
  const OpShape& s = a.shape;
  const int next = s.gathered ? 3 : 2, last = s.gathered ? next + 3 : next + 2;
  const AttentionBackward work{.layout = layout_of(s),
                               .batch = static_cast<int>(s.batch),
                               .dy = a.at<const void>(0),
                               .qkv = a.at<const void>(1),
                               .keys = a.at<const void>(next - 1),
                               .y = a.at<const void>(next),
                               .log_sum_exp = a.at<const float>(next + 1),
                               .dqkv = a.at<void>(next + 2),
                               .dkeys = a.at<void>(last),
                               .sums = a.at<float>(last + 1)};
  if (s.gathered) {
    // The columns of keys and values, whose gradients are elsewhere.
    const std::int64_t bytes = s.sequence * work.layout.qkv_stride * size_of(a.type);
    check(cudaMemsetAsync(work.dqkv, 0, static_cast<std::size_t>(bytes), a.stream), "attention_gradient");
  }
  if (aligned({work.dy, work.qkv, work.keys, work.y, work.dqkv, work.dkeys}) &&
      attention_gradient_on_matrix_units(work, a.type, a.stream))
    return;
  attention_gradient_general(work, a.type, a.stream);
}

}  // namespace parplan
