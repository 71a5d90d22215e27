#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "planner/base/hash.h"
#include "planner/base/units.h"
#include "planner/cluster/cluster.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/layout_choices.h"
#include "planner/plan/parallel_spec.h"
#include "planner/plan/spec_hash.h"
#include "planner/schedule/schedules.h"
#include "planner/search/candidates.h"
#include "planner/search/device_count_bound.h"
#include "planner/search/space_width.h"

namespace parplan {

// Nothing takes less, whatever is still to be chosen.
struct Floor {
  Seconds time;
  Bytes memory;  // of the fullest device
  bool operator==(const Floor&) const = default;
};

// What floors of samples (LayoutFloors::seconds_of_sample) follow from: from layouts as they run;
// for any context parallelism, from what samples take without it, of which each rank has its share,
// since what is cut into parts takes no less; or, for communication over the tensor axis that is
// hidden however well, from all else; or, for replicas with unlike numbers of micro-batches, from
// the devices of all replicas together. The latter three have no other floors. Where time does not
// matter, they follow from nothing: the number of devices alone tells.
enum class SampleFloors { as_run, shared_over_context, without_tensor_communication, shared_by_unlike_replicas, none };

// Floors of layouts whose choices are made step by step: each step costs more and tells more. They
// never exceed the simulation (a property test holds this). The graph, the cluster, the training,
// the request and the maker must outlive it; used by one thread.
class LayoutFloors {
 public:
  static constexpr Seconds infinite{std::numeric_limits<double>::infinity()};

  LayoutFloors(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training, const LayoutRequest& request,
               const SpaceWidth& width, CandidateMaker& maker, SampleFloors samples = SampleFloors::as_run);

  // With the number of devices alone: all products at the highest rate of their devices, and a
  // device's share of the state.
  Floor of_devices(int devices) const;
  // With the degrees: all products at the highest rate of their devices, or all kernels of the
  // blocks in the largest of micro-batches, in the least time of a pipeline of so many stages, and
  // a device's share of the state.
  Floor of_degrees(const ParallelSpec& spec);
  // The same with a micro-batch; any later time, for less work, where it is not below `below`.
  Floor of_micro_batch_at_peak(const ParallelSpec& spec, Seconds below = infinite);
  // With a micro-batch and sequence parallelism: the kernels of the blocks, and communication in
  // them with no latency over all of a device's links.
  Floor of_micro_batch(const ParallelSpec& spec);
  // The same memory, with the time of of_micro_batch_at_peak: less work, where time only breaks
  // ties.
  Floor memory_of_micro_batch(const ParallelSpec& spec);
  // The same with communication over the links that it crosses, in the best order of the axes; 0
  // where that is not known yet.
  Seconds time_on_links(const ParallelSpec& spec);
  // With a schedule and a number of stages, for any ZeRO stage and order of the axes: the blocks of
  // of_micro_batch. The devices are alike.
  Seconds time_of_any_shards(const ParallelSpec& spec);
  // The same where they are not: as fast as the stages are in the best order of the axes; and in
  // each of some orders.
  Seconds time_of_any_order(const ParallelSpec& spec);
  std::vector<Seconds> times_in_orders(const ParallelSpec& spec, std::span<const AxisOrder> orders);
  // Communication over the data axis, with the ZeRO stage, for any order of the axes; any time up
  // to `enough` where it is not above that.
  Seconds data_time_of_any_order(const ParallelSpec& spec, Seconds enough = {});
  // Whether replicas may have unlike numbers of micro-batches: then the devices alone tell.
  bool may_be_unlike() const { return samples_of_ == SampleFloors::shared_by_unlike_replicas; }
  // Whether layouts may be given such as are balanced.
  bool balances_replicas() const { return balances_; }
  // Whether those of this layout, as far as it is chosen, may be given unlike numbers.
  bool may_be_unlike(const ParallelSpec& spec) const;
  // The same in the order of its axes, on which the devices of replicas depend.
  bool may_be_unlike_in_order(const ParallelSpec& spec);
  // Whether the devices together lack the memory for any layout of these.
  bool lacks_room(const ParallelSpec& spec);
  // Whether the fullest of them holds so much.
  bool takes(const ParallelSpec& spec, Bytes memory);
  // What they hold at least, by that micro-batch or a smaller one that was asked about.
  Bytes memory_known(const ParallelSpec& spec);

