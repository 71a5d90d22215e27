#include "planner/plan/plan.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "planner/base/yaml.h"
#include "planner/cluster/find_cluster.h"
#include "tests/planner/base/error_of.h"

using namespace parplan;

namespace {

// Four cores that share one memory.
const std::string cluster_text = R"(name: four cores
device:
  name: core
  title: 'One core: "fast"'
  backend: cpu
  memory: {capacity: 4 GiB, overhead: 16 MiB}
  peak: {fp32: 256 GFLOP/s}
  kernel_launch: 0.2 us
  overlaps_communication: false
  rates:
    - {active: 1, matrix_fp32: 200 GFLOP/s, vector: 20 GFLOP/s, memory: 20 GB/s}
node: {devices: 4, intra: memory, bandwidth: 25 GB/s, latency: 0.3 us}
nodes: 1
)";

ParallelSpec two_by_two() {
  ParallelSpec spec;
  spec.mesh.degree = {.pp = 2, .dp = 2};  // pp, dp, tp
  spec.mesh.order = {Axis::dp, Axis::pp, Axis::tp};
  spec.zero_stage = 2;
  spec.micro_batch = 2;
  spec.recompute = Recompute::full;
  spec.stage_blocks = {2, 3};
  return spec;
}

StepResult some_result(double scale) {
  return {.time = {.compute = Seconds(0.1 * scale),
                   .recompute = Seconds(1.0 / 3.0 * scale),
                   .exposed = {.pp = Seconds(2.5e-5 * scale), .dp = Seconds(1e-8 * scale), .tp = Seconds(0)},
                   .bubble = Seconds(0.30000000000000004 * scale),
                   .optimizer = Seconds(5e-324),
                   .offload = Seconds(0)},
          .memory = {.parameters = Bytes(1000),
                     .gradients = Bytes(2000),
                     .optimizer = Bytes(4000),
                     .activations = Bytes(9007199254740993),
                     .buffers = Bytes(16000),
                     .overhead = Bytes(16777216)},
          .communication = {.pp = Bytes(77), .dp = Bytes(123456789), .tp = Bytes(0)}};
}

Plan some_plan() {
  Plan plan;
  plan.model_text = "# a tiny model\nname: tiny\n\nlayers: 3\n";
  plan.model = {.name = "tiny", .parameters = 12345, .flops_per_sample = Flops(6.02e11)};
  plan.cluster = read_cluster(YamlNode::parse(cluster_text, "cluster.yaml"));
  plan.training.global_batch = 16;
  plan.training.sequence_length = 64;
  plan.spec = two_by_two();
  plan.placements.parameters = {{"attention.qkv.weight", {}}, {"embedding.weight", {}}};
  plan.placements.state.gradients.dp = flat_shard();
  plan.placements.state.optimizer.dp = flat_shard();
  std::vector<std::vector<Action>> ranks;
  for (const std::string stage : {"0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"}) {
    auto& actions = ranks.emplace_back();
    for (std::size_t i = 0; i < stage.size(); i += 4) actions.push_back(parse_action(stage.substr(i, 3)));
  }
  plan.schedule = one_stage_a_rank(std::move(ranks));
  plan.prediction = some_result(1.0);
  ParallelSpec other;
  other.mesh.degree = {.tp = 2};
  other.sequence_parallel = true;
  other.stage_blocks = {5};
  other.schedule = ScheduleKind::gpipe;
  plan.alternatives = {{other, some_result(1.25)}, {two_by_two(), some_result(3.0)}};
  plan.search = {.objective = Objective::cost,
                 .candidates = 120,
                 .infeasible_memory = 3,
                 .pruned_by_bound = 80,
                 .simulated = 37,
                 .seconds = 0.125,
                 .certified = false,
                 .gap = 0.0625};
  plan.notes = {"uses 4 of 4 devices: \"all\"", "two\nlines, a tab\t and a back\\slash", "", "ü"};
  return plan;
}

void check_equal(const Plan& a, const Plan& b) {
  CHECK(a.model_text == b.model_text);
  CHECK(a.model == b.model);
  CHECK(write_cluster(a.cluster) == write_cluster(b.cluster));
  CHECK(a.training == b.training);
  CHECK(a.spec == b.spec);
  CHECK(a.placements == b.placements);
  CHECK(a.schedule == b.schedule);
  CHECK(a.prediction == b.prediction);
  CHECK(a.alternatives == b.alternatives);
  CHECK(a.search == b.search);
  CHECK(a.notes == b.notes);
}

// The plan's text with its first `from` replaced.
std::string edited(const std::string& from, const std::string& to) {
  std::string text = write_plan(some_plan());
  const std::size_t at = text.find(from);
  REQUIRE_MESSAGE(at != std::string::npos, "the plan has no " << from);
  return text.replace(at, from.size(), to);
}

