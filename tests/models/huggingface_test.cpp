#include "models/huggingface.h"

#include <doctest/doctest.h>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/base/error.h"
#include "planner/base/file.h"
#include "tests/planner/base/error_of.h"

using namespace parplan;

namespace {

const std::filesystem::path source = PARPLAN_SOURCE_DIR;

ModelFile published(const std::string& folder) {
  const std::filesystem::path file = source / "tests/data/huggingface" / folder / "config.json";
  return read_huggingface(read_file(file), file.string());
}

ModelFile zoo(const std::string& name) { return load_model(name, source / "models"); }

std::string error(const std::string& text) {
  return error_of<ConfigError>([&] { read_huggingface(text, "c.json"); });
}

}  // namespace

TEST_CASE("Published configs give the specs of the zoo, but for the name") {
  for (const auto& [folder, name] : {std::pair{"gpt2", "gpt2"}, std::pair{"Meta-Llama-3-8B", "llama3-8b"},
                                     std::pair{"Mistral-7B-v0.1", "mistral-7b"}, std::pair{"Qwen2.5-7B", "qwen2.5-7b"}}) {
    CAPTURE(folder);
    ModelFile file = published(folder);
    CHECK(file.spec.name == folder);
    file.spec.name = name;
    CHECK(file.spec == zoo(name).spec);
  }
}

TEST_CASE("What a config says and parplan ignores is noted") {
  CHECK(published("gpt2").notes ==
        std::vector<std::string>{"attn_pdrop 0.1 is ignored: parplan trains without dropout",
                                 "embd_pdrop 0.1 is ignored: parplan trains without dropout",
                                 "resid_pdrop 0.1 is ignored: parplan trains without dropout"});
  CHECK(published("Meta-Llama-3-8B").notes.empty());
  CHECK(published("Mistral-7B-v0.1").notes ==
        std::vector<std::string>{"sliding_window 4096 is ignored: attention covers the whole sequence"});
  CHECK(published("Qwen2.5-7B").notes.empty());
  const auto notes = [](const std::string& text) { return read_huggingface(text, "c.json").notes; };
  CHECK(notes(R"({"model_type": "llama", "attention_dropout": 0.2, "quantization_config": {"bits": 4},
                  "rope_scaling": {"rope_type": "llama3", "factor": 8.0}})") ==
        std::vector<std::string>{"attention_dropout 0.2 is ignored: parplan trains without dropout",
                                 "rope_scaling of type llama3 is ignored: it changes angles, neither time nor memory",
                                 "quantization_config is ignored: weights are trained in the precision of the plan"});
  CHECK(notes(R"({"model_type": "qwen2", "use_sliding_window": true, "sliding_window": 100})") ==
        std::vector<std::string>{"sliding_window 100 is ignored: attention covers the whole sequence"});
  CHECK(notes(R"({"model_type": "mistral", "sliding_window": null})").empty());
  CHECK(notes(R"({"model_type": "gpt2", "scale_attn_weights": false, "scale_attn_by_inverse_layer_idx": true})") ==
        std::vector<std::string>{
            "scale_attn_weights false is ignored: attention is scaled by 1 / sqrt(head_dim)",
            "scale_attn_by_inverse_layer_idx true is ignored: attention is scaled by 1 / sqrt(head_dim)"});
}

TEST_CASE("Absent keys have the defaults of transformers") {
  ModelFile gpt2 = read_huggingface(R"({"model_type": "gpt2"})", "some/gpt2/config.json");
  CHECK(gpt2.spec == zoo("gpt2").spec);
  ModelSpec llama = read_huggingface(R"({"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5})",
                                     "llama2-7b.json")
                        .spec;
  CHECK(llama == zoo("llama2-7b").spec);
  const ModelSpec mistral = read_huggingface(R"({"model_type": "mistral"})", "c.json").spec;
  CHECK(mistral.kv_heads == 8);
  CHECK(mistral.feature == 14336);
  CHECK(mistral.context == 131072);
  const ModelSpec every_head = read_huggingface(R"({"model_type": "mistral", "num_key_value_heads": null})", "c.json").spec;
  CHECK(every_head.kv_heads == 32);
  const ModelSpec qwen2 = read_huggingface(R"({"model_type": "qwen2"})", "c.json").spec;
  CHECK(qwen2.kv_heads == 32);
  CHECK(qwen2.feature == 22016);
  CHECK(qwen2.vocabulary == 151936);
  CHECK(qwen2.qkv_bias);
  CHECK_FALSE(qwen2.attention_output_bias);
}

