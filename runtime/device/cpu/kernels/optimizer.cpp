#include "planner/graph/dynamic_quantization.h"
#include "planner/graph/newton_schulz.h"
#include "runtime/device/cpu/kernels/kernels.h"
#include "runtime/device/cpu/kernels/simd.h"

namespace parplan::PARPLAN_CPU_NAMESPACE {

namespace {

// The operands of an optimizer kernel after those that its shape always has, and what follows from
// them for the step.
struct Gradients {
  float factor = 1.0f;    // of gradients
  std::int64_t step = 1;  // for bias correction
  bool skipped = false;   // nothing may change
  float* master = nullptr;

  // Gradients are clipped by min(1, clip / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_;
  // the norm is that of the gradients without the loss scale.
  Gradients(const CpuKernelArguments& a, int next) : step(a.scalars->step) {
    const float* sum_of_squares = a.shape.norm ? a.floats(next++) : nullptr;
    if (a.shape.master) master = a.floats(next++);
    double scale = 1.0;
    if (a.shape.scaled) {
      const LossScale& loss_scale = a.loss_scale(next++);
      scale = loss_scale.scale;
      step -= static_cast<std::int64_t>(loss_scale.skipped_steps);
    }
    skipped = (a.shape.scaled || a.scalars->skips_not_finite) && sum_of_squares != nullptr &&
              !__builtin_isfinite(*sum_of_squares);
    double clip = 1.0;
    if (sum_of_squares != nullptr && a.scalars->clip_norm > 0.0) {
      const double norm = __builtin_sqrt(static_cast<double>(*sum_of_squares)) / scale;
      const double wanted = a.scalars->clip_norm / (norm + 1e-6);
      clip = wanted < 1.0 ? wanted : 1.0;
    }
    factor = static_cast<float>(clip / scale);
  }
  // The array that is updated, and from which the parameter is rewritten.
  float* updated(float* parameter) const { return master != nullptr ? master : parameter; }
  void deliver(float* parameter, std::int64_t n) const {
    if (master != nullptr) __builtin_memcpy(parameter, master, n * sizeof(float));
  }
};

double power(double base, std::int64_t exponent) { return __builtin_pow(base, static_cast<double>(exponent)); }

// Runs steps(arrays, n) on the elements, with n always a multiple of 16: the rest goes through a
// padded copy. The steps are never inlined, so each element meets the same instructions wherever a
// ZeRO shard begins or ends.
template <int Arrays, class Steps>
void in_sixteens(float* const (&arrays)[Arrays], std::int64_t n, const Steps& steps) {
  const std::int64_t whole = n / 16 * 16;
  const std::int64_t rest = n - whole;
  if (whole > 0) steps(arrays, whole);
  if (rest == 0) return;
  alignas(64) float copies[Arrays][16] = {};
  float* pointers[Arrays];
  for (int i = 0; i < Arrays; ++i) {
    __builtin_memcpy(copies[i], arrays[i] + whole, rest * sizeof(float));
    pointers[i] = copies[i];
  }
  steps(pointers, 16);
  for (int i = 1; i < Arrays; ++i) __builtin_memcpy(arrays[i] + whole, copies[i], rest * sizeof(float));
}

struct AdamConstants {
  float clip, keep, coupled_decay, beta1, rest1, beta2, rest2, step_size, root, epsilon;
};

[[gnu::noinline]] void adam_steps(const AdamConstants& constants, const float* __restrict gradient,
                                  float* __restrict parameter, float* __restrict first, float* __restrict second,
                                  std::int64_t n) {
  const AdamConstants c = constants;
  for (std::int64_t i = 0; i < n / 16 * 16; ++i) {
    const float g = gradient[i] * c.clip + c.coupled_decay * parameter[i];
    const float m = c.beta1 * first[i] + c.rest1 * g;
    const float v = c.beta2 * second[i] + c.rest2 * (g * g);
    first[i] = m;
    second[i] = v;
    parameter[i] = parameter[i] * c.keep - c.step_size * (m / (__builtin_sqrtf(v) / c.root + c.epsilon));
  }
}

AdamConstants adam_constants(const CpuKernelArguments& a, const Gradients& gradients) {
  const StepScalars& t = *a.scalars;
  const double decay = a.shape.weight_decay ? t.weight_decay : 0.0;
  return {
      .clip = gradients.factor,
      .keep = t.decoupled_decay ? static_cast<float>(1.0 - t.learning_rate * decay) : 1.0f,
      .coupled_decay = t.decoupled_decay ? 0.0f : static_cast<float>(decay),
      .beta1 = static_cast<float>(t.beta1),
      .rest1 = static_cast<float>(1.0 - t.beta1),
      .beta2 = static_cast<float>(t.beta2),
      .rest2 = static_cast<float>(1.0 - t.beta2),
      .step_size = static_cast<float>(t.learning_rate / (1.0 - power(t.beta1, gradients.step))),
      .root = static_cast<float>(__builtin_sqrt(1.0 - power(t.beta2, gradients.step))),
      .epsilon = static_cast<float>(t.epsilon),
  };
}

// Quantized moments, a block at a time ------------------------------------------------------------

constexpr int block = static_cast<int>(quantization_block);

// Codes to numbers.
PARPLAN_INLINE void load_block(const CodeValues& values, const std::uint8_t* codes, float scale, float* to,
                               std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = values.of[codes[i]] * scale;
}

// Numbers to codes, as `quantized` (planner/graph/dynamic_quantization.h), sixteen at a time;
// returns their scale.
template <bool is_signed>
PARPLAN_INLINE float store_block(const float* from, std::uint8_t* codes, std::int64_t n) {
  constexpr Decades decades = decades_of({.is_signed = is_signed});
  Wide highest = load(from, Whole{}), lowest = highest;
  for (int i = 16; i < block; i += 16) {
    const Wide x = load(from + i, Whole{});
    highest = maximum(highest, x);
    lowest = x < lowest ? x : lowest;
  }
  const float scale = block_scale(max_lanes(highest), -max_lanes(-lowest));
  const float inverse = inverse_scale(scale);
  std::uint8_t all[block];
  for (int i = 0; i < block; i += 16) {
    const Wide x = load(from + i, Whole{}) * inverse;
    const Wide magnitude = x < 0.0f ? -x : x;
    Wide number = splat(is_signed ? 0.0f : 1.0f);
#pragma GCC unroll 7
    for (const Decade& decade : decades.all) {
      const Wide nearest = decade.slope * magnitude + decade.offset, last = splat(decade.last);
      number = magnitude > decade.above ? (nearest < last ? nearest : last) : number;
    }
    const WideInt whole = __builtin_convertvector(number, WideInt);
    const WideInt top = WideInt{} + 255;
    WideInt code = magnitude > decades.above_last ? top : whole + (is_signed ? 127 : -1);
    if constexpr (is_signed) code = x < 0.0f ? 127 - whole : code;
    for (int lane = 0; lane < 16; ++lane) all[i + lane] = static_cast<std::uint8_t>(code[lane]);
  }
  __builtin_memcpy(codes, all, static_cast<std::size_t>(n));
  return scale;
}

struct Quantized {
  std::uint8_t* first;
  std::uint8_t* second;
  float* first_scales;
  float* second_scales;
};

[[gnu::noinline]] void adam_8bit_steps(const AdamConstants& constants, const float* gradient, float* parameter,
                                       const Quantized& state, std::int64_t n) {
  alignas(64) float first[block], second[block];
  for (std::int64_t b = 0; b * block < n; ++b) {
    const std::int64_t from = b * block, count = n - from < block ? n - from : block;
    load_block(signed_values, state.first + from, state.first_scales[b], first, count);
    load_block(unsigned_values, state.second + from, state.second_scales[b], second, count);
    // What fills up the last block is 0, and stays so.
    for (std::int64_t i = count; i < block; ++i) first[i] = second[i] = 0.0f;
    in_sixteens<4>({const_cast<float*>(gradient) + from, parameter + from, first, second}, count,
                   [&](float* const* p, std::int64_t size) { adam_steps(constants, p[0], p[1], p[2], p[3], size); });
    state.first_scales[b] = store_block<true>(first, state.first + from, count);
    state.second_scales[b] = store_block<false>(second, state.second + from, count);
  }
}

struct SgdConstants {
  float clip, decay, momentum, rate;
};

[[gnu::noinline]] void sgd_steps(const SgdConstants& constants, const float* __restrict gradient,
                                 float* __restrict parameter, std::int64_t n) {
  const SgdConstants c = constants;
  for (std::int64_t i = 0; i < n / 16 * 16; ++i)
    parameter[i] -= c.rate * (gradient[i] * c.clip + c.decay * parameter[i]);
}

[[gnu::noinline]] void sgd_steps_with_momentum(const SgdConstants& constants, const float* __restrict gradient,
                                               float* __restrict parameter, float* __restrict buffer, std::int64_t n) {
  const SgdConstants c = constants;
  for (std::int64_t i = 0; i < n / 16 * 16; ++i) {
    const float b = c.momentum * buffer[i] + (gradient[i] * c.clip + c.decay * parameter[i]);
    buffer[i] = b;
    parameter[i] -= c.rate * b;
  }
}

// As torch.optim.Muon: the momentum is an average, and Nesterov's direction goes on to it from the
// gradient.
[[gnu::noinline]] void muon_momentum_steps(float factor, float rest, float* __restrict gradient,
                                           float* __restrict momentum, std::int64_t n) {
  for (std::int64_t i = 0; i < n / 16 * 16; ++i) {
    const float g = gradient[i] * factor;
    const float m = momentum[i] + rest * (g - momentum[i]);
    momentum[i] = m;
    gradient[i] = m + rest * (g - m);
  }
}

[[gnu::noinline]] void muon_steps(float keep, float rate, const float* __restrict direction,
                                  float* __restrict parameter, std::int64_t n) {
  for (std::int64_t i = 0; i < n / 16 * 16; ++i) parameter[i] = parameter[i] * keep - rate * direction[i];
}

}  // namespace

// x -> y += sum of x^2, added up in double precision
void sum_squares(const CpuKernelArguments& a) {
  const std::int64_t n = elements(a.shape);
  const float* x = a.floats(0);
  WideDouble sum{};
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const WideDouble v = __builtin_convertvector(load(x + i, Whole{}), WideDouble);
    sum += v * v;
  }
  if (i < n) {
    const WideDouble v = __builtin_convertvector(load(x + i, Rest{n - i}), WideDouble);
    sum += v * v;
  }
  double total = 0.0;
  for (int lane = 0; lane < 16; ++lane) total += sum[lane];
  *a.floats(1) += static_cast<float>(total);
}