// The place of the first `what` in the unedited plan, as errors state it.
std::string place_of(const std::string& what) {
  const std::string text = write_plan(some_plan());
  const std::size_t at = text.find(what);
  REQUIRE_MESSAGE(at != std::string::npos, "the plan has no " << what);
  const auto line = std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(at), '\n') + 1;
  const std::size_t start = at == 0 ? 0 : text.rfind('\n', at - 1) + 1;
  return "plan.yaml:" + std::to_string(line) + ":" + std::to_string(at - start + 1) + ": error: ";
}

// The error of reading the plan with its first `from` replaced.
std::string error_with(const std::string& from, const std::string& to) {
  const std::string text = edited(from, to);
  return error_of<ConfigError>([&] { read_plan(text, "plan.yaml"); });
}

// The place of the value of `key` in the plan: "devices: 4" has it at the 4.
std::string value_place(const std::string& line) {
  const std::string text = place_of(line);
  const std::size_t column_end = text.find(": error: ");
  const std::size_t column_start = text.rfind(':', column_end - 1) + 1;
  const int column =
      std::stoi(text.substr(column_start, column_end - column_start)) + static_cast<int>(line.find(": ")) + 2;
  return text.substr(0, column_start) + std::to_string(column) + ": error: ";
}

}  // namespace

TEST_CASE("A plan is read back as it was written, to the last bit") {
  const Plan plan = some_plan();
  const std::string text = write_plan(plan);
  const Plan again = read_plan(text, "plan.yaml");
  check_equal(plan, again);
  CHECK(write_plan(again) == text);
}

TEST_CASE("A plan's first part is what people look at, in this form") {
  const std::string text = write_plan(some_plan());
  const std::string expected = R"(# Written by parplan; docs/plan.md says what everything means.
schema: parplan.plan/1
plan_id: "PLAN_ID"
backend: cpu
layout:
  devices: 4
  dp: 2
  tp: 1
  pp: 2
  mesh_order: dp-pp-tp
  sequence_parallel: false
  zero_stage: 2
  micro_batch: 2
  micro_batches: 4
  schedule: 1f1b
  recompute: full
  stage_blocks: [2, 3]
prediction:
  # step 733 ms, peak 8192 TiB
  time_compute_s: 0.1
  time_recompute_s: 0.3333333333333333
  time_tp_exposed_s: 0
  time_dp_exposed_s: 1.0e-08
  time_pp_exposed_s: 2.5e-05
  time_bubble_s: 0.30000000000000004
  time_optimizer_s: 5.0e-324
  memory_parameters_bytes: 1000
  memory_gradients_bytes: 2000
  memory_optimizer_bytes: 4000
  memory_activations_bytes: 9007199254740993
  memory_buffers_bytes: 16000
  memory_overhead_bytes: 16777216
  memory_stage: 0
  communication_tp_bytes: 0
  communication_dp_bytes: 123456789
  communication_pp_bytes: 77
training:
  global_batch: 16
  sequence_length: 64
  precision: fp32
  optimizer: adamw
  learning_rate: 0.0006
  learning_rate_schedule: constant
  warmup_steps: 0
  decay_steps: 0
  final_learning_rate: 0
  beta1: 0.9
  beta2: 0.95
  epsilon: 1.0e-08
  weight_decay: 0.1
  momentum: 0
  clip_norm: 0
  seed: 1234
placements:
  residual_over_tp: Replicate
  parameters_over_dp: Replicate
  gradients_over_dp: FlatShard
  optimizer_over_dp: FlatShard
  parameters_over_tp:
    "attention.qkv.weight": Replicate
    "embedding.weight": Replicate
schedule:
  - "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"
  - "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
search:
  objective: cost
  candidates: 120
  infeasible_memory: 3
  pruned_by_bound: 80
  simulated: 37
  seconds: 0.125
  certified: false
  gap: 0.0625
notes:
  - "uses 4 of 4 devices: \"all\""
  - "two\x0alines, a tab\x09 and a back\\slash"
  - ""
  - "ü"
alternatives:
  - layout:
      devices: 2
      dp: 1
      tp: 2
)";
  std::string wanted = expected;
  const Plan plan = some_plan();
  wanted.replace(wanted.find("PLAN_ID"), 7, plan_id(plan.model, plan.training, plan.spec));
  CHECK(text.substr(0, wanted.size()) == wanted);
  CHECK(text.find("model: |\n  # a tiny model\n  name: tiny\n\n  layers: 3\ncluster:\n  name: four cores\n") !=
        std::string::npos);
}

TEST_CASE("Any model text comes back exactly") {
  for (const std::string& text :
       std::vector<std::string>{"name: a\n", "name: a", "", "\n", "  indented: first\n", "\n\nname: a\n\n\n",
                                "a: |\n  b\n   c\n", "tab:\there\n", "trailing: blank   \n   \n", "a\r\nb\r\n",
                                "# --- \n---\nx: \"y\"\n...\n", "bell\a\n", "a\n  ", "\tx\n", "ü: ∑\n"}) {
    Plan plan = some_plan();
    plan.model_text = text;
    CHECK(read_plan(write_plan(plan), "plan.yaml").model_text == text);
  }
}

