#include "runtime/checkpoint/logical_slice.h"

#include <algorithm>
#include <map>
#include <tuple>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

// Slices smaller than this are not cut further (elements): files would have many small tensors.
constexpr std::int64_t least_piece = 16 * 1024;

std::int64_t elements_in(const Program& program, int buffer, DataType type) {
  return program.buffers[buffer].bytes / size_of(type);
}

StateBuffer parameters_of(const Program& program, const Bucket& bucket, DataType precision) {
  const DataType type = in_memory(precision);
  const bool whole = elements_in(program, bucket.parameters, type) == bucket.elements;
  return {.state = State::parameter, .buffer = bucket.parameters, .type = type, .held = held_ranges(bucket, whole)};
}

// Who holds a slice of a state, and where.
struct Holder {
  int rank = 0;
  int buffer = 0;
  DataType type = DataType::fp32;
  std::int64_t at = 0;
  std::optional<int> scales = {};
};
using Holders = std::map<std::tuple<State, TensorId, LogicalSlice>, std::vector<Holder>>;

Holders find_holders(const OpGraph& graph, const std::vector<Program>& programs, DataType precision) {
  Holders holders;
  for (const Program& program : programs)
    for (std::size_t b = 0; b < program.buckets.size(); ++b)
      for (const StateBuffer& kept : kept_state(program, program.buckets[b], precision))
        for (const HeldSlice& held : slices_of(graph, program, static_cast<int>(b), kept.held))
          holders[{kept.state, held.tensor, held.slice}].push_back(
              {.rank = program.rank, .buffer = kept.buffer, .type = kept.type, .at = held.at, .scales = kept.scales});
  return holders;
}

// Ranks that hold the same slice hold equal ones: it is enough to count.
void check_complete(const OpGraph& graph, const Holders& holders) {
  std::map<std::pair<State, TensorId>, std::int64_t> elements;
  for (const auto& [key, ranks] : holders)
    elements[{std::get<0>(key), std::get<1>(key)}] += std::get<2>(key).elements();
  for (const auto& [key, count] : elements) {
    const Tensor& tensor = graph.tensors[key.second];
    PARPLAN_ASSERT(count == element_count(tensor),
                   fmt::format("{} of {} elements of {} are held", count, element_count(tensor), tensor.name));
  }
}

}  // namespace

LogicalSlice whole_of(const Tensor& tensor) {
  return {.rows = tensor.dims[0].size, .columns = tensor.dims.size() == 2 ? tensor.dims[1].size : 1};
}

LogicalSlice common(const LogicalSlice& a, const LogicalSlice& b) {
  LogicalSlice both;
  both.row = std::max(a.row, b.row);
  both.column = std::max(a.column, b.column);
  both.rows = std::min(a.row + a.rows, b.row + b.rows) - both.row;
  both.columns = std::min(a.column + a.columns, b.column + b.columns) - both.column;
  return both.rows > 0 && both.columns > 0 ? both : LogicalSlice{};
}

std::vector<HeldSlice> slices_of(const OpGraph& graph, const Program& program, int bucket,
                                 std::span<const HeldRange> held) {
  std::vector<HeldSlice> slices;
  const auto take = [&](const ParameterPart& part, const HeldRange& of) {
    // Rows past the logical end are padding.
    const std::int64_t rows =
        std::clamp<std::int64_t>(graph.tensors[part.tensor].dims[0].size - part.row_begin, 0, part.rows);
    const std::int64_t first = std::max(of.range.begin - part.bucket_offset, std::int64_t{0});
    const std::int64_t last = std::min(of.range.end - part.bucket_offset, rows * part.columns);  // one past
    const auto add = [&](std::int64_t from, std::int64_t to) {
      if (from >= to) return;
      const bool whole_rows = from % part.columns == 0 && to % part.columns == 0;
      slices.push_back({.tensor = part.tensor,
                        .slice = {.row = part.row_begin + from / part.columns,
                                  .column = part.column_begin + from % part.columns,
                                  .rows = whole_rows ? (to - from) / part.columns : 1,
                                  .columns = whole_rows ? part.columns : to - from},
                        .at = of.at + part.bucket_offset + from - of.range.begin});
    };
    if (first >= last) return;
    const std::int64_t first_whole = std::min((first + part.columns - 1) / part.columns * part.columns, last);
    const std::int64_t last_whole = std::max(last / part.columns * part.columns, first_whole);
    add(first, first_whole);
    add(first_whole, last_whole);
    add(last_whole, last);
  };
  for (const ParameterPart& part : program.parameters)
    if (part.bucket == bucket)
      for (const HeldRange& of : held) take(part, of);
  return slices;
}

