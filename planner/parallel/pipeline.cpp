#include "planner/parallel/pipeline.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace parplan {

namespace {

// Elements, but with a key and a value for each query head, whatever the groups.
std::int64_t weight_of(const Tensor& weight) {
  std::int64_t elements = element_count(weight);
  for (const TensorDim& dim : weight.dims)
    if (dim.dim == Dim::kv_groups && dim.shared > 0) elements = elements / dim.granule * 3 * (dim.granule - dim.shared);
  return elements;
}

// By block: of all its products.
std::vector<std::int64_t> product_weights(const OpGraph& graph) {
  std::vector<std::int64_t> weights;
  for (const Block& block : graph.blocks) {
    std::int64_t& sum = weights.emplace_back(0);
    for (int op = block.first_op; op < block.last_op; ++op)
      if (const Op& one = graph.ops[static_cast<std::size_t>(op)];
          !one.parameters.empty() && model_products(graph, one).pairs > 0.0)
        sum += weight_of(graph.tensors[one.parameters.front()]);
  }
  return weights;
}

// The last ones may get none.
std::vector<int> shares_of(const std::vector<std::int64_t>& weights, int stages) {
  const std::int64_t all = std::accumulate(weights.begin(), weights.end(), std::int64_t{0});
  std::vector<int> cut(static_cast<std::size_t>(stages), 0);
  std::int64_t taken = 0, stage = 0;
  for (const std::int64_t of_block : weights) {
    ++cut[static_cast<std::size_t>(stage)];
    taken += of_block;
    if (taken * stages > all * (stage + 1)) ++stage;
  }
  return cut;
}

}  // namespace

std::vector<int> legal_pipeline_degrees(const OpGraph& graph, const TrainingSpec& training,
                                        const ParallelSpec& /*spec*/, int most) {
  if (!training.engine.has_pipeline) return {1};
  std::vector<int> degrees(static_cast<std::size_t>(std::min(most, static_cast<int>(graph.blocks.size()))));
  std::iota(degrees.begin(), degrees.end(), 1);
  if (training.engine.stages_share_weights) {
    const std::vector<std::int64_t> weights = product_weights(graph);
    std::erase_if(degrees, [&](int stages) { return shares_of(weights, stages).back() == 0; });
  }
  return degrees;
}

namespace {

std::string in_words(const std::vector<int>& degrees) {
  const bool are_all = degrees.back() == static_cast<int>(degrees.size()) && degrees.size() > 1;
  return are_all ? fmt::format("1 to {}", degrees.back()) : fmt::format("{}", fmt::join(degrees, ", "));
}

}  // namespace

bool allows_group(std::int64_t micro_batches, int ranks, std::int64_t group) {
  const std::int64_t left = micro_batches % group;
  return group >= ranks && group <= micro_batches && (left == 0 || left >= ranks);
}

std::int64_t next_group(std::int64_t micro_batches, int ranks) {
  std::int64_t group = ranks + 1;
  while (group <= micro_batches && !allows_group(micro_batches, ranks, group)) ++group;
  return group;
}

std::optional<std::int64_t> smallest_group(std::int64_t micro_batches, int ranks) {
  if (allows_group(micro_batches, ranks, ranks)) return 0;
  const std::int64_t group = next_group(micro_batches, ranks);
  return group <= micro_batches ? std::optional(group) : std::nullopt;
}

std::vector<int> equal_stages(const OpGraph& graph, const Engine& engine, int stages) {
  const int blocks = static_cast<int>(graph.blocks.size()), layers = blocks - 2;
  std::vector<int> cut(static_cast<std::size_t>(stages), blocks / stages);
  const bool takes_more_last = engine.last_stages_take_more;
  if (!takes_more_last && blocks % stages == 0 && (layers <= 0 || layers % stages != 0)) return cut;
  const bool counts_layers = layers >= stages;
  const int counted = counts_layers ? layers : blocks;
  for (int s = 0; s < stages; ++s) {
    const int before = takes_more_last ? stages - 1 - s : s;  // stages that take one more before this does
    cut[static_cast<std::size_t>(s)] = counted / stages + (before < counted % stages ? 1 : 0);
  }
  if (counts_layers) {
    ++cut.front();
    ++cut.back();
  }
  return cut;
}