// gradient, parameter, m, v, (norm), (master), (loss scale). Loshchilov and Hutter 2019, in the
// order of torch.optim.AdamW; without decoupled decay, Kingma and Ba 2015 in the order of
// torch.optim.Adam.
void adamw(const CpuKernelArguments& a) {
  const Gradients gradients(a, 4);
  if (gradients.skipped) return;
  const AdamConstants constants = adam_constants(a, gradients);
  in_sixteens<4>({a.floats(0), gradients.updated(a.floats(1)), a.floats(2), a.floats(3)}, elements(a.shape),
                 [&](float* const* p, std::int64_t n) { adam_steps(constants, p[0], p[1], p[2], p[3], n); });
  gradients.deliver(a.floats(1), elements(a.shape));
}

// gradient, parameter, m, v, scales of m, scales of v, (norm), (master), (loss scale). The same
// step, from moments that are kept in 8 bits (planner/graph/dynamic_quantization.h). It is made
// with the new moments before they are quantized, as in bitsandbytes and torchao.
void adamw_8bit(const CpuKernelArguments& a) {
  const Gradients gradients(a, 6);
  if (gradients.skipped) return;
  const Quantized state{
      .first = a.codes(2), .second = a.codes(3), .first_scales = a.floats(4), .second_scales = a.floats(5)};
  adam_8bit_steps(adam_constants(a, gradients), a.floats(0), gradients.updated(a.floats(1)), state, elements(a.shape));
  gradients.deliver(a.floats(1), elements(a.shape));
}

