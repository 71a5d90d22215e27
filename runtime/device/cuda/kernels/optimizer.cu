#include "planner/graph/cuda_workspace.h"
#include "planner/graph/dynamic_quantization.h"
#include "planner/graph/newton_schulz.h"
#include "runtime/device/cuda/kernels/kernels.h"
#include "runtime/device/cuda/kernels/load_store.h"
#include "runtime/device/cuda/kernels/thread_reduction.h"
#include "runtime/device/cuda/kernels/work_division.h"

// The step's scalars and the loss scale are read from device memory when the kernels run, so that
// recorded work can be replayed with new values.
namespace parplan {
namespace {

// Sums of squares ---------------------------------------------------------------------------------

constexpr int width = vector_width<float>;

__global__ void sum_squares_of_part(FlatRange range, const float* x, float* parts) {
  __shared__ float shared[1][most_warps];
  float sum = 0.0f;
  for_each_flat<width>(range, [&](std::int64_t i, auto count) {
    float values[decltype(count)::width];
    load(x + i, values);
#pragma unroll
    for (const float value : values) sum = fmaf(value, value, sum);
  });
  sum = over_threads<Sum>(sum, shared);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// One block; halves are added to halves.
__global__ void __launch_bounds__(sum_squares_blocks) add_sums_of_squares(const float* parts, int count, float* y) {
  __shared__ double shared[sum_squares_blocks];
  const int thread = static_cast<int>(threadIdx.x);
  shared[thread] = thread < count ? static_cast<double>(parts[thread]) : 0.0;
  for (int half = static_cast<int>(sum_squares_blocks) / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) shared[thread] += shared[thread + half];
  }
  if (thread == 0) *y += static_cast<float>(shared[0]);
}

// Steps -------------------------------------------------------------------------------------------

// What both optimizers derive from the step. One thread of each block computes it, in double
// precision, like the CPU's kernels.
struct StepOperands {
  const StepScalars* scalars = nullptr;
  const float* sum_of_squares = nullptr;  // null: no clipping
  const LossScale* loss_scale = nullptr;  // null: 1
  bool weight_decay = false;
};

struct Gradients {
  float factor;       // of gradients
  std::int64_t step;  // for bias correction
  bool skipped;      // nothing may change
};

// Gradients are clipped by min(1, clip / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_; the
// norm is that of the gradients without the loss scale.
__device__ inline Gradients gradients_of(const StepOperands& o) {
  Gradients result{1.0f, o.scalars->step, false};
  double scale = 1.0, clip = 1.0;
  if (o.loss_scale != nullptr) {
    scale = static_cast<double>(o.loss_scale->scale);
    result.step -= static_cast<std::int64_t>(o.loss_scale->skipped_steps);
  }
  result.skipped = (o.loss_scale != nullptr || o.scalars->skips_not_finite) && o.sum_of_squares != nullptr &&
                    !(fabsf(*o.sum_of_squares) < __builtin_inff());
  if (o.sum_of_squares != nullptr && o.scalars->clip_norm > 0.0) {
    const double norm = sqrt(static_cast<double>(*o.sum_of_squares)) / scale;
    const double wanted = o.scalars->clip_norm / (norm + 1e-6);
    clip = wanted < 1.0 ? wanted : 1.0;
  }
  result.factor = static_cast<float>(clip / scale);
  return result;
}

struct AdamConstants {
  float factor, keep, coupled_decay, beta1, rest1, beta2, rest2, step_size, inverse_root, epsilon;
  bool skipped;
};

__device__ inline AdamConstants adam_constants(const StepOperands& o) {
  const StepScalars& t = *o.scalars;
  const Gradients gradients = gradients_of(o);
  const double decay = o.weight_decay ? t.weight_decay : 0.0;
  const auto step = static_cast<double>(gradients.step);
  return {.factor = gradients.factor,
          .keep = t.decoupled_decay ? static_cast<float>(1.0 - t.learning_rate * decay) : 1.0f,
          .coupled_decay = t.decoupled_decay ? 0.0f : static_cast<float>(decay),
          .beta1 = static_cast<float>(t.beta1),
          .rest1 = static_cast<float>(1.0 - t.beta1),
          .beta2 = static_cast<float>(t.beta2),
          .rest2 = static_cast<float>(1.0 - t.beta2),
          .step_size = static_cast<float>(t.learning_rate / (1.0 - pow(t.beta1, step))),
          .inverse_root = static_cast<float>(1.0 / sqrt(1.0 - pow(t.beta2, step))),
          .epsilon = static_cast<float>(t.epsilon),
          .skipped = gradients.skipped};
}

// Products that are added are written as fmaf: an element meets the same instructions wherever a
// shard begins or ends. Loshchilov and Hutter 2019, in the order of torch.optim.AdamW; without
// decoupled decay, Kingma and Ba 2015 in the order of torch.optim.Adam.
__device__ __forceinline__ void adam_step(const AdamConstants& c, float gradient, float& parameter, float& first,
                                          float& second) {
  const float g = fmaf(c.coupled_decay, parameter, gradient * c.factor);
  first = fmaf(c.beta1, first, c.rest1 * g);
  second = fmaf(c.beta2, second, c.rest2 * (g * g));
  const float change = first / fmaf(sqrtf(second), c.inverse_root, c.epsilon);
  parameter = fmaf(-c.step_size, change, parameter * c.keep);
}

// A master copy, where there is one, is updated, and the parameter is rewritten from it.
template <class T, bool has_master, int most>
__global__ void adam_steps(FlatRange range, StepOperands operands, const float* gradient, T* parameter, float* first,
                           float* second, float* master) {
  __shared__ AdamConstants shared;
  if (threadIdx.x == 0) shared = adam_constants(operands);
  __syncthreads();
  const AdamConstants c = shared;
  if (c.skipped) return;
  for_each_flat<most>(range, [&](std::int64_t i, auto count) {
    constexpr int n = decltype(count)::width;
    float g[n], p[n], m[n], v[n];
    load(gradient + i, g);
    load(first + i, m);
    load(second + i, v);
    if constexpr (has_master) {
      load(master + i, p);
    } else {
      load(parameter + i, p);
    }
#pragma unroll
    for (int k = 0; k < n; ++k) adam_step(c, g[k], p[k], m[k], v[k]);
    store(first + i, m);
    store(second + i, v);
    if constexpr (has_master) store(master + i, p);
    store(parameter + i, p);
  });
}

// The same step from moments that are kept in 8 bits, with a scale for each block of them; it is
// made with the new moments before they are quantized. A thread block works on such blocks one by
// one, a thread on one element of each.
template <class T, bool has_master>
__global__ void __launch_bounds__(quantization_block)
    adam_8bit_steps(std::int64_t n, StepOperands operands, const float* gradient, T* parameter, std::uint8_t* first,
                    std::uint8_t* second, float* first_scales, float* second_scales, float* master) {
  __shared__ AdamConstants shared;
  __shared__ float first_values[quantization_block], second_values[quantization_block];
  __shared__ float extremes[3][most_warps];
  const int thread = static_cast<int>(threadIdx.x);
  first_values[thread] = DynamicMap{.is_signed = true}.value(thread);
  second_values[thread] = DynamicMap{.is_signed = false}.value(thread);
  if (thread == 0) shared = adam_constants(operands);
  __syncthreads();
  const AdamConstants c = shared;
  if (c.skipped) return;
  const std::int64_t blocks = quantization_blocks(n);
  for (std::int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const std::int64_t i = block * quantization_block + thread;
    const bool is_there = i < n;
    // What fills up the last block is 0, and stays so.
    float g[1] = {0.0f}, p[1] = {0.0f};
    float m = 0.0f, v = 0.0f;
    if (is_there) {
      load(gradient + i, g);
      if constexpr (has_master) {
        load(master + i, p);
      } else {
        load(parameter + i, p);
      }
      m = first_values[first[i]] * first_scales[block];
      v = second_values[second[i]] * second_scales[block];
    }
    adam_step(c, g[0], p[0], m, v);
    // All threads have read the scales before one of them writes the new ones.
    float most[3] = {m, -m, v};
    over_threads<Maximum>(most, extremes);
    const float first_scale = block_scale(most[0], -most[1]), second_scale = block_scale(most[2], 0.0f);
    if (is_there) {
      first[i] = quantized<true>(m * inverse_scale(first_scale));
      second[i] = quantized<false>(v * inverse_scale(second_scale));
      if constexpr (has_master) store(master + i, p);
      store(parameter + i, p);
    }
    if (thread == 0) {
      first_scales[block] = first_scale;
      second_scales[block] = second_scale;
    }
  }
}

struct SgdConstants {
  float factor, decay, momentum, rate;
  bool skipped;
};

__device__ inline SgdConstants sgd_constants(const StepOperands& o) {
  const Gradients gradients = gradients_of(o);
  return {.factor = gradients.factor,
          .decay = o.weight_decay ? static_cast<float>(o.scalars->weight_decay) : 0.0f,
          .momentum = static_cast<float>(o.scalars->momentum),
          .rate = static_cast<float>(o.scalars->learning_rate),
          .skipped = gradients.skipped};
}

// In the order of torch.optim.SGD; `buffer` may be null: no momentum.
template <class T, bool has_master, int most>
__global__ void sgd_steps(FlatRange range, StepOperands operands, const float* gradient, T* parameter, float* buffer,
                          float* master) {
  __shared__ SgdConstants shared;
  if (threadIdx.x == 0) shared = sgd_constants(operands);
  __syncthreads();
  const SgdConstants c = shared;
  if (c.skipped) return;
  for_each_flat<most>(range, [&](std::int64_t i, auto count) {
    constexpr int n = decltype(count)::width;
    float g[n], p[n], b[n] = {};
    load(gradient + i, g);
    if constexpr (has_master) {
      load(master + i, p);
    } else {
      load(parameter + i, p);
    }
    if (buffer != nullptr) load(buffer + i, b);
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const float change = fmaf(c.decay, p[k], g[k] * c.factor);
      b[k] = buffer != nullptr ? fmaf(c.momentum, b[k], change) : change;
      p[k] = fmaf(-c.rate, b[k], p[k]);
    }
    if (buffer != nullptr) store(buffer + i, b);
    if constexpr (has_master) store(master + i, p);
    store(parameter + i, p);
  });
}

struct MuonConstants {
  float factor, rest, keep, rate;
  bool skipped;
};

__device__ inline MuonConstants muon_constants(const StepOperands& o, double length) {
  const StepScalars& t = *o.scalars;
  const Gradients gradients = gradients_of(o);
  const double decay = o.weight_decay ? t.weight_decay : 0.0;
  return {.factor = gradients.factor,
          .rest = static_cast<float>(1.0 - t.momentum),
          .keep = static_cast<float>(1.0 - t.learning_rate * decay),
          .rate = static_cast<float>(t.learning_rate * length),
          .skipped = gradients.skipped};
}

// As torch.optim.Muon: the momentum is an average, and Nesterov's direction goes on to it from the
// gradient.
template <int most>
__global__ void muon_momentum_steps(FlatRange range, StepOperands operands, float* gradient, float* momentum) {
  __shared__ MuonConstants shared;
  if (threadIdx.x == 0) shared = muon_constants(operands, 0.0);
  __syncthreads();
  const MuonConstants c = shared;
  if (c.skipped) return;
  for_each_flat<most>(range, [&](std::int64_t i, auto count) {
    constexpr int n = decltype(count)::width;
    float g[n], m[n];
    load(gradient + i, g);
    load(momentum + i, m);
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const float scaled = g[k] * c.factor;
      m[k] = fmaf(c.rest, scaled - m[k], m[k]);
      g[k] = fmaf(c.rest, scaled - m[k], m[k]);
    }
    store(momentum + i, m);
    store(gradient + i, g);
  });
}

