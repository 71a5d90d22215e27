#include "planner/search/space.h"

#include <algorithm>
#include <set>

#include "planner/parallel/techniques.h"
#include "planner/schedule/schedules.h"

namespace parplan {
namespace {

// The orders that differ on axes of more than one rank; each stands for those that differ elsewhere only.
std::vector<std::array<Axis, 3>> distinct_orders(const std::array<int, 3>& degree, const LayoutRequest& request) {
  if (request.order) return {*request.order};
  std::array<Axis, 3> order = all_axes;
  std::vector<std::array<Axis, 3>> orders;
  std::set<std::vector<Axis>> seen;
  do {
    std::vector<Axis> matters;
    for (Axis axis : order)
      if (degree[static_cast<std::size_t>(axis)] > 1) matters.push_back(axis);
    if (seen.insert(matters).second) orders.push_back(order);
  } while (std::next_permutation(order.begin(), order.end()));
  return orders;
}

template <class T>
std::vector<T> choices(const std::optional<T>& fixed, std::vector<T> free) {
  return fixed ? std::vector<T>{*fixed} : free;
}

}  // namespace

std::vector<ParallelSpec> enumerate_specs(const OpGraph& graph, const TrainingSpec& training, int devices, const LayoutRequest& request) {
  std::vector<ParallelSpec> specs;
  std::vector<ScheduleKind> schedules;
  for (const ScheduleRow& row : schedule_rows()) schedules.push_back(row.kind);
  const auto fixed_differs = [](const std::optional<int>& fixed, int degree) { return fixed && *fixed != degree; };

  for (const std::int64_t tp : divisors(devices)) {
    for (const std::int64_t pp : divisors(devices / tp)) {
      ParallelSpec spec;
      spec.mesh.degree = {static_cast<int>(pp), static_cast<int>(devices / tp / pp), static_cast<int>(tp)};
      if (fixed_differs(request.tp, spec.tp()) || fixed_differs(request.pp, spec.pp()) || fixed_differs(request.dp, spec.dp())) continue;
      if (training.global_batch % spec.dp() != 0) continue;
      if (request.stage_blocks) spec.stage_blocks = *request.stage_blocks;
      // What a technique forbids at these degrees, it forbids for every choice of the others.
      for (const bool sequence_parallel : choices(request.sequence_parallel, spec.tp() > 1 ? std::vector{false, true} : std::vector{false}))
        for (const int zero : choices(request.zero_stage, spec.dp() > 1 ? std::vector{0, 1, 2, 3} : std::vector{0})) {
          spec.sequence_parallel = sequence_parallel;
          spec.zero_stage = zero;
          spec.micro_batch = request.micro_batch.value_or(1);
          if (illegal(graph, training, spec)) continue;
          for (const std::int64_t micro_batch : choices(request.micro_batch, divisors(training.global_batch / spec.dp())))
            for (const ScheduleKind schedule : spec.pp() > 1 ? choices(request.schedule, schedules) : std::vector{ScheduleKind::one_f_one_b})
              for (const Recompute recompute : choices(request.recompute, {Recompute::none, Recompute::full}))
                for (const std::array<Axis, 3>& order : distinct_orders(spec.mesh.degree, request)) {
                  ParallelSpec candidate = spec;
                  candidate.micro_batch = micro_batch;
                  candidate.schedule = schedule;
                  candidate.recompute = recompute;
                  candidate.mesh.order = order;
                  specs.push_back(std::move(candidate));
                }
        }
    }
  }
  return specs;
}

}  // namespace parplan
