#include "planner/simulator/stage_bound.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "planner/program/bucket_work.h"
#include "planner/program/memory.h"
#include "planner/program/orthogonalize.h"
#include "planner/simulator/estimate_sizes.h"
#include "planner/simulator/segment_cost.h"

namespace parplan {
namespace {

// The ends of the last update and of the last read and write of state on NVMe, as buckets are
// updated one after another: that of a bucket is read once that of the bucket state_buffers before
// it is written, for the first of them at any time, and written once it is updated.
struct Updates {
  bool on_nvme = false;
  bool reads_first = false;  // whether reading the first ones takes time
  Seconds updated = {}, read = {}, write = {};
  std::vector<Seconds> written = {};  // by bucket

  void update(const BucketCosts& bucket) {
    const bool moves = on_nvme && bucket.read > Seconds(0.0);
    if (moves) {
      const bool is_first = written.size() < state_buffers;
      if (!is_first) read = std::max(read, written[written.size() - state_buffers]);
      if (!is_first || reads_first) read += bucket.read;
      updated = std::max(updated, read);
    }
    updated += bucket.update;
    if (!moves) return;
    write = std::max(write, updated) + bucket.write;
    written.push_back(write);
  }
};

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
// their backward, on another (wait_for_saved).
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
class BoundedStage {
 public:
  BoundedStage(const OpGraph& graph, const ModelBlocks& blocks, const TrainingSpec& training, const ParallelSpec& spec,
               const Placements& placements, const StagePlace& place, const WayOfStage& way, const BlockShapes& shapes,
               const DataCosts& data, std::vector<BlockVisit>& visits)
      : graph_(graph),
        blocks_(blocks),
        training_(training),
        spec_(spec),
        homes_(placements.state.homes),
        place_(place),
        range_(place.blocks),
        way_(way),
        shapes_(shapes),
        data_(data),
        visits_(visits),
        shards_(data_shards(placements, spec.replicas())),
        count_(place.blocks.size()),
        ahead_forward_(blocks_ahead(spec.prefetch_depth, training.engine, Phase::forward)),
        ahead_backward_(blocks_ahead(spec.prefetch_depth, training.engine, Phase::backward)),
        in_parts_(runs_backward_in_parts(spec.schedule, place.stage)),
        together_(spec.tied_gradients == TiedGradients::together) {}

  StageBound find() {
    visits_.assign(static_cast<std::size_t>(count_), {});
    for (int i = 0; i < count_; ++i) visit(i);
    add_up();
    if (place_.sequential) {
      take_turns();
    } else {
      bound_.begin = std::max(clears_, visits_.front().gather + own(0).up);
      if (every_own_ && count_ >= 2) {
        if (shards_.parameters || shards_.gradients) wait_for_data();
        if (homes_.parameters != Home::device) wait_for_parameters();
      }
      if (every_own_ && are_brought(shards_, homes_) && std::max(ahead_forward_, ahead_backward_) == 0)
        wait_for_all_data();
      if (way_.recomputing.copies != nullptr) wait_for_saved();
      follow_last_backward();
    }
    bound_.forward += hands_out_ + (tied_uses_ > 0 ? data_.tied.hand_out : Seconds(0.0));
    bound_.backward += collects_ + (together_ ? std::min(tied_uses_, 1) : tied_uses_) * data_.tied.collect;
    if (homes_.gradients == Home::nvme && computes_norm(training_)) square_sums_in_files();
    update();
    return bound_;
  }

 private:
  const BucketCosts& own(int i) const { return data_.own[blocks_.kind_of(range_.first + i)]; }
  bool has_frozen(int i) const { return shapes_.frozen_elements[blocks_.kind_of(range_.first + i)].all > 0; }
  bool goes_back(int i) const { return has_backward(graph_, range_.first + i); }

