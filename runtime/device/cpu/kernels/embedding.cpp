#include "runtime/device/cpu/kernels/kernels.h"
#include "runtime/device/cpu/kernels/simd.h"

namespace parplan::PARPLAN_CPU_NAMESPACE {

// tokens, table -> y. Tokens of other shards of the vocabulary give zeros: the sum over shards is
// the whole.
void embedding(const CpuKernelArguments& a) {
  const std::int64_t columns = a.shape.columns;
  const std::int32_t* tokens = a.tokens(0);
  const float* table = a.floats(1);
  float* y = a.floats(2);
  for (std::int64_t row = 0; row < a.shape.rows; ++row, y += columns) {
    const std::int64_t index = tokens[row] - a.shape.begin;
    if (index >= 0 && index < a.shape.valid) {
      __builtin_memcpy(y, table + index * columns, columns * sizeof(float));
    } else {
      __builtin_memset(y, 0, columns * sizeof(float));
    }
  }
}

// Colours, 0 to 255 -> (colour / 255 - 0.5) / 0.5, as transformers' ViTImageProcessor.
void normalize_pixels(const CpuKernelArguments& a) {
  const std::int32_t* colours = a.tokens(0);
  float* y = a.floats(1);
  const std::int64_t count = a.shape.rows * a.shape.columns;
  for (std::int64_t i = 0; i < count; ++i) y[i] = static_cast<float>(colours[i]) * (2.0f / 255.0f) - 1.0f;
}

// dy, tokens -> dtable +=
void embedding_gradient(const CpuKernelArguments& a) {
  const std::int64_t columns = a.shape.columns;
  const float* dy = a.floats(0);
  const std::int32_t* tokens = a.tokens(1);
  for (std::int64_t row = 0; row < a.shape.rows; ++row, dy += columns) {
    const std::int64_t index = tokens[row] - a.shape.begin;
    if (index < 0 || index >= a.shape.valid) continue;
    float* to = a.floats(2) + index * columns;
    for (std::int64_t i = 0; i < columns; ++i) to[i] += dy[i];
  }
}

// x, position table -> y
void add_position(const CpuKernelArguments& a) {
  const std::int64_t columns = a.shape.columns;
  const float* x = a.floats(0);
  float* y = a.floats(2);
  for (std::int64_t s = 0; s < a.shape.sequence; ++s) {
    const float* position = a.floats(1) + a.shape.position(s) * columns;
    for (std::int64_t b = 0; b < a.shape.batch; ++b, x += columns, y += columns)
      for (std::int64_t i = 0; i < columns; ++i) y[i] = x[i] + position[i];
  }
}

// dy -> dtable +=
void add_position_gradient(const CpuKernelArguments& a) {
  const std::int64_t columns = a.shape.columns;
  const float* dy = a.floats(0);
  for (std::int64_t s = 0; s < a.shape.sequence; ++s) {
    float* to = a.floats(1) + a.shape.position(s) * columns;
    for (std::int64_t b = 0; b < a.shape.batch; ++b, dy += columns)
      for (std::int64_t i = 0; i < columns; ++i) to[i] += dy[i];
  }
}

}  // namespace parplan::PARPLAN_CPU_NAMESPACE