TEST_CASE("What a config says outweighs the defaults") {
  const ModelSpec llama = read_huggingface(
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
  const ModelSpec gpt2 = read_huggingface(
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
  const auto name = [](const std::string& text, const std::string& file) { return read_huggingface(text, file).spec.name; };
  CHECK(name(R"({"model_type": "gpt2", "_name_or_path": "openai/gpt2-xl/"})", "x/config.json") == "gpt2-xl");
  CHECK(name(R"({"model_type": "gpt2", "_name_or_path": ""})", "my-model/config.json") == "my-model");
  CHECK(name(R"({"model_type": "gpt2"})", "my-model.json") == "my-model");
  CHECK(name(R"({"model_type": "gpt2"})", "config.json") == "gpt2");
  CHECK(name(R"({"model_type": "gpt2"})", "./config.json") == "gpt2");
}

TEST_CASE("Other types of model are refused with the four that are read") {
  CHECK(error(R"({"model_type": "mixtral"})") ==
        "c.json:1:16: error: model_type 'mixtral' is not supported; supported: gpt2, llama, mistral, qwen2; did you mean "
        "'mistral'?");
  CHECK(error(R"({"model_type": "bert"})") ==
        "c.json:1:16: error: model_type 'bert' is not supported; supported: gpt2, llama, mistral, qwen2");
  CHECK(error(R"({"hidden_size": 3})") == "c.json:1:1: error: missing key 'model_type' at the top level");
  CHECK(error("[]") == "c.json:1:1: error: expected a map with key 'model_type', found a list");
}

TEST_CASE("Contradictions and values that cannot be are errors with their place") {
  CHECK(error("{\n  \"model_type\": \"gpt2\",\n}") ==
        "c.json:3:1: error: invalid JSON: syntax error while parsing object key - unexpected '}'; expected string literal");
  CHECK(error("{\"model_type\": \"gpt2\", \"n_head\": 7}") ==
        "c.json:1:34: error: n_embd 768 is not a multiple of n_head 7, and there is no head_dim");
  CHECK(error("{\"model_type\": \"llama\", \"hidden_size\": 100}") ==
        "c.json:1:1: error: hidden_size 100 is not a multiple of num_attention_heads 32, and there is no head_dim");
  CHECK(error("{\"model_type\": \"llama\", \"num_key_value_heads\": 5}") ==
        "c.json:1:48: error: 32 query heads cannot share 5 key/value heads evenly; allowed: 1, 2, 4, 8, 16, 32");
  CHECK(error("{\"model_type\": \"llama\", \"head_dim\": 5}") ==
        "c.json:1:37: error: rotary positions turn pairs of numbers: the width of a head must be even, found 5");
  CHECK(error("{\"model_type\": \"gpt2\", \"n_layer\": 12, \"num_hidden_layers\": 24}") ==
        "c.json:1:35: error: n_layer is 12, but num_hidden_layers is 24");
  CHECK(error("{\"model_type\": \"gpt2\", \"n_layer\": 0}") ==
        "c.json:1:35: error: expected a whole number from 1 to 10000, found '0'");
  CHECK(error("{\"model_type\": \"gpt2\", \"layer_norm_epsilon\": 0}") ==
        "c.json:1:46: error: expected layer_norm_epsilon above 0, found '0'");
  CHECK(error("{\"model_type\": \"gpt2\", \"activation_function\": \"tanh\"}") ==
        "c.json:1:47: error: expected one of gelu_new, gelu_pytorch_tanh, gelu_fast, gelu, relu, found 'tanh'");
  CHECK(error("{\"model_type\": \"gpt2\", \"add_cross_attention\": true}") ==
        "c.json:1:47: error: add_cross_attention is not supported: parplan builds decoder-only models");
  CHECK(error("{\"model_type\": \"llama\", \"hidden_act\": \"gelu\"}") ==
        "c.json:1:39: error: expected one of silu, swish, found 'gelu'");
  CHECK(error("{\"model_type\": \"llama\", \"rope_parameters\": {\"rope_theta\": 0}}") ==
        "c.json:1:59: error: expected rope_theta above 0, found '0'");
  CHECK(error("{\"model_type\": \"llama\", \"mlp_bias\": \"yes\"}") ==
        "c.json:1:37: error: expected true or false, found 'yes'");
  CHECK(error("{\"model_type\": \"llama\", \"mlp_bias\": true, \"mlp_bias\": false}") ==
        "c.json:1:43: error: duplicate key 'mlp_bias', first given on line 1");
}