  // The bucket of the tied parameter as far as it is this block's.
  BucketCosts tied_at(int i) const {
    const int block = range_.first + i;
    BucketCosts tied = blocks_.uses_tied(block) ? data_.tied : BucketCosts{};
    // Uses that share an accumulator are reduced after the backward of the first block. Their
    // buffer is cleared before that of the last, in every micro-batch if that is of this stage.
    if (together_ && block != place_.tied_on_rank.first)
      tied.reduce = tied.accumulate = tied.across = tied.begin_clear = {};
    if (together_ && (block + 1 != place_.tied_on_rank.last || place_.tied_on_rank.first < range_.first))
      tied.clear = {};
    // Once on a rank, however many uses it holds.
    if (block != place_.tied_on_rank.first) tied.to_host = tied.from_host = {};
    return tied;
  }

  void visit(int i) {
    const std::size_t kind = blocks_.kind_of(range_.first + i);
    const BucketCosts& own = data_.own[kind];
    const BucketCosts tied = tied_at(i);
    const auto [block_costs, copies] = way_.of_block(range_.first + i);
    const BlockCosts& costs = *block_costs;
    tied_uses_ += blocks_.uses_tied(range_.first + i) ? 1 : 0;
    every_own_ = every_own_ && shapes_.own_elements[kind].all > 0 && has_frozen(i) == has_frozen(0) && goes_back(i);
    BlockVisit& visit = visits_[static_cast<std::size_t>(i)];
    visit = {.forward = costs.forward_seconds[kind],
             .backward = costs.backward_seconds[kind],
             .weights = costs.weights_seconds[kind],
             .clear = own.clear + tied.clear,
             .gather = shards_.parameters ? own.gather : Seconds(0.0),
             .gather_again = shards_.parameters ? own.gather_again : Seconds(0.0),
             .reduce = own.reduce + own.accumulate + tied.reduce + tied.accumulate,
             .own_reduce = own.reduce + own.accumulate,
             .across = own.across + tied.across,
             .to_host = own.to_host + tied.to_host,
             .out = {},
             .back = {},
             .up = own.up + tied.up,
             .up_again = own.up_again + (goes_back(i) ? tied.up : Seconds(0.0))};
    most_up_ = std::max(most_up_, visit.up);
    bound_.other_back += micro() * (visit.up + visit.up_again);
    bound_.reads += own.read_up + own.read_again + tied.read_up;
    bound_.update_reads += own.read;
    bound_.update_writes += own.write;
    if (place_.sequential) {
      visit.forward += visit.up;
      visit.backward += visit.up_again;
    }
    if (homes_.gradients != Home::device) move_sums(own, visit);
    if (copies != nullptr) move_saved((*copies)[kind], i, visit);
    to_host_ += homes_.gradients != Home::device ? tied.to_host : visit.to_host;
    bound_.returns += own.from_host;
    from_host_ += own.from_host + tied.from_host;
    across_ += visit.across;
    bound_.plain_forward += visit.forward;
    bound_.plain_backward += visit.backward + visit.clear;
    bound_.weights += visit.weights;
    gathers_ += visit.gather;
    gathers_again_ += visit.gather_again;
    hands_out_ += own.hand_out;
    collects_ += own.collect;
    if (shards_.parameters) gathers_ += tied.gather;
    if (shards_.parameters && goes_back(i)) gathers_again_ += tied.gather;
    reduces_ += visit.reduce;
    clears_ += own.begin_clear + tied.begin_clear;
    updates_ += own.update;
    // The first rank has the first of every so many blocks with matrices; that of another replica
    // has those of its place.
    if (own.orthogonalize > Seconds(0.0) &&
        (!shards_.optimizer || orthogonalizes_for_all(with_matrices_++, place_.shard, spec_.shard_ranks())))
      updates_ += own.orthogonalize;
    exchanged_ += own.exchange;
    if (place_.sequential) updates_ += own.exchange;
    // In two parts: those that follow the last second part, which is among the backwards.
    if (!shards_.gradients && !place_.sequential && (!in_parts_ || visit.weights > Seconds(0.0)))
      bound_.reduces += visit.own_reduce + own.across;
    if (regathers()) bound_.regathers += own.regather;
    bound_.norms += own.norm;
    if (!place_.on_first_rank) return;
    bound_.parts += costs.forward[kind];
    bound_.parts += costs.backward[kind];
    if (place_.sequential)
      bound_.parts.offload +=
          visit.forward + visit.backward - (costs.forward_seconds[kind] + costs.backward_seconds[kind]);
  }

