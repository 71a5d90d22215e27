#include "tests/numerics/random_plans.h"

#include <algorithm>
#include <initializer_list>
#include <map>
#include <optional>
#include <random>
#include <utility>
#include <variant>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/cluster/find_cluster.h"
#include "planner/graph/trained_file.h"
#include "planner/graph/trained_graph.h"
#include "planner/parallel/techniques.h"
#include "planner/plan/layout_choices.h"
#include "planner/plan/parallel_spec_text.h"
#include "planner/plan/unlike_replicas.h"
#include "planner/schedule/schedules.h"
#include "planner/search/space_rows.h"
#include "tests/numerics/plan_runs.h"
#include "tests/planner/schedule/random_orders.h"

namespace parplan::testing {
namespace {

constexpr int devices = 12;

unsigned below(std::size_t count, std::mt19937& random) { return random() % static_cast<unsigned>(count); }

template <class T>
T pick(std::initializer_list<T> from, std::mt19937& random) {
  return from.begin()[below(from.size(), random)];
}

template <class List>
void shuffle(List& list, std::mt19937& random) {
  for (std::size_t left = list.size(); left > 1; --left) std::swap(list[left - 1], list[below(left, random)]);
}

// ---- problems ----

OpGraph random_model(std::mt19937& random) {
  static const std::map<std::string, ModelSpec> specs = [] {
    std::map<std::string, ModelSpec> all;
    for (const std::string model : {"tiny-gpt2", "tiny-llama", "tiny-mlp", "tiny-bert", "tiny-t5", "tiny-vit"})
      all[model] = load_model(fmt::format("{}/tests/data/models/{}.yaml", PARPLAN_SOURCE_DIR, model), "").spec;
    return all;
  }();
  ModelSpec spec = std::next(specs.begin(), below(specs.size(), random))->second;
  if (!reads_images(spec)) spec.tied_embeddings = pick({false, true}, random);
  if (spec.kv_heads < spec.heads) spec.kv_heads = pick({1, 2}, random);
  // So that most cuts of most pipelines have several layers in a stage.
  if (spec.family != Family::encoder_decoder) spec.layers = pick({2, 4, 6}, random);
  return build_graph(spec, reads_images(spec) ? tokens_of_image(spec) : sequence);
}

void train_random_parts(TrainingSpec& training, OpGraph& graph, std::mt19937& random) {
  for (;;) {
    training.trainable = {};
    training.lora.reset();
    const unsigned how = below(4, random);  // all; all and adapters; parts; adapters
    if (how == 0) return;
    if (how != 1) {
      training.trainable.all = false;
      if (how == 3 && below(3, random) == 0) training.trainable.patterns = {"head"};
      if (how == 2) training.trainable.patterns = {graph.blocks[below(graph.blocks.size(), random)].name};
      if (how == 2 && below(2, random) == 0)
        training.trainable.patterns = {
            pick<std::string>({"bias", "*norm.weight", "head*", "down", "encoder.position"}, random)};
    }
    if (how != 2) {
      const auto r = pick<std::int64_t>({1, 3, 8}, random);
      training.lora = Lora{.r = r, .alpha = static_cast<double>(r), .target_modules = {}};
      if (below(3, random) == 0)
        training.lora->target_modules = {
            pick<std::string>({"attention.output", "attention.qkv", "up", "down"}, random)};
    }
    if (!find_problem(training, graph)) break;
  }
  graph = as_trained(training, std::move(graph));
}

TrainingSpec random_training(std::mt19937& random) {
  TrainingSpec training = training_of();
  training.global_batch = pick<std::int64_t>({8, 12, 16}, random);
  training.optimizer = all_optimizers[below(all_optimizers.size(), random)];
  if (training.optimizer == Optimizer::sgd && below(2, random) == 0) training.momentum = 0.9;
  if (training.optimizer == Optimizer::muon) training.momentum = default_muon_momentum;
  if (below(2, random) == 0) training.clip_norm = 0.5;
  return training;
}

// Nodes of four cores, all alike or of two kinds, whose hosts and drives have rates.
Cluster random_cluster(std::mt19937& random) {
  static const Cluster two_kinds = [] {
    const std::string source = PARPLAN_SOURCE_DIR;
    Cluster cluster = find_cluster(source + "/tests/data/clusters/cpu-two-kinds.yaml",
                                   {source + "/configs/devices", source + "/configs/clusters"}, {});
    for (NodeGroup& group : cluster.groups) {
      group.host = {.memory = Bytes(std::int64_t{1} << 36),
                    .memory_bandwidth = BytesPerSecond(1e10),
                    .link = BytesPerSecond(1e10)};
      group.nvme = {.read = BytesPerSecond(6e9),
                    .write = BytesPerSecond(3e9),
                    .latency = Seconds(1e-5),
                    .capacity = Bytes(std::int64_t{1} << 40)};
    }
    return cluster;
  }();
  Cluster cluster = two_kinds;
  const int of_first = pick({1, 2, 3}, random);
  cluster.groups[0].nodes = of_first;
  cluster.groups[1].nodes = devices / 4 - of_first;
  if (of_first == devices / 4) cluster.groups.pop_back();
  return cluster;
}

// ---- layouts ----

// Sums to `whole`, each at least 1.
std::vector<int> random_parts(int whole, int count, std::mt19937& random) {
  std::vector<int> parts(static_cast<std::size_t>(count), 1);
  for (int left = whole - count; left > 0; --left) ++parts[below(parts.size(), random)];
  return parts;
}

// A random value of a choice; legal or not, but for what its type alone rules out. A new type of
// values is one function more.
struct RandomValue {
  const ChoiceRow& row;
  const RandomPlan& plan;
  std::mt19937& random;

