#include "tests/fuzz/targets.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "cli/load_plan.h"
#include "models/families.h"
#include "models/huggingface.h"
#include "models/model_file.h"
#include "planner/base/error.h"
#include "planner/base/text.h"
#include "planner/calibrate/training_log.h"
#include "planner/cluster/cluster_calibration.h"
#include "planner/cluster/find_cluster.h"
#include "planner/cluster/nccl/import.h"
#include "planner/cluster/nccl/xml_files.h"
#include "planner/cluster/smi_topology.h"
#include "planner/cluster/write_topology.h"
#include "planner/plan/plan.h"
#include "planner/report/csv.h"
#include "planner/report/explain.h"
#include "planner/report/plan_row.h"
#include "planner/report/plan_table.h"
#include "planner/report/table.h"
#include "planner/suggest.h"
#include "runtime/checkpoint/checkpoint_index.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/checkpoint/weight_index.h"

namespace parplan::fuzz {
namespace {

const std::string file = "input";
const ClusterCatalog catalog = {.devices_folder = PARPLAN_SOURCE_DIR "/configs/devices",
                                .clusters_folder = PARPLAN_SOURCE_DIR "/configs/clusters"};

// Graphs of deep models take long to build and show nothing beyond those of a few layers.
constexpr std::int64_t most_layers = 24;

void use_model(const ModelFile& model) {
  const ModelSpec& spec = model.spec;
  const std::string written = write_model(spec);
  PARPLAN_ASSERT(read_model(written, "written").spec == spec, written);
  if (spec.layers > most_layers) return;
  const OpGraph graph = build_graph(spec, std::min<std::int64_t>(spec.context, 128));
  PARPLAN_ASSERT(parameter_count(graph) > 0, fmt::format("{} parameters", parameter_count(graph)));
}

void take_model(const std::string& input) { use_model(read_model(input, file)); }

void take_huggingface(const std::string& input) { use_model(read_huggingface(input, file)); }

void take_device(const std::string& input) {
  const DeviceKind device = read_device(YamlNode::parse(input, file));
  const std::string written = write_device(device);
  PARPLAN_ASSERT(read_device(YamlNode::parse(written, "written")) == device, written);
}

void use_cluster(const Cluster& cluster) {
  const std::string written = write_cluster(cluster);
  PARPLAN_ASSERT(read_cluster(YamlNode::parse(written, "written")) == cluster, written);
  if (problem_with(cluster)) return;
  PARPLAN_ASSERT(!describe(cluster).empty(), written);
}

void take_cluster(const std::string& input) { use_cluster(read_cluster(YamlNode::parse(input, file), catalog)); }

void take_smi_topology(const std::string& input) {
  if (!is_smi_topology(input)) return;
  const SmiTopology topology = read_smi_topology(input, file);
  static const std::array devices = {find_device("h100-sxm-80gb", catalog), find_device("rtx-4090", catalog)};
  for (const DeviceKind& device : devices)
    for (const std::optional<BytesPerSecond> network :
         {std::optional<BytesPerSecond>(), std::optional(BytesPerSecond(50e9))}) {
      try {
        use_cluster(cluster_of(topology, "topology", device, network));
      } catch (const ConfigError&) {  // the links do not fit this device; they may fit the next
      }
    }
}

// The file as it is, and completed by options where that is not enough.
void take_nccl_topology(const std::string& input) {
  ClusterOptions options;
  try {
    use_cluster(import_nccl_topology(input, file, catalog, options));
  } catch (const ConfigError&) {
    options.device = "h100-sxm-80gb";
    options.network = BytesPerSecond(50e9);
    use_cluster(import_nccl_topology(input, file, catalog, options));
  }
}

void take_nccl_graphs(const std::string& input) {
  for (const NcclGraph& graph : read_nccl_graphs(input, file)) PARPLAN_ASSERT(name(graph.algorithm) != nullptr, input);
}

// What explain prints for a plan, and simulate if the plan is small: lowering takes time in
// proportion to ranks, blocks and actions.
void take_plan(const std::string& input) {
  const Plan plan = read_plan(input, file);
  const std::string written = write_plan(plan);
  PARPLAN_ASSERT(write_plan(read_plan(written, "written")) == written, written);
  PARPLAN_ASSERT(!explain(plan).empty() && !write_table(plan).empty(), written);
  std::vector<Json> rows;
  for (int rank = 1; rank <= static_cast<int>(plan.alternatives.size()) + 1; ++rank)
    rows.push_back(row(subject_of(plan, rank)));
  PARPLAN_ASSERT(!write_csv(rows).empty(), written);
  std::size_t actions = 0;
  for (const std::vector<Action>& stage : plan.schedule.ranks) actions += stage.size();
  if (plan.spec.mesh.size() > 16 || actions > 256 || read_model(plan.model_text, file).spec.layers > most_layers)
    return;
  LoadedPlan loaded = load_plan(input, file);
  loaded.plan.prediction = simulate_plan(loaded.graph, loaded.plan);
  PARPLAN_ASSERT(!write_table(loaded.plan).empty(), written);
}

// The fields of one line of CSV by RFC 4180, read back. Lines end in \n.
std::vector<std::string> fields_of(std::string_view text, std::size_t& at) {
  std::vector<std::string> fields(1);
  for (; text[at] != '\n'; ++at) {
    if (text[at] == ',') {
      fields.emplace_back();
    } else if (text[at] != '"') {
      fields.back() += text[at];
    } else {
      for (++at; text[at] != '"' || text[at + 1] == '"'; ++at) {
        fields.back() += text[at];
        if (text[at] == '"') ++at;
      }
    }
  }
  ++at;
  return fields;
}

// As it is written where a spreadsheet would take it for a formula.
std::string as_text(const std::string& value) {
  const bool is_formula = !value.empty() && std::string_view("=+@\t\r").find(value.front()) != std::string_view::npos;
  return is_formula ? "'" + value : value;
}

// parplan reads no CSV: its output for any text must come back through another reader.
void take_csv(const std::string& input) {
  std::vector<Json> rows(2);
  std::size_t next = 0;
  for (Json& row : rows)
    for (const Column& column : columns()) {
      const std::size_t end = std::min(input.find('\0', next), input.size());
      row[std::string(column.key)] = input.substr(next, end - next);
      next = std::min(end + 1, input.size());
    }
  const std::string text = write_csv(rows);
  std::size_t at = 0;
  const std::vector<std::string> keys = fields_of(text, at);
  for (const Json& row : rows) {
    const std::vector<std::string> fields = fields_of(text, at);
    PARPLAN_ASSERT(fields.size() == keys.size(), fmt::format("{} fields under {} keys", fields.size(), keys.size()));
    for (std::size_t i = 0; i < keys.size(); ++i)
      PARPLAN_ASSERT(as_text(row.at(keys[i]).get<std::string>()) == fields[i], fields[i]);
  }
  PARPLAN_ASSERT(at == text.size(), text);
}

// The whole file: its header, and tensors that have to be as many bytes as it says.
void take_safetensors(const std::string& input) {
  const SafetensorsHeader header = parse_safetensors_header(input, std::ssize(input), file);
  const std::string written = write_safetensors_header(header);
  const std::int64_t data = std::ssize(input) - header.data_begin;
  const SafetensorsHeader again = parse_safetensors_header(written, std::ssize(written) + data, "written");
  PARPLAN_ASSERT(again.metadata == header.metadata && again.entries.size() == header.entries.size(), written);
}

void take_weight_index(const std::string& input) {
  for (const std::string& name : read_weight_index(input, file))
    PARPLAN_ASSERT(!name.empty() && name.find('/') == std::string::npos, name);
}

void take_checkpoint_index(const std::string& input) {
  const std::string written = write_index(read_index(input, file));
  PARPLAN_ASSERT(write_index(read_index(written, "written")) == written, written);
}

void take_calibration(const std::string& input) {
  const std::string written = write_calibration(read_calibration(YamlNode::parse(input, file)));
  PARPLAN_ASSERT(write_calibration(read_calibration(YamlNode::parse(written, "written"))) == written, written);
}

void take_training_log(const std::string& input) {
  const LoggedSteps steps = read_training_log(input, file, {.global_batch = 8, .sequence_length = 128, .devices = 2});
  PARPLAN_ASSERT(steps.lines > 0 && steps.low <= steps.median && steps.median <= steps.high,
                 fmt::format("{} lines", steps.lines));
}

constexpr std::array target_rows = {
    Target{"model", take_model},
    Target{"huggingface", take_huggingface},
    Target{"device", take_device},
    Target{"cluster", take_cluster},
    Target{"smi_topology", take_smi_topology},
    Target{"nccl_topology", take_nccl_topology},
    Target{"nccl_graphs", take_nccl_graphs},
    Target{"plan", take_plan},
    Target{"csv", take_csv},
    Target{"safetensors", take_safetensors},
    Target{"weight_index", take_weight_index},
    Target{"checkpoint_index", take_checkpoint_index},
    Target{"calibration", take_calibration},
    Target{"training_log", take_training_log},
};

}  // namespace

std::span<const Target> targets() { return target_rows; }

const Target& find_target(std::string_view name) {
  std::vector<std::string> names;
  for (const Target& target : target_rows) {
    if (target.name == name) return target;
    names.emplace_back(target.name);
  }
  throw ConfigError(fmt::format("unknown target '{}'; allowed: {}", name, join(names)));
}

Verdict take_input(const Target& target, const std::string& input) {
  try {
    target.take(input);
    return Verdict::taken;
  } catch (const ConfigError& error) {
    const std::string_view message = error.what();
    const std::size_t at = message.find("error: ");
    PARPLAN_ASSERT(at != std::string_view::npos && at + 7 < message.size(),
                   fmt::format("a refusal says '{}'", message));
    return Verdict::refused;
  }
}

}  // namespace parplan::fuzz
