#include "planner/cluster/visible_devices.h"

#include <algorithm>
#include <charconv>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/base/error.h"
#include "planner/base/text.h"
#include "planner/cluster/node_layout.h"

namespace parplan {
namespace {

// The parts between commas, without spaces around them.
std::vector<std::string> entries_of(const std::string& text) {
  std::vector<std::string> entries;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string entry = text.substr(begin, end - begin);
    const std::size_t first = entry.find_first_not_of(" \t");
    entries.push_back(first == std::string::npos ? "" : entry.substr(first, entry.find_last_not_of(" \t") - first + 1));
    begin = end + 1;
  }
  return entries;
}

// The number at the start of a text, or nothing: "3" and "3abc", as strtoul reads.
std::optional<int> leading_number(const std::string& text) {
  int number = 0;
  const bool sign = text.starts_with('+');
  const auto [end, error] = std::from_chars(text.data() + (sign ? 1 : 0), text.data() + text.size(), number);
  return error == std::errc() ? std::optional(number) : std::nullopt;
}

// A whole number and nothing else.
std::optional<int> whole_number(const std::string& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() && number >= 0 ? std::optional(number) : std::nullopt;
}

std::string numbered(std::size_t count) { return count == 1 ? "0" : fmt::format("0 to {}", count - 1); }

[[noreturn]] void fail_empty(const SelectionRequest& request, const std::string& variable, const std::string& why) {
  throw ConfigError(fmt::format("{} shows none of the {} device{} of {}{}; unset the variable, or list some of {}",
                                variable, request.devices.size(), request.devices.size() == 1 ? "" : "s",
                                request.machine, why.empty() ? "" : " (" + why + ")",
                                numbered(request.devices.size())));
}

// The machine's devices as CUDA numbers them: by bus ids with CUDA_DEVICE_ORDER=PCI_BUS_ID;
// otherwise (also where it is empty) the fastest first, equally fast ones by bus ids (CUDA
// Programming Guide, Environment Variables; the guide leaves the order of equal ones open, and this
// is what CUDA does).
std::vector<int> cuda_order(const SelectionRequest& request) {
  std::vector<int> order(request.devices.size());
  std::iota(order.begin(), order.end(), 0);
  const std::string given = request.environment.cuda_device_order.value_or("");
  const std::vector<std::string> known = {"FASTEST_FIRST", "PCI_BUS_ID"};
  const std::string kind = given.empty() ? known.front() : given;
  const bool unlike = std::ranges::any_of(
      request.devices, [&](const MachineDevice& device) { return device.speed != request.devices.front().speed; });
  // The order does not matter where devices are equal and nobody numbers them.
  if (std::ranges::find(known, kind) == known.end() && (unlike || request.environment.cuda_visible_devices))
    throw ConfigError(
        fmt::format("CUDA_DEVICE_ORDER='{}': expected one of {}{}", kind, join(known), did_you_mean(kind, known)));
  if (kind == "FASTEST_FIRST")
    std::ranges::stable_sort(order, [&](int a, int b) {
      return request.devices[a].speed > request.devices[b].speed;
    });
  return order;
}

// CUDA_VISIBLE_DEVICES as CUDA reads it (CUDA Programming Guide, Environment Variables; its
// treatment of repetitions and of numbers followed by letters: pytorch/pytorch
// torch/cuda/__init__.py, _parse_visible_devices): in the order listed, up to the first entry that
// is no device; none at all where one is repeated.
std::vector<int> cuda_visible(const SelectionRequest& request) {
  const std::vector<int> order = cuda_order(request);
  if (!request.environment.cuda_visible_devices) return order;
  const std::string& text = *request.environment.cuda_visible_devices;
  const std::string variable = fmt::format("CUDA_VISIBLE_DEVICES='{}'", text);
  const std::vector<std::string> entries = entries_of(text);
  if (entries.front().starts_with("MIG-"))
    throw ConfigError(variable +
                      " names slices of GPUs (MIG), and parplan plans for whole GPUs; list GPUs by their numbers");
  const bool by_uuid = entries.front().starts_with("GPU-");
  if (by_uuid && std::ranges::any_of(request.devices, [](const MachineDevice& device) { return device.uuid.empty(); }))
    throw ConfigError(
        fmt::format("{} names GPUs by their UUIDs, which {} does not say; list them by their numbers as `nvidia-smi "
                    "-L` prints them, or give "
                    "--device-ids with the variable unset",
                    variable, request.machine));
  const auto device_of = [&](const std::string& entry) -> std::optional<int> {
    if (!by_uuid) {
      const auto number = leading_number(entry);
      return number && *number >= 0 && *number < static_cast<int>(order.size()) ? std::optional(order[*number])
                                                                                : std::nullopt;
    }
    std::optional<int> found;
    for (std::size_t d = 0; d < request.devices.size(); ++d) {
      if (!entry.starts_with("GPU-") || !request.devices[d].uuid.starts_with(entry)) continue;
      if (found) return std::nullopt;  // a prefix of two devices
      found = static_cast<int>(d);
    }
    return found;
  };
  std::vector<int> visible;
  for (const std::string& entry : entries) {
    const auto device = device_of(entry);
    if (!device) {
      if (visible.empty() && !text.empty())
        fail_empty(request, variable, fmt::format("'{}' is none of them, and CUDA stops there", entry));
      break;
    }
    if (std::ranges::find(visible, *device) != visible.end())
      fail_empty(request, variable, fmt::format("'{}' is listed twice, and CUDA then shows none", entry));
    visible.push_back(*device);
  }
  if (visible.empty()) fail_empty(request, variable, "");
  return visible;
}

// ZE_AFFINITY_MASK (oneAPI Level Zero specification, Core Programming Guide, Affinity Mask): a set,
// which keeps the order of devices. With ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE a number is a card with
// all its tiles, and 1.0 is a tile of it; otherwise tiles are devices of their own and are numbered
// consecutively. Where the hierarchy is not set, a mask with a point refers to cards.
std::vector<int> level_zero_visible(const SelectionRequest& request) {
  std::vector<int> all(request.devices.size());
  std::iota(all.begin(), all.end(), 0);
  if (!request.environment.ze_affinity_mask || request.environment.ze_affinity_mask->empty()) return all;
  const std::string& text = *request.environment.ze_affinity_mask;
  const std::string variable = fmt::format("ZE_AFFINITY_MASK='{}'", text);
  const std::string hierarchy = request.environment.ze_flat_device_hierarchy.value_or("");
  const std::vector<std::string> known = {"FLAT", "COMPOSITE", "COMBINED"};
  if (!hierarchy.empty() && std::ranges::find(known, hierarchy) == known.end())
    throw ConfigError(fmt::format("ZE_FLAT_DEVICE_HIERARCHY='{}': expected one of {}{}", hierarchy, join(known),
                                  did_you_mean(hierarchy, known)));
  const bool points = text.find('.') != std::string::npos;
  if (points && (hierarchy == "FLAT" || hierarchy == "COMBINED"))
    throw ConfigError(
        fmt::format("{} names tiles of cards, and with ZE_FLAT_DEVICE_HIERARCHY={} tiles are devices of their own: "
                    "number them from 0 to {}, or set "
                    "ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE",
                    variable, hierarchy, request.devices.size() - 1));
  const int tiles = hierarchy == "COMPOSITE" || points ? request.tiles_per_card : 1;
  const std::size_t cards = request.devices.size() / static_cast<std::size_t>(tiles);
  const auto refuse = [&](const std::string& entry) {
    throw ConfigError(fmt::format("{}: {} has {} {}{}, found '{}'", variable, request.machine,
                                  tiles > 1 ? "cards" : "devices", numbered(cards),
                                  tiles > 1 ? fmt::format(" of {} tiles", tiles) : "", entry));
  };
  std::vector<bool> shown(request.devices.size(), false);
  for (const std::string& entry : entries_of(text)) {
    const std::size_t point = entry.find('.');
    const auto card = whole_number(entry.substr(0, point));
    const auto tile = point == std::string::npos ? std::optional(0) : whole_number(entry.substr(point + 1));
    if (!card || !tile || *card >= static_cast<int>(cards) || *tile >= tiles) refuse(entry);
    const int first = *card * tiles + *tile;
    std::fill_n(shown.begin() + first, point == std::string::npos ? tiles : 1, true);
  }
  std::erase_if(all, [&](int device) { return !shown[device]; });
  return all;
}

}  // namespace

