// Every op's kernel against its formula, in double precision, on inputs that were rounded to the
// type first: in fp32, bf16 and fp16, at odd shapes, at aligned and unaligned addresses, and in
// place where the op's row allows it.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "planner/graph/dynamic_quantization.h"
#include "planner/graph/relative_position.h"
#include "tests/gpu/device.h"
#include "tests/gpu/device_array.h"

namespace parplan {

using namespace testing;

namespace {

using Doubles = std::vector<double>;

// One operand: its contents before the kernel runs (poison if not given) and after (unchanged if
// not given).
struct Operand {
  DataType type{};
  std::int64_t size = 0;
  std::optional<Doubles> before = std::nullopt;
  std::optional<Doubles> after = std::nullopt;
  double tolerance = 0.0;  // relative to the largest number, besides the rounding of each to the type
  double largest = 0.0;    // among the terms of sums, where they cancel
};

struct Case {
  OpShape shape;
  std::vector<Operand> operands;  // in the order of the op's row, without the workspace
  StepScalars scalars = {};
};

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
std::int64_t count(const Doubles& numbers) { return static_cast<std::int64_t>(numbers.size()); }

double rounded(DataType type, double number) {
  const auto single = static_cast<float>(number);
  float result = 0.0f;
  std::uint32_t element = 0;
  narrow(type, &single, 1, &element);
  widen(type, &element, 1, &result);
  return static_cast<double>(result);
}
Doubles rounded(DataType type, Doubles numbers) {
  for (double& number : numbers) number = rounded(type, number);
  return numbers;
}
Doubles random_in(DataType type, std::int64_t size, int seed, double scale = 1.0) {
  return rounded(type, random_numbers(size, seed, scale));
}

Operand reads(DataType type, const Doubles& numbers) {
  return {.type = type, .size = count(numbers), .before = numbers};
}
Operand writes(DataType type, const Doubles& after, double tolerance) {
  return {.type = type, .size = count(after), .after = after, .tolerance = tolerance};
}
Operand updates(DataType type, const Doubles& before, const Doubles& after, double tolerance) {
  return {.type = type, .size = count(after), .before = before, .after = after, .tolerance = tolerance};
}

constexpr DataType fp32 = DataType::fp32;
constexpr double close = 2e-6;  // a few fp32 roundings

std::string text(const OpShape& s) {
  std::string result = std::to_string(s.rows) + " x " + std::to_string(s.columns);
  if (s.sequence > 0) result += ", sequence " + std::to_string(s.sequence) + ", batch " + std::to_string(s.batch);
  if (s.heads > 0)
    result +=
        ", " + std::to_string(s.heads) + "/" + std::to_string(s.kv_heads) + " heads of " + std::to_string(s.head_dim);
  const std::pair<bool, const char*> flags[] = {
      {s.bias, "bias"},     {s.second, "second"}, {s.accumulate, "accumulate"},    {s.norm, "norm"},
      {s.master, "master"}, {s.scaled, "scaled"}, {s.weight_decay, "weight decay"}};
  for (const auto& [is_set, flag] : flags)
    if (is_set) result += std::string(", ") + flag;
  return result;
}

void check_near(const DeviceArray& found_array, const Operand& operand, int position) {
  const Doubles found = found_array.values();
  const Doubles& wanted = *operand.after;
  REQUIRE(found.size() == wanted.size());
  double largest = operand.largest;
  for (const double w : wanted)
    if (std::isfinite(w)) largest = std::max(largest, std::abs(w));
  // (Neighbouring numbers of fp16 are at least 2^-24 apart.)
  const double smallest = operand.type == DataType::fp16 ? 0x1p-25 : 0.0;
  double worst = 0.0;
  std::size_t place = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (found[i] == wanted[i]) continue;
    const double allowed = 1.01 * rounding(operand.type) * std::abs(wanted[i]) + smallest + operand.tolerance * largest;
    double excess = std::abs(found[i] - wanted[i]) / std::max(allowed, 1e-300);
    if (std::isnan(excess)) excess = std::numeric_limits<double>::infinity();
    if (excess > worst) {
      worst = excess;
      place = i;
    }
  }
  if (found.empty()) return;
  INFO("operand ", position, ", element ", place, ": ", found[place], " instead of ", wanted[place]);
  CHECK(worst <= 1.0);
}

using Bits = std::vector<std::vector<std::byte>>;

// How the operands are placed: operand i begins shifts[i % 3] elements after an aligned address;
// two may share storage.
struct Placing {
  std::int64_t shifts[3] = {0, 0, 0};
  std::optional<InPlace> in_place = {};  // positions among the present operands
};

Bits run_once(Backend& backend, const OpRow& row, DataType type, const Case& c, const Placing& placing) {
  std::vector<DeviceArray> arrays;
  std::vector<void*> pointers;
  arrays.reserve(c.operands.size() + 1);
  for (std::size_t i = 0; i < c.operands.size(); ++i) {
    const Operand& operand = c.operands[i];
    const std::int64_t shift = placing.shifts[i % 3];
    if (operand.before) {
      arrays.emplace_back(backend, operand.type, *operand.before, shift);
    } else {
      arrays.emplace_back(backend, operand.type, operand.size, shift);
    }
    pointers.push_back(arrays.back().data());
  }
  if (placing.in_place) pointers[at(placing.in_place->write)] = pointers[at(placing.in_place->read)];
  if (operand_count(row, c.shape, row.cuda_workspace != nullptr) > operand_count(row, c.shape, false)) {
    arrays.emplace_back(backend, fp32, row.cuda_workspace(c.shape).count / 4);
    pointers.push_back(arrays.back().data());
  }
  Bits before;
  for (const DeviceArray& array : arrays) before.push_back(array.bits());
  backend.set_scalars(c.scalars);
  backend.run(0, {.kind = row.kind, .shape = c.shape, .type = type, .operands = pointers});
  Bits bits;
  for (std::size_t i = 0; i < c.operands.size(); ++i) {
    const bool is_elsewhere = placing.in_place && i == at(placing.in_place->write);
    const DeviceArray& array = arrays[is_elsewhere ? at(placing.in_place->read) : i];
    bits.push_back(array.bits());
    if (placing.in_place && i == at(placing.in_place->read)) {
      bits.back().clear();
    } else if (c.operands[i].after) {
      check_near(array, c.operands[i], static_cast<int>(i));
    } else {
      INFO("operand ", i, " is only read");
      CHECK(bits.back() == before[i]);
    }
  }
  return bits;
}

// Position of an operand of the row among the present ones.
std::optional<int> position_of(const OpRow& row, const OpShape& shape, int operand) {
  if (!is_present(row.operands[at(operand)], shape, false)) return std::nullopt;
  int position = 0;
  for (int i = 0; i < operand; ++i) position += is_present(row.operands[at(i)], shape, false) ? 1 : 0;
  return position;
}

void check_case(Backend& backend, const OpRow& row, DataType type, const Case& c) {
  INFO(row.name, " in ", std::string(name(type)), ", ", text(c.shape));
  REQUIRE(static_cast<int>(c.operands.size()) == operand_count(row, c.shape, false));
  const Bits bits = run_once(backend, row, type, c, {});
  CHECK(run_once(backend, row, type, c, {}) == bits);
  run_once(backend, row, type, c, {.shifts = {1, 1, 1}});
  run_once(backend, row, type, c, {.shifts = {0, 3, 2}});
  if (!row.in_place) return;
  const std::optional<int> read = position_of(row, c.shape, row.in_place->read);
  const std::optional<int> write = position_of(row, c.shape, row.in_place->write);
  if (!read || !write) return;
  INFO("in place");
  Bits in_place = run_once(backend, row, type, c, {.in_place = InPlace{.read = *read, .write = *write}});
  in_place[at(*read)] = bits[at(*read)];
  CHECK(in_place == bits);
}

// The cases, op by op -----------------------------------------------------------------------------

struct Size {
  std::int64_t rows, columns;
};
constexpr Size flat_sizes[] = {{1, 1}, {3, 7}, {5, 24}, {2, 1000}, {3, 2056}, {300, 5}};

// A shard of a vocabulary: rows [40, 43) of a table with 4, the last one padding. 43 is padding;
// 39, 99, -1 are elsewhere.
const Doubles shard_tokens = {40, 39, 42, 42, 99, 43, 41, 40, -1, 42};
constexpr std::int64_t shard_begin = 40, shard_valid = 3, shard_rows = 4;

std::vector<Case> embedding_cases(DataType type) {
  std::vector<Case> cases;
  for (const std::int64_t columns : {1, 7, 24, 1000, 2056}) {
    const Doubles table = random_in(type, shard_rows * columns, 1);
    Doubles y(shard_tokens.size() * at(columns));
    for (std::size_t r = 0; r < shard_tokens.size(); ++r)
      for (std::int64_t i = 0; i < columns; ++i) {
        const auto row = static_cast<std::int64_t>(shard_tokens[r]) - shard_begin;
        if (row >= 0 && row < shard_valid) y[r * at(columns) + at(i)] = table[at(row * columns + i)];
      }
    cases.push_back({{.rows = count(shard_tokens), .columns = columns, .begin = shard_begin, .valid = shard_valid},
                     {reads(DataType::int32, shard_tokens), reads(type, table), writes(type, y, 0.0)}});
  }
  return cases;
}

std::vector<Case> embedding_gradient_cases(DataType type) {
  std::vector<Case> cases;
  Doubles many;  // several looks of a block at the tokens, of several warps
  for (int i = 0; i < 2000; ++i) many.push_back(shard_begin + i * i % 7 - 2);
  for (const auto& [tokens, columns] : {std::pair{shard_tokens, std::int64_t{1}},
                                        {shard_tokens, 7},
                                        {shard_tokens, 24},
                                        {shard_tokens, 2056},
                                        {many, 65}}) {
    const Doubles dy = random_in(type, count(tokens) * columns, 1), before = random_in(fp32, shard_rows * columns, 2);
    Doubles after = before;
    for (std::size_t r = 0; r < tokens.size(); ++r) {
      const auto row = static_cast<std::int64_t>(tokens[r]) - shard_begin;
      if (row < 0 || row >= shard_valid) continue;
      for (std::int64_t i = 0; i < columns; ++i) after[at(row * columns + i)] += dy[r * at(columns) + at(i)];
    }
    cases.push_back({{.rows = count(tokens), .columns = columns, .begin = shard_begin, .valid = shard_valid},
                     {reads(type, dy), reads(DataType::int32, tokens), updates(fp32, before, after, close)}});
  }
  return cases;
}

// The positions of five rows, written out: consecutive ones of a table of 10; of the middle one of
// three ranks with chunks of 4, the rows from the second one on (a tensor axis cuts them), chunks 1
// and 4 of 24 positions.
struct PositionCase {
  std::int64_t begin = 0;
  ContextChunks chunks = {};
  std::int64_t positions[5] = {};
  std::int64_t table_rows = 0;
};
constexpr PositionCase position_cases[] = {
    {.begin = 4, .positions = {4, 5, 6, 7, 8}, .table_rows = 10},
    {.chunks = {.ranks = 3, .rank = 1, .size = 4, .first = 1}, .positions = {5, 6, 7, 16, 17}, .table_rows = 24}};
constexpr std::int64_t position_sequence = 5, position_batch = 3;

OpShape position_shape(const PositionCase& c, std::int64_t columns) {
  return {.rows = position_sequence * position_batch,
          .columns = columns,
          .sequence = position_sequence,
          .batch = position_batch,
          .begin = c.begin,
          .chunks = c.chunks};
}

std::vector<Case> add_position_cases(DataType type) {
  std::vector<Case> cases;
  for (const PositionCase& c : position_cases)
    for (const std::int64_t columns : {1, 7, 24, 1000}) {
      const std::int64_t rows = position_sequence * position_batch;
      const Doubles x = random_in(type, rows * columns, 1), table = random_in(type, c.table_rows * columns, 2);
      Doubles y = x;
      for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t i = 0; i < columns; ++i)
          y[at(r * columns + i)] += table[at(c.positions[r / position_batch] * columns + i)];
      cases.push_back({position_shape(c, columns), {reads(type, x), reads(type, table), writes(type, y, close)}});
    }
  return cases;
}

