#include <algorithm>
#include <deque>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/program/bucket_work.h"
#include "planner/program/lower_block.h"
#include "planner/program/lowering_state.h"
#include "planner/program/memory.h"
#include "planner/program/scales.h"

namespace parplan {
namespace {

// Parameters --------------------------------------------------------------------------------------

// What an accelerator's host takes for the shards of all ranks, each as the engine says.
Seconds host_of_shards(const Lowering& lowering, Seconds Engine::*of_each) {
  if (!is_accelerator(lowering.job.backend)) return {};
  return lowering.job.training.engine.*of_each * static_cast<double>(lowering.job.layout.mesh.shard_ranks());
}

// Around a gather of several parameters; where lists are gathered, they have copies of their own.
bool copies_coalesced(const Engine& engine) { return engine.copies_coalesced && !engine.lists_shards; }

// Into the whole, unit by unit: this rank's shard, where it is not on the device, and the others'.
void gather_into(Lowering& lowering, int index, int whole) {
  const Bucket& bucket = lowering.program.buckets[index];
  const RankBucket& of = lowering.rank_buckets[index];
  const bool is_brought = of.homes.parameters != Home::device;
  if (is_brought) bring_parameters(lowering, index, whole);
  if (!of.shards.parameters) return;
  const DataType type = in_memory(lowering.job.training.precision);
  const std::int64_t element = size_of(type);
  constexpr const char* title = "data.all_gather.parameters";
  const bool lists = lowering.job.training.engine.lists_shards,
             coalesced = copies_coalesced(lowering.job.training.engine);
  const auto gather_units = [&](std::span<const BucketUnit> units) -> Call& {
    std::vector<Instruction> instructions;
    std::vector<std::vector<Piece>> pieces;
    const auto add = [&](Instruction instruction, std::vector<Piece> on) {
      instructions.push_back(std::move(instruction));
      pieces.push_back(std::move(on));
    };
    for (const BucketUnit& unit : units) {
      const BucketRange& range = unit.range;
      const HeldRange& own = unit.own;
      const auto all = [&](Access access) {
        return Piece{whole, range.begin * element, range.size() * element, access};
      };
      // What is brought is there already.
      if (lists && !is_brought) add(fill_gathered(range.size(), lowering.job.training), {all(Access::write)});
      Instruction gather =
          communication(InstructionKind::all_gather, shard_group(lowering.job.layout.mesh), Stream::dp, type);
      if (lists) gather.submission = host_of_shards(lowering, &Engine::host_per_listed_shard);
      const Piece shard{is_brought ? whole : bucket.parameters, (is_brought ? own.range.begin : own.at) * element,
                        own.range.size() * element, Access::read};
      if (coalesced)
        add(copy_shards(own.range.size(), type, Seconds(0.0)),
            {shard, {whole, own.range.begin * element, own.range.size() * element, Access::update}});
      add(std::move(gather), {shard, all(Access::write)});
      if (lists)
        add(copy_shards(range.size(), type, host_of_shards(lowering, &Engine::host_per_copied_shard)),
            {all(Access::update)});
    }
    return call_on_pieces(lowering, title, Stream::dp, std::move(instructions), pieces);
  };
  // The host awaits each before it makes the list of the next.
  const std::size_t together = lists ? 1 : bucket.units.size();
  for (std::size_t first = 0; first < bucket.units.size(); first += together) {
    const PiecesKey key(title, lowering.like_units[index], is_brought ? 1 : 0, static_cast<std::int64_t>(first));
    const auto make = [&]() -> Call& { return gather_units(std::span(bucket.units).subspan(first, together)); };
    if (is_brought)
      call_again(lowering, key, {whole}, {}, make);
    else if (lists)
      call_again(lowering, key, {whole, bucket.parameters}, {}, make);
    else
      call_again(lowering, key, {bucket.parameters, whole}, {}, make);
  }
}

// The buffers in which the parameters of a block are whole.
struct WholeParameters {
  std::optional<int> own, frozen, tied;
};

// ZeRO-3, or parameters elsewhere: the whole buckets of a block, each gathered or copied into one
// of the buffers that take turns, the first `turning`. Nothing where the block has no such
// parameters of its own.
WholeParameters gather(Lowering& lowering, int block, std::size_t turning) {
  WholeParameters whole;
  const auto gather_bucket = [&](int index, const std::vector<int>& buffers, int& turns) {
    if (lowering.program.buckets[index].elements == 0) return std::optional<int>();
    const int buffer = buffers[turns++ % std::min(turning, buffers.size())];
    gather_into(lowering, index, buffer);
    return std::optional(buffer);
  };
  whole.own = gather_bucket(lowering.bucket_index(block), lowering.gathered, lowering.gathers);
  if (const std::optional<int> frozen = lowering.frozen_buckets[block])
    whole.frozen = gather_bucket(*frozen, lowering.gathered_frozen, lowering.frozen_gathers);
  return whole;
}

// Under engines with gathers_again: for the backward behind a recomputed forward.
void gather_again(Lowering& lowering, int block, const WholeParameters& whole) {
  if (!lowering.job.training.engine.gathers_again || !lowering.shards_of(block).parameters ||
      lowering.job.layout.of_block(block).recompute != Recompute::full || !may_recompute(lowering.graph.blocks[block]))
    return;
  if (whole.own) gather_into(lowering, lowering.bucket_index(block), *whole.own);
  if (whole.frozen) gather_into(lowering, *lowering.frozen_buckets[block], *whole.frozen);
}

bool are_brought(const Lowering& lowering, int block) {
  const RankBucket& bucket = lowering.rank_buckets[lowering.bucket_index(block)];
  return are_brought(bucket.shards, bucket.homes);
}

// Under engines with copies_gathered or copies_coalesced: the parameters of one buffer are copied
// before they are used. Where that is on a stream of its own, it is counted in line all the same:
// blocks of products leave no room on a multiprocessor for others (planner/cost/contention.h).
void copy_gathered(Lowering& lowering, std::optional<int> whole, std::int64_t elements) {
  const Engine& engine = lowering.job.training.engine;
  if (!whole || !(engine.copies_gathered || copies_coalesced(engine)) || elements == 0) return;
  const DataType type = in_memory(lowering.job.training.precision);
  constexpr const char* title = "parameters.copy";
  call_again(lowering, {title, elements, 0, 0}, {*whole}, {}, [&]() -> Call& {
    return call_on_pieces(lowering, title, Stream::compute,
                          {flat_kernel(OpKind::copy, elements, Stream::compute, Label::compute, type)},
                          {{{*whole, 0, elements * size_of(type), Access::update}}});
  });
}

// Runs `visit(block, WholeParameters)` over blocks while their parameters are whole; `visit`
// returns the number of the block's call. While one block computes, those of blocks_ahead are
// gathered. In a forward, buffers alone keep gathers from running further ahead; in a backward they
// are also behind reductions.
template <class Visit>
void visit_blocks(Lowering& lowering, const std::vector<int>& blocks, Phase phase, Visit visit) {
  const int depth = lowering.job.layout.prefetch_depth;
  const Engine& engine = lowering.job.training.engine;
  const auto ahead = static_cast<std::size_t>(blocks_ahead(depth, engine, phase)),
             turning = phase == Phase::forward ? ahead + 1 : lowering.gathered.size();
  std::deque<WholeParameters> ready;  // of blocks [i, gathered) whose parameters are brought
  std::size_t gathered = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    for (; gathered < blocks.size() && gathered <= i + ahead; ++gathered)
      if (are_brought(lowering, blocks[gathered])) {
        ready.push_back(gather(lowering, blocks[gathered], turning));
        if (phase == Phase::backward) gather_again(lowering, blocks[gathered], ready.back());
      }
    const int block = blocks[i];
    const std::optional<int> tied = lowering.tied_bucket_of(block), frozen = lowering.frozen_buckets[block];
    const auto held = [&](std::optional<int> bucket) {
      return bucket ? std::optional(lowering.program.buckets[*bucket].parameters) : std::nullopt;
    };
    if (!are_brought(lowering, block)) {
      visit(block, {.own = lowering.bucket_of(block).parameters, .frozen = held(frozen), .tied = held(tied)});
      continue;
    }
    WholeParameters current = ready.front();
    ready.pop_front();
    if (tied) {
      current.tied = lowering.gathered_tied;
      gather_into(lowering, *tied, *lowering.gathered_tied);
    }
    copy_gathered(lowering, current.own, lowering.bucket_of(block).elements);
    if (frozen) copy_gathered(lowering, current.frozen, lowering.program.buckets[*frozen].elements);
    if (tied) copy_gathered(lowering, current.tied, lowering.program.buckets[*tied].elements);
    const int call = visit(block, current);
    for (const std::optional<int> buffer : {current.own, current.frozen, current.tied})
      if (buffer) lowering.program.calls[call].frees.push_back(*buffer);
  }
}

// Gradients ---------------------------------------------------------------------------------------

void clear(Lowering& lowering, int buffer, std::int64_t elements) {
  if (elements == 0) return;
  constexpr const char* title = "fill_zero";
  call_again(lowering, {title, elements, 0, 0}, {buffer}, {}, [&]() -> Call& {
    const TrainingSpec& training = lowering.job.training;
    return call_on_pieces(lowering, title, Stream::compute,
                          {clear_gradients(elements, Label::dp, gradient_type(training))},
                          {{{buffer, 0, elements * gradient_bytes(training), Access::write}}});
  });
}

bool is_hybrid(const DeviceMesh& mesh, DataShards shards) {
  return mesh.dp_shard > 0 && shards.optimizer;
}
// The ranks over which a bucket's gradients are summed first.
GroupKey data_group(const DeviceMesh& mesh, DataShards shards) {
  return is_hybrid(mesh, shards) ? shard_group(mesh) : all_along(Axis::dp);
}

// Adds what one micro-batch's backward left in half precision, where it does, to the sum. In fp16,
// what the first left is the sum.
void add_half_gradients(Lowering& lowering, int accumulator, std::int64_t elements, int micro_batch) {
  const TrainingSpec& training = lowering.job.training;
  if (!leaves_half_gradients(training) || elements == 0) return;
  if (gradient_type(training) == training.precision && micro_batch == 0) return;
  constexpr const char* title = "gradients.add";
  call_again(lowering, {title, elements, 0, 0}, {accumulator}, {}, [&]() -> Call& {
    std::vector<Instruction> kernels = add_half_gradients(elements, training);
    const std::vector<std::vector<Piece>> pieces(
        kernels.size(), {{accumulator, 0, elements * gradient_bytes(training), Access::update}});
    return call_on_pieces(lowering, title, Stream::compute, std::move(kernels), pieces);
  });
}

// Under engines with flattens_gradients or widens_gradients: what a micro-batch's backward left in
// half precision becomes the one tensor in fp32 that is reduced. The division by the number of
// ranks is left out, which moves twice as much as the clearing of that tensor, which such engines
// do not need.
void flatten_gradients(Lowering& lowering, int unreduced, std::int64_t elements) {
  const TrainingSpec& training = lowering.job.training;
  if (!training.engine.flattens_gradients && !training.engine.widens_gradients) return;
  if (!is_half(training.precision) || elements == 0) return;
  constexpr const char* title = "gradients.flatten";
  call_again(lowering, {title, elements, 0, 0}, {unreduced}, {}, [&]() -> Call& {
    std::vector<Instruction> kernels = flatten_gradients(elements, training);
    const std::vector<std::vector<Piece>> pieces(
        kernels.size(), {{unreduced, 0, elements * gradient_bytes(training), Access::update}});
    return call_on_pieces(lowering, title, Stream::compute, std::move(kernels), pieces);
  });
}

// Under engines with copies_sharded: what a micro-batch's backward left becomes the bucket that is
// reduced, in line, as copy_gathered has it.
void copy_to_bucket(Lowering& lowering, int unreduced, std::int64_t elements) {
  const TrainingSpec& training = lowering.job.training;
  if (clears_sharded(training) || elements == 0) return;
  constexpr const char* title = "gradients.bucket";
  call_again(lowering, {title, elements, 0, 0}, {unreduced}, {}, [&]() -> Call& {
    std::vector<Instruction> kernels = sharded_copies(elements, training);
    const std::vector<std::vector<Piece>> pieces(
        kernels.size(), {{unreduced, 0, elements * size_of(training.precision), Access::update}});
    return call_on_pieces(lowering, title, Stream::compute, std::move(kernels), pieces);
  });
}

// Hybrid sharding: sums a shard over the ranks that hold the same one.
void reduce_over_replicas(Lowering& lowering, const Piece& shard) {
  collective(lowering, "data.all_reduce.shards", InstructionKind::all_reduce_sum, shard_replicas, {shard},
             reduced_type(lowering.job.training));
}

// Sums a bucket's accumulated gradients, which are whole on every rank, over the data axis.
void reduce_accumulated(Lowering& lowering, int index, int accumulator) {
  const Bucket& bucket = lowering.program.buckets[index];
  const DeviceMesh& mesh = lowering.job.layout.mesh;
  const DataShards shards = lowering.rank_buckets[index].shards;
  const BucketReduction reduction = accumulated_reduction(bucket.elements, shards, lowering.job.training);
  const std::int64_t element = reduced_bytes(lowering.job.training);
  std::vector<Instruction> instructions = reduction.before;
  instructions.push_back(
      communication(reduction.kind, data_group(mesh, shards), Stream::dp, reduced_type(lowering.job.training)));
  instructions.insert(instructions.end(), reduction.after.begin(), reduction.after.end());
  std::vector<std::vector<Piece>> pieces;
  for (const Instruction& one : instructions)
    pieces.push_back({{accumulator, 0, bucket.elements * size_of(one.type), Access::update}});
  call_on_pieces(lowering, fmt::format("data.{}.gradients", name(reduction.kind)), Stream::dp, std::move(instructions),
                 pieces);
  if (is_hybrid(mesh, shards))
    reduce_over_replicas(lowering, {accumulator, begin_in_whole(bucket) * element, bucket.shard_elements * element});
}

// Comes after a block's backward. Without sharded gradients, the accumulated bucket is reduced
// once, after the last micro-batch: here, beside the backwards of other blocks, or at the end of
// the step under engines that overlap nothing with it (reduce_at_end). With them, each
// micro-batch's bucket is reduced and added to this rank's shard. With hybrid sharding, this sums
// over the shard group; shards are summed over the replicas of the group once, after the last
// micro-batch.
void reduce_over_data_axis(Lowering& lowering, int index, int accumulator, int unreduced, bool last_micro_batch) {
  const Bucket& bucket = lowering.program.buckets[index];
  const DataShards shards = lowering.rank_buckets[index].shards;
  const DeviceMesh& mesh = lowering.job.layout.mesh;
  if (group_size(mesh, Axis::dp) == 1 || bucket.elements == 0 || lowering.job.layout.has_master()) return;
  if (!shards.gradients) {
    if (last_micro_batch && lowering.job.training.engine.overlaps_data)
      reduce_accumulated(lowering, index, accumulator);
    return;
  }
  const std::int64_t element = gradient_bytes(lowering.job.training), sent = reduced_bytes(lowering.job.training);
  const char* const title = gradient_reduction(shards, lowering.job.training) == InstructionKind::reduce_scatter
                                ? "data.reduce_scatter.gradients"
                                : "data.all_reduce.gradients";
  call_again(lowering, {title, lowering.like_units[index], 0, 0}, {unreduced, accumulator}, {unreduced},
             [&]() -> Call& {
               std::vector<Instruction> instructions;
               std::vector<std::vector<Piece>> pieces;
               for (const auto& [range, own] : bucket.units) {
                 if (lowering.job.training.engine.lists_shards) {
                   // The division, and the copies, which the host submits beside the backward.
                   const Instruction copy =
                       copy_shards(range.size(), reduced_type(lowering.job.training), Seconds(0.0));
                   instructions.insert(instructions.end(), {copy, copy});
                   pieces.insert(pieces.end(), 2,
                                 {{unreduced, range.begin * sent, range.size() * sent, Access::update}});
                 }
                 instructions.push_back(communication(gradient_reduction(shards, lowering.job.training),
                                                      data_group(mesh, shards), Stream::dp,
                                                      reduced_type(lowering.job.training)));
                 pieces.push_back({{unreduced, range.begin * sent, range.size() * sent, Access::update}});
                 instructions.push_back(accumulate_gradients(own.range.size(), Stream::dp, Label::dp));
                 const std::int64_t bytes = own.range.size() * element;
                 pieces.push_back({{unreduced, own.range.begin * element, bytes, Access::read},
                                   {accumulator, own.at * element, bytes, Access::update}});
               }
               return call_on_pieces(lowering, title, Stream::dp, std::move(instructions), pieces);
             });
  if (last_micro_batch && is_hybrid(mesh, shards))
    reduce_over_replicas(lowering, {accumulator, 0, bucket.shard_elements * sent});
}

// The buffer in which a bucket's gradients add up while backwards visit its block: its own, or one
// that takes turns, filled from the host one block ahead.
class Accumulators {
 public:
  explicit Accumulators(Lowering& lowering) : lowering_(lowering) {}

