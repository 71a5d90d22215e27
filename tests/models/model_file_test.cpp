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
  const ModelFile file =
      read_model(decoder +
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
  expected.optimizer = Optimizer::muon;
  expected.momentum = 0.95;  // its default
  CHECK(with_overrides(given, read_model(decoder + "training: {optimizer: {name: muon}}\n", "m.yaml").training) ==
        expected);
  expected.momentum = 0.8;
  CHECK(with_overrides(
            given, read_model(decoder + "training: {optimizer: {name: muon, momentum: 0.8}}\n", "m.yaml").training) ==
        expected);
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
  CHECK(
      error(decoder + "hiden: 3\n") ==
      "m.yaml:12:1: error: unknown key 'hiden'; allowed: name, source, family, layers, hidden, feature, context, "
      "vocabulary, tied_embeddings, activation, training, heads, position, norm, embedding_width, kv_heads, head_dim, "
      "position_offset, rope_theta, rope_factor, "
      "rotary_dim, rotary_interleaved, sliding_rope_theta, sliding_rotary_only, alibi_multiplier, norm_epsilon, "
      "norm_without_bias, norm_placement, qk_norm, embedding_norm, "
      "parallel_residual, "
      "shared_norm, sliding_window, attention_pattern, attention_scale, attention_softcap, logits_softcap, "
      "embedding_multiplier, "
      "residual_multiplier, logits_multiplier, qkv_bias, attention_output_bias, mlp_bias, head_bias, bidirectional, "
      "token_types, head_transform, mask_token, masked_share, image_size, patch_size, image_channels; did you mean "
      "'hidden'?");
  CHECK(error(decoder + "hidden: 3\n") == "m.yaml:12:1: error: duplicate key 'hidden', first given on line 4");
  CHECK(error(replaced("layers: 2\n", "")) == "m.yaml:1:1: error: missing key 'layers' at the top level");
  CHECK(error("") == "m.yaml: error: the file is empty; expected a map with key 'family'");
  CHECK(error("just text") == "m.yaml:1:1: error: expected a map with key 'family', found 'just text'");
}

TEST_CASE("Keys that a family does not read are errors") {
  CHECK(error("name: m\nfamily: mlp\nheads: 4\n") ==
        "m.yaml:3:1: error: unknown key 'heads'; allowed: name, source, family, layers, hidden, feature, context, "
        "vocabulary, tied_embeddings, activation, training");
  CHECK(error(replaced("family: decoder", "family: decodr")) ==
        "m.yaml:2:9: error: expected one of decoder, mlp, encoder_decoder, found 'decodr'; did you mean 'decoder'?");
  CHECK(error("name: m\nfamily: mlp\nlayers: 1\nhidden: 4\nfeature: 4\nvocabulary: 5\ncontext: 4\nactivation: "
              "gated_silu\n") == "m.yaml:8:13: error: a plain MLP has no gate; allowed: gelu_tanh, gelu_erf, relu");
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
        "m.yaml:9:11: error: expected one of learned, rotary, alibi, found 'rotery'; did you mean 'rotary'?");
  CHECK(error(replaced("rms_norm", "batch_norm")) ==
        "m.yaml:10:7: error: expected one of layer_norm, rms_norm, found 'batch_norm'");
  CHECK(error(replaced("gated_silu", "gelu")) ==
        "m.yaml:11:13: error: expected one of gelu_tanh, gelu_erf, relu, gated_silu, gated_gelu_tanh, gated_gelu_erf, "
        "found "
        "'gelu'; did you mean 'gelu_tanh' or 'gelu_erf'?");
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
  // Without head_dim the error is at heads: 32 / 32 is 1.
  CHECK(error(replaced("heads: 4", "heads: 32")) ==
        "m.yaml:5:8: error: rotary positions turn pairs of numbers: the width of a head must be even, found 1");
}

TEST_CASE("Numbers out of range are errors") {
  CHECK(error(decoder + "norm_epsilon: 0\n") == "m.yaml:12:15: error: expected a number above 0, found '0'");
  CHECK(error(decoder + "rope_theta: -1\n") == "m.yaml:12:13: error: expected a number above 0, found '-1'");
  CHECK(error(replaced("rotary", "learned") + "rope_theta: 1\n") ==
        "m.yaml:12:13: error: rope_theta belongs to rotary positions, and position is learned");
}

