#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "planner/program/bucket_work.h"
#include "planner/program/lowering_state.h"
#include "planner/program/workspace.h"

namespace parplan {
namespace {

// Elements [begin, end) of a rank's shard of a bucket.
using Range = BucketRange;

Piece loss_scale_piece(const Program& program, Access access) {
  return {*program.loss_scale_buffer, 0, sizeof(LossScale), access};
}

void clear(Lowering& lowering, int buffer) {
  const std::int64_t bytes = lowering.program.buffers[buffer].bytes;
  if (bytes == 0) return;
  call_on_pieces(lowering, "fill_zero", Stream::compute,
                 {clear_gradients(bytes / size_of(DataType::fp32), Label::optimizer)},
                 {{{buffer, 0, bytes, Access::write}}});
}

// Reduces the gradients of parameters that every rank of an axis holds whole, but whose gradients
// each rank computed from its share of the tokens. `accumulators`: the buffers that hold them.
void reduce_partial_gradients(Lowering& lowering, std::size_t index, const BufferIds& accumulators, Axis axis) {
  const Bucket& bucket = lowering.program.buckets[index];
  std::vector<Piece> pieces;
  for (const int gradients : accumulators)
    for (const Range& range : ranges_where(lowering.rank_buckets[index].layout, bucket.units,
                                           [&](const BucketLayout::Run& run) { return run.partial[axis]; }))
      pieces.push_back(gradient_piece(lowering, index, gradients, range, Access::update));
  if (!pieces.empty())
    collective(lowering, fmt::format("{}.all_reduce.gradients", axis_word(axis)), InstructionKind::all_reduce_sum,
               all_along(axis), pieces, gradient_type(lowering.job.training));
}

// Reduces the gradients of rows of which several tensor-parallel ranks hold copies: each computed
// them from its own query heads.
void reduce_gradients_of_copies(Lowering& lowering, std::size_t index, int gradients) {
  const BucketLayout& layout = lowering.rank_buckets[index].layout;
  std::set<int> sizes;
  for (const BucketLayout::Run& run : layout.runs)
    if (run.copies > 1) sizes.insert(run.copies);
  for (const int size : sizes) {
    std::vector<Piece> pieces;
    for (const Range& range : ranges_where(layout, lowering.program.buckets[index].units,
                                           [&](const BucketLayout::Run& run) { return run.copies == size; }))
      pieces.push_back(gradient_piece(lowering, index, gradients, range, Access::update));
    if (!pieces.empty())
      collective(lowering, "tensor.all_reduce.gradients_of_copies", InstructionKind::all_reduce_sum,
                 holders_of_copies(size), pieces, gradient_type(lowering.job.training));
  }
}

// Adds the gradients of the uses of a tied parameter: two accumulators of this rank, or those of
// ranks of the pipeline.
void add_tied(Lowering& lowering, std::size_t index) {
  const Bucket& bucket = lowering.program.buckets[index];
  if (!lowering.rank_buckets[index].tied || !bucket.gradients) return;
  const Range shard = shard_of(bucket);
  const Piece sum = gradient_piece(lowering, index, *bucket.gradients, shard, Access::update);
  if (bucket.second_gradients) {
    call_on_pieces(lowering, "add_tied_gradients", Stream::compute,
                   {accumulate_gradients(bucket.shard_elements, Stream::compute, Label::optimizer)},
                   {{gradient_piece(lowering, index, *bucket.second_gradients, shard, Access::read), sum}});
  } else if (!lowering.program.group(tied_stages).empty()) {
    collective(lowering, "pipeline.all_reduce.tied_gradients", InstructionKind::all_reduce_sum, tied_stages, {sum},
               gradient_type(lowering.job.training));
  }
}

// Whether ranks along the axis hold different blocks, parts of parameters, or shards of their
// state.
bool is_divided(const Layout& layout, Axis axis) {
  if (group_size(layout.mesh, axis) == 1) return false;
  return axis == Axis::pp || std::ranges::any_of(layout.layouts, [&](const BlockLayout& block) {
           return divides_state(block.placements, axis);
         });
}

// Whether another rank counts this whole bucket in the norm: a tied parameter belongs to the rank
// of its first use; and where the data axis shards the state of some blocks, that of the others
// belongs to its first rank. With hybrid sharding, the same holds in each shard group.
bool is_counted_elsewhere(const Lowering& lowering, std::size_t index) {
  const RankBucket& bucket = lowering.rank_buckets[index];
  if (bucket.tied) {
    const std::vector<int>& holders = lowering.program.group(tied_stages);
    if (!holders.empty() && holders.front() != lowering.program.rank) return true;
  }
  return is_divided(lowering.job.layout, Axis::dp) && !bucket.shards.optimizer &&
         replica_rank(lowering.job.layout.mesh, lowering.at) % lowering.job.layout.mesh.shard_ranks() > 0;
}

// The rank's gradients on its host, where that updates or sums squares.
Piece gradients_on_host(const Lowering& lowering, std::size_t index, Range range) {
  const Bucket& bucket = lowering.program.buckets[index];
  return bucket.host_gradients
             ? in_shard(*bucket.host_gradients, range, gradient_bytes(lowering.job.training), Access::read)
             : gradient_piece(lowering, index,
                              is_sum_in_file(lowering, static_cast<int>(index)) ? lowering.sum_in.at(index)
                                                                                : *bucket.gradients,
                              range, Access::read);
}

// The sum of squares over every parameter of the model, each counted once.
void compute_norm(Lowering& lowering) {
  const Program& program = lowering.program;
  std::vector<Instruction> instructions;
  std::vector<std::vector<Piece>> pieces;
  const bool on_host = sums_squares_on_host(lowering);
  const Piece norm{*program.norm_buffer, 0, 4, Access::update};
  const Piece sum{on_host ? *program.host_norm_buffer : *program.norm_buffer, 0, 4, Access::update};
  const std::int64_t workspace = on_host ? 0 : norm_scratch_bytes(lowering.job.training, lowering.job.backend).count;
  BufferIds frees;
  if (workspace > 0) frees.push_back(lowering.scratch);
  // What several ranks of an axis hold belongs to the first, where the sum goes over that axis.
  PerAxis<bool> is_later;
  for (const Axis axis : parameter_axes)
    is_later[axis] = lowering.at[axis] > 0 && is_divided(lowering.job.layout, axis);
  const auto counts_here = [&](const BucketLayout::Run& run) {
    return lowering.at.tp % run.copies == 0 &&
           std::ranges::none_of(parameter_axes, [&](Axis axis) { return run.replicated[axis] && is_later[axis]; });
  };
  const auto sum_on_host = [&] {
    if (!instructions.empty()) call_on_pieces(lowering, "gradient_norm", Stream::host, std::move(instructions), pieces);
    instructions.clear();
    pieces.clear();
  };
  for (std::size_t index = 0; index < program.buckets.size(); ++index) {
    const Bucket& bucket = program.buckets[index];
    if (!bucket.gradients || is_counted_elsewhere(lowering, index)) continue;
    const std::vector<Range> ranges = ranges_where(lowering.rank_buckets[index].layout, bucket.units, counts_here);
    const bool in_file = is_sum_in_file(lowering, static_cast<int>(index)) && !ranges.empty();
    if (in_file) {
      sum_on_host();
      read_sum(lowering, static_cast<int>(index), ranges);
    }
    for (const Range& range : ranges) {
      const std::int64_t elements = range.end - range.begin;
      if (!on_host)
        for (Instruction& copy : norm_copies(elements, lowering.job.training)) {
          instructions.push_back(std::move(copy));
          pieces.push_back({gradient_piece(lowering, index, *bucket.gradients, range, Access::read)});
        }
      instructions.push_back(on_host ? sum_of_squares_on_host(elements) : sum_of_squares(elements));
      pieces.push_back({on_host ? gradients_on_host(lowering, index, range)
                                : gradient_piece(lowering, index, *bucket.gradients, range, Access::read),
                        sum});
      if (workspace > 0) pieces.back().push_back({lowering.scratch, 0, workspace, Access::update});
    }
    if (!in_file) continue;
    sum_on_host();
    done_with_sum(lowering, static_cast<int>(index));
  }
  if (on_host) {
    sum_on_host();
    return_norm(lowering);
  }
  const auto reduce = [&](Axis axis) {
    // Replicas of a shard group hold what it holds.
    const GroupKey group = axis == Axis::dp ? shard_group(lowering.job.layout.mesh) : all_along(axis);
    instructions.push_back(communication(InstructionKind::all_reduce_sum, group, Stream::dp));
    pieces.push_back({norm});
  };
  for (const Axis axis : inner_axes_first)
    if (is_divided(lowering.job.layout, axis)) reduce(axis);
  if (on_host && instructions.empty()) return;
  call_on_pieces(lowering, "gradient_norm", Stream::compute, std::move(instructions), pieces, std::move(frees));
}

// What an update finds in one home.
struct UpdateOperands {
  Piece gradient, parameter;
  std::optional<Piece> norm, loss_scale;
  StatePieces state;
};

UpdateOperands operands_on_device(const Lowering& lowering, std::size_t index, Range range) {
  const Program& program = lowering.program;
  const Bucket& bucket = program.buckets[index];
  UpdateOperands operands{.gradient = gradient_piece(lowering, index, *bucket.gradients, range, Access::read),
                          .parameter = parameter_piece(lowering, index, range, Access::update),
                          .norm = {},
                          .loss_scale = {},
                          .state = state_pieces(lowering, index, range)};
  if (program.norm_buffer) operands.norm = {*program.norm_buffer, 0, 4, Access::read};
  if (program.loss_scale_buffer) operands.loss_scale = loss_scale_piece(program, Access::read);
  return operands;
}

// In fp32, the master copy is what is updated.
UpdateOperands operands_on_host(const Lowering& lowering, std::size_t index, Range range) {
  const Program& program = lowering.program;
  const Bucket& bucket = program.buckets[index];
  const TrainingSpec& training = lowering.job.training;
  UpdateOperands operands = operands_on_device(lowering, index, range);
  operands.gradient = gradients_on_host(lowering, index, range);
  if (bucket.host_parameters)
    operands.parameter = in_shard(*bucket.host_parameters, range, size_of(training.precision), Access::update);
  else if (operands.state.master && !is_half(training.precision))
    operands.parameter = *std::exchange(operands.state.master, std::nullopt);
  if (operands.state.parameters) operands.parameter = *operands.state.parameters;
  if (operands.norm) operands.norm->buffer = *program.host_norm_buffer;
  if (operands.loss_scale) operands.loss_scale->buffer = *program.host_loss_scale_buffer;
  return operands;
}

void update(Lowering& lowering, std::size_t index) {
  const Bucket& bucket = lowering.program.buckets[index];
  if (bucket.shard_elements == 0 || !bucket.gradients) return;
  const bool on_host = updates_on_host(lowering.rank_buckets[index].homes),
             in_file = is_sum_in_file(lowering, static_cast<int>(index));
  std::vector<Instruction> instructions;
  std::vector<std::vector<Piece>> pieces;
  const auto add = [&](Range range, bool decays) {
    if (in_file && instructions.empty()) read_sum(lowering, static_cast<int>(index), {shard_of(bucket)});
    const UpdateCopies copies =
        on_host ? UpdateCopies{} : update_copies(range.end - range.begin, lowering.job.training);
    for (const Instruction& copy : copies.before) {
      instructions.push_back(copy);
      pieces.push_back({gradient_piece(lowering, index, *bucket.gradients, range, Access::update)});
    }
    instructions.push_back(
        (on_host ? update_on_host : update_parameters)(range.end - range.begin, decays, lowering.job.training));
    const UpdateOperands operands = (on_host ? operands_on_host : operands_on_device)(lowering, index, range);
    std::vector<Piece>& all = pieces.emplace_back(std::vector{operands.gradient, operands.parameter});
    const StatePieces& state = operands.state;
    for (const std::optional<Piece>& piece : {state.first_moment, state.second_moment, state.first_scales,
                                              state.second_scales, operands.norm, state.master, operands.loss_scale})
      if (piece) all.push_back(*piece);
    for (const Instruction& copy : copies.behind) {
      instructions.push_back(copy);
      pieces.push_back({parameter_piece(lowering, index, range, Access::update)});
    }
  };
  for (const bool decays : {true, false})
    for (const Range& range :
         ranges_where(lowering.rank_buckets[index].layout, bucket.units,
                      [&](const BucketLayout::Run& run) { return run.decays == decays && !run.is_matrix; }))
      add(range, decays);
  if (instructions.empty()) return;
  call_on_pieces(lowering, "optimizer", on_host ? Stream::host : Stream::compute, std::move(instructions), pieces);
  if (in_file) done_with_sum(lowering, static_cast<int>(index));
}

// Comes after every optimizer call of the step, which read the scale that the gradients were
// computed with. The norm is that of the whole model on every rank, so that all ranks keep the same
// scale.
void update_loss_scale(Lowering& lowering) {
  const Program& program = lowering.program;
  call_on_pieces(lowering, "update_loss_scale", Stream::compute,
                 {flat_kernel(OpKind::update_loss_scale, 1, Stream::compute, Label::optimizer)},
                 {{{*program.norm_buffer, 0, 4, Access::read}, loss_scale_piece(program, Access::update)}});
}

// ZeRO-1 and 2: each rank has updated its shard of the whole bucket.
void gather_in_place(Lowering& lowering, std::size_t index) {
  const Bucket& bucket = lowering.program.buckets[index];
  const DataShards shards = lowering.rank_buckets[index].shards;
  if (!shards.optimizer || shards.parameters || bucket.elements == 0 || !bucket.gradients) return;
  const DataType type = in_memory(lowering.job.training.precision);
  call_on_pieces(lowering, "data.all_gather.parameters", Stream::dp,
                 {communication(InstructionKind::all_gather, shard_group(lowering.job.layout.mesh), Stream::dp, type)},
                 {{parameter_piece(lowering, index, shard_of(bucket), Access::read),
                   {bucket.parameters, 0, bucket.elements * size_of(type), Access::write}}});
}

// Under engines with persists_below: the small parameters of a block's bucket that were updated,
// into where it is gathered. They count as its last ones.
void gather_persistent(Lowering& lowering, std::size_t index) {
  const Bucket& bucket = lowering.program.buckets[index];
  const RankBucket& of = lowering.rank_buckets[index];
  const Engine& engine = lowering.job.training.engine;
  if (of.frozen || of.tied || !of.shards.parameters || of.homes.parameters != Home::device ||
      lowering.gathered.empty() ||
      gather_unit(lowering.job, of.blocks.front()) != GatherUnit::parameter)
    return;
  const std::int64_t ranks = of.shard_ranks;
  const SmallParameters small = small_parameters(of.layout, engine.persists_below, ranks);
  if (small.count == 0) return;
  const DataType type = in_memory(lowering.job.training.precision);
  const std::int64_t element = size_of(type);
  const std::int64_t own = std::min(ceil_div(small.elements, ranks), bucket.shard_elements);
  const int whole = lowering.gathered.front();
  const Piece all{whole, (bucket.elements - own * ranks) * element, own * ranks * element, Access::write};
  const Seconds host =
      is_accelerator(lowering.job.backend)
          ? engine.host_per_persistent_shard * static_cast<double>(small.shards)
          : Seconds(0.0);
  call_on_pieces(lowering, "data.all_gather.persistent_parameters", Stream::dp,
                 {communication(InstructionKind::all_gather, shard_group(lowering.job.layout.mesh), Stream::dp, type),
                  copy_shards(own * ranks, type, host)},
                 {{{bucket.parameters, (bucket.shard_elements - own) * element, own * element, Access::read}, all},
                  {{all.buffer, all.offset, all.bytes, Access::update}}},
                 {whole});
}

// Sums the loss over the axes whose ranks have computed it from different tokens: those of the
// context axis are in the data axis's group.
void reduce_loss(Lowering& lowering) {
  const OpGraph& graph = lowering.graph;
  const int last = static_cast<int>(graph.blocks.size()) - 1;
  const BlockPlacements placed = propagate(graph, graph.blocks[last], block_context(lowering.job, last, lowering.at));
  const auto differs = [&](Axis axis) {
    if (axis == Axis::cp) return false;
    if (axis == Axis::dp)
      return group_size(lowering.job.layout.mesh, axis) > 1 &&
             !(lowering.job.layout.has_master() && lowering.job.training.engine.master_computes_loss);
    for (int i = graph.blocks[last].first_op; i < graph.blocks[last].last_op; ++i)
      for (const TensorId id : graph.ops[i].outputs)
        if (graph.tensors[id].role == TensorRole::loss) return is_partial(placed.produced[id][axis]);
    return false;
  };
  for (const Axis axis : inner_axes_first)
    if (differs(axis))
      collective(lowering, fmt::format("{}.all_reduce.loss", axis_word(axis)), InstructionKind::all_reduce_sum,
                 all_along(axis), {{*lowering.program.loss_buffer, 0, 4}});
}

// The accumulators that a bucket has on the device at the end of the step.
BufferIds accumulators(const Lowering& lowering, std::size_t index) {
  BufferIds buffers;
  if (stages_gradients(lowering, static_cast<int>(index))) return buffers;
  const Bucket& bucket = lowering.program.buckets[index];
  for (const std::optional<int> gradients : {bucket.gradients, bucket.second_gradients})
    if (gradients) buffers.push_back(*gradients);
  return buffers;
}

}  // namespace

void reduce_over_other_axes(Lowering& lowering, int bucket, int gradients) {
  const auto index = static_cast<std::size_t>(bucket);
  for (const Axis axis : parameter_axes) reduce_partial_gradients(lowering, index, {gradients}, axis);
  reduce_gradients_of_copies(lowering, index, gradients);
}

// Gradient accumulators, loss and norm start from zero.
void begin_step(Lowering& lowering) {
  Program& program = lowering.program;
  const int first = lowering.next_call();
  for (std::size_t i = 0; i < program.buckets.size(); ++i)
    for (const int gradients : accumulators(lowering, i)) clear(lowering, gradients);
  if (program.norm_buffer) clear(lowering, *program.norm_buffer);
  if (sums_squares_on_host(lowering)) begin_norm_on_host(lowering);
  if (program.loss_buffer) clear(lowering, *program.loss_buffer);
  program.tasks.push_back({std::nullopt, first, lowering.next_call()});
}

// The remaining reductions, then the optimizer.
void end_step(Lowering& lowering) {
  Program& program = lowering.program;
  const int first = lowering.next_call();
  begin_reads_of_state(lowering);
  reduce_at_end(lowering);
  for (std::size_t i = program.buckets.size(); i-- > 0;)
    for (const Axis axis : parameter_axes) reduce_partial_gradients(lowering, i, accumulators(lowering, i), axis);
  for (std::size_t i = program.buckets.size(); i-- > 0;)
    if (const BufferIds gradients = accumulators(lowering, i); !gradients.empty())
      reduce_gradients_of_copies(lowering, i, gradients.front());
  for (std::size_t i = 0; i < program.buckets.size(); ++i) add_tied(lowering, i);
  for (std::size_t i = 0; i < program.buckets.size(); ++i) copy_other_gradients(lowering, static_cast<int>(i));
  if (program.norm_buffer) compute_norm(lowering);
  copy_norm(lowering);
  for (std::size_t i = 0; i < program.buckets.size(); ++i) update_momentum(lowering, i);
  // Buckets that share buffers for their state are done with one by one, before a later one is
  // read.
  const auto shares = [&](std::size_t bucket) { return lowering.state_in.contains(bucket); };
  for (std::size_t i = 0; i < program.buckets.size(); ++i) {
    update(lowering, i);
    if (!shares(i)) continue;
    copy_updated_parameters(lowering, static_cast<int>(i));
    write_state(lowering, i);
  }
  for (std::size_t i = 0; i < program.buckets.size(); ++i) orthogonalize_matrices(lowering, i);
  for (std::size_t i = 0; i < program.buckets.size(); ++i) move_matrices(lowering, i);
  for (std::size_t i = 0; i < program.buckets.size(); ++i)
    if (!shares(i)) copy_updated_parameters(lowering, static_cast<int>(i));
  if (program.loss_scale_buffer && !lowering.is_replica()) update_loss_scale(lowering);
  for (std::size_t i = 0; i < program.buckets.size(); ++i) gather_in_place(lowering, i);
  if (lowering.job.training.engine.persists_below > 0)
    for (std::size_t i = 0; i < program.buckets.size(); ++i) gather_persistent(lowering, i);
  if (program.loss_buffer) reduce_loss(lowering);
  program.tasks.push_back({std::nullopt, first, lowering.next_call()});
}

}  // namespace parplan
