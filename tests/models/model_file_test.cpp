#include "models/model_file.h"

#include <doctest/doctest.h>

#include "planner/base/error.h"
#include "tests/planner/base/error_of.h"

using namespace parplan;

namespace {

// Line 1 is the name; tests add lines from line 12 on.
const std::string decoder =
    "name: small\n"
    "family: decoder\n"
    "layers: 2\n"
    "hidden: 32\n"
    "heads: 4\n"
    "feature: 64\n"
    "vocabulary: 61\n"
    "context: 16\n"
    "position: rotary\n"
    "norm: rms_norm\n"
    "activation: gated_silu\n";

std::string replaced(const std::string& line, const std::string& by) {
  std::string text = decoder;
  const std::size_t at = text.find(line);
  REQUIRE(at != std::string::npos);
  return text.replace(at, line.size(), by);
}

std::string error(const std::string& text) {
  return error_of<ConfigError>([&] { read_model(text, "m.yaml"); });
}

}  // namespace

TEST_CASE("A decoder has the defaults of docs/model.md") {
  const ModelFile file = read_model(decoder, "m.yaml");
  CHECK(file.spec == ModelSpec{.name = "small",
                               .family = Family::decoder,
                               .layers = 2,
                               .hidden = 32,
                               .feature = 64,
                               .vocabulary = 61,
                               .context = 16,
                               .activation = FeedForwardKind::gated_silu,
                               .tied_embeddings = false,
                               .heads = 4,
                               .kv_heads = 4,
                               .head_dim = 8,
                               .position = PositionKind::rotary,
                               .rope_theta = 10000.0,
                               .norm = NormKind::rms_norm,
                               .norm_epsilon = 1e-5,
                               .qkv_bias = false,
                               .attention_output_bias = false,
                               .mlp_bias = false,
                               .initializer_range = 0.02,
                               .scaled_residual = false});
  CHECK(file.training == TrainingOverrides{});
  CHECK(file.source == "");
}

TEST_CASE("The training section overrides exactly what it says") {
  const ModelFile file = read_model(decoder +
                                        "source: a paper\n"
                                        "training:\n"
                                        "  global_batch: 8\n"
                                        "  sequence_length: 12\n"
                                        "  precision: bf16\n"
                                        "  seed: 7\n"
                                        "  optimizer: {name: adam, learning_rate: 1e-3, schedule: cosine, warmup_steps: "
                                        "10, decay_steps: 100, final_learning_rate: 1e-4, beta1: 0.8, beta2: 0.9, "
                                        "epsilon: 1e-7, weight_decay: 0.2, clip_norm: 1.0}\n"
                                        "  initialization: {standard_deviation: 0.01, scaled_residual: true}\n",
                                    "m.yaml");
  CHECK(file.source == "a paper");
  CHECK(file.spec.initializer_range == 0.01);
  CHECK(file.spec.scaled_residual);
  CHECK(with_overrides(TrainingSpec{}, file.training) == TrainingSpec{.global_batch = 8,
                                                                      .sequence_length = 12,
                                                                      .precision = DataType::bf16,
                                                                      .optimizer = Optimizer::adam,
                                                                      .learning_rate = 1e-3,
                                                                      .schedule = LearningRateSchedule::cosine,
                                                                      .warmup_steps = 10,
                                                                      .decay_steps = 100,
                                                                      .final_learning_rate = 1e-4,
                                                                      .beta1 = 0.8,
                                                                      .beta2 = 0.9,
                                                                      .epsilon = 1e-7,
                                                                      .weight_decay = 0.2,
                                                                      .momentum = 0.0,
                                                                      .clip_norm = 1.0,
                                                                      .seed = 7});
  const ModelFile sgd = read_model(decoder + "training: {optimizer: {name: sgd, momentum: 0.9}}\n", "m.yaml");
  const TrainingSpec given = {.global_batch = 3, .beta1 = 0.5};
  TrainingSpec expected = given;
  expected.optimizer = Optimizer::sgd;
  expected.momentum = 0.9;
  CHECK(with_overrides(given, sgd.training) == expected);
}

TEST_CASE("What is written reads back, awkward names and numbers too") {
  ModelSpec spec = read_model(decoder, "m.yaml").spec;
  spec.name = "a \"b\": #c \\ \xc3\xa9";
  spec.norm_epsilon = 1e-7;
  spec.rope_theta = 1e300;
  spec.initializer_range = 0.1 + 0.2;
  spec.scaled_residual = true;
  spec.kv_heads = 2;
  spec.head_dim = 6;
  spec.qkv_bias = true;
  CHECK(read_model(write_model(spec), "written.yaml").spec == spec);
}

