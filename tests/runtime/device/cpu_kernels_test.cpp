#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "planner/graph/attention_span.h"
#include "runtime/device/cpu/host_conversion.h"
#include "tests/runtime/device/guarded_arrays.h"

using namespace parplan;
using namespace parplan::testing;

using Vector = std::vector<double>;

namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

Vector plus(Vector a, const Vector& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

struct LinearSize {
  std::int64_t rows, columns, inner;
};
// Odd sizes; rests after groups of 4 tokens; widths that end within and between registers; several
// blocks of each kind.
constexpr LinearSize linear_sizes[] = {{1, 1, 1},   {3, 5, 7},    {4, 16, 8},    {6, 50, 37},
                                       {17, 33, 65}, {70, 401, 771}, {259, 70, 90}, {5, 970, 300}};

Vector naive_linear(const LinearSize& s, const Vector& x, const Vector& w, const Vector& bias) {
  Vector y(at(s.rows * s.columns));
  for (std::int64_t r = 0; r < s.rows; ++r)
    for (std::int64_t c = 0; c < s.columns; ++c) {
      double sum = bias.empty() ? 0.0 : bias[at(c)];
      for (std::int64_t k = 0; k < s.inner; ++k) sum += x[at(r * s.inner + k)] * w[at(c * s.inner + k)];
      y[at(r * s.columns + c)] = sum;
    }
  return y;
}

}  // namespace

TEST_CASE("every op kind but the data loader's and other engines' has a kernel in every instruction set") {
  for (const std::string& name : cpu_instruction_sets())
    for (const OpRow& row : op_rows()) {
      INFO(name, " ", row.name);
      const bool loader = row.kind == OpKind::load_tokens || row.kind == OpKind::load_targets;
      CHECK((cpu_kernels(name).kernels[static_cast<int>(row.kind)] == nullptr) == (loader || is_foreign(row.kind)));
    }
}

TEST_CASE("linear multiplies by the transposed weight and adds the bias") {
  on_every_instruction_set([](Backend& backend) {
    for (const LinearSize& s : linear_sizes)
      for (const bool bias : {false, true}) {
        INFO(s.rows, " x ", s.columns, " x ", s.inner);
        const Vector x = numbers(s.rows * s.inner, 1), w = numbers(s.columns * s.inner, 2);
        const Vector b = bias ? numbers(s.columns, 3) : Vector{};
        const OpShape shape{.rows = s.rows, .columns = s.columns, .inner = s.inner, .bias = bias};
        Array y(s.rows * s.columns);
        if (bias) {
          run(backend, OpKind::linear, shape, Array(x), Array(w), Array(b), y);
        } else {
          run(backend, OpKind::linear, shape, Array(x), Array(w), y);
        }
        check_near(y, naive_linear(s, x, w, b), 2e-6);
      }
  });
}

TEST_CASE("linear_input_gradient writes dy W, or adds it where the shape says so") {
  on_every_instruction_set([](Backend& backend) {
    for (const LinearSize& s : linear_sizes)
      for (const bool accumulate : {false, true}) {
        INFO(s.rows, " x ", s.columns, " x ", s.inner);
        const Vector dy = numbers(s.rows * s.columns, 1), w = numbers(s.columns * s.inner, 2);
        const Vector before = numbers(s.rows * s.inner, 3);
        Vector wanted = accumulate ? before : Vector(before.size());
        for (std::int64_t r = 0; r < s.rows; ++r)
          for (std::int64_t k = 0; k < s.inner; ++k)
            for (std::int64_t c = 0; c < s.columns; ++c)
              wanted[at(r * s.inner + k)] += dy[at(r * s.columns + c)] * w[at(c * s.inner + k)];
        const Array dx = accumulate ? Array(before) : Array(s.rows * s.inner);
        run(backend, OpKind::linear_input_gradient,
            {.rows = s.rows, .columns = s.columns, .inner = s.inner, .accumulate = accumulate}, Array(dy),
            Array(w), dx);
        check_near(dx, wanted, 2e-6);
      }
  });
}

TEST_CASE("linear_weight_gradient adds dy^T x to the weight's gradient and dy to the bias's") {
  on_every_instruction_set([](Backend& backend) {
    for (const LinearSize& s : linear_sizes)
      for (const bool bias : {false, true}) {
        INFO(s.rows, " x ", s.columns, " x ", s.inner);
        const Vector dy = numbers(s.rows * s.columns, 1), x = numbers(s.rows * s.inner, 2);
        const Vector before = numbers(s.columns * s.inner, 3), bias_before = numbers(s.columns, 4);
        Vector wanted = before, wanted_bias = bias_before;
        for (std::int64_t r = 0; r < s.rows; ++r)
          for (std::int64_t c = 0; c < s.columns; ++c) {
            wanted_bias[at(c)] += dy[at(r * s.columns + c)];
            for (std::int64_t k = 0; k < s.inner; ++k)
              wanted[at(c * s.inner + k)] += dy[at(r * s.columns + c)] * x[at(r * s.inner + k)];
          }
        const OpShape shape{.rows = s.rows, .columns = s.columns, .inner = s.inner, .bias = bias};
        Array dw(before), dbias(bias_before);
        if (bias) {
          run(backend, OpKind::linear_weight_gradient, shape, Array(dy), Array(x), dw, dbias);
          check_near(dbias, wanted_bias, 2e-6);
        } else {
          run(backend, OpKind::linear_weight_gradient, shape, Array(dy), Array(x), dw);
        }
        check_near(dw, wanted, 2e-6);
      }
  });
}

TEST_CASE("embedding looks up its shard's rows and gives zeros for the others and its gradient adds to those rows") {
  // Shard: tokens 4..6 of a table with rows 4..7, the last one padding. Token 7 is padding, 3 and 9
  // are elsewhere.
  const std::vector<std::int32_t> tokens = {4, 3, 6, 6, 9, 7, 5};
  const std::int64_t columns = 19;
  const OpShape shape{.rows = 7, .columns = columns, .begin = 4, .valid = 3};
  const Vector table = numbers(4 * columns, 1), dy = numbers(7 * columns, 2), before = numbers(4 * columns, 3);
  Vector wanted(at(7 * columns)), wanted_gradient = before;
  for (std::int64_t r = 0; r < 7; ++r)
    for (std::int64_t i = 0; i < columns; ++i) {
      const std::int64_t row = tokens[at(r)] - 4;
      if (row < 0 || row >= 3) continue;
      wanted[at(r * columns + i)] = table[at(row * columns + i)];
      wanted_gradient[at(row * columns + i)] += dy[at(r * columns + i)];
    }
  on_every_instruction_set([&](Backend& backend) {
    Array y(7 * columns), gradient(before);
    run(backend, OpKind::embedding, shape, tokens, Array(table), y);
    check_near(y, wanted, 0.0);
    run(backend, OpKind::embedding_gradient, shape, Array(dy), tokens, gradient);
    check_near(gradient, wanted_gradient, 1e-7);
  });
}

TEST_CASE("add_position adds the row of the position to every sample and its gradient sums over samples") {
  const std::int64_t sequence = 3, batch = 2, columns = 21, begin = 4;
  const OpShape shape{
      .rows = sequence * batch, .columns = columns, .sequence = sequence, .batch = batch, .begin = begin};
  const Vector x = numbers(6 * columns, 1), table = numbers(9 * columns, 2), before = numbers(9 * columns, 3);
  Vector wanted = x, wanted_gradient = before;
  for (std::int64_t r = 0; r < 6; ++r)
    for (std::int64_t i = 0; i < columns; ++i) {
      wanted[at(r * columns + i)] += table[at((begin + r / batch) * columns + i)];
      wanted_gradient[at((begin + r / batch) * columns + i)] += x[at(r * columns + i)];
    }
  on_every_instruction_set([&](Backend& backend) {
    Array y(6 * columns), in_place(x), gradient(before);
    run(backend, OpKind::add_position, shape, Array(x), Array(table), y);
    check_near(y, wanted, 1e-7);
    run(backend, OpKind::add_position, shape, in_place, Array(table), in_place);
    check_near(in_place, wanted, 1e-7);
    run(backend, OpKind::add_position_gradient, shape, Array(x), gradient);
    check_near(gradient, wanted_gradient, 1e-7);
  });
}

TEST_CASE("layer_norm and its gradient") {
  constexpr double epsilon = 1e-5;
  for (const std::int64_t columns : {1, 7, 16, 50}) {
    const std::int64_t rows = 3;
    Vector x = numbers(rows * columns, 1, 2.0);
    for (double& value : x) value = static_cast<float>(value + 3.0);
    const Vector gamma = numbers(columns, 2), beta = numbers(columns, 3), dy = numbers(rows * columns, 4);
    Vector means, rstds;
    const auto forward = [&](const Vector& input, const Vector& g, const Vector& b) {
      Vector y;
      means.clear();
      rstds.clear();
      for (std::int64_t r = 0; r < rows; ++r) {
        double mean = 0.0, variance = 0.0;
        for (std::int64_t i = 0; i < columns; ++i) mean += input[at(r * columns + i)] / static_cast<double>(columns);
        for (std::int64_t i = 0; i < columns; ++i)
          variance += std::pow(input[at(r * columns + i)] - mean, 2) / static_cast<double>(columns);
        means.push_back(mean);
        rstds.push_back(1 / std::sqrt(variance + epsilon));
        for (std::int64_t i = 0; i < columns; ++i)
          y.push_back((input[at(r * columns + i)] - mean) * rstds.back() * g[at(i)] + b[at(i)]);
      }
      return y;
    };
    const Vector dx = slopes([&](const Vector& v) { return dot(forward(v, gamma, beta), dy); }, x);
    const Vector dgamma = slopes([&](const Vector& v) { return dot(forward(x, v, beta), dy); }, gamma);
    const Vector dbeta = slopes([&](const Vector& v) { return dot(forward(x, gamma, v), dy); }, beta);
    const Vector wanted = forward(x, gamma, beta);
    on_every_instruction_set([&](Backend& backend) {
      INFO("columns ", columns);
      OpShape shape{.rows = rows, .columns = columns, .epsilon = epsilon};
      Array y(rows * columns), mean(rows), rstd(rows);
      run(backend, OpKind::layer_norm, shape, Array(x), Array(gamma), Array(beta), y, mean, rstd);
      check_near(y, wanted, 2e-6);
      check_near(mean, means, 1e-6);
      check_near(rstd, rstds, 2e-6);
      const Vector before = numbers(rows * columns, 5), gamma_before = numbers(columns, 6);
      for (const bool accumulate : {false, true}) {
        shape.accumulate = accumulate;
        const Array found = accumulate ? Array(before) : Array(rows * columns);
        Array found_gamma(gamma_before), found_beta(gamma_before);
        run(backend, OpKind::layer_norm_gradient, shape, Array(dy), Array(x), Array(gamma), mean, rstd, found,
            found_gamma, found_beta);
        check_near(found, accumulate ? plus(before, dx) : dx, 1e-5);
        check_near(found_gamma, plus(gamma_before, dgamma), 1e-5);
        check_near(found_beta, plus(gamma_before, dbeta), 1e-5);
      }
    });
    const Vector without_beta = forward(x, gamma, Vector(beta.size()));
    on_every_instruction_set([&](Backend& backend) {
      INFO("columns ", columns, ", without beta");
      OpShape shape{.rows = rows, .columns = columns, .without_beta = true, .epsilon = epsilon};
      Array y(rows * columns), mean(rows), rstd(rows), found(rows * columns), found_gamma(columns, 0.0f);
      run(backend, OpKind::layer_norm, shape, Array(x), Array(gamma), y, mean, rstd);
      check_near(y, without_beta, 2e-6);
      shape.freezes_second = true;
      run(backend, OpKind::layer_norm_gradient, shape, Array(dy), Array(x), Array(gamma), mean, rstd, found,
          found_gamma);
      check_near(found, dx, 1e-5);
      check_near(found_gamma, dgamma, 1e-5);
    });
  }
}

