#include "planner/parallel/context.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include <fmt/format.h>

#include "planner/parallel/techniques.h"

namespace parplan {
namespace {

// What the degree must divide, and be a multiple of.
struct ContextLimits {
  std::int64_t sequence = 0;   // parts that chunks, and tensor-parallel shards within them, are made of
  std::int64_t kv_groups = 0;  // of each tensor-parallel rank; 0: they set no limit
  int exchanging = 1;          // cp_ulysses: of several groups of so many ranks each
  bool is_of_groups(int degree) const {
    return exchanging == 1 || (exchanging > 1 && degree > exchanging && degree % exchanging == 0);
  }
  bool has_heads_for(int degree) const {
    return kv_groups == 0 || kv_groups % (exchanging > 1 ? exchanging : degree) == 0;
  }
  bool allows(int degree) const {
    if (!is_of_groups(degree)) return false;
    return degree == 1 || (sequence % degree == 0 && has_heads_for(degree));
  }
};

// Calls `visit` with each op of attention's core, once for blocks that do equal work.
template <class Visit>
void for_each_attention(const OpGraph& graph, const Visit& visit) {
  for (const int kind : graph.kinds) {
    const Block& block = graph.blocks[static_cast<std::size_t>(kind)];
    for (int i = block.first_op; i < block.last_op; ++i)
      if (row_of(graph.ops[i].kind).module == OpModule::core_attention) visit(graph.ops[i]);
  }
}

}  // namespace

std::int64_t key_value_groups(const OpGraph& graph) {
  std::int64_t common = 0;
  for_each_attention(graph, [&](const Op& op) {
    if (row_of(op.kind).sharding != ShardingRule::heads) return;
    const TensorDim& heads = graph.tensors[op.inputs[0]].dims.back();
    common = std::gcd(common, heads.size / heads.granule);
  });
  return common;
}

namespace {

ContextLimits context_limits(const OpGraph& graph, const ParallelSpec& spec) {
  // The tokens of a rank, or of a group that exchanges them for heads, are two chunks, and a rank's
  // divide among its tensor-parallel ranks.
  const std::int64_t tokens = spec.sequence_parallel ? std::max(spec.tp(), 1) : 1;
  const bool is_odd = tokens % 2 != 0 && spec.mesh.cp_ulysses % 2 != 0;
  const std::int64_t unit = keeps_queries(spec.cp_method) && is_odd ? 2 * tokens : tokens;
  ContextLimits limits{.sequence = graph.sequence % unit == 0 ? graph.sequence / unit : 1,
                       .exchanging = spec.mesh.cp_ulysses};
  if (spec.cp_method == ContextMethod::ulysses || limits.exchanging > 1) {
    const std::int64_t groups = key_value_groups(graph);
    const int tensor_ranks = std::max(spec.tp(), 1);
    limits.kv_groups = groups % tensor_ranks == 0 ? std::max<std::int64_t>(groups / tensor_ranks, 1) : 1;
  }
  return limits;
}

}  // namespace

namespace {

// Kernels that write all scores know no chunks of sequences.
bool is_unknown_to_engine(const TrainingSpec& training, const ParallelSpec& spec) {
  return !training.engine.fused_attention && keeps_queries(spec.cp_method);
}

// Groups that exchange tokens for heads, where all ranks do so already.
bool exchanges_twice(const ParallelSpec& spec) {
  return spec.cp_method == ContextMethod::ulysses && spec.mesh.cp_ulysses > 1;
}

// Why the groups of cp_ulysses cannot be.
std::optional<std::string> illegal_groups(const OpGraph& graph, const ParallelSpec& spec) {
  const int cp = spec.cp(), size = spec.mesh.cp_ulysses;
  if (size == 1) return std::nullopt;
  if (cp == 1) return fmt::format("cp_ulysses {} makes groups of context-parallel ranks, and there is 1 (cp 1)", size);
  if (exchanges_twice(spec))
    return fmt::format(
        "cp_method ulysses exchanges tokens for heads between all {} context-parallel ranks, so there are no groups of "
        "{} (cp_ulysses) that do: leave cp_ulysses out, or let keys and values go between groups (cp_method ring, "
        "all_gather)",
        cp, size);
  const ContextLimits limits = context_limits(graph, spec);
  std::vector<std::int64_t> legal;
  for (const std::int64_t one : divisors(cp))
    if (one == 1 || (one < cp && limits.kv_groups % one == 0)) legal.push_back(one);
  const std::string sizes = fmt::format("legal sizes: {}", list_degrees(legal));
  if (!limits.is_of_groups(cp))
    return fmt::format(
        "groups of {} ranks that exchange tokens for heads (cp_ulysses) cannot divide {} context-parallel ranks into "
        "several groups; {}{}",
        size, cp, sizes, size == cp ? "; for one group of all, take cp_method ulysses" : "");
  if (!limits.has_heads_for(cp))
    return fmt::format(
        "groups of {} ranks that exchange tokens for heads (cp_ulysses) cannot split {} key/value groups over tp {}; "
        "{}",
        size, key_value_groups(graph), spec.tp(), sizes);
  return std::nullopt;
}

// What a ring's steps, which know rows and not positions, cannot do.
std::optional<std::string> not_around_a_ring(const OpGraph& graph, const ParallelSpec& spec) {
  std::optional<std::string> what;
  if (spec.cp_method != ContextMethod::ring) return what;
  for_each_attention(graph, [&](const Op& op) {
    if (what) return;
    if (op.attributes.window > 0 && op.attributes.window < graph.sequence)
      what = fmt::format("attention to a window of {} of {} tokens", op.attributes.window, graph.sequence);
    else if (op.attributes.alibi != 0.0)
      what = "attention with ALiBi";
  });
  return what;
}

}  // namespace

std::vector<int> legal_context_degrees(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec,
                                       int most) {
  if (!training.engine.has_context || graph.joins_sequences || is_unknown_to_engine(training, spec) ||
      not_around_a_ring(graph, spec))
    return {1};
  const ContextLimits limits = context_limits(graph, spec);
  std::vector<int> degrees;
  for (const std::int64_t degree : divisors(limits.sequence))
    if (degree <= most && limits.allows(static_cast<int>(degree))) degrees.push_back(static_cast<int>(degree));
  return degrees;
}

bool allows_context(const OpGraph& graph, const TrainingSpec& training, const ParallelSpec& spec) {
  const int cp = spec.cp();
  return cp >= 1 && (cp > 1 || spec.cp_method == ContextMethod::all_gather) && !exchanges_twice(spec) &&
         !(cp > 1 && (graph.joins_sequences || is_unknown_to_engine(training, spec))) &&
         !not_around_a_ring(graph, spec) &&
         ((cp == 1 && spec.mesh.cp_ulysses == 1) || context_limits(graph, spec).allows(cp));
}

std::optional<std::string> illegal_context(const OpGraph& graph, const TrainingSpec& training,
                                           const ParallelSpec& spec) {
  if (allows_context(graph, training, spec)) return std::nullopt;
  const int cp = spec.cp();
  if (cp < 1) return fmt::format("the context-parallel degree is {}; it must be at least 1", cp);
  if (cp == 1 && spec.cp_method != ContextMethod::all_gather)
    return fmt::format("cp_method {} {} between context-parallel ranks, and there is 1 (cp 1)", name(spec.cp_method),
                       spec.cp_method == ContextMethod::ring ? "passes keys and values" : "exchanges tokens");
  if (cp > 1 && graph.joins_sequences)
    return "context parallelism cannot cut activations whose rows are taken apart, such as those of an encoder and a "
           "decoder, or of an image and its class: cp must be 1";
  if (cp > 1 && is_unknown_to_engine(training, spec))
    return fmt::format("engine {} has no attention over keys and values {} other ranks: cp must be 1",
                       training.engine.name, spec.cp_method == ContextMethod::ring ? "of" : "gathered from");
  if (const std::optional<std::string> what = not_around_a_ring(graph, spec))
    return fmt::format("{} cannot go around a ring of ranks (cp_method ring); gather keys and values (all_gather)",
                       *what);
  if (const std::optional<std::string> why = illegal_groups(graph, spec)) return why;
  const ContextLimits limits = context_limits(graph, spec);
  const std::vector<int> legal = legal_context_degrees(graph, training, spec, std::numeric_limits<int>::max());
  const std::string degrees = list_degrees({legal.begin(), legal.end()});
  if (limits.sequence % cp != 0) {
    const bool in_chunks = keeps_queries(spec.cp_method);
    std::string parts = !in_chunks              ? "one part for each rank"
                        : limits.exchanging > 1 ? "two chunks for each group of ranks"
                                                : "two chunks for each rank";
    if (spec.sequence_parallel) parts += fmt::format(" and cut by {} tensor-parallel ranks", spec.tp());
    return fmt::format("context parallelism over {} cannot split a sequence of {} tokens into {}; legal degrees: {}",
                       cp, graph.sequence, parts, degrees);
  }
  return fmt::format(
      "context parallelism over {} by exchange for heads (ulysses) cannot split {} key/value groups over tp {}; legal "
      "degrees: {}; gathered keys and values (all_gather) need no heads",
      cp, key_value_groups(graph), spec.tp(), degrees);
}

void place_context(const OpGraph& /*graph*/, const ParallelSpec& spec, Placements& placements) {
  placements.residual.cp = spec.cp() > 1 ? shard(Dim::sequence) : replicate();
}

}  // namespace parplan
