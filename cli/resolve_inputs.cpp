#include "cli/resolve_inputs.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ostream.h>

#include "cli/data_folder.h"
#include "cli/local_machine.h"
#include "cli/model_graph.h"
#include "cli/version.h"
#include "models/find_model.h"
#include "planner/base/file.h"
#include "planner/base/text.h"
#include "planner/base/yaml.h"
#include "planner/cluster/cluster_calibration.h"
#include "planner/cluster/price_and_power.h"
#include "planner/graph/counting_limit.h"
#include "planner/graph/engine_file.h"
#include "planner/graph/trained_file.h"
#include "planner/parallel/engine_layouts.h"
#include "planner/parallel/pipeline.h"
#include "planner/parallel/techniques.h"
#include "planner/parallel/zero.h"
#include "planner/report/error_band.h"
#include "planner/report/plan_row.h"

namespace parplan {
namespace {

constexpr std::int64_t gpu_global_batch = 512;
// Few models are pre-trained at the length to which their context was extended later.
constexpr std::int64_t gpu_sequence = 8192;
constexpr std::int64_t cpu_sequence = 256;
constexpr std::int64_t cpu_sequences_per_device = 4;

// The environment's variables that restrict this machine's visible devices.
VisibilityVariables visibility_of_environment() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  };
  return {.cuda_visible_devices = variable("CUDA_VISIBLE_DEVICES"),
          .cuda_device_order = variable("CUDA_DEVICE_ORDER"),
          .ze_affinity_mask = variable("ZE_AFFINITY_MASK"),
          .ze_flat_device_hierarchy = variable("ZE_FLAT_DEVICE_HIERARCHY")};
}

TrainingSpec default_training(const Cluster& cluster, const ModelSpec& model) {
  TrainingSpec training;
  const bool cpu = cluster.backend() == BackendKind::cpu;
  training.precision = default_precision(cluster);
  training.sequence_length = std::min(cpu ? cpu_sequence : gpu_sequence, model.context);
  if (reads_images(model)) training.sequence_length = tokens_of_image(model);  // no other
  training.global_batch = cpu ? cpu_sequences_per_device * cluster.devices() : gpu_global_batch;
  return training;
}

}  // namespace

DataType default_precision(const Cluster& cluster) {
  if (!is_accelerator(cluster.backend())) return DataType::fp32;
  for (const DataType half : {DataType::bf16, DataType::fp16})
    if (has_units(cluster, half)) return half;
  return DataType::fp32;
}

PrecisionOf precision_of(const std::vector<std::string>& defaults) {
  if (std::ranges::find(defaults, "precision") == defaults.end()) return nullptr;
  return default_precision;
}

Cluster resolve_cluster(const WhereArguments& where, Terminal& terminal, const OutputArguments& output) {
  Cluster cluster;
  ClusterOptions options = where.options;
  options.device_ids = where.device_ids;
  options.environment = visibility_of_environment();
  if (where.cluster) {
    if (where.measure_again)
      throw ConfigError(fmt::format(
          "--measure-again measures this machine, and --cluster {} is given; leave one of them out", *where.cluster));
    cluster = find_cluster(*where.cluster, cluster_catalog(), options);
  } else {
    if (where.options.device || where.options.network)
      throw ConfigError(
          fmt::format("{} completes a topology (text of nvidia-smi topo -m, XML of NCCL); give that with --cluster",
                      where.options.device ? "--device" : "--network"));
    if (where.options.nodes.value_or(1) > 1)
      throw ConfigError(
          fmt::format("--nodes {}: this machine is one node; give --cluster for others", *where.options.nodes));
    const auto say = [&](const std::string& text) {
      if (!output.quiet) terminal.err << text << '\n';
    };
    cluster = local_machine(where.measure_again ? LocalNumbers::measure : LocalNumbers::cached, say);
    if (const int devices = where.options.devices.value_or(cluster.devices()); devices > cluster.devices())
      throw ConfigError(fmt::format("--devices {}: this machine has {} usable core{}; give --cluster for others",
                                    devices, cluster.devices(), cluster.devices() == 1 ? "" : "s"));
    choose_devices(cluster, options);
  }
  set_price(cluster, where.price);
  return cluster;
}

std::string calibrate(Cluster& cluster, Engine& engine, const std::string& file) {
  const ClusterCalibration calibration = read_calibration(YamlNode::load(file));
  try {
    calibrate(cluster, engine, calibration);
  } catch (const ConfigError& error) {
    throw ConfigError({file}, message_of(error));
  }
  if (calibration.engine == engine.name) return "";
  return fmt::format("steps of {} were measured, and {} is predicted: what one's kernels do better than the other's is "
                     "in the shares",
                     calibration.engine, engine.name);
}