  // The sums of a bucket's gradients go out after each backward that adds to them, and come back
  // before all but the first; in two parts, for each of the parts.
  void move_sums(const BucketCosts& own, BlockVisit& visit) {
    // Where some backwards are whole, as if all were.
    const bool has_second = in_parts_ && visit.weights > Seconds(0.0) && !also_runs_whole_backwards(spec_.schedule);
    const double times = has_second ? 2.0 * micro() : micro();
    bound_.other_out += (times - 1.0) * own.sum + own.to_host;
    bound_.other_back += (times - 1.0) * own.sum;
    // In a file, they are read for the norm and for the update, too.
    bound_.update_reads += (times - 1.0) * own.sum_read + (computes_norm(training_) ? 2.0 : 1.0) * own.shard_read;
    bound_.update_writes += (times - 1.0) * own.sum_write + own.shard_write;
    if (!place_.sequential) return;
    const Seconds of_weights = has_second ? own.sum + own.to_host : Seconds(0.0);
    visit.backward += (has_second || place_.micro_batches > 1 ? own.sum : own.to_host) + of_weights;
    visit.weights += of_weights;
  }

  // What the block saves goes to the host or on to NVMe, and comes back.
  void move_saved(const SavedCopies& saved, int i, BlockVisit& visit) {
    // A stage's input may lie apart: the bound is that of both.
    const bool with_input = i > 0 || place_.stage == 0;
    visit.out = with_input ? saved.out : saved.out_without_input;
    visit.back = with_input ? saved.back : saved.back_without_input;
    bound_.writes += saved.write;
    bound_.reads += saved.read;
    const Seconds again = in_parts_ ? saved.for_weights : Seconds(0.0);
    bound_.out += visit.out;
    bound_.back += visit.back + again;
    if (!place_.sequential) return;
    visit.forward += visit.out;
    visit.backward += visit.back + again;
    visit.weights += again;
  }

  void add_up() {
    // So many blocks' parameters have buffers before the stage's first forward.
    bound_.other_back -= (1 + std::max(ahead_forward_, ahead_backward_)) * most_up_;
    bound_.updates = updates_;
    if (tied_uses_ > 0) updates_ += data_.tied.update;
    if (tied_uses_ > 0 && place_.stage == 0) bound_.norms += data_.tied.norm;
    bound_.occupied = bound_.plain_forward + bound_.plain_backward;
    // The first block's buffer is cleared while the stage may still wait for the gradient.
    if (!place_.sequential) bound_.plain_backward -= visits_.back().clear;
    bound_.forward = bound_.plain_forward;
    bound_.backward = bound_.plain_backward;
    bound_.data = micro() * (gathers_ + gathers_again_ + (shards_.gradients ? reduces_ : Seconds(0.0))) +
                  (shards_.gradients ? Seconds(0.0) : reduces_) + across_;
  }

  // Ranks that do one thing after another.
  void take_turns() {
    bound_.begin = clears_;
    bound_.forward += gathers_;
    bound_.backward += gathers_again_ + (shards_.gradients ? reduces_ : Seconds(0.0));
    bound_.behind = (shards_.gradients ? across_ : reduces_ + across_) + to_host_;
  }

