#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "planner/base/json.h"
#include "planner/plan/memory_verdict.h"
#include "planner/plan/parallel_spec_text.h"
#include "planner/plan/plan.h"

namespace parplan {

// The subject of a row: one layout of a model on a cluster with its result, predicted or measured.
// It refers to what the caller owns.
struct RowSubject {
  int rank = 1;  // place among the ranked plans, from 1
  const ModelSummary& model;
  const Cluster& cluster;
  const TrainingSpec& training;
  const ParallelSpec& spec;
  const StepResult& result;
  bool predicted = true;  // else measured
  const Plan* first = nullptr;  // whose alternative this is
};
// Whether pairs of published runs tell the steps of the two apart (error_band.h); nothing where
// there is no other plan or no run is known.
std::optional<bool> told_from_first(const RowSubject& subject);
RowSubject subject_of(const Plan& plan);
// By its predicted or measured memory, and the headroom of its cluster.
MemoryVerdict verdict_of(const RowSubject& subject);
std::optional<Shortage> shortage_of(const RowSubject& subject);
// The plan itself (rank 1) or one of its alternatives (rank 2 and up).
RowSubject subject_of(const Plan& plan, int rank);
// The plan with measured values in place of predicted ones.
RowSubject subject_of(const Plan& plan, const StepResult& measured);

// A column of the flat row (docs/json.md): every row has every column, in this order; null where
// there is no value.
struct Column {
  std::string_view key;
  std::string_view unit;  // "" where the value has none
  std::string_view description;
  Json (*value)(const RowSubject& subject) = nullptr;
};
std::span<const Column> columns();

// An object with one key per column.
Json row(const RowSubject& subject);

double tokens_per_second(const RowSubject& subject);
// Model FLOP/s per device; and its ratio to the device's peak at the precision, null where no peak
// is known.
FlopsPerSecond model_rate_per_device(const RowSubject& subject);
Json model_flops_utilization(const RowSubject& subject);

}  // namespace parplan
