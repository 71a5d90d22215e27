#include "planner/search/space.h"

#include <algorithm>
#include <array>

#include "planner/base/enum_index.h"
#include "planner/parallel/techniques.h"
#include "planner/search/space_rows.h"

namespace parplan {
namespace {

// A walk over the rows of the space, with one layout in which each row in turn sets its choice. A
// row's values are kept until a choice that they follow from changes.
class SpaceWalk {
 public:
  SpaceWalk(const OpGraph& graph, const TrainingSpec& training, int devices, const LayoutRequest& request)
      : context_{graph, training, devices}, request_(request) {
    for (const SpaceRow& row : space_rows()) {
      Step& step = steps_[count_++];
      step.space = &row;
      step.choice = &row_of(row.choice);
      if (row.decides_legality) deciding_ = count_;
      for (const SpaceRow& later : space_rows())
        if (later.follows_from.contains(row.choice)) step.followers |= 1u << (&later - space_rows().data());
    }
  }

  // Visits every legal layout.
  template <class Visit>
  void enumerate(const Visit& visit) {
    decide(0, [&] { choose(deciding_, visit); });
  }

  // The number of legal layouts, without visiting choices from which nothing follows.
  std::int64_t count() {
    std::int64_t layouts = 0;
    decide(0, [&] { layouts += count_from(deciding_); });
    return layouts;
  }

 private:
  struct Step {
    const SpaceRow* space = nullptr;
    const ChoiceRow* choice = nullptr;
    unsigned followers = 0;  // the rows whose values follow from this choice
    bool is_known = false;   // whether `values` holds for the present layout
    std::vector<ChoiceValue> values;
  };

  const std::vector<ChoiceValue>& values(std::size_t row) {
    Step& step = steps_[row];
    if (step.is_known) return step.values;
    step.is_known = true;
    step.values.clear();
    const std::optional<ChoiceValue>& given = request_[step.space->choice];
    const bool applies = !step.choice->applies || step.choice->applies(spec_);
    if (!given || !applies) {
      step.space->values(context_, spec_, step.values);
    } else if (!step.choice->axis) {
      step.values.push_back(*given);
    } else {
      // Degrees have to multiply to the number of devices, which no technique checks.
      step.space->values(context_, spec_, step.values);
      std::erase_if(step.values, [&](const ChoiceValue& value) { return value != *given; });
    }
    return step.values;
  }

  void set(std::size_t row, const ChoiceValue& value) {
    steps_[row].choice->set(spec_, value);
    for (std::size_t later = row + 1; later < count_; ++later)
      if ((steps_[row].followers >> later & 1u) != 0) steps_[later].is_known = false;
  }

  // What a technique rejects with one value of the other choices, it rejects with every value.
  bool is_legal() {
    for (std::size_t row = deciding_; row < count_; ++row) {
      const std::vector<ChoiceValue>& any = values(row);
      if (any.empty()) return false;
      set(row, any.front());
    }
    return !illegal(context_.graph, context_.training, spec_);
  }

  template <class Visit>
  void decide(std::size_t row, const Visit& visit) {
    if (row == deciding_) {
      if (is_legal()) visit();
      return;
    }
    for (const ChoiceValue& value : values(row)) {
      set(row, value);
      decide(row + 1, visit);
    }
  }

  template <class Visit>
  void choose(std::size_t row, const Visit& visit) {
    if (row == count_) {
      visit(spec_);
      return;
    }
    for (const ChoiceValue& value : values(row)) {
      set(row, value);
      choose(row + 1, visit);
    }
  }

  std::int64_t count_from(std::size_t row) {
    if (row == count_) return 1;
    const std::vector<ChoiceValue>& each = values(row);
    if (steps_[row].followers == 0) return static_cast<std::int64_t>(each.size()) * count_from(row + 1);
    std::int64_t layouts = 0;
    for (const ChoiceValue& value : each) {
      set(row, value);
      layouts += count_from(row + 1);
    }
    return layouts;
  }

  SpaceContext context_;
  const LayoutRequest& request_;
  std::array<Step, count_of<Choice>> steps_;
  std::size_t count_ = 0;
  std::size_t deciding_ = 0;  // number of rows that decide legality
  ParallelSpec spec_;
};

}  // namespace

std::vector<ParallelSpec> enumerate_specs(const OpGraph& graph, const TrainingSpec& training, int devices,
                                          const LayoutRequest& request) {
  std::vector<ParallelSpec> specs;
  SpaceWalk(graph, training, devices, request).enumerate([&](const ParallelSpec& spec) { specs.push_back(spec); });
  return specs;
}

std::int64_t count_specs(const OpGraph& graph, const TrainingSpec& training, int devices,
                         const LayoutRequest& request) {
  return SpaceWalk(graph, training, devices, request).count();
}

}  // namespace parplan