  // A layout without its cut: blocks and transfers on the links that they cross, or communication
  // over the data axis. Stages may choose between `choices` what they recompute.
  Seconds time_of(const ParallelSpec& spec, std::span<const Recompute> choices);
  // The same of what is not over the data axis, for any ZeRO stage and groups of shards, of layouts
  // whose replicas are alike.
  Seconds time_in_any_shards(const ParallelSpec& spec, std::span<const Recompute> choices) {
    return may_be_unlike() ? of_devices(spec.mesh.size()).time : least_layout(spec, choices).time;
  }
  // And the communication of the fullest rank over the data axis.
  Seconds data_time(const ParallelSpec& spec);
  // Whether the pipeline's ranks with these choices can hold all blocks within `most` seconds for
  // each micro-batch, and within their memory, or `memory` where that is given. A layout that fits
  // can.
  bool can_hold(const ParallelSpec& spec, std::span<const Recompute> choices, std::optional<Seconds> most = {},
                std::optional<Bytes> memory = {});
  // Whether the pipeline's ranks together lack the memory for all blocks with these choices,
  // however large the groups are over which ZeRO shards. The devices are alike.
  bool lacks_room_in_any_shards(const ParallelSpec& spec, std::span<const Recompute> choices);
  // The fullest rank's share of what all ranks hold of the blocks, at least: a floor of the memory
  // that looks at no cut.
  Bytes memory_by_share(const ParallelSpec& spec, std::span<const Recompute> choices);
  // The floor of the time where memory decides what stages recompute; from `enough` on it need not
  // be close.
  Seconds time_within_memory(const ParallelSpec& spec, std::span<const Recompute> choices, Seconds enough = infinite);
  // The floor of the memory, not below `least`.
  Bytes memory_of(const ParallelSpec& spec, std::span<const Recompute> choices, Bytes least);

