#include "planner/plan/layout_choices.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <limits>
#include <numeric>
#include <system_error>
#include <type_traits>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/base/error.h"
#include "planner/base/text.h"
#include "planner/plan/parallel_spec_text.h"

namespace parplan {
namespace {

constexpr std::int64_t most_devices = std::int64_t{1} << 20;
constexpr std::int64_t most = std::int64_t{1} << 40;
constexpr std::int64_t most_ahead = 1024;  // blocks
constexpr std::int64_t most_micro_batches = std::int64_t{1} << 20;

// ---- values ----

template <auto member>
ChoiceValue get(const ParallelSpec& spec) {
  return spec.*member;
}

template <auto member>
void set(ParallelSpec& spec, const ChoiceValue& value) {
  using Field = std::remove_reference_t<decltype(spec.*member)>;
  if constexpr (std::is_same_v<Field, int>)
    spec.*member = static_cast<int>(std::get<std::int64_t>(value));
  else
    spec.*member = std::get<Field>(value);
}

template <Axis axis>
ChoiceValue get_degree(const ParallelSpec& spec) {
  return spec.mesh.degree[axis];
}

template <Axis axis>
void set_degree(ParallelSpec& spec, const ChoiceValue& value) {
  spec.mesh.degree[axis] = static_cast<int>(std::get<std::int64_t>(value));
}

template <auto... values>
std::vector<ChoiceValue> named() {
  return {values...};
}

// What a stage can recompute.
std::vector<ChoiceValue> recomputes() {
  std::vector<ChoiceValue> values;
  for (const RecomputeRow& row : recompute_rows()) values.emplace_back(row.kind);
  return values;
}

std::vector<ChoiceValue> offloads() {
  std::vector<ChoiceValue> values;
  for (const Offload& offload : all_offloads()) values.emplace_back(offload);
  return values;
}

std::int64_t number(const ChoiceValue& value) {
  return std::get<std::int64_t>(value);
}

std::int64_t devices_of_plan(const TrainingSpec& /*training*/, int devices) {
  return devices;
}

// ---- what plan.yaml says next to the choice itself ----

std::optional<std::string> write_micro_batches(const ParallelSpec& spec, const TrainingSpec& training) {
  return fmt::format("{}", micro_batches(spec, training));
}

void read_micro_batches(const YamlNode& layout, const TrainingSpec& training, ParallelSpec& spec) {
  const YamlNode node = layout.at("micro_batches");
  const std::int64_t found = node.as_integer(1);
  if (found == micro_batches(spec, training)) return;
  if (!spec.replica_micro_batches.empty())
    node.fail(fmt::format("the most of replica_micro_batches is {}, and micro_batches is {}",
                          micro_batches(spec, training), found));
  node.fail(
      fmt::format("a global batch of {} over dp {} x micro_batch {} makes {} micro-batches, and micro_batches is {}",
                  training.global_batch, spec.dp(), spec.micro_batch, micro_batches(spec, training), found));
}

std::optional<std::string> write_stages_recompute(const ParallelSpec& spec, const TrainingSpec& /*training*/) {
  if (spec.recompute != Recompute::per_stage) return std::nullopt;
  std::vector<std::string> stages;
  for (const StageRecompute& stage : spec.stage_recompute) stages.push_back(write_stage_recompute(stage));
  return fmt::format("[{}]", join(stages));
}

// "full", "full:3"
StageRecompute read_stage(const YamlNode& node) {
  std::vector<std::string> names;
  for (const RecomputeRow& row : recompute_rows()) names.emplace_back(row.name);
  const std::string text = node.as_string();
  const std::size_t colon = text.find(':');
  if (colon == std::string::npos) return recompute_rows()[node.as_choice(names)].kind;
  const std::string rule = text.substr(0, colon), number = text.substr(colon + 1);
  const auto found = std::ranges::find(names, rule);
  int layers = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), layers);
  const bool is_number = error == std::errc() && end == number.data() + number.size() && layers >= 1;
  if (found == names.end() || rule == name(Recompute::none) || !is_number)
    node.fail(
        fmt::format("'{}' is not what a stage recomputes; write a way to recompute, alone for all layers of the "
                    "stage, or with the number of its first layers that recompute: full:3",
                    text));
  return {recompute_rows()[static_cast<std::size_t>(found - names.begin())].kind, layers};
}

void read_stages_recompute(const YamlNode& layout, const TrainingSpec& /*training*/, ParallelSpec& spec) {
  if (spec.recompute == Recompute::per_stage) {
    const YamlNode stages = layout.at("stage_recompute");
    for (const YamlNode& item : stages.items()) spec.stage_recompute.push_back(read_stage(item));
    if (static_cast<int>(spec.stage_recompute.size()) != spec.stages())
      stages.fail(fmt::format("stage_recompute has {} stages, and {}", spec.stage_recompute.size(), stages_text(spec)));
  } else if (const auto stages = layout.find("stage_recompute")) {
    stages->fail(
        fmt::format("stage_recompute goes with recompute per_stage, and recompute is {}", name(spec.recompute)));
  }
}

bool has_one_rule(const ParallelSpec& spec) {
  return spec.recompute != Recompute::none && spec.recompute != Recompute::per_stage;
}

std::optional<std::string> layers_without_rule(const ParallelSpec& spec, const TrainingSpec& /*training*/) {
  if (has_one_rule(spec)) return std::nullopt;
  return fmt::format("recompute_layers says how many layers of each stage recompute, and recompute is {}{}",
                     name(spec.recompute),
                     spec.recompute == Recompute::none ? ": leave the key out, or say what they recompute"
                                                       : ": write the number behind each stage's own, such as full:3");
}

