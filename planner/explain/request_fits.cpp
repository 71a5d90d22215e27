#include "planner/explain/request_fits.h"

#include <utility>

#include "planner/parallel/engine_layouts.h"
#include "planner/search/node_group_arrangements.h"
#include "planner/search/search.h"
#include "planner/search/space_rows.h"

namespace parplan {
namespace {

// The limit of one remedy's search for the fastest plan that fits.
constexpr std::int64_t most_simulated = 4;

SearchResult search_for(const SuggestRequest& request, Objective objective, std::int64_t simulated,
                        bool fewer_devices = false) {
  if (lacks_homes(request.cluster, request.layout)) return {};
  SearchOptions options;
  options.top = 1;
  options.objective = objective;
  options.most_simulated = simulated;
  options.fewer_devices = fewer_devices;
  options.threads = request.options.threads;
  options.counts_layouts = false;
  options.says_what_may_fit = false;
  options.shapes = request.options.shapes;
  return search(*request.graph, request.cluster, request.training,
                with_implied(request.training.engine, request.layout), options);
}

}  // namespace

std::optional<Bytes> least_that_fits(const SuggestRequest& request, bool fewer_devices) {
  const SearchResult found = search_for(request, Objective::memory, 0, fewer_devices);
  if (!found.fits) return std::nullopt;
  return found.smallest->result.memory.peak();
}

bool is_uniform(const Cluster& cluster) { return cluster.groups.size() == 1; }

bool fits(SuggestRequest request) {
  for (const SpaceRow& row : space_rows())
    if (row.frugalest && !request.layout[row.choice]) request.layout[row.choice] = row.frugalest(request.cluster);
  return least_that_fits(request).has_value();
}

std::optional<Remedy> remedy(const SuggestRequest& changed, std::string_view of, std::string instead,
                             RemedyValue value) {
  SuggestRequest request = changed;
  SearchResult found;
  for (const double headroom : {changed.headroom_of_remedies, 0.0}) {
    request.cluster.memory_headroom = headroom;
    for (const bool fewer_devices : {false, changed.options.fewer_devices})
      if (found.plans.empty()) found = search_for(request, request.options.objective, most_simulated, fewer_devices);
  }
  if (found.plans.empty()) return std::nullopt;
  const ModelSummary model{.name = changed.model_name,
                           .parameters = parameter_count(*changed.graph),
                           .flops_per_sample = model_flops_per_sample(*changed.graph)};
  request.cluster.memory_headroom = changed.headroom_of_remedies;
  return Remedy{.of = of,
                .instead = std::move(instead),
                .value = std::move(value),
                .model = model,
                .cluster = std::move(request.cluster),
                .training = changed.training,
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