template <class T, int most>
__global__ void divide_by_norm(FlatRange range, const float* x, const float* sum_of_squares, T* y) {
  const float norm = sqrtf(*sum_of_squares), least = static_cast<float>(least_matrix_norm);
  const float inverse = 1.0f / (norm > least ? norm : least);
  for_each_flat<most>(range, [&](std::int64_t i, auto count) {
    float values[decltype(count)::width];
    load(x + i, values);
#pragma unroll
    for (float& value : values) value *= inverse;
    store(y + i, values);
  });
}

// Elements i * (columns + 1) are the diagonal.
template <class T, int most>
__global__ void polynomial_of_square(FlatRange range, std::int64_t columns, const T* square, T* result) {
  for_each_flat<most>(range, [&](std::int64_t i, auto count) {
    constexpr int n = decltype(count)::width;
    float s[n], r[n];
    load(square + i, s);
    load(result + i, r);
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const float diagonal = (i + k) % (columns + 1) == 0 ? static_cast<float>(newton_schulz.a) : 0.0f;
      r[k] = fmaf(static_cast<float>(newton_schulz.c), r[k], fmaf(static_cast<float>(newton_schulz.b), s[k], diagonal));
    }
    store(result + i, r);
  });
}

template <class T, bool has_master, int most>
__global__ void muon_steps(FlatRange range, StepOperands operands, double length, const T* direction, T* parameter,
                           float* master) {
  __shared__ MuonConstants shared;
  if (threadIdx.x == 0) shared = muon_constants(operands, length);
  __syncthreads();
  const MuonConstants c = shared;
  if (c.skipped) return;
  for_each_flat<most>(range, [&](std::int64_t i, auto count) {
    constexpr int n = decltype(count)::width;
    float d[n], p[n];
    load(direction + i, d);
    if constexpr (has_master) {
      load(master + i, p);
    } else {
      load(parameter + i, p);
    }
#pragma unroll
    for (int k = 0; k < n; ++k) p[k] = fmaf(-c.rate, d[k], p[k] * c.keep);
    if constexpr (has_master) store(master + i, p);
    store(parameter + i, p);
  });
}

