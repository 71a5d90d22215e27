#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "planner/cluster/mesh.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/offload.h"
#include "planner/plan/recompute.h"
#include "planner/plan/schedule.h"

namespace parplan {

enum class ScheduleKind { gpipe, one_f_one_b, interleaved, zero_bubble_h1, zero_bubble_v, dualpipe_v };
// "gpipe", "1f1b", "interleaved", "zero_bubble_h1", "zero_bubble_v", "dualpipe_v"
const char* name(ScheduleKind kind);
// Whether a schedule's stages go down the ranks and back (v_rank), two on each.
constexpr bool is_v_shaped(ScheduleKind kind) {
  return kind == ScheduleKind::zero_bubble_v || kind == ScheduleKind::dualpipe_v;
}
// Whether a schedule runs backwards in two parts (Phase), and whether a stage does so under it:
// nobody waits for the gradients of the first stage's inputs.
constexpr bool runs_backward_in_parts(ScheduleKind kind) {
  return kind == ScheduleKind::zero_bubble_h1 || is_v_shaped(kind);
}
constexpr bool runs_backward_in_parts(ScheduleKind kind, int stage) {
  return stage > 0 && runs_backward_in_parts(kind);
}
// Whether such a stage runs others of its backwards whole.
constexpr bool also_runs_whole_backwards(ScheduleKind kind) { return kind == ScheduleKind::dualpipe_v; }

// Where the gradients of the uses of a tied parameter add up. `together`: on each rank in one
// accumulator, which is reduced over the data axis once. `apart`: in one accumulator per use, each
// reduced by itself; the sums then do not depend on where stages are cut.
enum class TiedGradients { together, apart };
const char* name(TiedGradients gradients);

// The buffers of a stage for activations that arrive from the stage before: one for each
// micro-batch in flight, or `one_more`, into which the next activation arrives while a backward
// still needs the others.
enum class InputSlots { in_flight, one_more };
const char* name(InputSlots slots);  // "in_flight", "in_flight+1"

// How attention gets at the tokens of the other ranks of the context axis: each gathers the keys
// and values of all; or they exchange tokens for heads before attention, and back after it; or keys
// and values go around the ring of the ranks, which attend to one part after another.
enum class ContextMethod { all_gather, ulysses, ring };
inline constexpr ContextMethod context_methods[] = {ContextMethod::all_gather, ContextMethod::ulysses,
                                                    ContextMethod::ring};
const char* name(ContextMethod method);
// Whether a rank keeps the queries of its own tokens, two chunks of the sequence (ContextChunks).
constexpr bool keeps_queries(ContextMethod method) { return method != ContextMethod::ulysses; }

// How tensor-parallel ranks that share out tokens (sequence parallelism) exchange them beside the
// products that need them: not at all, a product begins when all its rows are there; or around the
// ring of the ranks, and a product is a slice of its rows for each rank: those that have arrived
// are multiplied while the next ones are on their way, and sums of results go around likewise.
enum class TensorOverlap { none, ring };
const char* name(TensorOverlap overlap);

// How the ranks of the data axis come by equal parameters: each reduces the gradients of all and
// updates them; or the first rank, the master of a single process, has the only optimizer,
// computes the loss of all, collects their gradients, and hands parameters out before each forward
// (PyTorch's DataParallel).
enum class DataMethod { all_reduce, master };
const char* name(DataMethod method);

// What one collective of ZeRO-3 gathers of parameters, and one sums of their gradients: what a
// block has of them, or each parameter by itself, of which every rank then has an equal part.
enum class GatherUnit { block, parameter };
const char* name(GatherUnit unit);

// One point of the search space: how the work is distributed.
struct ParallelSpec {
  DeviceMesh mesh;
  bool sequence_parallel = false;
  int zero_stage = 0;
  std::int64_t micro_batch = 1;  // sequences
  // Micro-batches of each replica along the data axis in a step, where they are unlike; else empty.
  std::vector<int> replica_micro_batches;
  ScheduleKind schedule = ScheduleKind::one_f_one_b;
  Recompute recompute = Recompute::none;
  // The layers of each stage that recompute, its first ones; 0: all; so with none and per_stage.
  int recompute_layers = 0;
  // For each stage, where `recompute` is per_stage; else empty.
  std::vector<StageRecompute> stage_recompute;
  std::vector<int> stage_blocks;  // number of the graph's blocks in each stage; empty until they are cut
  int virtual_stages = 1;         // stages on each rank of the pipeline
  // Micro-batches that an interleaved schedule runs through one stage of a rank before the next; 0:
  // as many as the pipeline has ranks.
  int micro_batch_group = 0;
  TiedGradients tied_gradients = TiedGradients::together;
  InputSlots input_slots = InputSlots::in_flight;
  ContextMethod cp_method = ContextMethod::all_gather;  // so where the context axis has one rank
  Offload offload;
  // The layers of each stage whose activations `offload` takes off the device, its first ones; 0:
  // all; so where it takes none.
  int offload_layers = 0;
  DataMethod dp_method = DataMethod::all_reduce;  // so where the data axis has one rank
  TensorOverlap tp_overlap = TensorOverlap::none;  // so without sequence parallelism
  // Blocks whose parameters are gathered, or come from the host, ahead of the one that computes; so
  // where none are.
  int prefetch_depth = 1;
  GatherUnit gather_unit = GatherUnit::block;  // so without ZeRO-3

