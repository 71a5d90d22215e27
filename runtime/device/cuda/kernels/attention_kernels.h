#pragma once

#include <cstdint>

#include "planner/graph/cuda_workspace.h"
#include "runtime/device/cuda/kernels/kernel_arguments.h"

namespace parplan {

// Where the rows of one sample's query head, or key/value head, are. Activations are [sequence,
// batch, width]; the fused width holds for each key/value head its query heads, the key and the
// value, each head_dim wide. The output has the query heads in the same order; statistics
// (log-sum-exp, sums of dy * y) are fp32 [batch, heads, sequence]. Offsets and strides count
// elements.
//
// Rows are of this rank's tokens. Where the context axis shares these out in chunks, keys and
// values are an array of their own, gathered from all ranks, [positions, batch, key/value heads,
// (key, value), head_dim], and queries and keys meet by position. Otherwise rows, positions and the
// rows of keys are the same numbers; but where queries see all keys, in bidirectional attention or
// a step around a ring, the queries' positions are `ahead` of their rows: behind all keys.
struct AttentionLayout {
  int sequence = 0;           // rows of queries
  int keys = 0;               // positions of keys
  int positions = 0;          // one past the last position of a query
  int ahead = 0;
  int statistics_rows = 0;    // from a head's statistics to the next head's
  bool apart = false;         // keys are in an array of their own
  bool accumulates = false;   // y and log-sum-exp, and gradients of queries, add to what is there
  ContextChunks chunks = {};  // of keys gathered from all ranks
  int heads = 0;
  int per_group = 0;  // query heads per key/value head
  int group_width = 0;  // of the array with the queries: with its key and value, or without
  int head_dim = 0;
  std::int64_t qkv_width = 0;
  std::int64_t y_width = 0;
  std::int64_t qkv_stride = 0;  // from a row to the next
  std::int64_t y_stride = 0;
  std::int64_t key_stride = 0;
  float scale = 0.0f;  // of scores
  // Options of heads. A query sees the last `window` keys, including its own (`keys`: all before
  // it).
  int window = 0;
  float softcap = 0.0f;  // scores become softcap tanh(score / softcap); 0: they do not
  float alibi = 0.0f;    // multiplier of the head's slope times (key's - query's position), added after that
  int all_heads = 0;     // of all ranks: slopes are numbered among them
  int first_head = 0;    // of this rank's
  // Relative position biases, by sample, head and distance (biases_of); null: none.
  const float* biases = nullptr;

  bool is_plain() const {
    return !chunks.any() && window >= keys && softcap == 0.0f && alibi == 0.0f && biases == nullptr;
  }
  // Those of a head, from the distance 0 of a key's position from a query's on. Tiles reach beyond
  // the last query and the last key.
  __host__ __device__ std::int64_t bias_width() const { return statistics_rows + keys + 2 * attention_bias_margin; }
  __device__ const float* biases_of(int sample, int head) const {
    return biases + (static_cast<std::int64_t>(sample) * heads + head) * bias_width() + attention_bias_margin +
           statistics_rows - 1 + ahead;
  }
  // The first key that a query sees, and one past the last query that sees a key: positions.
  __device__ int first_key(int query) const { return query >= window ? query - window + 1 : 0; }
  __device__ int last_query(int key) const { return window < keys - key ? key + window : positions; }

  // The position of a row of queries, the rows whose positions come before one, and the row of the
  // key at a position.
  __device__ int position(int row) const {
    return chunks.any() ? static_cast<int>(chunks.position(row)) : ahead + row;
  }
  // Where there are no chunks.
  __device__ int plain_position(int row) const { return ahead + row; }
  __device__ int plain_rows_before(int position) const { return max(position - ahead, 0); }
  __device__ int rows_before(int position) const {
    if (!chunks.any()) return plain_rows_before(position);
    const int size = static_cast<int>(chunks.size);
    const int below = position - this->position(0), above = position - this->position(size);
    return min(max(below, 0), size) + min(max(above, 0), size);
  }
  __device__ int key_row(int position) const {
    return chunks.any() ? static_cast<int>(chunks.gathered_row(position)) : position;
  }

  __host__ __device__ std::int64_t group(int sample, int group) const {
    return sample * qkv_width + static_cast<std::int64_t>(group) * group_width;
  }
  __host__ __device__ std::int64_t query(int sample, int head) const {
    return group(sample, head / per_group) + head % per_group * head_dim;
  }
  // In the fused array, or in their own.
  __device__ std::int64_t key(int sample, int kv_head) const {
    if (!apart) return group(sample, kv_head) + per_group * head_dim;
    return (static_cast<std::int64_t>(sample) * (heads / per_group) + kv_head) * 2 * head_dim;
  }
  __device__ std::int64_t value(int sample, int kv_head) const { return key(sample, kv_head) + head_dim; }
  __host__ __device__ std::int64_t y(int sample, int head) const {
    return sample * y_width + static_cast<std::int64_t>(head) * head_dim;
  }
  __host__ __device__ std::int64_t statistics(int sample, int head) const {
    return (static_cast<std::int64_t>(sample) * heads + head) * statistics_rows;
  }
};

// What a step around a ring does with the results before it: of a row whose keys so far have the
// log-sum-exp `before`, and those at hand `own`, that of both, and the factors of both outputs.
struct MergedRow {
  float log_sum_exp = 0.0f;
  float kept = 0.0f;
  float added = 1.0f;