TEST_CASE("What few models have is absent until a file says it") {
  const ModelSpec spec = read_model(replaced("rotary", "alibi") +
                                        "alibi_multiplier: 0.5\n"
                                        "embedding_width: 8\n"
                                        "norm_placement: around_branch\n"
                                        "qk_norm: whole_width\n"
                                        "embedding_norm: true\n"
                                        "sliding_window: 8\n"
                                        "attention_pattern: [sliding, full]\n"
                                        "attention_scale: 0.25\n"
                                        "attention_softcap: 50\n"
                                        "logits_softcap: 30\n"
                                        "embedding_multiplier: 12\n"
                                        "residual_multiplier: 0.22\n"
                                        "logits_multiplier: 0.0625\n"
                                        "head_bias: true\n",
                                    "m.yaml")
                             .spec;
  ModelSpec expected = read_model(decoder, "m.yaml").spec;
  expected.position = PositionKind::alibi;
  expected.alibi_multiplier = 0.5;
  expected.embedding_width = 8;
  expected.norm_placement = NormPlacement::around_branch;
  expected.qk_norm = QkNorm::whole_width;
  expected.embedding_norm = true;
  expected.sliding_window = 8;
  expected.attention_pattern = {LayerSpan::sliding, LayerSpan::full};
  expected.attention_scale = 0.25;
  expected.attention_softcap = 50.0;
  expected.logits_softcap = 30.0;
  expected.embedding_multiplier = 12.0;
  expected.residual_multiplier = 0.22;
  expected.logits_multiplier = 0.0625;
  expected.head_bias = true;
  CHECK(spec == expected);
  CHECK(read_model(write_model(spec), "written.yaml").spec == spec);
  CHECK(window_of(spec, 0) == 8);
  CHECK(window_of(spec, 1) == std::nullopt);

  ModelSpec gptj =
      read_model(decoder + "rotary_dim: 4\nrotary_interleaved: true\nparallel_residual: true\nshared_norm: true\n",
                 "m.yaml")
          .spec;
  CHECK(gptj.rotary_dim == 4);
  CHECK((gptj.rotary_interleaved && gptj.parallel_residual && gptj.shared_norm));
  CHECK(read_model(write_model(gptj), "written.yaml").spec == gptj);
  ModelSpec opt =
      read_model(replaced("rotary", "learned") + "position_offset: 2\nnorm_placement: after_add\n", "m.yaml").spec;
  CHECK(opt.position_offset == 2);
  CHECK(read_model(write_model(opt), "written.yaml").spec == opt);
}

