#include "runtime/run_facts.h"

#include <algorithm>
#include <cmath>
#include <concepts>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "planner/graph/trained_file.h"
#include "planner/plan/layout_choices.h"
#include "runtime/device/cpu/instruction_sets.h"
#include "runtime/launch/fingerprint.h"
#include "runtime/plugin/build_identity.h"

namespace parplan {
namespace {

struct FactInputs {
  const Plan& plan;
  const RunOptions& options;
};

// What a checkpoint says of a fact: nothing; what it was, in case it has changed; or what it has to
// be in every run that goes on from it.
enum class InCheckpoint { no, noted, held };

struct FactRow {
  std::string_view name;
  std::string (*value)(const FactInputs&);
  InCheckpoint in_checkpoint = InCheckpoint::no;
  std::string_view before = "absent";  // value_before
};

std::string text(std::string_view value) { return std::string(value); }
std::string text(const char* value) { return value; }  // not a bool
std::string text(bool value) { return value ? "true" : "false"; }
std::string text(std::integral auto value) { return fmt::format("{}", value); }
std::string text(double value) { return fmt::format("{}", value); }  // the shortest that reads back equal

// A name, and what tells two things of one name apart.
std::string named_text(const std::string& name, const std::string& content) {
  return fmt::format("'{}' (fingerprint {})", name, write_fingerprint(fingerprint(content)));
}

std::string placements_text(const Placements& placements) {
  std::string all;
  const auto add = [&](std::string_view what, const TensorLayout& layout) {
    for (const Axis axis : all_axes) all += fmt::format("{} {} {}\n", what, name(axis), write_placement(layout[axis]));
  };
  add("residual", placements.residual);
  add("parameters", placements.state.parameters);
  add("gradients", placements.state.gradients);
  add("optimizer", placements.state.optimizer);
  for (const Home home : {placements.state.homes.parameters, placements.state.homes.gradients,
                          placements.state.homes.optimizer})
    all += fmt::format("home{}\n", where(home));
  for (const auto& [parameter, layout] : placements.parameters) add(parameter, layout);
  return write_fingerprint(fingerprint(all));
}

std::string schedule_text(const Schedule& schedule) {
  std::string all = fmt::format("{}\n", fmt::join(schedule.rank_of_stage, " "));
  std::size_t actions = 0;
  for (const std::vector<Action>& rank : schedule.ranks) {
    for (const Action& action : rank) all += write_action(action) + ' ';
    all += '\n';
    actions += rank.size();
  }
  return fmt::format("of {} actions (fingerprint {})", actions, write_fingerprint(fingerprint(all)));
}

constexpr FactRow fact_rows[] = {
    {"version", [](const FactInputs&) { return text(build_identity().version); }},
    {"sources", [](const FactInputs&) { return text(build_identity().sources); }},
    {"compiler", [](const FactInputs&) { return text(build_identity().compiler); }},
    {"compiler options", [](const FactInputs&) { return text(build_identity().options); }},
    {"CPU instruction set",
     [](const FactInputs& i) {
       return i.plan.cluster.backend() == BackendKind::cpu ? chosen_cpu_instruction_set() : "unused";
     }},
    {"--steps", [](const FactInputs& i) { return text(i.options.steps); }},
    {"--on-nan", [](const FactInputs& i) { return text(name(i.options.on_not_finite)); }},
    {"--checkpoint",
     [](const FactInputs& i) {
       const CheckpointOptions& options = i.options.checkpoint;
       return options.folder.empty() ? "absent" : fmt::format("every {} steps, keep {}{}", options.every, options.keep,
                                                              options.resume ? ", --resume" : "");
     }},
    {"--weights", [](const FactInputs& i) { return text(i.options.weights.folder.empty() ? "absent" : "given"); }},
    {"--export-weights",
     [](const FactInputs& i) { return text(i.options.exported_weights.folder.empty() ? "absent" : "given"); }},
    {"gradient norm",
     [](const FactInputs& i) { return text(computes_norm(i.plan.training) ? "computed" : "not computed"); }},
    {"--deterministic", [](const FactInputs& i) { return text(i.options.world.gpu.deterministic); }},
    {"model", [](const FactInputs& i) { return named_text(i.plan.model.name, i.plan.model_text); }},
    {"backend", [](const FactInputs& i) { return text(name(i.plan.cluster.backend())); }},
    {"global batch", [](const FactInputs& i) { return text(i.plan.training.global_batch); }, InCheckpoint::noted},
    {"sequence length", [](const FactInputs& i) { return text(i.plan.training.sequence_length); }, InCheckpoint::held},
    {"precision", [](const FactInputs& i) { return text(name(stated_precision(i.plan.training))); },
     InCheckpoint::noted},
    {"optimizer", [](const FactInputs& i) { return text(name(i.plan.training.optimizer)); }, InCheckpoint::held},
    {"learning rate", [](const FactInputs& i) { return text(i.plan.training.learning_rate); }, InCheckpoint::noted},
    {"learning rate schedule", [](const FactInputs& i) { return text(name(i.plan.training.schedule)); },
     InCheckpoint::noted},
    {"warm-up steps", [](const FactInputs& i) { return text(i.plan.training.warmup_steps); }, InCheckpoint::noted},
    {"decay steps", [](const FactInputs& i) { return text(i.plan.training.decay_steps); }, InCheckpoint::noted},
    {"final learning rate", [](const FactInputs& i) { return text(i.plan.training.final_learning_rate); },
     InCheckpoint::noted},
    {"beta1", [](const FactInputs& i) { return text(i.plan.training.beta1); }, InCheckpoint::noted},
    {"beta2", [](const FactInputs& i) { return text(i.plan.training.beta2); }, InCheckpoint::noted},
    {"epsilon", [](const FactInputs& i) { return text(i.plan.training.epsilon); }, InCheckpoint::noted},
    {"weight decay", [](const FactInputs& i) { return text(i.plan.training.weight_decay); }, InCheckpoint::noted},
    {"momentum", [](const FactInputs& i) { return text(i.plan.training.momentum); }, InCheckpoint::noted},
    {"clip norm",
     [](const FactInputs& i) {  // infinite: only the norm is wanted (with_gradient_norm)
       return text(std::isinf(i.plan.training.clip_norm) ? 0.0 : i.plan.training.clip_norm);
     },
     InCheckpoint::noted},
    {"seed", [](const FactInputs& i) { return text(i.plan.training.seed); }, InCheckpoint::held},
    {"trained parameters", [](const FactInputs& i) { return describe_trained(i.plan.training); }, InCheckpoint::held,
     "all"},
};

// What follows from the choices of the layout, or belongs to no choice: after them.
constexpr FactRow rows_after_layout[] = {
    {"placements", [](const FactInputs& i) { return placements_text(i.plan.placements); }},
    {"schedule", [](const FactInputs& i) { return schedule_text(i.plan.schedule); }},
    {"cluster", [](const FactInputs& i) { return named_text(i.plan.cluster.name, write_cluster(i.plan.cluster)); }},
};

}  // namespace

std::vector<Fact> run_facts(const Plan& plan, const RunOptions& options) {
  const FactInputs inputs{plan, options};
  std::vector<Fact> facts;
  for (const FactRow& row : fact_rows) facts.push_back({text(row.name), row.value(inputs)});
  for (const ChoiceRow& row : choice_rows()) {
    facts.push_back({fmt::format("layout.{}", row.key), write_value(row.get(plan.spec))});
    if (row.companion.write)
      facts.push_back({fmt::format("layout.{}", row.companion.key),
                       row.companion.write(plan.spec, plan.training).value_or("absent")});
  }
  for (const FactRow& row : rows_after_layout) facts.push_back({text(row.name), row.value(inputs)});
  return facts;
}

std::vector<Fact> checkpoint_facts(const Plan& plan, const TokenData& data) {
  const RunOptions none;
  std::vector<Fact> facts;
  for (const FactRow& row : fact_rows)
    if (row.in_checkpoint != InCheckpoint::no) facts.push_back({text(row.name), row.value({plan, none})});
  for (Fact& fact : data_facts(data)) facts.push_back(std::move(fact));
  return facts;
}

bool has_to_match(std::string_view fact) {
  return std::ranges::any_of(fact_rows, [&](const FactRow& row) {
    return row.name == fact && row.in_checkpoint == InCheckpoint::held;
  });
}

std::string_view value_before(std::string_view fact) {
  const auto* const row = std::ranges::find(fact_rows, fact, &FactRow::name);
  return row == std::end(fact_rows) ? "absent" : row->before;
}

std::vector<Fact> data_facts(const TokenData& data) {
  return {{"data", fmt::format("of {} tokens (fingerprint {}), {}", data.size(), write_fingerprint(data.fingerprint()),
                               data.shuffle() ? fmt::format("shuffled with seed {}", *data.shuffle())
                                              : "in their order")}};
}

}  // namespace parplan
