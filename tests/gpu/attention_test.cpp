// Attention and its gradient against the formulas in double precision on the rounded inputs.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "planner/base/error.h"
#include "planner/graph/cuda_workspace.h"
#include "tests/gpu/device.h"
#include "tests/gpu/device_array.h"

namespace parplan {

using namespace testing;

namespace {

using Doubles = std::vector<double>;

struct Case {
  DataType type{};
  std::int64_t sequence = 0, batch = 0, heads = 0, kv_heads = 0, head_dim = 0;
  double scale = 1.0;  // of queries and keys
  OpShape features = {};  // window, softcap, alibi, score_scale
};

std::string text(const Case& c) {
  return std::string(name(c.type)) + ", sequence " + std::to_string(c.sequence) + ", batch " + std::to_string(c.batch) +
         ", " + std::to_string(c.heads) + " heads of " + std::to_string(c.head_dim) + ", " +
         std::to_string(c.kv_heads) + " of keys, scale " + std::to_string(c.scale) + ", window " +
         std::to_string(c.features.window) + ", softcap " + std::to_string(c.features.softcap) + ", alibi " +
         std::to_string(c.features.alibi) + (c.features.bidirectional ? ", bidirectional" : "");
}

OpShape shape_of(const Case& c) {
  OpShape shape = c.features;
  shape.rows = c.sequence * c.batch;
  shape.sequence = c.sequence;
  shape.batch = c.batch;
  shape.heads = c.heads;
  shape.kv_heads = c.kv_heads;
  shape.head_dim = c.head_dim;
  return shape;
}

// One past the last key that a query may see.
std::int64_t keys_end(const Case& c, std::int64_t query) { return c.features.bidirectional ? c.sequence : query + 1; }

// The position of element `d` of a head at a position: [sequence, batch, kv_heads x (queries of the
// group, key, value) x head_dim].
struct Places {
  Case c;
  std::int64_t per_group() const { return c.heads / c.kv_heads; }
  std::int64_t qkv_size() const { return c.sequence * c.batch * (c.heads + 2 * c.kv_heads) * c.head_dim; }
  std::int64_t y_size() const { return c.sequence * c.batch * c.heads * c.head_dim; }
  std::int64_t statistics() const { return c.sequence * c.batch * c.heads; }
  std::size_t slot(std::int64_t position, std::int64_t sample, std::int64_t group, std::int64_t slot) const {
    return static_cast<std::size_t>((((position * c.batch + sample) * c.kv_heads + group) * (per_group() + 2) + slot) *
                                    c.head_dim);
  }
  std::size_t query(std::int64_t position, std::int64_t sample, std::int64_t head) const {
    return slot(position, sample, head / per_group(), head % per_group());
  }
  std::size_t key(std::int64_t position, std::int64_t sample, std::int64_t head) const {
    return slot(position, sample, head / per_group(), per_group());
  }
  std::size_t value(std::int64_t position, std::int64_t sample, std::int64_t head) const {
    return slot(position, sample, head / per_group(), per_group() + 1);
  }
  std::size_t y(std::int64_t position, std::int64_t sample, std::int64_t head) const {
    return static_cast<std::size_t>(((position * c.batch + sample) * c.heads + head) * c.head_dim);
  }
  std::size_t statistic(std::int64_t position, std::int64_t sample, std::int64_t head) const {
    return static_cast<std::size_t>((sample * c.heads + head) * c.sequence + position);
  }
};

// The expected value, and the allowed distance from it.
struct Expected {
  Doubles values, allowed;
  explicit Expected(std::int64_t size)
      : values(static_cast<std::size_t>(size)), allowed(static_cast<std::size_t>(size)) {}
};

constexpr double fp32_rounding = 0x1p-24;
// What the smallest numbers may lose: fp16's are 2^-24 apart; in the others, exponentials below the
// smallest normal number may be 0.
double smallest_step(DataType type) {
  return type == DataType::fp16 ? 0x1p-25 : 0x1p-125;
}

// A sum of products and the sum of their sizes.
struct Dot {
  double value = 0.0, size = 0.0;
};
Dot dot(const Doubles& a, std::size_t i, const Doubles& b, std::size_t j, std::int64_t n) {
  Dot result;
  for (std::size_t d = 0; d < static_cast<std::size_t>(n); ++d) {
    const double product = a[i + d] * b[j + d];
    result.value += product;
    result.size += std::abs(product);
  }
  return result;
}

// The score that follows from the product of a query and a key; the product and its error are in
// `dot`.
struct Score {
  double value = 0.0;
  double to_product = 1.0;  // d value / d product
  double size = 0.0;        // the size to which its roundings are relative
  bool sees = true;
};
Score score_of(const Case& c, const Dot& product, std::int64_t head, std::int64_t query, std::int64_t key) {
  const OpShape& f = c.features;
  Score score;
  score.to_product = f.score_scale != 0.0 ? f.score_scale : 1.0 / std::sqrt(static_cast<double>(c.head_dim));
  score.value = score.to_product * product.value;
  score.size = score.to_product * product.size;
  if (f.softcap != 0.0) {
    const double tangent = std::tanh(score.value / f.softcap);
    score.value = f.softcap * tangent;
    score.to_product *= 1.0 - tangent * tangent;
    score.size += f.softcap;
  }
  if (f.alibi != 0.0) {
    const double bias = f.alibi * alibi_slope(f.first_head + head, f.all_heads) * static_cast<double>(key - query);
    score.value += bias;
    score.size += std::abs(bias);
  }
  score.sees = f.window == 0 || query - key < f.window;
  return score;
}

// Rounding of the type is allowed once for probabilities (and dS), which matrix units read in the
// type, and once for the result; all other roundings are fp32's: of a score (a sum of head_dim
// products), of the exponent, and of sums over keys or queries.
double probability_error(const Case& c, const Score& score, double log_sum_exp) {
  return fp32_rounding * (2.0 * (c.head_dim + 4) * score.size + 8.0 * std::abs(log_sum_exp) + 16.0);
}
double to_result(const Case& c, double value) {
  return rounding(c.type) * std::abs(value) + smallest_step(c.type);
}

std::pair<Expected, Expected> forward(const Case& c, const Doubles& qkv) {
  const Places at{c};
  const auto n = static_cast<std::size_t>(c.head_dim);
  Expected y(at.y_size()), log_sum_exp(at.statistics());
  for (std::int64_t sample = 0; sample < c.batch; ++sample)
    for (std::int64_t head = 0; head < c.heads; ++head)
      for (std::int64_t query = 0; query < c.sequence; ++query) {
        std::vector<Score> scores;
        double largest = -INFINITY;
        for (std::int64_t key = 0; key < keys_end(c, query); ++key) {
          const Dot product = dot(qkv, at.query(query, sample, head), qkv, at.key(key, sample, head), c.head_dim);
          scores.push_back(score_of(c, product, head, query, key));
          if (scores.back().sees) largest = std::max(largest, scores.back().value);
        }
        double sum = 0.0;
        for (const Score& score : scores)
          if (score.sees) sum += std::exp(score.value - largest);
        const double total = largest + std::log(sum);
        double error = 0.0;
        for (const Score& score : scores)
          if (score.sees) error = std::max(error, probability_error(c, score, largest));
        error += static_cast<double>(keys_end(c, query)) * fp32_rounding;
        const std::size_t statistic = at.statistic(query, sample, head);
        log_sum_exp.values[statistic] = total;
        log_sum_exp.allowed[statistic] = error + 4 * fp32_rounding * (std::abs(total) + std::abs(largest));
        Doubles value(n), size(n), steps(n);
        for (std::int64_t key = 0; key < keys_end(c, query); ++key) {
          const Score& score = scores[key];
          if (!score.sees) continue;
          const double probability = std::exp(score.value - total);
          for (std::size_t d = 0; d < n; ++d) {
            const double v = qkv[at.value(key, sample, head) + d];
            value[d] += probability * v;
            size[d] += probability * std::abs(v);
            steps[d] += smallest_step(c.type) * std::abs(v);
          }
        }
        for (std::size_t d = 0; d < n; ++d) {
          const std::size_t place = at.y(query, sample, head) + d;
          y.values[place] = value[d];
          y.allowed[place] = (rounding(c.type) + 2 * error) * size[d] + steps[d] + 1.01 * to_result(c, value[d]);
        }
      }
  return {std::move(y), std::move(log_sum_exp)};
}

Expected backward(const Case& c, const Doubles& dy, const Doubles& qkv, const Doubles& y, const Doubles& log_sum_exp) {
  const Places at{c};
  const auto n = static_cast<std::size_t>(c.head_dim);
  Expected result(at.qkv_size());
  // A term times a number of the operand, where the term is off by `error`.
  const auto add = [&](std::size_t to, double term, double error, const Doubles& other, std::size_t from) {
    for (std::size_t d = 0; d < n; ++d) {
      result.values[to + d] += term * other[from + d];
      result.allowed[to + d] += error * std::abs(other[from + d]);
    }
  };
  const double sum_error = static_cast<double>(c.sequence * at.per_group()) * fp32_rounding;
  for (std::int64_t sample = 0; sample < c.batch; ++sample)
    for (std::int64_t head = 0; head < c.heads; ++head)
      for (std::int64_t query = 0; query < c.sequence; ++query) {
        const Dot row = dot(dy, at.y(query, sample, head), y, at.y(query, sample, head), c.head_dim);
        const double shift = log_sum_exp[at.statistic(query, sample, head)];
        for (std::int64_t key = 0; key < keys_end(c, query); ++key) {
          const Dot product = dot(qkv, at.query(query, sample, head), qkv, at.key(key, sample, head), c.head_dim);
          const Score score = score_of(c, product, head, query, key);
          if (!score.sees) continue;
          const double probability = std::exp(score.value - shift);
          const double error = probability_error(c, score, shift);
          add(at.value(key, sample, head), probability,
              (rounding(c.type) + error + sum_error) * probability + smallest_step(c.type), dy,
              at.y(query, sample, head));
          const Dot dp = dot(dy, at.y(query, sample, head), qkv, at.value(key, sample, head), c.head_dim);
          const double ds = probability * (dp.value - row.value);
          // (The slope of a cap is 1 less a square: its error is that of the score relative to the
          // cap, and rounding.)
          const double cap_error =
              c.features.softcap != 0.0
                  ? 4 * fp32_rounding * (score.size * static_cast<double>(c.head_dim + 4) / c.features.softcap + 4)
                  : 0.0;
          const double ds_error =
              (rounding(c.type) + error + sum_error) * std::abs(ds) +
              probability * static_cast<double>(c.head_dim + 4) * fp32_rounding * (dp.size + row.size) +
              smallest_step(c.type);
          const double scale =
              c.features.score_scale != 0.0 ? c.features.score_scale : 1.0 / std::sqrt(static_cast<double>(c.head_dim));
          const double allowed =
              score.to_product * ds_error + scale * (cap_error * std::abs(ds) + smallest_step(c.type));
          add(at.query(query, sample, head), score.to_product * ds, allowed, qkv, at.key(key, sample, head));
          add(at.key(key, sample, head), score.to_product * ds, allowed, qkv, at.query(query, sample, head));
        }
      }
  for (std::size_t i = 0; i < result.values.size(); ++i)
    result.allowed[i] = 1.01 * (result.allowed[i] + to_result(c, result.values[i]));
  return result;
}

void check_close(const Doubles& found, const Expected& expected) {
  REQUIRE(found.size() == expected.values.size());
  std::size_t worst = 0;
  double worst_ratio = 0.0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const double ratio = std::abs(found[i] - expected.values[i]) / expected.allowed[i];
    if (!(ratio <= worst_ratio)) {
      worst = i;
      worst_ratio = std::isnan(ratio) ? INFINITY : ratio;
    }
  }
  INFO("element ", worst, ": ", found[worst], " instead of ", expected.values[worst], ", allowed ",
       expected.allowed[worst]);
  CHECK(worst_ratio <= 1.0);
}

Doubles inputs(const Case& c, int seed) {
  const Places at{c};
  Doubles qkv = random_numbers(at.qkv_size(), seed);
  for (std::int64_t position = 0; position < c.sequence; ++position)
    for (std::int64_t sample = 0; sample < c.batch; ++sample)
      for (std::int64_t head = 0; head < c.heads; ++head)
        for (std::size_t d = 0; d < static_cast<std::size_t>(c.head_dim); ++d) {
          qkv[at.query(position, sample, head) + d] *= c.scale;
          if (head % at.per_group() == 0) qkv[at.key(position, sample, head) + d] *= c.scale;
        }
  return qkv;
}

// Both ops, each twice, into poison. `shift`: elements by which the arrays miss their alignment.
void check_attention(Backend& backend, const Case& c, std::int64_t shift = 0) {
  INFO(text(c), ", shift ", shift);
  const Places at{c};
  const DeviceArray qkv(backend, c.type, inputs(c, 1), shift);
  const auto [y_expected, log_sum_exp_expected] = forward(c, qkv.values());
  const auto run_forward = [&] {
    std::pair<DeviceArray, DeviceArray> result{DeviceArray(backend, c.type, at.y_size(), shift),
                                               DeviceArray(backend, DataType::fp32, at.statistics())};
    void* const operands[] = {qkv.data(), result.first.data(), result.second.data()};
    backend.run(0, {.kind = OpKind::attention, .shape = shape_of(c), .type = c.type, .operands = operands});
    return result;
  };
  const auto found = run_forward();
  {
    INFO("y");
    check_close(found.first.values(), y_expected);
  }
  {
    INFO("log-sum-exp");
    check_close(found.second.values(), log_sum_exp_expected);
  }
  const auto again = run_forward();
  CHECK(found.first.bits() == again.first.bits());
  CHECK(found.second.bits() == again.second.bits());

  // The gradient has its own formula in y and log-sum-exp: it gets the exact ones, rounded.
  const DeviceArray dy(backend, c.type, random_numbers(at.y_size(), 2), shift);
  const DeviceArray y(backend, c.type, y_expected.values, shift);
  const DeviceArray log_sum_exp(backend, DataType::fp32, log_sum_exp_expected.values);
  const auto run_backward = [&] {
    DeviceArray dqkv(backend, c.type, at.qkv_size(), shift);
    const DeviceArray workspace(backend, DataType::fp32,
                                cuda_attention_gradient_workspace(c.sequence, c.batch, c.heads).count / 4);
    void* const operands[] = {dy.data(), qkv.data(), y.data(), log_sum_exp.data(), dqkv.data(), workspace.data()};
    backend.run(0, {.kind = OpKind::attention_gradient, .shape = shape_of(c), .type = c.type, .operands = operands});
    return dqkv.bits();  // waits: the workspace is released here
  };
  DeviceArray dqkv(backend, c.type, at.qkv_size());
  const std::vector<std::byte> bits = run_backward();
  backend.copy(0, dqkv.data(), bits.data(), Bytes(dqkv.bytes()));
  backend.synchronize();
  {
    INFO("dqkv");
    check_close(dqkv.values(), backward(c, dy.values(), qkv.values(), y.values(), log_sum_exp.values()));
  }
  CHECK(bits == run_backward());
}

// The part of the context axis: the sequence is shared out among `ranks` in chunks ---------------

// Rows of `width` elements, of the positions that a rank has.
Doubles rows_of(const Case& c, const ContextChunks& chunks, const Doubles& values, std::int64_t width) {
  Doubles rows;
  const std::int64_t size = c.batch * width;
  for (std::int64_t row = 0; row < 2 * chunks.size; ++row) {
    const auto begin = values.begin() + chunks.position(row) * size;
    rows.insert(rows.end(), begin, begin + size);
  }
  return rows;
}
Expected rows_of(const Case& c, const ContextChunks& chunks, const Expected& values, std::int64_t width) {
  Expected rows(0);
  rows.values = rows_of(c, chunks, values.values, width);
  rows.allowed = rows_of(c, chunks, values.allowed, width);
  return rows;
}

// [batch, heads, sequence], of the positions that a rank has.
Doubles statistics_of(const Case& c, const ContextChunks& chunks, const Doubles& values) {
  Doubles own;
  for (std::int64_t head = 0; head < c.batch * c.heads; ++head)
    for (std::int64_t row = 0; row < 2 * chunks.size; ++row)
      own.push_back(values[static_cast<std::size_t>(head * c.sequence + chunks.position(row))]);
  return own;
}

// The keys and values of a fused array, as an all-gather leaves them: rank after rank, the rows of
// each, with a key and a value for each key/value head.
Doubles gathered(const Case& c, std::int64_t ranks, const Doubles& fused) {
  const Places at{c};
  Doubles keys;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const ContextChunks chunks{.ranks = ranks, .rank = rank, .size = c.sequence / (2 * ranks)};
    for (std::int64_t row = 0; row < 2 * chunks.size; ++row)
      for (std::int64_t sample = 0; sample < c.batch; ++sample)
        for (std::int64_t head = 0; head < c.heads; head += at.per_group()) {
          const auto key = fused.begin() + static_cast<std::ptrdiff_t>(at.key(chunks.position(row), sample, head));
          keys.insert(keys.end(), key, key + 2 * c.head_dim);
        }
  }
  return keys;
}

