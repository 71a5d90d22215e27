#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "planner/cluster/cluster.h"
#include "planner/graph/op_graph.h"
#include "planner/graph/training_spec.h"
#include "planner/plan/layout_choices.h"
#include "planner/plan/objective.h"
#include "planner/search/best_first.h"
#include "planner/search/candidates.h"
#include "planner/search/layout_floors.h"
#include "planner/search/space.h"

namespace parplan {

// Some layouts of a space, such as those beyond a restriction, among those of the space without it.
struct Beyond {
  std::function<bool(const ParallelSpec&)> of_degrees;  // whether some layout of these degrees is one
  // Whether one is, by its degrees, schedule, stages and ZeRO; empty: the degrees or the room
  // decide.
  std::function<bool(const ParallelSpec&)> layout;
  // Layouts for which there is room; those that fit with what the space recomputes, but not with
  // what `recompute` says by itself; or those that do not, whatever they recompute.
  enum class Room { enough, with_other_recompute, any } room = Room::enough;
  bool also_what_fits = false;  // with `any`
  // How far parts are looked into: to single layouts, or only to what samples take with a size of
  // micro-batch, however they are laid out.
  enum class Until { layouts, samples } until = Until::layouts;
};

// The parts of a space that a search has opened. A part is looked into step by step: it has all
// layouts of some degrees, then those with one micro-batch and one kind of tensor parallelism, then
// those that differ in the order of their axes alone, then a single layout without its cut. Each
// step tells more of what nothing in the part can beat. The arguments must outlive it; used by one
// thread.
class OpenParts {
 public:
  OpenParts(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training, const LayoutRequest& request,
            const SpaceWidth& width, Objective objective, int least_devices, LayoutFloors& floors);

  // All parts on `least_devices` or more, of which only the degrees are known.
  std::vector<Open> open_all();
  // The same without counting their layouts.
  std::vector<Open> open_uncounted();
  // Those with some layout beyond a restriction: only such layouts are opened from then on, and
  // none are counted. `than`: a space with the same floors, whose search has looked into all that
  // may beat its best plan; empty: from the degrees on.
  std::vector<Open> open_beyond(const Beyond& beyond, const OpenParts* than);
  // Those on exactly so many devices, likewise.
  std::vector<Open> open_those(const Beyond& those, int devices);
  // What is open instead of a part once it has been looked into; nothing where it is a single
  // layout of which no more can be told: its candidates are next. Bounds from the score `enough` on
  // need not be close.
  std::optional<std::vector<Open>> look_into(std::size_t number,
                                             double enough = std::numeric_limits<double>::infinity());

  struct Layouts {
    ParallelSpec spec;  // with what has been chosen
    std::int64_t count = 0;
    Floor floor;
    // Counts parts, layouts in their part, and the candidates that a layout may have.
    std::uint64_t place = 0;
  };
  Layouts layouts(std::size_t number) const;
  // Whether a part has come down to one layout, with its order of axes.
  bool is_layout(std::size_t number) const { return parts_[number].step >= Step::layout; }
  std::int64_t count(std::size_t number) const { return parts_[number].space.layouts; }
  std::int64_t count_all() const { return count_all_; }
  // Where layouts are counted: Space::named_values.
  const Space::NamedValues& named_values() const { return space_.named_values(); }
  // Those of parts that were left out, since nothing in them fits.
  std::int64_t count_left_out() const { return count_left_out_; }
  // The single layout of these that needs the least memory by its floor, taken out of them; nothing
  // where each needs at least `most`.
  std::optional<Layouts> take_smallest_left_out(std::optional<Bytes> most);

