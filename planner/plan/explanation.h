#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "planner/plan/plan.h"
#include "planner/plan/step_details.h"

namespace parplan {

// What keeps a plan from being faster.
enum class Constraint { compute, communication, bubble, memory };
const char* name(Constraint constraint);

// From this share of a device's memory on, memory counts as full: another micro-batch in flight or
// a ZeRO stage less rarely fits in a tenth.
inline constexpr double full_share = 0.9;
// The peak over the capacity, on the stage that needs most.
double memory_share(const Plan& plan);

// What of a pipeline of equal stages is idle: (p - 1) / (m + p - 1) of p stages and m
// micro-batches.
double closed_form_bubble(const Plan& plan);
// A plan's bubble by what it waits for: up to the closed form for the pipeline to fill and drain,
// which is shorter with more micro-batches; the rest for stages that take longer than others, which
// is not.
struct Waiting {
  Seconds filling;
  Seconds unequal;
};
Waiting waiting(const Plan& plan);

// By the parts of the plan's step alone: memory, where it does not fit; else what could be gained
// most from. Half of what computes or waits for stages that take longer, of what communication is
// waited for and of the bubble of few micro-batches, as if devices, links or micro-batches were
// doubled; and of memory all that is computed again, since nothing recomputes for any other reason
// than room, with the exposed communication of a sharding (ZeRO-2, 3) in a device that is full.
Constraint binding_constraint(const Plan& plan);

// Another layout beside the plan. One that does not fit has its estimate.
struct Rival {
  RankedPlan plan;
  Bytes capacity;  // of the devices of the stage that needs most
  bool fits() const { return plan.result.memory.peak() <= capacity; }
};
Rival rival(const Cluster& cluster, RankedPlan plan);  // on this cluster

// The best of a family of layouts, a part of the search space that people know by name: of those on
// as many devices as the plan has (where it has one, on all), and of its alternatives on however
// many.
struct FamilyBest {
  std::string_view family;
  std::optional<Rival> best;  // the fastest that fits; where none does, the one that needs least memory; absent where
                              // the family has no layout
  bool certified = true;  // nothing else of the family on so many devices is better; false where a limit on simulated
                          // candidates ended the search
  bool of_the_plan = false;   // the plan is of this family
};

// What a plan has, changed.
enum class Resource { compute, node_links, network, links, memory, global_batch, count_ };
const char* name(
    Resource resource);  // "compute", "links inside nodes", "network", "all links", "memory", "global batch"

// The choice, if one resource were more or less.
struct Variation {
  Resource resource{};
  double factor = 1.0;        // of what there is now
  std::int64_t global_batch = 0;
  Cluster cluster = {};       // as changed
  Rival plan;                 // the plan as it stands; its micro-batch may be another, where the batch is
  std::optional<RankedPlan>
      best;  // the best that fits then: the plan itself where nothing is better; absent where nothing fits
  bool changes = false;       // `best` is another layout than the plan
  bool certified =
      false;  // nothing in the space is better than `best`: no limit on simulations kept the search from seeing that
};

// The same, measured by variations to twice of each resource. Communication counts by all links:
// routes cross several kinds of them in a row, and where these are alike twice of one alone gains
// nothing. What the plan itself gains from faster devices counts up to half of what it computes or
// waits for stages that take longer (the rest of the bubble waits for computing too, but is shorter
// with more micro-batches), and from a larger batch up to half of that rest; what memory gains
// (without a variation of it: as by the parts), or a batch with which the plan does not fit, is by
// how much the best plan is better than `now`, the best of today.
Constraint binding_constraint(const Plan& plan, std::span<const Variation> twice, const RankedPlan& now);

// By how much more another result has of what the plan's objective counts: 0.1 is a tenth more,
// negative is better.
double excess(const Plan& plan, const ParallelSpec& spec, const StepResult& result);
double excess(const Plan& plan, const Cluster& cluster, const ParallelSpec& spec,
              const StepResult& result);  // of another cluster

// The plan with one of its choices made differently.
struct Neighbour {
  std::string change;  // "without recompute"
  Rival rival;
};

// The rules of the well-known guides, as they come out for this model on this cluster. What the
// numbers do not say is absent.
struct Guide {
  struct OneDevice {
    Cluster
        cluster;  // of unlike devices those of one kind: the best of those that have room, else those that lack least
    Rival least;      // the layout of one device that needs least memory, or the best that fits
  };
  struct LargestBlock {  // does not fit on one device
    std::string block;
    Bytes state;     // of its parameters: themselves, gradients, optimizer state
    Bytes capacity;  // of the device that has most
  };
  struct BeyondNode {  // tensor parallelism over more devices than a node has
    int inside_ranks = 0;
    BytesPerSecond inside;  // what a device's ring reaches with as many ranks as a node has devices
    int across_ranks = 0;
    BytesPerSecond across;  // the same with as many ranks as the best beyond has
    Rival best;             // the best of all degrees beyond
    bool certified = true;  // of these
  };
  struct ShardedPipeline {  // ZeRO-2 or 3 with a pipeline reduces or gathers in every micro-batch
    Rival rival;            // the plan with that stage
    Bytes sent;             // by a device in a step for data parallelism, in the plan
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
    // A bubble is negligible from four times as many micro-batches as stages on (Huang et al.,
    // GPipe, 2019, section 2.3).
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

// Prediction over measurement, minus one, over runs of one model on one cluster in several layouts:
// what is common to all does not change which layout is the faster one; what is not says how far
// apart two predictions have to be.
struct ModelError {
  double least = 0.0;
  double most = 0.0;
  int runs = 0;
  std::string_view source;
  // Predicted step times that differ by a smaller part may come out in the other order.
  double undecided() const { return (1.0 + most) / (1.0 + least) - 1.0; }
};

// What a remedy changes to: a number (memory in bytes), whether, or a name as options take it.
using RemedyValue = std::variant<std::int64_t, bool, std::string>;

// With no plan that fits: a change, the smallest of its kind, and the plan that fits then.
struct Remedy {
  std::string_view of;   // what is changed: "memory", "devices", "global_batch" ...
  std::string instead;   // "1.20 GiB of memory a device instead of 1.00 GiB"
  RemedyValue value;
  ModelSummary model;    // of the sequence as changed
  Cluster cluster;       // as changed
  TrainingSpec training;
  RankedPlan plan;       // simulated
};

// Why a plan is as it is.
struct Reasons {
  StepDetails details;
  std::vector<Bytes> capacities;  // of each stage's devices
  std::optional<ModelError> error;      // where runs on such devices are known
  std::optional<ModelError> elsewhere;  // else, for accelerators: of the devices of which runs are known
  std::optional<RankedPlan> runner_up;  // the next best of all that was looked at, where the plan keeps no alternatives
  Constraint binding{};
  std::vector<Neighbour> neighbours;
  Guide guide;
  // By searches; empty where none were wanted.
  std::vector<FamilyBest> families;
  std::optional<Variation> unrestricted;  // as things are, where the whole space has a better plan
  std::vector<Variation> twice;           // of each resource
  std::vector<Variation> sensitivity;     // a fifth less and more; of the batch no less where it cannot be lessened
  double seconds = 0.0;                   // that finding them took
};

// The element of `twice` for the binding resource; null without searches.
const Variation* relaxed(const Reasons& reasons);

}  // namespace parplan
