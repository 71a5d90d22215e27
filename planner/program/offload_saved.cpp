#include <vector>

#include "planner/program/bucket_work.h"
#include "planner/program/lower_block.h"
#include "planner/program/lowering_state.h"

// What layers keep from their forward for their backward, where that is on the host: a layer fills
// a buffer on the device, from which it is copied to its slot on the host while the next layers
// run. It is copied back while the backward of the layer behind it runs (ZeRO-Infinity, Rajbhandari
// et al. 2021, arXiv:2104.07857). Buffers on the device take turns.
namespace parplan {
namespace {

// Binds a buffer in either home: where from, and where to.
std::optional<int> add_copies(Lowering& lowering, const char* name, Home to, const std::vector<ByteRange>& ranges) {
  if (ranges.empty()) return std::nullopt;
  const Instruction copy = copy_to(to, in_memory(lowering.job.training.precision));
  Segment segment{.name = name, .stream = copy.stream, .bindings = {"from", "to"}, .instructions = {}};
  for (const ByteRange& range : ranges) {
    const std::int64_t bytes = range.end - range.begin;
    segment.instructions.push_back(copy);
    segment.instructions.back().operands = {{0, range.begin, bytes, Access::read},
                                            {1, range.begin, bytes, Access::write}};
  }
  return add_segment(lowering.program, std::move(segment));
}

void call_copy(Lowering& lowering, int segment, int from, int to, BufferIds frees) {
  Call& call = lowering.program.calls.emplace_back();
  call.segment = segment;
  call.buffers = {from, to};
  call.frees = std::move(frees);
}

int next_of(const std::vector<int>& buffers, int& turns) {
  return buffers[turns++ % buffers.size()];
}

// The block's buffers of a slot, in whichever home.
SavedBuffers of_slot(const Lowering& lowering, int block, const ActionSlots& slots) {
  SavedBuffers buffers{.saved = lowering.has_own_slots(block)
                                    ? lowering.head[slots.head]
                                    : lowering.saved[slots.saved][lowering.position_in_slot[block]],
                       .for_weights = std::nullopt};
  if (!lowering.for_weights.empty())
    buffers.for_weights = lowering.for_weights[slots.for_weights][lowering.position_for_weights[block]];
  return buffers;
}

}  // namespace

void add_saved_copies(Lowering& lowering, const LoweredBlock& block, Lowering::BlockSegments& segments) {
  const std::vector<ByteRange> saved = saved_ranges(block, true), for_weights = for_weights_ranges(block);
  segments.saved = {.out = add_copies(lowering, "offload.saved", Home::host, saved),
                    .back = add_copies(lowering, "fetch.saved", Home::device, saved)};
  segments.for_weights = {.out = add_copies(lowering, "offload.saved_for_weights", Home::host, for_weights),
                          .back = add_copies(lowering, "fetch.saved_for_weights", Home::device, for_weights)};
  segments.for_first_part = add_copies(lowering, "fetch.saved_for_weights", Home::device,
                                       ranges_read(block.backward_inputs, binding::for_weights));
}

SavedBuffers saved_for_forward(Lowering& lowering, int block, const ActionSlots& slots) {
  SavedBuffers buffers = of_slot(lowering, block, slots);
  const Lowering::BlockSegments& segments = lowering.segments_of(block);
  if (segments.saved.out) buffers.saved = next_of(lowering.staged, lowering.stagings);
  if (segments.for_weights.out)
    buffers.for_weights = next_of(lowering.staged_for_weights, lowering.stagings_for_weights);
  return buffers;
}

void copy_saved_out(Lowering& lowering, int block, const ActionSlots& slots, const SavedBuffers& from) {
  const SavedBuffers to = of_slot(lowering, block, slots);
  const Lowering::BlockSegments& segments = lowering.segments_of(block);
  if (segments.saved.out) call_copy(lowering, *segments.saved.out, from.saved, to.saved, {from.saved});
  if (segments.for_weights.out)
    call_copy(lowering, *segments.for_weights.out, *from.for_weights, *to.for_weights, {*from.for_weights});
}

SavedBuffers fetch_saved(Lowering& lowering, int block, const ActionSlots& slots, Phase phase) {
  const SavedBuffers from = of_slot(lowering, block, slots);
  SavedBuffers to = from;
  const Lowering::BlockSegments& segments = lowering.segments_of(block);
  if (segments.saved.back && phase != Phase::backward_weights) {
    to.saved = next_of(lowering.staged, lowering.stagings);
    call_copy(lowering, *segments.saved.back, from.saved, to.saved, {from.saved});
  }
  // The first part of a backward leaves it on the host for the second.
  const bool is_first_part = phase == Phase::backward_inputs;
  const std::optional<int> copy = is_first_part ? segments.for_first_part : segments.for_weights.back;
  if (copy) {
    to.for_weights = next_of(lowering.staged_for_weights, lowering.stagings_for_weights);
    call_copy(lowering, *copy, *from.for_weights, *to.for_weights,
              is_first_part ? BufferIds() : BufferIds{*from.for_weights});
  }
  return to;
}

}  // namespace parplan
