#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace parplan {

// An allocation that the system refused, with its size: what operator new of the program throws.
class RefusedAllocation : public std::bad_alloc {
 public:
  explicit RefusedAllocation(std::size_t bytes) noexcept : bytes_(bytes) {}
  const char* what() const noexcept override { return "out of memory"; }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  std::size_t bytes_;
};

// "out of memory", and how much was asked for, where that is known.
std::string out_of_memory_text(const std::bad_alloc& failure);

// RunError: so many bytes were asked for, for `what`, and the system has them not.
[[noreturn]] void out_of_memory(double bytes, std::string_view what);

// Makes `values` as long as that. For what may be large: where there is no memory for it, RunError
// says how much was asked for, and for what.
template <class T>
void allocate(std::vector<T>& values, std::int64_t count, std::string_view what) {
  try {
    values.resize(static_cast<std::size_t>(count));
  } catch (const std::bad_alloc&) {
    out_of_memory(static_cast<double>(count) * sizeof(T), what);
  } catch (const std::length_error&) {
    out_of_memory(static_cast<double>(count) * sizeof(T), what);
  }
}

// The same as a new vector; its values are zero.
template <class T>
std::vector<T> allocated(std::int64_t count, std::string_view what) {
  std::vector<T> values;
  allocate(values, count, what);
  return values;
}

}  // namespace parplan
