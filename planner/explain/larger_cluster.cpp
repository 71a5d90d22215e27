#include "planner/explain/larger_cluster.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "planner/explain/request_fits.h"

namespace parplan {
namespace {

// Devices with at least so much memory each.
SuggestRequest with_memory(const SuggestRequest& request, Bytes bytes) {
  SuggestRequest changed = request;
  for (NodeGroup& group : changed.cluster.groups) {
    Bytes& capacity = group.device.memory_capacity;
    capacity = std::max(capacity, bytes);
  }
  return changed;
}

// The memory of one device; the range for heterogeneous devices.
std::string memory_now(const Cluster& cluster, int digits) {
  return digits == 3 || !is_uniform(cluster) ? device_memory(cluster) : format_bytes_up(least_memory(cluster), digits);
}

// The text has as few digits as possible such that the number it shows can be typed: with it the
// request fits, it is not above what the devices have unless `enough` is, and it differs from the
// present memory.
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
  const char* const each = is_uniform(request.cluster) ? "" : "at least ";
  return fmt::format("{}{} of memory a device instead of {}", each, text, now);
}

// The same request with more devices of the same kind: as many as the caller can give, or whole
// nodes where a network joins nodes.
std::optional<SuggestRequest> with_devices(const SuggestRequest& request, int devices) {
  SuggestRequest changed = request;
  if (request.cluster_of)
    if (std::optional<Cluster> cluster = request.cluster_of(devices); cluster && cluster->devices() == devices) {
      changed.cluster = std::move(*cluster);
      // A memory limit in the request holds for the added devices too.
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

}  // namespace

std::optional<Remedy> more_memory(const SuggestRequest& request, const SearchResult& failed) {
  if (!failed.smallest) return std::nullopt;
  Bytes enough = failed.smallest->result.memory.peak();
  const bool fewer = request.options.fewer_devices;  // the frugalest plan may be one of them
  const auto least_in = [&](Bytes bytes) { return least_that_fits(with_memory(request, bytes), fewer); };
  // On heterogeneous devices, the stage that fills its own device most is not always the stage that
  // needs the most memory.
  constexpr int most_doublings = 8;
  for (int doublings = 0; !least_in(enough); ++doublings) {
    if (doublings == most_doublings) return std::nullopt;
    enough = 2 * enough;
  }
  // The model is cut differently for different memory: with less than the frugalest plan needs
  // another may fit, and with exactly what that one needs the cut may change so that it does not
  // fit.
  constexpr int most_rounds = 16;
  std::optional<Bytes> needed = least_in(enough - Bytes(1));
  if (needed) enough -= Bytes(1);
  for (int round = 0; needed && round < most_rounds; ++round) {
    const Bytes exactly = std::min(*needed, enough);
    needed = least_in(exactly - Bytes(1));
    if (needed)
      enough = exactly - Bytes(1);
    else if (exactly < enough && least_in(exactly))
      enough = exactly;
  }
  const std::string words = memory_in_words(request, enough, [&](Bytes bytes) { return least_in(bytes).has_value(); });
  return remedy(with_memory(request, enough), "memory", words, enough.count);
}

std::optional<Remedy> more_devices(const SuggestRequest& request) {
  if (gives_every_degree(request.layout)) return std::nullopt;
  const int now = request.cluster.devices();
  const auto helps = [&](int devices) {
    const std::optional<SuggestRequest> changed = with_devices(request, devices);
    return changed && fits(*changed);
  };
  const auto found = [&](int devices) {
    return remedy(*with_devices(request, devices), "devices", fmt::format("{} devices instead of {}", devices, now),
                  std::int64_t{devices});
  };
  // Within a node, devices are added one by one.
  int node = request.cluster.groups.back().devices_per_node();
  if (request.cluster.nodes() == 1)
    for (int devices = now + 1;; ++devices) {
      const std::optional<SuggestRequest> changed = with_devices(request, devices);
      if (!changed || changed->cluster.nodes() > 1) break;
      if (fits(*changed)) return found(devices);
      node = devices;
    }
  // Beyond this number, a lack of devices is not the reason.
  const int most = std::max(64 * node, 4 * now);
  // Beyond a node, devices are added node by node: doubled until the request fits, then the first
  // number in between; a large range is halved, since more devices seldom fit worse.
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

}  // namespace parplan