 private:
  // Replicas whose stages are on the same devices: the first of them, how many these are, and for
  // each device of theirs the first stage on it and the number of stages.
  struct ReplicaKind {
    struct StagesOn {
      const NetworkCache::StageDevice* device = nullptr;
      int first = 0;
      int count = 1;
    };
    int first = 0;
    int replicas = 0;
    std::vector<StagesOn> stages;
  };
  const std::vector<ReplicaKind>& replica_kinds(const DeviceMesh& mesh);
  // The least time of the layout whose replicas have any numbers of micro-batches that are those of
  // the global batch together; whatever the schedule and what recomputes, where no `choices` of
  // that are given.
  Seconds time_of_unlike(const ParallelSpec& spec, std::span<const Recompute> choices = {});
  // What a block of each kind takes at least for a micro-batch on such stages.
  std::vector<Seconds> least_on(const ParallelSpec& spec, const ReplicaKind& kind, const ReplicaKind::StagesOn& stages,
                                std::span<const Recompute> choices);
  // What the blocks of a layer take at least, by Block::kind.
  struct LeastBlocks {
    std::vector<std::int64_t> saved;  // bytes for a micro-batch
    std::int64_t scratch = 0;         // bytes of a rank, with a single stage of all blocks
    std::int64_t least_scratch = 0;   // with any blocks
    // What a micro-batch's forward and backward take, by device.
    std::map<const DeviceKind*, std::vector<Seconds>> seconds;
  };
  // What the Segments of a block take at least.
  struct SegmentSeconds {
    Seconds forward;
    Seconds backward;  // or its first part
    Seconds weights;   // its second part, where it runs in two
    Seconds all() const { return forward + backward + weights; }
  };
  // What all blocks take at least: together, and those of the slowest rank.
  struct LeastWork {
    Seconds all = {};
    Seconds slowest = {};
    bool operator==(const LeastWork&) const = default;
  };
  static void take_least(std::span<const Seconds> seconds, std::vector<Seconds>& least);
  // How many times as fast as the fastest stage the stages are together, at most: each as fast as
  // it is with the kind of block that suits it best.
  static double speeds_of(std::span<const std::vector<Seconds>> stages, std::span<const Seconds> fastest);
  // What the slowest of unlike ranks takes for its blocks at least, however these are cut.
  // `stages`: what each rank takes for a block, by Block::kind.
  Seconds slowest_of(std::span<const std::vector<Seconds>> stages) const;
  static LeastWork work_of(std::span<const int> blocks, std::span<const Seconds> by_kind, int ranks);
  static Seconds least_of_slowest(const ScheduleRow& row, const LeastWork& work, Seconds transfer,
                                  const PipelineShape& shape);
  // What the blocks of a layout take at least for a micro-batch: together, and those of its slowest
  // stage; a transfer between stages; and the step.
  struct LeastLayout {
    Seconds all, slowest, transfer, time;
  };
  LeastLayout least_layout(const ParallelSpec& spec, std::span<const Recompute> choices);
  // What of that does not follow from the schedule; `speeds` as speeds_of has it.
  struct LeastStages {
    LeastWork work;
    double speeds = 1.0;
    Seconds transfer;
    bool operator==(const LeastStages&) const = default;
  };
  // For so many ranks, whose blocks take so long; `stages`: a single one where all are alike.
  LeastStages least_of(std::span<const std::vector<Seconds>> stages, int ranks) const;
  // By their kernels alone, with any recompute.
  LeastStages kernels_of_stages(const ParallelSpec& spec);
  const LeastStages& least_stages(const ParallelSpec& spec, std::span<const Recompute> choices);
  // Those by their kernels alone that differ, and by order of the axes which of them.
  struct StagesInOrders {
    std::vector<LeastStages> each;
    std::vector<std::pair<AxisOrder, std::size_t>> of_order;
  };
  const StagesInOrders& stages_in_any_order(const ParallelSpec& spec);
  std::vector<Seconds> times_of(const StagesInOrders& stages, const ParallelSpec& spec);
  static ParallelSpec of_any_schedule(ParallelSpec spec);
  // In every order of its axes.
  std::vector<ParallelSpec> orders_of(const ParallelSpec& spec) const;
  // What a stage with some choice holds.
  struct Holding {
    BlockTable table;
    // Bytes beside those that grow with blocks, by schedule and the kinds of blocks held.
    std::vector<std::pair<std::pair<ScheduleKind, std::uint64_t>, std::int64_t>> fixed;
  };
  struct Holdings {
    std::vector<std::size_t> of_stage;  // in `each`; a single one where all stages are equal
    std::vector<Holding> each;
  };

