#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "runtime/device/cpu/cpu_backend.h"

// Shared by the tests of kernels: arrays that notice writes past their end, calls, and comparison
// with numbers that were computed in double precision.
namespace parplan::testing {

constexpr float poison = std::numeric_limits<float>::quiet_NaN();

// `size` floats, 64-byte aligned plus `shift` floats, with guards before and after.
class Array {
 public:
  explicit Array(std::int64_t size, float fill = poison, std::int64_t shift = 0)
      : size_(size), memory_(static_cast<float*>(::operator new(bytes(size), std::align_val_t{64}))),
        data_(memory_ + 32 + shift) {
    for (std::int64_t i = -16; i < size + 16; ++i) data_[i] = guard;
    for (std::int64_t i = 0; i < size; ++i) data_[i] = fill;
  }
  Array(const std::vector<double>& values, std::int64_t shift = 0)
      : Array(static_cast<std::int64_t>(values.size()), poison, shift) {
    for (std::int64_t i = 0; i < size_; ++i) data_[i] = static_cast<float>(values[i]);
  }
  Array(Array&& other) noexcept : size_(other.size_), memory_(other.memory_), data_(other.data_) {
    other.memory_ = nullptr;
  }
  ~Array() {
    if (memory_ == nullptr) return;
    for (std::int64_t i = 0; i < 16; ++i) {
      CHECK(data_[-1 - i] == guard);
      CHECK(data_[size_ + i] == guard);
    }
    ::operator delete(memory_, std::align_val_t{64});
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  Array& operator=(Array&&) = delete;

  std::int64_t size() const { return size_; }
  float* data() const { return data_; }
  float& operator[](std::int64_t i) const { return data_[i]; }
  std::vector<double> values() const { return {data_, data_ + size_}; }

 private:
  static constexpr float guard = 12345.678f;
  static std::size_t bytes(std::int64_t size) { return static_cast<std::size_t>(size + 96) * sizeof(float); }

  std::int64_t size_;
  float* memory_;
  float* data_;
};

// Numbers in [-scale, scale) that look random; exactly representable in fp32.
inline std::vector<double> numbers(std::int64_t count, int seed, double scale = 1.0) {
  std::vector<double> result;
  std::uint64_t state = 88172645463325252ull + static_cast<std::uint64_t>(seed) * 2654435761ull;
  for (std::int64_t i = 0; i < count; ++i) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    const double unit = static_cast<double>(state >> 40) / static_cast<double>(1 << 24);
    result.push_back(static_cast<float>((2.0 * unit - 1.0) * scale));
  }
  return result;
}

inline void* pointer(const Array& array) { return array.data(); }
inline void* pointer(const std::vector<std::int32_t>& tokens) { return const_cast<std::int32_t*>(tokens.data()); }
inline void* pointer(const std::vector<std::uint8_t>& codes) { return const_cast<std::uint8_t*>(codes.data()); }
inline void* pointer(float* data) { return data; }

// Runs one kernel; if its row has a workspace, one of exactly the size that the row promises is
// appended.
template <class... Operands>
void run(Backend& backend, OpKind kind, const OpShape& shape, const Operands&... operands) {
  std::vector<void*> pointers = {pointer(operands)...};
  const OpRow& row = row_of(kind);
  std::unique_ptr<Array> workspace;
  if (row.cpu_workspace != nullptr) {
    workspace = std::make_unique<Array>(row.cpu_workspace(shape).count / 4);
    pointers.push_back(workspace->data());
  }
  backend.run(0, {.kind = kind, .shape = shape, .operands = pointers});
}

inline void check_near(const Array& found, const std::vector<double>& wanted, double tolerance) {
  REQUIRE(found.size() == static_cast<std::int64_t>(wanted.size()));
  double largest = 0.0;
  for (const double w : wanted) largest = std::max(largest, std::abs(w));
  std::int64_t worst = 0;
  double worst_error = -1.0;
  for (std::int64_t i = 0; i < found.size(); ++i) {
    const double error = std::abs(static_cast<double>(found[i]) - wanted[i]);
    if (!(error <= worst_error)) {
      worst_error = std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
      worst = i;
    }
  }
  if (found.size() == 0) return;
  INFO("element ", worst, ": ", found[worst], " instead of ", wanted[worst]);
  CHECK(worst_error <= tolerance * std::max(largest, 1.0));
}

inline bool same_bits(const float* a, const float* b, std::int64_t count) {
  return std::memcmp(a, b, static_cast<std::size_t>(count) * sizeof(float)) == 0;
}

// The gradient of `loss` at x by central differences in double precision.
inline std::vector<double> slopes(const std::function<double(const std::vector<double>&)>& loss,
                                  std::vector<double> x) {
  constexpr double step = 1e-5;
  std::vector<double> result;
  for (double& value : x) {
    const double kept = value;
    value = kept + step;
    const double above = loss(x);
    value = kept - step;
    const double below = loss(x);
    value = kept;
    result.push_back((above - below) / (2 * step));
  }
  return result;
}

inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Runs `body` once for every instruction set of this machine.
inline void on_every_instruction_set(const std::function<void(Backend&)>& body) {
  for (const std::string& name : cpu_instruction_sets()) {
    INFO("instruction set ", name);
    const std::unique_ptr<Backend> backend = make_cpu_backend(name);
    body(*backend);
  }
}

}  // namespace parplan::testing
