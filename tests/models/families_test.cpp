#include "models/families.h"

#include <doctest/doctest.h>

#include "planner/base/error.h"
#include "tests/planner/base/error_of.h"

using namespace parplan;

namespace {

ModelSpec decoder() {
  return {.name = "small",
          .family = Family::decoder,
          .layers = 2,
          .hidden = 32,
          .feature = 48,
          .vocabulary = 61,
          .context = 16,
          .heads = 4,
          .kv_heads = 2,
          .head_dim = 8};
}

const Tensor* find_tensor(const OpGraph& graph, const std::string& name) {
  for (const Tensor& tensor : graph.tensors) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

const Tensor& tensor(const OpGraph& graph, const std::string& name) {
  const Tensor* found = find_tensor(graph, name);
  REQUIRE_MESSAGE(found != nullptr, name);
  return *found;
}

const Op& op(const OpGraph& graph, const std::string& name) {
  for (const Op& found : graph.ops) {
    if (found.name == name) return found;
  }
  FAIL(name);
  return graph.ops.front();
}

// "linear layers.0.up" ... of one block
std::vector<std::string> ops_of(const OpGraph& graph, std::size_t block) {
  std::vector<std::string> found;
  for (int i = graph.blocks[block].first_op; i < graph.blocks[block].last_op; ++i) {
    const Op& each = graph.ops[i];
    found.push_back(std::string(name(each.kind)) + " " + each.name);
  }
  return found;
}

}  // namespace

TEST_CASE("The rows of the families stand in the order of the enumeration under its names") {
  for (const FamilyRow& row : family_rows()) {
    CHECK(&row_of(row.family) == &row);
    CHECK(row.name == name(row.family));
  }
}

TEST_CASE("A ViT makes tokens of patches, with a row behind them for the class, which the head reads") {
  ModelSpec spec = decoder();
  spec.image_size = 12;
  spec.patch_size = 3;
  spec.image_channels = 2;
  spec.context = 17;
  spec.bidirectional = spec.head_bias = true;
  const OpGraph graph = build_graph(spec, 17);
  CHECK(graph.images == LabelledImages{.size = 12, .patch = 3, .channels = 2});
  CHECK(graph.joins_sequences);
  CHECK(targets_of_sample(graph) == 1);
  CHECK(ops_of(graph, 0) == std::vector<std::string>{"normalize_pixels pixels", "linear embedding", "append_rows class",
                                                     "add_position position"});
  const std::vector<std::string> head = ops_of(graph, 3);
  CHECK(head.front() == "take_rows head.class");
  CHECK(op(graph, "head.class").attributes.begin == 16);
  CHECK(op(graph, "head.class").attributes.sequence == 1);
  // 16 patches of 3 x 3 pixels of two colours.
  CHECK(tensor(graph, "colours").dims.back().size == 18);
  CHECK(tensor(graph, "embedding.weight").dims[1].size == 18);
  CHECK(element_count(tensor(graph, "class.weight")) == 32);
  CHECK(element_count(tensor(graph, "position.weight")) == 17 * 32);
  CHECK(tensor(graph, "head.logits").dims.front().size == 1);
  // Nobody needs the gradient of the pixels: its product counts twice, the others' three times.
  const std::vector<bool> needs = needs_gradient(graph, graph.blocks.front());
  CHECK(product_passes(needs, op(graph, "embedding")) == 2);
  CHECK(error_of<ConfigError>([&] { build_graph(spec, 16); }) ==
        "error: sequence length 16 is not that of the images of model 'small', which are 17 tokens: 12 x 12 pixels in "
        "patches of 3 x 3, and one for the class");
  spec.tied_embeddings = true;
  CHECK(find_problem(spec)->key == "tied_embeddings");
  spec.tied_embeddings = false;
  spec.patch_size = 5;
  CHECK(find_problem(spec) == SpecProblem{"patch_size", "patches of 5 x 5 pixels do not divide an image of 12 x 12"});
}

TEST_CASE("A GPT-2 is an embedding with positions, its layers and a head") {
  ModelSpec spec = decoder();
  spec.qkv_bias = spec.attention_output_bias = spec.mlp_bias = true;
  const OpGraph graph = build_graph(spec, 16);
  CHECK(graph.blocks.size() == 4);
  CHECK(ops_of(graph, 0) == std::vector<std::string>{"embedding embedding", "add_position position"});
  CHECK(ops_of(graph, 2) == std::vector<std::string>{
                                "layer_norm layers.1.attention_norm",
                                "linear layers.1.attention.qkv",
                                "attention layers.1.attention",
                                "linear layers.1.attention.output",
                                "add layers.1.attention_add",
                                "layer_norm layers.1.feed_forward_norm",
                                "linear layers.1.feed_forward.up",
                                "activation layers.1.feed_forward.activation",
                                "linear layers.1.feed_forward.down",
                                "add layers.1.feed_forward_add",
                            });
  CHECK(ops_of(graph, 3) == std::vector<std::string>{"layer_norm head.norm", "linear head",
                                                     "cross_entropy_max head.maximum", "cross_entropy_sums head.sums",
                                                     "cross_entropy_loss head.loss"});
  CHECK(graph.blocks[1].kind == graph.blocks[2].kind);
  CHECK(graph.blocks[0].kind != graph.blocks[1].kind);
}

TEST_CASE("A Llama turns queries and keys and gates its feed-forward layers") {
  ModelSpec spec = decoder();
  spec.position = PositionKind::rotary;
  spec.rope_theta = 500.0;
  spec.norm = NormKind::rms_norm;
  spec.norm_epsilon = 1e-6;
  spec.activation = FeedForwardKind::gated_silu;
  const OpGraph graph = build_graph(spec, 100);  // longer than the context: rotary positions have no table
  CHECK(ops_of(graph, 0) == std::vector<std::string>{"embedding embedding"});
  CHECK(ops_of(graph, 1) == std::vector<std::string>{
                                "rms_norm layers.0.attention_norm",
                                "linear layers.0.attention.qkv",
                                "rotary layers.0.attention.rotary",
                                "attention layers.0.attention",
                                "linear layers.0.attention.output",
                                "add layers.0.attention_add",
                                "rms_norm layers.0.feed_forward_norm",
                                "linear layers.0.feed_forward.gate",
                                "linear layers.0.feed_forward.up",
                                "gate layers.0.feed_forward.gated",
                                "linear layers.0.feed_forward.down",
                                "add layers.0.feed_forward_add",
                            });
  CHECK(op(graph, "layers.0.attention.rotary").attributes.theta == 500.0);
  CHECK(op(graph, "layers.0.attention_norm").attributes.epsilon == 1e-6);
  CHECK(op(graph, "layers.0.attention").attributes == OpShape{.heads = 4, .kv_heads = 2, .head_dim = 8});
}

TEST_CASE("Query, key and value are one product, cut by key/value group") {
  ModelSpec spec = decoder();
  spec.qkv_bias = true;
  const OpGraph graph = build_graph(spec, 16);
  // 2 groups of 2 query heads, a key and a value, 8 wide each: ranks that share out a group have a
  // query head each, and a copy of the key and the value.
  const TensorDim fused = {Dim::kv_groups, 64, 32, 2, 16};
  const TensorDim hidden = {Dim::hidden, 32, 1};
  CHECK(tensor(graph, "layers.0.attention.qkv.weight").dims == std::vector<TensorDim>{fused, hidden});
  CHECK(tensor(graph, "layers.0.attention.qkv.bias").dims == std::vector<TensorDim>{fused});
  CHECK(tensor(graph, "layers.0.attention.mixed").dims ==
        std::vector<TensorDim>{{Dim::sequence, 16, 1}, {Dim::batch, 1, 1}, {Dim::kv_groups, 32, 16, 2}});
  CHECK(tensor(graph, "layers.0.attention.log_sum_exp").dims ==
        std::vector<TensorDim>{{Dim::batch, 1, 1}, {Dim::kv_groups, 4, 2, 2}, {Dim::sequence, 16, 1}});
  CHECK(tensor(graph, "layers.0.attention.output.weight").dims ==
        std::vector<TensorDim>{hidden, {Dim::kv_groups, 32, 16, 2}});
  CHECK(tensor(graph, "head.sums").dims ==
        std::vector<TensorDim>{{Dim::sequence, 16, 1}, {Dim::batch, 1, 1}, {Dim::hidden, 2, 1}});
  CHECK(tensor(graph, "loss").dims.empty());
}

TEST_CASE("Biases behind row-parallel products belong to the add") {
  ModelSpec spec = decoder();
  spec.attention_output_bias = true;
  const OpGraph graph = build_graph(spec, 16);
  CHECK(op(graph, "layers.0.attention.output").parameters.size() == 1);
  CHECK(op(graph, "layers.0.attention_add").parameters.size() == 1);
  CHECK(op(graph, "layers.0.feed_forward_add").parameters.empty());
  CHECK(op(graph, "layers.0.attention.qkv").parameters.size() == 1);
}

TEST_CASE("A tied head has the embedding's weight, an untied one its own") {
  ModelSpec spec = decoder();
  spec.tied_embeddings = true;
  const OpGraph tied = build_graph(spec, 16);
  CHECK(find_tensor(tied, "head.weight") == nullptr);
  CHECK(op(tied, "head").parameters == op(tied, "embedding").parameters);
  CHECK(tied.tied == op(tied, "embedding").parameters);
  spec.tied_embeddings = false;
  const OpGraph untied = build_graph(spec, 16);
  CHECK(tensor(untied, "head.weight").dims == tensor(untied, "embedding.weight").dims);
  CHECK(untied.tied.empty());
  CHECK(parameter_count(untied) - parameter_count(tied) == 61 * 32);
}

TEST_CASE(
    "Weights are normal and decay, biases and norms do not and what writes into the residual stream may start "
    "smaller") {
  ModelSpec spec = decoder();
  spec.qkv_bias = spec.mlp_bias = true;
  spec.initializer_range = 0.5;
  spec.scaled_residual = true;
  const OpGraph graph = build_graph(spec, 16);
  for (const TensorId id : parameters(graph)) {
    const Tensor& parameter = graph.tensors[id];
    CAPTURE(parameter.name);
    const bool matrix = parameter.dims.size() == 2;
    const bool gamma = parameter.name.ends_with("norm.weight");
    const bool residual = parameter.name.ends_with("output.weight") || parameter.name.ends_with("down.weight");
    CHECK(parameter.decays == matrix);
    CHECK(parameter.initializer == (matrix ? Initializer::normal : gamma ? Initializer::ones : Initializer::zeros));
    // 0.5 / sqrt(2 * 2 layers)
    if (matrix) CHECK(parameter.standard_deviation == (residual ? 0.25 : 0.5));
  }
  spec.scaled_residual = false;
  CHECK(tensor(build_graph(spec, 16), "layers.0.attention.output.weight").standard_deviation == 0.5);
}

TEST_CASE("An MLP has neither norms nor residuals") {
  const ModelSpec spec = {.name = "mlp",
                          .family = Family::mlp,
                          .layers = 2,
                          .hidden = 8,
                          .feature = 16,
                          .vocabulary = 10,
                          .context = 4,
                          .activation = FeedForwardKind::relu};
  const OpGraph graph = build_graph(spec, 4);
  CHECK(ops_of(graph, 1) == std::vector<std::string>{"linear layers.0.up", "activation layers.0.activation",
                                                     "linear layers.0.down", "add layers.0.add"});
  CHECK(op(graph, "layers.0.add").inputs.size() == 1);
  CHECK(op(graph, "layers.0.activation").attributes.activation == ActivationKind::relu);
  // 2 * 10 * 8 + 2 (8 * 16 + 16 + 16 * 8 + 8)
  CHECK(parameter_count(graph) == 720);
}

TEST_CASE("Every combination of parts gives a graph that holds together") {
  for (const FeedForwardKind activation : {FeedForwardKind::gelu_tanh, FeedForwardKind::relu,
                                           FeedForwardKind::gated_silu, FeedForwardKind::gated_gelu_tanh}) {
    for (int bits = 0; bits < 64; ++bits) {
      const auto bit = [&](int which) { return (bits >> which & 1) == 1; };
      ModelSpec spec = decoder();
      spec.activation = activation;
      spec.position = bit(0) ? PositionKind::rotary : PositionKind::learned;
      spec.norm = bit(1) ? NormKind::rms_norm : NormKind::layer_norm;
      spec.qkv_bias = bit(2);
      spec.attention_output_bias = bit(3);
      spec.mlp_bias = bit(4);
      spec.tied_embeddings = bit(5);
      for (const std::int64_t kv_heads : {1, 2, 4}) {  // MQA, GQA, MHA
        spec.kv_heads = kv_heads;
        // hidden 32, feature 48, head_dim 8, vocabulary 61, context 16
        const std::int64_t fused = (4 + 2 * kv_heads) * 8;
        const std::int64_t wide = is_gated(activation) ? 2 : 1;
        const std::int64_t norm = bit(1) ? 32 : 64;
        const std::int64_t layer = fused * 32 + (bit(2) ? fused : 0) + 32 * 32 + (bit(3) ? 32 : 0) +
                                   (wide + 1) * 32 * 48 + (bit(4) ? wide * 48 + 32 : 0) + 2 * norm;
        CHECK(parameter_count(build_graph(spec, 16)) ==
              61 * 32 * (bit(5) ? 1 : 2) + (bit(0) ? 0 : 16 * 32) + 2 * layer + norm);
      }
    }
  }
}

TEST_CASE("Norms stand where the spec places them") {
  ModelSpec spec = decoder();
  spec.norm = NormKind::rms_norm;
  spec.position = PositionKind::rotary;
  const auto layer = [&] {
    std::vector<std::string> found;
    for (const std::string& each : ops_of(build_graph(spec, 16), 1)) {
      if (each.starts_with("rms_norm") || each.starts_with("add")) found.push_back(each);
    }
    return found;
  };
  const auto head = [&] { return ops_of(build_graph(spec, 16), 3).front(); };
  spec.norm_placement = NormPlacement::after_branch;
  CHECK(layer() == std::vector<std::string>{"rms_norm layers.0.attention_output_norm", "add layers.0.attention_add",
                                            "rms_norm layers.0.feed_forward_output_norm",
                                            "add layers.0.feed_forward_add"});
  CHECK(head() == "rms_norm head.norm");
  spec.norm_placement = NormPlacement::around_branch;
  CHECK(layer() ==
        std::vector<std::string>{"rms_norm layers.0.attention_norm", "rms_norm layers.0.attention_output_norm",
                                 "add layers.0.attention_add", "rms_norm layers.0.feed_forward_norm",
                                 "rms_norm layers.0.feed_forward_output_norm", "add layers.0.feed_forward_add"});
  spec.norm_placement = NormPlacement::after_add;
  CHECK(layer() == std::vector<std::string>{"add layers.0.attention_add", "rms_norm layers.0.attention_norm",
                                            "add layers.0.feed_forward_add", "rms_norm layers.0.feed_forward_norm"});
  CHECK(head() == "linear head");
  // The next block reads the normalised sum.
  const OpGraph graph = build_graph(spec, 16);
  CHECK(graph.tensors[*graph.blocks[1].output].name == "layers.0.feed_forward_norm");
}

TEST_CASE("Parallel branches read one residual stream, and share a norm where the spec says so") {
  ModelSpec spec = decoder();
  spec.parallel_residual = true;
  spec.attention_output_bias = spec.mlp_bias = true;
  const OpGraph two = build_graph(spec, 16);
  CHECK(ops_of(two, 1) == std::vector<std::string>{
                              "layer_norm layers.0.attention_norm",
                              "layer_norm layers.0.feed_forward_norm",
                              "linear layers.0.attention.qkv",
                              "attention layers.0.attention",
                              "linear layers.0.attention.output",
                              "linear layers.0.feed_forward.up",
                              "activation layers.0.feed_forward.activation",
                              "linear layers.0.feed_forward.down",
                              "add layers.0.attention_add",
                              "add layers.0.feed_forward_add",
                          });
  CHECK(op(two, "layers.0.feed_forward_norm").inputs == op(two, "layers.0.attention_norm").inputs);
  spec.shared_norm = true;
  const OpGraph one = build_graph(spec, 16);
  CHECK(op(one, "layers.0.feed_forward.up").inputs == op(one, "layers.0.attention.qkv").inputs);
  CHECK(find_tensor(one, "layers.0.norm.weight") != nullptr);
  CHECK(parameter_count(two) - parameter_count(one) == 2 * 2 * 32);  // two layers' gamma and beta
}

TEST_CASE("Queries and keys are normed before they turn: each head, or all heads of a token") {
  ModelSpec spec = decoder();
  spec.position = PositionKind::rotary;
  const std::int64_t without = parameter_count(build_graph(spec, 16));
  spec.qk_norm = QkNorm::per_head;
  const OpGraph heads = build_graph(spec, 16);
  CHECK(ops_of(heads, 1)[2] == "head_norm layers.0.attention.qk_norm");
  CHECK(ops_of(heads, 1)[3] == "rotary layers.0.attention.rotary");
  CHECK(tensor(heads, "layers.0.attention.query_norm.weight").dims == std::vector<TensorDim>{{Dim::hidden, 8, 1}});
  CHECK(parameter_count(heads) - without == 2 * (8 + 8));
  spec.qk_norm = QkNorm::whole_width;
  const OpGraph width = build_graph(spec, 16);
  CHECK(ops_of(width, 1)[2] == "query_key_squares layers.0.attention.qk_squares");
  CHECK(ops_of(width, 1)[3] == "query_key_norm layers.0.attention.qk_norm");
  CHECK(tensor(width, "layers.0.attention.key_norm.weight").dims ==
        std::vector<TensorDim>{{Dim::kv_groups, 16, 8, 2, 8}});
  CHECK(parameter_count(width) - without == 2 * (4 * 8 + 2 * 8));
}

TEST_CASE("Heads may have LayerNorms of their own, and norms no bias: Command R+") {
  ModelSpec spec = decoder();
  spec.position = PositionKind::rotary;
  const std::int64_t without = parameter_count(build_graph(spec, 16));
  spec.qk_norm = QkNorm::layer_norm_per_head;
  const OpGraph graph = build_graph(spec, 16);
  CHECK(ops_of(graph, 1)[2] == "head_norm layers.0.attention.qk_norm");
  CHECK(op(graph, "layers.0.attention.qk_norm").attributes.centered);
  CHECK(tensor(graph, "layers.0.attention.query_norm.weight").dims ==
        std::vector<TensorDim>{{Dim::kv_groups, 32, 16, 2}});
  CHECK(tensor(graph, "layers.0.attention.key_norm.weight").dims ==
        std::vector<TensorDim>{{Dim::kv_groups, 16, 8, 2, 8}});
  CHECK(parameter_count(graph) - without == 2 * (4 * 8 + 2 * 8));
  spec.norm_without_bias = true;
  const OpGraph plain = build_graph(spec, 16);
  CHECK(op(plain, "head.norm").parameters.size() == 1);
  CHECK(parameter_count(graph) - parameter_count(plain) == 5 * 32);
}

TEST_CASE("Layers that slide may turn by a base of their own, or alone") {
  ModelSpec spec = decoder();
  spec.layers = 3;
  spec.position = PositionKind::rotary;
  spec.rope_theta = 1e6;
  spec.rope_factor = 8.0;
  spec.sliding_rope_theta = 1e4;
  spec.sliding_window = 8;
  spec.attention_pattern = {LayerSpan::sliding, LayerSpan::full};
  const OpGraph bases = build_graph(spec, 8);  // the window cuts nothing, and the layers differ nevertheless
  CHECK(op(bases, "layers.0.attention.rotary").attributes.theta == 1e4);
  CHECK(op(bases, "layers.0.attention.rotary").attributes.factor == 0.0);
  CHECK(op(bases, "layers.1.attention.rotary").attributes.theta == 1e6);
  CHECK(op(bases, "layers.1.attention.rotary").attributes.factor == 8.0);
  CHECK(bases.blocks[1].kind == bases.blocks[3].kind);
  CHECK(bases.blocks[1].kind != bases.blocks[2].kind);
  spec.sliding_rope_theta = std::nullopt;
  spec.sliding_rotary_only = true;
  const OpGraph alone = build_graph(spec, 8);
  CHECK(ops_of(alone, 1)[2] == "rotary layers.0.attention.rotary");
  CHECK(op(alone, "layers.0.attention.rotary").attributes.factor == 8.0);
  CHECK(ops_of(alone, 2)[2] == "attention layers.1.attention");
}

TEST_CASE("A BERT adds positions and a kind of segment, sees both ways and learns masked tokens") {
  ModelSpec spec = decoder();
  const std::int64_t without = parameter_count(build_graph(spec, 16));
  spec.norm_placement = NormPlacement::after_add;
  spec.bidirectional = spec.head_transform = spec.embedding_norm = true;
  spec.token_types = 2;
  spec.mask_token = 3;
  const OpGraph graph = build_graph(spec, 16);
  CHECK(ops_of(graph, 0) == std::vector<std::string>{"embedding embedding", "add_position position", "add token_type",
                                                     "layer_norm embedding.norm"});
  CHECK(ops_of(graph, 3) == std::vector<std::string>{"linear head.transform", "activation head.transform.activation",
                                                     "layer_norm head.transform.norm", "linear head",
                                                     "cross_entropy_max head.maximum", "cross_entropy_sums head.sums",
                                                     "cross_entropy_loss head.loss"});
  CHECK(op(graph, "layers.1.attention").attributes.bidirectional);
  CHECK(tensor(graph, "token_type.weight").dims == std::vector<TensorDim>{{Dim::position, 2, 1}, {Dim::hidden, 32, 1}});
  // Norms: of the embedding and in the head, none before the head.
  CHECK(parameter_count(graph) - without == 2 * 32 + 2 * 32 + (32 * 32 + 32 + 2 * 32) - 2 * 32);
  CHECK(graph.masked == MaskedTokens{.count = 2, .token = 3});  // 0.15 * 16 = 2.4
  CHECK(targets_of_sample(graph) == 2);
  CHECK(build_graph(spec, 1).masked->count == 1);
  spec.masked_share = 0.5;
  CHECK(targets_of_sample(build_graph(spec, 16)) == 8);
  CHECK(targets_of_sample(build_graph(decoder(), 16)) == 16);
}

ModelSpec encoder_decoder() {
  return {.name = "small-t5",
          .family = Family::encoder_decoder,
          .layers = 5,
          .hidden = 32,
          .feature = 64,
          .vocabulary = 100,
          .context = 40,
          .activation = FeedForwardKind::relu,
          .tied_embeddings = true,
          .heads = 4,
          .kv_heads = 4,
          .head_dim = 6,
          .logits_multiplier = 0.5,
          .decoder_layers = 2,
          .decoder_context = 10,
          .position_buckets = 12,
          .position_distance = 20,
          .initializer_range = 1.0};
}

TEST_CASE("A T5 passes the rows of both sides and of both position tables on as one activation") {
  const OpGraph graph = build_graph(encoder_decoder(), 24);
  // A quarter of 24 tokens is the decoder's. A table has 12 x 4 elements: two rows of 32.
  REQUIRE(graph.blocks.size() == 1 + 3 + 1 + 2 + 1);
  CHECK(graph.joins_sequences);
  CHECK_FALSE(build_graph(decoder(), 16).joins_sequences);
  for (const Block& block : graph.blocks)
    if (block.output) CHECK(graph.tensors[*block.output].dims.front() == TensorDim{Dim::sequence, 24 + 2 * 2, 1});
  std::vector<int> kinds;
  for (const Block& block : graph.blocks) kinds.push_back(block.kind);
  CHECK(kinds == std::vector<int>{0, 1, 1, 1, 2, 3, 3, 4});
  CHECK(graph.tied == std::vector<TensorId>{graph.ops[0].parameters[0]});  // not the tables: one use each
  CHECK(ops_of(graph, 0) == std::vector<std::string>{"embedding embedding", "append_rows encoder.position",
                                                     "append_rows decoder.position"});
  CHECK(ops_of(graph, 4) ==
        std::vector<std::string>{"take_rows encoder.taken", "rms_norm encoder.norm", "put_rows encoder.put"});
  CHECK(ops_of(graph, 5).size() == 21);
  const OpShape own = op(graph, "decoder.0.attention").attributes,
                cross = op(graph, "decoder.0.cross_attention").attributes,
                encoder = op(graph, "encoder.0.attention").attributes;
  CHECK((own.keys == 6 && !own.bidirectional && own.buckets == 12));
  CHECK((cross.keys == 18 && cross.bidirectional && cross.buckets == 0));
  CHECK((encoder.keys == 18 && encoder.bidirectional && encoder.buckets == 12));
  for (const OpShape& shape : {own, cross, encoder}) CHECK(shape.score_scale == 1.0);
  // Attention: four products of 32 x 24. Layers of the encoder have two norms, the decoder's three.
  const std::int64_t attention = 4 * 32 * 24, feed_forward = 2 * 32 * 64;
  CHECK(parameter_count(graph) == 100 * 32 + 2 * 12 * 4 + 3 * (attention + feed_forward + 2 * 32) +
                                      2 * (2 * attention + feed_forward + 3 * 32) + 2 * 32);
  // Products of queries and keys alone differ from those of a decoder of as many tokens.
  CHECK(graph.corrupted == CorruptedSpans{.decoder = 6, .spans = 1, .start = 0, .end = 1});
  CHECK(targets_of_sample(graph) == 6);
  // 512 and 114 tokens: 85 of 568 are told, in 28 spans (arXiv:1910.10683, section 3.1.4).
  ModelSpec paper = encoder_decoder();
  paper.context = 626;
  paper.decoder_context = 114;
  CHECK(build_graph(paper, 626).corrupted == CorruptedSpans{.decoder = 114, .spans = 28, .start = 0, .end = 1});
}

TEST_CASE("What an encoder-decoder cannot be is said") {
  const auto problem = [](auto change) {
    ModelSpec spec = encoder_decoder();
    change(spec);
    return error_of<ConfigError>([&] { build_graph(spec, 24); });
  };
  CHECK(problem([](ModelSpec& spec) { spec.decoder_layers = 5; }) ==
        "error: model 'small-t5': decoder_layers: layers counts both sides: of 5, the decoder has 5, which leaves none "
        "to the encoder; allowed: 1 to 4");
  CHECK(problem([](ModelSpec& spec) { spec.decoder_context = 40; }) ==
        "error: model 'small-t5': decoder_context: context counts both sides: of 40 tokens, the decoder has 40, which "
        "leaves none to the encoder; allowed: 1 to 39");
  CHECK(problem([](ModelSpec& spec) { spec.position_buckets = 6; }) ==
        "error: model 'small-t5': position_buckets: half of the rows are of keys behind the query, and half of these "
        "of single distances: expected a multiple of 4 up to 256, found 6");
  CHECK(problem([](ModelSpec& spec) { spec.position_distance = 6; }) ==
        "error: model 'small-t5': position_distance: the first 6 distances have rows of their own: expected more, "
        "found 6");
  CHECK(problem([](ModelSpec& spec) { spec.end_token = 100; }) ==
        "error: model 'small-t5': end_token: the token 100 is beyond the vocabulary, which ends at 99");
  CHECK(error_of<ConfigError>([] { build_graph(encoder_decoder(), 9); }) ==
        "error: sequence length 9 leaves 2 tokens to the decoder of model 'small-t5' and 7 to its encoder; cutting a "
        "span out of a text and telling it takes 3 and 3: give at least 10");
}

TEST_CASE("Layers whose windows differ are of two kinds, unless the sequence fits the window") {
  ModelSpec spec = decoder();
  spec.layers = 5;
  spec.sliding_window = 8;
  spec.attention_pattern = {LayerSpan::sliding, LayerSpan::full};
  const OpGraph longer = build_graph(spec, 16);
  CHECK(op(longer, "layers.0.attention").attributes.window == 8);
  CHECK(op(longer, "layers.1.attention").attributes.window == 0);
  CHECK(op(longer, "layers.4.attention").attributes.window == 8);
  CHECK(longer.blocks[1].kind == longer.blocks[3].kind);
  CHECK(longer.blocks[1].kind != longer.blocks[2].kind);
  CHECK(longer.blocks[2].kind == longer.blocks[4].kind);
  const OpGraph shorter = build_graph(spec, 8);
  CHECK(op(shorter, "layers.0.attention").attributes.window == 0);
  CHECK(shorter.blocks[1].kind == shorter.blocks[2].kind);
  spec.attention_pattern.clear();
  CHECK(op(build_graph(spec, 16), "layers.1.attention").attributes.window == 8);
}

TEST_CASE("Scales, caps and positions stand in the attributes of their ops") {
  ModelSpec spec = decoder();
  spec.position = PositionKind::rotary;
  spec.rotary_dim = 4;
  spec.rotary_interleaved = true;
  spec.attention_scale = 0.25;
  spec.attention_softcap = 50.0;
  spec.logits_softcap = 30.0;
  spec.embedding_multiplier = 12.0;
  spec.residual_multiplier = 0.5;
  spec.logits_multiplier = 0.125;
  spec.attention_output_bias = true;
  spec.head_bias = true;
  const OpGraph graph = build_graph(spec, 16);
  CHECK(op(graph, "layers.0.attention.rotary").attributes ==
        OpShape{.heads = 4, .kv_heads = 2, .head_dim = 8, .rotary_dim = 4, .interleaved = true, .theta = 10000.0});
  CHECK(op(graph, "layers.0.attention").attributes ==
        OpShape{.heads = 4, .kv_heads = 2, .head_dim = 8, .score_scale = 0.25, .softcap = 50.0});
  CHECK(op(graph, "embedding.scale").attributes == OpShape{.factor = 12.0});
  CHECK(op(graph, "layers.1.feed_forward_scale").attributes == OpShape{.factor = 0.5});
  CHECK(op(graph, "head.scale").attributes == OpShape{.factor = 0.125});
  CHECK(op(graph, "head.softcap").attributes == OpShape{.softcap = 30.0});
  // The bias of a scaled branch is scaled with it; the head's is not.
  CHECK(op(graph, "layers.0.attention_bias").parameters.size() == 1);
  CHECK(op(graph, "layers.0.attention_scale").inputs == op(graph, "layers.0.attention_bias").outputs);
  CHECK(op(graph, "layers.0.attention_add").parameters.empty());
  CHECK(op(graph, "head").parameters.size() == 2);
  CHECK(tensor(graph, "head.bias").dims == std::vector<TensorDim>{{Dim::vocabulary, 61, 1}});
  CHECK(ops_of(graph, 3) == std::vector<std::string>{"layer_norm head.norm", "scale head.scale", "linear head",
                                                     "softcap head.softcap", "cross_entropy_max head.maximum",
                                                     "cross_entropy_sums head.sums", "cross_entropy_loss head.loss"});
}

TEST_CASE("Embeddings of another width than the stream are turned into it and back") {
  ModelSpec spec = decoder();
  spec.embedding_width = 10;
  spec.tied_embeddings = true;
  const OpGraph graph = build_graph(spec, 16);
  CHECK(ops_of(graph, 0) ==
        std::vector<std::string>{"embedding embedding", "linear embedding.projection", "add_position position"});
  CHECK(tensor(graph, "embedding.weight").dims ==
        std::vector<TensorDim>{{Dim::vocabulary, 61, 1}, {Dim::hidden, 10, 1}});
  CHECK(tensor(graph, "embedding.projection.weight").dims ==
        std::vector<TensorDim>{{Dim::hidden, 32, 1}, {Dim::hidden, 10, 1}});
  CHECK(ops_of(graph, 3)[1] == "linear head.projection");
  CHECK(tensor(graph, "head.projection").dims.back() == TensorDim{Dim::hidden, 10, 1});
}

TEST_CASE("Positions may be slopes or rows further down the table, and embeddings may be normed") {
  ModelSpec spec = decoder();
  spec.embedding_norm = true;
  spec.position = PositionKind::alibi;
  spec.alibi_multiplier = 0.5;
  const OpGraph alibi = build_graph(spec, 100);  // no table
  CHECK(ops_of(alibi, 0) == std::vector<std::string>{"embedding embedding", "layer_norm embedding.norm"});
  CHECK(op(alibi, "layers.0.attention").attributes == OpShape{.heads = 4, .kv_heads = 2, .head_dim = 8, .alibi = 0.5});
  spec = decoder();
  spec.position_offset = 2;
  const OpGraph learned = build_graph(spec, 16);
  CHECK(tensor(learned, "position.weight").dims.front() == TensorDim{Dim::position, 18, 1});
  CHECK(op(learned, "position").attributes == OpShape{.begin = 2});
}

TEST_CASE("A sequence that the model has no positions for is the user's mistake") {
  CHECK(error_of<ConfigError>([] { build_graph(decoder(), 17); }) ==
        "error: sequence length 17 is longer than the 16 learned positions of model 'small'; allowed: 1 to 16");
  CHECK(error_of<ConfigError>([] { build_graph(decoder(), 0); }) ==
        "error: expected a sequence length from 1 to 16777216, found 0");
  ModelSpec spec = decoder();
  spec.kv_heads = 3;
  CHECK(error_of<ConfigError>([&] { build_graph(spec, 16); }) ==
        "error: model 'small': kv_heads: 4 query heads cannot share 3 key/value heads evenly; allowed: 1, 2, 4");
}