std::vector<int> stages_by_weights(const OpGraph& graph, int stages) {
  return shares_of(product_weights(graph), stages);
}

std::optional<std::vector<int>> stages_of_engine(const OpGraph& graph, const Engine& engine, int stages) {
  if (engine.stages_share_weights) return stages_by_weights(graph, stages);
  if (engine.equal_stages) return equal_stages(graph, engine, stages);
  return std::nullopt;
}

namespace {

// As Megatron-LM asserts in forward_backward_pipelining_with_interleaving.
std::optional<std::string> illegal_interleaving(const TrainingSpec& training, const ParallelSpec& spec) {
  if (spec.pp() < 2)
    return fmt::format("an interleaved pipeline goes around 2 or more ranks, and pp is {}; take 1f1b", spec.pp());
  if (spec.virtual_stages < 2)
    return fmt::format("an interleaved pipeline has 2 or more stages on each rank (virtual_stages), and there is {}; "
                       "1f1b has one",
                       spec.virtual_stages);
  const std::int64_t of_round = spec.mesh.batch_ranks() * spec.micro_batch;
  const bool are_unlike = !spec.replica_micro_batches.empty();
  // No number of micro-batches: another reason.
  if (!are_unlike && training.global_batch % of_round != 0) return std::nullopt;
  const std::int64_t count = micro_batches(spec, training);
  const std::int64_t group = spec.micro_batch_group > 0 ? spec.micro_batch_group : spec.pp();
  if (group < spec.pp())
    return fmt::format("an interleaved pipeline of {} ranks runs micro-batches in groups of at least {}, and "
                       "micro_batch_group is {}",
                       spec.pp(), spec.pp(), group);
  for (const int of_replica : spec.replica_micro_batches)
    if (of_replica % group != 0)
      return fmt::format(
          "an interleaved pipeline of replicas with unlike numbers of micro-batches runs whole groups "
          "of {}, and one has {}: take multiples of {}",
          group, of_replica, group);
  if (count < group)
    return fmt::format("an interleaved pipeline runs micro-batches in groups of {}, and there {} {}: take smaller "
                       "micro-batches, less data parallelism, or a larger batch",
                       group, count == 1 ? "is" : "are", count);
  if (const std::int64_t left = count % group; left > 0 && left < spec.pp()) {
    const std::optional<std::int64_t> allowed = smallest_group(count, spec.pp());
    const bool has_allowed = allowed.value_or(0) > 0 && training.engine.has_other_groups;
    return fmt::format("an interleaved pipeline of {} ranks runs micro-batches in groups of {}, and {} leave a last "
                       "group of {}: it must have at least {}{}, or the number must be a multiple of {}",
                       spec.pp(), group, count, left, spec.pp(),
                       has_allowed ? fmt::format(", as with micro_batch_group {}", *allowed) : "", group);
  }
  return std::nullopt;
}

std::optional<std::string> illegal_v(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec) {
  const char* const schedule = name(spec.schedule);
  if (spec.pp() < 2)
    return fmt::format("the schedule {} goes down 2 or more ranks and back, and pp is {}; take 1f1b", schedule,
                       spec.pp());
  if (spec.virtual_stages != 2)
    return fmt::format(
        "the schedule {} has 2 stages on each rank, one on the way down the ranks and one on the way "
        "back, and virtual_stages is {}",
        schedule, spec.virtual_stages);
  if (spec.micro_batch_group != 0)
    return fmt::format("micro_batch_group is for the schedule interleaved, and the schedule is {}", schedule);
  const int blocks = static_cast<int>(graph.blocks.size());
  if (spec.stages() > blocks)
    return fmt::format(
        "the schedule {} has 2 stages on each of {} ranks, which cannot all have a block: the model has "
        "{} ({} to {}); legal degrees: 2 to {}",
        schedule, spec.pp(), blocks, graph.blocks.front().name, graph.blocks.back().name, std::max(blocks / 2, 2));
  // As DeepSeek's dualpipev.py asserts.
  const std::int64_t of_round = spec.mesh.batch_ranks() * spec.micro_batch;
  if (spec.schedule == ScheduleKind::dualpipe_v && training.global_batch % of_round == 0 &&
      training.global_batch / of_round < 2 * spec.pp())
    return fmt::format(
        "the schedule {} of {} ranks runs at least {} micro-batches, two for each rank, and there {} "
        "{}: take smaller micro-batches, less data parallelism, a larger batch, or zero_bubble_v",
        schedule, spec.pp(), 2 * spec.pp(), training.global_batch / of_round == 1 ? "is" : "are",
        training.global_batch / of_round);
  return std::nullopt;
}

}  // namespace