std::vector<Case> add_position_gradient_cases(DataType type) {
  std::vector<Case> cases;
  for (const PositionCase& c : position_cases)
    for (const std::int64_t columns : {1, 7, 24, 1000}) {
      const std::int64_t rows = position_sequence * position_batch;
      const Doubles dy = random_in(type, rows * columns, 1), before = random_in(fp32, c.table_rows * columns, 2);
      Doubles after = before;
      for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t i = 0; i < columns; ++i)
          after[at(c.positions[r / position_batch] * columns + i)] += dy[at(r * columns + i)];
      cases.push_back({position_shape(c, columns), {reads(type, dy), updates(fp32, before, after, close)}});
    }
  return cases;
}

// One warp per row, one block, a block with several vectors per thread, rows that are read again;
// whole vectors and others.
constexpr Size norm_sizes[] = {{3, 1},   {9, 7},    {17, 8},   {3, 50},   {10, 256},
                               {3, 768}, {2, 1600}, {2, 2304}, {2, 4100}, {1, 33000}};
constexpr double norm_epsilon = 1e-5;

struct Statistics {
  double mean = 0.0, rstd = 0.0;
};
Statistics statistics_of(const Doubles& x, std::int64_t row, std::int64_t columns, bool has_mean) {
  Statistics s;
  double squares = 0.0;
  if (has_mean)
    for (std::int64_t i = 0; i < columns; ++i) s.mean += x[at(row * columns + i)] / static_cast<double>(columns);
  for (std::int64_t i = 0; i < columns; ++i)
    squares += std::pow(x[at(row * columns + i)] - s.mean, 2) / static_cast<double>(columns);
  s.rstd = 1.0 / std::sqrt(squares + norm_epsilon);
  return s;
}

struct Normalized {
  Doubles y, mean, rstd;
};
// `beta` may be empty.
Normalized normalized(const Doubles& x, const Doubles& gamma, const Doubles& beta, bool has_mean) {
  const std::int64_t columns = count(gamma), rows = count(x) / columns;
  Normalized result;
  for (std::int64_t r = 0; r < rows; ++r) {
    const Statistics s = statistics_of(x, r, columns, has_mean);
    result.mean.push_back(s.mean);
    result.rstd.push_back(s.rstd);
    for (std::int64_t i = 0; i < columns; ++i)
      result.y.push_back((x[at(r * columns + i)] - s.mean) * s.rstd * gamma[at(i)] +
                         (beta.empty() ? 0.0 : beta[at(i)]));
  }
  return result;
}

// Rows whose mean is not zero: the variance is a small difference.
Doubles norm_input(DataType type, std::int64_t size) {
  Doubles x = random_numbers(size, 1, 2.0);
  for (double& number : x) number += 3.0;
  return rounded(type, x);
}

// A LayerNorm has a beta, and of every other size is tried without it, too.
std::vector<Case> norm_cases(DataType type, bool has_mean) {
  std::vector<Case> cases;
  for (int i = 0; i < 2 * static_cast<int>(std::size(norm_sizes)); ++i) {
    const auto& [rows, columns] = norm_sizes[i / 2];
    const bool has_beta = i % 2 == 0;
    if (!has_beta && (!has_mean || columns % 2 != 0)) continue;
    const Doubles x = norm_input(type, rows * columns), gamma = random_in(type, columns, 2);
    const Doubles beta = has_mean && has_beta ? random_in(type, columns, 3) : Doubles{};
    const Normalized wanted = normalized(x, gamma, beta, has_mean);
    Case c{{.rows = rows, .columns = columns, .without_beta = !has_beta, .epsilon = norm_epsilon},
           {reads(type, x), reads(type, gamma)}};
    if (!beta.empty()) c.operands.push_back(reads(type, beta));
    c.operands.push_back(writes(type, wanted.y, 5e-6));
    if (has_mean) c.operands.push_back(writes(fp32, wanted.mean, close));
    c.operands.push_back(writes(fp32, wanted.rstd, 1e-5));
    cases.push_back(c);
  }
  return cases;
}
std::vector<Case> layer_norm_cases(DataType type) { return norm_cases(type, true); }
std::vector<Case> rms_norm_cases(DataType type) { return norm_cases(type, false); }

std::vector<Case> add_norm_cases(DataType type, bool has_mean) {
  std::vector<Case> cases;
  int variant = 0;
  for (const auto& [rows, columns] : norm_sizes) {
    for (int more = 0; more < (columns <= 256 ? 3 : 1); ++more) {
      ++variant;
      const bool second = variant % 3 != 0, bias = variant % 2 != 0 || !second;
      const Doubles a = norm_input(type, rows * columns), b = random_in(type, rows * columns, 4),
                    last = random_in(type, columns, 5);
      const bool has_beta = !has_mean || variant % 4 != 0;
      const Doubles gamma = random_in(type, columns, 2),
                    beta = has_mean && has_beta ? random_in(type, columns, 3) : Doubles{};
      // Added like in the kernel, in fp32.
      Doubles sum = a;
      for (std::int64_t i = 0; i < count(sum); ++i) {
        if (second) sum[at(i)] = rounded(fp32, sum[at(i)] + b[at(i)]);
        if (bias) sum[at(i)] = rounded(fp32, sum[at(i)] + last[at(i % columns)]);
      }
      const Doubles x = rounded(type, sum);
      const Normalized wanted = normalized(x, gamma, beta, has_mean);
      Case c{{.rows = rows,
              .columns = columns,
              .bias = bias,
              .without_beta = !has_beta,
              .second = second,
              .epsilon = norm_epsilon},
             {reads(type, a)}};
      if (second) c.operands.push_back(reads(type, b));
      if (bias) c.operands.push_back(reads(type, last));
      c.operands.push_back(reads(type, gamma));
      if (!beta.empty()) c.operands.push_back(reads(type, beta));
      c.operands.push_back(writes(type, x, 0.0));
      c.operands.push_back(writes(type, wanted.y, 5e-6));
      if (has_mean) c.operands.push_back(writes(fp32, wanted.mean, close));
      c.operands.push_back(writes(fp32, wanted.rstd, 1e-5));
      cases.push_back(c);
    }
  }
  return cases;
}
std::vector<Case> add_layer_norm_cases(DataType type) { return add_norm_cases(type, true); }
std::vector<Case> add_rms_norm_cases(DataType type) { return add_norm_cases(type, false); }

std::vector<Case> norm_gradient_cases(DataType type, bool has_mean) {
  std::vector<Case> cases;
  std::vector<Size> sizes(std::begin(norm_sizes), std::end(norm_sizes));
  // Several parts of rows; several rows of a part in one thread; parts without rows.
  sizes.insert(sizes.end(), {{37, 24}, {130, 768}, {300, 41}, {4200, 8}});
  for (const Size& size : sizes) {
    const std::int64_t rows = size.rows, columns = size.columns;
    const bool accumulate = columns % 2 == 0;
    const Doubles x = norm_input(type, rows * columns), dy = random_in(type, rows * columns, 4),
                  gamma = random_in(type, columns, 2);
    const Doubles dx_before = random_in(type, rows * columns, 5), gamma_before = random_in(fp32, columns, 6),
                  beta_before = random_in(fp32, columns, 7);
    Doubles dx = accumulate ? dx_before : Doubles(x.size()), dgamma = gamma_before, dbeta = beta_before, mean, rstd;
    for (std::int64_t r = 0; r < rows; ++r) {
      const Statistics s = statistics_of(x, r, columns, has_mean);
      mean.push_back(rounded(fp32, s.mean));
      rstd.push_back(rounded(fp32, s.rstd));
      double sum = 0.0, products = 0.0;
      const auto normal = [&](std::int64_t i) { return (x[at(r * columns + i)] - mean.back()) * rstd.back(); };
      for (std::int64_t i = 0; i < columns; ++i) {
        const double d = dy[at(r * columns + i)];
        sum += has_mean ? d * gamma[at(i)] : 0.0;
        products += d * gamma[at(i)] * normal(i);
        dgamma[at(i)] += d * normal(i);
        dbeta[at(i)] += d;
      }
      const auto width = static_cast<double>(columns);
      for (std::int64_t i = 0; i < columns; ++i)
        dx[at(r * columns + i)] +=
            rstd.back() * (dy[at(r * columns + i)] * gamma[at(i)] - sum / width - normal(i) * products / width);
    }
    Case c{{.rows = rows, .columns = columns, .accumulate = accumulate, .epsilon = norm_epsilon},
           {reads(type, dy), reads(type, x), reads(type, gamma)}};
    if (has_mean) c.operands.push_back(reads(fp32, mean));
    c.operands.push_back(reads(fp32, rstd));
    c.operands.push_back(accumulate ? updates(type, dx_before, dx, 1e-5) : writes(type, dx, 1e-5));
    if (columns == 1) c.operands.back().largest = *std::max_element(rstd.begin(), rstd.end());
    c.operands.push_back(updates(fp32, gamma_before, dgamma, 5e-6));
    if (has_mean) c.operands.push_back(updates(fp32, beta_before, dbeta, 5e-6));
    cases.push_back(c);
  }
  return cases;
}
std::vector<Case> layer_norm_gradient_cases(DataType type) { return norm_gradient_cases(type, true); }
std::vector<Case> rms_norm_gradient_cases(DataType type) { return norm_gradient_cases(type, false); }