TEST_CASE("A plan says what is trained only where that is not everything, and reads it back") {
  Plan plan = some_plan();
  CHECK(write_plan(plan).find("trainable:") == std::string::npos);
  CHECK(write_plan(plan).find("lora:") == std::string::npos);
  const Trainable parts{.all = false, .patterns = {"head", "*norm.weight"}};
  const Lora lora{.r = 16, .alpha = 0.1, .target_modules = {"attention.qkv", "up"}};
  for (const auto& [trainable, adapters] : {std::pair(parts, std::optional<Lora>()),
                                            {parts, lora},
                                            {Trainable{.all = false, .patterns = {}}, Lora{}},
                                            {Trainable{}, lora}}) {
    plan.training.trainable = trainable;
    plan.training.lora = adapters;
    const std::string text = write_plan(plan);
    INFO(text);
    CHECK(read_plan(text, "plan.yaml").training == plan.training);
  }
}

TEST_CASE("A plan without alternatives, notes, placements or gap is read back too") {
  Plan plan = some_plan();
  plan.alternatives.clear();
  plan.notes.clear();
  plan.placements.parameters.clear();
  plan.search.gap.reset();
  plan.search.certified = true;
  check_equal(plan, read_plan(write_plan(plan), "plan.yaml"));
  plan.search.cut_gap = 0.03125;
  check_equal(plan, read_plan(write_plan(plan), "plan.yaml"));
  plan.search.left_out = {{.what = "hybrid: sharding", .gap = 0.0625, .options = {"--dp-shard"}},
                          {.what = "pipelines", .gap = 0.0, .options = {"--schedule a", "--schedule b"}},
                          {.what = "rings", .gap = std::nullopt}};
  const std::string text = write_plan(plan);
  CHECK(text.find("options: [\"--schedule a\", \"--schedule b\"]") != std::string::npos);
  check_equal(plan, read_plan(text, "plan.yaml"));
  // Plans of older versions name one.
  std::string older = text;
  older.replace(older.find("options: [\"--dp-shard\"]"), 23, "option: \"--dp-shard\"");
  check_equal(plan, read_plan(older, "plan.yaml"));
}

TEST_CASE("alternatives on other groups of nodes say which, and groups that the plan lacks are written once") {
  Plan plan = some_plan();
  NodeGroup fast = plan.cluster.groups.front();
  fast.device.name = "fast";
  fast.device.peak_tf32 = FlopsPerSecond(1e12);
  Cluster both = plan.cluster;
  both.groups.insert(both.groups.begin(), fast);
  Cluster alone = plan.cluster;
  alone.groups = {fast};
  TrainingSpec other = plan.training;
  other.precision = DataType::tf32;
  plan.alternatives.push_back(plan.alternatives.front());
  plan.alternatives[0].on = OtherDevices{.cluster = both, .training = plan.training};
  plan.alternatives[2].on = OtherDevices{.cluster = alone, .training = other};
  const std::string text = write_plan(plan);
  CHECK(text.find("    groups: [1, 0]\n    precision: fp32\n") != std::string::npos);
  CHECK(text.find("    groups: [1]\n    precision: tf32\n") != std::string::npos);
  CHECK(text.find("name: fast\n") == text.rfind("name: fast\n"));
  CHECK(text.find("\nother_groups:\n") > text.find("\ncluster:\n"));
  check_equal(plan, read_plan(text, "plan.yaml"));
  std::string wrong = text;
  wrong.replace(wrong.find("groups: [1, 0]"), 14, "groups: [2, 0]");
  CHECK(error_of<ConfigError>([&] { read_plan(wrong, "plan.yaml"); })
            .find("group 2 of 2: groups of nodes are numbered from 0, those of other_groups behind the cluster's") !=
        std::string::npos);
  wrong = text;
  wrong.erase(wrong.find("    groups: [1, 0]\n"), 19);
  CHECK(error_of<ConfigError>([&] { read_plan(wrong, "plan.yaml"); }).find("has the plan's precision; name its") !=
        std::string::npos);
  wrong = text;
  wrong.replace(wrong.find("groups: [1, 0]"), 14, "groups: [ ]");
  CHECK(error_of<ConfigError>([&] { read_plan(wrong, "plan.yaml"); }).find("is on one group of nodes at least") !=
        std::string::npos);
  const auto place_of = [&](const char* part, int column) {
    const std::size_t at = wrong.find(part);
    return fmt::format("plan.yaml:{}:{}: error: ", 1 + std::count(wrong.begin(), wrong.begin() + at, '\n'), column);
  };
  wrong = text;
  wrong.replace(wrong.find("groups: [1, 0]"), 14, "groups: [1, 1]");
  CHECK(error_of<ConfigError>([&] { read_plan(wrong, "plan.yaml"); }) ==
        place_of("groups: [1, 1]", 17) +
            "group 1 a second time: an alternative has the nodes of a group once; leave one out");
  // The plan's precision may be emulated, as it was asked for; another is one that devices have.
  wrong = text;
  wrong.replace(wrong.find("    groups: [1]\n    precision: tf32"), 35, "    groups: [0]\n    precision: tf32");
  CHECK(error_of<ConfigError>([&] { read_plan(wrong, "plan.yaml"); }) ==
        place_of("precision: tf32", 16) + plan.cluster.groups.front().device.name +
            " has no units for tf32; expected a precision that all devices of the alternative have, or the plan's own, "
            "fp32");
}

