// The ops that are matrix products against arithmetic in double precision on the rounded inputs.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "planner/graph/cuda_workspace.h"
#include "tests/gpu/device.h"
#include "tests/gpu/device_array.h"

namespace parplan {

using namespace testing;

namespace {

constexpr DataType all_types[] = {DataType::fp32, DataType::tf32, DataType::bf16, DataType::fp16};

struct Size {
  std::int64_t rows, columns, inner;
};
// Whole tiles, odd numbers, single rows and columns, and sizes that cuBLASLt's epilogues refuse.
constexpr Size sizes[] = {{1, 1, 1}, {3, 5, 7}, {1, 64, 32}, {17, 24, 40}, {32, 64, 16}, {33, 130, 72}, {130, 9, 8}};

using Doubles = std::vector<double>;

// The product of [m, k] and [k, n], and the sum of the sizes of its terms, on which bounds of
// rounding are based.
struct StridedProduct {
  Doubles values, sizes;
};
struct Operand {
  const Doubles& values;
  std::int64_t row_stride, column_stride;
  double at(std::int64_t row, std::int64_t column) const {
    return values[row * row_stride + column * column_stride];
  }
};
StridedProduct product(std::int64_t m, std::int64_t n, std::int64_t k, const Operand& a, const Operand& b) {
  StridedProduct p;
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < n; ++j) {
      double value = 0.0, size = 0.0;
      for (std::int64_t l = 0; l < k; ++l) {
        value += a.at(i, l) * b.at(l, j);
        size += std::abs(a.at(i, l) * b.at(l, j));
      }
      p.values.push_back(value);
      p.sizes.push_back(size);
    }
  return p;
}

// The allowed error of sums of `terms` products in fp32, relative to the sum of the sizes of the
// terms. tf32 keeps 10 bits of each factor, and hardware may cut rather than round: 2^-10 twice.
double sum_error(DataType type, std::int64_t terms) {
  return static_cast<double>(terms + 4) * std::ldexp(1.0, -24) + (type == DataType::tf32 ? std::ldexp(1.0, -9) : 0.0);
}

double gelu(double x) {
  return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
}
double gelu_slope(double x) {
  const double c = std::sqrt(2.0 / M_PI);
  const double t = std::tanh(c * (x + 0.044715 * x * x * x));
  return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * c * (1.0 + 3.0 * 0.044715 * x * x);
}

void check_close(const Doubles& found, const Doubles& wanted, const Doubles& allowed) {
  REQUIRE(found.size() == wanted.size());
  std::size_t worst = 0;
  double worst_ratio = 0.0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const double ratio = std::abs(found[i] - wanted[i]) / allowed[i];
    if (!(ratio <= worst_ratio)) {
      worst = i;
      worst_ratio = std::isnan(ratio) ? INFINITY : ratio;
    }
  }
  INFO("element ", worst, ": ", found[worst], " instead of ", wanted[worst], ", allowed ", allowed[worst]);
  CHECK(worst_ratio <= 1.0);
}

// fp16 loses relative precision below 2^-14.
double rounded(DataType type, double size) {
  return rounding(type) * size + (type == DataType::fp16 ? std::ldexp(1.0, -25) : 0.0);
}

// What a product that is added to what is there may be off by besides: some of cuBLASLt's kernels
// round it to the result's type first (seen with 13.1 on an H200, small sizes in half precision).
double added_error(DataType type, bool accumulate, double product) {
  return accumulate ? rounded(type, std::abs(product)) : 0.0;
}

// The ops' operands on one backend, with one workspace of exactly the promised size.
struct Bench {
  Backend& backend;
  DataType type;
  DeviceArray& workspace;

  DeviceArray filled(std::int64_t count, int seed, double scale = 1.0, std::int64_t shift = 0) const {
    return DeviceArray(backend, type, random_numbers(count, seed, scale), shift);
  }
  DeviceArray empty(std::int64_t count, std::int64_t shift = 0) const {
    return DeviceArray(backend, type, count, shift);
  }
  void run(OpKind op, const OpShape& shape, std::vector<void*> operands) const {
    operands.push_back(workspace.data());
    backend.run(0, {.kind = op, .shape = shape, .type = type, .operands = operands});
  }
};