std::optional<std::string> layers_without_offload(const ParallelSpec& spec, const TrainingSpec& /*training*/) {
  if (spec.offload.activations != Home::device) return std::nullopt;
  return fmt::format(
      "offload_layers says of how many layers of each stage activations leave the device, and offload "
      "is {}: leave the key out, or write activations among what is offloaded",
      name(spec.offload));
}

std::optional<std::string> sequence_parallel_alone(const ParallelSpec& spec, const TrainingSpec& /*training*/) {
  if (!spec.sequence_parallel || spec.tp() > 1) return std::nullopt;
  return "sequence parallelism spreads work over tensor-parallel ranks, and there is 1 (tp 1)";
}

// Replicas with unlike numbers of micro-batches are as many as dp.
std::optional<std::string> other_replicas_than_dp(const ParallelSpec& spec, const TrainingSpec& /*training*/) {
  if (static_cast<int>(spec.replica_micro_batches.size()) == spec.dp()) return std::nullopt;
  return fmt::format("replica_micro_batches names {} replicas, and dp is {}", spec.replica_micro_batches.size(),
                     spec.dp());
}

std::optional<std::string> micro_batch_divides_not(const ParallelSpec& spec, const TrainingSpec& training) {
  if (!spec.replica_micro_batches.empty()) return other_batch_than_replicas(spec, training);
  // The product of the two may need more than 64 bits.
  const int ranks = spec.mesh.batch_ranks();
  if (training.global_batch % ranks == 0 && training.global_batch / ranks % spec.micro_batch == 0)
    return std::nullopt;
  return fmt::format("a global batch of {} is no multiple of dp {} x micro_batch {}", training.global_batch, spec.dp(),
                     spec.micro_batch);
}

std::optional<std::string> no_shard_group(const ParallelSpec& spec, const TrainingSpec& /*training*/) {
  const int ranks = spec.mesh.dp_shard;
  if (ranks == 0) return std::nullopt;
  if (spec.zero_stage == 0)
    return fmt::format("dp_shard {} says over how many ranks ZeRO shards, and zero_stage is 0", ranks);
  if (spec.replicas() % ranks == 0) return std::nullopt;
  return fmt::format("dp_shard {} does not divide the {} data-parallel ranks (dp {}, cp {})", ranks, spec.replicas(),
                     spec.dp(), spec.cp());
}

std::optional<std::string> no_exchange_group(const ParallelSpec& spec, const TrainingSpec& /*training*/) {
  const int ranks = spec.mesh.cp_ulysses;
  if (ranks == 1 || (spec.cp() % ranks == 0 && ranks < spec.cp())) return std::nullopt;
  return fmt::format("cp_ulysses {} does not divide the {} context-parallel ranks (cp) into several groups", ranks,
                     spec.cp());
}

std::optional<std::string> other_stages_than_pp(const ParallelSpec& spec, const TrainingSpec& /*training*/) {
  if (static_cast<int>(spec.stage_blocks.size()) == spec.stages()) return std::nullopt;
  return fmt::format("stage_blocks has {} stages, and {}", spec.stage_blocks.size(), stages_text(spec));
}

// That a request's schedule asks for, or --virtual-stages; where so many stages are interleaved
// without that, the fewest of several, unless --pp says how many.
std::int64_t stages_of_a_rank(const LayoutRequest& request, std::int64_t stages) {
  const std::optional<ScheduleKind> schedule = given<ScheduleKind>(request, Choice::schedule);
  if (schedule && is_v_shaped(*schedule)) return 2;
  if (const auto asked = given<std::int64_t>(request, Choice::virtual_stages)) return *asked;
  if (schedule != ScheduleKind::interleaved) return 1;
  const std::int64_t ranks = given<std::int64_t>(request, Choice::pp).value_or(0);
  for (std::int64_t each = 2; each < stages; ++each)
    if (stages % each == 0 && (ranks == 0 || each * ranks == stages)) return each;
  return 1;
}

ImpliedChoices stages_of_cut(const ChoiceValue& value, const LayoutRequest& before) {
  const auto stages = static_cast<std::int64_t>(std::get<std::vector<int>>(value).size());
  const std::int64_t of_a_rank = stages_of_a_rank(before, stages);
  ImpliedChoices implied = {{Choice::pp, stages / of_a_rank}};
  if (of_a_rank > 1) implied.emplace_back(Choice::virtual_stages, of_a_rank);
  return implied;
}

// Two stages on each rank, or nothing more.
ImpliedChoices both_ways(const ChoiceValue& value, const LayoutRequest& /*before*/) {
  if (!is_v_shaped(std::get<ScheduleKind>(value))) return {};
  return {{Choice::virtual_stages, std::int64_t{2}}};
}

ImpliedChoices interleaving(const ChoiceValue& /*value*/, const LayoutRequest& /*before*/) {
  return {{Choice::schedule, ScheduleKind::interleaved}};
}

std::optional<std::string> without_several_stages(const ParallelSpec& spec, const TrainingSpec& /*training*/) {
  if (spec.pp() > 1 && (spec.schedule == ScheduleKind::interleaved || is_v_shaped(spec.schedule))) return std::nullopt;
  return fmt::format("the key goes with schedule interleaved, zero_bubble_v or dualpipe_v on 2 or more pipeline ranks, "
                     "and the schedule is {} on {}",
                     name(spec.schedule), spec.pp());
}

