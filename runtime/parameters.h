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
// the same under every plan. Called by several threads at once.
using InitialValues = std::function<std::function<float(std::int64_t)>(const Tensor&)>;

// As the tensor's initializer says; normal values from a counter-based generator (splitmix64 and
// Box-Muller).
InitialValues initializer(std::uint64_t seed);

// Fills this rank's parameters (padding with zeros) in `precision`, master copies, and optimizer
// state with zeros.
void initialise(const OpGraph& graph, const Program& program, const Arena& arena, DataType precision,
                const InitialValues& values);

enum class ParameterContent { values, gradients };

// Copies what this rank holds into logical tensors, keyed by parameter name and sized on first use:
// parameters as fp32 knows them (the master copies where there are some), and gradients of the last
// step as the optimizer read them (before clipping; times the loss scale where there is one). Call
// for every rank to have all of it.
using LogicalTensors = std::map<std::string, std::vector<float>>;
void collect(const OpGraph& graph, const Program& program, const Arena& arena, DataType precision,
             ParameterContent content, LogicalTensors& into);

}  // namespace parplan
