#include "planner/search/search.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>

#include "planner/program/lower.h"
#include "planner/schedule/schedules.h"
#include "planner/search/candidate.h"
#include "planner/search/candidates.h"
#include "planner/simulator/simulate.h"

namespace parplan {
namespace {

// Sizes of job to consider: all devices; on small clusters every smaller number, on large ones half of them and the
// largest power of two below.
std::vector<int> device_counts(int devices, const LayoutRequest& request, bool fewer) {
  std::vector<int> counts{devices};
  if (request.dp && request.tp && request.pp) return {*request.dp * *request.tp * *request.pp};
  if (!fewer) return counts;
  if (devices <= 16) {
    for (int n = devices - 1; n >= 1; --n) counts.push_back(n);
    return counts;
  }
  int power = 1;
  while (power * 2 < devices) power *= 2;
  counts.push_back(power);
  if (devices % 2 == 0 && devices / 2 != power) counts.push_back(devices / 2);
  return counts;
}

}  // namespace

StepResult simulate_spec(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training, const ParallelSpec& spec,
                         const Placements& placements, const Schedule& schedule, std::span<const CostModel> models, Timeline* timeline) {
  const Job job{.graph = &graph, .training = training, .spec = spec, .placements = placements, .schedule = schedule,
                .backend = cluster.backend(), .overhead = memory_overhead(cluster)};
  return simulate(lower_representatives(job), models, timeline);
}

StepResult simulate_spec(const OpGraph& graph, NetworkCache& networks, const TrainingSpec& training, const ParallelSpec& spec,
                         const Placements& placements, const Schedule& schedule, Timeline* timeline) {
  std::vector<CostModel> models;
  for (int stage = 0; stage < spec.pp(); ++stage) models.push_back(cost_model(networks, spec.mesh, stage));
  return simulate_spec(graph, networks.cluster(), training, spec, placements, schedule, models, timeline);
}

namespace {

// Calls `work(thread, item)` for every item, each once, on several threads. What one of them throws is thrown here.
void in_parallel(int threads, std::size_t items, const std::function<void(int thread, std::size_t item)>& work) {
  if (threads <= 1 || items <= 1) {
    for (std::size_t item = 0; item < items; ++item) work(0, item);
    return;
  }
  std::atomic<std::size_t> next{0};
  std::mutex guard;
  std::exception_ptr failure;
  const auto run = [&](int thread) {
    try {
      for (std::size_t item = next++; item < items; item = next++) work(thread, item);
    } catch (...) {
      const std::lock_guard lock(guard);
      if (!failure) failure = std::current_exception();
      next = items;
    }
  };
  {
    std::vector<std::jthread> others;
    for (int thread = 1; thread < std::min<int>(threads, static_cast<int>(items)); ++thread) others.emplace_back(run, thread);
    run(0);
  }
  if (failure) std::rethrow_exception(failure);
}

// Candidates of one layout on equal networks take equal time, whatever the order of their axes.
struct Simulated {
  ParallelSpec spec;
  std::vector<CostModel> models;
  StepResult result;
};
bool equal_work(const ParallelSpec& spec, const std::vector<CostModel>& models, const Simulated& known) {
  ParallelSpec same_order = spec;
  same_order.mesh.order = known.spec.mesh.order;
  return same_order == known.spec && std::ranges::equal(models, known.models, [](const CostModel& a, const CostModel& b) {
    return *a.device == *b.device && a.rates == b.rates && a.networks == b.networks;
  });
}

}  // namespace

SearchResult search(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training, const LayoutRequest& request,
                    const SearchOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  const int threads = options.threads > 0 ? options.threads : static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 16u));
  std::vector<std::unique_ptr<CandidateMaker>> makers;  // by thread
  for (int thread = 0; thread < threads; ++thread) makers.push_back(std::make_unique<CandidateMaker>(graph, cluster, training, options.memory_limit));

  // Specs whose blocks have equal shapes go to one thread together, since they share what is lowered.
  std::vector<ParallelSpec> specs;
  for (const int devices : device_counts(cluster.devices(), request, options.fewer_devices))
    for (ParallelSpec& spec : enumerate_specs(graph, training, devices, request)) specs.push_back(std::move(spec));
  std::map<std::tuple<std::int64_t, int, bool>, std::vector<std::size_t>> by_shape;
  for (std::size_t i = 0; i < specs.size(); ++i) by_shape[{specs[i].micro_batch, specs[i].tp(), specs[i].sequence_parallel}].push_back(i);
  std::vector<const std::vector<std::size_t>*> tasks;
  for (const auto& [shape, members] : by_shape) tasks.push_back(&members);
  struct Made {
    std::int64_t candidates = 0;
    std::vector<Candidate> fitting;
    std::optional<Candidate> smallest;  // of those that do not fit
  };
  std::vector<Made> made(specs.size());
  in_parallel(threads, tasks.size(), [&](int thread, std::size_t task) {
    std::vector<Candidate> candidates;
    for (const std::size_t i : *tasks[task]) {
      candidates.clear();
      makers[static_cast<std::size_t>(thread)]->add(specs[i], !request.recompute, candidates);
      Made& to = made[i];
      to.candidates = static_cast<std::int64_t>(candidates.size());
      for (Candidate& candidate : candidates) {
        if (candidate.estimate.spare.count >= 0)
          to.fitting.push_back(std::move(candidate));
        else if (!to.smallest || candidate.estimate.memory.peak() < to.smallest->estimate.memory.peak())
          to.smallest = std::move(candidate);
      }
    }
  });

  SearchResult result;
  std::vector<Candidate> candidates;  // that fit, in the order of the space
  for (Made& one : made) {
    result.counts.candidates += one.candidates;
    result.counts.infeasible_memory += one.candidates - static_cast<std::int64_t>(one.fitting.size());
    std::ranges::move(one.fitting, std::back_inserter(candidates));
    if (one.smallest && (!result.smallest || one.smallest->estimate.memory.peak() < result.smallest->result.memory.peak())) {
      const Estimate& estimate = one.smallest->estimate;
      result.smallest = RankedPlan{std::move(one.smallest->spec), {.time = estimate.time, .memory = estimate.memory, .memory_stage = estimate.memory_stage, .communication = {}}};
    }
  }
  if (!candidates.empty()) result.smallest.reset();

  // Most promising first.
  std::vector<std::pair<Score, std::size_t>> order;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const Candidate& candidate = candidates[i];
    order.emplace_back(score(options.objective, cluster, candidate.spec, candidate.estimate.lower_bound, candidate.estimate.memory), i);
  }
  std::ranges::sort(order);

  struct Ranked {
    Score score;
    std::size_t index = 0;  // in the space, for ties
    RankedPlan plan;
  };
  std::vector<Ranked> best;
  const auto cannot_win = [&](const Score& bound) { return static_cast<int>(best.size()) >= options.top && bound >= best.back().score; };
  std::vector<Simulated> known;
  std::size_t next = 0;
  // Batches do not depend on the number of threads: as many as are still missing to the best `top`, then few.
  constexpr std::int64_t batch = 4;
  while (next < order.size() && result.counts.simulated < options.most_simulated && !cannot_win(order[next].first)) {
    const std::int64_t missing = options.top - static_cast<std::int64_t>(best.size());
    const std::int64_t room = std::min(options.most_simulated - result.counts.simulated, std::max(missing, batch));
    struct Turn {
      std::size_t index = 0;
      std::vector<CostModel> models;
      StepResult result;
    };
    std::vector<Turn> jobs;
    for (; next < order.size() && static_cast<std::int64_t>(jobs.size()) < room && !cannot_win(order[next].first); ++next) jobs.push_back({.index = order[next].second, .models = {}, .result = {}});
    in_parallel(threads, jobs.size(), [&](int thread, std::size_t number) {
      Turn& job = jobs[number];
      const ParallelSpec& spec = candidates[job.index].spec;
      CandidateMaker& maker = *makers[static_cast<std::size_t>(thread)];
      for (int stage = 0; stage < spec.pp(); ++stage) job.models.push_back(cost_model(maker.estimator().networks(), spec.mesh, stage));
      for (const Simulated& one : known)
        if (equal_work(spec, job.models, one)) {
          job.result = one.result;
          return;
        }
      const Schedule schedule = row_of(spec.schedule).actions(spec.pp(), static_cast<int>(micro_batches(spec, training)));
      job.result = simulate_spec(graph, cluster, training, spec, maker.placements_of(spec), schedule, job.models, nullptr);
    });
    for (Turn& job : jobs) {
      const ParallelSpec& spec = candidates[job.index].spec;
      known.push_back({spec, std::move(job.models), job.result});
      best.push_back({.score = score(options.objective, cluster, spec, job.result.time.total(), job.result.memory), .index = job.index, .plan = {spec, job.result}});
      ++result.counts.simulated;
    }
    std::ranges::sort(best, {}, [](const Ranked& one) { return std::pair(one.score, one.index); });
    if (static_cast<int>(best.size()) > options.top) best.erase(best.begin() + options.top, best.end());
    if (options.progress) options.progress(result.counts.simulated, std::min<std::int64_t>(options.most_simulated, static_cast<std::int64_t>(order.size())));
  }

  for (Ranked& one : best) result.plans.push_back(std::move(one.plan));
  if (!result.plans.empty()) {
    // The bounds ascend: what is left is no better than the next.
    const Score& winner = best.front().score;
    result.counts.pruned_by_bound = 0;
    for (std::size_t i = next; i < order.size(); ++i) result.counts.pruned_by_bound += order[i].first >= winner;
    result.counts.certified = next >= order.size() || order[next].first >= winner;
    if (!result.counts.certified) {
      const Score& bound = order[next].first;
      result.counts.gap = winner.first > bound.first ? winner.first / bound.first - 1.0 : winner.second / bound.second - 1.0;
    }
  }
  result.counts.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

}  // namespace parplan