TEST_CASE("alternatives on several groups of equal nodes have each of them once") {
  const std::string source = PARPLAN_SOURCE_DIR;
  Plan plan = some_plan();
  plan.cluster = find_cluster("dgx-a100", {source + "/configs/devices", source + "/configs/clusters"},
                              {.device = {}, .network = {}, .devices = 8, .nodes = {}});
  NodeGroup fast = plan.cluster.groups.front();
  fast.device.name = "fast";
  Cluster three = plan.cluster;
  three.groups = {fast, plan.cluster.groups.front(), fast};
  plan.alternatives[0].on = OtherDevices{.cluster = three, .training = plan.training};
  const std::string text = write_plan(plan);
  CHECK(text.find("    groups: [1, 0, 2]\n") != std::string::npos);
  check_equal(plan, read_plan(text, "plan.yaml"));
}

TEST_CASE("A plan names the buffers for arriving activations only where there is one more") {
  Plan plan = some_plan();
  CHECK(write_plan(plan).find("input_slots") == std::string::npos);
  plan.spec.input_slots = InputSlots::one_more;
  const std::string text = write_plan(plan);
  CHECK(text.find("  stage_blocks: [2, 3]\n  input_slots: in_flight+1\n") != std::string::npos);
  CHECK(read_plan(text, "plan.yaml").spec == plan.spec);
}

TEST_CASE("A plan says how far ahead parameters are gathered where that is not one block") {
  Plan plan = some_plan();
  plan.spec.zero_stage = 3;
  plan.placements.state.parameters.dp = flat_shard();
  CHECK(write_plan(plan).find("prefetch_depth") == std::string::npos);
  for (const int depth : {0, 2}) {
    plan.spec.prefetch_depth = depth;
    const std::string text = write_plan(plan);
    CHECK(text.find(fmt::format("  prefetch_depth: {}\n", depth)) != std::string::npos);
    CHECK(read_plan(text, "plan.yaml").spec == plan.spec);
  }
}

TEST_CASE("A plan says what is gathered at once only where that is one parameter") {
  Plan plan = some_plan();
  plan.spec.zero_stage = 3;
  plan.placements.state.parameters.dp = flat_shard();
  CHECK(write_plan(plan).find("gather_unit") == std::string::npos);
  plan.spec.gather_unit = GatherUnit::parameter;
  const std::string text = write_plan(plan);
  CHECK(text.find("  gather_unit: parameter\n") != std::string::npos);
  CHECK(read_plan(text, "plan.yaml").spec == plan.spec);
}

TEST_CASE("A plan names its virtual stages only where the schedule interleaves them") {
  Plan plan = some_plan();
  CHECK(write_plan(plan).find("virtual_stages") == std::string::npos);
  CHECK(error_with("schedule: 1f1b", "schedule: 1f1b\n  virtual_stages: 2")
            .ends_with("the key goes with schedule interleaved, zero_bubble_v or dualpipe_v on 2 or more pipeline "
                       "ranks, and the schedule is 1f1b on 2"));
  plan.spec.schedule = ScheduleKind::interleaved;
  plan.spec.virtual_stages = 2;
  plan.spec.stage_blocks = {1, 2, 1, 1};
  plan.schedule = {.rank_of_stage = {0, 1, 0, 1}, .ranks = {}, .exchanges = 4};
  for (const std::string rank : {"0F0 0F1 0F2 0F3 2F0 2F1 2F2 2B0 2F3 2B1 2B2 0B0 0B1 0B2 2B3 0B3",
                                 "1F0 1F1 1F2 1F3 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2 3F3 3B3 1B3"}) {
    auto& actions = plan.schedule.ranks.emplace_back();
    for (std::size_t i = 0; i < rank.size(); i += 4) actions.push_back(parse_action(rank.substr(i, 3)));
  }
  plan.spec.micro_batch_group = 4;
  REQUIRE(!find_fault(plan.schedule, 4));
  const std::string text = write_plan(plan);
  CHECK(text.find("  schedule: interleaved\n  virtual_stages: 2\n  micro_batch_group: 4\n") != std::string::npos);
  check_equal(plan, read_plan(text, "plan.yaml"));
}

