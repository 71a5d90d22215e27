#include <utility>
#include <vector>

#include "planner/program/bucket_work.h"
#include "planner/program/lowering_state.h"

// Sums of a bucket's gradients where they are on the host: whenever a backward adds to them they
// are copied into one of a few buffers on the device, and back to the host behind it, as DeepSpeed
// adds up gradients with offload_optimizer (deepspeed/runtime/zero/stage_1_and_2.py,
// async_accumulate_grad_in_cpu_via_gpu; ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840). Additions
// are the device's, in the order of those that stay there.
//
// Where they are in a file, they are read from there and written back each time, by way of a few
// buffers on the host: neither memory ever holds the sums of all buckets. DeepSpeed adds them up in
// memory instead, and has them in a file only between the last backward and the update
// (deepspeed/runtime/zero/stage3.py, partition_grads; ZeRO-Infinity, Rajbhandari et al. 2021,
// arXiv:2104.07857).
namespace parplan {
namespace {

int next_on_host(Lowering& lowering) {
  return lowering.staged_sums[lowering.sum_stagings++ % lowering.staged_sums.size()];
}

// Bytes of a bucket's sum, which have the same place in both buffers.
void copy_sum(Lowering& lowering, const char* title, Stream stream, int from, int to, const Piece& part,
              BufferIds frees) {
  call_again(lowering, {title, part.offset, part.bytes, 0}, {from, to}, std::move(frees), [&]() -> Call& {
    const Piece source{from, part.offset, part.bytes, Access::read}, target{to, part.offset, part.bytes, Access::write};
    return call_on_pieces(lowering, title, stream, {copy_on(stream, gradient_type(lowering.job.training))},
                          {{source, target}});
  });
}

constexpr const char* read = "read.gradients";

Piece whole_sum(const Lowering& lowering, int buffer) {
  return {buffer, 0, lowering.program.buffers[buffer].bytes, Access::read};
}

}  // namespace

bool stages_gradients(const Lowering& lowering, int bucket) {
  const RankBucket& of = lowering.rank_buckets[bucket];
  return lowering.program.buckets[bucket].gradients && of.elements > 0 && !of.tied &&
         of.homes.gradients != Home::device;
}

bool is_sum_in_file(const Lowering& lowering, int bucket) {
  return stages_gradients(lowering, bucket) && lowering.rank_buckets[bucket].homes.gradients == Home::nvme;
}

int fetch_sum(Lowering& lowering, int bucket) {
  const std::vector<int>& buffers = lowering.staged_gradients;
  const int buffer = buffers[lowering.gradient_stagings++ % buffers.size()];
  const Piece sum = whole_sum(lowering, *lowering.program.buckets[bucket].gradients);
  const DataType type = gradient_type(lowering.job.training);
  if (!lowering.has_sum[bucket]) {
    constexpr const char* title = "fill_zero.staged_gradients";
    call_again(lowering, {title, sum.bytes, 0, 0}, {buffer}, {}, [&]() -> Call& {
      return call_on_pieces(lowering, title, Stream::compute,
                            {clear_gradients(sum.bytes / size_of(type), Label::optimizer, type)},
                            {{{buffer, 0, sum.bytes, Access::write}}});
    });
    return buffer;
  }
  const bool in_file = is_sum_in_file(lowering, bucket);
  int from = sum.buffer;
  if (in_file) {
    from = next_on_host(lowering);
    copy_sum(lowering, read, Stream::from_nvme, sum.buffer, from, sum, {});
    may_be_early(lowering, sum.buffer, from);
  }
  copy_sum(lowering, "fetch.gradients", Stream::from_host, from, buffer, sum, in_file ? BufferIds{from} : BufferIds());
  if (in_file) note_use(lowering, from);
  return buffer;
}

void copy_sum_out(Lowering& lowering, int index, int from, bool last_micro_batch) {
  const Bucket& bucket = lowering.program.buckets[index];
  Piece part = whole_sum(lowering, *bucket.gradients);
  const int sum = part.buffer;
  // That is all that the host updates.
  if (last_micro_batch && bucket.shard_elements > 0)
    part = gradient_piece(lowering, index, sum, shard_of(bucket), Access::read);
  lowering.has_sum[index] = true;
  const bool in_file = is_sum_in_file(lowering, index);
  const int to = in_file ? next_on_host(lowering) : sum;
  copy_sum(lowering, "offload.sums", Stream::to_host, from, to, part, {from});
  if (!in_file) return;
  copy_sum(lowering, "write.gradients", Stream::to_nvme, to, sum, part, {to});
  note_use(lowering, to);
  note_use(lowering, sum);
}

void read_sum(Lowering& lowering, int index, const std::vector<BucketRange>& ranges) {
  const auto of = static_cast<std::size_t>(index);
  const int sum = *lowering.program.buckets[of].gradients, on_host = next_on_host(lowering);
  std::vector<std::vector<Piece>> pieces;
  for (const BucketRange& range : ranges)
    pieces.push_back({gradient_piece(lowering, of, sum, range, Access::read),
                      gradient_piece(lowering, of, on_host, range, Access::write)});
  call_on_pieces(lowering, read, Stream::from_nvme,
                 std::vector(pieces.size(), copy_on(Stream::from_nvme, gradient_type(lowering.job.training))), pieces);
  may_be_early(lowering, sum, on_host);
  lowering.sum_in[of] = on_host;
}

void done_with_sum(Lowering& lowering, int index) {
  const int on_host = lowering.sum_in.at(static_cast<std::size_t>(index));
  lowering.program.calls.back().frees.push_back(on_host);
  note_use(lowering, on_host);
}

}  // namespace parplan
