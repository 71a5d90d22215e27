#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "runtime/device/backend.h"
#include "runtime/device/cpu/host_conversion.h"

namespace parplan::testing {

// Numbers on a device, in a type, between guards that notice writes outside. Values that are not
// given are poison: bytes of 0xff, a NaN in every floating-point type. Values given in double are
// rounded to the type; `values` reads back what the device holds.
class DeviceArray {
 public:
  // The first element is `shift` elements away from an address that is a multiple of 256.
  DeviceArray(Backend& backend, DataType type, std::int64_t size, std::int64_t shift = 0)
      : backend_(backend), type_(type), size_(size), shift_(shift) {
    const std::vector<std::byte> poison(static_cast<std::size_t>(memory_bytes()), std::byte{0xff});
    memory_ = static_cast<std::byte*>(backend_.allocate(Bytes(memory_bytes())));
    put(0, poison.data(), memory_bytes());
  }
  DeviceArray(Backend& backend, DataType type, const std::vector<double>& values, std::int64_t shift = 0)
      : DeviceArray(backend, type, static_cast<std::int64_t>(values.size()), shift) {
    const std::vector<float> single(values.begin(), values.end());
    std::vector<std::byte> elements(static_cast<std::size_t>(bytes()));
    if (type == DataType::int32) {
      const std::vector<std::int32_t> whole(values.begin(), values.end());
      std::memcpy(elements.data(), whole.data(), elements.size());
    } else if (type == DataType::uint8) {
      std::transform(values.begin(), values.end(), elements.begin(),
                     [](double value) { return static_cast<std::byte>(value); });
    } else {
      narrow(type, single.data(), size_, elements.data());
    }
    put(begin(), elements.data(), bytes());
  }
  ~DeviceArray() {
    if (memory_ == nullptr) return;
    check_guards();
    backend_.release(memory_);
  }
  DeviceArray(DeviceArray&& other) noexcept
      : backend_(other.backend_),
        type_(other.type_),
        size_(other.size_),
        shift_(other.shift_),
        memory_(std::exchange(other.memory_, nullptr)) {}
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  DeviceArray& operator=(DeviceArray&&) = delete;

  void* data() const { return memory_ + begin(); }
  std::int64_t size() const { return size_; }
  DataType type() const { return type_; }
  std::int64_t bytes() const { return size_ * size_of(type_); }

  // The bits of the elements in memory; waits for the device.
  std::vector<std::byte> bits() const {
    std::vector<std::byte> found(static_cast<std::size_t>(bytes()));
    get(begin(), found.data(), bytes());
    return found;
  }
  std::vector<double> values() const {
    const std::vector<std::byte> found = bits();
    if (type_ == DataType::int32) {
      std::vector<std::int32_t> whole(static_cast<std::size_t>(size_));
      std::memcpy(whole.data(), found.data(), found.size());
      return {whole.begin(), whole.end()};
    }
    if (type_ == DataType::uint8) {
      std::vector<double> whole;
      for (const std::byte each : found) whole.push_back(std::to_integer<int>(each));
      return whole;
    }
    std::vector<float> single(static_cast<std::size_t>(size_));
    widen(type_, found.data(), size_, single.data());
    return {single.begin(), single.end()};
  }

 private:
  static constexpr std::int64_t guard_bytes = 256;

  std::int64_t begin() const { return guard_bytes + shift_ * size_of(type_); }
  std::int64_t memory_bytes() const { return begin() + bytes() + guard_bytes; }
  void put(std::int64_t at, const void* from, std::int64_t count) const {
    backend_.copy(0, memory_ + at, from, Bytes(count));
    backend_.synchronize();
  }
  void get(std::int64_t at, void* to, std::int64_t count) const {
    backend_.synchronize();
    backend_.copy(0, to, memory_ + at, Bytes(count));
    backend_.synchronize();
  }
  void check_guards() const {
    for (const std::int64_t at : {std::int64_t{0}, begin() + bytes()}) {
      std::vector<std::byte> guard(static_cast<std::size_t>(at == 0 ? begin() : guard_bytes));
      get(at, guard.data(), static_cast<std::int64_t>(guard.size()));
      const bool untouched = std::all_of(guard.begin(), guard.end(), [](std::byte b) { return b == std::byte{0xff}; });
      CHECK_MESSAGE(untouched, "written outside of an array of ", size_, " elements in ", name(type_));
    }
  }

  Backend& backend_;
  DataType type_;
  std::int64_t size_ = 0;
  std::int64_t shift_ = 0;
  std::byte* memory_ = nullptr;
};

// Numbers in [-scale, scale) that look random.
inline std::vector<double> random_numbers(std::int64_t count, int seed, double scale = 1.0) {
  std::vector<double> result;
  std::uint64_t state = 88172645463325252ull + static_cast<std::uint64_t>(seed) * 2654435761ull;
  for (std::int64_t i = 0; i < count; ++i) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    result.push_back((2.0 * static_cast<double>(state >> 40) / static_cast<double>(1 << 24) - 1.0) * scale);
  }
  return result;
}

// Half the distance of neighbouring numbers near 1: the relative error of rounding to the type.
inline double rounding(DataType type) {
  switch (type) {
    case DataType::bf16: return std::ldexp(1.0, -8);
    case DataType::fp16: return std::ldexp(1.0, -11);
    default: return std::ldexp(1.0, -24);
  }
}

}  // namespace parplan::testing
