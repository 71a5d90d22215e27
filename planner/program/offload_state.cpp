#include <algorithm>
#include <utility>
#include <vector>

#include "planner/base/error.h"
#include "planner/program/bucket_work.h"
#include "planner/program/lowering_state.h"
#include "planner/program/memory.h"

// The optimizer's state where it is on NVMe, and parameters that are there: bucket by bucket they
// are read into one of a few buffers on the host, updated there by the host's processor, and
// written back, while the next bucket's are read (ZeRO-Infinity, Rajbhandari et al. 2021,
// arXiv:2104.07857; in DeepSpeed runtime/swap_tensor/pipelined_optimizer_swapper.py). The first
// buckets are read while the step computes gradients, as soon as nothing else is: the buffers are
// free then. An update rewrites parameters in half precision from their master copy, and is a
// kernel that updates them in place: they are read, too.
namespace parplan {
namespace {

struct InFile {
  int buffer = 0;
  DataType type = DataType::fp32;
};
// What an update finds of a bucket in the file, in the order in which it lies in a buffer on the
// host.
std::vector<InFile> state_on_nvme(const Lowering& lowering, std::size_t index) {
  const Bucket& bucket = lowering.program.buckets[index];
  const StateHomes& homes = lowering.rank_buckets[index].homes;
  std::vector<InFile> buffers;
  if (!bucket.gradients || bucket.shard_elements == 0) return buffers;
  if (homes.optimizer == Home::nvme)
    for (const std::optional<int> buffer : {bucket.first_moment, bucket.second_moment, bucket.master})
      if (buffer) buffers.push_back({.buffer = *buffer});
  if (homes.parameters == Home::nvme)
    buffers.push_back({.buffer = bucket.parameters, .type = in_memory(lowering.job.training.precision)});
  return buffers;
}

// Which are updated so, in the order of their updates.
std::vector<std::size_t> staged_buckets(const Lowering& lowering) {
  std::vector<std::size_t> buckets;
  for (std::size_t i = 0; i < lowering.program.buckets.size(); ++i)
    if (!state_on_nvme(lowering, i).empty()) buckets.push_back(i);
  return buckets;
}

void copy_state(Lowering& lowering, const char* name, std::size_t index, Stream stream, BufferIds frees) {
  const int staged = lowering.state_in.at(index);
  std::vector<std::vector<Piece>> pieces;
  std::vector<Instruction> copies;
  std::int64_t begin = 0;
  for (const InFile& part : state_on_nvme(lowering, index)) {
    const std::int64_t bytes = lowering.program.buckets[index].shard_elements * size_of(part.type);
    Piece in_file{part.buffer, 0, bytes, Access::read};
    Piece on_host{staged, begin, bytes, Access::write};
    begin += bytes;
    copies.push_back(copy_on(stream, part.type));
    if (stream == Stream::to_nvme) {
      std::swap(in_file.access, on_host.access);
      std::swap(in_file, on_host);
    }
    pieces.push_back({in_file, on_host});
  }
  call_on_pieces(lowering, name, stream, std::move(copies), pieces, std::move(frees));
}

void read_state(Lowering& lowering, std::size_t index) {
  lowering.state_in[index] = lowering.staged_state[lowering.state_stagings++ % lowering.staged_state.size()];
  copy_state(lowering, "read.state", index, Stream::from_nvme, {});
}

}  // namespace

void begin_reads_of_state(Lowering& lowering) {
  const std::vector<std::size_t> buckets = staged_buckets(lowering);
  for (std::size_t k = 0; k < std::min(buckets.size(), lowering.staged_state.size()); ++k) {
    read_state(lowering, buckets[k]);
    may_follow_early(lowering);
  }
}

void write_state(Lowering& lowering, std::size_t index) {
  if (state_on_nvme(lowering, index).empty()) return;
  copy_state(lowering, "write.state", index, Stream::to_nvme, {lowering.state_in.at(index)});
  const std::vector<std::size_t> buckets = staged_buckets(lowering);
  const auto next = std::ranges::find(buckets, index) - buckets.begin() + std::ssize(lowering.staged_state);
  if (next < std::ssize(buckets)) read_state(lowering, buckets[static_cast<std::size_t>(next)]);
}

StatePieces state_pieces(const Lowering& lowering, std::size_t index, BucketRange range) {
  const Bucket& bucket = lowering.program.buckets[index];
  const OptimizerState state = optimizer_state(lowering.job.training);
  std::int64_t begin = 0;  // of the next part in a buffer on the host
  const auto staged = lowering.state_in.find(index);
  const auto place = [&](std::optional<int> own, std::int64_t element) -> std::optional<Piece> {
    if (!own) return std::nullopt;
    if (lowering.program.buffers[*own].home != Home::nvme) return in_shard(*own, range, element, Access::update);
    Piece piece = in_shard(staged->second, range, element, Access::update);
    piece.offset += begin;
    begin += bucket.shard_elements * element;
    return piece;
  };
  // The scales of its blocks, of which a range of parameters has whole ones (bucket_alignment).
  const auto scales = [&](std::optional<int> own) -> std::optional<Piece> {
    if (!own) return std::nullopt;
    PARPLAN_ASSERT(range.begin % quantization_block == 0, bucket.name);
    const std::int64_t first = quantization_blocks(range.begin), end = quantization_blocks(range.end);
    return Piece{*own, first * state_bytes, (end - first) * state_bytes, Access::update};
  };
  StatePieces pieces;
  pieces.first_moment = place(bucket.first_moment, state.moment_bytes(1));
  pieces.second_moment = place(bucket.second_moment, state.moment_bytes(1));
  const std::int64_t before = bucket.without_second > 0 ? bucket.without_second - begin_in_whole(bucket) : 0;
  if (range.begin < before)
    pieces.second_moment.reset();
  else if (pieces.second_moment && before > 0)
    pieces.second_moment->offset -= before * state.moment_bytes(1);
  pieces.master = place(bucket.master, state_bytes);
  if (lowering.program.buffers[bucket.parameters].home == Home::nvme)
    pieces.parameters = place(bucket.parameters, size_of(in_memory(lowering.job.training.precision)));
  pieces.first_scales = scales(bucket.first_scales);
  pieces.second_scales = scales(bucket.second_scales);
  return pieces;
}

}  // namespace parplan