  int of(int bucket) {
    if (!stages_gradients(lowering_, bucket)) return *lowering_.program.buckets[bucket].gradients;
    if (!is_fetched_) return fetch_sum(lowering_, bucket);
    is_fetched_ = false;
    return fetched_;
  }
  void prefetch(int bucket) {
    is_fetched_ = stages_gradients(lowering_, bucket);
    if (is_fetched_) fetched_ = fetch_sum(lowering_, bucket);
  }

 private:
  Lowering& lowering_;
  int fetched_ = 0;
  bool is_fetched_ = false;
};

// Takes the gradients that are complete, those of the last micro-batch's whole backward, on to
// where they are updated; others stay in `accumulator`, or go to the host.
void pass_gradients_on(Lowering& lowering, int bucket, int accumulator, bool are_complete) {
  if (stages_gradients(lowering, bucket)) {
    if (are_complete) reduce_over_other_axes(lowering, bucket, accumulator);
    copy_sum_out(lowering, bucket, accumulator, are_complete);
  } else if (are_complete) {
    copy_ready_gradients(lowering, bucket);
  }
}

// Stages ------------------------------------------------------------------------------------------

// Whether an action is of the last micro-batch, after which gradients are whole.
bool is_last(const Lowering& lowering, const Action& action) {
  return action.micro_batch + 1 == micro_batches(lowering.job.layout, lowering.job.training, lowering.at.dp);
}

// Communication of one buffer: over a group, or with a neighbouring stage.
Call& communicate(Lowering& lowering, const char* what, InstructionKind kind, GroupKey group, Access access, int buffer,
                  std::int64_t bytes) {
  return call_again(lowering, {what, static_cast<std::int64_t>(kind), static_cast<std::int64_t>(group.members), bytes},
                    {buffer}, {}, [&]() -> Call& {
                      const Stream stream = stream_of(kind, group);
                      const DataType type = in_memory(lowering.job.training.precision);
                      return call_on_pieces(lowering, fmt::format("pipeline.{}.{}", name(kind), what), stream,
                                            {communication(kind, group, stream, type)}, {{{buffer, 0, bytes, access}}});
                    });
}

// What crosses the boundary after a block: an activation, or its gradient.
struct Crossing {
  const char* what;
  int block;
  std::int64_t bytes;
};

int parts_of(const Lowering& lowering, const Crossing& crossing) {
  const Layout& layout = lowering.job.layout;
  return transfer_parts(layout.of_block(crossing.block).placements.residual, layout.mesh, lowering.job.training.engine);
}

Call& send(Lowering& lowering, const Crossing& crossing, int stage, int neighbour, int buffer) {
  return communicate(lowering, crossing.what, InstructionKind::send, towards(lowering.schedule, stage, neighbour),
                     Access::read, buffer, crossing.bytes / parts_of(lowering, crossing));
}

void receive(Lowering& lowering, const Crossing& crossing, int stage, int neighbour, int buffer) {
  const int parts = parts_of(lowering, crossing);
  communicate(lowering, crossing.what, InstructionKind::receive, towards(lowering.schedule, stage, neighbour),
              Access::write, buffer, crossing.bytes / parts);
  if (parts > 1)
    communicate(lowering, crossing.what, InstructionKind::all_gather, all_along(Axis::tp), Access::update, buffer,
                crossing.bytes);
}

// The buffer of the activation that enters a stage, where it lies apart from what its first block
// saves.
std::optional<int> input_of_stage(const Lowering& lowering, BlockRange range, const ActionSlots& slots) {
  return lowering.input_apart[range.first] ? std::optional(lowering.input[slots.input]) : std::nullopt;
}

// The neighbouring stage from which an action receives its input, or to which it sends its result:
// nothing where there is none, or where it is on this rank.
std::optional<int> stage_elsewhere(const Lowering& lowering, const std::optional<Action>& neighbour) {
  if (!neighbour || lowering.rank_of_stage(neighbour->stage) == lowering.program.pipeline_rank) return std::nullopt;
  return neighbour->stage;
}

// In fp8 under engines with scale_history, behind a pass through a stage that runs products in fp8,
// before its result is sent: magnitudes of all such products of the rank, by way of scratch. Also
// those of products whose blocks have no backward: TransformerEngine lists both at the forward.
void reduce_scales(Lowering& lowering, const Action& action) {
  BlockRange ran = lowering.blocks_of(action.stage);
  if (action.phase != Phase::forward) ran.first = std::max(ran.first, lowering.graph.first_trained);
  if (!reduces_scales(lowering.job.training) || products_in_fp8(lowering.graph, ran) == 0) return;
  int products = 0;
  for (const int stage : lowering.stages) products += products_in_fp8(lowering.graph, lowering.blocks_of(stage));
  const std::int64_t magnitudes = magnitudes_of_pass(products, action.phase);
  constexpr const char* title = "scales.all_reduce";
  call_again(lowering, {title, magnitudes, 0, 0}, {lowering.scratch}, {lowering.scratch}, [&]() -> Call& {
    const std::int64_t bytes = magnitudes * size_of(DataType::fp32);
    const auto on = [&](Access access) { return std::vector{Piece{lowering.scratch, 0, bytes, access}}; };
    std::vector<Instruction> work = reduce_scales(magnitudes, lowering.job.layout.mesh, lowering.job.training.engine);
    std::vector<std::vector<Piece>> pieces(work.size(), on(Access::update));
    pieces.front() = on(Access::write);
    pieces.back() = on(Access::read);
    return call_on_pieces(lowering, title, Stream::compute, std::move(work), pieces);
  });
}

void forward(Lowering& lowering, const Action& action, const ActionSlots& slots) {
  hand_out_parameters(lowering);
  const int stages = lowering.schedule.stages();
  const BlockRange range = lowering.blocks_of(action.stage);
  const std::optional<int> from = stage_elsewhere(lowering, input_of(action, stages)),
                           to = stage_elsewhere(lowering, output_of(action, stages));
  // The result, to be sent, or handed over to the next stage of this rank.
  std::optional<int> result;
  if (to) result = lowering.output[slots.exchange];
  if (hands_over(lowering.schedule, action)) result = lowering.input[slots.handed_over];
  const std::optional<int> input = input_of_stage(lowering, range, slots);
  // That of the block that runs, which leaves its output where the next one saves it.
  SavedBuffers own = saved_for_forward(lowering, range.first, slots);
  if (from)
    receive(lowering, {"activation", range.first - 1, lowering.segments_of(range.first).input_bytes}, action.stage,
            *from, input.value_or(own.saved));
  std::vector<int> blocks(static_cast<std::size_t>(range.size()));
  std::iota(blocks.begin(), blocks.end(), range.first);
  visit_blocks(lowering, blocks, Phase::forward, [&](int block, const WholeParameters& parameters) {
    const std::optional<SavedBuffers> next =
        block + 1 < range.last ? std::optional(saved_for_forward(lowering, block + 1, slots)) : std::nullopt;
    const int call = lowering.next_call();
    add_call(lowering, lowering.segments_of(block).forward,
             {{binding::parameters, parameters.own},
              {binding::frozen, parameters.frozen},
              {binding::tied_parameters, parameters.tied},
              {binding::saved, own.saved},
              {binding::for_weights, own.for_weights},
              {binding::input, input},
              {binding::output, next ? next->saved : result},
              {binding::loss, lowering.program.loss_buffer},
              {binding::scratch, lowering.scratch}},
             action.micro_batch, {});
    copy_saved_out(lowering, block, slots, own);
    if (next) own = *next;
    return call;
  });
  reduce_scales(lowering, action);
  if (to)
    send(lowering, {"activation", range.last - 1, lowering.segments_of(range.last - 1).output_bytes}, action.stage, *to,
         *result)
        .frees.push_back(*result);
}

void backward(Lowering& lowering, const Action& action, const ActionSlots& slots) {
  Program& program = lowering.program;
  const int stages = lowering.schedule.stages();
  const BlockRange range = lowering.blocks_of(action.stage);
  const int gradient = lowering.gradient[slots.exchange];
  const std::optional<int> input = input_of_stage(lowering, range, slots);
  std::optional<int> from = stage_elsewhere(lowering, input_of(action, stages)),
                     to = stage_elsewhere(lowering, output_of(action, stages));
  bool passes_on = to || hands_over(lowering.schedule, action);
  // Where nothing before is trained, the backward ends: in this stage, or in one behind it.
  if (!passes_gradient_on(lowering.graph, range.last)) from = std::nullopt;
  if (!passes_gradient_on(lowering.graph, range.first)) to = std::nullopt, passes_on = false;
  const int first = std::max(range.first, lowering.graph.first_trained);
  if (first >= range.last) return;
  const bool last_micro_batch = is_last(lowering, action);
  clear_sent_gradients(lowering, action.micro_batch);
  const bool in_parts = action.phase == Phase::backward_inputs, has_parts = lowering.splits_backward[action.stage] != 0;
  if (from)
    receive(lowering, {"gradient", range.last - 1, lowering.segments_of(range.last - 1).output_bytes}, action.stage,
            *from, gradient);
  std::vector<int> blocks(static_cast<std::size_t>(range.last - first));
  std::iota(blocks.rbegin(), blocks.rend(), first);
  std::optional<SavedBuffers> fetched;  // one block ahead
  Accumulators accumulators(lowering);
  visit_blocks(lowering, blocks, Phase::backward, [&](int block, const WholeParameters& parameters) {
    const int own = lowering.bucket_index(block);
    const Bucket& bucket = program.buckets[own];
    std::optional<int> tied = lowering.tied_bucket_of(block);
    if (tied && lowering.rank_buckets[*tied].frozen) tied = std::nullopt;
    // Where the gradients are summed in the end, and where this backward leaves them. The first
    // block that uses a tied parameter is the last to go backward: uses that share an accumulator
    // are reduced there.
    std::optional<int> tied_accumulator;
    bool completes_tied = false;
    if (tied) {
      const bool is_first_use = block == lowering.rank_buckets[*tied].blocks.front();
      const std::optional<int> second = program.buckets[*tied].second_gradients;
      tied_accumulator = is_first_use || !second ? program.buckets[*tied].gradients : second;
      completes_tied = is_first_use || second;
    }
    const int accumulator = accumulators.of(own);
    if (block > first) accumulators.prefetch(lowering.bucket_index(block - 1));
    int gradients = accumulator;
    std::optional<int> tied_gradients = tied_accumulator;
    if (lowering.shards_of(block).gradients) {
      gradients = lowering.unreduced[lowering.reductions++ % lowering.unreduced.size()];
      if (clears_sharded(lowering.job.training)) clear(lowering, gradients, bucket.elements);
      if (tied) {
        Lowering::UnreducedTied& unreduced = lowering.unreduced_tied.at(*tied);
        tied_gradients = unreduced.buffer;
        if (!unreduced.holds_gradients) clear(lowering, *tied_gradients, program.buckets[*tied].elements);
        unreduced.holds_gradients = !completes_tied;
      }
    }
    const int at = lowering.position_for_weights[block];
    const Lowering::BlockSegments& segments = lowering.segments_of(block);
    const auto [saved, for_weights] = fetched ? *fetched : fetch_saved(lowering, block, slots, action.phase);
    if (block > first) fetched = fetch_saved(lowering, block - 1, slots, action.phase);
    BufferIds frees{saved};
    if (has_parts && (!in_parts || segments.for_first_part.back)) frees.push_back(*for_weights);
    if (input && block == range.first) frees.push_back(*input);
    if (!passes_on && block == first) frees.push_back(gradient);
    const int call = lowering.next_call();
    add_call(lowering, in_parts ? *segments.backward_inputs : *segments.backward,
             {{binding::parameters, parameters.own},
              {binding::frozen, parameters.frozen},
              {binding::tied_parameters, parameters.tied},
              {binding::gradients, gradients},
              {binding::tied_gradients, tied_gradients},
              {binding::saved, saved},
              {binding::for_weights, for_weights},
              {binding::left, in_parts ? std::optional(lowering.left[slots.left][at]) : std::nullopt},
              {binding::input, input},
              {binding::gradient, gradient},
              {binding::loss, program.loss_buffer},
              {binding::loss_scale, program.loss_scale_buffer},
              {binding::scratch, lowering.scratch}},
             action.micro_batch, std::move(frees));
    const bool is_whole = !in_parts || !segments.backward_weights;
    if (is_whole) {
      if (lowering.shards_of(block).gradients) {
        copy_to_bucket(lowering, gradients, bucket.elements);
        flatten_gradients(lowering, gradients, bucket.elements);
      } else {
        add_half_gradients(lowering, gradients, bucket.elements, action.micro_batch);
      }
      reduce_over_data_axis(lowering, own, accumulator, gradients, last_micro_batch);
    }
    pass_gradients_on(lowering, own, accumulator, is_whole && last_micro_batch);
    if (completes_tied && lowering.shards_of(block).gradients) {
      copy_to_bucket(lowering, *tied_gradients, program.buckets[*tied].elements);
      flatten_gradients(lowering, *tied_gradients, program.buckets[*tied].elements);
    }
    if (tied && !lowering.shards_of(block).gradients)
      add_half_gradients(lowering, *tied_gradients, program.buckets[*tied].elements, action.micro_batch);
    if (completes_tied) reduce_over_data_axis(lowering, *tied, *tied_accumulator, *tied_gradients, last_micro_batch);
    if (completes_tied && last_micro_batch) copy_ready_gradients(lowering, *tied);
    return call;
  });
  reduce_scales(lowering, action);
  collect_gradients(lowering);
  if (to)
    send(lowering, {"gradient", range.first - 1, lowering.segments_of(range.first).input_bytes}, action.stage, *to,
         gradient)
        .frees.push_back(gradient);
}

// The second part of a backward. It reads no parameters, and nothing waits for its results but the
// reduction of the block's gradients.
void backward_weights(Lowering& lowering, const Action& action, const ActionSlots& slots) {
  const BlockRange range = lowering.blocks_of(action.stage);
  std::vector<int> blocks;
  for (int block = range.last; block-- > range.first;)
    if (lowering.segments_of(block).backward_weights) blocks.push_back(block);
  std::optional<int> fetched;  // one block ahead
  Accumulators accumulators(lowering);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const int block = blocks[i];
    const auto fetch = [&](int of) { return fetch_saved(lowering, of, slots, action.phase).for_weights; };
    const std::optional<int> for_weights = fetched ? fetched : fetch(block);
    if (i + 1 < blocks.size()) fetched = fetch(blocks[i + 1]);
    const int own = lowering.bucket_index(block), gradients = accumulators.of(own);
    if (i + 1 < blocks.size()) accumulators.prefetch(lowering.bucket_index(blocks[i + 1]));
    const int left = lowering.left[slots.left][lowering.position_for_weights[block]];
    add_call(lowering, *lowering.segments_of(block).backward_weights,
             {{binding::gradients, gradients},
              {binding::for_weights, for_weights},
              {binding::left, left},
              {binding::scratch, lowering.scratch}},
             action.micro_batch, {*for_weights, left});
    add_half_gradients(lowering, gradients, lowering.program.buckets[own].elements, action.micro_batch);
    reduce_over_data_axis(lowering, own, gradients, gradients, is_last(lowering, action));
    pass_gradients_on(lowering, own, gradients, is_last(lowering, action));
  }
}

}  // namespace

