#include "models/huggingface.h"

#include <algorithm>
#include <cmath>
#include <map>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/base/json.h"
#include "tests/planner/base/error_of.h"

using namespace parplan;

namespace {

const std::filesystem::path source = PARPLAN_SOURCE_DIR;

ModelFile published(const std::string& folder) {
  const std::filesystem::path file = source / "tests/data/huggingface" / folder / "config.json";
  return read_huggingface(read_file(file), file.string());
}

ModelFile zoo(const std::string& name) {
  return load_model(name, source / "models");
}

// The config with the sizes that every file has to give, where it gives none: those that
// transformers' class has by default.
std::string sized(const std::string& text) {
  struct Sizes {
    int layers, hidden, heads, vocabulary;
  };
  const std::map<std::string, Sizes> sizes = {
      {"bloom", {2, 64, 8, 250880}},       {"falcon", {32, 4544, 71, 65024}},    {"gemma", {28, 3072, 16, 256000}},
      {"gemma2", {26, 2304, 8, 256000}},   {"gpt2", {12, 768, 12, 50257}},       {"gpt_neox", {44, 6144, 64, 50432}},
      {"gptj", {28, 4096, 16, 50400}},     {"granite", {32, 4096, 32, 32000}},   {"llama", {32, 4096, 32, 32000}},
      {"mistral", {32, 4096, 32, 32000}},  {"opt", {12, 768, 12, 50272}},        {"phi3", {32, 3072, 32, 32064}},
      {"qwen2", {32, 4096, 32, 151936}},   {"qwen3", {32, 4096, 32, 151936}},    {"starcoder2", {30, 3072, 24, 49152}}};
  Json config = Json::parse(text);
  const auto type = config.at("model_type").get<std::string>();
  const auto found = sizes.find(type);
  if (found == sizes.end()) return text;
  const bool short_names = type == "gpt2" || type == "gptj" || type == "bloom";
  const auto give = [&](const char* name, const char* short_name, int value) {
    if (!config.contains(name) && !config.contains(short_name)) config[short_names ? short_name : name] = value;
  };
  // These types call it so.
  const std::map<std::string, int> features = {{"gemma", 24576},   {"gemma2", 9216},   {"gpt_neox", 24576},
                                               {"granite", 11008}, {"llama", 11008},   {"mistral", 14336},
                                               {"phi3", 8192},     {"qwen2", 22016},   {"qwen3", 22016},
                                               {"starcoder2", 12288}};
  if (features.contains(type) && !config.contains("intermediate_size"))
    config["intermediate_size"] = features.at(type);
  give("num_hidden_layers", "n_layer", found->second.layers);
  give("hidden_size", type == "bloom" ? "n_embed" : "n_embd", found->second.hidden);
  give("num_attention_heads", "n_head", found->second.heads);
  if (!config.contains("vocab_size")) config["vocab_size"] = found->second.vocabulary;
  return config.dump();
}
ModelFile read_sized(const std::string& text, const std::string& file) { return read_huggingface(sized(text), file); }

std::string error(const std::string& text) {
  return error_of<ConfigError>([&] { read_huggingface(text, "c.json"); });
}

}  // namespace

TEST_CASE("Published configs give the specs of the zoo, but for the name") {
  const std::map<std::string, std::string> names = {
      {"gpt2", "gpt2"},
      {"Meta-Llama-3-8B", "llama3-8b"},
      {"Mistral-7B-v0.1", "mistral-7b"},
      {"Qwen2.5-7B", "qwen2.5-7b"},
      {"Qwen3-8B", "qwen3-8b"},
      {"Qwen3-32B", "qwen3-32b"},
      {"pythia-6.9b", "pythia-6.9b"},
      {"gpt-neox-20b", "gpt-neox-20b"},
      {"gpt-j-6b", "gptj-6b"},
      {"opt-6.7b", "opt-6.7b"},
      {"bloom-7b1", "bloom-7b1"},
      {"bloom", "bloom-176b"},
      {"falcon-7b", "falcon-7b"},
      {"falcon-40b", "falcon-40b"},
      {"Phi-3-mini-4k-instruct", "phi3-mini"},
      {"gemma-7b", "gemma-7b"},
      {"gemma-2-9b", "gemma2-9b"},
      {"gemma-2-27b", "gemma2-27b"},
      {"starcoder2-15b", "starcoder2-15b"},
      {"OLMo-2-1124-7B", "olmo2-7b"},
      {"OLMo-2-1124-13B", "olmo2-13b"},
      {"granite-3.1-8b-base", "granite-3.1-8b"},
      {"c4ai-command-r-v01", "command-r"},
      {"c4ai-command-r7b-12-2024", "command-r7b"},
      {"c4ai-command-a-03-2025", "command-a"},
      {"gemma-3-1b", "gemma3-1b"},
      {"gemma-3-12b", "gemma3-12b"},
      {"bert-base-uncased", "bert-base"},
      {"bert-large-uncased", "bert-large"},
  };
  for (const auto& named : names) {
    const std::string folder = named.first, name = named.second;
    CAPTURE(folder);
    ModelFile file = published(folder);
    CHECK(file.spec.name == folder);
    file.spec.name = name;
    CHECK(file.spec == zoo(name).spec);
  }
}