std::vector<Case> rotation_cases(DataType type, double direction) {
  struct Heads {
    std::int64_t sequence, batch, heads, kv_heads, head_dim, begin;
    std::int64_t rotary_dim = 0;
    bool interleaved = false;
    ContextChunks chunks = {};
    std::vector<std::int64_t> positions = {};  // of the rows; none: consecutive ones from `begin` on
    double factor = 0.0;
  };
  std::vector<Case> cases;
  for (const Heads& h :
       {Heads{3, 2, 4, 2, 2, 0},
        {2, 3, 3, 3, 6, 5},
        {4, 1, 4, 1, 64, 100000},
        {2, 2, 2, 2, 128, 7},
        {1, 1, 1, 1, 200, 9},
        {3, 2, 4, 2, 6, 3, 2},
        {2, 2, 2, 1, 80, 5, 32},
        {2, 1, 2, 2, 96, 5, 36},
        {2, 3, 3, 3, 2, 5, 0, true},
        {2, 3, 3, 3, 6, 5, 4, true},
        {3, 2, 2, 1, 256, 4, 64, true},
        {2, 1, 2, 2, 128, 4, 0, true},
        {5, 2, 2, 1, 64, 0, 0, false, {.ranks = 3, .rank = 1, .size = 4, .first = 1}, {5, 6, 7, 16, 17}},
        {2, 1, 2, 1, 6, 0, 4, true, {.ranks = 2, .rank = 0, .size = 1}, {0, 3}},
        {4, 1, 2, 1, 64, 30, 0, false, {}, {}, 8.0}}) {
    const std::int64_t turning = h.rotary_dim > 0 ? h.rotary_dim : h.head_dim;
    const std::int64_t rows = h.sequence * h.batch, heads = h.heads + 2 * h.kv_heads, half = turning / 2,
                       per_group = h.heads / h.kv_heads + 2;
    const Doubles x = random_in(type, rows * heads * h.head_dim, 1);
    Doubles y = x;
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int64_t head = 0; head < heads; ++head) {
        if (head % per_group == per_group - 1) continue;  // a value
        for (std::int64_t i = 0; i < half; ++i) {
          // In fp32, as in Hugging Face.
          const auto frequency =
              static_cast<float>(std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(turning))) /
              (h.factor > 0.0 ? static_cast<float>(h.factor) : 1.0f);
          const std::int64_t place = row / h.batch,
                             position = h.positions.empty() ? h.begin + place : h.positions[at(place)];
          const double angle = static_cast<double>(static_cast<float>(position) * frequency);
          const std::size_t low = at((row * heads + head) * h.head_dim + (h.interleaved ? 2 * i : i));
          const std::size_t high = low + at(h.interleaved ? 1 : half);
          y[low] = x[low] * std::cos(angle) - direction * x[high] * std::sin(angle);
          y[high] = x[high] * std::cos(angle) + direction * x[low] * std::sin(angle);
        }
      }
    // (A frequency may be rounded to the other side than here: a rotation by 2^-24 of the angle.)
    const double tolerance = close + 0x1p-23 * static_cast<double>(h.begin > 1000 ? h.begin : 0);
    cases.push_back({{.rows = rows,
                      .sequence = h.sequence,
                      .batch = h.batch,
                      .heads = h.heads,
                      .kv_heads = h.kv_heads,
                      .head_dim = h.head_dim,
                      .rotary_dim = h.rotary_dim,
                      .begin = h.begin,
                      .chunks = h.chunks,
                      .interleaved = h.interleaved,
                      .theta = 10000.0,
                      .factor = h.factor},
                     {reads(type, x), writes(type, y, tolerance)}});
  }
  return cases;
}
std::vector<Case> rotary_cases(DataType type) { return rotation_cases(type, 1.0); }
std::vector<Case> rotary_gradient_cases(DataType type) { return rotation_cases(type, -1.0); }

// Fused queries, keys and values: for each key/value head its query heads, the key and the value.
struct FusedHeads {
  std::int64_t sequence, batch, heads, kv_heads, head_dim;
  OpShape shape() const {
    return {.rows = rows(),
            .sequence = sequence,
            .batch = batch,
            .heads = heads,
            .kv_heads = kv_heads,
            .head_dim = head_dim,
            .all_heads = 2 * heads,
            .epsilon = norm_epsilon};
  }
  std::int64_t rows() const { return sequence * batch; }
  std::int64_t queries() const { return heads / kv_heads; }
  std::int64_t slots() const { return heads + 2 * kv_heads; }
  std::int64_t size() const { return rows() * slots() * head_dim; }
  std::int64_t first(std::int64_t row, std::int64_t slot) const { return (row * slots() + slot) * head_dim; }
  bool is_key(std::int64_t slot) const { return slot % (queries() + 2) == queries(); }
  // Calls body(row, slot, is a key, number among the heads of its kind) for each query and key
  // head, in the order of memory.
  void for_each(const std::function<void(std::int64_t, std::int64_t, bool, std::int64_t)>& body) const {
    for (std::int64_t row = 0; row < rows(); ++row)
      for (std::int64_t slot = 0; slot < slots(); ++slot) {
        const std::int64_t group = slot / (queries() + 2), place = slot % (queries() + 2);
        if (place <= queries()) body(row, slot, is_key(slot), is_key(slot) ? group : group * queries() + place);
      }
  }
};
// (The third has several rows for each partial sum.)
constexpr FusedHeads fused_heads[] = {{3, 2, 4, 2, 2},   {2, 3, 3, 3, 7},   {270, 2, 2, 1, 8},
                                      {20, 2, 4, 1, 64}, {2, 2, 2, 2, 128}, {1, 1, 6, 2, 200}};

// The mean and 1 / root mean square of a head's elements, less that mean where there is one.
Statistics statistics_of_head(const Doubles& x, std::size_t first, std::int64_t head_dim, bool centered) {
  Statistics s;
  double square = 0.0;
  const auto n = static_cast<double>(head_dim);
  for (std::size_t i = first; centered && i < first + at(head_dim); ++i) s.mean += x[i] / n;
  for (std::size_t i = first; i < first + at(head_dim); ++i) square += (x[i] - s.mean) * (x[i] - s.mean) / n;
  s.rstd = 1.0 / std::sqrt(square + norm_epsilon);
  return s;
}
// Widths of the gammas of queries and of keys.
std::array<std::int64_t, 2> gamma_widths(const FusedHeads& h, bool centered) {
  return {centered ? h.heads * h.head_dim : h.head_dim, centered ? h.kv_heads * h.head_dim : h.head_dim};
}

std::vector<Case> head_norm_cases(DataType type) {
  std::vector<Case> cases;
  for (const FusedHeads& h : fused_heads)
    for (const bool centered : {false, true}) {
      const auto widths = gamma_widths(h, centered);
      const Doubles x = random_in(type, h.size(), 1, 2.0),
                    gammas[] = {random_in(type, widths[0], 2), random_in(type, widths[1], 3)};
      Doubles y = x, rstd;
      h.for_each([&](std::int64_t row, std::int64_t slot, bool key, std::int64_t number) {
        const std::size_t first = at(h.first(row, slot)), own = centered ? at(number * h.head_dim) : 0;
        const Statistics s = statistics_of_head(x, first, h.head_dim, centered);
        rstd.push_back(s.rstd);
        for (std::size_t i = 0; i < at(h.head_dim); ++i)
          y[first + i] = (x[first + i] - s.mean) * s.rstd * gammas[key ? 1 : 0][own + i];
      });
      OpShape shape = h.shape();
      shape.centered = centered;
      cases.push_back({shape,
                       {reads(type, x), reads(type, gammas[0]), reads(type, gammas[1]),
                        writes(type, y, centered ? 5e-6 : close), writes(fp32, rstd, centered ? 1e-5 : close)}});
    }
  return cases;
}

std::vector<Case> head_norm_gradient_cases(DataType type) {
  std::vector<Case> cases;
  for (const FusedHeads& h : fused_heads)
    for (const bool centered : {false, true}) {
      const auto widths = gamma_widths(h, centered);
      const Doubles dy = random_in(type, h.size(), 4), x = random_in(type, h.size(), 1, 2.0);
      const Doubles gammas[] = {random_in(type, widths[0], 2), random_in(type, widths[1], 3)};
      const Doubles before[] = {random_in(fp32, widths[0], 5), random_in(fp32, widths[1], 6)};
      Doubles dx = dy, rstd, after[] = {before[0], before[1]};
      h.for_each([&](std::int64_t row, std::int64_t slot, bool key, std::int64_t number) {
        const std::size_t first = at(h.first(row, slot)), n = at(h.head_dim);
        const std::size_t own = centered ? at(number * h.head_dim) : 0;
        const Statistics s = statistics_of_head(x, first, h.head_dim, centered);
        rstd.push_back(rounded(fp32, s.rstd));
        const double r = rstd.back();
        const Doubles& gamma = gammas[key ? 1 : 0];
        double mean_g = 0.0, mean_product = 0.0;
        const auto normal = [&](std::size_t i) { return (x[first + i] - s.mean) * r; };
        for (std::size_t i = 0; i < n; ++i) {
          const double g = dy[first + i] * gamma[own + i];
          after[key ? 1 : 0][own + i] += dy[first + i] * normal(i);
          mean_g += centered ? g / static_cast<double>(n) : 0.0;
          mean_product += g * normal(i) / static_cast<double>(n);
        }
        for (std::size_t i = 0; i < n; ++i)
          dx[first + i] = r * (dy[first + i] * gamma[own + i] - mean_g - normal(i) * mean_product);
      });
      OpShape shape = h.shape();
      shape.centered = centered;
      cases.push_back({shape,
                       {reads(type, dy), reads(type, x), reads(type, gammas[0]), reads(type, gammas[1]),
                        reads(fp32, rstd), writes(type, dx, centered ? 1e-5 : 5e-6),
                        updates(fp32, before[0], after[0], 1e-5), updates(fp32, before[1], after[1], 1e-5)}});
    }
  return cases;
}

std::vector<Case> query_key_squares_cases(DataType type) {
  std::vector<Case> cases;
  for (const FusedHeads& h : fused_heads) {
    const Doubles x = random_in(type, h.size(), 1, 2.0);
    Doubles squares(at(2 * h.rows()));
    h.for_each([&](std::int64_t row, std::int64_t slot, bool key, std::int64_t) {
      for (std::int64_t i = 0; i < h.head_dim; ++i)
        squares[at(2 * row + (key ? 1 : 0))] += std::pow(x[at(h.first(row, slot) + i)], 2);
    });
    cases.push_back({h.shape(), {reads(type, x), writes(fp32, squares, close)}});
  }
  return cases;
}

std::vector<Case> query_key_squares_gradient_cases(DataType type) {
  std::vector<Case> cases;
  for (const FusedHeads& h : fused_heads)
    for (const bool accumulate : {false, true}) {
      const Doubles x = random_in(type, h.size(), 1, 2.0), dsquares = random_in(fp32, 2 * h.rows(), 2);
      const Doubles before = random_in(type, h.size(), 3);
      Doubles dx = accumulate ? before : Doubles(at(h.size()));
      h.for_each([&](std::int64_t row, std::int64_t slot, bool key, std::int64_t) {
        for (std::int64_t i = h.first(row, slot); i < h.first(row, slot) + h.head_dim; ++i)
          dx[at(i)] += 2.0 * x[at(i)] * dsquares[at(2 * row + (key ? 1 : 0))];
      });
      OpShape shape = h.shape();
      shape.accumulate = accumulate;
      cases.push_back({shape,
                       {reads(fp32, dsquares), reads(type, x),
                        accumulate ? updates(type, before, dx, close) : writes(type, dx, close)}});
    }
  return cases;
}

// The widths are those of twice the heads, the heads of all ranks.
double width_rstd(const FusedHeads& h, double squares, bool key) {
  return 1.0 / std::sqrt(squares / static_cast<double>(2 * (key ? h.kv_heads : h.heads) * h.head_dim) + norm_epsilon);
}

std::vector<Case> query_key_norm_cases(DataType type) {
  std::vector<Case> cases;
  for (const FusedHeads& h : fused_heads) {
    const Doubles x = random_in(type, h.size(), 1, 2.0);
    const Doubles gammas[] = {random_in(type, h.heads * h.head_dim, 2), random_in(type, h.kv_heads * h.head_dim, 3)};
    Doubles squares = random_in(fp32, 2 * h.rows(), 4), y = x;
    for (double& square : squares) square = rounded(fp32, 3.0 + square);
    h.for_each([&](std::int64_t row, std::int64_t slot, bool key, std::int64_t number) {
      const double r = width_rstd(h, squares[at(2 * row + (key ? 1 : 0))], key);
      for (std::int64_t i = 0; i < h.head_dim; ++i)
        y[at(h.first(row, slot) + i)] *= r * gammas[key ? 1 : 0][at(number * h.head_dim + i)];
    });
    cases.push_back({h.shape(),
                     {reads(type, x), reads(fp32, squares), reads(type, gammas[0]), reads(type, gammas[1]),
                      writes(type, y, close)}});
  }
  return cases;
}

