#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "planner/program/program.h"
#include "planner/program/verify.h"

namespace parplan {

// The parts of `find_faults`, in order; each appends its faults, at most `most_faults` per rank.
inline constexpr std::size_t most_faults = 20;

void find_structure_faults(std::span<const Program> programs, std::vector<Fault>& faults);
void find_file_faults(const Program& program, std::vector<Fault>& faults);           // of what is on NVMe
void find_data_faults(const Program& program, std::vector<Fault>& faults);           // order, definition, reductions
void find_ring_faults(const Program& program, std::vector<Fault>& faults);           // around the context axis
void find_exchange_faults(const Program& program, std::vector<Fault>& faults);       // in groups of the context axis
void find_slice_faults(const Program& program, std::vector<Fault>& faults);          // around the tensor axis
void find_communication_faults(std::span<const Program> programs, std::vector<Fault>& faults);

// The source of each operand of a kernel by its op's row, without absent operands; nothing if the
// operands do not fit the row and the shape.
std::optional<std::vector<OperandSource>> operand_sources(const Instruction& instruction);

// "linear 'attention.qkv'", "all_reduce_sum 'loss'".
std::string describe(const Instruction& instruction);
// "0, 1, 3".
std::string list_ranks(const std::vector<int>& ranks);

}  // namespace parplan