TEST_CASE("A plan names the micro-batches of its replicas only where these are unlike") {
  Plan plan = some_plan();
  CHECK(write_plan(plan).find("replica_micro_batches") == std::string::npos);
  plan.spec.replica_micro_batches = {5, 3};
  plan.spec.zero_stage = 1;
  plan.placements.state.gradients.dp = replicate();
  plan.schedule.ranks[0].push_back({0, Phase::forward, 4});
  plan.schedule.ranks[0].push_back({0, Phase::backward, 4});
  plan.schedule.ranks[1].push_back({1, Phase::forward, 4});
  plan.schedule.ranks[1].push_back({1, Phase::backward, 4});
  plan.prediction.memory_stage = 1;
  plan.prediction.memory_replica = 1;
  const std::string text = write_plan(plan);
  CHECK(text.find("  zero_stage: 1\n  replica_micro_batches: [5, 3]\n  micro_batch: 2\n  micro_batches: 5\n") !=
        std::string::npos);
  CHECK(text.find("  memory_stage: 1\n  memory_replica: 1\n") != std::string::npos);
  check_equal(plan, read_plan(text, "plan.yaml"));
  CHECK(plan_id(plan.model, plan.training, plan.spec) != plan_id(plan.model, plan.training, some_plan().spec));
  const auto error_for = [&](const std::string& from, const std::string& to) {
    std::string other = text;
    other.replace(other.find(from), from.size(), to);
    const std::string error = error_of<ConfigError>([&] { read_plan(other, "plan.yaml"); });
    return error.substr(error.find("error: "));
  };
  CHECK(error_for("[5, 3]", "[5, 2, 1]") == "error: replica_micro_batches names 3 replicas, and dp is 2");
  CHECK(error_for("[5, 3]", "[5, 2]") ==
        "error: replica_micro_batches [5, 2] are 7 micro-batches of 2, and the global batch is 16");
  CHECK(error_for("[5, 3]", "[8, 0]").starts_with("error: expected a whole number from 1 to 16, found '0'"));
  CHECK(error_for("micro_batches: 5", "micro_batches: 4") ==
        "error: the most of replica_micro_batches is 5, and micro_batches is 4");
  CHECK(error_for("1B4", "1I4 1W4") ==
        "error: 1B2 is a whole backward and 1I4 the first part of one, and both are the last of replicas with unlike "
        "numbers of micro-batches, which reduce gradients together: write both alike");
}

TEST_CASE("A plan says how tied gradients add up only where each use has an accumulator") {
  Plan plan = some_plan();
  CHECK(write_plan(plan).find("tied_gradients") == std::string::npos);
  plan.spec.tied_gradients = TiedGradients::apart;
  const std::string text = write_plan(plan);
  CHECK(text.find("  stage_blocks: [2, 3]\n  tied_gradients: apart\n") != std::string::npos);
  CHECK(read_plan(text, "plan.yaml").spec == plan.spec);
  CHECK(plan_id(plan.model, plan.training, plan.spec) !=
        plan_id(plan.model, plan.training, some_plan().spec));
  const std::string line = "stage_blocks: [2, 3]\n";
  CHECK(read_plan(edited(line, line + "  tied_gradients: together\n"), "plan.yaml").spec == some_plan().spec);
  CHECK(error_with(line, line + "  tied_gradients: summed\n").find("expected one of together, apart, found 'summed'") !=
        std::string::npos);
}

TEST_CASE("Every axis order, schedule, ZeRO stage, optimizer and precision is read back") {
  Plan plan = some_plan();
  plan.alternatives.clear();
  for (const AxisOrder& order :
       {AxisOrder{Axis::pp, Axis::dp, Axis::tp}, AxisOrder{Axis::tp, Axis::dp, Axis::pp},
        AxisOrder{Axis::dp, Axis::tp, Axis::pp}}) {
    plan.spec.mesh.order = order;
    CHECK(read_plan(write_plan(plan), "plan.yaml").spec == plan.spec);
  }
  for (int stage : {0, 1, 2, 3}) {
    plan.spec.zero_stage = stage;
    plan.placements.state.optimizer.dp = stage >= 1 ? flat_shard() : replicate();
    plan.placements.state.gradients.dp = stage >= 2 ? flat_shard() : replicate();
    plan.placements.state.parameters.dp = stage >= 3 ? flat_shard() : replicate();
    CHECK(read_plan(write_plan(plan), "plan.yaml").placements == plan.placements);
  }
  for (DataType precision : {DataType::fp32, DataType::tf32, DataType::bf16, DataType::fp16}) {
    plan.training.precision = precision;
    for (Optimizer optimizer : all_optimizers) {
      plan.training.optimizer = optimizer;
      for (LearningRateSchedule schedule :
           {LearningRateSchedule::constant, LearningRateSchedule::cosine, LearningRateSchedule::linear}) {
        plan.training.schedule = schedule;
        CHECK(read_plan(write_plan(plan), "plan.yaml").training == plan.training);
      }
    }
  }
}

TEST_CASE("A long schedule is read back") {
  Plan plan = some_plan();
  plan.training.global_batch = 4 * 1024;
  plan.alternatives.clear();
  std::vector<std::vector<Action>> ranks(2);
  for (int s = 0; s < 2; ++s)
    for (Phase phase : {Phase::forward, Phase::backward})
      for (int m = 0; m < 1024; ++m) ranks[s].push_back({s, phase, m});
  plan.schedule = one_stage_a_rank(std::move(ranks));
  CHECK(read_plan(write_plan(plan), "plan.yaml").schedule == plan.schedule);
}