std::vector<Case> query_key_norm_gradient_cases(DataType type) {
  std::vector<Case> cases;
  for (const FusedHeads& h : fused_heads) {
    const Doubles dy = random_in(type, h.size(), 4), x = random_in(type, h.size(), 1, 2.0);
    const Doubles gammas[] = {random_in(type, h.heads * h.head_dim, 2), random_in(type, h.kv_heads * h.head_dim, 3)};
    const Doubles before[] = {random_in(fp32, h.heads * h.head_dim, 5), random_in(fp32, h.kv_heads * h.head_dim, 6)};
    Doubles squares = random_in(fp32, 2 * h.rows(), 7), dx = dy, dsquares(squares.size()),
            after[] = {before[0], before[1]};
    for (double& square : squares) square = rounded(fp32, 3.0 + square);
    h.for_each([&](std::int64_t row, std::int64_t slot, bool key, std::int64_t number) {
      const std::size_t sum = at(2 * row + (key ? 1 : 0));
      const double r = width_rstd(h, squares[sum], key),
                   width = static_cast<double>(2 * (key ? h.kv_heads : h.heads) * h.head_dim);
      for (std::int64_t i = 0; i < h.head_dim; ++i) {
        const std::size_t place = at(h.first(row, slot) + i), of_gamma = at(number * h.head_dim + i);
        const double g = dy[place] * gammas[key ? 1 : 0][of_gamma];
        after[key ? 1 : 0][of_gamma] += dy[place] * x[place] * r;
        dsquares[sum] -= 0.5 * g * x[place] * r * r * r / width;
        dx[place] = g * r;
      }
    });
    cases.push_back({h.shape(),
                     {reads(type, dy), reads(type, x), reads(fp32, squares), reads(type, gammas[0]),
                      reads(type, gammas[1]), writes(type, dx, close), writes(fp32, dsquares, 1e-5),
                      updates(fp32, before[0], after[0], 1e-5), updates(fp32, before[1], after[1], 1e-5)}});
  }
  return cases;
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

double activated(ActivationKind kind, double x) {
  switch (kind) {
    case ActivationKind::gelu_tanh:
      return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case ActivationKind::gelu_erf:
      return x / 2 * (1 + std::erf(x / std::sqrt(2.0)));
    case ActivationKind::silu:
      return x * sigmoid(x);
    default:
      return std::max(x, 0.0);
  }
}
double activation_slope(ActivationKind kind, double x) {
  switch (kind) {
    case ActivationKind::gelu_tanh: {
      const double t = std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
      return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
    }
    case ActivationKind::gelu_erf:
      return 0.5 * (1 + std::erf(x / std::sqrt(2.0))) + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
    case ActivationKind::silu:
      return sigmoid(x) + x * sigmoid(x) * (1 - sigmoid(x));
    default:
      return x > 0.0 ? 1.0 : 0.0;
  }
}

constexpr ActivationKind activation_kinds[] = {ActivationKind::gelu_tanh, ActivationKind::gelu_erf,
                                               ActivationKind::relu, ActivationKind::silu};

// With arguments far out on both sides.
Doubles activation_input(DataType type, std::int64_t size) {
  Doubles x = random_numbers(size, 1, 5.0);
  for (std::size_t i = 0; i < x.size(); i += 13) x[i] *= 100.0;
  if (size > 20) x[17] = 0.0;
  return rounded(type, x);
}

std::vector<Case> activation_cases(DataType type) {
  std::vector<Case> cases;
  for (const ActivationKind kind : activation_kinds)
    for (const auto& [rows, columns] : flat_sizes) {
      const Doubles x = activation_input(type, rows * columns);
      Doubles y = x;
      for (double& number : y) number = activated(kind, number);
      cases.push_back(
          {{.rows = rows, .columns = columns, .activation = kind}, {reads(type, x), writes(type, y, close)}});
    }
  return cases;
}

std::vector<Case> activation_gradient_cases(DataType type) {
  std::vector<Case> cases;
  for (const ActivationKind kind : activation_kinds)
    for (const auto& [rows, columns] : flat_sizes) {
      const Doubles x = activation_input(type, rows * columns), dy = random_in(type, rows * columns, 2);
      Doubles dx = dy;
      for (std::size_t i = 0; i < dx.size(); ++i) dx[i] *= activation_slope(kind, x[i]);
      cases.push_back({{.rows = rows, .columns = columns, .activation = kind},
                       {reads(type, dy), reads(type, x), writes(type, dx, close)}});
    }
  return cases;
}

std::vector<Case> gate_cases(DataType type) {
  std::vector<Case> cases;
  for (const ActivationKind kind : activation_kinds)
    for (const auto& [rows, columns] : flat_sizes) {
      const Doubles gate = activation_input(type, rows * columns), up = random_in(type, rows * columns, 2);
      Doubles y = up;
      for (std::size_t i = 0; i < y.size(); ++i) y[i] *= activated(kind, gate[i]);
      cases.push_back({{.rows = rows, .columns = columns, .activation = kind},
                       {reads(type, gate), reads(type, up), writes(type, y, close)}});
    }
  return cases;
}

std::vector<Case> gate_gradient_cases(DataType type) {
  std::vector<Case> cases;
  for (const ActivationKind kind : activation_kinds)
    for (const auto& [rows, columns] : flat_sizes) {
      const Doubles dy = random_in(type, rows * columns, 3), gate = activation_input(type, rows * columns),
                    up = random_in(type, rows * columns, 2);
      Doubles dgate = dy, dup = dy;
      for (std::size_t i = 0; i < dy.size(); ++i) {
        dgate[i] *= up[i] * activation_slope(kind, gate[i]);
        dup[i] *= activated(kind, gate[i]);
      }
      cases.push_back({{.rows = rows, .columns = columns, .activation = kind},
                       {reads(type, dy), reads(type, gate), reads(type, up), writes(type, dgate, close),
                        writes(type, dup, close)}});
    }
  return cases;
}

constexpr double scale_factor = 0.37, cap = 30.0;

std::vector<Case> scale_cases(DataType type) {
  std::vector<Case> cases;
  for (const auto& [rows, columns] : flat_sizes) {
    const Doubles x = random_in(type, rows * columns, 1);
    Doubles y = x;
    for (double& number : y) number *= scale_factor;
    cases.push_back(
        {{.rows = rows, .columns = columns, .factor = scale_factor}, {reads(type, x), writes(type, y, close)}});
  }
  return cases;
}

std::vector<Case> softcap_cases(DataType type) {
  std::vector<Case> cases;
  for (const auto& [rows, columns] : flat_sizes) {
    const Doubles x = activation_input(type, rows * columns);
    Doubles y = x;
    for (double& number : y) number = cap * std::tanh(number / cap);
    cases.push_back({{.rows = rows, .columns = columns, .softcap = cap}, {reads(type, x), writes(type, y, close)}});
  }
  return cases;
}

std::vector<Case> softcap_gradient_cases(DataType type) {
  std::vector<Case> cases;
  for (const auto& [rows, columns] : flat_sizes) {
    const Doubles dy = random_in(type, rows * columns, 1), y = random_in(type, rows * columns, 2, cap);
    Doubles dx = dy;
    for (std::size_t i = 0; i < dx.size(); ++i) dx[i] *= 1.0 - y[i] * y[i] / (cap * cap);
    cases.push_back({{.rows = rows, .columns = columns, .softcap = cap},
                     {reads(type, dy), reads(type, y), writes(type, dx, close)}});
  }
  return cases;
}

std::vector<Case> add_cases(DataType type) {
  std::vector<Case> cases;
  for (const auto& [rows, columns] : flat_sizes)
    for (const auto& [second, bias] : {std::pair{true, false}, {false, true}, {true, true}}) {
      const Doubles a = random_in(type, rows * columns, 1), b = random_in(type, rows * columns, 2),
                    last = random_in(type, columns, 3);
      Doubles y = a;
      for (std::int64_t i = 0; i < count(y); ++i)
        y[at(i)] += (second ? b[at(i)] : 0.0) + (bias ? last[at(i % columns)] : 0.0);
      Case c{{.rows = rows, .columns = columns, .bias = bias, .second = second}, {reads(type, a)}};
      if (second) c.operands.push_back(reads(type, b));
      if (bias) c.operands.push_back(reads(type, last));
      c.operands.push_back(writes(type, y, close));
      cases.push_back(c);
    }
  return cases;
}

std::vector<Case> bias_gradient_cases(DataType type) {
  std::vector<Case> cases;
  for (const auto& [rows, columns] : {Size{1, 1}, {3, 7}, {16, 24}, {17, 300}, {33, 1000}, {300, 41}, {4200, 8}}) {
    const Doubles dy = random_in(type, rows * columns, 1), before = random_in(fp32, columns, 2);
    Doubles after = before;
    for (std::int64_t i = 0; i < count(dy); ++i) after[at(i % columns)] += dy[at(i)];
    cases.push_back(
        {{.rows = rows, .columns = columns, .bias = true}, {reads(type, dy), updates(fp32, before, after, close)}});
  }
  return cases;
}

// Vocabulary-parallel cross-entropy ---------------------------------------------------------------

struct Shard {
  std::int64_t rows, columns, begin, valid;
};
constexpr Shard shards[] = {{1, 1, 0, 1},   {4, 16, 32, 13}, {3, 1000, 0, 1000},
                            {2, 37, 5, 30}, {3, 64, 100, 0}, {2, 9000, 50, 8999}};

struct Tokens {
  Doubles logits, targets, maximum, sums;
};
// Targets in the shard, in its padding, elsewhere, and none; maxima and sums as if other shards had
// raised them.
Tokens tokens_of(DataType type, const Shard& s) {
  Tokens t;
  t.logits = random_in(type, s.rows * s.columns, 1, 4.0);
  for (std::int64_t r = 0; r < s.rows; ++r) {
    t.targets.push_back(static_cast<double>(r == 1   ? s.begin + s.valid
                                            : r == 2 ? s.begin - 1
                                            : r == 3 ? -1
                                                     : s.begin + s.valid / 2));
    double largest = 0.5, sum = 2.0;
    for (std::int64_t i = 0; i < s.valid; ++i) largest = std::max(largest, t.logits[at(r * s.columns + i)]);
    t.maximum.push_back(rounded(fp32, largest));
    for (std::int64_t i = 0; i < s.valid; ++i) sum += std::exp(t.logits[at(r * s.columns + i)] - t.maximum.back());
    t.sums.push_back(rounded(fp32, sum));
    t.sums.push_back(rounded(fp32, -1.0 - static_cast<double>(r)));
  }
  return t;
}
OpShape shape_of(const Shard& s) { return {.rows = s.rows, .columns = s.columns, .begin = s.begin, .valid = s.valid}; }

std::vector<Case> cross_entropy_max_cases(DataType type) {
  std::vector<Case> cases;
  for (const Shard& s : shards) {
    const Tokens t = tokens_of(type, s);
    Doubles maximum;
    for (std::int64_t r = 0; r < s.rows; ++r) {
      maximum.push_back(-std::numeric_limits<double>::infinity());
      for (std::int64_t i = 0; i < s.valid; ++i)
        maximum.back() = std::max(maximum.back(), t.logits[at(r * s.columns + i)]);
    }
    cases.push_back({shape_of(s), {reads(type, t.logits), writes(fp32, maximum, 0.0)}});
  }
  return cases;
}

std::vector<Case> cross_entropy_sums_cases(DataType type) {
  std::vector<Case> cases;
  for (const Shard& s : shards) {
    const Tokens t = tokens_of(type, s);
    Doubles sums;
    for (std::int64_t r = 0; r < s.rows; ++r) {
      double sum = 0.0;
      for (std::int64_t i = 0; i < s.valid; ++i) sum += std::exp(t.logits[at(r * s.columns + i)] - t.maximum[at(r)]);
      const std::int64_t target = static_cast<std::int64_t>(t.targets[at(r)]) - s.begin;
      sums.push_back(sum);
      sums.push_back(target >= 0 && target < s.valid ? t.logits[at(r * s.columns + target)] - t.maximum[at(r)] : 0.0);
    }
    cases.push_back({shape_of(s),
                     {reads(type, t.logits), reads(DataType::int32, t.targets), reads(fp32, t.maximum),
                      writes(fp32, sums, close)}});
  }
  return cases;
}

std::vector<Case> cross_entropy_loss_cases(DataType type) {
  std::vector<Case> cases;
  for (const Shard& s : {shards[0], shards[1], Shard{2500, 3, 0, 3}}) {
    const Tokens t = tokens_of(type, s);
    double loss = 7.0;
    for (std::int64_t r = 0; r < s.rows; ++r)
      if (t.targets[at(r)] >= 0.0) loss += std::log(t.sums[at(2 * r)]) - t.sums[at(2 * r + 1)];
    cases.push_back({shape_of(s),
                     {reads(type, t.logits), reads(DataType::int32, t.targets), reads(fp32, t.maximum),
                      reads(fp32, t.sums), updates(fp32, {7.0}, {loss}, 2e-7)}});
  }
  return cases;
}

std::vector<Case> cross_entropy_gradient_cases(DataType type) {
  std::vector<Case> cases;
  for (const Shard& s : shards)
    for (const bool scaled : {false, true}) {
      const Tokens t = tokens_of(type, s);
      OpShape shape = shape_of(s);
      shape.scaled = scaled;
      shape.scale = scaled ? 1.0 / 65536 : 0.25;
      const double scale = scaled ? shape.scale * 16384.0 : shape.scale;
      Doubles dx(t.logits.size());
      for (std::int64_t r = 0; r < s.rows; ++r)
        for (std::int64_t i = 0; i < s.valid && t.targets[at(r)] >= 0.0; ++i)
          dx[at(r * s.columns + i)] =
              (std::exp(t.logits[at(r * s.columns + i)] - t.maximum[at(r)]) / t.sums[at(2 * r)] -
               (static_cast<double>(s.begin + i) == t.targets[at(r)] ? 1.0 : 0.0)) *
              scale;
      Case c{shape,
             {reads(type, t.logits), reads(DataType::int32, t.targets), reads(fp32, t.maximum), reads(fp32, t.sums),
              writes(type, dx, close)}};
      if (scaled) c.operands.push_back(reads(fp32, {16384.0, 3.0, 1.0, 0.0}));
      cases.push_back(c);
    }
  return cases;
}

// Around the step ---------------------------------------------------------------------------------

std::vector<Case> accumulate_cases(DataType type) {
  std::vector<Case> cases;
  for (const std::int64_t size : {1, 7, 64, 2051}) {
    const Doubles x = random_in(type, size, 1), before = random_in(type, size, 2);
    Doubles after = before;
    for (std::size_t i = 0; i < after.size(); ++i) after[i] += x[i];
    cases.push_back({{.rows = size}, {reads(type, x), updates(type, before, after, close)}});
  }
  return cases;
}

std::vector<Case> fill_zero_cases(DataType type) {
  std::vector<Case> cases;
  for (const std::int64_t size : {1, 7, 64, 2051})
    cases.push_back({{.rows = size}, {writes(type, Doubles(at(size)), 0.0)}});
  return cases;
}

std::vector<Case> copy_cases(DataType type) {
  std::vector<Case> cases;
  for (const auto& [rows, columns] : {Size{1, 1}, {7, 0}, {64, 3}, {2051, 0}}) {
    const Doubles x = random_in(type, rows * std::max<std::int64_t>(columns, 1), 1);
    cases.push_back({{.rows = rows, .columns = columns}, {reads(type, x), writes(type, x, 0.0)}});
  }
  return cases;
}

std::vector<Case> transpose_blocks_cases(DataType type) {
  std::vector<Case> cases;
  // Widths that can be moved in vectors and others; blocks of several parts of the grid.
  using Sizes = std::array<std::int64_t, 3>;
  for (const auto& [rows, blocks, columns] :
       {Sizes{1, 1, 1}, {1, 3, 5}, {4, 1, 2}, {7, 2, 33}, {6, 4, 64}, {3, 2, 2600}}) {
    const Doubles x = random_in(type, rows * blocks * columns, 1);
    Doubles y(x.size());
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t b = 0; b < blocks; ++b)
        for (std::int64_t c = 0; c < columns; ++c)
          y[at((b * rows + r) * columns + c)] = x[at((r * blocks + b) * columns + c)];
    cases.push_back({{.rows = rows, .columns = columns, .inner = blocks}, {reads(type, x), writes(type, y, 0.0)}});
  }
  return cases;
}

