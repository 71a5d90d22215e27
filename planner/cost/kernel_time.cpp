#include "planner/cost/kernel_time.h"

#include <algorithm>
#include <array>
#include <numeric>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/cluster/nccl/import.h"
#include "planner/cost/tiling.h"
#include "planner/graph/attention_span.h"

namespace parplan {
namespace {

// Blocks of queries and keys of fused attention on GPUs (FlashAttention-2, Dao 2023, section 3.3:
// 64 or 128).
constexpr std::int64_t attention_block = 128;
// What a query takes there before its first key, as that of so many keys: FlashAttention-2 and
// cuDNN on an H100 (Shah et al. 2024, figures 5 and 6; tests/golden/fit_attention.py). Rates of
// device files are those beside it.
constexpr double attention_start = 300.0;
// What dropout in the kernel leaves of attention's rate, forward and backward: of 75 to 85 % and of
// 60 to 70 % on GB200, cuDNN 9.24 and FlashAttention-4 alike (Dao-AILab/flash-attention pull
// request 2597), the middle. Assumed for all GPUs.
constexpr double dropout_leaves = 0.80, dropout_leaves_gradient = 0.65;

bool is_attention(OpKind kind) { return row_of(kind).cost == CostClass::attention; }

// A rate, and which of the row's it is.
template <typename Unit>
struct RateOf {
  Unit value;
  Rate rate{};
};

// `type`: fp8 for products in it.
RateOf<FlopsPerSecond> rate(bool matrix, DataType type, const DeviceKind& device, const DeviceRates& rates) {
  if (!matrix) return {rates.vector, Rate::vector};
  if (type == DataType::fp8 && rates.matrix_fp8.value > 0.0) return {rates.matrix_fp8, Rate::matrix_fp8};
  if (type == DataType::tf32 && rates.matrix_tf32.value > 0.0) return {rates.matrix_tf32, Rate::matrix_tf32};
  // Without units for a half precision, numbers are widened and multiplied as fp32; the same holds
  // for tf32.
  if (is_half(in_memory(type)) && has_units(device, in_memory(type)) && rates.matrix_half.value > 0.0)
    return {rates.matrix_half, Rate::matrix_half};
  return {rates.matrix_fp32, Rate::matrix_fp32};
}

// The less of two rates where the first is known.
template <typename Unit>
RateOf<Unit> known_or(RateOf<Unit> known, RateOf<Unit> reached) {
  return known.value.value > 0.0 && known.value <= reached.value ? known : reached;
}

// The rate that products sustain in a training step, those of weight gradients or others.
RateOf<FlopsPerSecond> sustained(bool of_weights, DataType type, const DeviceKind& device, const DeviceRates& rates) {
  const RateOf<FlopsPerSecond> best = rate(true, type, device, rates);
  if (best.rate == Rate::matrix_fp8)
    return known_or(of_weights ? RateOf<FlopsPerSecond>{rates.sustained_fp8_weights, Rate::sustained_fp8_weights}
                               : RateOf<FlopsPerSecond>{rates.sustained_fp8, Rate::sustained_fp8},
                    best);
  if (best.rate != Rate::matrix_half) return best;
  return known_or(of_weights ? RateOf<FlopsPerSecond>{rates.sustained_weights, Rate::sustained_weights}
                             : RateOf<FlopsPerSecond>{rates.sustained_half, Rate::sustained_half},
                  best);
}
// The rate at which it moves its operands.
RateOf<BytesPerSecond> memory_rate(OpKind op, const DeviceRates& rates) {
  const RateOf<BytesPerSecond> reached{rates.memory, Rate::memory};
  if (row_of(op).cost == CostClass::streaming) return reached;
  return known_or({rates.sustained_memory, Rate::sustained_memory}, reached);
}

// Whether a product's operands begin where matrix units can read them: at multiples of 16 bytes
// (cuBLAS, Tensor Core Usage). The batched products of single heads that do not ran on the ordinary
// cores: BLOOM's steps with heads of 108 and 150 elements (bigscience@9e64ede, tr11-176B-ml
// chronicles-prequel.md, "Another round of NHEADS").
bool is_aligned(OpKind op, const OpShape& shape, DataType type) {
  constexpr std::int64_t alignment = 16;
  return !row_of(op).by_head || !is_half(type) || shape.head_dim * size_of(type) % alignment == 0;
}

// The rate of a layer's product, less where rows of an operand, which begin `columns` or `inner`
// numbers of half precision apart, do not begin at multiples of 16 bytes.
RateOf<FlopsPerSecond> rate_by_rows(const OpShape& shape, DataType type, const DeviceRates& rates,
                                    const RateOf<FlopsPerSecond>& aligned) {
  if (!is_half(type)) return aligned;
  const std::int64_t bytes = std::gcd(std::gcd(shape.columns, shape.inner) * size_of(type), std::int64_t{16});
  if (bytes == 16) return aligned;
  return bytes == 2 ? known_or({rates.unaligned_two_bytes, Rate::unaligned_two_bytes}, aligned)
                    : known_or({rates.unaligned_four_bytes, Rate::unaligned_four_bytes}, aligned);
}

// How much slower one device is because of the others at work; 1 where it works alone.
double slowdown(FlopsPerSecond alone, FlopsPerSecond now) {
  return now.value > 0.0 && alone.value > 0.0 ? alone / now : 1.0;
}

// What a kernel's factors are multiplied in.
DataType multiplied_in(const OpShape& shape, DataType type) {
  return multiplies_in_fp8(shape) ? DataType::fp8 : type;
}

// Kernels before a product.
struct Before {
  int kernels = 0;
  Bytes moved;
};

// What it adds to is written, and read by the product.
Before writing_added_to(OpKind op, const OpShape& shape, DataType type) {
  const auto elements = row_of(op).added_to;
  if (elements == nullptr || elements(shape) == 0) return {};
  return {.kernels = 1, .moved = Bytes(2 * elements(shape) * size_of(type))};
}

// The casts of a product in fp8: kernels that read each factor for its largest number, and read it
// again to write it in 8 bits; or that read it once and write it twice, as it is and transposed, by
// a scale that is known before (TransformerEngine, delayed scaling). There, what is on the right is
// a weight in 8 bits, which is read and written.
Before casts_of(OpKind op, const OpShape& shape, DataType type) {
  const auto row_casts = row_of(op).casts;
  if (row_casts == nullptr || !multiplies_in_fp8(shape)) return {};
  const bool once = casts_once(shape.fp8);
  const CastElements elements = row_casts(shape);
  const int factors = (elements.left > 0 ? 1 : 0) + (elements.right > 0 ? 1 : 0);
  if (once) return {.kernels = factors, .moved = Bytes(elements.left * (size_of(type) + 2) + elements.right * 2)};
  return {.kernels = 2 * factors, .moved = Bytes((elements.left + elements.right) * (2 * size_of(type) + 1))};
}

struct Arithmetic {
  Seconds time;
  Origin origin = Origin::datasheet;
};

Arithmetic arithmetic(OpKind op, const OpShape& shape, DataType type, const OpWork& work, const DeviceKind& device,
                      const DeviceRates& rates) {
  if (work.flops.value <= 0.0) return {};
  const bool is_product = work.matrix && !is_attention(op);
  const RateOf<FlopsPerSecond> reached = is_product
                                             ? sustained(row_of(op).of_weights && !shape.in_half,
                                                         multiplied_in(shape, type), device, rates)
                                             : rate(work.matrix, type, device, rates);
  PARPLAN_ASSERT(reached.value.value > 0.0, fmt::format("{} on {}", name(op), device.name));
  const auto at = [&](const RateOf<FlopsPerSecond>& one) {
    return Arithmetic{.time = work.flops / one.value, .origin = rates.origins[one.rate]};
  };
  if (const double each = row_of(op).elements_of_multiprocessor; each > 0.0 && device.multiprocessors > 0)
    return {.time = std::max(at(reached).time,
                             Seconds(static_cast<double>(shape.rows) / (each * device.multiprocessors))),
            .origin = Origin::interpolated};
  if (device.multiprocessors == 0 || !work.matrix) return at(reached);
  if (is_product && !is_aligned(op, shape, type)) return at(known_or({rates.vector, Rate::vector}, reached));
  if (is_attention(op)) {
    const bool is_forward = row_of(op).model_products != nullptr;
    const FlopsPerSecond known = is_forward ? rates.attention : rates.attention_gradient;
    const bool is_known = is_half(type) && known.value > 0.0;
    const double left = !shape.drops ? 1.0 : is_forward ? dropout_leaves : dropout_leaves_gradient;
    const FlopsPerSecond used = (is_known ? known : reached.value * row_of(op).unmeasured_share) * left;
    const AttentionWork attention = attention_work(op, shape, type, device.backend);
    const double starts = is_known ? attention.starts * attention_start : 0.0;
    return {.time = Seconds((attention.flops + starts) / used.value),
            .origin = !is_known    ? Origin::datasheet
                      : is_forward ? rates.origins[Rate::attention]
                                   : rates.origins[Rate::attention_gradient]};
  }
  const ProductRates product_rates{.rate = reached.value,
                                   .memory = memory_rate(op, rates).value,
                                   .multiprocessors = device.multiprocessors,
                                   .hides_results = hides_results(device)};
  const Arithmetic tiled = {.time = time_of(best_tiling(product_of(op, shape, type), product_rates), product_rates),
                            .origin = rates.origins[reached.rate]};
  if (row_of(op).by_head) return tiled;
  const Arithmetic unaligned = at(rate_by_rows(shape, multiplied_in(shape, type), rates, reached));
  return unaligned.time > tiled.time ? unaligned : tiled;
}

// The time by a fit. `several` is how much slower the device is because of the others at work, and
// in a training step rather than in a loop.
Seconds fitted_time(const KernelFit& fit, OpKind op, const OpShape& shape, DataType type, const OpWork& work,
                    const DeviceKind& device, const DeviceRates& rates) {
  const DeviceRates& alone = device.rates.front();
  const double several_memory = alone.memory / rates.memory;
  const Seconds moving = work.bytes / fit.memory * several_memory;
  if (!work.matrix) {
    // A kernel whose time is arithmetic (GELU on a CPU) does not compete for memory.
    const bool computes = work.flops / alone.vector > work.bytes / alone.memory;
    return fit.floor + (computes ? work.bytes / fit.memory * slowdown(alone.vector, rates.vector) : moving);
  }
  const DataType multiplied = multiplied_in(shape, type);
  const bool has_share = (is_half(multiplied) || multiplied == DataType::fp8) && rates.sustained_share > 0.0;
  const double several =
      slowdown(rate(true, multiplied, device, alone).value, rate(true, multiplied, device, rates).value) /
      (has_share ? rates.sustained_share : 1.0);
  if (is_attention(op)) {
    const AttentionWork attention = attention_work(op, shape, type, device.backend);
    return fit.floor +
           std::max(Seconds((attention.flops + attention.starts * fit.half_length) / fit.rate.value) * several, moving);
  }
  const ProductRates product{.rate = fit.rate,
                             .half_length = fit.half_length,
                             .memory = fit.memory,
                             .multiprocessors = device.multiprocessors,
                             .hides_results = hides_results(device)};
  return fit.floor + std::max(time_of(best_tiling(product_of(op, shape, type), product), product) * several, moving);
}

// Attention with heads of a size that was not measured: interpolated linearly between the two
// measured sizes around it, and in proportion beyond them. A larger head never takes less: the
// times of smaller measured sizes count too.
Seconds attention_time(const KernelFits& fits, OpKind op, const OpShape& shape, DataType type, const DeviceKind& device,
                       const DeviceRates& rates) {
  const auto at = [&](const KernelFit& largest) {
    Seconds time;
    for (const KernelFit& fit : device.measured->fits) {
      if (fit.kind != largest.kind || fit.type != largest.type || fit.head_dim > largest.head_dim) continue;
      OpShape measured = shape;
      measured.head_dim = fit.head_dim;
      time = std::max(time, fitted_time(fit, op, measured, type, row_of(op).work(measured, type), device, rates));
    }
    return time;
  };
  const double wanted = static_cast<double>(shape.head_dim);
  const Seconds low = at(*fits.lower);
  if (fits.lower == fits.upper) return low * (wanted / static_cast<double>(fits.lower->head_dim));
  const double t = (wanted - static_cast<double>(fits.lower->head_dim)) /
                   static_cast<double>(fits.upper->head_dim - fits.lower->head_dim);
  return low + (at(*fits.upper) - low) * t;
}

}  // namespace

bool hides_results(const DeviceKind& device) {
  const auto is_hopper = [](const std::string& kind) {
    constexpr int hopper = 90;
    return compute_capability_of(kind).value_or(0) >= hopper;
  };
  if (device.backend != BackendKind::cuda) return false;
  return device.joins.empty() ? is_hopper(device.name) : std::ranges::all_of(device.joins, is_hopper);
}

AttentionWork attention_work(OpKind kind, const OpShape& shape, DataType type, BackendKind backend) {
  const double flops = row_of(kind).work(shape, type).flops.value;
  // Twice a triangle: n (n + 1) / 2 pairs of queries and keys up to them.
  const auto triangle = [](std::int64_t n) { return static_cast<double>(n) * (static_cast<double>(n) + 1.0); };
  const AttentionSpan span = attention_span(shape);
  // Queries up to `n` with the keys that they see.
  const auto pairs_up_to = [&](std::int64_t n) {
    return triangle(n) - (shape.window > 0 && shape.window < n ? triangle(n - shape.window) : 0.0);
  };
  // They become squares: for a block of queries from `first` on, the blocks of keys up to its last
  // one, or with a window only as many as reach back `window` - 1 keys from its first query.
  const auto squares_between = [&](std::int64_t first, std::int64_t last) {
    const std::int64_t blocks = ceil_div(last - first, attention_block), before = ceil_div(first, attention_block);
    const std::int64_t most = shape.window > 0 && shape.window < last ? ceil_div(shape.window - 1, attention_block) + 1
                                                                      : before + blocks;
    // The whole blocks of queries, of which the first so many see fewer than the most.
    const std::int64_t rising = std::clamp<std::int64_t>(most - before, 0, blocks - 1);
    return triangle(before + rising) - triangle(before) +
           2.0 * static_cast<double>((blocks - 1 - rising) * most + std::min(ceil_div(last, attention_block), most));
  };
  const std::int64_t queries = std::max<std::int64_t>(span.last - span.first, 1);
  double pairs = pairs_up_to(std::max<std::int64_t>(span.last, 1)) - pairs_up_to(span.first);
  double squares = squares_between(span.first, std::max(span.last, span.first + 1));
  if (!span.causal) {
    pairs = 2.0 * static_cast<double>(queries) * static_cast<double>(span.keys);
    squares = 2.0 * static_cast<double>(ceil_div(queries, attention_block) * ceil_div(span.keys, attention_block));
  }
  const double whole = is_accelerator(backend) ? flops * (squares * attention_block * attention_block) / pairs : flops;
  // The cost of a query before its first key depends neither on the window nor on the keys.
  const double unwindowed = triangle(queries);
  const double without = pairs == unwindowed ? flops : flops * unwindowed / pairs;
  return {.flops = whole, .starts = without / static_cast<double>(queries)};
}

KernelFits find_fits(const MeasuredKernels& measured, OpKind kind, DataType type, std::int64_t head_dim) {
  const DataType other_half = type == DataType::bf16 ? DataType::fp16 : type == DataType::fp16 ? DataType::bf16 : type;
  for (const OpKind wanted : {kind, row_of(kind).made_of.value_or(kind)})
    for (const DataType precision : {type, other_half}) {
      KernelFits found;
      for (const KernelFit& fit : measured.fits) {
        if (fit.kind != wanted || fit.type != precision) continue;
        if (fit.head_dim <= head_dim && (found.lower == nullptr || fit.head_dim > found.lower->head_dim))
          found.lower = &fit;
        if (fit.head_dim >= head_dim && (found.upper == nullptr || fit.head_dim < found.upper->head_dim))
          found.upper = &fit;
      }
      if (found.lower == nullptr) found.lower = found.upper;
      if (found.upper == nullptr) found.upper = found.lower;
      if (found.lower != nullptr) return found;
    }
  return {};
}

FlopsPerSecond fastest_product(DataType type, const DeviceKind& device) {
  const FlopsPerSecond alone = rate(true, type, device, device.rates.front()).value;
  FlopsPerSecond fastest;
  double gained = 1.0;
  for (const DeviceRates& rates : device.rates) {
    const FlopsPerSecond with_others = rate(true, type, device, rates).value;
    // Not every product of a training in fp8 is in it.
    for (const bool of_weights : {false, true})
      for (const DataType one : {type, in_memory(type)})
        fastest = std::max(fastest, sustained(of_weights, one, device, rates).value);
    if (is_half(in_memory(type))) fastest = std::max({fastest, rates.early_half, rates.early_weights});
    gained = std::max(gained, 1.0 / slowdown(alone, with_others));
  }
  if (device.measured)
    for (const KernelFit& fit : device.measured->fits) fastest = std::max(fastest, fit.rate * gained);
  const FlopsPerSecond most = is_accelerator(device.backend) ? peak(device, type) : FlopsPerSecond(0.0);
  return most.value > 0.0 ? std::min(fastest, most) : fastest;
}

namespace {

// A kernel's launch and what it does then, each with the number that it follows from.
struct KernelParts {
  Seconds launch, work;
  Origin launch_origin = Origin::datasheet, work_origin = Origin::datasheet;
};

// The same kernel, so many times.
struct Repeated {
  OpShape shape;
  int times = 1;
};
// A product of queries, and two of keys and values, where they are apart (key_columns).
std::array<Repeated, 2> apart(const OpShape& shape) {
  OpShape queries = shape, keys = shape;
  queries.key_columns = keys.key_columns = 0;
  queries.columns = shape.columns - 2 * shape.key_columns;
  keys.columns = shape.key_columns;
  return {Repeated{.shape = queries}, Repeated{.shape = keys, .times = 2}};
}

KernelParts parts_of(OpKind op, const OpShape& shape, DataType type, const DeviceKind& device,
                     const DeviceRates& rates) {
  const Origin of_launch = rates.origins[Rate::kernel_launch];
  if (row_of(op).cost == CostClass::loading)
    return {.launch = device.backend == BackendKind::cpu ? Seconds(0.0) : device.kernel_launch,
            .work = {},
            .launch_origin = of_launch};
  const OpRow& row = row_of(op);
  const OpWork work = row.work(shape, type);
  PARPLAN_ASSERT(rates.memory.value > 0.0, fmt::format("{} on {}", row.name, device.name));
  KernelParts parts;
  // For everything but products, tf32 is fp32.
  const DataType fitted = work.matrix ? multiplied_in(shape, type) : in_memory(type);
  const KernelFits fits =
      device.measured ? find_fits(*device.measured, op, fitted, is_attention(op) ? shape.head_dim : 0) : KernelFits{};
  const RateOf<BytesPerSecond> memory = memory_rate(op, rates);
  const Seconds beside = row.beside == nullptr ? Seconds(0.0) : row.beside(shape, type) / memory.value;
  const auto sum_of_products = [&](auto seconds_of) {
    if (shape.key_columns == 0) return seconds_of(shape, work);
    Seconds sum;
    for (const Repeated& part : apart(shape)) sum += part.times * seconds_of(part.shape, row.work(part.shape, type));
    return sum;
  };
  if (fits.lower == nullptr) {
    const Arithmetic computing = arithmetic(op, shape, type, work, device, rates);
    const Seconds moving = work.bytes / memory.value;
    const auto one = [&](const OpShape& part, const OpWork& its) {
      return std::max(arithmetic(op, part, type, its, device, rates).time, its.bytes / memory.value);
    };
    parts = {.launch = device.kernel_launch * launches(op, shape),
             .work = beside + (shape.key_columns > 0 ? sum_of_products(one) : std::max(computing.time, moving)),
             .launch_origin = of_launch,
             .work_origin = computing.time < moving ? rates.origins[memory.rate] : computing.origin};
    for (const Before& before : {casts_of(op, shape, type), writing_added_to(op, shape, type)}) {
      parts.launch += device.kernel_launch * before.kernels;
      parts.work += before.moved / memory.value;
    }
  } else {
    const int fitted_launches = shape.key_columns > 0 ? 3 : 1;  // one is in the fit of each
    parts.launch = device.kernel_launch * (launches(op, shape) - fitted_launches);
    parts.launch_origin = of_launch;
    parts.work = beside + (is_attention(op) ? attention_time(fits, op, shape, type, device, rates)
                                            : sum_of_products([&](const OpShape& part, const OpWork& its) {
                                                return fitted_time(*fits.lower, op, part, type, its, device, rates);
                                              }));
    parts.work_origin = Origin::interpolated;
  }
  const FlopsPerSecond most = work.matrix && is_accelerator(device.backend)
                                  ? peak(device, multiplied_in(shape, type))
                                  : FlopsPerSecond(0.0);
  if (most.value <= 0.0 || parts.launch + parts.work >= work.flops / most) return parts;
  return {.launch = {}, .work = work.flops / most};
}

}  // namespace

Seconds kernel_time(OpKind op, const OpShape& shape, DataType type, const DeviceKind& device,
                    const DeviceRates& rates) {
  const KernelParts parts = parts_of(op, shape, type, device, rates);
  return parts.launch + parts.work;
}

TimeByOrigin kernel_time_by_origin(OpKind op, const OpShape& shape, DataType type, const DeviceKind& device,
                                   const DeviceRates& rates) {
  const KernelParts parts = parts_of(op, shape, type, device, rates);
  TimeByOrigin times;
  times[parts.launch_origin] += parts.launch;
  times[parts.work_origin] += parts.work;
  return times;
}

}  // namespace parplan