std::optional<std::string> without_interleaving(const ParallelSpec& spec, const TrainingSpec& /*training*/) {
  if (spec.pp() > 1 && spec.schedule == ScheduleKind::interleaved) return std::nullopt;
  return fmt::format("the key goes with schedule interleaved on 2 or more pipeline ranks, and the schedule is {} on {}",
                     name(spec.schedule), spec.pp());
}

// ---- texts ----

// "full,none*31,full*20": runs of adjacent stages that recompute alike.
std::string runs_of(const std::vector<StageRecompute>& stages) {
  std::vector<std::string> runs;
  for (auto first = stages.begin(); first != stages.end();) {
    const auto last = std::find_if(first, stages.end(), [&](const StageRecompute& stage) { return stage != *first; });
    const std::string one = write_stage_recompute(*first);
    runs.push_back(last - first == 1 ? one : fmt::format("{}*{}", one, last - first));
    first = last;
  }
  return join(runs, ",");
}

// Where the stages of each rank recompute alike, a rank is named once.
std::string word_of_recompute(const ParallelSpec& spec) {
  if (spec.recompute == Recompute::none) return "";
  if (spec.recompute != Recompute::per_stage) return "recompute=" + write_stage_recompute(spec.recompute_of(0));
  const std::vector<StageRecompute>& stages = spec.stage_recompute;
  bool alike = spec.virtual_stages > 1;
  for (int stage = 0; stage < spec.stages(); ++stage)
    alike = alike && stages[stage] == stages[rank_of_stage(spec, stage)];
  if (!alike) return "recompute=" + runs_of(stages);
  return "rank-recompute=" + runs_of({stages.begin(), stages.begin() + spec.pp()});
}

// The axes of several ranks, outermost first, where more than one axis has several.
std::string word_of_order(const ParallelSpec& spec) {
  std::vector<std::string> axes;
  for (const Axis axis : spec.mesh.axes())
    if (spec.mesh.degree_of(axis) > 1) axes.push_back(name(axis));
  return axes.size() > 1 ? join(axes, ">") : "";
}

// "6*2,2*2": runs of adjacent replicas with equally many micro-batches.
std::string runs_of(const std::vector<int>& replicas) {
  std::vector<std::string> runs;
  for (auto first = replicas.begin(); first != replicas.end();) {
    const auto last = std::find_if(first, replicas.end(), [&](int count) { return count != *first; });
    runs.push_back(last - first == 1 ? fmt::format("{}", *first) : fmt::format("{}*{}", *first, last - first));
    first = last;
  }
  return join(runs, ",");
}

std::string sequence_parallelism(bool on) {
  return on ? "with sequence parallelism" : "without sequence parallelism";
}