// Rows of `inner` columns and a part of them, from aligned columns and others.
struct Columns {
  std::int64_t rows, columns, inner, begin;
};
constexpr Columns columns_moved[] = {{1, 1, 1, 0},     {5, 3, 8, 4},       {7, 33, 40, 1},
                                     {6, 64, 192, 64}, {3, 128, 384, 256}, {2, 2600, 5200, 2600}};

std::vector<Case> take_columns_cases(DataType type) {
  std::vector<Case> cases;
  for (const auto& [rows, columns, inner, begin] : columns_moved) {
    const Doubles x = random_in(type, rows * inner, 1);
    Doubles y;
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < columns; ++c) y.push_back(x[at(r * inner + begin + c)]);
    cases.push_back({{.rows = rows, .columns = columns, .inner = inner, .begin = begin},
                     {reads(type, x), writes(type, y, 0.0)}});
  }
  return cases;
}

std::vector<Case> put_columns_cases(DataType type) {
  std::vector<Case> cases;
  for (const auto& [rows, columns, inner, begin] : columns_moved) {
    const Doubles x = random_in(type, rows * columns, 1), before = random_in(type, rows * inner, 2);
    Doubles after = before;
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < columns; ++c) after[at(r * inner + begin + c)] = x[at(r * columns + c)];
    cases.push_back({{.rows = rows, .columns = columns, .inner = inner, .begin = begin},
                     {reads(type, x), updates(type, before, after, 0.0)}});
  }
  return cases;
}

std::vector<Case> sum_squares_cases(DataType) {
  std::vector<Case> cases;
  for (const std::int64_t size : {1, 5, 1000, 300001, 1100003}) {  // the last one: more than one vector a thread
    const Doubles x = random_in(fp32, size, 1);
    double sum = 0.5;
    for (const double number : x) sum += number * number;
    cases.push_back({{.rows = size}, {reads(fp32, x), updates(fp32, {0.5}, {sum}, 1e-6)}});
  }
  return cases;
}

// The variants of a step: the operands that are present, and what it should do to the gradients.
struct StepVariant {
  const char* what;
  bool norm, master, scaled, weight_decay;
  double sum_of_squares;  // of the gradients, without loss scale
  StepScalars scalars;
};
constexpr double infinite = std::numeric_limits<double>::infinity();
const StepVariant step_variants[] = {
    {"plain", false, false, false, false, 0.0, {.step = 1, .learning_rate = 0.01, .epsilon = 1e-3}},
    {"decay",
     false,
     false,
     false,
     true,
     0.0,
     {.step = 3, .learning_rate = 0.01, .epsilon = 1e-3, .weight_decay = 0.1, .momentum = 0.9}},
    {"decay added to the gradient",
     false,
     true,
     false,
     true,
     0.0,
     {.step = 3,
      .learning_rate = 0.01,
      .epsilon = 1e-3,
      .weight_decay = 0.1,
      .decoupled_decay = false,
      .momentum = 0.9}},
    {"clipped",
     true,
     true,
     false,
     true,
     9.0,
     {.step = 1000, .learning_rate = 0.01, .epsilon = 1e-3, .weight_decay = 0.1, .momentum = 0.9, .clip_norm = 2.0}},
    {"not clipped",
     true,
     true,
     false,
     true,
     9.0,
     {.step = 5, .learning_rate = 0.01, .epsilon = 1e-3, .momentum = 0.5, .clip_norm = 4.0}},
    {"scaled",
     true,
     true,
     true,
     true,
     9.0,
     {.step = 5, .learning_rate = 0.01, .epsilon = 1e-3, .weight_decay = 0.1, .momentum = 0.9, .clip_norm = 2.0}},
    {"overflow",
     true,
     true,
     true,
     true,
     infinite,
     {.step = 5, .learning_rate = 0.01, .epsilon = 1e-3, .weight_decay = 0.1, .momentum = 0.9, .clip_norm = 2.0}},
    {"not a number",
     true,
     true,
     true,
     true,
     std::numeric_limits<double>::quiet_NaN(),
     {.step = 5, .learning_rate = 0.01, .epsilon = 1e-3}},
    {"skipped because it is infinite",
     true,
     false,
     false,
     true,
     infinite,
     {.step = 5, .learning_rate = 0.01, .epsilon = 1e-3, .clip_norm = infinite, .skips_not_finite = true}},
    {"skipped because it is not a number",
     true,
     true,
     false,
     true,
     std::numeric_limits<double>::quiet_NaN(),
     {.step = 5, .learning_rate = 0.01, .epsilon = 1e-3, .clip_norm = 2.0, .skips_not_finite = true}},
    {"not skipped, nor clipped by an infinite norm",
     true,
     false,
     false,
     true,
     9.0,
     {.step = 5, .learning_rate = 0.01, .epsilon = 1e-3, .clip_norm = infinite, .skips_not_finite = true}},
};
constexpr double tested_loss_scale = 4096.0, skipped_steps = 2.0;

// Optimizer cases: `step` changes one element's parameter, first and second moment.
using Step = std::function<void(const StepVariant&, double gradient, double step, double& parameter, double& first,
                                double& second)>;

std::vector<Case> step_cases(DataType type, int moments, const Step& step) {
  std::vector<Case> cases;
  for (const std::int64_t size : {1, 3, 37, 1027})
    for (const StepVariant& v : step_variants) {
      // A half type has a master copy. (Without one, its rounding would hide everything else.)
      const bool master = v.master || is_half(type);
      const double scale = v.scaled ? tested_loss_scale : 1.0;
      const double clip = v.norm && v.scalars.clip_norm > 0.0
                              ? std::min(1.0, v.scalars.clip_norm / (std::sqrt(v.sum_of_squares) + 1e-6))
                              : 1.0;
      const bool overflow = (v.scaled || v.scalars.skips_not_finite) && !std::isfinite(v.sum_of_squares);
      const Doubles gradient = random_in(fp32, size, 1, scale), parameter = random_in(fp32, size, 2),
                    first = random_in(fp32, size, 3);
      Doubles second = random_in(fp32, size, 4);
      for (double& number : second) number = std::abs(number);
      Doubles new_parameter = parameter, new_first = first, new_second = second;
      for (std::size_t i = 0; i < parameter.size() && !overflow; ++i)
        step(v, gradient[i] / scale * clip, static_cast<double>(v.scalars.step) - (v.scaled ? skipped_steps : 0.0),
             new_parameter[i], new_first[i], new_second[i]);
      const Doubles low = random_in(type, size, 5);
      Case c{{.rows = size,
              .second = moments == 1,
              .weight_decay = v.weight_decay,
              .norm = v.norm,
              .master = master,
              .scaled = v.scaled},
             {reads(fp32, gradient)},
             v.scalars};
      // A parameter with a master copy is only written.
      c.operands.push_back(updates(type, master ? low : parameter, master && overflow ? low : new_parameter, close));
      if (moments >= 1) c.operands.push_back(updates(fp32, first, new_first, close));
      if (moments == 2) c.operands.push_back(updates(fp32, second, new_second, close));
      if (v.norm) c.operands.push_back(reads(fp32, {v.sum_of_squares * scale * scale}));
      if (v.norm && std::isnan(v.sum_of_squares))
        c.operands.back() = {.type = fp32, .size = 1};  // poison is not a number
      if (master) c.operands.push_back(updates(fp32, parameter, new_parameter, close));
      if (v.scaled) c.operands.push_back(reads(fp32, {tested_loss_scale, 7.0, skipped_steps, 0.0}));
      cases.push_back(c);
    }
  return cases;
}