// gradient, parameter, (momentum), (norm), (master), (loss scale). In the order of torch.optim.SGD.
void sgd(const CpuKernelArguments& a) {
  const StepScalars& t = *a.scalars;
  const bool has_momentum = a.shape.second;
  const Gradients gradients(a, has_momentum ? 3 : 2);
  if (gradients.skipped) return;
  const SgdConstants constants{
      .clip = gradients.factor,
      .decay = a.shape.weight_decay ? static_cast<float>(t.weight_decay) : 0.0f,
      .momentum = static_cast<float>(t.momentum),
      .rate = static_cast<float>(t.learning_rate),
  };
  float* parameter = gradients.updated(a.floats(1));
  if (has_momentum) {
    in_sixteens<3>({a.floats(0), parameter, a.floats(2)}, elements(a.shape), [&](float* const* p, std::int64_t n) {
      sgd_steps_with_momentum(constants, p[0], p[1], p[2], n);
    });
  } else {
    in_sixteens<2>({a.floats(0), parameter}, elements(a.shape),
                   [&](float* const* p, std::int64_t n) { sgd_steps(constants, p[0], p[1], n); });
  }
  gradients.deliver(a.floats(1), elements(a.shape));
}

// gradient, momentum, (norm), (loss scale)
void muon_momentum(const CpuKernelArguments& a) {
  OpShape shape = a.shape;
  shape.master = false;  // it updates no parameter
  const Gradients gradients({.shape = shape, .operands = a.operands, .scalars = a.scalars}, 2);
  if (gradients.skipped) return;
  const float rest = static_cast<float>(1.0 - a.scalars->momentum);
  // The first array is not written back.
  in_sixteens<3>({a.floats(0), a.floats(1), a.floats(0)}, elements(a.shape),
                 [&](float* const* p, std::int64_t n) { muon_momentum_steps(gradients.factor, rest, p[2], p[1], n); });
}