// The numbers of a format of 8 bits (Micikevicius et al. 2022, table 1), from 0 up.
Doubles numbers_of_fp8(bool e5m2) {
  Doubles numbers;
  const int fraction_bits = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7, codes = e5m2 ? 0x7c : 0x7f;
  for (int code = 0; code < codes; ++code) {
    const int exponent = code >> fraction_bits, fraction = code % (1 << fraction_bits);
    numbers.push_back(std::ldexp(fraction + (exponent > 0 ? 1 << fraction_bits : 0),
                                 std::max(exponent, 1) - bias - fraction_bits));
  }
  return numbers;
}

// The values as a product in fp8 reads them: the nearest numbers of the format, of two the one with
// an even code, times the largest power of two with which the largest value is at most the largest
// of them.
Doubles read_in_fp8(const Doubles& values, bool e5m2) {
  const Doubles numbers = numbers_of_fp8(e5m2);
  double largest = 0.0;
  for (const double value : values) largest = std::max(largest, std::abs(value));
  double scale = 1.0;
  while (largest > 0.0 && largest * scale > numbers.back()) scale /= 2.0;
  while (largest > 0.0 && largest * scale * 2.0 <= numbers.back()) scale *= 2.0;
  Doubles read;
  for (const double value : values) {
    const double wanted = std::abs(value) * scale;
    std::size_t nearest = 0;
    for (std::size_t code = 1; code < numbers.size(); ++code) {
      const double now = std::abs(numbers[nearest] - wanted), other = std::abs(numbers[code] - wanted);
      if (other < now || (other == now && code % 2 == 0)) nearest = code;
    }
    read.push_back(std::copysign(numbers[nearest], value) / scale);
  }
  return read;
}

// Sizes in which products are in fp8, and workspaces that they need.
constexpr Size fp8_sizes[] = {{16, 16, 16}, {1, 64, 16}, {48, 160, 96}, {83, 16, 272}};
void for_all_fp8_sizes(Gpu& gpu, const std::function<void(const Bench&, const Size&)>& body) {
  const auto backend = gpu.make_backend(0, {});
  if (10 * gpu.devices()[0].compute_major + gpu.devices()[0].compute_minor < 89) return;
  for (const Size& size : fp8_sizes) {
    CAPTURE(size.rows);
    CAPTURE(size.columns);
    CAPTURE(size.inner);
    constexpr std::int64_t shift = 16;
    const std::int64_t rows = ceil_div(size.rows, fp8_multiple) * fp8_multiple;
    const std::int64_t most = std::max({rows * size.columns, rows * size.inner, size.columns * size.inner});
    DeviceArray workspace(*backend, DataType::fp32,
                          (matrix_workspace_bytes + fp8_workspace(most, most).count) / 4, shift);
    body({*backend, DataType::bf16, workspace}, size);
  }
}
// Hopper's units keep 14 bits of a sum of a few products (DeepSeek-V3, arXiv:2412.19437, section
// 3.3.2).
double fp8_sum_error(std::int64_t terms) {
  return sum_error(DataType::fp32, terms) + std::ldexp(1.0, -13);
}

void for_all_types_and_sizes(Gpu& gpu, const std::function<void(const Bench&, const Size&)>& body) {
  const auto backend = gpu.make_backend(0, {});
  constexpr std::int64_t shift = 16;  // elements: plans align workspaces to 64 bytes, cuBLASLt needs 256
  DeviceArray workspace(*backend, DataType::fp32, matrix_workspace_bytes / 4, shift);
  for (const DataType type : all_types)
    for (const Size& size : sizes) {
      CAPTURE(name(type));
      CAPTURE(size.rows);
      CAPTURE(size.columns);
      CAPTURE(size.inner);
      body({*backend, type, workspace}, size);
    }
}

std::vector<void*> with_optional(std::vector<void*> operands, std::size_t at, bool present, void* operand) {
  if (present) operands.insert(operands.begin() + static_cast<std::ptrdiff_t>(at), operand);
  return operands;
}