// Both ops on every rank, each twice, into poison: outputs and gradients of queries are the whole
// sequence's, and those of keys and values what the rank's own queries add to them.
void check_gathered(Backend& backend, const Case& c, std::int64_t ranks, std::int64_t shift = 0) {
  const Places at{c};
  const std::int64_t size = c.sequence / (2 * ranks);
  REQUIRE(2 * ranks * size == c.sequence);
  const Doubles qkv = DeviceArray(backend, c.type, inputs(c, 1)).values();
  const Doubles dy = DeviceArray(backend, c.type, random_numbers(at.y_size(), 2)).values();
  const auto [y_expected, log_sum_exp_expected] = forward(c, qkv);
  const Doubles y = DeviceArray(backend, c.type, y_expected.values).values();
  const DeviceArray keys(backend, c.type, gathered(c, ranks, qkv), shift);
  const std::int64_t qkv_width = (c.heads + 2 * c.kv_heads) * c.head_dim, y_width = c.heads * c.head_dim;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    INFO(text(c), ", rank ", rank, " of ", ranks, ", shift ", shift);
    const ContextChunks chunks{.ranks = ranks, .rank = rank, .size = size};
    Case own = c;
    own.sequence = 2 * size;
    OpShape shape = shape_of(own);
    shape.chunks = chunks;
    shape.gathered = true;
    const DeviceArray own_qkv(backend, c.type, rows_of(c, chunks, qkv, qkv_width), shift);
    const auto run = [&](OpKind kind, std::initializer_list<const DeviceArray*> arrays) {
      std::vector<void*> operands;
      for (const DeviceArray* array : arrays) operands.push_back(array->data());
      backend.run(0, {.kind = kind, .shape = shape, .type = c.type, .operands = operands});
      backend.synchronize();
    };
    std::vector<std::vector<std::byte>> bits[2];
    for (auto& found : bits) {
      const DeviceArray own_y(backend, c.type, Places{own}.y_size(), shift);
      const DeviceArray log_sum_exp(backend, DataType::fp32, Places{own}.statistics());
      run(OpKind::attention, {&own_qkv, &keys, &own_y, &log_sum_exp});

      // The gradient gets the exact y and log-sum-exp, rounded.
      const Doubles own_statistics = statistics_of(c, chunks, log_sum_exp_expected.values);
      const DeviceArray own_dy(backend, c.type, rows_of(c, chunks, dy, y_width), shift),
          exact_y(backend, c.type, rows_of(c, chunks, y, y_width), shift),
          exact_statistics(backend, DataType::fp32, own_statistics), dqkv(backend, c.type, own_qkv.size(), shift),
          dkeys(backend, c.type, keys.size(), shift),
          workspace(backend, DataType::fp32,
                    cuda_attention_gradient_workspace(own.sequence, own.batch, own.heads).count / 4);
      run(OpKind::attention_gradient,
          {&own_dy, &own_qkv, &keys, &exact_y, &exact_statistics, &dqkv, &dkeys, &workspace});
      found = {own_y.bits(), log_sum_exp.bits(), dqkv.bits(), dkeys.bits()};
      if (&found != &bits[0]) continue;

      {
        INFO("y");
        check_close(own_y.values(), rows_of(c, chunks, y_expected, y_width));
      }
      {
        INFO("log-sum-exp");
        Expected expected(0);
        expected.values = own_statistics;
        expected.allowed = statistics_of(c, chunks, log_sum_exp_expected.allowed);
        check_close(log_sum_exp.values(), expected);
      }
      // Without the gradients of other ranks' outputs, the whole sequence's gradients are this
      // rank's.
      Doubles masked(dy.size());
      for (std::int64_t row = 0; row < own.sequence; ++row) {
        const auto begin = static_cast<std::size_t>(chunks.position(row) * c.batch * y_width);
        std::copy_n(dy.begin() + static_cast<std::ptrdiff_t>(begin), c.batch * y_width,
                    masked.begin() + static_cast<std::ptrdiff_t>(begin));
      }
      const Expected whole =
          backward(c, masked, qkv, y, DeviceArray(backend, DataType::fp32, log_sum_exp_expected.values).values());
      {
        INFO("dqkv");
        Expected expected = rows_of(c, chunks, whole, qkv_width);
        for (std::size_t i = 0; i < expected.values.size(); ++i) {
          const auto slot = static_cast<std::int64_t>(i) / c.head_dim % (at.per_group() + 2);
          if (slot < at.per_group()) continue;
          expected.values[i] = 0.0;  // keys and values: their gradients are elsewhere
          expected.allowed[i] = 1e-300;
        }
        check_close(dqkv.values(), expected);
      }
      {
        INFO("dkeys");
        Expected expected(0);
        expected.values = gathered(c, ranks, whole.values);
        expected.allowed = gathered(c, ranks, whole.allowed);
        // No query of the rank sees what lies behind its last chunk.
        std::int64_t unseen = 0;
        const std::int64_t row_size = c.batch * 2 * c.kv_heads * c.head_dim;
        const std::int64_t seen = c.features.bidirectional ? c.sequence : (2 * ranks - rank) * size;
        for (std::int64_t position = seen; position < c.sequence; ++position)
          for (std::int64_t i = 0; i < row_size; ++i, ++unseen)
            expected.allowed[static_cast<std::size_t>(chunks.gathered_row(position) * row_size + i)] = 1e-300;
        CHECK(unseen == (c.sequence - seen) * row_size);
        check_close(dkeys.values(), expected);
      }
    }
    CHECK(bits[0] == bits[1]);
  }
}