// Each block computes the step's constants once: there are enough blocks to fill a GPU several
// times over, and no more.
constexpr std::int64_t step_blocks = 4096;

// (norm), (master), (loss scale), from operand `next` on.
struct StepRest {
  StepOperands operands;
  float* master = nullptr;
};
StepRest read_rest(const CudaKernelArguments& a, int next) {
  StepRest rest;
  rest.operands = {.scalars = a.scalars, .weight_decay = a.shape.weight_decay};
  if (a.shape.norm) rest.operands.sum_of_squares = a.at<const float>(next++);
  if (a.shape.master) rest.master = a.at<float>(next++);
  if (a.shape.scaled) rest.operands.loss_scale = a.at<const LossScale>(next++);
  return rest;
}

// In the order of torch.amp.GradScaler.update.
__global__ void change_loss_scale(const float* sum_of_squares, LossScale* loss_scale) {
  LossScale now = *loss_scale;
  if (!(fabsf(*sum_of_squares) < __builtin_inff())) {
    now.scale *= 0.5f;
    now.good_steps = 0.0f;
    now.skipped_steps += 1.0f;
  } else {
    now.good_steps += 1.0f;
    if (now.good_steps >= loss_scale_growth_interval) {
      now.good_steps = 0.0f;
      if (now.scale * 2.0f < __builtin_inff()) now.scale *= 2.0f;
    }
  }
  *loss_scale = now;
}

}  // namespace