constexpr std::array rows = {
    ChoiceRow{.choice = Choice::dp,
              .key = "dp",
              .option = "--dp",
              .operand = "N",
              .description = "data-parallel degree",
              .axis = Axis::dp,
              .get = get_degree<Axis::dp>,
              .set = set_degree<Axis::dp>,
              .maximum = most_devices,
              .most_in_plan = devices_of_plan,
              .word = [](const ParallelSpec& spec) { return fmt::format("dp{}", spec.dp()); }},
    ChoiceRow{.choice = Choice::tp,
              .key = "tp",
              .option = "--tp",
              .operand = "N",
              .description = "tensor-parallel degree",
              .axis = Axis::tp,
              .get = get_degree<Axis::tp>,
              .set = set_degree<Axis::tp>,
              .maximum = most_devices,
              .most_in_plan = devices_of_plan,
              .word =
                  [](const ParallelSpec& spec) {
                    return fmt::format("tp{}{}", spec.tp(), spec.sequence_parallel ? "+sp" : "");
                  }},
    ChoiceRow{.choice = Choice::pp,
              .key = "pp",
              .option = "--pp",
              .operand = "N",
              .description = "pipeline stages",
              .axis = Axis::pp,
              .get = get_degree<Axis::pp>,
              .set = set_degree<Axis::pp>,
              .maximum = most_devices,
              .most_in_plan = devices_of_plan,
              .word = [](const ParallelSpec& spec) { return fmt::format("pp{}", spec.pp()); }},
    ChoiceRow{.choice = Choice::cp,
              .key = "cp",
              .option = "--cp",
              .operand = "N",
              .description = "context-parallel degree",
              .axis = Axis::cp,
              .get = get_degree<Axis::cp>,
              .set = set_degree<Axis::cp>,
              .maximum = most_devices,
              .most_in_plan = devices_of_plan,
              .may_be_absent = true,
              .word = [](const ParallelSpec& spec) { return spec.cp() > 1 ? fmt::format("cp{}", spec.cp()) : ""; }},
    ChoiceRow{.choice = Choice::mesh_order,
              .key = "mesh_order",
              .option = "--mesh-order",
              .operand = "AXES",
              .description = "mesh axes from the outermost to the one of neighbouring devices: pp-dp-tp",
              .get = [](const ParallelSpec& spec) -> ChoiceValue { return spec.mesh.order; },
              .set = [](ParallelSpec& spec, const ChoiceValue& value) { spec.mesh.order = std::get<AxisOrder>(value); },
              .word = word_of_order},
    // In texts, it is part of tp's word.
    ChoiceRow{.choice = Choice::sequence_parallel,
              .key = "sequence_parallel",
              .option = "--sequence-parallel",
              .description = "shard activations between tensor-parallel regions along the sequence",
              .get = get<&ParallelSpec::sequence_parallel>,
              .set = set<&ParallelSpec::sequence_parallel>,
              .presumes = Choice::tp,
              .fault = sequence_parallel_alone,
              .phrase = [](const ChoiceValue& value) { return sequence_parallelism(std::get<bool>(value)); },
              .instead = [](const ParallelSpec& now,
                            const ChoiceValue&) { return sequence_parallelism(now.sequence_parallel); }},
    ChoiceRow{.choice = Choice::cp_method,
              .key = "cp_method",
              .option = "--cp-method",
              .description = "how context-parallel ranks attend to the tokens of one another: all keys and values are "
                             "gathered, tokens are exchanged for heads, or keys and values go around a ring",
              .get = get<&ParallelSpec::cp_method>,
              .set = set<&ParallelSpec::cp_method>,
              .named = named<ContextMethod::all_gather, ContextMethod::ulysses, ContextMethod::ring>,
              .may_be_absent = true,
              .applies = [](const ParallelSpec& spec) { return spec.cp() > 1; },
              .presumes = Choice::cp,
              .word =
                  [](const ParallelSpec& spec) {
                    return std::string(spec.cp_method == ContextMethod::all_gather ? "" : name(spec.cp_method));
                  },
              .phrase =
                  [](const ChoiceValue& value) {
                    constexpr const char* phrases[] = {"gathered keys and values",
                                                       "tokens exchanged for heads (Ulysses)",
                                                       "keys and values around a ring"};
                    static_assert(std::size(phrases) == std::size(context_methods));
                    return std::string(phrases[static_cast<std::size_t>(std::get<ContextMethod>(value))]);
                  }},
    ChoiceRow{.choice = Choice::cp_ulysses,
              .key = "cp_ulysses",
              .option = "--cp-ulysses",
              .operand = "N",
              .description = "with cp-method ring or all_gather: context-parallel ranks that exchange tokens for "
                             "heads in groups of so many neighbours; keys and values go between groups "
                             "(hierarchical; default: 1, no groups)",
              .get = [](const ParallelSpec& spec) -> ChoiceValue { return std::int64_t{spec.mesh.cp_ulysses}; },
              .set = [](ParallelSpec& spec,
                        const ChoiceValue& value) { spec.mesh.cp_ulysses = static_cast<int>(number(value)); },
              .maximum = most_devices,
              .most_in_plan = devices_of_plan,
              .may_be_absent = true,
              .applies = [](const ParallelSpec& spec) { return spec.cp() > 1; },
              .presumes = Choice::cp,
              .fault = no_exchange_group,
              .word =
                  [](const ParallelSpec& spec) {
                    return spec.mesh.cp_ulysses > 1 ? fmt::format("ulysses{}", spec.mesh.cp_ulysses) : "";
                  },
              .phrase =
                  [](const ChoiceValue& value) {
                    return number(value) == 1
                               ? std::string("no groups that exchange tokens for heads")
                               : fmt::format("tokens exchanged for heads in groups of {}", number(value));
                  }},
    ChoiceRow{
        .choice = Choice::zero_stage,
        .key = "zero_stage",
        .option = "--zero",
        .operand = "0..3",
        .description = "ZeRO stage",
        .get = get<&ParallelSpec::zero_stage>,
        .set = set<&ParallelSpec::zero_stage>,
        .minimum = 0,
        .maximum = 3,
        .presumes = Choice::dp,
        .word =
            [](const ParallelSpec& spec) { return spec.replicas() > 1 ? fmt::format("zero{}", spec.zero_stage) : ""; },
        .phrase = [](const ChoiceValue& value) { return fmt::format("ZeRO-{}", number(value)); },
        .instead =
            [](const ParallelSpec& now, const ChoiceValue& given) {
              return fmt::format("ZeRO stage {} instead of {}", now.zero_stage, number(given));
            }},
    // As many as there are: the default, all of them.
    ChoiceRow{.choice = Choice::dp_shard,
              .key = "dp_shard",
              .option = "--dp-shard",
              .operand = "N",
              .description = "data-parallel ranks over which ZeRO shards; groups of so many are replicas (hybrid "
                             "sharding; default: all)",
              .get = [](const ParallelSpec& spec) -> ChoiceValue { return std::int64_t{spec.mesh.dp_shard}; },
              .set =
                  [](ParallelSpec& spec, const ChoiceValue& value) {
                    const std::int64_t ranks = number(value);
                    spec.mesh.dp_shard = ranks == spec.replicas() ? 0 : static_cast<int>(ranks);
                  },
              .minimum = 2,
              .maximum = most_devices,
              .most_in_plan = devices_of_plan,
              .may_be_absent = true,
              .applies = [](const ParallelSpec& spec) { return spec.zero_stage > 0 && spec.replicas() > 1; },
              .presumes = Choice::zero_stage,
              .fault = no_shard_group,
              .word =
                  [](const ParallelSpec& spec) {
                    return spec.mesh.dp_shard > 0 ? fmt::format("dp-shard{}", spec.mesh.dp_shard) : "";
                  },
              .phrase =
                  [](const ChoiceValue& value) {
                    return number(value) == 0 ? std::string("sharding over all data-parallel ranks")
                                              : fmt::format("sharding over groups of {}", number(value));
                  }},
    // All alike: the default, an empty list.
    ChoiceRow{
        .choice = Choice::replica_micro_batches,
        .key = "replica_micro_batches",
        .option = "--replica-micro-batches",
        .operand = "N,N,...",
        .description = "micro-batches of each data-parallel replica in a step, for replicas on unlike devices "
                       "(default: all alike)",
        .get = get<&ParallelSpec::replica_micro_batches>,
        .set = set<&ParallelSpec::replica_micro_batches>,
        .maximum = most_micro_batches,
        .most_in_plan = [](const TrainingSpec& training, int) { return training.global_batch; },
        .may_be_absent = true,
        .applies = [](const ParallelSpec& spec) { return spec.dp() > 1; },
        .presumes = Choice::dp,
        .implies = [](const ChoiceValue& value, const LayoutRequest& /*before*/) -> ImpliedChoices {
          return {{Choice::dp, static_cast<std::int64_t>(std::get<std::vector<int>>(value).size())}};
        },
        .fault = other_replicas_than_dp,
        .word =
            [](const ParallelSpec& spec) {
              return spec.replica_micro_batches.empty()
                         ? ""
                         : fmt::format("micro-batches={}", runs_of(spec.replica_micro_batches));
            },
        .phrase =
            [](const ChoiceValue& value) {
              const auto& replicas = std::get<std::vector<int>>(value);
              return replicas.empty() ? std::string("equally many micro-batches on all replicas")
                                      : fmt::format("{} micro-batches on the replicas", runs_of(replicas));
            }},
    ChoiceRow{.choice = Choice::micro_batch,
              .key = "micro_batch",
              .option = "--micro-batch",
              .operand = "N",
              .description = "sequences of a micro-batch",
              .get = get<&ParallelSpec::micro_batch>,
              .set = set<&ParallelSpec::micro_batch>,
              .maximum = most,
              .most_in_plan = [](const TrainingSpec& training, int) { return training.global_batch; },
              .fault = micro_batch_divides_not,
              .companion = {"micro_batches", write_micro_batches, read_micro_batches},
              .word = [](const ParallelSpec& spec) { return fmt::format("mb{}", spec.micro_batch); },
              .phrase = [](const ChoiceValue& value) { return fmt::format("micro-batch {}", number(value)); },
              .instead =
                  [](const ParallelSpec& now, const ChoiceValue& given) {
                    return fmt::format("micro-batches of {} instead of {}", now.micro_batch, number(given));
                  }},
    // Without a pipeline, micro-batches follow one another as in 1F1B.
    ChoiceRow{.choice = Choice::schedule,
              .key = "schedule",
              .option = "--schedule",
              .description = "order of the pipeline's tasks",
              .get = get<&ParallelSpec::schedule>,
              .set =
                  [](ParallelSpec& spec, const ChoiceValue& value) {
                    spec.schedule = std::get<ScheduleKind>(value);
                    if (spec.schedule == ScheduleKind::interleaved) return;
                    spec.virtual_stages = is_v_shaped(spec.schedule) ? 2 : 1;
                    spec.micro_batch_group = 0;
                  },
              .named = named<ScheduleKind::gpipe, ScheduleKind::one_f_one_b, ScheduleKind::interleaved,
                             ScheduleKind::zero_bubble_h1, ScheduleKind::zero_bubble_v, ScheduleKind::dualpipe_v>,
              .applies = [](const ParallelSpec& spec) { return spec.pp() > 1; },
              .presumes = Choice::virtual_stages,
              .implies = both_ways,
              .word = [](const ParallelSpec& spec) { return std::string(spec.pp() > 1 ? name(spec.schedule) : ""); }},
    ChoiceRow{.choice = Choice::virtual_stages,
              .key = "virtual_stages",
              .option = "--virtual-stages",
              .operand = "N",
              .description = "stages on each rank of an interleaved pipeline",
              .get = get<&ParallelSpec::virtual_stages>,
              .set = set<&ParallelSpec::virtual_stages>,
              .minimum = 2,
              .maximum = most_devices,
              .most_in_plan = [](const TrainingSpec&, int) { return most_devices; },
              .may_be_absent = true,
              .applies = [](const ParallelSpec& spec) { return spec.pp() > 1; },
              .implies = interleaving,
              .fault = without_several_stages,
              .word =
                  [](const ParallelSpec& spec) {
                    return spec.virtual_stages > 1 && !is_v_shaped(spec.schedule)
                               ? fmt::format("v{}", spec.virtual_stages)
                               : "";
                  },
              .phrase =
                  [](const ChoiceValue& value) { return fmt::format("{} virtual stages a rank", number(value)); }},
    ChoiceRow{
        .choice = Choice::micro_batch_group,
        .key = "micro_batch_group",
        .option = "--micro-batch-group",
        .operand = "N",
        .description = "micro-batches that an interleaved pipeline runs through one stage of a rank before the "
                       "next (default: as many as ranks)",
        .get = get<&ParallelSpec::micro_batch_group>,
        .set = set<&ParallelSpec::micro_batch_group>,
        .minimum = 2,
        .maximum = most_devices,
        .most_in_plan = [](const TrainingSpec& training, int) { return training.global_batch; },
        .may_be_absent = true,
        .applies = [](const ParallelSpec& spec) { return spec.pp() > 1; },
        .presumes = Choice::virtual_stages,
        .implies = interleaving,
        .fault = without_interleaving,
        .word =
            [](const ParallelSpec& spec) {
              return spec.micro_batch_group > 0 ? fmt::format("group{}", spec.micro_batch_group) : "";
            },
        .phrase = [](const ChoiceValue& value) { return fmt::format("micro-batch groups of {}", number(value)); }},
    ChoiceRow{
        .choice = Choice::recompute,
        .key = "recompute",
        .option = "--recompute",
        .operand = "none|norms+activation|norms+mlp|full|MODULES",
        .description = "activations computed again in the backward pass; modules, joined by +: core_attn, norms, "
                       "activation or mlp; or every_other_product",
        .get = get<&ParallelSpec::recompute>,
        .set =
            [](ParallelSpec& spec, const ChoiceValue& value) {
              spec.recompute = std::get<Recompute>(value);
              spec.recompute_layers = 0;
              spec.stage_recompute.clear();
            },
        .named = recomputes,
        .only_in_plans = named<Recompute::per_stage>,
        .companion = {"stage_recompute", write_stages_recompute, read_stages_recompute},
        .word = word_of_recompute,
        .phrase =
            [](const ChoiceValue& value) {
              const auto recompute = std::get<Recompute>(value);
              if (recompute == Recompute::none) return std::string("without recompute");
              return recompute == Recompute::full ? std::string("with full recompute")
                                                  : fmt::format("with recompute of {}", name(recompute));
            },
        // No option takes what each stage chooses for itself.
        .instead =
            [](const ParallelSpec& now, const ChoiceValue& given) {
              return now.recompute == Recompute::per_stage
                         ? fmt::format("recompute as each stage needs it, without --recompute, instead of {}",
                                       write_value(given))
                         : fmt::format("recompute {} instead of {}", name(now.recompute), write_value(given));
            }},
    // In texts, it is part of recompute's word.
    ChoiceRow{
        .choice = Choice::recompute_layers,
        .key = "recompute_layers",
        .option = "--recompute-layers",
        .operand = "N",
        .description = "layers of each stage that recompute, the first ones (default: all); alone, with "
                       "--recompute full",
        .get = get<&ParallelSpec::recompute_layers>,
        // Without a rule for all stages there is nothing to count.
        .set =
            [](ParallelSpec& spec, const ChoiceValue& value) {
              spec.recompute_layers = has_one_rule(spec) ? static_cast<int>(number(value)) : 0;
            },
        .maximum = most_devices,
        .may_be_absent = true,
        .presumes = Choice::recompute,
        .implies = [](const ChoiceValue& value, const LayoutRequest& /*before*/) -> ImpliedChoices {
          if (number(value) == 0) return {};
          return {{Choice::recompute, Recompute::full}};
        },
        .fault = layers_without_rule,
        .phrase =
            [](const ChoiceValue& value) {
              return number(value) == 0 ? std::string("with recompute of all layers")
                                        : fmt::format("with recompute of {} layers a stage", number(value));
            },
        .instead =
            [](const ParallelSpec& now, const ChoiceValue& given) {
              return now.recompute_layers == 0
                         ? fmt::format("recompute of all layers instead of {} a stage", number(given))
                         : fmt::format("recompute of {} layers a stage instead of {}", now.recompute_layers,
                                       number(given));
            }},
    ChoiceRow{.choice = Choice::stage_blocks,
              .key = "stage_blocks",
              .option = "--stage-blocks",
              .operand = "N,N,...",
              .description = "blocks of the model per stage; the embedding and the head are one each",
              .get = get<&ParallelSpec::stage_blocks>,
              .set = set<&ParallelSpec::stage_blocks>,
              .maximum = most_devices,
              .most_in_plan = [](const TrainingSpec&, int) -> std::int64_t { return std::numeric_limits<int>::max(); },
              .presumes = Choice::pp,
              .implies = stages_of_cut,
              .fault = other_stages_than_pp,
              .instead =
                  [](const ParallelSpec& now, const ChoiceValue&) {
                    return fmt::format("layers per stage {} instead of what was given", stage_layers(now));
                  }},
    ChoiceRow{
        .choice = Choice::tied_gradients,
        .key = "tied_gradients",
        .option = "--tied-gradients",
        .description = "accumulators of a tied parameter on a rank: one, reduced once, or one for each use, for "
                       "bits that do not depend on the stages",
        .get = get<&ParallelSpec::tied_gradients>,
        .set = set<&ParallelSpec::tied_gradients>,
        .named = named<TiedGradients::together, TiedGradients::apart>,
        .may_be_absent = true,
        .word =
            [](const ParallelSpec& spec) {
              return std::string(spec.tied_gradients == TiedGradients::apart ? "tied-gradients=apart" : "");
            },
        .phrase =
            [](const ChoiceValue& value) {
              return fmt::format("tied gradients {}", name(std::get<TiedGradients>(value)));
            }},
    // GPipe uses each buffer once in a step.
    ChoiceRow{
        .choice = Choice::input_slots,
        .key = "input_slots",
        .option = "--input-slots",
        .description = "buffers of a stage for arriving activations",
        .get = get<&ParallelSpec::input_slots>,
        .set = set<&ParallelSpec::input_slots>,
        .named = named<InputSlots::in_flight, InputSlots::one_more>,
        .may_be_absent = true,
        .applies = [](const ParallelSpec& spec) { return spec.pp() > 1 && spec.schedule != ScheduleKind::gpipe; },
        .word =
            [](const ParallelSpec& spec) {
              return std::string(spec.input_slots == InputSlots::one_more ? "input-slots+1" : "");
            },
        .phrase =
            [](const ChoiceValue& value) {
              return std::string(std::get<InputSlots>(value) == InputSlots::one_more
                                     ? "with one more buffer for arriving activations"
                                     : "without another buffer for arriving activations");
            }},
    ChoiceRow{.choice = Choice::offload,
              .key = "offload",
              .option = "--offload",
              .operand = "none|PARTS",
              .description = "what is kept in host memory: nothing, or parts joined by +: optimizer, its state, which "
                             "the host's processor then updates (ZeRO-Offload), with it gradients and parameters "
                             "(ZeRO-3); activations, what layers keep for their backward; a part with :nvme "
                             "behind it, as in optimizer:nvme, is in files on NVMe (ZeRO-Infinity)",
              .get = get<&ParallelSpec::offload>,
              .set =
                  [](ParallelSpec& spec, const ChoiceValue& value) {
                    spec.offload = std::get<Offload>(value);
                    if (spec.offload.activations == Home::device) spec.offload_layers = 0;
                  },
              .named = offloads,
              .may_be_absent = true,
              .word =
                  [](const ParallelSpec& spec) {
                    return spec.offload == Offload{} ? "" : fmt::format("offload={}", name(spec.offload));
                  },
              .phrase = [](const ChoiceValue& value) { return phrase(std::get<Offload>(value)); }},
    ChoiceRow{
        .choice = Choice::offload_layers,
        .key = "offload_layers",
        .option = "--offload-layers",
        .operand = "N",
        .description = "layers of each stage whose activations leave the device, the first ones (default: all); "
                       "alone, with --offload activations",
        .get = get<&ParallelSpec::offload_layers>,
        // Without activations elsewhere there is nothing to count.
        .set =
            [](ParallelSpec& spec, const ChoiceValue& value) {
              spec.offload_layers = spec.offload.activations != Home::device ? static_cast<int>(number(value)) : 0;
            },
        .maximum = most_devices,
        .may_be_absent = true,
        .presumes = Choice::offload,
        .implies = [](const ChoiceValue& value, const LayoutRequest& /*before*/) -> ImpliedChoices {
          if (number(value) == 0) return {};
          return {{Choice::offload, Offload{.activations = Home::host}}};
        },
        .fault = layers_without_offload,
        .word =
            [](const ParallelSpec& spec) {
              return spec.offload_layers > 0 ? fmt::format("offload-layers={}", spec.offload_layers) : "";
            },
        .phrase =
            [](const ChoiceValue& value) {
              if (number(value) == 0) return std::string("with the activations of all layers off the device");
              return fmt::format("with the activations of {} layer{} a stage off the device", number(value),
                                 number(value) == 1 ? "" : "s");
            },
        .instead =
            [](const ParallelSpec& now, const ChoiceValue& given) {
              return now.offload_layers == 0
                         ? fmt::format("the activations of all layers off the device instead of {} a stage",
                                       number(given))
                         : fmt::format("the activations of {} layers a stage off the device instead of {}",
                                       now.offload_layers, number(given));
            }},
    ChoiceRow{
        .choice = Choice::dp_method,
        .key = "dp_method",
        .option = "--dp-method",
        .description = "how data-parallel ranks come by equal parameters: gradients are reduced on all, or one "
                       "process's master hands parameters out, computes the loss and collects gradients "
                       "(DataParallel)",
        .get = get<&ParallelSpec::dp_method>,
        .set = set<&ParallelSpec::dp_method>,
        .named = named<DataMethod::all_reduce, DataMethod::master>,
        .may_be_absent = true,
        .applies = [](const ParallelSpec& spec) { return spec.dp() > 1; },
        .presumes = Choice::dp,
        .word =
            [](const ParallelSpec& spec) { return std::string(spec.dp_method == DataMethod::master ? "master" : ""); },
        .phrase =
            [](const ChoiceValue& value) {
              return std::string(std::get<DataMethod>(value) == DataMethod::master
                                     ? "one process with a master (DataParallel)"
                                     : "gradients reduced on all ranks");
            }},
    ChoiceRow{
        .choice = Choice::tp_overlap,
        .key = "tp_overlap",
        .option = "--tp-overlap",
        .description = "with sequence parallelism: products wait for all their rows, or slices of them are "
                       "multiplied while others go around the ring of the tensor-parallel ranks",
        .get = get<&ParallelSpec::tp_overlap>,
        .set = set<&ParallelSpec::tp_overlap>,
        .named = named<TensorOverlap::none, TensorOverlap::ring>,
        .may_be_absent = true,
        .applies = [](const ParallelSpec& spec) { return spec.sequence_parallel; },
        .presumes = Choice::sequence_parallel,
        .implies = [](const ChoiceValue& value, const LayoutRequest& /*before*/) -> ImpliedChoices {
          if (std::get<TensorOverlap>(value) == TensorOverlap::none) return {};
          return {{Choice::sequence_parallel, true}};
        },
        .word =
            [](const ParallelSpec& spec) {
              return std::string(spec.tp_overlap == TensorOverlap::ring ? "tp-ring" : "");
            },
        .phrase =
            [](const ChoiceValue& value) {
              return std::string(std::get<TensorOverlap>(value) == TensorOverlap::ring
                                     ? "tokens around a ring beside slices of products"
                                     : "products of all tokens at once");
            }},
    ChoiceRow{
        .choice = Choice::prefetch_depth,
        .key = "prefetch_depth",
        .option = "--prefetch-depth",
        .operand = "N",
        .description = "with ZeRO-3, or parameters on the host: blocks whose parameters are gathered ahead of the one "
                       "that computes, a buffer each (default: 1)",
        .get = get<&ParallelSpec::prefetch_depth>,
        .set = set<&ParallelSpec::prefetch_depth>,
        .minimum = 0,
        .maximum = most_ahead,
        .may_be_absent = true,
        .applies = brings_parameters,
        .is_kept = true,
        .presumes = Choice::zero_stage,
        .word =
            [](const ParallelSpec& spec) {
              return spec.prefetch_depth == ParallelSpec{}.prefetch_depth
                         ? ""
                         : fmt::format("prefetch{}", spec.prefetch_depth);
            },
        .phrase =
            [](const ChoiceValue& value) {
              return number(value) == 0 ? std::string("parameters gathered when a block needs them")
                                        : fmt::format("parameters gathered {} block{} ahead", number(value),
                                                      number(value) == 1 ? "" : "s");
            }},
    ChoiceRow{
        .choice = Choice::gather_unit,
        .key = "gather_unit",
        .option = "--gather-unit",
        .description = "with ZeRO-3: a block's parameters are gathered together, or each by itself, and so are their "
                       "gradients reduced (default: block)",
        .get = get<&ParallelSpec::gather_unit>,
        .set = set<&ParallelSpec::gather_unit>,
        .named = named<GatherUnit::block, GatherUnit::parameter>,
        .may_be_absent = true,
        .applies = gathers_parameters,
        .is_kept = true,
        .presumes = Choice::zero_stage,
        .word =
            [](const ParallelSpec& spec) {
              return std::string(spec.gather_unit == GatherUnit::parameter ? "gather-parameters" : "");
            },
        .phrase =
            [](const ChoiceValue& value) {
              return std::string(std::get<GatherUnit>(value) == GatherUnit::parameter
                                     ? "parameters gathered one by one"
                                     : "parameters gathered block by block");
            }},
};