TEST_CASE("The text of a model names every key") {
  CHECK(write_model(read_model(decoder, "m.yaml").spec) ==
        "name: \"small\"\n"
        "family: decoder\n"
        "layers: 2\n"
        "hidden: 32\n"
        "feature: 64\n"
        "vocabulary: 61\n"
        "context: 16\n"
        "activation: gated_silu\n"
        "tied_embeddings: false\n"
        "heads: 4\n"
        "kv_heads: 4\n"
        "head_dim: 8\n"
        "position: rotary\n"
        "rope_theta: 10000\n"
        "norm: rms_norm\n"
        "norm_epsilon: 1.0e-05\n"
        "qkv_bias: false\n"
        "attention_output_bias: false\n"
        "mlp_bias: false\n"
        "training:\n"
        "  initialization:\n"
        "    standard_deviation: 0.02\n"
        "    scaled_residual: false\n");
}

TEST_CASE("Unknown, missing and duplicate keys of a model are errors") {
  CHECK(error(decoder + "hiden: 3\n") ==
        "m.yaml:12:1: error: unknown key 'hiden'; allowed: name, source, family, layers, hidden, feature, context, "
        "vocabulary, tied_embeddings, activation, training, heads, position, norm, kv_heads, head_dim, rope_theta, "
        "norm_epsilon, qkv_bias, attention_output_bias, mlp_bias; did you mean 'hidden'?");
  CHECK(error(decoder + "hidden: 3\n") == "m.yaml:12:1: error: duplicate key 'hidden', first given on line 4");
  CHECK(error(replaced("layers: 2\n", "")) == "m.yaml:1:1: error: missing key 'layers' at the top level");
  CHECK(error("") == "m.yaml: error: expected a map with key 'family', found nothing");
  CHECK(error("just text") == "m.yaml:1:1: error: expected a map with key 'family', found 'just text'");
}

TEST_CASE("Keys that a family does not read are errors") {
  CHECK(error("name: m\nfamily: mlp\nheads: 4\n") ==
        "m.yaml:3:1: error: unknown key 'heads'; allowed: name, source, family, layers, hidden, feature, context, "
        "vocabulary, tied_embeddings, activation, training");
  CHECK(error(replaced("family: decoder", "family: decodr")) ==
        "m.yaml:2:9: error: expected one of decoder, mlp, found 'decodr'; did you mean 'decoder'?");
  CHECK(error("name: m\nfamily: mlp\nlayers: 1\nhidden: 4\nfeature: 4\nvocabulary: 5\ncontext: 4\nactivation: "
              "gated_silu\n") ==
        "m.yaml:8:13: error: a plain MLP has no gate; allowed: gelu_tanh, gelu_erf, relu");
}

TEST_CASE("Sizes are whole numbers in range") {
  CHECK(error(replaced("name: small", "name: ''")) == "m.yaml:1:7: error: expected a name, found ''");
  CHECK(error(replaced("layers: 2", "layers: 0")) ==
        "m.yaml:3:9: error: expected a whole number from 1 to 10000, found '0'");
  CHECK(error(replaced("hidden: 32", "hidden: 3e2")) ==
        "m.yaml:4:9: error: expected a whole number from 1 to 1048576, found '3e2'");
  CHECK(error(replaced("heads: 4", "heads: four")) ==
        "m.yaml:5:8: error: expected a whole number from 1 to 1048576, found 'four'");
  CHECK(error(replaced("feature: 64", "feature: -1")) ==
        "m.yaml:6:10: error: expected a whole number from 1 to 1048576, found '-1'");
  CHECK(error(replaced("vocabulary: 61", "vocabulary: 1.5")) ==
        "m.yaml:7:13: error: expected a whole number from 1 to 16777216, found '1.5'");
  CHECK(error(replaced("context: 16", "context: [16]")) ==
        "m.yaml:8:10: error: expected a whole number from 1 to 16777216, found a list");
}

TEST_CASE("Kinds are told from their like") {
  CHECK(error(replaced("rotary", "rotery")) ==
        "m.yaml:9:11: error: expected one of learned, rotary, found 'rotery'; did you mean 'rotary'?");
  CHECK(error(replaced("rms_norm", "batch_norm")) ==
        "m.yaml:10:7: error: expected one of layer_norm, rms_norm, found 'batch_norm'");
  CHECK(error(replaced("gated_silu", "gelu")) ==
        "m.yaml:11:13: error: expected one of gelu_tanh, gelu_erf, relu, gated_silu, found 'gelu'; did you mean "
        "'gelu_tanh'?");
  CHECK(error(decoder + "tied_embeddings: yes\n") == "m.yaml:12:18: error: expected true or false, found 'yes'");
}

