#include "runtime/device/cpu/kernels/kernels.h"
#include "runtime/device/cpu/kernels/wide.h"

namespace parplan::PARPLAN_CPU_NAMESPACE {

namespace {

PARPLAN_INLINE Wide sigmoid(const Wide& x) { return 1.0f / (1.0f + exponential(-x)); }

// GELU by tanh (Hugging Face "gelu_new"): x/2 (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3), which is
// x sigmoid(2 u), without the cancellation.
struct GeluTanh {
  static constexpr float linear = 1.5957691216057308f;  // 2 sqrt(2/pi)
  static constexpr float cubic = static_cast<float>(1.5957691216057308 * 0.044715);
  PARPLAN_INLINE static Wide value(const Wide& x) { return x * sigmoid(twice_u(x)); }
  PARPLAN_INLINE static Wide slope(const Wide& x) {
    const Wide s = sigmoid(twice_u(x));
    return s + x * s * (1.0f - s) * (linear + 3.0f * cubic * (x * x));
  }
  PARPLAN_INLINE static Wide twice_u(const Wide& x) {
    return x * (linear + cubic * (x * x));
  }
};

struct GeluErf {
  PARPLAN_INLINE static Wide cumulative(const Wide& x) { return 0.5f + 0.5f * error_function(x * 0.7071067811865475f); }
  PARPLAN_INLINE static Wide value(const Wide& x) { return x * cumulative(x); }
  PARPLAN_INLINE static Wide slope(const Wide& x) {
    return cumulative(x) + x * (0.3989422804014327f * exponential(-0.5f * (x * x)));
  }
};

struct Relu {
  PARPLAN_INLINE static Wide value(const Wide& x) { return x > 0.0f ? x : Wide{}; }
  PARPLAN_INLINE static Wide slope(const Wide& x) { return x > 0.0f ? splat(1.0f) : Wide{}; }
};

template <class Function>
void apply(const CpuKernelArguments& a) {
  const float* x = a.floats(0);
  float* y = a.floats(1);
  for_each_wide(elements(a.shape),
                [&](std::int64_t i, auto lanes) { store(y + i, Function::value(load(x + i, lanes)), lanes); });
}

template <class Function>
void apply_gradient(const CpuKernelArguments& a) {
  const float* dy = a.floats(0);
  const float* x = a.floats(1);
  float* dx = a.floats(2);
  for_each_wide(elements(a.shape), [&](std::int64_t i, auto lanes) {
    Wide d = load(dy + i, lanes) * Function::slope(load(x + i, lanes));
    if (a.shape.accumulate) d += load(dx + i, lanes);
    store(dx + i, d, lanes);
  });
}

}  // namespace

// x -> y
void activation(const CpuKernelArguments& a) {
  switch (a.shape.activation) {
    case ActivationKind::gelu_tanh: return apply<GeluTanh>(a);
    case ActivationKind::gelu_erf: return apply<GeluErf>(a);
    case ActivationKind::relu: return apply<Relu>(a);
  }
}

// dy, x -> dx
void activation_gradient(const CpuKernelArguments& a) {
  switch (a.shape.activation) {
    case ActivationKind::gelu_tanh: return apply_gradient<GeluTanh>(a);
    case ActivationKind::gelu_erf: return apply_gradient<GeluErf>(a);
    case ActivationKind::relu: return apply_gradient<Relu>(a);
  }
}

// gate, up -> y
void gate(const CpuKernelArguments& a) {
  const float* gate = a.floats(0);
  const float* up = a.floats(1);
  float* y = a.floats(2);
  for_each_wide(elements(a.shape), [&](std::int64_t i, auto lanes) {
    const Wide g = load(gate + i, lanes);
    store(y + i, g * sigmoid(g) * load(up + i, lanes), lanes);
  });
}

// dy, gate, up -> dgate, dup; both are read before either is written, so that they may share storage.
void gate_gradient(const CpuKernelArguments& a) {
  const float* dy = a.floats(0);
  const float* gate = a.floats(1);
  const float* up = a.floats(2);
  float* dgate = a.floats(3);
  float* dup = a.floats(4);
  for_each_wide(elements(a.shape), [&](std::int64_t i, auto lanes) {
    const Wide d = load(dy + i, lanes), g = load(gate + i, lanes), u = load(up + i, lanes);
    const Wide s = sigmoid(g);
    Wide to_gate = d * u * (s + g * s * (1.0f - s));
    Wide to_up = d * (g * s);
    if (a.shape.accumulate) {
      to_gate += load(dgate + i, lanes);
      to_up += load(dup + i, lanes);
    }
    store(dgate + i, to_gate, lanes);
    store(dup + i, to_up, lanes);
  });
}

// a, (b), (bias) -> y
void add(const CpuKernelArguments& a) {
  const std::int64_t columns = a.shape.columns;
  int operand = 0;
  const float* x = a.floats(operand++);
  const float* b = a.shape.second ? a.floats(operand++) : nullptr;
  const float* bias = a.shape.bias ? a.floats(operand++) : nullptr;
  float* y = a.floats(operand);
  for (std::int64_t row = 0; row < a.shape.rows; ++row, x += columns, y += columns) {
    for_each_wide(columns, [&](std::int64_t i, auto lanes) {
      Wide v = load(x + i, lanes);
      if (b != nullptr) v += load(b + row * columns + i, lanes);
      if (bias != nullptr) v += load(bias + i, lanes);
      store(y + i, v, lanes);
    });
  }
}

// dy -> dbias +=
void bias_gradient(const CpuKernelArguments& a) {
  const std::int64_t columns = a.shape.columns;
  const float* dy = a.floats(0);
  float* dbias = a.floats(1);
  for (std::int64_t row = 0; row < a.shape.rows; ++row, dy += columns)
    for (std::int64_t i = 0; i < columns; ++i) dbias[i] += dy[i];
}

// x -> y +=
void accumulate(const CpuKernelArguments& a) {
  const std::int64_t n = elements(a.shape);
  const float* x = a.floats(0);
  float* y = a.floats(1);
  for (std::int64_t i = 0; i < n; ++i) y[i] += x[i];
}

// -> y = 0
void fill_zero(const CpuKernelArguments& a) { __builtin_memset(a.operands[0], 0, elements(a.shape) * sizeof(float)); }

// x -> y = x
void copy(const CpuKernelArguments& a) {
  if (a.operands[0] == a.operands[1]) return;
  __builtin_memcpy(a.operands[1], a.operands[0], elements(a.shape) * sizeof(float));
}

}  // namespace parplan::PARPLAN_CPU_NAMESPACE
