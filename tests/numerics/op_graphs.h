#pragma once

#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "models/families.h"
#include "models/graph_builder.h"
#include "planner/graph/op_graph.h"

// Decoders with what the tiny models of tests/data lack: each op and attribute of the table at
// least once, tensors with several uses in several orders, layers of two kinds in turn. No real
// model is like this, which does not matter to plans.
namespace parplan::testing {

class OpGraphBuilder {
 public:
  OpGraphBuilder(std::string name, std::int64_t sequence, std::int64_t heads, std::int64_t kv_heads,
                 std::int64_t head_dim)
      : spec_({.name = std::move(name),
               .layers = 3,
               .hidden = 24,
               .feature = 40,
               .vocabulary = 61,
               .context = sequence,
               .heads = heads,
               .kv_heads = kv_heads,
               .head_dim = head_dim}),
        sequence_(sequence),
        queries_(heads / kv_heads),
        builder_(spec_, sequence) {}

  GraphBuilder& builder() { return builder_; }

  TensorId rms_norm(const std::string& name, TensorId x) {
    const TensorId gamma = builder_.ones(name + ".weight", builder_.hidden());
    const TensorId y = builder_.activation(name, builder_.hidden());
    builder_.op(OpKind::rms_norm, name, {x}, {gamma}, {y, builder_.statistic(name + ".rstd")}, {.epsilon = 1e-5});
    return y;
  }
  TensorId layer_norm(const std::string& name, TensorId x) {
    const TensorId gamma = builder_.ones(name + ".weight", builder_.hidden());
    const TensorId beta = builder_.zeros(name + ".bias", builder_.hidden());
    const TensorId y = builder_.activation(name, builder_.hidden());
    const TensorId mean = builder_.statistic(name + ".mean");
    builder_.op(OpKind::layer_norm, name, {x}, {gamma, beta}, {y, mean, builder_.statistic(name + ".rstd")},
                {.epsilon = 1e-5});
    return y;
  }
  TensorId elementwise(OpKind kind, const std::string& name, TensorId x, TensorDim width, OpShape attributes) {
    const TensorId y = builder_.activation(name, width);
    builder_.op(kind, name, {x}, {}, {y}, attributes);
    return y;
  }
  TensorId scale(const std::string& name, TensorId x, double factor) {
    return elementwise(OpKind::scale, name, x, builder_.hidden(), {.factor = factor});
  }

  enum class Norms { none, heads, width };
  struct Attention {
    Norms norms = Norms::none;
    bool rotary = true;
    OpShape rotation = {.theta = 10000.0};  // rotary_dim, interleaved
    OpShape scores = {};                    // window, softcap, alibi, score_scale
  };
  // The branch without its bias.
  TensorId attention(const std::string& name, TensorId x, const Attention& how) {
    const TensorDim fused = {Dim::kv_groups, spec_.kv_heads * (queries_ + 2) * spec_.head_dim,
                             (queries_ + 2) * spec_.head_dim, queries_, 2 * spec_.head_dim};
    const TensorDim mixed = {Dim::kv_groups, spec_.heads * spec_.head_dim, queries_ * spec_.head_dim, queries_};
    TensorId qkv = builder_.linear(name + ".qkv", x, fused, builder_.hidden(), 0.02, true);
    if (how.norms == Norms::heads) {
      const TensorDim head = {Dim::hidden, spec_.head_dim, 1};
      const TensorId queries = builder_.ones(name + ".query_norm.weight", head),
                     keys = builder_.ones(name + ".key_norm.weight", head);
      const TensorId y = builder_.activation(name + ".norm", fused);
      const TensorId rstd = builder_.statistic(
          name + ".norm.rstd", {{Dim::kv_groups, spec_.heads + spec_.kv_heads, queries_ + 1, queries_, 1}});
      builder_.op(OpKind::head_norm, name + ".norm", {qkv}, {queries, keys}, {y, rstd}, with_heads({.epsilon = 1e-5}));
      qkv = y;
    }
    if (how.norms == Norms::width) {
      const TensorId queries = builder_.ones(name + ".query_norm.weight", mixed);
      const TensorId keys = builder_.ones(name + ".key_norm.weight", {Dim::kv_groups, spec_.kv_heads * spec_.head_dim,
                                                                      spec_.head_dim, queries_, spec_.head_dim});
      const TensorId squares = builder_.statistic(name + ".squares", {{Dim::hidden, 2, 1}});
      builder_.op(OpKind::query_key_squares, name + ".squares", {qkv}, {}, {squares}, with_heads({.epsilon = 1e-5}));
      const TensorId y = builder_.activation(name + ".norm", fused);
      builder_.op(OpKind::query_key_norm, name + ".norm", {qkv, squares}, {queries, keys}, {y},
                  with_heads({.epsilon = 1e-5}));
      qkv = y;
    }
    if (how.rotary) qkv = elementwise(OpKind::rotary, name + ".rotary", qkv, fused, with_heads(how.rotation));
    const TensorId y = builder_.activation(name + ".mixed", mixed);
    const TensorId log_sum_exp = builder_.tensor(
        name + ".log_sum_exp", TensorRole::statistic,
        {{Dim::batch, 1, 1}, {Dim::kv_groups, spec_.heads, queries_, queries_}, {Dim::sequence, sequence_, 1}});
    builder_.op(OpKind::attention, name, {qkv}, {}, {y, log_sum_exp}, with_heads(how.scores));
    return builder_.linear(name + ".output", y, builder_.hidden(), mixed, 0.02, false);
  }