  __device__ MergedRow(float before, float own) {
    const float larger = fmaxf(before, own);
    log_sum_exp = larger + logf(expf(before - larger) + expf(own - larger));
    kept = expf(before - log_sum_exp);
    added = expf(own - log_sum_exp);
  }
};

// The operations on a head's scores.
struct AttentionScores {
  float scale = 0.0f;
  float softcap = 0.0f;
  float slope = 0.0f;
  const float* biases = nullptr;

  __device__ AttentionScores(const AttentionLayout& layout, int sample, int head)
      : scale(layout.scale), softcap(layout.softcap) {
    if (layout.biases != nullptr) biases = layout.biases_of(sample, head);
    if (layout.alibi == 0.0f) return;
    // As alibi_slope (planner/graph/op_kind.h).
    const int whole = 1 << (31 - __clz(layout.all_heads)), number = layout.first_head + head;
    const bool beyond = number >= whole;
    const int power = beyond ? 2 * (number - whole) + 1 : number + 1;
    slope = layout.alibi * exp2f(-8.0f * static_cast<float>(power) / static_cast<float>(beyond ? 2 * whole : whole));
  }
  // `product` is that of a query and a key; `distance` runs from the query's position to the key's.
  // `to_product` is the factor of the score's gradient on the way back to scale * product.
  __device__ float of(float product, int distance, float& to_product) const {
    float score = scale * product;
    to_product = 1.0f;
    if (softcap != 0.0f) {
      const float tangent = tanhf(score / softcap);
      score = softcap * tangent;
      to_product = 1.0f - tangent * tangent;
    }
    if (biases != nullptr) return score + biases[distance];
    return score + slope * static_cast<float>(distance);
  }
  __device__ float of(float product, int distance) const {
    float unused;
    return of(product, distance, unused);
  }
};

// The rows of an activation that hold the table of relative position biases (append_rows), and
// what distances of them stand for (planner/graph/relative_position.h).
struct BiasTable {
  const void* rows = nullptr;
  int buckets = 0;
  int most_distance = 0;
  bool bidirectional = false;
  int inner = 0;  // the width of a row
  int all_heads = 0;
  int first_head = 0;
};

struct AttentionForward {
  AttentionLayout layout;
  int batch = 0;
  const void* qkv = nullptr;
  const void* keys = nullptr;  // and values: the fused array, or their own
  void* y = nullptr;
  float* log_sum_exp = nullptr;
};

struct AttentionBackward {
  AttentionLayout layout;
  int batch = 0;
  const void* dy = nullptr;
  const void* qkv = nullptr;
  const void* keys = nullptr;
  const void* y = nullptr;
  const float* log_sum_exp = nullptr;
  void* dqkv = nullptr;
  void* dkeys = nullptr;  // where the gradients of keys and values go: dqkv, or an array of their own
  float* sums = nullptr;  // of dy * y
};

// On matrix units (attention_matrix_units.cu): bf16 and fp16, some head dims, chunks of whole
// tiles; rows of qkv, keys, y and their gradients must be aligned to 16 bytes. Returns false, with
// nothing submitted, for other types, head dims and chunks.
bool attention_on_matrix_units(const AttentionForward& work, DataType type, cudaStream_t stream);
bool attention_gradient_on_matrix_units(const AttentionBackward& work, DataType type, cudaStream_t stream);

// For every type, head dim up to 256 and alignment (attention_general.cu); fp32 arithmetic.
inline constexpr int most_attention_head_dim = 256;
void attention_general(const AttentionForward& work, DataType type, cudaStream_t stream);
void attention_gradient_general(const AttentionBackward& work, DataType type, cudaStream_t stream);

// The biases of each sample and head by distance, to `biases` [batch, heads, bias_width].
void expand_biases(const AttentionLayout& layout, int batch, const BiasTable& table, float* biases, DataType type,
                   cudaStream_t stream);
// The gradients of the table, to all of its rows; what `work` does has been submitted. `parts`:
// cuda_bias_sums_workspace.
void bias_gradients(const AttentionBackward& work, const BiasTable& table, float* parts, void* gradients, DataType type,
                    cudaStream_t stream);

}  // namespace parplan