TEST_CASE("rms_norm and its gradient") {
  constexpr double epsilon = 1e-6;
  for (const std::int64_t columns : {1, 7, 16, 50}) {
    const std::int64_t rows = 3;
    const Vector x = numbers(rows * columns, 1, 2.0), gamma = numbers(columns, 2), dy = numbers(rows * columns, 4);
    Vector rstds;
    const auto forward = [&](const Vector& input, const Vector& g) {
      Vector y;
      rstds.clear();
      for (std::int64_t r = 0; r < rows; ++r) {
        double square = 0.0;
        for (std::int64_t i = 0; i < columns; ++i)
          square += std::pow(input[at(r * columns + i)], 2) / static_cast<double>(columns);
        rstds.push_back(1 / std::sqrt(square + epsilon));
        for (std::int64_t i = 0; i < columns; ++i) y.push_back(input[at(r * columns + i)] * rstds.back() * g[at(i)]);
      }
      return y;
    };
    const Vector dx = slopes([&](const Vector& v) { return dot(forward(v, gamma), dy); }, x);
    const Vector dgamma = slopes([&](const Vector& v) { return dot(forward(x, v), dy); }, gamma);
    const Vector wanted = forward(x, gamma);
    on_every_instruction_set([&](Backend& backend) {
      INFO("columns ", columns);
      OpShape shape{.rows = rows, .columns = columns, .epsilon = epsilon};
      Array y(rows * columns), rstd(rows);
      run(backend, OpKind::rms_norm, shape, Array(x), Array(gamma), y, rstd);
      check_near(y, wanted, 2e-6);
      check_near(rstd, rstds, 2e-6);
      const Vector before = numbers(rows * columns, 5), gamma_before = numbers(columns, 6);
      for (const bool accumulate : {false, true}) {
        shape.accumulate = accumulate;
        const Array found = accumulate ? Array(before) : Array(rows * columns);
        Array found_gamma(gamma_before);
        run(backend, OpKind::rms_norm_gradient, shape, Array(dy), Array(x), Array(gamma), rstd, found,
            found_gamma);
        check_near(found, accumulate ? plus(before, dx) : dx, 1e-5);
        check_near(found_gamma, plus(gamma_before, dgamma), 1e-5);
      }
    });
  }
}

TEST_CASE(
    "rotary turns query and key heads by position, leaves values and the rest of a head, and its gradient turns back") {
  struct Case {
    std::int64_t head_dim, rotary_dim;
    bool interleaved;
    double factor = 0.0;
  };
  // For each key/value head: 2 query heads, the key and the value.
  for (const Case& c : {Case{2, 0, false},
                        {6, 0, false},
                        {32, 0, false},
                        {200, 0, false},
                        {6, 2, false},
                        {40, 10, false},
                        {200, 136, false},
                        {2, 2, true},
                        {6, 0, true},
                        {40, 10, true},
                        {200, 136, true},
                        {32, 0, false, 8.0},
                        {40, 10, true, 2.5}}) {
    const std::int64_t sequence = 3, batch = 2, begin = 5, head_dim = c.head_dim;
    const std::int64_t turning = c.rotary_dim > 0 ? c.rotary_dim : head_dim, width = 8 * head_dim;
    const OpShape shape{.rows = 6, .sequence = sequence, .batch = batch, .heads = 4, .kv_heads = 2,
                        .head_dim = head_dim, .rotary_dim = c.rotary_dim, .begin = begin, .interleaved = c.interleaved,
                        .theta = 10000.0, .factor = c.factor};
    const Vector x = numbers(6 * width, 1);
    Vector wanted = x;
    for (std::int64_t row = 0; row < 6; ++row)
      for (std::int64_t head = 0; head < 8; ++head) {
        if (head % 4 == 3) continue;
        for (std::int64_t i = 0; i < turning / 2; ++i) {
          const std::int64_t position = begin + row / batch;
          const double angle = static_cast<double>(position) / (c.factor > 0.0 ? c.factor : 1.0) *
                               std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(turning));
          const std::int64_t first = row * width + head * head_dim;
          const std::size_t low = at(first + (c.interleaved ? 2 * i : i));
          const std::size_t high = at(first + (c.interleaved ? 2 * i + 1 : i + turning / 2));
          wanted[low] = x[low] * std::cos(angle) - x[high] * std::sin(angle);
          wanted[high] = x[high] * std::cos(angle) + x[low] * std::sin(angle);
        }
      }
    on_every_instruction_set([&](Backend& backend) {
      INFO("head_dim ", head_dim, ", of which turn ", turning, c.interleaved ? ", interleaved" : "");
      Array y(6 * width), in_place(x), back(6 * width);
      run(backend, OpKind::rotary, shape, Array(x), y);
      check_near(y, wanted, 1e-6);
      run(backend, OpKind::rotary, shape, in_place, in_place);
      CHECK(same_bits(in_place.data(), y.data(), y.size()));
      run(backend, OpKind::rotary_gradient, shape, y, back);  // the inverse of a rotation is its transpose
      check_near(back, x, 1e-6);
    });
  }
}

namespace {

// Fused queries, keys and values: 3 rows of 2 groups with 2 query heads, the key and the value.
struct HeadsCase {
  std::int64_t head_dim = 0;
  static constexpr std::int64_t rows = 3, groups = 2, slots = 8;
  OpShape shape() const {
    return {.rows = rows,
            .sequence = 3,
            .batch = 1,
            .heads = 4,
            .kv_heads = 2,
            .head_dim = head_dim,
            .all_heads = 4,
            .epsilon = 1e-6};
  }
  std::int64_t size() const { return rows * slots * head_dim; }
  static bool is_value(std::int64_t slot) { return slot % 4 == 3; }
  static bool is_key(std::int64_t slot) { return slot % 4 == 2; }
  // Among the heads of its kind.
  static std::int64_t number(std::int64_t slot) {
    return is_key(slot) || is_value(slot) ? slot / 4 : slot / 4 * 2 + slot % 4;
  }
  std::int64_t first(std::int64_t row, std::int64_t slot) const { return (row * slots + slot) * head_dim; }
};

double square_sum(const Vector& x, std::int64_t first, std::int64_t count) {
  double sum = 0.0;
  for (std::int64_t i = first; i < first + count; ++i) sum += x[at(i)] * x[at(i)];
  return sum;
}

// Gammas of a head's width are for all heads; longer ones have a part for each, and the mean is
// taken off first.
Vector naive_head_norm(const HeadsCase& c, const Vector& x, const Vector& query_gamma, const Vector& key_gamma,
                       Vector* rstd = nullptr) {
  Vector y = x;
  const bool centered = std::ssize(query_gamma) > c.head_dim;
  for (std::int64_t row = 0; row < c.rows; ++row)
    for (std::int64_t slot = 0; slot < c.slots; ++slot) {
      if (c.is_value(slot)) continue;
      const std::int64_t first = c.first(row, slot), gamma = centered ? c.number(slot) * c.head_dim : 0;
      if (centered) {
        double mean = 0.0;
        for (std::int64_t i = 0; i < c.head_dim; ++i) mean += x[at(first + i)] / static_cast<double>(c.head_dim);
        for (std::int64_t i = 0; i < c.head_dim; ++i) y[at(first + i)] -= mean;
      }
      const double r = 1 / std::sqrt(square_sum(y, first, c.head_dim) / static_cast<double>(c.head_dim) + 1e-6);
      if (rstd != nullptr) rstd->push_back(r);
      for (std::int64_t i = 0; i < c.head_dim; ++i)
        y[at(first + i)] *= r * (c.is_key(slot) ? key_gamma : query_gamma)[at(gamma + i)];
    }
  return y;
}

// [rows, 2]: sums for queries, and for keys.
Vector naive_squares(const HeadsCase& c, const Vector& x) {
  Vector squares(at(c.rows * 2));
  for (std::int64_t row = 0; row < c.rows; ++row)
    for (std::int64_t slot = 0; slot < c.slots; ++slot)
      if (!c.is_value(slot))
        squares[at(row * 2 + (c.is_key(slot) ? 1 : 0))] += square_sum(x, c.first(row, slot), c.head_dim);
  return squares;
}

Vector naive_query_key_norm(const HeadsCase& c, const Vector& x, const Vector& squares, const Vector& query_gamma,
                            const Vector& key_gamma) {
  Vector y = x;
  for (std::int64_t row = 0; row < c.rows; ++row)
    for (std::int64_t slot = 0; slot < c.slots; ++slot) {
      if (c.is_value(slot)) continue;
      const bool key = c.is_key(slot);
      const double r =
          1 / std::sqrt(squares[at(row * 2 + (key ? 1 : 0))] / static_cast<double>((key ? 2 : 4) * c.head_dim) + 1e-6);
      for (std::int64_t i = 0; i < c.head_dim; ++i)
        y[at(c.first(row, slot) + i)] *= r * (key ? key_gamma : query_gamma)[at(c.number(slot) * c.head_dim + i)];
    }
  return y;
}

}  // namespace

