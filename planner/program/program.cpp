#include "planner/program/program.h"

#include <algorithm>
#include <utility>

#include "planner/base/enum_index.h"
#include "planner/base/error.h"

namespace parplan {
namespace {

template <class Enum, std::size_t size>
constexpr const char* in_table(const char* const (&names)[size], Enum value) {
  return names[index_of(value)];
}

constexpr const char* stream_names[] = {"compute",       "tensor",       "data",    "send_next", "receive_previous",
                                        "send_previous", "receive_next", "context", "expert",    "to_host",
                                        "from_host",     "host",         "ring_send", "ring_receive",
                                        "send_next_on_return",     "receive_previous_on_return",
                                        "send_previous_on_return", "receive_next_on_return",
                                        "to_nvme",       "from_nvme"};
static_assert(std::size(stream_names) == stream_count);

constexpr const char* instruction_names[] = {"kernel",         "all_reduce_sum", "all_reduce_max", "all_gather",
                                             "reduce_scatter", "all_to_all",     "send",           "receive",
                                             "broadcast",      "reduce_sum",     "gather",         "scatter",
                                             "copy"};
static_assert(std::size(instruction_names) == index_of(InstructionKind::copy) + 1);

}  // namespace

const char* name(Stream stream) { return in_table(stream_names, stream); }
std::string name(GroupKey group) {
  static_assert(index_of(Members::stage) == 11);
  constexpr const char* part_names[] = {
      "",      "tied",     "next",  "previous", "next on return", "previous on return",
      "shard", "replicas", "heads", "keys",     "copies",         "stage"};
  if (group.members == Members::all) return axis_word(group.axis);
  const char* part = in_table(part_names, group.members);
  return group.axis == Axis::pp ? part : std::string(axis_word(group.axis)) + " " + part;
}
const char* name(InstructionKind kind) { return in_table(instruction_names, kind); }

std::vector<int> buffers_of(const Bucket& bucket) {
  std::vector<int> buffers = {bucket.parameters};
  for (const std::optional<int> buffer :
       {bucket.gradients, bucket.second_gradients, bucket.first_moment, bucket.second_moment, bucket.first_scales,
        bucket.second_scales, bucket.master, bucket.host_gradients, bucket.host_parameters})
    if (buffer) buffers.push_back(*buffer);
  return buffers;
}

std::vector<HeldRange> held_ranges(const Bucket& bucket, bool is_whole) {
  if (is_whole) return {{.range = {0, bucket.elements}, .at = 0}};
  std::vector<HeldRange> held;
  for (const BucketUnit& unit : bucket.units) held.push_back(unit.own);
  return held;
}

std::int64_t begin_in_whole(const Bucket& bucket) {
  PARPLAN_ASSERT(bucket.units.size() == 1, bucket.name);
  return bucket.units.front().own.range.begin;
}

const std::vector<int>& Program::group(GroupKey key) const {
  static const std::vector<int> none;
  const auto found = std::ranges::find(groups, key, &Group::key);
  return found == groups.end() ? none : found->ranks;
}

void Program::set_group(GroupKey key, std::vector<int> ranks) {
  const auto found = std::ranges::find(groups, key, &Group::key);
  if (found == groups.end()) {
    groups.push_back({key, std::move(ranks)});
  } else {
    found->ranks = std::move(ranks);
  }
}

std::int64_t end_of_use(const Program& program, Home home) {
  std::int64_t end = 0;
  // Sums of gradients have no value before a step writes it: of one micro-batch's, a shard alone.
  for (const Buffer& buffer : program.buffers)
    if (buffer.home == home && buffer.persistent && buffer.category != MemoryCategory::gradients && buffer.bytes > 0)
      end = std::max(end, buffer.offset + buffer.bytes);
  for (const Call& call : program.calls)
    for (const Instruction& instruction : program.segments[call.segment].instructions)
      for (const Operand& operand : instruction.operands)
        if (const Buffer& buffer = program.buffers[call.buffers[operand.binding]];
            buffer.home == home && operand.access != Access::read && operand.bytes > 0)
          end = std::max(end, buffer.offset + operand.offset + operand.bytes);
  return end;
}

std::optional<std::vector<int>> operand_positions(const Instruction& instruction) {
  const OpRow& row = row_of(instruction.op);
  const int count = static_cast<int>(instruction.operands.size());
  for (const bool workspace : {false, true}) {
    if (operand_count(row, instruction.shape, workspace) != count) continue;
    std::vector<int> positions;
    for (std::size_t i = 0; i < row.operands.size(); ++i)
      if (is_present(row.operands[i], instruction.shape, workspace)) positions.push_back(static_cast<int>(i));
    return positions;
  }
  return std::nullopt;
}

}  // namespace parplan
