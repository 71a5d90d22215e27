#include "planner/plan/plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <sstream>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/base/error.h"
#include "planner/base/text.h"
#include "planner/base/yaml.h"
#include "planner/cluster/host_share.h"
#include "planner/cluster/price_and_power.h"
#include "planner/graph/engine_file.h"
#include "planner/graph/trained_file.h"
#include "planner/plan/layout.h"
#include "planner/plan/layout_choices.h"
#include "planner/plan/unlike_replicas.h"

namespace parplan {
namespace {

constexpr std::string_view plan_schema = "parplan.plan/1";
constexpr const char* devices_key = "devices";  // of a layout, whose other keys are those of choices

// Plain numbers with the unit in the key, with the same names as in the JSON rows, so that they are
// read back to the last bit.
struct TimeKey {
  const char* key;
  Seconds StepTime::*part;
};
// Communication over an axis has its own keys: exposed_key, communication_key.
constexpr std::array<TimeKey, 2> time_keys_before = {{
    {"time_compute_s", &StepTime::compute},
    {"time_recompute_s", &StepTime::recompute},
}};
constexpr std::array<TimeKey, 2> time_keys_behind = {{
    {"time_bubble_s", &StepTime::bubble},
    {"time_optimizer_s", &StepTime::optimizer},
}};
constexpr const char* replica_key = "memory_replica";  // only where it is not the first
constexpr const char* host_key = "memory_host_bytes";  // the same
constexpr const char* nvme_key = "memory_nvme_bytes";  // the same
constexpr const char* offload_key = "time_offload_s";  // only where there is some
std::string exposed_key(Axis axis) {
  return fmt::format("time_{}_exposed_s", name(axis));
}
std::string communication_key(Axis axis) {
  return fmt::format("communication_{}_bytes", name(axis));
}

struct MemoryKey {
  const char* key;
  Bytes MemoryUse::*part;
};
constexpr std::array<MemoryKey, 6> memory_keys = {{
    {"memory_parameters_bytes", &MemoryUse::parameters},
    {"memory_gradients_bytes", &MemoryUse::gradients},
    {"memory_optimizer_bytes", &MemoryUse::optimizer},
    {"memory_activations_bytes", &MemoryUse::activations},
    {"memory_buffers_bytes", &MemoryUse::buffers},
    {"memory_overhead_bytes", &MemoryUse::overhead},
}};

constexpr const char* reserve_key = "memory_reserve_bytes";  // only where an engine's allocator keeps some

std::string residual_key(Axis axis) {
  return fmt::format("residual_over_{}", name(axis));
}
std::string parameters_key(Axis axis) {
  return fmt::format("parameters_over_{}", name(axis));
}
// The axes over which a file always says where activations and parameters lie. Over the context
// axis, parameters are whole.
std::vector<Axis> planned_parameter_axes() {
  std::vector<Axis> planned;
  std::ranges::copy_if(parameter_axes, std::back_inserter(planned), is_planned);
  return planned;
}
bool took_part(const StepResult& result, Axis axis) {
  return result.time.exposed[axis].value > 0.0 || result.communication[axis].count > 0;
}
struct DataAxisKey {
  const char* key;
  TensorLayout StateLayout::*layout;
  int from_zero_stage;  // FlatShard from this ZeRO stage on
};
constexpr std::array<DataAxisKey, 3> data_axis_keys = {{
    {"parameters_over_dp", &StateLayout::parameters, 3},
    {"gradients_over_dp", &StateLayout::gradients, 2},
    {"optimizer_over_dp", &StateLayout::optimizer, 1},
}};

constexpr std::array backends = {BackendKind::cpu, BackendKind::cuda, BackendKind::rocm, BackendKind::oneapi,
                                 BackendKind::synapse};
constexpr std::array learning_rate_schedules = {LearningRateSchedule::constant, LearningRateSchedule::cosine,
                                                LearningRateSchedule::linear};
constexpr std::array objectives = {Objective::time, Objective::cost, Objective::memory};

// ---- writing ----

std::string number(double value) {
  PARPLAN_ASSERT(std::isfinite(value), fmt::format("value {}", value));
  std::string text = fmt::format("{}", value);  // the shortest text that reads back to the same bits
  // YAML 1.1 readers such as PyYAML take "1e-08" as text; "1.0e-08" is a number to all.
  if (const std::size_t exponent = text.find('e'); exponent != std::string::npos && text.find('.') == std::string::npos)
    text.insert(exponent, ".0");
  return text;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\')
      out += fmt::format("\\{}", c);
    else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    else
      out += c;
  }
  return out + '"';
}

std::string indented(const std::string& text, int spaces) {
  std::string out;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    out += line.empty() ? "\n" : std::string(static_cast<std::size_t>(spaces), ' ') + line + '\n';
  return out;
}

// `key:` with the text as it is, readable and editable; quoted where a literal block would not give
// it back exactly.
std::string literal_block(const std::string& key, const std::string& text) {
  const bool indents = !text.empty() && (text[0] == ' ' || text[0] == '\t' || text[0] == '\n');
  const bool ends_line = !text.empty() && text.back() == '\n';
  const bool ends_empty_line = text.size() > 1 && text.ends_with("\n\n");
  const std::string block = fmt::format("{}: |{}{}\n{}", key, indents ? "2" : "",
                                        ends_empty_line ? "+"
                                        : ends_line     ? ""
                                                        : "-",
                                        indented(text, 2));
  const auto gives_back = [&] {
    try {
      return YamlNode::parse(block, "").at(key).as_string() == text;
    } catch (const ConfigError&) {
      return false;
    }
  };
  return gives_back() ? block : fmt::format("{}: {}\n", key, quoted(text));
}

std::string write_model_summary(const ModelSummary& model) {
  return fmt::format("name: {}\nparameters: {}\nflops_per_sample: {}\n", quoted(model.name), model.parameters,
                     number(model.flops_per_sample.value));
}

std::string write_training(const TrainingSpec& t) {
  std::string out;
  const auto line = [&](const char* key, const std::string& value) { out += fmt::format("{}: {}\n", key, value); };
  line("global_batch", fmt::format("{}", t.global_batch));
  line("sequence_length", fmt::format("{}", t.sequence_length));
  line("precision", name(stated_precision(t)));
  line("optimizer", name(t.optimizer));
  line("learning_rate", number(t.learning_rate));
  line("learning_rate_schedule", name(t.schedule));
  line("warmup_steps", fmt::format("{}", t.warmup_steps));
  line("decay_steps", fmt::format("{}", t.decay_steps));
  line("final_learning_rate", number(t.final_learning_rate));
  line("beta1", number(t.beta1));
  line("beta2", number(t.beta2));
  line("epsilon", number(t.epsilon));
  line("weight_decay", number(t.weight_decay));
  line("momentum", number(t.momentum));
  line("clip_norm", number(t.clip_norm));
  line("seed", fmt::format("{}", t.seed));
  out += write_trained(t);
  if (!is_own(t.engine)) out += "engine:\n" + indented(write_engine_of_plan(t.engine), 2);
  return out;
}

std::string write_layout(const ParallelSpec& spec, const TrainingSpec& training) {
  std::string out = fmt::format("{}: {}\n", devices_key, spec.mesh.size());
  for (const ChoiceRow& row : choice_rows()) {
    if (row.may_be_absent && row.get(spec) == row.get(ParallelSpec{})) continue;
    out += fmt::format("{}: {}\n", row.key, write_value(row.get(spec)));
    if (!row.companion.write) continue;
    if (const auto companion = row.companion.write(spec, training))
      out += fmt::format("{}: {}\n", row.companion.key, *companion);
  }
  return out;
}

std::string write_placements(const Placements& placements) {
  std::string out;
  for (const Axis axis : planned_parameter_axes())
    out += fmt::format("{}: {}\n", residual_key(axis), write_placement(placements.residual[axis]));
  if (placements.residual.cp != replicate())
    out += fmt::format("{}: {}\n", residual_key(Axis::cp), write_placement(placements.residual.cp));
  for (const DataAxisKey& row : data_axis_keys)
    out += fmt::format("{}: {}\n", row.key, write_placement((placements.state.*row.layout).dp));
  for (const Axis axis : planned_parameter_axes()) {
    out += fmt::format("{}:{}\n", parameters_key(axis), placements.parameters.empty() ? " {}" : "");
    for (const auto& [parameter, layout] : placements.parameters)
      out += fmt::format("  {}: {}\n", quoted(parameter), write_placement(layout[axis]));
  }
  return out;
}

std::string write_schedule(const Schedule& schedule) {
  std::string out;
  for (const std::vector<Action>& rank : schedule.ranks) {
    std::vector<std::string> words;
    for (const Action& action : rank) words.push_back(write_action(action));
    out += fmt::format("- \"{}\"\n", join(words, " "));
  }
  return out;
}

std::string write_result(const StepResult& result) {
  std::string out =
      fmt::format("# step {}, peak {}\n", format_duration(result.time.total()), format_bytes(result.memory.peak()));
  const auto time = [&](std::string_view key, Seconds part) {
    out += fmt::format("{}: {}\n", key, number(part.value));
  };
  for (const TimeKey& row : time_keys_before) time(row.key, result.time.*row.part);
  for (const Axis axis : inner_axes_first)
    if (is_planned(axis) && (!may_be_unnamed(axis) || took_part(result, axis)))
      time(exposed_key(axis), result.time.exposed[axis]);
  for (const TimeKey& row : time_keys_behind) time(row.key, result.time.*row.part);
  if (result.time.offload.value > 0.0) time(offload_key, result.time.offload);
  for (const MemoryKey& row : memory_keys) out += fmt::format("{}: {}\n", row.key, (result.memory.*row.part).count);
  if (result.memory.reserve.count > 0) out += fmt::format("{}: {}\n", reserve_key, result.memory.reserve.count);
  if (result.memory.host.count > 0) out += fmt::format("{}: {}\n", host_key, result.memory.host.count);
  if (result.memory.nvme.count > 0) out += fmt::format("{}: {}\n", nvme_key, result.memory.nvme.count);
  out += fmt::format("memory_stage: {}\n", result.memory_stage);
  if (result.memory_replica > 0) out += fmt::format("{}: {}\n", replica_key, result.memory_replica);
  for (const Axis axis : inner_axes_first)
    if (is_planned(axis) && (!may_be_unnamed(axis) || took_part(result, axis)))
      out += fmt::format("{}: {}\n", communication_key(axis), result.communication[axis].count);
  return out;
}

// ", options: [a, b]"; empty without any.
std::string write_options(const std::vector<std::string>& options) {
  if (options.empty()) return "";
  std::vector<std::string> all;
  for (const std::string& option : options) all.push_back(quoted(option));
  return fmt::format(", options: [{}]", fmt::join(all, ", "));
}

std::string write_search(const SearchCounts& search) {
  std::string out = fmt::format(
      "objective: {}\n{}candidates: {}\ninfeasible_memory: {}\npruned_by_bound: {}\nsimulated: {}\nseconds: "
      "{}\ncertified: {}\ngap: {}\n",
      name(search.objective), search.space.empty() ? "" : fmt::format("space: {}\n", quoted(search.space)),
      search.candidates, search.infeasible_memory, search.pruned_by_bound, search.simulated, number(search.seconds),
      search.certified, search.gap ? number(*search.gap) : "null");
  if (search.cut_gap) out += fmt::format("cut_gap: {}\n", number(*search.cut_gap));
  if (!search.left_out.empty()) out += "left_out:\n";
  for (const LeftOut& one : search.left_out)
    out += fmt::format("  - {{what: {}, gap: {}{}}}\n", quoted(one.what), one.gap ? number(*one.gap) : "null",
                       write_options(one.options));
  return out;
}

// ---- reading ----

template <typename Enum, std::size_t n>
Enum read_choice(const YamlNode& node, const std::array<Enum, n>& values) {
  std::vector<std::string> names;
  for (Enum value : values) names.push_back(name(value));
  return values[node.as_choice(names)];
}

// An error of a parser that knows no place gets the node's.
template <typename Parse>
auto at_place(const YamlNode& node, Parse parse) {
  try {
    return parse(node.as_string());
  } catch (const ConfigError& error) {
    std::string_view message = error.what();
    constexpr std::string_view prefix = "error: ";
    if (!message.starts_with(prefix)) throw;  // the node is no text, and the error says where
    message.remove_prefix(prefix.size());
    node.fail(std::string(message));
  }
}

Placement read_placement(const YamlNode& node) {
  return at_place(node, parse_placement);
}

double read_number(const YamlNode& node) {
  const double value = node.as_number();
  if (value < 0) node.fail(fmt::format("expected a number of at least 0, found {}", value));
  return value;
}

// Above the time that the slowest device that a file may describe takes for the largest model that
// can be counted, and small enough for results computed from it to stay numbers.
constexpr Seconds longest_step(1e30);

Seconds read_time(const YamlNode& node) {
  const Seconds time(read_number(node));
  if (time > longest_step)
    node.fail(fmt::format("expected seconds from 0 to {}, found {}; take the number that parplan wrote, or plan again",
                          longest_step.value, time.value));
  return time;
}

// The bytes of one of several parts that are summed.
Bytes read_part(const YamlNode& node) {
  constexpr std::int64_t most = std::int64_t{1} << 60;
  return Bytes(node.as_integer(0, most));
}

int read_int(const YamlNode& node, int minimum, int maximum = std::numeric_limits<int>::max()) {
  return static_cast<int>(node.as_integer(minimum, maximum));
}

ModelSummary read_model_summary(const YamlNode& node) {
  node.allow_keys({"name", "parameters", "flops_per_sample"});
  return {.name = node.at("name").as_name(),
          .parameters = node.at("parameters").as_integer(1),
          .flops_per_sample = Flops(read_number(node.at("flops_per_sample")))};
}

double read_beta(const YamlNode& node) {
  const double value = read_number(node);
  if (value >= 1) node.fail(fmt::format("expected a number of at least 0 and below 1, found {}", value));
  return value;
}

TrainingSpec read_training(const YamlNode& node) {
  node.allow_keys({"global_batch", "sequence_length", "precision", "optimizer", "learning_rate",
                   "learning_rate_schedule", "warmup_steps", "decay_steps", "final_learning_rate", "beta1", "beta2",
                   "epsilon", "weight_decay", "momentum", "clip_norm", "seed", "trainable", "lora", "engine"});
  const auto engine = node.find("engine");
  const TrainedKeys trained = read_trained(node);
  const DataType stated = read_choice(node.at("precision"), all_precisions);
  return {.global_batch = node.at("global_batch").as_integer(1),
          .sequence_length = node.at("sequence_length").as_integer(1),
          .precision = stated == DataType::fp8 ? DataType::bf16 : stated,
          .fp8 = stated == DataType::fp8,
          .optimizer = read_choice(node.at("optimizer"), all_optimizers),
          .learning_rate = read_number(node.at("learning_rate")),
          .schedule = read_choice(node.at("learning_rate_schedule"), learning_rate_schedules),
          .warmup_steps = node.at("warmup_steps").as_integer(0),
          .decay_steps = node.at("decay_steps").as_integer(0),
          .final_learning_rate = read_number(node.at("final_learning_rate")),
          .beta1 = read_beta(node.at("beta1")),
          .beta2 = read_beta(node.at("beta2")),
          .epsilon = read_number(node.at("epsilon")),
          .weight_decay = read_number(node.at("weight_decay")),
          .momentum = read_number(node.at("momentum")),
          .clip_norm = read_number(node.at("clip_norm")),
          .seed = static_cast<std::uint64_t>(node.at("seed").as_integer(0)),
          .engine = engine ? read_engine_of_plan(*engine) : Engine{},
          .trainable = trained.trainable.value_or(Trainable{}),
          .lora = trained.lora};
}

// Reads the value of a choice, which has the type of the choice's default.
struct ValueReader {
  const ChoiceRow& row;
  const YamlNode& node;
  std::int64_t most;