TEST_CASE("head_norm is the RMS norm or LayerNorm of query and key heads, its gradient its slope, also in place") {
  for (const auto& [head_dim, centered] : {std::pair<std::int64_t, bool>{1, false}, {6, false}, {16, false},
                                           {37, false}, {2, true}, {6, true}, {16, true}, {37, true}}) {
    const HeadsCase c{head_dim};
    OpShape shape = c.shape();
    shape.centered = centered;
    const Vector x = numbers(c.size(), 1, 2.0), dy = numbers(c.size(), 2);
    const std::int64_t queries = centered ? 4 * head_dim : head_dim, keys = centered ? 2 * head_dim : head_dim;
    const Vector query_gamma = numbers(queries, 3), key_gamma = numbers(keys, 4), query_before = numbers(queries, 5),
                 key_before = numbers(keys, 6);
    Vector rstds;
    const Vector wanted = naive_head_norm(c, x, query_gamma, key_gamma, &rstds);
    const Vector dx =
        slopes([&](const Vector& v) { return dot(naive_head_norm(c, v, query_gamma, key_gamma), dy); }, x);
    const Vector dquery =
        slopes([&](const Vector& v) { return dot(naive_head_norm(c, x, v, key_gamma), dy); }, query_gamma);
    const Vector dkey =
        slopes([&](const Vector& v) { return dot(naive_head_norm(c, x, query_gamma, v), dy); }, key_gamma);
    on_every_instruction_set([&](Backend& backend) {
      INFO("head_dim ", head_dim, centered ? ", centered" : "");
      Array y(c.size()), rstd(c.rows * 6), found(c.size()), in_place(dy);
      run(backend, OpKind::head_norm, shape, Array(x), Array(query_gamma), Array(key_gamma), y, rstd);
      check_near(y, wanted, 2e-6);
      check_near(rstd, rstds, 2e-6);
      for (const bool over : {false, true}) {
        Array found_query(query_before), found_key(key_before);
        run(backend, OpKind::head_norm_gradient, shape, over ? in_place.data() : Array(dy).data(), Array(x),
            Array(query_gamma), Array(key_gamma), rstd, over ? in_place.data() : found.data(), found_query, found_key);
        check_near(found_query, plus(query_before, dquery), 1e-5);
        check_near(found_key, plus(key_before, dkey), 1e-5);
      }
      check_near(found, dx, 1e-5);
      CHECK(same_bits(in_place.data(), found.data(), c.size()));
    });
  }
}

TEST_CASE("query_key_squares and query_key_norm are the RMS norm over all queries and over all keys, in two steps") {
  for (const std::int64_t head_dim : {1, 6, 37}) {
    const HeadsCase c{head_dim};
    const Vector x = numbers(c.size(), 1, 2.0), dy = numbers(c.size(), 2), query_gamma = numbers(4 * head_dim, 3);
    const Vector key_gamma = numbers(2 * head_dim, 4), query_before = numbers(4 * head_dim, 5),
                 key_before = numbers(2 * head_dim, 6);
    const auto norm = [&](const Vector& v) {
      return naive_query_key_norm(c, v, naive_squares(c, v), query_gamma, key_gamma);
    };
    const Vector squares = naive_squares(c, x);
    const Vector dx = slopes([&](const Vector& v) { return dot(norm(v), dy); }, x);
    const Vector dsquares = slopes(
        [&](const Vector& v) { return dot(naive_query_key_norm(c, x, v, query_gamma, key_gamma), dy); }, squares);
    const Vector dquery = slopes(
        [&](const Vector& v) { return dot(naive_query_key_norm(c, x, squares, v, key_gamma), dy); }, query_gamma);
    const Vector dkey = slopes(
        [&](const Vector& v) { return dot(naive_query_key_norm(c, x, squares, query_gamma, v), dy); }, key_gamma);
    on_every_instruction_set([&](Backend& backend) {
      INFO("head_dim ", head_dim);
      Array found_squares(c.rows * 2), y(c.size()), found(c.size()), found_dsquares(c.rows * 2);
      run(backend, OpKind::query_key_squares, c.shape(), Array(x), found_squares);
      check_near(found_squares, squares, 2e-6);
      run(backend, OpKind::query_key_norm, c.shape(), Array(x), found_squares, Array(query_gamma), Array(key_gamma), y);
      check_near(y, norm(x), 2e-6);
      Array found_query(query_before), found_key(key_before);
      run(backend, OpKind::query_key_norm_gradient, c.shape(), Array(dy), Array(x), found_squares, Array(query_gamma),
          Array(key_gamma), found, found_dsquares, found_query, found_key);
      check_near(found_dsquares, dsquares, 1e-5);
      check_near(found_query, plus(query_before, dquery), 1e-5);
      check_near(found_key, plus(key_before, dkey), 1e-5);
      // The whole slope is that through x itself plus that through the sums.
      OpShape adding = c.shape();
      adding.accumulate = true;
      Array alone(c.size());
      run(backend, OpKind::query_key_squares_gradient, c.shape(), found_dsquares, Array(x), alone);
      const Vector through_x = found.values();
      run(backend, OpKind::query_key_squares_gradient, adding, found_dsquares, Array(x), found);
      check_near(found, dx, 1e-5);
      check_near(found, plus(through_x, alone.values()), 1e-6);
      Array in_place(dy), again(c.rows * 2);
      Array other_query(query_before), other_key(key_before);
      run(backend, OpKind::query_key_norm_gradient, c.shape(), in_place, Array(x), found_squares, Array(query_gamma),
          Array(key_gamma), in_place, again, other_query, other_key);
      check_near(in_place, through_x, 0.0);
    });
  }
}

TEST_CASE("heads over two ranks, with the sums of squares added up, are normalised as on one") {
  const HeadsCase c{5};
  const Vector x = numbers(c.size(), 1, 2.0), query_gamma = numbers(20, 3), key_gamma = numbers(10, 4);
  const std::unique_ptr<Backend> backend = make_cpu_backend();
  Array squares(c.rows * 2), y(c.size());
  run(*backend, OpKind::query_key_squares, c.shape(), Array(x), squares);
  run(*backend, OpKind::query_key_norm, c.shape(), Array(x), squares, Array(query_gamma), Array(key_gamma), y);
  OpShape half = c.shape();
  half.heads = 2;
  half.kv_heads = 1;
  Vector sums(at(c.rows * 2));
  std::vector<Vector> shards(2);
  for (int rank = 0; rank < 2; ++rank) {
    for (std::int64_t row = 0; row < c.rows; ++row)
      for (std::int64_t i = 0; i < 20; ++i) shards[at(rank)].push_back(x[at(row * 40 + rank * 20 + i)]);
    Array part(c.rows * 2);
    run(*backend, OpKind::query_key_squares, half, Array(shards[at(rank)]), part);
    sums = plus(sums, part.values());
  }
  for (int rank = 0; rank < 2; ++rank) {
    Array part(c.size() / 2);
    const Vector queries(query_gamma.begin() + rank * 10, query_gamma.begin() + rank * 10 + 10);
    const Vector keys(key_gamma.begin() + rank * 5, key_gamma.begin() + rank * 5 + 5);
    run(*backend, OpKind::query_key_norm, half, Array(shards[at(rank)]), Array(sums), Array(queries), Array(keys),
        part);
    for (std::int64_t row = 0; row < c.rows; ++row)
      for (std::int64_t i = 0; i < 20; ++i)
        CHECK(part[row * 20 + i] == doctest::Approx(y[row * 40 + rank * 20 + i]).epsilon(1e-6));
  }
}

namespace {

struct AttentionSize {
  std::int64_t sequence, batch, heads, kv_heads, head_dim;
  OpShape features = {};  // window, softcap, alibi, score_scale
  OpShape shape() const {
    OpShape result = features;
    result.rows = sequence * batch;
    result.sequence = sequence;
    result.batch = batch;
    result.heads = heads;
    result.kv_heads = kv_heads;
    result.head_dim = head_dim;
    return result;
  }
  std::int64_t width() const { return (heads + 2 * kv_heads) * head_dim; }
  std::int64_t fused() const { return sequence * batch * width(); }
  std::int64_t output() const { return sequence * batch * heads * head_dim; }
};

// Row by row, straight from the definition. Writes log-sum-exp [batch, heads, sequence] if asked
// for.
Vector naive_attention(const AttentionSize& s, const Vector& qkv, Vector* lse = nullptr) {
  const std::int64_t per_group = s.heads / s.kv_heads;
  Vector y(at(s.output()));
  if (lse != nullptr) lse->assign(at(s.batch * s.heads * s.sequence), 0.0);
  for (std::int64_t b = 0; b < s.batch; ++b)
    for (std::int64_t h = 0; h < s.heads; ++h) {
      const std::int64_t group = (h / per_group) * (per_group + 2);
      const auto element = [&](std::int64_t position, std::int64_t slot, std::int64_t i) {
        return qkv[at((position * s.batch + b) * s.width() + (group + slot) * s.head_dim + i)];
      };
      for (std::int64_t q = 0; q < s.sequence; ++q) {
        Vector weights;
        double sum = 0.0;
        const OpShape& f = s.features;
        const std::int64_t last = f.bidirectional ? s.sequence - 1 : q;
        for (std::int64_t k = 0; k <= last; ++k) {
          if (f.window > 0 && q - k >= f.window) {
            weights.push_back(0.0);
            continue;
          }
          double score = 0.0;
          for (std::int64_t i = 0; i < s.head_dim; ++i)
            score += element(q, h % per_group, i) * element(k, per_group, i);
          score *= f.score_scale != 0.0 ? f.score_scale : 1 / std::sqrt(static_cast<double>(s.head_dim));
          if (f.softcap != 0.0) score = f.softcap * std::tanh(score / f.softcap);
          if (f.alibi != 0.0)
            score += f.alibi * alibi_slope(f.first_head + h, f.all_heads) * static_cast<double>(k - q);
          weights.push_back(std::exp(score));
          sum += weights.back();
        }
        if (lse != nullptr) (*lse)[at((b * s.heads + h) * s.sequence + q)] = std::log(sum);
        for (std::int64_t i = 0; i < s.head_dim; ++i) {
          double value = 0.0;
          for (std::int64_t k = 0; k <= last; ++k) value += weights[at(k)] / sum * element(k, per_group + 1, i);
          y[at((q * s.batch + b) * s.heads * s.head_dim + h * s.head_dim + i)] = value;
        }
      }
    }
  return y;
}

}  // namespace

namespace {

// The options of heads besides the plain softmax, alone and together.
const OpShape attention_features[] = {{},
                                      {.window = 1},
                                      {.window = 4},
                                      {.window = 128},
                                      {.window = 150},
                                      {.score_scale = 0.31},
                                      {.softcap = 1.5},
                                      {.all_heads = 6, .first_head = 2, .alibi = 1.0},
                                      {.window = 7, .all_heads = 4, .score_scale = 0.4, .softcap = 2.5, .alibi = 0.5},
                                      {.bidirectional = true},
                                      {.bidirectional = true, .score_scale = 0.4, .softcap = 2.5}};

}  // namespace

TEST_CASE(
    "attention is causal or not, shares key/value heads, honours what it is asked for and saves log-sum-exp") {
  // The last two have several blocks of queries.
  std::vector<AttentionSize> sizes;
  for (const OpShape& features : attention_features)
    for (const AttentionSize& size :
         {AttentionSize{1, 1, 1, 1, 1}, {5, 2, 4, 2, 6}, {17, 3, 2, 2, 16}, {130, 1, 3, 1, 20}, {259, 2, 2, 1, 8}}) {
      sizes.push_back(size);
      sizes.back().features = features;
    }
  on_every_instruction_set([&](Backend& backend) {
    for (const AttentionSize& s : sizes) {
      INFO("sequence ", s.sequence, ", window ", s.features.window, ", softcap ", s.features.softcap, ", alibi ",
           s.features.alibi);
      const Vector qkv = numbers(s.fused(), 1, 2.0);
      Vector wanted_lse;
      const Vector wanted = naive_attention(s, qkv, &wanted_lse);
      Array y(s.output()), lse(s.batch * s.heads * s.sequence);
      run(backend, OpKind::attention, s.shape(), Array(qkv), y, lse);
      check_near(y, wanted, 3e-6);
      check_near(lse, wanted_lse, 1e-6);
    }
  });
}