  // Whether `of_bytes`, which holds for more bytes if it does for fewer, holds for those beside the
  // state.
  bool tells(const ParallelSpec& spec, const std::function<bool(double)>& of_bytes);
  // can_hold without the closed form that tells most often (`Shares`).
  bool can_hold_in_turn(const ParallelSpec& spec, std::span<const Recompute> choices, std::optional<Seconds> most,
                        std::optional<Bytes> memory);
  // Whether layers that recompute nothing are not among the choices of a layout that has some.
  static bool lacks_kept_layers(const ParallelSpec& spec, std::span<const Recompute> choices);
  // Whether what a stage holds besides the state does not grow with its blocks alone.
  static bool has_own_peaks(const ParallelSpec& spec);
  // Whether cuts of a layout are not told apart by what stages hold.
  bool holds_anything(const ParallelSpec& spec) const;
  // Letters: rank s holds blocks of kind k in a_ks bytes each, with the recompute that takes least.
  // Where R_s bytes of it are for blocks, sum over s of R_s / a_ms is at least `needed`, for the
  // kind m of most blocks: the sum over all blocks of a_ks / a_ms on their ranks is no larger than
  // the one and, with the least of it over the ranks, no smaller than the other.
  struct Shares {
    std::vector<double> of_byte;  // 1 / a_ms, by rank
    double needed = 0.0;
    std::int64_t least_fixed = 0;  // with libraries
    std::int64_t libraries = 0;
  };
  Shares shares_of(const ParallelSpec& spec, std::span<const Recompute> choices);
  Holdings& holdings_of(const ParallelSpec& spec, Recompute choice, bool with_seconds);
  // What blocks [begin, end) on a stage take for a micro-batch, at least, if they recompute by the
  // rule of `own`, in as few layers as it takes to fit. `none`: the stage without recompute.
  Seconds least_seconds_held(const ParallelSpec& spec, const BlockTable& none, const BlockTable& own, int in_flight,
                             std::int64_t heads, std::int64_t capacity, std::size_t begin, std::size_t end) const;
  void forget_holdings();
  // Whether a layout may run backwards in two parts, and its blocks on a stage that does.
  bool may_divide() const;
  ParallelSpec with_fewest_casts(ParallelSpec spec) const;
  std::span<const LoweredBlock> blocks_of(ParallelSpec spec, Recompute recompute);
  std::span<const LoweredBlock> divided_blocks(ParallelSpec spec, Recompute recompute);
  LeastBlocks& least_blocks(const ParallelSpec& spec);
  std::optional<std::int64_t> known_size_below(const ParallelSpec& spec) const;
  // What they follow from, with the micro-batch last.
  using BlocksKey = std::tuple<int, bool, TensorOverlap, int, ContextMethod, int, std::int64_t>;
  static BlocksKey blocks_key(const ParallelSpec& spec) {
    return {spec.tp(),        spec.sequence_parallel, spec.tp_overlap, spec.cp(), spec.cp_method, spec.mesh.cp_ulysses,
            spec.micro_batch};
  }
  // What the kernels of a block take at least for a sample, in any micro-batch, by Block::kind; and
  // with the degrees alone. 0 on heterogeneous devices.
  const std::vector<Seconds>& seconds_of_sample(const ParallelSpec& spec);
  const std::vector<Seconds>& seconds_of_any_sample(const ParallelSpec& spec);
  Floor of_samples(const ParallelSpec& spec, std::span<const Seconds> kernels, Seconds below);
  // What the blocks of each kind take at least for a micro-batch, as they are run; and a share of
  // which holds for every smaller one, too.
  const std::vector<Seconds>& least_seconds(const ParallelSpec& spec, const NetworkCache::StageDevice& device);
  std::vector<Seconds> least_seconds_by_data(const ParallelSpec& spec, const NetworkCache::StageDevice& device);
  // What the Segments of lowered blocks take, by kind.
  std::vector<SegmentSeconds> segment_seconds(std::span<const LoweredBlock> blocks, const ParallelSpec& spec,
                                              const NetworkCache::StageDevice& device) const;
  Seconds least_time(std::span<const Seconds> by_kind, const PipelineShape& shape, Seconds below = infinite);
  Seconds least_time(const LeastWork& work, const PipelineShape& shape, Seconds below = infinite);
  Seconds least_time(const ScheduleRow& row, const LeastWork& work, const PipelineShape& shape, Seconds below);
  Seconds least_of_any_cut(const ScheduleRow& row, Seconds all, Seconds transfer, const PipelineShape& shape);
  double bytes_beside_state(const ParallelSpec& spec, const LeastBlocks& blocks) const;