// torch.optim.AdamW and Adam.
std::vector<Case> adamw_cases(DataType type) {
  return step_cases(type, 2,
                    [](const StepVariant& v, double gradient, double step, double& parameter, double& first,
                       double& second) {
                      const StepScalars& t = v.scalars;
                      const double decay = v.weight_decay ? t.weight_decay : 0.0;
                      if (!t.decoupled_decay) gradient += decay * parameter;
                      if (t.decoupled_decay) parameter -= t.learning_rate * decay * parameter;
                      first = t.beta1 * first + (1 - t.beta1) * gradient;
                      second = t.beta2 * second + (1 - t.beta2) * gradient * gradient;
                      parameter -= t.learning_rate / (1 - std::pow(t.beta1, step)) * first /
                                   (std::sqrt(second) / std::sqrt(1 - std::pow(t.beta2, step)) + t.epsilon);
                    });
}

// The values of codes (tests/planner/graph/dynamic_quantization_test.cpp holds them to the
// published map), and the nearest one in double precision.
double value_of(bool is_signed, int code) {
  return static_cast<double>((is_signed ? signed_values : unsigned_values).of[code]);
}
struct Nearest {
  int code = 0;
  bool is_close_call = false;  // where rounding may decide for the neighbour
};
Nearest nearest_code(bool is_signed, double x) {
  int best = 0, second = 1;
  const auto distance = [&](int code) { return std::abs(value_of(is_signed, code) - x); };
  if (distance(1) < distance(0)) std::swap(best, second);
  for (int code = 2; code < 256; ++code) {
    if (distance(code) < distance(best)) {
      second = std::exchange(best, code);
    } else if (distance(code) < distance(second)) {
      second = code;
    }
  }
  return {best, distance(second) - distance(best) < 2e-5 * std::abs(x)};
}

// AdamW from moments of 8 bits: the new moments in double, of each block the number of the largest
// magnitude, and the nearest codes. Gradients that lead to close calls are changed.
std::vector<Case> adamw_8bit_cases(DataType type) {
  std::vector<Case> cases;
  for (const std::int64_t size : {1, 37, 256, 1027})
    for (const StepVariant& v : step_variants) {
      const StepScalars& t = v.scalars;
      const bool master = v.master || is_half(type);
      const double scale = v.scaled ? tested_loss_scale : 1.0;
      const double clip =
          v.norm && t.clip_norm > 0.0 ? std::min(1.0, t.clip_norm / (std::sqrt(v.sum_of_squares) + 1e-6)) : 1.0;
      const bool overflow = (v.scaled || t.skips_not_finite) && !std::isfinite(v.sum_of_squares);
      const double decay = v.weight_decay ? t.weight_decay : 0.0;
      const double step = static_cast<double>(t.step) - (v.scaled ? skipped_steps : 0.0);
      const std::int64_t blocks = quantization_blocks(size);
      const Doubles parameter = random_in(fp32, size, 2), low = random_in(type, size, 5);
      Doubles gradient = random_in(fp32, size, 1, scale), scales[2] = {random_in(fp32, blocks, 3, 1e-2), {}}, codes[2];
      for (const double each : scales[0]) scales[1].push_back(rounded(fp32, each * each));
      for (int moment : {0, 1})
        for (const double each : random_in(fp32, size, 6 + moment, 128.0))
          codes[moment].push_back(std::floor(each + 128.0));
      Doubles new_parameter, new_scales[2], new_codes[2];
      for (bool again = true; again;) {
        again = false;
        Doubles moments[2];
        new_parameter.clear();
        for (std::size_t i = 0; i < at(size); ++i) {
          const auto before = [&](int moment) {
            return value_of(moment == 0, static_cast<int>(codes[moment][i])) * scales[moment][i / 256];
          };
          double p = parameter[i], g = gradient[i] / scale * clip;
          if (!t.decoupled_decay) g += decay * p;
          if (t.decoupled_decay) p -= t.learning_rate * decay * p;
          moments[0].push_back(t.beta1 * before(0) + (1 - t.beta1) * g);
          moments[1].push_back(t.beta2 * before(1) + (1 - t.beta2) * g * g);
          new_parameter.push_back(p -
                                  t.learning_rate / (1 - std::pow(t.beta1, step)) * moments[0][i] /
                                      (std::sqrt(moments[1][i]) / std::sqrt(1 - std::pow(t.beta2, step)) + t.epsilon));
        }
        for (const int moment : {0, 1}) {
          new_scales[moment].clear();
          new_codes[moment].clear();
          for (std::size_t i = 0; i < at(size); ++i) {
            if (i % 256 == 0) {
              const auto begin = moments[moment].begin() + static_cast<std::ptrdiff_t>(i);
              const auto end = moments[moment].begin() + static_cast<std::ptrdiff_t>(std::min(i + 256, at(size)));
              new_scales[moment].push_back(
                  *std::max_element(begin, end, [](double a, double b) { return std::abs(a) < std::abs(b); }));
            }
            const Nearest found = nearest_code(moment == 0, moments[moment][i] / new_scales[moment].back());
            new_codes[moment].push_back(found.code);
            if (found.is_close_call) gradient[i] = rounded(fp32, gradient[i] * 1.01);
            again |= found.is_close_call;
          }
        }
      }
      Case c{{.rows = size, .weight_decay = v.weight_decay, .norm = v.norm, .master = master, .scaled = v.scaled},
             {reads(fp32, gradient)},
             t};
      const auto updated = [&](DataType of, const Doubles& before, const Doubles& after, double tolerance) {
        c.operands.push_back(updates(of, before, overflow ? before : after, tolerance));
      };
      updated(type, master ? low : parameter, new_parameter, close);
      for (const int moment : {0, 1}) updated(DataType::uint8, codes[moment], new_codes[moment], 0.0);
      for (const int moment : {0, 1}) updated(fp32, scales[moment], new_scales[moment], close);
      if (v.norm) c.operands.push_back(reads(fp32, {v.sum_of_squares * scale * scale}));
      if (v.norm && std::isnan(v.sum_of_squares))
        c.operands.back() = {.type = fp32, .size = 1};  // poison is not a number
      if (master) updated(fp32, parameter, new_parameter, close);
      if (v.scaled) c.operands.push_back(reads(fp32, {tested_loss_scale, 7.0, skipped_steps, 0.0}));
      cases.push_back(c);
    }
  return cases;
}

std::vector<Case> normalize_pixels_cases(DataType type) {
  std::vector<Case> cases;
  for (const Size& size : flat_sizes) {
    Doubles colours, wanted;
    for (std::int64_t i = 0; i < size.rows * size.columns; ++i) colours.push_back(static_cast<double>(i * 37 % 256));
    for (const double colour : colours) wanted.push_back((colour / 255.0 - 0.5) / 0.5);
    cases.push_back(
        {{.rows = size.rows, .columns = size.columns}, {reads(DataType::int32, colours), writes(type, wanted, 2e-7)}});
  }
  return cases;
}

// torch.optim.SGD.
std::vector<Case> sgd_cases(DataType type) {
  std::vector<Case> cases;
  for (const int moments : {0, 1}) {
    const std::vector<Case> more = step_cases(
        type, moments, [&](const StepVariant& v, double gradient, double, double& parameter, double& first, double&) {
          gradient += (v.weight_decay ? v.scalars.weight_decay : 0.0) * parameter;
          first = v.scalars.momentum * first + gradient;
          parameter -= v.scalars.learning_rate * (moments == 1 ? first : gradient);
        });
    cases.insert(cases.end(), more.begin(), more.end());
  }
  return cases;
}

// torch.optim.Muon, before its orthogonalization and behind it.
std::vector<Case> muon_momentum_cases(DataType) {
  std::vector<Case> cases;
  for (const Case& c : step_cases(
           fp32, 1, [](const StepVariant&v, double gradient, double, double&parameter, double&momentum, double&) {
             momentum = v.scalars.momentum * momentum + (1 - v.scalars.momentum) * gradient;
             parameter = v.scalars.momentum * momentum + (1 - v.scalars.momentum) * gradient;  // the direction
           })) {
    if (c.shape.master) continue;
    // The direction takes the gradient's place, which an overflow leaves as it was.
    Case changed = c;
    changed.shape.second = changed.shape.weight_decay = false;
    Operand& direction = changed.operands[1];
    const bool overflow = direction.after == direction.before;
    direction.before = changed.operands[0].before;
    if (overflow) direction.after = direction.before;
    changed.operands.erase(changed.operands.begin());
    cases.push_back(changed);
  }
  return cases;
}
std::vector<Case> muon_cases(DataType type) {
  std::vector<Case> cases;
  for (const std::int64_t size : {1, 3, 37, 1027})
    for (const StepVariant& v : step_variants) {
      const bool master = v.master || is_half(type);
      const double scale = v.scaled ? tested_loss_scale : 1.0;
      const bool overflow = (v.scaled || v.scalars.skips_not_finite) && !std::isfinite(v.sum_of_squares);
      const Doubles direction = random_in(type, size, 1), parameter = random_in(fp32, size, 2),
                    low = random_in(type, size, 5);
      constexpr double factor = 3.0;
      Doubles moved = parameter;
      for (std::size_t i = 0; i < moved.size() && !overflow; ++i)
        moved[i] = parameter[i] * (1 - v.scalars.learning_rate * (v.weight_decay ? v.scalars.weight_decay : 0.0)) -
                   v.scalars.learning_rate * factor * direction[i];
      Case c{{.rows = size,
              .weight_decay = v.weight_decay,
              .norm = v.norm,
              .master = master,
              .scaled = v.scaled,
              .factor = factor},
             {reads(type, direction)},
             v.scalars};
      c.operands.push_back(updates(type, master ? low : parameter, master && overflow ? low : moved, close));
      if (v.norm) c.operands.push_back(reads(fp32, {v.sum_of_squares * scale * scale}));
      if (v.norm && std::isnan(v.sum_of_squares)) c.operands.back() = {.type = fp32, .size = 1};
      if (master) c.operands.push_back(updates(fp32, parameter, moved, close));
      if (v.scaled) c.operands.push_back(reads(fp32, {tested_loss_scale, 7.0, skipped_steps, 0.0}));
      cases.push_back(c);
    }
  return cases;
}
std::vector<Case> normalize_matrix_cases(DataType type) {
  std::vector<Case> cases;
  for (const double norm : {3.0, 0.0})
    for (const std::int64_t columns : {1, 5, 24}) {
      const Doubles x = random_in(fp32, 7 * columns, 1);
      Doubles y;
      for (const double number : x) y.push_back(number / std::max(norm, 1e-7));
      const bool is_too_large = type == DataType::fp16 && norm == 0.0;
      if (!is_too_large)
        cases.push_back(
            {{.rows = 7, .columns = columns}, {reads(fp32, x), reads(fp32, {norm * norm}), writes(type, y, close)}});
    }
  return cases;
}
std::vector<Case> newton_schulz_polynomial_cases(DataType type) {
  std::vector<Case> cases;
  for (const std::int64_t rows : {1, 3, 8, 37}) {
    const Doubles square = random_in(type, rows * rows, 1), fourth = random_in(type, rows * rows, 2);
    Doubles result;
    for (std::int64_t i = 0; i < rows * rows; ++i)
      result.push_back((i % (rows + 1) == 0 ? 3.4445 : 0.0) - 4.7750 * square[at(i)] + 2.0315 * fourth[at(i)]);
    cases.push_back({{.rows = rows, .columns = rows}, {reads(type, square), updates(type, fourth, result, 1e-5)}});
  }
  return cases;
}