void set_price(Cluster& cluster, const std::optional<Price>& price) {
  if (price)
    for (NodeGroup& group : cluster.groups) group.price = price;
  if (const auto problem = problem_with_prices(cluster)) throw ConfigError(*problem);
  if (const auto missing = missing_prices(cluster);
      missing && std::ranges::find(cluster.notes, *missing) == cluster.notes.end())
    cluster.notes.push_back(*missing);
}

// Options of adapters ask for adapters. `--trainable all` asks for none, whatever the model says,
// and `--trainable lora` for PEFT's if it says nothing.
void choose_trained(const WhatArguments& what, TrainingSpec& training) {
  const bool adapts = what.lora_r || what.lora_alpha || what.target_modules;
  const bool adapters_alone = what.trainable && !what.trainable->all && what.trainable->patterns.empty();
  if (what.trainable && what.trainable->all && !adapts) training.lora.reset();
  if ((adapts || adapters_alone) && !training.lora) {
    training.lora.emplace();
    training.trainable = {.all = false, .patterns = {}};
  }
  if (what.trainable) training.trainable = *what.trainable;
  if (what.lora_r) training.lora->r = *what.lora_r;
  if (what.lora_alpha) training.lora->alpha = *what.lora_alpha;
  if (what.target_modules) training.lora->target_modules = *what.target_modules;
}

// Names that a file gives are checked where it is read.
void check_trained(const WhatArguments& what, const ModelSpec& model, const TrainingSpec& training) {
  if (!what.trainable && !what.target_modules) return;
  const auto problem = problem_with_trained(model, training);
  if (!problem) return;
  const bool of_lora = problem->of == TrainedProblem::Of::target_modules;
  throw ConfigError(fmt::format("{}: {}", of_lora ? "--target-modules" : "--trainable", problem->message));
}

TrainingSpec choose_training(const Cluster& cluster, const ModelFile& model, const WhatArguments& what,
                             std::vector<std::string>& defaults) {
  TrainingSpec training = with_overrides(default_training(cluster, model.spec), model.training);
  const auto choose = [&](const char* field, auto& value, const auto& given, bool from_file) {
    if (given) value = *given;
    else if (!from_file) defaults.push_back(field);
  };
  const TrainingOverrides& file = model.training;
  choose("global_batch", training.global_batch, what.global_batch, file.global_batch.has_value());
  choose("sequence_length", training.sequence_length, what.sequence_length, file.sequence_length.has_value());
  if (what.precision) state_precision(training, *what.precision);
  else if (!file.precision) defaults.emplace_back("precision");
  choose("optimizer", training.optimizer, what.optimizer, file.optimizer.has_value());
  if (!file.momentum) training.momentum = training.optimizer == Optimizer::muon ? default_muon_momentum : 0.0;
  training.engine = find_engine(what.engine, engines_folder());
  if (training.fp8)
    if (const auto reason = lacks_fp8(cluster, training.engine)) throw ConfigError(*reason);
  if (const auto reason = lacked_by_engine(training.engine, training.optimizer)) throw ConfigError(*reason);
  choose_trained(what, training);
  return training;
}

std::string note_on_length(const ModelSpec& model, const TrainingSpec& training,
                           const std::vector<std::string>& defaults) {
  const bool is_cut = training.sequence_length == gpu_sequence && model.context > gpu_sequence &&
                      std::ranges::find(defaults, "sequence_length") != defaults.end();
  if (!is_cut) return "";
  return fmt::format("sequences of {} tokens by default, and its context is {}; --seq-len gives another length",
                     gpu_sequence, model.context);
}

