#include "planner/program/rank_buckets.h"

#include <algorithm>
#include <utility>

#include "planner/program/bucket_work.h"

namespace parplan {

bool divides_state(const Placements& placements, Axis axis) {
  return placements.state.optimizer[axis] == flat_shard() ||
         std::ranges::any_of(placements.parameters,
                             [&](const auto& named) { return named.second[axis].kind == PlacementKind::shard; });
}

std::int64_t padded_elements(std::int64_t elements, int shard_ranks, const TrainingSpec& training) {
  return align_up(Bytes(elements), bucket_alignment(training) * shard_ranks).count;
}

std::vector<RankBucket> rank_buckets(const Job& job, const std::vector<int>& stages, const Coordinates& at) {
  const OpGraph& graph = *job.graph;
  std::vector<RankBucket> buckets;
  std::vector<RankBucket> tied_buckets, frozen_buckets;
  const auto bucket_of = [&](std::string name, const std::vector<TensorId>& parameters, int block) {
    const BlockLayout& layout = job.layout.of_block(block);
    RankBucket bucket;
    bucket.name = std::move(name);
    bucket.layout = bucket_layout(graph, graph.blocks[block], parameters, block_context(job, block, at));
    bucket.blocks = {block};
    bucket.shards = data_shards(layout);
    bucket.homes = layout.placements.state.homes;
    bucket.shard_ranks = job.layout.mesh.shard_ranks();
    bucket.elements = padded_elements(bucket.layout.elements, bucket.shard_ranks, job.training);
    const int ranks = bucket.shards.optimizer ? bucket.shard_ranks : 1;
    bucket.units = bucket_units(bucket.layout, bucket.elements, gather_unit(job, block), ranks,
                                replica_rank(job.layout.mesh, at) % ranks, job.training.engine.persists_below);
    bucket.shard_elements = bucket.elements / ranks;
    if (job.layout.has_master() && at.dp > 0) {
      bucket.shard_elements = 0;
      bucket.units.front().own = {};
    }
    return bucket;
  };
  // Blocks of a kind that are laid out alike have equal buckets, of parameters of their own.
  struct Known {
    const BlockLayout* layout = nullptr;
    int kind = 0;
    std::vector<TensorId> parameters;
    RankBucket bucket;
  };
  const auto like_known = [&](std::vector<Known>& known, std::string name, const std::vector<TensorId>& parameters,
                              int block) {
    const BlockLayout* layout = &job.layout.of_block(block);
    const int kind = graph.blocks[block].kind;
    const auto like =
        std::ranges::find_if(known, [&](const Known& one) { return one.layout == layout && one.kind == kind; });
    if (like == known.end()) {
      known.push_back({layout, kind, parameters, bucket_of(std::move(name), parameters, block)});
      return known.back().bucket;
    }
    RankBucket bucket = like->bucket;
    bucket.name = std::move(name);
    bucket.blocks = {block};
    for (ParameterPart& part : bucket.layout.parts)
      part.tensor = parameters[std::ranges::find(like->parameters, part.tensor) - like->parameters.begin()];
    return bucket;
  };
  std::vector<Known> known_own, known_frozen;
  for (const int stage : stages)
    for (int b = job.layout.stages[stage].first; b < job.layout.stages[stage].last; ++b) {
      const BlockParameters parameters = block_parameters(graph, graph.blocks[b]);
      buckets.push_back(like_known(known_own, graph.blocks[b].name, parameters.own, b));
      if (!parameters.frozen.empty()) {
        frozen_buckets.push_back(like_known(known_frozen, graph.blocks[b].name + " (frozen)", parameters.frozen, b));
        frozen_buckets.back().frozen = true;
      }
      if (!parameters.tied) continue;
      const auto known = std::ranges::find(tied_buckets, parameters.tied, &RankBucket::tied);
      if (known != tied_buckets.end()) {
        known->blocks.push_back(b);
        continue;
      }
      tied_buckets.push_back(bucket_of(graph.tensors[*parameters.tied].name, {*parameters.tied}, b));
      tied_buckets.back().tied = parameters.tied;
      tied_buckets.back().homes = homes_of_tied(tied_buckets.back().homes);
      tied_buckets.back().frozen = graph.tensors[*parameters.tied].frozen;
    }
  buckets.insert(buckets.end(), tied_buckets.begin(), tied_buckets.end());
  buckets.insert(buckets.end(), frozen_buckets.begin(), frozen_buckets.end());
  return buckets;
}

}  // namespace parplan