std::vector<Case> update_loss_scale_cases(DataType) {
  const auto step = [](double norm, const Doubles& before, const Doubles& after) {
    return Case{
        {},
        {std::isnan(norm) ? Operand{.type = fp32, .size = 1} : reads(fp32, {norm}), updates(fp32, before, after, 0.0)}};
  };
  return {step(1.0, {65536, 0, 0, 0}, {65536, 1, 0, 0}),          step(1.0, {65536, 1998, 3, 0}, {65536, 1999, 3, 0}),
          step(1.0, {65536, 1999, 3, 0}, {131072, 0, 3, 0}),      step(infinite, {65536, 1999, 3, 0}, {32768, 0, 4, 0}),
          step(std::nan(""), {65536, 5, 0, 0}, {32768, 0, 1, 0}), step(1.0, {0x1p127, 1999, 0, 0}, {0x1p127, 0, 0, 0})};
}

// Rows of several sequences in one activation: [positions, batch, columns], of which `moved` from
// `begin` on are taken or put.
struct RowsMoved {
  std::int64_t positions, batch, columns, begin, moved;
  std::int64_t first() const { return begin * batch * columns; }
  std::int64_t last() const { return (begin + moved) * batch * columns; }
  std::int64_t size() const { return positions * batch * columns; }
  OpShape shape(bool accumulate = false) const {
    return {.rows = positions * batch,
            .columns = columns,
            .sequence = moved,
            .batch = batch,
            .begin = begin,
            .accumulate = accumulate};
  }
};
constexpr RowsMoved rows_moved[] = {
    {1, 1, 1, 0, 1}, {5, 2, 3, 1, 2}, {9, 3, 24, 0, 4}, {9, 1, 40, 5, 4}, {3, 2, 8, 0, 3}};

Doubles part_of(const Doubles& numbers, std::int64_t first, std::int64_t last) {
  return {numbers.begin() + first, numbers.begin() + last};
}

std::vector<Case> take_rows_cases(DataType type) {
  std::vector<Case> cases;
  for (const RowsMoved& m : rows_moved) {
    const Doubles x = random_in(type, m.size(), 1);
    cases.push_back({m.shape(), {reads(type, x), writes(type, part_of(x, m.first(), m.last()), 0.0)}});
  }
  return cases;
}

std::vector<Case> take_rows_gradient_cases(DataType type) {
  std::vector<Case> cases;
  for (const RowsMoved& m : rows_moved) {
    const Doubles dy = random_in(type, m.last() - m.first(), 1), before = random_in(type, m.size(), 2);
    Doubles alone(at(m.size())), added = before;
    for (std::int64_t e = 0; e < count(dy); ++e) {
      alone[at(m.first() + e)] = dy[at(e)];
      added[at(m.first() + e)] += dy[at(e)];
    }
    cases.push_back({m.shape(), {reads(type, dy), writes(type, alone, 0.0)}});
    cases.push_back({m.shape(true), {reads(type, dy), updates(type, before, added, close)}});
  }
  return cases;
}

std::vector<Case> put_rows_cases(DataType type) {
  std::vector<Case> cases;
  for (const RowsMoved& m : rows_moved) {
    const Doubles x = random_in(type, m.size(), 1), y = random_in(type, m.last() - m.first(), 2);
    Doubles z = x;
    std::copy(y.begin(), y.end(), z.begin() + m.first());
    cases.push_back({m.shape(), {reads(type, x), reads(type, y), writes(type, z, 0.0)}});
  }
  return cases;
}

std::vector<Case> put_rows_gradient_cases(DataType type) {
  std::vector<Case> cases;
  for (const RowsMoved& m : rows_moved) {
    const Doubles dz = random_in(type, m.size(), 1);
    Doubles dx = dz;
    std::fill(dx.begin() + m.first(), dx.begin() + m.last(), 0.0);
    cases.push_back(
        {m.shape(), {reads(type, dz), writes(type, dx, 0.0), writes(type, part_of(dz, m.first(), m.last()), 0.0)}});
  }
  return cases;
}

// Tables that fill their rows, end within one, or within the first.
struct RowsAppended {
  std::int64_t positions, batch, columns, elements;
  std::int64_t rows() const { return (elements + columns - 1) / columns; }
  OpShape shape() const {
    return {.rows = positions * batch,
            .columns = columns,
            .inner = elements,
            .sequence = rows(),
            .batch = batch,
            .begin = positions};
  }
  // The place of an element of a sample in the appended rows.
  std::size_t place(std::int64_t element, std::int64_t sample) const {
    return at(positions * batch * columns + (element / columns * batch + sample) * columns + element % columns);
  }
};
constexpr RowsAppended rows_appended[] = {{1, 1, 4, 3}, {3, 2, 5, 15}, {2, 3, 24, 50}, {4, 1, 7, 300}};

std::vector<Case> append_rows_cases(DataType type) {
  std::vector<Case> cases;
  for (const RowsAppended& a : rows_appended) {
    const Doubles x = random_in(type, a.positions * a.batch * a.columns, 1), table = random_in(type, a.elements, 2);
    Doubles y = x;
    y.resize(at((a.positions + a.rows()) * a.batch * a.columns));
    for (std::int64_t element = 0; element < a.elements; ++element)
      for (std::int64_t sample = 0; sample < a.batch; ++sample) y[a.place(element, sample)] = table[at(element)];
    cases.push_back({a.shape(), {reads(type, x), reads(type, table), writes(type, y, 0.0)}});
  }
  return cases;
}

std::vector<Case> append_rows_gradient_cases(DataType type) {
  std::vector<Case> cases;
  for (const RowsAppended& a : rows_appended)
    for (const bool frozen : {false, true}) {
      const Doubles dy = random_in(type, (a.positions + a.rows()) * a.batch * a.columns, 1);
      const Doubles before = random_in(fp32, a.elements, 2);
      Doubles after = before;
      for (std::int64_t element = 0; element < a.elements; ++element)
        for (std::int64_t sample = 0; sample < a.batch; ++sample) after[at(element)] += dy[a.place(element, sample)];
      Case c{a.shape(), {reads(type, dy), writes(type, part_of(dy, 0, a.positions * a.batch * a.columns), 0.0)}};
      c.shape.freezes_first = frozen;
      if (!frozen) c.operands.push_back(updates(fp32, before, after, close));
      cases.push_back(c);
    }
  return cases;
}

// Attention with packed keys and values: more keys than queries or as many, with rows of biases for
// some of all heads, on matrix units (halves of 64) and not.
struct Packed {
  std::int64_t sequence, keys, batch, heads, head_dim;
  bool bidirectional = true;
  std::int64_t buckets = 0, most_distance = 0, inner = 0, all_heads = 0, first_head = 0;
  OpShape shape() const {
    return {.rows = sequence * batch,
            .columns = heads * head_dim,
            .inner = inner,
            .sequence = sequence,
            .batch = batch,
            .heads = heads,
            .kv_heads = heads,
            .head_dim = head_dim,
            .all_heads = all_heads,
            .first_head = first_head,
            .keys = keys,
            .buckets = buckets,
            .most_distance = most_distance,
            .bidirectional = bidirectional,
            .second = buckets > 0,
            .score_scale = 0.3};
  }
  std::size_t query(std::int64_t q, std::int64_t b, std::int64_t h) const {
    return at(((q * batch + b) * heads + h) * head_dim);
  }
  std::size_t key(std::int64_t k, std::int64_t b, std::int64_t h) const { return 2 * query(k, b, h); }
  std::size_t statistic(std::int64_t q, std::int64_t b, std::int64_t h) const {
    return at((b * heads + h) * sequence + q);
  }
  std::int64_t rows() const { return buckets == 0 ? 0 : (buckets * all_heads + inner - 1) / inner; }
  std::size_t bias(std::int64_t q, std::int64_t k, std::int64_t b, std::int64_t h) const {
    const std::int64_t element =
        relative_bucket(k - q, buckets, most_distance, bidirectional) * all_heads + first_head + h;
    return at((element / inner * batch + b) * inner + element % inner);
  }
};
constexpr Packed packed_sizes[] = {
    {7, 19, 2, 3, 4},    {70, 70, 1, 2, 16, false, 8, 20, 5, 5, 2},    {130, 130, 1, 2, 64, true, 32, 128, 24, 2, 0},
    {33, 200, 1, 2, 64}, {65, 65, 2, 1, 64, false, 32, 128, 64, 3, 1}, {40, 40, 1, 1, 160, true, 12, 7, 16, 1, 0},
};

std::vector<Case> packed_attention_cases(DataType type, bool gradient) {
  std::vector<Case> cases;
  const double tolerance = (is_half(type) ? 8 * rounding(type) : 0.0) + 2e-5;
  for (const Packed& p : packed_sizes) {
    const std::int64_t n = p.head_dim;
    const Doubles query = random_in(type, p.sequence * p.batch * p.heads * n, 1),
                  keys = random_in(type, p.keys * p.batch * p.heads * 2 * n, 2), dy = random_in(type, count(query), 3),
                  table = random_in(type, p.rows() * p.batch * p.inner, 4);
    Doubles y(query.size()), log_sum_exp(at(p.sequence * p.batch * p.heads));
    const auto product = [&](const Doubles& a, std::size_t i, const Doubles& b, std::size_t j) {
      double sum = 0.0;
      for (std::size_t d = 0; d < at(n); ++d) sum += a[i + d] * b[j + d];
      return sum;
    };
    const auto for_each_row = [&](const auto& body) {
      for (std::int64_t b = 0; b < p.batch; ++b)
        for (std::int64_t h = 0; h < p.heads; ++h)
          for (std::int64_t q = 0; q < p.sequence; ++q) {
            Doubles scores(at(p.bidirectional ? p.keys : q + 1));
            for (std::int64_t k = 0; k < count(scores); ++k)
              scores[at(k)] = 0.3 * product(query, p.query(q, b, h), keys, p.key(k, b, h)) +
                              (p.buckets > 0 ? table[p.bias(q, k, b, h)] : 0.0);
            body(q, b, h, scores);
          }
    };
    for_each_row([&](std::int64_t q, std::int64_t b, std::int64_t h, const Doubles& scores) {
      double total = 0.0;
      for (const double score : scores) total += std::exp(score);
      log_sum_exp[p.statistic(q, b, h)] = std::log(total);
      for (std::int64_t k = 0; k < count(scores); ++k)
        for (std::size_t d = 0; d < at(n); ++d)
          y[p.query(q, b, h) + d] += std::exp(scores[at(k)]) / total * keys[p.key(k, b, h) + at(n) + d];
    });
    std::vector<Operand> operands = {reads(type, query), reads(type, keys)};
    if (p.buckets > 0) operands.push_back(reads(type, table));
    if (!gradient) {
      operands.push_back(writes(type, y, tolerance));
      operands.push_back(writes(fp32, log_sum_exp, 1e-5));
      cases.push_back({p.shape(), std::move(operands)});
      continue;
    }
    y = rounded(type, y);
    log_sum_exp = rounded(fp32, log_sum_exp);
    Doubles dquery(query.size()), dkeys(keys.size()), dtable(table.size());
    for_each_row([&](std::int64_t q, std::int64_t b, std::int64_t h, const Doubles& scores) {
      const std::size_t row = p.query(q, b, h);
      const double weighed = product(dy, row, y, row);
      for (std::int64_t k = 0; k < count(scores); ++k) {
        const std::size_t key = p.key(k, b, h), value = key + at(n);
        const double probability = std::exp(scores[at(k)] - log_sum_exp[p.statistic(q, b, h)]);
        const double ds = probability * (product(dy, row, keys, value) - weighed);
        if (p.buckets > 0) dtable[p.bias(q, k, b, h)] += ds;
        for (std::size_t d = 0; d < at(n); ++d) {
          dquery[row + d] += 0.3 * ds * keys[key + d];
          dkeys[key + d] += 0.3 * ds * query[row + d];
          dkeys[value + d] += probability * dy[row + d];
        }
      }
    });
    operands.insert(operands.begin(), reads(type, dy));
    operands.push_back(reads(type, y));
    operands.push_back(reads(fp32, log_sum_exp));
    operands.push_back(writes(type, dquery, tolerance));
    operands.push_back(writes(type, dkeys, tolerance));
    if (p.buckets > 0) operands.push_back(writes(type, dtable, tolerance));
    cases.push_back({p.shape(), std::move(operands)});
  }
  return cases;
}
std::vector<Case> packed_forward_cases(DataType type) {
  return packed_attention_cases(type, false);
}
std::vector<Case> packed_gradient_cases(DataType type) {
  return packed_attention_cases(type, true);
}

