#include "planner/search/node_group_arrangements.h"

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>

#include "planner/base/error.h"
#include "planner/cluster/price_and_power.h"
#include "planner/cost/kernel_time.h"
#include "planner/plan/objective.h"
#include "planner/search/device_count_bound.h"
#include "planner/simulator/block_shapes.h"

namespace parplan {
namespace {

constexpr std::size_t most_groups_in_every_order = 3;

// Rounding must not decide for another order.
constexpr double noise = 1e-9;

// Adds what the bounds of one search left open below the best plan until then, compared with the
// best of all searches.
void add_counts(const SearchCounts& one, std::optional<double> best_until_then, double best_of_all, SearchCounts& all) {
  all.candidates += one.candidates;
  all.infeasible_memory += one.infeasible_memory;
  all.pruned_by_bound += one.pruned_by_bound;
  all.simulated += one.simulated;
  all.seconds += one.seconds;
  if (best_until_then && one.cut_gap)
    if (const double gap = best_of_all * (1.0 + *one.cut_gap) / *best_until_then - 1.0; gap > 0.0)
      all.cut_gap = std::max(all.cut_gap.value_or(0.0), gap);
  if (!best_until_then || one.certified) return;
  const double gap = one.gap ? best_of_all * (1.0 + *one.gap) / *best_until_then - 1.0 : 0.0;
  if (one.gap && gap <= 0.0) return;
  all.certified = false;
  if (one.gap) all.gap = std::max(all.gap.value_or(0.0), gap);
}

void add_outside(const std::vector<OutsideSpace>& of_one, std::vector<OutsideSpace>& of_all) {
  for (const OutsideSpace& one : of_one)
    if (const auto same = std::ranges::find(of_all, one.what, &OutsideSpace::what); same != of_all.end())
      same->least = std::min(same->least, one.least);
    else
      of_all.push_back(one);
}

// A plan of one of the arrangements.
struct Listed {
  Score score;
  RankedPlan plan;  // `on` its arrangement
};

// Whether both are the same layout of the same devices. Each is looked at in one arrangement
// (least_devices), but the best plan is listed with those behind it, too.
bool are_one_plan(const RankedPlan& a, const RankedPlan& b) {
  const int devices = a.spec.mesh.size();
  return a.spec == b.spec && a.on->training.precision == b.on->training.precision &&
         first_nodes(a.on->cluster, devices).groups == first_nodes(b.on->cluster, devices).groups;
}

// The best plans of all arrangements, as those of one search are ranked: the best first, of those
// that are as good but for rounding the one of the first arrangement.
class BestOfAll {
 public:
  explicit BestOfAll(const SearchOptions& options) : top_(ranked_plans(options)), top_each_(options.top_each) {}

  void add(Listed one) {
    std::vector<std::size_t> rivals;  // of its degrees, the best first
    for (std::size_t i = 0; i < list_.size(); ++i) {
      if (are_one_plan(list_[i].plan, one.plan)) return;
      if (list_[i].plan.spec.mesh.degree == one.plan.spec.mesh.degree) rivals.push_back(i);
    }
    if (static_cast<int>(rivals.size()) >= top_each_) {
      if (!better(one.score, list_[rivals.back()].score, noise)) return;
      list_.erase(list_.begin() + static_cast<std::ptrdiff_t>(rivals.back()));
    }
    list_.push_back(std::move(one));
    std::ranges::stable_sort(list_, {}, &Listed::score);
    if (static_cast<int>(list_.size()) > top_) list_.pop_back();
  }

  std::vector<RankedElsewhere> ranked() const {
    std::vector<RankedElsewhere> result;
    for (const Listed& one : list_) result.push_back({.score = one.score, .degrees = one.plan.spec.mesh.degree});
    return result;
  }

  // The list behind its best plan, which may be one that is as good but for a tie; `top` with it.
  std::vector<RankedPlan> behind(const RankedPlan& first, int top) const {
    std::vector<RankedPlan> plans;
    int of_degrees = 1;
    for (const Listed& one : list_) {
      if (are_one_plan(one.plan, first)) continue;
      if (one.plan.spec.mesh.degree == first.spec.mesh.degree && ++of_degrees > top_each_) continue;
      if (static_cast<int>(plans.size()) + 1 < top) plans.push_back(one.plan);
    }
    return plans;
  }

