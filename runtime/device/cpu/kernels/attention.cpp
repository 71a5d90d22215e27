#include "planner/graph/attention_span.h"
#include "planner/graph/relative_position.h"
#include "runtime/device/cpu/kernels/gemm.h"
#include "runtime/device/cpu/kernels/kernels.h"
#include "runtime/device/cpu/kernels/simd.h"

namespace parplan::PARPLAN_CPU_NAMESPACE {

namespace {

// Where the rows of one (sample, query head) are. Activations are [sequence, batch, width]; the
// fused width holds for each key/value head its query heads, the key and the value, each head_dim
// wide. The output has the query heads in the same order; log-sum-exp is [batch, heads, sequence].
struct Head {
  std::int64_t qkv_stride = 0;
  std::int64_t y_stride = 0;
  std::int64_t query = 0;  // offsets into qkv
  std::int64_t key = 0;
  std::int64_t value = 0;
  std::int64_t y = 0;      // offset into the output
  std::int64_t lse = 0;    // offset into log-sum-exp
};

Head head_of(const OpShape& s, std::int64_t sample, std::int64_t head) {
  if (s.keys > 0) {  // queries alone
    const std::int64_t width = s.heads * s.head_dim, at = sample * width + head * s.head_dim;
    return {.qkv_stride = s.batch * width,
            .y_stride = s.batch * width,
            .query = at,
            .y = at,
            .lse = (sample * s.heads + head) * s.sequence};
  }
  const std::int64_t per_group = s.heads / s.kv_heads;
  const std::int64_t group = head / per_group;
  const std::int64_t qkv_width = (s.heads + 2 * s.kv_heads) * s.head_dim;
  const std::int64_t y_width = s.heads * s.head_dim;
  const std::int64_t base = sample * qkv_width + group * (per_group + 2) * s.head_dim;
  return {.qkv_stride = s.batch * qkv_width,
          .y_stride = s.batch * y_width,
          .query = base + head % per_group * s.head_dim,
          .key = base + per_group * s.head_dim,
          .value = base + (per_group + 1) * s.head_dim,
          .y = sample * y_width + head * s.head_dim,
          .lse = (sample * s.heads + head) * s.sequence};
}

float score_scale(const OpShape& s) {
  return s.score_scale != 0.0 ? static_cast<float>(s.score_scale)
                              : 1.0f / __builtin_sqrtf(static_cast<float>(s.head_dim));
}

// The first row of queries that meets keys.
std::int64_t first_query_of(const OpShape& s) { return s.chunks.holder ? ring_step(s).first_query : 0; }

// The rows of queries from `begin` on that are handled at a time: they have consecutive positions.
std::int64_t rows_of_block(const OpShape& s, std::int64_t begin) {
  const std::int64_t run = run_of_queries(s);
  const std::int64_t left = (begin / run + 1) * run - begin, block = attention_block(run);
  return left < block ? left : block;
}

// Where a row of queries is among the keys. In a step around a ring these count by rows. A query
// that sees all keys is behind the last.
std::int64_t position_of(const OpShape& s, std::int64_t row) {
  if (!s.chunks.holder) return s.bidirectional ? room_for_keys(s) + row : s.chunks.position(row);
  const RingStep step = ring_step(s);
  return step.causal ? row : step.keys + row;
}

// The positions of the keys that a block of queries needs, [begin, end), and those that one of its
// rows sees, counted from `begin`.
struct Keys {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t first(std::int64_t query, const OpShape& s) const {
    const std::int64_t seen = s.window > 0 ? query - s.window + 1 : 0;
    return seen > begin ? seen - begin : 0;
  }
  std::int64_t last(std::int64_t query) const { return (query < end ? query + 1 : end) - begin; }  // one past
  std::int64_t count() const { return end - begin; }
};
Keys keys_of(const OpShape& s, std::int64_t first_query, std::int64_t rows) {
  const std::int64_t seen = s.window > 0 ? first_query - s.window + 1 : 0;
  const std::int64_t end = first_query + rows;
  const std::int64_t most = s.chunks.holder ? ring_step(s).keys : s.bidirectional ? room_for_keys(s) : end;
  return {.begin = seen > 0 ? seen : 0, .end = end < most ? end : most};
}

// Where the keys and values of one (sample, query head) are: among the fused ones, or with those
// that come from other ranks, or are packed, [rows, batch, key/value heads, 2, head_dim].
struct KeyRows {
  std::int64_t stride = 0;
  std::int64_t key = 0;
  std::int64_t value = 0;
};
KeyRows key_rows(const OpShape& s, const Head& h, std::int64_t sample, std::int64_t head) {
  if (!s.gathered && s.keys == 0) return {.stride = h.qkv_stride, .key = h.key, .value = h.value};
  const std::int64_t key = (sample * s.kv_heads + head / (s.heads / s.kv_heads)) * 2 * s.head_dim;
  return {.stride = s.batch * 2 * s.kv_heads * s.head_dim, .key = key, .value = key + s.head_dim};
}

// Calls `visit` with the first row, the place from `keys.begin` on, and the number of each run of
// keys whose rows follow one another.
template <class Visit>
PARPLAN_INLINE void for_each_run(const OpShape& s, const Keys& keys, const Visit& visit) {
  if (!s.gathered || s.chunks.holder) {
    visit(keys.begin, std::int64_t{0}, keys.count());
    return;
  }
  for (std::int64_t position = keys.begin; position < keys.end;) {
    const std::int64_t chunk_end = (position / s.chunks.size + 1) * s.chunks.size;
    const std::int64_t end = chunk_end < keys.end ? chunk_end : keys.end;
    visit(s.chunks.gathered_row(position), position - keys.begin, end - position);
    position = end;
  }
}

// The operations on a score after it is scaled: s -> cap tanh(s / cap) + slope (key's - query's
// position), or + the bias of that distance.
struct Adjustment {
  float cap = 0.0f;    // 0: none
  float slope = 0.0f;
  const float* biases = nullptr;  // by distance, from 0 on; null: none
  Adjustment(const OpShape& s, std::int64_t head, const float* by_distance)
      : cap(static_cast<float>(s.softcap)), biases(by_distance) {
    if (s.alibi != 0.0) slope = static_cast<float>(s.alibi * alibi_slope(s.first_head + head, s.all_heads));
  }
  bool any() const { return cap != 0.0f || slope != 0.0f || biases != nullptr; }
  PARPLAN_INLINE Wide capped(const Wide& score) const {
    return cap != 0.0f ? cap * hyperbolic_tangent(score / cap) : score;
  }
  // d capped / d score.
  PARPLAN_INLINE Wide slope_of_cap(const Wide& capped_score) const {
    const Wide tangent = cap != 0.0f ? capped_score / cap : Wide{};
    return 1.0f - tangent * tangent;
  }
  // For sixteen keys from `distance` = the first one's position - the query's.
  PARPLAN_INLINE Wide bias(std::int64_t distance) const {
    if (biases != nullptr) return load(biases + distance, Whole{});
    constexpr Wide lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return slope * (static_cast<float>(distance) + lane);
  }
};

// The place in the rows that hold the table of relative position biases (append_rows).
std::int64_t place_of_bias(const OpShape& s, std::int64_t bucket, std::int64_t head, std::int64_t sample) {
  const std::int64_t element = bucket * s.all_heads + s.first_head + head;
  return (element / s.inner * s.batch + sample) * s.inner + element % s.inner;
}
// Calls `visit` with each distance of a key from a query, and the place of its bias.
template <class Visit>
PARPLAN_INLINE void for_each_bias(const OpShape& s, std::int64_t head, std::int64_t sample, const Visit& visit) {
  for (std::int64_t distance = 1 - s.sequence; distance < s.keys; ++distance)
    visit(distance,
          place_of_bias(s, relative_bucket(distance, s.buckets, s.most_distance, s.bidirectional), head, sample));
}

// Where the bias of a key at its query's position is among those of a head by distance. Positions
// of queries that see all keys count from behind these (position_of).
std::int64_t bias_origin(const OpShape& s) {
  return s.sequence - 1 + (s.bidirectional ? s.keys : 0);
}

void zero(float* p, std::int64_t n) { __builtin_memset(p, 0, n * sizeof(float)); }

// scores[rows, keys] = scale * a[rows, head_dim] b[keys, head_dim]
void dot_products(const OpShape& s, const Keys& keys, const float* a, std::int64_t a_stride, const float* b,
                  std::int64_t b_stride, std::int64_t rows, float scale, float* scores, float* packing) {
  zero(scores, rows * keys.count());
  for_each_run(s, keys, [&](std::int64_t row, std::int64_t place, std::int64_t count) {
    gemm_rows({.m = count, .n = rows, .k = s.head_dim, .x = a, .x_stride = a_stride, .w = b + row * b_stride,
               .w_stride = b_stride, .y = scores + place, .y_stride = keys.count(), .scale = scale,
               .blocking = forward_blocking, .workspace = packing});
  });
}

// What a forward reads and writes, and room for scores.
struct Forward {
  const float* qkv = nullptr;
  const float* all_keys = nullptr;
  const float* table = nullptr;  // rows of relative position biases; null: none
  float* y = nullptr;
  float* lse = nullptr;
  float* scores = nullptr;
  float* biases = nullptr;  // room for those of a head by distance
};

// For each block of queries:
// scores against all keys that it may see, softmax in place, product with the values. After the
// first step around a ring, y and log-sum-exp L are of the keys before; with those at hand, whose
// own is l, both become log(e^L + e^l) =: M and e^(L - M) y + e^(l - M) y_own (Liu et al. 2023,
// arXiv:2310.01889, section 3; Milakov, Gimelshein 2018).
void attend(const OpShape& s, const Forward& work) {
  const auto& [qkv, all_keys, table, y, lse, scores, biases] = work;
  const float* const by_distance = table != nullptr ? biases + bias_origin(s) : nullptr;
  float* packing = scores + align_elements(rows_of_block(s, 0) * room_for_keys(s));
  const float scale = score_scale(s);
  float kept[attention_query_block];  // the factors of what is there, of a block's rows
  for (std::int64_t sample = 0; sample < s.batch; ++sample) {
    for (std::int64_t head = 0; head < s.heads; ++head) {
      const Head h = head_of(s, sample, head);
      const KeyRows at = key_rows(s, h, sample, head);
      if (table != nullptr)
        for_each_bias(s, head, sample, [&](std::int64_t distance, std::int64_t place) {
          biases[distance + s.sequence - 1] = table[place];
        });
      const Adjustment adjustment(s, head, by_distance);
      for (std::int64_t begin = first_query_of(s), rows = 0; begin < s.sequence; begin += rows) {
        rows = rows_of_block(s, begin);
        const std::int64_t position = position_of(s, begin);
        const Keys met = keys_of(s, position, rows);
        const std::int64_t keys = met.count();
        dot_products(s, met, qkv + h.query + begin * h.qkv_stride, h.qkv_stride, all_keys + at.key, at.stride, rows,
                     scale, scores, packing);
        for (std::int64_t row = 0; row < rows; ++row) {
          const std::int64_t query = position + row;
          const std::int64_t first = met.first(query, s);
          const std::int64_t visible = met.last(query) - first;
          zero(scores + row * keys, first);
          float* p = scores + row * keys + first;
          if (adjustment.any())
            for_each_wide(visible, [&](std::int64_t i, auto lanes) {
              store(p + i, adjustment.capped(load(p + i, lanes)) + adjustment.bias(met.begin + first + i - query),
                    lanes);
            });
          Wide largest = splat(p[0]);
          for_each_wide(visible, [&](std::int64_t i, auto lanes) {
            largest = maximum(largest, load(p + i, lanes, p[0]));
          });
          const float max = max_lanes(largest);
          Wide sum{};
          for_each_wide(visible, [&](std::int64_t i, auto lanes) {
            const Wide e = exponential(load(p + i, lanes, -__builtin_inff()) - max);
            store(p + i, e, lanes);
            sum += load(p + i, lanes);  // the padding of the rest does not count
          });
          const float total = sum_lanes(sum);
          float& row_lse = lse[h.lse + begin + row];
          float factor = 1.0f / total;
          const float own = max + __builtin_logf(total);
          if (s.accumulate) {
            const float larger = own > row_lse ? own : row_lse;
            const float merged =
                larger + __builtin_logf(__builtin_expf(own - larger) + __builtin_expf(row_lse - larger));
            kept[row] = __builtin_expf(row_lse - merged);
            factor *= __builtin_expf(own - merged);
            row_lse = merged;
          } else {
            row_lse = own;
          }
          for_each_wide(visible, [&](std::int64_t i, auto lanes) {
            store(p + i, load(p + i, lanes) * factor, lanes);
          });
          zero(p + visible, keys - first - visible);
        }
        float* out = y + h.y + begin * h.y_stride;
        for (std::int64_t row = 0; row < rows; ++row) {
          float* out_row = out + row * h.y_stride;
          if (s.accumulate)
            for_each_wide(s.head_dim, [&](std::int64_t i, auto lanes) {
              store(out_row + i, load(out_row + i, lanes) * kept[row], lanes);
            });
          else
            zero(out_row, s.head_dim);
        }
        for_each_run(s, met, [&](std::int64_t first, std::int64_t place, std::int64_t count) {
          gemm_rows_transposed({.m = s.head_dim, .n = rows, .k = count, .x = scores + place, .x_stride = keys,
                                .w = all_keys + at.value + first * at.stride, .w_stride = at.stride, .y = out,
                                .y_stride = h.y_stride, .blocking = backward_blocking, .workspace = packing});
        });
      }
    }
  }
}

// What a backward reads and writes.
struct Backward {
  const float* dy = nullptr;
  const float* qkv = nullptr;
  const float* all_keys = nullptr;
  const float* table = nullptr;
  const float* y = nullptr;
  const float* lse = nullptr;
  float* dqkv = nullptr;
  float* dkeys = nullptr;          // cleared
  float* dtable = nullptr;         // cleared
  float* probabilities = nullptr;  // room for what a block of queries needs
  float* biases = nullptr;         // room for biases and for their gradients by distance
};

// As FlashAttention
// (Dao et al. 2022, algorithm 4): with P = exp(scale Q K^T - lse), dP = dY V^T, D = rowsum(dY * Y)
// and dS = P (dP - D) scale: dQ = dS K, dK = dS^T Q, dV = P^T dY. A capped score t = cap tanh(s /
// cap) multiplies dS by dt/ds = 1 - (t / cap)^2. A bias is added behind the cap and the scale: its
// gradient is the sum of P (dP - D) over all pairs of its distance.
void attend_back(const OpShape& s, const Backward& work) {
  const auto& [dy, qkv, all_keys, table, y, lse, dqkv, dkeys, dtable, probabilities, biases] = work;
  const std::int64_t block = rows_of_block(s, 0), room = room_for_keys(s);
  const float* const by_distance = table != nullptr ? biases + bias_origin(s) : nullptr;
  float* const bias_gradients = table != nullptr ? biases + biases_by_distance(s.sequence, s.keys) : nullptr;
  float* gradients = probabilities + align_elements(block * room);
  float* sums = gradients + align_elements(block * room);
  float* packing = sums + align_elements(block);
  const float scale = score_scale(s);
  for (std::int64_t sample = 0; sample < s.batch; ++sample) {
    for (std::int64_t head = 0; head < s.heads; ++head) {
      const Head h = head_of(s, sample, head);
      const KeyRows rows_at = key_rows(s, h, sample, head);
      if (table != nullptr) {
        for_each_bias(s, head, sample, [&](std::int64_t distance, std::int64_t place) {
          biases[distance + s.sequence - 1] = table[place];
        });
        zero(bias_gradients, biases_by_distance(s.sequence, s.keys));
      }
      const Adjustment adjustment(s, head, by_distance);
      for (std::int64_t begin = first_query_of(s), rows = 0; begin < s.sequence; begin += rows) {
        rows = rows_of_block(s, begin);
        const std::int64_t position = position_of(s, begin);
        const Keys met = keys_of(s, position, rows);
        const std::int64_t keys = met.count();
        const float* query = qkv + h.query + begin * h.qkv_stride;
        const float* dout = dy + h.y + begin * h.y_stride;
        const float* out = y + h.y + begin * h.y_stride;
        dot_products(s, met, query, h.qkv_stride, all_keys + rows_at.key, rows_at.stride, rows, scale, probabilities,
                     packing);
        dot_products(s, met, dout, h.y_stride, all_keys + rows_at.value, rows_at.stride, rows, 1.0f, gradients,
                     packing);
        for (std::int64_t row = 0; row < rows; ++row) {
          Wide sum{};
          for_each_wide(s.head_dim, [&](std::int64_t i, auto lanes) {
            sum += load(dout + row * h.y_stride + i, lanes) * load(out + row * h.y_stride + i, lanes);
          });
          sums[row] = sum_lanes(sum);
        }
        for (std::int64_t row = 0; row < rows; ++row) {
          const std::int64_t at = position + row;
          const std::int64_t first = met.first(at, s);
          const std::int64_t visible = met.last(at) - first;
          zero(probabilities + row * keys, first);
          zero(gradients + row * keys, first);
          float* p = probabilities + row * keys + first;
          float* d = gradients + row * keys + first;
          const float row_lse = lse[h.lse + begin + row];
          const float row_sum = sums[row];
          if (adjustment.any()) {
            for_each_wide(visible, [&](std::int64_t i, auto lanes) {
              const Wide capped = adjustment.capped(load(p + i, lanes));
              const Wide probability = exponential(capped + adjustment.bias(met.begin + first + i - at) - row_lse);
              store(p + i, probability, lanes);
              const Wide of_score = probability * (load(d + i, lanes) - row_sum);
              store(d + i, of_score * scale * adjustment.slope_of_cap(capped), lanes);
              if (bias_gradients != nullptr) {
                float* const sum = bias_gradients + bias_origin(s) + (met.begin + first + i - at);
                store(sum, load(sum, lanes) + of_score, lanes);
              }
            });
          } else {
            for_each_wide(visible, [&](std::int64_t i, auto lanes) {
              const Wide probability = exponential(load(p + i, lanes) - row_lse);
              store(p + i, probability, lanes);
              store(d + i, probability * (load(d + i, lanes) - row_sum) * scale, lanes);
            });
          }
          zero(p + visible, keys - first - visible);
          zero(d + visible, keys - first - visible);
        }
        for_each_run(s, met, [&](std::int64_t first, std::int64_t place, std::int64_t count) {
          const std::int64_t key = rows_at.key + first * rows_at.stride;
          const std::int64_t value = rows_at.value + first * rows_at.stride;
          gemm_rows_transposed({.m = s.head_dim, .n = rows, .k = count, .x = gradients + place, .x_stride = keys,
                                .w = all_keys + key, .w_stride = rows_at.stride,
                                .y = dqkv + h.query + begin * h.qkv_stride, .y_stride = h.qkv_stride,
                                .blocking = backward_blocking, .workspace = packing});
          gemm_outer({.m = s.head_dim, .n = count, .k = rows, .x = gradients + place, .x_stride = keys,
                      .w = query, .w_stride = h.qkv_stride, .y = dkeys + key, .y_stride = rows_at.stride,
                      .blocking = backward_blocking, .workspace = packing});
          gemm_outer({.m = s.head_dim, .n = count, .k = rows, .x = probabilities + place, .x_stride = keys,
                      .w = dout, .w_stride = h.y_stride, .y = dkeys + value, .y_stride = rows_at.stride,
                      .blocking = backward_blocking, .workspace = packing});
        });
      }
      if (table != nullptr)
        for_each_bias(s, head, sample, [&](std::int64_t distance, std::int64_t place) {
          dtable[place] += bias_gradients[distance + s.sequence - 1];
        });
    }
  }
}

}  // namespace

// fused qkv, (keys and values of ranks) -> y, log-sum-exp, workspace
void attention(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const int next = s.gathered ? 2 : 1;
  attend(s, {.qkv = a.floats(0),
             .all_keys = a.floats(next - 1),
             .y = a.floats(next),
             .lse = a.floats(next + 1),
             .scores = a.floats(next + 2)});
}

// dy, qkv, (keys and values of ranks), y, log-sum-exp -> dqkv, (their gradients), workspace; with
// such keys, dqkv has gradients of queries alone, which add up around a ring.
void attention_gradient(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const int next = s.gathered ? 3 : 2;
  float* const dqkv = a.floats(next + 2);
  float* const dkeys = s.gathered ? a.floats(next + 3) : dqkv;
  if (!s.accumulate) zero(dqkv, s.sequence * s.batch * (s.heads + 2 * s.kv_heads) * s.head_dim);
  if (s.gathered) zero(dkeys, room_for_keys(s) * s.batch * 2 * s.kv_heads * s.head_dim);
  attend_back(s, {.dy = a.floats(0),
                  .qkv = a.floats(1),
                  .all_keys = a.floats(next - 1),
                  .y = a.floats(next),
                  .lse = a.floats(next + 1),
                  .dqkv = dqkv,
                  .dkeys = dkeys,
                  .probabilities = a.floats(s.gathered ? next + 4 : next + 3)});
}

// queries, keys and values, (rows of biases) -> y, log-sum-exp, workspace
void packed_attention(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const int next = s.second ? 3 : 2;
  float* const workspace = a.floats(next + 2);
  attend(s, {.qkv = a.floats(0),
             .all_keys = a.floats(1),
             .table = s.second ? a.floats(2) : nullptr,
             .y = a.floats(next),
             .lse = a.floats(next + 1),
             .scores = workspace + (s.second ? biases_by_distance(s.sequence, s.keys) : 0),
             .biases = workspace});
}

// dy, queries, keys and values, (rows of biases), y, log-sum-exp -> dqueries, dkeys and dvalues,
// (gradients of the rows), workspace
void packed_attention_gradient(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const int next = s.second ? 4 : 3;
  float* const dqueries = a.floats(next + 2);
  float* const dkeys = a.floats(next + 3);
  float* const dtable = s.second ? a.floats(next + 4) : nullptr;
  float* const workspace = a.floats(s.second ? next + 5 : next + 4);
  zero(dqueries, s.sequence * s.batch * s.heads * s.head_dim);
  zero(dkeys, s.keys * s.batch * 2 * s.kv_heads * s.head_dim);
  if (s.second) zero(dtable, (s.buckets * s.all_heads + s.inner - 1) / s.inner * s.batch * s.inner);
  attend_back(s, {.dy = a.floats(0),
                  .qkv = a.floats(1),
                  .all_keys = a.floats(2),
                  .table = s.second ? a.floats(3) : nullptr,
                  .y = a.floats(next),
                  .lse = a.floats(next + 1),
                  .dqkv = dqueries,
                  .dkeys = dkeys,
                  .dtable = dtable,
                  .probabilities = workspace + (s.second ? 2 * biases_by_distance(s.sequence, s.keys) : 0),
                  .biases = workspace});
}

}  // namespace parplan::PARPLAN_CPU_NAMESPACE
