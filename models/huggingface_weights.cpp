#include "models/huggingface_weights.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <span>
#include <sstream>
#include <utility>

#include <fmt/format.h>

#include "models/huggingface.h"
#include "models/huggingface_config.h"
#include "models/model_file.h"
#include "planner/base/error.h"
#include "planner/base/json.h"
#include "planner/base/text.h"
#include "planner/graph/trained_graph.h"

namespace parplan {
namespace {

// How a parameter lies in a tensor. The product of query, key and value is one parameter, which has
// for each group of heads its queries, its key and its value.
enum class How {
  whole,
  transposed,  // [in, out], as in GPT-2
  query,       // a tensor for each of the three
  key,
  value,
  concatenated,  // all queries, all keys, all values
  concatenated_transposed,
  first_half,  // of a tensor that holds two parameters
  second_half,
  by_head,     // a vector as [heads, head_dim]
  packed_key,  // keys and values in one parameter, head by head, and in two tensors
  packed_value,
};

struct NameRow {
  std::string_view parameter;  // without ".weight" and ".bias", and without "layers.3."
  std::string_view tensor;     // within the layer, or within the model
  How how = How::whole;
};

constexpr NameRow llama_names[] = {
    {"embedding", "embed_tokens"},
    {"head.norm", "norm"},
    {"attention_norm", "input_layernorm"},
    {"feed_forward_norm", "post_attention_layernorm"},
    {"attention.qkv", "self_attn.q_proj", How::query},
    {"attention.qkv", "self_attn.k_proj", How::key},
    {"attention.qkv", "self_attn.v_proj", How::value},
    {"attention.query_norm", "self_attn.q_norm"},
    {"attention.key_norm", "self_attn.k_norm"},
    {"attention.output", "self_attn.o_proj"},
    {"feed_forward.gate", "mlp.gate_proj"},
    {"feed_forward.up", "mlp.up_proj"},
    {"feed_forward.down", "mlp.down_proj"},
};
constexpr NameRow gemma2_names[] = {
    {"attention_output_norm", "post_attention_layernorm"},
    {"feed_forward_norm", "pre_feedforward_layernorm"},
    {"feed_forward_output_norm", "post_feedforward_layernorm"},
};
constexpr NameRow cohere_names[] = {
    {"norm", "input_layernorm"},
    {"attention.query_norm", "self_attn.q_norm", How::by_head},
    {"attention.key_norm", "self_attn.k_norm", How::by_head},
};
constexpr NameRow olmo2_names[] = {
    {"attention_output_norm", "post_attention_layernorm"},
    {"feed_forward_output_norm", "post_feedforward_layernorm"},
};
constexpr NameRow phi3_names[] = {
    {"attention.qkv", "self_attn.qkv_proj", How::concatenated},
    {"feed_forward.gate", "mlp.gate_up_proj", How::first_half},
    {"feed_forward.up", "mlp.gate_up_proj", How::second_half},
};
constexpr NameRow glm_names[] = {
    {"feed_forward.gate", "mlp.gate_up_proj", How::first_half},
    {"feed_forward.up", "mlp.gate_up_proj", How::second_half},
};
constexpr NameRow glm4_names[] = {
    {"attention_output_norm", "post_self_attn_layernorm"},
    {"feed_forward_output_norm", "post_mlp_layernorm"},
    {"feed_forward.gate", "mlp.gate_up_proj", How::first_half},
    {"feed_forward.up", "mlp.gate_up_proj", How::second_half},
};
constexpr NameRow starcoder2_names[] = {{"feed_forward.up", "mlp.c_fc"}, {"feed_forward.down", "mlp.c_proj"}};

constexpr NameRow bloom_names[] = {
    {"embedding", "word_embeddings"},
    {"embedding.norm", "word_embeddings_layernorm"},
    {"head.norm", "ln_f"},
    {"attention_norm", "input_layernorm"},
    {"feed_forward_norm", "post_attention_layernorm"},
    {"attention.qkv", "self_attention.query_key_value"},
    {"attention.output", "self_attention.dense"},
    {"feed_forward.up", "mlp.dense_h_to_4h"},
    {"feed_forward.down", "mlp.dense_4h_to_h"},
};
constexpr NameRow falcon_names[] = {{"norm", "input_layernorm"}};
// Two norms side by side have names of their own.
constexpr NameRow falcon_two_norms_names[] = {{"attention_norm", "ln_attn"}, {"feed_forward_norm", "ln_mlp"}};
constexpr NameRow gpt2_names[] = {
    {"embedding", "wte"},
    {"position", "wpe"},
    {"head.norm", "ln_f"},
    {"attention_norm", "ln_1"},
    {"feed_forward_norm", "ln_2"},
    {"attention.qkv", "attn.c_attn", How::concatenated_transposed},
    {"attention.output", "attn.c_proj", How::transposed},
    {"feed_forward.up", "mlp.c_fc", How::transposed},
    {"feed_forward.down", "mlp.c_proj", How::transposed},
};
constexpr NameRow gptj_names[] = {
    {"norm", "ln_1"},
    {"attention.qkv", "attn.q_proj", How::query},
    {"attention.qkv", "attn.k_proj", How::key},
    {"attention.qkv", "attn.v_proj", How::value},
    {"attention.output", "attn.out_proj"},
    {"feed_forward.up", "mlp.fc_in"},
    {"feed_forward.down", "mlp.fc_out"},
};
constexpr NameRow gpt_neox_names[] = {
    {"embedding", "embed_in"},
    {"head.norm", "final_layer_norm"},
    {"attention.qkv", "attention.query_key_value"},
    {"attention.output", "attention.dense"},
};
constexpr NameRow opt_names[] = {
    {"position", "embed_positions"},
    {"embedding.projection", "project_in"},
    {"head.projection", "project_out"},
    {"head.norm", "final_layer_norm"},
    {"attention_norm", "self_attn_layer_norm"},
    {"feed_forward_norm", "final_layer_norm"},
    {"attention.output", "self_attn.out_proj"},
    {"feed_forward.up", "fc1"},
    {"feed_forward.down", "fc2"},
};

constexpr NameRow bert_names[] = {
    {"embedding", "bert.embeddings.word_embeddings"},
    {"position", "bert.embeddings.position_embeddings"},
    {"token_type", "bert.embeddings.token_type_embeddings"},
    {"embedding.norm", "bert.embeddings.LayerNorm"},
    {"attention.qkv", "attention.self.query", How::query},
    {"attention.qkv", "attention.self.key", How::key},
    {"attention.qkv", "attention.self.value", How::value},
    {"attention.output", "attention.output.dense"},
    {"attention_norm", "attention.output.LayerNorm"},
    {"feed_forward.up", "intermediate.dense"},
    {"feed_forward.down", "output.dense"},
    {"feed_forward_norm", "output.LayerNorm"},
    {"head.transform", "cls.predictions.transform.dense"},
    {"head.transform.norm", "cls.predictions.transform.LayerNorm"},
};

constexpr NameRow roberta_names[] = {
    {"embedding", "roberta.embeddings.word_embeddings"},
    {"position", "roberta.embeddings.position_embeddings"},
    {"token_type", "roberta.embeddings.token_type_embeddings"},
    {"embedding.norm", "roberta.embeddings.LayerNorm"},
    {"head.transform", "lm_head.dense"},
    {"head.transform.norm", "lm_head.layer_norm"},
};

constexpr NameRow t5_names[] = {
    {"embedding", "shared"},
    {"encoder.position", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"},
    {"decoder.position", "decoder.block.0.layer.0.SelfAttention.relative_attention_bias"},
    {"encoder.norm", "encoder.final_layer_norm"},
    {"head.norm", "decoder.final_layer_norm"},
    {"attention_norm", "layer.0.layer_norm"},
    {"attention.query", "layer.0.SelfAttention.q"},
    {"attention.key_value", "layer.0.SelfAttention.k", How::packed_key},
    {"attention.key_value", "layer.0.SelfAttention.v", How::packed_value},
    {"attention.output", "layer.0.SelfAttention.o"},
    {"cross_attention_norm", "layer.1.layer_norm"},
    {"cross_attention.query", "layer.1.EncDecAttention.q"},
    {"cross_attention.key_value", "layer.1.EncDecAttention.k", How::packed_key},
    {"cross_attention.key_value", "layer.1.EncDecAttention.v", How::packed_value},
    {"cross_attention.output", "layer.1.EncDecAttention.o"},
    {"feed_forward_norm", "layer.2.layer_norm"},
    {"feed_forward.gate", "layer.2.DenseReluDense.wi_0"},
    {"feed_forward.up", "layer.2.DenseReluDense.wi_1"},
    {"feed_forward.down", "layer.2.DenseReluDense.wo"},
};
// Without a gate, and in layers that do not attend to another side.
constexpr NameRow t5_ungated_names[] = {{"feed_forward.up", "layer.2.DenseReluDense.wi"}};
constexpr NameRow t5_encoder_names[] = {
    {"feed_forward_norm", "layer.1.layer_norm"},
    {"feed_forward.gate", "layer.1.DenseReluDense.wi_0"},
    {"feed_forward.up", "layer.1.DenseReluDense.wi_1"},
    {"feed_forward.down", "layer.1.DenseReluDense.wo"},
};
constexpr NameRow t5_ungated_encoder_names[] = {{"feed_forward.up", "layer.1.DenseReluDense.wi"}};

struct TypeRow {
  std::string_view type;
  std::string_view architecture;
  std::string_view model;             // in front of all names but the head's
  std::string_view layers;            // "layers.3." is this and the number
  std::span<const NameRow> own = {};  // these first
  std::span<const NameRow> names = llama_names;
  float norm_added = 0.0f;  // to the weights of norms
  std::string_view head = "lm_head";
  std::string_view head_alias = "";  // its name in other versions
  bool rotates_parts = false;        // of heads; the other classes turn whole ones whatever a config says
  std::string_view head_bias = "";   // its name where it does not stand beside the weight's
};

// The types in the order in which a model without a config is compared with them.
constexpr TypeRow type_rows[] = {
    {"llama", "LlamaForCausalLM", "model.", "layers."},
    {"gpt2", "GPT2LMHeadModel", "transformer.", "h.", {}, gpt2_names},
    {"bert",
     "BertForMaskedLM",
     "",
     "bert.encoder.layer.",
     {},
     bert_names,
     0.0f,
     "cls.predictions.decoder",
     "",
     false,
     "cls.predictions"},
    {"bloom", "BloomForCausalLM", "transformer.", "h.", {}, bloom_names},
    {"cohere", "CohereForCausalLM", "model.", "layers.", cohere_names},
    {"cohere2", "Cohere2ForCausalLM", "model.", "layers.", cohere_names},
    {"falcon", "FalconForCausalLM", "transformer.", "h.", falcon_names, bloom_names},
    {"gemma", "GemmaForCausalLM", "model.", "layers.", {}, llama_names, 1.0f},
    {"gemma2", "Gemma2ForCausalLM", "model.", "layers.", gemma2_names, llama_names, 1.0f},
    {"gemma3_text", "Gemma3ForCausalLM", "model.", "layers.", gemma2_names, llama_names, 1.0f},
    {"glm", "GlmForCausalLM", "model.", "layers.", glm_names, llama_names, 0.0f, "lm_head", "", true},
    {"glm4", "Glm4ForCausalLM", "model.", "layers.", glm4_names, llama_names, 0.0f, "lm_head", "", true},
    {"gpt_neox", "GPTNeoXForCausalLM", "gpt_neox.", "layers.", gpt_neox_names, bloom_names, 0.0f, "embed_out",
     "lm_head", true},
    {"gptj", "GPTJForCausalLM", "transformer.", "h.", gptj_names, gpt2_names, 0.0f, "lm_head", "", true},
    {"granite", "GraniteForCausalLM", "model.", "layers."},
    {"mistral", "MistralForCausalLM", "model.", "layers."},
    {"olmo2", "Olmo2ForCausalLM", "model.", "layers.", olmo2_names},
    {"opt", "OPTForCausalLM", "model.decoder.", "layers.", opt_names},
    {"phi3", "Phi3ForCausalLM", "model.", "layers.", phi3_names, llama_names, 0.0f, "lm_head", "", true},
    {"qwen2", "Qwen2ForCausalLM", "model.", "layers."},
    {"qwen3", "Qwen3ForCausalLM", "model.", "layers."},
    {"roberta", "RobertaForMaskedLM", "", "roberta.encoder.layer.", roberta_names, bert_names, 0.0f, "lm_head.decoder",
     "", false, "lm_head"},
    {"starcoder2", "Starcoder2ForCausalLM", "model.", "layers.", starcoder2_names},
    {"t5", "T5ForConditionalGeneration", "", "block.", {}, t5_names},
};

const TypeRow& row_of_type(std::string_view type) {
  const auto* const row = std::ranges::find(type_rows, type, &TypeRow::type);
  PARPLAN_ASSERT(row != std::end(type_rows), std::string(type));
  return *row;
}

// A parameter's name: "layers", "3", "attention.qkv", "weight"; of an encoder-decoder's layers,
// "encoder" or "decoder" comes first.
struct ParameterName {
  std::string stack;
  std::string layer;
  std::string base;
  std::string kind;
};

ParameterName parts_of(const std::string& name) {
  ParameterName parts;
  std::size_t begin = 0;
  for (const std::string_view stack : {"layers", "encoder", "decoder"}) {
    const std::size_t number = stack.size() + 1;
    if (!name.starts_with(stack) || name.size() <= number || name[number] < '0' || name[number] > '9') continue;
    begin = name.find('.', number) + 1;
    parts.stack = stack;
    parts.layer = name.substr(number, begin - 1 - number);
  }
  const std::size_t end = name.rfind('.');
  parts.base = name.substr(begin, end - begin);
  parts.kind = name.substr(end + 1);
  return parts;
}

std::vector<NameRow> rows_for(const TypeRow& type, const ModelSpec& spec, std::string_view stack,
                              std::string_view parameter) {
  std::vector<std::span<const NameRow>> tables = {type.own, type.names};
  if (type.type == "falcon" && spec.parallel_residual && !spec.shared_norm)
    tables.insert(tables.begin(), falcon_two_norms_names);
  if (type.type == "t5") {
    const bool gated = is_gated(spec.activation), encodes = stack == "encoder";
    if (encodes) tables.insert(tables.begin(), t5_encoder_names);
    if (!gated)
      tables.insert(tables.begin(), encodes ? std::span<const NameRow>(t5_ungated_encoder_names)
                                            : std::span<const NameRow>(t5_ungated_names));
  }
  for (const std::span<const NameRow> table : tables) {
    std::vector<NameRow> found;
    for (const NameRow& row : table)
      if (row.parameter == parameter) found.push_back(row);
    if (!found.empty()) return found;
  }
  return {};
}

// Writes the list of one model.
struct Lister {
  const TypeRow& type;
  const ModelSpec& spec;
  StoredWeights list = {};
  std::map<std::string, int> known = {};

  int tensor(const std::string& name, std::vector<std::int64_t> shape, const std::string& alias) {
    const auto [found, is_new] = known.try_emplace(name, static_cast<int>(list.tensors.size()));
    if (is_new) list.tensors.push_back({.name = name, .shape = std::move(shape), .alias = alias});
    return found->second;
  }

  // The rows of one head group after the other: `count` rows from `begin` of each group.
  void add_groups(StoredRows part, std::int64_t begin, std::int64_t count, std::int64_t stored) {
    add_groups(std::move(part), begin, count, stored, (spec.heads / spec.kv_heads + 2) * spec.head_dim);
  }
  void add_groups(StoredRows part, std::int64_t begin, std::int64_t count, std::int64_t stored, std::int64_t group) {
    for (std::int64_t g = 0; g < spec.kv_heads; ++g) {
      part.row = g * group + begin;
      part.rows = count;
      part.stored_row = stored + g * count;
      list.rows.push_back(part);
    }
  }

  void add(const Tensor& parameter, const std::string& name, const std::string& alias, How how, float added) {
    const std::int64_t count = parameter.dims[0].size;
    const bool matrix = parameter.dims.size() == 2;
    const std::int64_t queries = spec.heads / spec.kv_heads * spec.head_dim;  // of a group
    const std::int64_t all_queries = spec.heads * spec.head_dim, keys = spec.kv_heads * spec.head_dim;
    const bool halves = how == How::first_half || how == How::second_half;
    const std::int64_t stored = how == How::query                                    ? all_queries
                                : how == How::key || how == How::value               ? keys
                                : how == How::packed_key || how == How::packed_value ? keys
                                : halves                                             ? 2 * count
                                                                                     : count;
    const bool transposed = matrix && (how == How::transposed || how == How::concatenated_transposed);
    std::vector<std::int64_t> shape = {stored};
    if (matrix) shape.insert(transposed ? shape.begin() : shape.end(), parameter.dims[1].size);
    const bool by_head = how == How::by_head;
    if (by_head) shape = {stored / spec.head_dim, spec.head_dim};
    StoredRows part{.parameter = parameter.name,
                    .rows = count,
                    .tensor = tensor(name, std::move(shape), alias),
                    .transposed = transposed,
                    .by_element = by_head,
                    .added = added};
    switch (how) {
      case How::whole:
      case How::transposed:
      case How::first_half:
      case How::by_head:
        list.rows.push_back(part);
        break;
      case How::second_half:
        part.stored_row = count;
        list.rows.push_back(part);
        break;
      case How::query:
        add_groups(part, 0, queries, 0);
        break;
      case How::key:
        add_groups(part, queries, spec.head_dim, 0);
        break;
      case How::value:
        add_groups(part, queries + spec.head_dim, spec.head_dim, 0);
        break;
      case How::packed_key:
        add_groups(part, 0, spec.head_dim, 0, 2 * spec.head_dim);
        break;
      case How::packed_value:
        add_groups(part, spec.head_dim, spec.head_dim, 0, 2 * spec.head_dim);
        break;
      case How::concatenated:
      case How::concatenated_transposed:
        add_groups(part, 0, queries, 0);
        add_groups(part, queries, spec.head_dim, all_queries);
        add_groups(part, queries + spec.head_dim, spec.head_dim, all_queries + keys);
        break;
    }
  }

  void add(const Tensor& parameter) {
    const ParameterName name = parts_of(parameter.name);
    if (name.layer.empty() && name.base == "head") {
      const std::string alias = type.head_alias.empty() ? "" : fmt::format("{}.{}", type.head_alias, name.kind);
      const std::string_view head = name.kind == "bias" && !type.head_bias.empty() ? type.head_bias : type.head;
      return add(parameter, fmt::format("{}.{}", head, name.kind), alias, How::whole, 0.0f);
    }
    const std::vector<NameRow> places = rows_for(type, spec, name.stack, name.base);
    if (places.empty())
      throw ConfigError(
          fmt::format("model_type '{}' of transformers has no place for the parameter {}", type.type, parameter.name));
    const bool is_norm = name.base.ends_with("norm");
    for (const NameRow& row : places) {
      const std::string side = name.stack.empty() || name.stack == "layers" ? "" : name.stack + ".";
      const std::string inner =
          fmt::format("{}{}{}.{}", side, name.layer.empty() ? "" : fmt::format("{}{}.", type.layers, name.layer),
                      row.tensor, name.kind);
      // Files of the bare model, without a head, leave its name out (openai-community/gpt2). BERT's
      // norms have names of TensorFlow's (google-bert/bert-base-uncased).
      std::string alias = inner;
      if (is_norm && type.type == "bert")
        alias.replace(alias.rfind('.'), std::string::npos, name.kind == "weight" ? ".gamma" : ".beta");
      add(parameter, std::string(type.model) + inner, alias, row.how, is_norm ? type.norm_added : 0.0f);
    }
  }
};

// Everything that a config of any type may say of a model; readers take what is theirs.
Json every_key(const ModelSpec& spec) {
  Json json;
  for (const char* key : {"num_hidden_layers", "n_layer"}) json[key] = spec.layers;
  for (const char* key : {"hidden_size", "n_embd"}) json[key] = spec.hidden;
  for (const char* key : {"num_attention_heads", "n_head"}) json[key] = spec.heads;
  for (const char* key : {"num_key_value_heads", "num_kv_heads"}) json[key] = spec.kv_heads;
  for (const char* key : {"intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"}) json[key] = spec.feature;
  for (const char* key : {"max_position_embeddings", "n_positions", "seq_length"}) json[key] = spec.context;
  json["vocab_size"] = spec.vocabulary;
  json["head_dim"] = spec.head_dim;
  json["word_embed_proj_dim"] = spec.embedding_width.value_or(spec.hidden);
  json["tie_word_embeddings"] = spec.tied_embeddings;
  json["initializer_range"] = spec.initializer_range;
  json["init_std"] = spec.initializer_range;
  for (const char* key : {"rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"})
    json[key] = spec.norm_epsilon;
  constexpr const char* activations[] = {"gelu_pytorch_tanh", "gelu", "relu", "silu", "gelu_pytorch_tanh", "gelu"};
  for (const char* key : {"hidden_act", "hidden_activation", "activation_function", "activation"})
    json[key] = activations[static_cast<std::size_t>(spec.activation)];
  if (spec.position == PositionKind::rotary) {
    for (const char* key : {"rope_theta", "rotary_emb_base"}) json[key] = spec.rope_theta;
    json["rope_local_base_freq"] = spec.sliding_rope_theta.value_or(spec.rope_theta);
    if (spec.rope_factor != 1.0) json["rope_scaling"] = {{"rope_type", "linear"}, {"factor", spec.rope_factor}};
    const std::int64_t rotary = spec.rotary_dim.value_or(spec.head_dim);
    json["rotary_dim"] = rotary;
    for (const char* key : {"partial_rotary_factor", "rotary_pct"})
      json[key] = static_cast<double>(rotary) / static_cast<double>(spec.head_dim);
  }
  json["alibi"] = spec.position == PositionKind::alibi;
  json["attention_bias"] = spec.qkv_bias;  // of the output, too, in some classes
  json["mlp_bias"] = spec.mlp_bias;
  for (const char* key : {"bias", "use_bias", "enable_bias"}) json[key] = spec.mlp_bias;
  json["use_parallel_residual"] = json["parallel_attn"] = spec.parallel_residual;
  json["new_decoder_architecture"] = spec.parallel_residual && spec.kv_heads > 1;
  json["multi_query"] = spec.kv_heads == 1;
  if (spec.parallel_residual && spec.kv_heads > 1) json["num_ln_in_parallel_attn"] = spec.shared_norm ? 1 : 2;
  json["do_layer_norm_before"] = spec.norm_placement == NormPlacement::before_branch;
  if (spec.attention_scale) {
    json["attention_multiplier"] = *spec.attention_scale;
    json["query_pre_attn_scalar"] = std::llround(1.0 / (*spec.attention_scale * *spec.attention_scale));
    json["scale_attn_weights"] = *spec.attention_scale != 1.0;
  } else {
    json["query_pre_attn_scalar"] = spec.head_dim;
  }
  json["embedding_multiplier"] = spec.embedding_multiplier;
  json["residual_multiplier"] = spec.residual_multiplier;
  json["logits_scaling"] = 1.0 / spec.logits_multiplier;
  json["logit_scale"] = spec.logits_multiplier;
  json["use_qk_norm"] = spec.qk_norm == QkNorm::layer_norm_per_head;
  json["attn_logit_softcapping"] = optional_number(spec.attention_softcap);
  json["final_logit_softcapping"] = optional_number(spec.logits_softcap);
  json["sliding_window"] = spec.sliding_window ? Json(*spec.sliding_window) : Json(nullptr);
  json["use_sliding_window"] = spec.sliding_window.has_value();
  if (spec.sliding_window) json["max_window_layers"] = 0;
  if (!spec.attention_pattern.empty()) {
    json["layer_types"] = Json::array();
    for (std::int64_t layer = 0; layer < spec.layers; ++layer)
      json["layer_types"].push_back(window_of(spec, layer) ? "sliding_attention" : "full_attention");
  }
  if (spec.family == Family::encoder_decoder) {
    for (const char* key : {"num_layers", "num_hidden_layers"}) json[key] = spec.layers - spec.decoder_layers;
    json["num_decoder_layers"] = spec.decoder_layers;
    json["d_model"] = spec.hidden;
    json["num_heads"] = spec.heads;
    json["d_kv"] = spec.head_dim;
    json["d_ff"] = spec.feature;
    json["n_positions"] = std::max<std::int64_t>(spec.context / 2, 1);
    json["relative_attention_num_buckets"] = spec.position_buckets;
    json["relative_attention_max_distance"] = spec.position_distance;
    json["initializer_factor"] = spec.initializer_range;
    constexpr const char* kinds[] = {"", "gelu", "relu", "gated-silu", "gated-gelu", ""};
    json["feed_forward_proj"] = kinds[static_cast<std::size_t>(spec.activation)];
    json["decoder_start_token_id"] = spec.start_token;
    json["eos_token_id"] = spec.end_token;
    json["is_encoder_decoder"] = true;
  }
  if (spec.token_types > 0) json["type_vocab_size"] = spec.token_types;
  if (spec.mask_token) json["mask_token_id"] = *spec.mask_token;
  return json;
}

// The keys that a type's reader asks for.
std::string keys_of_type(const Json& every, std::string_view type) {
  HuggingFaceConfig config{.root = parse_json(every.dump(), "config.json")};
  ModelSpec ignored;
  for (const HuggingFaceType& row : huggingface_types())
    if (row.name == type) row.read(config, ignored);
  const TypeRow& named = row_of_type(type);
  // The model does not say which tokens are special; a class's default may be beyond the
  // vocabulary.
  Json own = {{"model_type", type},
              {"architectures", {named.architecture}},
              {"dtype", "float32"},
              {"pad_token_id", nullptr}};
  for (const auto& item : every.items())
    if (config.asked.contains(item.key())) own[item.key()] = item.value();
  return write_json(own);
}

// What a model computes: without its name and its initial values, and without the longest sequence
// where nothing has that size.
ModelSpec computed(ModelSpec spec) {
  const ModelSpec defaults;
  spec.name.clear();
  spec.initializer_range = defaults.initializer_range;
  spec.scaled_residual = defaults.scaled_residual;
  if (spec.position != PositionKind::learned) spec.context = 1;
  if (spec.family == Family::encoder_decoder) {
    spec.context = 2;
    spec.decoder_context = 1;
  }
  return spec;
}

// The config of a type that builds this model; nothing where the type has none.
std::optional<std::string> config_of_type(Json every, std::string_view type, const ModelSpec& spec) {
  if (type == "roberta") {  // its positions are counted with those of padding
    every["max_position_embeddings"] = spec.context + spec.position_offset;
    every["pad_token_id"] = spec.position_offset - 1;
  }
  try {
    const std::string own = keys_of_type(every, type);
    if (computed(read_huggingface(own, "config.json").spec) == computed(spec)) return own;
  } catch (const ConfigError&) {
    // Its reader refuses these sizes.
  }
  return std::nullopt;
}

std::vector<std::string> lines_in(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

StoredWeights huggingface_weights(std::string_view model_type, const ModelSpec& spec, const OpGraph& graph) {
  // A ViT's patches are a convolution there, and its row of the class comes first.
  if (std::ranges::find(type_rows, model_type, &TypeRow::type) == std::end(type_rows))
    throw ConfigError(
        fmt::format("weights of model_type '{}' are not read: parplan keeps them in another order; leave --weights out",
                    model_type));
  Lister lister{row_of_type(model_type), spec};
  for (const TensorId id : parameters(graph))
    if (!is_of_adapter(graph.tensors[id])) lister.add(graph.tensors[id]);
  return std::move(lister.list);
}

HuggingFaceExport huggingface_export(const std::string& config, const std::string& file_name) {
  Json json = Json::parse(config, nullptr, false);
  if (!json.is_object()) throw ConfigError({file_name}, "this is no JSON object");
  const std::string type = parse_json(config, file_name).at("model_type").as_string();
  json.erase("torch_dtype");
  json["dtype"] = "float32";
  return {.model_type = type, .config = write_json(json)};
}

HuggingFaceExport huggingface_export(const ModelSpec& spec) {
  Json with_head_dim = every_key(spec);
  Json without = with_head_dim;  // some classes compute it and refuse to be told
  without.erase("head_dim");
  std::vector<std::string> types;
  for (const TypeRow& row : type_rows) {
    types.emplace_back(row.type);
    if (spec.rotary_dim && !row.rotates_parts) continue;
    for (const Json* every : {&without, &with_head_dim})
      if (const auto config = config_of_type(*every, row.type, spec))
        return {.model_type = std::string(row.type), .config = *config};
  }
  throw ConfigError(fmt::format(
      "none of transformers' classes that parplan knows ({}) builds the model '{}', so that there are no names for its "
      "weights; checkpoints (--checkpoint DIR) hold them under parplan's own",
      join(types), spec.name));
}

std::string differences(const ModelSpec& there, const ModelSpec& in_plan) {
  if (computed(there) == computed(in_plan)) return "";
  const std::vector<std::string> ones = lines_in(write_model(computed(there)));
  const std::vector<std::string> others = lines_in(write_model(computed(in_plan)));
  const auto beyond = [](const std::vector<std::string>& lines, const std::vector<std::string>& known) {
    std::vector<std::string> all;
    for (const std::string& line : lines)
      if (std::ranges::find(known, line) == known.end()) all.push_back(fmt::format("'{}'", line));
    return join(all);
  };
  std::vector<std::string> parts;
  if (const std::string only = beyond(ones, others); !only.empty()) parts.push_back(only + " there");
  if (const std::string only = beyond(others, ones); !only.empty()) parts.push_back(only + " in the plan");
  return join(parts, "; ");
}

}  // namespace parplan
