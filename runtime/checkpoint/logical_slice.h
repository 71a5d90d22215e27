#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/program/program.h"

namespace parplan {

// A rectangle of a parameter in logical (unsharded, unpadded) coordinates. A vector has one column.
struct LogicalSlice {
  std::int64_t row = 0, column = 0;
  std::int64_t rows = 0, columns = 0;
  std::int64_t elements() const { return rows * columns; }
  auto operator<=>(const LogicalSlice&) const = default;
};

// The whole of a parameter.
LogicalSlice whole_of(const Tensor& tensor);
// What two slices have in common; empty (no rows) where that is nothing.
LogicalSlice common(const LogicalSlice& a, const LogicalSlice& b);

// A slice of a parameter whose elements lie side by side in a buffer of a bucket, row by row.
struct HeldSlice {
  TensorId tensor = 0;
  LogicalSlice slice;
  std::int64_t at = 0;  // elements from the start of the buffer
};

// What a buffer that holds these elements of a bucket has of parameters, without padding: of each
// range and parameter at most three slices, since only the first and the last row can be cut.
std::vector<HeldSlice> slices_of(const OpGraph& graph, const Program& program, int bucket,
                                 std::span<const HeldRange> held);

// What training keeps of every parameter; of frozen ones, only the first.
enum class State : std::uint8_t { parameter, first_moment, second_moment };

// The buffer of a bucket that holds a state in fp32, or in the precision of the plan where there is
// nothing better, or as codes (uint8), with the scales of its blocks in another buffer; and which
// elements of the bucket.
struct StateBuffer {
  State state{};
  int buffer = 0;
  DataType type = DataType::fp32;
  std::vector<HeldRange> held;
  std::optional<int> scales = {};
  std::int64_t elements() const { return held.empty() ? 0 : held.back().at + held.back().range.size(); }
};
// Those that hold what a checkpoint keeps: master copies where there are any.
std::vector<StateBuffer> kept_state(const Program& program, const Bucket& bucket, DataType precision);
// Those that a checkpoint fills: with the parameters in the precision of the plan besides.
std::vector<StateBuffer> all_state(const Program& program, const Bucket& bucket, DataType precision);

// A slice that this rank writes.
struct WrittenSlice {
  State state{};
  TensorId tensor = 0;
  LogicalSlice slice;
  int buffer = 0;
  DataType type = DataType::fp32;  // of the buffer
  std::int64_t at = 0;             // elements from its start
  std::optional<int> scales = {};  // as of StateBuffer
};
// Divides the state of a job among its ranks: each element is written once, by a rank that holds
// it, and every rank writes about as many bytes as the others. By rank. Every process finds the
// same.
std::vector<std::vector<WrittenSlice>> divide_state(const OpGraph& graph, const std::vector<Program>& programs,
                                                    DataType precision);

}  // namespace parplan
