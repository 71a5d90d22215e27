#include "planner/program/lower.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "planner/program/events.h"
#include "planner/program/lowering.h"

namespace parplan {

BlockChoice block_choice(const Job& job, int stage, int tensor_rank) {
  return {.placements = job.placements,
          .degree = job.spec.mesh.degree,
          .at = {.tp = tensor_rank},
          .micro_batch = job.spec.micro_batch,
          .recompute = job.spec.recompute_of(stage) == Recompute::full,
          .precision = job.training.precision,
          .backend = job.backend,
          .loss_weight = 1.0 / (static_cast<double>(job.training.global_batch) *
                                static_cast<double>(job.training.sequence_length)),
          .fuse = job.fuse};
}

BlockRange blocks_of_stage(const ParallelSpec& spec, int stage) {
  const auto begin = spec.stage_blocks.begin();
  const int first = std::accumulate(begin, begin + stage, 0);
  return {first, first + spec.stage_blocks[stage]};
}

// The groups that this rank communicates with.
void set_groups(Lowering& lowering) {
  Program& program = lowering.program;
  for (const Axis axis : inner_axes_first)
    if (is_planned(axis)) program.set_group(all_along(axis), group_of(lowering.job.spec.mesh, program.rank, axis));
  const std::vector<int> pipeline = program.group(all_along(Axis::pp));
  const bool crosses = pipeline.size() > 1 && !lowering.graph.tied.empty();
  if (crosses && (lowering.is_first() || lowering.is_last()))
    program.set_group(tied_stages, {pipeline.front(), pipeline.back()});
  if (!lowering.is_last()) program.set_group(next_stage, {pipeline[program.stage + 1]});
  if (!lowering.is_first()) program.set_group(previous_stage, {pipeline[program.stage - 1]});
}

// One pair of Segments for every kind of block on this stage.
void lower_blocks(Lowering& lowering) {
  const BlockChoice choice = block_choice(lowering.job, lowering.program.stage, lowering.at.tp);
  for (int b = lowering.range.first; b < lowering.range.last; ++b) {
    const int kind = lowering.graph.blocks[b].kind;
    if (lowering.kinds.contains(kind)) continue;
    LoweredBlock lowered = lower_block(lowering.graph, b, choice);
    lowering.crossing_bytes = lowered.crossing_bytes;
    const int forward = add_segment(lowering.program, std::move(lowered.forward));
    const int backward = add_segment(lowering.program, std::move(lowered.backward));
    lowering.kinds[kind] = {.forward = forward, .backward = backward, .saved_bytes = lowered.saved_bytes};
  }
}

void count_communication(Program& program) {
  std::vector<CommunicationVolume> of_segment;
  for (const Segment& segment : program.segments) {
    CommunicationVolume volume;
    for (const Instruction& instruction : segment.instructions) {
      if (instruction.kind == InstructionKind::kernel) continue;
      const std::vector<int>& group = program.group(instruction.group);
      const auto at = std::find(group.begin(), group.end(), program.rank) - group.begin();
      volume[instruction.group.axis] +=
          Bytes(sent_bytes(instruction.kind, instruction.operands.back().bytes, size_of(instruction.type),
                           static_cast<int>(group.size()), static_cast<int>(at)));
    }
    of_segment.push_back(volume);
  }
  for (const Call& call : program.calls) program.communication += of_segment[call.segment];
}

Program lower(const Job& job, int rank) {
  Lowering lowering(job, rank);
  set_groups(lowering);
  lower_blocks(lowering);
  make_buckets(lowering);
  make_buffers(lowering);
  begin_step(lowering);
  run_actions(lowering);
  end_step(lowering);
  order_calls(lowering.program);
  plan_memory(lowering.program, job.overhead);
  count_communication(lowering.program);
  return std::move(lowering.program);
}

std::vector<Program> lower_representatives(const Job& job) {
  std::vector<Program> programs;
  for (int stage = 0; stage < job.spec.pp(); ++stage)
    programs.push_back(lower(job, rank_at(job.spec.mesh, {.pp = stage})));
  return programs;
}

std::vector<Program> lower_all(const Job& job) {
  std::vector<Program> programs;
  for (int rank = 0; rank < job.spec.mesh.size(); ++rank) programs.push_back(lower(job, rank));
  return programs;
}

}  // namespace parplan
