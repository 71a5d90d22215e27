#include <algorithm>
#include <vector>

#include "planner/program/bucket_work.h"
#include "planner/program/lowering_state.h"

// What goes between the homes where the host's processor updates parameters (ZeRO-Offload, Ren et
// al. 2021, arXiv:2101.06840): gradients of a bucket when the backward has summed them, so that
// their copy overlaps with the backward of other blocks, and the updated parameters.
namespace parplan {
namespace {

// Whether gradients change once more after the data axis has summed them: all of a bucket.
bool changes_later(const Lowering& lowering, int index) {
  if (!lowering.job.training.engine.overlaps_data && group_size(lowering.job.layout.mesh, Axis::dp) > 1) return true;
  if (!lowering.rank_buckets[index].tied) return false;
  return lowering.program.buckets[index].second_gradients || !lowering.program.group(tied_stages).empty();
}
// The same: of a run of parameters.
bool changes_later(const BucketLayout::Run& run) {
  return run.copies > 1 || std::ranges::any_of(parameter_axes, [&](Axis axis) { return run.partial[axis]; });
}

void copy(Lowering& lowering, const char* name, Home to, DataType type, const std::vector<std::vector<Piece>>& pieces) {
  if (pieces.empty()) return;
  const Instruction instruction = copy_to(to, type);
  call_on_pieces(lowering, name, instruction.stream, std::vector(pieces.size(), instruction), pieces);
}

void copy_gradients(Lowering& lowering, int index, bool later) {
  const Bucket& bucket = lowering.program.buckets[index];
  if (!bucket.host_gradients) return;
  const bool whole = changes_later(lowering, index);
  if (whole && !later) return;
  std::vector<std::vector<Piece>> pieces;
  for (const BucketRange& range :
       ranges_where(lowering.rank_buckets[index].layout, shard_of(bucket),
                    [&](const BucketLayout::Run& run) { return whole || changes_later(run) == later; }))
    pieces.push_back(
        {gradient_piece(lowering, index, *bucket.gradients, range, Access::read),
         in_shard(bucket, *bucket.host_gradients, range, gradient_bytes(lowering.job.training), Access::write)});
  copy(lowering, "offload.gradients", Home::host, gradient_type(lowering.job.training), pieces);
}

}  // namespace

void copy_ready_gradients(Lowering& lowering, int bucket) {
  copy_gradients(lowering, bucket, false);
}
void copy_other_gradients(Lowering& lowering, int bucket) {
  copy_gradients(lowering, bucket, true);
}

void copy_norm(Lowering& lowering) {
  const Program& program = lowering.program;
  const auto whole = [&](std::optional<int> from, std::optional<int> to) {
    if (!to) return;
    const std::int64_t bytes = program.buffers[*to].bytes;
    copy(lowering, "offload.norm", Home::host, DataType::fp32,
         {{{*from, 0, bytes, Access::read}, {*to, 0, bytes, Access::write}}});
  };
  whole(program.loss_scale_buffer, program.host_loss_scale_buffer);
  whole(program.norm_buffer, program.host_norm_buffer);
}

void copy_updated_parameters(Lowering& lowering, int index) {
  const Bucket& bucket = lowering.program.buckets[index];
  const StateHomes& homes = lowering.rank_buckets[index].homes;
  if (!updates_on_host(homes) || homes.parameters == Home::host || bucket.shard_elements == 0 || !bucket.gradients)
    return;
  const DataType type = in_memory(lowering.job.training.precision);
  const BucketRange shard = shard_of(bucket);
  copy(lowering, "offload.parameters", Home::device, type,
       {{in_shard(bucket, bucket.host_parameters.value_or(*bucket.master), shard, size_of(type), Access::read),
         parameter_piece(lowering, index, shard, Access::write)}});
}

}  // namespace parplan
