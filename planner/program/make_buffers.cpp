#include <algorithm>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/program/lowering_state.h"
#include "planner/program/memory.h"
#include "planner/program/workspace.h"

namespace parplan {

// Adds the buckets, without buffers, and the places of the parameters in them.
void make_buckets(Lowering& lowering) {
  Program& program = lowering.program;
  lowering.rank_buckets = rank_buckets(lowering.job, lowering.stages, lowering.at);
  for (const RankBucket& from : lowering.rank_buckets) {
    const auto like = std::ranges::find(program.buckets, from.units, &Bucket::units);
    lowering.like_units.push_back(static_cast<int>(like - program.buckets.begin()));
    program.buckets.push_back(
        {.name = from.name,
         .elements = from.elements,
         .units = from.units,
         .shard_elements = from.shard_elements,
         .without_second = from.frozen ? 0 : from.layout.matrix_elements});
    for (ParameterPart part : from.layout.parts) {
      part.bucket = static_cast<int>(program.buckets.size()) - 1;
      program.parameters.push_back(part);
    }
  }
  lowering.tied_buckets.assign(lowering.graph.blocks.size(), std::nullopt);
  lowering.frozen_buckets = lowering.tied_buckets;
  for (std::size_t i = 0; i < lowering.rank_buckets.size(); ++i)
    for (const int block : lowering.rank_buckets[i].blocks) {
      const RankBucket& bucket = lowering.rank_buckets[i];
      if (bucket.tied && !lowering.tied_buckets[block]) lowering.tied_buckets[block] = static_cast<int>(i);
      if (!bucket.tied && bucket.frozen) lowering.frozen_buckets[block] = static_cast<int>(i);
    }
}

namespace {

// Where a rank holds several stages, which share its slots, the largest blocks of all stages lie in
// one place of a slot, the second largest in another, and so on: that takes least. Otherwise blocks
// lie in their order. Those with a buffer on the host come behind the others. `bytes`: of a block;
// `is_elsewhere`: whether it lies in other slots.
template <class BytesOf, class IsElsewhere>
std::vector<int> positions_in_slot(const Lowering& lowering, BytesOf bytes, IsElsewhere is_elsewhere) {
  std::vector<int> positions(lowering.graph.blocks.size());
  int end = 0;
  for (const Home home : all_homes) {
    const int begin = end;
    for (const int stage : lowering.stages) {
      const BlockRange range = lowering.blocks_of(stage);
      std::vector<int> blocks;
      for (int b = range.first; b < range.last; ++b)
        if (!is_elsewhere(b) && lowering.home_of_saved(b) == home) blocks.push_back(b);
      if (lowering.stages.size() > 1) std::ranges::stable_sort(blocks, std::ranges::greater(), bytes);
      for (std::size_t i = 0; i < blocks.size(); ++i) positions[blocks[i]] = begin + static_cast<int>(i);
      end = std::max(end, begin + static_cast<int>(blocks.size()));
    }
  }
  return positions;
}

// Layers of each stage that save elsewhere, and take turns in the places of those behind them, as
// many layers apart as there are of these (`in_place_of`).
void share_places(Lowering& lowering) {
  lowering.in_place_of.assign(lowering.graph.blocks.size(), std::nullopt);
  for (const int stage : lowering.stages) {
    const BlockRange range = lowering.blocks_of(stage);
    std::vector<int> elsewhere, on_device;
    SavedByStage saved;
    for (int b = range.first; b < range.last; ++b) {
      if (!is_layer(lowering.graph, b) || !has_backward(lowering.graph, b)) continue;
      const std::int64_t bytes = lowering.segments_of(b).saved_bytes;
      const bool leaves = lowering.home_of_saved(b) != Home::device;
      (leaves ? elsewhere : on_device).push_back(b);
      if (leaves)
        saved.most_elsewhere = std::max(saved.most_elsewhere, bytes);
      else
        saved.least_on_device = std::min(saved.least_on_device, bytes);
    }
    saved.on_device = static_cast<int>(on_device.size());
    if (!take_turns_with_others(saved)) continue;
    // Counted from the last of them backwards.
    for (std::size_t i = 0; i < elsewhere.size(); ++i)
      lowering.in_place_of[elsewhere[elsewhere.size() - 1 - i]] =
          on_device[on_device.size() - 1 - i % on_device.size()];
  }
}

// The buffers of one rank, each in an entry of its own (`times` is 1); only buffers that take turns
// share an entry.
std::vector<RankBuffer> buffers_of(const Lowering& lowering) {
  std::vector<BucketSizes> buckets;
  for (const RankBucket& bucket : lowering.rank_buckets)
    buckets.push_back(
        {.elements = bucket.elements,
         .shards = bucket.shards,
         .shard_ranks = bucket.shard_ranks,
         .tied = bucket.tied.has_value(),
         .frozen = bucket.frozen,
         .accumulates_twice = bucket.blocks.size() > 1 && lowering.job.layout.tied_gradients == TiedGradients::apart,
         .homes = bucket.homes,
         .of_layer = !bucket.tied && is_layer(lowering.graph, bucket.blocks.front()),
         .reduced = lowering.job.layout.mesh.replica_ranks() > 1 && !lowering.job.layout.has_master(),
         .without_second = bucket.layout.matrix_elements});
  // A slot holds a micro-batch of any of the rank's stages, but not the last block where that has
  // slots of its own.
  std::vector<SavedSizes> saved, for_weights, left;
  std::int64_t gradient = 0;
  std::int64_t sent = 0;
  std::int64_t input = 0;
  std::int64_t head = 0;
  std::int64_t staged = 0, staged_for_weights = 0, in_file = 0;
  const auto take_most = [](std::vector<SavedSizes>& sizes, int position, std::int64_t bytes, Home home) {
    const auto at = static_cast<std::size_t>(position);
    if (sizes.size() <= at) sizes.resize(at + 1);
    sizes[at] = {.bytes = std::max(sizes[at].bytes, bytes), .times = 1, .home = home};
  };
  const Schedule& schedule = lowering.schedule;
  int most_blocks = 0;  // of a stage
  for (const int stage : lowering.stages) {
    const BlockRange range = lowering.blocks_of(stage);
    most_blocks = std::max(most_blocks, range.size());
    for (int b = range.first; b < range.last; ++b) {
      const Lowering::BlockSegments& segments = lowering.segments_of(b);
      const Home home = lowering.home_of_saved(b);
      if (lowering.has_own_slots(b))
        head = std::max(head, segments.saved_bytes);
      else
        take_most(saved, lowering.position_in_slot[b], segments.saved_bytes, home);
      take_most(for_weights, lowering.position_for_weights[b], segments.for_weights_bytes, home);
      take_most(left, lowering.position_for_weights[b], segments.left_bytes, Home::device);
      if (home != Home::device) {
        if (!lowering.in_place_of[b]) staged = std::max(staged, segments.saved_bytes);
        staged_for_weights = std::max(staged_for_weights, segments.for_weights_bytes);
        if (home == Home::nvme) in_file = std::max({in_file, segments.saved_bytes, segments.for_weights_bytes});
      }
      gradient = std::max(gradient, segments.gradient_bytes);
      if (lowering.input_apart[b]) input = std::max(input, segments.input_bytes);
    }
    if (sends(schedule, {stage, Phase::forward, 0}))
      sent = std::max(sent, lowering.segments_of(range.last - 1).output_bytes);
  }
  std::int64_t scratch = step_scratch_bytes(lowering.job.training, lowering.graph, lowering.job.backend).count;
  for (const Segment& segment : lowering.program.segments) scratch = std::max(scratch, segment.scratch_bytes);
  for (const RankBucket& bucket : lowering.rank_buckets)
    scratch = std::max(scratch, orthogonalization_scratch(lowering, bucket));
  std::int64_t freed = 0;
  if (const int last = static_cast<int>(lowering.graph.blocks.size()) - 1;
      schedule.stages() == 1 && lowering.home_of_saved(last) == Home::device)
    freed = lowering.segments_of(last).saved_bytes;
  const RankSizes sizes{
      .buckets = buckets,
      .saved = saved,
      .for_weights = for_weights,
      .left = left,
      .staged_bytes = staged,
      .staged_for_weights_bytes = staged_for_weights,
      .in_file_bytes = in_file,
      .gradient_bytes = gradient,
      .sent_bytes = sent,
      .scratch_bytes = scratch,
      .in_flight = lowering.slots.saved,
      .head_bytes = head,
      .head_in_flight = lowering.slots.head,
      .last_saved_bytes = freed,
      .for_weights_in_flight = lowering.slots.for_weights,
      .left_in_flight = lowering.slots.left,
      .outputs = lowering.slots.outputs,
      .gradients = lowering.slots.gradients,
      .gathered = gathered_buffers(lowering.job.layout.prefetch_depth, lowering.job.training.engine, most_blocks),
      .input_bytes = input,
      .inputs = lowering.slots.inputs,
      .computes_loss = lowering.stages.back() + 1 == schedule.stages() &&
                       !(lowering.is_replica() && lowering.job.training.engine.master_computes_loss),
      .one_backward = schedule.stages() == 1 &&
                      std::ranges::count(schedule.ranks.front(), Phase::forward, &Action::phase) == 1,
      .updates = !lowering.is_replica()};
  std::vector<RankBuffer> buffers;
  for_each_buffer(sizes, lowering.job.training, [&](const RankBuffer& buffer) { buffers.push_back(buffer); });
  return buffers;
}

const char* words(BufferRole role) {
  switch (role) {
    case BufferRole::parameters: return "parameters of {}";
    case BufferRole::gradients: return "gradients of {}";
    case BufferRole::second_gradients: return "second gradients of {}";
    case BufferRole::half_gradients:
      return "gradients of {} in half precision";
    case BufferRole::reduced_copies:
      return "gradients of {} as they are reduced";
    case BufferRole::dummy_gradients:
      return "gradients that nothing reads";
    case BufferRole::reduced_bucket:
      return "bucket of gradients";
    case BufferRole::first_moment: return "first moment of {}";
    case BufferRole::second_moment: return "second moment of {}";
    case BufferRole::first_scales: return "scales of the first moment of {}";
    case BufferRole::second_scales: return "scales of the second moment of {}";
    case BufferRole::master: return "master copy of {}";
    case BufferRole::loss_scale: return "loss scale";
    case BufferRole::staged_state:
      return "what is updated on its way to and from NVMe {}";
    case BufferRole::staged_parameters:
      return "parameters on their way from NVMe {}";
    case BufferRole::host_gradients: return "gradients of {} for the host";
    case BufferRole::host_parameters: return "parameters of {} from the host";
    case BufferRole::host_norm: return "gradient norm for the host";
    case BufferRole::host_loss_scale: return "loss scale for the host";
    case BufferRole::gathered: return "gathered parameters {}";
    case BufferRole::gathered_frozen:
      return "gathered frozen parameters {}";
    case BufferRole::gathered_tied: return "gathered tied parameter";
    case BufferRole::unreduced: return "unreduced gradients {}";
    case BufferRole::unreduced_tied: return "unreduced tied gradients";
    case BufferRole::staged_gradients:
      return "gradients on their way to and from the host {}";
    case BufferRole::staged_sums:
      return "gradients on their way to and from NVMe {}";
    case BufferRole::saved:
    case BufferRole::head:
      return "saved of {}, slot {}";
    case BufferRole::for_weights:
      return "saved of {} for weight gradients, slot {}";
    case BufferRole::left:
      return "left of {} for weight gradients, slot {}";
    case BufferRole::staged:
      return "saved on its way to and from the host {}";
    case BufferRole::staged_for_weights:
      return "saved for weight gradients on its way to and from the host {}";
    case BufferRole::staged_on_host:
      return "saved on its way to and from NVMe {}";
    case BufferRole::input: return "arriving activation {}";
    case BufferRole::output: return "activation to send {}";
    case BufferRole::scratch: return "scratch";
    case BufferRole::gradient: return "activation gradient {}";
    case BufferRole::norm: return "gradient norm";
    case BufferRole::loss: return "loss";
  }
  PARPLAN_ASSERT(false, "a buffer has a role");
  return "";
}

// Whether it is one of a block's buffers for a micro-batch.
bool is_slot(BufferRole role) {
  return role == BufferRole::saved || role == BufferRole::head || role == BufferRole::for_weights ||
         role == BufferRole::left;
}

// Whether each bucket has one, or may have.
bool is_of_bucket(BufferRole role) {
  return (is_persistent(role) && role != BufferRole::loss_scale) || role == BufferRole::host_gradients;
}

// Records a buffer's number where the later passes look for it.
void keep(Lowering& lowering, const RankBuffer& buffer, int slot, int number) {
  Program& program = lowering.program;
  const auto bucket = [&]() -> Bucket& { return program.buckets[buffer.of]; };
  const auto of_position = [&](std::vector<int>& numbers) -> int& {
    numbers.resize(std::max(numbers.size(), buffer.of + 1));
    return numbers[buffer.of];
  };
  switch (buffer.role) {
    case BufferRole::parameters: bucket().parameters = number; break;
    case BufferRole::gradients: bucket().gradients = number; break;
    case BufferRole::second_gradients: bucket().second_gradients = number; break;
    case BufferRole::half_gradients:
    case BufferRole::reduced_copies:
    case BufferRole::dummy_gradients:
    case BufferRole::reduced_bucket:
      break;
    case BufferRole::first_moment: bucket().first_moment = number; break;
    case BufferRole::second_moment: bucket().second_moment = number; break;
    case BufferRole::first_scales: bucket().first_scales = number; break;
    case BufferRole::second_scales: bucket().second_scales = number; break;
    case BufferRole::master: bucket().master = number; break;
    case BufferRole::loss_scale: program.loss_scale_buffer = number; break;
    case BufferRole::staged_state:
      lowering.staged_state.push_back(number);
      break;
    case BufferRole::staged_parameters:
      lowering.staged_parameters.push_back(number);
      break;
    case BufferRole::host_gradients: bucket().host_gradients = number; break;
    case BufferRole::host_parameters: bucket().host_parameters = number; break;
    case BufferRole::host_norm: program.host_norm_buffer = number; break;
    case BufferRole::host_loss_scale: program.host_loss_scale_buffer = number; break;
    case BufferRole::gathered: lowering.gathered.push_back(number); break;
    case BufferRole::gathered_frozen:
      lowering.gathered_frozen.push_back(number);
      break;
    case BufferRole::gathered_tied: lowering.gathered_tied = number; break;
    case BufferRole::unreduced: lowering.unreduced.push_back(number); break;
    case BufferRole::unreduced_tied: lowering.unreduced_tied[static_cast<int>(buffer.of)].buffer = number; break;
    case BufferRole::staged_gradients:
      lowering.staged_gradients.push_back(number);
      break;
    case BufferRole::staged_sums:
      lowering.staged_sums.push_back(number);
      break;
    case BufferRole::saved:
      of_position(lowering.saved[slot]) = number;
      break;
    case BufferRole::head:
      lowering.head.push_back(number);
      break;
    case BufferRole::for_weights:
      of_position(lowering.for_weights[slot]) = number;
      break;
    case BufferRole::left:
      of_position(lowering.left[slot]) = number;
      break;
    case BufferRole::staged:
      lowering.staged.push_back(number);
      break;
    case BufferRole::staged_for_weights:
      lowering.staged_for_weights.push_back(number);
      break;
    case BufferRole::staged_on_host:
      lowering.staged_on_host.push_back(number);
      break;
    case BufferRole::input: lowering.input.push_back(number); break;
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
  lowering.has_sum.assign(lowering.rank_buckets.size(), false);
  int first_back = 0;
  while (first_back < lowering.schedule.stages() && lowering.blocks_of(first_back).last <= lowering.graph.first_trained)
    ++first_back;
  lowering.slots =
      play_slots(lowering.schedule, lowering.program.pipeline_rank, lowering.job.layout.input_slots, first_back);
  lowering.position_in_slot = positions_in_slot(
      lowering, [&](int block) { return lowering.segments_of(block).saved_bytes; },
      [&](int block) { return lowering.has_own_slots(block); });
  lowering.position_for_weights = positions_in_slot(
      lowering, [&](int block) { return Lowering::bytes_for_weights(lowering.segments_of(block)); },
      [](int) { return false; });
  share_places(lowering);
  const std::vector<RankBuffer> buffers = buffers_of(lowering);
  // A slot's buffers are named after the blocks of the first stage that has so many.
  const auto block_name = [&](BufferRole role, std::size_t position) {
    if (role == BufferRole::head) return lowering.graph.blocks.back().name;
    for (const int stage : lowering.stages) {
      const BlockRange range = lowering.blocks_of(stage);
      for (int b = range.first; b < range.last; ++b) {
        const int at = (role == BufferRole::saved ? lowering.position_in_slot : lowering.position_for_weights)[b];
        if (at == static_cast<int>(position) && !(role == BufferRole::saved && lowering.has_own_slots(b)))
          return lowering.graph.blocks[b].name;
      }
    }
    return std::string();
  };
  const auto add = [&](const RankBuffer& buffer, int slot) {
    std::string of;
    if (is_slot(buffer.role))
      of = block_name(buffer.role, buffer.of);
    else if (is_of_bucket(buffer.role))
      of = lowering.rank_buckets[buffer.of].name;
    else of = fmt::format("{}", slot);
    const int number = add_buffer(lowering.program, fmt::format(fmt::runtime(words(buffer.role)), of, slot),
                                  buffer.category, buffer.bytes, is_persistent(buffer.role));
    lowering.program.buffers[number].home = buffer.home;
    lowering.program.buffers[number].counted = buffer.counted;
    lowering.program.buffers[number].kept = buffer.kept;
    keep(lowering, buffer, slot, number);
  };
  for (std::size_t i = 0; i < buffers.size();) {
    std::size_t end = i + 1;
    while (end < buffers.size() && buffers[end].role == buffers[i].role && buffers[end].slots == buffers[i].slots &&
           buffers[i].slots > 1)
      ++end;
    const auto slots = static_cast<std::size_t>(buffers[i].slots);
    if (buffers[i].role == BufferRole::saved) lowering.saved.resize(slots);
    if (buffers[i].role == BufferRole::for_weights) lowering.for_weights.resize(slots);
    if (buffers[i].role == BufferRole::left) lowering.left.resize(slots);
    for (int slot = 0; slot < buffers[i].slots; ++slot)
      for (std::size_t b = i; b < end; ++b)
        if (buffers[b].home == Home::device) add(buffers[b], slot);
    // Backwards, so that what most stages fill comes last: the largest block in the first slot.
    for (int slot = buffers[i].slots; slot-- > 0;)
      for (std::size_t b = end; b-- > i;)
        if (buffers[b].home != Home::device) add(buffers[b], slot);
    i = end;
  }
}

}  // namespace parplan
