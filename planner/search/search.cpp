#include "planner/search/search.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <numeric>
#include <tuple>

#include "planner/parallel/pipeline.h"
#include "planner/parallel/techniques.h"
#include "planner/program/lower.h"
#include "planner/schedule/schedules.h"
#include "planner/search/candidate.h"
#include "planner/simulator/estimate.h"
#include "planner/simulator/simulate.h"

namespace parplan {
namespace {

struct Candidate {
  ParallelSpec spec;
  Estimate estimate;
};

// Placements depend on few of a spec's choices; each combination is placed once.
class PlacementCache {
 public:
  explicit PlacementCache(const OpGraph& graph) : graph_(graph) {}
  const Placements& of(const ParallelSpec& spec) {
    const std::tuple key{spec.tp(), spec.sequence_parallel, spec.dp() > 1 ? spec.zero_stage : 0};
    const auto found = known_.find(key);
    return found != known_.end() ? found->second : known_.emplace(key, place(graph_, spec)).first->second;
  }

 private:
  const OpGraph& graph_;
  std::map<std::tuple<int, bool, int>, Placements> known_;
};

// Stage cuts by what blocks cost under the spec's shapes.
class CutCache {
 public:
  explicit CutCache(Estimator& estimator) : estimator_(estimator) {}
  const std::vector<int>& of(const ParallelSpec& spec, const Placements& placements) {
    const std::tuple key{spec.pp(), spec.tp(), spec.sequence_parallel, spec.micro_batch, spec.recompute, spec.mesh.order};
    const auto found = known_.find(key);
    if (found != known_.end()) return found->second;
    return known_.emplace(key, cut_stages(estimator_.block_seconds(spec, placements), spec.pp())).first->second;
  }

 private:
  Estimator& estimator_;
  std::map<std::tuple<int, int, bool, std::int64_t, Recompute, std::array<Axis, 3>>, std::vector<int>> known_;
};

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

StepResult simulate_spec(const OpGraph& graph, NetworkCache& networks, const TrainingSpec& training, const ParallelSpec& spec,
                         const Placements& placements, const Schedule& schedule, Timeline* timeline) {
  const DeviceKind& device = networks.cluster().groups.front().device;
  const Job job{.graph = &graph, .training = training, .spec = spec, .placements = placements, .schedule = schedule,
                .backend = device.backend, .overhead = device.memory_overhead};
  const std::vector<Program> programs = lower_representatives(job);
  std::vector<CostModel> models;
  for (int stage = 0; stage < spec.pp(); ++stage) models.push_back(cost_model(networks, spec.mesh, stage));
  return simulate(programs, models, timeline);
}

SearchResult search(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training, const LayoutRequest& request,
                    const SearchOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  Estimator estimator(graph, cluster, training);
  PlacementCache placements(graph);
  CutCache cuts(estimator);
  const Bytes capacity = options.memory_limit.value_or(cluster.groups.front().device.memory_capacity);

  SearchResult result;
  std::vector<Candidate> candidates;
  for (const int devices : device_counts(cluster.devices(), request, options.fewer_devices)) {
    for (ParallelSpec& spec : enumerate_specs(graph, training, devices, request)) {
      ++result.counts.candidates;
      const Placements& placed = placements.of(spec);
      if (spec.stage_blocks.empty()) spec.stage_blocks = cuts.of(spec, placed);
      const ScheduleRow& schedule = row_of(spec.schedule);
      const Estimate estimate = estimator.estimate(spec, placed, {schedule.closed_form, schedule.in_flight});
      if (estimate.memory.peak() > capacity) {
        ++result.counts.infeasible_memory;
        if (!result.smallest || estimate.memory.peak() < result.smallest->result.memory.peak())
          result.smallest = RankedPlan{spec, {.time = estimate.time, .memory = estimate.memory, .communication = {}}};
        continue;
      }
      candidates.push_back({std::move(spec), estimate});
    }
  }
  if (!candidates.empty()) result.smallest.reset();
  std::vector<std::size_t> by_estimate(candidates.size());
  std::iota(by_estimate.begin(), by_estimate.end(), std::size_t{0});
  std::stable_sort(by_estimate.begin(), by_estimate.end(), [&](std::size_t a, std::size_t b) {
    return candidates[a].estimate.time.total() < candidates[b].estimate.time.total();
  });

  // The best so far, with their place in the space for ties.
  std::vector<std::pair<RankedPlan, std::size_t>> best;
  const auto worst_of_best = [&] {
    return static_cast<int>(best.size()) < options.top ? Seconds(1e300) : best.back().first.result.time.total();
  };
  const std::int64_t to_simulate = std::min<std::int64_t>(options.most_simulated, static_cast<std::int64_t>(candidates.size()));
  std::vector<std::size_t> left;
  for (const std::size_t index : by_estimate) {
    const Candidate& candidate = candidates[index];
    if (candidate.estimate.lower_bound >= worst_of_best()) {
      ++result.counts.pruned_by_bound;
      continue;
    }
    if (result.counts.simulated == to_simulate) {
      left.push_back(index);
      continue;
    }
    const ParallelSpec& spec = candidate.spec;
    const Schedule schedule = row_of(spec.schedule).actions(spec.pp(), static_cast<int>(micro_batches(spec, training)));
    best.push_back({{spec, simulate_spec(graph, estimator.networks(), training, spec, placements.of(spec), schedule, nullptr)}, index});
    std::stable_sort(best.begin(), best.end(), [](const auto& a, const auto& b) {
      return std::pair(a.first.result.time.total(), a.second) < std::pair(b.first.result.time.total(), b.second);
    });
    if (static_cast<int>(best.size()) > options.top) best.pop_back();
    ++result.counts.simulated;
    if (options.progress) options.progress(result.counts.simulated, to_simulate);
  }
  Seconds smallest_bound{1e300};
  for (const std::size_t index : left) {
    if (candidates[index].estimate.lower_bound >= worst_of_best()) {
      ++result.counts.pruned_by_bound;
    } else {
      smallest_bound = std::min(smallest_bound, candidates[index].estimate.lower_bound);
    }
  }
  for (auto& [plan, index] : best) result.plans.push_back(std::move(plan));
  if (!result.plans.empty()) {
    const Seconds winner = result.plans.front().result.time.total();
    result.counts.certified = smallest_bound >= winner;
    if (!result.counts.certified) result.counts.gap = winner / smallest_bound - 1.0;
  }
  result.counts.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

}  // namespace parplan
