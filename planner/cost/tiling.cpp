#include "planner/cost/tiling.h"

#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

struct Tile {
  std::int64_t m = 0;
  std::int64_t n = 0;
  // The share of the rate that it reaches where loading binds.
  constexpr double reuse() const {
    constexpr double enough = 128.0 * 128.0 / (128.0 + 128.0);
    return std::min(1.0, static_cast<double>(m * n) / static_cast<double>(m + n) / enough);
  }
};
constexpr Tile tiles[] = {{256, 128}, {128, 256}, {128, 128}, {128, 64}, {64, 128}, {64, 64}};
constexpr std::int64_t splits[] = {1, 2, 4, 8, 16, 32};

Bytes share_of(Bytes bytes, double share) {
  return Bytes(static_cast<std::int64_t>(static_cast<double>(bytes.count) * share));
}

}  // namespace

bool is_product(OpKind kind) {
  return row_of(kind).cost == CostClass::product;
}

Product product_of(OpKind kind, const OpShape& shape, DataType type) {
  const OpRow& row = row_of(kind);
  PARPLAN_ASSERT(row.product != nullptr, fmt::format("{} is no matrix product", row.name));
  return row.product(shape, type);
}

ProductWork best_tiling(const Product& product, const ProductRates& rates) {
  const double m = static_cast<double>(product.m);
  const double n = static_cast<double>(product.n);
  const double k = static_cast<double>(product.k);
  if (rates.multiprocessors == 0)
    return {.flops = 2.0 * m * n * k, .starts = 2.0 * (m * k + k * n + m * n), .bytes = {}, .hidden = {}};
  ProductWork best;
  Seconds least(std::numeric_limits<double>::infinity());
  for (const Tile& tile : tiles) {
    const std::int64_t whole = ceil_div(product.m, tile.m) * ceil_div(product.n, tile.n);
    const double of_tile = static_cast<double>(tile.m * tile.n) / tile.reuse();
    const double of_wave = static_cast<double>(rates.multiprocessors * tile.m * tile.n) / (m * n);
    for (const std::int64_t parts : splits) {
      const Bytes partial = parts > 1 ? Bytes(8 * product.m * product.n * parts) : Bytes(0);
      const bool hides = rates.hides_results && parts == 1;
      const Bytes last = hides && of_wave < 1.0 ? share_of(product.result, of_wave) : product.result;
      // No wave has an empty place in it.
      const ProductWork full{.flops = 2.0 * static_cast<double>(whole) * of_tile * k,
                             .starts = 0.0,
                             .bytes = last + partial,
                             .hidden = hides ? product.result : Bytes(0)};
      if (time_of(full, rates) * (1 - 1e-9) >= least) continue;
      const std::int64_t places = ceil_div(whole * parts, rates.multiprocessors) * rates.multiprocessors;
      ProductWork work = full;
      work.starts = 2.0 * static_cast<double>(places) * static_cast<double>(tile.m * tile.n) / tile.reuse();
      work.flops = work.starts * static_cast<double>(ceil_div(product.k, parts));
      if (const Seconds time = time_of(work, rates); time < least) {
        least = time;
        best = work;
      }
    }
  }
  return best;
}

}  // namespace parplan