// Every op kind has its row: cases, or the place where it is tested.
struct TestRow {
  OpKind kind;
  std::vector<Case> (*cases)(DataType) = nullptr;
  const char* elsewhere = nullptr;
};
constexpr TestRow test_rows[] = {
    {OpKind::embedding, embedding_cases},
    {OpKind::normalize_pixels, normalize_pixels_cases},
    {OpKind::add_position, add_position_cases},
    {OpKind::layer_norm, layer_norm_cases},
    {OpKind::rms_norm, rms_norm_cases},
    {OpKind::head_norm, head_norm_cases},
    {OpKind::query_key_squares, query_key_squares_cases},
    {OpKind::query_key_norm, query_key_norm_cases},
    {OpKind::linear, nullptr, "matrix_products_test.cpp"},
    {OpKind::rotary, rotary_cases},
    {OpKind::attention, nullptr, "attention_test.cpp"},
    {OpKind::packed_attention, packed_forward_cases},
    {OpKind::activation, activation_cases},
    {OpKind::gate, gate_cases},
    {OpKind::scale, scale_cases},
    {OpKind::softcap, softcap_cases},
    {OpKind::add, add_cases},
    {OpKind::cross_entropy_max, cross_entropy_max_cases},
    {OpKind::cross_entropy_sums, cross_entropy_sums_cases},
    {OpKind::cross_entropy_loss, cross_entropy_loss_cases},
    {OpKind::add_layer_norm, add_layer_norm_cases},
    {OpKind::add_rms_norm, add_rms_norm_cases},
    {OpKind::linear_gelu, nullptr, "matrix_products_test.cpp"},
    {OpKind::embedding_gradient, embedding_gradient_cases},
    {OpKind::add_position_gradient, add_position_gradient_cases},
    {OpKind::layer_norm_gradient, layer_norm_gradient_cases},
    {OpKind::rms_norm_gradient, rms_norm_gradient_cases},
    {OpKind::head_norm_gradient, head_norm_gradient_cases},
    {OpKind::query_key_squares_gradient, query_key_squares_gradient_cases},
    {OpKind::query_key_norm_gradient, query_key_norm_gradient_cases},
    {OpKind::linear_input_gradient, nullptr, "matrix_products_test.cpp"},
    {OpKind::linear_weight_gradient, nullptr, "matrix_products_test.cpp"},
    {OpKind::rotary_gradient, rotary_gradient_cases},
    {OpKind::attention_gradient, nullptr, "attention_test.cpp"},
    {OpKind::packed_attention_gradient, packed_gradient_cases},
    {OpKind::activation_gradient, activation_gradient_cases},
    {OpKind::gate_gradient, gate_gradient_cases},
    {OpKind::scale_gradient, scale_cases},
    {OpKind::softcap_gradient, softcap_gradient_cases},
    {OpKind::bias_gradient, bias_gradient_cases},
    {OpKind::cross_entropy_gradient, cross_entropy_gradient_cases},
    {OpKind::linear_input_gradient_gelu, nullptr, "matrix_products_test.cpp"},
    {OpKind::accumulate, accumulate_cases},
    {OpKind::fill_zero, fill_zero_cases},
    {OpKind::copy, copy_cases},
    {OpKind::transpose_blocks, transpose_blocks_cases},
    {OpKind::take_columns, take_columns_cases},
    {OpKind::put_columns, put_columns_cases},
    {OpKind::take_rows, take_rows_cases},
    {OpKind::put_rows, put_rows_cases},
    {OpKind::append_rows, append_rows_cases},
    {OpKind::take_rows_gradient, take_rows_gradient_cases},
    {OpKind::put_rows_gradient, put_rows_gradient_cases},
    {OpKind::append_rows_gradient, append_rows_gradient_cases},
    {OpKind::load_tokens, nullptr, "the data loader's"},
    {OpKind::load_targets, nullptr, "the data loader's"},
    {OpKind::sum_squares, sum_squares_cases},
    {OpKind::adamw, adamw_cases},
    {OpKind::adamw_8bit, adamw_8bit_cases},
    {OpKind::sgd, sgd_cases},
    {OpKind::muon_momentum, muon_momentum_cases},
    {OpKind::normalize_matrix, normalize_matrix_cases},
    {OpKind::newton_schulz_polynomial, newton_schulz_polynomial_cases},
    {OpKind::muon, muon_cases},
    {OpKind::update_loss_scale, update_loss_scale_cases},
};

void check_kernels(Gpu& gpu, DataType type) {
  const std::unique_ptr<Backend> backend = gpu.make_backend(0, {});
  for (const OpRow& row : op_rows()) {
    if (is_foreign(row.kind)) continue;  // no backend has it
    const auto* found = std::find_if(std::begin(test_rows), std::end(test_rows),
                                     [&](const TestRow& test) { return test.kind == row.kind; });
    if (found == std::end(test_rows)) {
      FAIL_CHECK(row.name, " has no test of its CUDA kernel");
    } else if (found->cases != nullptr) {
      for (const Case& c : found->cases(type)) check_case(*backend, row, type, c);
    }
  }
}

}  // namespace

TEST_CASE("every op kind's kernel computes its formula in fp32") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  check_kernels(*gpu, DataType::fp32);
}

TEST_CASE("every op kind's kernel computes its formula in bf16") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  check_kernels(*gpu, DataType::bf16);
}

TEST_CASE("every op kind's kernel computes its formula in fp16") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  check_kernels(*gpu, DataType::fp16);
}

TEST_CASE("to every kernel but matrix products tf32 is fp32") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const std::unique_ptr<Backend> backend = gpu->make_backend(0, {});
  for (const TestRow& test : test_rows)
    if (test.cases != nullptr)
      check_case(*backend, row_of(test.kind), DataType::tf32, test.cases(DataType::tf32).at(1));
}

TEST_CASE("a norm fused with the sum before it gives the bits of the two ops on a GPU") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const std::unique_ptr<Backend> backend = gpu->make_backend(0, {});
  for (const DataType type : {DataType::fp32, DataType::bf16, DataType::fp16})
    for (const bool has_mean : {false, true})
      for (const Size& size : norm_sizes) {
        const std::int64_t rows = size.rows, columns = size.columns;
        INFO(std::string(name(type)), " ", rows, " x ", columns);
        const OpShape shape{.rows = rows, .columns = columns, .bias = true, .second = true, .epsilon = norm_epsilon};
        const DeviceArray a(*backend, type, norm_input(type, rows * columns)),
            b(*backend, type, random_numbers(rows * columns, 2)), bias(*backend, type, random_numbers(columns, 3)),
            gamma(*backend, type, random_numbers(columns, 4)), beta(*backend, type, random_numbers(columns, 5));
        const DeviceArray sums[] = {{*backend, type, rows * columns}, {*backend, type, rows * columns}};
        const DeviceArray results[] = {{*backend, type, rows * columns}, {*backend, type, rows * columns}};
        const DeviceArray means[] = {{*backend, fp32, rows}, {*backend, fp32, rows}};
        const DeviceArray rstds[] = {{*backend, fp32, rows}, {*backend, fp32, rows}};
        const auto run = [&](OpKind kind, std::vector<void*> operands) {
          backend->run(0, {.kind = kind, .shape = shape, .type = type, .operands = operands});
        };
        run(OpKind::add, {a.data(), b.data(), bias.data(), sums[0].data()});
        if (has_mean) {
          run(OpKind::layer_norm,
              {sums[0].data(), gamma.data(), beta.data(), results[0].data(), means[0].data(), rstds[0].data()});
          run(OpKind::add_layer_norm, {a.data(), b.data(), bias.data(), gamma.data(), beta.data(), sums[1].data(),
                                       results[1].data(), means[1].data(), rstds[1].data()});
        } else {
          run(OpKind::rms_norm, {sums[0].data(), gamma.data(), results[0].data(), rstds[0].data()});
          run(OpKind::add_rms_norm,
              {a.data(), b.data(), bias.data(), gamma.data(), sums[1].data(), results[1].data(), rstds[1].data()});
        }
        CHECK(sums[0].bits() == sums[1].bits());
        CHECK(results[0].bits() == results[1].bits());
        CHECK(means[0].bits() == means[1].bits());
        CHECK(rstds[0].bits() == rstds[1].bits());
      }
}

// A ZeRO shard may begin anywhere.
TEST_CASE("an optimizer's element is updated to the same bits wherever it stands on a GPU") {
  const auto gpu = gpu_or_skip();
  if (gpu == nullptr) return;
  const std::unique_ptr<Backend> backend = gpu->make_backend(0, {});
  const std::int64_t size = 61;
  backend->set_scalars({.step = 3, .learning_rate = 0.01, .weight_decay = 0.1, .momentum = 0.9});
  for (const DataType type : {DataType::fp32, DataType::bf16, DataType::fp16})
    for (const OpKind kind : {OpKind::adamw, OpKind::sgd}) {
      Bits whole;
      for (const std::int64_t shift : {0, 1, 2, 3}) {
        INFO(row_of(kind).name, " in ", std::string(name(type)), ", shifted by ", shift);
        const DeviceArray gradient(*backend, fp32, random_numbers(size, 1), shift), low(*backend, type, size, 0),
            first(*backend, fp32, random_numbers(size, 2), shift),
            second(*backend, fp32, Doubles(at(size), 0.25), shift),
            master(*backend, fp32, random_numbers(size, 3), shift == 3 ? 1 : shift);
        // In two calls.
        for (const auto& part :
             {std::pair{0, static_cast<int>(7 * shift)}, {static_cast<int>(7 * shift), static_cast<int>(size)}}) {
          const int begin = part.first;
          const OpShape shape{
              .rows = part.second - begin, .second = kind == OpKind::sgd, .weight_decay = true, .master = true};
          const auto from = [&](const DeviceArray& array) -> void* {
            return static_cast<std::byte*>(array.data()) + begin * size_of(array.type());
          };
          std::vector<void*> operands = {from(gradient), from(low), from(first)};
          if (kind == OpKind::adamw) operands.push_back(from(second));
          operands.push_back(from(master));
          backend->run(0, {.kind = kind, .shape = shape, .type = type, .operands = operands});
        }
        const Bits bits = {low.bits(), first.bits(), second.bits(), master.bits()};
        if (whole.empty()) whole = bits;
        CHECK(bits == whole);
      }
    }
}

}  // namespace parplan
