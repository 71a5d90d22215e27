#include "planner/validate/validate.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <numeric>
#include <tuple>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/base/parallel_for.h"
#include "planner/graph/engine_graph.h"
#include "planner/parallel/engine_layouts.h"
#include "planner/parallel/techniques.h"
#include "planner/plan/layout_choices.h"
#include "planner/plan/memory_verdict.h"
#include "planner/plan/recompute.h"
#include "planner/report/error_band.h"
#include "planner/suggest.h"
#include "planner/validate/collective_run.h"

namespace parplan {

std::optional<double> ValidatedRun::step_error() const {
  if (!skipped.empty() || run.step_seconds.value_or(0.0) <= 0.0) return std::nullopt;
  return step.value / *run.step_seconds - 1.0;
}

std::optional<double> ValidatedRun::memory_error() const {
  if (!skipped.empty() || run.memory_gib.value_or(0.0) <= 0.0) return std::nullopt;
  return static_cast<double>(memory.count) / (*run.memory_gib * 1024.0 * 1024.0 * 1024.0) - 1.0;
}

namespace {

Bytes counted(const MemoryUse& use, MemoryScope scope) {
  if (scope == MemoryScope::allocated) return use.arena();
  return scope == MemoryScope::reserved ? use.arena() + use.reserve : use.peak();
}

// Whether a run cannot have had the memory that is predicted from its facts. No published peak is
// as far from its prediction (docs/accuracy.md).
bool surely_too_large(const ValidatedRun& run) {
  constexpr double beyond_any_error = 1.25;
  return run.verdict == MemoryVerdict::does_not_fit &&
         static_cast<double>(run.device_memory.count) > beyond_any_error * static_cast<double>(run.capacity.count);
}

// Takes sequence parallelism that was assumed out of a run whose model or length it cannot cut.
void keep_to_legal(const OpGraph& graph, StatedRun& stated) {
  if (!stated.sequence_parallel_unstated) return;
  LayoutRequest without = stated.layout;
  without[Choice::sequence_parallel].reset();
  without[Choice::tp_overlap].reset();
  const auto may_be = [&](const LayoutRequest& layout) {
    return is_legal(graph, stated.training, with_given(with_implied(stated.training.engine, layout), stated.training));
  };
  if (may_be(stated.layout) || !may_be(without)) return;
  stated.layout = without;
  std::erase(stated.assumed, assumed_sequence_parallel);
}

}  // namespace

ValidatedRun validate(const PublishedRun& run, const ValidationRequest& of, const GraphOfModel& graph_of) {
  ValidatedRun result;
  result.run = run;
  if (run.collective) {
    PredictedCollective predicted = predict_collective(run, of.catalog);
    result.skipped = std::move(predicted.skipped);
    result.assumed = std::move(predicted.assumed);
    result.step = predicted.time;
    return result;
  }
  StatedRun stated = state(run, of);
  result.skipped = stated.skipped;
  result.assumed = stated.assumed;
  if (stated.has_engine) result.engine = stated.training.engine.name;
  result.engine_differs = stated.engine_differs;
  if (!result.skipped.empty()) return result;
  try {
    const OpGraph graph = as_run_by(stated.training, graph_of(stated.model));
    keep_to_legal(graph, stated);
    result.assumed = stated.assumed;
    SuggestRequest request;
    request.graph = &graph;
    request.model_name = stated.model.name;
    request.cluster = stated.cluster;
    request.training = stated.training;
    request.layout = stated.layout;
    const auto predict = [&] {
      const Plan plan = simulate_layout(request);
      result.step = plan.prediction.time.total();
      const MemoryUse& use = plan.prediction.memory;
      result.scope = stated.memory_scope;
      result.memory = counted(use, stated.memory_scope);
      result.device_memory = use.peak();
      result.capacity = memory_capacity(plan.cluster, plan.spec, plan.prediction);
      result.verdict = memory_verdict(use, result.capacity, memory_headroom(plan.training.engine, plan.cluster));
    };
    const bool ran = run.outcome != "oom";
    std::string since;  // why what is stated is not taken
    if (!stated.recompute_unstated) {
      predict();
      if (!ran || !surely_too_large(result)) return result;
      since = fmt::format(": as stated it needs {} of {}, and it ran", format_bytes(result.device_memory),
                          format_bytes(result.capacity));
    }
    ValidatedRun as_stated = result;
    request.layout[Choice::recompute_layers].reset();  // of the recompute that is not taken
    for (const Recompute recompute : searched_recomputes(stated.training.engine)) {
      request.layout[Choice::recompute] = recompute;
      predict();
      if (result.verdict != MemoryVerdict::does_not_fit || !ran) break;
    }
    const bool fits = result.verdict != MemoryVerdict::does_not_fit;
    if (!stated.recompute_unstated && !fits) return as_stated;
    const Recompute least = *given<Recompute>(request.layout, Choice::recompute);
    result.assumed.push_back(
        least == Recompute::none
            ? "no recompute"
            : fmt::format("recompute: {}, {}{}", name(least),
                          fits ? "the least that fits" : "with which it does not fit either", since));
  } catch (const ConfigError& error) {
    result.skipped = error.message();
  }
  return result;
}

std::vector<ValidatedRun> validate(std::span<const PublishedRun> runs, const ValidationRequest& request,
                                   const GraphOfModel& graph_of, int threads,
                                   const std::function<void(std::size_t done, std::size_t all)>& progress) {
  std::vector<ValidatedRun> results(runs.size());
  std::mutex speaks;
  std::size_t done = 0;
  parallel_for(threads > 0 ? threads : threads_of_this_machine(), runs.size(), [&](int /*thread*/, std::size_t i) {
    results[i] = validate(runs[i], request, graph_of);
    const std::scoped_lock lock(speaks);
    if (progress) progress(++done, runs.size());
  });
  return results;
}

namespace {

// From 1; equal values share the mean of their ranks.
std::vector<double> ranks_of(std::span<const double> values) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, {}, [&](std::size_t i) { return values[i]; });
  std::vector<double> ranks(values.size());
  for (std::size_t first = 0, end = 0; first < order.size(); first = end) {
    while (end < order.size() && values[order[end]] == values[order[first]]) ++end;
    for (std::size_t i = first; i < end; ++i)
      ranks[order[i]] = (static_cast<double>(first) + 1.0 + static_cast<double>(end)) / 2.0;
  }
  return ranks;
}