  // A forward takes at least `down`, and a backward `up`, but in two parts. Returns what that adds.
  Seconds wait(Seconds down, Seconds up) {
    const Seconds forward = std::max(bound_.forward, down),
                  backward = in_parts_ ? bound_.backward : std::max(bound_.backward, up);
    const Seconds adds = (forward - bound_.forward) + (backward - bound_.backward);
    stall_ += backward - bound_.backward;
    bound_.forward = forward;
    bound_.backward = backward;
    return adds;
  }
  struct Both {
    Seconds down, up;
  };
  // The first block and the last one, which wait for nothing between them.
  Both ends() const {
    return {.down = visits_.front().forward + visits_.back().forward,
            .up = visits_.front().backward + visits_.back().backward};
  }

  // For gathers and for the buffers of unreduced gradients.
  void wait_for_data() {
    auto [down, up] = ends();
    for (int i = 1; i < count_; ++i) {
      if (i > ahead_forward_) down += visits_[i].gather;
      if (i > ahead_backward_) up += visits_[count_ - 1 - i].gather_again;
      // All but the reductions of the last two visited blocks, 0 and 1. Block 0 waits only for
      // block 2's own buffer: a tied one lies elsewhere.
      if (shards_.gradients && i > 1) up += i == 2 ? visits_[2].own_reduce : visits_[i].reduce;
    }
    bound_.forward = std::max(bound_.forward, down);
    bound_.backward = std::max(bound_.backward, up);
  }

  // For copies of parameters from the host.
  void wait_for_parameters() {
    auto [down, up] = ends();
    for (int i = 1; i < count_; ++i) {
      if (i > ahead_forward_) down += own(i).up;
      if (i > ahead_backward_) up += own(count_ - 1 - i).up_again;
    }
    bound_.stalls = wait(down, up);
  }

  // For both, where nothing is ahead.
  void wait_for_all_data() {
    Seconds down, up, all, before;  // the reduction of the block visited before
    for (int i = count_; i-- > 0;) {
      const BlockVisit& visit = visits_[i];
      const Seconds gather = own(i).up + visit.gather;
      // A copy from the host waits for the block before alone.
      const Seconds again = std::max(before, own(i).up_again) + visit.gather_again;
      before = shards_.gradients ? visit.reduce : Seconds(0.0);
      // The backward of an embedding does not wait for its parameters, which it does not read.
      const std::size_t kind = blocks_.kind_of(range_.first + i);
      const bool reads = std::ranges::any_of(shapes_.kinds[kind].backward.bindings, [](const std::string& of_block) {
        return of_block == binding::parameters || of_block == binding::frozen;
      });
      const Seconds back = reads ? again + visit.backward : again;
      const bool waits = i + 1 < count_ && (reads || i > 0);
      down += visit.forward + (i > 0 ? gather : Seconds(0.0));
      up += waits ? back : visit.backward;
      all += visit.forward + gather + back;
      // Before the first forward and beside the last backward, others may compute.
      if (i == 0) all -= (1.0 / micro()) * (reads ? gather : gather + again);
    }
    // Second parts of backwards read no parameters.
    if (!in_parts_) bound_.occupied = std::max(bound_.occupied, all);
    const Seconds waits = wait(down, up);
    if (homes_.parameters != Home::device) bound_.stalls += waits;
  }

  // For copies of what blocks save. Letters: k_1 .. k_m are the blocks that keep it on the host, in
  // the order in which a phase visits them. b buffers take turns. In a forward, block k_m waits for
  // the copy of block k_(m-b), and copies follow one another from the end of block k_1; in a
  // backward, the copy for block k_(m-b) waits for block k_m. Where the buffers are those of the b
  // layers behind k_m, block k_m + b waits for its copy, and its copy for that block.
  void wait_for_saved() {
    kept_.clear();
    for (std::size_t i = 0; i < visits_.size(); ++i)
      if (visits_[i].out > Seconds(0.0)) kept_.push_back(i);
    const auto turns = static_cast<std::size_t>(way_.turns);
    if (kept_.empty() || (!way_.with_others && kept_.size() <= turns)) return;
    const std::size_t copied = way_.with_others ? kept_.size() : kept_.size() - turns;
    const std::size_t last = way_.with_others ? kept_.back() + turns : kept_.back();
    Seconds down, up;
    for (std::size_t i = 0; i < visits_.size(); ++i) {
      if (i <= kept_.front() || i >= last) down += visits_[i].forward;
      if (i <= kept_.front() || i >= last) up += visits_[i].backward;
    }
    for (std::size_t k = 0; k < copied; ++k) {
      down += visits_[kept_[k]].out;
      up += visits_[kept_[k]].back;
    }
    bound_.stalls += wait(down, up);
  }

