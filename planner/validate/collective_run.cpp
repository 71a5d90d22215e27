#include "planner/validate/collective_run.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/cluster/group_network.h"
#include "planner/cost/collective_time.h"

namespace parplan {
namespace {

// The named cluster whose nodes a table's text begins to describe.
struct HardwareRow {
  std::string_view text;
  std::string_view cluster;
  std::string_view assumed = "";  // beyond one node
};
constexpr std::array hardware_rows = {
    HardwareRow{"A100 (8-GPU node", "dgx-a100"},
    HardwareRow{"A100 node (NVLink3", "dgx-a100"},
    HardwareRow{"DGX A100", "dgx-a100"},
    HardwareRow{"8xA100, 4x200Gb IB", "dgx-a100"},
    HardwareRow{"V100 (8-GPU NVLink node", "dgx-1-v100"},
    HardwareRow{"DGX H100", "dgx-h100"},
    HardwareRow{"8xH100", "dgx-h100"},
    HardwareRow{"H200 node", "hgx-h200"},
    HardwareRow{"AWS p4de", "aws-p4de"},
    HardwareRow{"AWS p5.48xlarge", "aws-p5"},
    HardwareRow{"AWS p5en", "aws-p5en"},
    HardwareRow{"AWS P6-B200", "dgx-b200", "InfiniBand instead of EFA"},
};

struct KindRow {
  std::string_view text;
  InstructionKind kind;
};
constexpr std::array kind_rows = {
    KindRow{"all_reduce", InstructionKind::all_reduce_sum},
    KindRow{"all_gather", InstructionKind::all_gather},
    KindRow{"reduce_scatter", InstructionKind::reduce_scatter},
    KindRow{"alltoall", InstructionKind::all_to_all},
};

// Settings of NCCL under which a collective was measured, as notes name them: the algorithms that
// are left.
struct SettingRow {
  std::string_view text;
  bool (*allows)(std::string_view algorithm);
};
constexpr auto no_nvls = [](std::string_view algorithm) { return !algorithm.starts_with("NVLS"); };
constexpr auto ring_only = [](std::string_view algorithm) { return algorithm.starts_with("ring"); };
constexpr auto nvls_only = [](std::string_view algorithm) { return algorithm == "NVLS"; };
constexpr auto nvls_tree_only = [](std::string_view algorithm) { return algorithm == "NVLS tree"; };
constexpr std::array setting_rows = {
    SettingRow{"NCCL_NVLS_ENABLE=0", no_nvls}, SettingRow{"NVLS off", no_nvls},
    SettingRow{"NCCL_ALGO=RING", ring_only},   SettingRow{"NCCL_ALGO=NVLS", nvls_only},
    SettingRow{"forced NVLSTree", nvls_tree_only},
};

// By the fastest algorithm that the settings leave; by any where they leave none.
Seconds time_under(const std::string& notes, InstructionKind kind, Bytes bytes, const GroupNetwork& network,
                   BackendKind backend) {
  const auto* const setting = std::ranges::find_if(
      setting_rows, [&](const SettingRow& row) { return notes.find(row.text) != std::string::npos; });
  std::optional<Seconds> least;
  for (const CommunicationAlgorithm& row : communication_algorithms())
    if (setting != setting_rows.end() && row.applies(kind, backend) && setting->allows(row.name) &&
        (row.available == nullptr || row.available(network)))
      least = std::min(least.value_or(row.time(kind, bytes, network)), row.time(kind, bytes, network));
  return least ? *least : collective_time(kind, bytes, network, backend);
}

}  // namespace

PredictedCollective predict_collective(const PublishedRun& run, const ClusterCatalog& catalog) {
  const PublishedCollective& collective = *run.collective;
  const auto skip = [](std::string why) {
    return PredictedCollective{.skipped = std::move(why), .assumed = {}, .time = {}};
  };
  const auto* const kind = std::ranges::find(kind_rows, collective.kind, &KindRow::text);
  if (kind == kind_rows.end()) return skip(fmt::format("collective '{}' is not modelled", collective.kind));
  if (!collective.bytes || *collective.bytes < 1) return skip("the size of the message is not stated");
  if (!run.devices || !collective.nodes) return skip("the number of GPUs or nodes is not stated");
  if (*run.devices > std::numeric_limits<int>::max()) return skip(fmt::format("no cluster has {} GPUs", *run.devices));
  const auto* const hardware =
      std::ranges::find_if(hardware_rows, [&](const HardwareRow& row) { return run.device.starts_with(row.text); });
  if (hardware == hardware_rows.end()) return skip(fmt::format("{} is in no file of configs/clusters", run.device));
  PredictedCollective result;
  if (*collective.nodes > 1 && !hardware->assumed.empty()) result.assumed.emplace_back(hardware->assumed);
  try {
    ClusterOptions options;
    options.devices = static_cast<int>(*run.devices);
    const Cluster cluster = find_cluster(std::string(hardware->cluster), catalog, options);
    if (cluster.nodes() != *collective.nodes)
      return skip(fmt::format("{} GPUs of {} are {} nodes, not {}", *run.devices, hardware->cluster, cluster.nodes(),
                              *collective.nodes));
    DeviceMesh mesh;
    mesh.degree.dp = *options.devices;
    result.time = time_under(collective.notes, kind->kind, Bytes(*collective.bytes),
                             group_network(cluster, mesh, Axis::dp), cluster.backend());
  } catch (const ConfigError& error) {
    return skip(error.message());
  }
  return result;
}

}  // namespace parplan