// The same step by step around a ring: each rank meets the keys and values of one after another,
// and adds to what it has. Each step may round it once more.
void check_ring(Backend& backend, const Case& c, std::int64_t ranks, std::int64_t shift = 0) {
  const Places at{c};
  const std::int64_t size = c.sequence / (2 * ranks);
  REQUIRE(2 * ranks * size == c.sequence);
  const Doubles qkv = DeviceArray(backend, c.type, inputs(c, 1)).values();
  const Doubles dy = DeviceArray(backend, c.type, random_numbers(at.y_size(), 2)).values();
  const auto [y_expected, log_sum_exp_expected] = forward(c, qkv);
  const Doubles y = DeviceArray(backend, c.type, y_expected.values).values();
  const Doubles all_keys = gathered(c, ranks, qkv);
  const std::int64_t qkv_width = (c.heads + 2 * c.kv_heads) * c.head_dim, y_width = c.heads * c.head_dim;
  const auto of_holder = [&](const Doubles& all, std::int64_t holder) {
    const auto part = static_cast<std::ptrdiff_t>(all.size()) / ranks;
    return Doubles(all.begin() + holder * part, all.begin() + (holder + 1) * part);
  };
  const auto rounded_often = [&](Expected expected) {
    for (double& allowed : expected.allowed) allowed = std::max(allowed * static_cast<double>(ranks), 1e-300);
    return expected;
  };
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    INFO(text(c), ", rank ", rank, " of ", ranks, " around a ring, shift ", shift);
    const ContextChunks chunks{.ranks = ranks, .rank = rank, .size = size};
    Case own = c;
    own.sequence = 2 * size;
    const DeviceArray own_qkv(backend, c.type, rows_of(c, chunks, qkv, qkv_width), shift);
    const auto run = [&](OpKind kind, std::int64_t step, std::initializer_list<const DeviceArray*> arrays) {
      OpShape shape = shape_of(own);
      shape.chunks = chunks;
      shape.chunks.holder = (rank + ranks - step) % ranks;
      shape.gathered = true;
      shape.accumulate = step > 0;
      std::vector<void*> operands;
      for (const DeviceArray* array : arrays) operands.push_back(array->data());
      backend.run(0, {.kind = kind, .shape = shape, .type = c.type, .operands = operands});
      backend.synchronize();
    };
    const DeviceArray own_y(backend, c.type, Places{own}.y_size(), shift);
    const DeviceArray log_sum_exp(backend, DataType::fp32, Places{own}.statistics());
    const Doubles own_statistics = statistics_of(c, chunks, log_sum_exp_expected.values);
    const DeviceArray own_dy(backend, c.type, rows_of(c, chunks, dy, y_width), shift),
        exact_y(backend, c.type, rows_of(c, chunks, y, y_width), shift),
        exact_statistics(backend, DataType::fp32, own_statistics), dqkv(backend, c.type, own_qkv.size(), shift),
        workspace(backend, DataType::fp32,
                  cuda_attention_gradient_workspace(own.sequence, own.batch, own.heads).count / 4);
    Doubles masked(dy.size());
    for (std::int64_t row = 0; row < own.sequence; ++row) {
      const auto begin = static_cast<std::size_t>(chunks.position(row) * c.batch * y_width);
      std::copy_n(dy.begin() + static_cast<std::ptrdiff_t>(begin), c.batch * y_width,
                  masked.begin() + static_cast<std::ptrdiff_t>(begin));
    }
    const Expected whole =
        backward(c, masked, qkv, y, DeviceArray(backend, DataType::fp32, log_sum_exp_expected.values).values());
    for (std::int64_t step = 0; step < ranks; ++step) {
      const std::int64_t holder = (rank + ranks - step) % ranks;
      const DeviceArray keys(backend, c.type, of_holder(all_keys, holder), shift),
          part(backend, c.type, keys.size(), shift);
      run(OpKind::attention, step, {&own_qkv, &keys, &own_y, &log_sum_exp});
      run(OpKind::attention_gradient, step,
          {&own_dy, &own_qkv, &keys, &exact_y, &exact_statistics, &dqkv, &part, &workspace});
      INFO("gradients of the keys of rank ", holder);
      Expected expected(0);
      expected.values = of_holder(gathered(c, ranks, whole.values), holder);
      expected.allowed = of_holder(gathered(c, ranks, whole.allowed), holder);
      check_close(part.values(), rounded_often(expected));
    }
    {
      INFO("y");
      check_close(own_y.values(), rounded_often(rows_of(c, chunks, y_expected, y_width)));
    }
    {
      INFO("log-sum-exp");
      Expected expected(0);
      expected.values = own_statistics;
      expected.allowed = statistics_of(c, chunks, log_sum_exp_expected.allowed);
      check_close(log_sum_exp.values(), rounded_often(expected));
    }
    {
      INFO("dqkv");
      Expected expected = rows_of(c, chunks, whole, qkv_width);
      for (std::size_t i = 0; i < expected.values.size(); ++i) {
        const auto slot = static_cast<std::int64_t>(i) / c.head_dim % (at.per_group() + 2);
        if (slot >= at.per_group()) expected.values[i] = expected.allowed[i] = 0.0;
      }
      check_close(dqkv.values(), rounded_often(expected));
    }
  }
}