Inputs resolve_inputs(const std::string& model, const WhereArguments& where, const WhatArguments& what,
                      Terminal& terminal, const OutputArguments& output) {
  Inputs inputs;
  inputs.model = load_model(model, zoo_folder());
  if (!output.quiet)
    for (const std::string& note : inputs.model.notes) fmt::print(terminal.err, "note: {}: {}\n", model, note);
  inputs.cluster = resolve_cluster(where, terminal, output);
  inputs.training = choose_training(inputs.cluster, inputs.model, what, inputs.defaults);
  keep_kernels_of(inputs.training.engine, inputs.cluster);
  if (where.calibration)
    if (const std::string note = calibrate(inputs.cluster, inputs.training.engine, *where.calibration);
        !note.empty() && !output.quiet)
      fmt::print(terminal.err, "note: {}: {}\n", *where.calibration, note);
  if (!output.quiet)
    for (const std::string& note : inputs.cluster.notes)
      fmt::print(terminal.err, "note: {}: {}\n", inputs.cluster.name, note);
  if (const BackendRow& backend = row_of(inputs.cluster.backend()); !output.quiet && !backend.runs)
    fmt::print(terminal.err,
               "note: {}: planned only, for parplan runs nothing on {}; {} is taken to communicate as NCCL does\n",
               inputs.cluster.name, backend.runtime, backend.collectives);
  if (const std::string note = rates_of_loops(inputs.cluster, stated_precision(inputs.training));
      !output.quiet && !note.empty())
    fmt::print(terminal.err, "note: {}: {}\n", inputs.cluster.name, note);
  if (const std::string note = note_on_length(inputs.model.spec, inputs.training, inputs.defaults);
      !note.empty() && !output.quiet)
    fmt::print(terminal.err, "note: {}: {}\n", model, note);
  check_trained(what, inputs.model.spec, inputs.training);
  inputs.graph = graph_of(inputs.model.spec, inputs.training);
  return inputs;
}

void limit_memory(Cluster& cluster, const MemoryLimit& limit, Terminal& terminal, const OutputArguments& output) {
  const std::string had = device_memory(cluster);
  if (limit.bytes && std::ranges::none_of(cluster.groups, [&](const NodeGroup& group) {
        return group.device.memory_capacity >= *limit.bytes;
      }))
    throw ConfigError(
        fmt::format("--memory-limit: a device of cluster '{}' has {}, found {}; give less, or a percentage",
                    cluster.name, had, format_bytes(*limit.bytes)));
  bool limits = false;
  for (NodeGroup& group : cluster.groups) {
    Bytes& capacity = group.device.memory_capacity;
    const Bytes allowed = limit.bytes
                              ? std::min(*limit.bytes, capacity)
                              : Bytes(static_cast<std::int64_t>(static_cast<double>(capacity.count) * limit.share));
    limits = limits || allowed < capacity;
    capacity = allowed;
  }
  if (!limits) return;
  cluster.notes.push_back(fmt::format("memory limited to {} of a device's {}", device_memory(cluster), had));
  if (!output.quiet) fmt::print(terminal.err, "note: {}: {}\n", cluster.name, cluster.notes.back());
}

void leave_headroom(Cluster& cluster, const Engine& engine, const std::optional<double>& given, bool is_limited) {
  if (given)
    cluster.memory_headroom = *given;
  else if (cluster.memory_headroom == 0.0 && !is_limited)
    cluster.memory_headroom = memory_headroom(engine, cluster);
}

SuggestRequest request_of(const Inputs& inputs, const LayoutRequest& layout) {
  SuggestRequest request;
  request.graph = &inputs.graph;
  request.model_text = write_model(inputs.model.spec);
  request.model_name = inputs.model.spec.name;
  request.cluster = inputs.cluster;
  request.training = inputs.training;
  request.precision_of = precision_of(inputs.defaults);
  request.layout = layout;
  return request;
}

void check_layout(const Inputs& inputs, const LayoutRequest& layout, const WhereArguments& where) {
  check_layout(inputs.graph, inputs.training, inputs.cluster, layout, where);
}

