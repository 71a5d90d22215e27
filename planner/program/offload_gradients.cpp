#include <vector>

#include "planner/program/bucket_work.h"
#include "planner/program/lowering_state.h"

// Sums of a bucket's gradients where they are on the host: whenever a backward adds to them they
// are copied into one of a few buffers on the device, and back to the host behind it, as DeepSpeed
// adds up gradients with offload_optimizer (deepspeed/runtime/zero/stage_1_and_2.py,
// async_accumulate_grad_in_cpu_via_gpu; ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840). Additions
// are the device's, in the order of those that stay there.
namespace parplan {

bool stages_gradients(const Lowering& lowering, int bucket) {
  const RankBucket& of = lowering.rank_buckets[bucket];
  return lowering.program.buckets[bucket].gradients && of.elements > 0 && !of.tied && of.homes.gradients == Home::host;
}

int fetch_sum(Lowering& lowering, int bucket) {
  const std::vector<int>& buffers = lowering.staged_gradients;
  const int buffer = buffers[lowering.gradient_stagings++ % buffers.size()];
  const int sum = *lowering.program.buckets[bucket].gradients;
  const std::int64_t bytes = lowering.program.buffers[sum].bytes;
  const DataType type = gradient_type(lowering.job.training);
  if (!lowering.has_sum[bucket]) {
    constexpr const char* title = "fill_zero.staged_gradients";
    call_again(lowering, {title, bytes, 0, 0}, {buffer}, {}, [&]() -> Call& {
      return call_on_pieces(lowering, title, Stream::compute,
                            {clear_gradients(bytes / size_of(type), Label::optimizer, type)},
                            {{{buffer, 0, bytes, Access::write}}});
    });
    return buffer;
  }
  constexpr const char* title = "fetch.gradients";
  call_again(lowering, {title, bytes, 0, 0}, {sum, buffer}, {}, [&]() -> Call& {
    const Instruction back = copy_to(Home::device, type);
    return call_on_pieces(lowering, title, back.stream, {back},
                          {{{sum, 0, bytes, Access::read}, {buffer, 0, bytes, Access::write}}});
  });
  return buffer;
}

void copy_sum_out(Lowering& lowering, int index, int from, bool last_micro_batch) {
  const Bucket& bucket = lowering.program.buckets[index];
  const int sum = *bucket.gradients;
  Piece source{from, 0, lowering.program.buffers[sum].bytes, Access::read};
  // That is all that the host updates.
  if (last_micro_batch && bucket.shard_elements > 0)
    source = gradient_piece(lowering, index, from, shard_of(bucket), Access::read);
  lowering.has_sum[index] = true;
  constexpr const char* title = "offload.sums";
  call_again(lowering, {title, source.offset, source.bytes, 0}, {from, sum}, {from}, [&]() -> Call& {
    const Instruction out = copy_to(Home::host, gradient_type(lowering.job.training));
    return call_on_pieces(lowering, title, out.stream, {out},
                          {{source, {sum, source.offset, source.bytes, Access::write}}});
  });
}

}  // namespace parplan