TEST_CASE("Parts that contradict each other are errors at the key to blame, and say what to do") {
  CHECK(error(decoder + "rotary_dim: 5\n") ==
        "m.yaml:12:13: error: rotary positions turn pairs of a head's 8 numbers: expected an even rotary_dim from 2 to "
        "8, found 5");
  CHECK(error(decoder + "rotary_dim: 10\n") ==
        "m.yaml:12:13: error: rotary positions turn pairs of a head's 8 numbers: expected an even rotary_dim from 2 to "
        "8, found "
        "10");
  CHECK(error(decoder + "rotary_dim: 1\n") ==
        "m.yaml:12:13: error: expected a whole number from 2 to 1048576, found '1'");
  // A head of odd width may be rotated in part.
  CHECK(error(decoder + "head_dim: 7\nrotary_dim: 4\n") == "no error");
  CHECK(error(replaced("rotary", "alibi") + "rotary_interleaved: true\n") ==
        "m.yaml:12:21: error: rotary_interleaved belongs to rotary positions, and position is alibi");
  CHECK(error(decoder + "position_offset: 2\n") ==
        "m.yaml:12:18: error: position_offset belongs to learned positions, and position is rotary");
  CHECK(error(decoder + "alibi_multiplier: 2\n") ==
        "m.yaml:12:19: error: alibi_multiplier belongs to alibi positions, and position is rotary");
  CHECK(error(replaced("rotary", "learned") + "position_offset: 16777216\n") ==
        "m.yaml:12:18: error: a table of 16777216 + 16 positions is too long; at most 16777216 rows");
  CHECK(error(decoder + "shared_norm: true\n") ==
        "m.yaml:12:14: error: branches that run one after the other cannot share a norm; leave out shared_norm, or set "
        "parallel_residual to true");
  CHECK(error(decoder + "norm_placement: after_add\nparallel_residual: true\n") ==
        "m.yaml:13:20: error: branches that run side by side have their norms before them, and norm_placement is "
        "after_add; "
        "leave out "
        "norm_placement, or set parallel_residual to false");
  CHECK(error(decoder + "attention_pattern: [sliding, full]\n") ==
        "m.yaml:12:20: error: layers that slide need a sliding_window; add one, or make them full");
  CHECK(error(decoder + "sliding_window: 4\nattention_pattern: [full]\n") ==
        "m.yaml:13:20: error: there is a sliding_window, but every layer is full; leave out either");
  CHECK(error(decoder + "sliding_window: 4\nattention_pattern: [full, full, sliding]\n") ==
        "m.yaml:13:20: error: the pattern names 3 layers of 2; shorten it to what repeats");
  CHECK(error(decoder + "attention_pattern: []\n") ==
        "m.yaml:12:20: error: expected a list of full and sliding, found an empty one");
  CHECK(error(decoder + "attention_pattern: sliding\n") == "m.yaml:12:20: error: expected a list, found 'sliding'");
  CHECK(error(decoder + "attention_pattern: [local]\n") ==
        "m.yaml:12:21: error: expected one of full, sliding, found 'local'");
  CHECK(error(decoder + "sliding_window: 0\n") ==
        "m.yaml:12:17: error: expected a whole number from 1 to 16777216, found '0'");
  CHECK(error(decoder + "attention_softcap: 0\n") == "m.yaml:12:20: error: expected a number above 0, found '0'");
  CHECK(error(decoder + "residual_multiplier: -1\n") == "m.yaml:12:22: error: expected a number above 0, found '-1'");
  CHECK(error(decoder + "norm_placement: post\n") ==
        "m.yaml:12:17: error: expected one of before_branch, after_branch, around_branch, after_add, found 'post'");
  CHECK(error(decoder + "qk_norm: head\n") ==
        "m.yaml:12:10: error: expected one of none, per_head, whole_width, layer_norm_per_head, found 'head'");
  CHECK(error(decoder + "norm_without_bias: true\n") ==
        "m.yaml:12:20: error: an RMS norm has no bias; leave norm_without_bias out");
  CHECK(error(decoder + "sliding_rope_theta: 100\n") ==
        "m.yaml:12:21: error: sliding_rope_theta is for layers that slide, and none does; leave it out, or add a "
        "sliding_window");
  CHECK(error(replaced("rotary", "learned") + "sliding_rotary_only: true\n") ==
        "m.yaml:12:22: error: sliding_rotary_only belongs to rotary positions, and position is learned");
  CHECK(error(decoder + "bidirectional: true\n") ==
        "m.yaml:12:16: error: every token sees the next one, which would be its target; add a mask_token, so that the "
        "model learns masked tokens");
  CHECK(error(decoder + "bidirectional: true\nmask_token: 1\nsliding_window: 4\n") ==
        "m.yaml:12:16: error: a sliding window ends at its own token; leave out sliding_window");
  CHECK(error(replaced("rotary", "alibi") + "bidirectional: true\nmask_token: 1\n") ==
        "m.yaml:12:16: error: alibi falls towards earlier tokens; choose learned or rotary positions");
  CHECK(error(decoder + "mask_token: 1\n") ==
        "m.yaml:12:13: error: only what is behind a masked token and before it tells it; add bidirectional");
  CHECK(error(decoder + "bidirectional: true\nmask_token: 16777216\n")
            .starts_with("m.yaml:13:13: error: the mask token 16777216 is beyond the vocabulary, which ends at"));
  CHECK(error(decoder + "masked_share: 0.3\n") == "m.yaml:12:15: error: nothing is masked without a mask_token");
  CHECK(error(decoder + "masked_share: 1\n") ==
        "m.yaml:12:15: error: expected a number above 0 and below 1, found '1'");
  const std::string images = replaced("rotary", "learned") + "bidirectional: true\n";
  CHECK(error(images + "image_size: 30\n") ==
        "m.yaml:5:8: error: patches of 16 x 16 pixels do not divide an image of 30 x 30");
  CHECK(error(images + "patch_size: 8\n") ==
        "m.yaml:13:13: error: patch_size is of images; give their image_size, too");
  CHECK(error(images + "image_size: 32\npatch_size: 8\n")
            .find("is 16 tokens, and one more stands for its class: "
                  "expected 17, found") != std::string::npos);
  CHECK(error(decoder + "head_bias: 1\n") == "m.yaml:12:12: error: expected true or false, found '1'");
}

