#include <vector>

#include "planner/program/bucket_work.h"
#include "planner/program/lower_block.h"
#include "planner/program/lowering_state.h"

// What layers keep from their forward for their backward, where that is on the host: a layer fills
// a buffer on the device, from which it is copied to its slot on the host while the next layers
// run. It is copied back while the backward of the layer behind it runs (ZeRO-Infinity, Rajbhandari
// et al. 2021, arXiv:2104.07857). Buffers on the device take turns: buffers of their own, or those
// of layers behind it that keep theirs there (`in_place_of`). Where the slot is in a file, the way
// leads over one of a few buffers on the host, from which it is written, and into which it is read
// ahead of the backward.
namespace parplan {
namespace {

// Binds a buffer in either home: where from, and where to.
std::optional<int> add_copies(Lowering& lowering, const char* name, Stream stream,
                              const std::vector<ByteRange>& ranges) {
  if (ranges.empty()) return std::nullopt;
  const Instruction copy = copy_on(stream, in_memory(lowering.job.training.precision));
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

// From the device to where a block keeps it.
void call_out(Lowering& lowering, const Lowering::BlockSegments::Copies& copies, int from, int to) {
  if (!copies.write) return call_copy(lowering, *copies.out, from, to, {from});
  const int on_host = next_of(lowering.staged_on_host, lowering.stagings_on_host);
  call_copy(lowering, *copies.out, from, on_host, {from});
  call_copy(lowering, *copies.write, on_host, to, {on_host});
  note_use(lowering, on_host);
  note_use(lowering, to);
}

// And back to the device; `frees`: whether nothing else will need it.
void call_back(Lowering& lowering, const Lowering::BlockSegments::Copies& copies, int from, int to, bool frees) {
  const BufferIds freed = frees ? BufferIds{from} : BufferIds();
  if (!copies.read) return call_copy(lowering, *copies.back, from, to, freed);
  const int on_host = next_of(lowering.staged_on_host, lowering.stagings_on_host);
  call_copy(lowering, *copies.read, from, on_host, freed);
  may_be_early(lowering, from, on_host);
  call_copy(lowering, *copies.back, on_host, to, {on_host});
  note_use(lowering, on_host);
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

// Where a block that saves elsewhere has that on the device while it computes.
int place_on_device(Lowering& lowering, int block, const ActionSlots& slots) {
  if (const std::optional<int> other = lowering.in_place_of[block])
    return lowering.saved[slots.saved][lowering.position_in_slot[*other]];
  return next_of(lowering.staged, lowering.stagings);
}

}  // namespace

void add_saved_copies(Lowering& lowering, const LoweredBlock& block, Home home, Lowering::BlockSegments& segments) {
  const std::vector<ByteRange> saved = saved_ranges(block, true), for_weights = for_weights_ranges(block),
                               for_first_part = ranges_read(block.backward_inputs, binding::for_weights);
  segments.saved.out = add_copies(lowering, "offload.saved", Stream::to_host, saved);
  segments.saved.back = add_copies(lowering, "fetch.saved", Stream::from_host, saved);
  segments.for_weights.out = add_copies(lowering, "offload.saved_for_weights", Stream::to_host, for_weights);
  segments.for_weights.back = add_copies(lowering, "fetch.saved_for_weights", Stream::from_host, for_weights);
  segments.for_first_part.back = add_copies(lowering, "fetch.saved_for_weights", Stream::from_host, for_first_part);
  if (home != Home::nvme) return;
  segments.saved.write = add_copies(lowering, "write.saved", Stream::to_nvme, saved);
  segments.saved.read = add_copies(lowering, "read.saved", Stream::from_nvme, saved);
  segments.for_weights.write = add_copies(lowering, "write.saved_for_weights", Stream::to_nvme, for_weights);
  segments.for_weights.read = add_copies(lowering, "read.saved_for_weights", Stream::from_nvme, for_weights);
  segments.for_first_part.read = add_copies(lowering, "read.saved_for_weights", Stream::from_nvme, for_first_part);
}

SavedBuffers saved_for_forward(Lowering& lowering, int block, const ActionSlots& slots) {
  SavedBuffers buffers = of_slot(lowering, block, slots);
  const Lowering::BlockSegments& segments = lowering.segments_of(block);
  if (segments.saved.out) buffers.saved = place_on_device(lowering, block, slots);
  if (segments.for_weights.out)
    buffers.for_weights = next_of(lowering.staged_for_weights, lowering.stagings_for_weights);
  return buffers;
}

void copy_saved_out(Lowering& lowering, int block, const ActionSlots& slots, const SavedBuffers& from) {
  const SavedBuffers to = of_slot(lowering, block, slots);
  const Lowering::BlockSegments& segments = lowering.segments_of(block);
  if (segments.saved.out) call_out(lowering, segments.saved, from.saved, to.saved);
  if (segments.for_weights.out) call_out(lowering, segments.for_weights, *from.for_weights, *to.for_weights);
}

SavedBuffers fetch_saved(Lowering& lowering, int block, const ActionSlots& slots, Phase phase) {
  const SavedBuffers from = of_slot(lowering, block, slots);
  SavedBuffers to = from;
  const Lowering::BlockSegments& segments = lowering.segments_of(block);
  if (segments.saved.back && phase != Phase::backward_weights) {
    to.saved = place_on_device(lowering, block, slots);
    call_back(lowering, segments.saved, from.saved, to.saved, true);
  }
  // The first part of a backward leaves it there for the second.
  const bool is_first_part = phase == Phase::backward_inputs;
  const Lowering::BlockSegments::Copies& copies = is_first_part ? segments.for_first_part : segments.for_weights;
  if (copies.back) {
    to.for_weights = next_of(lowering.staged_for_weights, lowering.stagings_for_weights);
    call_back(lowering, copies, *from.for_weights, *to.for_weights, !is_first_part);
  }
  return to;
}

}  // namespace parplan
