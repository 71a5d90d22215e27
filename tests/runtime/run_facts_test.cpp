#include "runtime/run_facts.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <set>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/base/file.h"
#include "planner/base/yaml.h"
#include "planner/parallel/techniques.h"
#include "planner/plan/layout_choices.h"
#include "planner/schedule/schedules.h"

namespace parplan {
namespace {

// The names of the facts that differ.
std::set<std::string> between(const std::vector<Fact>& a, const std::vector<Fact>& b) {
  REQUIRE(a.size() == b.size());
  std::set<std::string> names;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (a[i] != b[i]) names.insert(a[i].name);
  return names;
}

Plan some_plan() {
  const std::string file = std::string(PARPLAN_SOURCE_DIR) + "/tests/data/models/tiny-gpt2.yaml";
  const OpGraph graph = build_graph(load_model(file, "").spec, 16);
  Plan plan;
  plan.model_text = "name: a";
  plan.model.name = "a";
  plan.training.global_batch = 8;
  plan.training.sequence_length = 16;
  plan.spec.mesh.degree = {.pp = 2, .dp = 2, .tp = 1};
  plan.spec.stage_blocks = {1, static_cast<int>(graph.blocks.size()) - 1};
  plan.placements = place(graph, plan.spec);
  plan.schedule = schedule_of(plan.spec, plan.training);
  const std::string cluster = std::string(PARPLAN_SOURCE_DIR) + "/tests/data/clusters/cpu-8.yaml";
  plan.cluster = read_cluster(YamlNode::parse(read_file(cluster), cluster));
  return plan;
}

}  // namespace

TEST_CASE("every field of the training is a fact of its own") {
  const Plan plan = some_plan();
  const std::vector<Fact> facts = run_facts(plan, {});
  CHECK(between(facts, run_facts(plan, {})).empty());
  const std::map<std::string, void (*)(TrainingSpec&)> changes = {
      {"global batch", [](TrainingSpec& t) { t.global_batch *= 2; }},
      {"sequence length", [](TrainingSpec& t) { t.sequence_length += 1; }},
      {"precision", [](TrainingSpec& t) { t.precision = DataType::tf32; }},
      {"optimizer", [](TrainingSpec& t) { t.optimizer = Optimizer::adam; }},
      {"learning rate", [](TrainingSpec& t) { t.learning_rate = 1e-3; }},
      {"learning rate schedule", [](TrainingSpec& t) { t.schedule = LearningRateSchedule::cosine; }},
      {"warm-up steps", [](TrainingSpec& t) { t.warmup_steps += 1; }},
      {"decay steps", [](TrainingSpec& t) { t.decay_steps += 1; }},
      {"final learning rate", [](TrainingSpec& t) { t.final_learning_rate += 1e-9; }},
      {"beta1", [](TrainingSpec& t) { t.beta1 += 1e-15; }},
      {"beta2", [](TrainingSpec& t) { t.beta2 += 1e-15; }},
      {"epsilon", [](TrainingSpec& t) { t.epsilon += 1e-20; }},
      {"weight decay", [](TrainingSpec& t) { t.weight_decay += 1e-15; }},
      {"momentum", [](TrainingSpec& t) { t.momentum += 1e-15; }},
      {"clip norm", [](TrainingSpec& t) { t.clip_norm += 1e-15; }},
      {"seed", [](TrainingSpec& t) { t.seed += 1; }},
  };
  // A field of the training that has no change here fails: plan.yaml has a line for each.
  const std::string text = write_plan(plan);
  const std::size_t begin = text.find("\ntraining:\n") + 1;
  const std::size_t end = text.find("\nplacements:\n");
  CHECK(static_cast<std::size_t>(std::count(text.begin() + static_cast<std::ptrdiff_t>(begin),
                                            text.begin() + static_cast<std::ptrdiff_t>(end), '\n')) == changes.size());
  for (const auto& change : changes) {
    Plan other = plan;
    change.second(other.training);
    CHECK(other.training != plan.training);
    CAPTURE(change.first);
    std::set<std::string> differ = between(facts, run_facts(other, {}));
    differ.erase("layout.micro_batches");  // it follows from the global batch
    differ.erase("gradient norm");         // it follows from the clip norm
    CHECK(differ == std::set<std::string>{change.first});
  }
}

TEST_CASE("what is trained is a fact, and a checkpoint that does not say it trained everything") {
  const Plan plan = some_plan();
  const std::set<std::string> trained{"trained parameters"};
  Plan other = plan;
  for (const auto& change : std::initializer_list<void (*)(TrainingSpec&)>{
           [](TrainingSpec& t) { t.lora.emplace(); }, [](TrainingSpec& t) { t.lora->r = 9; },
           [](TrainingSpec& t) { t.lora->alpha = 9.5; }, [](TrainingSpec& t) { t.lora->target_modules = {"up"}; },
           [](TrainingSpec& t) { t.trainable.all = false; }, [](TrainingSpec& t) { t.trainable.patterns = {"head"}; },
           [](TrainingSpec& t) { t.lora.reset(); }}) {
    const std::vector<Fact> before = run_facts(other, {});
    change(other.training);
    CHECK(between(before, run_facts(other, {})) == trained);
  }
  CHECK(has_to_match("trained parameters"));
  CHECK(value_before("trained parameters") == "all");
  CHECK(value_before("seed") == "absent");
}

TEST_CASE("every choice of the layout is a fact, and what follows from it differs too") {
  const Plan plan = some_plan();
  const std::vector<Fact> facts = run_facts(plan, {});
  const std::map<std::string, void (*)(ParallelSpec&)> changes = {
      {"layout.dp", [](ParallelSpec& s) { s.mesh.degree.dp = 4; }},
      {"layout.tp", [](ParallelSpec& s) { s.mesh.degree.tp = 2; }},
      {"layout.pp", [](ParallelSpec& s) { s.mesh.degree.pp = 4; }},
      {"layout.cp", [](ParallelSpec& s) { s.mesh.degree.cp = 2; }},
      {"layout.cp_method", [](ParallelSpec& s) { s.cp_method = ContextMethod::ulysses; }},
      {"layout.cp_ulysses", [](ParallelSpec& s) { s.mesh.cp_ulysses = 2; }},
      {"layout.mesh_order",
       [](ParallelSpec& s) {
         s.mesh.order = AxisOrder({Axis::dp, Axis::pp, Axis::tp});
       }},
      {"layout.sequence_parallel", [](ParallelSpec& s) { s.sequence_parallel = true; }},
      {"layout.zero_stage", [](ParallelSpec& s) { s.zero_stage = 2; }},
      {"layout.dp_shard", [](ParallelSpec& s) { s.mesh.dp_shard = 2; }},
      {"layout.replica_micro_batches",
       [](ParallelSpec& s) {
         s.replica_micro_batches = {3, 1};
       }},
      {"layout.micro_batch", [](ParallelSpec& s) { s.micro_batch = 2; }},
      {"layout.schedule", [](ParallelSpec& s) { s.schedule = ScheduleKind::gpipe; }},
      {"layout.virtual_stages", [](ParallelSpec& s) { s.virtual_stages = 2; }},
      {"layout.micro_batch_group", [](ParallelSpec& s) { s.micro_batch_group = 4; }},
      {"layout.recompute", [](ParallelSpec& s) { s.recompute = Recompute::full; }},
      {"layout.recompute_layers",
       [](ParallelSpec& s) {
         s.recompute = Recompute::full;
         s.recompute_layers = 1;
       }},
      {"layout.stage_blocks", [](ParallelSpec& s) { std::swap(s.stage_blocks.front(), s.stage_blocks.back()); }},
      {"layout.tied_gradients", [](ParallelSpec& s) { s.tied_gradients = TiedGradients::apart; }},
      {"layout.offload", [](ParallelSpec& s) { s.offload = Offload{.optimizer = Home::host}; }},
      {"layout.offload_layers",
       [](ParallelSpec& s) {
         s.offload = Offload{.activations = Home::host};
         s.offload_layers = 1;
       }},
      {"layout.dp_method", [](ParallelSpec& s) { s.dp_method = DataMethod::master; }},
      {"layout.tp_overlap", [](ParallelSpec& s) { s.tp_overlap = TensorOverlap::ring; }},
      {"layout.prefetch_depth", [](ParallelSpec& s) { s.prefetch_depth = 2; }},
      {"layout.gather_unit", [](ParallelSpec& s) { s.gather_unit = GatherUnit::parameter; }},
      {"layout.input_slots", [](ParallelSpec& s) { s.input_slots = InputSlots::one_more; }},
  };
  CHECK(changes.size() == choice_rows().size());
  for (const auto& change : changes) {
    Plan other = plan;
    change.second(other.spec);
    CAPTURE(change.first);
    CHECK(between(facts, run_facts(other, {})).contains(change.first));
  }
}

TEST_CASE("the rest of what decides a run are facts, and its prediction and search are none") {
  const Plan plan = some_plan();
  const std::vector<Fact> facts = run_facts(plan, {});
  const auto differ = [&](void (*change)(Plan&)) {
    Plan other = plan;
    change(other);
    return between(facts, run_facts(other, {}));
  };
  using Names = std::set<std::string>;
  CHECK(differ([](Plan& p) { p.model_text += "\n"; }) == Names{"model"});
  CHECK(differ([](Plan& p) { std::swap(p.schedule.ranks[0][0], p.schedule.ranks[0][1]); }) == Names{"schedule"});
  CHECK(differ([](Plan& p) { p.placements.state.homes.optimizer = Home::host; }) == Names{"placements"});
  CHECK(differ([](Plan& p) { p.placements.residual.tp = replicate(); p.placements.residual.dp = flat_shard(); }) ==
        Names{"placements"});
  CHECK(differ([](Plan& p) { p.cluster.name = "b"; }) == Names{"cluster"});
  CHECK(differ([](Plan& p) { p.cluster.groups.front().device.memory_capacity += Bytes(1); }) == Names{"cluster"});
  CHECK(differ([](Plan& p) { p.cluster.groups.front().device.backend = BackendKind::cuda; }) ==
        Names{"backend", "cluster", "CPU instruction set"});
  CHECK(differ([](Plan& p) {
          p.prediction.memory.buffers += Bytes(1);
          p.search.seconds += 1.0;
          p.notes.push_back("by hand");
        }).empty());
  RunOptions options;
  options.steps += 1;
  CHECK(between(facts, run_facts(plan, options)) == Names{"--steps"});
  options = {};
  options.world.gpu.deterministic = !options.world.gpu.deterministic;
  CHECK(between(facts, run_facts(plan, options)) == Names{"--deterministic"});
  options = {};
  options.on_not_finite = OnNotFinite::skip;
  CHECK(between(facts, run_facts(plan, options)) == Names{"--on-nan"});
  // A norm that is computed without being asked for by the plan is no other clip norm.
  CHECK(differ([](Plan& p) { p.training = with_gradient_norm(p.training); }) == Names{"gradient norm"});
  options = {};
  options.data = {"another path"};
  CHECK(between(facts, run_facts(plan, options)).empty());
}

TEST_CASE("data are told apart by one token, by their length, and not by where they were read") {
  std::vector<std::int32_t> tokens(1000, 3);
  const std::vector<Fact> facts = data_facts(TokenData(tokens));
  CHECK(facts == data_facts(TokenData(tokens)));
  CHECK(facts.front().value.starts_with("of 1000 tokens (fingerprint "));
  tokens[999] = 4;
  CHECK(facts != data_facts(TokenData(tokens)));
  CHECK(facts != data_facts(TokenData(std::vector<std::int32_t>(1001, 3))));
}

}  // namespace parplan