  // Reductions from a block on, less the backwards after it; where these have two parts, those of
  // the blocks that have the second, which comes last. Likewise copies to the host, the first of
  // which follows its reduction.
  void follow_last_backward() {
    Seconds suffix, to_copy;
    // Where gathers are not ahead, the last one follows the reduction of the block before.
    const bool gathers_behind = shards_.parameters && ahead_backward_ == 0;
    const int last = shards_.gradients ? std::min(count_, gathers_behind ? 1 : 2) : count_;
    for (int i = 0; i < last; ++i) {
      const BlockVisit& visit = visits_[i];
      // The last backward may wait that long for what comes from the host, while others reduce.
      if (i == 1) {
        suffix -= stall_;
        to_copy -= stall_;
      }
      if (in_parts_ && visit.weights == Seconds(0.0)) continue;
      if (visit.to_host > Seconds(0.0)) {
        to_copy += visit.to_host;
        bound_.copied = std::max(bound_.copied, to_copy + (spec_.replicas() > 1 ? visit.own_reduce : Seconds(0.0)));
        to_copy -= last_part(visit);
      }
      if (spec_.replicas() == 1) continue;
      suffix += visit.reduce + visit.across;
      bound_.behind = std::max(bound_.behind, suffix);
      suffix -= last_part(visit);
    }
  }

  // Sums in files come for the norm in the order of buckets, through buffers that take turns. All
  // that the host squares from the bucket on whose sum is complete last is behind that sum's way to
  // the file and back, and reads into buffers in their second turn are behind its own squares.
  // Those of a rank's later stages follow those of its first, whose sums are complete last.
  void square_sums_in_files() {
    const bool is_later = spec_.virtual_stages > 1 && place_.stage >= spec_.pp();
    Seconds first, others, reads, last, ahead_of_end;
    int taken = 0;
    for (int i = 0; i < count_; ++i) {
      const BlockVisit& visit = visits_[i];
      const Seconds norm = own(i).norm;
      if (taken == 0 && !place_.sequential && !is_later &&
          (norm == Seconds(0.0) || (in_parts_ && visit.weights == Seconds(0.0)))) {
        ahead_of_end += last_part(visit);
        continue;
      }
      const bool ends_alone =
          !place_.sequential && !is_later && ahead_of_end == Seconds(0.0) && visit.reduce == visit.own_reduce;
      if (taken == 0) first = norm;
      if (taken == 0 && ends_alone) first += own(i).to_host + own(i).shard_write + own(i).shard_read;
      if (taken > 0) others += norm;
      if (taken >= file_buffers) reads += own(i).shard_read;
      last = norm;
      taken += norm > Seconds(0.0) ? 1 : 0;
    }
    bound_.norms = first + std::max(others, reads > Seconds(0.0) ? reads + last : Seconds(0.0));
    if (tied_uses_ > 0 && place_.stage == 0) bound_.norms += data_.tied.norm;
    bound_.later_norms_follow = ahead_of_end == Seconds(0.0) && bound_.norms > Seconds(0.0);
    if (ahead_of_end > Seconds(0.0)) bound_.norms = std::max(bound_.norms - ahead_of_end - stall_, Seconds(0.0));
    // Which of several stages is done last, the schedule says.
    if (in_parts_ && !place_.sequential && spec_.virtual_stages > 1) bound_.norms = {};
  }

