#include "planner/explain/request_fits.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "planner/parallel/engine_layouts.h"
#include "planner/parallel/techniques.h"
#include "planner/search/node_group_arrangements.h"
#include "planner/search/search.h"
#include "planner/search/search_with_headroom.h"
#include "planner/search/space_rows.h"

namespace parplan {
namespace {

// The limit of one remedy's search for the fastest plan that fits.
constexpr std::int64_t most_simulated = 4;

// `fewer_devices`: also on some of the devices, and on some groups of nodes alone or in another
// order.
ArrangedResult search_for(const SuggestRequest& request, Objective objective, std::int64_t simulated,
                          bool fewer_devices) {
  const std::vector<Cluster> looked_at =
      fewer_devices ? arrangements(request.cluster) : std::vector<Cluster>{request.cluster};
  const auto lacks = [&](const Cluster& one) { return lacks_homes(one, request.layout).has_value(); };
  if (std::ranges::all_of(looked_at, lacks)) return {};
  SearchOptions options;
  options.top = 1;
  options.objective = objective;
  options.most_simulated = simulated;
  options.fewer_devices = fewer_devices;
  options.threads = request.options.threads;
  options.counts_layouts = false;
  options.recomputes_fewest_layers = simulated > 0 && request.options.recomputes_fewest_layers;
  options.balances_replicas = simulated > 0 && request.options.balances_replicas;
  options.says_what_may_fit = false;
  options.shapes = request.options.shapes;
  return search_arrangements(*request.graph, request.cluster, request.training,
                             with_implied(request.training.engine, request.layout), options, request.precision_of);
}

// A plan is tight, and fits, where the engine's allocator gives back what it keeps.
SuggestRequest keeping_nothing(SuggestRequest request) {
  request.training.engine = keeping_nothing(request.training.engine);
  return request;
}

}  // namespace

std::optional<Bytes> least_that_fits(const SuggestRequest& request, bool fewer_devices) {
  return search_for(keeping_nothing(request), Objective::memory, 0, fewer_devices).least_that_fits;
}

bool is_uniform(const Cluster& cluster) { return cluster.groups.size() == 1; }

bool fits(SuggestRequest request) {
  for (const SpaceRow& row : space_rows())
    if (row.frugalest && !request.layout[row.choice])
      request.layout[row.choice] = row.frugalest(request.cluster, request.layout);
  return least_that_fits(request, false) || (request.options.fewer_devices && least_that_fits(request, true));
}

std::optional<Remedy> remedy(const SuggestRequest& changed, std::string_view of, std::string instead,
                             RemedyValue value) {
  SuggestRequest request = changed;
  request.cluster.memory_headroom = changed.headroom_of_remedies;
  const Objective objective = request.options.objective;
  ArrangedResult arranged =
      search_with_headroom(*request.graph, request.cluster, request.training, objective, [&](const SearchRoom& room) {
        SuggestRequest within = request;
        within.cluster = room.cluster;
        within.training = room.training;
        ArrangedResult on_all = search_for(within, objective, most_simulated, false);
        return on_all.found.plans.empty() && request.options.fewer_devices
                   ? search_for(within, objective, most_simulated, true)
                   : on_all;
      });
  SearchResult& found = arranged.found;
  if (found.plans.empty()) return std::nullopt;
  TrainingSpec training = changed.training;
  training.precision = arranged.precision;
  const ModelSummary model{.name = changed.model_name,
                           .parameters = parameter_count(*changed.graph),
                           .flops_per_sample = model_flops_per_sample(*changed.graph)};
  return Remedy{.of = of,
                .instead = std::move(instead),
                .value = std::move(value),
                .model = model,
                .cluster = std::move(arranged.cluster),
                .training = std::move(training),
                .plan = std::move(found.plans.front())};
}

std::int64_t nearest_that_helps(std::int64_t low, std::int64_t high, const std::function<bool(std::int64_t)>& helps) {
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (helps(middle) ? high : low) = middle;
  }
  return high;
}

}  // namespace parplan
