#include "runtime/device/cuda/kernels/ordered_reduction.h"

#include <string>

#include "runtime/device/cuda/kernels/load_store.h"
#include "runtime/device/cuda/kernels/thread_reduction.h"
#include "runtime/device/cuda/kernels/work_division.h"

namespace parplan {
namespace {

struct Inputs {
  const void* begin[most_inputs_in_order] = {};
  int count = 0;
};

template <class T, int width, class Combine>
__global__ void combine_in_order(FlatRange range, T* out, Inputs inputs) {
  for_each_flat<width>(range, [&](std::int64_t i, auto count) {
    constexpr int n = decltype(count)::width;
    float result[n], next[n];
    load(static_cast<const T*>(inputs.begin[0]) + i, result);
    for (int input = 1; input < inputs.count; ++input) {
      load(static_cast<const T*>(inputs.begin[input]) + i, next);
#pragma unroll
      for (int k = 0; k < n; ++k) result[k] = Combine::of(result[k], next[k]);
    }
    store(out + i, result);
  });
}

template <class Combine>
void submit(void* out, std::span<const void* const> from, std::int64_t count, DataType type, cudaStream_t stream) {
  PARPLAN_ASSERT(!from.empty() && from.size() <= most_inputs_in_order, std::to_string(from.size()) + " inputs");
  Inputs inputs;
  for (const void* input : from) inputs.begin[inputs.count++] = input;
  dispatch(type, [&](auto number) {
    using T = typename decltype(number)::Type;
    T* to = static_cast<T*>(out);
    const T* other = to;  // one whose alignment differs from that of `out`, if any
    for (const void* input : from)
      if ((reinterpret_cast<std::uintptr_t>(input) - reinterpret_cast<std::uintptr_t>(out)) % 16 != 0)
        other = static_cast<const T*>(input);
    submit_flat<vector_width<T>>(count, {to, other}, [&](auto width, FlatRange range, const Grid& grid) {
      launch("reduce in order", combine_in_order<T, decltype(width)::width, Combine>, grid, stream, range, to, inputs);
    });
  });
}

}  // namespace

void sum_in_order(void* out, std::span<const void* const> inputs, std::int64_t count, DataType type,
                  cudaStream_t stream) {
  submit<Sum>(out, inputs, count, type, stream);
}

void max_in_order(void* out, std::span<const void* const> inputs, std::int64_t count, DataType type,
                  cudaStream_t stream) {
  submit<Maximum>(out, inputs, count, type, stream);
}

}  // namespace parplan
