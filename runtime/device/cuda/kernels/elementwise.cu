#include "runtime/device/cuda/kernels/kernels.h"
#include "runtime/device/cuda/kernels/load_store.h"
#include "runtime/device/cuda/kernels/work_division.h"

namespace parplan {
namespace {

// 1 / y to 2 units in the last place, 0 from 2^126 on (CUDA C++ Programming Guide, intrinsic
// functions).
__device__ __forceinline__ float reciprocal(float y) { return __fdividef(1.0f, y); }
__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + expf(-x)); }

// GELU by tanh (Hugging Face "gelu_new"): x/2 (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3),
// which is x sigmoid(2 u), without the cancellation.
struct GeluTanh {
  static constexpr float linear = 1.5957691216057308f;  // 2 sqrt(2/pi)
  static constexpr float cubic = static_cast<float>(1.5957691216057308 * 0.044715);
  __device__ __forceinline__ static float value(float x) { return x * sigmoid(twice_u(x)); }
  __device__ __forceinline__ static float slope(float x) {
    const float s = sigmoid(twice_u(x));
    // (s (1 - s) comes first: far out it is 0 before the square of x is infinite.)
    const float bend = s * (1.0f - s);
    return bend == 0.0f ? s : s + x * bend * (linear + 3.0f * cubic * (x * x));
  }
  __device__ __forceinline__ static float twice_u(float x) { return x * (linear + cubic * (x * x)); }
};

struct GeluErf {
  __device__ __forceinline__ static float cumulative(float x) { return 0.5f + 0.5f * erff(x * 0.7071067811865475f); }
  __device__ __forceinline__ static float value(float x) { return x * cumulative(x); }
  __device__ __forceinline__ static float slope(float x) {
    return cumulative(x) + x * (0.3989422804014327f * expf(-0.5f * (x * x)));
  }
};

struct Silu {
  __device__ __forceinline__ static float value(float x) { return x * sigmoid(x); }
  __device__ __forceinline__ static float slope(float x) {
    const float s = sigmoid(x);
    return s + x * s * (1.0f - s);
  }
};

// (NaN stays NaN.)
struct Relu {
  __device__ __forceinline__ static float value(float x) { return x <= 0.0f ? 0.0f : x; }
  __device__ __forceinline__ static float slope(float x) { return x > 0.0f ? 1.0f : 0.0f; }
};

template <class Body>
void for_activation(ActivationKind kind, const Body& body) {
  switch (kind) {
    case ActivationKind::gelu_tanh:
      return body(GeluTanh{});
    case ActivationKind::gelu_erf:
      return body(GeluErf{});
    case ActivationKind::relu:
      return body(Relu{});
    case ActivationKind::silu:
      return body(Silu{});
  }
}

template <class T, int width, class Function>
__global__ void apply(FlatRange range, const T* x, T* y) {
  for_each_flat<width>(range, [&](std::int64_t i, auto count) {
    float values[decltype(count)::width];
    load(x + i, values);
#pragma unroll
    for (float& value : values) value = Function::value(value);
    store(y + i, values);
  });
}

template <class T, int width, class Function>
__global__ void apply_gradient(FlatRange range, const T* dy, const T* x, T* dx, bool accumulate) {
  for_each_flat<width>(range, [&](std::int64_t i, auto count) {
    constexpr int n = decltype(count)::width;
    float d[n], at[n], before[n] = {};
    load(dy + i, d);
    load(x + i, at);
    if (accumulate) load(dx + i, before);
#pragma unroll
    for (int k = 0; k < n; ++k) d[k] = before[k] + d[k] * Function::slope(at[k]);
    store(dx + i, d);
  });
}

template <class T, int width, class Function>
__global__ void apply_gate(FlatRange range, const T* gates, const T* up, T* y) {
  for_each_flat<width>(range, [&](std::int64_t i, auto count) {
    constexpr int n = decltype(count)::width;
    float g[n], u[n];
    load(gates + i, g);
    load(up + i, u);
#pragma unroll
    for (int k = 0; k < n; ++k) g[k] = Function::value(g[k]) * u[k];
    store(y + i, g);
  });
}

