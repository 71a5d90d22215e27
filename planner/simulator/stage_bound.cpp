#include "planner/simulator/stage_bound.h"

#include <algorithm>
#include <utility>

#include "planner/program/bucket_work.h"
#include "planner/program/memory.h"
#include "planner/program/orthogonalize.h"
#include "planner/simulator/estimate_sizes.h"
#include "planner/simulator/segment_cost.h"

namespace parplan {

// Letters: blocks 1 .. n of the stage in the order in which a phase visits them; k_1 .. k_m those
// that keep what they save on the host, with computation c_i. b buffers take turns. In a forward,
// block k_m waits for the copy of block k_(m-b), and copies follow one another from the end of
// block k_1; in a backward, the copy for block k_(m-b) waits for block k_m. Where the buffers are
// those of the b layers behind k_m, block k_m + b waits for its copy, and its copy for that block.
std::pair<Seconds, Seconds> StageBounds::chains_of_copies(const WayOfStage& way) const {
  std::vector<std::size_t> kept;
  for (std::size_t i = 0; i < visits_.size(); ++i)
    if (visits_[i].out > Seconds(0.0)) kept.push_back(i);
  const auto turns = static_cast<std::size_t>(way.turns);
  if (kept.empty() || (!way.with_others && kept.size() <= turns)) return {};
  const std::size_t copied = way.with_others ? kept.size() : kept.size() - turns;
  const std::size_t last = way.with_others ? kept.back() + turns : kept.back();
  Seconds forward, backward;
  for (std::size_t i = 0; i < visits_.size(); ++i) {
    if (i <= kept.front() || i >= last) forward += visits_[i].forward;
    if (i <= kept.front() || i >= last) backward += visits_[i].backward;
  }
  for (std::size_t k = 0; k < copied; ++k) {
    forward += visits_[kept[k]].out;
    backward += visits_[kept[k]].back;
  }
  return {forward, backward};
}

// Reductions follow one another: the host launches them ahead. Between those of other stages on the
// rank, it is not known which is in flight: shares are then the least of any reduction. Nor is it
// known which kernels are beside reductions that end before the work does: in x beside reductions
// that take a share s, at least (x - n) s is lost, where n of the work is without kernels.
StageReductions StageBounds::reductions(BlockRange range, bool alone_on_rank, const WayOfStage& way,
                                        const DataCosts& data, Seconds sent_back) const {
  StageReductions result;
  Contention least{.multiprocessors = 1.0, .memory = 1.0, .nics = 1.0};
  for (std::size_t kind = 0; kind < data.reductions.size(); ++kind) {
    if (data.own[kind].reduce > Seconds(0.0) && data.reductions[kind].empty()) return result;
    for (const DataReduction& one : data.reductions[kind])
      least = {.multiprocessors = std::min(least.multiprocessors, one.takes.multiprocessors),
               .memory = std::min(least.memory, one.takes.memory),
               .nics = std::min(least.nics, one.takes.nics)};
  }
  result.sends_back = slowed_by({.nics = sent_back}, least);
  Seconds backward, end, reduced;  // the latter two of the last backward, from its start on
  BoundTimes kernels;              // of a backward
  std::vector<InFlight> in_flight;
  for (int block = range.last; block-- > range.first;) {
    const BlockCosts& costs = *way.of_block(block).costs;
    const auto kind = blocks_.kind_of(block);
    const Seconds own = costs.backward_seconds[kind];
    backward += own;
    kernels = kernels + costs.backward_bound[kind];
    if (own > Seconds(0.0)) end = end_beside(in_flight, end, own, costs.backward_bound[kind]);
    reduced = std::max(reduced, end);
    for (const DataReduction& one : data.reductions[kind]) {
      in_flight.push_back({.start = reduced,
                           .end = reduced + one.duration,
                           .takes = alone_on_rank ? one.takes : least});
      reduced += one.duration;
      result.all += one.duration;
    }
  }
  result.left = reduced - end;
  result.own = end - backward;
  double share = 1.0;
  if (kernels.multiprocessors > Seconds(0.0)) share = std::min(share, least.multiprocessors);
  if (kernels.memory > Seconds(0.0)) share = std::min(share, least.memory);
  result.backward = {.throughout = slowed_by(kernels, least),
                     .kept = backward - kernels.multiprocessors - kernels.memory,
                     .share = std::min(share, most_taken)};
  return result;
}

// Letters: blocks 1 .. n of the stage in the order in which a phase visits them; c_k a block's
// computation in that phase, g_k the gather of its parameters (ZeRO-3), r_k the reduction of its
// gradients after its backward (ZeRO-2, 3: of every micro-batch; else of the last one only).
//
// A phase takes at least sum c_k. Parameters of so many blocks ahead are gathered, a of them, and
// two buffers of unreduced gradients take turns, so that from its first block on it takes at least
// c_1 + sum_{k>=a+2} g_k + sum_{k<=n-2} r_k + c_n: on one stream, the gather of block k waits for
// block k - a - 1, and block n waits for the reduction of block n - 2 (that of its own bucket; the
// tied bucket's comes later). Where a is 0, nothing is hidden: a block's gather waits for the block
// before and for its reduction, so that a phase takes at least sum c_k + sum_{k>=2} g_k, a backward
// sum_{k<n} r_k more, and the gathers of a step, but the first, add to what occupies a rank. After
// the last backward come the reductions that it did not overlap: max over k of (sum_{i>=k} r_i -
// sum_{i>k} c_i). Updates run in the order of blocks, and each gather of updated parameters
// (ZeRO-1, 2) follows its update.
//
// A master hands out all parameters before each forward, and collects gradients after each
// backward.
//
// With hybrid sharding, the reductions of the last micro-batch also sum shards over their replicas.
//
// What blocks keep on the host is copied out after their forward, on one stream, and back before
// their backward, on another (chains_of_copies).
//
// Parameters on the host are copied into the buffers of gathers before these, on a stream of their
// own, so that a phase takes at least c_1 + sum_{k>=a+2} of these copies + c_n, too. Sums of
// gradients elsewhere go out behind each backward, and come back before the next: the link takes at
// least the sum of all copies each way, and a file that of all writes and reads.
//
// The optimizer's state on NVMe is read, updated and written bucket by bucket, through a few
// buffers; reads and writes go on beside all else, also of ranks that carry out their own
// communication. A step takes at least all reads, and all writes.
//
// Ranks that carry out their own communication do all of this one after another.
StageBound StageBounds::of(const ParallelSpec& spec, const Placements& placements, const StagePlace& place,
                           const WayOfStage& way, const BlockShapes& shapes, const DataCosts& data) {
  const int stage = place.stage, micro = place.micro_batches;
  const BlockRange range = place.blocks, tied_on_rank = place.tied_on_rank;
  const bool sequential = place.sequential;
  const DataShards shards = data_shards(placements, spec.replicas());
  const int count = range.last - range.first;
  const int ahead_forward = blocks_ahead(spec.prefetch_depth, training_.engine, Phase::forward),
            ahead_backward = blocks_ahead(spec.prefetch_depth, training_.engine, Phase::backward);
  StageBound bound;
  visits_.assign(static_cast<std::size_t>(count), {});
  Seconds clears, updates, gathers, gathers_again, reduces, across, to_host, from_host, hands_out, collects;
  const StateHomes& homes = placements.state.homes;
  Seconds most_up;  // of the copies of a block's parameters
  int tied_uses = 0;
  std::int64_t with_matrices = 0;
  Seconds exchanged;
  // Blocks all have buckets that take turns, and a backward.
  bool every_own = true;
  const auto has_frozen = [&](int i) {
    return shapes.frozen_elements[blocks_.kind_of(range.first + i)].all > 0;
  };
  const bool in_parts = runs_backward_in_parts(spec.schedule, stage);
  const bool together = spec.tied_gradients == TiedGradients::together;
  for (int i = 0; i < count; ++i) {
    const std::size_t kind = blocks_.kind_of(range.first + i);
    const BucketCosts& own = data.own[kind];
    const auto [block_costs, copies] = way.of_block(range.first + i);
    const BlockCosts& costs = *block_costs;
    BucketCosts tied = blocks_.uses_tied(range.first + i) ? data.tied : BucketCosts{};
    // Uses that share an accumulator are reduced after the backward of the first block. Their
    // buffer is cleared before that of the last, in every micro-batch if that is of this stage.
    if (together && range.first + i != tied_on_rank.first)
      tied.reduce = tied.accumulate = tied.across = tied.begin_clear = {};
    if (together && (range.first + i + 1 != tied_on_rank.last || tied_on_rank.first < range.first)) tied.clear = {};
    // Once on a rank, however many uses it holds.
    if (range.first + i != tied_on_rank.first) tied.to_host = tied.from_host = {};
    tied_uses += blocks_.uses_tied(range.first + i);
    every_own = every_own && shapes.own_elements[kind].all > 0 && has_frozen(i) == has_frozen(0) &&
                has_backward(graph_, range.first + i);
    Visit& visit = visits_[i];
    visit = {.forward = costs.forward_seconds[kind],
             .backward = costs.backward_seconds[kind],
             .weights = costs.weights_seconds[kind],
             .clear = own.clear + tied.clear,
             .gather = shards.parameters ? own.gather : Seconds(0.0),
             .gather_again = shards.parameters ? own.gather_again : Seconds(0.0),
             .reduce = own.reduce + own.accumulate + tied.reduce + tied.accumulate,
             .own_reduce = own.reduce + own.accumulate,
             .across = own.across + tied.across,
             .to_host = own.to_host + tied.to_host,
             .out = {},
             .back = {},
             .up = own.up + tied.up,
             .up_again = own.up_again + (has_backward(graph_, range.first + i) ? tied.up : Seconds(0.0))};
    most_up = std::max(most_up, visit.up);
    bound.other_back += static_cast<double>(micro) * (visit.up + visit.up_again);
    bound.reads += own.read_up + own.read_again + tied.read_up;
    bound.update_reads += own.read;
    bound.update_writes += own.write;
    // The sums of the bucket's gradients go out after each backward that adds to them, and come
    // back before all but the first; in two parts, for each of the parts.
    Seconds of_backward, of_weights;
    if (homes.gradients != Home::device) {
      // Where some backwards are whole, as if all were.
      const bool has_second = in_parts && visit.weights > Seconds(0.0) && !also_runs_whole_backwards(spec.schedule);
      const double times = has_second ? 2.0 * micro : micro;
      bound.other_out += (times - 1.0) * own.sum + own.to_host;
      bound.other_back += (times - 1.0) * own.sum;
      of_weights = has_second ? own.sum + own.to_host : Seconds(0.0);
      of_backward = has_second || micro > 1 ? own.sum : own.to_host;
      // In a file, they are read for the norm and for the update, too.
      bound.update_reads += (times - 1.0) * own.sum_read + (computes_norm(training_) ? 2.0 : 1.0) * own.shard_read;
      bound.update_writes += (times - 1.0) * own.sum_write + own.shard_write;
    }
    if (sequential) {
      visit.forward += visit.up;
      visit.backward += visit.up_again + of_backward + of_weights;
      visit.weights += of_weights;
    }
    if (copies != nullptr) {
      const SavedCopies& saved = (*copies)[kind];
      // A stage's input may lie apart: the bound is that of both.
      const bool with_input = i > 0 || stage == 0;
      visit.out = with_input ? saved.out : saved.out_without_input;
      visit.back = with_input ? saved.back : saved.back_without_input;
      bound.writes += saved.write;
      bound.reads += saved.read;
      const Seconds again = in_parts ? saved.for_weights : Seconds(0.0);
      bound.out += visit.out;
      bound.back += visit.back + again;
      if (sequential) {
        visit.forward += visit.out;
        visit.backward += visit.back + again;
        visit.weights += again;
      }
    }
    to_host += homes.gradients != Home::device ? tied.to_host : visit.to_host;
    bound.returns += own.from_host;
    from_host += own.from_host + tied.from_host;
    across += visit.across;
    bound.plain_forward += visit.forward;
    bound.plain_backward += visit.backward + visit.clear;
    bound.weights += visit.weights;
    gathers += visit.gather;
    gathers_again += visit.gather_again;
    hands_out += own.hand_out;
    collects += own.collect;
    if (shards.parameters) gathers += tied.gather;
    if (shards.parameters && has_backward(graph_, range.first + i)) gathers_again += tied.gather;
    reduces += visit.reduce;
    clears += own.begin_clear + tied.begin_clear;
    // The first rank has the first of every so many blocks with matrices; that of another replica
    // has those of its place.
    updates += own.update;
    if (own.orthogonalize > Seconds(0.0) &&
        (!shards.optimizer || orthogonalizes_for_all(with_matrices++, place.shard, spec.shard_ranks())))
      updates += own.orthogonalize;
    exchanged += own.exchange;
    if (sequential) updates += own.exchange;
    // In two parts: those that follow the last second part, which is among the backwards.
    if (!shards.gradients && !sequential && (!in_parts || visit.weights > Seconds(0.0)))
      bound.reduces += visit.own_reduce + own.across;
    if (shards.optimizer && !shards.parameters) bound.regathers += own.regather;
    bound.norms += own.norm;
    if (place.on_first_rank) {
      bound.parts += costs.forward[kind];
      bound.parts += costs.backward[kind];
      if (sequential)
        bound.parts.offload +=
            visit.forward + visit.backward - (costs.forward_seconds[kind] + costs.backward_seconds[kind]);
    }
  }
  // So many blocks' parameters have buffers before the stage's first forward.
  bound.other_back -= (1 + std::max(ahead_forward, ahead_backward)) * most_up;
  bound.updates = updates;
  if (tied_uses > 0) updates += data.tied.update;
  if (tied_uses > 0 && stage == 0) bound.norms += data.tied.norm;
  bound.occupied = bound.plain_forward + bound.plain_backward;
  // The first block's buffer is cleared while the stage may still wait for the gradient.
  if (!sequential) bound.plain_backward -= visits_.back().clear;
  bound.forward = bound.plain_forward;
  bound.backward = bound.plain_backward;
  bound.data = static_cast<double>(micro) * (gathers + gathers_again + (shards.gradients ? reduces : Seconds(0.0))) +
               (shards.gradients ? Seconds(0.0) : reduces) + across;

  Seconds stall;  // of the backward, beyond what it waits for anyway
  if (sequential) {
    bound.begin = clears;
    bound.forward += gathers;
    bound.backward += gathers_again + (shards.gradients ? reduces : Seconds(0.0));
    bound.behind = (shards.gradients ? across : reduces + across) + to_host;
  } else {
    bound.begin = std::max(clears, visits_.front().gather + data.own[blocks_.kind_of(range.first)].up);
    if (every_own && count >= 2 && (shards.parameters || shards.gradients)) {
      Seconds down = visits_.front().forward + visits_.back().forward,
              up = visits_.front().backward + visits_.back().backward;
      for (int i = 1; i < count; ++i) {
        if (i > ahead_forward) down += visits_[i].gather;
        if (i > ahead_backward) up += visits_[count - 1 - i].gather_again;
        // All but the reductions of the last two visited blocks, 0 and 1. Block 0 waits only for
        // block 2's own buffer: a tied one lies elsewhere.
        if (shards.gradients && i > 1) up += i == 2 ? visits_[2].own_reduce : visits_[i].reduce;
      }
      bound.forward = std::max(bound.forward, down);
      bound.backward = std::max(bound.backward, up);
    }
    if (every_own && count >= 2 && homes.parameters != Home::device) {
      Seconds down = visits_.front().forward + visits_.back().forward,
              up = visits_.front().backward + visits_.back().backward;
      for (int i = 1; i < count; ++i) {
        if (i > ahead_forward) down += data.own[blocks_.kind_of(range.first + i)].up;
        if (i > ahead_backward) up += data.own[blocks_.kind_of(range.last - 1 - i)].up_again;
      }
      const Seconds forward = std::max(bound.forward, down);
      const Seconds backward = in_parts ? bound.backward : std::max(bound.backward, up);
      bound.stalls = (forward - bound.forward) + (backward - bound.backward);
      stall = backward - bound.backward;
      bound.forward = forward;
      bound.backward = backward;
    }
    if (every_own && are_brought(shards, homes) && std::max(ahead_forward, ahead_backward) == 0) {
      Seconds down, up, all, before;  // the reduction of the block visited before
      for (int i = count; i-- > 0;) {
        const Visit& visit = visits_[i];
        const auto kind = blocks_.kind_of(range.first + i);
        const Seconds gather = data.own[kind].up + visit.gather;
        // A copy from the host waits for the block before alone.
        const Seconds again = std::max(before, data.own[kind].up_again) + visit.gather_again;
        before = shards.gradients ? visit.reduce : Seconds(0.0);
        // The backward of an embedding does not wait for its parameters, which it does not read.
        const bool reads = std::ranges::any_of(shapes.kinds[kind].backward.bindings, [](const std::string& of_block) {
          return of_block == binding::parameters || of_block == binding::frozen;
        });
        const Seconds back = reads ? again + visit.backward : again;
        const bool waits = i + 1 < count && (reads || i > 0);
        down += visit.forward + (i > 0 ? gather : Seconds(0.0));
        up += waits ? back : visit.backward;
        all += visit.forward + gather + back;
        // Before the first forward and beside the last backward, others may compute.
        if (i == 0) all -= (1.0 / micro) * (reads ? gather : gather + again);
      }
      // Second parts of backwards read no parameters.
      if (!in_parts) bound.occupied = std::max(bound.occupied, all);
      const Seconds forward = std::max(bound.forward, down);
      const Seconds backward = in_parts ? bound.backward : std::max(bound.backward, up);
      if (homes.parameters != Home::device) bound.stalls += (forward - bound.forward) + (backward - bound.backward);
      stall += backward - bound.backward;
      bound.forward = forward;
      bound.backward = backward;
    }
    if (way.recomputing.copies != nullptr) {
      const auto [down, up] = chains_of_copies(way);
      const Seconds forward = std::max(bound.forward, down);
      const Seconds backward = in_parts ? bound.backward : std::max(bound.backward, up);
      bound.stalls += (forward - bound.forward) + (backward - bound.backward);
      stall += backward - bound.backward;
      bound.forward = forward;
      bound.backward = backward;
    }
    // Reductions from block i on, less the backwards after it; where these have two parts, those of
    // the blocks that have the second, which comes last.
    Seconds suffix;
    // Likewise copies to the host from block i on, the first of which follows its reduction.
    Seconds to_copy;
    // Where gathers are not ahead, the last one follows the reduction of the block before.
    const bool gathers_behind = shards.parameters && ahead_backward == 0;
    const int last = shards.gradients ? std::min(count, gathers_behind ? 1 : 2) : count;
    for (int i = 0; i < last; ++i) {
      const Visit& visit = visits_[i];
      // The last backward may wait that long for what comes from the host, while others reduce.
      if (i == 1) {
        suffix -= stall;
        to_copy -= stall;
      }
      if (in_parts && visit.weights == Seconds(0.0)) continue;
      const Seconds overlapped = in_parts ? visit.weights : visit.backward + visit.clear;
      if (visit.to_host > Seconds(0.0)) {
        to_copy += visit.to_host;
        bound.copied = std::max(bound.copied, to_copy + (spec.replicas() > 1 ? visit.own_reduce : Seconds(0.0)));
        to_copy -= overlapped;
      }
      if (spec.replicas() == 1) continue;
      suffix += visit.reduce + visit.across;
      bound.behind = std::max(bound.behind, suffix);
      suffix -= overlapped;
    }
  }
  if (tied_uses > 0) {
    hands_out += data.tied.hand_out;
    collects += (together ? 1.0 : tied_uses) * data.tied.collect;
  }
  bound.forward += hands_out;
  bound.backward += collects;
  // Sums in files come for the norm in the order of buckets, through buffers that take turns. All
  // that the host squares from the bucket on whose sum is complete last is behind that sum's way to
  // the file and back, and reads into buffers in their second turn are behind its own squares.
  if (homes.gradients == Home::nvme && computes_norm(training_)) {
    Seconds first, others, reads, last, ahead_of_end;
    int taken = 0;
    for (int i = 0; i < count; ++i) {
      const BucketCosts& own = data.own[blocks_.kind_of(range.first + i)];
      const Visit& visit = visits_[i];
      if (taken == 0 && !sequential && (own.norm == Seconds(0.0) || (in_parts && visit.weights == Seconds(0.0)))) {
        ahead_of_end += in_parts ? visit.weights : visit.backward + visit.clear;
        continue;
      }
      const bool ends_alone = !sequential && ahead_of_end == Seconds(0.0) && visit.reduce == visit.own_reduce;
      if (taken == 0) first = own.norm;
      if (taken == 0 && ends_alone) first += own.to_host + own.shard_write + own.shard_read;
      if (taken > 0) others += own.norm;
      if (taken >= file_buffers) reads += own.shard_read;
      last = own.norm;
      taken += own.norm > Seconds(0.0);
    }
    bound.norms = first + std::max(others, reads > Seconds(0.0) ? reads + last : Seconds(0.0));
    if (tied_uses > 0 && stage == 0) bound.norms += data.tied.norm;
    if (ahead_of_end > Seconds(0.0)) bound.norms = std::max(bound.norms - ahead_of_end - stall, Seconds(0.0));
    // Which of several stages is done last, the schedule says.
    if (in_parts && !sequential && spec.virtual_stages > 1) bound.norms = {};
  }
  // Each bucket is updated, copied back where the host has updated it, and gathered.
  const bool regathers = shards.optimizer && !shards.parameters;
  // State on NVMe: a bucket's is read once that of the bucket state_buffers before it is written,
  // for the first of them at any time, and written once it is updated.
  const bool on_nvme = homes.optimizer == Home::nvme || homes.parameters == Home::nvme;
  std::vector<Seconds> written;  // by bucket
  Seconds read, write;           // the ends of the last ones
  bool reads_first = false;      // whether reading the first ones takes time
  const auto begin_update = [&](const BucketCosts& bucket, Seconds from) {
    if (!on_nvme || bucket.read == Seconds(0.0)) return from;
    const bool is_first = written.size() < state_buffers;
    if (!is_first) read = std::max(read, written[written.size() - state_buffers]);
    if (!is_first || reads_first) read += bucket.read;
    return std::max(from, read);
  };
  const auto end_update = [&](const BucketCosts& bucket, Seconds at) {
    if (!on_nvme || bucket.read == Seconds(0.0)) return;
    write = std::max(write, at) + bucket.write;
    written.push_back(write);
  };
  const auto for_each_updated = [&](auto visit) {
    for (int i = range.first; i < range.last; ++i) visit(data.own[blocks_.kind_of(i)]);
    if (tied_uses > 0) visit(data.tied);
  };
  Seconds updated;
  const auto update_all = [&] {
    for_each_updated([&](const BucketCosts& bucket) {
      updated = begin_update(bucket, updated) + bucket.update;
      end_update(bucket, updated);
    });
  };
  if (on_nvme) {
    reads_first = true;
    update_all();
    bound.drives = write;
    reads_first = false;
    written.clear();
    read = write = updated = {};
  }
  if (sequential) {
    // Copies back take turns with updates, and hide reads and writes as these do.
    if (on_nvme)
      for_each_updated([&](const BucketCosts& bucket) {
        updated = begin_update(bucket, updated) + bucket.update;
        end_update(bucket, updated);
        updated += bucket.from_host;
      });
    updated = std::max(updated, updates + from_host);
  }
  Seconds copied = updated, gathered = std::max(updated, sequential ? Seconds(0.0) : exchanged);
  const auto finish = [&](const BucketCosts& bucket) {
    if (!sequential) {
      updated = begin_update(bucket, updated) + bucket.update;
      end_update(bucket, updated);
    }
    copied = std::max(copied, updated) + (sequential ? Seconds(0.0) : bucket.from_host);
    gathered = std::max(gathered, copied) + (regathers ? bucket.regather : Seconds(0.0));
  };
  if (regathers || from_host > Seconds(0.0) || on_nvme) for_each_updated(finish);
  bound.finish = std::max({updates, copied, gathered, write});
  // The host updates the first bucket once its gradients are there: the first blocks may have none.
  Seconds ahead;
  if (updates_on_host(placements.state.homes) && !sequential)
    for (int i = 0; i < count && data.own[blocks_.kind_of(range.first + i)].update == Seconds(0.0); ++i)
      ahead += in_parts ? visits_[i].weights : visits_[i].backward + visits_[i].clear;
  if (ahead > Seconds(0.0)) ahead += stall;
  bound.finish_behind = std::max(bound.finish - ahead, Seconds(0.0));
  return bound;
}

}  // namespace parplan
