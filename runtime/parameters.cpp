#include "runtime/parameters.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>

#include "planner/base/allocated.h"
#include "planner/base/parallel_for.h"
#include "runtime/checkpoint/logical_slice.h"
#include "runtime/device/cpu/host_conversion.h"

namespace parplan {
namespace {

std::uint64_t splitmix64(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// FNV-1a.
std::uint64_t hash(const std::string& text) {
  std::uint64_t h = 0xCBF29CE484222325u;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return h;
}

double uniform(std::uint64_t bits) { return (static_cast<double>(bits >> 11) + 0.5) * 0x1.0p-53; }

// Calls visit(index in the buffer, logical index) for every element of a slice.
template <class Visit>
void for_each_element(const OpGraph& graph, const HeldSlice& held, Visit visit) {
  const std::int64_t logical_columns = whole_of(graph.tensors[held.tensor]).columns;
  std::int64_t at = held.at;
  for (std::int64_t row = held.slice.row; row < held.slice.row + held.slice.rows; ++row)
    for (std::int64_t column = held.slice.column; column < held.slice.column + held.slice.columns; ++column)
      visit(at++, row * logical_columns + column);
}

// Parts of a slice of whole rows, or of a single row of parts of it, about as large as each other.
std::vector<HeldSlice> divided(const HeldSlice& held, std::int64_t parts) {
  std::vector<HeldSlice> result;
  const bool by_rows = held.slice.rows > 1;
  const std::int64_t pieces = by_rows ? held.slice.rows : held.slice.columns;
  parts = std::clamp<std::int64_t>(parts, 1, std::max<std::int64_t>(pieces, 1));
  for (std::int64_t part = 0; part < parts; ++part) {
    const std::int64_t begin = pieces * part / parts, count = pieces * (part + 1) / parts - begin;
    HeldSlice own = held;
    (by_rows ? own.slice.row : own.slice.column) += begin;
    (by_rows ? own.slice.rows : own.slice.columns) = count;
    own.at += by_rows ? begin * held.slice.columns : begin;
    result.push_back(own);
  }
  return result;
}

// Elements from which on a thread more is worth its start.
constexpr std::int64_t elements_of_a_thread = 1 << 16;

std::int64_t elements_of(const Program& program, int buffer, DataType type) {
  return program.buffers[buffer].bytes / size_of(type);
}

void read_numbers(const Arena& arena, int buffer, DataType type, float* values, std::int64_t count) {
  const Bytes bytes(count * size_of(type));
  if (size_of(type) == sizeof(float)) return arena.read(buffer, values, bytes);
  auto narrowed = allocated<std::byte>(bytes.count, "parameters in the plan's precision");
  arena.read(buffer, narrowed.data(), bytes);
  widen(type, narrowed.data(), count, values);
}

}  // namespace

void write_numbers(const Arena& arena, int buffer, DataType type, const float* values, std::int64_t count,
                   std::int64_t at) {
  const Bytes bytes(count * size_of(type)), to(at * size_of(type));
  if (size_of(type) == sizeof(float)) return arena.write(buffer, values, bytes, to);
  auto narrowed = allocated<std::byte>(bytes.count, "parameters in the plan's precision");
  narrow(type, values, count, narrowed.data());
  arena.write(buffer, narrowed.data(), bytes, to);
}

InitialValues initializer(std::uint64_t seed) {
  return [seed](const Tensor& tensor) -> std::function<float(std::int64_t)> {
    if (tensor.initializer == Initializer::zeros) return [](std::int64_t) { return 0.0f; };
    if (tensor.initializer == Initializer::ones) return [](std::int64_t) { return 1.0f; };
    return [stream = splitmix64(seed ^ hash(tensor.name)), deviation = tensor.standard_deviation](std::int64_t index) {
      const std::uint64_t counter = stream + 2 * static_cast<std::uint64_t>(index);
      const double radius = std::sqrt(-2.0 * std::log(uniform(splitmix64(counter))));
      return static_cast<float>(deviation * radius *
                                std::cos(2.0 * std::numbers::pi * uniform(splitmix64(counter + 1))));
    };
  };
}

void initialise(const OpGraph& graph, const Program& program, const Arena& arena, DataType precision,
                const InitialValues& initial, int threads) {
  for (const Bucket& bucket : program.buckets)
    for (const std::optional<int> buffer :
         {bucket.first_moment, bucket.second_moment, bucket.first_scales, bucket.second_scales})
      if (buffer) arena.zero(*buffer);
  if (program.loss_scale_buffer) {
    const LossScale initial_scale;
    arena.write(*program.loss_scale_buffer, &initial_scale, Bytes(sizeof(initial_scale)));
  }
  for (std::size_t b = 0; b < program.buckets.size(); ++b) {
    const Bucket& bucket = program.buckets[b];
    const std::int64_t held = elements_of(program, bucket.parameters, precision);
    const bool whole = held == bucket.elements;
    auto values = allocated<float>(held, "the initial values of a block's parameters");
    for (const HeldSlice& part : slices_of(graph, program, static_cast<int>(b), held_ranges(bucket, whole))) {
      const std::function<float(std::int64_t)> value = initial(graph.tensors[part.tensor]);
      const auto fill = [&](const HeldSlice& own) {
        for_each_element(graph, own, [&](std::int64_t at, std::int64_t logical) { values[at] = value(logical); });
      };
      const std::vector<HeldSlice> parts =
          divided(part, std::min<std::int64_t>(threads, part.slice.elements() / elements_of_a_thread));
      parallel_for(static_cast<int>(parts.size()), parts.size(), [&](int, std::size_t own) { fill(parts[own]); });
    }
    const float* const shard = values.data() + (whole ? begin_in_whole(bucket) : 0);
    write_numbers(arena, bucket.parameters, precision, values.data(), held);
    if (bucket.master) write_numbers(arena, *bucket.master, DataType::fp32, shard, bucket.shard_elements);
    if (bucket.host_parameters) write_numbers(arena, *bucket.host_parameters, precision, shard, bucket.shard_elements);
  }
}

void collect(const OpGraph& graph, const Program& program, const Arena& arena, DataType precision,
             ParameterContent content, LogicalTensors& into) {
  for (std::size_t b = 0; b < program.buckets.size(); ++b) {
    const Bucket& bucket = program.buckets[b];
    const bool gradients = content == ParameterContent::gradients;
    const bool from_master = !gradients && bucket.master;
    if (gradients && !bucket.gradients) continue;
    if (is_updated_elsewhere(bucket)) continue;  // what the master had at the beginning of its step
    const int buffer = gradients ? *bucket.gradients : from_master ? *bucket.master : bucket.parameters;
    const DataType type = gradients || from_master ? DataType::fp32 : precision;
    const std::int64_t held = elements_of(program, buffer, type);
    const bool whole = held == bucket.elements;
    auto values = allocated<float>(held, "a block's parameters or gradients");
    read_numbers(arena, buffer, type, values.data(), held);
    std::vector<HeldRange> from = held_ranges(bucket, whole && !gradients);
    // Under ZeRO-1 the gradient buffer is whole, but only this rank's shard of it is reduced.
    if (whole && gradients) from.front().at = begin_in_whole(bucket);
    for (const HeldSlice& part : slices_of(graph, program, static_cast<int>(b), from)) {
      const Tensor& tensor = graph.tensors[part.tensor];
      std::vector<float>& logical_values = into[tensor.name];
      allocate(logical_values, element_count(tensor), tensor.name);
      for_each_element(graph, part,
                       [&](std::int64_t at, std::int64_t logical) { logical_values[logical] = values[at]; });
    }
  }
}

}  // namespace parplan
