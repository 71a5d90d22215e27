#include "models/huggingface.h"

#include <filesystem>
#include <initializer_list>
#include <map>

#include <fmt/format.h>

#include "planner/base/json.h"
#include "planner/base/text.h"
#include "planner/base/yaml.h"

namespace parplan {
namespace {

// A config.json with what was noted on the way. `keys` says where a field of the spec came from, to put errors there.
struct Config {
  YamlNode root;
  std::vector<std::string> notes = {};
  std::map<std::string, std::string> keys = {};

  std::int64_t size(const std::string& field, const char* key, std::int64_t maximum, std::int64_t absent) {
    keys[field] = key;
    const auto node = root.find(key);
    return node ? node->as_integer(1, maximum) : absent;
  }
  // GPT-2 has two names for a size: its own and the one all others use.
  std::int64_t size(const std::string& field, const char* key, const char* other, std::int64_t maximum,
                    std::int64_t absent) {
    if (!root.find(other)) return size(field, key, maximum, absent);
    const std::int64_t found = size(field, other, maximum, absent);
    const auto own = root.find(key);
    if (own && own->as_integer(1, maximum) != found) {
      own->fail(fmt::format("{} is {}, but {} is {}", key, own->as_string(), other, found));
    }
    return found;
  }
  double number(const char* key, double absent) const {
    const auto node = root.find(key);
    if (!node) return absent;
    const double value = node->as_number();
    if (value <= 0.0) node->fail(fmt::format("expected {} above 0, found '{}'", key, node->as_string()));
    return value;
  }
  bool flag(const char* key, bool absent) const {
    const auto node = root.find(key);
    return node ? node->as_bool() : absent;
  }
};

void note_dropout(Config& config, std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    const auto node = config.root.find(key);
    if (node && node->as_number() > 0.0) {
      config.notes.push_back(fmt::format("{} {} is ignored: parplan trains without dropout", key, node->as_string()));
    }
  }
}

// head_dim where the file gives one, else hidden / heads.
void read_head_dim(Config& config, ModelSpec& spec) {
  if (const auto node = config.root.find("head_dim")) {
    config.keys["head_dim"] = "head_dim";
    spec.head_dim = node->as_integer(1, largest_width);
    return;
  }
  if (spec.hidden % spec.heads != 0) {
    const std::string& key = config.keys["heads"];
    const auto node = config.root.find(key);
    (node ? *node : config.root)
        .fail(fmt::format("{} {} is not a multiple of {} {}, and there is no head_dim", config.keys["hidden"], spec.hidden,
                          key, spec.heads));
  }
  spec.head_dim = spec.hidden / spec.heads;
}

// transformers/models/gpt2/configuration_gpt2.py
void read_gpt2(Config& config, ModelSpec& spec) {
  spec.layers = config.size("layers", "n_layer", "num_hidden_layers", largest_layers, 12);
  spec.hidden = config.size("hidden", "n_embd", "hidden_size", largest_width, 768);
  spec.heads = config.size("heads", "n_head", "num_attention_heads", largest_width, 12);
  spec.kv_heads = spec.heads;
  read_head_dim(config, spec);
  spec.feature = config.size("feature", "n_inner", largest_width, 4 * spec.hidden);
  spec.vocabulary = config.size("vocabulary", "vocab_size", largest_vocabulary, 50257);
  spec.context = config.size("context", "n_positions", "max_position_embeddings", largest_vocabulary, 1024);
  spec.position = PositionKind::learned;
  spec.norm = NormKind::layer_norm;
  spec.norm_epsilon = config.number("layer_norm_epsilon", 1e-5);
  spec.activation = FeedForwardKind::gelu_tanh;
  if (const auto node = config.root.find("activation_function")) {
    constexpr FeedForwardKind kinds[] = {FeedForwardKind::gelu_tanh, FeedForwardKind::gelu_tanh,
                                         FeedForwardKind::gelu_tanh, FeedForwardKind::gelu_erf, FeedForwardKind::relu};
    spec.activation = kinds[node->as_choice({"gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu", "relu"})];
  }
  spec.qkv_bias = spec.attention_output_bias = spec.mlp_bias = true;
  spec.tied_embeddings = config.flag("tie_word_embeddings", true);
  spec.scaled_residual = true;  // GPT2PreTrainedModel._init_weights

  if (const auto node = config.root.find("add_cross_attention"); node && node->as_bool()) {
    node->fail("add_cross_attention is not supported: parplan builds decoder-only models");
  }
  note_dropout(config, {"attn_pdrop", "embd_pdrop", "resid_pdrop"});
  if (!config.flag("scale_attn_weights", true)) {
    config.notes.push_back("scale_attn_weights false is ignored: attention is scaled by 1 / sqrt(head_dim)");
  }
  if (config.flag("scale_attn_by_inverse_layer_idx", false)) {
    config.notes.push_back("scale_attn_by_inverse_layer_idx true is ignored: attention is scaled by 1 / sqrt(head_dim)");
  }
}

// What llama, mistral and qwen2 have in common; the defaults in which they differ.
struct GatedDefaults {
  std::int64_t feature = 0;
  std::int64_t vocabulary = 0;
  std::int64_t context = 0;
  std::int64_t kv_heads = 0;  // 0: as many as heads
};

void read_gated(Config& config, ModelSpec& spec, const GatedDefaults& defaults) {
  spec.layers = config.size("layers", "num_hidden_layers", largest_layers, 32);
  spec.hidden = config.size("hidden", "hidden_size", largest_width, 4096);
  spec.heads = config.size("heads", "num_attention_heads", largest_width, 32);
  // A file that says null means one key/value head per query head, whatever the class's default.
  const bool null = config.root.find("num_key_value_heads") == std::nullopt && [&] {
    for (const std::string& key : config.root.keys()) {
      if (key == "num_key_value_heads") return true;
    }
    return false;
  }();
  spec.kv_heads = config.size("kv_heads", "num_key_value_heads", largest_width,
                              defaults.kv_heads == 0 || null ? spec.heads : defaults.kv_heads);
  read_head_dim(config, spec);
  spec.feature = config.size("feature", "intermediate_size", largest_width, defaults.feature);
  spec.vocabulary = config.size("vocabulary", "vocab_size", largest_vocabulary, defaults.vocabulary);
  spec.context = config.size("context", "max_position_embeddings", largest_vocabulary, defaults.context);
  spec.activation = FeedForwardKind::gated_silu;
  if (const auto node = config.root.find("hidden_act")) node->as_choice({"silu", "swish"});
  spec.position = PositionKind::rotary;
  spec.rope_theta = config.number("rope_theta", 10000.0);
  spec.norm = NormKind::rms_norm;
  spec.norm_epsilon = config.number("rms_norm_eps", 1e-6);
  spec.tied_embeddings = config.flag("tie_word_embeddings", false);
  note_dropout(config, {"attention_dropout"});

  // transformers 5 keeps theta and scaling in one map, `rope_parameters`; before, scaling stood in `rope_scaling`.
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const auto rope = config.root.find(key);
    if (!rope) continue;
    if (const auto theta = rope->find("rope_theta")) {
      spec.rope_theta = theta->as_number();
      if (spec.rope_theta <= 0.0) theta->fail(fmt::format("expected rope_theta above 0, found '{}'", theta->as_string()));
    }
    auto type = rope->find("rope_type");
    if (!type) type = rope->find("type");
    const std::string kind = type ? type->as_string() : "default";
    if (kind == "default") continue;
    config.notes.push_back(
        fmt::format("{} of type {} is ignored: it changes angles, neither time nor memory", key, kind));
  }
}

