#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "planner/graph/engine.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/layout_choices.h"

namespace parplan {

// Context parallelism pays where a sequence is long. It is searched over any number of ranks from
// the long sequence on, or where the request asks for it; from the shortest sequence on over so
// many that each has the least number of tokens of it, by gathered keys and values alone: hops of
// rings take longer than what they hide. From the medium sequence on, also by exchange for heads,
// and over more ranks where a batch has fewer sequences than there are devices, and floors promise
// more than `worth_context` of the best plan without. Searches over deep models take long: of
// these, from there on alone.
inline constexpr std::int64_t long_sequence = 32'768, medium_sequence = 8192, least_shared_tokens = 1024,
                              shortest_shared_sequence = 2 * least_shared_tokens;
inline constexpr std::size_t deep_model = 256;  // blocks; a deep one has more
inline constexpr double worth_context = 0.2;
inline constexpr int any_context_ranks = std::numeric_limits<int>::max();
int most_context_ranks(const OpGraph& graph, const LayoutRequest& request);

// How far a space goes where a request leaves the choice. What is narrow here is a restriction of
// the space, which the search names with its gap (restrictions.h).
struct SpaceWidth {
  // Interleaved pipelines of any number of stages on a rank and any ZeRO stage; or only of numbers
  // into which the layers divide evenly, with ZeRO-0 and 1.
  bool interleaves_freely = false;
  // Blocks that are no layers, any of which may count as one where layers are divided evenly: an
  // embedding and a head, and the embedding of a decoder behind an encoder.
  int blocks_beside_layers = 2;
  // Interleaved pipelines have groups of as many micro-batches as ranks. Where their number does
  // not allow that, they have groups of as few more as it allows, or are not in the space.
  bool takes_larger_groups = false;
  // The same, and floors hold for all groups.
  bool groups_freely = false;
  int most_context_ranks = 1;
  // Around a ring, a Segment has steps for each of its ranks, whose cost the search would spend its
  // time on; long before, hops take longer than steps.
  int most_ring_ranks = 64;
  int most_exchange_ranks = any_context_ranks;  // of tokens for heads
  // Where stages choose what they recompute, each does so in as few of its layers as its memory
  // demands; or in all.
  bool recomputes_fewest_layers = false;
  // ZeRO may shard over groups of any number of ranks that divides them all; or of numbers each of
  // which is at least twice the one before. It always may where an engine has data parallelism
  // alone, since few layouts are that.
  bool shards_freely = false;
  // The replicas for whose unlike numbers of micro-batches the request asks; 0: it does not. Or
  // each layout has the numbers that suit its devices (replica_shares.h).
  int unlike_replicas = 0;
  bool balances_replicas = false;
};
SpaceWidth usual_width(const OpGraph& graph, const Engine& engine, const LayoutRequest& request);
// The same with context parallelism over any number of ranks, whatever the sequence.
SpaceWidth with_context(SpaceWidth width);

// Whether a context method is in a space for so many ranks.
constexpr bool is_searched(ContextMethod method, int ranks, const SpaceWidth& width) {
  if (ranks == 1) return method == ContextMethod::all_gather;
  switch (method) {
    case ContextMethod::all_gather: return true;
    case ContextMethod::ulysses: return ranks <= width.most_exchange_ranks;
    case ContextMethod::ring: return ranks <= width.most_ring_ranks;
  }
  return false;
}

}  // namespace parplan