constexpr DataType half_types[] = {DataType::bf16, DataType::fp16};
constexpr DataType all_types[] = {DataType::fp32, DataType::bf16, DataType::fp16};

}  // namespace

TEST_CASE("attention and its gradient equal the formula at the head dims of matrix units, whole and ragged tiles") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const auto backend = gpu->make_backend(0, {});
  for (const DataType type : half_types) {
    for (const std::int64_t head_dim : {64, 128}) {
      for (const std::int64_t sequence : {1, 7, 64, 129, 200})
        check_attention(*backend, {type, sequence, 1, 1, 1, head_dim});
      check_attention(*backend, {type, 129, 3, 4, 2, head_dim});
      check_attention(*backend, {type, 65, 3, 4, 1, head_dim});
      check_attention(*backend, {type, 33, 1, 16, 2, head_dim});
    }
    check_attention(*backend, {type, 70, 1, 2, 1, 32});
    check_attention(*backend, {type, 130, 1, 2, 2, 96});
  }
}

TEST_CASE("attention and its gradient equal the formula in every type at any head dim") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const auto backend = gpu->make_backend(0, {});
  for (const DataType type : all_types) {
    for (const std::int64_t head_dim : {4, 16, 80}) {
      for (const std::int64_t sequence : {1, 7, 64, 129})
        check_attention(*backend, {type, sequence, 1, 2, 1, head_dim});
    }
    check_attention(*backend, {type, 200, 3, 4, 1, 16});
    check_attention(*backend, {type, 65, 3, 8, 1, 5});
    check_attention(*backend, {type, 70, 1, 1, 1, 256});
  }
  check_attention(*backend, {DataType::fp32, 129, 1, 4, 2, 64});
  check_attention(*backend, {DataType::fp32, 65, 1, 2, 2, 128});
  check_attention(*backend, {DataType::tf32, 65, 1, 2, 1, 64});
}

