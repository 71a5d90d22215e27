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

// One point of a sweep: some devices of a cluster, a batch and a sequence, with the best plan for
// them, or the reason why there is none.
struct SweepPoint {
  ModelSummary model;  // for the point's sequence
  Cluster cluster;     // reduced to the point's devices
  TrainingSpec training;
  std::optional<RankedPlan> best;
  SearchCounts search;
  std::string reason;  // if there is no plan
  // The groups of `cluster` that `best` uses, in its order, where these differ from the cluster
  // itself.
  std::optional<Cluster> arranged;

  const Cluster& planned() const { return arranged ? *arranged : cluster; }
};

struct Sweep {
  std::string version;                 // of parplan
  std::string objective = "time";      // what the search minimises at each point
  std::vector<std::string> defaults;   // fields of the trainings that were not given
  std::optional<std::int64_t> tokens;  // to train on
  // The share of the time in which steps are made; the rest goes to what fails and what is not
  // training.
  double goodput = 1.0;
  std::vector<SweepPoint> points = {};  // at least one; of one model
};

// What training on all tokens takes with a point's best plan. Values are absent where tokens, a
// price or a power is unknown, or there is no plan. Only devices that the plan uses count.
struct Spending {
  std::optional<double> price_per_hour;  // of the devices together, in the cluster's currency
  std::optional<double> power_w;         // rated power of their boards
  std::optional<double> cost_per_million_tokens;
  std::optional<std::int64_t> steps;   // whole ones; the last may have a part of a batch
  std::optional<double> days;          // tokens / tokens_per_s / goodput / 86400, not rounded up to whole steps
  std::optional<double> device_hours;  // days * 24 * devices
  std::optional<double> cost;          // days * 24 * price_per_hour
  // days * 24 * power_w / 1000: an upper bound for the devices, without hosts, network and cooling.
  std::optional<double> energy_kwh;
};
Spending spending(const Sweep& sweep, const SweepPoint& point);

// A point's marks among those with the same training: equal batch and sequence.
struct SweepMarks {
  bool knee = false;
  bool pareto = false;
};

// What the front weighs against speed: the price if all points with a plan have one, otherwise
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

// (x, y), smaller is better in both: whether each is on the front. Equal points are on it together
// or not at all.
std::vector<bool> pareto_front(std::span<const std::array<double, 2>> points);
// (x, y) ascending in x: the index of the knee of a curve that rises ever more slowly.
std::optional<std::size_t> knee(std::span<const std::array<double, 2>> curve);

// The keys and meanings of a row's columns, in their order: the point, the best plan's row
// (plan_row.h), what all tokens take.
struct SweepColumn {
  std::string key;
  std::string unit;  // "" where the value has none
  std::string description;
};
std::vector<SweepColumn> sweep_columns();
// One object per point, each with one key per column; without a plan, the plan's values are null
// and "reason" says why.
std::vector<Json> sweep_rows(const Sweep& sweep);
// The assumptions behind the numbers, in sentences, including what the front weighs.
std::vector<std::string> assumptions(const Sweep& sweep);
std::vector<std::string> sweep_notes(const Sweep& sweep);

// parplan.sweep/1.
Json sweep_json(const Sweep& sweep);
std::string sweep_csv(const Sweep& sweep);
// For people.
std::string sweep_table(const Sweep& sweep);

}  // namespace parplan