// The index of a choice's row is its enumerator.
constexpr bool in_order() {
  for (std::size_t i = 0; i < rows.size(); ++i)
    if (index_of(rows[i].choice) != i) return false;
  return rows.size() == count_of<Choice>;
}
static_assert(in_order(), "every choice has a row, in the order of the enumerators");

struct Writer {
  std::string operator()(std::int64_t value) const { return fmt::format("{}", value); }
  std::string operator()(bool value) const { return fmt::format("{}", value); }
  std::string operator()(const AxisOrder& value) const { return write_order(value); }
  std::string operator()(const std::vector<int>& value) const { return fmt::format("{}", value); }
  template <class Named>
  std::string operator()(Named value) const {
    return name(value);
  }
};

}  // namespace

std::string write_value(const ChoiceValue& value) {
  return std::visit(Writer{}, value);
}

std::span<const ChoiceRow> choice_rows() {
  return rows;
}

const ChoiceRow& row_of(Choice choice) {
  return rows[index_of(choice)];
}

std::vector<const ChoiceRow*> choice_rows(std::span<const Choice> first) {
  std::vector<const ChoiceRow*> ordered;
  for (const Choice choice : first) ordered.push_back(&row_of(choice));
  for (const ChoiceRow& row : rows)
    if (std::ranges::find(first, row.choice) == first.end()) ordered.push_back(&row);
  return ordered;
}

