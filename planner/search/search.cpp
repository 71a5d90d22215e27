#include "planner/search/search.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <span>
#include <thread>
#include <utility>

#include "planner/parallel/techniques.h"
#include "planner/schedule/schedules.h"
#include "planner/search/best_first.h"
#include "planner/search/candidates.h"
#include "planner/search/device_count_bound.h"
#include "planner/search/parallel_for.h"
#include "planner/search/simulate_spec.h"

namespace parplan {
namespace {

// The numbers of devices to consider, the number of all devices first. Up to 16 devices, every
// number; beyond that all whole nodes up to 16, repeated halves of all devices, powers of two, the
// largest multiple of the product of the given degrees, and that product times powers of two.
std::vector<int> device_counts(const Cluster& cluster, const LayoutRequest& request, bool fewer) {
  const int devices = cluster.devices();
  const int given = static_cast<int>(product_of_degrees(request));
  if (gives_every_degree(request)) return {given};
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

// The inputs that determine a candidate's time and memory.
struct Work {
  ParallelSpec spec;
  std::vector<CostModel> models;  // by rank of the pipeline
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

// One search, from the numbers of devices to the plans. A part of its space is a number of devices
// (a size); the place of a part is the number of the size, and the place of a candidate adds its
// own within it.
class SpaceSearch {
 public:
  SpaceSearch(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training, const LayoutRequest& request,
              const SearchOptions& options)
      : graph_(graph),
        cluster_(cluster),
        training_(training),
        request_(request),
        options_(options),
        floor_(graph, cluster, training),
        search_{.top = options.top} {
    const int threads = options.threads > 0
                            ? options.threads
                            : static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 16u));
    for (int thread = 0; thread < threads; ++thread) {
      owned_.push_back(std::make_unique<CandidateMaker>(graph, cluster, training, options.objective));
      makers_.push_back(owned_.back().get());
    }
    std::vector<Open> sizes;
    for (const int devices : device_counts(cluster, request, options.fewer_devices)) {
      const std::int64_t layouts = count_specs(graph, training, devices, request);
      counts_.candidates += layouts;
      if (layouts == 0) continue;
      ParallelSpec any;
      any.mesh.degree = {.dp = devices};
      MemoryUse least;
      least.parameters = floor_.memory(devices);
      sizes.push_back(
          {.bound = score_of(any, floor_.time(devices), least), .place = std::uint64_t{sizes_.size()} << 40});
      sizes_.push_back({.devices = devices, .layouts = layouts, .candidates = {}});
    }
    add(search_, sizes);
  }

  SearchResult run() {
    parplan::run(search_, {.look_into = [this](const Open& part) { return look_into(part.place); },
                           .room = [this] { return room(); },
                           .is_new = [this](const Open& candidate) { return is_new(candidate); },
                           .simulate = [this](std::span<const Open> turns) { return simulate(turns); }});
    try_other_cuts();
    simulate_winner_in_full();
    return take_result();
  }

 private:
  struct Size {
    int devices = 0;
    std::int64_t layouts = 0;
    std::vector<Candidate> candidates;  // those that fit, once the size was looked into
    // Layouts with other cuts than those of the candidates; none of the others takes less than
    // `others_from`.
    std::vector<OpenLayout> others = {};
    Seconds others_from = Seconds(std::numeric_limits<double>::infinity());
  };

  // Whether stages may differ in what they recompute.
  bool mixes() const { return !request_[Choice::recompute]; }

  Score score_of(const ParallelSpec& spec, Seconds time, const MemoryUse& memory) const {
    return score(options_.objective, cluster_, spec, time, memory);
  }

  std::vector<Open> look_into(std::uint64_t place) {
    Size& size = sizes_[place >> 40];
    // Where other numbers of devices have plans, it is enough to know that the model does not fit
    // on these.
    if (fits_any_ && floor_.lacks_room(size.devices)) {
      counts_.infeasible_memory += size.layouts;
      return {};
    }
    counts_.candidates -= size.layouts;
    make_candidates_of(size);
    std::vector<Open> opened;
    for (const Candidate& candidate : size.candidates)
      opened.push_back({.bound = score_of(candidate.spec, candidate.bound.lower_bound, candidate.bound.memory),
                        .place = place + opened.size(),
                        .candidate = &candidate});
    fits_any_ = fits_any_ || !size.candidates.empty();
    return opened;
  }

  void make_candidates_of(Size& size) {
    MadeCandidates made = make_candidates(makers_, enumerate_specs(graph_, training_, size.devices, request_),
                                          mixes(), options_.objective);
    counts_.candidates += made.count;
    counts_.infeasible_memory += made.count - static_cast<std::int64_t>(made.fitting.size());
    size.candidates = std::move(made.fitting);
    size.others = std::move(made.others);
    size.others_from = made.others_from;
    if (made.least_memory_left) leave(static_cast<double>(made.least_memory_left->count));
    // The smallest candidate that fits; where none fits, the smallest of all.
    const auto least =
        std::ranges::min_element(size.candidates, {}, [](const Candidate& one) { return one.bound.memory.peak(); });
    const bool fits = least != size.candidates.end();
    if (!fits && !made.smallest) return;
    const Candidate& one = fits ? *least : *made.smallest;
    if (!smallest_ || (fits && !fits_any_) ||
        (fits == fits_any_ && one.bound.memory.peak() < smallest_->bound.memory.peak()))
      smallest_ = one;
  }

  // Several at once: as many as the best `top` still lack, then a few, whatever the number of
  // threads.
  std::int64_t room() const {
    constexpr std::int64_t batch = 4;
    const std::int64_t missing = options_.top - static_cast<std::int64_t>(search_.best.size());
    const std::int64_t room = std::max(missing, batch);
    if (options_.most_simulated) return std::min(room, *options_.most_simulated - search_.simulated);
    return search_.simulated < usual_simulated || calls_ < free_calls ? room : 0;
  }

  bool is_new(const Open& one) {
    const ParallelSpec& spec = one.candidate->spec;
    Work work{.spec = spec, .models = cost_models(makers_.front()->estimator().networks(), spec.mesh)};
    if (std::ranges::any_of(known_, [&](const Work& other) { return equal_work(work, other); })) {
      ++counts_.simulated;
      return false;
    }
    known_.push_back(std::move(work));
    return true;
  }

  // The candidates are those that were last found new, in this order.
  std::vector<Ranked> simulate(std::span<const Open> turns) {
    const std::span<const Work> works = std::span(known_).last(turns.size());
    std::vector<SimulatedSpec> simulated(turns.size());
    parallel_for(static_cast<int>(makers_.size()), turns.size(), [&](int thread, std::size_t turn) {
      const auto& [spec, models] = works[turn];
      const Placements& placements = makers_[thread]->placements_of(spec);
      simulated[turn] = simulate_soon(graph_, cluster_, training_, spec, placements, models);
    });
    std::vector<Ranked> ranked;
    for (std::size_t turn = 0; turn < turns.size(); ++turn) {
      const ParallelSpec& spec = works[turn].spec;
      const auto& [result, in_full] = simulated[turn];
      ranked.push_back({.score = score_of(spec, result.time.total(), result.memory),
                        .place = turns[turn].place,
                        .plan = {spec, result},
                        .in_full = in_full});
      calls_ += 2 * spec.stages() *
                std::min(micro_batches(spec, training_),
                         in_full ? most_calls : std::int64_t{2} * steady_micro_batches(spec.stages()));
      ++counts_.simulated;
    }
    if (options_.progress)
      options_.progress(search_.simulated,
                        options_.most_simulated.value_or(std::max(usual_simulated, search_.simulated)));
    return ranked;
  }

  // A layout that was open to other cuts, and what is left of it.
  struct OtherCuts {
    const OpenLayout* layout = nullptr;
    std::uint64_t place = 0;
    Score bound;
    CutsBelow below = {};
  };
  struct OtherCandidate {
    Score bound;
    std::uint64_t place = 0;
    const Candidate* candidate = nullptr;
  };

  double score_of_second(const ParallelSpec& spec) const { return score_of(spec, Seconds(1.0), {}).first; }

  // The layouts whose other cuts might beat the best plan, the least bound first.
  std::vector<OtherCuts> layouts_with_other_cuts() {
    std::vector<OtherCuts> open;
    for (std::size_t s = 0; s < sizes_.size(); ++s) {
      ParallelSpec any;
      any.mesh.degree = {.dp = sizes_[s].devices};
      leave(score_of_second(any) * sizes_[s].others_from.value);
      for (const OpenLayout& layout : sizes_[s].others)
        open.push_back({.layout = &layout,
                        .place = std::uint64_t{s} << 40,
                        .bound = score_of(layout.spec, layout.time, {})});
    }
    const Score best = search_.best.front().score;
    std::erase_if(open, [&](const OtherCuts& one) { return one.bound >= best; });
    std::ranges::stable_sort(open, {}, [](const OtherCuts& one) { return std::pair(one.bound, one.place); });
    return open;
  }

  // No cut of those that were not looked at scores less.
  void leave(double score) { least_left_ = std::min(least_left_, score); }

  // Looks at other cuts of the layouts that may beat the best plan with them.
  void try_other_cuts() {
    if (search_.best.empty() || options_.objective == Objective::memory) return;
    std::vector<OtherCuts> open = layouts_with_other_cuts();
    const std::int64_t room =
        options_.most_simulated ? *options_.most_simulated - search_.simulated : most_other_simulated;
    const std::size_t looked_at = room > 0 ? std::min(open.size(), most_other_layouts) : 0;
    for (std::size_t i = looked_at; i < open.size(); ++i) leave(open[i].bound.first);
    open.resize(looked_at);
    if (open.empty()) return;
    const double best = search_.best.front().score.first;
    const std::size_t most = std::clamp<std::size_t>(most_other_cuts / open.size(), 16, 1024);
    parallel_for(static_cast<int>(makers_.size()), open.size(), [&](int thread, std::size_t i) {
      const ParallelSpec& spec = open[i].layout->spec;
      open[i].below = makers_[thread]->cuts_below(spec, mixes(), Seconds(best / score_of_second(spec)), most);
    });
    std::vector<OtherCandidate> turns;
    for (std::size_t i = 0; i < open.size(); ++i) {
      leave(score_of_second(open[i].layout->spec) * open[i].below.rest.value);
      for (const Candidate& candidate : open[i].below.candidates)
        turns.push_back({.bound = score_of(candidate.spec, candidate.bound.lower_bound, candidate.bound.memory),
                         .place = other_place + turns.size(),
                         .candidate = &candidate});
    }
    std::ranges::sort(turns, {}, [](const OtherCandidate& one) { return std::pair(one.bound, one.place); });
    simulate_other_cuts(turns);
  }

  void simulate_other_cuts(std::span<const OtherCandidate> turns) {
    const std::int64_t calls = calls_;
    std::int64_t tried = 0;
    std::size_t next = 0;
    while (next < turns.size() && turns[next].bound < search_.best.front().score) {
      constexpr std::int64_t batch = 4;
      std::int64_t room = tried < most_other_simulated || calls_ - calls < free_other_calls ? batch : 0;
      if (options_.most_simulated) room = std::min(batch, *options_.most_simulated - search_.simulated);
      if (room <= 0) break;
      std::vector<Open> together;
      for (; next < turns.size() && static_cast<std::int64_t>(together.size()) < room &&
             turns[next].bound < search_.best.front().score;
           ++next) {
        const Open one{.bound = turns[next].bound, .place = turns[next].place, .candidate = turns[next].candidate};
        ++counts_.candidates;
        if (is_new(one)) together.push_back(one);
      }
      tried += static_cast<std::int64_t>(together.size());
      search_.simulated += static_cast<std::int64_t>(together.size());
      for (Ranked& one : simulate(together)) take_cut(std::move(one));
    }
    if (next < turns.size()) leave(turns[next].bound.first);
  }

  // A layout is ranked with its best cut.
  void take_cut(Ranked&& one) {
    const auto of_layout = [](ParallelSpec spec) {
      spec.stage_blocks.clear();
      spec.stage_recompute.clear();
      return spec;
    };
    const auto ranked = std::ranges::find_if(
        search_.best, [&](const Ranked& other) { return of_layout(other.plan.spec) == of_layout(one.plan.spec); });
    if (ranked == search_.best.end())
      search_.best.push_back(std::move(one));
    else if (one.score < ranked->score)
      *ranked = std::move(one);
    rank(search_);
  }

  // The winner's time to the last digit, as simulating its plan gives it.
  void simulate_winner_in_full() {
    while (!search_.best.empty() && !search_.best.front().in_full) {
      auto& [winner, place, plan, in_full] = search_.best.front();
      CandidateMaker& maker = *makers_.front();
      plan.result = simulate_spec(graph_, maker.estimator().networks(), training_, plan.spec,
                                  maker.placements_of(plan.spec), schedule_of(plan.spec, training_), nullptr);
      winner = score_of(plan.spec, plan.result.time.total(), plan.result.memory);
      in_full = true;
      rank(search_);
    }
  }

  SearchResult take_result() {
    SearchResult result;
    if (smallest_) result.smallest = makers_.front()->with_times(*smallest_);
    result.counts = counts_;
    if (search_.best.empty()) return result;
    const Score winner = search_.best.front().score;
    result.counts.certified = is_certified(search_);
    for (const Open& left : search_.open)
      if (left.bound >= winner)
        result.counts.pruned_by_bound += left.candidate != nullptr ? 1 : sizes_[left.place >> 40].layouts;
    if (!result.counts.certified) {
      const Score& bound = search_.open.front().bound;
      result.counts.gap =
          winner.first > bound.first ? winner.first / bound.first - 1.0 : winner.second / bound.second - 1.0;
    }
    result.counts.cut_gap = cut_gap(result.counts);
    for (Ranked& one : search_.best) result.plans.push_back(std::move(one.plan));
    return result;
  }

  // How much better other cuts may be than the best plan; nothing where none is.
  std::optional<double> cut_gap(const SearchCounts& counts) const {
    const double gap = search_.best.front().score.first / least_left_ - 1.0;
    if (gap <= 0.0) return std::nullopt;
    return std::max(gap, counts.gap.value_or(0.0));
  }

  // Limits on looking at other cuts.
  static constexpr std::size_t most_other_layouts = 10'000;
  static constexpr std::size_t most_other_cuts = 4096;
  static constexpr std::int64_t most_other_simulated = 8;
  static constexpr std::int64_t free_other_calls = 100'000;
  static constexpr std::uint64_t other_place = std::uint64_t{1} << 63;

  // Limits that hold where the user gives none.
  static constexpr std::int64_t usual_simulated = 64;
  static constexpr std::int64_t free_calls = 400'000;

  const OpGraph& graph_;
  const Cluster& cluster_;
  const TrainingSpec& training_;
  const LayoutRequest& request_;
  const SearchOptions& options_;
  DeviceCountBound floor_;
  std::vector<std::unique_ptr<CandidateMaker>> owned_;
  std::vector<CandidateMaker*> makers_;  // by thread
  std::vector<Size> sizes_;
  BestFirst search_;
  std::vector<Work> known_;
  SearchCounts counts_;
  std::optional<Candidate> smallest_;
  bool fits_any_ = false;
  double least_left_ = std::numeric_limits<double>::infinity();  // of the scores of other cuts
  std::int64_t calls_ = 0;  // simulated so far
};

}  // namespace

SearchResult search(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                    const LayoutRequest& request, const SearchOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  SearchResult result = SpaceSearch(graph, cluster, training, request, options).run();
  result.counts.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

}  // namespace parplan