  ChoiceValue operator()(bool) const { return below(2, random) == 0; }
  ChoiceValue operator()(std::int64_t plain) const {
    std::vector<std::int64_t> values = {plain};
    for (const std::int64_t value : {0, 1, 2, 3, 4, 6, 8})
      if (value >= row.minimum && value <= row.maximum && value != plain) values.push_back(value);
    return values[below(values.size(), random)];
  }
  ChoiceValue operator()(const AxisOrder&) const {
    std::vector<ChoiceValue> values;
    space_row_of(row.choice)
        .values({.graph = plan.graph, .training = plan.training, .devices = devices}, plan.spec, values);
    return values[below(values.size(), random)];
  }
  ChoiceValue operator()(const std::vector<int>& plain) const {
    const ParallelSpec& spec = plan.spec;
    if (row.choice == Choice::stage_blocks)
      return random_parts(static_cast<int>(plan.graph.blocks.size()), spec.stages(), random);
    const auto micro_batches = static_cast<int>(plan.training.global_batch / spec.micro_batch);
    if (below(2, random) == 0 || micro_batches < spec.dp()) return plain;
    // Pairs of equal replicas may share out what they hold, and whole groups may be interleaved.
    const int alike = spec.dp() % 2 == 0 ? 1 + static_cast<int>(below(2, random)) : 1;
    const int group = spec.pp() > 1 && below(2, random) == 0 ? spec.pp() : 1;
    if (micro_batches % (alike * group) != 0 || micro_batches < spec.dp() * group) return plain;
    std::vector<int> shares;
    for (const int part : random_parts(micro_batches / (alike * group), spec.dp() / alike, random))
      shares.insert(shares.end(), static_cast<std::size_t>(alike), part * group);
    return shares;
  }
  template <class Named>
  ChoiceValue operator()(const Named&) const {
    std::vector<ChoiceValue> values = row.named();
    if (row.only_in_plans != nullptr) std::ranges::copy(row.only_in_plans(), std::back_inserter(values));
    return values[below(values.size(), random)];
  }
};

// What follows from a changed choice: others that no longer apply, and lists of another length.
void settle(RandomPlan& plan, std::mt19937& random) {
  ParallelSpec& spec = plan.spec;
  for (const ChoiceRow& row : choice_rows())
    if (row.applies != nullptr && !row.applies(spec)) row.set(spec, row.get(ParallelSpec{}));
  if (spec.schedule == ScheduleKind::interleaved) spec.virtual_stages = std::max(spec.virtual_stages, 2);
  const auto blocks = static_cast<int>(plan.graph.blocks.size());
  const auto stages = static_cast<std::size_t>(spec.stages());
  if (spec.stage_blocks.size() != stages && spec.stages() <= blocks)
    spec.stage_blocks = random_parts(blocks, spec.stages(), random);
  if (spec.recompute != Recompute::per_stage || spec.stage_recompute.size() == stages) return;
  spec.stage_recompute.assign(stages, {});
  const std::vector<int> layers = layers_of_stages(spec);
  for (std::size_t stage = 0; stage < stages && stage < layers.size(); ++stage) {
    StageRecompute& own = spec.stage_recompute[stage];
    own.rule = recompute_rows()[below(recompute_rows().size(), random)].kind;
    if (own.rule != Recompute::none && layers[stage] > 0 && below(2, random) == 0)
      own.layers = 1 + static_cast<int>(below(static_cast<std::size_t>(layers[stage]), random));
  }
}

// Whether plan.yaml may say so.
bool may_be(const RandomPlan& plan) {
  const ParallelSpec& spec = plan.spec;
  if (spec.mesh.size() > devices || static_cast<int>(spec.stage_blocks.size()) != spec.stages()) return false;
  for (const ChoiceRow& row : choice_rows()) {
    const bool is_written = !row.may_be_absent || row.get(spec) != row.get(ParallelSpec{});
    if (is_written && row.fault != nullptr && row.fault(spec, plan.training)) return false;
  }
  return is_legal(plan.graph, plan.training, spec);
}

// Some of the rows never give back a value that is not the plainest, so that others have to be
// legal with what few layouts allow.
void walk(RandomPlan& plan, std::mt19937& random) {
  constexpr int rounds = 4, kept = 5;
  plan.spec.stage_blocks = {static_cast<int>(plan.graph.blocks.size())};
  std::vector<const ChoiceRow*> rows;
  for (const ChoiceRow& row : choice_rows()) rows.push_back(&row);
  shuffle(rows, random);
  const std::vector<const ChoiceRow*> keepers(rows.begin(), rows.begin() + kept);
  for (int round = 0; round < rounds; ++round) {
    shuffle(rows, random);
    for (const ChoiceRow* row : rows) {
      const ParallelSpec before = plan.spec;
      const ChoiceValue plain = row->get(ParallelSpec{});
      if (row->get(before) != plain && std::ranges::find(keepers, row) != keepers.end()) continue;
      const ChoiceValue value = std::visit(RandomValue{.row = *row, .plan = plan, .random = random}, plain);
      row->set(plan.spec, value);
      settle(plan, random);
      if (!may_be(plan)) plan.spec = before;
    }
  }
}

// An order of actions that is nobody's row, where such an order runs.
std::optional<Schedule> random_order(const ParallelSpec& spec, const TrainingSpec& training, std::mt19937& random) {
  if (spec.pp() == 1) return std::nullopt;
  const PipelineShape shape = shape_of(spec, training);
  std::vector<int> ranks;
  for (int stage = 0; stage < spec.stages(); ++stage) ranks.push_back(rank_of_stage(spec, stage));
  for (int trial = 0; trial < 20; ++trial) {
    const Backwards backwards = spec.zero_stage <= 1 && below(2, random) == 0 ? Backwards::in_parts : Backwards::whole;
    Schedule schedule = spec.virtual_stages > 1
                            ? random_orders_of_several(ranks, shape.micro_batches, random, backwards)
                            : random_orders(spec.pp(), shape.micro_batches, false, random, backwards);
    schedule.exchanges = most_exchange_buffers(shape);
    if (!find_fault(schedule, shape.micro_batches) && !unlike_last_backwards(schedule, spec)) return schedule;
  }
  return std::nullopt;
}

// ---- traits ----

constexpr std::int64_t few = 8;  // numbers that count one by one

struct ValueWords {
  const ChoiceRow& row;
  const ParallelSpec& spec;