// y before any activation, and its allowed error.
struct Linear {
  Doubles values, allowed;
};
Linear linear_of(const Bench& bench, const Size& s, const Doubles& x, const Doubles& weight, const Doubles* bias) {
  const StridedProduct p = product(s.rows, s.columns, s.inner, {x, s.inner, 1}, {weight, 1, s.inner});
  Linear linear;
  for (std::size_t i = 0; i < p.values.size(); ++i) {
    const double added = bias == nullptr ? 0.0 : (*bias)[i % static_cast<std::size_t>(s.columns)];
    const double value = p.values[i] + added;
    const double sum = sum_error(bench.type, s.inner) * (p.sizes[i] + std::abs(added));
    linear.values.push_back(value);
    // Twice: where a separate kernel adds the bias, the product is rounded before.
    linear.allowed.push_back(sum + rounded(bench.type, std::abs(value)) +
                             (bias == nullptr ? 0.0 : rounded(bench.type, std::abs(p.values[i]) + sum)));
  }
  return linear;
}

}  // namespace

TEST_CASE("linear is the product with the transposed weight plus the bias") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  for_all_types_and_sizes(*gpu, [](const Bench& bench, const Size& s) {
    for (const bool bias : {false, true}) {
      const DeviceArray x = bench.filled(s.rows * s.inner, 1), weight = bench.filled(s.columns * s.inner, 2),
                        b = bench.filled(s.columns, 3);
      const DeviceArray y = bench.empty(s.rows * s.columns);
      bench.run(OpKind::linear, {.rows = s.rows, .columns = s.columns, .inner = s.inner, .bias = bias},
                with_optional({x.data(), weight.data(), y.data()}, 2, bias, b.data()));
      const Doubles b_values = b.values();
      const Linear wanted = linear_of(bench, s, x.values(), weight.values(), bias ? &b_values : nullptr);
      check_close(y.values(), wanted.values, wanted.allowed);
    }
  });
}

TEST_CASE("linear works at addresses that are only aligned to an element") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  for_all_types_and_sizes(*gpu, [](const Bench& bench, const Size& s) {
    const DeviceArray x = bench.filled(s.rows * s.inner, 1, 1.0, 1),
                      weight = bench.filled(s.columns * s.inner, 2, 1.0, 3);
    const DeviceArray b = bench.filled(s.columns, 3, 1.0, 1), y = bench.empty(s.rows * s.columns, 5);
    bench.run(OpKind::linear, {.rows = s.rows, .columns = s.columns, .inner = s.inner, .bias = true},
              {x.data(), weight.data(), b.data(), y.data()});
    const Doubles b_values = b.values();
    const Linear wanted = linear_of(bench, s, x.values(), weight.values(), &b_values);
    check_close(y.values(), wanted.values, wanted.allowed);
  });
}

TEST_CASE("linear with gelu keeps what goes into gelu and gives what comes out") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  for_all_types_and_sizes(*gpu, [](const Bench& bench, const Size& s) {
    for (const bool bias : {false, true})
      for (const bool keeps : {true, false})
        for (const std::int64_t shift : {0, 1}) {  // shifted: cuBLASLt's epilogue is refused
          CAPTURE(bias);
          CAPTURE(keeps);
          CAPTURE(shift);
          const DeviceArray x = bench.filled(s.rows * s.inner, 1), weight = bench.filled(s.columns * s.inner, 2);
          const DeviceArray b = bench.filled(s.columns, 3), before = bench.empty(s.rows * s.columns, shift);
          const DeviceArray y = bench.empty(s.rows * s.columns, shift);
          bench.run(
              OpKind::linear_gelu, {.rows = s.rows, .columns = s.columns, .inner = s.inner, .bias = bias},
              with_optional({x.data(), weight.data(), keeps ? before.data() : y.data(), y.data()}, 2, bias, b.data()));
          const Doubles b_values = b.values();
          const Linear linear = linear_of(bench, s, x.values(), weight.values(), bias ? &b_values : nullptr);
          if (keeps) check_close(before.values(), linear.values, linear.allowed);
          Doubles wanted, allowed;
          for (std::size_t i = 0; i < linear.values.size(); ++i) {
            const double before_gelu = linear.values[i];
            wanted.push_back(gelu(before_gelu));
            // gelu's slope is below 1.13 everywhere. GPUs approximate tanh: 2^-11 in the half types
            // (PTX's tanh.approx), 2^-18 in fp32.
            const double tanh_error = rounding(bench.type) > 1e-6 ? std::ldexp(1.0, -11) : std::ldexp(1.0, -18);
            allowed.push_back(1.13 * linear.allowed[i] + rounded(bench.type, std::abs(wanted.back())) +
                              tanh_error * std::abs(before_gelu) + 1e-9);
          }
          check_close(y.values(), wanted, allowed);
        }
  });
}