// x -> y += sum of x^2, workspace
void sum_squares(const CudaKernelArguments& a) {
  const float* x = a.at<const float>(0);
  auto* parts = a.at<float>(2);
  // (Unaligned arrays have a head: there is always one.)
  submit_flat<width>(
      elements(a.shape), {x},
      [&](auto, FlatRange range, const Grid& grid) {
        launch("sum_squares", sum_squares_of_part, grid, a.stream, range, x, parts);
        launch("sum_squares", add_sums_of_squares, Grid{.blocks = dim3(1), .threads = dim3(sum_squares_blocks)},
               a.stream, static_cast<const float*>(parts), static_cast<int>(grid.blocks.x), a.at<float>(1));
      },
      sum_squares_blocks);
}

// gradient, parameter, m, v, (norm), (master), (loss scale)
void adamw(const CudaKernelArguments& a) {
  const StepRest rest = read_rest(a, 4);
  const float* gradient = a.at<const float>(0);
  float *first = a.at<float>(2), *second = a.at<float>(3);
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    T* parameter = a.at<T>(1);
    submit_flat<width>(
        elements(a.shape), {gradient, parameter, first, second, rest.master != nullptr ? rest.master : first},
        [&](auto count, FlatRange range, const Grid& grid) {
          constexpr int n = decltype(count)::width;
          launch("adamw", rest.master != nullptr ? adam_steps<T, true, n> : adam_steps<T, false, n>, grid, a.stream,
                 range, rest.operands, gradient, parameter, first, second, rest.master);
        },
        step_blocks);
  });
}

// gradient, parameter, codes of m, codes of v, scales of m, scales of v, (norm), (master), (loss
// scale)
void adamw_8bit(const CudaKernelArguments& a) {
  const StepRest rest = read_rest(a, 6);
  const std::int64_t n = elements(a.shape);
  if (n == 0) return;
  const std::int64_t blocks = quantization_blocks(n);
  const Grid grid{.blocks = dim3(static_cast<unsigned>(blocks < step_blocks ? blocks : step_blocks)),
                  .threads = dim3(static_cast<unsigned>(quantization_block))};
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    launch("adamw_8bit", rest.master != nullptr ? adam_8bit_steps<T, true> : adam_8bit_steps<T, false>, grid, a.stream,
           n, rest.operands, a.at<const float>(0), a.at<T>(1), a.at<std::uint8_t>(2), a.at<std::uint8_t>(3),
           a.at<float>(4), a.at<float>(5), rest.master);
  });
}