  ChoiceValue operator()(std::int64_t) const { return node.as_integer(row.minimum, most); }
  ChoiceValue operator()(bool) const { return node.as_bool(); }
  ChoiceValue operator()(const AxisOrder&) const { return at_place(node, parse_order); }
  ChoiceValue operator()(const Offload&) const { return at_place(node, parse_offload); }
  ChoiceValue operator()(const std::vector<int>&) const {
    std::vector<int> numbers;
    for (const YamlNode& item : node.items()) numbers.push_back(static_cast<int>(item.as_integer(row.minimum, most)));
    return numbers;
  }
  template <class Named>
  ChoiceValue operator()(Named) const {
    std::vector<ChoiceValue> values = row.named();
    if (row.only_in_plans) std::ranges::copy(row.only_in_plans(), std::back_inserter(values));
    std::vector<std::string> names;
    for (const ChoiceValue& value : values) names.push_back(write_value(value));
    return values[node.as_choice(names)];
  }
};

ParallelSpec read_layout(const YamlNode& node, const TrainingSpec& training, int cluster_devices) {
  std::vector<std::string> keys{devices_key};
  for (const ChoiceRow& row : choice_rows()) {
    keys.emplace_back(row.key);
    if (row.companion.read) keys.emplace_back(row.companion.key);
  }
  node.allow_keys(keys);
  ParallelSpec spec;
  const int devices = read_int(node.at(devices_key), 1);
  const auto read = [&](const ChoiceRow& row) {
    if (row.may_be_absent && !node.find(row.key)) return;
    const YamlNode value = node.at(row.key);
    const std::int64_t most = row.most_in_plan ? row.most_in_plan(training, devices) : row.maximum;
    row.set(spec, std::visit(ValueReader{row, value, most}, row.get(spec)));
    if (const auto fault = row.fault ? row.fault(spec, training) : std::nullopt) value.fail(*fault);
    if (row.companion.read) row.companion.read(node, training, spec);
  };
  std::int64_t product = 1;
  std::vector<std::string> degrees;
  for (const ChoiceRow& row : choice_rows())
    if (row.axis) {
      read(row);
      product *= spec.mesh.degree_of(*row.axis);
      if (!row.may_be_absent || spec.mesh.degree_of(*row.axis) > 1)
        degrees.push_back(fmt::format("{} {}", row.key, spec.mesh.degree_of(*row.axis)));
    }
  if (product != devices)
    node.at(devices_key)
        .fail(fmt::format("{} is {} devices, and devices is {}", join(degrees, " x "), product, devices));
  if (devices > cluster_devices)
    node.at(devices_key)
        .fail(fmt::format("the layout takes {} devices, and the cluster has {}", devices, cluster_devices));
  for (const ChoiceRow& row : choice_rows())
    if (!row.axis) read(row);
  return spec;
}

Placements read_placements(const YamlNode& node, const ParallelSpec& spec) {
  std::vector<std::string> keys;
  for (const Axis axis : planned_parameter_axes()) {
    keys.push_back(residual_key(axis));
    keys.push_back(parameters_key(axis));
  }
  keys.push_back(residual_key(Axis::cp));
  for (const DataAxisKey& row : data_axis_keys) keys.push_back(row.key);
  node.allow_keys(keys);
  Placements placements;
  placements.state.homes = state_homes(spec);
  for (const Axis axis : planned_parameter_axes())
    placements.residual[axis] = read_placement(node.at(residual_key(axis)));
  if (const auto over_context = node.find(residual_key(Axis::cp)); over_context || spec.cp() > 1) {
    const YamlNode value = over_context ? *over_context : node.at(residual_key(Axis::cp));
    placements.residual.cp = read_placement(value);
    const Placement wanted = spec.cp() > 1 ? shard(Dim::sequence) : replicate();
    if (placements.residual.cp != wanted)
      value.fail(fmt::format("with cp {} it is {}, found {}", spec.cp(), write_placement(wanted),
                             write_placement(placements.residual.cp)));
  }
  const Placement residual = spec.sequence_parallel ? shard(Dim::sequence) : replicate();
  if (placements.residual.tp != residual)
    node.at(residual_key(Axis::tp))
        .fail(fmt::format("with sequence_parallel {} it is {}, found {}", spec.sequence_parallel,
                          write_placement(residual), write_placement(placements.residual.tp)));
  for (const DataAxisKey& row : data_axis_keys) {
    const Placement found = (placements.state.*row.layout).dp = read_placement(node.at(row.key));
    const Placement wanted = spec.zero_stage >= row.from_zero_stage ? flat_shard() : replicate();
    if (found != wanted)
      node.at(row.key).fail(fmt::format("with zero_stage {} it is {}, found {}", spec.zero_stage,
                                        write_placement(wanted), write_placement(found)));
  }
  for (const Axis axis : planned_parameter_axes()) {
    const YamlNode parameters = node.at(parameters_key(axis));
    for (const std::string& parameter : parameters.keys()) {
      const YamlNode value = parameters.at(parameter);
      const Placement placement = read_placement(value);
      if (placement.kind != PlacementKind::replicate && placement.kind != PlacementKind::shard)
        value.fail(fmt::format("a parameter over {} is Replicate or Shard(dim), found {}", name(axis),
                               write_placement(placement)));
      placements.parameters[parameter][axis] = placement;
    }
  }
  return placements;
}

// Spaces or commas between actions: a row of PyTorch's CSV is one, too.
std::vector<Action> parse_actions(std::string text) {
  std::ranges::replace(text, ',', ' ');
  std::istringstream words(text);
  std::vector<Action> actions;
  for (std::string word; words >> word;) actions.push_back(parse_action(word));
  return actions;
}

Schedule read_schedule(const YamlNode& node, const ParallelSpec& spec, std::int64_t count) {
  std::vector<std::vector<Action>> ranks;
  for (const YamlNode& rank : node.items()) {
    ranks.push_back(at_place(rank, parse_actions));
    for (const Action& action : ranks.back())
      if (action.stage >= spec.stages())
        rank.fail(fmt::format("{} is an action of stage {}, and {}: stages are numbered from 0 to {}",
                              write_action(action), action.stage, stages_text(spec), spec.stages() - 1));
  }
  if (static_cast<int>(ranks.size()) != spec.pp())
    node.fail(fmt::format("the schedule has {} {}, and pp is {}", ranks.size(),
                          spec.virtual_stages == 1 ? "stages" : "ranks", spec.pp()));
  PipelineShape shape(spec.pp(), spec.stages(), static_cast<int>(count));
  if (spec.micro_batch_group > 0) shape.group = spec.micro_batch_group;
  Schedule schedule{.rank_of_stage = {}, .ranks = std::move(ranks), .exchanges = most_exchange_buffers(shape)};
  for (int stage = 0; stage < shape.stages; ++stage) schedule.rank_of_stage.push_back(rank_of_stage(spec, stage));
  if (const auto fault = find_fault(schedule, static_cast<int>(count))) node.fail(*fault);
  if (const auto fault = unlike_last_backwards(schedule, spec)) node.fail(*fault);
  for (int stage = 0; stage < shape.stages && spec.zero_stage > 1; ++stage)
    if (splits_backward(schedule, stage))
      node.fail(
          fmt::format("stage {} runs backwards in two parts (I and W), which needs whole gradients until the "
                      "second, and zero_stage is {}; legal stages: 0, 1",
                      stage, spec.zero_stage));
  return schedule;
}

StepResult read_result(const YamlNode& node) {
  std::vector<std::string> keys;
  const auto for_each_axis = [](auto visit) {
    for (const Axis axis : inner_axes_first)
      if (is_planned(axis)) visit(axis);
  };
  const auto for_each_time = [&](auto visit) {
    for (const TimeKey& row : time_keys_before) visit(row);
    for (const TimeKey& row : time_keys_behind) visit(row);
  };
  for_each_time([&](const TimeKey& row) { keys.push_back(row.key); });
  for_each_axis([&](Axis axis) { keys.insert(keys.end(), {exposed_key(axis), communication_key(axis)}); });
  for (const MemoryKey& row : memory_keys) keys.push_back(row.key);
  keys.insert(keys.end(), {reserve_key, host_key, nvme_key, "memory_stage", replica_key, offload_key});
  node.allow_keys(keys);
  StepResult result;
  for_each_time([&](const TimeKey& row) { result.time.*row.part = read_time(node.at(row.key)); });
  if (const auto offload = node.find(offload_key)) result.time.offload = read_time(*offload);
  for_each_axis([&](Axis axis) {
    if (!may_be_unnamed(axis) || node.find(exposed_key(axis)))
      result.time.exposed[axis] = read_time(node.at(exposed_key(axis)));
  });
  for (const MemoryKey& row : memory_keys) result.memory.*row.part = read_part(node.at(row.key));
  if (const auto reserve = node.find(reserve_key)) result.memory.reserve = read_part(*reserve);
  if (const auto host = node.find(host_key)) result.memory.host = read_part(*host);
  if (const auto nvme = node.find(nvme_key)) result.memory.nvme = read_part(*nvme);
  if (const auto stage = node.find("memory_stage")) result.memory_stage = read_int(*stage, 0);
  if (const auto replica = node.find(replica_key)) result.memory_replica = read_int(*replica, 0);
  for_each_axis([&](Axis axis) {
    if (!may_be_unnamed(axis) || node.find(communication_key(axis)))
      result.communication[axis] = read_part(node.at(communication_key(axis)));
  });
  return result;
}

SearchCounts read_search(const YamlNode& node) {
  node.allow_keys({"objective", "space", "candidates", "infeasible_memory", "pruned_by_bound", "simulated", "seconds",
                   "certified", "gap", "cut_gap", "left_out"});
  SearchCounts search{.candidates = node.at("candidates").as_integer(0),
                      .infeasible_memory = node.at("infeasible_memory").as_integer(0),
                      .pruned_by_bound = node.at("pruned_by_bound").as_integer(0),
                      .simulated = node.at("simulated").as_integer(0),
                      .seconds = read_number(node.at("seconds")),
                      .certified = node.at("certified").as_bool(),
                      .gap = std::nullopt};
  if (const auto space = node.find("space")) search.space = printable_line(space->as_string());
  if (const auto objective = node.find("objective")) search.objective = read_choice(*objective, objectives);
  if (const auto gap = node.find("gap")) search.gap = read_number(*gap);
  if (const auto gap = node.find("cut_gap")) search.cut_gap = read_number(*gap);
  if (const auto left_out = node.find("left_out"))
    for (const YamlNode& one : left_out->items()) {
      one.allow_keys({"what", "gap", "option", "options"});
      search.left_out.push_back({.what = printable_line(one.at("what").as_string()), .gap = std::nullopt});
      if (const auto gap = one.find("gap")) search.left_out.back().gap = read_number(*gap);
      // `option` is that of plans before several were named.
      std::vector<std::string>& options = search.left_out.back().options;
      if (const auto option = one.find("option")) options.push_back(printable_line(option->as_string()));
      if (const auto given = one.find("options"))
        for (const YamlNode& option : given->items()) options.push_back(printable_line(option.as_string()));
    }
  return search;
}

// The places of a cluster's groups among all, each its own: equal ones are told apart by their
// order. Those that are not among all are added behind.
std::vector<std::size_t> place_groups(const Cluster& cluster, Cluster& all) {
  std::vector<std::size_t> places;
  for (const NodeGroup& group : cluster.groups) {
    std::size_t place = 0;
    while (place < all.groups.size() &&
           (all.groups[place] != group || std::ranges::find(places, place) != places.end()))
      ++place;
    if (place == all.groups.size()) all.groups.push_back(group);
    places.push_back(place);
  }
  return places;
}

// The cluster of an alternative, by the places of its groups among all.
Cluster chosen_groups(const YamlNode& node, const Cluster& all) {
  Cluster chosen = all;
  chosen.groups.clear();
  std::vector<std::int64_t> places;
  for (const YamlNode& item : node.items()) {
    const std::int64_t group = item.as_integer(0);
    if (group >= static_cast<std::int64_t>(all.groups.size()))
      item.fail(fmt::format("group {} of {}: groups of nodes are numbered from 0, those of other_groups behind the "
                            "cluster's",
                            group, all.groups.size()));
    if (std::ranges::find(places, group) != places.end())
      item.fail(fmt::format("group {} a second time: an alternative has the nodes of a group once; leave one out",
                            group));
    places.push_back(group);
    chosen.groups.push_back(all.groups[static_cast<std::size_t>(group)]);
  }
  if (chosen.groups.empty()) node.fail("an alternative is on one group of nodes at least");
  return chosen;
}

// An alternative trains as the plan does, or in what all of its devices have.
void check_precision(const YamlNode& precision, const Plan& plan, const RankedPlan& alternative) {
  const DataType own = stated_precision(alternative.on->training);
  if (own == stated_precision(plan.training)) return;
  for (const NodeGroup& group : groups_in_use(alternative.on->cluster, alternative.spec.mesh.size()))
    if (!has_units(group.device, own))
      precision.fail(fmt::format("{} has no units for {}; expected a precision that all devices of the alternative "
                                 "have, or the plan's own, {}",
                                 group.device.name, name(own), name(stated_precision(plan.training))));
}

TrainingSpec with_precision(const YamlNode& node, TrainingSpec training) {
  state_precision(training, read_choice(node, all_precisions));
  return training;
}

int sum(const std::vector<int>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), 0);
}

}  // namespace

