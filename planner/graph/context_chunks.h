#pragma once

#include <cstdint>
#include <optional>

namespace parplan {

// Which positions of a sequence the rows of a rank have, where the ranks of the context axis share
// it out in chunks: with 2 ranks chunks, rank r holds chunks r and 2 ranks - 1 - r, one behind the
// other. Under a causal mask, all ranks then have equally many pairs of queries and keys (Llama
// Team 2024, arXiv:2407.21783, section 3.3.2).
struct ContextChunks {
  std::int64_t ranks = 1;
  std::int64_t rank = 0;
  std::int64_t size = 0;   // positions of a chunk; 0: rows have consecutive positions
  std::int64_t first = 0;  // of the rank's rows: where its other axes cut these
  // Attention around a ring: the one rank whose keys and values its queries meet.
  std::optional<std::int64_t> holder = {};

  constexpr bool any() const { return size > 0; }
  // The positions of all ranks together.
  constexpr std::int64_t positions() const { return 2 * ranks * size; }
  // The position of a row, counted from `first`.
  constexpr std::int64_t position(std::int64_t row) const {
    if (!any()) return row;
    const std::int64_t own = first + row;
    return own < size ? rank * size + own : (2 * ranks - 1 - rank) * size + own - size;
  }
  // Where the position is among the rows of all ranks, rank after rank, as an all-gather leaves
  // them.
  constexpr std::int64_t gathered_row(std::int64_t position) const {
    const std::int64_t chunk = position / size, within = position % size;
    return chunk < ranks ? chunk * 2 * size + within : (2 * (2 * ranks - 1 - chunk) + 1) * size + within;
  }
  bool operator==(const ContextChunks&) const = default;
};

}  // namespace parplan