TEST_CASE("The plan's id depends on what decides how it runs") {
  const Plan plan = some_plan();
  const std::string id = plan_id(plan.model, plan.training, plan.spec);
  CHECK(id.size() == 8);
  CHECK(id.find_first_not_of("0123456789abcdef") == std::string::npos);
  CHECK(id == plan_id(plan.model, plan.training, plan.spec));
  std::vector<std::string> ids = {id};
  const auto differs = [&](const ModelSummary& model, const TrainingSpec& training, const ParallelSpec& spec) {
    const std::string other = plan_id(model, training, spec);
    CHECK(std::find(ids.begin(), ids.end(), other) == ids.end());
    ids.push_back(other);
  };
  ModelSummary model = plan.model;
  model.parameters += 1;
  differs(model, plan.training, plan.spec);
  TrainingSpec training = plan.training;
  training.seed += 1;
  differs(plan.model, training, plan.spec);
  ParallelSpec spec = plan.spec;
  spec.mesh.order = {Axis::pp, Axis::dp, Axis::tp};
  differs(plan.model, plan.training, spec);
  spec = plan.spec;
  spec.stage_blocks = {3, 2};
  differs(plan.model, plan.training, spec);
  spec = plan.spec;
  spec.recompute = Recompute::none;
  differs(plan.model, plan.training, spec);
}

TEST_CASE("An id that no longer fits, or none, is no error") {
  const Plan plan = some_plan();
  const std::string line = "plan_id: \"" + plan_id(plan.model, plan.training, plan.spec) + "\"\n";
  check_equal(plan, read_plan(edited(line, "plan_id: \"00000000\"\n"), "plan.yaml"));
  check_equal(plan, read_plan(edited(line, ""), "plan.yaml"));
}

TEST_CASE("What is no plan is called what it is") {
  const auto error = [](const std::string& text) {
    return error_of<ConfigError>([&] { read_plan(text, "plan.yaml"); });
  };
  CHECK(error("name: gpt2\n") == "plan.yaml:1:1: error: missing key 'schema' at the top level");
  CHECK(error("just text\n") == "plan.yaml:1:1: error: expected a map with key 'schema', found 'just text'");
  CHECK(error_with("parplan.plan/1", "parplan.plan/2") ==
        value_place("schema: parplan.plan/1") + "expected schema 'parplan.plan/1', found 'parplan.plan/2'");
}

TEST_CASE("Unknown and missing keys are errors in every part") {
  CHECK(error_with("backend: cpu", "backend: cpu\nnode: 3") ==
        "plan.yaml:5:1: error: unknown key 'node'; allowed: schema, plan_id, backend, layout, prediction, training, "
        "placements, schedule, search, notes, alternatives, model_summary, model, cluster, other_groups");
  CHECK(
      error_with("zero_stage: 2", "zero_stagee: 2") ==
      place_of("zero_stage: 2") +
          "unknown key 'zero_stagee'; allowed: devices, dp, tp, pp, cp, mesh_order, sequence_parallel, cp_method, "
          "cp_ulysses, zero_stage, dp_shard, replica_micro_batches, micro_batch, micro_batches, schedule, "
          "virtual_stages, "
          "micro_batch_group, recompute, stage_recompute, recompute_layers, stage_blocks, tied_gradients, input_slots, "
          "offload, offload_layers, dp_method, tp_overlap, prefetch_depth, gather_unit; did you mean 'zero_stage'?");
  CHECK(error_with("time_bubble_s", "time_idle_s").find("unknown key 'time_idle_s'; allowed: time_compute_s, ") !=
        std::string::npos);
  CHECK(error_with("warmup_steps", "warm_steps").find("unknown key 'warm_steps'; allowed: global_batch, ") !=
        std::string::npos);
  CHECK(error_with("residual_over_tp", "residual") ==
        place_of("residual_over_tp") +
            "unknown key 'residual'; allowed: residual_over_tp, parameters_over_tp, residual_over_cp, "
            "parameters_over_dp, gradients_over_dp, optimizer_over_dp; did you mean 'residual_over_tp' or "
            "'residual_over_cp'?");
  CHECK(error_with("  candidates: 120\n", "") == 
        place_of("objective: cost") + "missing key 'candidates' in 'search'");
  CHECK(error_with("  tp: 1\n", "") == place_of("devices: 4") + "missing key 'tp' in 'layout'");
  CHECK(error_with("  - layout:", "  - layouts:")
            .find("unknown key 'layouts'; allowed: layout, prediction, groups, precision; did you mean 'layout'?") !=
        std::string::npos);
  CHECK(error_with("flops_per_sample", "flops")
            .find("unknown key 'flops'; allowed: name, parameters, flops_per_sample") != std::string::npos);
}

TEST_CASE("A plan without an objective has least time") {
  CHECK(read_plan(edited("  objective: cost\n", ""), "plan.yaml").search.objective == Objective::time);
  CHECK(error_with("objective: cost", "objective: costs") ==
        value_place("objective: cost") + "expected one of time, cost, memory, found 'costs'; did you mean 'cost'?");
}