TEST_CASE("attention and its gradient with windows, both ways, capped scores, ALiBi and a scale, alone and together") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const auto backend = gpu->make_backend(0, {});
  const OpShape features[] = {{.window = 1},
                              {.window = 5},
                              {.window = 64},
                              {.window = 100},
                              {.score_scale = 0.21},
                              {.softcap = 1.5},
                              {.bidirectional = true},
                              {.bidirectional = true, .score_scale = 0.4, .softcap = 2.5},
                              {.all_heads = 6, .first_head = 2, .alibi = 1.0},
                              {.window = 33, .all_heads = 4, .score_scale = 0.4, .softcap = 2.5, .alibi = 0.5}};
  for (const OpShape& asked : features) {
    for (const DataType type : half_types) {
      check_attention(*backend, {type, 200, 1, 2, 1, 64, 1.0, asked});
      check_attention(*backend, {type, 70, 2, 4, 2, 128, 1.0, asked});
    }
    check_attention(*backend, {DataType::bf16, 130, 1, 2, 2, 96, 1.0, asked});
    check_attention(*backend, {DataType::fp32, 200, 1, 4, 2, 16, 1.0, asked});
    check_attention(*backend, {DataType::fp32, 70, 1, 2, 1, 160, 1.0, asked});
    check_attention(*backend, {DataType::fp16, 65, 2, 2, 1, 24, 1.0, asked});
  }
  // Whole tiles: bidirectional attention on matrix units.
  for (const DataType type : half_types)
    check_attention(*backend, {type, 256, 1, 2, 1, 64, 1.0, {.bidirectional = true}});
  check_attention(*backend, {DataType::bf16, 128, 2, 2, 2, 128, 1.0, {.bidirectional = true}});
}