 private:
  int top_;
  int top_each_;
  std::vector<Listed> list_;
};

// Whether a cluster has the first groups of another, in the same order.
bool begins(const Cluster& one, const Cluster& other) {
  return one.groups.size() <= other.groups.size() &&
         std::ranges::equal(one.groups, std::span(other.groups).first(one.groups.size()));
}

// The fewest devices that a plan uses which is not one of another arrangement: some of the last
// group's, where that may be left out.
int least_devices(const Cluster& one, std::span<const Cluster> all) {
  int least = 1;
  for (const Cluster& other : all)
    if (other.groups.size() < one.groups.size() && begins(other, one)) least = std::max(least, other.devices() + 1);
  return least;
}

// Leaves those on which a given offload can be timed; the cluster itself is the first. What is left
// out is not the beginning of one that stays.
void keep_those_with_homes(const LayoutRequest& request, std::vector<Cluster>& all) {
  const auto lacks = [&](const Cluster& one) { return lacks_homes(one, request); };
  const std::int64_t most = all.front().devices();
  const std::int64_t least = gives_every_degree(request) ? std::min(product_of_degrees(request), most) : 1;
  const auto serves = [&](const Cluster& one) { return one.devices() >= least && !lacks(one); };
  if (std::ranges::none_of(all, serves)) throw ConfigError(*lacks(all.front()));
  std::erase_if(all, lacks);
}

// What the words for the space of one arrangement leave out.
std::string arrangements_in_words(const Cluster& cluster, std::size_t arrangements) {
  if (cluster.groups.size() == 1) return "";
  if (arrangements == 1) return ", with its groups of nodes in their own order";
  if (cluster.groups.size() <= most_groups_in_every_order) return ", with any of its groups of nodes, in any order";
  return ", with the first of its groups of nodes or all of them in their own order, or with one of them";
}

// The least time of any choice of groups: no device does better than its fastest product in the
// precision of the choice, which is that of one of its groups alone.
Seconds least_of_any_groups(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                            const PrecisionOf& precision_of) {
  Seconds least(std::numeric_limits<double>::infinity());
  for (const NodeGroup& group : cluster.groups) {
    Cluster those = cluster;
    TrainingSpec own = training;
    if (precision_of) {
      those.groups = {group};
      own.precision = precision_of(those);
      those.groups = cluster.groups;
      std::erase_if(those.groups, [&](const NodeGroup& other) {
        return fastest_product(own.precision, other.device).value <= 0.0;
      });
    }
    least = std::min(least, DeviceCountBound(graph, those, own).time(those.devices()));
  }
  return least;
}

// Choices and orders of groups that are not searched; nothing where all are.
std::optional<LeftOut> other_arrangements(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                                          const PrecisionOf& precision_of, std::size_t arranged, Objective objective,
                                          double best) {
  if (cluster.groups.size() == 1 || (arranged > 1 && cluster.groups.size() <= most_groups_in_every_order))
    return std::nullopt;
  LeftOut left_out{.what = "other choices and orders of the groups of nodes", .gap = std::nullopt};
  if (objective != Objective::time) return left_out;
  const Seconds least = least_of_any_groups(graph, cluster, training, precision_of);
  if (least > Seconds(0.0)) left_out.gap = std::max(0.0, best / least.value - 1.0);
  return left_out;
}

}  // namespace

std::optional<std::string> lacks_homes(const Cluster& cluster, const LayoutRequest& request) {
  const std::int64_t all = cluster.devices();
  const std::int64_t used = gives_every_degree(request) ? std::min(product_of_degrees(request), all) : all;
  return lacks_homes(first_nodes(cluster, static_cast<int>(used)),
                     given<Offload>(request, Choice::offload).value_or(Offload{}));
}

std::vector<Cluster> arrangements(const Cluster& cluster) {
  std::vector<Cluster> result{cluster};
  const std::size_t groups = cluster.groups.size();
  const bool has_blocks =
      std::ranges::any_of(cluster.network.levels, [](const FabricLevel& level) { return level.nodes.has_value(); });
  if (groups == 1 || has_blocks) return result;
  const auto add = [&](std::span<const std::size_t> chosen) {
    Cluster other = cluster;
    other.groups.clear();
    for (const std::size_t g : chosen) other.groups.push_back(cluster.groups[g]);
    if (std::ranges::find(result, other) == result.end()) result.push_back(std::move(other));
  };
  std::vector<std::size_t> order(groups);
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (groups > most_groups_in_every_order) {
    for (std::size_t taken = groups; taken > 0; --taken) add(std::span(order).first(taken));
    for (const std::size_t g : order) add(std::array{g});
    return result;
  }
  do
    for (std::size_t taken = groups; taken > 0; --taken) add(std::span(order).first(taken));
  while (std::ranges::next_permutation(order).found);
  return result;
}

ArrangedResult search_arrangements(const OpGraph& graph, const Cluster& cluster, const TrainingSpec& training,
                                   const LayoutRequest& request, const SearchOptions& options,
                                   const PrecisionOf& precision_of) {
  std::vector<Cluster> all = arrangements(cluster);
  if (!options.fewer_devices) all.erase(all.begin() + 1, all.end());
  const std::size_t arranged = all.size();
  keep_those_with_homes(request, all);
  const std::string in_words = arrangements_in_words(cluster, arranged) +
                               (all.size() < arranged ? ", of those that state the rates of the offload's homes" : "");
  const bool fixed = gives_every_degree(request);
  // Costs are compared in one unit: in device-seconds where not every device has a price.
  const bool priced = hourly_price(cluster, cluster.devices()).has_value();

  const std::shared_ptr<KnownBlockShapes> shapes =
      options.shapes ? options.shapes : std::make_shared<KnownBlockShapes>();

  std::vector<std::pair<SearchCounts, std::optional<Score>>> searches;  // the counts of each, and the best until then
  std::vector<OutsideSpace> outside;                                    // of all of them
  ArrangedResult result;
  std::optional<Score> best;
  std::optional<Score> best_as_it_stands;
  std::optional<RankedPlan> as_stands, smallest, smallest_of_first;
  std::optional<Bytes> least_that_fits;
  BestOfAll ranked(options);
  for (std::size_t i = 0; i < all.size(); ++i) {
    // Each plan is looked at once, on the groups that it uses.
    const int least = options.fewer_devices ? least_devices(all[i], all) : 1;
    const std::int64_t given = product_of_degrees(request);
    const bool is_elsewhere = fixed && given <= cluster.devices() && (given < least || given > all[i].devices());
    if (is_elsewhere || (i > 0 && fixed && given > cluster.devices())) continue;
    Cluster compared = all[i];
    if (!priced)
      for (NodeGroup& group : compared.groups) group.price.reset();
    TrainingSpec own_training = training;
    if (precision_of) own_training.precision = precision_of(compared);
    const bool is_as_it_stands =
        begins(all[i], cluster) && (!precision_of || own_training.precision == precision_of(cluster));
    SearchOptions own_options = options;
    own_options.least_devices = least;
    if (all.size() > 1) own_options.top = ranked_plans(options);
    own_options.to_beat = best;
    own_options.ranked_elsewhere = ranked.ranked();
    own_options.shapes = shapes;
    SearchResult found = search(graph, compared, own_training, request, own_options);
    std::optional<Bytes> own_least;
    if (found.fits) own_least = found.smallest->result.memory.peak();
    if (own_least && (!least_that_fits || *own_least < *least_that_fits)) least_that_fits = own_least;
    std::optional<Score> own;
    // The first plan may be a plainer one that is as good but for a tie, which must not add up.
    for (const RankedPlan& plan : found.plans) {
      const Score its = score(options.objective, compared, plan.spec, plan.result.time.total(), plan.result.memory);
      own = own ? std::min(*own, its) : its;
      if (all.size() == 1) continue;
      Listed listed{.score = its, .plan = plan};
      listed.plan.on = OtherDevices{.cluster = is_as_it_stands ? cluster : all[i], .training = own_training};
      ranked.add(std::move(listed));
    }
    const bool wins = searches.empty() || (own && (!best || better(*own, *best, noise)));
    const bool is_best_as_it_stands =
        is_as_it_stands && own && (!best_as_it_stands || better(*own, *best_as_it_stands, noise));
    add_outside(found.outside, outside);
    searches.emplace_back(found.counts, best && (!own || *best < *own) ? best : own);
    if (is_best_as_it_stands) {
      best_as_it_stands = own;
      as_stands = found.plans.front();
    }
    const auto keep_smallest = [&](std::optional<RankedPlan>& kept) {
      if (found.smallest && (!kept || found.smallest->result.memory.peak() < kept->result.memory.peak()))
        kept = found.smallest;
    };
    if (is_as_it_stands) keep_smallest(smallest);
    else if (begins(all[i], cluster)) keep_smallest(smallest_of_first);
    const bool is_enough = own_least && options.most_simulated && *options.most_simulated == 0;
    if (is_enough) all.erase(all.begin() + static_cast<std::ptrdiff_t>(i) + 1, all.end());
    if (!wins) continue;
    best = own;
    result = {.cluster = is_as_it_stands ? cluster : all[i],
              .precision = own_training.precision,
              .found = std::move(found),
              .least_that_fits = {},
              .as_stands = std::nullopt};
  }
  if (!result.found.plans.empty() && result.cluster != cluster) result.as_stands = std::move(as_stands);
  result.found.smallest = std::move(smallest ? smallest : smallest_of_first);
  result.least_that_fits = least_that_fits;
  if (all.size() > 1 && !result.found.plans.empty()) {
    RankedPlan first = result.found.plans.front();
    TrainingSpec its_training = training;
    its_training.precision = result.precision;
    first.on = OtherDevices{.cluster = result.cluster, .training = its_training};
    result.found.plans.resize(1);
    for (RankedPlan& plan : ranked.behind(first, options.top)) {
      RankedPlan on_its = plan;
      on_its.on = first.on;
      if (are_one_plan(plan, on_its)) plan.on.reset();
      result.found.plans.push_back(std::move(plan));
    }
  }
  SearchCounts& counts = result.found.counts;
  const std::string space = searches.front().first.space + in_words;
  if (searches.size() > 1) {
    counts = {};
    counts.certified = best.has_value();
    for (const auto& [one, until_then] : searches)
      add_counts(one, until_then ? std::optional(until_then->first) : std::nullopt, best ? best->first : 0.0, counts);
    if (options.bounds_left_out) counts.left_out = left_out(outside, best ? std::optional(best->first) : std::nullopt);
  }
  counts.space = space;
  if (options.bounds_left_out && options.fewer_devices && best)
    if (std::optional<LeftOut> others =
            other_arrangements(graph, cluster, training, precision_of, arranged, options.objective, best->first))
      counts.left_out.push_back(*std::move(others));
  return result;
}

}  // namespace parplan
