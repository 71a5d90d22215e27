// The meaning of transformers' config classes, one function per model_type: which keys, which
// defaults (v5.23.0; BERT's, Cohere's, Gemma 3's and GLM's v5.24.0;
// transformers/models/TYPE/configuration_TYPE.py) and what modeling_TYPE.py builds from them.
#include <algorithm>
#include <cmath>

#include <limits>

#include <fmt/format.h>

#include "models/huggingface_config.h"

namespace parplan {
namespace {

using Config = HuggingFaceConfig;

// Parts that several types share ------------------------------------------------------------------

// Null means one key/value head per query head, whatever the class's default is.
void read_kv_heads(Config& config, ModelSpec& spec, const char* key, std::int64_t absent) {
  const bool null = config.says(key) && !config.find(key);
  spec.kv_heads = config.size("kv_heads", {key}, largest_width, null ? spec.heads : absent);
}

[[noreturn]] void fail_uneven(Config& config, const ModelSpec& spec, std::string_view more) {
  config.fail("heads", fmt::format("{} {} is not a multiple of {} {}{}", config.keys["hidden"], spec.hidden,
                                   config.keys["heads"], spec.heads, more));
}

// head_dim where the file or its class gives one, else hidden / heads.
void read_head_dim(Config& config, ModelSpec& spec, std::optional<std::int64_t> absent) {
  if (absent || config.find("head_dim")) {
    spec.head_dim = config.size("head_dim", {"head_dim"}, largest_width, absent.value_or(0));
    return;
  }
  if (spec.hidden % spec.heads != 0) fail_uneven(config, spec, ", and there is no head_dim");
  spec.head_dim = spec.hidden / spec.heads;
}

// Classes whose heads share the width of the model.
void divide_heads(Config& config, ModelSpec& spec) {
  if (spec.hidden % spec.heads != 0) fail_uneven(config, spec, "");
  spec.head_dim = spec.hidden / spec.heads;
  const auto node = config.find("head_dim");
  if (node && config.whole("head_dim", *node, 1, largest_width) != spec.head_dim) {
    node->fail(fmt::format("heads of this model_type are {} / {} = {} wide, found head_dim {}", config.keys["hidden"],
                           config.keys["heads"], spec.head_dim, node->as_string()));
  }
}

struct RotaryKeys {
  const char* theta = "rope_theta";
  const char* fraction = "partial_rotary_factor";
  double absent_fraction = 1.0;
};

// Linear scaling divides positions; other kinds are left out.
void read_scaling(Config& config, ModelSpec& spec, const YamlNode& rope, const char* key) {
  auto type = rope.find("rope_type");
  if (!type) type = rope.find("type");
  const std::string kind = type ? type->as_string() : "default";
  if (kind == "default") return;
  const auto factor = rope.find("factor");
  if (kind == "linear" && factor) {
    spec.rope_factor = factor->as_number();
    if (spec.rope_factor <= 0.0)
      factor->fail(fmt::format("expected a factor above 0, found '{}'", factor->as_string()));
    return;
  }
  config.notes.push_back(
      fmt::format("{} of type {} is ignored: it changes angles, neither time nor memory", key, kind));
}

// The head_dim is known here. transformers 5 keeps theta, fraction and scaling in one map,
// `rope_parameters`; earlier versions have `rope_scaling`, with the other two beside it.
void read_rotary(Config& config, ModelSpec& spec, const RotaryKeys& keys = {}) {
  spec.position = PositionKind::rotary;
  spec.rope_theta = config.number("rope_theta", config.number(keys.theta, 10000.0));
  double fraction = config.number("partial_rotary_factor", config.number(keys.fraction, keys.absent_fraction));
  std::optional<YamlNode> blamed = config.find("partial_rotary_factor");
  if (!blamed) blamed = config.find(keys.fraction);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const auto rope = config.find(key);
    if (!rope) continue;
    for (const std::string& inner : rope->keys()) {
      const auto node = rope->find(inner);
      if (node && node->is_map()) {
        node->fail(fmt::format("{} of its own for {} is not supported: all layers turn alike in parplan", key, inner));
      }
    }
    if (const auto theta = rope->find("rope_theta")) {
      spec.rope_theta = theta->as_number();
      if (spec.rope_theta <= 0.0)
        theta->fail(fmt::format("expected rope_theta above 0, found '{}'", theta->as_string()));
    }
    if (const auto node = rope->find("partial_rotary_factor")) {
      fraction = node->as_number();
      blamed = node;
    }
    read_scaling(config, spec, *rope, key);
  }
  if (fraction <= 0.0 || fraction > 1.0) {
    (blamed ? *blamed : config.root)
        .fail(fmt::format("expected a part of every head above 0 and at most 1, found {}", fraction));
  }
  const auto rotary_dim = static_cast<std::int64_t>(static_cast<double>(spec.head_dim) * fraction);
  if (rotary_dim != spec.head_dim) spec.rotary_dim = rotary_dim;
  config.keys["rotary_dim"] = keys.fraction;
}

// `absent` is the class's value where the file has none; null means no window.
void read_window(Config& config, ModelSpec& spec, std::optional<std::int64_t> absent) {
  if (const auto window = config.find("sliding_window")) {
    spec.sliding_window = config.whole("sliding_window", *window, 1, largest_vocabulary);
  } else if (!config.says("sliding_window")) {
    spec.sliding_window = absent;
  }
}

// The shortest list that repeats to `spans`.
std::vector<LayerSpan> period_of(const std::vector<LayerSpan>& spans) {
  for (std::size_t length = 1; length < spans.size(); ++length) {
    bool repeats = true;
    for (std::size_t i = length; i < spans.size() && repeats; ++i) repeats = spans[i] == spans[i - length];
    if (repeats) return {spans.begin(), spans.begin() + static_cast<std::ptrdiff_t>(length)};
  }
  return spans;
}

// `layer_types` where the file has them, else `absent`. No pattern is needed where all layers are
// equal.
void read_layer_types(Config& config, ModelSpec& spec, std::vector<LayerSpan> absent) {
  std::vector<LayerSpan> spans = std::move(absent);
  const auto types = config.find("layer_types");
  config.keys["attention_pattern"] = "layer_types";
  if (types) {
    spans.clear();
    for (const YamlNode& type : types->items()) {
      constexpr LayerSpan kinds[] = {LayerSpan::full, LayerSpan::sliding};
      spans.push_back(kinds[type.as_choice({"full_attention", "sliding_attention"})]);
    }
    if (static_cast<std::int64_t>(spans.size()) != spec.layers) {
      types->fail(
          fmt::format("layer_types names {} layers, but {} is {}", spans.size(), config.keys["layers"], spec.layers));
    }
  }
  spans = period_of(spans);
  const bool slides = std::ranges::find(spans, LayerSpan::sliding) != spans.end();
  if (slides && !spec.sliding_window && types) {
    types->fail("layers of sliding_attention need a sliding_window, and there is none");
  }
  if (!slides || !spec.sliding_window) {
    spec.sliding_window = std::nullopt;
  } else if (spans.size() > 1) {
    spec.attention_pattern = spans;
  }
}

// Classes without layer_types: transformers ignores them there.
void refuse_layer_types(Config& config) {
  const auto types = config.find("layer_types");
  if (!types) return;
  for (const YamlNode& type : types->items()) {
    if (type.as_string() != (*types)[0].as_string()) {
      types->fail(
          "layers of several kinds are not supported for this model_type; leave layer_types out, or write a model.yaml "
          "(docs/model.md) with an attention_pattern");
    }
  }
}

// Llama and its descendants: rotary positions, RMS norms, gated feed-forward layers.
struct GatedDefaults {
  std::int64_t layers = 32;
  std::int64_t hidden = 4096;
  std::int64_t heads = 32;
  std::int64_t kv_heads = 0;  // 0: equal to heads
  std::optional<std::int64_t> head_dim = std::nullopt;
  std::int64_t feature = 0;
  std::int64_t vocabulary = 0;
  std::int64_t context = 0;
  double norm_epsilon = 1e-6;
  bool tied_embeddings = false;
};

// Without `rotary` the caller reads the positions.
void read_gated(Config& config, ModelSpec& spec, const GatedDefaults& defaults,
                const std::optional<RotaryKeys>& rotary = RotaryKeys{}) {
  spec.layers = config.size("layers", {"num_hidden_layers"}, largest_layers, defaults.layers);
  spec.hidden = config.size("hidden", {"hidden_size"}, largest_width, defaults.hidden);
  spec.heads = config.size("heads", {"num_attention_heads"}, largest_width, defaults.heads);
  read_kv_heads(config, spec, "num_key_value_heads", defaults.kv_heads == 0 ? spec.heads : defaults.kv_heads);
  read_head_dim(config, spec, defaults.head_dim);
  spec.feature = config.size("feature", {"intermediate_size"}, largest_width, defaults.feature);
  spec.vocabulary = config.size("vocabulary", {"vocab_size"}, largest_vocabulary, defaults.vocabulary);
  spec.context = config.size("context", {"max_position_embeddings"}, largest_vocabulary, defaults.context);
  config.note_dropout({"attention_dropout"});
  if (rotary) read_rotary(config, spec, *rotary);
  spec.norm = NormKind::rms_norm;
  spec.norm_epsilon = config.number("rms_norm_eps", defaults.norm_epsilon);
  spec.tied_embeddings = config.flag("tie_word_embeddings", defaults.tied_embeddings);
}

// The hidden_act of most types: silu.
void read_gated_silu(Config& config, ModelSpec& spec) {
  spec.activation = config.gated_activation("hidden_act", FeedForwardKind::gated_silu);
}

void read_attention_bias(Config& config, ModelSpec& spec, bool absent = false) {
  spec.qkv_bias = spec.attention_output_bias = config.flag("attention_bias", absent);
}

// GPT-2, GPT-J: OpenAI's names of sizes, beside those that all types use.
void read_openai_sizes(Config& config, ModelSpec& spec, std::int64_t layers, std::int64_t hidden, std::int64_t heads,
                       std::int64_t vocabulary, std::int64_t context) {
  spec.layers = config.size("layers", {"n_layer", "num_hidden_layers"}, largest_layers, layers);
  spec.hidden = config.size("hidden", {"n_embd", "hidden_size"}, largest_width, hidden);
  spec.heads = config.size("heads", {"n_head", "num_attention_heads"}, largest_width, heads);
  spec.kv_heads = spec.heads;
  divide_heads(config, spec);
  spec.feature = config.size("feature", {"n_inner"}, largest_width, 4 * spec.hidden);
  spec.vocabulary = config.size("vocabulary", {"vocab_size"}, largest_vocabulary, vocabulary);
  spec.context = config.size("context", {"n_positions", "max_position_embeddings"}, largest_vocabulary, context);
  spec.norm = NormKind::layer_norm;
  spec.norm_epsilon = config.number("layer_norm_epsilon", 1e-5);
  spec.activation = config.plain_activation("activation_function", FeedForwardKind::gelu_tanh);
  config.note_dropout({"attn_pdrop", "embd_pdrop", "resid_pdrop"});
}

// Gemma scales embeddings by sqrt(hidden), but not its tied heads.
void read_gemma_parts(Config& config, ModelSpec& spec) {
  spec.embedding_multiplier = std::sqrt(static_cast<double>(spec.hidden));
  // "gelu" appears in the first releases' hidden_act and means the tanh form:
  // huggingface/transformers#29402.
  const auto act = config.find("hidden_act");
  spec.activation = FeedForwardKind::gated_gelu_tanh;
  if (config.find("hidden_activation")) {
    spec.activation = config.gated_activation("hidden_activation", spec.activation);
  } else if (act && act->as_string() != "gelu") {
    spec.activation = config.gated_activation("hidden_act", spec.activation);
  }
  read_attention_bias(config, spec);
  config.require("use_bidirectional_attention", false, "a Gemma's attention is causal in parplan");
}

// The caps are those of the class where the file has none; null means no cap.
void read_gemma_scores(Config& config, ModelSpec& spec, std::optional<double> attention_cap,
                       std::optional<double> logits_cap) {
  const double scalar = config.number("query_pre_attn_scalar", 256.0);
  if (scalar != static_cast<double>(spec.head_dim)) spec.attention_scale = 1.0 / std::sqrt(scalar);
  const auto softcap = [&](const char* key, std::optional<double> absent) -> std::optional<double> {
    if (!config.find(key)) return config.says(key) ? std::nullopt : absent;
    return config.number(key, 1.0);
  };
  spec.attention_softcap = softcap("attn_logit_softcapping", attention_cap);
  spec.logits_softcap = softcap("final_logit_softcapping", logits_cap);
}

// Layers slide but for every `period`th, which is full.
std::vector<LayerSpan> full_every(std::int64_t layers, std::int64_t period) {
  std::vector<LayerSpan> spans;
  for (std::int64_t layer = 1; layer <= layers; ++layer)
    spans.push_back(layer % period == 0 ? LayerSpan::full : LayerSpan::sliding);
  return spans;
}

// `layer_types`, or every `sliding_window_pattern`th layer is full, as in configs of the first
// releases; null windows are refused where layers slide.
void read_sliding_layers(Config& config, ModelSpec& spec, std::int64_t window, std::int64_t period) {
  read_window(config, spec, window);
  if (const auto node = config.find("sliding_window_pattern"))
    period = config.whole("sliding_window_pattern", *node, 1, largest_layers);
  if (!spec.sliding_window && !config.find("layer_types") && period > 1)
    config.root.fail("layers of this model_type slide, and sliding_window is null; give it a number");
  read_layer_types(config, spec, full_every(spec.layers, period));
}

// Types -------------------------------------------------------------------------------------------

// The mask tokens of Google's vocabularies, [MASK] of bert-base-uncased and all its kin, and of
// RoBERTa's: <mask>, behind GPT-2's.
constexpr std::int64_t bert_mask_token = 103, roberta_mask_token = 50264;

// An encoder with the head of masked language modelling (modeling_bert.py). What it learns is not
// in the file.
void read_encoder(Config& config, ModelSpec& spec, std::int64_t vocabulary, std::int64_t mask_token) {
  spec.layers = config.size("layers", {"num_hidden_layers"}, largest_layers, 12);
  spec.hidden = config.size("hidden", {"hidden_size"}, largest_width, 768);
  spec.heads = config.size("heads", {"num_attention_heads"}, largest_width, 12);
  spec.kv_heads = spec.heads;
  divide_heads(config, spec);
  spec.feature = config.size("feature", {"intermediate_size"}, largest_width, 3072);
  spec.vocabulary = config.size("vocabulary", {"vocab_size"}, largest_vocabulary, vocabulary);
  spec.context = config.size("context", {"max_position_embeddings"}, largest_vocabulary, 512);
  spec.position = PositionKind::learned;
  if (const auto positions = config.find("position_embedding_type")) positions->as_choice({"absolute"});
  spec.token_types = config.size("token_types", {"type_vocab_size"}, largest_vocabulary, 2);
  spec.embedding_norm = true;
  spec.norm = NormKind::layer_norm;
  spec.norm_epsilon = config.number("layer_norm_eps", 1e-12);
  spec.norm_placement = NormPlacement::after_add;
  spec.activation = config.plain_activation("hidden_act", FeedForwardKind::gelu_erf);
  spec.bidirectional = spec.head_transform = true;
  spec.qkv_bias = spec.attention_output_bias = spec.mlp_bias = spec.head_bias = true;
  config.require("tie_word_embeddings", true, "the head of an encoder has the embedding's weight");
  spec.tied_embeddings = true;
  const auto mask = config.find("mask_token_id");
  spec.mask_token = mask ? config.whole("mask_token_id", *mask, 0, largest_vocabulary) : mask_token;
  config.keys["mask_token"] = "mask_token_id";
  config.require("is_decoder", false, "models of this type are built as encoders");
  config.require("add_cross_attention", false, "models of this type are built as encoders");
  config.note_dropout({"hidden_dropout_prob", "attention_probs_dropout_prob"});
}

void read_bert(Config& config, ModelSpec& spec) { read_encoder(config, spec, 30522, bert_mask_token); }

void read_bloom(Config& config, ModelSpec& spec) {
  spec.layers = config.size("layers", {"n_layer", "num_hidden_layers"}, largest_layers, 2);
  spec.hidden = config.size("hidden", {"hidden_size", "n_embed"}, largest_width, 64);
  spec.heads = config.size("heads", {"n_head", "num_attention_heads"}, largest_width, 8);
  spec.kv_heads = spec.heads;
  divide_heads(config, spec);
  spec.feature = 4 * spec.hidden;
  if (const auto inner = config.find("n_inner");
      inner && config.whole("n_inner", *inner, 1, largest_width) != spec.feature) {
    inner->fail(fmt::format("transformers' bloom has feed-forward layers of 4 x hidden_size = {}, found n_inner {}",
                            spec.feature, inner->as_string()));
  }
  spec.vocabulary = config.size("vocabulary", {"vocab_size"}, largest_vocabulary, 250880);
  // The class has no length: BLOOM was trained on 2048 (arXiv:2211.05100, table 3).
  spec.context = config.size("context", {"seq_length"}, largest_vocabulary, 2048);
  spec.position = PositionKind::alibi;
  spec.embedding_norm = true;
  spec.norm = NormKind::layer_norm;
  spec.norm_epsilon = config.number("layer_norm_epsilon", 1e-5);
  spec.activation = FeedForwardKind::gelu_tanh;
  spec.qkv_bias = spec.attention_output_bias = spec.mlp_bias = true;
  spec.tied_embeddings = config.flag("tie_word_embeddings", true);
  config.require("apply_residual_connection_post_layernorm", false,
                 "residuals that begin behind the norm are not built");
  config.note_dropout({"hidden_dropout", "attention_dropout"});
}

// Command R and Aya: branches side by side behind one norm, which has no bias.
void read_cohere_parts(Config& config, ModelSpec& spec) {
  read_gated(config, spec,
             {.layers = 40,
              .hidden = 8192,
              .heads = 64,
              .feature = 22528,
              .vocabulary = 256000,
              .context = 8192,
              .tied_embeddings = true});
  read_gated_silu(config, spec);
  read_attention_bias(config, spec);
  spec.rotary_interleaved = true;
  spec.norm = NormKind::layer_norm;
  spec.norm_without_bias = true;
  spec.norm_epsilon = config.number("layer_norm_eps", 1e-5);
  spec.parallel_residual = spec.shared_norm = true;
  spec.logits_multiplier = config.number("logit_scale", 0.0625);
}

void read_cohere(Config& config, ModelSpec& spec) {
  read_cohere_parts(config, spec);
  refuse_layer_types(config);
  if (config.flag("use_qk_norm", false)) spec.qk_norm = QkNorm::layer_norm_per_head;
}

// Command R7B, Command A: three of four layers slide, and only they are rotated.
void read_cohere2(Config& config, ModelSpec& spec) {
  read_cohere_parts(config, spec);
  divide_heads(config, spec);
  read_sliding_layers(config, spec, 4096, 4);
  if (!spec.sliding_window)
    config.root.fail("full layers of a cohere2 have no positions, and no layer of this one slides");
  spec.sliding_rotary_only = !spec.attention_pattern.empty();
}

void read_falcon(Config& config, ModelSpec& spec) {
  spec.layers = config.size("layers", {"num_hidden_layers", "n_layer"}, largest_layers, 32);
  spec.hidden = config.size("hidden", {"hidden_size", "n_embed"}, largest_width, 4544);
  spec.heads = config.size("heads", {"num_attention_heads", "n_head"}, largest_width, 71);
  const bool new_architecture = config.flag("new_decoder_architecture", false);
  const bool multi_query = config.flag("multi_query", true);
  const std::int64_t kv_heads = config.size("kv_heads", {"num_kv_heads", "n_head_kv"}, largest_width, spec.heads);
  spec.kv_heads = new_architecture ? kv_heads : multi_query ? 1 : spec.heads;
  divide_heads(config, spec);
  spec.feature = config.size("feature", {"ffn_hidden_size"}, largest_width, 4 * spec.hidden);
  spec.vocabulary = config.size("vocabulary", {"vocab_size"}, largest_vocabulary, 65024);
  spec.context = config.size("context", {"max_position_embeddings"}, largest_vocabulary, 2048);
  if (config.flag("alibi", false)) {
    spec.position = PositionKind::alibi;
    // Falcon scales scores and slopes together (FalconAttention.forward).
    spec.alibi_multiplier = 1.0 / std::sqrt(static_cast<double>(spec.head_dim));
    config.number("rope_theta", 10000.0);
  } else {
    read_rotary(config, spec);
  }
  spec.norm = NormKind::layer_norm;
  spec.norm_epsilon = config.number("layer_norm_epsilon", 1e-5);
  const bool parallel = config.flag("parallel_attn", true);
  if (new_architecture && !parallel) {
    config.find("parallel_attn")
        ->fail("a new_decoder_architecture has parallel branches; leave parallel_attn out, or set it to true");
  }
  spec.parallel_residual = parallel;
  std::int64_t norms = new_architecture ? 2 : 1;
  if (const auto node = config.find("num_ln_in_parallel_attn")) {
    norms = config.whole("num_ln_in_parallel_attn", *node, 1, 2);
    if (norms == 2 && !new_architecture) node->fail("2 norms side by side need new_decoder_architecture: expected 1");
  }
  spec.shared_norm = parallel && norms == 1;
  spec.activation = config.plain_activation("activation", FeedForwardKind::gelu_erf);
  spec.qkv_bias = spec.attention_output_bias = spec.mlp_bias = config.flag("bias", false);
  spec.tied_embeddings = config.flag("tie_word_embeddings", true);
  config.require("apply_residual_connection_post_layernorm", false,
                 "residuals that begin behind the norm are not built");
  config.note_dropout({"hidden_dropout", "attention_dropout"});
}

void read_gemma(Config& config, ModelSpec& spec) {
  read_gated(config, spec,
             {.layers = 28,
              .hidden = 3072,
              .heads = 16,
              .kv_heads = 16,
              .head_dim = 256,
              .feature = 24576,
              .vocabulary = 256000,
              .context = 8192,
              .tied_embeddings = true});
  read_gemma_parts(config, spec);
}

void read_gemma2(Config& config, ModelSpec& spec) {
  read_gated(config, spec,
             {.layers = 26,
              .hidden = 2304,
              .heads = 8,
              .kv_heads = 4,
              .head_dim = 256,
              .feature = 9216,
              .vocabulary = 256000,
              .context = 8192,
              .tied_embeddings = true});
  read_gemma_parts(config, spec);
  spec.norm_placement = NormPlacement::around_branch;
  read_gemma_scores(config, spec, 50.0, 30.0);
  read_window(config, spec, 4096);
  std::vector<LayerSpan> alternating(static_cast<std::size_t>(spec.layers), LayerSpan::full);
  for (std::size_t i = 0; i < alternating.size(); i += 2) alternating[i] = LayerSpan::sliding;
  read_layer_types(config, spec, alternating);
}

// Gemma 3's frequencies: `rope_theta` in full layers, `rope_local_base_freq` in those that slide;
// transformers 5 keeps a map for each kind of layer.
void read_gemma3_rotary(Config& config, ModelSpec& spec) {
  spec.position = PositionKind::rotary;
  double full = config.number("rope_theta", 1e6), sliding = config.number("rope_local_base_freq", 1e4);
  if (const auto scaling = config.find("rope_scaling")) read_scaling(config, spec, *scaling, "rope_scaling");
  if (const auto rope = config.find("rope_parameters")) {
    for (const auto& [key, theta] : {std::pair("full_attention", &full), std::pair("sliding_attention", &sliding)}) {
      const auto kind = rope->find(key);
      if (!kind) continue;
      if (theta == &full) {
        read_scaling(config, spec, *kind, "rope_parameters");
      } else if (const auto type = kind->find("rope_type"); type && type->as_string() != "default") {
        type->fail("layers that slide have no scaling in parplan; leave rope_type out");
      }
      const auto node = kind->find("rope_theta");
      if (!node) continue;
      *theta = node->as_number();
      if (*theta <= 0.0) node->fail(fmt::format("expected rope_theta above 0, found '{}'", node->as_string()));
    }
  }
  spec.rope_theta = full;
  if (!spec.sliding_window) return;
  if (spec.attention_pattern.empty()) {
    spec.rope_theta = sliding;
    spec.rope_factor = 1.0;
  } else if (sliding != full || spec.rope_factor != 1.0) {
    spec.sliding_rope_theta = sliding;
  }
}

void read_gemma3_text(Config& config, ModelSpec& spec) {
  read_gated(config, spec,
             {.layers = 26,
              .hidden = 2304,
              .heads = 8,
              .kv_heads = 4,
              .head_dim = 256,
              .feature = 9216,
              .vocabulary = 262208,
              .context = 131072,
              .tied_embeddings = true},
             std::nullopt);
  read_gemma_parts(config, spec);
  spec.norm_placement = NormPlacement::around_branch;
  spec.qk_norm = QkNorm::per_head;
  read_gemma_scores(config, spec, std::nullopt, std::nullopt);
  read_sliding_layers(config, spec, 4096, 6);
  read_gemma3_rotary(config, spec);
}

// GLM-4: half of each head turns, in pairs of neighbours, and only queries, keys and values have
// biases (modeling_glm.py).
void read_glm(Config& config, ModelSpec& spec) {
  read_gated(config, spec,
             {.layers = 40,
              .kv_heads = 2,
              .head_dim = 128,
              .feature = 13696,
              .vocabulary = 151552,
              .context = 131072,
              .norm_epsilon = 1.5625e-7},
             RotaryKeys{.absent_fraction = 0.5});
  read_gated_silu(config, spec);
  spec.rotary_interleaved = true;
  spec.qkv_bias = config.flag("attention_bias", true);
}

// GLM-4-0414 and GLM-Z1: norms around branches (modeling_glm4.py).
void read_glm4(Config& config, ModelSpec& spec) {
  read_glm(config, spec);
  spec.norm_placement = NormPlacement::around_branch;
}

void read_gpt2(Config& config, ModelSpec& spec) {
  read_openai_sizes(config, spec, 12, 768, 12, 50257, 1024);
  spec.position = PositionKind::learned;
  spec.qkv_bias = spec.attention_output_bias = spec.mlp_bias = true;
  spec.tied_embeddings = config.flag("tie_word_embeddings", true);
  spec.scaled_residual = true;  // GPT2PreTrainedModel._init_weights
  config.require("add_cross_attention", false, "parplan builds decoder-only models");
  if (!config.flag("scale_attn_weights", true)) spec.attention_scale = 1.0;
  if (config.flag("scale_attn_by_inverse_layer_idx", false)) {
    config.notes.push_back(
        "scale_attn_by_inverse_layer_idx true is ignored: it changes numbers, neither time nor memory");
  }
}

void read_gpt_neox(Config& config, ModelSpec& spec) {
  spec.layers = config.size("layers", {"num_hidden_layers"}, largest_layers, 44);
  spec.hidden = config.size("hidden", {"hidden_size"}, largest_width, 6144);
  spec.heads = config.size("heads", {"num_attention_heads"}, largest_width, 64);
  spec.kv_heads = spec.heads;
  divide_heads(config, spec);
  spec.feature = config.size("feature", {"intermediate_size"}, largest_width, 24576);
  spec.vocabulary = config.size("vocabulary", {"vocab_size"}, largest_vocabulary, 50432);
  spec.context = config.size("context", {"max_position_embeddings"}, largest_vocabulary, 2048);
  read_rotary(config, spec, {.theta = "rotary_emb_base", .fraction = "rotary_pct", .absent_fraction = 0.25});
  spec.norm = NormKind::layer_norm;
  spec.norm_epsilon = config.number("layer_norm_eps", 1e-5);
  spec.parallel_residual = config.flag("use_parallel_residual", true);
  spec.activation = config.plain_activation("hidden_act", FeedForwardKind::gelu_erf);
  read_attention_bias(config, spec, true);
  spec.mlp_bias = true;
  spec.tied_embeddings = config.flag("tie_word_embeddings", false);
  config.note_dropout({"hidden_dropout", "attention_dropout"});
}

void read_gptj(Config& config, ModelSpec& spec) {
  read_openai_sizes(config, spec, 28, 4096, 16, 50400, 2048);
  spec.position = PositionKind::rotary;
  const std::int64_t rotary_dim = config.size("rotary_dim", {"rotary_dim"}, largest_width, 64);
  if (rotary_dim != spec.head_dim) spec.rotary_dim = rotary_dim;
  spec.rotary_interleaved = true;
  spec.parallel_residual = spec.shared_norm = true;
  spec.mlp_bias = spec.head_bias = true;
  spec.tied_embeddings = config.flag("tie_word_embeddings", false);
}

void read_granite(Config& config, ModelSpec& spec) {
  read_gated(config, spec, {.feature = 11008, .vocabulary = 32000, .context = 2048});
  read_gated_silu(config, spec);
  read_attention_bias(config, spec);
  spec.mlp_bias = config.flag("mlp_bias", false);
  spec.embedding_multiplier = config.number("embedding_multiplier", 1.0);
  spec.residual_multiplier = config.number("residual_multiplier", 1.0);
  spec.logits_multiplier = 1.0 / config.number("logits_scaling", 1.0);
  spec.attention_scale = config.number("attention_multiplier", 1.0);
}

void read_llama(Config& config, ModelSpec& spec) {
  read_gated(config, spec, {.feature = 11008, .vocabulary = 32000, .context = 2048});
  read_gated_silu(config, spec);
  read_attention_bias(config, spec);
  spec.mlp_bias = config.flag("mlp_bias", false);
}

void read_mistral(Config& config, ModelSpec& spec) {
  read_gated(config, spec, {.kv_heads = 8, .feature = 14336, .vocabulary = 32000, .context = 131072});
  read_gated_silu(config, spec);
  read_window(config, spec, 4096);
  refuse_layer_types(config);
}

void read_olmo2(Config& config, ModelSpec& spec) {
  read_gated(config, spec, {.feature = 11008, .vocabulary = 50304, .context = 2048, .norm_epsilon = 1e-5});
  read_gated_silu(config, spec);
  read_attention_bias(config, spec);
  spec.norm_placement = NormPlacement::after_branch;
  spec.qk_norm = QkNorm::whole_width;
}

void read_opt(Config& config, ModelSpec& spec) {
  spec.layers = config.size("layers", {"num_hidden_layers"}, largest_layers, 12);
  spec.hidden = config.size("hidden", {"hidden_size"}, largest_width, 768);
  spec.heads = config.size("heads", {"num_attention_heads"}, largest_width, 12);
  spec.kv_heads = spec.heads;
  divide_heads(config, spec);
  spec.feature = config.size("feature", {"ffn_dim"}, largest_width, 3072);
  spec.vocabulary = config.size("vocabulary", {"vocab_size"}, largest_vocabulary, 50272);
  spec.context = config.size("context", {"max_position_embeddings"}, largest_vocabulary, 2048);
  spec.position = PositionKind::learned;
  spec.position_offset = 2;  // OPTLearnedPositionalEmbedding
  spec.norm = NormKind::layer_norm;
  spec.norm_epsilon = 1e-5;  // torch.nn.LayerNorm's own
  spec.norm_placement =
      config.flag("do_layer_norm_before", true) ? NormPlacement::before_branch : NormPlacement::after_add;
  spec.activation = config.plain_activation("activation_function", FeedForwardKind::relu);
  spec.qkv_bias = spec.attention_output_bias = spec.mlp_bias = config.flag("enable_bias", true);
  spec.tied_embeddings = config.flag("tie_word_embeddings", true);
  spec.initializer_range = config.number("init_std", 0.02);
  const std::int64_t embedding_width =
      config.size("embedding_width", {"word_embed_proj_dim"}, largest_width, spec.hidden);
  if (embedding_width != spec.hidden) spec.embedding_width = embedding_width;
  config.require("_remove_final_layer_norm", false, "the last norm is built wherever norms stand before branches");
  config.require("layer_norm_elementwise_affine", true, "norms have weights and biases in parplan");
  config.note_dropout({"dropout", "attention_dropout", "activation_dropout", "layerdrop"});
}

void read_phi3(Config& config, ModelSpec& spec) {
  read_gated(config, spec,
             {.hidden = 3072, .feature = 8192, .vocabulary = 32064, .context = 4096, .norm_epsilon = 1e-5});
  read_gated_silu(config, spec);
  read_window(config, spec, std::nullopt);
  refuse_layer_types(config);
  config.note_dropout({"resid_pdrop", "embd_pdrop"});
}

// The window of Qwen's layers from max_window_layers on, if use_sliding_window is set.
void read_qwen_window(Config& config, ModelSpec& spec) {
  read_window(config, spec, 4096);
  if (!config.flag("use_sliding_window", false)) spec.sliding_window = std::nullopt;
  std::int64_t first = 28;
  if (const auto node = config.find("max_window_layers"))
    first = config.whole("max_window_layers", *node, 0, std::numeric_limits<std::int64_t>::max());
  std::vector<LayerSpan> spans;
  for (std::int64_t layer = 0; layer < spec.layers; ++layer) {
    spans.push_back(spec.sliding_window && layer >= first ? LayerSpan::sliding : LayerSpan::full);
  }
  read_layer_types(config, spec, spans);
}

void read_qwen2(Config& config, ModelSpec& spec) {
  read_gated(config, spec, {.kv_heads = 32, .feature = 22016, .vocabulary = 151936, .context = 32768});
  read_gated_silu(config, spec);
  spec.qkv_bias = true;  // modeling_qwen2.py
  read_qwen_window(config, spec);
}

void read_qwen3(Config& config, ModelSpec& spec) {
  read_gated(config, spec, {.kv_heads = 32, .head_dim = 128, .feature = 22016, .vocabulary = 151936, .context = 32768});
  read_gated_silu(config, spec);
  read_attention_bias(config, spec);
  spec.qk_norm = QkNorm::per_head;
  read_qwen_window(config, spec);
}

// A BERT whose first token has the position behind that of padding (modeling_roberta.py).
void read_roberta(Config& config, ModelSpec& spec) {
  read_encoder(config, spec, 50265, roberta_mask_token);
  const auto padding = config.find("pad_token_id");
  spec.position_offset = 1 + (padding ? config.whole("pad_token_id", *padding, 0, largest_vocabulary) : 1);
  spec.context -= spec.position_offset;
  if (spec.context < 1)
    config.fail("context", fmt::format("the first {} positions belong to padding, and there are no others",
                                       spec.position_offset));
  if (spec.activation != FeedForwardKind::gelu_erf)
    config.fail("activation", "the head of a roberta has the activation gelu, and its layers have another");
}

void read_starcoder2(Config& config, ModelSpec& spec) {
  read_gated(config, spec,
             {.layers = 30,
              .hidden = 3072,
              .heads = 24,
              .kv_heads = 2,
              .feature = 12288,
              .vocabulary = 49152,
              .context = 4096,
              .tied_embeddings = true});
  spec.norm = NormKind::layer_norm;
  spec.norm_epsilon = config.number("norm_epsilon", 1e-5);
  spec.activation = config.plain_activation("hidden_act", FeedForwardKind::gelu_tanh);
  spec.qkv_bias = spec.attention_output_bias = spec.mlp_bias = config.flag("use_bias", true);
  spec.initializer_range = config.number("initializer_range", 0.018042);
  read_window(config, spec, std::nullopt);
  refuse_layer_types(config);
  if (const auto norm = config.find("norm_type")) norm->as_choice({"layer_norm"});
  if (const auto mlp = config.find("mlp_type")) mlp->as_choice({"default"});
  config.note_dropout({"residual_dropout", "embedding_dropout"});
}

// T5, its versions 1.1 and Flan (modeling_t5.py). The class has no length of either side; configs
// have had n_positions, that of the texts it was trained on, for one side.
void read_t5(Config& config, ModelSpec& spec) {
  spec.family = Family::encoder_decoder;
  const std::int64_t encoder = config.size("layers", {"num_layers", "num_hidden_layers"}, largest_layers / 2, 6);
  spec.decoder_layers = config.size("decoder_layers", {"num_decoder_layers"}, largest_layers / 2, encoder);
  spec.layers = encoder + spec.decoder_layers;
  spec.hidden = config.size("hidden", {"d_model", "hidden_size"}, largest_width, 512);
  spec.heads = config.size("heads", {"num_heads", "num_attention_heads"}, largest_width, 8);
  spec.kv_heads = spec.heads;
  spec.head_dim = config.size("head_dim", {"d_kv", "head_dim"}, largest_width, 64);
  spec.feature = config.size("feature", {"d_ff"}, largest_width, 2048);
  spec.vocabulary = config.size("vocabulary", {"vocab_size"}, largest_vocabulary, 32128);
  spec.decoder_context = config.size("context", {"n_positions"}, largest_vocabulary / 2, 512);
  spec.context = 2 * spec.decoder_context;
  spec.position_buckets = config.size("position_buckets", {"relative_attention_num_buckets"}, largest_width, 32);
  spec.position_distance =
      config.size("position_distance", {"relative_attention_max_distance"}, largest_vocabulary, 128);
  spec.norm_epsilon = config.number("layer_norm_epsilon", 1e-6);
  spec.activation = FeedForwardKind::relu;
  if (const auto kind = config.find("feed_forward_proj")) {
    constexpr FeedForwardKind kinds[] = {FeedForwardKind::relu, FeedForwardKind::gelu_erf,
                                         FeedForwardKind::gated_gelu_tanh, FeedForwardKind::gated_silu};
    spec.activation = kinds[kind->as_choice({"relu", "gelu", "gated-gelu", "gated-silu"})];
  }
  spec.tied_embeddings = config.flag("tie_word_embeddings", true);
  if (spec.tied_embeddings) spec.logits_multiplier = 1.0 / std::sqrt(static_cast<double>(spec.hidden));
  const auto token = [&](const char* key, std::int64_t absent) {
    const auto node = config.find(key);
    return node ? config.whole(key, *node, 0, largest_vocabulary) : absent;
  };
  spec.start_token = token("decoder_start_token_id", token("pad_token_id", 0));
  spec.end_token = token("eos_token_id", 1);
  spec.initializer_range = config.number("initializer_factor", 1.0);
  config.require("is_encoder_decoder", true, "models of this type are built with both sides");
  config.require("is_decoder", false, "models of this type are built with both sides");
  config.note_dropout({"dropout_rate"});
}

// A classifier of images (modeling_vit.py, ViTForImageClassification). Its classes are those that
// id2label names.
void read_vit(Config& config, ModelSpec& spec) {
  spec.layers = config.size("layers", {"num_hidden_layers"}, largest_layers, 12);
  spec.hidden = config.size("hidden", {"hidden_size"}, largest_width, 768);
  spec.heads = config.size("heads", {"num_attention_heads"}, largest_width, 12);
  spec.kv_heads = spec.heads;
  divide_heads(config, spec);
  spec.feature = config.size("feature", {"intermediate_size"}, largest_width, 3072);
  if (const auto classes = config.find("id2label"); classes && classes->is_map()) {
    spec.vocabulary = static_cast<std::int64_t>(classes->keys().size());
    config.keys["vocabulary"] = "id2label";
    if (spec.vocabulary < 1) classes->fail("expected a name for each class, found none");
  } else {
    spec.vocabulary = config.size("vocabulary", {"num_labels"}, largest_classes, 2);
  }
  spec.image_size = config.size("image_size", {"image_size"}, 65536, 224);
  spec.patch_size = config.size("patch_size", {"patch_size"}, 65536, 16);
  spec.image_channels = config.size("image_channels", {"num_channels"}, 1024, 3);
  spec.context = tokens_of_image(spec);
  spec.position = PositionKind::learned;
  spec.norm = NormKind::layer_norm;
  spec.norm_epsilon = config.number("layer_norm_eps", 1e-12);
  spec.activation = config.plain_activation("hidden_act", FeedForwardKind::gelu_erf);
  spec.bidirectional = true;
  spec.qkv_bias = config.flag("qkv_bias", true);
  spec.attention_output_bias = spec.mlp_bias = spec.head_bias = true;
  config.note_dropout({"hidden_dropout_prob", "attention_probs_dropout_prob"});
}

constexpr HuggingFaceType types[] = {
    {"bert", read_bert},       {"bloom", read_bloom},             {"cohere", read_cohere},
    {"cohere2", read_cohere2}, {"falcon", read_falcon},           {"gemma", read_gemma},
    {"gemma2", read_gemma2},   {"gemma3_text", read_gemma3_text}, {"glm", read_glm},
    {"glm4", read_glm4},       {"gpt2", read_gpt2},               {"gpt_neox", read_gpt_neox},
    {"gptj", read_gptj},       {"granite", read_granite},         {"llama", read_llama},
    {"mistral", read_mistral}, {"olmo2", read_olmo2},             {"opt", read_opt},
    {"phi3", read_phi3},       {"qwen2", read_qwen2},             {"qwen3", read_qwen3},
    {"roberta", read_roberta}, {"starcoder2", read_starcoder2},   {"t5", read_t5},
    {"vit", read_vit},
};

}  // namespace

std::span<const HuggingFaceType> huggingface_types() {
  return types;
}

}  // namespace parplan
