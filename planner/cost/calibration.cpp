#include "planner/cost/calibration.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <tuple>

#include <Eigen/Dense>
#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/cost/kernel_time.h"
#include "planner/cost/tiling.h"

namespace parplan {
namespace {

constexpr std::size_t fewest_rows = 3;

// A row as a linear equation: coefficients * unknowns = seconds.
struct Equation {
  std::array<double, 3> coefficients{};
  double seconds = 0.0;   // of the row, less what is already known of it
  double measured = 0.0;  // of the row
};

// The least sum of squared relative errors without negative unknowns: the best over all sets of
// unknowns that may differ from 0. There are `columns` unknowns.
std::array<double, 3> least_squares(const std::vector<Equation>& equations, int columns,
                                    const std::vector<double>& weights) {
  std::array<double, 3> best{};
  std::optional<double> least;
  for (int used = 1; used < 1 << columns; ++used) {
    std::vector<int> unknowns;
    for (int c = 0; c < columns; ++c)
      if ((used >> c & 1) != 0) unknowns.push_back(c);
    const Eigen::Index height = static_cast<Eigen::Index>(equations.size());
    Eigen::MatrixXd a(height, static_cast<Eigen::Index>(unknowns.size()));
    Eigen::VectorXd b(height);
    for (Eigen::Index r = 0; r < height; ++r) {
      const Equation& equation = equations[r];
      const double weight = weights[r] / equation.measured;
      for (std::size_t u = 0; u < unknowns.size(); ++u)
        a(r, static_cast<Eigen::Index>(u)) = weight * equation.coefficients[unknowns[u]];
      b(r) = weight * equation.seconds;
    }
    // Columns are scaled to size 1: seconds per launch stand beside seconds per operation.
    const Eigen::VectorXd sizes = a.colwise().norm().cwiseMax(1e-300);
    const Eigen::VectorXd x =
        (a * sizes.cwiseInverse().asDiagonal()).colPivHouseholderQr().solve(b).cwiseQuotient(sizes);
    if (!x.allFinite() || (x.array() < 0.0).any()) continue;
    const double residual = (a * x - b).squaredNorm();
    if (least && residual >= *least) continue;
    least = residual;
    best = {};
    for (std::size_t u = 0; u < unknowns.size(); ++u) best[unknowns[u]] = x(static_cast<Eigen::Index>(u));
  }
  return best;
}

// The same, with rows far from the fit weighted less.
std::array<double, 3> robust_least_squares(const std::vector<Equation>& equations, int columns) {
  constexpr int rounds = 20;
  constexpr double near = 0.01;  // relative errors below this count as none
  std::vector<double> weights(equations.size(), 1.0);
  std::array<double, 3> x{};
  for (int round = 0; round < rounds; ++round) {
    const std::array<double, 3> last = x;
    x = least_squares(equations, columns, weights);
    if (x == last) break;
    for (std::size_t r = 0; r < equations.size(); ++r) {
      double found = 0.0;
      for (int c = 0; c < columns; ++c) found += equations[r].coefficients[c] * x[c];
      const double error = std::abs(found - equations[r].seconds) / equations[r].measured;
      weights[r] = 1.0 / std::sqrt(std::max(error, near));
    }
  }
  return x;
}

using FitKey = std::tuple<OpKind, DataType, std::int64_t>;
FitKey key_of(const KernelMeasurement& row) {
  return {row.kind, row.type,
          row_of(row.kind).cost == CostClass::attention ? row.shape.head_dim : 0};
}
OpWork work_of(const KernelMeasurement& row) { return row_of(row.kind).work(row.shape, row.type); }

// The fit of a memory-bound kind. Nothing where its rows have no slope.
std::optional<KernelFit> fit_moving(const std::vector<KernelMeasurement>& rows) {
  std::vector<Equation> equations;
  for (const KernelMeasurement& row : rows)
    equations.push_back({.coefficients = {1.0, static_cast<double>(work_of(row).bytes.count), 0.0},
                         .seconds = row.time.value,
                         .measured = row.time.value});
  const std::array<double, 3> x = robust_least_squares(equations, 2);
  const Equation& largest =
      *std::ranges::max_element(equations, {}, [](const Equation& equation) { return equation.coefficients[1]; });
  constexpr double visible = 0.01;  // of the largest row's time
  if (x[1] * largest.coefficients[1] < visible * largest.measured) return std::nullopt;
  KernelFit fit;
  fit.floor = Seconds(x[0]);
  fit.memory = BytesPerSecond(1.0 / x[1]);
  return fit;
}

struct ArithmeticRow {
  double flops = 0.0;
  double starts = 0.0;
  Bytes written;  // after the arithmetic
};

// The fit of matrix products and attention.
KernelFit fit_arithmetic(const std::vector<KernelMeasurement>& rows, const DeviceKind& device, BytesPerSecond memory) {
  constexpr int rounds = 30;
  ProductRates rates;
  rates.memory = memory;
  rates.multiprocessors = device.multiprocessors;
  rates.hides_results = hides_results(device);
  for (const KernelMeasurement& row : rows) rates.rate = std::max(rates.rate, work_of(row).flops / row.time);
  // Noise must not appear as a rate that nothing comes near and only products far larger than the
  // measured ones would reach.
  constexpr double beyond_the_best = 2.0;
  FlopsPerSecond most = rates.rate * beyond_the_best;
  if (is_accelerator(device.backend) && peak(device, rows.front().type).value > 0.0)
    most = std::min(most, peak(device, rows.front().type));
  const auto arithmetic_of = [&](const KernelMeasurement& row) -> ArithmeticRow {
    if (!is_product(row.kind)) {
      const AttentionWork work = attention_work(row.kind, row.shape, row.type, device.backend);
      return {.flops = work.flops, .starts = work.starts, .written = {}};
    }
    const ProductWork work = best_tiling(product_of(row.kind, row.shape, row.type), rates);
    return {.flops = work.flops, .starts = work.starts, .written = work.bytes};
  };
  Seconds floor;
  for (int round = 0; round < rounds; ++round) {
    std::vector<Equation> equations;
    std::vector<Equation> bound_by_memory;
    for (const KernelMeasurement& row : rows) {
      const ArithmeticRow work = arithmetic_of(row);
      const Seconds written = work.written / memory;
      const Equation equation{.coefficients = {1.0, work.flops, work.starts},
                              .seconds = (row.time - written).value,
                              .measured = row.time.value};
      const Seconds computing = Seconds((work.flops + work.starts * rates.half_length) / rates.rate.value) + written;
      (work_of(row).bytes / memory > computing ? bound_by_memory : equations).push_back(equation);
    }
    if (equations.size() < fewest_rows)
      equations.insert(equations.end(), bound_by_memory.begin(), bound_by_memory.end());
    std::array<double, 3> x = robust_least_squares(equations, 3);
    if (x[1] < 1.0 / most.value) {  // the rate is held at its limit
      for (Equation& equation : equations) {
        equation.seconds -= equation.coefficients[1] / most.value;
        equation.coefficients = {equation.coefficients[0], equation.coefficients[2], 0.0};
      }
      const std::array<double, 3> others = robust_least_squares(equations, 2);
      x = {others[0], 1.0 / most.value, others[1]};
    }
    ProductRates next = rates;
    next.rate = FlopsPerSecond(1.0 / x[1]);
    next.half_length = x[2] / x[1];
    const bool settled =
        std::abs(next.rate / rates.rate - 1.0) < 1e-9 && std::abs(next.half_length - rates.half_length) < 1e-6;
    floor = Seconds(x[0]);
    rates = next;
    if (settled) break;
  }
  KernelFit fit;
  fit.floor = floor;
  fit.rate = rates.rate;
  fit.half_length = rates.half_length;
  fit.memory = memory;
  return fit;
}

// The median rate of streaming kernels; without any, the best of the others; without any of these,
// the device's own.
BytesPerSecond streaming_rate(const std::vector<KernelFit>& fits, const DeviceKind& device) {
  std::vector<BytesPerSecond> streaming;
  BytesPerSecond best;
  for (const KernelFit& fit : fits) {
    best = std::max(best, fit.memory);
    if (row_of(fit.kind).cost == CostClass::streaming) streaming.push_back(fit.memory);
  }
  if (!streaming.empty()) {
    std::sort(streaming.begin(), streaming.end());
    return streaming[streaming.size() / 2];
  }
  return best.value > 0.0 ? best : device.rates.front().memory;
}

// Three significant digits, the accuracy of measurements; the written value is the used one.
double rounded(double value) { return std::stod(fmt::format("{:.3g}", value)); }

}  // namespace

std::vector<KernelFit> fit_kernels(std::span<const KernelMeasurement> rows, const DeviceKind& device) {
  std::map<FitKey, std::vector<KernelMeasurement>> groups;
  for (const KernelMeasurement& row : rows) {
    PARPLAN_ASSERT(row.time.value > 0.0, fmt::format("{} took {} s", name(row.kind), row.time.value));
    groups[key_of(row)].push_back(row);
  }
  for (auto& [key, group] : groups)
    std::sort(group.begin(), group.end(), [](const KernelMeasurement& a, const KernelMeasurement& b) {
      const auto sizes = [](const KernelMeasurement& row) {
        const OpShape& s = row.shape;
        return std::tuple(s.rows, s.columns, s.inner, s.sequence, s.batch, s.heads, s.kv_heads, row.time.value);
      };
      return sizes(a) < sizes(b);
    });

  std::map<FitKey, KernelFit> found;
  std::vector<KernelFit> moving;
  for (const bool matrix : {false, true}) {
    const BytesPerSecond memory = matrix ? streaming_rate(moving, device) : BytesPerSecond(0.0);
    for (const auto& [key, group] : groups) {
      if (group.size() < fewest_rows || work_of(group.front()).matrix != matrix) continue;
      std::optional<KernelFit> fit = matrix ? fit_arithmetic(group, device, memory) : fit_moving(group);
      if (!fit) continue;
      std::tie(fit->kind, fit->type, fit->head_dim) = key;
      fit->floor = Seconds(rounded(fit->floor.value));
      fit->rate = FlopsPerSecond(rounded(fit->rate.value));
      if (matrix && is_accelerator(device.backend) && peak(device, fit->type).value > 0.0)
        fit->rate = std::min(fit->rate, peak(device, fit->type));  // rounded up, it may be higher
      fit->half_length = rounded(fit->half_length);
      fit->memory = BytesPerSecond(rounded(fit->memory.value));
      if (!matrix) moving.push_back(*fit);
      found.emplace(key, *fit);
    }
  }

  // The error of a fit is that of what plans use: kernel_time.
  DeviceKind with_fits = device;
  with_fits.measured = MeasuredKernels{};
  for (const auto& [key, fit] : found) with_fits.measured->fits.push_back(fit);
  std::vector<KernelFit> result;
  for (auto& [key, fit] : found) {
    const std::vector<KernelMeasurement>& group = groups.at(key);
    double errors = 0.0;
    for (const KernelMeasurement& row : group)
      errors +=
          std::abs(kernel_time(row.kind, row.shape, row.type, with_fits, with_fits.rates.front()) / row.time - 1.0);
    fit.rows = static_cast<int>(group.size());
    fit.error = rounded(errors / static_cast<double>(group.size()));
    result.push_back(fit);
  }
  return result;
}

DeviceRates fitted_rates(const MeasuredKernels& measured, DeviceRates rates) {
  DeviceKind none;
  none.rates = {rates};
  std::vector<KernelFit> moving;
  struct Mean {
    double seconds_per_flop = 0.0;  // summed
    int fits = 0;
    void put_into(FlopsPerSecond& rate, Origin& origin) const {
      if (fits == 0) return;
      rate = FlopsPerSecond(fits / seconds_per_flop);
      origin = Origin::interpolated;
    }
  };
  Mean fp32, half, tf32;
  for (const KernelFit& fit : measured.fits) {
    if (fit.rate.value <= 0.0) moving.push_back(fit);
    // Products in fp8 are timed with the casts of their factors, which plans count apart.
    if (!is_product(fit.kind) || fit.type == DataType::fp8) continue;
    Mean& mean = is_half(fit.type) ? half : fit.type == DataType::tf32 ? tf32 : fp32;
    mean.seconds_per_flop += 1.0 / fit.rate.value;
    ++mean.fits;
  }
  rates.memory = streaming_rate(moving, none);
  if (!moving.empty()) rates.origins[Rate::memory] = Origin::interpolated;
  fp32.put_into(rates.matrix_fp32, rates.origins[Rate::matrix_fp32]);
  half.put_into(rates.matrix_half, rates.origins[Rate::matrix_half]);
  tf32.put_into(rates.matrix_tf32, rates.origins[Rate::matrix_tf32]);
  for (const OptionalRate& one : optional_rates())
    rates.*one.member = std::min(rates.*one.member, rates.*one.reached);
  rates.sustained_memory = std::min(rates.sustained_memory, rates.memory);
  return rates;
}

}  // namespace parplan