  // Each bucket is updated, copied back where the host has updated it, and gathered.
  void update() {
    const bool sequential = place_.sequential;
    const bool on_nvme = homes_.optimizer == Home::nvme || homes_.parameters == Home::nvme;
    if (on_nvme) {
      Updates alone{.on_nvme = true, .reads_first = true};
      for_each_updated([&](const BucketCosts& bucket) { alone.update(bucket); });
      bound_.drives = alone.write;
    }
    Updates updates{.on_nvme = on_nvme};
    if (sequential) {
      // Copies back take turns with updates, and hide reads and writes as these do.
      if (on_nvme)
        for_each_updated([&](const BucketCosts& bucket) {
          updates.update(bucket);
          updates.updated += bucket.from_host;
        });
      updates.updated = std::max(updates.updated, updates_ + from_host_);
    }
    Seconds copied = updates.updated,
            gathered = std::max(updates.updated, sequential ? Seconds(0.0) : exchanged_);
    if (regathers() || from_host_ > Seconds(0.0) || on_nvme)
      for_each_updated([&](const BucketCosts& bucket) {
        if (!sequential) updates.update(bucket);
        copied = std::max(copied, updates.updated) + (sequential ? Seconds(0.0) : bucket.from_host);
        gathered = std::max(gathered, copied) + (regathers() ? bucket.regather : Seconds(0.0));
      });
    bound_.finish = std::max({updates_, copied, gathered, updates.write});
    // The host updates the first bucket once its gradients are there: the first blocks may have
    // none.
    Seconds ahead;
    if (updates_on_host(homes_) && !sequential)
      for (int i = 0; i < count_ && own(i).update == Seconds(0.0); ++i) ahead += last_part(visits_[i]);
    if (ahead > Seconds(0.0)) ahead += stall_;
    bound_.finish_behind = std::max(bound_.finish - ahead, Seconds(0.0));
  }
  template <class Visit>
  void for_each_updated(Visit visit_bucket) const {
    for (int i = 0; i < count_; ++i) visit_bucket(own(i));
    if (tied_uses_ > 0) visit_bucket(data_.tied);
  }

  // What hides what follows a block's gradients.
  Seconds last_part(const BlockVisit& visit) const {
    return in_parts_ ? visit.weights : visit.backward + visit.clear;
  }
  bool regathers() const { return shards_.optimizer && !shards_.parameters; }
  double micro() const { return place_.micro_batches; }

  const OpGraph& graph_;
  const ModelBlocks& blocks_;
  const TrainingSpec& training_;
  const ParallelSpec& spec_;
  const StateHomes& homes_;
  const StagePlace& place_;
  const BlockRange range_;
  const WayOfStage& way_;
  const BlockShapes& shapes_;
  const DataCosts& data_;
  std::vector<BlockVisit>& visits_;
  const DataShards shards_;
  const int count_, ahead_forward_, ahead_backward_;
  const bool in_parts_, together_;
  StageBound bound_;
  // Sums over blocks.
  Seconds clears_, updates_, exchanged_, gathers_, gathers_again_, reduces_, across_, to_host_, from_host_, hands_out_,
      collects_;
  Seconds most_up_;  // of the copies of a block's parameters
  Seconds stall_;    // of the backward, beyond what it waits for anyway
  int tied_uses_ = 0;
  std::int64_t with_matrices_ = 0;
  bool every_own_ = true;  // blocks all have buckets that take turns, and a backward
  std::vector<std::size_t> kept_;
};

}  // namespace

StageBound StageBounds::of(const ParallelSpec& spec, const Placements& placements, const StagePlace& place,
                           const WayOfStage& way, const BlockShapes& shapes, const DataCosts& data) {
  return BoundedStage(graph_, blocks_, training_, spec, placements, place, way, shapes, data, visits_).find();
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

}  // namespace parplan