  TensorId gated(const std::string& name, TensorId x, ActivationKind activation) {
    const TensorId opening = builder_.linear(name + ".gate", x, builder_.feature(), builder_.hidden(), 0.02, false);
    const TensorId up = builder_.linear(name + ".up", x, builder_.feature(), builder_.hidden(), 0.02, false);
    const TensorId inner = builder_.activation(name + ".gated", builder_.feature());
    builder_.op(OpKind::gate, name + ".gated", {opening, up}, {}, {inner}, {.activation = activation});
    return builder_.linear(name + ".down", inner, builder_.hidden(), builder_.feature(), 0.02, false);
  }
  TensorId plain(const std::string& name, TensorId x, ActivationKind activation) {
    const TensorId up = builder_.linear(name + ".up", x, builder_.feature(), builder_.hidden(), 0.02, true);
    const TensorId inner =
        elementwise(OpKind::activation, name + ".activation", up, builder_.feature(), {.activation = activation});
    return builder_.linear(name + ".down", inner, builder_.hidden(), builder_.feature(), 0.02, false);
  }
  TensorId add(const std::string& name, TensorId a, TensorId b, bool bias = false) {
    return builder_.add(name, a, b, name + ".bias", bias);
  }

  // A head with a bias, its logits capped.
  void head(TensorId x) {
    GraphBuilder& b = builder_;
    b.begin_block("head", x);
    TensorId logits = b.linear("head", layer_norm("head.norm", x), b.vocabulary(), b.hidden(), 0.02, true);
    logits = elementwise(OpKind::softcap, "head.capped", logits, b.vocabulary(), {.softcap = 3.0});
    const TensorId targets = b.tokens("targets"), maximum = b.statistic("head.maximum");
    b.op(OpKind::cross_entropy_max, "head.maximum", {logits}, {}, {maximum});
    const TensorId sums = b.statistic("head.sums", {{Dim::hidden, 2, 1}});
    b.op(OpKind::cross_entropy_sums, "head.sums", {logits, targets, maximum}, {}, {sums});
    b.op(OpKind::cross_entropy_loss, "head.loss", {logits, targets, maximum, sums}, {},
         {b.tensor("loss", TensorRole::loss, {})});
    b.end_block(std::nullopt);
  }

 private:
  OpShape with_heads(OpShape shape) const {
    shape.heads = spec_.heads;
    shape.kv_heads = spec_.kv_heads;
    shape.head_dim = spec_.head_dim;
    return shape;
  }