  std::string operator()(std::int64_t value) const {
    if (row.maximum - row.minimum < few) return fmt::format("{}", value);
    const auto plain = std::get<std::int64_t>(row.get(ParallelSpec{}));
    return value == plain ? "plain" : value < plain ? "less" : "more";
  }
  std::string operator()(const AxisOrder&) const {
    std::vector<Axis> own, plain;
    for (const Axis axis : spec.mesh.axes())
      if (spec.mesh.degree_of(axis) > 1) own.push_back(axis);
    DeviceMesh mesh = spec.mesh;
    mesh.order = AxisOrder();
    for (const Axis axis : mesh.axes())
      if (mesh.degree_of(axis) > 1) plain.push_back(axis);
    return own == plain ? "plain" : "other";
  }
  std::string operator()(const std::vector<int>& values) const {
    const bool alike = std::ranges::adjacent_find(values, std::ranges::not_equal_to()) == values.end();
    return alike ? "alike" : "unlike";
  }
  template <class Named>
  std::string operator()(const Named& value) const {
    return write_value(value);
  }
};

void add_offload(const Offload& offload, std::vector<Trait>& traits) {
  for (const OffloadPart& part : offload_parts())
    traits.push_back({fmt::format("offload of {}", part.name), name(offload.*part.home)});
}

std::string trained_part(const TrainingSpec& training) {
  if (training.lora) return training.trainable.all ? "all and adapters" : "adapters";
  return training.trainable.all ? "all" : "parts";
}

std::string yes_or_no(bool yes) { return yes ? "yes" : "no"; }

}  // namespace

RandomPlan random_plan(std::uint32_t seed) {
  std::mt19937 random(seed);
  RandomPlan plan;
  plan.graph = random_model(random);
  plan.training = random_training(random);
  train_random_parts(plan.training, plan.graph, random);
  plan.cluster = random_cluster(random);
  walk(plan, random);
  plan.schedule = schedule_of(plan.spec, plan.training);
  if (below(3, random) == 0)
    if (std::optional<Schedule> order = random_order(plan.spec, plan.training, random)) {
      plan.schedule = std::move(*order);
      plan.has_own_order = true;
    }
  return plan;
}

std::string describe(const RandomPlan& plan) {
  std::string text = fmt::format("{} of {} blocks{}, batch {}, {} of {}, clip {}, {}", plan.graph.name,
                                 plan.graph.blocks.size(), plan.graph.tied.empty() ? "" : " (tied)",
                                 plan.training.global_batch, name(plan.training.optimizer),
                                 describe_trained(plan.training), plan.training.clip_norm, layout_text(plan.spec));
  text += fmt::format(", cut {}, order {}, {} kinds of device", plan.spec.stage_blocks,
                      write_order(plan.spec.mesh.order), plan.cluster.groups.size());
  if (!plan.has_own_order) return text;
  for (const std::vector<Action>& rank : plan.schedule.ranks) {
    text += "\n ";
    for (const Action& action : rank) text += " " + write_action(action);
  }
  return text;
}

std::vector<Trait> traits_of(const RandomPlan& plan) {
  std::vector<Trait> traits;
  for (const ChoiceRow& row : choice_rows()) {
    const ChoiceValue value = row.get(plan.spec);
    if (const auto* offload = std::get_if<Offload>(&value))
      add_offload(*offload, traits);
    else
      traits.push_back({std::string(row.key), std::visit(ValueWords{.row = row, .spec = plan.spec}, value)});
  }
  const TrainingSpec& training = plan.training;
  traits.push_back({"model", plan.graph.name});
  traits.push_back({"tied", yes_or_no(!plan.graph.tied.empty())});
  traits.push_back({"optimizer", name(training.optimizer)});
  traits.push_back({"momentum of sgd", yes_or_no(training.optimizer == Optimizer::sgd && training.momentum > 0.0)});
  traits.push_back({"clipped", yes_or_no(training.clip_norm > 0.0)});
  traits.push_back({"trained", trained_part(training)});
  traits.push_back({"order of its own", yes_or_no(plan.has_own_order)});
  traits.push_back({"kinds of device", fmt::format("{}", plan.cluster.groups.size())});
  traits.push_back({"accumulates", yes_or_no(micro_batches(plan.spec, training) > 1)});
  return traits;
}

std::vector<Trait> named_traits() {
  std::vector<Trait> traits;
  for (const ChoiceRow& row : choice_rows()) {
    std::vector<ChoiceValue> values;
    if (row.named != nullptr) values = row.named();
    if (row.only_in_plans != nullptr) std::ranges::copy(row.only_in_plans(), std::back_inserter(values));
    for (std::int64_t number = row.minimum; row.maximum - row.minimum < few && number <= row.maximum; ++number)
      values.emplace_back(number);
    for (const ChoiceValue& value : values)
      if (const auto* offload = std::get_if<Offload>(&value))
        add_offload(*offload, traits);
      else
        traits.push_back({std::string(row.key), write_value(value)});
  }
  for (const Optimizer optimizer : all_optimizers) traits.push_back({"optimizer", name(optimizer)});
  return traits;
}

ParallelSpec plainest_of_same_bits(const RandomPlan& plan) {
  const TrainingSpec& training = plan.training;
  ParallelSpec spec = plan.spec;
  row_of(Choice::offload).set(spec, Offload{});
  row_of(Choice::recompute).set(spec, Recompute::none);
  spec.input_slots = InputSlots::in_flight;
  if (spec.tp() == 2) spec.tp_overlap = TensorOverlap::none;  // a sum of two has one order
  const bool accumulates = micro_batches(spec, training) > 1;
  if (!accumulates) spec.dp_method = DataMethod::all_reduce;
  // A norm adds up what each rank holds: by stage, and by shard.
  if (!computes_norm(training)) {
    spec.gather_unit = GatherUnit::block;
    if (spec.mesh.dp_shard > 0 && !accumulates) spec.zero_stage = 1;
    if (spec.mesh.dp_shard == 0 && (spec.zero_stage == 1 || !accumulates)) spec.zero_stage = 0;
    if (plan.graph.tied.empty() || spec.tied_gradients == TiedGradients::apart) {
      spec.mesh.degree.pp = 1;
      spec.stage_blocks = {static_cast<int>(plan.graph.blocks.size())};
    }
  }
  row_of(Choice::schedule)
      .set(spec, spec.pp() > 1 && spec.virtual_stages > 1 ? spec.schedule : ScheduleKind::one_f_one_b);
  if (spec.pp() == 1) spec.virtual_stages = 1;
  spec.prefetch_depth = 1;
  return spec;
}

}  // namespace parplan::testing
