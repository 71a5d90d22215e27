#include "planner/program/lower.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "planner/graph/engine_graph.h"
#include "planner/program/events.h"
#include "planner/program/lower_block.h"
#include "planner/program/lowering_state.h"
#include "planner/program/scales.h"

namespace parplan {

namespace {

// The ranks of the pipeline that hold users of a tied parameter that is trained, ascending.
std::set<int> holders_of_tied(const Lowering& lowering) {
  std::set<int> holders;
  if (std::ranges::all_of(lowering.graph.tied, [&](TensorId id) { return lowering.graph.tensors[id].frozen; }))
    return holders;
  for (const int block : lowering.tied_blocks)
    holders.insert(lowering.rank_of_stage(lowering.job.layout.stage_of_block(block)));
  return holders;
}

}  // namespace

// The groups that this rank communicates with.
void set_groups(Lowering& lowering) {
  Program& program = lowering.program;
  for (const Axis axis : inner_axes_first)
    if (is_planned(axis) && (!may_be_unnamed(axis) || lowering.job.layout.mesh.degree_of(axis) > 1))
      program.set_group(all_along(axis), group_of(lowering.job.layout.mesh, program.rank, axis));
  if (const int size = lowering.job.layout.mesh.dp_shard; size > 0) {
    const std::vector<int>& all = program.group(all_along(Axis::dp));
    const int own = replica_rank(lowering.job.layout.mesh, lowering.at);
    std::vector<int> shard, replicas;
    for (int at = 0; at < static_cast<int>(all.size()); ++at) {
      if (at / size == own / size) shard.push_back(all[at]);
      if (at % size == own % size) replicas.push_back(all[at]);
    }
    program.set_group(shard_group(lowering.job.layout.mesh), std::move(shard));
    program.set_group(shard_replicas, std::move(replicas));
  }
  if (reduces_scales(lowering.job.training)) {
    std::vector<int> ranks;
    for (int rank = 0; rank < lowering.job.layout.mesh.size(); ++rank)
      if (coordinates_of(lowering.job.layout.mesh, rank).pp == lowering.at.pp) ranks.push_back(rank);
    program.set_group(ranks_of_stage(lowering.job.layout.mesh), std::move(ranks));
  }
  if (const int size = lowering.job.layout.mesh.cp_ulysses; size > 1) {
    const std::vector<int>& all = program.group(all_along(Axis::cp));
    std::vector<int> heads, keys;
    for (int at = 0; at < static_cast<int>(all.size()); ++at) {
      if (at / size == lowering.at.cp / size) heads.push_back(all[at]);
      if (at % size == lowering.at.cp % size) keys.push_back(all[at]);
    }
    program.set_group(exchange_group, std::move(heads));
    program.set_group(keys_group(size), std::move(keys));
  }
  if (const std::set<int> holders = holders_of_tied(lowering);
      holders.size() > 1 && holders.contains(program.pipeline_rank)) {
    const std::vector<int>& pipeline = program.group(all_along(Axis::pp));
    std::vector<int> ranks;
    for (const int holder : holders) ranks.push_back(pipeline[holder]);
    program.set_group(tied_stages, std::move(ranks));
  }
}

// The consecutive ranks of the tensor axis that hold copies of the same rows of its parameters.
void set_holders_of_copies(Lowering& lowering) {
  Program& program = lowering.program;
  const std::vector<int> all = program.group(all_along(Axis::tp));
  for (const ParameterPart& part : program.parameters) {
    if (part.copies == 1) continue;
    const auto first = all.begin() + lowering.at.tp / part.copies * part.copies;
    program.set_group(holders_of_copies(part.copies), {first, first + part.copies});
  }
}

// The neighbours that its instructions exchange with, around the ring of the ranks of an axis.
void set_neighbours(Lowering& lowering) {
  Program& program = lowering.program;
  std::set<GroupKey> neighbours;
  for (const Segment& segment : program.segments)
    for (const Instruction& instruction : segment.instructions)
      if (communicates(instruction.kind) && is_neighbour(instruction.group))
        neighbours.insert(instruction.group);
  for (const GroupKey key : neighbours) {
    const int apart = key.axis == Axis::cp ? lowering.job.layout.mesh.cp_ulysses : 1;
    const std::vector<int> ring = program.group(key.axis == Axis::cp ? keys_group(apart) : all_along(key.axis));
    const int ranks = static_cast<int>(ring.size());
    const int step = is_after(key) ? 1 : ranks - 1;
    program.set_group(key, {ring[(lowering.at[key.axis] / apart + step) % ranks]});
  }
}

// The Segments of blocks of one kind and layout, of backwards those that the actions call.
void lower_blocks(Lowering& lowering) {
  const std::vector<Action>& actions = lowering.schedule.ranks[lowering.program.pipeline_rank];
  for (const int stage : lowering.stages) {
    const bool has_whole = std::ranges::any_of(
        actions, [&](const Action& action) { return action.stage == stage && action.phase == Phase::backward; });
    for (int b = lowering.blocks_of(stage).first; b < lowering.blocks_of(stage).last; ++b) {
      const auto [segments, is_new] = lowering.block_segments.try_emplace(lowering.segments_key(b));
      lowering.segments_at[b] = &segments->second;
      const bool runs_back = has_backward(lowering.graph, b);
      if (!is_new && (segments->second.backward || !has_whole || !runs_back)) continue;
      BlockContext context = block_context(lowering.job, b, lowering.at);
      context.input_apart = lowering.input_apart[b] != 0;
      context.splits_backward = lowering.splits_backward[stage] != 0;
      const LoweredBlock& lowered = lowering.shared.lowered(b, context);
      const int forward = add_segment(lowering.program, lowered.forward);
      const auto add = [&](const Segment& segment, bool is_called) {
        return is_called ? std::optional(add_segment(lowering.program, segment)) : std::nullopt;
      };
      segments->second = {
          .forward = forward,
          .backward = add(lowered.backward, has_whole && runs_back),
          .backward_inputs = add(lowered.backward_inputs, context.splits_backward && runs_back),
          .backward_weights = add(lowered.backward_weights, !lowered.backward_weights.instructions.empty()),
          .saved_bytes = lowered.saved_bytes,
          .for_weights_bytes = lowered.for_weights_bytes,
          .left_bytes = lowered.left_bytes,
          .input_bytes = lowered.input_bytes,
          .output_bytes = lowered.output_bytes,
          .gradient_bytes = lowered.gradient_bytes};
      if (const Home home = lowering.home_of_saved(b); home != Home::device)
        add_saved_copies(lowering, lowered, home, segments->second);
    }
  }
}

// Under engines with lists_shards, the host makes the lists of which gradients are scattered, one
// of all ranks' shards for each parameter, and submits their copies while it submits the block's
// backward, whose last kernel does not end before the host is through.
void list_gradients_beside_backwards(Lowering& lowering) {
  const Engine& engine = lowering.job.training.engine;
  if (!engine.lists_shards || !is_accelerator(lowering.job.backend) || lowering.job.layout.has_master()) return;
  std::set<int> done;  // blocks that are alike share Segments
  for (const int stage : lowering.stages)
    for (int b = lowering.blocks_of(stage).first; b < lowering.blocks_of(stage).last; ++b) {
      const RankBucket& bucket = lowering.rank_buckets[lowering.bucket_index(b)];
      if (!bucket.shards.gradients || bucket.frozen || bucket.shard_ranks == 1) continue;
      const std::int64_t shards = parameters_of(bucket.layout) * bucket.shard_ranks;
      const Seconds host = (engine.host_per_listed_shard + engine.host_per_copied_shard) * static_cast<double>(shards);
      const Lowering::BlockSegments& segments = lowering.segments_of(b);
      for (const std::optional<int> segment : {segments.backward, segments.backward_weights}) {
        if (!segment || !done.insert(*segment).second) continue;
        std::vector<Instruction>& all = lowering.program.segments[*segment].instructions;
        const auto last = std::ranges::find_if(
            all.rbegin(), all.rend(), [](const Instruction& one) { return one.kind == InstructionKind::kernel; });
        if (last != all.rend()) last->submission += host;
      }
    }
}

// What the host takes around modules whose parameters are sharded, and behind gradients that are
// (Engine::host_per_module_forward, host_per_module_backward, host_per_sharded_gradient), spread
// over the kernels of forwards and backwards. Full recompute runs a layer's modules forward again.
void run_hooks_beside_kernels(Lowering& lowering) {
  const Engine& engine = lowering.job.training.engine;
  const Seconds none;
  if (engine.host_per_module_forward == none && engine.host_per_module_backward == none &&
      engine.host_per_sharded_gradient == none)
    return;
  if (!is_accelerator(lowering.job.backend) || lowering.job.layout.has_master()) return;
  std::set<int> done;  // blocks that are alike share Segments
  const auto spread = [&](std::optional<int> number, Seconds host) {
    if (!number || !done.insert(*number).second) return;
    std::vector<Instruction>& all = lowering.program.segments[*number].instructions;
    const auto is_kernel = [](const Instruction& one) { return one.kind == InstructionKind::kernel; };
    const auto kernels = static_cast<double>(std::ranges::count_if(all, is_kernel));
    for (Instruction& one : all)
      if (is_kernel(one)) one.submission += host / kernels;
  };
  for (const int stage : lowering.stages)
    for (int b = lowering.blocks_of(stage).first; b < lowering.blocks_of(stage).last; ++b) {
      const DataShards shards = lowering.shards_of(b);
      const Block& block = lowering.graph.blocks[b];
      const BlockModules of = modules_of(lowering.graph, block);
      const bool repeats = lowering.job.layout.of_block(b).recompute == Recompute::full && may_recompute(block);
      const auto around = [&](Seconds each) {
        return shards.parameters ? each * static_cast<double>(of.modules) : Seconds();
      };
      const Seconds forward = around(engine.host_per_module_forward),
                    again = repeats ? forward : Seconds(),
                    backward = again + around(engine.host_per_module_backward),
                    gradients = shards.gradients
                                    ? engine.host_per_sharded_gradient * static_cast<double>(of.trained)
                                    : Seconds();
      const Lowering::BlockSegments& segments = lowering.segments_of(b);
      spread(segments.forward, forward);
      spread(segments.backward, backward + gradients);
      spread(segments.backward_inputs, segments.backward_weights ? backward : backward + gradients);
      spread(segments.backward_weights, gradients);
    }
}

void count_communication(Program& program) {
  const std::vector<CommunicationVolume> of_segment = sent_by_segment(program);
  for (const Call& call : program.calls) {
    program.communication += of_segment[call.segment];
    for (const Instruction& instruction : program.segments[call.segment].instructions)
      if (instruction.kind == InstructionKind::copy)
        copied_on(program.copied, instruction.stream) += Bytes(instruction.operands.back().bytes);
  }
}

Program lower(JobLowering& shared, int rank) {
  const Job& job = shared.job;
  Lowering lowering(shared, rank);
  set_groups(lowering);
  lower_blocks(lowering);
  make_buckets(lowering);
  list_gradients_beside_backwards(lowering);
  run_hooks_beside_kernels(lowering);
  set_holders_of_copies(lowering);
  make_buffers(lowering);
  begin_step(lowering);
  run_actions(lowering);
  end_step(lowering);
  read_ahead(lowering);
  set_neighbours(lowering);
  order_calls(lowering.program);
  plan_memory(lowering.program, job.training, job.overhead);
  count_communication(lowering.program);
  return std::move(lowering.program);
}

Program lower(const Job& job, int rank) {
  JobLowering shared(job);
  return lower(shared, rank);
}

std::vector<Program> lower_representatives(const Job& job, KnownBlocks* blocks) {
  std::vector<int> ranks(static_cast<std::size_t>(job.layout.mesh.degree_of(Axis::pp)));
  std::iota(ranks.begin(), ranks.end(), 0);
  return lower_representatives(job, ranks, blocks);
}

std::vector<Program> lower_representatives(const Job& job, std::span<const int> named, KnownBlocks* blocks) {
  JobLowering shared(job, blocks);
  std::vector<Program> programs;
  for (const int rank : named) programs.push_back(lower(shared, rank_at(job.layout.mesh, {.pp = rank})));
  return programs;
}

std::vector<Program> lower_replicas(const Job& job, std::span<const int> replicas, KnownBlocks* blocks) {
  JobLowering shared(job, blocks);
  std::vector<Program> programs;
  for (const int replica : replicas)
    for (int rank = 0; rank < job.layout.mesh.degree_of(Axis::pp); ++rank)
      programs.push_back(lower(shared, rank_at(job.layout.mesh, {.pp = rank, .dp = replica})));
  return programs;
}

std::vector<Program> lower_all(const Job& job) {
  JobLowering shared(job);
  std::vector<Program> programs;
  for (int rank = 0; rank < job.layout.mesh.size(); ++rank) programs.push_back(lower(shared, rank));
  return programs;
}

}  // namespace parplan