TEST_CASE("the input gradient of linear is the product with the weight and is added where that is asked for") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  for_all_types_and_sizes(*gpu, [](const Bench& bench, const Size& s) {
    for (const bool accumulate : {false, true}) {
      const DeviceArray dy = bench.filled(s.rows * s.columns, 1), weight = bench.filled(s.columns * s.inner, 2);
      const DeviceArray dx = accumulate ? bench.filled(s.rows * s.inner, 3) : bench.empty(s.rows * s.inner);
      const Doubles there = accumulate ? dx.values() : Doubles(static_cast<std::size_t>(s.rows * s.inner), 0.0);
      bench.run(OpKind::linear_input_gradient,
                {.rows = s.rows, .columns = s.columns, .inner = s.inner, .accumulate = accumulate},
                {dy.data(), weight.data(), dx.data()});
      const StridedProduct p =
          product(s.rows, s.inner, s.columns, {dy.values(), s.columns, 1}, {weight.values(), s.inner, 1});
      Doubles wanted, allowed;
      for (std::size_t i = 0; i < p.values.size(); ++i) {
        wanted.push_back(p.values[i] + there[i]);
        allowed.push_back(sum_error(bench.type, s.columns) * (p.sizes[i] + std::abs(there[i])) +
                          added_error(bench.type, accumulate, p.values[i]) +
                          rounded(bench.type, std::abs(wanted[i])));
      }
      check_close(dx.values(), wanted, allowed);
    }
  });
}

TEST_CASE("the input gradient through gelu is the product times gelu's slope") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  for_all_types_and_sizes(*gpu, [](const Bench& bench, const Size& s) {
    for (const std::int64_t shift : {0, 1}) {  // shifted: cuBLASLt's epilogue is refused
      CAPTURE(shift);
      const DeviceArray dy = bench.filled(s.rows * s.columns, 1), weight = bench.filled(s.columns * s.inner, 2);
      const DeviceArray before = bench.filled(s.rows * s.inner, 3, 3.0, shift), dbefore = bench.empty(s.rows * s.inner);
      bench.run(OpKind::linear_input_gradient_gelu, {.rows = s.rows, .columns = s.columns, .inner = s.inner},
                {dy.data(), weight.data(), before.data(), dbefore.data()});
      const StridedProduct p =
          product(s.rows, s.inner, s.columns, {dy.values(), s.columns, 1}, {weight.values(), s.inner, 1});
      const Doubles x = before.values();
      Doubles wanted, allowed;
      for (std::size_t i = 0; i < p.values.size(); ++i) {
        wanted.push_back(p.values[i] * gelu_slope(x[i]));
        const double sum = sum_error(bench.type, s.columns) * p.sizes[i];
        const double tanh_error = rounding(bench.type) > 1e-6 ? std::ldexp(1.0, -9) : std::ldexp(1.0, -16);
        allowed.push_back(1.13 * (sum + rounded(bench.type, std::abs(p.values[i]))) +
                          rounded(bench.type, std::abs(wanted[i])) + tanh_error * std::abs(p.values[i]) + 1e-9);
      }
      check_close(dbefore.values(), wanted, allowed);
    }
  });
}

