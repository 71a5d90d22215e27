#include "models/huggingface_config.h"

#include <algorithm>

#include <fmt/format.h>

namespace parplan {
namespace {

struct Activation {
  const char* name;  // transformers/activations.py
  FeedForwardKind kind;
};
constexpr Activation plain_activations[] = {
    {"gelu_new", FeedForwardKind::gelu_tanh},  {"gelu_pytorch_tanh", FeedForwardKind::gelu_tanh},
    {"gelu_fast", FeedForwardKind::gelu_tanh}, {"gelu", FeedForwardKind::gelu_erf},
    {"relu", FeedForwardKind::relu},
};
constexpr Activation gated_activations[] = {
    {"silu", FeedForwardKind::gated_silu},           {"swish", FeedForwardKind::gated_silu},
    {"gelu_new", FeedForwardKind::gated_gelu_tanh},  {"gelu_pytorch_tanh", FeedForwardKind::gated_gelu_tanh},
    {"gelu_fast", FeedForwardKind::gated_gelu_tanh}, {"gelu", FeedForwardKind::gated_gelu_erf},
};

// What `read` makes of the node, whose errors say what is expected. A config.json may hold all of
// its keys in one line, so these errors name their key, too.
template <class Read>
auto named(const char* key, const YamlNode& node, Read read) {
  try {
    return read(node);
  } catch (const ConfigError& error) {
    node.fail(fmt::format("{}: {}", key, error.message()));
  }
}

FeedForwardKind read_activation(const char* key, const YamlNode& node, std::span<const Activation> activations) {
  std::vector<std::string> names;
  for (const Activation& activation : activations) names.emplace_back(activation.name);
  return activations[named(key, node, [&](const YamlNode& n) { return n.as_choice(names); })].kind;
}

// JSON tells text and numbers apart.
void refuse_text(const char* key, const YamlNode& node, std::string_view wanted) {
  if (node.is_quoted()) node.fail(fmt::format("{}: expected {}, found the text \"{}\"", key, wanted, node.as_string()));
}

}  // namespace

std::optional<YamlNode> HuggingFaceConfig::find(const char* key) {
  asked.insert(key);
  return root.find(key);
}

bool HuggingFaceConfig::says(const char* key) {
  asked.insert(key);
  const std::vector<std::string> all = root.keys();
  return std::ranges::find(all, key) != all.end();
}

std::int64_t HuggingFaceConfig::whole(const char* key, const YamlNode& node, std::int64_t minimum,
                                      std::int64_t maximum) const {
  const std::int64_t value = named(key, node, [&](const YamlNode& n) { return n.as_integer(minimum, maximum); });
  refuse_text(key, node, "a whole number");
  return value;
}

std::int64_t HuggingFaceConfig::size(const std::string& field, std::initializer_list<const char*> names,
                                     std::int64_t maximum, std::int64_t absent) {
  keys[field] = *names.begin();
  std::optional<std::int64_t> found;
  std::string found_at;
  for (const char* name : names) {
    const auto node = find(name);
    if (!node) continue;
    const std::int64_t value = whole(name, *node, 1, maximum);
    if (found && *found != value) node->fail(fmt::format("{} is {}, but {} is {}", name, value, found_at, *found));
    if (found) continue;
    found = value;
    found_at = keys[field] = name;
  }
  if (!found) defaulted.push_back(field);
  return found.value_or(absent);
}

void HuggingFaceConfig::require_sizes(std::initializer_list<const char*> fields) const {
  for (const char* field : fields)
    if (std::ranges::find(defaulted, field) != defaulted.end())
      root.fail(fmt::format("missing key '{}': a config.json that transformers writes has it, and without it the sizes "
                            "would be those of another model",
                            keys.at(field)));
}

double HuggingFaceConfig::number(const char* key, double absent) {
  const auto node = find(key);
  if (!node) return absent;
  const double value = named(key, *node, [](const YamlNode& n) { return n.as_number(); });
  refuse_text(key, *node, "a number");
  if (value <= 0.0) node->fail(fmt::format("expected {} above 0, found '{}'", key, node->as_string()));
  return value;
}

bool HuggingFaceConfig::flag(const char* key, bool absent) {
  const auto node = find(key);
  if (!node) return absent;
  const bool value = named(key, *node, [](const YamlNode& n) { return n.as_bool(); });
  refuse_text(key, *node, "true or false");
  return value;
}

FeedForwardKind HuggingFaceConfig::plain_activation(const char* key, FeedForwardKind absent) {
  const auto node = find(key);
  return node ? read_activation(key, *node, plain_activations) : absent;
}

FeedForwardKind HuggingFaceConfig::gated_activation(const char* key, FeedForwardKind absent) {
  const auto node = find(key);
  return node ? read_activation(key, *node, gated_activations) : absent;
}

void HuggingFaceConfig::note_dropout(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const auto node = find(name);
    if (node && named(name, *node, [](const YamlNode& n) { return n.as_number(); }) > 0.0) {
      notes.push_back(fmt::format("{} {} is ignored: parplan trains without dropout", name, node->as_string()));
    }
  }
}

void HuggingFaceConfig::require(const char* key, bool supported, std::string_view reason) {
  const auto node = find(key);
  if (node && named(key, *node, [](const YamlNode& n) { return n.as_bool(); }) != supported)
    node->fail(fmt::format("{} {} is not supported: {}", key, !supported, reason));
}

void HuggingFaceConfig::fail(const std::string& field, const std::string& message) const {
  const auto key = keys.find(field);
  const auto node = key == keys.end() ? std::nullopt : root.find(key->second);
  (node ? *node : root).fail(message);
}

}  // namespace parplan