// Chunks of 64 positions are whole tiles of the gradients on matrix units, those of 128 of the
// forward, too; others are left to the general kernels.
TEST_CASE("attention over a rank's chunks with gathered keys is that of the whole sequence, forward and backward") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const auto backend = gpu->make_backend(0, {});
  for (const DataType type : all_types) {
    for (const std::int64_t size : {1, 5, 33}) check_gathered(*backend, {type, 4 * size, 2, 4, 2, 16}, 2);
    check_gathered(*backend, {type, 6 * 16, 1, 2, 1, 160}, 3);
    check_gathered(*backend, {type, 4 * 64, 1, 1, 1, 64}, 2, 1);
  }
  check_gathered(*backend, {DataType::bf16, 4 * 128, 1, 1, 1, 128}, 2);
  check_gathered(*backend, {DataType::fp16, 4 * 128, 1, 2, 1, 64}, 2);
  check_gathered(*backend, {DataType::fp16, 6 * 64, 2, 2, 1, 32}, 3);
  check_gathered(*backend, {DataType::bf16, 2 * 128, 1, 2, 2, 96}, 1);
  const OpShape features[] = {{.window = 1},
                              {.window = 50},
                              {.window = 130},
                              {.bidirectional = true},
                              {.window = 33, .all_heads = 4, .score_scale = 0.4, .softcap = 2.5, .alibi = 0.5}};
  for (const OpShape& asked : features) {
    check_gathered(*backend, {DataType::bf16, 4 * 128, 1, 1, 1, 32, 1.0, asked}, 2);
    check_gathered(*backend, {DataType::fp16, 6 * 64, 1, 1, 1, 64, 1.0, asked}, 3);
    check_gathered(*backend, {DataType::fp32, 6 * 20, 2, 4, 2, 16, 1.0, asked}, 3);
  }
}