void run_actions(Lowering& lowering) {
  const std::vector<Action>& actions = lowering.schedule.ranks[lowering.program.pipeline_rank];
  for (std::size_t i = 0; i < actions.size(); ++i) {
    const int first = lowering.next_call();
    const auto run = actions[i].phase == Phase::forward            ? forward
                     : actions[i].phase == Phase::backward_weights ? backward_weights
                                                                   : backward;
    run(lowering, actions[i], lowering.slots.actions[i]);
    lowering.program.tasks.push_back({actions[i], first, lowering.next_call()});
  }
}

void reduce_at_end(Lowering& lowering) {
  if (lowering.job.training.engine.overlaps_data || group_size(lowering.job.layout.mesh, Axis::dp) == 1 ||
      lowering.job.layout.has_master())
    return;
  const std::vector<Bucket>& buckets = lowering.program.buckets;
  for (std::size_t i = buckets.size(); i-- > 0;) {
    const auto index = static_cast<int>(i);
    if (buckets[i].elements == 0 || !buckets[i].gradients || lowering.rank_buckets[i].shards.gradients) continue;
    reduce_accumulated(lowering, index, *buckets[i].gradients);
    if (buckets[i].second_gradients) reduce_accumulated(lowering, index, *buckets[i].second_gradients);
  }
}

}  // namespace parplan