// x, its sum of squares -> x / norm
void normalize_matrix(const CpuKernelArguments& a) {
  const float* x = a.floats(0);
  float* y = a.floats(2);
  const double norm = __builtin_sqrt(static_cast<double>(*a.floats(1)));
  const float inverse = static_cast<float>(1.0 / (norm > least_matrix_norm ? norm : least_matrix_norm));
  for_each_wide(elements(a.shape),
                [&](std::int64_t i, auto lanes) { store(y + i, load(x + i, lanes) * inverse, lanes); });
}

// A, A A -> in the place of the second, a I + b A + c A A
void newton_schulz_polynomial(const CpuKernelArguments& a) {
  const std::int64_t rows = a.shape.rows, columns = a.shape.columns;
  const float* square = a.floats(0);
  float* result = a.floats(1);
  const float b = static_cast<float>(newton_schulz.b), c = static_cast<float>(newton_schulz.c);
  for_each_wide(rows * columns, [&](std::int64_t i, auto lanes) {
    store(result + i, load(square + i, lanes) * b + load(result + i, lanes) * c, lanes);
  });
  for (std::int64_t i = 0; i < rows && i < columns; ++i) result[i * columns + i] += static_cast<float>(newton_schulz.a);
}

// direction, parameter, (norm), (master), (loss scale). As torch.optim.Muon.
void muon(const CpuKernelArguments& a) {
  const StepScalars& t = *a.scalars;
  const Gradients gradients(a, 2);
  if (gradients.skipped) return;
  const double decay = a.shape.weight_decay ? t.weight_decay : 0.0;
  const float keep = static_cast<float>(1.0 - t.learning_rate * decay),
              rate = static_cast<float>(t.learning_rate * a.shape.factor);
  in_sixteens<2>({a.floats(0), gradients.updated(a.floats(1))}, elements(a.shape),
                 [&](float* const* p, std::int64_t n) { muon_steps(keep, rate, p[0], p[1], n); });
  gradients.deliver(a.floats(1), elements(a.shape));
}

// norm -> loss scale. In the order of torch.amp.GradScaler.update.
void update_loss_scale(const CpuKernelArguments& a) {
  LossScale& loss_scale = a.loss_scale(1);
  if (!__builtin_isfinite(*a.floats(0))) {
    loss_scale.scale *= 0.5f;
    loss_scale.good_steps = 0.0f;
    loss_scale.skipped_steps += 1.0f;
    return;
  }
  loss_scale.good_steps += 1.0f;
  if (loss_scale.good_steps < loss_scale_growth_interval) return;
  loss_scale.good_steps = 0.0f;
  if (__builtin_isfinite(loss_scale.scale * 2.0f)) loss_scale.scale *= 2.0f;
}

}  // namespace parplan::PARPLAN_CPU_NAMESPACE