TEST_CASE("attention step by step around a ring equals the formula of the whole sequence") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const auto backend = gpu->make_backend(0, {});
  for (const DataType type : all_types) {
    for (const std::int64_t size : {1, 5, 33}) check_ring(*backend, {type, 4 * size, 2, 4, 2, 16}, 2);
    check_ring(*backend, {type, 6 * 16, 1, 2, 1, 160}, 3);
    check_ring(*backend, {type, 4 * 64, 1, 1, 1, 64}, 2, 1);
  }
  check_ring(*backend, {DataType::bf16, 4 * 128, 1, 1, 1, 128}, 2);
  check_ring(*backend, {DataType::fp16, 4 * 128, 1, 2, 1, 64}, 2);
  check_ring(*backend, {DataType::fp16, 6 * 64, 2, 2, 1, 32}, 3);
  check_ring(*backend, {DataType::bf16, 2 * 128, 1, 2, 2, 96}, 1);
  check_ring(*backend, {DataType::bf16, 4 * 128, 1, 1, 1, 32, 1.0, {.softcap = 1.5}}, 2);
  check_ring(*backend, {DataType::fp32, 6 * 20, 2, 4, 2, 16, 1.0, {.softcap = 1.5}}, 3);
  check_ring(*backend, {DataType::bf16, 4 * 128, 1, 1, 1, 64, 1.0, {.bidirectional = true}}, 2);
  check_ring(*backend, {DataType::fp32, 6 * 5, 2, 4, 2, 16, 1.0, {.bidirectional = true}}, 3);
}