void note_sliding_window(Config& config, const ModelSpec& spec, std::int64_t absent) {
  std::int64_t window = absent;
  for (const std::string& key : config.root.keys()) {
    if (key == "sliding_window") window = 0;  // null: none
  }
  if (const auto node = config.root.find("sliding_window")) window = node->as_integer(1);
  if (window > 0 && window < spec.context) {
    config.notes.push_back(fmt::format("sliding_window {} is ignored: attention covers the whole sequence", window));
  }
}

// transformers/models/llama/configuration_llama.py
void read_llama(Config& config, ModelSpec& spec) {
  read_gated(config, spec, {.feature = 11008, .vocabulary = 32000, .context = 2048});
  spec.qkv_bias = spec.attention_output_bias = config.flag("attention_bias", false);
  spec.mlp_bias = config.flag("mlp_bias", false);
}

// transformers/models/mistral/configuration_mistral.py
void read_mistral(Config& config, ModelSpec& spec) {
  read_gated(config, spec, {.feature = 14336, .vocabulary = 32000, .context = 131072, .kv_heads = 8});
  note_sliding_window(config, spec, 4096);
}

// transformers/models/qwen2/configuration_qwen2.py; the biases stand in modeling_qwen2.py.
void read_qwen2(Config& config, ModelSpec& spec) {
  read_gated(config, spec, {.feature = 22016, .vocabulary = 151936, .context = 32768, .kv_heads = 32});
  spec.qkv_bias = true;
  if (config.flag("use_sliding_window", false)) note_sliding_window(config, spec, 4096);
}

