#include "models/huggingface.h"

#include <algorithm>
#include <array>
#include <filesystem>

#include <fmt/format.h>

#include "models/huggingface_config.h"
#include "planner/base/json.h"
#include "planner/base/text.h"

namespace parplan {
namespace {

// Keys by their meaning ---------------------------------------------------------------------------
// A star at the end of a key stands for any ending.

bool matches(std::string_view pattern, std::string_view key) {
  if (!pattern.ends_with('*')) return pattern == key;
  return key.starts_with(pattern.substr(0, pattern.size() - 1));
}

// The keys of a decoder's sizes and structure, over all supported types.
constexpr std::string_view understood[] = {
    "vocab_size",
    "hidden_size",
    "n_embd",
    "n_embed",
    "num_hidden_layers",
    "n_layer",
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "multi_query",
    "head_dim",
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "ffn_hidden_size",
    "max_position_embeddings",
    "n_positions",
    "seq_length",
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "activation",
    "tie_word_embeddings",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_epsilon",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rotary_dim",
    "rotary_pct",
    "rotary_emb_base",
    "partial_rotary_factor",
    "alibi",
    "attention_bias",
    "mlp_bias",
    "bias",
    "use_bias",
    "enable_bias",
    "use_parallel_residual",
    "parallel_attn",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "initializer_range",
    "init_std",
    "attention_dropout",
    "hidden_dropout",
    "dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
};

// Tokens, generation, bookkeeping, other tasks' heads, choices of implementation: they change
// neither the graph nor time nor memory.
constexpr std::string_view without_effect[] = {
    "model_type",
    "architectures",
    "auto_map",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "_*",
    "name_or_path",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "sep_token_id",
    "cls_token_id",
    "mask_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "tokenizer_class",
    "prefix",
    "use_cache",
    "cache_implementation",
    "task_specific_params",
    "summary_*",
    "classifier_dropout",
    "id2label",
    "label2id",
    "num_labels",
    "encoder_stride",
    "pooler_output_size",
    "pooler_act",
    "problem_type",
    "finetuning_task",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "return_dict",
    "return_dict_in_generate",
    "torchscript",
    "use_bfloat16",
    "tf_legacy_loss",
    "pruned_heads",
    "tie_encoder_decoder",
    "is_decoder",
    "cross_attention_hidden_size",
    "chunk_size_feed_forward",
    "gradient_checkpointing",
    "pretraining_tp",
    "slow_but_exact",
    "attention_softmax_in_fp32",
    "masked_softmax_fusion",
    "bias_dropout_fusion",
    "skip_bias_add",
    "skip_bias_add_qkv",
    "offset_alibi",
    "reorder_and_upcast_attn",
    "n_ctx",
    "original_max_position_embeddings",
    "sliding_window_size",
    "max_length",
    "min_length",
    "do_sample",
    "early_stopping",
    "num_beams",
    "num_beam_groups",
    "diversity_penalty",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "length_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "num_return_sequences",
    "remove_invalid_values",
    "exponential_decay_length_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
    "quantization_config",
    "scale_attn_weights",
};

// Structures that parplan does not build, by their keys. A key that is null, false, zero or empty
// says nothing.
struct Structure {
  std::string_view meaning;
  std::span<const std::string_view> keys;
};
constexpr std::string_view expert_keys[] = {
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "num_shared_experts",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "moe_*",
    "router_*",
    "first_k_dense_replace",
    "decoder_sparse_step",
    "norm_topk_prob",
    "n_group",
    "topk_group",
    "topk_method",
    "routed_scaling_factor",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "mlp_only_layers",
    "expert_capacity",
    "ffn_config",
};
constexpr std::string_view latent_keys[] = {"kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim",
                                            "v_head_dim"};
constexpr std::string_view state_keys[] = {
    "ssm_*",       "mamba_*",     "state_size",    "d_state",       "d_conv",
    "conv_kernel", "time_step_*", "use_conv_bias", "rescale_every", "attention_hidden_size",
    "lru_width",
};
constexpr std::string_view linear_keys[] = {"linear_*", "full_attention_interval", "attn_layers", "lightning_*"};
constexpr std::string_view mixed_keys[] = {
    "layers_block_type", "block_types",     "hybrid_override_pattern", "attn_layer_period",
    "attn_layer_offset", "attention_types", "hybrid_layer_ids",        "no_rope_layers",
};
constexpr std::string_view encoder_keys[] = {
    "encoder_*",
    "num_encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "is_encoder_decoder",
    "relative_attention_*",
    "d_kv",
    "type_vocab_size",
    "encoder",
};
constexpr std::string_view other_input_keys[] = {"vision_*", "audio_*",     "image_*", "video_*",
                                                 "mm_*",     "text_config", "speech_*"};
constexpr std::string_view cross_keys[] = {"cross_attention_layers", "add_cross_attention"};
constexpr std::string_view future_keys[] = {"num_nextn_predict_layers", "mtp_*", "num_mtp_modules"};
constexpr std::string_view per_layer_keys[] = {
    "altup_*", "laurel_rank", "hidden_size_per_layer_input", "num_kv_shared_layers", "sliding_window_pattern",
    "rope_local_base_freq", "num_query_heads", "ffn_multipliers",
};
constexpr Structure structures[] = {
    {"a mixture of experts", expert_keys},         {"latent attention", latent_keys},
    {"a state space model", state_keys},           {"linear attention", linear_keys},
    {"layers of unlike kinds", mixed_keys},        {"an encoder", encoder_keys},
    {"other inputs than text", other_input_keys},  {"cross attention", cross_keys},
    {"prediction of several tokens", future_keys}, {"sizes or positions that differ by layer", per_layer_keys},
};

bool is_any_of(std::span<const std::string_view> patterns, std::string_view key) {
  return std::ranges::any_of(patterns, [&](std::string_view pattern) { return matches(pattern, key); });
}

bool says_something(const YamlNode& node) {
  if (node.is_map()) return !node.keys().empty();
  if (node.is_list()) return node.size() > 0;
  if (node.is_null()) return false;
  const std::string text = node.as_string();
  return text != "false" && text != "0" && text != "0.0" && text != "" && text != "null";
}

// The structure that a key describes; null where it describes none.
const Structure* structure_of(const YamlNode& root, const std::string& key) {
  for (const Structure& structure : structures) {
    if (!is_any_of(structure.keys, key)) continue;
    const auto node = root.find(key);
    if (node && says_something(*node)) return &structure;
  }
  return nullptr;
}

// "a, b, c and 4 more": a file may have thousands.
std::string some_of(const std::vector<std::string>& keys) {
  constexpr std::size_t most = 16;
  if (keys.size() <= most) return join(keys);
  return fmt::format("{} and {} more", join({keys.begin(), keys.begin() + most}), keys.size() - most);
}

// Flow --------------------------------------------------------------------------------------------

// Says which keys a file of an unknown type has, and which of them parplan lacks.
[[noreturn]] void refuse_type(const YamlNode& root, const YamlNode& node, const std::string& type,
                              const std::vector<std::string>& supported) {
  std::vector<std::string> known, unknown;
  std::array<std::vector<std::string>, std::size(structures)> unmapped;
  for (const std::string& key : root.keys()) {
    if (const Structure* structure = structure_of(root, key)) {
      unmapped[structure - structures].push_back(key);
    } else if (is_any_of(understood, key)) {
      known.push_back(key);
    } else if (!is_any_of(without_effect, key) && root.find(key) && says_something(*root.find(key))) {
      unknown.push_back(key);
    }
  }
  std::string message = fmt::format("model_type '{}' is not supported; supported: {}", type, join(supported));
  if (!known.empty()) message += fmt::format("; of its keys parplan understands {}", some_of(known));
  for (std::size_t i = 0; i < unmapped.size(); ++i) {
    if (!unmapped[i].empty())
      message += fmt::format("; it cannot map {} ({})", some_of(unmapped[i]), structures[i].meaning);
  }
  if (!unknown.empty()) message += fmt::format("; it does not know {}", some_of(unknown));
  if (const auto text_config = root.find("text_config"); text_config && text_config->is_map()) {
    const auto inner = text_config->find("model_type");
    if (inner && inner->is_scalar() && std::ranges::find(supported, inner->as_string()) != supported.end()) {
      message += fmt::format(
          "; its text_config is of type '{}': save it as a config.json of its own to plan the language model alone",
          inner->as_string());
    }
  }
  message += "; a dense decoder can be written as a model.yaml (docs/model.md)";
  node.fail(message + did_you_mean(type, supported));
}

const HuggingFaceType& find_type(const YamlNode& root) {
  const std::vector<std::string> keys = root.is_map() ? root.keys() : std::vector<std::string>{};
  if (root.is_map() && std::ranges::find(keys, "model_type") == keys.end())
    root.fail(
        "missing key 'model_type', which says what kind of model this is; take the config.json of the model's "
        "repository as it stands, or write a model.yaml "
        "(docs/model.md)");
  const YamlNode node = root.at("model_type");
  const std::string type = node.as_string();
  std::vector<std::string> supported;
  for (const HuggingFaceType& row : huggingface_types()) {
    if (type == row.name) return row;
    supported.emplace_back(row.name);
  }
  refuse_type(root, node, type, supported);
}

// Keys of a supported type that its reader did not ask for: structure that parplan lacks is
// refused, unknown keys are noted.
void check_other_keys(HuggingFaceConfig& config, std::string_view type) {
  std::vector<std::string> strangers;
  for (const std::string& key : config.root.keys()) {
    if (config.asked.contains(key) || is_any_of(without_effect, key)) continue;
    const auto node = config.root.find(key);
    if (!node || !says_something(*node)) continue;
    if (const Structure* structure = structure_of(config.root, key)) {
      node->fail(fmt::format(
          "{} means {}, which parplan does not build in a model of type '{}'; take the key out, or write what there "
          "is as a model.yaml (docs/model.md)",
          key, structure->meaning, type));
    }
    strangers.push_back(printable_line(key));
  }
  if (!strangers.empty()) {
    config.notes.push_back(fmt::format("{} {} ignored: parplan does not know {} in a model of type '{}'",
                                       some_of(strangers), strangers.size() == 1 ? "is" : "are",
                                       strangers.size() == 1 ? "it" : "them", type));
  }
}

// "meta-llama/Meta-Llama-3-8B" -> "Meta-Llama-3-8B"; else the name of the file's folder; else the
// model's type.
std::string name_of(const YamlNode& root, const std::string& file_name, std::string_view type) {
  const auto last_part = [](std::string path) {
    while (path.ends_with('/')) path.pop_back();
    return path.substr(path.rfind('/') + 1);
  };
  if (const auto given = root.find("_name_or_path")) {
    const std::string last = last_part(printable_line(given->as_string()));
    if (!last.empty() && last != "." && last != "..") return last;
  }
  const std::filesystem::path path(file_name);
  if (path.filename() != "config.json") return path.stem().string();
  const std::string folder = path.parent_path().filename().string();
  return folder.empty() || folder == "." || folder == ".." ? std::string(type) : folder;
}

}  // namespace

ModelFile read_huggingface(const std::string& text, const std::string& file_name) {
  HuggingFaceConfig config{.root = parse_json(text, file_name)};
  const HuggingFaceType& type = find_type(config.root);

  ModelFile file;
  file.source = file_name;
  file.spec.family = Family::decoder;
  file.spec.name = name_of(config.root, file_name, type.name);
  file.spec.initializer_range = config.number("initializer_range", 0.02);
  type.read(config, file.spec);
  check_other_keys(config, type.name);
  if (config.root.find("quantization_config")) {
    config.notes.push_back("quantization_config is ignored: weights are trained in the precision of the plan");
  }
  if (const auto problem = find_problem(file.spec)) config.fail(problem->key, problem->message);
  config.require_sizes({"layers", "hidden", "heads", "vocabulary"});
  // Under other names it may be absent: it then is four times the hidden size.
  if (config.keys["feature"] == "intermediate_size") config.require_sizes({"feature"});
  file.notes = config.notes;
  return file;
}

}  // namespace parplan