TEST_CASE("A layout that does not add up says how") {
  CHECK(error_with("devices: 4", "devices: 3") ==
        value_place("devices: 4") + "dp 2 x tp 1 x pp 2 is 4 devices, and devices is 3");
  CHECK(error_with("devices: 4\n  dp: 2", "devices: 8\n  dp: 4") ==
        value_place("devices: 4") + "the layout takes 8 devices, and the cluster has 4");
  CHECK(error_with("micro_batch: 2", "micro_batch: 3") ==
        value_place("micro_batch: 2") + "a global batch of 16 is no multiple of dp 2 x micro_batch 3");
  CHECK(error_with("micro_batches: 4", "micro_batches: 5") ==
        value_place("micro_batches: 4") +
            "a global batch of 16 over dp 2 x micro_batch 2 makes 4 micro-batches, and micro_batches is 5");
  CHECK(error_with("stage_blocks: [2, 3]", "stage_blocks: [5]") ==
        value_place("stage_blocks: [2, 3]") + "stage_blocks has 1 stages, and pp is 2");
  CHECK(error_with("stage_blocks: [2, 3]", "stage_blocks: [0, 5]")
            .find("expected a whole number from 1 to 2147483647, found '0'") != std::string::npos);
  CHECK(error_with("sequence_parallel: false", "sequence_parallel: true") ==
        value_place("sequence_parallel: false") +
            "sequence parallelism spreads work over tensor-parallel ranks, and there is 1 (tp 1)");
  CHECK(error_with("zero_stage: 2", "zero_stage: 4") ==
        value_place("zero_stage: 2") + "expected a whole number from 0 to 3, found '4'");
  CHECK(error_with("mesh_order: dp-pp-tp", "mesh_order: dp-tp").find(value_place("mesh_order: dp-pp-tp")) == 0);
  CHECK(error_with("schedule: 1f1b", "schedule: 1b1f") ==
        value_place("schedule: 1f1b") +
            "expected one of gpipe, 1f1b, interleaved, zero_bubble_h1, zero_bubble_v, dualpipe_v, found '1b1f'");
  CHECK(error_with("recompute: full", "recompute: fully") ==
        value_place("recompute: full") +
            "expected one of none, norms, activation, norms+activation, core_attn, core_attn+norms, "
            "core_attn+activation, core_attn+norms+activation, mlp, norms+mlp, core_attn+mlp, core_attn+norms+mlp, "
            "every_other_product, full, per_stage, found 'fully'; did you mean 'full'?");
  CHECK(error_with("recompute: full", "recompute: per_stage").find("missing key 'stage_recompute'") !=
        std::string::npos);
  CHECK(error_with("recompute: full", "recompute: full\n  stage_recompute: [full, none]").find(
            "stage_recompute goes with recompute per_stage, and recompute is full") != std::string::npos);
  CHECK(error_with("recompute: full", "recompute: per_stage\n  stage_recompute: [full]")
            .find("stage_recompute has 1 stages, and pp is 2") != std::string::npos);
  for (const std::string stage : {"full:", "full:0", "full:2x", "none:1", "fully:1", "full:99999999999"})
    CHECK(error_with("recompute: full", "recompute: per_stage\n  stage_recompute: ['" + stage + "', none]")
              .find("'" + stage +
                    "' is not what a stage recomputes; write a way to recompute, alone for all layers of "
                    "the stage, or with the number of its first layers that recompute: full:3") != std::string::npos);
  CHECK(error_with("recompute: full", "recompute: per_stage\n  stage_recompute: [fully, none]")
            .find("found 'fully'; did you mean 'full'?") != std::string::npos);
  CHECK(error_with("recompute: full", "recompute: none\n  recompute_layers: 2")
            .find("recompute_layers says how many layers of each stage recompute, and recompute is none: leave the key "
                  "out, or say what they recompute") != std::string::npos);
  CHECK(error_with("recompute: full", "recompute: per_stage\n  stage_recompute: [full, none]\n  recompute_layers: 2")
            .find("and recompute is per_stage: write the number behind each stage's own, such as full:3") !=
        std::string::npos);
  CHECK(error_with("recompute: full", "recompute: full\n  recompute_layers: 0")
            .find("expected a whole number from 1 to ") != std::string::npos);
  CHECK(error_with("recompute: full", "recompute: full\n  offload_layers: 2")
            .find("offload_layers says of how many layers of each stage activations leave the device, and offload is "
                  "none: leave the key out, or write activations among what is offloaded") != std::string::npos);
  CHECK(error_with("recompute: full", "recompute: full\n  offload: activations\n  offload_layers: 0")
            .find("expected a whole number from 1 to ") != std::string::npos);
  // The stage cut of an alternative must be of the same model.
  CHECK(error_with("stage_blocks: [5]", "stage_blocks: [6]") ==
        value_place("stage_blocks: [5]") + "the stages hold 6 blocks, and the plan's own hold 5");
}

