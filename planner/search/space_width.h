#pragma once

#include <cstdint>

#include "planner/graph/engine.h"
#include "planner/graph/op_graph.h"
#include "planner/plan/layout_choices.h"

namespace parplan {

// Context parallelism is searched from this sequence on, or where the request asks for it: it pays
// where a sequence is long, and every other search would look at several times as many layouts.
// From the shorter one on, it is searched where a batch has fewer sequences than there are devices,
// and floors promise more than `worth_context` of the best plan without it: without rings, whose
// hops take longer than what they hide.
inline constexpr std::int64_t long_sequence = 32'768, shortest_shared_sequence = 8192;
inline constexpr double worth_context = 0.2;
bool shares_context(const OpGraph& graph, const LayoutRequest& request);

// How far a space goes where a request leaves the choice. What is narrow here is a restriction of
// the space, which the search names with its gap (restrictions.h).
struct SpaceWidth {
  // Interleaved pipelines of any number of stages on a rank and any ZeRO stage; or only of numbers
  // into which the layers divide evenly, with ZeRO-0 and 1.
  bool interleaves_freely = false;
  bool shares_context = false;  // the context axis may have several ranks
  // Around a ring, a Segment has steps for each of its ranks, whose cost the search would spend its
  // time on; long before, hops take longer than steps.
  int most_ring_ranks = 64;
  // ZeRO may shard over groups of any number of ranks, or only over all: it always may where an
  // engine has data parallelism alone, since few layouts are that.
  bool shards_freely = false;
  // Where stages choose what they recompute, each does so in as few of its layers as its memory
  // demands; or in all.
  bool recomputes_fewest_layers = false;
  // The replicas for whose unlike numbers of micro-batches the request asks; 0: it does not. Or
  // each layout has the numbers that suit its devices (replica_shares.h).
  int unlike_replicas = 0;
  bool balances_replicas = false;
};
SpaceWidth usual_width(const OpGraph& graph, const Engine& engine, const LayoutRequest& request);
// The same with context parallelism, whatever the sequence.
SpaceWidth with_context(SpaceWidth width);

// Whether a context method is in a space for so many ranks.
constexpr bool is_searched(ContextMethod method, int ranks, const SpaceWidth& width) {
  if (ranks == 1) return method == ContextMethod::all_gather;
  return method != ContextMethod::ring || ranks <= width.most_ring_ranks;
}

}  // namespace parplan