// Counted by tests/golden/count_parameters.py with transformers 5.23 (BERT, Command and Gemma 3:
// 5.24); the numbers of the models' cards where they state one.
TEST_CASE("Published configs have exactly the parameters that transformers builds of them") {
  const std::map<std::string, std::int64_t> published_counts = {
      {"Meta-Llama-3-8B", 8'030'261'248},
      {"Mistral-7B-v0.1", 7'241'732'096},
      {"OLMo-2-0325-32B", 32'234'279'936},
      {"OLMo-2-1124-13B", 13'716'198'400},
      {"OLMo-2-1124-7B", 7'298'617'344},
      {"Phi-3-medium-4k-instruct", 13'960'238'080},
      {"Phi-3-mini-4k-instruct", 3'821'079'552},
      {"Qwen2.5-7B", 7'615'616'512},
      {"Qwen3-0.6B", 596'049'920},
      {"Qwen3-32B", 32'762'123'264},
      {"Qwen3-8B", 8'190'735'360},
      {"bert-base-uncased", 109'514'298},
      {"bert-large-uncased", 335'174'458},
      {"bloom", 176'247'271'424},
      {"bloom-560m", 559'214'592},
      {"bloom-7b1", 7'069'016'064},
      {"c4ai-command-a-03-2025", 111'057'580'032},
      {"c4ai-command-r-plus", 103'810'674'688},
      {"c4ai-command-r-v01", 34'980'831'232},
      {"c4ai-command-r7b-12-2024", 8'028'033'024},
      {"falcon-11B", 11'102'822'400},
      {"falcon-40b", 41'303'293'952},
      {"falcon-7b", 6'921'720'704},
      {"falcon-rw-1b", 1'311'625'216},
      {"gemma-2-27b", 27'227'128'320},
      {"gemma-2-2b", 2'614'341'888},
      {"gemma-2-9b", 9'241'705'984},
      {"gemma-2b", 2'506'172'416},
      {"gemma-7b", 8'537'680'896},
      {"gemma-3-12b", 11'766'034'176},
      {"gemma-3-1b", 999'885'952},
      {"gpt-j-6b", 6'050'882'784},
      {"gpt-neox-20b", 20'554'567'680},
      {"gpt2", 124'439'808},
      {"granite-3.1-2b-base", 2'533'525'504},
      {"granite-3.1-8b-base", 8'170'835'968},
      {"opt-1.3b", 1'315'758'080},
      {"opt-125m", 125'239'296},
      {"opt-350m", 331'196'416},
      {"opt-6.7b", 6'658'473'984},
      {"pythia-6.9b", 6'857'302'016},
      {"pythia-70m", 70'426'624},
      {"roberta-base", 124'697'433},
      {"roberta-large", 355'412'057},
      {"starcoder2-15b", 15'957'889'024},
      {"starcoder2-3b", 3'030'371'328},
      {"starcoder2-7b", 7'173'923'840},
  };
  std::size_t configs = 0;
  for (const auto& folder : std::filesystem::directory_iterator(source / "tests/data/huggingface")) {
    if (!folder.is_directory()) continue;
    const std::string name = folder.path().filename().string();
    CAPTURE(name);
    ++configs;
    const ModelSpec spec = published(name).spec;
    CHECK(parameter_count(build_graph(spec, std::min<std::int64_t>(spec.context, 64))) == published_counts.at(name));
    CHECK(read_model(write_model(spec), "written.yaml").spec == spec);
  }
  CHECK(configs == published_counts.size());
}

// Counted as above, of the classes' own defaults: those of glm-4-9b-chat-hf and GLM-4-9B-0414.
TEST_CASE("GLM-4 rotates half of each head in pairs of neighbours, and has biases of query, key and value alone") {
  for (const auto& counted : {std::pair("glm", 9'399'951'360), std::pair("glm4", 9'400'279'040)}) {
    const std::string type = counted.first;
    const std::int64_t count = counted.second;
    CAPTURE(type);
    const ModelSpec spec = read_huggingface(fmt::format(R"({{"model_type": "{}", "num_hidden_layers": 40,
        "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 13696, "vocab_size": 151552}})",
                                                        type),
                                            "c.json")
                               .spec;
    CHECK(spec.rotary_dim == 64);
    CHECK(spec.rotary_interleaved);
    CHECK(spec.kv_heads == 2);
    CHECK(spec.qkv_bias);
    CHECK_FALSE(spec.attention_output_bias);
    CHECK((spec.norm_placement == NormPlacement::around_branch) == (type == std::string("glm4")));
    CHECK(parameter_count(build_graph(spec, 64)) == count);
    CHECK(read_model(write_model(spec), "written.yaml").spec == spec);
  }
}

TEST_CASE("Cohere's branches share a norm without a bias, and in Command R7B only layers that slide are rotated") {
  const ModelSpec r = published("c4ai-command-r-v01").spec, plus = published("c4ai-command-r-plus").spec,
                  seven = published("c4ai-command-r7b-12-2024").spec;
  for (const ModelSpec& spec : {r, plus, seven}) {
    CHECK((spec.parallel_residual && spec.shared_norm && spec.norm_without_bias && spec.rotary_interleaved));
    CHECK(spec.norm == NormKind::layer_norm);
    CHECK(spec.tied_embeddings);
  }
  CHECK(r.logits_multiplier == 0.0625);
  CHECK(plus.qk_norm == QkNorm::layer_norm_per_head);
  CHECK(r.qk_norm == QkNorm::none);
  CHECK((seven.sliding_rotary_only && !r.sliding_rotary_only));
  const std::vector<LayerSpan> pattern = {LayerSpan::sliding, LayerSpan::sliding, LayerSpan::sliding,
                                          LayerSpan::full};
  CHECK(seven.attention_pattern == pattern);
  const std::string sizes =
      R"("num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 50)";
  CHECK(error(R"({"model_type": "cohere2", )" + sizes +
              R"(, "layer_types": ["full_attention", "full_attention"]})") ==
        "c.json:1:1: error: full layers of a cohere2 have no positions, and no layer of this one slides");
  CHECK(error(R"({"model_type": "cohere2", )" + sizes + R"(, "sliding_window": null})") ==
        "c.json:1:1: error: layers of this model_type slide, and sliding_window is null; give it a number");
}

TEST_CASE("Gemma 3's layers that slide have a base of their own, and the others may be scaled, in either spelling") {
  const ModelSpec spec = published("gemma-3-12b").spec;
  CHECK(spec.rope_theta == 1e6);
  CHECK(spec.rope_factor == 8.0);
  CHECK(spec.sliding_rope_theta == 1e4);
  CHECK(spec.sliding_window == 1024);
  CHECK(spec.attention_pattern.size() == 6);
  CHECK(spec.attention_pattern.back() == LayerSpan::full);
  CHECK(!spec.attention_softcap);
  Json config = Json::parse(read_file(source / "tests/data/huggingface/gemma-3-12b/config.json"));
  for (const char* key : {"rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern"})
    config.erase(key);
  config["rope_parameters"] = {{"full_attention", {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 1e6}}},
                               {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 1e4}}}};
  config["_name_or_path"] = "gemma-3-12b";
  CHECK(read_huggingface(config.dump(), "c.json").spec == spec);
  config["rope_parameters"]["sliding_attention"]["rope_type"] = "linear";
  CHECK(error(config.dump()).ends_with("layers that slide have no scaling in parplan; leave rope_type out"));
  config["rope_parameters"] = {{"full_attention", {{"rope_type", "yarn"}, {"factor", 8.0}}}};
  CHECK(read_huggingface(config.dump(), "c.json").notes ==
        std::vector<std::string>{
            "rope_parameters of type yarn is ignored: it changes angles, neither time nor memory"});
}

TEST_CASE("A T5 has both sides, as long as n_positions each, and the scale of a tied head") {
  const std::string sizes =
      R"({"model_type": "t5", "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 50)";
  const auto read = [&](const std::string& more) { return read_huggingface(sizes + more + "}", "c.json").spec; };
  ModelSpec spec = read("");
  CHECK(spec.family == Family::encoder_decoder);
  CHECK((spec.layers == 4 && spec.decoder_layers == 2));
  CHECK((spec.context == 1024 && spec.decoder_context == 512));
  CHECK((spec.position_buckets == 32 && spec.position_distance == 128));
  CHECK((spec.start_token == 0 && spec.end_token == 1));
  CHECK(spec.activation == FeedForwardKind::relu);
  CHECK(spec.tied_embeddings);
  CHECK(spec.logits_multiplier == 0.25);  // 16^(-1/2)
  CHECK(spec.initializer_range == 1.0);
  CHECK(read_model(write_model(spec), "written.yaml").spec == spec);
  spec = read(R"(, "num_decoder_layers": 3, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": false,
      "n_positions": 100, "decoder_start_token_id": 7, "eos_token_id": 8, "initializer_factor": 0.5)");
  CHECK((spec.layers == 5 && spec.decoder_layers == 3));
  CHECK((spec.context == 200 && spec.decoder_context == 100));
  CHECK((spec.start_token == 7 && spec.end_token == 8));
  CHECK(spec.activation == FeedForwardKind::gated_gelu_tanh);
  CHECK_FALSE(spec.tied_embeddings);
  CHECK(spec.logits_multiplier == 1.0);
  CHECK(spec.initializer_range == 0.5);
  CHECK(read_model(write_model(spec), "written.yaml").spec == spec);
  CHECK(error(sizes + R"(, "feed_forward_proj": "gated-swish"})")
            .find("expected one of relu, gelu, gated-gelu, gated-silu, found 'gated-swish'") != std::string::npos);
  CHECK(error(sizes + R"(, "is_decoder": true})")
            .ends_with("is_decoder true is not supported: models of this type are built with both sides"));
  CHECK(error(sizes + R"(, "relative_attention_num_buckets": 30})").find("expected a multiple of 4 up to 256") !=
        std::string::npos);
}

TEST_CASE("A BERT is an encoder that learns masked tokens, and other uses of its class are refused") {
  const ModelFile base = published("bert-base-uncased");
  CHECK((base.spec.bidirectional && base.spec.head_transform && base.spec.embedding_norm && base.spec.head_bias));
  CHECK(base.spec.mask_token == 103);
  CHECK(base.spec.token_types == 2);
  CHECK(base.spec.norm_placement == NormPlacement::after_add);
  CHECK(base.notes ==
        std::vector<std::string>{"hidden_dropout_prob 0.1 is ignored: parplan trains without dropout",
                                 "attention_probs_dropout_prob 0.1 is ignored: parplan trains without dropout"});
  const auto with = [](const std::string& more) {
    return R"({"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, )"
           R"("intermediate_size": 96, "vocab_size": 50)" + more + "}";
  };
  CHECK(read_huggingface(with(R"(, "mask_token_id": 7)"), "c.json").spec.mask_token == 7);
  CHECK(error(with("")) == "c.json:1:1: error: the mask token 103 is beyond the vocabulary, which ends at 49");
  CHECK(error(with(R"(, "mask_token_id": 7, "is_decoder": true)"))
            .ends_with("is_decoder true is not supported: models of this type are built as encoders"));
  CHECK(error(with(R"(, "mask_token_id": 7, "tie_word_embeddings": false)"))
            .ends_with("tie_word_embeddings false is not supported: the head of an encoder has the embedding's "
                       "weight"));
  CHECK(error(with(R"(, "mask_token_id": 7, "position_embedding_type": "relative_key")"))
            .ends_with("expected one of absolute, found 'relative_key'"));
}

TEST_CASE("A ViT reads images, and its classes are those that id2label names") {
  const auto with = [](const std::string& more) {
    return R"({"model_type": "vit", "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, )"
           R"("intermediate_size": 3072)" +
           more + "}";
  };
  // google/vit-base-patch16-224 but for its 1,000 names.
  const std::string config = with(
      R"(, "architectures": ["ViTForImageClassification"], "hidden_act": "gelu", "hidden_dropout_prob": 0.0, )"
      R"("attention_probs_dropout_prob": 0.0, "initializer_range": 0.02, "layer_norm_eps": 1e-12, "image_size": 224, )"
      R"("patch_size": 16, "num_channels": 3, "qkv_bias": true, "encoder_stride": 16, "num_labels": 1000)");
  ModelFile base = read_huggingface(config, "c.json");
  CHECK(base.notes.empty());
  base.spec.name = "vit-base";
  CHECK(base.spec == zoo("vit-base").spec);
  CHECK(parameter_count(build_graph(base.spec, 197)) == 86'567'656);
  // Absent keys have the defaults of ViTConfig.
  CHECK(read_huggingface(with(R"(, "num_labels": 1000)"), "vit-base/config.json").spec == base.spec);
  CHECK(read_huggingface(with(R"(, "id2label": {"0": "cat", "1": "dog", "2": "cow"})"), "c.json").spec.vocabulary == 3);
  CHECK(error(with("")).starts_with("c.json:1:1: error: missing key 'num_labels'"));
  CHECK(error(with(R"(, "num_labels": 10, "image_size": 30)")) ==
        "c.json:1:1: error: patches of 16 x 16 pixels do not divide an image of 30 x 30");
}

TEST_CASE("A RoBERTa is a BERT whose positions begin behind that of padding") {
  const ModelSpec spec = published("roberta-base").spec;
  CHECK(spec.position_offset == 2);
  CHECK(spec.context == 512);
  CHECK(spec.token_types == 1);
  CHECK(spec.mask_token == 50264);
  const auto with = [](const std::string& more) {
    return R"({"model_type": "roberta", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, )"
           R"("intermediate_size": 96, "vocab_size": 50, "mask_token_id": 7)" + more + "}";
  };
  CHECK(error(with(R"(, "max_position_embeddings": 2)"))
            .ends_with("the first 2 positions belong to padding, and there are no others"));
  CHECK(error(with(R"(, "hidden_act": "relu")"))
            .ends_with("the head of a roberta has the activation gelu, and its layers have another"));
}

TEST_CASE("What a config says and parplan ignores is noted") {
  CHECK(published("gpt2").notes ==
        std::vector<std::string>{"attn_pdrop 0.1 is ignored: parplan trains without dropout",
                                 "embd_pdrop 0.1 is ignored: parplan trains without dropout",
                                 "resid_pdrop 0.1 is ignored: parplan trains without dropout"});
  CHECK(published("Meta-Llama-3-8B").notes.empty());
  CHECK(published("Mistral-7B-v0.1").notes.empty());
  CHECK(published("Qwen2.5-7B").notes.empty());
  const auto notes = [](const std::string& text) { return read_sized(text, "c.json").notes; };
  CHECK(notes(R"({"model_type": "llama", "attention_dropout": 0.2, "quantization_config": {"bits": 4},
                  "rope_scaling": {"rope_type": "llama3", "factor": 8.0}})") ==
        std::vector<std::string>{"attention_dropout 0.2 is ignored: parplan trains without dropout",
                                 "rope_scaling of type llama3 is ignored: it changes angles, neither time nor memory",
                                 "quantization_config is ignored: weights are trained in the precision of the plan"});
  CHECK(notes(R"({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": true})") ==
        std::vector<std::string>{
            "scale_attn_by_inverse_layer_idx true is ignored: it changes numbers, neither time nor memory"});
  CHECK(published("opt-6.7b").notes ==
        std::vector<std::string>{"dropout 0.1 is ignored: parplan trains without dropout"});
  CHECK(published("starcoder2-15b").notes ==
        std::vector<std::string>{"attention_dropout 0.1 is ignored: parplan trains without dropout",
                                 "residual_dropout 0.1 is ignored: parplan trains without dropout",
                                 "embedding_dropout 0.1 is ignored: parplan trains without dropout",
                                 "activation_function, layer_norm_epsilon are ignored: parplan does not know them in a "
                                 "model of type 'starcoder2'"});
  CHECK(
      notes(
          R"({"model_type": "llama", "attn_temperature": 2, "num_experts": 0, "mamba_d_conv": null, "vision_config": {}})") ==
      std::vector<std::string>{"attn_temperature is ignored: parplan does not know it in a model of type 'llama'"});
}

TEST_CASE("Absent keys have the defaults of transformers") {
  ModelFile gpt2 = read_sized(R"({"model_type": "gpt2"})", "some/gpt2/config.json");
  CHECK(gpt2.spec == zoo("gpt2").spec);
  ModelSpec llama =
      read_sized(R"({"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5})",
                       "llama2-7b.json")
          .spec;
  CHECK(llama == zoo("llama2-7b").spec);
  const ModelSpec mistral = read_sized(R"({"model_type": "mistral"})", "c.json").spec;
  CHECK(mistral.kv_heads == 8);
  CHECK(mistral.feature == 14336);
  CHECK(mistral.context == 131072);
  const ModelSpec every_head =
      read_sized(R"({"model_type": "mistral", "num_key_value_heads": null})", "c.json").spec;
  CHECK(every_head.kv_heads == 32);
  const ModelSpec qwen2 = read_sized(R"({"model_type": "qwen2"})", "c.json").spec;
  CHECK(qwen2.kv_heads == 32);
  CHECK(qwen2.feature == 22016);
  CHECK(qwen2.vocabulary == 151936);
  CHECK(qwen2.qkv_bias);
  CHECK_FALSE(qwen2.attention_output_bias);
}

TEST_CASE("What a config says outweighs the defaults") {
  const ModelSpec llama = read_sized(
                              R"({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32,
          "num_key_value_heads": 2, "attention_bias": true, "mlp_bias": true, "tie_word_embeddings": true,
          "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "initializer_range": 0.01})",
                              "c.json")
                              .spec;
  CHECK(llama.head_dim == 32);
  CHECK(llama.kv_heads == 2);
  CHECK(llama.qkv_bias);
  CHECK(llama.attention_output_bias);
  CHECK(llama.mlp_bias);
  CHECK(llama.tied_embeddings);
  CHECK(llama.rope_theta == 5e5);
  CHECK(llama.initializer_range == 0.01);
  const ModelSpec gpt2 = read_sized(
                             R"({"model_type": "gpt2", "hidden_size": 96, "n_inner": 100, "activation_function": "gelu",
                                 "tie_word_embeddings": false})",
                             "c.json")
                             .spec;
  CHECK(gpt2.hidden == 96);
  CHECK(gpt2.feature == 100);
  CHECK(gpt2.activation == FeedForwardKind::gelu_erf);
  CHECK_FALSE(gpt2.tied_embeddings);
}

TEST_CASE("A model is named by its config, its folder, its file or its type") {
  const auto name = [](const std::string& text, const std::string& file) {
    return read_sized(text, file).spec.name;
  };
  CHECK(name(R"({"model_type": "gpt2", "_name_or_path": "openai/gpt2-xl/"})", "x/config.json") == "gpt2-xl");
  CHECK(name(R"({"model_type": "gpt2", "_name_or_path": ""})", "my-model/config.json") == "my-model");
  CHECK(name(R"({"model_type": "gpt2"})", "my-model.json") == "my-model");
  CHECK(name(R"({"model_type": "gpt2"})", "config.json") == "gpt2");
  CHECK(name(R"({"model_type": "gpt2"})", "./config.json") == "gpt2");
}

TEST_CASE("Windows, patterns, scales and placements are read as transformers builds them") {
  const auto spec = [](const std::string& text) { return read_sized(text, "c.json").spec; };
  const std::vector<LayerSpan> alternating = {LayerSpan::sliding, LayerSpan::full};
  CHECK(spec(R"({"model_type": "mistral"})").sliding_window == 4096);
  CHECK(spec(R"({"model_type": "mistral", "sliding_window": null})").sliding_window == std::nullopt);
  CHECK(spec(R"({"model_type": "phi3"})").sliding_window == std::nullopt);
  CHECK(spec(R"({"model_type": "qwen2", "sliding_window": 100})").sliding_window == std::nullopt);
  // Layers from max_window_layers on have sliding windows.
  const ModelSpec qwen = spec(
      R"({"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": true, "sliding_window": 100, "max_window_layers": 3})");
  CHECK(qwen.sliding_window == 100);
  CHECK(qwen.attention_pattern == std::vector<LayerSpan>{LayerSpan::full, LayerSpan::full,
                                                         LayerSpan::full, LayerSpan::sliding});
  const ModelSpec all = spec(R"({"model_type": "qwen3", "use_sliding_window": true, "max_window_layers": 0})");
  CHECK(all.sliding_window == 4096);
  CHECK(all.attention_pattern.empty());
  const ModelSpec gemma2 = spec(R"({"model_type": "gemma2", "num_hidden_layers": 5})");
  CHECK(gemma2.attention_pattern == alternating);
  CHECK(gemma2.attention_scale == std::nullopt);  // 1 / sqrt(256) is that of its heads
  CHECK(gemma2.attention_softcap == 50.0);
  CHECK(gemma2.embedding_multiplier == 48.0);  // sqrt(2304)
  const ModelSpec uncapped =
      spec(R"({"model_type": "gemma2", "attn_logit_softcapping": null, "final_logit_softcapping": null,
                                      "query_pre_attn_scalar": 144, "sliding_window": null})");
  CHECK(uncapped.attention_softcap == std::nullopt);
  CHECK(uncapped.logits_softcap == std::nullopt);
  CHECK(uncapped.attention_scale == 1.0 / 12.0);
  CHECK(uncapped.attention_pattern.empty());
  const ModelSpec listed =
      spec(R"({"model_type": "qwen3", "num_hidden_layers": 4, "use_sliding_window": true, "layer_types":
      ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]})");
  CHECK(listed.attention_pattern == alternating);

  // The heads are rotated in part; transformers 5 puts the fraction beside theta.
  CHECK(spec(R"({"model_type": "gpt_neox"})").rotary_dim == 24);  // a quarter of 6144 / 64
  CHECK(spec(R"({"model_type": "gpt_neox", "rotary_pct": 1.0})").rotary_dim == std::nullopt);
  const ModelSpec partial =
      spec(R"({"model_type": "gpt_neox", "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 5}})");
  CHECK(partial.rotary_dim == 48);
  CHECK(partial.rope_theta == 5.0);
  CHECK(spec(R"({"model_type": "phi3", "partial_rotary_factor": 0.75})").rotary_dim == 72);
  CHECK(spec(R"({"model_type": "gptj"})").rotary_dim == 64);

  CHECK(spec(R"({"model_type": "gpt2", "scale_attn_weights": false})").attention_scale == 1.0);
  const ModelSpec granite =
      spec(R"({"model_type": "granite", "attention_multiplier": 0.5, "logits_scaling": 8, "residual_multiplier": 0.25,
                                     "embedding_multiplier": 12})");
  CHECK(granite.attention_scale == 0.5);
  CHECK(granite.logits_multiplier == 0.125);
  CHECK(granite.residual_multiplier == 0.25);
  CHECK(granite.embedding_multiplier == 12.0);
  CHECK(spec(R"({"model_type": "opt", "word_embed_proj_dim": 512})").embedding_width == 512);
  CHECK(published("opt-125m").spec.embedding_width == std::nullopt);
  CHECK(spec(R"({"model_type": "opt", "do_layer_norm_before": false})").norm_placement == NormPlacement::after_add);
  CHECK_FALSE(spec(R"({"model_type": "opt", "enable_bias": false})").mlp_bias);

  // Falcon's three generations.
  const ModelSpec seven = spec(R"({"model_type": "falcon"})");
  CHECK(seven.kv_heads == 1);
  CHECK((seven.parallel_residual && seven.shared_norm));
  const ModelSpec forty =
      spec(R"({"model_type": "falcon", "hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8,
                                   "new_decoder_architecture": true})");
  CHECK(forty.kv_heads == 8);
  CHECK((forty.parallel_residual && !forty.shared_norm));
  CHECK(published("falcon-11B").spec.shared_norm);
  const ModelSpec rw = published("falcon-rw-1b").spec;
  CHECK(rw.kv_heads == 32);
  CHECK(rw.position == PositionKind::alibi);
  CHECK(rw.alibi_multiplier == 0.125);  // 1 / sqrt(64)
  CHECK_FALSE(rw.parallel_residual);

  // "gelu" in the first Gemma configs means the tanh form, unless hidden_activation states it.
  CHECK(spec(R"({"model_type": "gemma", "hidden_act": "gelu"})").activation == FeedForwardKind::gated_gelu_tanh);
  CHECK(spec(R"({"model_type": "gemma", "hidden_act": "silu"})").activation == FeedForwardKind::gated_silu);
  CHECK(spec(R"({"model_type": "gemma", "hidden_activation": "gelu"})").activation == FeedForwardKind::gated_gelu_erf);
  CHECK(spec(R"({"model_type": "llama", "hidden_act": "gelu_pytorch_tanh"})").activation ==
        FeedForwardKind::gated_gelu_tanh);
  CHECK(published("gpt-neox-20b").spec.activation == FeedForwardKind::gelu_tanh);
}

TEST_CASE("What a supported type may say and parplan does not build is refused with the reason") {
  CHECK(error(R"({"model_type": "opt", "_remove_final_layer_norm": true})") ==
        "c.json:1:51: error: _remove_final_layer_norm true is not supported: the last norm is built wherever norms "
        "stand before "
        "branches");
  CHECK(error(R"({"model_type": "opt", "layer_norm_elementwise_affine": false})") ==
        "c.json:1:56: error: layer_norm_elementwise_affine false is not supported: norms have weights and biases in "
        "parplan");
  CHECK(error(R"({"model_type": "bloom", "apply_residual_connection_post_layernorm": true})") ==
        "c.json:1:69: error: apply_residual_connection_post_layernorm true is not supported: residuals that begin "
        "behind the "
        "norm are not "
        "built");
  CHECK(error(R"({"model_type": "bloom", "n_inner": 5})") ==
        "c.json:1:36: error: transformers' bloom has feed-forward layers of 4 x hidden_size = 256, found n_inner 5");
  CHECK(error(R"({"model_type": "gemma", "use_bidirectional_attention": true})") ==
        "c.json:1:56: error: use_bidirectional_attention true is not supported: a Gemma's attention is causal in "
        "parplan");
  CHECK(error(R"({"model_type": "falcon", "new_decoder_architecture": true, "parallel_attn": false})") ==
        "c.json:1:77: error: a new_decoder_architecture has parallel branches; leave parallel_attn out, or set it to "
        "true");
  CHECK(error(R"({"model_type": "falcon", "num_ln_in_parallel_attn": 2})") ==
        "c.json:1:53: error: 2 norms side by side need new_decoder_architecture: expected 1");
  CHECK(error(R"({"model_type": "starcoder2", "mlp_type": "gated"})") ==
        "c.json:1:42: error: expected one of default, found 'gated'");
  CHECK(error(R"({"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"]})") ==
        "c.json:1:42: error: layers of several kinds are not supported for this model_type; leave layer_types out, or "
        "write a "
        "model.yaml "
        "(docs/model.md) with an attention_pattern");
  CHECK(error(R"({"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["linear_attention"]})") ==
        "c.json:1:65: error: expected one of full_attention, sliding_attention, found 'linear_attention'; did you mean "
        "'sliding_attention'?");
  CHECK(error(R"({"model_type": "qwen3", "layer_types": ["full_attention"]})") ==
        "c.json:1:40: error: layer_types names 1 layers, but num_hidden_layers is 32");
  CHECK(error(R"({"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["sliding_attention"]})") ==
        "c.json:1:64: error: layers of sliding_attention need a sliding_window, and there is none");
  CHECK(error(R"({"model_type": "gemma2", "rope_parameters": {"full_attention": {"rope_theta": 5}}})") ==
        "c.json:1:64: error: rope_parameters of its own for full_attention is not supported: all layers turn alike in "
        "parplan");
  CHECK(error(R"({"model_type": "phi3", "partial_rotary_factor": 1.5})") ==
        "c.json:1:49: error: expected a part of every head above 0 and at most 1, found 1.5");
  CHECK(error(R"({"model_type": "gptj", "rotary_dim": 63})") ==
        "c.json:1:38: error: rotary positions turn pairs of a head's 256 numbers: expected an even rotary_dim from 2 "
        "to 256, "
        "found 63");
  CHECK(error(R"({"model_type": "gpt_neox", "head_dim": 64})") ==
        "c.json:1:40: error: heads of this model_type are hidden_size / num_attention_heads = 96 wide, found head_dim "
        "64");
  CHECK(error(R"({"model_type": "llama", "num_local_experts": 8})") ==
        "c.json:1:46: error: num_local_experts means a mixture of experts, which parplan does not build in a model of "
        "type "
        "'llama'; take "
        "the key out, or write what there is as a model.yaml (docs/model.md)");
  CHECK(error(R"({"model_type": "qwen3", "kv_lora_rank": 512})") ==
        "c.json:1:41: error: kv_lora_rank means latent attention, which parplan does not build in a model of type "
        "'qwen3'; take "
        "the key "
        "out, or write what there is as a model.yaml (docs/model.md)");
}

TEST_CASE("Other types of model are refused with what of them parplan understands and what it cannot map") {
  const std::string types =
      "bert, bloom, cohere, cohere2, falcon, gemma, gemma2, gemma3_text, glm, glm4, gpt2, gpt_neox, gptj, granite, "
      "llama, mistral, olmo2, opt, phi3, qwen2, qwen3, roberta, starcoder2, t5, vit";
  const std::string advice = "; a dense decoder can be written as a model.yaml (docs/model.md)";
  CHECK(
      error(
          R"({"model_type": "mixtral", "hidden_size": 4096, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
                  "router_aux_loss_coef": 0.02, "use_cache": true, "bos_token_id": 1})") ==
      "c.json:1:16: error: model_type 'mixtral' is not supported; supported: " + types +
          "; of its keys parplan understands hidden_size, vocab_size; it cannot map num_local_experts, "
          "num_experts_per_tok, "
          "router_aux_loss_coef (a mixture of experts)" +
          advice + "; did you mean 'mistral'?");
  CHECK(
      error(
          R"({"model_type": "deepseek_v3", "kv_lora_rank": 512, "n_routed_experts": 256, "num_nextn_predict_layers": 1,
                  "strange": [1], "stranger": false})") ==
      "c.json:1:16: error: model_type 'deepseek_v3' is not supported; supported: " + types +
          "; it cannot map n_routed_experts (a mixture of experts); it cannot map kv_lora_rank (latent attention); it "
          "cannot map "
          "num_nextn_predict_layers (prediction of several tokens); it does not know strange" +
          advice);
  CHECK(error(R"({"model_type": "mamba", "state_size": 16, "conv_kernel": 4, "time_step_rank": 48})") ==
        "c.json:1:16: error: model_type 'mamba' is not supported; supported: " + types +
            "; it cannot map state_size, conv_kernel, time_step_rank (a state space model)" + advice);
  CHECK(error(R"({"model_type": "albert", "hidden_size": 768, "type_vocab_size": 2})") ==
        "c.json:1:16: error: model_type 'albert' is not supported; supported: " + types +
            "; of its keys parplan understands hidden_size; it cannot map type_vocab_size (an encoder)" + advice +
            "; did you mean 'bert'?");
  CHECK(
      error(R"({"model_type": "paligemma", "text_config": {"model_type": "gemma2"}, "vision_config": {"depth": 1}})") ==
      "c.json:1:16: error: model_type 'paligemma' is not supported; supported: " + types +
          "; it cannot map text_config, vision_config (other inputs than text); its text_config is of type 'gemma2': "
          "save it "
          "as a "
          "config.json of its own to plan the language model alone" +
          advice);
  CHECK(error(R"({"model_type": "jamba"})") ==
        "c.json:1:16: error: model_type 'jamba' is not supported; supported: " + types + advice);
  // Thousands of keys do not make a message of thousands of words.
  std::string many = R"({"model_type": "x")";
  for (int i = 0; i < 1000; ++i) many += R"(, "k)" + std::to_string(i) + R"(": 1)";
  CHECK(
      error(many + "}")
          .find(
              "it does not know k0, k1, k2, k3, k4, k5, k6, k7, k8, k9, k10, k11, k12, k13, k14, k15 and 984 more;") !=
      std::string::npos);
  CHECK(error(R"({"hidden_size": 3})") ==
        "c.json:1:1: error: missing key 'model_type', which says what kind of model this is; take the config.json of "
        "the model's repository as it stands, or write a "
        "model.yaml (docs/model.md)");
  CHECK(error("[]") == "c.json:1:1: error: expected a map with key 'model_type', found a list");
  CHECK(error(R"({"model_type": null})") == "c.json:1:16: error: expected text, found nothing");
  CHECK(error(R"({"model_type": ["llama"]})") == "c.json:1:16: error: expected text, found a list");
}

TEST_CASE("Keys of every supported type hold values of any kind without a crash") {
  for (const auto& folder : std::filesystem::directory_iterator(source / "tests/data/huggingface")) {
    if (!folder.is_directory()) continue;
    const Json config = Json::parse(read_file(folder.path() / "config.json"));
    for (const auto& [key, value] : config.items()) {
      for (const Json& other : {Json(nullptr), Json(true), Json(-1), Json(0), Json(7), Json(1e300), Json(1e-300),
                                Json("text"), Json::array(), Json::array({1, "a", nullptr}), Json{{"rope_type", 3}},
                                Json{{"full_attention", Json::object()}}}) {
        Json changed = config;
        changed[key] = other;
        INFO(changed.dump());
        try {
          const ModelSpec spec = read_huggingface(changed.dump(), "c.json").spec;
          CHECK_FALSE(find_problem(spec));
          CHECK(read_model(write_model(spec), "written.yaml").spec == spec);
        } catch (const ConfigError& error) {
          CHECK(std::string(error.what()).starts_with("c.json:1:"));
        }
      }
    }
  }
}

TEST_CASE("Sizes are those of the file, and numbers are no text") {
  CHECK(error(R"({"model_type": "llama"})") ==
        "c.json:1:1: error: missing key 'num_hidden_layers': a config.json that transformers writes has it, and "
        "without it the sizes would be those of another model");
  CHECK(error(R"({"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4})").find("missing key 'vocab_size'") !=
        std::string::npos);
  for (const char* type : {"llama", "gpt_neox"})
    CHECK(error(fmt::format(R"({{"model_type": "{}", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
                            "vocab_size": 99}})", type))
              .find("missing key 'intermediate_size'") != std::string::npos);
  CHECK(error(R"({"model_type": "llama", "hidden_size": "5120"})") ==
        "c.json:1:40: error: hidden_size: expected a whole number, found the text \"5120\"");
  CHECK(error(R"({"model_type": "llama", "rms_norm_eps": "1e-5"})") ==
        "c.json:1:41: error: rms_norm_eps: expected a number, found the text \"1e-5\"");
  CHECK(error(R"({"model_type": "llama", "mlp_bias": "true"})") ==
        "c.json:1:37: error: mlp_bias: expected true or false, found the text \"true\"");
}

TEST_CASE("Contradictions and values that cannot be are errors with their place") {
  CHECK(error("{\n  \"model_type\": \"gpt2\",\n}") ==
        "c.json:3:1: error: invalid JSON: syntax error while parsing object key - unexpected '}'; expected string "
        "literal");
  CHECK(error("{\"model_type\": \"gpt2\", \"n_head\": 7}") ==
        "c.json:1:34: error: n_embd 768 is not a multiple of n_head 7");
  CHECK(error("{\"model_type\": \"llama\", \"hidden_size\": 100}") ==
        "c.json:1:1: error: hidden_size 100 is not a multiple of num_attention_heads 32, and there is no head_dim");
  CHECK(error("{\"model_type\": \"llama\", \"num_key_value_heads\": 5}") ==
        "c.json:1:48: error: 32 query heads cannot share 5 key/value heads evenly; allowed: 1, 2, 4, 8, 16, 32");
  CHECK(error("{\"model_type\": \"llama\", \"head_dim\": 5}") ==
        "c.json:1:37: error: rotary positions turn pairs of numbers: the width of a head must be even, found 5");
  CHECK(error("{\"model_type\": \"gpt2\", \"n_layer\": 12, \"num_hidden_layers\": 24}") ==
        "c.json:1:60: error: num_hidden_layers is 24, but n_layer is 12");
  CHECK(error("{\"model_type\": \"gpt2\", \"n_layer\": 0}") ==
        "c.json:1:35: error: n_layer: expected a whole number from 1 to 10000, found '0'");
  CHECK(error("{\"model_type\": \"gpt2\", \"layer_norm_epsilon\": \"small\"}") ==
        "c.json:1:46: error: layer_norm_epsilon: expected a number, found 'small'");
  CHECK(error("{\"model_type\": \"gpt2\", \"n_embd\": 1e400}") ==
        "c.json:1:34: error: invalid JSON: the number 1e400 is beyond what a double holds");
  CHECK(error("{\"model_type\": \"gpt2\", \"n_embd\": 1e300}")
            .find("error: n_embd: expected a whole number from 1 to ") != std::string::npos);
  CHECK(error("{\"model_type\": \"mistral\", \"sliding_window\": -1}")
            .find("error: sliding_window: expected a whole number from 1 to ") != std::string::npos);
  CHECK(error("{\"model_type\": \"gpt2\", \"layer_norm_epsilon\": 0}") ==
        "c.json:1:46: error: expected layer_norm_epsilon above 0, found '0'");
  CHECK(error("{\"model_type\": \"gpt2\", \"activation_function\": \"tanh\"}") ==
        "c.json:1:47: error: activation_function: expected one of gelu_new, gelu_pytorch_tanh, gelu_fast, gelu, relu, "
        "found 'tanh'");
  CHECK(error("{\"model_type\": \"gpt2\", \"add_cross_attention\": true}") ==
        "c.json:1:47: error: add_cross_attention true is not supported: parplan builds decoder-only models");
  CHECK(error("{\"model_type\": \"llama\", \"hidden_act\": \"relu\"}") ==
        "c.json:1:39: error: hidden_act: expected one of silu, swish, gelu_new, gelu_pytorch_tanh, gelu_fast, gelu, "
        "found 'relu'; did you "
        "mean 'gelu'?");
  CHECK(error("{\"model_type\": \"llama\", \"rope_parameters\": {\"rope_theta\": 0}}") ==
        "c.json:1:59: error: expected rope_theta above 0, found '0'");
  CHECK(error("{\"model_type\": \"llama\", \"mlp_bias\": \"yes\"}") ==
        "c.json:1:37: error: mlp_bias: expected true or false, found 'yes'");
  CHECK(error("{\"model_type\": \"llama\", \"mlp_bias\": true, \"mlp_bias\": false}") ==
        "c.json:1:43: error: duplicate key 'mlp_bias', first given on line 1");
}