DeviceSelection select_devices(const SelectionRequest& request) {
  DeviceSelection selection;
  const auto is_set = [](const std::optional<std::string>& variable) { return variable && !variable->empty(); };
  if (request.backend == BackendKind::cuda) {
    selection.devices = cuda_visible(request);
    if (request.environment.cuda_visible_devices)
      selection.shown_by = fmt::format("CUDA_VISIBLE_DEVICES='{}'", *request.environment.cuda_visible_devices);
  } else if (request.backend == BackendKind::oneapi) {
    selection.devices = level_zero_visible(request);
    if (is_set(request.environment.ze_affinity_mask))
      selection.shown_by = fmt::format("ZE_AFFINITY_MASK='{}'", *request.environment.ze_affinity_mask);
  } else {
    selection.devices.resize(request.devices.size());
    std::iota(selection.devices.begin(), selection.devices.end(), 0);
  }
  if (request.device_ids.empty()) return selection;
  std::vector<int> chosen;
  for (const int id : request.device_ids) {
    if (id < 0 || id >= static_cast<int>(selection.devices.size())) {
      const std::string numbers = numbered(selection.devices.size());
      throw ConfigError(selection.shown_by.empty()
                            ? fmt::format("--device-ids: {} has devices {}, found {}", request.machine, numbers, id)
                            : fmt::format("--device-ids counts the devices that are visible, and {} shows {} of the {} "
                                          "of {}, numbered {}; found {}",
                                          selection.shown_by, selection.devices.size(), request.devices.size(),
                                          request.machine, numbers, id));
    }
    chosen.push_back(selection.devices[id]);
  }
  selection.devices = std::move(chosen);
  return selection;
}

