#include "planner/search/search.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>
#include <utility>

#include "planner/parallel/techniques.h"
#include "planner/schedule/schedules.h"
#include "planner/search/simulate_spec.h"
#include "planner/search/candidates.h"
#include "planner/search/floor.h"

namespace parplan {
namespace {

// Numbers of devices to consider, all of them first. On up to 16 devices every number; beyond that
// all whole nodes up to 16, halves of all, powers of two, and what the given degrees multiply to:
// as often as it goes, and by powers of two.
std::vector<int> device_counts(const Cluster& cluster, const LayoutRequest& request, bool fewer) {
  const int devices = cluster.devices();
  const int given = request.dp.value_or(1) * request.tp.value_or(1) * request.pp.value_or(1);
  if (request.dp && request.tp && request.pp) return {given};
  if (!fewer || given > devices) return {devices};
  std::set<int, std::greater<>> counts{devices};
  constexpr int few = 16;
  if (devices <= few)
    for (int n = devices; n >= 1; --n) counts.insert(n);
  for (int n = devices; n >= 1; n /= 2) {
    counts.insert(n);
    if (n % 2 != 0) break;
  }
  for (int power = 1; power <= devices; power *= 2) counts.insert(power);
  int whole = 0, nodes = 0;
  for (const NodeGroup& group : cluster.groups)
    for (int node = 0; node < group.nodes && nodes < few; ++node, ++nodes)
      counts.insert(whole += group.devices_per_node());
  counts.insert(devices / given * given);
  for (int product = given; product <= devices; product *= 2) counts.insert(product);
  std::erase_if(counts, [&](int n) { return n > devices; });
  return {counts.begin(), counts.end()};
}

// Calls `work(thread, item)` for every item, each once, on several threads. What one of them throws
// is thrown here.
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
    for (int thread = 1; thread < std::min<int>(threads, static_cast<int>(items)); ++thread)
      others.emplace_back(run, thread);
    run(0);
  }
  if (failure) std::rethrow_exception(failure);
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
  return same_order == b.spec &&
         std::ranges::equal(a.models, b.models, [](const CostModel& of_a, const CostModel& of_b) {
           return *of_a.device == *of_b.device && of_a.rates == of_b.rates && of_a.networks == of_b.networks;
         });
}

// A plan, once it was simulated.
struct Ranked {
  Score score;
  std::uint64_t place = 0;  // in the space, for ties
  RankedPlan plan;
  bool in_full = true;
};
bool operator<(const Ranked& a, const Ranked& b) { return std::pair(a.score, a.place) < std::pair(b.score, b.place); }

