#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "planner/plan/memory_verdict.h"
#include "planner/plan/plan.h"
#include "planner/plan/step_details.h"

namespace parplan {

// What keeps a plan from being faster.
enum class Constraint { compute, communication, bubble, memory, host, nvme };
const char* name(Constraint constraint);

// From this share of a device's memory on, memory counts as full: another micro-batch in flight, or
// one ZeRO stage less, rarely fits in a tenth.
inline constexpr double full_share = 0.9;
// The peak over the capacity, on the stage that needs the most memory.
double memory_share(const Plan& plan);

// The idle share of a pipeline of equal stages: (p - 1) / (m + p - 1) with p stages and m
// micro-batches.
double closed_form_bubble(const Plan& plan);
// By what its schedule divides 1F1B's bubble: the stages on a rank, or 3 for ZB-H1, where a forward
// and the two parts of a backward take equally long.
int bubble_divisor(const ParallelSpec& spec);
// A plan's bubble by its causes. Up to the closed form, the pipeline fills and drains, which more
// micro-batches make shorter. The rest, on the stage that computes longest, is waiting for what
// other stages communicate, which more micro-batches do not make shorter.
struct Waiting {
  Seconds filling;
  Seconds others;
};
Waiting waiting(const Plan& plan);
// What of a step the hosts of accelerators compute: the updates of parameters whose optimizer state
// is not on the device.
Seconds updates_on_host(const Plan& plan);
// What the devices compute.
Seconds computing(const Plan& plan);

// Decided by the parts of the plan's step alone: memory where the plan does not fit, else the
// constraint whose removal could gain the most. Doubled devices, links or micro-batches would gain
// half of the time that computes, half of the exposed communication, that of other stages with it,
// half of the bubble due to few micro-batches, and half of the wait for copies to and from the host
// or, where it uses these, its NVMe drives; a faster host half of the updates that it does, too.
// Memory could gain all recomputation, since nothing recomputes for any other reason, the wait for
// copies and the host's updates where twice of it would hold what is off the device, and today's
// would not, and, on a device that is full, the exposed communication of a sharding (ZeRO-2, 3).
Constraint binding_constraint(const Plan& plan);

// A layout to compare with the plan. One that does not fit carries its estimate.
struct Rival {
  RankedPlan plan;
  Bytes capacity;                         // of the devices of the stage that needs the most memory
  std::optional<Shortage> shortage = {};  // where it does not fit, in any home
  bool fits() const { return !shortage; }
};
Rival rival(const Cluster& cluster, RankedPlan plan);  // on this cluster

// The best of a family of layouts, a part of the search space that people know by name: the best on
// as many devices as the plan uses (on all devices where the plan uses one), and among the plan's
// alternatives on any number.
struct FamilyBest {
  std::string_view family;
  // The fastest that fits; where none fits, the one that needs the least memory; absent where the
  // family has no layout.
  std::optional<Rival> best;
  // Nothing else of the family on so many devices is better, whatever its cut; false where a limit
  // on simulated candidates ended the search, or another cut may be better.
  bool certified = true;
  bool of_the_plan = false;   // the plan is of this family
};

// What can be varied of a plan's circumstances; the host's rates and those of its NVMe drives where
// the plan uses these.
enum class Resource { compute, node_links, network, links, host, nvme, memory, global_batch, count_ };
// "compute", "links inside nodes", "network", "all links", "host rates", "NVMe rates", "memory",
// "global batch".
const char* name(Resource resource);

// The choice if there were more or less of one resource.
struct Variation {
  Resource resource{};
  double factor = 1.0;  // of the present amount
  std::int64_t global_batch = 0;
  Cluster cluster = {};       // as changed
  // The plan as it stands; its micro-batch may differ where the batch is changed.
  Rival plan;
  // The best that fits then: the plan itself where nothing is better; absent where nothing fits.
  std::optional<RankedPlan> best;
  bool changes = false;  // `best` is another layout than the plan
  // Nothing in the space is better than `best`: no limit on simulations kept the search from seeing
  // that.
  bool certified = false;
};

// The same, measured by variations to twice of each resource. Communication counts by all links:
// routes cross several kinds of links in a row, and where these are alike, twice of one kind alone
// gains nothing. The plan's own gain from faster devices counts up to half of what they compute or
// waits for longer stages (the rest of the bubble waits for computation too, but more micro-batches
// shorten it), and its gain from a larger batch up to half of that rest. The gain from memory
// (where it is not varied: as decided by the parts), or from a batch with which the plan does not
// fit, is the lead of the best plan over `now`, the present best.
Constraint binding_constraint(const Plan& plan, std::span<const Variation> twice, const RankedPlan& now);

// How much more of the plan's objective another result has: 0.1 is a tenth more, negative is
// better.
double excess(const Plan& plan, const ParallelSpec& spec, const StepResult& result);
// For a result on another cluster.
double excess(const Plan& plan, const Cluster& cluster, const ParallelSpec& spec, const StepResult& result);
// How much more one result has than another. Costs are compared in money where the devices of both
// have prices in one currency, else in device-seconds.
struct OnCluster {
  const Cluster& cluster;
  const ParallelSpec& spec;
  const StepResult& result;
};
double excess(Objective objective, const OnCluster& of, const OnCluster& over);

// The plan with one of its choices made differently.
struct Neighbour {
  std::string change;  // "without recompute"
  Rival rival;
};

// The rules of the well-known guides, in numbers for this model on this cluster. A rule on which
// the numbers say nothing is absent.
struct Guide {
  struct OneDevice {
    // One kind of the cluster's devices: the best kind that the model fits on, else the kind that
    // lacks the least memory.
    Cluster cluster;
    Rival least;  // the layout on one device that needs the least memory, or the best that fits
  };
  struct LargestBlock {  // does not fit on one device
    std::string block;
    Bytes state;     // of its parameters: themselves, gradients, optimizer state
    Bytes capacity;  // of the device with the most memory
  };
  struct BeyondNode {  // tensor parallelism over more devices than a node has
    int inside_ranks = 0;
    BytesPerSecond inside;  // bandwidth of a device in a ring of as many ranks as a node has devices
    int across_ranks = 0;
    BytesPerSecond across;  // the same with as many ranks as the best beyond has
    Rival best;             // the best of all degrees beyond a node
    bool certified = true;  // no layout beyond a node is better
  };
  // ZeRO-2 and 3 with a pipeline reduce or gather in every micro-batch.
  struct ShardedPipeline {
    Rival rival;  // the plan with that ZeRO stage
    Bytes sent;   // by a device of the plan in a step, for data parallelism
    std::int64_t micro_batches = 0;
  };
  struct GatheredEachMicroBatch {  // the plan is ZeRO-3
    std::int64_t micro_batches = 0;
    Bytes sent;
    Seconds exposed;
  };
  struct Bubble {
    int stages = 0;
    std::int64_t micro_batches = 0;
    double closed_form = 0.0;  // (p - 1) / (m + p - 1)
    double simulated = 0.0;    // share of the step
    // A bubble is negligible with at least four times as many micro-batches as stages (Huang et
    // al., GPipe, 2019, section 2.3).
    std::int64_t enough = 0;   // micro-batches
    double closed_form_then = 0.0;
  };
  std::optional<OneDevice> one_device;
  std::optional<LargestBlock> largest_block;
  std::optional<BeyondNode> beyond_node;
  std::vector<ShardedPipeline> sharded_pipeline;
  std::optional<GatheredEachMicroBatch> gathered;
  std::optional<Bubble> bubble;
};

// The value that a remedy sets: a number (memory in bytes), a flag, or a name as options take it.
using RemedyValue = std::variant<std::int64_t, bool, std::string>;

// A remedy where no plan fits: the smallest change of its kind, and the plan that then fits.
struct Remedy {
  std::string_view of;   // what is changed: "memory", "devices", "global_batch" ...
  std::string instead;   // "1.20 GiB of memory a device instead of 1.00 GiB"
  RemedyValue value;
  ModelSummary model;  // with the changed sequence length
  Cluster cluster;     // as changed
  TrainingSpec training;
  RankedPlan plan;       // simulated
};

// The groups of the cluster's nodes (bit by group) on whose devices ranks do what this one does.
std::uint64_t groups_of(const Plan& plan, const RankResult& rank);

// A rank that unlike devices share goes at the pace of the slowest. What all its kernels take, each
// alone, if each of its devices is one of this group.
struct KernelsOnGroup {
  int rank = 0;           // its place in StepDetails::ranks
  std::size_t group = 0;  // of the cluster
  Seconds kernels;
  bool operator==(const KernelsOnGroup&) const = default;
};

// Why a plan is as it is.
struct Reasons {
  StepDetails details;
  std::vector<KernelsOnGroup> shared;   // of each rank that unlike devices share, one for each of its groups
  std::vector<Bytes> capacities;        // of the devices of each of details.ranks
  // The next best of all layouts that were simulated, where the plan keeps no alternatives.
  std::optional<RankedPlan> runner_up;
  Constraint binding{};
  std::vector<Neighbour> neighbours;
  Guide guide;
  // Found by searches; empty without searches.
  std::vector<FamilyBest> families;
  std::optional<Variation> unrestricted;  // the present situation, where the whole space has a better plan
  std::vector<Variation> twice;           // of each resource
  // A fifth less and more of each resource; a batch only more where it cannot be smaller.
  std::vector<Variation> sensitivity;
  Seconds time;  // taken to find them
};

// The plans behind it: its alternatives, or the runner-up where it keeps none.
std::span<const RankedPlan> ranked_behind(const Plan& plan, const Reasons& reasons);

// The element of `twice` for the binding resource; null without searches.
const Variation* relaxed(const Reasons& reasons);

}  // namespace parplan