TEST_CASE("a window as long as the sequence gives the bits of none") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const auto backend = gpu->make_backend(0, {});
  const auto y_bits = [&](const OpShape& features) {
    const Case c{DataType::bf16, 130, 1, 2, 1, 64, 1.0, features};
    const Places at{c};
    const DeviceArray qkv(*backend, c.type, inputs(c, 1)), y(*backend, c.type, at.y_size());
    const DeviceArray log_sum_exp(*backend, DataType::fp32, at.statistics());
    void* const operands[] = {qkv.data(), y.data(), log_sum_exp.data()};
    backend->run(0, {.kind = OpKind::attention, .shape = shape_of(c), .type = c.type, .operands = operands});
    return y.bits();
  };
  CHECK(y_bits({.window = 130}) == y_bits({}));
  CHECK(y_bits({.window = 129}) != y_bits({}));
}

TEST_CASE("attention takes arrays that are aligned to no more than their elements") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const auto backend = gpu->make_backend(0, {});
  for (const DataType type : all_types) check_attention(*backend, {type, 65, 1, 2, 1, 64}, 1);
}

TEST_CASE("softmax of large scores neither overflows nor loses its small terms") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const auto backend = gpu->make_backend(0, {});
  for (const DataType type : all_types) {
    check_attention(*backend, {type, 130, 1, 2, 1, 64, 12.0});
    check_attention(*backend, {type, 130, 1, 1, 1, 16, 20.0});
  }
}

// CUDA keeps the limit of a kernel's shared memory for each GPU.
TEST_CASE("attention has the shared memory that it needs on each GPU of a process, whichever head dim came first") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  for (int device = 0; device < static_cast<int>(std::min<std::size_t>(gpu->devices().size(), 2)); ++device) {
    const auto backend = gpu->make_backend(device, {});
    backend->attach_thread();
    for (const std::int64_t head_dim : {112, 128, 104})
      check_attention(*backend, {DataType::fp32, 33, 1, 1, 1, head_dim});
    check_attention(*backend, {DataType::bf16, 33, 1, 1, 1, 128});
  }
}

TEST_CASE("attention refuses heads that are too wide for its kernels") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const auto backend = gpu->make_backend(0, {});
  const Case c{DataType::fp32, 1, 1, 1, 1, 257};
  const DeviceArray qkv(*backend, c.type, Places{c}.qkv_size()), y(*backend, c.type, Places{c}.y_size());
  const DeviceArray log_sum_exp(*backend, c.type, Places{c}.statistics());
  void* const operands[] = {qkv.data(), y.data(), log_sum_exp.data()};
  CHECK_THROWS_WITH_AS(
      backend->run(0, {.kind = OpKind::attention, .shape = shape_of(c), .type = c.type, .operands = operands}),
      "attention on CUDA: head_dim 257 is larger than 256", RunError);
}

}  // namespace parplan
