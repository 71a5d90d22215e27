#pragma once

#include <cstdint>

#include "runtime/device/cuda/kernels/arguments.h"

namespace parplan {

// Where one sample's query head, or key/value head, finds its rows. Activations are [sequence, batch, width]; in the
// fused width stand, per key/value head: its query heads, the key, the value, each head_dim wide. The output has the
// query heads in the same order; statistics (log-sum-exp, sums of dy * y) are fp32 [batch, heads, sequence]. Offsets
// and strides count elements.
struct AttentionLayout {
  int sequence = 0;
  int heads = 0;
  int per_group = 0;  // query heads for each key/value head
  int head_dim = 0;
  std::int64_t qkv_width = 0;
  std::int64_t y_width = 0;
  std::int64_t qkv_stride = 0;  // from a position to the next
  std::int64_t y_stride = 0;
  float scale = 0.0f;  // of scores: 1 / sqrt(head_dim)

  __host__ __device__ std::int64_t group(int sample, int group) const {
    return sample * qkv_width + static_cast<std::int64_t>(group) * (per_group + 2) * head_dim;
  }
  __host__ __device__ std::int64_t query(int sample, int head) const {
    return group(sample, head / per_group) + head % per_group * head_dim;
  }
  __host__ __device__ std::int64_t key(int sample, int kv_head) const {
    return group(sample, kv_head) + per_group * head_dim;
  }
  __host__ __device__ std::int64_t value(int sample, int kv_head) const { return key(sample, kv_head) + head_dim; }
  __host__ __device__ std::int64_t y(int sample, int head) const {
    return sample * y_width + static_cast<std::int64_t>(head) * head_dim;
  }
  __host__ __device__ std::int64_t statistics(int sample, int head) const {
    return (static_cast<std::int64_t>(sample) * heads + head) * sequence;
  }
};

struct AttentionForward {
  AttentionLayout layout;
  int batch = 0;
  const void* qkv = nullptr;
  void* y = nullptr;
  float* log_sum_exp = nullptr;
};

struct AttentionBackward {
  AttentionLayout layout;
  int batch = 0;
  const void* dy = nullptr;
  const void* qkv = nullptr;
  const void* y = nullptr;
  const float* log_sum_exp = nullptr;
  void* dqkv = nullptr;
  float* sums = nullptr;  // of dy * y
};

// On matrix units (attention_matrix_units.cu): bf16 and fp16, some head dims; rows of qkv, y and their gradients must
// be aligned to 16 bytes. False, with nothing submitted: not for this type or head dim.
bool attention_on_matrix_units(const AttentionForward& work, DataType type, cudaStream_t stream);
bool attention_gradient_on_matrix_units(const AttentionBackward& work, DataType type, cudaStream_t stream);

// For every type, head dim up to 256 and alignment (attention_general.cu); fp32 arithmetic.
inline constexpr int most_attention_head_dim = 256;
void attention_general(const AttentionForward& work, DataType type, cudaStream_t stream);
void attention_gradient_general(const AttentionBackward& work, DataType type, cudaStream_t stream);

}  // namespace parplan