std::optional<std::string> other_batch_than_replicas(const ParallelSpec& spec, const TrainingSpec& training) {
  const std::int64_t micro_batches =
      std::accumulate(spec.replica_micro_batches.begin(), spec.replica_micro_batches.end(), std::int64_t{0});
  // The product may need more than 64 bits.
  if (training.global_batch % spec.micro_batch == 0 && training.global_batch / spec.micro_batch == micro_batches)
    return std::nullopt;
  return fmt::format("replica_micro_batches [{}] are {} micro-batches of {}, and the global batch is {}",
                     fmt::join(spec.replica_micro_batches, ", "), micro_batches, spec.micro_batch,
                     training.global_batch);
}

std::string phrase(const ChoiceRow& row, const ChoiceValue& value) {
  return row.phrase ? row.phrase(value) : fmt::format("{} {}", row.key, write_value(value));
}

std::string instead(const ChoiceRow& row, const ParallelSpec& now, const ChoiceValue& given) {
  return row.instead ? row.instead(now, given)
                     : fmt::format("{} {} instead of {}", row.key, write_value(row.get(now)), write_value(given));
}

bool offloads_activations(const LayoutRequest& request) {
  return given<Offload>(request, Choice::offload).value_or(Offload{}).activations != Home::device;
}

bool gives_every_degree(const LayoutRequest& request) {
  return std::ranges::all_of(
      rows, [&](const ChoiceRow& row) { return !row.axis || may_be_unnamed(*row.axis) || request[row.choice]; });
}

std::int64_t product_of_degrees(const LayoutRequest& request) {
  std::int64_t product = 1;
  for (const ChoiceRow& row : rows)
    if (row.axis) product *= given<std::int64_t>(request, row.choice).value_or(1);
  return product;
}

ParallelSpec with_given(const LayoutRequest& request) {
  ParallelSpec spec;
  for (const ChoiceRow& row : rows)
    if (request[row.choice] && (row.is_kept || !row.applies || row.applies(spec))) row.set(spec, *request[row.choice]);
  return spec;
}

ParallelSpec with_given(const LayoutRequest& request, const TrainingSpec& training) {
  ParallelSpec spec = with_given(request);
  const std::vector<int>& replicas = spec.replica_micro_batches;
  if (replicas.empty() || request[Choice::micro_batch]) return spec;
  const auto micro_batches = std::accumulate(replicas.begin(), replicas.end(), std::int64_t{0});
  if (micro_batches > 0 && training.global_batch % micro_batches == 0)
    spec.micro_batch = training.global_batch / micro_batches;
  return spec;
}

}  // namespace parplan