 private:
  // What is known of a part.
  enum class Step {
    devices,  // with the floor of their number alone
    degrees,
    micro_batch_at_peak,   // and tensor parallelism; with the floor of their degrees' devices
    micro_batch,           // with the floor of its kernels
    micro_batch_on_links,  // with that of the links that they cross
    any_shards,            // with the floor of its schedule
    unlike_orders,         // the same on devices that are not alike, where the order of axes matters
    alike_orders,          // those of them in which kernels take as long
    unlike_shards,         // and in one order, with the floor of its links
    any_recompute,         // and of its ZeRO stage, in groups of so many ranks
    any_that_fits,         // and of its memory
    any_order,
    layout,
    refined_layout,  // with the best floor that there is
  };
  // Groups of a part that differ in their micro-batches, by their floors: while the first is open
  // it stands for all. Where the smallest takes the least, the smallest first, with the floor of
  // all from it on.
  struct Groups {
    ParallelSpec spec;
    struct Size : SpaceGroups::Size {
      Seconds floor;
    };
    std::vector<Size> sizes;
  };
  // Layouts that differ in what all of their stages recompute: the first leaves the choice to each
  // stage, where stages may choose. With any shards also in the groups of ZeRO's shards.
  using Recomputing = std::vector<PlacedSpec>;
  struct Part {
    Step step{};
    SpacePart space;
    Floor floor;
    std::uint64_t place = 0;
    bool has_to_mix = false;  // layouts: fit only if some stages recompute
    // With the floor of the peak: the place in its groups.
    const Groups* groups = nullptr;
    std::size_t size = 0;
    const Recomputing* recomputing = nullptr;  // with any recompute or shards
    Seconds in_orders = {};                    // alike_orders: what kernels take in these orders
  };

  // Equal devices hold the same in every order of the axes.
  bool are_equal() const { return cluster_.groups.size() == 1; }
  // As long as the layout lives.
  std::span<const Recompute> choices_of(const ParallelSpec& spec) const;
  std::vector<Recompute> choices_of(const Recomputing& group) const;
  std::uint64_t place_of(std::size_t part, const PlacedSpec& placed) const;
  std::vector<PlacedSpec> list_layouts(std::size_t number, bool each_order) const;
  std::vector<PlacedSpec> orders_of(std::size_t number) const;
  std::vector<PlacedSpec> layouts_of(std::size_t number) const;

  std::vector<SpacePart> on_enough(std::vector<SpacePart> parts) const;
  std::vector<Open> open_degrees(std::vector<SpacePart> parts);
  std::vector<Open> open_only(std::vector<SpacePart> parts, const Beyond& those);
  Open open_part(Part part);
  Open opened(std::size_t number);
  Open open_again(std::size_t number, Step step, const Floor& floor);
  Open open_groups(std::size_t number, const Groups& groups, std::size_t size);
  bool is_open(const ParallelSpec& spec) const { return !beyond_ || !beyond_->layout || beyond_->layout(spec); }
  // The time of a layout that scores as much.
  Seconds time_for(const ParallelSpec& spec, double score_of_it) const;
  // Floors of memory grow with the micro-batch, unless one kernel makes its softmax
  // (SoftmaxKernel).
  bool smallest_takes_least() const { return objective_ == Objective::memory && engine_.softmax_multiple <= 1; }
  bool has_room(Beyond::Room room) const { return beyond_ && beyond_->room == room; }
  Open open_on_links(std::size_t number);
  Open open_layout(Part part);
  std::vector<Open> leave_out(std::size_t number);
  std::vector<Open> look_into_degrees(std::size_t number);
  std::vector<Open> look_into_groups(std::size_t number);
  Open open_recomputing(Part part, Recomputing layouts);
  std::vector<Open> look_into_micro_batch(std::size_t number);
  std::vector<Open> look_into_shards(std::size_t number);
  std::vector<Open> look_into_unlike_orders(std::size_t number);
  std::vector<Open> look_into_alike_orders(std::size_t number);
  std::vector<Open> look_into_unlike_shards(std::size_t number);
  std::vector<Open> look_for_room(std::size_t number);
  std::vector<Open> look_into_recomputing(std::size_t number);
  std::vector<Open> open_orders(std::size_t number);
  std::optional<std::vector<Open>> refine(std::size_t number, double enough);
  void keep_left_out(Part part);

  const Cluster& cluster_;
  const Engine& engine_;
  const LayoutRequest& request_;
  Objective objective_{};
  int least_devices_ = 1;
  Space space_;
  LayoutFloors& floors_;
  std::optional<Beyond> beyond_;
  std::vector<std::size_t> looked_into_;  // with one micro-batch, or left out then
  std::deque<Part> parts_;
  std::deque<Groups> groups_;
  std::deque<Recomputing> recomputing_;
  std::vector<std::size_t> left_out_;  // parts that hold nothing that fits
  bool counts_ = false;  // layouts
  std::int64_t count_all_ = 0, count_left_out_ = 0;
  bool is_heap_ = false;  // left_out_, once the smallest has been asked for
};

}  // namespace parplan