std::optional<double> correlation(std::span<const double> a, std::span<const double> b) {
  const double count = static_cast<double>(a.size());
  const double mean_a = std::accumulate(a.begin(), a.end(), 0.0) / count;
  const double mean_b = std::accumulate(b.begin(), b.end(), 0.0) / count;
  double together = 0.0, of_a = 0.0, of_b = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    together += (a[i] - mean_a) * (b[i] - mean_b);
    of_a += (a[i] - mean_a) * (a[i] - mean_a);
    of_b += (b[i] - mean_b) * (b[i] - mean_b);
  }
  if (of_a <= 0.0 || of_b <= 0.0) return std::nullopt;
  return together / std::sqrt(of_a * of_b);
}

}  // namespace

std::optional<ErrorSummary> summarise(std::span<const std::pair<double, double>> predicted_and_measured) {
  if (predicted_and_measured.empty()) return std::nullopt;
  std::vector<double> predicted, measured, absolute;
  ErrorSummary summary{.count = static_cast<int>(predicted_and_measured.size()), .rank_correlation = std::nullopt};
  for (const auto& [of_prediction, of_measurement] : predicted_and_measured) {
    predicted.push_back(of_prediction);
    measured.push_back(of_measurement);
    const double error = of_prediction / of_measurement - 1.0;
    absolute.push_back(std::abs(error));
    summary.bias += error / summary.count;
    summary.mean_absolute += std::abs(error) / summary.count;
  }
  std::ranges::sort(absolute);
  const std::size_t half = absolute.size() / 2;
  summary.median_absolute = absolute.size() % 2 == 1 ? absolute[half] : (absolute[half - 1] + absolute[half]) / 2.0;
  summary.largest_absolute = absolute.back();
  summary.rank_correlation = correlation(ranks_of(predicted), ranks_of(measured));
  return summary;
}

std::vector<std::vector<std::size_t>> jobs_of(std::span<const ValidatedRun> runs) {
  const auto job_of = [](const PublishedRun& run) {
    return std::tie(run.source, run.engine, run.device, run.cluster, run.devices, run.layers, run.hidden, run.sequence,
                    run.global_batch, run.precision);
  };
  std::vector<std::vector<std::size_t>> jobs;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (!runs[i].step_error() || runs[i].run.collective) continue;
    const auto is_same = [&](const std::vector<std::size_t>& job) {
      return job_of(runs[job.front()].run) == job_of(runs[i].run);
    };
    auto job = std::ranges::find_if(jobs, is_same);
    if (job == jobs.end()) job = jobs.insert(jobs.end(), std::vector<std::size_t>());
    job->push_back(i);
  }
  std::erase_if(jobs, [](const std::vector<std::size_t>& job) { return job.size() < 2; });
  return jobs;
}

OrderSummary summarise_order(std::span<const ValidatedRun> runs, double apart) {
  OrderSummary summary;
  for (const std::vector<std::size_t>& job : jobs_of(runs)) {
    std::vector<const ValidatedRun*> group;
    for (const std::size_t i : job) group.push_back(&runs[i]);
    ++summary.groups;
    for (std::size_t a = 0; a < group.size(); ++a)
      for (std::size_t b = a + 1; b < group.size(); ++b) {
        const double of_a = *group[a]->run.step_seconds, of_b = *group[b]->run.step_seconds;
        if (std::abs(of_a - of_b) <= apart * std::min(of_a, of_b)) continue;
        ++summary.pairs;
        // A pair that is predicted to take equally long is not in its order.
        const Seconds earlier = of_a < of_b ? group[a]->step : group[b]->step;
        const Seconds later = of_a < of_b ? group[b]->step : group[a]->step;
        summary.pairs_right += earlier < later;
      }
    const auto measured = [](const ValidatedRun* one) { return *one->run.step_seconds; };
    const Seconds least = (*std::ranges::min_element(group, {}, &ValidatedRun::step))->step;
    // Any of those that are predicted to be the fastest may be picked.
    double picked = 0.0;
    int picks = 0;
    for (const ValidatedRun* one : group)
      if (one->step == least) {
        picked += measured(one);
        ++picks;
      }
    summary.regret += picked / picks / measured(*std::ranges::min_element(group, {}, measured)) - 1.0;
  }
  if (summary.groups > 0) summary.regret /= summary.groups;
  return summary;
}

}  // namespace parplan