std::string describe_devices(const Plan& plan, const RankedPlan& other) {
  const DataType precision = training_of(plan, other).precision;
  return describe_groups(first_nodes(cluster_of(plan, other), other.spec.mesh.size())) +
         (precision == plan.training.precision ? "" : fmt::format(", in {}", name(precision)));
}

std::string plan_id(const ModelSummary& model, const TrainingSpec& training, const ParallelSpec& spec) {
  // FNV-1a, 64 bits folded to 32 (Fowler, Noll, Vo; draft-eastlake-fnv).
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : write_model_summary(model) + write_training(training) + write_layout(spec, training)) {
    hash ^= static_cast<unsigned char>(c);
    hash *= 0x100000001b3u;
  }
  return fmt::format("{:08x}", static_cast<std::uint32_t>(hash ^ (hash >> 32)));
}

std::string write_plan(const Plan& plan) {
  std::string out = "# Written by parplan; docs/plan.md says what everything means.\n";
  const auto section = [&](const char* key, const std::string& body) {
    out += fmt::format("{}:\n{}", key, indented(body, 2));
  };
  out += fmt::format("schema: {}\n", plan_schema);
  out += fmt::format("plan_id: \"{}\"\n", plan_id(plan.model, plan.training, plan.spec));
  out += fmt::format("backend: {}\n", name(plan.cluster.backend()));
  section("layout", write_layout(plan.spec, plan.training));
  section("prediction", write_result(plan.prediction));
  section("training", write_training(plan.training));
  section("placements", write_placements(plan.placements));
  section("schedule", write_schedule(plan.schedule));
  section("search", write_search(plan.search));
  if (plan.notes.empty())
    out += "notes: []\n";
  else
    out += "notes:\n";
  for (const std::string& note : plan.notes) out += fmt::format("  - {}\n", quoted(note));
  if (plan.alternatives.empty())
    out += "alternatives: []\n";
  else
    out += "alternatives:\n";
  Cluster all = plan.cluster;
  for (const RankedPlan& alternative : plan.alternatives) {
    out += "  - layout:\n" + indented(write_layout(alternative.spec, plan.training), 6);
    out += "    prediction:\n" + indented(write_result(alternative.result), 6);
    if (!alternative.on) continue;
    out += fmt::format("    groups: [{}]\n", fmt::join(place_groups(alternative.on->cluster, all), ", "));
    out += fmt::format("    precision: {}\n", name(stated_precision(alternative.on->training)));
  }
  section("model_summary", write_model_summary(plan.model));
  out += literal_block("model", plan.model_text);
  section("cluster", write_cluster(plan.cluster));
  if (all.groups.size() > plan.cluster.groups.size()) {
    Cluster others = all;
    others.groups.erase(others.groups.begin(),
                        others.groups.begin() + static_cast<std::ptrdiff_t>(plan.cluster.groups.size()));
    section("other_groups", write_cluster(others));
  }
  return out;
}

