#include "planner/graph/trained_file.h"

#include <vector>

#include <fmt/format.h>

#include "planner/base/json.h"
#include "planner/base/text.h"

namespace parplan {
namespace {

std::vector<std::string> read_names(const YamlNode& node) {
  std::vector<std::string> names;
  for (const YamlNode& item : node.items()) names.push_back(item.as_name());
  if (names.empty()) node.fail("expected a list of names, found an empty one");
  return names;
}

std::string write_names(const std::vector<std::string>& names) {
  std::vector<std::string> quoted;
  for (const std::string& name : names) quoted.push_back(Json(name).dump());
  return fmt::format("[{}]", join(quoted));
}

Trainable read_trainable(const YamlNode& node) {
  if (node.is_list()) return {.all = false, .patterns = read_names(node)};
  const std::string word = node.as_string();
  if (word == "all") return {};
  if (word == "lora") return {.all = false, .patterns = {}};
  node.fail(fmt::format("expected all, lora or a list of names of parameters, found '{}'; write [{}] for a list of one",
                        word, word));
}

Lora read_lora(const YamlNode& node) {
  node.allow_keys({"r", "lora_alpha", "target_modules"});
  Lora lora;
  if (const auto r = node.find("r")) lora.r = r->as_integer(1, largest_adapter);
  if (const auto alpha = node.find("lora_alpha")) {
    lora.alpha = alpha->as_number();
    if (lora.alpha <= 0.0) alpha->fail(fmt::format("expected a number above 0, found '{}'", alpha->as_string()));
  }
  const auto targets = node.find("target_modules");
  if (targets && targets->is_list()) lora.target_modules = read_names(*targets);
  if (targets && !targets->is_list() && targets->as_string() != "all-linear")
    targets->fail(fmt::format("expected all-linear or a list of names, found '{}'; write [{}] for a list of one",
                              targets->as_string(), targets->as_string()));
  return lora;
}

}  // namespace

TrainedKeys read_trained(const YamlNode& training) {
  TrainedKeys keys;
  if (const auto node = training.find("lora")) keys.lora = read_lora(*node);
  if (const auto node = training.find("trainable")) {
    keys.trainable = read_trainable(*node);
    if (!keys.trainable->all && keys.trainable->patterns.empty() && !keys.lora) keys.lora = Lora{};
  } else if (keys.lora) {
    keys.trainable = Trainable{.all = false, .patterns = {}};
  }
  return keys;
}

std::string write_trained(const TrainingSpec& training) {
  std::string text;
  if (!training.trainable.all)
    text += fmt::format("trainable: {}\n",
                        training.trainable.patterns.empty() ? "lora" : write_names(training.trainable.patterns));
  else if (training.lora)
    text += "trainable: all\n";
  if (const std::optional<Lora>& lora = training.lora)
    text += fmt::format("lora:\n  r: {}\n  lora_alpha: {}\n  target_modules: {}\n", lora->r, lora->alpha,
                        lora->target_modules.empty() ? "all-linear" : write_names(lora->target_modules));
  return text;
}

void fail_at(const YamlNode& training, const TrainedProblem& problem) {
  const bool of_lora = problem.of == TrainedProblem::Of::target_modules;
  const YamlNode list = of_lora ? training.at("lora").at("target_modules") : training.at("trainable");
  (problem.which ? list[*problem.which] : list).fail(problem.message);
}

std::string describe_trained(const TrainingSpec& training) {
  if (training.trainable.all && !training.lora) return "all";
  std::vector<std::string> parts;
  if (const std::optional<Lora>& lora = training.lora)
    parts.push_back(fmt::format("LoRA adapters (r {}, lora_alpha {}) beside {}", lora->r, lora->alpha,
                                lora->target_modules.empty() ? "all products of layers" : join(lora->target_modules)));
  if (training.trainable.all) parts.emplace_back("all parameters");
  if (!training.trainable.patterns.empty()) parts.push_back(join(training.trainable.patterns));
  return join(parts, "; ");
}

}  // namespace parplan
