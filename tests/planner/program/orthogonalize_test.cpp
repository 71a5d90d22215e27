// The kernels by which Muon orthogonalizes a matrix, run on a CPU, against matrices whose singular
// values and vectors are known.
#include "planner/program/orthogonalize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include "planner/graph/newton_schulz.h"
#include "runtime/device/cpu/cpu_backend.h"

using namespace parplan;

namespace {

using Matrix = std::vector<double>;  // row by row

// I - 2 v v^T / |v|^2, which is orthogonal.
Matrix reflection(std::int64_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Matrix v(static_cast<std::size_t>(size)), result(static_cast<std::size_t>(size * size));
  double squares = 0.0;
  for (double& number : v) {
    number = normal(random);
    squares += number * number;
  }
  for (std::size_t i = 0; i < v.size(); ++i)
    for (std::size_t j = 0; j < v.size(); ++j)
      result[i * v.size() + j] = (i == j ? 1.0 : 0.0) - 2.0 * v[i] * v[j] / squares;
  return result;
}

// U diag(values) V^T with such U and V.
Matrix with_singular_values(std::int64_t rows, std::int64_t columns, const std::vector<double>& values) {
  const Matrix u = reflection(rows, 1), v = reflection(columns, 2);
  Matrix result(static_cast<std::size_t>(rows * columns));
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < columns; ++j)
      for (std::size_t k = 0; k < values.size(); ++k)
        result[static_cast<std::size_t>(i * columns + j)] +=
            u[static_cast<std::size_t>(i * rows) + k] * values[k] * v[static_cast<std::size_t>(j * columns) + k];
  return result;
}

// What the iteration makes of a singular value of a matrix with norm 1.
double iterated(double s) {
  for (int step = 0; step < 5; ++step) s = 3.4445 * s - 4.7750 * s * s * s + 2.0315 * s * s * s * s * s;
  return s;
}

BucketMatrix whole(std::int64_t rows, std::int64_t columns) {
  BucketMatrix matrix{.part = {}, .rows = rows, .columns = columns, .shards = 1};
  matrix.part.rows = rows;
  matrix.part.columns = columns;
  return matrix;
}

std::vector<float> cut(const Matrix& of, const BucketMatrix& matrix) {
  std::vector<float> part;
  for (std::int64_t i = 0; i < matrix.part.rows; ++i)
    for (std::int64_t j = 0; j < matrix.part.columns; ++j)
      part.push_back(static_cast<float>(
          of[static_cast<std::size_t>((matrix.part.row_begin + i) * matrix.columns + matrix.part.column_begin + j)]));
  return part;
}

struct alignas(64) Line {
  float numbers[16];
};

// Runs the instructions on the parts of all ranks; the direction of each.
std::vector<std::vector<float>> directions(const std::vector<BucketMatrix>& parts, const Matrix& of) {
  const std::unique_ptr<Backend> backend = make_cpu_backend();
  std::vector<std::vector<float>> gradients, result;
  for (const BucketMatrix& part : parts) gradients.push_back(cut(of, part));
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    const Orthogonalization work = orthogonalize(parts[rank], DataType::fp32, BackendKind::cpu);
    // What no kernel has written is no number.
    Line unwritten;
    std::ranges::fill(unwritten.numbers, std::nanf(""));
    std::vector<Line> lines(static_cast<std::size_t>(work.scratch_bytes) / sizeof(Line) + 1, unwritten);
    float* const scratch = lines.front().numbers;
    const auto at = [&](const MatrixOperand& operand) {
      const bool in_gradients = operand.place == MatrixOperand::Place::gradients;
      if (in_gradients)
        CHECK(operand.offset + operand.bytes <= static_cast<std::int64_t>(4 * gradients[rank].size()));
      else
        CHECK(operand.offset + operand.bytes <= work.scratch_bytes);
      return reinterpret_cast<char*>(in_gradients ? gradients[rank].data() : scratch) + operand.offset;
    };
    for (const MatrixInstruction& one : work.instructions) {
      std::vector<void*> operands;
      for (const MatrixOperand& operand : one.operands) operands.push_back(at(operand));
      if (one.instruction.kind == InstructionKind::kernel) {
        backend->run(0, {.kind = one.instruction.op, .shape = one.instruction.shape, .operands = operands});
        continue;
      }
      REQUIRE(one.instruction.kind == InstructionKind::all_gather);
      char* to = static_cast<char*>(operands.back());
      for (const std::vector<float>& part : gradients) {
        std::memcpy(to, part.data(), part.size() * sizeof(float));
        to += part.size() * sizeof(float);
      }
    }
    const float* direction = scratch + work.direction / 4;
    result.emplace_back(direction, direction + gradients[rank].size());
  }
  return result;
}