void check_layout(const OpGraph& graph, const TrainingSpec& training, const Cluster& cluster,
                  const LayoutRequest& layout, const WhereArguments& where) {
  if (const auto reason = beyond_counting(graph, training)) throw ConfigError(*reason);
  const int devices = cluster.devices();
  std::vector<std::string> given_degrees;
  for (const ChoiceRow& row : choice_rows())
    if (row.axis && layout[row.choice])
      given_degrees.push_back(fmt::format("{} {}", row.key, write_value(*layout[row.choice])));
  const std::string given = join(given_degrees, " x ");
  const std::int64_t product = product_of_degrees(layout);
  if (product > devices)
    throw ConfigError(fmt::format(
        "the layout needs {} devices ({}); the cluster has {}; lower a degree, or give more with --devices or --nodes",
        product, given, devices));
  if (gives_every_degree(layout) && where.options.devices && product != devices)
    throw ConfigError(fmt::format(
        "the layout takes {} devices ({}), and --devices asks for {}; make them equal, or leave one part out", product,
        given, devices));
  if (const auto reason = lacked_by_engine(training.engine, layout)) throw ConfigError(*reason);
  if (layout[Choice::recompute_layers] && layout[Choice::recompute] == ChoiceValue(Recompute::none))
    throw ConfigError("--recompute-layers says how many layers of each stage recompute, and --recompute is none; leave "
                      "one out");
  if (const auto offload = parplan::given<Offload>(layout, Choice::offload);
      layout[Choice::offload_layers] && offload && offload->activations == Home::device)
    throw ConfigError(
        fmt::format("--offload-layers says of how many layers of each stage activations leave the device, and "
                    "--offload is {}; leave --offload-layers out, or add activations to --offload",
                    name(*offload)));
  // What is gathered follows from ZeRO alone, whatever number of replicas is chosen.
  ParallelSpec replicated = with_given(layout);
  if (!layout[Choice::dp]) replicated.mesh.degree.dp = 2;
  replicated.mesh.dp_shard = 0;
  if (layout[Choice::zero_stage])
    if (const auto reason = illegal_zero(graph, training, replicated)) throw ConfigError(*reason);
  // Options that are not given may still be chosen so that these are legal.
  LayoutRequest judged = with_implied(training.engine, layout);
  for (const ChoiceRow& row : choice_rows())
    if (row.presumes && !judged[*row.presumes]) judged[row.choice].reset();
  ParallelSpec fewest = with_given(judged, training);
  // A search takes groups that the number of micro-batches allows.
  if (fewest.schedule == ScheduleKind::interleaved && !layout[Choice::micro_batch_group] &&
      training.engine.has_other_groups && fewest.replica_micro_batches.empty() &&
      training.global_batch % (fewest.mesh.batch_ranks() * fewest.micro_batch) == 0)
    fewest.micro_batch_group =
        static_cast<int>(smallest_group(micro_batches(fewest, training), fewest.pp()).value_or(0));
  if (const auto reason = illegal_technique(graph, training, fewest)) throw ConfigError(*reason);
  // With as few micro-batches as what is not given allows.
  if (!layout[Choice::dp]) fewest.mesh.degree.dp = std::max(devices / fewest.mesh.size(), 1);
  if (!layout[Choice::micro_batch])
    fewest.micro_batch = std::max<std::int64_t>(training.global_batch / fewest.mesh.batch_ranks(), 1);
  if (const auto reason = too_many_calls(training, fewest)) throw ConfigError(*reason);
}

ReportInputs report_inputs(const Inputs& inputs) {
  return {.version = version(),
          .model = {.name = inputs.model.spec.name,
                    .parameters = parameter_count(inputs.graph),
                    .flops_per_sample = model_flops_per_sample(inputs.graph)},
          .cluster = inputs.cluster,
          .training = inputs.training,
          .defaults = inputs.defaults};
}

ReportInputs report_inputs(const Plan& plan) {
  return {
      .version = version(), .model = plan.model, .cluster = plan.cluster, .training = plan.training, .defaults = {}};
}

std::string describe_inputs(const ReportInputs& inputs) {
  const Cluster& cluster = inputs.cluster;
  const TrainingSpec& training = inputs.training;
  const auto marked = [&](const std::string& value, const char* field) {
    return value + (std::ranges::find(inputs.defaults, field) != inputs.defaults.end() ? " (default)" : "");
  };
  std::string text = fmt::format("model     {}: {} parameters\n", inputs.model.name, inputs.model.parameters);
  const std::string measured = (cluster.measured_on ? ", measured " + *cluster.measured_on : "") +
                               (cluster.calibrated ? ", calibrated: " + *cluster.calibrated : "");
  if (cluster.groups.size() == 1) {
    text += fmt::format("cluster   {}: {} x {}, {} node{} of {}{}\n", cluster.name, cluster.devices(),
                        device_name(cluster), cluster.nodes(), cluster.nodes() == 1 ? "" : "s",
                        cluster.groups.front().devices_per_node(), measured);
  } else {
    text += fmt::format("cluster   {}: {} devices, {}{}\n", cluster.name, cluster.devices(), describe_groups(cluster),
                        measured);
  }
  text += fmt::format("training  global batch {}, sequence length {}, precision {}, optimizer {}\n",
                      marked(fmt::format("{}", training.global_batch), "global_batch"),
                      marked(fmt::format("{}", training.sequence_length), "sequence_length"),
                      marked(name(stated_precision(training)), "precision"),
                      marked(name(training.optimizer), "optimizer"));
  if (training.lora || !training.trainable.all) text += fmt::format("trained   {}\n", describe_trained(training));
  if (!is_own(training.engine)) text += fmt::format("engine    {}: {}\n", training.engine.name, training.engine.title);
  return text;
}

}  // namespace parplan