TEST_CASE("attention_gradient is the slope of attention") {
  std::vector<AttentionSize> sizes;
  for (const OpShape& features : attention_features)
    for (const AttentionSize& size : {AttentionSize{1, 1, 1, 1, 1}, {5, 2, 4, 2, 6}, {9, 1, 2, 2, 17}}) {
      sizes.push_back(size);
      sizes.back().features = features;
    }
  for (const AttentionSize& s : sizes) {
    const Vector qkv = numbers(s.fused(), 1, 2.0), dy = numbers(s.output(), 2);
    const Vector wanted = slopes([&](const Vector& v) { return dot(naive_attention(s, v), dy); }, qkv);
    on_every_instruction_set([&](Backend& backend) {
      INFO("sequence ", s.sequence);
      Array y(s.output()), lse(s.batch * s.heads * s.sequence), dqkv(s.fused());
      run(backend, OpKind::attention, s.shape(), Array(qkv), y, lse);
      run(backend, OpKind::attention_gradient, s.shape(), Array(dy), Array(qkv), y, lse, dqkv);
      check_near(dqkv, wanted, 1e-5);
    });
  }
}

TEST_CASE("attention_gradient over several blocks of queries: slopes along random directions") {
  for (const OpShape& features : attention_features) {
    const AttentionSize s{.sequence = 261, .batch = 2, .heads = 2, .kv_heads = 1, .head_dim = 6, .features = features};
    const Vector qkv = numbers(s.fused(), 1, 2.0), dy = numbers(s.output(), 2);
    std::vector<Vector> directions;
    Vector wanted;
    for (int seed = 10; seed < 13; ++seed) {
      directions.push_back(numbers(s.fused(), seed));
      const auto loss_at = [&](double step) {
        Vector moved = qkv;
        for (std::size_t i = 0; i < moved.size(); ++i) moved[i] += step * directions.back()[i];
        return dot(naive_attention(s, moved), dy);
      };
      wanted.push_back((loss_at(1e-5) - loss_at(-1e-5)) / 2e-5);
    }
    on_every_instruction_set([&](Backend& backend) {
      INFO("window ", features.window, ", softcap ", features.softcap, ", alibi ", features.alibi);
      Array y(s.output()), lse(s.batch * s.heads * s.sequence), dqkv(s.fused());
      run(backend, OpKind::attention, s.shape(), Array(qkv), y, lse);
      run(backend, OpKind::attention_gradient, s.shape(), Array(dy), Array(qkv), y, lse, dqkv);
      const Vector found = dqkv.values();
      double scale = 0.0;
      for (const double v : found) scale += v * v;
      for (std::size_t i = 0; i < wanted.size(); ++i)
        CHECK(std::abs(dot(found, directions[i]) - wanted[i]) <= 1e-5 * std::sqrt(scale));
    });
  }
}

namespace {

// The rows of one rank of those that share out a sequence in chunks.
Vector rows_of(const AttentionSize& whole, const ContextChunks& chunks, const Vector& values, std::int64_t width) {
  Vector rows;
  for (std::int64_t row = 0; row < 2 * chunks.size; ++row) {
    const std::int64_t begin = chunks.position(row) * whole.batch * width;
    rows.insert(rows.end(), values.begin() + begin, values.begin() + begin + whole.batch * width);
  }
  return rows;
}

}  // namespace

TEST_CASE("attention over a rank's chunks with gathered keys is that of the whole sequence, forward and backward") {
  for (const OpShape& features : attention_features)
    for (const auto& [ranks, size] : {std::pair<std::int64_t, std::int64_t>{2, 1}, {3, 2}, {2, 130}}) {
      const AttentionSize s{.sequence = 2 * ranks * size, .batch = 2, .heads = 4, .kv_heads = 2, .head_dim = 6,
                            .features = features};
      const std::int64_t per_group = s.heads / s.kv_heads, keys_width = 2 * s.kv_heads * s.head_dim;
      const Vector qkv = numbers(s.fused(), 1, 2.0), dy = numbers(s.output(), 2);
      on_every_instruction_set([&](Backend& backend) {
        INFO("ranks ", ranks, ", chunks of ", size, ", window ", features.window, ", softcap ", features.softcap,
             ", alibi ", features.alibi);
        Array y(s.output()), lse(s.batch * s.heads * s.sequence), dqkv(s.fused());
        run(backend, OpKind::attention, s.shape(), Array(qkv), y, lse);
        run(backend, OpKind::attention_gradient, s.shape(), Array(dy), Array(qkv), y, lse, dqkv);
        // Keys and values, rank after rank, and their gradients summed over the ranks.
        const auto gathered = [&](const Vector& fused) {
          Vector all;
          for (std::int64_t rank = 0; rank < ranks; ++rank) {
            const Vector rows = rows_of(s, {.ranks = ranks, .rank = rank, .size = size}, fused, s.width());
            const OpShape columns{.rows = 2 * size * s.batch * s.kv_heads,
                                  .columns = 2 * s.head_dim,
                                  .inner = (per_group + 2) * s.head_dim,
                                  .begin = per_group * s.head_dim};
            Array own(2 * size * s.batch * keys_width);
            run(backend, OpKind::take_columns, columns, Array(rows), own);
            const Vector taken = own.values();
            all.insert(all.end(), taken.begin(), taken.end());
          }
          return all;
        };
        const Vector keys = gathered(qkv);
        Vector key_gradients(keys.size());
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
          const ContextChunks chunks{.ranks = ranks, .rank = rank, .size = size};
          AttentionSize own = s;
          own.sequence = 2 * size;
          OpShape shape = own.shape();
          shape.chunks = chunks;
          shape.gathered = true;
          const Vector rows = rows_of(s, chunks, qkv, s.width());
          Array own_y(own.output()), own_lse(own.batch * own.heads * own.sequence), own_dqkv(own.fused()),
              dkeys(static_cast<std::int64_t>(keys.size()));
          run(backend, OpKind::attention, shape, Array(rows), Array(keys), own_y, own_lse);
          check_near(own_y, rows_of(s, chunks, y.values(), s.heads * s.head_dim), 3e-6);
          const Vector found_lse = own_lse.values(), whole_lse = lse.values();
          for (std::int64_t head = 0; head < s.batch * s.heads; ++head)
            for (std::int64_t row = 0; row < own.sequence; ++row)
              CHECK(found_lse[at(head * own.sequence + row)] ==
                    doctest::Approx(whole_lse[at(head * s.sequence + chunks.position(row))]).epsilon(1e-6));
          run(backend, OpKind::attention_gradient, shape, Array(rows_of(s, chunks, dy, s.heads * s.head_dim)),
              Array(rows), Array(keys), own_y, own_lse, own_dqkv, dkeys);
          // Those of queries; those of keys are the sum over the ranks.
          Vector queries = own_dqkv.values(), wanted = rows_of(s, chunks, dqkv.values(), s.width());
          for (std::size_t i = 0; i < wanted.size(); ++i)
            if (static_cast<std::int64_t>(i) / s.head_dim % (per_group + 2) >= per_group) queries[i] = wanted[i] = 0.0;
          for (std::size_t i = 0; i < wanted.size(); ++i) CHECK(std::abs(queries[i] - wanted[i]) <= 2e-5);
          key_gradients = plus(key_gradients, dkeys.values());
        }
        const Vector wanted = gathered(dqkv.values());
        for (std::size_t i = 0; i < wanted.size(); ++i) CHECK(std::abs(key_gradients[i] - wanted[i]) <= 1e-4);
      });
    }
}

TEST_CASE("attention step by step around a ring is that of the whole sequence, forward and backward") {
  const OpShape all_features[] = {{}, {.softcap = 1.5}, {.bidirectional = true}};
  for (const OpShape& features : all_features)
    for (const auto& [ranks, size] : {std::pair<std::int64_t, std::int64_t>{1, 3}, {2, 1}, {3, 2}, {2, 130}}) {
      const AttentionSize s{.sequence = 2 * ranks * size, .batch = 2, .heads = 4, .kv_heads = 2, .head_dim = 6,
                            .features = features};
      const std::int64_t per_group = s.heads / s.kv_heads;
      const Vector qkv = numbers(s.fused(), 1, 2.0), dy = numbers(s.output(), 2);
      on_every_instruction_set([&](Backend& backend) {
        INFO("ranks ", ranks, ", chunks of ", size, ", softcap ", features.softcap, ", bidirectional ",
             features.bidirectional);
        Array y(s.output()), lse(s.batch * s.heads * s.sequence), dqkv(s.fused());
        run(backend, OpKind::attention, s.shape(), Array(qkv), y, lse);
        run(backend, OpKind::attention_gradient, s.shape(), Array(dy), Array(qkv), y, lse, dqkv);
        const auto keys_of = [&](std::int64_t rank, const Vector& fused) {
          const Vector rows = rows_of(s, {.ranks = ranks, .rank = rank, .size = size}, fused, s.width());
          const OpShape columns{.rows = 2 * size * s.batch * s.kv_heads,
                                .columns = 2 * s.head_dim,
                                .inner = (per_group + 2) * s.head_dim,
                                .begin = per_group * s.head_dim};
          Array own(columns.rows * columns.columns);
          run(backend, OpKind::take_columns, columns, Array(rows), own);
          return own.values();
        };
        std::vector<Vector> key_gradients(at(ranks), Vector(keys_of(0, qkv).size()));
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
          const ContextChunks chunks{.ranks = ranks, .rank = rank, .size = size};
          AttentionSize own = s;
          own.sequence = 2 * size;
          const Vector rows = rows_of(s, chunks, qkv, s.width());
          Array own_y(own.output()), own_lse(own.batch * own.heads * own.sequence), own_dqkv(own.fused());
          const auto step = [&](std::int64_t number) {
            OpShape shape = own.shape();
            shape.chunks = chunks;
            shape.chunks.holder = (rank + ranks - number) % ranks;
            shape.gathered = true;
            shape.accumulate = number > 0;
            return shape;
          };
          for (std::int64_t number = 0; number < ranks; ++number) {
            const OpShape shape = step(number);
            run(backend, OpKind::attention, shape, Array(rows), Array(keys_of(*shape.chunks.holder, qkv)), own_y,
                own_lse);
          }
          check_near(own_y, rows_of(s, chunks, y.values(), s.heads * s.head_dim), 5e-6);
          const Vector found_lse = own_lse.values(), whole_lse = lse.values();
          for (std::int64_t head = 0; head < s.batch * s.heads; ++head)
            for (std::int64_t row = 0; row < own.sequence; ++row)
              CHECK(found_lse[at(head * own.sequence + row)] ==
                    doctest::Approx(whole_lse[at(head * s.sequence + chunks.position(row))]).epsilon(1e-6));
          for (std::int64_t number = 0; number < ranks; ++number) {
            const OpShape shape = step(number);
            Vector& sum = key_gradients[at(*shape.chunks.holder)];
            Array part(static_cast<std::int64_t>(sum.size()));
            run(backend, OpKind::attention_gradient, shape, Array(rows_of(s, chunks, dy, s.heads * s.head_dim)),
                Array(rows), Array(keys_of(*shape.chunks.holder, qkv)), own_y, own_lse, own_dqkv, part);
            sum = plus(sum, part.values());
          }
          Vector queries = own_dqkv.values(), wanted = rows_of(s, chunks, dqkv.values(), s.width());
          for (std::size_t i = 0; i < wanted.size(); ++i)
            if (static_cast<std::int64_t>(i) / s.head_dim % (per_group + 2) >= per_group) {
              CHECK(queries[i] == 0.0);
              wanted[i] = 0.0;
            }
          for (std::size_t i = 0; i < wanted.size(); ++i) CHECK(std::abs(queries[i] - wanted[i]) <= 2e-5);
        }
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
          const Vector wanted = keys_of(rank, dqkv.values());
          for (std::size_t i = 0; i < wanted.size(); ++i)
            CHECK(std::abs(key_gradients[at(rank)][i] - wanted[i]) <= 1e-4);
        }
      });
    }
}