// Everything is read before anything is written, so operands may share storage.
template <class T, int width, class Function>
__global__ void apply_gate_gradient(FlatRange range, const T* dy, const T* gates, const T* up, T* dgates, T* dup) {
  for_each_flat<width>(range, [&](std::int64_t i, auto count) {
    constexpr int n = decltype(count)::width;
    float d[n], g[n], u[n];
    load(dy + i, d);
    load(gates + i, g);
    load(up + i, u);
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const float to_up = d[k] * Function::value(g[k]);
      g[k] = d[k] * u[k] * Function::slope(g[k]);
      u[k] = to_up;
    }
    store(dgates + i, g);
    store(dup + i, u);
  });
}

template <class T, int width>
__global__ void scale_flat(FlatRange range, const T* x, T* y, float factor) {
  for_each_flat<width>(range, [&](std::int64_t i, auto count) {
    float values[decltype(count)::width];
    load(x + i, values);
#pragma unroll
    for (float& value : values) value *= factor;
    store(y + i, values);
  });
}

template <class T, int width>
__global__ void softcap_flat(FlatRange range, const T* x, T* y, float cap) {
  for_each_flat<width>(range, [&](std::int64_t i, auto count) {
    float values[decltype(count)::width];
    load(x + i, values);
#pragma unroll
    for (float& value : values) value = cap * tanhf(value / cap);
    store(y + i, values);
  });
}

template <class T, int width>
__global__ void softcap_slope(FlatRange range, const T* dy, const T* y, T* dx, float cap) {
  for_each_flat<width>(range, [&](std::int64_t i, auto count) {
    constexpr int n = decltype(count)::width;
    float d[n], at[n];
    load(dy + i, d);
    load(y + i, at);
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const float tangent = at[k] / cap;
      d[k] *= 1.0f - tangent * tangent;
    }
    store(dx + i, d);
  });
}

// y = a + b, b null: y = a
template <class T, int width>
__global__ void add_flat(FlatRange range, const T* a, const T* b, T* y) {
  for_each_flat<width>(range, [&](std::int64_t i, auto count) {
    constexpr int n = decltype(count)::width;
    float sum[n], other[n] = {};
    load(a + i, sum);
    if (b != nullptr) load(b + i, other);
#pragma unroll
    for (int k = 0; k < n; ++k) sum[k] += other[k];
    store(y + i, sum);
  });
}

// y = (a + b) + bias, b null: y = a + bias
template <class T, int width>
__global__ void add_bias(std::int64_t columns, const T* a, const T* b, const T* bias, T* y) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * columns;
  for_each_column<width>(columns, [&](std::int64_t i) {
    float sum[width], other[width] = {}, last[width];
    load(a + row + i, sum);
    if (b != nullptr) load(b + row + i, other);
    load(bias + i, last);
#pragma unroll
    for (int k = 0; k < width; ++k) sum[k] = (sum[k] + other[k]) + last[k];
    store(y + row + i, sum);
  });
}

}  // namespace

// x -> y
void activation(const CudaKernelArguments& a) {
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T* x = a.at<const T>(0);
    T* y = a.at<T>(1);
    for_activation(a.shape.activation, [&](auto function) {
      submit_flat<vector_width<T>>(elements(a.shape), {x, y}, [&](auto width, FlatRange range, const Grid& grid) {
        launch("activation", apply<T, decltype(width)::width, decltype(function)>, grid, a.stream, range, x, y);
      });
    });
  });
}

// dy, x -> dx
void activation_gradient(const CudaKernelArguments& a) {
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T *dy = a.at<const T>(0), *x = a.at<const T>(1);
    T* dx = a.at<T>(2);
    for_activation(a.shape.activation, [&](auto function) {
      submit_flat<vector_width<T>>(elements(a.shape), {dy, x, dx}, [&](auto width, FlatRange range, const Grid& grid) {
        launch("activation_gradient", apply_gradient<T, decltype(width)::width, decltype(function)>, grid, a.stream,
               range, dy, x, dx, a.shape.accumulate);
      });
    });
  });
}

