#include "runtime/device/cpu/kernels/kernels.h"

namespace parplan::PARPLAN_CPU_NAMESPACE {

// -> y = 0
void fill_zero(const CpuKernelArguments& a) { __builtin_memset(a.operands[0], 0, elements(a.shape) * sizeof(float)); }

// x -> y = x
void copy(const CpuKernelArguments& a) {
  if (a.operands[0] == a.operands[1]) return;
  __builtin_memcpy(a.operands[1], a.operands[0], elements(a.shape) * sizeof(float));
}

// x [rows, inner, columns] -> y [inner, rows, columns]
void transpose_blocks(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const float* x = a.floats(0);
  float* y = a.floats(1);
  for (std::int64_t block = 0; block < s.inner; ++block)
    for (std::int64_t row = 0; row < s.rows; ++row, y += s.columns)
      __builtin_memcpy(y, x + (row * s.inner + block) * s.columns, s.columns * sizeof(float));
}

// x [rows, inner] -> y [rows, columns]: the columns from `begin` on
void take_columns(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const float* x = a.floats(0) + s.begin;
  float* y = a.floats(1);
  for (std::int64_t row = 0; row < s.rows; ++row, x += s.inner, y += s.columns)
    __builtin_memcpy(y, x, s.columns * sizeof(float));
}

// x [rows, columns] -> y [rows, inner], in the columns from `begin` on
void put_columns(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const float* x = a.floats(0);
  float* y = a.floats(1) + s.begin;
  for (std::int64_t row = 0; row < s.rows; ++row, x += s.columns, y += s.inner)
    __builtin_memcpy(y, x, s.columns * sizeof(float));
}

namespace {

// Elements of the rows that are moved, and those before them: positions come first.
std::int64_t moved(const OpShape& s) {
  return s.sequence * s.batch * s.columns;
}
std::int64_t before(const OpShape& s) {
  return s.begin * s.batch * s.columns;
}

void move(float* to, const float* from, std::int64_t count) {
  __builtin_memcpy(to, from, count * sizeof(float));
}
void clear(float* to, std::int64_t count) {
  __builtin_memset(to, 0, count * sizeof(float));
}

}  // namespace

// x [positions, batch, columns] -> y: `sequence` positions from `begin` on
void take_rows(const CpuKernelArguments& a) {
  move(a.floats(1), a.floats(0) + before(a.shape), moved(a.shape));
}

// dy -> dx (+=)
void take_rows_gradient(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const float* dy = a.floats(0);
  float* dx = a.floats(1);
  const std::int64_t first = before(s), count = moved(s);
  if (s.accumulate) {
    for (std::int64_t i = 0; i < count; ++i) dx[first + i] += dy[i];
    return;
  }
  clear(dx, first);
  move(dx + first, dy, count);
  clear(dx + first + count, s.rows * s.columns - first - count);
}

// x, y -> z: x with y from position `begin` on; x may be z
void put_rows(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  float* z = a.floats(2);
  const float* x = a.floats(0);
  const std::int64_t first = before(s), count = moved(s), rest = s.rows * s.columns - first - count;
  if (x != z) {
    move(z, x, first);
    move(z + first + count, x + first + count, rest);
  }
  move(z + first, a.floats(1), count);
}

// dz -> dx, dy; dz may be dx
void put_rows_gradient(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const float* dz = a.floats(0);
  float* dx = a.floats(1);
  const std::int64_t first = before(s), count = moved(s), rest = s.rows * s.columns - first - count;
  move(a.floats(2), dz + first, count);
  if (dx != dz) {
    move(dx, dz, first);
    move(dx + first + count, dz + first + count, rest);
  }
  clear(dx + first, count);
}

// x, table -> y: x, and for each sample the table's elements in `sequence` rows behind it
void append_rows(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const float* table = a.floats(1);
  float* y = a.floats(2);
  move(y, a.floats(0), s.rows * s.columns);
  y += s.rows * s.columns;
  for (std::int64_t row = 0; row < s.sequence; ++row)
    for (std::int64_t sample = 0; sample < s.batch; ++sample, y += s.columns) {
      const std::int64_t left = s.inner - row * s.columns, count = left < s.columns ? left : s.columns;
      move(y, table + row * s.columns, count);
      clear(y + count, s.columns - count);
    }
}

// dy -> dx, (dtable +=): samples are added in order
void append_rows_gradient(const CpuKernelArguments& a) {
  const OpShape& s = a.shape;
  const float* dy = a.floats(0);
  move(a.floats(1), dy, s.rows * s.columns);
  if (s.freezes_first) return;
  float* dtable = a.floats(2);
  dy += s.rows * s.columns;
  for (std::int64_t element = 0; element < s.inner; ++element) {
    float sum = 0.0f;
    for (std::int64_t sample = 0; sample < s.batch; ++sample)
      sum += dy[(element / s.columns * s.batch + sample) * s.columns + element % s.columns];
    dtable[element] += sum;
  }
}

}  // namespace parplan::PARPLAN_CPU_NAMESPACE