TEST_CASE("in every step around a ring but the own one, all ranks have as many pairs of queries and keys") {
  for (const std::int64_t ranks : {2, 3, 8})
    for (const std::int64_t size : {1, 5})
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        std::int64_t all = 0, positions = 0;
        ContextChunks chunks{.ranks = ranks, .rank = rank, .size = size};
        for (std::int64_t row = 0; row < 2 * size; ++row) positions += chunks.position(row) + 1;
        for (std::int64_t holder = 0; holder < ranks; ++holder) {
          chunks.holder = holder;
          const RingStep step = ring_step({.chunks = chunks});
          std::int64_t pairs = 0;
          for (std::int64_t row = step.first_query; row < 2 * size; ++row) pairs += step.causal ? row + 1 : step.keys;
          CHECK(pairs == (holder == rank ? size * (2 * size + 1) : 2 * size * size));
          all += pairs;
        }
        CHECK(all == positions);
        // Bidirectional attention: all with all, in every step.
        for (std::int64_t holder = 0; holder < ranks; ++holder) {
          chunks.holder = holder;
          const RingStep step = ring_step({.chunks = chunks, .bidirectional = true});
          CHECK((step.first_query == 0 && step.keys == 2 * size && !step.causal));
        }
      }
}

TEST_CASE("take_columns and put_columns move some columns of rows, and leave the others") {
  on_every_instruction_set([](Backend& backend) {
    const OpShape shape{.rows = 5, .columns = 3, .inner = 8, .begin = 4};
    const Vector x = numbers(40, 1), before = numbers(40, 2);
    Vector wanted, put = before;
    for (std::int64_t row = 0; row < 5; ++row)
      for (std::int64_t column = 4; column < 7; ++column) {
        wanted.push_back(x[at(row * 8 + column)]);
        put[at(row * 8 + column)] = x[at(row * 8 + column)];
      }
    Array taken(15), to(before);
    run(backend, OpKind::take_columns, shape, Array(x), taken);
    check_near(taken, wanted, 0.0);
    run(backend, OpKind::put_columns, shape, taken, to);
    check_near(to, put, 0.0);
  });
}

TEST_CASE("the rows of every rank's chunks have each position once, and equally many pairs with keys before them") {
  for (const std::int64_t ranks : {1, 2, 3, 8})
    for (const std::int64_t size : {1, 5}) {
      std::vector<int> seen(at(2 * ranks * size));
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        const ContextChunks chunks{.ranks = ranks, .rank = rank, .size = size};
        std::int64_t pairs = 0;
        for (std::int64_t row = 0; row < 2 * size; ++row) {
          const std::int64_t position = chunks.position(row);
          ++seen[at(position)];
          pairs += position + 1;
          CHECK(chunks.gathered_row(position) == rank * 2 * size + row);
        }
        CHECK(pairs == size * (2 * ranks * size + 1));
      }
      CHECK(std::ranges::all_of(seen, [](int count) { return count == 1; }));
    }
}

namespace {

struct ActivationCase {
  ActivationKind kind;
  double (*value)(double);
};
const ActivationCase activation_cases[] = {
      {ActivationKind::gelu_tanh,
       [](double x) {
         return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
       }},
      {ActivationKind::gelu_erf, [](double x) { return 0.5 * x * (1 + std::erf(x / std::numbers::sqrt2)); }},
      {ActivationKind::relu, [](double x) { return x > 0 ? x : 0.0; }},
      {ActivationKind::silu, [](double x) { return x / (1 + std::exp(-x)); }},
};

}  // namespace

TEST_CASE("activations and their gradients, also in place") {
  const std::int64_t rows = 5, columns = 43;
  Vector x = numbers(rows * columns, 1, 6.0);
  x[0] = 60.0;  // far out, where the tails must not overflow
  x[1] = -60.0;
  x[2] = 0.0;
  const Vector dy = numbers(rows * columns, 2);
  for (const ActivationCase& c : activation_cases) {
    Vector wanted, wanted_gradient;
    for (std::size_t i = 0; i < x.size(); ++i) {
      wanted.push_back(c.value(x[i]));
      const double slope = c.kind == ActivationKind::relu ? (x[i] > 0 ? 1.0 : 0.0)
                                                          : (c.value(x[i] + 1e-5) - c.value(x[i] - 1e-5)) / 2e-5;
      wanted_gradient.push_back(dy[i] * slope);
    }
    on_every_instruction_set([&](Backend& backend) {
      INFO("activation ", static_cast<int>(c.kind));
      const OpShape shape{.rows = rows, .columns = columns, .activation = c.kind};
      Array y(rows * columns), in_place(x), dx(rows * columns), gradient_in_place(dy);
      run(backend, OpKind::activation, shape, Array(x), y);
      for (std::int64_t i = 0; i < y.size(); ++i)
        // tanh and exp have a small relative error; erf has 1.2e-7, of which x times remains where
        // the rest cancels.
        CHECK(std::abs(y[i] - wanted[at(i)]) <=
              2e-6 * std::abs(wanted[at(i)]) +
                  (c.kind == ActivationKind::gelu_erf ? 1.5e-7 * std::abs(x[at(i)]) : 1e-9));
      run(backend, OpKind::activation, shape, in_place, in_place);
      CHECK(same_bits(in_place.data(), y.data(), y.size()));
      run(backend, OpKind::activation_gradient, shape, Array(dy), Array(x), dx);
      check_near(dx, wanted_gradient, 2e-6);
      run(backend, OpKind::activation_gradient, shape, gradient_in_place, Array(x), gradient_in_place);
      CHECK(same_bits(gradient_in_place.data(), dx.data(), dx.size()));
    });
  }
}

TEST_CASE("gates of every activation and their gradients, also in place") {
  const std::int64_t rows = 3, columns = 29, count = rows * columns;
  Vector gate = numbers(count, 1, 8.0);
  gate[0] = 100.0;
  gate[1] = -100.0;
  const Vector up = numbers(count, 2), dy = numbers(count, 3);
  for (const ActivationCase& c : activation_cases) {
    const OpShape shape{.rows = rows, .columns = columns, .activation = c.kind};
    const auto forward = [&](const Vector& g, const Vector& u) {
      Vector y;
      for (std::size_t i = 0; i < g.size(); ++i) y.push_back(c.value(g[i]) * u[i]);
      return y;
    };
    const Vector dgate = slopes([&](const Vector& v) { return dot(forward(v, up), dy); }, gate);
    const Vector dup = slopes([&](const Vector& v) { return dot(forward(gate, v), dy); }, up);
    on_every_instruction_set([&](Backend& backend) {
      INFO("activation ", static_cast<int>(c.kind));
      Array y(count), in_place(gate), found_gate(count), found_up(count), gradient_in_place(dy);
      run(backend, OpKind::gate, shape, Array(gate), Array(up), y);
      check_near(y, forward(gate, up), 1e-6);
      run(backend, OpKind::gate, shape, in_place, Array(up), in_place);
      CHECK(same_bits(in_place.data(), y.data(), count));
      run(backend, OpKind::gate_gradient, shape, Array(dy), Array(gate), Array(up), found_gate, found_up);
      check_near(found_gate, dgate, 2e-6);
      check_near(found_up, dup, 2e-6);
      run(backend, OpKind::gate_gradient, shape, gradient_in_place, Array(gate), Array(up),
          gradient_in_place, found_up);
      CHECK(same_bits(gradient_in_place.data(), found_gate.data(), count));
    });
  }
}

TEST_CASE("scale and softcap and their gradients, also in place") {
  const std::int64_t rows = 3, columns = 29, count = rows * columns;
  Vector x = numbers(count, 1, 40.0);
  x[0] = 1e6;
  x[1] = -1e6;
  x[2] = 0.0;
  x[3] = 1e-4;  // where 1 - 2 / (exp(2x) + 1) cancels
  const Vector dy = numbers(count, 2);
  for (const OpShape& shape : {OpShape{.rows = rows, .columns = columns, .factor = -0.37},
                               OpShape{.rows = rows, .columns = columns, .softcap = 30.0}}) {
    const bool capped = shape.softcap != 0.0;
    const auto value = [&](double v) { return capped ? 30.0 * std::tanh(v / 30.0) : -0.37 * v; };
    Vector wanted, wanted_gradient;
    for (std::size_t i = 0; i < x.size(); ++i) {
      wanted.push_back(value(x[i]));
      wanted_gradient.push_back(dy[i] * (capped ? 1 - std::pow(std::tanh(x[i] / 30.0), 2) : -0.37));
    }
    on_every_instruction_set([&](Backend& backend) {
      const OpKind forward = capped ? OpKind::softcap : OpKind::scale;
      Array y(count), in_place(x), dx(count), gradient_in_place(dy);
      run(backend, forward, shape, Array(x), y);
      for (std::int64_t i = 0; i < count; ++i) CHECK(std::abs(y[i] - wanted[at(i)]) <= 4e-7 * std::abs(wanted[at(i)]));
      run(backend, forward, shape, in_place, in_place);
      CHECK(same_bits(in_place.data(), y.data(), count));
      if (capped) {
        run(backend, OpKind::softcap_gradient, shape, Array(dy), y, dx);
        run(backend, OpKind::softcap_gradient, shape, gradient_in_place, y, gradient_in_place);
      } else {
        run(backend, OpKind::scale_gradient, shape, Array(dy), dx);
        run(backend, OpKind::scale_gradient, shape, gradient_in_place, gradient_in_place);
      }
      check_near(dx, wanted_gradient, 1e-6);
      CHECK(same_bits(gradient_in_place.data(), dx.data(), count));
    });
  }
}