// One search, from the numbers of devices to the plans. `open_` holds what is left by its bound:
// numbers of devices that were not looked into, and candidates that were not simulated.
class BestFirst {
 public:
  BestFirst(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training, const LayoutRequest& request,
            const SearchOptions& options)
      : graph_(graph),
        cluster_(cluster),
        training_(training),
        request_(request),
        options_(options),
        floor_(graph, cluster, training),
        threads_(options.threads > 0 ? options.threads
                                     : static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 16u))) {
    for (int thread = 0; thread < threads_; ++thread)
      makers_.push_back(std::make_unique<CandidateMaker>(graph, cluster, training, options.objective));
    for (const int devices : device_counts(cluster, request, options.fewer_devices)) {
      const std::int64_t layouts = count_specs(graph, training, devices, request);
      counts_.candidates += layouts;
      if (layouts == 0) continue;
      ParallelSpec any;
      any.mesh.degree = {.dp = devices};
      MemoryUse least;
      least.parameters = floor_.memory(devices);
      push({.bound = score_of(any, floor_.time(devices), least),
            .place = std::uint64_t{sizes_.size()} << 40,
            .candidate = nullptr});
      sizes_.push_back({.devices = devices, .layouts = layouts, .candidates = {}});
    }
  }

  SearchResult run() {
    while (!open_.empty() && !cannot_win(open_.front().bound)) {
      if (open_.front().candidate == nullptr) look_into_next_size();
      else if (!may_simulate()) break;
      else simulate_next();
    }
    simulate_winner_in_full();
    return take_result();
  }

 private:
  struct Size {
    int devices = 0;
    std::int64_t layouts = 0;
    std::vector<Candidate> candidates;  // that fit, once it was looked into
  };
  struct Open {
    Score bound;
    std::uint64_t place = 0;  // in the space: the number of the size, and within it of the candidate
    const Candidate* candidate = nullptr;
  };
  static bool comes_later(const Open& a, const Open& b) {
    return std::tie(a.bound, a.place) > std::tie(b.bound, b.place);
  }
  struct Turn {
    std::uint64_t place = 0;
    std::size_t work = 0;  // in `known_`
    SimulatedSpec simulated;
  };

  Score score_of(const ParallelSpec& spec, Seconds time, const MemoryUse& memory) const {
    return score(options_.objective, cluster_, spec, time, memory);
  }
  bool cannot_win(const Score& bound) const {
    return static_cast<int>(best_.size()) >= options_.top && bound >= best_.back().score;
  }
  bool may_simulate() const {
    return options_.most_simulated ? simulated_ < *options_.most_simulated
                                   : simulated_ < usual_simulated || calls_ < free_calls;
  }

  void push(const Open& one) {
    open_.push_back(one);
    std::ranges::push_heap(open_, comes_later);
  }
  Open pop() {
    std::ranges::pop_heap(open_, comes_later);
    const Open next = open_.back();
    open_.pop_back();
    return next;
  }

  void look_into_next_size() {
    const std::uint64_t place = pop().place;
    Size& size = sizes_[place >> 40];
    // Where other numbers of devices have plans, it is enough to know that these have not the room.
    if (fits_any_ && floor_.lacks_room(size.devices)) {
      counts_.infeasible_memory += size.layouts;
      return;
    }
    counts_.candidates -= size.layouts;
    make_candidates(size);
    for (std::size_t i = 0; i < size.candidates.size(); ++i) {
      const Candidate& candidate = size.candidates[i];
      open_.push_back({.bound = score_of(candidate.spec, candidate.estimate.lower_bound, candidate.estimate.memory),
                       .place = place + i,
                       .candidate = &candidate});
    }
    std::ranges::make_heap(open_, comes_later);
    fits_any_ = fits_any_ || !size.candidates.empty();
  }

  // Specs whose blocks have equal shapes go to one thread together, since they share what is
  // lowered.
  void make_candidates(Size& size) {
    const std::vector<ParallelSpec> specs = enumerate_specs(graph_, training_, size.devices, request_);
    std::map<std::tuple<std::int64_t, int, bool>, std::vector<std::size_t>> by_shape;
    for (std::size_t i = 0; i < specs.size(); ++i)
      by_shape[{specs[i].micro_batch, specs[i].tp(), specs[i].sequence_parallel}].push_back(i);
    std::vector<const std::vector<std::size_t>*> tasks;
    for (const auto& [shape, members] : by_shape) tasks.push_back(&members);
    struct Made {
      std::int64_t candidates = 0;
      std::vector<std::pair<std::size_t, Candidate>> fitting;     // with the number of their spec
      std::optional<std::pair<std::size_t, Candidate>> smallest;  // of those that do not fit
    };
    const auto smaller = [](const std::pair<std::size_t, Candidate>& a, const std::pair<std::size_t, Candidate>& b) {
      return std::pair(a.second.estimate.memory.peak(), a.first) < std::pair(b.second.estimate.memory.peak(), b.first);
    };
    std::vector<Made> made(tasks.size());
    in_parallel(threads_, tasks.size(), [&](int thread, std::size_t task) {
      std::vector<Candidate> candidates;
      for (const std::size_t i : *tasks[task]) {
        candidates.clear();
        makers_[thread]->add(specs[i], !request_.recompute, candidates);
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
    std::vector<std::pair<std::size_t, Candidate>> fitting;
    std::optional<std::pair<std::size_t, Candidate>> smallest;
    for (Made& one : made) {
      counts_.candidates += one.candidates;
      counts_.infeasible_memory += one.candidates - static_cast<std::int64_t>(one.fitting.size());
      std::ranges::move(one.fitting, std::back_inserter(fitting));
      if (one.smallest && (!smallest || smaller(*one.smallest, *smallest))) smallest = std::move(one.smallest);
    }
    std::ranges::stable_sort(fitting, {}, &std::pair<std::size_t, Candidate>::first);
    for (auto& [number, candidate] : fitting) size.candidates.push_back(std::move(candidate));
    // The smallest of those that fit; where none does, of all.
    const auto least =
        std::ranges::min_element(size.candidates, {}, [](const Candidate& one) { return one.estimate.memory.peak(); });
    const Candidate* const one = least != size.candidates.end() ? &*least : smallest ? &smallest->second : nullptr;
    if (one == nullptr) return;
    const bool fits = least != size.candidates.end();
    if (!smallest_ || (fits && !fits_any_) ||
        (fits == fits_any_ && one->estimate.memory.peak() < smallest_->estimate.memory.peak()))
      smallest_ = *one;
  }

  // The most promising candidates, several at once: as many as are still missing to the best `top`,
  // then few, whatever the number of threads.
  void simulate_next() {
    constexpr std::int64_t batch = 4;
    const std::int64_t missing = options_.top - static_cast<std::int64_t>(best_.size());
    std::int64_t room = std::max(missing, batch);
    if (options_.most_simulated) room = std::min(room, *options_.most_simulated - simulated_);
    std::vector<Turn> turns;
    while (!open_.empty() && static_cast<std::int64_t>(turns.size()) < room && open_.front().candidate != nullptr &&
           !cannot_win(open_.front().bound)) {
      const auto [bound, place, candidate] = pop();
      Work work{.spec = candidate->spec,
                .models = cost_models(makers_.front()->estimator().networks(), candidate->spec.mesh)};
      if (std::ranges::any_of(known_, [&](const Work& other) { return equal_work(work, other); })) {
        ++counts_.simulated;
        continue;
      }
      known_.push_back(std::move(work));
      turns.push_back({.place = place, .work = known_.size() - 1, .simulated = {}});
    }
    in_parallel(threads_, turns.size(), [&](int thread, std::size_t number) {
      Turn& turn = turns[number];
      const auto& [spec, models] = known_[turn.work];
      const Placements& placements = makers_[thread]->placements_of(spec);
      turn.simulated = simulate_soon(graph_, cluster_, training_, spec, placements, models);
    });
    for (const Turn& turn : turns) {
      const ParallelSpec& spec = known_[turn.work].spec;
      const auto& [result, in_full] = turn.simulated;
      best_.push_back({.score = score_of(spec, result.time.total(), result.memory),
                       .place = turn.place,
                       .plan = {spec, result},
                       .in_full = in_full});
      calls_ += 2 * spec.pp() *
                std::min(micro_batches(spec, training_),
                         in_full ? most_calls : std::int64_t{2} * steady_micro_batches(spec.pp()));
      ++counts_.simulated;
      ++simulated_;
    }
    std::sort(best_.begin(), best_.end());
    if (static_cast<int>(best_.size()) > options_.top) best_.erase(best_.begin() + options_.top, best_.end());
    if (options_.progress)
      options_.progress(simulated_, options_.most_simulated.value_or(std::max(usual_simulated, simulated_)));
  }

  // To the last digit of what simulating its plan gives.
  void simulate_winner_in_full() {
    while (!best_.empty() && !best_.front().in_full) {
      auto& [winner, place, plan, in_full] = best_.front();
      CandidateMaker& maker = *makers_.front();
      plan.result = simulate_spec(graph_, maker.estimator().networks(), training_, plan.spec,
                                  maker.placements_of(plan.spec), schedule_of(plan.spec, training_), nullptr);
      winner = score_of(plan.spec, plan.result.time.total(), plan.result.memory);
      in_full = true;
      std::sort(best_.begin(), best_.end());
    }
  }

  SearchResult take_result() {
    SearchResult result;
    if (smallest_) result.smallest = makers_.front()->with_times(*smallest_);
    result.counts = counts_;
    if (best_.empty()) return result;
    const Score winner = best_.front().score;
    result.counts.certified = open_.empty() || open_.front().bound >= winner;
    for (const Open& left : open_)
      if (left.bound >= winner)
        result.counts.pruned_by_bound += left.candidate != nullptr ? 1 : sizes_[left.place >> 40].layouts;
    if (!result.counts.certified) {
      const Score& bound = open_.front().bound;
      result.counts.gap =
          winner.first > bound.first ? winner.first / bound.first - 1.0 : winner.second / bound.second - 1.0;
    }
    for (Ranked& one : best_) result.plans.push_back(std::move(one.plan));
    return result;
  }

  // Without a limit of the user's.
  static constexpr std::int64_t usual_simulated = 64;
  static constexpr std::int64_t free_calls = 400'000;

  const OpGraph& graph_;
  const Cluster& cluster_;
  const TrainingSpec& training_;
  const LayoutRequest& request_;
  const SearchOptions& options_;
  Floor floor_;
  int threads_;
  std::vector<std::unique_ptr<CandidateMaker>> makers_;  // by thread
  std::vector<Size> sizes_;
  std::vector<Open> open_;  // a heap, the least bound in front
  std::vector<Work> known_;
  std::vector<Ranked> best_;  // at most `top`, the best first
  SearchCounts counts_;
  std::optional<Candidate> smallest_;
  bool fits_any_ = false;
  std::int64_t simulated_ = 0;
  std::int64_t calls_ = 0;  // of what was simulated
};

}  // namespace

SearchResult search(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                    const LayoutRequest& request, const SearchOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  SearchResult result = BestFirst(graph, cluster, training, request, options).run();
  result.counts.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

}  // namespace parplan