  ModelSpec spec_;
  std::int64_t sequence_;
  std::int64_t queries_;
  GraphBuilder builder_;
};

// Two parallel branches, as in GPT-NeoX, GPT-J and Falcon: one norm or two, and in one layer the
// first sum is made before the second branch is computed, so that the backward has to add what it
// could otherwise pass on.
inline OpGraph parallel_branches(std::int64_t sequence) {
  OpGraphBuilder b("parallel-branches", sequence, 4, 2, 8);
  GraphBuilder& builder = b.builder();
  builder.begin_block("embedding", std::nullopt);
  TensorId x = b.scale("embedding.scale", builder.embed(), 1.5);
  builder.end_block(x);
  for (int layer = 0; layer < 3; ++layer) {
    const std::string name = fmt::format("layers.{}", layer);
    builder.begin_block(name, x);
    const TensorId first = b.layer_norm(name + ".norm", x);
    const OpShape scores = {.window = layer == 1 ? 5 : 0, .alibi = layer == 2 ? 1.0 : 0.0};
    const OpShape rotation = {.rotary_dim = 4, .interleaved = layer == 0, .theta = 10000.0};
    const TensorId attended =
        b.attention(name + ".attention", first, {.rotary = layer != 2, .rotation = rotation, .scores = scores});
    // In GPT-NeoX's order: x + attention(norm1(x)), then + feed_forward(norm2(x)).
    const bool late = layer == 1;
    TensorId sum = late ? b.add(name + ".attention_add", x, attended, true) : -1;
    const TensorId fed = b.plain(name + ".feed_forward", layer == 0 ? first : b.layer_norm(name + ".norm2", x),
                                 layer == 0 ? ActivationKind::gelu_tanh : ActivationKind::silu);
    if (!late) sum = b.add(name + ".attention_add", x, attended, true);
    x = b.add(name + ".feed_forward_add", sum, fed, true);
    builder.end_block(x);
  }
  b.head(x);
  return builder.finish_graph();
}

// Norms around every branch and of queries and keys, caps and windows in turn, branches scaled:
// Qwen3, Gemma 2 and Granite at once.
inline OpGraph normed_heads(std::int64_t sequence) {
  OpGraphBuilder b("normed-heads", sequence, 4, 4, 6);
  GraphBuilder& builder = b.builder();
  builder.begin_block("embedding", std::nullopt);
  TensorId x = builder.embed();
  builder.end_block(x);
  for (int layer = 0; layer < 3; ++layer) {
    const std::string name = fmt::format("layers.{}", layer);
    builder.begin_block(name, x);
    const OpShape scores = {.window = layer % 2 == 0 ? 4 : 0, .score_scale = 0.3, .softcap = 1.5};
    const TensorId attended = b.attention(name + ".attention", b.rms_norm(name + ".norm", x),
                                          {.norms = OpGraphBuilder::Norms::heads, .scores = scores});
    x = b.add(name + ".attention_add", x, b.rms_norm(name + ".post_norm", attended));
    const TensorId fed = b.gated(name + ".feed_forward", b.rms_norm(name + ".norm2", x), ActivationKind::gelu_tanh);
    x = b.add(name + ".feed_forward_add", x,
              b.scale(name + ".feed_forward.scale", b.rms_norm(name + ".post_norm2", fed), 0.4));
    builder.end_block(x);
  }
  b.head(x);
  return builder.finish_graph();
}

// Norms over all queries and all keys, and after the branches: OLMo 2.
inline OpGraph normed_width(std::int64_t sequence) {
  OpGraphBuilder b("normed-width", sequence, 8, 4, 4);
  GraphBuilder& builder = b.builder();
  builder.begin_block("embedding", std::nullopt);
  TensorId x = builder.embed();
  builder.end_block(x);
  for (int layer = 0; layer < 3; ++layer) {
    const std::string name = fmt::format("layers.{}", layer);
    builder.begin_block(name, x);
    const TensorId attended = b.attention(name + ".attention", x, {.norms = OpGraphBuilder::Norms::width});
    x = b.add(name + ".attention_add", x, b.rms_norm(name + ".post_norm", attended));
    const TensorId fed = b.gated(name + ".feed_forward", x, ActivationKind::silu);
    x = b.add(name + ".feed_forward_add", x, b.rms_norm(name + ".post_norm2", fed));
    builder.end_block(x);
  }
  b.head(x);
  return builder.finish_graph();
}

// Norms of the sums, as in BERT: a norm's backward writes the gradient of the residual stream
// first, which a branch's product reads before the branch adds to it.
inline OpGraph normed_sums(std::int64_t sequence) {
  OpGraphBuilder b("normed-sums", sequence, 4, 2, 6);
  GraphBuilder& builder = b.builder();
  builder.begin_block("embedding", std::nullopt);
  TensorId x = builder.embed();
  builder.end_block(x);
  for (int layer = 0; layer < 3; ++layer) {
    const std::string name = fmt::format("layers.{}", layer);
    builder.begin_block(name, x);
    const TensorId attended = b.attention(name + ".attention", x, {});
    x = b.layer_norm(name + ".norm", b.add(name + ".attention_add", x, attended));
    const TensorId fed = b.plain(name + ".feed_forward", x, ActivationKind::gelu_tanh);
    x = b.layer_norm(name + ".norm2", b.add(name + ".feed_forward_add", x, fed));
    builder.end_block(x);
  }
  b.head(x);
  return builder.finish_graph();
}

inline std::vector<OpGraph> op_graphs(std::int64_t sequence) {
  return {parallel_branches(sequence), normed_heads(sequence), normed_width(sequence)};
}

// An encoder and a decoder, whose activations hold rows of both and of tables: T5.
inline OpGraph two_sequences(std::int64_t sequence) {
  return build_graph({.name = "two-sequences",
                      .family = Family::encoder_decoder,
                      .layers = 3,
                      .hidden = 24,
                      .feature = 40,
                      .vocabulary = 61,
                      .context = 16,
                      .activation = FeedForwardKind::gated_gelu_tanh,
                      .heads = 4,
                      .kv_heads = 4,
                      .head_dim = 6,
                      .decoder_layers = 2,
                      .decoder_context = 8,
                      .position_buckets = 24,
                      .position_distance = 14,
                      .initializer_range = 0.1},
                     sequence);
}

}  // namespace parplan::testing
