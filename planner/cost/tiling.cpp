#include "planner/cost/tiling.h"

#include <algorithm>
#include <optional>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

struct Tile {
  std::int64_t m = 0;
  std::int64_t n = 0;
};
constexpr Tile tiles[] = {{256, 128}, {128, 256}, {128, 128}, {128, 64}, {64, 128}, {64, 64}};
constexpr std::int64_t splits[] = {1, 2, 4, 8, 16, 32};

// The share of the rate that a tile reaches where loading binds.
double reuse(const Tile& tile) {
  constexpr double enough = 128.0 * 128.0 / (128.0 + 128.0);
  return std::min(1.0, static_cast<double>(tile.m * tile.n) / static_cast<double>(tile.m + tile.n) / enough);
}

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
  std::optional<ProductWork> best;
  for (const Tile& tile : tiles)
    for (const std::int64_t parts : splits) {
      const std::int64_t count = ceil_div(product.m, tile.m) * ceil_div(product.n, tile.n) * parts;
      const std::int64_t places = ceil_div(count, rates.multiprocessors) * rates.multiprocessors;
      const double step = 2.0 * static_cast<double>(places) * static_cast<double>(tile.m * tile.n) / reuse(tile);
      const Bytes partial = parts > 1 ? Bytes(8 * product.m * product.n * parts) : Bytes(0);
      const bool hides = rates.hides_results && parts == 1;
      const double of_wave = static_cast<double>(rates.multiprocessors * tile.m * tile.n) / (m * n);
      const Bytes last = hides && of_wave < 1.0 ? share_of(product.result, of_wave) : product.result;
      const ProductWork work{.flops = step * static_cast<double>(ceil_div(product.k, parts)),
                             .starts = step,
                             .bytes = last + partial,
                             .hidden = hides ? product.result : Bytes(0)};
      if (!best || time_of(work, rates) < time_of(*best, rates)) best = work;
    }
  return *best;
}

}  // namespace parplan