  const OpGraph& graph_;
  const Cluster& cluster_;
  const TrainingSpec& training_;
  CandidateMaker& maker_;
  DeviceCountBound bound_;
  std::vector<Recompute> recomputes_;          // that layouts may have
  std::vector<const ScheduleRow*> schedules_;  // that pipelines may have
  std::vector<std::int64_t> micro_batches_;    // that layouts may have
  std::optional<ContextMethod> method_;        // where it is given
  int exchanging_ = 1;                         // cp_ulysses of layouts that share out sequences
  TensorOverlap overlap_ = TensorOverlap::none;  // of layouts with sequence parallelism
  Offload offload_;  // of all layouts, whether or not it is chosen yet
  SpaceWidth width_;
  SampleFloors samples_of_{};
  bool balances_ = false;         // replicas may be given unlike numbers of micro-batches
  std::map<DeviceMesh, std::vector<ReplicaKind>> replica_kinds_;
  int group_ = 0;                 // micro_batch_group of layouts that interleave
  std::vector<int> blocks_;       // by Block::kind
  bool alike_inside_ = true;      // all blocks but the first and the last
  std::vector<double> flops_;     // of a sample, by Block::kind: the least of its blocks
  BytesPerSecond fastest_links_;  // of a device, all of its links together
  bool switches_add_ = false;     // has_nvlink_sharp
  // By tensor degree, sequence parallelism and overlap, context degree, method and groups, and
  // micro-batch.
  std::map<BlocksKey, LeastBlocks> least_blocks_;
  // seconds_of_sample by the device, whose rates follow from how many of a node are at work, tensor
  // degree, sequence parallelism and overlap, context degree, method and groups, and
  // seconds_of_any_sample by the device, tensor and context degree.
  std::map<std::tuple<const DeviceKind*, int, bool, TensorOverlap, int, ContextMethod, int>, std::vector<Seconds>>
      samples_;
  std::map<std::tuple<const DeviceKind*, int, int>, std::vector<Seconds>> any_samples_;
  // What the blocks of a layer take at least on the links that they cross, by Block::kind, for a
  // number of Estimator::paces.
  std::map<std::pair<int, int>, std::vector<Seconds>> seconds_by_pace_;
  // The least time of a pipeline whose blocks take a second together, by schedule, ranks, stages,
  // micro-batches, groups of these and seconds of a transfer.
  using FillKey = std::tuple<const ScheduleRow*, int, int, int, int, double>;
  std::unordered_map<FillKey, Seconds, TupleHash> fills_;
  // Some of what was asked for: least_stages, by layouts of any schedule and what their layers may
  // recompute; data_time; and stages_in_any_order.
  struct StagesKey {
    ParallelSpec layout;
    std::vector<Recompute> choices;
    bool operator==(const StagesKey&) const = default;
  };
  struct StagesHash {
    std::size_t operator()(const StagesKey& key) const {
      std::size_t seed = SpecHash()(key.layout);
      for (const Recompute recompute : key.choices) add_hash(seed, static_cast<std::size_t>(recompute));
      return seed;
    }
  };
  std::unordered_map<StagesKey, LeastStages, StagesHash> least_stages_;
  std::unordered_map<ParallelSpec, Seconds, SpecHash> data_times_;
  std::unordered_map<ParallelSpec, StagesInOrders, SpecHash> stages_in_any_order_;
  // Those asked for last, by layout with one recompute, and whether their seconds count: what
  // blocks hold depends neither on the schedule nor on the order of the axes.
  struct HoldingsHash {
    std::size_t operator()(const std::pair<ParallelSpec, bool>& key) const {
      return SpecHash()(key.first) + static_cast<std::size_t>(key.second);
    }
  };
  std::unordered_map<std::pair<ParallelSpec, bool>, Holdings, HoldingsHash> holdings_;
  std::vector<BlockTable> spare_tables_;  // of those that were forgotten
  std::map<std::pair<ParallelSpec, std::size_t>, Bytes> memories_;
  std::vector<Seconds> of_micro_batch_;  // by Block::kind: a buffer of of_samples
};

}  // namespace parplan