TEST_CASE("Placements that contradict the layout are errors") {
  CHECK(error_with("gradients_over_dp: FlatShard", "gradients_over_dp: Replicate") ==
        value_place("gradients_over_dp: FlatShard") + "with zero_stage 2 it is FlatShard, found Replicate");
  CHECK(error_with("parameters_over_dp: Replicate", "parameters_over_dp: FlatShard") ==
        value_place("parameters_over_dp: Replicate") + "with zero_stage 2 it is Replicate, found FlatShard");
  CHECK(error_with("residual_over_tp: Replicate", "residual_over_tp: Shard(sequence)") ==
        value_place("residual_over_tp: Replicate") +
            "with sequence_parallel false it is Replicate, found Shard(sequence)");
  CHECK(error_with("\"embedding.weight\": Replicate", "\"embedding.weight\": FlatShard") ==
        value_place("\"embedding.weight\": Replicate") +
            "a parameter over tp is Replicate or Shard(dim), found FlatShard");
  CHECK(error_with("\"embedding.weight\": Replicate", "\"embedding.weight\": Shard(vocabularies)") ==
        value_place("\"embedding.weight\": Replicate") +
            "expected a placement, one of Replicate, Shard(sequence), Shard(batch), Shard(hidden), Shard(kv_groups), "
            "Shard(feature), Shard(vocabulary), Shard(position), Shard(adapter), FlatShard, Partial(sum), "
            "Partial(max), First, found 'Shard(vocabularies)'; did you mean 'Shard(vocabulary)'?");
}

TEST_CASE("A schedule's actions may stand between commas, as in PyTorch's CSV") {
  const Plan spaces = read_plan(write_plan(some_plan()), "plan.yaml");
  const std::string commas = edited("0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "0F0,0F1,0B0, 0F2,,0B1,0F3,0B2,0B3,");
  CHECK(read_plan(commas, "plan.yaml").schedule == spaces.schedule);
  // An order of its own, in that grammar.
  const std::string other = edited("1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3", "1F0,1F1,1B0,1B1,1F2,1B2,1F3,1B3");
  const Plan own = read_plan(other, "plan.yaml");
  CHECK(own.schedule.ranks[1][1] == Action{1, Phase::forward, 1});
  CHECK(error_with("1F0 1B0 1F1", "1F0,1X0,1F1").find("found '1X0'") != std::string::npos);
}

TEST_CASE("A faulty schedule is an error at its place") {
  const std::string schedule = place_of("- \"0F0 ");
  CHECK(error_with(" 1B3\"", "\"") == schedule + "stage 1 never runs 1B3");
  CHECK(error_with("\"1F0 1B0 1F1 1B1", "\"1F0 1F1 1B1 1B0") ==
        schedule + "stage 1 runs 1B0 after 1B1; backwards must run in ascending order of micro-batches");
  CHECK(error_with("\"0F0 0F1 0B0 0F2", "\"0F0 0B0 0F1 0F2") == "no error");
  CHECK(error_with("\"1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3\"", "\"1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3\"") ==
        schedule + "the schedule cannot run to its end: 0B0 waits for 1B0, 1F2 waits for 0F2");
  CHECK(error_with("  - \"1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3\"\n", "") ==
        schedule + "the schedule has 1 stages, and pp is 2");
  CHECK(error_with("\"1F0 1B0", "\"1F0 1I0 1W0") ==
        schedule +
            "stage 1 runs backwards in two parts (I and W), which needs whole gradients until the second, and "
            "zero_stage is 2; legal stages: 0, 1");
  CHECK(error_with("\"1F0 1B0", "\"1F0 1X0") ==
        place_of("\"1F0 1B0") +
            "expected an action: a stage, F (forward), B (backward), I or W (its two parts: gradients of inputs, of "
            "weights), and a micro-batch, such as 2F0; found '1X0'");
}

TEST_CASE("Numbers out of range and a backend that is not the cluster's are errors") {
  CHECK(error_with("time_bubble_s: 0.30000000000000004", "time_bubble_s: -1") ==
        value_place("time_bubble_s: 0.30000000000000004") + "expected a number of at least 0, found -1");
  CHECK(error_with("time_bubble_s: 0.30000000000000004", "time_bubble_s: nan") ==
        value_place("time_bubble_s: 0.30000000000000004") + "expected a number, found 'nan'");
  CHECK(error_with("beta2: 0.95", "beta2: 1") ==
        value_place("beta2: 0.95") + "expected a number of at least 0 and below 1, found 1");
  CHECK(error_with("memory_buffers_bytes: 16000", "memory_buffers_bytes: 16 KiB") ==
        value_place("memory_buffers_bytes: 16000") +
            "expected a whole number from 0 to 1152921504606846976, found '16 KiB'");
  CHECK(error_with("global_batch: 16", "global_batch: 0") ==
        value_place("global_batch: 16") + "expected a whole number of at least 1, found '0'");
  CHECK(error_with("precision: fp32", "precision: int32") ==
        value_place("precision: fp32") + "expected one of fp32, tf32, bf16, fp16, fp8, found 'int32'");
  CHECK(error_with("backend: cpu", "backend: cuda") ==
        value_place("backend: cpu") + "backend is cuda, and the cluster's core has backend cpu");
}

TEST_CASE("Errors inside the cluster have their place in the plan") {
  CHECK(error_with("overhead: 16 MiB", "overhead: 16 Mib").find("plan.yaml:") == 0);
}
