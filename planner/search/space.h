#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/layout_choices.h"
#include "planner/plan/parallel_spec.h"
#include "planner/search/space_width.h"

namespace parplan {

// Every legal combination of the values of space_rows() on `devices` devices, in a fixed order,
// with stage cuts still empty.
std::vector<ParallelSpec> enumerate_specs(const OpGraph& graph, const TrainingSpec& training, int devices,
                                          const LayoutRequest& request);
// The number of these.
std::int64_t count_specs(const OpGraph& graph, const TrainingSpec& training, int devices, const LayoutRequest& request);

// The layouts of one set of degrees, and among these the layouts of one micro-batch and of one kind
// of tensor and context parallelism.
struct SpacePart {
  ParallelSpec spec;         // with the degrees; in a group also with the others
  std::int64_t layouts = 0;  // legal ones
};
enum class Devices { at_most, exactly };
// The groups of a part that differ in nothing but their micro-batches.
struct SpaceGroups {
  ParallelSpec spec;  // without the micro-batch
  struct Size {
    std::int64_t micro_batch = 0;
    std::int64_t layouts = 0;
  };
  std::vector<Size> sizes;  // the smallest first
};
// The layouts of a group that differ in nothing but the order of their axes: the first, and their
// number. Their places in their part follow one another.
struct PlacedSpec {
  std::int64_t place = 0;
  ParallelSpec spec;
  std::int64_t orders = 0;
};

struct KnownLayouts;

// The same layouts, listed step by step. It keeps what it has counted. The arguments must outlive
// it; used by one thread.
class Space {
 public:
  Space(const OpGraph& graph, const TrainingSpec& training, const LayoutRequest& request, const SpaceWidth& width);
  ~Space();

  // All degrees on at most `devices` devices, or exactly these, in the order of parts(); their
  // layouts are not counted, and groups() tells whether any is legal.
  std::vector<SpacePart> degrees(int devices, Devices wanted);

  // All parts with layouts that use at most `devices` devices, or exactly these: the most devices
  // first, and otherwise in the order of enumerate_specs.
  std::vector<SpacePart> parts(int devices, Devices wanted);
  // The values of choices that words for the space name, as legal layouts of parts() have them.
  using NamedValues = std::vector<std::pair<Choice, std::vector<ChoiceValue>>>;
  const NamedValues& named_values() const { return named_values_; }
  // With `counts` false no layouts are counted.
  std::vector<SpaceGroups> groups(const SpacePart& part, bool counts = true);
  std::vector<PlacedSpec> specs(const SpacePart& group) const;
  // Each of these layouts, and the orders in which they are listed.
  std::vector<PlacedSpec> orders(const PlacedSpec& placed) const;
  std::vector<AxisOrder> orders_of(const ParallelSpec& spec) const;

 private:
  const OpGraph& graph_;
  const TrainingSpec& training_;
  const LayoutRequest& request_;
  SpaceWidth width_;
  std::unique_ptr<KnownLayouts> known_;
  NamedValues named_values_;
};

}  // namespace parplan