TEST_CASE("add adds what is present and bias_gradient sums over rows") {
  const std::int64_t rows = 3, columns = 21;
  const Vector a = numbers(rows * columns, 1), b = numbers(rows * columns, 2), bias = numbers(columns, 3);
  on_every_instruction_set([&](Backend& backend) {
    for (const bool second : {false, true})
      for (const bool has_bias : {false, true}) {
        const OpShape shape{.rows = rows, .columns = columns, .bias = has_bias, .second = second};
        Vector wanted = a;
        for (std::int64_t i = 0; i < rows * columns; ++i)
          wanted[at(i)] += (second ? b[at(i)] : 0.0) + (has_bias ? bias[at(i % columns)] : 0.0);
        Array y(rows * columns);
        if (second && has_bias) run(backend, OpKind::add, shape, Array(a), Array(b), Array(bias), y);
        if (second && !has_bias) run(backend, OpKind::add, shape, Array(a), Array(b), y);
        if (!second && has_bias) run(backend, OpKind::add, shape, Array(a), Array(bias), y);
        if (!second && !has_bias) run(backend, OpKind::add, shape, Array(a), y);
        check_near(y, wanted, 1e-6);
      }
    Array in_place(b);
    run(backend, OpKind::add, {.rows = rows, .columns = columns, .second = true}, Array(a), in_place, in_place);
    check_near(in_place, plus(a, b), 1e-6);
    Vector wanted = bias;
    for (std::int64_t i = 0; i < rows * columns; ++i) wanted[at(i % columns)] += a[at(i)];
    Array dbias(bias);
    run(backend, OpKind::bias_gradient, {.rows = rows, .columns = columns, .bias = true}, Array(a), dbias);
    check_near(dbias, wanted, 1e-6);
  });
}

TEST_CASE("cross entropy over shards of a padded vocabulary equals that over the whole") {
  // 41 tokens over shards of 22 columns: the second holds 19 and 3 padding, a third (all padding)
  // none.
  const std::int64_t rows = 5, vocabulary = 41, columns = 22;
  const Vector logits = numbers(rows * vocabulary, 1, 30.0);
  const std::vector<std::int32_t> targets = {0, 21, -1, 40, 7};  // the third token has none
  const double scale = 0.125;
  double wanted_loss = 2.5;
  Vector wanted_gradient;
  for (std::int64_t r = 0; r < rows; ++r) {
    if (targets[at(r)] < 0) {
      wanted_gradient.insert(wanted_gradient.end(), at(vocabulary), 0.0);
      continue;
    }
    double sum = 0.0;
    for (std::int64_t i = 0; i < vocabulary; ++i) sum += std::exp(logits[at(r * vocabulary + i)]);
    wanted_loss += std::log(sum) - logits[at(r * vocabulary + targets[at(r)])];
    for (std::int64_t i = 0; i < vocabulary; ++i)
      wanted_gradient.push_back((std::exp(logits[at(r * vocabulary + i)]) / sum - (i == targets[at(r)] ? 1 : 0)) *
                                scale);
  }
  on_every_instruction_set([&](Backend& backend) {
    const std::int64_t shards = 3;
    std::vector<Array> shard_logits, maxima, sums, gradients;
    std::vector<OpShape> shapes;
    Array maximum(rows, -INFINITY), sum(2 * rows, 0.0f), loss(1, 2.5f);
    for (std::int64_t shard = 0; shard < shards; ++shard) {
      const std::int64_t begin = shard * columns;
      const std::int64_t valid = std::max<std::int64_t>(0, std::min(columns, vocabulary - begin));
      shapes.push_back({.rows = rows, .columns = columns, .begin = begin, .valid = valid, .scale = scale});
      shard_logits.emplace_back(rows * columns, 1000.0f);  // padding holds anything
      for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t i = 0; i < valid; ++i)
          shard_logits.back()[r * columns + i] = static_cast<float>(logits[at(r * vocabulary + begin + i)]);
      maxima.emplace_back(rows);
      sums.emplace_back(2 * rows);
      gradients.emplace_back(rows * columns);
      run(backend, OpKind::cross_entropy_max, shapes.back(), shard_logits.back(), maxima.back());
      for (std::int64_t r = 0; r < rows; ++r) maximum[r] = std::max(maximum[r], maxima.back()[r]);
    }
    CHECK(maxima[2][0] == -INFINITY);
    for (std::size_t shard = 0; shard < 3; ++shard) {
      run(backend, OpKind::cross_entropy_sums, shapes[shard], shard_logits[shard], targets, maximum,
          sums[shard]);
      for (std::int64_t i = 0; i < 2 * rows; ++i) sum[i] += sums[shard][i];
    }
    run(backend, OpKind::cross_entropy_loss, shapes[0], shard_logits[0], targets, maximum, sum, loss);
    CHECK(std::abs(loss[0] - wanted_loss) <= 2e-6 * wanted_loss);
    for (std::size_t shard = 0; shard < 3; ++shard) {
      run(backend, OpKind::cross_entropy_gradient, shapes[shard], shard_logits[shard], targets, maximum, sum,
          gradients[shard]);
      for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t i = 0; i < columns; ++i) {
          const double wanted =
              i < shapes[shard].valid ? wanted_gradient[at(r * vocabulary + shapes[shard].begin + i)] : 0.0;
          CHECK(std::abs(gradients[shard][r * columns + i] - wanted) <= 1e-6 * scale);
        }
      run(backend, OpKind::cross_entropy_gradient, shapes[shard], shard_logits[shard], targets, maximum, sum,
          shard_logits[shard]);
      CHECK(same_bits(shard_logits[shard].data(), gradients[shard].data(), rows * columns));
    }
  });
}

TEST_CASE("accumulate, fill_zero, copy and sum_squares") {
  on_every_instruction_set([](Backend& backend) {
    for (const std::int64_t count : {1, 16, 100}) {
      const OpShape shape{.rows = count};
      const Vector x = numbers(count, 1), y = numbers(count, 2);
      Array sum(y), zero(count), same(count), squares(1, 3.0f);
      run(backend, OpKind::accumulate, shape, Array(x), sum);
      check_near(sum, plus(x, y), 1e-7);
      run(backend, OpKind::fill_zero, shape, zero);
      check_near(zero, Vector(at(count)), 0.0);
      run(backend, OpKind::copy, shape, Array(x), same);
      check_near(same, x, 0.0);
      run(backend, OpKind::sum_squares, shape, Array(x), squares);
      check_near(squares, {3.0 + dot(x, x)}, 1e-7);
    }
  });
}

TEST_CASE("transpose_blocks swaps the first two of three dims, and with them swapped again is undone") {
  on_every_instruction_set([](Backend& backend) {
    for (const LinearSize& s : {LinearSize{1, 1, 1}, {1, 3, 5}, {4, 1, 2}, {7, 2, 33}, {6, 4, 16}}) {
      const std::int64_t rows = s.rows, blocks = s.columns, columns = s.inner;
      INFO(rows, " x ", blocks, " x ", columns);
      const Vector x = numbers(rows * blocks * columns, 1);
      Vector wanted(x.size());
      for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t b = 0; b < blocks; ++b)
          for (std::int64_t c = 0; c < columns; ++c)
            wanted[at((b * rows + r) * columns + c)] = x[at((r * blocks + b) * columns + c)];
      Array y(rows * blocks * columns), back(rows * blocks * columns);
      run(backend, OpKind::transpose_blocks, {.rows = rows, .columns = columns, .inner = blocks}, Array(x), y);
      check_near(y, wanted, 0.0);
      run(backend, OpKind::transpose_blocks, {.rows = blocks, .columns = columns, .inner = rows}, y, back);
      check_near(back, x, 0.0);
    }
  });
}

TEST_CASE("adamw follows torch.optim.AdamW, adam torch.optim.Adam, with and without clipping") {
  const std::int64_t count = 37;
  const Vector gradient = numbers(count, 1), parameter = numbers(count, 2), first = numbers(count, 3);
  Vector second = numbers(count, 4);
  for (double& v : second) v = std::abs(v);
  on_every_instruction_set([&](Backend& backend) {
    for (const bool decoupled : {true, false})
      for (const bool decays : {true, false})
        for (const double norm_squared : {0.0, 0.01, 400.0}) {  // none, below and above the clip norm of 2
          const StepScalars t{.step = 3, .learning_rate = 0.01, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-3,
                              .weight_decay = 0.1, .decoupled_decay = decoupled, .clip_norm = 2.0};
          backend.set_scalars(t);
          const double clip = norm_squared > 0 ? std::min(1.0, 2.0 / (std::sqrt(norm_squared) + 1e-6)) : 1.0;
          const double decay = decays ? 0.1 : 0.0;
          Vector wanted_parameter, wanted_first, wanted_second;
          for (std::size_t i = 0; i < at(count); ++i) {
            const double g = gradient[i] * clip + (decoupled ? 0.0 : decay * parameter[i]);
            wanted_first.push_back(0.9 * first[i] + 0.1 * g);
            wanted_second.push_back(0.95 * second[i] + 0.05 * g * g);
            const double denominator = std::sqrt(wanted_second[i]) / std::sqrt(1 - std::pow(0.95, 3)) + 1e-3;
            wanted_parameter.push_back(parameter[i] * (decoupled ? 1 - 0.01 * decay : 1.0) -
                                       0.01 / (1 - std::pow(0.9, 3)) * wanted_first[i] / denominator);
          }
          const OpShape shape{.rows = count, .weight_decay = decays, .norm = norm_squared > 0};
          Array p(parameter), m(first), v(second);
          const Array norm(1, static_cast<float>(norm_squared));
          if (shape.norm) {
            run(backend, OpKind::adamw, shape, Array(gradient), p, m, v, norm);
          } else {
            run(backend, OpKind::adamw, shape, Array(gradient), p, m, v);
          }
          check_near(p, wanted_parameter, 1e-6);
          check_near(m, wanted_first, 1e-6);
          check_near(v, wanted_second, 1e-6);
        }
  });
}

namespace {

// Moments in blocks of 256 codes, as the published map says (tests/planner/graph has it in double).
struct QuantizedMoment {
  bool is_signed;
  std::vector<std::uint8_t> codes;
  Array scales;
  QuantizedMoment(bool has_sign, const Vector& numbers)
      : is_signed(has_sign), codes(numbers.size()), scales((static_cast<std::int64_t>(numbers.size()) + 255) / 256) {
    const std::vector<float> single(numbers.begin(), numbers.end());
    quantize(is_signed, single.data(), static_cast<std::int64_t>(single.size()), codes.data(), scales.data());
  }
  Vector numbers() const {
    std::vector<float> single(codes.size());
    dequantize(is_signed, codes.data(), scales.data(), 0, static_cast<std::int64_t>(codes.size()), single.data());
    return {single.begin(), single.end()};
  }
};

}  // namespace

