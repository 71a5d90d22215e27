#include "planner/search/search.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
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
#include "planner/simulator/steady.h"

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

std::optional<StepResult> simulate_steady(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training, const ParallelSpec& spec,
                                          const Placements& placements, std::span<const CostModel> models) {
  constexpr int period = 2;  // buffers take turns by two
  const int stages = spec.pp();
  const std::int64_t all = micro_batches(spec, training);
  // Time to become steady, a window that is longer than anything reaches back, and the end of the schedule.
  int some = 6 * stages + 24;
  some += static_cast<int>((all - some) & 1);
  if (all < 3 * some) return std::nullopt;  // it would save too little
  const ScheduleRow& row = row_of(spec.schedule);
  for (int stage = 0; stage < stages; ++stage)
    if (row.in_flight(stage, stages, some - period) != row.in_flight(stage, stages, static_cast<int>(all))) return std::nullopt;
  Job job{.graph = &graph, .training = training, .spec = spec, .placements = placements, .schedule = {},
          .backend = cluster.backend(), .overhead = memory_overhead(cluster)};
  std::vector<Program> programs;
  const auto play = [&](int count, std::vector<CallEnds>* ends) {
    job.training.global_batch = count * spec.dp() * spec.micro_batch;
    job.schedule = row.actions(stages, count);
    programs = lower_representatives(job);
    return simulate(programs, models, nullptr, nullptr, ends);
  };
  const StepResult before = play(some - period, nullptr);
  std::vector<CommunicationVolume> sent_before;
  for (const Program& program : programs) sent_before.push_back(program.communication);
  std::vector<CallEnds> ends;
  StepResult result = play(some, &ends);
  const int window = stages + 4;
  const std::optional<double> later = steady_seconds(programs, ends, some - stages - 2 - period - window, window, period);
  const double grown = (result.time.total() - before.time.total()).value;
  if (!later || std::abs(grown - *later) > 1e-9 * *later || !(before.memory == result.memory)) return std::nullopt;

  const std::int64_t times = (all - some) / period;
  StepTime of_period = result.time;
  StepTime less = before.time;
  less *= -1.0;
  of_period += less;
  of_period *= static_cast<double>(times);
  result.time += of_period;
  Bytes most(-1);
  for (std::size_t s = 0; s < programs.size(); ++s) {
    CommunicationVolume sent = programs[s].communication;
    const auto extend = [&](Bytes& volume, Bytes shorter) { volume += (volume - shorter) * times; };
    extend(sent.tensor, sent_before[s].tensor);
    extend(sent.data, sent_before[s].data);
    extend(sent.pipeline, sent_before[s].pipeline);
    if (const Bytes sum = sent.tensor + sent.data + sent.pipeline; sum > most) {
      most = sum;
      result.communication = sent;
    }
  }
  return result;
}

StepResult simulate_spec(const OpGraph& graph, NetworkCache& networks, const TrainingSpec& training, const ParallelSpec& spec,
                         const Placements& placements, const Schedule& schedule, Timeline* timeline) {
  return simulate_spec(graph, networks.cluster(), training, spec, placements, schedule, cost_models(networks, spec.mesh), timeline);
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

RankedPlan estimated(const Candidate& candidate) {
  const Estimate& estimate = candidate.estimate;
  return {candidate.spec, {.time = estimate.time, .memory = estimate.memory, .memory_stage = estimate.memory_stage, .communication = {}}};
}

// What decides what a candidate takes.
struct Work {
  ParallelSpec spec;
  std::vector<CostModel> models;  // by stage
};
// Candidates of one layout on equal networks are one plan, whatever the order of their axes.
bool equal_work(const Work& a, const Work& b) {
  ParallelSpec same_order = a.spec;
  same_order.mesh.order = b.spec.mesh.order;
  return same_order == b.spec && std::ranges::equal(a.models, b.models, [](const CostModel& of_a, const CostModel& of_b) {
    return *of_a.device == *of_b.device && of_a.rates == of_b.rates && of_a.networks == of_b.networks;
  });
}

}  // namespace