TEST_CASE("the gradients of weight and bias are added to in fp32") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  for_all_types_and_sizes(*gpu, [](const Bench& bench, const Size& s) {
    for (const bool bias : {false, true}) {
      const DeviceArray dy = bench.filled(s.rows * s.columns, 1), x = bench.filled(s.rows * s.inner, 2);
      const DeviceArray dweight(bench.backend, DataType::fp32, random_numbers(s.columns * s.inner, 3));
      const DeviceArray dbias(bench.backend, DataType::fp32, random_numbers(s.columns, 4));
      const Doubles weight_there = dweight.values(), bias_there = dbias.values();
      bench.run(OpKind::linear_weight_gradient, {.rows = s.rows, .columns = s.columns, .inner = s.inner, .bias = bias},
                with_optional({dy.data(), x.data(), dweight.data()}, 3, bias, dbias.data()));
      const StridedProduct p =
          product(s.columns, s.inner, s.rows, {dy.values(), 1, s.columns}, {x.values(), s.inner, 1});
      Doubles wanted, allowed;
      for (std::size_t i = 0; i < p.values.size(); ++i) {
        wanted.push_back(p.values[i] + weight_there[i]);
        allowed.push_back(sum_error(bench.type, s.rows) * (p.sizes[i] + std::abs(weight_there[i])) + 1e-9);
      }
      check_close(dweight.values(), wanted, allowed);

      const Doubles ones(static_cast<std::size_t>(s.rows), 1.0);
      const StridedProduct sums = product(1, s.columns, s.rows, {ones, s.rows, 1}, {dy.values(), s.columns, 1});
      wanted = bias_there;
      allowed.assign(wanted.size(), 1e-12);
      for (std::size_t i = 0; i < sums.values.size() && bias; ++i) {
        wanted[i] += sums.values[i];
        allowed[i] = sum_error(DataType::fp32, s.rows) * (sums.sizes[i] + std::abs(bias_there[i])) + 1e-9;
      }
      check_close(dbias.values(), wanted, allowed);
    }
  });
}

TEST_CASE("a matrix product gives the same bits every time") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  for_all_types_and_sizes(*gpu, [](const Bench& bench, const Size& s) {
    const DeviceArray dy = bench.filled(s.rows * s.columns, 1), x = bench.filled(s.rows * s.inner, 2);
    std::vector<std::vector<std::byte>> bits;
    for (int time = 0; time < 3; ++time) {
      const DeviceArray dweight(bench.backend, DataType::fp32, random_numbers(s.columns * s.inner, 3));
      bench.run(OpKind::linear_weight_gradient, {.rows = s.rows, .columns = s.columns, .inner = s.inner},
                {dy.data(), x.data(), dweight.data()});
      bits.push_back(dweight.bits());
    }
    CHECK(bits[1] == bits[0]);
    CHECK(bits[2] == bits[0]);
  });
}

TEST_CASE("in fp8 a product is that of its factors cast to 8 bits") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  for_all_fp8_sizes(*gpu, [](const Bench& bench, const Size& s) {
    for (const double size : {1.0, 1e-6, 3e4})
      for (const bool bias : {false, true}) {
        CAPTURE(size);
        const DeviceArray x = bench.filled(s.rows * s.inner, 1, size), weight = bench.filled(s.columns * s.inner, 2),
                          b = bench.filled(s.columns, 3, size);
        const OpShape shape{.rows = s.rows,
                            .columns = s.columns,
                            .inner = s.inner,
                            .bias = bias,
                            .fp8 = Fp8Casts::each_product};
        const StridedProduct p = product(s.rows, s.columns, s.inner, {read_in_fp8(x.values(), false), s.inner, 1},
                                         {read_in_fp8(weight.values(), false), 1, s.inner});
        const Doubles b_values = b.values();
        Doubles wanted, allowed, wanted_gelu, allowed_gelu;
        for (std::size_t i = 0; i < p.values.size(); ++i) {
          const double added = bias ? b_values[i % static_cast<std::size_t>(s.columns)] : 0.0;
          wanted.push_back(p.values[i] + added);
          allowed.push_back(fp8_sum_error(s.inner) * (p.sizes[i] + std::abs(added)) +
                            2.0 * rounded(bench.type, std::abs(p.values[i]) + std::abs(added)));
          wanted_gelu.push_back(gelu(wanted.back()));
          allowed_gelu.push_back(1.13 * allowed.back() + rounded(bench.type, std::abs(wanted_gelu.back())) +
                                 std::ldexp(1.0, -11) * std::abs(wanted.back()) + 1e-9);
        }
        const DeviceArray y = bench.empty(s.rows * s.columns);
        bench.run(OpKind::linear, shape, with_optional({x.data(), weight.data(), y.data()}, 2, bias, b.data()));
        check_close(y.values(), wanted, allowed);
        const DeviceArray before = bench.empty(s.rows * s.columns), after = bench.empty(s.rows * s.columns);
        bench.run(OpKind::linear_gelu, shape,
                  with_optional({x.data(), weight.data(), before.data(), after.data()}, 2, bias, b.data()));
        check_close(before.values(), wanted, allowed);
        check_close(after.values(), wanted_gelu, allowed_gelu);
      }
  });
}

