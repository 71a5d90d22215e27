#include <algorithm>
#include <vector>

#include "planner/program/bucket_work.h"
#include "planner/program/lowering_state.h"

// What goes between the homes where the host's processor updates parameters (ZeRO-Offload, Ren et
// al. 2021, arXiv:2101.06840): gradients of a bucket when the backward has summed them, so that
// their copy overlaps with the backward of other blocks, and the updated parameters. Where these
// are on the host for good, they are copied up whenever their block computes (ZeRO-Infinity,
// Rajbhandari et al. 2021, arXiv:2104.07857); where they are in a file, from a buffer on the host
// into which they are read ahead.
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

// In fp32, from one home to the other.
void copy_whole(Lowering& lowering, const char* name, int from, int to) {
  const Buffer& target = lowering.program.buffers[to];
  copy(lowering, name, target.home, DataType::fp32,
       {{{from, 0, target.bytes, Access::read}, {to, 0, target.bytes, Access::write}}});
}

void copy_gradients(Lowering& lowering, int index, bool later) {
  const Bucket& bucket = lowering.program.buckets[index];
  if (!bucket.host_gradients) return;
  const bool whole = changes_later(lowering, index);
  if (whole && !later) return;
  std::vector<std::vector<Piece>> pieces;
  for (const BucketRange& range :
       ranges_where(lowering.rank_buckets[index].layout, bucket.units,
                    [&](const BucketLayout::Run& run) { return whole || changes_later(run) == later; }))
    pieces.push_back({gradient_piece(lowering, index, *bucket.gradients, range, Access::read),
                      in_shard(*bucket.host_gradients, range, gradient_bytes(lowering.job.training), Access::write)});
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
  if (program.host_loss_scale_buffer)
    copy_whole(lowering, "offload.norm", *program.loss_scale_buffer, *program.host_loss_scale_buffer);
  if (program.host_norm_buffer) copy_whole(lowering, "offload.norm", *program.norm_buffer, *program.host_norm_buffer);
}

// Gradients whose sums are on the host are not on the device when all are summed.
bool sums_squares_on_host(const Lowering& lowering) {
  const Program& program = lowering.program;
  if (!program.norm_buffer || !program.host_norm_buffer) return false;
  bool any = false, all = true;
  for (std::size_t i = 0; i < program.buckets.size(); ++i) {
    if (!program.buckets[i].gradients || program.buckets[i].elements == 0) continue;
    any = any || stages_gradients(lowering, static_cast<int>(i));
    all = all && updates_on_host(lowering.rank_buckets[i].homes);
  }
  return any && all;
}

void begin_norm_on_host(Lowering& lowering) {
  copy_whole(lowering, "offload.norm", *lowering.program.norm_buffer, *lowering.program.host_norm_buffer);
}

void return_norm(Lowering& lowering) {
  copy_whole(lowering, "fetch.norm", *lowering.program.host_norm_buffer, *lowering.program.norm_buffer);
}

void bring_parameters(Lowering& lowering, int index, int whole) {
  const Bucket& bucket = lowering.program.buckets[index];
  const DataType type = in_memory(lowering.job.training.precision);
  const std::int64_t element = size_of(type);
  const bool is_shard = lowering.rank_buckets[index].shards.parameters;
  const std::int64_t bytes = (is_shard ? bucket.shard_elements : bucket.elements) * element;
  const bool in_file = lowering.rank_buckets[index].homes.parameters == Home::nvme && bytes > 0;
  int from = bucket.parameters;
  if (in_file) {
    from = lowering.staged_parameters[lowering.parameter_stagings++ % lowering.staged_parameters.size()];
    constexpr const char* read = "read.parameters";
    call_again(lowering, {read, 0, bytes, 0}, {bucket.parameters, from}, {}, [&]() -> Call& {
      return call_on_pieces(lowering, read, Stream::from_nvme, {copy_on(Stream::from_nvme, type)},
                            {{{bucket.parameters, 0, bytes, Access::read}, {from, 0, bytes, Access::write}}});
    });
    may_be_early(lowering, bucket.parameters, from);
  }
  constexpr const char* title = "fetch.parameters";
  call_again(lowering, {title, lowering.like_units[index], is_shard ? 1 : 0, 0}, {from, whole},
             in_file ? BufferIds{from} : BufferIds(), [&]() -> Call& {
               const Instruction up = copy_to(Home::device, type);
               std::vector<std::vector<Piece>> pieces;
               for (const auto& [range, at] : held_ranges(bucket, !is_shard))
                 pieces.push_back({{from, at * element, range.size() * element, Access::read},
                                   {whole, range.begin * element, range.size() * element, Access::write}});
               return call_on_pieces(lowering, title, up.stream, std::vector(pieces.size(), up), pieces);
             });
  if (in_file) note_use(lowering, from);
}

void copy_updated_parameters(Lowering& lowering, int index) {
  const Bucket& bucket = lowering.program.buckets[index];
  const StateHomes& homes = lowering.rank_buckets[index].homes;
  if (!updates_on_host(homes) || homes.parameters != Home::device || bucket.shard_elements == 0 || !bucket.gradients)
    return;
  const DataType type = in_memory(lowering.job.training.precision);
  const BucketRange shard = shard_of(bucket);
  Piece updated = bucket.host_parameters ? in_shard(*bucket.host_parameters, shard, size_of(type), Access::read)
                                         : *state_pieces(lowering, static_cast<std::size_t>(index), shard).master;
  updated.access = Access::read;
  copy(lowering, "offload.parameters", Home::device, type,
       {{updated, parameter_piece(lowering, index, shard, Access::write)}});
}

}  // namespace parplan