double distance(const std::vector<float>& found, const Matrix& wanted) {
  double squares = 0.0;
  for (std::size_t i = 0; i < wanted.size(); ++i) squares += std::pow(static_cast<double>(found[i]) - wanted[i], 2);
  return std::sqrt(squares);
}

}  // namespace

TEST_CASE("singular values become what five steps of the polynomial make of them, and vectors stay") {
  struct Size {
    std::int64_t rows, columns;
  };
  for (const auto [rows, columns] : {Size{1, 1}, Size{5, 17}, Size{17, 5}, Size{24, 24}, Size{64, 48}}) {
    CAPTURE(rows);
    CAPTURE(columns);
    std::vector<double> values, becomes;
    double squares = 0.0;
    for (std::int64_t k = 0; k < std::min(rows, columns); ++k) {
      values.push_back(3.0 / static_cast<double>(k + 1));
      squares += values.back() * values.back();
    }
    for (const double value : values) {
      becomes.push_back(iterated(value / std::sqrt(squares)));
      // Jordan et al.: about 0.7 to 1.2.
      CHECK(becomes.back() > 0.65);
      CHECK(becomes.back() < 1.25);
    }
    const Matrix wanted = with_singular_values(rows, columns, becomes);
    const auto found = directions({whole(rows, columns)}, with_singular_values(rows, columns, values));
    CHECK(distance(found.front(), wanted) < 2e-4 * std::sqrt(static_cast<double>(values.size())));
  }
}

TEST_CASE("nothing goes nowhere") {
  const auto found = directions({whole(6, 9)}, Matrix(54, 0.0));
  CHECK(found.front() == std::vector<float>(54, 0.0f));
}

TEST_CASE("ranks that hold rows or columns of a matrix find their part of its direction, to the bit") {
  for (const bool tall : {false, true})
    for (const bool by_rows : {false, true}) {
      CAPTURE(tall);
      CAPTURE(by_rows);
      const std::int64_t rows = tall ? 24 : 8, columns = tall ? 8 : 24;
      const Matrix matrix = with_singular_values(rows, columns, {5.0, 4.0, 3.0, 2.0, 1.0, 0.5, 0.3, 0.1});
      std::vector<BucketMatrix> parts(4, whole(rows, columns));
      for (std::size_t rank = 0; rank < 4; ++rank) {
        BucketMatrix& part = parts[rank];
        part.shards = 4;
        (by_rows ? part.part.rows : part.part.columns) /= 4;
        (by_rows ? part.part.row_begin : part.part.column_begin) =
            static_cast<std::int64_t>(rank) * (by_rows ? part.part.rows : part.part.columns);
      }
      const std::vector<float> all = directions({whole(rows, columns)}, matrix).front();
      const Matrix all_directions(all.begin(), all.end());
      const auto found = directions(parts, matrix);
      for (std::size_t rank = 0; rank < 4; ++rank) CHECK(found[rank] == cut(all_directions, parts[rank]));
    }
}

TEST_CASE("products are counted as the formulas have them") {
  double flops = 0.0;
  for (const MatrixInstruction& one : orthogonalize(whole(300, 100), DataType::bf16, BackendKind::cuda).instructions)
    if (row_of(one.instruction.op).cost == CostClass::product)
      flops += row_of(one.instruction.op).work(one.instruction.shape, one.instruction.type).flops.value;
  // Five times 2 m m n, 2 m m m and 2 m m n, with m = 100 and n = 300.
  CHECK(flops == doctest::Approx(5.0 * (2.0 * 3e6 + 2.0 * 1e6 + 2.0 * 3e6)));
  CHECK(muon_factor(300, 100) == doctest::Approx(0.2 * std::sqrt(300.0)));
}
