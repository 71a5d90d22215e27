#include "planner/program/buckets.h"

#include <algorithm>

namespace parplan {

std::int64_t padded_elements(std::int64_t elements, int data_degree) {
  return align_up(Bytes(elements), 16 * std::int64_t{data_degree}).count;
}

std::vector<StageBucket> stage_buckets(const Job& job, BlockRange range, int tensor_rank, int data_rank) {
  const OpGraph& graph = *job.graph;
  // The layout of parameters does not depend on the stage.
  const BlockChoice choice = block_choice(job, 0, tensor_rank);
  std::vector<StageBucket> buckets;
  std::vector<StageBucket> tied_buckets;
  for (int b = range.first; b < range.last; ++b) {
    const Block& block = graph.blocks[b];
    const BlockParameters parameters = block_parameters(graph, block);
    StageBucket bucket;
    bucket.name = block.name;
    bucket.layout = bucket_layout(graph, parameters.own, choice);
    bucket.blocks = {b};
    buckets.push_back(std::move(bucket));
    if (parameters.tied < 0) continue;
    const auto known = std::find_if(tied_buckets.begin(), tied_buckets.end(),
                                    [&](const StageBucket& tied) { return tied.tied == parameters.tied; });
    if (known != tied_buckets.end()) {
      known->blocks.push_back(b);
      continue;
    }
    StageBucket tied;
    tied.name = graph.tensors[parameters.tied].name;
    tied.layout = bucket_layout(graph, {parameters.tied}, choice);
    tied.blocks = {b};
    tied.tied = parameters.tied;
    tied_buckets.push_back(std::move(tied));
  }
  buckets.insert(buckets.end(), tied_buckets.begin(), tied_buckets.end());

  const bool sharded = data_shards(job.placements, job.spec.dp()).optimizer;
  for (StageBucket& bucket : buckets) {
    bucket.elements = padded_elements(bucket.layout.elements, job.spec.dp());
    bucket.shard_elements = sharded ? bucket.elements / job.spec.dp() : bucket.elements;
    bucket.shard_begin = sharded ? bucket.shard_elements * data_rank : 0;
  }
  return buckets;
}

std::vector<BucketLayout::Range> intersect(const std::vector<BucketLayout::Range>& ranges, std::int64_t begin,
                                           std::int64_t end) {
  std::vector<BucketLayout::Range> result;
  for (const BucketLayout::Range& range : ranges) {
    const BucketLayout::Range common{std::max(range.begin, begin), std::min(range.end, end)};
    if (common.begin < common.end) result.push_back(common);
  }
  return result;
}

std::vector<BucketLayout::Range> complement(const std::vector<BucketLayout::Range>& ranges, std::int64_t begin,
                                            std::int64_t end) {
  std::vector<BucketLayout::Range> result;
  for (const BucketLayout::Range& range : intersect(ranges, begin, end)) {
    if (begin < range.begin) result.push_back({begin, range.begin});
    begin = range.end;
  }
  if (begin < end) result.push_back({begin, end});
  return result;
}

}  // namespace parplan