  int dp() const { return mesh.degree_of(Axis::dp); }
  int tp() const { return mesh.degree_of(Axis::tp); }
  int pp() const { return mesh.degree_of(Axis::pp); }
  int cp() const { return mesh.degree_of(Axis::cp); }
  int replicas() const { return mesh.replica_ranks(); }  // that hold the same parameters
  int shard_ranks() const { return mesh.shard_ranks(); }  // over which ZeRO shards
  int stages() const { return pp() * virtual_stages; }
  StageRecompute recompute_of(int stage) const {
    return recompute == Recompute::per_stage ? stage_recompute[stage] : StageRecompute(recompute, recompute_layers);
  }
  auto operator<=>(const ParallelSpec&) const = default;
};

// Who holds a stage, and the stages of a rank of the pipeline, ascending.
int rank_of_stage(const ParallelSpec& spec, int stage);
std::vector<int> stages_of_rank(const ParallelSpec& spec, int rank);

// What messages about the number of stages say that it should be: "pp is 4", "pp 4 x virtual_stages
// 2 is 8".
std::string stages_text(const ParallelSpec& spec);

// Keys of memos: a whole recipe in which every choice that surely does not matter has its default
// value. A choice that is added to ParallelSpec is part of every key until somebody takes it out:
// forgetting that costs sharing, but never yields another layout's cost.
ParallelSpec placement_key(const ParallelSpec& spec);  // where the tensors of a block lie
// What a block's Segments do.
ParallelSpec block_key(const ParallelSpec& spec, Recompute recompute, const TrainingSpec& training);
ParallelSpec bucket_key(const ParallelSpec& spec);  // the work around a block's parameters
// What all layers recompute at least: none where stages or their layers differ. Cuts balance that:
// so many layers of each stage add the same to each.
Recompute recompute_of_every_layer(const ParallelSpec& spec);
// Whether the parameters of blocks are whole on a device only while they compute: with ZeRO-3, or
// on the host.
bool brings_parameters(const ParallelSpec& spec);
// Whether they are shards over data-parallel ranks, which gather them: with ZeRO-3.
bool gathers_parameters(const ParallelSpec& spec);
// How blocks are cut without regard to memory; used together with the stages' paces.
ParallelSpec cut_key(const ParallelSpec& spec, const TrainingSpec& training);
// How blocks are cut so that they fit; used together with the stages' paces.
ParallelSpec fitting_cut_key(const ParallelSpec& spec);

// The number of micro-batches that each data-parallel rank runs in a step (gradient accumulation),
// and where replicas have unlike numbers, the largest. `global_batch` is a multiple of the
// sequences of one round.
inline std::int64_t micro_batches(const ParallelSpec& spec, const TrainingSpec& training) {
  if (!spec.replica_micro_batches.empty()) return std::ranges::max(spec.replica_micro_batches);
  return training.global_batch / (spec.mesh.batch_ranks() * spec.micro_batch);
}
// That of the replica at this coordinate of the data axis; of none, as above.
inline std::int64_t micro_batches(const ParallelSpec& spec, const TrainingSpec& training, std::optional<int> replica) {
  if (!replica || spec.replica_micro_batches.empty()) return micro_batches(spec, training);
  return spec.replica_micro_batches[static_cast<std::size_t>(*replica)];
}
// The pipeline of a replica with so many micro-batches; without a number, with the most.
inline PipelineShape shape_of(const ParallelSpec& spec, std::int64_t micro_batches) {
  return {spec.pp(), spec.stages(), static_cast<int>(micro_batches),
          spec.micro_batch_group > 0 ? spec.micro_batch_group : spec.pp()};
}
inline PipelineShape shape_of(const ParallelSpec& spec, const TrainingSpec& training) {
  return shape_of(spec, micro_batches(spec, training));
}

}  // namespace parplan
