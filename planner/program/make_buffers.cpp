#include <algorithm>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/program/lowering.h"
#include "planner/program/memory.h"
#include "planner/program/workspace.h"

namespace parplan {

// Adds the buckets, without buffers, and the places of the parameters in them.
void make_buckets(Lowering& lowering) {
  Program& program = lowering.program;
  lowering.stage_buckets = stage_buckets(lowering.job, lowering.range, lowering.at.tp, lowering.at.dp);
  for (const StageBucket& from : lowering.stage_buckets) {
    program.buckets.push_back({.name = from.name,
                               .elements = from.elements,
                               .shard_begin = from.shard_begin,
                               .shard_elements = from.shard_elements});
    for (ParameterPart part : from.layout.parts) {
      part.bucket = static_cast<int>(program.buckets.size()) - 1;
      program.parameters.push_back(part);
    }
  }
}

namespace {

// The buffers of one rank, each in an entry of its own (`times` is 1); only buffers that take turns
// share an entry.
std::vector<StageBuffer> buffers_of(const Lowering& lowering) {
  std::vector<BucketSizes> buckets;
  for (const StageBucket& bucket : lowering.stage_buckets)
    buckets.push_back({.elements = bucket.elements, .tied = bucket.tied >= 0, .used_twice = bucket.blocks.size() > 1});
  std::vector<SavedSizes> saved;
  for (int b = lowering.range.first; b < lowering.range.last; ++b)
    saved.push_back({.bytes = lowering.segments_of(b).saved_bytes});
  std::int64_t scratch = step_scratch_bytes(lowering.job.training, lowering.job.backend).count;
  for (const Segment& segment : lowering.program.segments) scratch = std::max(scratch, segment.scratch_bytes);
  const StageSizes sizes{.buckets = buckets,
                         .saved = saved,
                         .crossing_bytes = lowering.crossing_bytes,
                         .scratch_bytes = scratch,
                         .in_flight = lowering.slots.saved,
                         .last_stage = lowering.is_last()};
  std::vector<StageBuffer> buffers;
  for_each_buffer(sizes, lowering.job.spec, lowering.job.placements, lowering.job.training,
                  [&](const StageBuffer& buffer) { buffers.push_back(buffer); });
  return buffers;
}

const char* words(BufferRole role) {
  switch (role) {
    case BufferRole::parameters: return "parameters of {}";
    case BufferRole::gradients: return "gradients of {}";
    case BufferRole::second_gradients: return "second gradients of {}";
    case BufferRole::first_moment: return "first moment of {}";
    case BufferRole::second_moment: return "second moment of {}";
    case BufferRole::master: return "master copy of {}";
    case BufferRole::loss_scale: return "loss scale";
    case BufferRole::gathered: return "gathered parameters {}";
    case BufferRole::gathered_tied: return "gathered tied parameter";
    case BufferRole::unreduced: return "unreduced gradients {}";
    case BufferRole::unreduced_tied: return "unreduced tied gradients";
    case BufferRole::saved: return "saved of {}, slot {}";
    case BufferRole::output: return "activation to send {}";
    case BufferRole::scratch: return "scratch";
    case BufferRole::gradient: return "activation gradient {}";
    case BufferRole::norm: return "gradient norm";
    case BufferRole::loss: return "loss";
  }
  PARPLAN_ASSERT(false, "a buffer has a role");
  return "";
}

// Records a buffer's number where the later passes look for it.
void keep(Lowering& lowering, const StageBuffer& buffer, int slot, int number) {
  Program& program = lowering.program;
  const auto bucket = [&]() -> Bucket& { return program.buckets[buffer.of]; };
  switch (buffer.role) {
    case BufferRole::parameters: bucket().parameters = number; break;
    case BufferRole::gradients: bucket().gradients = number; break;
    case BufferRole::second_gradients: bucket().second_gradients = number; break;
    case BufferRole::first_moment: bucket().first_moment = number; break;
    case BufferRole::second_moment: bucket().second_moment = number; break;
    case BufferRole::master: bucket().master = number; break;
    case BufferRole::loss_scale: program.loss_scale_buffer = number; break;
    case BufferRole::gathered: lowering.gathered.push_back(number); break;
    case BufferRole::gathered_tied: lowering.gathered_tied = number; break;
    case BufferRole::unreduced: lowering.unreduced.push_back(number); break;
    case BufferRole::unreduced_tied: lowering.unreduced_tied = number; break;
    case BufferRole::saved: lowering.saved[slot].push_back(number); break;
    case BufferRole::output: lowering.output.push_back(number); break;
    case BufferRole::scratch: lowering.scratch = number; break;
    case BufferRole::gradient: lowering.gradient.push_back(number); break;
    case BufferRole::norm: program.norm_buffer = number; break;
    case BufferRole::loss: program.loss_buffer = number; break;
  }
}

}  // namespace

// Adds every buffer of the list that the memory plan sums, in its order.
void make_buffers(Lowering& lowering) {
  lowering.slots = play_slots(lowering.job.schedule, lowering.program.stage);
  const std::vector<StageBuffer> buffers = buffers_of(lowering);
  const auto add = [&](const StageBuffer& buffer, int slot) {
    std::string of;
    if (buffer.role == BufferRole::saved) of = lowering.graph.blocks[lowering.range.first + buffer.of].name;
    else if (is_persistent(buffer.role) && buffer.role != BufferRole::loss_scale)
      of = lowering.stage_buckets[buffer.of].name;
    else of = fmt::format("{}", slot);
    keep(lowering, buffer, slot,
         add_buffer(lowering.program, fmt::format(fmt::runtime(words(buffer.role)), of, slot), buffer.category,
                    buffer.bytes, is_persistent(buffer.role)));
  };
  for (std::size_t i = 0; i < buffers.size();) {
    std::size_t end = i + 1;
    while (end < buffers.size() && buffers[end].role == buffers[i].role && buffers[end].slots == buffers[i].slots &&
           buffers[i].slots > 1)
      ++end;
    if (buffers[i].role == BufferRole::saved) lowering.saved.resize(static_cast<std::size_t>(buffers[i].slots));
    for (int slot = 0; slot < buffers[i].slots; ++slot)
      for (std::size_t b = i; b < end; ++b) add(buffers[b], slot);
    i = end;
  }
}

}  // namespace parplan
