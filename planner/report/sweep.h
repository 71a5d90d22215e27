#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "planner/base/json.h"
#include "planner/plan/plan.h"

namespace parplan {

// One point of a sweep: some devices of a cluster, a batch and a sequence, with the best plan of
// them, or why there is none.
struct SweepPoint {
  ModelSummary model;  // for the point's sequence
  Cluster cluster;     // cut to the point's devices
  TrainingSpec training;
  std::optional<RankedPlan> best;
  SearchCounts search;
  std::string reason;  // without a plan
  std::optional<Cluster>
      arranged;  // the groups of `cluster` that `best` takes, in their order, where that is not how it stands

  const Cluster& planned() const { return arranged ? *arranged : cluster; }
};

struct Sweep {
  std::string version;                 // of parplan
  std::string objective = "time";      // what each point's best plan has least of
  std::vector<std::string> defaults;   // fields of the trainings that nobody gave
  std::optional<std::int64_t> tokens;  // to train on
  std::vector<SweepPoint> points;      // at least one; of one model
};

// What training on all tokens takes by a point's best plan. Absent where tokens, a price or a power
// is not known, or there is no plan. Only devices that the plan uses count.
struct Spending {
  std::optional<double> price_per_hour;  // of the devices together, in the cluster's currency
  std::optional<double> power_w;         // that their boards are rated for
  std::optional<double> cost_per_million_tokens;
  std::optional<std::int64_t> steps;     // whole ones; the last may be a part of a batch
  std::optional<double> days;            // tokens / tokens_per_s / 86400, not rounded up to whole steps
  std::optional<double> device_hours;    // days * 24 * devices
  std::optional<double> cost;            // days * 24 * price_per_hour
  std::optional<double> energy_kwh;  // days * 24 * power_w / 1000: an upper bound of what devices take, without hosts,
                                     // network and cooling
};
Spending spending(const Sweep& sweep, const SweepPoint& point);

// What a point is good for among those that train the same: equal batch and sequence.
struct SweepMarks {
  bool knee = false;
  bool pareto = false;
};

// What the front weighs against speed: the price where all points with a plan have one, else
// devices.
enum class FrontMeasure { cost, device_hours };
FrontMeasure front_measure(const Sweep& sweep);

// One for each point.
//
// The Pareto front: no other point is at least as fast and at least as cheap, and better in one of
// the two. Both count per token, so the front is the same for any number of tokens.
//
// The knee, among points that differ in nothing but the number of devices: the point that is
// farthest above the chord from the smallest to the largest, devices and tokens per second both
// scaled to 0..1, if the distance later falls by more than the mean step between sizes. This is
// Kneedle at sensitivity 1, without smoothing, as there is no noise (Satopaa et al., "Finding a
// 'Kneedle' in a Haystack", ICDCS Workshops 2011, section III). Ties go to the smallest; there is
// none where speed grows nearly in proportion.
std::vector<SweepMarks> marks(const Sweep& sweep);

// (x, y), smaller is better in both: whether each is on the front. Equal points stand or fall
// together.
std::vector<bool> pareto_front(std::span<const std::array<double, 2>> points);
// (x, y) ascending in x: the place of the knee of a curve that rises ever more slowly.
std::optional<std::size_t> knee(std::span<const std::array<double, 2>> curve);

// What the columns of a row are called and mean, in their order: the point, the best plan's row
// (row.h), what all tokens take.
struct SweepColumn {
  std::string key;
  std::string unit;  // "" where the value has none
  std::string description;
};
std::vector<SweepColumn> sweep_columns();
// One object a point, each with a key a column; without a plan, what belongs to one is null and
// "reason" says why.
std::vector<Json> sweep_rows(const Sweep& sweep);
// What numbers rest on, in sentences; with what the front weighs.
std::vector<std::string> assumptions(const Sweep& sweep);
std::vector<std::string> sweep_notes(const Sweep& sweep);

// parplan.sweep/1.
Json sweep_json(const Sweep& sweep);
std::string sweep_csv(const Sweep& sweep);
// For people.
std::string sweep_table(const Sweep& sweep);

}  // namespace parplan
