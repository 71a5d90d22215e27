#include "planner/search/space.h"

#include <algorithm>
#include <set>

#include "planner/base/enum.h"
#include "planner/parallel/techniques.h"
#include "planner/schedule/schedules.h"

namespace parplan {
namespace {

// The orders that differ on axes of more than one rank; each stands for those that differ elsewhere
// only.
std::vector<AxisOrder> distinct_orders(const Degrees& degree, const LayoutRequest& request) {
  if (request.order) return {*request.order};
  AxisOrder order;
  std::vector<AxisOrder> orders;
  std::set<std::vector<Axis>> seen;
  do {
    std::vector<Axis> matters;
    for (Axis axis : order)
      if (degree[axis] > 1) matters.push_back(axis);
    if (seen.insert(matters).second) orders.push_back(order);
  } while (std::next_permutation(order.begin(), order.end()));
  return orders;
}

template <class T>
std::vector<T> choices(const std::optional<T>& fixed, std::vector<T> free) {
  return fixed ? std::vector<T>{*fixed} : free;
}

// The choices that are free once degrees, sequence parallelism and ZeRO stage are fixed.
struct FreeChoices {
  ParallelSpec spec;  // of what is fixed
  std::vector<std::int64_t> micro_batches;
  std::vector<ScheduleKind> schedules;
  std::vector<Recompute> recomputes;
  std::vector<AxisOrder> orders;
};

template <class Visit>
void walk_space(const OpGraph& graph, const TrainingSpec& training, int devices, const LayoutRequest& request,
                const Visit& visit) {
  std::vector<ScheduleKind> schedules;
  for (const ScheduleRow& row : schedule_rows()) schedules.push_back(row.kind);
  const auto fixed_differs = [](const std::optional<int>& fixed, int degree) { return fixed && *fixed != degree; };

  for (const std::int64_t tp : divisors(devices)) {
    for (const std::int64_t pp : divisors(devices / tp)) {
      FreeChoices choice;
      ParallelSpec& spec = choice.spec;
      spec.mesh.degree = {
          .pp = static_cast<int>(pp), .dp = static_cast<int>(devices / tp / pp), .tp = static_cast<int>(tp)};
      if (fixed_differs(request.tp, spec.tp()) || fixed_differs(request.pp, spec.pp()) ||
          fixed_differs(request.dp, spec.dp()))
        continue;
      if (training.global_batch % spec.dp() != 0) continue;
      if (request.stage_blocks) spec.stage_blocks = *request.stage_blocks;
      choice.schedules = spec.pp() > 1 ? choices(request.schedule, schedules) : std::vector{ScheduleKind::one_f_one_b};
      choice.recomputes = choices(request.recompute, {Recompute::none, Recompute::full});
      for (const std::int64_t micro_batch : choices(request.micro_batch, divisors(training.global_batch / spec.dp()))) {
        spec.micro_batch = micro_batch;
        if (!too_many_calls(training, spec)) choice.micro_batches.push_back(micro_batch);
      }
      if (choice.micro_batches.empty()) continue;
      // What a technique forbids at these degrees, it forbids for every choice of the others.
      spec.micro_batch = choice.micro_batches.front();
      for (const bool sequence_parallel :
           choices(request.sequence_parallel, spec.tp() > 1 ? std::vector{false, true} : std::vector{false}))
        for (const int zero : choices(request.zero_stage, spec.dp() > 1 ? std::vector{0, 1, 2, 3} : std::vector{0})) {
          spec.sequence_parallel = sequence_parallel;
          spec.zero_stage = zero;
          if (illegal(graph, training, spec)) continue;
          if (choice.orders.empty()) choice.orders = distinct_orders(spec.mesh.degree, request);
          visit(choice);
        }
    }
  }
}

}  // namespace

std::vector<ParallelSpec> enumerate_specs(const OpGraph& graph, const TrainingSpec& training, int devices,
                                          const LayoutRequest& request) {
  std::vector<ParallelSpec> specs;
  walk_space(graph, training, devices, request, [&](const FreeChoices& choice) {
    for (const std::int64_t micro_batch : choice.micro_batches)
      for (const ScheduleKind schedule : choice.schedules)
        for (const Recompute recompute : choice.recomputes)
          for (const AxisOrder& order : choice.orders) {
            ParallelSpec& spec = specs.emplace_back(choice.spec);
            spec.micro_batch = micro_batch;
            spec.schedule = schedule;
            spec.recompute = recompute;
            spec.mesh.order = order;
          }
  });
  return specs;
}

std::int64_t count_specs(const OpGraph& graph, const TrainingSpec& training, int devices,
                         const LayoutRequest& request) {
  std::size_t count = 0;
  walk_space(graph, training, devices, request, [&](const FreeChoices& choice) {
    count += choice.micro_batches.size() * choice.schedules.size() * choice.recomputes.size() * choice.orders.size();
  });
  return static_cast<std::int64_t>(count);
}

}  // namespace parplan
