#include "runtime/device/cpu/kernels/kernels.h"
#include "runtime/device/cpu/kernels/simd.h"

namespace parplan::PARPLAN_CPU_NAMESPACE {

namespace {

PARPLAN_INLINE Wide sigmoid(const Wide& x) { return 1.0f / (1.0f + exponential(-x)); }

// GELU by tanh (Hugging Face "gelu_new"): x/2 (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3),
// which is x sigmoid(2 u), without the cancellation.
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

struct Silu {
  PARPLAN_INLINE static Wide value(const Wide& x) { return x * sigmoid(x); }
  PARPLAN_INLINE static Wide slope(const Wide& x) {
    const Wide s = sigmoid(x);
    return s + x * s * (1.0f - s);
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

template <class Function>
void apply_gate(const CpuKernelArguments& a) {
  const float* gate = a.floats(0);
  const float* up = a.floats(1);
  float* y = a.floats(2);
  for_each_wide(elements(a.shape), [&](std::int64_t i, auto lanes) {
    store(y + i, Function::value(load(gate + i, lanes)) * load(up + i, lanes), lanes);
  });
}

// Everything is read before anything is written, so operands may share storage.
template <class Function>
void apply_gate_gradient(const CpuKernelArguments& a) {
  const float* dy = a.floats(0);
  const float* gate = a.floats(1);
  const float* up = a.floats(2);
  float* dgate = a.floats(3);
  float* dup = a.floats(4);
  for_each_wide(elements(a.shape), [&](std::int64_t i, auto lanes) {
    const Wide d = load(dy + i, lanes), g = load(gate + i, lanes), u = load(up + i, lanes);
    const Wide to_gate = d * u * Function::slope(g);
    const Wide to_up = d * Function::value(g);
    store(dgate + i, to_gate, lanes);
    store(dup + i, to_up, lanes);
  });
}

// One function for each ActivationKind, in its order.
struct ActivationRow {
  ActivationKind kind{};
  CpuKernel value = nullptr;
  CpuKernel gradient = nullptr;
  CpuKernel gate = nullptr;
  CpuKernel gate_gradient = nullptr;
};
template <class Function>
constexpr ActivationRow activation_row(ActivationKind kind) {
  return {kind, apply<Function>, apply_gradient<Function>, apply_gate<Function>, apply_gate_gradient<Function>};
}
constexpr ActivationRow activations[] = {
    activation_row<GeluTanh>(ActivationKind::gelu_tanh), activation_row<GeluErf>(ActivationKind::gelu_erf),
    activation_row<Relu>(ActivationKind::relu), activation_row<Silu>(ActivationKind::silu)};
constexpr bool in_order() {
  for (int i = 0; i < 4; ++i)
    if (static_cast<int>(activations[i].kind) != i) return false;
  return true;
}
static_assert(in_order());

const ActivationRow& activation_row(const OpShape& shape) { return activations[static_cast<int>(shape.activation)]; }

}  // namespace

// x -> y
void activation(const CpuKernelArguments& a) { activation_row(a.shape).value(a); }

// dy, x -> dx
void activation_gradient(const CpuKernelArguments& a) { activation_row(a.shape).gradient(a); }

// gate, up -> y
void gate(const CpuKernelArguments& a) { activation_row(a.shape).gate(a); }

// dy, gate, up -> dgate, dup
void gate_gradient(const CpuKernelArguments& a) { activation_row(a.shape).gate_gradient(a); }

// x -> x * factor
void scale(const CpuKernelArguments& a) {
  const float factor = static_cast<float>(a.shape.factor);
  const float* x = a.floats(0);
  float* y = a.floats(1);
  for_each_wide(elements(a.shape),
                [&](std::int64_t i, auto lanes) { store(y + i, load(x + i, lanes) * factor, lanes); });
}

// dy -> dx
void scale_gradient(const CpuKernelArguments& a) { scale(a); }

// x -> softcap * tanh(x / softcap)
void softcap(const CpuKernelArguments& a) {
  const float cap = static_cast<float>(a.shape.softcap);
  const float* x = a.floats(0);
  float* y = a.floats(1);
  for_each_wide(elements(a.shape), [&](std::int64_t i, auto lanes) {
    store(y + i, cap * hyperbolic_tangent(load(x + i, lanes) / cap), lanes);
  });
}

// dy, y -> dx
void softcap_gradient(const CpuKernelArguments& a) {
  const float cap = static_cast<float>(a.shape.softcap);
  const float* dy = a.floats(0);
  const float* y = a.floats(1);
  float* dx = a.floats(2);
  for_each_wide(elements(a.shape), [&](std::int64_t i, auto lanes) {
    const Wide tangent = load(y + i, lanes) / cap;
    store(dx + i, load(dy + i, lanes) * (1.0f - tangent * tangent), lanes);
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

}  // namespace parplan::PARPLAN_CPU_NAMESPACE
