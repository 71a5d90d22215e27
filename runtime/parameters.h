#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/program/program.h"
#include "runtime/arena.h"

namespace parplan {

// The initial values of a parameter, each by its index in the logical (unsharded, unpadded) tensor:
// the same under every plan. Several threads may call it at once.
using InitialValues = std::function<std::function<float(std::int64_t)>(const Tensor&)>;

// Values by the tensor's initializer; normal values come from a counter-based generator (splitmix64
// and Box-Muller).
InitialValues initializer(std::uint64_t seed);

// Fills this rank's parameters (padding with zeros) in `precision`, the master copies, and the
// optimizer state with zeros, by so many threads: a billion normal values take one about 40 s.
void initialise(const OpGraph& graph, const Program& program, const Arena& arena, DataType precision,
                const InitialValues& values, int threads);

// Writes fp32 values to a buffer of `type`, rounded to it, from its start or so many elements
// behind it.
void write_numbers(const Arena& arena, int buffer, DataType type, const float* values, std::int64_t count,
                   std::int64_t at = 0);

enum class ParameterContent { values, gradients };

// Copies this rank's parts into logical tensors, keyed by parameter name and sized on first use:
// parameters in fp32 (the master copies if there are any), and gradients of the last step as the
// optimizer read them (before clipping; times the loss scale if there is one). Call it for every
// rank to get all of it.
using LogicalTensors = std::map<std::string, std::vector<float>>;
void collect(const OpGraph& graph, const Program& program, const Arena& arena, DataType precision,
             ParameterContent content, LogicalTensors& into);

}  // namespace parplan