TEST_CASE("Heads that do not fit together are errors at the key to blame") {
  CHECK(error(decoder + "kv_heads: 3\n") ==
        "m.yaml:12:11: error: 4 query heads cannot share 3 key/value heads evenly; allowed: 1, 2, 4");
  CHECK(error(decoder + "kv_heads: 8\n") ==
        "m.yaml:12:11: error: 4 query heads cannot share 8 key/value heads evenly; allowed: 1, 2, 4");
  CHECK(error(replaced("heads: 4", "heads: 5")) ==
        "m.yaml:5:8: error: hidden 32 is not a multiple of 5 heads; choose a divisor of 32, or give head_dim");
  CHECK(error(decoder + "head_dim: 7\n") ==
        "m.yaml:12:11: error: rotary positions turn pairs of numbers: the width of a head must be even, found 7");
  CHECK(error(decoder + "head_dim: 1048576\n") ==
        "m.yaml:5:8: error: 4 heads of 1048576 are 4194304 wide; at most 1048576");
  // Without head_dim the heads are blamed: 32 / 32 is 1.
  CHECK(error(replaced("heads: 4", "heads: 32")) ==
        "m.yaml:5:8: error: rotary positions turn pairs of numbers: the width of a head must be even, found 1");
}

TEST_CASE("Numbers out of range are errors") {
  CHECK(error(decoder + "norm_epsilon: 0\n") == "m.yaml:12:15: error: expected a number above 0, found '0'");
  CHECK(error(decoder + "rope_theta: -1\n") == "m.yaml:12:13: error: expected a number above 0, found '-1'");
  CHECK(error(replaced("rotary", "learned") + "rope_theta: 1\n") ==
        "m.yaml:12:13: error: rope_theta belongs to rotary positions, and position is learned");
}

TEST_CASE("The training section is as strict") {
  const auto training = [](const std::string& inside) { return error(decoder + "training: {" + inside + "}\n"); };
  CHECK(training("batch: 8") ==
        "m.yaml:12:12: error: unknown key 'batch'; allowed: global_batch, sequence_length, precision, optimizer, "
        "initialization, seed");
  CHECK(training("global_batch: 0") == "m.yaml:12:26: error: expected a whole number of at least 1, found '0'");
  CHECK(training("sequence_length: 0") == "m.yaml:12:29: error: expected a whole number from 1 to 16777216, found '0'");
  CHECK(training("precision: fp8") == "m.yaml:12:23: error: expected one of fp32, tf32, bf16, fp16, found 'fp8'");
  CHECK(training("seed: -1") == "m.yaml:12:18: error: expected a whole number of at least 0, found '-1'");
  CHECK(training("optimizer: {name: adamW}") ==
        "m.yaml:12:30: error: expected one of adamw, adam, sgd, found 'adamW'; did you mean 'adamw'?");
  CHECK(training("optimizer: {lr: 1}") ==
        "m.yaml:12:24: error: unknown key 'lr'; allowed: name, schedule, warmup_steps, decay_steps, learning_rate, "
        "final_learning_rate, beta1, beta2, epsilon, weight_decay, momentum, clip_norm");
  CHECK(training("optimizer: {learning_rate: 0}") == "m.yaml:12:39: error: expected a number above 0, found '0'");
  CHECK(training("optimizer: {beta1: 1}") ==
        "m.yaml:12:31: error: expected a number of at least 0 and below 1, found '1'");
  CHECK(training("optimizer: {weight_decay: -0.1}") ==
        "m.yaml:12:38: error: expected a number of at least 0, found '-0.1'");
  CHECK(training("optimizer: {name: adam, momentum: 0.9}") ==
        "m.yaml:12:46: error: momentum belongs to sgd, and the optimizer is adam");
  CHECK(training("optimizer: {schedule: cosine, warmup_steps: 10, decay_steps: 10}") ==
        "m.yaml:12:34: error: a cosine schedule needs decay_steps above the 10 warmup_steps, found 10");
  CHECK(training("optimizer: {schedule: linear}") ==
        "m.yaml:12:34: error: a linear schedule needs decay_steps above the 0 warmup_steps, found 0");
  CHECK(training("initialization: {range: 1}") ==
        "m.yaml:12:29: error: unknown key 'range'; allowed: standard_deviation, scaled_residual");
  CHECK(error(replaced("rotary", "learned") + "training: {sequence_length: 17}\n") ==
        "m.yaml:12:29: error: sequence length 17 is longer than the 16 learned positions (context); allowed: 1 to 16");
}