TEST_CASE("What is trained is everything, adapters, or parts that the model has") {
  const auto training = [](const std::string& keys) {
    return with_overrides({}, read_model(decoder + "training:\n" + keys, "m.yaml").training);
  };
  const Trainable nothing_else{.all = false, .patterns = {}};
  CHECK(training("  seed: 1\n").trainable == Trainable{});
  CHECK(training("  trainable: all\n").lora == std::nullopt);
  CHECK(training("  trainable: lora\n").lora == Lora{.r = 8, .alpha = 8.0, .target_modules = {}});
  CHECK(training("  lora: {r: 4}\n").trainable == nothing_else);
  CHECK(training("  lora: {r: 4, lora_alpha: 0.5, target_modules: [qkv, feed_forward.up]}\n").lora ==
        Lora{.r = 4, .alpha = 0.5, .target_modules = {"qkv", "feed_forward.up"}});
  CHECK(training("  lora: {target_modules: all-linear}\n  trainable: [head, layers.1]\n").trainable ==
        Trainable{.all = false, .patterns = {"head", "layers.1"}});
  CHECK(training("  trainable: all\n  lora: {}\n").lora == Lora{});

  const auto fault = [](const std::string& keys) { return error(decoder + "training:\n  " + keys + "\n"); };
  CHECK(fault("trainable: some") ==
        "m.yaml:13:14: error: expected all, lora or a list of names of parameters, found 'some'; write [some] for a "
        "list of one");
  CHECK(fault("trainable: [head, layer.1]") ==
        "m.yaml:13:21: error: no parameter has 'layer.1' in its name; did you mean 'layers.1'?");
  CHECK(fault("trainable: []") == "m.yaml:13:14: error: expected a list of names, found an empty one");
  CHECK(fault("lora: {r: 0}") == "m.yaml:13:13: error: expected a whole number from 1 to 65536, found '0'");
  CHECK(fault("lora: {alpha: 3}") ==
        "m.yaml:13:10: error: unknown key 'alpha'; allowed: r, lora_alpha, target_modules");
  CHECK(fault("lora: {lora_alpha: 0}") == "m.yaml:13:22: error: expected a number above 0, found '0'");
  CHECK(fault("lora: {target_modules: qkv}") ==
        "m.yaml:13:26: error: expected all-linear or a list of names, found 'qkv'; write [qkv] for a list of one");
  CHECK(fault("lora: {target_modules: [qvk]}") ==
        "m.yaml:13:27: error: no product of the layers is called 'qvk'; they have: attention.qkv, attention.output, "
        "feed_forward.gate, feed_forward.up, feed_forward.down");
  CHECK(fault("lora: {target_modules: [up, q_proj]}") ==
        "m.yaml:13:31: error: no product of the layers is called 'q_proj'; they have: attention.qkv, attention.output, "
        "feed_forward.gate, feed_forward.up, feed_forward.down; queries, keys and values are one product here, "
        "attention.qkv");
}

TEST_CASE("The training section is as strict") {
  const auto training = [](const std::string& inside) { return error(decoder + "training: {" + inside + "}\n"); };
  CHECK(training("batch: 8") ==
        "m.yaml:12:12: error: unknown key 'batch'; allowed: global_batch, sequence_length, precision, optimizer, "
        "initialization, seed, trainable, lora");
  CHECK(training("global_batch: 0") == "m.yaml:12:26: error: expected a whole number of at least 1, found '0'");
  CHECK(training("sequence_length: 0") == "m.yaml:12:29: error: expected a whole number from 1 to 16777216, found '0'");
  CHECK(training("precision: fp4") ==
        "m.yaml:12:23: error: expected one of fp32, tf32, bf16, fp16, fp8, found 'fp4'; did you mean 'fp8'?");
  CHECK(training("seed: -1") == "m.yaml:12:18: error: expected a whole number of at least 0, found '-1'");
  CHECK(
      training("optimizer: {name: adamW}") ==
      "m.yaml:12:30: error: expected one of adamw, adamw_8bit, adam, sgd, muon, found 'adamW'; did you mean 'adamw'?");
  CHECK(training("optimizer: {lr: 1}") ==
        "m.yaml:12:24: error: unknown key 'lr'; allowed: name, schedule, warmup_steps, decay_steps, learning_rate, "
        "final_learning_rate, beta1, beta2, epsilon, weight_decay, momentum, clip_norm");
  CHECK(training("optimizer: {learning_rate: 0}") == "m.yaml:12:39: error: expected a number above 0, found '0'");
  CHECK(training("optimizer: {beta1: 1}") ==
        "m.yaml:12:31: error: expected a number of at least 0 and below 1, found '1'");
  CHECK(training("optimizer: {weight_decay: -0.1}") ==
        "m.yaml:12:38: error: expected a number of at least 0, found '-0.1'");
  CHECK(training("optimizer: {name: adam, momentum: 0.9}") ==
        "m.yaml:12:46: error: momentum belongs to sgd and muon, and the optimizer is adam");
  CHECK(training("optimizer: {schedule: cosine, warmup_steps: 10, decay_steps: 10}") ==
        "m.yaml:12:34: error: a cosine schedule needs decay_steps above the 10 warmup_steps, found 10");
  CHECK(training("optimizer: {schedule: linear}") ==
        "m.yaml:12:34: error: a linear schedule needs decay_steps above the 0 warmup_steps, found 0");
  CHECK(training("initialization: {range: 1}") ==
        "m.yaml:12:29: error: unknown key 'range'; allowed: standard_deviation, scaled_residual");
  CHECK(error(replaced("rotary", "learned") + "training: {sequence_length: 17}\n") ==
        "m.yaml:12:29: error: sequence length 17 is longer than the 16 learned positions (context); allowed: 1 to 16");
}