TEST_CASE("adamw_8bit makes the step of adamw from what its codes stand for, and keeps the nearest codes") {
  const StepScalars t{.step = 3,
                      .learning_rate = 0.01,
                      .beta1 = 0.9,
                      .beta2 = 0.95,
                      .epsilon = 1e-3,
                      .weight_decay = 0.1,
                      .clip_norm = 2.0};
  for (const std::int64_t count : {1, 37, 256, 300, 1024}) {
    const Array gradient(numbers(count, 1)), norm(1, 9.0f);
    Vector second = numbers(count, 4);
    for (double& v : second) v = std::abs(v);
    on_every_instruction_set([&](Backend& backend) {
      CAPTURE(count);
      backend.set_scalars(t);
      const OpShape shape{.rows = count, .weight_decay = true, .norm = true};
      QuantizedMoment m(true, numbers(count, 3)), v(false, second);
      Array p(numbers(count, 2)), wanted(numbers(count, 2)), m32(m.numbers()), v32(v.numbers());
      run(backend, OpKind::adamw, shape, gradient, wanted, m32, v32, norm);
      run(backend, OpKind::adamw_8bit, shape, gradient, p, m.codes, v.codes, m.scales, v.scales, norm);
      CHECK(same_bits(p.data(), wanted.data(), count));
      // The host's conversion has the same codes.
      const QuantizedMoment m_wanted(true, m32.values()), v_wanted(false, v32.values());
      CHECK(same_bits(m.scales.data(), m_wanted.scales.data(), m.scales.size()));
      CHECK(same_bits(v.scales.data(), v_wanted.scales.data(), v.scales.size()));
      CHECK(m.codes == m_wanted.codes);
      CHECK(v.codes == v_wanted.codes);
      // Half a step of the upper decade at most.
      const Vector kept_m = m.numbers(), kept_v = v.numbers();
      for (std::int64_t i = 0; i < count; ++i) {
        CHECK(std::abs(kept_m[at(i)] - static_cast<double>(m32[i])) <=
              0.501 * 0.9 / 64 * std::abs(static_cast<double>(m.scales[i / 256])));
        CHECK(std::abs(kept_v[at(i)] - static_cast<double>(v32[i])) <=
              0.501 * 0.9 / 128 * static_cast<double>(v.scales[i / 256]));
      }
    });
  }
}

TEST_CASE("adamw_8bit keeps blocks of zeros, skips a step that overflowed, and updates the master copy") {
  const std::int64_t count = 300;
  on_every_instruction_set([&](Backend& backend) {
    backend.set_scalars({.step = 1, .learning_rate = 0.01});
    QuantizedMoment m(true, Vector(at(count), 0.0)), v(false, Vector(at(count), 0.0));
    Array p(numbers(count, 2)), zero(Vector(at(count), 0.0));
    run(backend, OpKind::adamw_8bit, {.rows = count}, zero, p, m.codes, v.codes, m.scales, v.scales);
    check_near(p, numbers(count, 2), 0.0);
    CHECK(m.scales.values() == Vector{0.0, 0.0});
    CHECK(v.numbers() == Vector(at(count), 0.0));
    // With a master copy and a loss scale.
    const OpShape shape{.rows = count, .norm = true, .master = true, .scaled = true};
    Array low(count), master(numbers(count, 2)), norm(1, INFINITY), scale(Vector{1024.0, 0.0, 0.0, 0.0});
    const Array gradient(numbers(count, 1, 1024.0));
    const std::vector<std::uint8_t> before = m.codes;
    run(backend, OpKind::adamw_8bit, shape, gradient, low, m.codes, v.codes, m.scales, v.scales, norm, master, scale);
    CHECK(m.codes == before);
    check_near(master, numbers(count, 2), 0.0);
    norm[0] = 1.0f;
    run(backend, OpKind::adamw_8bit, shape, gradient, low, m.codes, v.codes, m.scales, v.scales, norm, master, scale);
    CHECK(m.codes != before);
    CHECK(same_bits(low.data(), master.data(), count));
    CHECK(!same_bits(low.data(), Array(numbers(count, 2)).data(), count));
  });
}

TEST_CASE("normalize_pixels brings colours between -1 and 1") {
  on_every_instruction_set([&](Backend& backend) {
    const std::vector<std::int32_t> colours = {0, 51, 127, 255, 204, 128};
    Array y(6);
    run(backend, OpKind::normalize_pixels, {.rows = 2, .columns = 3}, colours, y);
    check_near(y, {-1.0, -0.6, 127.0 / 127.5 - 1.0, 1.0, 0.6, 128.0 / 127.5 - 1.0}, 1e-6);
  });
}

TEST_CASE("sgd follows torch.optim.SGD, with and without momentum and clipping") {
  const std::int64_t count = 37;
  const Vector gradient = numbers(count, 1), parameter = numbers(count, 2), buffer = numbers(count, 3);
  on_every_instruction_set([&](Backend& backend) {
    for (const bool momentum : {true, false})
      for (const bool clipped : {true, false}) {
        const StepScalars t{.learning_rate = 0.1, .weight_decay = 0.2, .momentum = momentum ? 0.9 : 0.0,
                            .clip_norm = 1.0};
        backend.set_scalars(t);
        const double clip = clipped ? 1.0 / (4.0 + 1e-6) : 1.0;
        Vector wanted, wanted_buffer;
        for (std::size_t i = 0; i < at(count); ++i) {
          const double g = gradient[i] * clip + 0.2 * parameter[i];
          wanted_buffer.push_back(momentum ? 0.9 * buffer[i] + g : g);
          wanted.push_back(parameter[i] - 0.1 * wanted_buffer[i]);
        }
        const OpShape shape{.rows = count, .second = momentum, .weight_decay = true, .norm = clipped};
        Array p(parameter), b(buffer);
        const Array norm(1, 16.0f), g(gradient);
        if (momentum && clipped) run(backend, OpKind::sgd, shape, g, p, b, norm);
        if (momentum && !clipped) run(backend, OpKind::sgd, shape, g, p, b);
        if (!momentum && clipped) run(backend, OpKind::sgd, shape, g, p, norm);
        if (!momentum && !clipped) run(backend, OpKind::sgd, shape, g, p);
        check_near(p, wanted, 1e-6);
        if (momentum) check_near(b, wanted_buffer, 1e-6);
      }
  });
}

TEST_CASE("muon_momentum and muon follow torch.optim.Muon around its orthogonalization") {
  const std::int64_t count = 37;
  const Vector gradient = numbers(count, 1), parameter = numbers(count, 2), buffer = numbers(count, 3),
               direction = numbers(count, 4);
  const StepScalars t{.learning_rate = 0.1, .weight_decay = 0.2, .momentum = 0.9, .clip_norm = 1.0};
  const OpShape shape{.rows = count, .norm = true};
  const OpShape moved{.rows = count, .weight_decay = true, .norm = true, .master = true, .factor = 3.0};
  on_every_instruction_set([&](Backend& backend) {
    backend.set_scalars(t);
    const double clip = 1.0 / (4.0 + 1e-6);
    Vector momentum, goes, wanted;
    for (std::size_t i = 0; i < at(count); ++i) {
      const double g = gradient[i] * clip;
      momentum.push_back(0.9 * buffer[i] + 0.1 * g);
      goes.push_back(0.9 * momentum.back() + 0.1 * g);
      wanted.push_back(parameter[i] * (1.0 - 0.1 * 0.2) - 0.1 * 3.0 * direction[i]);
    }
    const Array norm(1, 16.0f);
    Array g(gradient), m(buffer);
    run(backend, OpKind::muon_momentum, shape, g, m, norm);
    check_near(m, momentum, 1e-6);
    check_near(g, goes, 1e-6);
    Array low(count), master(parameter);
    run(backend, OpKind::muon, moved, Array(direction), low, norm, master);
    check_near(master, wanted, 1e-6);
    CHECK(same_bits(low.data(), master.data(), count));
    // Neither changes anything in a step whose loss scale was too large.
    OpShape scaled = shape, scaled_move = moved;
    scaled.scaled = scaled_move.scaled = true;
    const Array overflow(1, INFINITY), scale(Vector{1024.0, 0.0, 0.0, 0.0});
    run(backend, OpKind::muon_momentum, scaled, g, m, overflow, scale);
    run(backend, OpKind::muon, scaled_move, Array(direction), low, overflow, master, scale);
    check_near(m, momentum, 1e-6);
    check_near(g, goes, 1e-6);
    check_near(master, wanted, 1e-6);
  });
}

TEST_CASE("normalize_matrix divides by the norm, and newton_schulz_polynomial adds the diagonal") {
  on_every_instruction_set([&](Backend& backend) {
    const std::int64_t rows = 5, columns = 7;
    const Vector x = numbers(rows * columns, 1);
    Vector wanted;
    for (const double number : x) wanted.push_back(number / 3.0);
    Array y(rows * columns);
    run(backend, OpKind::normalize_matrix, {.rows = rows, .columns = columns}, Array(x), Array(1, 9.0f), y);
    check_near(y, wanted, 1e-6);
    const Vector square = numbers(rows * rows, 2), fourth = numbers(rows * rows, 3);
    Vector polynomial;
    for (std::size_t i = 0; i < at(rows * rows); ++i)
      polynomial.push_back((i % 6 == 0 ? 3.4445 : 0.0) - 4.7750 * square[i] + 2.0315 * fourth[i]);
    Array result(fourth);
    run(backend, OpKind::newton_schulz_polynomial, {.rows = rows, .columns = rows}, Array(square), result);
    check_near(result, polynomial, 2e-6);
  });
}

