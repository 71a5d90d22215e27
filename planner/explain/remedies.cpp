#include "planner/explain/remedies.h"

#include <algorithm>
#include <array>
#include <functional>
#include <optional>
#include <tuple>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/plan/layout_text.h"
#include "planner/plan/objective.h"

namespace parplan {
namespace {

// The limit of one remedy's search for the fastest plan that fits.
constexpr std::int64_t most_simulated = 4;

SearchResult search_for(const SuggestRequest& request, Objective objective, std::int64_t simulated,
                        bool fewer_devices = false) {
  SearchOptions options;
  options.top = 1;
  options.objective = objective;
  options.most_simulated = simulated;
  options.fewer_devices = fewer_devices;
  options.threads = request.options.threads;
  return search(*request.graph, request.cluster, request.training, request.layout, options);
}

// The memory of the candidate that needs least among those that fit. Nothing is simulated: the
// estimate knows a Program's memory to the byte.
std::optional<Bytes> least_that_fits(const SuggestRequest& request, bool fewer_devices = false) {
  const SearchResult found = search_for(request, Objective::memory, 0, fewer_devices);
  if (found.counts.candidates == found.counts.infeasible_memory) return std::nullopt;
  return found.smallest->result.memory.peak();
}

bool is_uniform(const Cluster& cluster) { return cluster.groups.size() == 1; }

// Whether anything fits. What decides it is memory alone: of what the user leaves free, the
// smallest micro-batch, the schedule with fewest micro-batches in flight, and any order of equal
// devices.
bool fits(SuggestRequest request) {
  if (!request.layout.micro_batch) request.layout.micro_batch = 1;
  if (!request.layout.schedule) request.layout.schedule = ScheduleKind::one_f_one_b;
  if (!request.layout.order && is_uniform(request.cluster)) request.layout.order = {Axis::pp, Axis::dp, Axis::tp};
  return least_that_fits(request).has_value();
}

std::optional<Remedy> remedy(const SuggestRequest& changed, std::string_view of, std::string instead,
                             RemedyValue value) {
  SearchResult found = search_for(changed, changed.options.objective, most_simulated);
  if (found.plans.empty())
    found = search_for(changed, changed.options.objective, most_simulated, changed.options.fewer_devices);
  if (found.plans.empty()) return std::nullopt;
  const ModelSummary model{.name = changed.model_name,
                           .parameters = parameter_count(*changed.graph),
                           .flops_per_sample = model_flops_per_sample(*changed.graph)};
  return Remedy{.of = of,
                .instead = std::move(instead),
                .value = std::move(value),
                .model = model,
                .cluster = changed.cluster,
                .training = changed.training,
                .plan = std::move(found.plans.front())};
}

// The number in (low, high] nearest to `low` for which `helps` holds, when it holds for `high`, not
// for `low`, and once it does, further on.
std::int64_t nearest_that_helps(std::int64_t low, std::int64_t high, const std::function<bool(std::int64_t)>& helps) {
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (helps(middle) ? high : low) = middle;
  }
  return high;
}

// Devices with at least so much memory.
SuggestRequest with_memory(const SuggestRequest& request, Bytes bytes) {
  SuggestRequest changed = request;
  for (NodeGroup& group : changed.cluster.groups) {
    Bytes& capacity = group.device.memory_capacity;
    capacity = std::max(capacity, bytes);
  }
  return changed;
}

// The memory of one device; for heterogeneous devices the range.
std::string memory_now(const Cluster& cluster, int digits) {
  return digits == 3 || !is_uniform(cluster) ? device_memory(cluster) : format_bytes_up(least_memory(cluster), digits);
}

// The words have as few digits as can be for what they name to be typed: it fits, is not more than
// the devices have where `enough` is not, and differs from what there is now.
std::string memory_in_words(const SuggestRequest& request, Bytes enough, const std::function<bool(Bytes)>& fits_in) {
  std::optional<Bytes> most;
  if (const auto whole = request.cluster_of ? request.cluster_of(request.cluster.devices()) : std::nullopt)
    for (const NodeGroup& group : whole->groups) most = std::max(most.value_or(Bytes(0)), group.device.memory_capacity);
  constexpr int most_digits = 17;  // by then it is `enough`
  std::string text, now;
  for (int digits = 3; digits <= most_digits; ++digits) {
    text = format_bytes_up(enough, digits);
    now = memory_now(request.cluster, digits);
    const Bytes typed = parse_bytes(text);
    const bool beyond = most && enough <= *most && typed > *most;
    if (text != now && !beyond && (typed == enough || fits_in(typed))) break;
  }
  return fmt::format("{} of memory a device instead of {}", text, now);
}

std::optional<Remedy> more_memory(const SuggestRequest& request, const SearchResult& failed) {
  if (!failed.smallest) return std::nullopt;
  Bytes enough = failed.smallest->result.memory.peak();
  const bool fewer = request.options.fewer_devices;  // the frugalest plan may be one of them
  const auto least_in = [&](Bytes bytes) { return least_that_fits(with_memory(request, bytes), fewer); };
  // With heterogeneous devices, the stage that fills its own device most need not be the one that
  // needs most memory.
  constexpr int most_doublings = 8;
  for (int doublings = 0; !least_in(enough); ++doublings) {
    if (doublings == most_doublings) return std::nullopt;
    enough = 2 * enough;
  }
  // Cuts of the model change with the room that there is: with less than the frugalest plan needs,
  // another may fit, and with just what that one needs it may be cut otherwise and not fit.
  constexpr int most_rounds = 16;
  for (int round = 0; round < most_rounds; ++round) {
    const std::optional<Bytes> needed = least_in(enough - Bytes(1));
    if (!needed) break;
    enough -= Bytes(1);
    if (!least_in(*needed)) break;
    enough = std::min(enough, *needed);
  }
  const std::string words = memory_in_words(request, enough, [&](Bytes bytes) { return least_in(bytes).has_value(); });
  return remedy(with_memory(request, enough), "memory", words, enough.count);
}

// The same request with more devices of the same kind: what the caller can give, else whole nodes
// where there is a network between them.
std::optional<SuggestRequest> with_devices(const SuggestRequest& request, int devices) {
  SuggestRequest changed = request;
  if (request.cluster_of)
    if (std::optional<Cluster> cluster = request.cluster_of(devices); cluster && cluster->devices() == devices) {
      changed.cluster = std::move(*cluster);
      // A limit of the request's memory holds for those that are added, too.
      for (NodeGroup& group : changed.cluster.groups)
        group.device.memory_capacity =
            std::min(group.device.memory_capacity, request.cluster.groups.back().device.memory_capacity);
      return changed;
    }
  NodeGroup& group = changed.cluster.groups.back();
  const bool has_network =
      std::ranges::any_of(group.node.vertices, [](const Vertex& v) { return v.kind == VertexKind::network; });
  const int more = devices - request.cluster.devices();
  if (!has_network || more % group.devices_per_node() != 0) return std::nullopt;
  group.nodes += more / group.devices_per_node();
  return changed;
}

std::optional<Remedy> more_devices(const SuggestRequest& request) {
  if (request.layout.dp && request.layout.tp && request.layout.pp) return std::nullopt;
  const int now = request.cluster.devices();
  const auto helps = [&](int devices) {
    const std::optional<SuggestRequest> changed = with_devices(request, devices);
    return changed && fits(*changed);
  };
  const auto found = [&](int devices) {
    return remedy(*with_devices(request, devices), "devices", fmt::format("{} devices instead of {}", devices, now),
                  std::int64_t{devices});
  };
  // Within a node one by one.
  int node = request.cluster.groups.back().devices_per_node();
  if (request.cluster.nodes() == 1)
    for (int devices = now + 1;; ++devices) {
      const std::optional<SuggestRequest> changed = with_devices(request, devices);
      if (!changed || changed->cluster.nodes() > 1) break;
      if (fits(*changed)) return found(devices);
      node = devices;
    }
  // Beyond so many, devices are not what is missing.
  const int most = std::max(64 * node, 4 * now);
  // Beyond it node by node: doubled until it fits, then the first number in between; of many, by
  // halving, since more seldom fit worse.
  int low = (now + node - 1) / node;
  int high = low + 1;
  while (!helps(high * node)) {
    low = high;
    high *= 2;
    if (high * node > most) return std::nullopt;
  }
  constexpr int few = 8;
  if (high - low <= few)
    for (int nodes = low + 1; nodes < high; ++nodes)
      if (helps(nodes * node)) return found(nodes * node);
  const auto nodes = high - low <= few ? high : static_cast<int>(nearest_that_helps(low, high, [&](std::int64_t count) {
    return helps(static_cast<int>(count) * node);
  }));
  return found(nodes * node);
}

// Each given part of the layout, left to the search or, where parts have an order, as near as can
// be to what was given.
void add_layouts(const SuggestRequest& request, const std::function<void(std::optional<Remedy>)>& add) {
  const LayoutRequest& given = request.layout;
  if (given.zero_stage)
    for (int zero = *given.zero_stage + 1; zero <= 3; ++zero) {
      SuggestRequest changed = request;
      changed.layout.zero_stage = zero;
      if (!fits(changed)) continue;
      add(remedy(changed, "zero_stage", fmt::format("ZeRO stage {} instead of {}", zero, *given.zero_stage),
                 std::int64_t{zero}));
      break;
    }
  if (given.micro_batch)
    for (std::int64_t micro_batch = *given.micro_batch - 1; micro_batch >= 1; --micro_batch) {
      if (request.training.global_batch % micro_batch != 0) continue;
      SuggestRequest changed = request;
      changed.layout.micro_batch = micro_batch;
      if (!fits(changed)) continue;
      add(remedy(changed, "micro_batch",
                 fmt::format("micro-batches of {} instead of {}", micro_batch, *given.micro_batch), micro_batch));
      break;
    }
  const auto leave_free = [&](auto part, std::string_view of, const auto& say) {
    if (!(given.*part)) return;
    SuggestRequest changed = request;
    (changed.layout.*part).reset();
    if (!fits(changed)) return;
    std::optional<Remedy> found = remedy(changed, of, "", {});
    if (!found) return;
    std::tie(found->instead, found->value) = say(found->plan.spec);
    add(std::move(found));
  };
  using Said = std::pair<std::string, RemedyValue>;
  leave_free(&LayoutRequest::recompute, "recompute", [&](const ParallelSpec& spec) {
    return Said(fmt::format("recompute {} instead of {}", name(spec.recompute), name(*given.recompute)),
                name(spec.recompute));
  });
  leave_free(&LayoutRequest::tp, "tp", [&](const ParallelSpec& spec) {
    return Said(fmt::format("tp {} instead of {}", spec.tp(), *given.tp), std::int64_t{spec.tp()});
  });
  leave_free(&LayoutRequest::pp, "pp", [&](const ParallelSpec& spec) {
    return Said(fmt::format("pp {} instead of {}", spec.pp(), *given.pp), std::int64_t{spec.pp()});
  });
  leave_free(&LayoutRequest::dp, "dp", [&](const ParallelSpec& spec) {
    return Said(fmt::format("dp {} instead of {}", spec.dp(), *given.dp), std::int64_t{spec.dp()});
  });
  leave_free(&LayoutRequest::schedule, "schedule", [&](const ParallelSpec& spec) {
    return Said(fmt::format("schedule {} instead of {}", name(spec.schedule), name(*given.schedule)),
                name(spec.schedule));
  });
  leave_free(&LayoutRequest::sequence_parallel, "sequence_parallel", [&](const ParallelSpec& spec) {
    return Said(spec.sequence_parallel ? "with sequence parallelism" : "without sequence parallelism",
                spec.sequence_parallel);
  });
  leave_free(&LayoutRequest::stage_blocks, "stage_blocks", [&](const ParallelSpec& spec) {
    return Said(fmt::format("layers per stage {} instead of what was given", stage_layers(spec)),
                fmt::format("{}", fmt::join(spec.stage_blocks, ",")));
  });
}

std::optional<Remedy> smaller_batch(const SuggestRequest& request) {
  // In multiples of what the given parts of the layout allow.
  const std::int64_t unit = request.layout.dp.value_or(1) * request.layout.micro_batch.value_or(1);
  const std::int64_t now = request.training.global_batch / unit;
  const auto with = [&](std::int64_t count) {
    SuggestRequest changed = request;
    changed.training.global_batch = count * unit;
    return changed;
  };
  if (now < 2 || !fits(with(1))) return std::nullopt;
  const auto helps = [&](std::int64_t less) { return fits(with(now - less)); };
  std::int64_t fewer = nearest_that_helps(0, now - 1, helps);
  // A batch with fewer divisors may fit worse than a larger one.
  constexpr std::int64_t looked_at = 8;
  for (std::int64_t less = std::max<std::int64_t>(fewer - looked_at, 1); less < fewer - 1; ++less)
    if (helps(less)) fewer = less;
  return remedy(with(now - fewer), "global_batch",
                fmt::format("a global batch of {} instead of {}", (now - fewer) * unit, request.training.global_batch),
                (now - fewer) * unit);
}

std::optional<Remedy> shorter_sequence(const SuggestRequest& request, OpGraph& graph) {
  if (!request.graph_of_length) return std::nullopt;
  // Whole steps that kernels like, of a sequence of any use.
  const std::int64_t now = request.training.sequence_length;
  const std::int64_t unit = now > 128 ? 128 : 1;
  const std::int64_t count = (now - 1) / unit;  // the longest that is shorter
  const auto with = [&](std::int64_t units) {
    SuggestRequest changed = request;
    graph = request.graph_of_length(units * unit);
    changed.graph = &graph;
    changed.training.sequence_length = units * unit;
    return changed;
  };
  if (count < 1 || !fits(with(1))) return std::nullopt;
  const std::int64_t fewer =
      nearest_that_helps(-1, count - 1, [&](std::int64_t less) { return fits(with(count - less)); });
  const std::int64_t tokens = (count - fewer) * unit;
  return remedy(with(count - fewer), "sequence_length",
                fmt::format("sequences of {} tokens instead of {}", tokens, now), tokens);
}

}  // namespace

std::vector<Remedy> find_remedies(const SuggestRequest& request, const SearchResult& failed) {
  std::vector<Remedy> remedies;
  const auto add = [&](std::optional<Remedy> found) {
    if (found) remedies.push_back(std::move(*found));
  };
  add(more_memory(request, failed));
  add(more_devices(request));
  add_layouts(request, add);
  add(smaller_batch(request));
  OpGraph shorter;
  add(shorter_sequence(request, shorter));
  for (const DataType half : {DataType::bf16, DataType::fp16}) {
    SuggestRequest changed = request;
    changed.training.precision = half;
    if (is_half(request.training.precision) || !has_units(request.cluster, half) || !fits(changed)) continue;
    add(remedy(changed, "precision",
               fmt::format("precision {} instead of {}", name(half), name(request.training.precision)), name(half)));
    break;
  }
  if (request.training.optimizer != Optimizer::sgd) {
    SuggestRequest changed = request;
    changed.training.optimizer = Optimizer::sgd;
    if (fits(changed))
      add(remedy(changed, "optimizer",
                 fmt::format("optimizer sgd instead of {}, which keeps less state", name(request.training.optimizer)),
                 name(Optimizer::sgd)));
  }
  return remedies;
}

}  // namespace parplan