// gradient, parameter, (momentum), (norm), (master), (loss scale)
void sgd(const CudaKernelArguments& a) {
  const StepRest rest = read_rest(a, a.shape.second ? 3 : 2);
  const float* gradient = a.at<const float>(0);
  float* buffer = a.shape.second ? a.at<float>(2) : nullptr;
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    T* parameter = a.at<T>(1);
    submit_flat<width>(
        elements(a.shape),
        {gradient, parameter, buffer != nullptr ? buffer : gradient, rest.master != nullptr ? rest.master : gradient},
        [&](auto count, FlatRange range, const Grid& grid) {
          constexpr int n = decltype(count)::width;
          launch("sgd", rest.master != nullptr ? sgd_steps<T, true, n> : sgd_steps<T, false, n>, grid, a.stream, range,
                 rest.operands, gradient, parameter, buffer, rest.master);
        },
        step_blocks);
  });
}

// gradient, momentum, (norm), (loss scale)
void muon_momentum(const CudaKernelArguments& a) {
  OpShape shape = a.shape;
  shape.master = false;  // it updates no parameter
  const CudaKernelArguments without_master{
      .shape = shape, .type = a.type, .operands = a.operands, .scalars = a.scalars, .stream = a.stream};
  const StepRest rest = read_rest(without_master, 2);
  float *gradient = a.at<float>(0), *momentum = a.at<float>(1);
  submit_flat<width>(
      elements(a.shape), {gradient, momentum},
      [&](auto count, FlatRange range, const Grid& grid) {
        launch("muon_momentum", muon_momentum_steps<decltype(count)::width>, grid, a.stream, range, rest.operands,
               gradient, momentum);
      },
      step_blocks);
}

// x, its sum of squares -> x / norm
void normalize_matrix(const CudaKernelArguments& a) {
  const float *x = a.at<const float>(0), *sum_of_squares = a.at<const float>(1);
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    T* y = a.at<T>(2);
    submit_flat<vector_width<T>>(
        elements(a.shape), {x, y},
        [&](auto count, FlatRange range, const Grid& grid) {
          launch("normalize_matrix", divide_by_norm<T, decltype(count)::width>, grid, a.stream, range, x,
                 sum_of_squares, y);
        },
        step_blocks);
  });
}

// A, A A -> in the place of the second, a I + b A + c A A
void newton_schulz_polynomial(const CudaKernelArguments& a) {
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T* square = a.at<const T>(0);
    T* result = a.at<T>(1);
    submit_flat<vector_width<T>>(elements(a.shape), {square, result},
                                 [&](auto count, FlatRange range, const Grid& grid) {
                                   launch("newton_schulz_polynomial", polynomial_of_square<T, decltype(count)::width>,
                                          grid, a.stream, range, a.shape.columns, square, result);
                                 });
  });
}

// direction, parameter, (norm), (master), (loss scale)
void muon(const CudaKernelArguments& a) {
  const StepRest rest = read_rest(a, 2);
  dispatch(a.type, [&](auto number) {
    using T = typename decltype(number)::Type;
    const T* direction = a.at<const T>(0);
    T* parameter = a.at<T>(1);
    const auto submit = [&](auto count, FlatRange range, const Grid& grid) {
      constexpr int n = decltype(count)::width;
      launch("muon", rest.master != nullptr ? muon_steps<T, true, n> : muon_steps<T, false, n>, grid, a.stream, range,
             rest.operands, a.shape.factor, direction, parameter, rest.master);
    };
    if (rest.master != nullptr)
      submit_flat<width>(elements(a.shape), {direction, parameter, rest.master}, submit, step_blocks);
    else
      submit_flat<width>(elements(a.shape), {direction, parameter}, submit, step_blocks);
  });
}

// norm -> loss scale
void update_loss_scale(const CudaKernelArguments& a) {
  launch("update_loss_scale", change_loss_scale, Grid{.blocks = dim3(1), .threads = dim3(1)}, a.stream,
         a.at<const float>(0), a.at<LossScale>(1));
}

}  // namespace parplan