TEST_CASE("add_layer_norm and add_rms_norm equal the sum and the norm, one after the other, to the bit") {
  const std::int64_t rows = 5;
  for (const std::int64_t columns : {1, 16, 53})
    for (const bool second : {false, true})
      for (const bool bias : {false, true}) {
        OpShape shape{.rows = rows, .columns = columns, .bias = bias, .second = second, .epsilon = 1e-5};
        const Array a(numbers(rows * columns, 1, 3.0)), b(numbers(rows * columns, 2)), offset(numbers(columns, 3));
        const Array gamma(numbers(columns, 4)), beta(numbers(columns, 5));
        on_every_instruction_set([&](Backend& backend) {
          INFO("columns ", columns, " second ", second, " bias ", bias);
          const auto with_terms = [&](OpKind kind, auto&... rest) {
            if (second && bias) run(backend, kind, shape, a, b, offset, rest...);
            if (second && !bias) run(backend, kind, shape, a, b, rest...);
            if (!second && bias) run(backend, kind, shape, a, offset, rest...);
            if (!second && !bias) run(backend, kind, shape, a, rest...);
          };
          Array sum(rows * columns), y(rows * columns), mean(rows), rstd(rows);
          Array fused_sum(rows * columns), fused_y(rows * columns), fused_mean(rows), fused_rstd(rows);
          with_terms(OpKind::add, sum);
          run(backend, OpKind::layer_norm, shape, sum, gamma, beta, y, mean, rstd);
          with_terms(OpKind::add_layer_norm, gamma, beta, fused_sum, fused_y, fused_mean, fused_rstd);
          CHECK(same_bits(sum.data(), fused_sum.data(), sum.size()));
          CHECK(same_bits(y.data(), fused_y.data(), y.size()));
          CHECK(same_bits(mean.data(), fused_mean.data(), rows));
          CHECK(same_bits(rstd.data(), fused_rstd.data(), rows));

          const OpShape before = shape;
          shape.without_beta = true;
          run(backend, OpKind::layer_norm, shape, sum, gamma, y, mean, rstd);
          with_terms(OpKind::add_layer_norm, gamma, fused_sum, fused_y, fused_mean, fused_rstd);
          CHECK(same_bits(sum.data(), fused_sum.data(), sum.size()));
          CHECK(same_bits(y.data(), fused_y.data(), y.size()));
          shape = before;

          Array other_sum(rows * columns), other_y(rows * columns), other_rstd(rows);
          run(backend, OpKind::rms_norm, shape, sum, gamma, y, rstd);
          with_terms(OpKind::add_rms_norm, gamma, other_sum, other_y, other_rstd);
          CHECK(same_bits(sum.data(), other_sum.data(), sum.size()));
          CHECK(same_bits(y.data(), other_y.data(), y.size()));
          CHECK(same_bits(rstd.data(), other_rstd.data(), rows));

          if (!second || bias) return;  // the sum may be written to b
          Array in_place(b.values());
          run(backend, OpKind::add_rms_norm, shape, a, in_place, gamma, in_place, other_y, other_rstd);
          CHECK(same_bits(sum.data(), in_place.data(), sum.size()));
          CHECK(same_bits(y.data(), other_y.data(), y.size()));
        });
      }
}

TEST_CASE("linear_gelu and its gradient equal the two kernels that they stand for, to the bit") {
  on_every_instruction_set([](Backend& backend) {
    for (const LinearSize& s : linear_sizes)
      for (const bool bias : {false, true}) {
        INFO(s.rows, " x ", s.columns, " x ", s.inner, " bias ", bias);
        const OpShape shape{.rows = s.rows, .columns = s.columns, .inner = s.inner, .bias = bias};
        const OpShape flat{.rows = s.rows, .columns = s.columns};
        const Array x(numbers(s.rows * s.inner, 1)), w(numbers(s.columns * s.inner, 2)), b(numbers(s.columns, 3));
        const std::int64_t count = s.rows * s.columns;
        Array before(count), y(count), fused_before(count), fused_y(count), alone(count);
        if (bias) {
          run(backend, OpKind::linear, shape, x, w, b, before);
          run(backend, OpKind::linear_gelu, shape, x, w, b, fused_before, fused_y);
          run(backend, OpKind::linear_gelu, shape, x, w, b, alone, alone);
        } else {
          run(backend, OpKind::linear, shape, x, w, before);
          run(backend, OpKind::linear_gelu, shape, x, w, fused_before, fused_y);
          run(backend, OpKind::linear_gelu, shape, x, w, alone, alone);
        }
        run(backend, OpKind::activation, flat, before, y);
        CHECK(same_bits(before.data(), fused_before.data(), count));
        CHECK(same_bits(y.data(), fused_y.data(), count));
        CHECK(same_bits(y.data(), alone.data(), count));  // `before` is not kept

        const Array dy(numbers(count, 4)), inner_before(numbers(s.rows * s.inner, 5, 3.0));
        Array dx(s.rows * s.inner), fused_dx(s.rows * s.inner);
        run(backend, OpKind::linear_input_gradient, shape, dy, w, dx);
        run(backend, OpKind::activation_gradient, {.rows = s.rows, .columns = s.inner}, dx, inner_before, dx);
        run(backend, OpKind::linear_input_gradient_gelu, shape, dy, w, inner_before, fused_dx);
        CHECK(same_bits(dx.data(), fused_dx.data(), dx.size()));
      }
  });
}

TEST_CASE("the loss scale multiplies the gradient of cross entropy, to the bit where it is a power of two") {
  const std::int64_t rows = 3, columns = 21;
  OpShape shape{.rows = rows, .columns = columns, .valid = columns, .scale = 0.25};
  const Array logits(numbers(rows * columns, 1, 5.0));
  const std::vector<std::int32_t> targets = {0, 20, 7};
  on_every_instruction_set([&](Backend& backend) {
    Array maximum(rows), sums(2 * rows), plain(rows * columns), scaled(rows * columns), scale(4, 0.0f);
    scale[0] = 1024.0f;
    run(backend, OpKind::cross_entropy_max, shape, logits, maximum);
    run(backend, OpKind::cross_entropy_sums, shape, logits, targets, maximum, sums);
    shape.scaled = false;
    run(backend, OpKind::cross_entropy_gradient, shape, logits, targets, maximum, sums, plain);
    shape.scaled = true;
    run(backend, OpKind::cross_entropy_gradient, shape, logits, targets, maximum, sums, scaled, scale);
    for (std::int64_t i = 0; i < rows * columns; ++i) CHECK(scaled[i] == 1024.0f * plain[i]);
  });
}

TEST_CASE("the optimizer divides by the loss scale, updates the master copy, and skips a step that overflowed") {
  const std::int64_t count = 37;
  const Vector gradient = numbers(count, 1), parameter = numbers(count, 2), first = numbers(count, 3);
  Vector second = numbers(count, 4);
  for (double& v : second) v = std::abs(v);
  Vector scaled_gradient = gradient;
  for (double& g : scaled_gradient) g *= 4096.0;
  const float squares = 9.0f;
  on_every_instruction_set([&](Backend& backend) {
    for (const OpKind kind : {OpKind::adamw, OpKind::sgd}) {
      INFO(name(kind));
      const bool adam = kind == OpKind::adamw;
      const StepScalars t{
          .step = 5, .learning_rate = 0.01, .epsilon = 1e-3, .weight_decay = 0.1, .momentum = 0.9, .clip_norm = 2.0};
      OpShape shape{.rows = count, .second = !adam, .weight_decay = true, .norm = true};
      // Without scale or master copy, of step 3: two steps were skipped.
      Array p(parameter), m(first), v(second), norm(1, squares);
      StepScalars plain = t;
      plain.step = adam ? 3 : 5;
      backend.set_scalars(plain);
      if (adam) {
        run(backend, kind, shape, Array(gradient), p, m, v, norm);
      } else {
        run(backend, kind, shape, Array(gradient), p, m, norm);
      }
      shape.master = shape.scaled = true;
      backend.set_scalars(t);
      Array scale(4, 0.0f), scaled_norm(1, squares * 4096.0f * 4096.0f);
      scale[0] = 4096.0f;
      scale[2] = 2.0f;
      Array low(count), master(parameter), m2(first), v2(second);
      const auto update = [&] {
        if (adam) {
          run(backend, kind, shape, Array(scaled_gradient), low, m2, v2, scaled_norm, master, scale);
        } else {
          run(backend, kind, shape, Array(scaled_gradient), low, m2, scaled_norm, master, scale);
        }
      };
      update();
      check_near(master, p.values(), 1e-6);
      check_near(m2, m.values(), 1e-6);
      if (adam) check_near(v2, v.values(), 1e-6);
      CHECK(same_bits(low.data(), master.data(), count));
      // Not a number and infinity: nothing changes.
      for (const float overflow : {INFINITY, std::nanf("")}) {
        const Vector kept = master.values(), kept_moment = m2.values();
        scaled_norm[0] = overflow;
        update();
        check_near(master, kept, 0.0);
        check_near(m2, kept_moment, 0.0);
        check_near(low, kept, 0.0);
      }
    }
  });
}

TEST_CASE("a step whose norm is not finite is skipped where that is wanted, and changes values where it is not") {
  const std::int64_t count = 37;
  const Vector gradient = numbers(count, 1), parameter = numbers(count, 2), first = numbers(count, 3);
  Vector second = numbers(count, 4);
  for (double& v : second) v = std::abs(v);
  on_every_instruction_set([&](Backend& backend) {
    for (const OpKind kind : {OpKind::adamw, OpKind::sgd})
      for (const bool skips : {false, true})
        for (const float squares : {9.0f, INFINITY, std::nanf("")}) {
          INFO(name(kind), " ", skips, " ", squares);
          const bool adam = kind == OpKind::adamw;
          const OpShape shape{.rows = count, .second = !adam, .weight_decay = true, .norm = true};
          backend.set_scalars({.step = 5, .learning_rate = 0.01, .epsilon = 1e-3, .weight_decay = 0.1, .momentum = 0.9,
                               .clip_norm = INFINITY, .skips_not_finite = skips});
          Array p(parameter), m(first), v(second), norm(1, squares);
          if (adam) {
            run(backend, kind, shape, Array(gradient), p, m, v, norm);
          } else {
            run(backend, kind, shape, Array(gradient), p, m, norm);
          }
          const bool changes = !skips || std::isfinite(squares);
          CHECK(same_bits(p.data(), Array(parameter).data(), count) == !changes);
          CHECK(same_bits(m.data(), Array(first).data(), count) == !changes);
          // An infinite clip norm clips nothing: the bits are those of a step without a norm.
          if (!changes) continue;
          const OpShape without{.rows = count, .second = !adam, .weight_decay = true};
          Array p2(parameter), m2(first), v2(second);
          if (adam) {
            run(backend, kind, without, Array(gradient), p2, m2, v2);
          } else {
            run(backend, kind, without, Array(gradient), p2, m2);
          }
          CHECK(same_bits(p.data(), p2.data(), count));
          CHECK(same_bits(m.data(), m2.data(), count));
        }
  });
}

TEST_CASE("the loss scale is halved by an overflow and doubled after 2000 good steps") {
  on_every_instruction_set([](Backend& backend) {
    Array norm(1, 1.0f), scale(std::vector<double>{65536.0, 0.0, 0.0, 0.0});
    const auto step = [&] { run(backend, OpKind::update_loss_scale, {}, norm, scale); };
    for (int i = 0; i < 1999; ++i) step();
    check_near(scale, {65536.0, 1999.0, 0.0, 0.0}, 0.0);
    step();
    check_near(scale, {131072.0, 0.0, 0.0, 0.0}, 0.0);
    step();
    norm[0] = INFINITY;
    step();
    check_near(scale, {65536.0, 0.0, 1.0, 0.0}, 0.0);
    norm[0] = std::nanf("");
    step();
    check_near(scale, {32768.0, 0.0, 2.0, 0.0}, 0.0);
    // A scale that cannot be doubled stays.
    norm[0] = 1.0f;
    scale[0] = 0x1p127f;
    scale[1] = 1999.0f;
    step();
    check_near(scale, {0x1p127, 0.0, 2.0, 0.0}, 0.0);
  });
}