SearchResult search(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training, const LayoutRequest& request,
                    const SearchOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  const int threads = options.threads > 0 ? options.threads : static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 16u));
  std::vector<std::unique_ptr<CandidateMaker>> makers;  // by thread
  for (int thread = 0; thread < threads; ++thread) makers.push_back(std::make_unique<CandidateMaker>(graph, cluster, training));

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
    std::vector<std::pair<std::size_t, Candidate>> fitting;                // with the number of their spec
    std::optional<std::pair<std::size_t, Candidate>> smallest;  // of those that do not fit
  };
  const auto smaller = [](const std::pair<std::size_t, Candidate>& a, const std::pair<std::size_t, Candidate>& b) {
    return std::pair(a.second.estimate.memory.peak(), a.first) < std::pair(b.second.estimate.memory.peak(), b.first);
  };
  std::vector<Made> made(tasks.size());
  in_parallel(threads, tasks.size(), [&](int thread, std::size_t task) {
    std::vector<Candidate> candidates;
    for (const std::size_t i : *tasks[task]) {
      candidates.clear();
      makers[static_cast<std::size_t>(thread)]->add(specs[i], !request.recompute, candidates);
      Made& to = made[task];
      to.candidates += static_cast<std::int64_t>(candidates.size());
      for (Candidate& candidate : candidates) {
        if (candidate.estimate.spare.count >= 0)
          to.fitting.emplace_back(i, std::move(candidate));
        else if (std::pair one(i, std::move(candidate)); !to.smallest || smaller(one, *to.smallest))
          to.smallest = std::move(one);
      }
    }
  });

  SearchResult result;
  std::vector<std::pair<std::size_t, Candidate>> fitting;
  std::optional<std::pair<std::size_t, Candidate>> smallest;
  for (Made& one : made) {
    result.counts.candidates += one.candidates;
    result.counts.infeasible_memory += one.candidates - static_cast<std::int64_t>(one.fitting.size());
    std::ranges::move(one.fitting, std::back_inserter(fitting));
    if (one.smallest && (!smallest || smaller(*one.smallest, *smallest))) smallest = std::move(one.smallest);
  }
  std::ranges::stable_sort(fitting, {}, &std::pair<std::size_t, Candidate>::first);
  std::vector<Candidate> candidates;  // that fit, in the order of the space
  candidates.reserve(fitting.size());
  for (auto& [number, candidate] : fitting) candidates.push_back(std::move(candidate));
  const auto least = std::ranges::min_element(candidates, {}, [](const Candidate& one) { return one.estimate.memory.peak(); });
  if (least != candidates.end())
    result.smallest = estimated(*least);
  else if (smallest)
    result.smallest = estimated(smallest->second);

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
    bool in_full = true;
  };
  std::vector<Ranked> best;
  const auto place = [](const Ranked& one) { return std::pair(one.score, one.index); };
  const auto cannot_win = [&](const Score& bound) { return static_cast<int>(best.size()) >= options.top && bound >= best.back().score; };
  std::vector<Work> known;
  std::size_t next = 0;
  std::int64_t simulated = 0;
  // Batches do not depend on the number of threads: as many as are still missing to the best `top`, then few.
  constexpr std::int64_t batch = 4;
  while (next < order.size() && simulated < options.most_simulated && !cannot_win(order[next].first)) {
    const std::int64_t missing = options.top - static_cast<std::int64_t>(best.size());
    const auto room = static_cast<std::size_t>(std::min(options.most_simulated - simulated, std::max(missing, batch)));
    struct Turn {
      std::size_t index = 0;
      std::size_t work = 0;  // in `known`
      StepResult result;
      bool in_full = true;
    };
    std::vector<Turn> jobs;
    for (; next < order.size() && jobs.size() < room && !cannot_win(order[next].first); ++next) {
      const ParallelSpec& spec = candidates[order[next].second].spec;
      Work work{.spec = spec, .models = cost_models(makers.front()->estimator().networks(), spec.mesh)};
      if (std::ranges::any_of(known, [&](const Work& other) { return equal_work(work, other); })) {
        ++result.counts.simulated;
        continue;
      }
      known.push_back(std::move(work));
      jobs.push_back({.index = order[next].second, .work = known.size() - 1, .result = {}, .in_full = true});
    }
    in_parallel(threads, jobs.size(), [&](int thread, std::size_t number) {
      Turn& job = jobs[number];
      const auto& [spec, models] = known[job.work];
      const Placements& placements = makers[static_cast<std::size_t>(thread)]->placements_of(spec);
      const std::optional<StepResult> steady = simulate_steady(graph, cluster, training, spec, placements, models);
      job.in_full = !steady;
      job.result = steady ? *steady : simulate_spec(graph, cluster, training, spec, placements, schedule_of(spec, training), models, nullptr);
    });
    for (const Turn& job : jobs) {
      const ParallelSpec& spec = known[job.work].spec;
      best.push_back({.score = score(options.objective, cluster, spec, job.result.time.total(), job.result.memory), .index = job.index, .plan = {spec, job.result}, .in_full = job.in_full});
      ++result.counts.simulated;
      ++simulated;
    }
    std::ranges::sort(best, {}, place);
    if (static_cast<int>(best.size()) > options.top) best.erase(best.begin() + options.top, best.end());
    if (options.progress) options.progress(simulated, std::min<std::int64_t>(options.most_simulated, static_cast<std::int64_t>(order.size())));
  }
  // The winner in full, to the last digit of what simulating its plan gives.
  while (!best.empty() && !best.front().in_full) {
    auto& [winner, index, plan, in_full] = best.front();
    CandidateMaker& maker = *makers.front();
    plan.result = simulate_spec(graph, maker.estimator().networks(), training, plan.spec, maker.placements_of(plan.spec), schedule_of(plan.spec, training), nullptr);
    winner = score(options.objective, cluster, plan.spec, plan.result.time.total(), plan.result.memory);
    in_full = true;
    std::ranges::sort(best, {}, place);
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