std::optional<std::string> illegal_pipeline(const OpGraph& graph, const TrainingSpec& training,
                                            const ParallelSpec& spec) {
  const int blocks = static_cast<int>(graph.blocks.size());
  if (spec.pp() < 1) return fmt::format("the pipeline-parallel degree is {}; it must be at least 1", spec.pp());
  if (spec.schedule == ScheduleKind::interleaved) {
    if (auto reason = illegal_interleaving(training, spec)) return reason;
  } else if (is_v_shaped(spec.schedule)) {
    if (auto reason = illegal_v(graph, training, spec)) return reason;
  } else if (spec.virtual_stages != 1 || spec.micro_batch_group != 0) {
    return fmt::format("virtual_stages and micro_batch_group are for the schedule interleaved, and the schedule is {}",
                       name(spec.schedule));
  }
  if (runs_backward_in_parts(spec.schedule) && spec.zero_stage > 1)
    return fmt::format(
        "the schedule {} runs backwards in two parts, which needs whole gradients until the second, "
        "and zero_stage is {}; legal stages: 0, 1",
        name(spec.schedule), spec.zero_stage);
  if (spec.stages() > blocks && spec.virtual_stages > 1)
    return fmt::format("{} virtual stages on each of {} ranks cannot all have a block: the model has {} ({} to {}); "
                       "legal numbers of virtual stages: 1 to {}",
                       spec.virtual_stages, spec.pp(), blocks, graph.blocks.front().name, graph.blocks.back().name,
                       std::max(blocks / spec.pp(), 1));
  if (spec.stages() > blocks)
    return fmt::format("pipeline parallelism over {} cannot give every stage a block: the model has {} ({} to {}); "
                       "legal degrees: {}",
                       spec.stages(), blocks, graph.blocks.front().name, graph.blocks.back().name,
                       in_words(legal_pipeline_degrees(graph, training, spec, blocks)));
  if (spec.stage_blocks.empty()) {  // still to be cut
    if (!training.engine.stages_share_weights) return std::nullopt;
    if (stages_by_weights(graph, spec.stages()).back() > 0) return std::nullopt;
    return fmt::format("engine {} fills {} stages by the weights of products, which leaves the last without a block; "
                       "legal degrees: {}",
                       training.engine.name, spec.stages(),
                       in_words(legal_pipeline_degrees(graph, training, spec, blocks)));
  }
  if (static_cast<int>(spec.stage_blocks.size()) != spec.stages())
    return fmt::format("the stage cut [{}] has {} stages, and {}", fmt::join(spec.stage_blocks, ", "),
                       spec.stage_blocks.size(), stages_text(spec));
  for (std::size_t s = 0; s < spec.stage_blocks.size(); ++s)
    if (spec.stage_blocks[s] < 1)
      return fmt::format("the stage cut [{}] leaves stage {} without a block", fmt::join(spec.stage_blocks, ", "), s);
  const int sum = std::accumulate(spec.stage_blocks.begin(), spec.stage_blocks.end(), 0);
  if (sum != blocks)
    return fmt::format("the stage cut [{}] holds {} blocks, and the model has {} ({} to {})",
                       fmt::join(spec.stage_blocks, ", "), sum, blocks, graph.blocks.front().name,
                       graph.blocks.back().name);
  return std::nullopt;
}

void place_pipeline(const OpGraph& /*graph*/, const ParallelSpec& /*spec*/, Placements& /*placements*/) {}

}  // namespace parplan