namespace {

// The ranges of a shard that have second moments, as their buffer holds them.
std::vector<HeldRange> with_second(const Bucket& bucket, std::vector<HeldRange> shard) {
  if (bucket.without_second == 0) return shard;
  std::int64_t at = 0;
  for (HeldRange& held : shard) {
    held.range.begin = std::max(held.range.begin, std::min(bucket.without_second, held.range.end));
    held.at = at;
    at += held.range.size();
  }
  std::erase_if(shard, [](const HeldRange& held) { return held.range.size() == 0; });
  return shard;
}

}  // namespace

std::vector<StateBuffer> kept_state(const Program& program, const Bucket& bucket, DataType precision) {
  const std::vector<HeldRange> shard = held_ranges(bucket, false);
  std::vector<StateBuffer> kept;
  if (is_updated_elsewhere(bucket)) return kept;
  if (bucket.master)
    kept.push_back({.state = State::parameter, .buffer = *bucket.master, .held = shard});
  else
    kept.push_back(parameters_of(program, bucket, precision));
  const auto keep = [&](State state, const std::optional<int>& buffer, const std::optional<int>& scales,
                        const std::vector<HeldRange>& held) {
    if (buffer && !held.empty())
      kept.push_back({.state = state,
                      .buffer = *buffer,
                      .type = scales ? DataType::uint8 : DataType::fp32,
                      .held = held,
                      .scales = scales});
  };
  keep(State::first_moment, bucket.first_moment, bucket.first_scales, shard);
  keep(State::second_moment, bucket.second_moment, bucket.second_scales, with_second(bucket, shard));
  return kept;
}

std::vector<StateBuffer> all_state(const Program& program, const Bucket& bucket, DataType precision) {
  std::vector<StateBuffer> all = kept_state(program, bucket, precision);
  if (bucket.master) all.push_back(parameters_of(program, bucket, precision));
  return all;
}

std::vector<std::vector<WrittenSlice>> divide_state(const OpGraph& graph, const std::vector<Program>& programs,
                                                    DataType precision) {
  const Holders holders = find_holders(graph, programs, precision);
  check_complete(graph, holders);
  std::vector<std::vector<WrittenSlice>> written(programs.size());
  std::vector<std::int64_t> load(programs.size(), 0);
  // The largest first: the smaller ones then even out what the ranks have to write.
  std::vector<Holders::const_iterator> order;
  for (auto held = holders.begin(); held != holders.end(); ++held) order.push_back(held);
  std::ranges::stable_sort(order, std::ranges::greater(),
                           [](const auto& held) { return std::get<2>(held->first).elements(); });
  for (const auto& held : order) {
    const auto& [state, tensor, slice] = held->first;
    std::vector<Holder> ranks = held->second;
    std::ranges::stable_sort(ranks, {}, [&](const Holder& holder) { return load[holder.rank]; });
    const std::int64_t pieces = std::clamp<std::int64_t>(slice.elements() / least_piece, 1,
                                                         std::min<std::int64_t>(std::ssize(ranks), slice.rows));
    for (std::int64_t piece = 0; piece < pieces; ++piece) {
      const Holder& holder = ranks[piece];
      const std::int64_t first = slice.rows * piece / pieces;
      LogicalSlice part = slice;
      part.row += first;
      part.rows = slice.rows * (piece + 1) / pieces - first;
      written[holder.rank].push_back({.state = state,
                                      .tensor = tensor,
                                      .slice = part,
                                      .buffer = holder.buffer,
                                      .type = holder.type,
                                      .at = holder.at + first * slice.columns,
                                      .scales = holder.scales});
      load[holder.rank] += part.elements();
    }
  }
  for (std::vector<WrittenSlice>& of_rank : written)
    std::ranges::sort(of_rank, {},
                      [](const WrittenSlice& one) { return std::tuple(one.tensor, one.state, one.slice); });
  return written;
}

}  // namespace parplan