// gate, up -> y
void gate(const CudaKernelArguments& a) {
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T *gates = a.at<const T>(0), *up = a.at<const T>(1);
    T* y = a.at<T>(2);
    for_activation(a.shape.activation, [&](auto function) {
      submit_flat<vector_width<T>>(elements(a.shape), {gates, up, y},
                                   [&](auto width, FlatRange range, const Grid& grid) {
                                     launch("gate", apply_gate<T, decltype(width)::width, decltype(function)>, grid,
                                            a.stream, range, gates, up, y);
                                   });
    });
  });
}

// dy, gate, up -> dgate, dup
void gate_gradient(const CudaKernelArguments& a) {
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T *dy = a.at<const T>(0), *gates = a.at<const T>(1), *up = a.at<const T>(2);
    T *dgates = a.at<T>(3), *dup = a.at<T>(4);
    for_activation(a.shape.activation, [&](auto function) {
      submit_flat<vector_width<T>>(
          elements(a.shape), {dy, gates, up, dgates, dup}, [&](auto width, FlatRange range, const Grid& grid) {
            launch("gate_gradient", apply_gate_gradient<T, decltype(width)::width, decltype(function)>, grid, a.stream,
                   range, dy, gates, up, dgates, dup);
          });
    });
  });
}

// x -> x * factor
void scale(const CudaKernelArguments& a) {
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T* x = a.at<const T>(0);
    T* y = a.at<T>(1);
    submit_flat<vector_width<T>>(elements(a.shape), {x, y}, [&](auto width, FlatRange range, const Grid& grid) {
      launch("scale", scale_flat<T, decltype(width)::width>, grid, a.stream, range, x, y,
             static_cast<float>(a.shape.factor));
    });
  });
}

// dy -> dx
void scale_gradient(const CudaKernelArguments& a) { scale(a); }

// x -> softcap * tanh(x / softcap)
void softcap(const CudaKernelArguments& a) {
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T* x = a.at<const T>(0);
    T* y = a.at<T>(1);
    submit_flat<vector_width<T>>(elements(a.shape), {x, y}, [&](auto width, FlatRange range, const Grid& grid) {
      launch("softcap", softcap_flat<T, decltype(width)::width>, grid, a.stream, range, x, y,
             static_cast<float>(a.shape.softcap));
    });
  });
}

// dy, y -> dx
void softcap_gradient(const CudaKernelArguments& a) {
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T *dy = a.at<const T>(0), *y = a.at<const T>(1);
    T* dx = a.at<T>(2);
    submit_flat<vector_width<T>>(elements(a.shape), {dy, y, dx}, [&](auto width, FlatRange range, const Grid& grid) {
      launch("softcap_gradient", softcap_slope<T, decltype(width)::width>, grid, a.stream, range, dy, y, dx,
             static_cast<float>(a.shape.softcap));
    });
  });
}

// a, (b), (bias) -> y
void add(const CudaKernelArguments& a) {
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    int operand = 0;
    const T* x = a.at<const T>(operand++);
    const T* b = a.shape.second ? a.at<const T>(operand++) : nullptr;
    const T* bias = a.shape.bias ? a.at<const T>(operand++) : nullptr;
    T* y = a.at<T>(operand);
    if (bias == nullptr) {
      submit_flat<vector_width<T>>(elements(a.shape), {x, b != nullptr ? b : x, y},
                                   [&](auto width, FlatRange range, const Grid& grid) {
                                     launch("add", add_flat<T, decltype(width)::width>, grid, a.stream, range, x, b, y);
                                   });
      return;
    }
    submit_rows<vector_width<T>>(
        a.shape.rows, a.shape.columns, {x, b != nullptr ? b : x, bias, y}, [&](auto width, const Grid& grid) {
          launch("add", add_bias<T, decltype(width)::width>, grid, a.stream, a.shape.columns, x, b, bias, y);
        });
  });
}

// x -> y +=
void accumulate(const CudaKernelArguments& a) {
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T* x = a.at<const T>(0);
    T* y = a.at<T>(1);
    submit_flat<vector_width<T>>(elements(a.shape), {x, y}, [&](auto width, FlatRange range, const Grid& grid) {
      launch("accumulate", add_flat<T, decltype(width)::width>, grid, a.stream, range, static_cast<const T*>(y), x, y);
    });
  });
}

}  // namespace parplan