VisibilitySetting visibility_of(BackendKind backend, const std::vector<int>& devices) {
  const std::string list = fmt::format("{}", fmt::join(devices, ","));
  switch (backend) {
    case BackendKind::cuda: return {.variables = {{"CUDA_DEVICE_ORDER", "PCI_BUS_ID"}, {"CUDA_VISIBLE_DEVICES", list}}};
    // AMD ROCm, "GPU isolation techniques": HIP_VISIBLE_DEVICES lists device indices, in the order
    // in which programs see them.
    case BackendKind::rocm: return {.variables = {{"HIP_VISIBLE_DEVICES", list}}};
    case BackendKind::oneapi:
      return {.variables = {{"ZE_ENABLE_PCI_ID_DEVICE_ORDER", "1"},
                            {"ZE_FLAT_DEVICE_HIERARCHY", "FLAT"},
                            {"ZE_AFFINITY_MASK", list}},
              .in_this_order = std::ranges::is_sorted(devices)};
    // Intel Gaudi, "Gaudi-to-process Assignment": the process with local rank i takes the i-th
    // module of the list.
    case BackendKind::synapse: return {.variables = {{"HABANA_VISIBLE_MODULES", list}}};
    case BackendKind::cpu: break;
  }
  return {};
}

DeviceSelection select_devices(Cluster& cluster, const VisibilityVariables& environment,
                               const std::vector<int>& device_ids) {
  PARPLAN_ASSERT(cluster.nodes() == 1, fmt::format("{} nodes", cluster.nodes()));
  NodeGroup& group = cluster.groups.front();
  const std::size_t count = group.node.devices.size();
  // A node has one kind of device: all are equally fast.
  const SelectionRequest request{.machine = fmt::format("cluster '{}'", cluster.name),
                                 .backend = group.device.backend,
                                 .devices = std::vector<MachineDevice>(count),
                                 .tiles_per_card = group.node.tiles_per_card,
                                 .environment = environment,
                                 .device_ids = device_ids};
  const DeviceSelection selection = select_devices(request);
  if (device_ids.empty() && selection.shown_by.empty()) return selection;
  group.node = with_devices(group.node, selection.devices);
  if (!selection.shown_by.empty()) {
    SelectionRequest before_ids = request;
    before_ids.device_ids.clear();
    const std::vector<int> shown = select_devices(before_ids).devices;
    const std::string chosen = device_ids.empty()
                                   ? ""
                                   : fmt::format("; --device-ids {} chose {} of them", fmt::join(device_ids, ","),
                                                 fmt::join(selection.devices, ", "));
    cluster.notes.push_back(fmt::format("{} shows device{} {} of {}{}", selection.shown_by,
                                        shown.size() == 1 ? "" : "s", fmt::join(shown, ", "), count, chosen));
  }
  // A file may already be a selection of a machine's devices.
  const std::vector<int> before = cluster.device_ids;
  cluster.device_ids = selection.devices;
  if (!before.empty())
    for (int& device : cluster.device_ids) device = before[device];
  return selection;
}

}  // namespace parplan