TEST_CASE("in fp8 gradients are those of factors cast to 8 bits, what comes from behind to e5m2") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  for_all_fp8_sizes(*gpu, [](const Bench& bench, const Size& s) {
    const DeviceArray dy = bench.filled(s.rows * s.columns, 1, 1e-5), x = bench.filled(s.rows * s.inner, 2),
                      weight = bench.filled(s.columns * s.inner, 3);
    const Doubles gradient = read_in_fp8(dy.values(), true);
    for (const bool accumulate : {false, true}) {
      const DeviceArray dx = accumulate ? bench.filled(s.rows * s.inner, 4, 1e-5) : bench.empty(s.rows * s.inner);
      const Doubles there = accumulate ? dx.values() : Doubles(static_cast<std::size_t>(s.rows * s.inner), 0.0);
      bench.run(OpKind::linear_input_gradient,
                {.rows = s.rows,
                 .columns = s.columns,
                 .inner = s.inner,
                 .accumulate = accumulate,
                 .fp8 = Fp8Casts::each_product},
                {dy.data(), weight.data(), dx.data()});
      const StridedProduct p = product(s.rows, s.inner, s.columns, {gradient, s.columns, 1},
                                       {read_in_fp8(weight.values(), false), s.inner, 1});
      Doubles wanted, allowed;
      for (std::size_t i = 0; i < p.values.size(); ++i) {
        wanted.push_back(p.values[i] + there[i]);
        allowed.push_back(fp8_sum_error(s.columns) * (p.sizes[i] + std::abs(there[i])) +
                          added_error(bench.type, accumulate, p.values[i]) +
                          rounded(bench.type, std::abs(wanted[i])));
      }
      check_close(dx.values(), wanted, allowed);
    }
    const DeviceArray dweight(bench.backend, DataType::fp32, random_numbers(s.columns * s.inner, 5, 1e-5));
    const DeviceArray dbias(bench.backend, DataType::fp32, random_numbers(s.columns, 6, 1e-5));
    const Doubles weight_there = dweight.values(), bias_there = dbias.values();
    bench.run(OpKind::linear_weight_gradient,
              {.rows = s.rows, .columns = s.columns, .inner = s.inner, .bias = true, .fp8 = Fp8Casts::each_product},
              {dy.data(), x.data(), dweight.data(), dbias.data()});
    const StridedProduct p = product(s.columns, s.inner, s.rows, {gradient, 1, s.columns},
                                     {read_in_fp8(x.values(), false), s.inner, 1});
    Doubles wanted, allowed;
    for (std::size_t i = 0; i < p.values.size(); ++i) {
      wanted.push_back(p.values[i] + weight_there[i]);
      allowed.push_back(fp8_sum_error(s.rows) * (p.sizes[i] + std::abs(weight_there[i])) + 1e-12);
    }
    check_close(dweight.values(), wanted, allowed);
    // The bias's gradient sums what was not cast.
    const Doubles values = dy.values();
    wanted = bias_there;
    allowed.assign(wanted.size(), 1e-12);
    for (std::size_t i = 0; i < values.size(); ++i) {
      wanted[i % static_cast<std::size_t>(s.columns)] += values[i];
      allowed[i % static_cast<std::size_t>(s.columns)] += 1e-6 * std::abs(values[i]);
    }
    check_close(dbias.values(), wanted, allowed);
  });
}

TEST_CASE("in fp8 a factor that is not finite leaves no number") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  for_all_fp8_sizes(*gpu, [](const Bench& bench, const Size& s) {
    for (const double broken : {INFINITY, NAN}) {
      Doubles numbers = random_numbers(s.rows * s.inner, 1);
      numbers.back() = broken;
      const DeviceArray x(bench.backend, bench.type, numbers), weight = bench.filled(s.columns * s.inner, 2),
          y = bench.empty(s.rows * s.columns);
      bench.run(OpKind::linear,
                {.rows = s.rows, .columns = s.columns, .inner = s.inner, .fp8 = Fp8Casts::each_product},
                {x.data(), weight.data(), y.data()});
      for (const double value : y.values()) CHECK(std::isnan(value));
    }
  });
}

}  // namespace parplan