Plan read_plan(const std::string& text, const std::string& file_name) {
  const YamlNode root = YamlNode::parse(text, file_name);
  // Checked first, so that a file of another kind or version is reported as such.
  if (const YamlNode schema = root.at("schema"); schema.as_string() != plan_schema)
    schema.fail(fmt::format("expected schema '{}', found '{}'", plan_schema, schema.as_string()));
  root.allow_keys({"schema", "plan_id", "backend", "layout", "prediction", "training", "placements", "schedule",
                   "search", "notes", "alternatives", "model_summary", "model", "cluster", "other_groups"});
  Plan plan;
  plan.model = read_model_summary(root.at("model_summary"));
  plan.model_text = root.at("model").as_string();
  plan.cluster = read_cluster(root.at("cluster"));
  if (const BackendKind found = read_choice(root.at("backend"), backends); found != plan.cluster.backend())
    root.at("backend").fail(fmt::format("backend is {}, and the cluster's {} has backend {}", name(found),
                                        device_name(plan.cluster), name(plan.cluster.backend())));
  plan.training = read_training(root.at("training"));
  plan.spec = read_layout(root.at("layout"), plan.training, plan.cluster.devices());
  if (const auto reason = lacks_homes(first_nodes(plan.cluster, plan.spec.mesh.size()), plan.spec.offload))
    root.at("cluster").fail(*reason);
  plan.placements = read_placements(root.at("placements"), plan.spec);
  plan.schedule = read_schedule(root.at("schedule"), plan.spec, micro_batches(plan.spec, plan.training));
  plan.prediction = read_result(root.at("prediction"));
  plan.search = read_search(root.at("search"));
  for (const YamlNode& note : root.at("notes").items()) plan.notes.push_back(note.as_string());
  Cluster all = plan.cluster;
  if (const auto others = root.find("other_groups")) {
    const Cluster read = read_cluster(*others);
    all.groups.insert(all.groups.end(), read.groups.begin(), read.groups.end());
  }
  for (const YamlNode& item : root.at("alternatives").items()) {
    item.allow_keys({"layout", "prediction", "groups", "precision"});
    const YamlNode layout = item.at("layout");
    RankedPlan& alternative = plan.alternatives.emplace_back();
    if (const auto groups = item.find("groups"))
      alternative.on = OtherDevices{.cluster = chosen_groups(*groups, all),
                                    .training = with_precision(item.at("precision"), plan.training)};
    else if (const auto precision = item.find("precision"))
      precision->fail("an alternative on the plan's own groups has the plan's precision; name its groups, too");
    alternative.spec =
        read_layout(layout, training_of(plan, alternative), cluster_of(plan, alternative).devices());
    alternative.result = read_result(item.at("prediction"));
    if (alternative.on) check_precision(item.at("precision"), plan, alternative);
    if (sum(alternative.spec.stage_blocks) != sum(plan.spec.stage_blocks))
      layout.at("stage_blocks")
          .fail(fmt::format("the stages hold {} blocks, and the plan's own hold {}", sum(alternative.spec.stage_blocks),
                            sum(plan.spec.stage_blocks)));
  }
  return plan;
}

}  // namespace parplan
