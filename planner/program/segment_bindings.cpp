// The end of a Segment's construction: from places to offsets in scratch and numbers of bindings.
#include <map>
#include <utility>

#include "planner/program/events.h"
#include "planner/program/fusion.h"
#include "planner/program/pack_scratch.h"
#include "planner/program/segment_lowering.h"

namespace parplan {
namespace {

constexpr std::int64_t alignment = 64;  // bytes

// Gives the places in scratch their offsets, by the instructions that use each first and last.
void pack_scratch(SegmentLowering& lowering) {
  std::map<int, Temporary> used;  // by place
  const std::vector<Instruction>& instructions = lowering.segment.instructions;
  for (std::size_t i = 0; i < instructions.size(); ++i)
    for (const Operand& operand : instructions[i].operands) {
      const int place = operand.binding;
      if (!lowering.temporary[place]) continue;
      const int now = static_cast<int>(i);
      Temporary& temporary =
          used.try_emplace(place, Temporary{.bytes = lowering.places[place].bytes, .first = now}).first->second;
      temporary.last = now;
    }
  std::vector<Temporary> temporaries;
  for (const auto& [place, temporary] : used) temporaries.push_back(temporary);
  lowering.segment.scratch_bytes = pack(temporaries, alignment);
  std::size_t next = 0;
  for (const auto& [place, temporary] : used) lowering.places[place].offset = temporaries[next++].offset;
}

// The same for places that share nothing.
void place_apart(SegmentLowering& lowering) {
  std::int64_t& end = lowering.segment.scratch_bytes;
  for (std::size_t i = 0; i < lowering.places.size(); ++i) {
    Storage& place = lowering.places[i];
    if (lowering.temporary[i]) place.offset = std::exchange(end, end + place.bytes);
  }
}

// Fuses kernels, unless their results then lie in scratch for so long that it must be larger: a
// kernel that computes again moves up to one that does, far from where its result is read.
void fuse_where_it_fits(SegmentLowering& lowering) {
  const std::int64_t apart = lowering.segment.scratch_bytes;
  std::vector<Instruction> instructions = lowering.segment.instructions;
  fuse(lowering.segment.instructions, lowering.temporary, lowering.of.context.fusions);
  if (lowering.segment.instructions.size() == instructions.size()) return;
  pack_scratch(lowering);
  if (lowering.segment.scratch_bytes <= apart) return;
  lowering.segment.instructions = std::move(instructions);
  pack_scratch(lowering);
}

// Gives operands the numbers of bindings, in the order of their first use.
void bind(SegmentLowering& lowering) {
  Segment& segment = lowering.segment;
  std::map<std::string, int> number;
  for (Instruction& instruction : segment.instructions)
    for (Operand& operand : instruction.operands) {
      const Storage& place = lowering.places[operand.binding];
      const auto [found, inserted] = number.try_emplace(place.binding, static_cast<int>(segment.bindings.size()));
      if (inserted) segment.bindings.push_back(place.binding);
      operand.binding = found->second;
      operand.offset += place.offset;
    }
}

}  // namespace

Segment finish(SegmentLowering lowering, std::string name) {
  if (lowering.of.context.scratch_apart) {
    fuse(lowering.segment.instructions, lowering.temporary, lowering.of.context.fusions);
    place_apart(lowering);
  } else {
    pack_scratch(lowering);
    if (lowering.of.context.fusions.any()) fuse_where_it_fits(lowering);
  }
  bind(lowering);
  Segment& segment = lowering.segment;
  segment.name = std::move(name);
  segment.stream = Stream::compute;
  order_instructions(segment);
  return std::move(segment);
}

}  // namespace parplan