struct TypeRow {
  const char* model_type;
  void (*read)(Config&, ModelSpec&);
};
constexpr TypeRow type_rows[] = {
    {"gpt2", read_gpt2},
    {"llama", read_llama},
    {"mistral", read_mistral},
    {"qwen2", read_qwen2},
};

const TypeRow& find_type(const YamlNode& root) {
  const YamlNode node = root.at("model_type");
  const std::string type = node.as_string();
  std::vector<std::string> types;
  for (const TypeRow& row : type_rows) {
    if (type == row.model_type) return row;
    types.emplace_back(row.model_type);
  }
  node.fail(fmt::format("model_type '{}' is not supported; supported: {}{}", type, join(types), did_you_mean(type, types)));
}

// "meta-llama/Meta-Llama-3-8B" -> "Meta-Llama-3-8B"; else the name of the file's folder; else the model's type.
std::string name_of(const YamlNode& root, const std::string& file_name, const std::string& type) {
  const auto last_part = [](std::string path) {
    while (path.ends_with('/')) path.pop_back();
    return path.substr(path.rfind('/') + 1);
  };
  if (const auto given = root.find("_name_or_path")) {
    const std::string last = last_part(given->as_string());
    if (!last.empty() && last != "." && last != "..") return last;
  }
  const std::filesystem::path path(file_name);
  if (path.filename() != "config.json") return path.stem().string();
  const std::string folder = path.parent_path().filename().string();
  return folder.empty() || folder == "." || folder == ".." ? type : folder;
}

}  // namespace

ModelFile read_huggingface(const std::string& text, const std::string& file_name) {
  Config config{.root = parse_json(text, file_name)};
  const TypeRow& type = find_type(config.root);

  ModelFile file;
  file.source = file_name;
  file.spec.family = Family::decoder;
  file.spec.name = name_of(config.root, file_name, type.model_type);
  file.spec.initializer_range = config.number("initializer_range", 0.02);
  type.read(config, file.spec);
  if (config.root.find("quantization_config")) {
    config.notes.push_back("quantization_config is ignored: weights are trained in the precision of the plan");
  }
  if (const auto problem = find_problem(file.spec)) {
    const auto blamed = config.root.find(config.keys[problem->key]);
    (blamed ? *blamed : config.root).fail(problem->message);
  }
  file.notes = config.notes;
  return file;
}

}  // namespace parplan
